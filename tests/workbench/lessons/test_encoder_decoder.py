"""Studies of encoder-decoder models: work counted, ways that agree, drafts with known errors."""

from dataclasses import replace

import numpy as np
import pytest

from asrkit.models import ConvConfig, presets
from asrkit.workbench.lessons.encoder_decoder import aed_bytes
from asrkit.workbench.lessons.encoder_decoder import studies as aed_studies
from asrkit.workbench.lessons.encoder_decoder.studies import LAYERS, WAYS, Times
from asrkit.workbench.measure import Timing

TOKENS = 6


@pytest.fixture(scope="module")
def model():
    return aed_studies.random_model((1, 2), width=64)


@pytest.fixture(scope="module")
def speech():
    return aed_studies.noise(3, seconds=0.8, tokens=TOKENS)


def test_work_has_the_parts_of_a_published_model_and_one_encoder_in_all_ways():
    config = presets.canary_1b()
    parts = {
        name: aed_studies.gigaflops(config, way, seconds=20, tokens=70)
        for name, way in WAYS.items()
    }
    assert len({one["encoder"] for one in parts.values()}) == 1
    assert sum(parts["NeMo 3.0"].values()) == pytest.approx(2388.7, abs=0.1)
    assert parts["absorbed"]["projections of frames"] == 0
    again = {name: one["earlier tokens again"] for name, one in parts.items()}
    assert (
        again["no cache"]
        > again["NeMo 3.0"]
        > again["K/V kept"]
        == again["absorbed"]
        == 0
    )
    convolutions = replace(config, encoder=ConvConfig(width=16))
    with pytest.raises(
        ValueError, match="config: expected a model with a FastConformer, got Conv"
    ):
        aed_studies.gigaflops(convolutions, WAYS["absorbed"], seconds=1, tokens=2)


def test_the_two_models_have_about_equal_parameters():
    counts = [
        sum(
            weight.numel()
            for weight in aed_studies.random_model(layers, width=64).parameters()
        )
        for layers in LAYERS.values()
    ]
    assert max(counts) / min(counts) < 1.1
    with pytest.raises(ValueError, match="width: expected a multiple of 64, got 100"):
        aed_studies.random_model((1, 1), width=100)


def test_texts_have_the_length_that_is_asked_for_and_all_ways_write_the_same(
    model, speech
):
    encoded, lengths = aed_studies.noise_frames(model, speech)
    found = aed_studies.decode(model, encoded, lengths, WAYS["K/V kept"], tokens=TOKENS)
    assert found.lengths.tolist() == [TOKENS - 1] * 3
    texts = found.tokens()
    assert len({tuple(text) for text in texts}) == 3 and len(set(texts[0])) > 1
    assert aed_studies.texts_agree(model, speech)


def test_what_is_kept_is_what_the_formula_says(model, speech):
    encoded, lengths = aed_studies.noise_frames(model, speech)
    for way in WAYS.values():
        formula = aed_bytes(
            B=3,
            T=encoded.shape[1],
            U=TOKENS,
            D=64,
            layers=2,
            V=1024,
            cross=way.cross,
            past=way.past,
            itemsize=4,
        )
        kept = aed_studies.kept_MB(model, encoded, lengths, way, tokens=TOKENS)
        assert kept == pytest.approx(formula.kept / 1e6)


def timing(*samples_ms):
    return Timing(samples_ms=samples_ms, warmup=0, timer="none")


def test_projections_count_once_a_step_and_never_more_than_the_whole():
    times = Times(
        B=2,
        seconds=4.0,
        tokens=10,
        timings={
            "deep, encoder": timing(30.0, 30.0, 30.0),
            "deep, projections": timing(5.0),
            "deep, NeMo 3.0": timing(70.0, 70.0, 90.0),
            "deep, K/V kept": timing(20.0, 20.0, 20.0),
            "deep, absorbed": timing(10.0, 10.0, 10.0),
            "deep, no cache": timing(45.0),
            "shallow, encoder": timing(40.0, 40.0, 40.0),
            "shallow, NeMo 3.0": timing(10.0, 60.0, 10.0),
        },
    )
    parts = {name: times.parts_ms("deep", name, way) for name, way in WAYS.items()}
    assert list(parts["NeMo 3.0"].values()) == [30, 50, 20]
    assert list(parts["K/V kept"].values()) == [30, 5, 15]
    assert list(parts["absorbed"].values()) == [30, 0, 10]
    assert list(parts["no cache"].values()) == [30, 45, 0]
    assert times.gain("NeMo 3.0").tolist() == [2, 1, 2.4]
    assert times.decoder_share("deep", "NeMo 3.0") == 0.7
    assert times.rtfx("deep", "K/V kept") == 80


def test_drafts_change_the_calls_and_never_the_text(model, speech):
    plain, right, wrong = aed_studies.time_drafts(model, speech, (0.0, 1.0), repeats=1)
    assert (plain.rate, right.rate, wrong.rate) == (None, 0.0, 1.0)
    assert (plain.calls, right.calls) == (TOKENS, 1) and 1 < wrong.calls <= TOKENS
    assert plain.accepted == wrong.accepted == (0, 0, 0)
    assert right.accepted == (TOKENS - 1,) * 3
    assert plain.same and right.same and wrong.same
    assert plain.speedups == (1.0,)


def test_the_first_error_of_a_draft_is_counted_and_behind_it_the_draft_goes_on(
    model, speech
):
    encoded, lengths = aed_studies.noise_frames(model, speech)
    way = WAYS["K/V kept"]
    text = aed_studies.decode(model, encoded, lengths, way, tokens=TOKENS)
    draft = aed_studies.spoiled(text, 0.4, np.random.default_rng(3))
    accepted = list(aed_studies.right_beginnings(text, draft))
    assert 0 < sum(accepted) < 3 * (TOKENS - 1)
    counted = aed_studies.Counting(model)
    found = aed_studies.decode(
        counted, encoded, lengths, way, tokens=TOKENS, draft=draft
    )
    assert found.tokens() == text.tokens()
    assert 1 < counted.calls["follow"] <= TOKENS - min(accepted)
    with pytest.raises(ValueError, match="rate: expected a chance from 0 to 1, got 2"):
        aed_studies.spoiled(text, 2, np.random.default_rng(0))
