"""Suites of decoding, and of features.

Decoding is timed on planted transducers (asrkit.workbench.bench.planted): V = 1025 tokens, a joint
of D = 640, an LSTM of one layer, and utterances of 5, 15 and 30 seconds at 12.5 frames a second
that say 3.5 labels a second. Least work, in every row: a joint for each node of the path, a
predictor step for each label; of CTC, to read the scores once.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.decoders import (
    Hypotheses,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_greedy,
)
from asrkit.features import normalize, normalize_sequential
from asrkit.models import TransducerModel
from asrkit.workbench.bench.cases import Arms, Case, PeerArms, Suite, rows
from asrkit.workbench.bench.peers.peer_decoders import GRAPHS, write
from asrkit.workbench.bench.planted import DURATIONS, Planted, ctc_log_probs, kind, planted
from asrkit.workbench.measure import launch_profile
from asrkit.workbench.measure.ops import dtype_name

LOOPS = ("frame_looping", "label_looping", "windowed_looping")
WINDOWS = (1, 2, 4, 6, 8, 16)
# sizes: utterances, and frames of the longest; the first are worth most
SIZES = ((32, 187), (1, 187), (128, 62), (8, 187), (32, 62), (32, 375))
HALF_SIZES = {"cpu": SIZES[:2], "cuda": SIZES[:4]}
WINDOW_SIZES = ((1, 187), (8, 187), (32, 187))
QUICK_SIZES = ((4, 40),)
QUICK_MODEL: dict[str, Any] = {"V": 33, "width": 240}
Options = dict[str, Any]  # of transducer_greedy


class Plans(NamedTuple):
    """Sizes of the planted batches: utterances, and frames of the longest."""

    ctc: Sequence[tuple[int, int]]
    smallest: tuple[int, int]  # with the slow loops
    loops: Sequence[tuple[int, int]]
    half: Mapping[str, Sequence[tuple[int, int]]]  # in bfloat16, by kind of device
    windows: Sequence[tuple[int, int]]
    model: dict[str, Any]


FULL = Plans(
    ctc=((1, 375), (8, 375), (32, 375), (128, 375)),
    smallest=(8, 62),
    loops=SIZES,
    half=HALF_SIZES,
    windows=WINDOW_SIZES,
    model={},
)
QUICK = Plans(
    ctc=((8, 40),),
    smallest=(2, 30),
    loops=QUICK_SIZES,
    half={"cpu": (), "cuda": QUICK_SIZES},
    windows=QUICK_SIZES,
    model=QUICK_MODEL,
)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """RNN-T and TDT: every loop in half precision, then over batch sizes and lengths, then windows
    and the slowest loops; greedy CTC over batch sizes.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes.
    """
    plans = QUICK if quick else FULL
    make: Callable[..., Planted] = partial(planted, **plans.model)
    versus = partial(versus_nemo, device=device)
    for (B, T), durations in product(plans.half[torch.device(device).type], DURATIONS):
        yield from versus(make(B, T, durations=durations), dtype=torch.bfloat16)
    for (B, T), durations in product(plans.loops, DURATIONS):
        yield from versus(make(B, T, durations=durations))
    for (B, T), durations in product(plans.windows, DURATIONS):
        yield window(make(B, T, durations=durations), device)
    for durations in DURATIONS:
        slow = make(*plans.smallest, durations=durations)
        yield from versus(slow, names=(*LOOPS, "one_by_one"))
    for B, T in plans.ctc:
        yield ctc(make(B, T), device)


def ctc(plan: Planted, device: str) -> Case:
    """Greedy CTC: one utterance after another, and batched."""
    log_probs = ctc_log_probs(plan).to(device)
    lengths = plan.lengths.to(device)
    batched = ["batched"]
    if not device.startswith("cuda"):
        batched.append("numba_cpu")
    arms: dict[str, Callable[[], Hypotheses]] = {}
    arms["sequential"] = partial(ctc_greedy_sequential, log_probs, lengths)
    for name in batched:
        arms[name] = partial(ctc_greedy, log_probs, lengths, impl=name)
    return Case(
        what="ctc-greedy-batched",
        arms=arms,
        params={
            "shape": [*log_probs.shape],
            "labels": sum(map(len, plan.labels)),
            "floor_B": log_probs.nbytes,
        },
        # what a compiled loop asks of a GPU says nothing
        arm_params={name: counts(arms[name], device) for name in ("sequential", "batched")},
        ratios=[("sequential", name) for name in batched],
        tolerance=1e-4,
    )


def versus_nemo(
    plan: Planted,
    device: str,
    names: Sequence[str] = LOOPS,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Case]:
    """One case of every loop, with NeMo's on the same weights and frames if peers are wanted.

    On CUDA windowed looping runs by graphs too. NeMo's slow loops join where our one-by-one does.
    Its graphs are set against our largest one. The file that NeMo reads exists until the case after
    this one is asked for.

    Args:
        plan: model and frames.
        device: "cpu" or "cuda".
        names: of our loops without graphs.
        dtype: of model and frames.
    """
    cuda = device.startswith("cuda")
    loop_graphs = "auto"
    if cuda:
        loop_graphs = "off"
    ways: dict[str, Options] = {name: {"strategy": name, "graphs": loop_graphs} for name in names}
    if cuda:
        ways |= by_graphs(("step", "full"))
    case = transducer(plan, device, ways, dtype, "greedy")
    largest_graph = ""  # the last of its arms
    for name in case.arms:
        if name.startswith("windowed_looping"):
            largest_graph = name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        write(path, plan.model, plan.encoded.to(dtype), plan.lengths)
        peers = PeerArms(
            request=nemo_request(case.what, device, "one_by_one" in names) | {"plan": str(path)},
            ours="windowed_looping",
            against={GRAPHS: largest_graph},
        )
        yield replace(case, ratios=_loop_pairs(case.arms), peers=peers)


def _loop_pairs(arms: Arms) -> list[tuple[str, str]]:
    """(slow, fast) pairs: all against windowed looping, and the published loops."""
    pairs = [(name, "windowed_looping") for name in arms if name != "windowed_looping"]
    pairs.append(("frame_looping", "label_looping"))
    return [pair for pair in pairs if arms.keys() >= {*pair}]


def by_graphs(
    modes: Sequence[str], name: str = "windowed_looping", **more: Any
) -> dict[str, Options]:
    """Options of arms that decode by CUDA graphs, by name of arm.

    Args:
        modes: of the graphs, "step" or "full"; an arm each.
        name: what the names of the arms begin with.
        **more: other options of all arms.
    """
    return {f"{name}_{mode}": {"graphs": mode, **more} for mode in modes}


def nemo_request(what: str, device: str, slow: bool) -> dict[str, Any]:
    """What NeMo is asked for, but for the plan.

    Args:
        what: "rnnt-greedy" or "tdt-greedy".
        device: on a GPU its graphs are asked for too.
        slow: whether its slow loops are.
    """
    if slow:
        what += "-loops"
    if device.startswith("cuda"):
        what += "-cuda"
    return {"loss": what, "max_symbols": 10, "device": device}


def window(plan: Planted, device: str) -> Case:
    """Windowed looping that joins more frames in one call, or fewer."""
    ways: dict[str, Options] = {f"window_{size}": {"window": size} for size in WINDOWS}
    case = transducer(plan, device, ways, torch.float32, "greedy-window")
    return replace(case, ratios=[("window_1", name) for name in ways if name != "window_1"])


def transducer(
    plan: Planted,
    device: str,
    ways: Mapping[str, Options],
    dtype: torch.dtype,
    what: str,
) -> Case:
    """A case with an arm for each way that can run; with none where the first cannot.

    A way that cannot run is named on standard error.

    Args:
        plan: model and frames.
        device: "cpu" or "cuda".
        ways: options of transducer_greedy by name of arm.
        dtype: of model and frames.
        what: name of the case behind the kind of model.
    """
    model = plan.model.to(device, dtype)
    encoded = plan.encoded.to(device, dtype)
    lengths = plan.lengths.to(device)
    case = f"{kind(plan.model.durations)}-{what}"
    first = next(iter(ways))
    arms: dict[str, Callable[[], Hypotheses]] = {}
    arm_params: dict[str, dict[str, Any]] = {}
    for name, options in ways.items():
        arm = partial(transducer_greedy, model, encoded, lengths, **options)
        try:
            arm()  # a graph is captured now, and kept for the calls that follow
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        arms[name] = arm
        arm_params[name] = _call_counts(arm, model, options, device)
    if first not in arms:
        arms = {}
    warmup = 0
    if len(lengths) < 32:
        warmup = 1
    tolerance = 0.2  # of scores near 0 that are sums of many logarithms
    if dtype == torch.float32:
        tolerance = 1e-3
    return Case(
        what=case,
        arms=arms,
        params=_params(plan, dtype),
        arm_params=arm_params,
        warmup=warmup,
        tolerance=tolerance,
    )


def _params(plan: Planted, dtype: torch.dtype) -> dict[str, Any]:
    """Shape and least work of decoding a plan."""
    B, T, D = plan.encoded.shape
    V = plan.model.blank + 1
    durations = [*plan.model.durations]
    labels = sum(map(len, plan.labels))
    path_joints = plan.joints()
    joint = 2 * D * (V + len(durations))
    step = 2 * 8 * D * D + 2 * D * D  # the LSTM's gates from label and state, then the projection
    return {
        "shape": [B, T, D, V],
        "dtype": dtype_name(dtype),
        "durations": durations,
        "frames": int(plan.lengths.sum()),
        "labels": labels,
        "looks": path_joints,
        "floor_FLOP": path_joints * joint + labels * step,
    }


def _call_counts(
    arm: partial[Hypotheses], model: TransducerModel, options: Options, device: str
) -> dict[str, Any]:
    """Counts of a call, or why there are none.

    Of a graph: what its replay asks for; the joint's calls are in it, out of sight.
    """
    counting = Counting(model)
    try:
        if options.get("graphs") in ("step", "full"):
            return counts(arm, device)
        watched = partial(arm.func, counting, *arm.args[1:], **arm.keywords)
        launches = counts(watched, device)
    except RuntimeError as error:  # of torch's tools for counting: the arm itself has just run
        return {"not_counted": str(error).partition("\n")[0]}
    return launches | {"join": counting.joins, "predict": counting.predictions}


class Counting(nn.Module):
    """A model that counts its calls, beside the model: its graphs are its own."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.model = model
        self.blank = model.blank
        self.durations = model.durations
        self.joins = 0
        self.predictions = 0

    def predict(self, labels: Tensor, state: object = None) -> tuple[Tensor, object]:
        """The model's prediction (B, D) and state."""
        self.predictions += 1
        return self.model.predict(labels, state)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """The model's logits (..., V + durations)."""
        self.joins += 1
        return self.model.join(encoded, predicted)


def counts(call: Callable[[], object], device: str) -> dict[str, int]:
    """Kernels and copies that a GPU is asked for, and how often it is waited for, in one call.

    They are counted by torch's dispatcher, so on a CPU they are those that a GPU would be asked
    for.
    """
    profile = launch_profile(call, device=device, runtime=False)
    return {"launches": profile.launches, "syncs": profile.syncs}


def features(device: str, quick: bool) -> Iterator[Case]:
    """Per-feature normalisation, one utterance after another and batched. Least work: read once,
    write once.
    """
    shape = (32, 1600, 80)
    if quick:
        shape = (8, 200, 80)
    B, T, F = shape
    mel, lengths = rows(B, T, F, device)
    yield Case(
        what="feature-norm-batched",
        arms={
            "sequential": lambda: (normalize_sequential(mel, lengths),),
            "batched": lambda: (normalize(mel, lengths),),
        },
        params={"shape": [B, T, F], "floor_B": 2 * 4 * B * T * F},
    )


SUITE = Suite(name="decoders", cases=suite, gpu_tests=("tests/decoders/test_graphs_gpu.py",))
FEATURES = Suite(name="features", cases=features)
