"""The suite of Jasper 10x5 DR: inference eager and optimized in each precision, on one core of a
CPU or on a GPU; its published protocol; and on a GPU the claims about it.

Weights are random and seeded, and the norms have the statistics of some noise. No other package
ships a Jasper; with `--peers` OpenVINO and ONNX Runtime run ours, one utterance on one core.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.models import CTCConfig, CTCModel, JasperConfig, presets
from asrkit.models.execution import EncoderForm, capture, cast_copy, prepare, tf32
from asrkit.workbench.bench import jasper_claims, protocols
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.peer_engines import write_features, write_model
from asrkit.workbench.bench.peers.processes import NAMES, Peers
from asrkit.workbench.bench.protocols import GridCell
from asrkit.workbench.bench.suites.encoder import TOLERANCE, one_thread
from asrkit.workbench.cost import encoder_flops
from asrkit.workbench.records import Measurement
from asrkit.workbench.tables import aligned

Inputs = tuple[Tensor, Tensor]
Size = tuple[int, float]  # utterances, and seconds of the longest
CPU_SIZES: tuple[Size, ...] = ((1, 2.0), (1, 7.0), (2, 7.0), (1, 16.7))
CUDA_SIZES: tuple[Size, ...] = ((1, 2.0), (1, 16.7), (16, 16.7))
QUICK_SIZES: tuple[Size, ...] = ((1, 0.5), (2, 0.5))
GRID = "jasper-grid"
GRID_BATCHES = {"cpu": (1, 2), "cuda": protocols.BATCHES}
GRID_ITERATIONS = {"cpu": 26, "cuda": protocols.ITERATIONS}  # a call takes a second on a core
QUICK_CHANNELS = 8  # times fewer, and a tenth of the weights or less


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an arm computes: the arithmetic of its products, and how the model is executed."""

    arithmetic: str = "float32"
    form: EncoderForm = "eager"  # "optimized": on a CPU folded and packed
    graphed: bool = False  # replayed as a CUDA graph


def suite(
    device: str,
    quick: bool,
    *,
    published: bool = False,
    peers: Peers | None = None,
) -> Iterator[Case]:
    """Yield the machine's ceiling, on a GPU claims, and inference by size; or the published grid.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper and short utterances.
        published: measure batches by durations with the published protocol instead.
        peers: on a CPU inference of one utterance beside them too.
    """
    cuda = device.startswith("cuda")
    model = random_jasper(config_of(quick), device)
    if published:
        yield from published_cases(model, device, quick)
        return
    yield Case(what="machine-ceiling", measure=lambda: ceilings(device, quick).measurements)
    sizes = CPU_SIZES
    if cuda:
        yield from jasper_claims.cases(model, device, quick)
        sizes = CUDA_SIZES
    if quick:
        sizes = QUICK_SIZES
    for B, seconds in sizes:
        inputs = speech(B, seconds, model.encoder.config.bins, device)
        yield inference_case(model, inputs, ways(cuda, compiled=cuda and not quick), device, quick)
    if peers is not None and not cuda:
        yield from engine_cases(model, [seconds for B, seconds in sizes if B == 1], peers, quick)


def ways(cuda: bool, compiled: bool = False) -> dict[str, Way]:
    """The arms of a device by name, eager float32 first.

    Args:
        cuda: whether it is a GPU.
        compiled: whether torch.compile takes part, which is slow to begin.
    """
    arms = {"float32": Way()}
    if cuda:
        arms["tf32"] = Way(arithmetic="tf32")
    names = ["float32", "bfloat16"]
    if cuda:
        names.append("float16")
    for name in names:
        arms[name] = Way(arithmetic=name)
        arms[f"optimized_{name}"] = Way(arithmetic=name, form="optimized")
        if cuda:
            graphed = Way(arithmetic=name, form="optimized", graphed=True)
            arms[f"graphed_{name}"] = replace(graphed, form="eager")
            arms[f"optimized_graphed_{name}"] = graphed
        if compiled:
            arms[f"compiled_{name}"] = Way(arithmetic=name, form="compiled")
    return arms


