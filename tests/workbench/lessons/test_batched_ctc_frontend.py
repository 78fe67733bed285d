import torch

from asrkit.models import FastConformerConfig
from asrkit.workbench.lessons import batched_ctc_frontend as lesson
from asrkit.workbench.measure import Timing


def test_the_steps_of_both_variants_lead_to_the_same_labels():
    speech = lesson.noise_batch(3, 1.0)
    encoder = FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8)
    model = lesson.recogniser_for(speech, encoder, V=12)
    arms = lesson.step_arms(model, speech)
    with torch.no_grad():
        loop = arms["decoding, sequential"]()
        batched = arms["decoding, batched"]()
    assert loop.tokens() == batched.tokens()
    times = {
        name: Timing(samples_ms=(float(n),), warmup=0, timer="")
        for n, name in enumerate(arms)
    }
    for variant in ("sequential", "batched"):
        by_step = lesson.step_ms(times, variant)
        assert tuple(by_step) == lesson.STEPS
        assert by_step["decoding"] == times[f"decoding, {variant}"].median_ms
