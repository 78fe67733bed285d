"""The one recogniser: its stages are those written by hand, its options change how, not what, it computes, and words have times."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import soundfile
import torch

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
from asrkit.models.inference import cast_copy
from asrkit.models.packed import PackedLinear
from asrkit.text import CharTokenizer
from asrkit.transcribe import (
    BeamOptions,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    recognize,
    transcribe,
)
from asrkit.transcribe.decoding import KINDS
from asrkit.transcribe.folder import made_by, text_settings
from asrkit.transcribe.recognizer import ModelVariants, encoder_form

sys.path.append(str(Path(__file__).resolve().parent))
from test_aed import random_model

OTHERS = [
    {},
    {"strategy": "one_by_one"},
    {"strategy": "batched"},
    {"encoder": "optimized"},
    {"precision": "float32"},
    {"graphs": "off"},
]


def made(kind):
    """A model of random weights that finds some labels in noise."""
    torch.manual_seed(0)
    if kind == "ctc":
        encoder = ConvConfig(width=16, layers=1)
        model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder))
        with torch.no_grad():
            model.output.bias[-1] = -10  # never blank
            model.output.weight *= 20  # tokens change from frame to frame
    elif kind in ("aed", "aed with ctc"):
        model = random_model(ctc=kind == "aed with ctc")
    else:
        durations = presets.TDT if kind == "tdt" else ()
        config = replace(presets.tiny(vocab_size=28), durations=durations)
        model = TransducerModel(config)
    bins = model.config.encoder.bins
    features = asdict(FeatureConfig(bins=bins))
    return Checkpoint(model.eval(), CharTokenizer(), features, {"max_symbols": 3})


@pytest.fixture(scope="module", params=["rnnt", "ctc"])
def checkpoint(request):
    return made(request.param)


@pytest.fixture(scope="module")
def noise():
    generator = torch.Generator().manual_seed(1)
    waveforms = 0.1 * torch.randn(3, 24_000, generator=generator)
    return waveforms, torch.tensor([24_000, 15_000, 700])


def by_hand(checkpoint, waveforms, lengths):
    """What the recogniser does, in plain code."""
    config = FeatureConfig(**checkpoint.features)
    features, frames = log_mel(waveforms, lengths, config=config)
    with torch.inference_mode():
        if isinstance(checkpoint.model, CTCModel):
            return ctc_greedy(*checkpoint.model(features, frames))
        encoded, ends, _ = checkpoint.model.encode(features, frames)
        return transducer_greedy(checkpoint.model, encoded, ends, max_symbols=3)


def test_the_recogniser_returns_to_the_bit_what_plain_code_does(checkpoint, noise):
    wanted = by_hand(checkpoint, *noise)
    assert int(wanted.lengths.sum()) > 3
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(encoder="eager"))
    encoded, ends = recognizer.encode(*recognizer.features(*noise))
    ways = (
        recognize(checkpoint, *noise),
        recognizer(*noise),
        recognizer.decode(encoded, ends),
    )
    for found in ways:
        for a, b in zip(found.parts(), wanted.parts(), strict=True):
            assert torch.equal(a, b)
    assert recognizer.model is checkpoint.model, "a copy of the weights was made"


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_how_it_computes_does_not_change_what_it_finds(checkpoint, noise, change):
    before = {
        name: weight.clone() for name, weight in checkpoint.model.state_dict().items()
    }
    recognizer = Recognizer.from_checkpoint(checkpoint, PipelineConfig(**change))
    assert recognizer(*noise).tokens() == by_hand(checkpoint, *noise).tokens()
    after = checkpoint.model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_options_reach_the_stage_that_they_are_about(checkpoint, noise):
    ctc = isinstance(checkpoint.model, CTCModel)
    for strategy in KINDS[type(checkpoint.model)].strategies:
        config = PipelineConfig(strategy=strategy)
        impl = Recognizer.from_checkpoint(checkpoint, config)(*noise).impl
        if strategy == "one_by_one":
            assert impl == ("sequential" if ctc else "one_by_one")
        elif not ctc:
            wanted = {"fastest": "windowed_looping", "batched": "frame_looping"}
            assert impl.startswith(wanted.get(strategy, strategy))
    config = PipelineConfig(precision="bfloat16")
    half = Recognizer.from_checkpoint(checkpoint, config)
    assert half.encode(*half.features(*noise))[0].dtype == half.dtype == torch.bfloat16
    limited = recognize(checkpoint, *noise, max_symbols=1)
    frames = limited.frames[0, : limited.lengths[0]].tolist()
    assert len(frames) == len({*frames})
    known = recognize(checkpoint, *noise, confidence=True)
    assert known.confidence.shape == known.labels.shape


def is_packed(model):
    return any(isinstance(part, PackedLinear) for part in model.modules())


def test_by_default_a_cpu_optimizes_a_copy_and_one_batch_runs_as_it_is(
    checkpoint, noise
):
    recognizer = Recognizer.from_checkpoint(checkpoint)
    assert recognizer.config.encoder == "optimized"
    assert is_packed(recognizer.model) and not is_packed(checkpoint.model)
    one_batch = recognize(checkpoint, *noise)
    assert torch.equal(one_batch.scores, by_hand(checkpoint, *noise).scores)
    for device, config, form in (
        ("cuda", {}, "eager"),
        ("cpu", {"precision": "autocast"}, "eager"),
        ("cuda", {"encoder": "optimized"}, "optimized"),
    ):
        assert encoder_form(PipelineConfig(**config), torch.device(device)) == form


def test_variants_are_made_once_and_share_weights_or_take_the_models_place(
    checkpoint, noise
):
    model = checkpoint.model
    variants = ModelVariants(model)
    half = PipelineConfig(encoder="eager", precision="bfloat16")
    first, again = (Recognizer(variants, half) for _ in range(2))
    assert first.model is again.model is not model
    assert Recognizer(variants, replace(half, precision="float32")).model is model
    assert Recognizer(variants).model is Recognizer(variants).model is not model
    own = cast_copy(model, torch.float32)
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    config = PipelineConfig(encoder="optimized")
    own = checkpoint._replace(model=own)
    recognizer = Recognizer.from_checkpoint(own, config, in_place=True)
    assert recognizer.model is own.model and is_packed(own.model)
    assert recognizer(*noise).tokens() == by_hand(checkpoint, *noise).tokens()


def test_only_settings_that_change_the_text_tell_folders_apart(checkpoint):
    def key(options=None, **config):
        settings = text_settings(options or WindowOptions(), PipelineConfig(**config))
        return made_by(checkpoint, settings)

    same = [key(WindowOptions(batch_s=9)), key(encoder="eager")]
    other = [key(WindowOptions(**{name: value})) for name, value in
             (("window_s", 20), ("overlap_s", 1), ("timestamps", True))]  # fmt: skip
    other += [key(precision="bfloat16"), key(max_symbols=1)]
    other += [key(search=BeamOptions(beam=beam)) for beam in (2, 3)]
    assert {*same} == {key()} and len({key(), *other}) == 8


@pytest.mark.parametrize("kind, search", [
    ("rnnt", None), ("tdt", None), ("ctc", None), ("ctc", BeamOptions(beam=2)), ("aed", None), ("aed", BeamOptions(beam=2)),
    ("aed with ctc", None), ("aed with ctc", BeamOptions(beam=2)), ("aed with ctc", BeamOptions(beam=2, ctc_weight=0)),
], ids=str)  # fmt: skip
def test_words_of_every_kind_of_model_have_times_and_confidences(
    kind, search, noise, tmp_path
):
    path = tmp_path / "noise.wav"
    soundfile.write(str(path), torch.cat([*noise[0]]).numpy(), 16_000)
    checkpoint = made(kind)
    options = WindowOptions(window_s=2, overlap_s=0.5, timestamps=True)
    config = PipelineConfig(search=search)
    recognizer = Recognizer.from_checkpoint(checkpoint, config)
    (one,) = transcribe(checkpoint, path, options=options, recognizer=recognizer)
    assert one.error == ""
    assert "".join(one.text.split()) == "".join(word.text for word in one.words) != ""
    starts = [word.start_s for word in one.words]
    assert starts == sorted(starts)
    for word in one.words:
        assert 0 <= word.start_s <= word.end_s <= one.audio_s
        assert 0 < word.confidence <= 1
