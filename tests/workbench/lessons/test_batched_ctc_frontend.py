import math

import pytest
import torch

from asrkit.decoders import ctc_greedy
from asrkit.models import FastConformerConfig
from asrkit.workbench.lessons.batched_ctc_frontend import steps
from asrkit.workbench.measure import Timing


def test_a_gain_of_ten_per_cent_needs_a_share_of_nine_or_of_ten_where_a_tenth_is_left():
    assert steps.share_needed(1.1, math.inf) == pytest.approx(0.0909, abs=1e-4)
    share = steps.share_needed(1.1, 10)
    assert share == pytest.approx(0.101, abs=1e-3)
    assert 1 / (1 - share + share / 10) == pytest.approx(1.1)  # Amdahl's law


def test_random_scores_have_as_much_blank_as_asked_for_and_nan_in_the_padding():
    log_probs, lengths = steps.random_scores(6, 80, 9, blank_share=0.72)
    valid = torch.arange(80) < lengths[:, None]
    assert log_probs[~valid].isnan().all() and not log_probs[valid].isnan().any()
    blank = (log_probs[valid].argmax(-1) == 8).double().mean()
    assert blank == pytest.approx(0.72, abs=0.05)
    assert lengths.min() >= 40


def test_the_steps_of_both_variants_lead_to_the_same_labels():
    speech = steps.noise_batch(3, 1.0)
    encoder = FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8)
    model = steps.recogniser_for(speech, encoder, V=12)
    arms = steps.step_arms(model, speech)
    with torch.no_grad():
        loop, batched = (
            arms[f"decoding, {variant}"]() for variant in ("sequential", "batched")
        )
    assert loop.tokens() == batched.tokens()
    assert isinstance(
        batched, type(ctc_greedy(torch.zeros(1, 2, 3), torch.tensor([2])))
    )
    times = {
        name: Timing(samples_ms=(float(n),), warmup=0, timer="")
        for n, name in enumerate(arms)
    }
    for variant in ("sequential", "batched"):
        by_step = steps.step_ms(times, variant)
        assert tuple(by_step) == steps.STEPS
        assert by_step["decoding"] == times[f"decoding, {variant}"].median_ms
