import copy

import numpy as np
import pytest
import torch

from asrkit.models import (
    AEDConfig,
    AEDModel,
    Checkpoint,
    FastConformerConfig,
    WhisperEncoderConfig,
)
from asrkit.text import CharTokenizer
from asrkit.workbench.lessons import bf16_casting as lesson
from asrkit.workbench.lessons.shared import precision


def test_a_frozen_layer_casts_its_weights_in_every_call_and_one_that_learns_casts_them_once():
    linear = torch.nn.Linear(8, 4)
    frozen = copy.deepcopy(linear).requires_grad_(False)
    x = torch.randn(3, 8)
    assert lesson.casts_by_operand(linear, x, 3) == {
        "cast of weight": 2,
        "cast of activation": 3,
    }
    assert lesson.casts_by_operand(frozen, x, 3) == {
        "cast of weight": 6,
        "cast of activation": 3,
    }


def test_bytes_of_an_encoders_casts_grow_linearly_between_the_ends_that_are_counted():
    config = FastConformerConfig(width=16, layers=1, heads=2, subsampling_channels=8)
    found = lesson.encoder_cast_bytes(config, (1, 2, 3), 64)
    casts = precision.autocast_casts(
        lambda: lesson.FastConformer(config), 2, 64, config.bins, device="cuda"
    )
    for operand in ("weight", "activation"):
        counted = sum(cast.bytes for cast in casts if cast.operand == operand)
        assert found[operand][1] == pytest.approx(counted)
    assert found["weight"][0] == found["weight"][2] > 0
    assert found["activation"][0] < found["activation"][2]


@pytest.mark.parametrize(("TFLOP_per_s", "product_us"), [(0.001, 25.6), (1.0, 5.056)])
def test_a_layers_least_times_are_its_bytes_or_operations_over_the_cards_rates(
    TFLOP_per_s, product_us
):
    times = lesson.layer_us(
        np.array([1, 100]), inputs=8, outputs=16, memory_GB_per_s=1.0,
        bfloat16_TFLOP_per_s=TFLOP_per_s,
    )  # fmt: skip
    found = [times[name][1] for name in (lesson.CAST, lesson.CAST_OF_INPUT)]
    assert found == pytest.approx([5.568, 4.8])  # 6 bytes a value
    assert times["product"][1] == pytest.approx(product_us)


@pytest.fixture(scope="module")
def whisper():
    """Random weights with Whisper's settings: a model that writes letters up to its last position."""
    torch.manual_seed(0)
    V = 32
    encoder = WhisperEncoderConfig(bins=8, width=64, layers=1, heads=1, most=40)
    sizes = {"width": 64, "layers": 2, "heads": 1, "most": 14, "dropout": 0.0}
    form = {"activation": "gelu", "positions": "learned", "embedding_norm": False, "output_bias": False}  # fmt: skip
    model = AEDModel(
        AEDConfig(
            vocab_size=V, bos=28, eos=29, pad=29, encoder=encoder, **sizes, **form
        )
    ).eval()
    with torch.no_grad():
        model.embedding.weight[:28] *= 3
        model.layers[-1].cross_attention.out.weight *= 20
    prompt = {
        "template": ("<|startoftranscript|>", "<|notimestamps|>"),
        "ids": {"<|startoftranscript|>": 28, "<|notimestamps|>": 31},
        "languages": ("en",),
    }
    suppressed = {"always": [28, 30, 31], "first": [0]}
    times = {"no_times": 31, "most_first": None}
    notes = {"prompt": prompt, "suppressed": suppressed, "whisper": times}
    return Checkpoint(model, CharTokenizer(), {"bins": 8, "fill_s": 0.5}, notes)


def test_precisions_take_turns_and_score_the_text_of_the_first(whisper):
    recognizers = lesson.recognizers(whisper, ["float32", "bfloat16", "float16"])
    assert [*recognizers] == ["float32", "bfloat16", "float16"]
    torch.manual_seed(0)
    waveforms = [torch.randn(samples) / 10 for samples in (4000, 6000, 5000)]
    fewer = {"float16": 2}
    found = lesson.read_in_turns(recognizers, whisper.notes, waveforms, fewer=fewer)
    assert [[*of_it] for of_it in found.values()] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    plain = found["float32"]
    for number, waveform in enumerate(waveforms):
        recognizer = recognizers["float32"]
        hypotheses = recognizer(waveform[None], torch.tensor([len(waveform)]))
        reading = plain[number]
        assert hypotheses.tokens() == [reading.tokens] and len(reading.tokens) == 12
        # the text has no end, whose log-probability is not in the score
        text, margins = reading.log_probs[:-1], reading.margins[:-1]
        assert float(text.sum()) == pytest.approx(float(hypotheses.scores), abs=1e-3)
        assert (margins > -1e-4).all()  # greedy: no other token is likelier
        assert reading.margins[-1] < 0
        assert reading.seconds > 0
    for name in ("bfloat16", "float16"):
        for number, reading in found[name].items():
            error = (reading.log_probs - plain[number].log_probs).abs()
            assert 0 < error.max() < 0.5, name


def test_a_precision_that_a_model_or_cpu_lacks_is_left_out(whisper, monkeypatch):
    plain = lesson.Recognizer.from_checkpoint

    def without_int8(checkpoint, config):
        if config.precision == "int8":
            raise ValueError("int8: expected an x86 CPU with AVX2.")
        return plain(checkpoint, config)

    monkeypatch.setattr(lesson.Recognizer, "from_checkpoint", without_int8)
    assert [*lesson.recognizers(whisper, ["float32", "int8"])] == ["float32"]
