"""The one recogniser: its stages are those written by hand, and its options change how, not what, it computes."""

from dataclasses import asdict, replace

import pytest
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
)
from asrkit.transcribe.decoding import KINDS
from asrkit.transcribe.folder import made_by, text_settings
from asrkit.transcribe.pipeline import ModelVariants, encoder_form, prefetched

OTHERS = [
    {},
    {"normalization": "one_by_one"},
    {"strategy": "one_by_one"},
    {"strategy": "batched"},
    {"encoder": "optimized"},
    {"precision": "float32"},
    {"order": "as_given", "loading": "before", "graphs": "off"},
]


@pytest.fixture(scope="module", params=["transducer", "ctc"])
def checkpoint(request):
    """A model of random weights that finds some labels in noise."""
    torch.manual_seed(0)
    config = presets.tiny(vocab_size=28)
    if request.param == "ctc":
        encoder = ConvConfig(width=16, layers=1)
        model = CTCModel(CTCConfig(vocab_size=28, encoder=encoder)).eval()
        with torch.no_grad():
            model.output.bias[-1] = -10  # never blank
            model.output.weight *= 20  # tokens change from frame to frame
    else:
        model = TransducerModel(config).eval()
    return Checkpoint(
        model, CharTokenizer(), asdict(FeatureConfig()), {"max_symbols": 3}
    )


@pytest.fixture(scope="module")
def noise():
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(3, 24_000, generator=generator), torch.tensor(
        [24_000, 15_000, 700]
    )


def by_hand(checkpoint, waveforms, lengths):
    """What `recognize` did before there was a class, in plain code."""
    features, frames = log_mel(
        waveforms, lengths, config=FeatureConfig(**checkpoint.features)
    )
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
    for found in (
        recognize(checkpoint, *noise),
        recognizer(*noise),
        recognizer.decode(encoded, ends),
    ):
        assert all(
            torch.equal(a, b)
            for a, b in zip(found.parts(), wanted.parts(), strict=True)
        )
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
        impl = Recognizer.from_checkpoint(
            checkpoint, PipelineConfig(strategy=strategy)
        )(*noise).impl
        if strategy == "one_by_one":
            assert impl == ("sequential" if ctc else "one_by_one")
        elif not ctc:
            wanted = {"fastest": "windowed_looping", "batched": "frame_looping"}
            assert impl.startswith(wanted.get(strategy, strategy))
    for precision, dtype in {
        "as_loaded": torch.float32,
        "bfloat16": torch.bfloat16,
    }.items():
        one = Recognizer.from_checkpoint(
            checkpoint, PipelineConfig(precision=precision)
        )
        assert one.encode(*one.features(*noise))[0].dtype == one.dtype == dtype
    limited = recognize(checkpoint, *noise, max_symbols=1)
    frames = limited.frames[0, : limited.lengths[0]].tolist()
    assert len(frames) == len({*frames})
    known = recognize(checkpoint, *noise, confidence=True)
    assert known.confidence.shape == known.labels.shape
    plain = replace(FeatureConfig(**checkpoint.features), normalization="none")
    with pytest.raises(ValueError, match="Only per-feature normalisation"):
        Recognizer(
            checkpoint.model, PipelineConfig(normalization="one_by_one"), features=plain
        )


def test_by_default_a_cpu_optimizes_a_copy_and_one_batch_runs_as_it_is(
    checkpoint, noise
):
    def is_packed(model):
        return any(isinstance(part, PackedLinear) for part in model.modules())

    recognizer = Recognizer.from_checkpoint(checkpoint)
    assert recognizer.config.encoder == "optimized"
    assert is_packed(recognizer.model) and not is_packed(checkpoint.model)
    one_batch = recognize(checkpoint, *noise)
    assert torch.equal(one_batch.scores, by_hand(checkpoint, *noise).scores)
    on_cuda = encoder_form(PipelineConfig(), torch.device("cuda"))
    assert (
        on_cuda == "eager"
        and encoder_form(PipelineConfig(encoder="optimized"), None) == "optimized"
    )
    assert (
        encoder_form(PipelineConfig(precision="autocast"), torch.device("cpu"))
        == "eager"
    )


def test_a_model_prepared_in_place_is_not_copied(checkpoint, noise):
    own = cast_copy(checkpoint.model, torch.float32)
    config = PipelineConfig(encoder="optimized")
    recognizer = Recognizer.from_checkpoint(
        checkpoint._replace(model=own), config, in_place=True
    )
    assert recognizer.model is own and any(
        isinstance(part, PackedLinear) for part in own.modules()
    )
    assert recognizer(*noise).tokens() == by_hand(checkpoint, *noise).tokens()


def test_variants_are_made_once_and_share_weights_of_their_dtype(checkpoint):
    variants = ModelVariants(checkpoint.model)
    half = PipelineConfig(encoder="eager", precision="bfloat16")
    first, again = (Recognizer(variants, half) for _ in range(2))
    assert first.model is again.model is not checkpoint.model
    assert (
        Recognizer(variants, replace(half, precision="float32")).model
        is checkpoint.model
    )
    assert (
        Recognizer(variants).model is Recognizer(variants).model is not checkpoint.model
    )
    half, whole = (
        cast_copy(checkpoint.model, dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    pairs = zip(whole.parameters(), checkpoint.model.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in checkpoint.model.parameters()} == {torch.float32}


def test_prefetched_items_keep_their_order_and_an_error_its_place():
    def items():
        yield 1
        yield 2
        raise OSError("gone")

    assert [*prefetched(iter(range(50)))] == [*range(50)]
    seen = []
    with pytest.raises(OSError, match="gone"):
        seen.extend(prefetched(items()))
    assert seen == [] or seen == [1, 2]


def test_only_settings_that_change_the_text_tell_folders_apart(checkpoint):
    def key(options=None, config=None):
        return made_by(
            checkpoint,
            text_settings(options or WindowOptions(), config or PipelineConfig()),
        )

    same = [
        key(WindowOptions(batch_s=9)),
        key(config=PipelineConfig(encoder="eager", order="as_given")),
    ]
    other = [key(WindowOptions(**{name: value})) for name, value in
             (("window_s", 20), ("overlap_s", 1), ("timestamps", True))]  # fmt: skip
    other += [
        key(config=PipelineConfig(**one))
        for one in ({"precision": "bfloat16"}, {"max_symbols": 1})
    ]
    other += [
        key(config=PipelineConfig(search=BeamOptions(beam=beam))) for beam in (2, 3)
    ]
    assert {*same} == {key()} and len({key(), *other}) == 8
