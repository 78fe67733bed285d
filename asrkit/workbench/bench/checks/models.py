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

GRAPHED_RUNGS = {  # by arithmetic, and whether the encoder is optimized
    ("float32", False): "only_graphed_encoder",
    ("bfloat16", True): "to_graphed_encoder",
}


def feature_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of features, and of models in the arithmetics of the suite of precision."""
    yield Check("models", "log_mel", "", partial(_log_mel, device))
    batched = r"^feature-norm-batched in \S+: batched$"
    yield Check("models", "normalize", batched, partial(_normalize, device))
    for mode in precision.MODES:
        arms = rf"^precision-\S+ in \S+: {mode}$"
        if mode in ("autocast", "bfloat16"):
            arms += rf"|^half-over-autocast in \S+: {mode}$"
        yield Check("models", f"precision {mode}", arms, partial(_precision, device, mode))


def _log_mel(device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    wave = torch.randn(3, 16_000, generator=draw) / 10
    lengths = torch.tensor([16_000, 12_345, 800])
    wanted = log_mel(wave, lengths)
    got = log_mel(wave.to(device), lengths.to(device))
    near(got, wanted, 2e-3)  # an FFT's last digits, through a logarithm


def _normalize(device: str) -> None:
    draw = torch.Generator().manual_seed(0)
    features = 3 + torch.randn(4, 50, 80, generator=draw)
    lengths = torch.tensor([50, 33, 1, 2])
    wanted = normalize_sequential(features.double(), lengths)
    features = features.to(device)
    lengths = lengths.to(device)
    for way in (normalize, normalize_sequential):
        got = way(features, lengths)
        near([got], [wanted], 1e-4)


def _precision(device: str, mode: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CTCConfig(vocab_size=32, encoder=presets.tiny().encoder)
        model = CTCModel(config).eval()
    features, lengths = encoder.speech(2, 2, 80, device)
    read_exactly = precision.reader(model, "float64")
    exact = read_exactly(features.cpu(), lengths.cpu())
    read = precision.reader(model.to(device), mode)
    output = read(features, lengths)
    output = output._replace(
        log_probs=output.log_probs.cpu(),
        lengths=output.lengths.cpu(),
    )
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
        group = "encoder"
        if way.compiled:
            group = "compiled"
        arms = rf"^encoder-\S+ in \S+: {name}$"
        rung = _rung_of(way, cuda)
        if rung:
            arms += rf"|^ladder-\S+ in {way.arithmetic}: {rung}$"
        call = partial(_encoded, device, way)
        yield Check(group, f"encoder {name}", arms, call)


def _rung_of(way: encoder.Way, cuda: bool) -> str:
    """A pattern of a ladder's arms that encode so, or "": none is in float16, and a graph is
    optimized unless it is alone.
    """
    if not cuda or way.arithmetic not in ("float32", "bfloat16"):
        return ""
    if way.graphed:
        return GRAPHED_RUNGS.get((way.arithmetic, way.optimized), "")
    if way.optimized:
        return r"\w+_optimized_encoder"
    return ""


def _encoded(device: str, way: encoder.Way) -> None:
    tiny: Any = presets.tiny().encoder
    model = encoder.random_encoder(tiny, "cpu")
    features, lengths = encoder.speech(3, 2, 80, "cpu")
    copied = deepcopy(model).to(device)
    moved = encoder.twin(copied, way.weights)
    buffer = features.clone().to(device)
    inputs = (buffer, lengths.to(device))
    call = encoder.arm(moved, inputs, way)
    exact = model.double()
    limit = encoder.TOLERANCE[way.arithmetic]
    for sign in (1, -1):  # a graph has to read its inputs anew
        signed = sign * features
        buffer.copy_(signed)
        with torch.inference_mode():
            wanted, wanted_lengths = exact(signed.double(), lengths)
        encoded, encoded_lengths = call()
        assert torch.equal(encoded_lengths.cpu(), wanted_lengths)
        difference = encoded.cpu().double() - wanted
        off = (difference.norm() / wanted.norm()).item()
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
            needs_gpu = rung in ladder.GPU_RUNGS
            needs_transducer = rung in ladder.TRANSDUCER_RUNGS
            if needs_gpu and not cuda:
                continue
            if needs_transducer and case == "ladder-ctc":
                continue
            call = partial(_rung, device, what, config, rung)
            start = rf"^{case}\S* in \S+"
            arms = rf"{start}: to_{rung}$|{start}: only_{rung}$"
            yield Check("ladder", f"{case} {rung}", arms, call)


def _rung(device: str, what: str, config: ladder.Config, rung: str) -> None:
    """The script is said, twice: graphs are captured, then replayed. Where a rung cannot be, there
    is nothing to check.
    """
    needs: Any = ladder.NEEDS.get(rung, {})
    fields = needs | ladder.RUNGS.get(rung, {})
    with tempfile.TemporaryDirectory() as folder:
        samples = [16_000, 33_333, 8_000]
        script = ladder.scripted(config, samples, Path(folder), batch=2, device=device)
        try:
            rung_config = replace(ladder.BASELINE, **fields)
            recognize = FileRecognizer(script.task, rung_config)
        except ValueError:
            return
        for _ in range(2):
            transcribed = recognize()
            tokens = transcribed.tokens()
            assert tokens == script.labels, f"{what} says other labels than its script"