def config_of(quick: bool) -> CTCConfig:
    """Jasper 10x5 DR, or the same with an eighth of the channels and one repeat of each stage."""
    config = presets.jasper_10x5dr()
    if not quick:
        return config
    sizes = config.encoder
    assert isinstance(sizes, JasperConfig)
    stages = [
        replace(stage, channels=stage.channels // QUICK_CHANNELS, repeat=1)
        for stage in sizes.stages
    ]
    return replace(config, encoder=replace(sizes, stages=stages))


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


def speech(B: int, seconds: float, bins: int, device: str) -> Inputs:
    """Noise as features (B, T, F), zeros in the padding, and lengths (B,) from T down to T / 2.

    Args:
        B: utterances.
        seconds: of the longest, whole frames of 10 ms.
        bins: F.
        device: of both.
    """
    T = protocols.frames_of(seconds)
    lengths = torch.linspace(T, T // 2, B).long()
    features = torch.randn(B, T, bins, generator=torch.Generator().manual_seed(1))
    features *= (torch.arange(T) < lengths[:, None])[..., None]
    return features.to(device), lengths.to(device)


def inference_case(
    model: CTCModel, inputs: Inputs, arms: Mapping[str, Way], device: str, quick: bool
) -> Case:
    """An arm for each way: log-probabilities of a batch, on one core where it is a CPU.

    Args:
        model: float32, on `device`.
        inputs: features (B, T, F) and lengths (B,).
        arms: by name; the first is what the others are compared with.
        device: "cpu" or "cuda".
        quick: take the ceilings at smaller sizes.
    """
    B, T, _ = inputs[0].shape
    encoder: Any = model.encoder
    params: dict[str, Any] = {
        "shape": [B, T, encoder.width, encoder.config.layers],
        "audio_s": inputs[1].sum().item() / protocols.FRAMES_PER_S,
        "weights": "random",
        "preset": "small" if quick else "jasper_10x5dr",
    }
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    if not device.startswith("cuda"):
        scope = one_thread
        params["cores"] = 1
    with scope():
        params_of_arms = {
            name: _arm_params(way, model, (B, T), device, quick) for name, way in arms.items()
        }
    return Case(
        what="jasper-inference",
        arms={name: arm(model, inputs, way, scope) for name, way in arms.items()},
        params=params,
        arm_params=params_of_arms,
        ratios=_pairs(arms),
        warmup=1,
    )


def engine_cases(
    model: CTCModel, durations: Iterable[float], peers: Peers, quick: bool
) -> Iterator[Case]:
    """For each arithmetic and duration ours and the peers on one utterance, all on one core.

    Half the memory goes to peers, so a case has few arms of ours, peers are started before these
    are made, and those of one arithmetic end before those of the next start.

    Args:
        model: float32, on the CPU.
        durations: seconds of the utterances.
        peers: whose processes run OpenVINO and ONNX Runtime.
        quick: take the ceilings at smaller sizes.
    """
    all_ways = ways(cuda=False)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model)
        for name in ("bfloat16", "float32"):
            loss = f"jasper-{name}"
            arms = {one: all_ways[one] for one in ("float32", f"optimized_{name}")}
            for seconds in durations:
                inputs = speech(1, seconds, model.encoder.config.bins, "cpu")
                write_features(Path(folder), inputs[0])
                T = inputs[0].shape[1]
                request: dict[str, Any] = {"loss": loss, "folder": folder, "frames": T}
                if peers.arms(**request):
                    yield _engine_case(model, inputs, arms, request, quick)
            peers.end(loss)


def _engine_case(
    model: CTCModel, inputs: Inputs, arms: Mapping[str, Way], request: dict[str, Any], quick: bool
) -> Case:
    """The case of `inference_case` with peers, under a name of its own."""
    made = inference_case(model, inputs, arms, "cpu", quick)
    ours = [*arms][-1]
    joined = PeerArms(request=request, ours=ours, params=made.arm_params[ours])
    ratios = _pairs(arms) + [("float32", name) for name in NAMES[request["loss"]]]
    what = request["loss"].replace("jasper", "jasper-engines")
    return replace(made, what=what, peers=joined, ratios=ratios)


def _pairs(arms: Mapping[str, Way]) -> list[tuple[str, str]]:
    """Each arm beside eager float32, and each optimized one beside the eager one of its kind."""
    pairs = [("float32", name) for name in arms if name != "float32"]
    for name, way in arms.items():
        half = way.arithmetic in arms and way.arithmetic != "float32"
        if way.form == "optimized" and not way.graphed and half:
            pairs.append((way.arithmetic, name))
    return pairs


def arm(
    model: CTCModel,
    inputs: Inputs,
    way: Way,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that returns log-probabilities (B, T', V) and their lengths (B,).

    Args:
        model: float32; it stays as it is.
        inputs: features (B, T, F) and lengths (B,).
        way: how to compute.
        scope: makes a context that each call runs in, such as one core.
    """
    features, lengths = inputs
    ready = cast_copy(model, protocols.weights_dtype(way.arithmetic)).eval().requires_grad_(False)
    ready = prepare(ready, way.form)

    def call() -> tuple[Tensor, Tensor]:
        with scope(), torch.inference_mode(), tf32(way.arithmetic == "tf32"):
            return ready(features, lengths)

    if way.graphed:
        return capture(call)
    return call


def _arm_params(
    way: Way, model: CTCModel, shape: tuple[int, int], device: str, quick: bool
) -> dict[str, Any]:
    """Arithmetic, tolerance and least work of an arm, and what the machine does at most."""
    B, T = shape
    sizes: Any = model.encoder.config
    FLOP = encoder_flops(sizes, B=B, T=T)
    itemsize = protocols.weights_dtype(way.arithmetic).itemsize
    read_B = itemsize * sum(weight.numel() for weight in model.parameters())
    top = ceilings(device, quick)
    return {
        "dtype": way.arithmetic,
        "tolerance": TOLERANCE[way.arithmetic],
        "floor_FLOP": FLOP,
        "floor_B": read_B,
        "least_ms": top.floor_ms(FLOP, read_B, way.arithmetic),
        "peak_FLOP": top.flops[way.arithmetic],
        "peak_B": top.bytes_per_s,
    }


def published_cases(model: CTCModel, device: str, quick: bool) -> Iterator[Case]:
    """The published protocol, a case for each precision and form.

    Args:
        model: float32, on `device`.
        device: "cpu" or "cuda".
        quick: two short cells.
    """
    cuda = device.startswith("cuda")
    precisions = ["float32", "bfloat16"]
    if cuda:
        precisions = ["float32", "tf32", "float16", "bfloat16"]
    forms: list[EncoderForm] = ["eager", "optimized"]
    for precision in precisions:
        for form in forms:
            measured = partial(grid_measurements, model, precision, form, device, quick)
            yield Case(what=GRID, params={"dtype": precision}, measure=measured)


def grid_measurements(
    model: CTCModel, precision: str, form: EncoderForm, device: str, quick: bool
) -> Iterator[Measurement]:
    """The cells of a precision, each with our statistics and with the published ones.

    Args:
        model: float32, on `device`.
        precision: of `protocols.PRECISIONS`.
        form: how the model is executed.
        device: "cpu" or "cuda".
        quick: two short cells.
    """
    kind = device.partition(":")[0]
    batches: Iterable[int] = GRID_BATCHES[kind]
    seconds: Iterable[float] = protocols.SECONDS
    if quick:
        seconds = (0.5,)
    iterations = GRID_ITERATIONS[kind]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    if kind == "cpu":
        scope = one_thread
    with scope():
        cells = protocols.grid(
            model, batches, seconds, [precision], form=form, iterations=iterations
        )
        threads = torch.get_num_threads()
    for cell in cells:
        yield from cell_measurements(cell, device, quick, threads)


def cell_measurements(
    cell: GridCell, device: str, quick: bool, threads: int
) -> Iterator[Measurement]:
    """Both statistics of a cell, named by `params["statistic"]`."""
    params: dict[str, Any] = {
        "batch": cell.batch,
        "duration_s": cell.seconds,
        "dtype": cell.precision,
        "form": cell.form,
        "floor_FLOP": cell.FLOP,
        "device": device,
        "threads": threads,
        "weights": "random",
    }
    if quick:
        params["quick"] = True
    samples_ms = tuple(round(1e3 * sample, 4) for sample in cell.samples_s)
    shared: dict[str, Any] = {
        "warmup": protocols.WARM_UP + protocols.DROPPED,
        "timer": "time.perf_counter",
        "impl": cell.form,
    }
    median = {"statistic": "median and quartiles (ours)"}
    middle_ms = protocols.ours(samples_ms)["p50"]
    yield Measurement(
        GRID, "latency", "ms", middle_ms, samples_ms, params=params | median, **shared
    )
    theirs = {name: 1e3 * value for name, value in cell.published.items()}
    mean = {"statistic": "mean and percentiles (published)"}
    yield Measurement(
        GRID, "published_latency", "ms", theirs["avg"], params=params | mean | theirs, **shared
    )


def grid_table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row for each cell: percentiles and mean as published, then median and quartiles as ours."""
    rows = ["batch seconds precision form | p90 p95 p99 mean | p25 median p75 | TFLOP/s".split(" ")]
    cells: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for record in records:
        params = record["params"]
        key = tuple(params[name] for name in ("batch", "duration_s", "dtype", "form"))
        cells.setdefault(key, {})[record["metric"]] = record
    for key, found in cells.items():
        if found.keys() < {"latency", "published_latency"}:
            continue
        ours = found["latency"]["stats"]
        theirs = found["published_latency"]["params"]
        rate = found["latency"]["params"]["floor_FLOP"] / ours["p50"] / 1e9
        row = [f"{key[0]}", f"{key[1]:g}", key[2], key[3], "|"]
        row += [f"{theirs[name]:.2f}" for name in ("p90", "p95", "p99", "avg")]
        row += ["|", *[f"{ours[name]:.2f}" for name in ("p25", "p50", "p75")], "|", f"{rate:.3f}"]
        rows.append(row)
    if len(rows) == 1:
        return []
    note = "ms. p90 to mean: the statistics of the published tables. p25 to p75: ours."
    return [*aligned(rows, right=[0, 1, 5, 6, 7, 8, 10, 11, 12, 14]), note]


SUITE = Suite(
    name="jasper", cases=suite, options=("published",), takes_peers=True, tables={GRID: grid_table}
)
