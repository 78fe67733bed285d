"""The suite of Jasper 10x5 DR: inference eager and optimized in each precision, on one core of a
CPU or on a GPU; and on a GPU the claims about it.

Weights are random and seeded, and the norms have the statistics of some noise. No other package
ships a Jasper; with `--peers` OpenVINO and ONNX Runtime run ours, one utterance on one core.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from asrkit.models import CTCConfig, CTCModel, presets
from asrkit.workbench.bench import jasper_claims
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.processes import Peers
from asrkit.workbench.bench.suites import engines, ways
from asrkit.workbench.bench.suites.ways import Inputs, Way, Work, speech
from asrkit.workbench.cost import encoder_flops

Size = tuple[int, float]  # utterances, and seconds of the longest
CPU_SIZES: tuple[Size, ...] = ((1, 2.0), (1, 7.0), (2, 7.0), (1, 16.7))
CUDA_SIZES: tuple[Size, ...] = ((1, 2.0), (1, 16.7), (16, 16.7))
QUICK_SIZES: tuple[Size, ...] = ((1, 0.5), (2, 0.5))


def suite(device: str, quick: bool, *, peers: Peers | None = None) -> Iterator[Case]:
    """Yield the machine's ceiling, on a GPU claims, and inference by size.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper and short utterances.
        peers: on a CPU inference of one utterance beside them too.
    """
    cuda = device.startswith("cuda")
    preset, config = "jasper_10x5dr", presets.jasper_10x5dr()
    if quick:
        preset, config = "mini_jasper", presets.mini_jasper()
    model = random_jasper(config, device)
    yield Case(what="machine-ceiling", measure=lambda: ceilings(device, quick).measurements)
    sizes = CPU_SIZES
    if cuda:
        yield from jasper_claims.cases(model, device, quick)
        sizes = CUDA_SIZES
    if quick:
        sizes = QUICK_SIZES
    for B, seconds in sizes:
        inputs = speech(B, seconds, model.encoder.config.bins, device)
        arms = ways_of(cuda, compiled=cuda and not quick)
        yield inference_case(model, inputs, arms, quick, preset)
    if peers is not None and not cuda:
        durations = [seconds for B, seconds in sizes if B == 1]
        subject = engine_subject(model, durations, preset)
        yield from engines.cases(subject, quick, peers, ("bfloat16", "float32"))


def ways_of(cuda: bool, compiled: bool = False) -> dict[str, Way]:
    """The arms of a device by name, eager float32 first.

    Args:
        cuda: whether it is a GPU.
        compiled: whether torch.compile takes part, which is slow to begin.
    """
    arms = {"float32": Way()}
    names = ["float32", "bfloat16"]
    if cuda:
        arms["tf32"] = Way(arithmetic="tf32")
        names.append("float16")
    for name in names:
        plain = Way(arithmetic=name)
        arms[name] = plain
        arms[f"optimized_{name}"] = replace(plain, form="optimized")
        if cuda:
            arms[f"graphed_{name}"] = replace(plain, graphed=True)
            arms[f"optimized_graphed_{name}"] = replace(plain, form="optimized", graphed=True)
        if compiled:
            arms[f"compiled_{name}"] = replace(plain, form="compiled")
    return arms


def random_jasper(config: CTCConfig, device: str) -> CTCModel:
    """A model in eval mode with seeded random weights, whose norms have seen noise.

    Args:
        config: of the model.
        device: of its weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(config).requires_grad_(False)
        norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]
        for norm in norms:
            norm.momentum = None  # the statistics are those of the next batch
        noise = torch.randn(1, 100, config.encoder.bins)
        model.train()(noise, torch.tensor([100]))
        for norm in norms:
            norm.momentum = 0.1
    return model.eval().to(device)


def inference_case(
    model: CTCModel, inputs: Inputs, arms: dict[str, Way], quick: bool, preset: str
) -> Case:
    """An arm for each way: log-probabilities of a batch, on one core where it is a CPU.

    Args:
        model: float32, where the inputs are.
        inputs: features (B, T, F) and lengths (B,).
        arms: by name; the first is what the others are compared with.
        quick: take the ceilings at smaller sizes.
        preset: of the model.
    """
    B, T, _ = inputs[0].shape
    params: dict[str, Any] = {"preset": preset}
    if not inputs[0].is_cuda:
        params["cores"] = 1
    made = ways.case("jasper-inference", arms, model, inputs, work(model, B, T), quick, **params)
    optimized = [
        (way.arithmetic, name)
        for name, way in arms.items()
        if way == Way(arithmetic=way.arithmetic, form="optimized") and way.arithmetic != "float32"
    ]
    return replace(made, ratios=[*made.pairs(), *optimized])


def engine_subject(model: CTCModel, durations: Sequence[float], preset: str) -> engines.Subject:
    """One utterance of each duration, for ours and the engines.

    Args:
        model: float32, on the CPU.
        durations: seconds of the utterances.
        preset: of the model.
    """
    bins = model.encoder.config.bins
    features = [speech(1, seconds, bins, "cpu")[0] for seconds in durations]
    return engines.Subject(
        name="jasper-engines",
        model=model,
        exported=model,
        features=features,
        works=[work(model, 1, one.shape[1]) for one in features],
        params={"preset": preset},
    )


def work(model: CTCModel, B: int, T: int) -> Work:
    """Least work of a call on B utterances of T feature frames."""
    config: Any = model.encoder.config
    weights = sum(weight.numel() for weight in model.parameters())
    return Work(FLOP=encoder_flops(config, B=B, T=T), weights=weights)


SUITE = Suite(name="jasper", cases=suite, takes_peers=True)
