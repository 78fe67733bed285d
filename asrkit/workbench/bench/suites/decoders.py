"""Suites of greedy decoding, and of features.

Decoding is timed on planted transducers (asrkit.workbench.bench.planted): V = 1025 tokens, a joint
of D = 640, an LSTM of one layer, and utterances of 5, 15 and 30 seconds at 12.5 frames a second
that say 3.5 labels a second. Least work, in every row: a joint for each look that the path takes, a
step of the predictor for each label.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from re import Pattern
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import Hypotheses, ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.features import normalize, normalize_sequential
from asrkit.models import TransducerModel
from asrkit.workbench.bench import guards
from asrkit.workbench.bench.cases import NOTHING, Arms, Case, PeerArms, Suite, dtype_name, rows
from asrkit.workbench.bench.planted import Planted, ctc_log_probs, kind, planted
from asrkit.workbench.bench.rivals.peer_decoders import GRAPHS, write
from asrkit.workbench.profiling import launch_profile

DURATIONS: Sequence[Sequence[int]] = ((), (0, 1, 2, 3, 4))
LOOPS = ("frame_looping", "label_looping", "windowed_looping")
WINDOWS = (1, 2, 4, 6, 8, 16)
Size = tuple[int, int]  # utterances, frames of the longest


def suite(device: str, quick: bool, *, without: Pattern[str] = NOTHING) -> Iterator[Case]:
    """Greedy CTC over batch sizes; then RNN-T and TDT: every loop over batch sizes and lengths, in
    half precision, and windows.

    `without`: names of arms that are not even tried.
    """
    sizes: list[Size] = (
        [(4, 40)] if quick else [(1, 187), (8, 187), (32, 62), (32, 187), (32, 375), (128, 62)]
    )
    half: list[Size] = [] if quick else [(1, 187), (32, 187)]
    windows: list[Size] = [(4, 40)] if quick else [(1, 187), (8, 187), (32, 187)]
    small: dict[str, Any] = {"V": 33, "width": 240} if quick else {}
    for B in (8,) if quick else (1, 8, 32, 128):
        yield ctc(planted(B, 40 if quick else 375, **small), device)
    for durations in DURATIONS:
        make: Callable[..., Planted] = partial(planted, durations=durations, **small)
        versus: Callable[..., Iterator[Case]] = partial(versus_nemo, device=device, without=without)
        yield from versus(make(2, 30) if quick else make(8, 62), names=(*LOOPS, "one_by_one"))
        for B, T in sizes:
            yield from versus(make(B, T))
        for B, T in half:
            yield from versus(make(B, T), dtype=torch.bfloat16)
        for B, T in windows:
            yield window(make(B, T), device)


def ctc(plan: Planted, device: str) -> Case:
    """One utterance after another, and batched."""
    log_probs, lengths = ctc_log_probs(plan).to(device), plan.lengths.to(device)
    batched = ["batched"] if device.startswith("cuda") else ["batched", "numba_cpu"]
    arms: Arms = {name: partial(ctc_greedy, log_probs, lengths, impl=name) for name in batched}
    arms = {"sequential": partial(ctc_greedy_sequential, log_probs, lengths), **arms}
    params = {
        "shape": [*log_probs.shape],
        "labels": sum(map(len, plan.labels)),
        "floor_B": log_probs.nbytes,
    }
    told = {
        name: counts(arms[name], device) for name in ("sequential", "batched")
    }  # the compiled one is nothing for a GPU
    pairs = [("sequential", name) for name in batched]
    return Case(
        what="ctc-greedy-batched",
        arms=arms,
        params=params,
        arm_params=told,
        ratios=pairs,
        tolerance=1e-4,
    )


def versus_nemo(
    plan: Planted,
    device: str,
    names: Sequence[str] = LOOPS,
    dtype: torch.dtype = torch.float32,
    without: Pattern[str] = NOTHING,
) -> Iterator[Case]:
    """Every loop, on CUDA label looping with graphs too; and NeMo's on the same weights and frames,
    if peers are wanted.

    Turns of graphs are fused, and plain in arms of their own. NeMo's slow loops join where our
    one-by-one does. Its graphs are set against our largest one.
    """
    modes = ("off", "step", "full") if device.startswith("cuda") else ("auto",)
    ways = {name: {"strategy": name, "graphs": modes[0]} for name in names}
    ways |= by_graphs(modes[1:], "plain") | by_graphs(modes[1:], "fused")
    case = transducer(plan, device, ways, dtype, "greedy", without)
    pairs = [(name, "windowed_looping") for name in case.arms if name != "windowed_looping"] * (
        "windowed_looping" in case.arms
    )
    loops = [("frame_looping", "label_looping")] * (
        {"frame_looping", "label_looping"} <= {*case.arms}
    )
    fused = [(f"{name}_plain", name) for name in case.arms if f"{name}_plain" in case.arms]
    largest = next(
        (name for name in reversed([*case.arms]) if name.startswith("windowed_looping")), ""
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        write(path, plan.model, plan.encoded.to(dtype), plan.lengths)
        yield replace(
            case,
            ratios=[*pairs, *loops, *fused],
            peers=PeerArms(
                request=_rivals(case.what, device, "one_by_one" in names) | {"plan": str(path)},
                ours="windowed_looping",
                against={GRAPHS: largest},
            ),
        )


def by_graphs(
    modes: Sequence[str], turn: str, name: str = "windowed_looping", **more: Any
) -> dict[str, dict[str, Any]]:
    """Label looping by graphs of these modes, whose turn is "plain" or "fused": where it cannot be
    fused such an arm cannot run.
    """
    return {
        f"{name}_{mode}" + "_plain" * (turn == "plain"): {"graphs": mode, "turn": turn, **more}
        for mode in modes
    }


def _rivals(what: str, device: str, slow: bool) -> dict[str, Any]:
    """What is asked of NeMo, but for the plan: its loops, the slow ones too, on a GPU its graphs as
    well.
    """
    loss = what + "-loops" * slow + "-cuda" * device.startswith("cuda")
    return {"loss": loss, "max_symbols": 10, "device": device}


def window(plan: Planted, device: str) -> Case:
    """Label looping that looks at more frames in one call, or at fewer."""
    ways = {f"window_{size}": {"window": size} for size in WINDOWS}
    case = transducer(plan, device, ways, torch.float32, "greedy-window")
    return replace(case, ratios=[("window_1", name) for name in ways if name != "window_1"])


def transducer(
    plan: Planted,
    device: str,
    ways: Mapping[str, dict[str, Any]],
    dtype: torch.dtype,
    what: str,
    without: Pattern[str] = NOTHING,
) -> Case:
    """A case with an arm for each way that can run, none where the first cannot; one that cannot is
    named on standard error.
    """
    model, encoded, lengths = (
        plan.model.to(device, dtype),
        plan.encoded.to(device, dtype),
        plan.lengths.to(device),
    )
    arms, told = dict[str, Callable[[], Hypotheses]](), dict[str, dict[str, Any]]()
    first = next(iter(ways))
    case, named = f"{kind(plan.model.durations)}-{what}", dtype_name(dtype)
    for name, way in ways.items():
        if any(guards.barred(without, one, case, named) for one in (name, first)):
            continue
        arm = partial(transducer_greedy, model, encoded, lengths, **way)
        try:
            arm()  # a graph is captured now, and kept for the calls that follow
        except (ValueError, RuntimeError) as error:
            guards.prove_alive(device, case, name)
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        arms[name], told[name] = arm, _told(arm, model, way, device)
        if "not_counted" in told[name]:
            guards.prove_alive(device, case, name)
    arms = arms if first in arms else {}
    (B, T, D), durations, labels, looks = (
        encoded.shape,
        [*model.durations],
        sum(map(len, plan.labels)),
        plan.looks(),
    )
    V, step = (
        model.blank + 1,
        2 * 8 * D * D + 2 * D * D,
    )  # the LSTM's gates from label and state, then the projection
    params = {
        "shape": [B, T, D, V],
        "dtype": named,
        "durations": durations,
        "frames": int(lengths.sum()),
        "labels": labels,
        "looks": looks,
        "floor_FLOP": looks * 2 * D * (V + len(durations)) + labels * step,
    }
    rounding = (
        1e-3 if dtype == torch.float32 else 0.2
    )  # of scores near 0 that are sums of many logarithms
    return Case(
        what=case, arms=arms, params=params, arm_params=told, warmup=int(B < 32), tolerance=rounding
    )


def _told(
    arm: partial[Hypotheses], model: TransducerModel, way: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """Counts of a call, or why there are none. Of a graph: what its replay asks for; the joint's
    calls are in it, out of sight.
    """
    counting = Counting(model)
    graphed = way.get("graphs") in ("step", "full")
    try:
        if graphed:
            return counts(arm, device)
        found = counts(partial(arm.func, counting, *arm.args[1:], **arm.keywords), device)
    except RuntimeError as error:  # of torch's tools for counting: the arm itself has just run
        return {"not_counted": str(error).partition("\n")[0]}
    return found | {"join": counting.joins, "predict": counting.predictions}


class Counting:
    """A model that counts its calls. An object of its own: graphs captured for `model` stay, whose
    attributes do not change.
    """

    def __init__(self, model: TransducerModel) -> None:
        self.model, self.blank, self.durations = model, model.blank, model.durations
        self.joins = self.predictions = 0

    def predict(self, labels: Tensor, state: object = None) -> tuple[Tensor, object]:
        """The model's prediction (B, D) and state."""
        self.predictions += 1
        return self.model.predict(labels, state)

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """The model's logits (..., V + durations)."""
        self.joins += 1
        return self.model.join(encoded, predicted)


def counts(call: Callable[[], object], device: str) -> dict[str, int]:
    """Kernels and copies that a GPU would be asked for, and how often it would be waited for: what
    the dispatcher sees.
    """
    seen = launch_profile(call, device=device, runtime=False)
    return {"launches": seen.launches, "syncs": seen.syncs}


def features(device: str, quick: bool) -> Iterator[Case]:
    """Per-feature normalisation, one utterance after another and batched. Least work: read once,
    write once.
    """
    B, T, F = (8, 200, 80) if quick else (32, 1600, 80)
    mel = rows(B, T, F, device)
    arms = {
        "sequential": lambda: (normalize_sequential(*mel),),
        "batched": lambda: (normalize(*mel),),
    }
    yield Case(
        what="feature-norm-batched",
        arms=arms,
        params={"shape": [B, T, F], "floor_B": 2 * 4 * B * T * F},
    )


SUITE = Suite(name="decoders", cases=suite, takes=("without",))
FEATURES = Suite(name="features", cases=features)
