"""The decoders against their definition, and graphs against the loops they capture."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import (
    ctc_greedy,
    ctc_greedy_sequential,
    release_graphs,
    transducer_greedy,
)
from asrkit.decoders.transducer import STRATEGIES, graphs
from asrkit.decoders.transducer.steps import GreedyModel
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.checks.losses import DTYPES
from asrkit.workbench.bench.planted import DURATIONS, Planted, ctc_log_probs, kind, planted
from asrkit.workbench.bench.suites.losses import ROUNDED
from asrkit.workbench.profiling import launch_profile
from asrkit.workbench.profiling.ops import dtype_name

OFF = {"graphs": "off"}
LADDER_RUNGS = {  # by graph and turn
    ("step", "plain"): "graph_of_steps",
    ("full", "plain"): "graph_whole",
    ("full", "fused"): "fused_turns",
}
LOOPED_SIZES = (  # utterances, frames, window
    (8, 48, None),
    (8, 40, None),
    (16, 20, 1),
    (1, 48, 8),
    (8, 48, None),
)


def random_transducer(durations: Sequence[int], device: str, dtype: torch.dtype) -> TransducerModel:
    """A small transducer of random weights that emits labels in bursts.

    Args:
        durations: of a TDT model; none for an RNN-T.
        device: of the model.
        dtype: of its weights, which are drawn in float64.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = TransducerConfig(
            vocab_size=7,
            predictor=LSTMConfig(width=8, layers=2),
            joint_width=8,
            durations=tuple(durations),
            activation="relu",
        )
        model = TransducerModel(config).double().eval().requires_grad_(False)
    model.output.weight.mul_(4)
    blank_bias = 1
    if durations:
        blank_bias = -2
    model.output.bias[model.blank] += blank_bias
    return model.to(device, dtype)


