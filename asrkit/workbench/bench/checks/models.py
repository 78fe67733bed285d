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
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.compare import near
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
    found = precision.reader(model.to(device), mode)(features, lengths)
    off = precision.deviation(
        exact, precision.ModelOutput(found.log_probs.cpu(), found.lengths.cpu(), found.tokens)
    )
    assert off.log_prob_max < 0.1, off


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
    return r"\w+_optimized_encoder" if way.optimized else ""


def _encoded(device: str, way: encoder.Way) -> None:
    tiny: Any = presets.tiny().encoder
    model = encoder.random_encoder(tiny, "cpu")
    features, lengths = encoder.speech(3, 2, 80, "cpu")
    moved = encoder.twin(deepcopy(model).to(device), way.weights)
    given = features.clone().to(device), lengths.to(device)
    call = encoder.arm(moved, given, way)
    for sign in (1, -1):  # a graph has to read its inputs anew
        given[0].copy_(sign * features)
        with torch.inference_mode():
            wanted, ends = model.double()(sign * features.double(), lengths)
        found, its = call()
        assert torch.equal(its.cpu(), ends)
        off = ((found.cpu().double() - wanted).norm() / wanted.norm()).item()
        limit = encoder.TOLERANCE[way.arithmetic]
        assert off <= limit, f"{off:.2g} of the norm apart; {limit:g} is let pass"


def ladder_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Each rung alone, of tiny recognisers. What fails is left out of the ladders of its kind, and
    rungs above do without.
    """
    for what, config, _ in ladder.configs("tiny"):
        of = what.removesuffix("-tiny")
        yield Check("ladder", f"{of} baseline", f"^{of}", partial(_rung, device, what, config, ""))
        for rung in ladder.RUNGS:
            if (cuda or rung not in ladder.GPU_RUNGS) and not (
                of == "ladder-ctc" and rung in ladder.TRANSDUCER_RUNGS
            ):
                call = partial(_rung, device, what, config, rung)
                arms = "|".join(rf"^{of}\S* in \S+: {how}_{rung}$" for how in ("to", "only"))
                yield Check("ladder", f"{of} {rung}", arms, call)


def _rung(device: str, what: str, config: ladder.Config, rung: str) -> None:
    """The script is said, twice: graphs are captured, then replayed. Where a rung cannot be, there
    is nothing to check.
    """
    fields: Any = ladder.NEEDS.get(rung, {}) | ladder.RUNGS.get(rung, {})
    with tempfile.TemporaryDirectory() as folder:
        made = ladder.scripted(
            config, [16_000, 33_333, 8_000], Path(folder), batch=2, device=device
        )
        try:
            heard = FileRecognizer(made.task, replace(ladder.BASELINE, **fields))
        except ValueError:
            return
        for _ in range(2):
            assert heard().tokens() == made.labels, f"{what} says other labels than its script"
