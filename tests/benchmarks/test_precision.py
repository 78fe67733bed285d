"""Rounding errors of log-probs, features and tokens, and the casts of autocast, compared with counts by hand."""

import math
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from asrkit.cpu import has_int8
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    TransducerModel,
    presets,
    save_checkpoint,
)
from asrkit.text import CharTokenizer
from asrkit.workbench import records
from asrkit.workbench.lessons.shared.precision import (
    MODES,
    ROUNDED,
    ModelOutput,
    autocast_casts,
    deviation,
    reader,
    rounded_features,
)
from asrkit.workbench.measure import cast_profile
from benchmarks.__main__ import main
from benchmarks.harness.runner import run
from benchmarks.suites import precision

pytestmark = pytest.mark.usefixtures("one_thread")
B, T, F = 2, 96, 80
LAYERS = 2
FEATURES = asdict(FeatureConfig())
CONFIG = FastConformerConfig(width=32, layers=LAYERS, heads=4, subsampling_channels=8)


@pytest.fixture
def batch():
    features = torch.randn(B, T, F, generator=torch.Generator().manual_seed(0))
    return features, torch.tensor([T, 60])


def random_model(make, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(config).eval()


def transducer(vocab_size=32):
    return random_model(TransducerModel, presets.tiny(vocab_size))


def ctc(vocab_size=30):
    return random_model(CTCModel, CTCConfig(vocab_size=vocab_size, encoder=CONFIG))


def test_a_deviation_is_that_computed_by_hand_and_ignores_padding():
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]]]).log()
    q = torch.tensor([[[0.2, 0.6, 0.2], [0.1, 0.8, 0.1], [torch.nan] * 3]]).log()
    two = torch.tensor([2])
    found = deviation(ModelOutput(p, two, []), ModelOutput(q, two, []))
    off = [math.log(0.5 / 0.2), math.log(0.6 / 0.3)]  # and four without
    assert found.log_prob_max == pytest.approx(max(off))
    assert found.log_prob_mean == pytest.approx(sum(off) / 6)


@pytest.mark.parametrize("make", [transducer, ctc])
def test_errors_of_half_precision_follow_its_digits_and_those_of_bfloat16_are_eight_times_those_of_float16(
    make, batch
):
    model = make()
    exact = reader(model, "float64")(*batch)
    assert exact.log_probs.dtype == torch.float64
    found = {mode: deviation(exact, reader(model, mode)(*batch)) for mode in MODES}
    assert found["float32"].log_prob_max < 1e-5
    assert 4 < found["bfloat16"].log_prob_mean / found["float16"].log_prob_mean < 16
    assert 1e-3 < found["bfloat16"].log_prob_mean < 0.05
    assert found["autocast"].log_prob_max > 100 * found["float32"].log_prob_max


def speech_like():
    """Tones that fall with the frequency, as speech does: one loud and long, one not."""
    time = torch.arange(16_000) / 16_000
    tones = [torch.sin(2 * math.pi * f * time) / f for f in (150, 450, 900)]
    loudness = torch.tensor([[0.5], [0.05]])
    return 60 * loudness * torch.stack(tones).sum(0), torch.tensor([16_000, 9_000])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_lose_least_when_they_are_rounded_last(dtype):
    waves, lengths = speech_like()
    exact, frames = log_mel(waves, lengths)
    off = {}
    for where in ROUNDED:
        config = FeatureConfig()
        rounded = rounded_features(waves, lengths, dtype, where=where, config=config)
        assert rounded.dtype == torch.float32
        assert rounded.isfinite().all()
        assert not rounded[1, frames[1] :].any()
        off[where] = ((rounded - exact).norm() / exact.norm()).item()
    assert 0 < off["features"] < off["log-mel"] < off["waveform"]
    assert off["features"] < torch.finfo(dtype).eps / 2


def casts_on(device):
    return autocast_casts(lambda: FastConformer(CONFIG), B, T, F, device=device)


def counted(casts):
    return Counter((cast.operand, cast.source, cast.target) for cast in casts)


