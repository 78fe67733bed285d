"""The one recogniser: its stages agree with plain code, options do not change its texts, and words have times."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import soundfile
import torch
from test_aed import random_model

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    ConvConfig,
    CTCConfig,
    CTCModel,
    TransducerModel,
    presets,
)
from asrkit.models.cpu.prepacked import PrepackedLinear
from asrkit.models.inference import cast_copy
from asrkit.text import CharTokenizer
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    recognize,
    transcribe,
)
from asrkit.transcribe.plan import Plan
from asrkit.transcribe.recognizer import ModelVariants, encoder_form

OTHERS = [
    {},
    {"strategy": "one_by_one"},
    {"strategy": "batched"},
    {"encoder": "optimized"},
    {"precision": "float32"},
    {"graphs": "off"},
]


def made(kind):
    """A model of random weights that writes some labels for noise."""
    torch.manual_seed(0)
    if kind == "ctc":
        encoder = ConvConfig(width=16, layers=1)
        model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder)).eval()
        model.output.bias.data[-1] = -10  # never blank
        model.output.weight.data *= 20  # tokens change from frame to frame
    elif kind.startswith("aed"):
        model = random_model(ctc=kind == "aed with ctc")
    else:
        durations = presets.TDT if kind == "tdt" else ()
        config = replace(presets.tiny(vocab_size=28), durations=durations)
        model = TransducerModel(config).eval()
    features = asdict(FeatureConfig(bins=model.config.encoder.bins))
    return Checkpoint(model, CharTokenizer(), features, {"max_symbols": 3})


@pytest.fixture(scope="module", params=["rnnt", "ctc"])
def checkpoint(request):
    return made(request.param)


@pytest.fixture(scope="module")
def noise():
    generator = torch.Generator().manual_seed(1)
    waveforms = 0.1 * torch.randn(3, 24_000, generator=generator)
    return waveforms, torch.tensor([24_000, 15_000, 700])


def by_hand(checkpoint, waveforms, lengths):
    """The computation of the recogniser in plain code."""
    config = FeatureConfig(**checkpoint.features)
    features, frames = log_mel(waveforms, lengths, config=config)
    with torch.inference_mode():
        if isinstance(checkpoint.model, CTCModel):
            return ctc_greedy(*checkpoint.model(features, frames))
        encoded, ends, _ = checkpoint.model.encode(features, frames)
        return transducer_greedy(checkpoint.model, encoded, ends, max_symbols=3)


def test_the_recogniser_returns_exactly_the_result_of_plain_code(checkpoint, noise):
    wanted = by_hand(checkpoint, *noise)
    assert int(wanted.lengths.sum()) > 3
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(encoder="eager"))
    stages = recognizer.decode(*recognizer.encode(*recognizer.features(*noise)))
    for found in (recognize(checkpoint, *noise), recognizer(*noise), stages):
        for a, b in zip(found.parts(), wanted.parts(), strict=True):
            assert torch.equal(a, b)
    assert recognizer.model is checkpoint.model, "a copy of the weights was made"


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_how_it_computes_does_not_change_what_it_finds(checkpoint, noise, change):
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(**change))
    assert recognizer(*noise).tokens() == by_hand(checkpoint, *noise).tokens()


@pytest.mark.parametrize("shape, lengths, message", [
    ((160,), (160,), "waveforms: expected shape (B, S)"),
    ((1, 0), (0,), "lengths: expected 1..0, got 0 to 0"),
    ((60, 16_000), (16_000,) * 40, "lengths: expected shape (B=60)"),
    ((0, 160), (), "lengths: expected at least one utterance, got (0,)"),
])  # fmt: skip
def test_features_refuse_wrong_shapes(shape, lengths, message):
    recognizer = Recognizer.from_checkpoint(made("ctc"))
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        recognizer.features(torch.zeros(shape), torch.tensor(lengths).long())


def test_features_of_many_samples_are_computed_in_parts(monkeypatch):
    waveforms, lengths = torch.randn(5, 4_000), torch.tensor([4_000, 1, 900, 3_000, 20])
    config = FeatureConfig()
    wanted = log_mel(waveforms, lengths, config=config)
    recognizer = Recognizer(made("ctc").model, features=config)
    for samples in (1, 8_000, 2**19):
        monkeypatch.setattr("asrkit.transcribe.recognizer.FEATURE_SAMPLES", samples)
        found = recognizer.features(waveforms, lengths)
        assert all(map(torch.equal, found, wanted))


IMPLS = {  # by kind of model and strategy
    ("rnnt", "fastest"): "windowed_looping",
    ("rnnt", "batched"): "frame_looping",
    ("rnnt", "label_looping"): "label_looping",
    ("rnnt", "one_by_one"): "one_by_one",
    ("ctc", "one_by_one"): "sequential",
}


@pytest.mark.parametrize(("kind", "strategy"), IMPLS)
def test_a_strategy_is_a_decoder(kind, strategy, noise):
    config = PipelineConfig(strategy=strategy)
    found = Recognizer.from_checkpoint(made(kind), config)(*noise)
    assert found.impl.startswith(IMPLS[kind, strategy])


def test_options_reach_the_stage_that_they_are_about(checkpoint, noise):
    config = PipelineConfig(precision="bfloat16")
    half = Recognizer.from_checkpoint(checkpoint, config)
    assert half.encode(*half.features(*noise))[0].dtype == half.dtype == torch.bfloat16
    one_a_frame = Recognizer.from_checkpoint(
        checkpoint._replace(notes={"max_symbols": 1})
    )
    found = one_a_frame(*noise, confidence=True)
    frames = found.frames[0, : found.lengths[0]].tolist()
    assert len(frames) == len({*frames})
    assert found.confidence.shape == found.labels.shape


def is_packed(model):
    return any(isinstance(part, PrepackedLinear) for part in model.modules())


def test_by_default_a_cpu_optimizes_a_copy_and_one_batch_runs_as_it_is(
    checkpoint, noise
):
    recognizer = Recognizer.from_checkpoint(checkpoint)
    assert recognizer.config.encoder == "optimized"
    assert is_packed(recognizer.model)
    assert not is_packed(checkpoint.model)
    one_batch = recognize(checkpoint, *noise)
    assert torch.equal(one_batch.scores, by_hand(checkpoint, *noise).scores)
    autocast = PipelineConfig(precision="autocast")
    assert encoder_form(autocast, torch.device("cpu")) == "eager"
    assert encoder_form(PipelineConfig(), torch.device("cuda")) == "eager"


def test_variants_are_made_once_and_share_weights_or_take_the_models_place(
    checkpoint, noise
):
    model = checkpoint.model
    variants = ModelVariants(model)
    half = PipelineConfig(encoder="eager", precision="bfloat16")
    first, again = (Recognizer(variants, half) for _ in range(2))
    assert first.model is again.model is not model
    assert Recognizer(variants, replace(half, precision="float32")).model is model
    own = cast_copy(model, torch.float32)
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    own = checkpoint._replace(model=own)
    recognizer = Recognizer.from_checkpoint(own, in_place=True)
    assert recognizer.model is own.model
    assert is_packed(own.model)
    assert recognizer(*noise).tokens() == by_hand(checkpoint, *noise).tokens()


def test_only_settings_that_change_the_text_tell_folders_apart():
    def key(windows=None, **config):
        windows, config = windows or WindowOptions(), PipelineConfig(**config)
        plan = Plan(model=Path(), windows=windows, config=config)
        return tuple(plan.settings().items())

    plain = key()
    assert key(WindowOptions(batch_s=9)) == key(encoder="eager") == plain
    changes = {"window_s": 20, "overlap_s": 1, "timestamps": True}
    other = {key(WindowOptions(**{name: to})) for name, to in changes.items()}
    other |= {key(precision="bfloat16")}
    other |= {key(search=BeamOptions(beam=beam)) for beam in (2, 3)}
    assert len({plain, *other}) == 7


TWO = BeamOptions(beam=2)


@pytest.mark.parametrize("kind, search", [
    ("rnnt", None), ("tdt", None), ("ctc", None), ("ctc", TWO), ("aed", None), ("aed", TWO),
    ("aed with ctc", None), ("aed with ctc", TWO), ("aed with ctc", replace(TWO, ctc_weight=0)),
], ids=str)  # fmt: skip
def test_words_of_every_kind_of_model_have_times_and_confidences(
    kind, search, noise, tmp_path
):
    path = tmp_path / "noise.wav"
    soundfile.write(str(path), noise[0].flatten().numpy(), 16_000)
    checkpoint = made(kind)
    options = WindowOptions(window_s=2, overlap_s=0.5, timestamps=True)
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(search=search))
    (one,) = transcribe(checkpoint, path, options=options, recognizer=recognizer)
    assert one.error == ""
    assert "".join(one.text.split()) == "".join(word.text for word in one.words) != ""
    starts = [word.start_s for word in one.words]
    assert starts == sorted(starts)
    for word in one.words:
        assert 0 <= word.start_s <= word.end_s <= one.audio_s
        assert 0 < word.confidence <= 1
