"""Features, encoders, arithmetics and whole recognisers against their references."""

import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asrkit.features import log_mel, normalize, normalize_sequential
from asrkit.models import CTCConfig, CTCModel, presets
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer
from asrkit.workbench.bench.suites import encoder, ladder, precision


def feature_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of features, and of models in the arithmetics of the suite of precision."""
    yield Check("models", "log_mel", "", partial(_log_mel, device))
    yield Check(
        "models",
        "normalize",
        r"^feature-norm-batched in \S+: batched$",
        partial(_normalize, device),
    )
    for mode in precision.MODES:
        arms = rf"^precision-\S+ in \S+: {mode}$"
        if mode in ("autocast", "bfloat16"):
            arms += rf"|^half-over-autocast in \S+: {mode}$"
        yield Check("models", f"precision {mode}", arms, partial(_precision, device, mode))


def _log_mel(device: str) -> None:
    wave = torch.randn(3, 16_000, generator=torch.Generator().manual_seed(0)) / 10
    lengths = torch.tensor([16_000, 12_345, 800])
    got = log_mel(wave.to(device), lengths.to(device))
    near(got, log_mel(wave, lengths), 2e-3)  # an FFT's last digits, through a logarithm


def _normalize(device: str) -> None:
    features = torch.randn(4, 50, 80, generator=torch.Generator().manual_seed(0)) + 3
    lengths = torch.tensor([50, 33, 1, 2])
    wanted = normalize_sequential(features.double(), lengths)
    for way in (normalize, normalize_sequential):
        near([way(features.to(device), lengths.to(device))], [wanted], 1e-4)


def _precision(device: str, mode: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(CTCConfig(vocab_size=32, encoder=presets.tiny().encoder)).eval()
    features, lengths = encoder.speech(2, 2, 80, device)
    exact = precision.reader(model, "float64")(features.cpu(), lengths.cpu())
    output = precision.reader(model.to(device), mode)(features, lengths)
    output = output._replace(log_probs=output.log_probs.cpu(), lengths=output.lengths.cpu())
    deviation = precision.deviation(exact, output)
    assert deviation.log_prob_max < 0.1, deviation


def encoder_checks(device: str, cuda: bool) -> Iterator[Check]:
    """FastConformers of two blocks in every way, against float64 on the CPU. Compiled on a GPU
    only: a rehearsal need not wait.
    """
    ways: dict[str, encoder.Way] = {}
    for ways_of_case in encoder.groups(cuda, compiled=cuda).values():
        ways |= ways_of_case
    for name, way in ways.items():
        group = "compiled" if way.compiled else "encoder"
        arms = rf"^encoder-\S+ in \S+: {name}$"
        rung = _rung_of(way, cuda)
        if rung:
            arms += rf"|^ladder-\S+ in {way.arithmetic}: {rung}$"
        yield Check(group, f"encoder {name}", arms, partial(_encoded, device, way))


def _rung_of(way: encoder.Way, cuda: bool) -> str:
    """A pattern of a ladder's arms that encode so, or "": none is in float16, and a graph is
    optimized unless it is alone.
    """
    if not cuda or way.arithmetic not in ("float32", "bfloat16"):
        return ""
    if way.graphed:
        known = {
            ("float32", False): "only_graphed_encoder",
            ("bfloat16", True): "to_graphed_encoder",
        }
        return known.get((way.arithmetic, way.optimized), "")
    if way.optimized:
        return r"\w+_optimized_encoder"
    return ""


def _encoded(device: str, way: encoder.Way) -> None:
    tiny: Any = presets.tiny().encoder
    model = encoder.random_encoder(tiny, "cpu")
    features, lengths = encoder.speech(3, 2, 80, "cpu")
    moved = encoder.twin(deepcopy(model).to(device), way.weights)
    buffer = features.clone().to(device)
    call = encoder.arm(moved, (buffer, lengths.to(device)), way)
    limit = encoder.TOLERANCE[way.arithmetic]
    for sign in (1, -1):  # a graph has to read its inputs anew
        buffer.copy_(sign * features)
        with torch.inference_mode():
            wanted, wanted_lengths = model.double()(sign * features.double(), lengths)
        encoded, encoded_lengths = call()
        assert torch.equal(encoded_lengths.cpu(), wanted_lengths)
        difference = (encoded.cpu().double() - wanted).norm() / wanted.norm()
        off = difference.item()
        assert off <= limit, f"{off:.2g} of the norm apart; {limit:g} is let pass"


def ladder_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Each rung alone, of tiny recognisers. What fails is left out of the ladders of its kind, and
    rungs above do without.
    """
    for what, config, _ in ladder.configs("tiny"):
        case = what.removesuffix("-tiny")
        baseline = partial(_rung, device, what, config, "")
        yield Check("ladder", f"{case} baseline", f"^{case}", baseline)
        for rung in ladder.RUNGS:
            if rung in ladder.GPU_RUNGS and not cuda:
                continue
            if rung in ladder.TRANSDUCER_RUNGS and case == "ladder-ctc":
                continue
            call = partial(_rung, device, what, config, rung)
            arms = [rf"^{case}\S* in \S+: {prefix}_{rung}$" for prefix in ("to", "only")]
            yield Check("ladder", f"{case} {rung}", "|".join(arms), call)


def _rung(device: str, what: str, config: ladder.Config, rung: str) -> None:
    """The script is said, twice: graphs are captured, then replayed. Where a rung cannot be, there
    is nothing to check.
    """
    fields: Any = ladder.NEEDS.get(rung, {}) | ladder.RUNGS.get(rung, {})
    with tempfile.TemporaryDirectory() as folder:
        samples = [16_000, 33_333, 8_000]
        script = ladder.scripted(config, samples, Path(folder), batch=2, device=device)
        try:
            recognize = FileRecognizer(script.task, replace(ladder.BASELINE, **fields))
        except ValueError:
            return
        for _ in range(2):
            tokens = recognize().tokens()
            assert tokens == script.labels, f"{what} says other labels than its script"