def test_without_a_gpu_the_casts_of_a_cpu_are_those_that_it_makes(batch):
    encoder = FastConformer(CONFIG).eval()
    with torch.no_grad():
        casts = cast_profile(encoder, batch, "autocast", repeats=1, warmup=0).casts
    without_memory = casts_on("cpu")
    assert counted(without_memory) == counted(casts)
    assert Counter(cast.bytes for cast in without_memory) == Counter(
        cast.bytes for cast in casts
    )


def test_on_a_gpu_norms_are_float32_and_what_they_feed_is_cast_again():
    """A block has four products behind a norm, and a second query that meets a float32 bias as the first does."""
    cpu = counted(casts_on("cpu"))
    cuda = counted(casts_on("cuda"))
    weights = ("weight", "float32", "bfloat16")
    down = ("activation", "float32", "bfloat16")
    up = ("activation", "bfloat16", "float32")
    assert cuda[weights] == cpu[weights]
    assert cuda[down] == cpu[down] + 4 * LAYERS
    assert up not in cpu
    assert cuda[up] == 5  # norms of the first block, until the sum is float32
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


def test_without_a_trained_model_there_is_nothing_to_measure(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    assert run("precision", quick=True) == []
    assert "run notebook 00 first" in caplog.text


def test_int8_is_left_out_where_the_encoder_is_no_fastconformer(caplog):
    model = CTCModel(CTCConfig(vocab_size=28)).eval()
    checkpoint = Checkpoint(model, CharTokenizer(), {}, {})
    assert precision.precisions_of(checkpoint) == ["float32", "bfloat16"]
    assert "int8 is left out: it needs a FastConformer" in caplog.text


def test_the_word_errors_of_precisions_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    model = ctc(28)
    with torch.no_grad():
        model.output.bias[-1] = -10  # it never writes blanks
    path = tmp_path / "model.safetensors"
    out = tmp_path / "bench.jsonl"
    saved = Checkpoint(model, CharTokenizer(), FEATURES, {"step": 3})
    save_checkpoint(path, saved)
    command = ["precision", "--quick", "--out", str(out), "--kinds", "digits"]
    assert main([*command, "--model", str(path)]) == 0
    found = {
        (record["impl"], record["metric"]): record["value"]
        for record in records.read(out)
    }
    exact = found["float32", "wer"]
    for kind in ["bfloat16", *["int8"] * has_int8()]:
        more = found[kind, "more_word_errors"]
        assert more == pytest.approx(found[kind, "wer"] - exact)
        assert 0 < found[kind, "other_texts"] <= 1


def test_errors_and_texts_that_a_precision_changes_are_counted():
    references = ["one two", "three", "four"]
    plain = ["one two", "three", "for"]
    other = ["one too", "three", "four"]
    more, texts = precision.changes("int8", references, plain, other, {})
    assert more.metric == "more_word_errors"
    assert more.value == 0.0
    assert more.params["low"] <= 0 <= more.params["high"]
    assert texts.metric == "other_texts"
    assert texts.value == pytest.approx(2 / 3)
    (worse, _) = precision.changes("int8", references, references, other, {})
    assert worse.value == 0.25
    wrong = ["too won", "tree", "for"]
    (all_wrong, _) = precision.changes("int8", references, references, wrong, {})
    assert (all_wrong.params["low"], all_wrong.params["high"]) == (
        1,
        1,
    )  # in any sample


def test_a_gpu_is_refused():
    with pytest.raises(ValueError, match="device: expected cpu, got cuda"):
        next(precision.suite("cuda", True))


def test_the_model_of_notebook_00_is_measured_on_digits(tmp_path, monkeypatch):
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))
    path = tmp_path / "demo/model.safetensors"
    path.parent.mkdir()
    save_checkpoint(path, Checkpoint(ctc(28), CharTokenizer(), FEATURES, {"step": 3}))
    (case,) = precision.suite("cpu", True)
    checkpoint, kinds, quick = case.measure.args
    assert checkpoint.notes == {"step": 3}
    assert kinds == ["digits"]
    assert quick