def random_frames(
    B: int, T: int, device: str, dtype: torch.dtype, seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Frames (B, T, 8) for `random_transducer`, and lengths (B,) from T down to 0.

    Args:
        B: utterances.
        T: frames of the longest.
        device: of both.
        dtype: of the frames, which are drawn in float64.
        seed: of the draw.
    """
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(B, T, 8, generator=draw, dtype=torch.float64)
    frames = (2 * noise).to(device, dtype)
    lengths = torch.linspace(T, 0, B).long()
    return frames, lengths.to(device)


def decoder_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the decoders without graphs."""
    for durations, strategy in product(DURATIONS, STRATEGIES):
        names = [strategy]
        if strategy == "windowed_looping":  # graphs have checks of their own
            names += ["windowed_looping_off", r"window_\d+(_off)?"]
        model = kind(durations)
        arms = "|".join(rf"^{model}-\S+ in \S+: {name}$" for name in names)
        call = partial(_greedy, device, strategy, durations)
        yield Check("decoders", f"{strategy} {model}", arms, call)
    for durations in DURATIONS:
        calls = {
            "planted": partial(_planted, device, durations),
            "carry": partial(_carry, device, durations, **OFF),
        }
        for name, call in calls.items():
            yield Check("decoders", f"{name} {len(durations)} durations", "", call)
    ctc_arms = r"^ctc-greedy-batched in \S+: batched$"
    ctc_call = partial(_ctc, device)
    yield Check("decoders", "ctc batched", ctc_arms, ctc_call)


def _greedy(device: str, strategy: Any, durations: Sequence[int]) -> None:
    """Labels, frames, durations, scores and confidence are those of the definition on the CPU, all
    in float64.
    """
    options: dict[str, Any] = {
        "confidence": "entropy",
        "max_symbols": 3,
        "graphs": "off",
    }
    wide = torch.float64
    model = random_transducer(durations, "cpu", wide)
    frames = random_frames(9, 30, "cpu", wide)
    wanted = transducer_greedy(model, *frames, strategy="one_by_one", **options)
    model = random_transducer(durations, device, wide)
    moved = [tensor.to(device) for tensor in frames]
    got = transducer_greedy(model, *moved, strategy=strategy, **options)
    assert wanted.lengths.sum() > 20, "the model says next to nothing"
    near(got.parts(), wanted.parts())


def _plan(durations: Sequence[int]) -> Planted:
    return planted(4, 40, V=33, width=240, durations=durations)


def _planted(device: str, durations: Sequence[int]) -> None:
    """The planted labels are found in every dtype."""
    plan = _plan(durations)
    lengths = plan.lengths.to(device)
    for dtype in DTYPES:
        model = deepcopy(plan.model).to(device, dtype)
        encoded = plan.encoded.to(device, dtype)
        got = transducer_greedy(model, encoded, lengths, graphs="off")
        assert got.tokens() == plan.labels, f"other labels in {dtype}"


def _carry(device: str, durations: Sequence[int], **options: Any) -> None:
    """Utterances in two pieces are decoded as in one, and padding does not matter."""
    model = random_transducer(durations, device, torch.float32)
    encoded, lengths = random_frames(5, 30, device, torch.float32)
    wanted = transducer_greedy(model, encoded, lengths, graphs="off").tokens()

    cut = 13
    before_cut = lengths.clamp(max=cut)
    after_cut = lengths - before_cut
    first = transducer_greedy(model, encoded[:, :cut], before_cut, **options)
    rest = transducer_greedy(model, encoded[:, cut:], after_cut, carry=first.carry, **options)
    pieces = zip(first.tokens(), rest.tokens(), strict=True)
    joined = [start + end for start, end in pieces]
    assert joined == wanted, "pieces differ from the whole"

    valid = valid_mask(lengths, 30)
    padding = valid.logical_not()[..., None]
    spoilt = encoded.masked_fill(padding, torch.nan)
    got = transducer_greedy(model, spoilt, lengths, **options)
    assert got.tokens() == wanted, "padding matters"


def _ctc(device: str) -> None:
    plan = _plan(())
    log_probs = ctc_log_probs(plan)
    lengths = plan.lengths
    wanted = ctc_greedy_sequential(log_probs, lengths)
    got = ctc_greedy(log_probs.to(device), lengths.to(device))
    near(got.parts(), wanted.parts())


def graph_checks(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of captured graphs, with fused and with plain turns; on a CPU "auto" stands for the
    plain loop.

    A turn vouches for its own arms only: where a fused kernel is wrong the plain ones are measured,
    and the other way round.
    """
    ways = [("auto", "auto")]
    dtypes: Sequence[torch.dtype] = DTYPES[:1]
    if cuda:
        ways = [*product(("step", "full"), ("fused", "plain")), *ways]
        dtypes = DTYPES
    for mode, turn in ways:
        options: dict[str, Any] = {"graphs": mode, "turn": turn}
        group = mode
        if turn == "plain":
            group += " plain"
        check = partial(_graph_check, group)
        for durations, dtype in product(DURATIONS, dtypes):
            name = f"{dtype_name(dtype)} {len(durations)} durations"
            call = partial(_looped, device, durations, dtype, **options)
            arms = graph_arms(mode, turn, durations, dtype)
            yield check(name, call, arms)
        calls = {
            "carry": partial(_carry, device, (), **options),
            "weights that change and move": partial(_moved, device, **options),
            "autocast": partial(_autocast, device, **options),
        }
        if cuda and mode != "auto":
            calls["nothing captured waits"] = partial(_never_waits, device, mode, turn)
        for name, call in calls.items():
            yield check(name, call)


def _graph_check(group: str, name: str, call: partial[None], arms: str = "") -> Check:
    return Check(f"graphs {group}", f"graphs={group}: {name}", arms, call)


def graph_arms(mode: str, turn: str, durations: Sequence[int], dtype: torch.dtype) -> str:
    """A pattern of the arms that decode by such graphs; "" where there are none.

    Of the ladder a plain turn has the rungs of graphs. The rung of fused turns stands on a whole
    graph.

    Args:
        mode: "step", "full" or "auto".
        turn: "fused", "plain" or "auto".
        durations: of the models.
        dtype: of the models; no arm is in float16.
    """
    if dtype == torch.float16:
        return ""
    model = kind(durations)
    suffix = f"_{mode}"
    if turn == "plain":
        suffix += "_plain"
    names = [
        rf"window_\d+{suffix}",
        f"windowed_looping{suffix}",
    ]
    if mode == "auto":
        names = [r"window_\d+"]  # which say nothing of graphs
    arms = [(rf"{model}-\S+", name) for name in names]
    rung = LADDER_RUNGS.get((mode, turn))
    if rung:
        arms.append((rf"ladder-{model}\S*", rf"\w+_{rung}"))
    arithmetic = dtype_name(dtype)
    return "|".join(rf"^{what} in {arithmetic}: {name}$" for what, name in arms)


def _looped(
    device: str,
    durations: Sequence[int],
    dtype: torch.dtype,
    *,
    graphs: Any,
    turn: Any = "auto",
) -> None:
    """Results are the plain loop's, scores up to rounding: a graph's products may be computed by
    other kernels.
    """
    model = random_transducer(durations, device, dtype)
    mode = graphs
    if mode == "auto":
        mode = "step"
    turns = {"fused": "fused", "plain": "not fused: as asked"}
    impl = f"windowed_looping, graphs={mode}, {turns.get(turn, '')}"
    for seed, (B, T, window) in enumerate(LOOPED_SIZES, 1):
        options: dict[str, Any] = {
            "confidence": "entropy",
            "max_symbols": 3,
            "window": window,
        }
        frames = random_frames(B, T, device, dtype, seed)
        got = transducer_greedy(model, *frames, graphs=graphs, turn=turn, **options)
        if device.startswith("cuda"):
            assert got.impl.startswith(impl), got.impl
        wanted = transducer_greedy(model, *frames, graphs="off", **options)
        near(got.parts(), wanted.parts(), ROUNDED[dtype])


def _moved(device: str, **options: Any) -> None:
    """A graph is captured anew where weights change their values, or move."""
    model = random_transducer((), device, torch.float32)
    encoded, lengths = random_frames(8, 48, device, torch.float32)
    before = transducer_greedy(model, encoded, lengths, **options)
    model.output.weight.neg_()
    after = transducer_greedy(model, encoded, lengths, **options)
    wanted = transducer_greedy(model, encoded, lengths, graphs="off")
    near(after.parts(), wanted.parts())
    assert after.tokens() != before.tokens(), "new weights, old labels"
    model.bfloat16()
    frames = (encoded.bfloat16(), lengths)
    got = transducer_greedy(model, *frames, **options)
    wanted = transducer_greedy(model, *frames, graphs="off")
    near(got.parts(), wanted.parts(), ROUNDED[torch.bfloat16])
    release_graphs(model)


def _autocast(device: str, **options: Any) -> None:
    model = random_transducer((), device, torch.float32)
    device_type = torch.device(device).type
    with torch.autocast(device_type, torch.bfloat16):
        for seed in (3, 4):
            frames = random_frames(8, 48, device, torch.float32, seed)
            got = transducer_greedy(model, *frames, **options)
            wanted = transducer_greedy(model, *frames, graphs="off")
            near(got.parts(), wanted.parts(), ROUNDED[torch.bfloat16])


def _never_waits(device: str, mode: Any, turn: Any) -> None:
    """torch raises at a wait, and the driver counts what Python launches beside the graph."""
    model = random_transducer((0, 1, 2), device, torch.float32)
    encoded, lengths = random_frames(8, 48, device, torch.float32)
    transducer_greedy(model, encoded, lengths, graphs=mode, turn=turn)
    [(loop, run)] = graphs.MODELS[id(model)].loops.values()
    with torch.inference_mode():
        greedy = GreedyModel(model, device=encoded.device)
        carry = greedy.initial_carry(encoded)
        loop.load(encoded, lengths, carry)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loop.turn(greedy)
            if mode == "full":
                run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        loop.load(encoded, lengths, carry)
        seen = launch_profile(run, device=device)
    graphs_run = seen.graph_launches or 0
    wanted = graphs_run
    if mode == "full":
        wanted = 0
    assert seen.launches == wanted, f"{seen.launches} launches beside {graphs_run} of graphs"
    assert (graphs_run <= 1) == (mode == "full"), f"{graphs_run} graphs were launched"
