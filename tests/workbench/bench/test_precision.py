"""What rounding does to log-probs, features and tokens, held to arithmetic, and the casts of autocast, held to a count by hand."""

import math
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from torch import nn

from asrkit.cli import main
from asrkit.cpu import has_int8
from asrkit.data import Utterances, corpora
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    TransducerModel,
    load_checkpoint,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.training import evaluate
from asrkit.workbench import bench, records
from asrkit.workbench.bench.suites import precision
from asrkit.workbench.bench.suites.precision import (
    MODES,
    ModelOutput,
    autocast_casts,
    deviation,
    reader,
    rounded_features,
)
from asrkit.workbench.measure import cast_profile

pytestmark = pytest.mark.usefixtures("one_thread")
B, T, F = 2, 96, 80
LAYERS = 2
CONFIG = FastConformerConfig(width=32, layers=LAYERS, heads=4, subsampling_channels=8)


@pytest.fixture
def given():
    return torch.randn(
        B, T, F, generator=torch.Generator().manual_seed(0)
    ), torch.tensor([T, 60])


@pytest.fixture
def model():
    return tiny()


def tiny(vocab_size=32):
    """A transducer of random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TransducerModel(presets.tiny(vocab_size)).eval()


def said(log_probs, lengths, tokens):
    return ModelOutput(torch.as_tensor(log_probs), torch.tensor(lengths), tokens)


def test_a_deviation_is_what_a_hand_computes_and_blind_to_padding():
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]]).log()
    q = torch.tensor([[[0.2, 0.6, 0.2], [0.1, 0.8, 0.1], [torch.nan] * 3]]).log()
    found = deviation(said(p, [2], [[0, 1]]), said(q, [2], [[1, 1, 2]]))
    off = torch.tensor([math.log(0.5 / 0.2), math.log(0.6 / 0.3), 0, 0, 0, 0])
    assert found.log_prob_max == pytest.approx(
        off.max().item()
    ) and found.log_prob_mean == pytest.approx(off.mean().item())
    assert found.token_errors == 1.0  # two edits of two tokens


@pytest.mark.parametrize("preset", ["tiny", "ctc"])
def test_half_precision_is_off_by_its_digits_and_bfloat16_eight_times_as_far_as_float16(
    preset, given
):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = (
            tiny()
            if preset == "tiny"
            else CTCModel(CTCConfig(vocab_size=30, encoder=CONFIG)).eval()
        )
    exact = reader(model, "float64")(*given)
    assert exact.log_probs.dtype == torch.float64
    found = {mode: deviation(exact, reader(model, mode)(*given)) for mode in MODES}
    assert found["float32"].log_prob_max < 1e-5
    assert 4 < found["bfloat16"].log_prob_mean / found["float16"].log_prob_mean < 16
    assert 1e-3 < found["bfloat16"].log_prob_mean < 0.05
    assert found["autocast"].log_prob_max > 100 * found["float32"].log_prob_max


def speech_like() -> tuple[torch.Tensor, torch.Tensor]:
    time = torch.arange(16_000) / 16_000
    tones = [
        torch.sin(2 * math.pi * f * time) / f for f in (150, 450, 900)
    ]  # falls with the frequency, as speech does
    return (60 * torch.stack(tones).sum(0))[None] * torch.tensor(
        [[0.5], [0.05]]
    ), torch.tensor([16_000, 9_000])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_lose_least_when_they_are_rounded_last(dtype):
    waveforms, lengths = speech_like()
    exact, frames = log_mel(waveforms, lengths)
    made = {
        where: rounded_features(
            waveforms, lengths, dtype, where=where, config=FeatureConfig()
        )
        for where in precision.ROUNDED
    }
    off = {
        where: ((rounded - exact).norm() / exact.norm()).item()
        for where, rounded in made.items()
    }
    assert 0 < off["features"] < off["log-mel"] < off["waveform"]
    assert off["features"] < torch.finfo(dtype).eps / 2
    for rounded in made.values():
        assert rounded.dtype == torch.float32 and rounded.isfinite().all()
        assert not rounded[1, frames[1] :].any()


def counted(casts):
    return Counter((cast.operand, cast.source, cast.target) for cast in casts)


def test_without_a_gpu_the_casts_of_a_cpu_are_those_that_it_makes(given):
    without_memory = autocast_casts(
        lambda: FastConformer(CONFIG), B, T, F, device="cpu"
    )
    with torch.no_grad():
        made = cast_profile(
            FastConformer(CONFIG).eval(), given, "autocast", repeats=1, warmup=0
        ).casts
    assert counted(without_memory) == counted(made)
    assert sorted(cast.bytes for cast in without_memory) == sorted(
        cast.bytes for cast in made
    )


def test_on_a_gpu_norms_are_float32_and_what_they_feed_is_cast_again():
    """A block has four products behind a norm, and a second query that meets a float32 bias as the first does."""
    cpu, cuda = (
        counted(autocast_casts(lambda: FastConformer(CONFIG), B, T, F, device=device))
        for device in ("cpu", "cuda")
    )
    weights, down, up = (
        ("weight", "float32", "bfloat16"),
        ("activation", "float32", "bfloat16"),
        ("activation", "bfloat16", "float32"),
    )
    assert cuda[weights] == cpu[weights]
    assert cuda[down] == cpu[down] + 4 * LAYERS
    assert (
        up not in cpu and cuda[up] == 5
    )  # norms of the first block, until the sum is float32
    assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled(
        "cpu"
    )


def test_casts_of_weights_are_six_bytes_each_and_do_not_grow_with_the_batch():
    def of(B):
        casts = autocast_casts(lambda: FastConformer(CONFIG), B, T, F, device="cuda")
        return [
            sum(cast.bytes for cast in casts if cast.operand == operand)
            for operand in ("weight", "activation")
        ]

    (weights, few), (same, twice), (_, thrice) = of(1), of(2), of(3)
    encoder = FastConformer(CONFIG)
    products = [
        part
        for part in encoder.modules()
        if isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d))
    ]
    numbers = sum(weight.numel() for part in products for weight in part.parameters())
    assert weights == same == 6 * numbers
    assert few < twice and thrice - twice == twice - few


def speech(checkpoint, **_):
    waves, lengths = speech_like()
    return precision.Speech(checkpoint, waves, lengths, ["one two", "three"])


def test_the_suite_records_times_and_what_they_cost_in_accuracy(tmp_path, monkeypatch):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    tokenizer = CharTokenizer()
    checkpoint = Checkpoint(tiny(tokenizer.vocab_size), tokenizer, {}, {})
    monkeypatch.setattr(precision, "load_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(precision, "unheard_digits", speech)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "model.safetensors").touch()
    found = bench.run("precision", quick=True)
    assert {one["what"] for one in found} == {"precision-demo"}
    assert {one["params"]["weights"] for one in found} == {"trained"}
    by_metric = {}
    for one in found:
        by_metric.setdefault(one["metric"], {})[one["impl"]] = one
    assert by_metric["latency"].keys() == {*MODES}
    ratios = [one for one in found if one["metric"] == "ratio"]
    assert {tuple(one["params"]["arms"]) for one in ratios} == {*precision.PAIRS}
    off = {mode: one["value"] for mode, one in by_metric["log_prob_mean"].items()}
    assert off["float32"] < off["float16"] < off["bfloat16"]
    rounded = {f"{where} in bfloat16" for where in precision.ROUNDED}
    for metric in ("wer", "cer"):
        assert by_metric[metric].keys() == {*MODES} | rounded
    shown = "\n".join(bench.table(found))
    assert "precision-demo" in shown and "token errors" in shown


def test_without_a_trained_model_there_is_nothing_to_measure(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    assert bench.run("precision", quick=True) == []
    assert "run notebook 00 first" in caplog.text


def test_int8_is_left_out_where_the_encoder_is_no_fastconformer(caplog):
    model = CTCModel(CTCConfig(vocab_size=28)).eval()
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    assert precision.precisions_of(checkpoint) == ["float32", "bfloat16"]
    assert "int8 is left out: it needs a FastConformer" in caplog.text


@pytest.mark.skipif(not has_int8(), reason="needs a CPU with VNNI or AMX")
def test_what_precisions_cost_a_trained_model_is_recorded_in_words(
    saved_model, tmp_path, capsys
):
    out = tmp_path / "bench.jsonl"
    asked = ["bench", "precision", "--quick", "--out", str(out), "--kinds", "digits"]
    assert main([*asked, "--model", str(saved_model)]) == 0
    shown = capsys.readouterr().out
    found = {(one["impl"], one["metric"]): one for one in records.read(out)}
    assert {one["what"] for one in found.values()} == {"precision-cost"}
    sets = corpora.spoken_commands(
        train=0, dev=60, test=60, kinds=["digits"], progress=False
    )
    speech = Utterances.load([*sets["test"], *sets["dev"]], progress=False)
    errors = evaluate(load_checkpoint(saved_model), speech).errors
    plain = found["float32", "wer"]
    assert (plain["value"], plain["params"]["units"]) == (errors.rate, errors.units)
    for kind in ("bfloat16", "int8"):
        more = found[kind, "more_word_errors"]
        assert more["value"] == pytest.approx(found[kind, "wer"]["value"] - errors.rate)
        assert more["params"]["low"] <= more["value"] <= more["params"]["high"]
        others = found[kind, "other_texts"]["value"]
        assert 0 <= others <= 1
        (row,) = [line for line in shown.splitlines() if line.startswith(kind)]
        assert f"{100 * others:.2f}\u00a0%" in row


def test_errors_and_texts_that_a_precision_changes_are_counted():
    said = ["one two", "three", "four"]
    plain = ["one two", "three", "for"]
    other = ["one too", "three", "four"]
    made = [*precision.changes("int8", said, plain, other, {})]
    assert {one.metric: one.value for one in made} == {
        "more_word_errors": 0.0, "other_texts": pytest.approx(2 / 3),
    }  # fmt: skip
    assert made[0].params["low"] <= 0 <= made[0].params["high"]
    (worse, _) = precision.changes("int8", said, said, other, {})
    assert worse.value == 0.25


@pytest.mark.parametrize(("call", "message"), [
    (lambda model: reader(model, "int8"), "mode: expected one of float32, autocast, .*got 'int8'"),
    (lambda model: rounded_features(*speech_like(), torch.float16, where="mel",
                                    config=FeatureConfig()),
     "where: expected one of features, log-mel, waveform, got 'mel'"),
    (lambda model: next(precision.suite("cpu", True, kinds=["digits"])),
     "kinds: expected --model beside it, got none"),
    (lambda model: next(precision.suite("cuda", True, model="x")),
     "device: expected cpu with --model, got cuda"),
])  # fmt: skip
def test_bad_arguments_are_one_line(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A CTC model of random weights that never writes blanks, in an $ASRKIT_HOME of its own."""
    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(CTCConfig(vocab_size=28, encoder=CONFIG)).eval()
    with torch.no_grad():
        model.output.bias[-1] = -10
    path = folder / "model.safetensors"
    notes = {"step": 3}
    save_checkpoint(
        path, Checkpoint(model, CharTokenizer(), asdict(FeatureConfig()), notes)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASRKIT_HOME", str(folder))
        yield path
