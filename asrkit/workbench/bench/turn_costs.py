"""What a turn of the decoder's loop costs: on the host, on a GPU at its peak, and in a graph.

A turn is one iteration of windowed looping: one call of the joint and one of the predictor.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions
from asrkit.decoders.transducer.windowed_looping import initial_state, joint_step, predictor_step
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.workbench.cost.cards import Card
from asrkit.workbench.profiling import measure, peak_memory

Span = tuple[float, float]  # start and length, in µs
Lanes = tuple[list[Span], list[Span]]  # the host's and the GPU's
CALLS = 50  # of an op in one sample: a single one is too short for the clock
SHORT = 256  # numbers whose addition takes next to no time


@dataclass(frozen=True, kw_only=True)
class LaunchCosts:
    """Microseconds, measured or assumed.

    Attributes:
        host_us: The host needs to launch a kernel.
        kernel_us: A short kernel takes inside a graph.
        flag_us: From the end of a kernel until the host has read a byte of its result.
        replay_us: The host needs to start a graph.
    """

    host_us: float
    kernel_us: float
    flag_us: float
    replay_us: float


def one_turn(model: TransducerModel, encoded: Tensor, lengths: Tensor) -> Callable[[], Any]:
    """A function that runs the first turn of windowed looping.

    Args:
        model: In eval mode, on the device of the frames.
        encoded: Encoder frames, (B, T, P).
        lengths: (B,).
    """
    greedy = GreedyModel(model, device=encoded.device)
    state = initial_state(greedy.initial_carry(encoded))
    batch = (greedy, encoded, lengths, state, GreedyOptions())
    return lambda: predictor_step(model.predict, *joint_step(*batch))


@torch.inference_mode()
def empty_turn_us(repeats: int = 200) -> float:
    """Microseconds of a turn with next to nothing to compute: the host's part.

    Args:
        repeats: Of the measurement.
    """
    config = TransducerConfig(vocab_size=8, predictor=LSTMConfig(width=8), joint_width=8)
    model = TransducerModel(config).eval()
    turn = one_turn(model, torch.zeros(1, 9, 8), torch.tensor([9]))
    times = measure({"turn": turn}, repeats=repeats, warmup=20, enough_s=1)
    return 1e3 * times["turn"].median_ms


def lanes(launches: int, host_us: float, device_us: float, start_us: float = 0.0) -> Lanes:
    """When the host launches and the GPU works, for kernels that are launched one by one.

    A kernel begins when its launch is done and the kernel before it has ended.

    Args:
        launches: Kernels.
        host_us: Of a launch.
        device_us: Of a kernel.
        start_us: When the host begins.
    """
    launched = [start_us + (place + 1) * host_us for place in range(launches)]
    ends = accumulate(launched, lambda free, at: max(free, at) + device_us, initial=0.0)
    host = [(at - host_us, host_us) for at in launched]
    device = [(end - device_us, device_us) for end in list(ends)[1:]]
    return host, device


def schedules(launches: int, costs: LaunchCosts) -> dict[str, Lanes]:
    """Two turns in three ways: with a wait after each, without one, and in a graph.

    Args:
        launches: Kernels of a turn.
        costs: Of launches, kernels, flags and graphs.
    """
    host, device = costs.host_us, costs.kernel_us
    first = lanes(launches, host, device)
    last_kernel = first[1][-1]
    second = lanes(launches, host, device, sum(last_kernel) + costs.flag_us)
    with_wait = (first[0] + second[0], first[1] + second[1])
    in_graph = [(costs.replay_us + n * device, device) for n in range(2 * launches)]
    return {
        "a wait a turn": with_wait,
        "no wait": lanes(2 * launches, host, device),
        "a graph": ([(0.0, costs.replay_us)], in_graph),
    }


def decode_us(turns: int, launches: int, k: int, costs: LaunchCosts) -> dict[str, float]:
    """Microseconds of a decode in four ways, by arithmetic.

    Args:
        turns: That the decode needs.
        launches: Of a turn.
        k: Turns in a graph.
        costs: Of launches, kernels, flags and graphs.
    """
    host_us = launches * costs.host_us
    device_us = launches * costs.kernel_us
    blocks = math.ceil(turns / k)
    block_us = k * device_us
    one_by_one = turns * (max(host_us, device_us) + 2 * costs.flag_us)
    flag_after = blocks * (costs.replay_us + block_us + costs.flag_us)
    asynchronous = (blocks + 1) * max(costs.replay_us, block_us) + costs.flag_us
    while_node = costs.replay_us + turns * (launches + 1) * costs.kernel_us
    return {
        "one by one": one_by_one,
        "graph of k, flag after": flag_after,
        "graph of k, flag asynchronous": asynchronous,
        "WHILE node": while_node,
    }


def peak_turn_us(B: int, card: Card, *, D: int, V: int) -> float:
    """Least microseconds of a turn at the rates of a card's data sheet, in float32.

    The weights and frames are read and the logits written once. The weights are those of the
    output layer, the LSTM and its projection.

    Args:
        B: Utterances decoded together.
        card: With its rates.
        D: Width of predictor and joint.
        V: Tokens with blank.
    """
    window = GreedyOptions().window  # frames of one joint step
    weights = V * D + 9 * D * D
    moved_B = 4 * (weights + B * window * (D + V))
    flops = 2 * B * (9 * D * D + window * D * V)
    assert card.memory_GB_per_s is not None
    assert card.float32_TFLOP_per_s is not None
    memory_us = moved_B / card.memory_GB_per_s / 1e3
    arithmetic_us = flops / card.float32_TFLOP_per_s / 1e6
    return max(memory_us, arithmetic_us)


def blocks_of_turns(
    k: int, model: TransducerModel, encoded: Tensor, lengths: Tensor
) -> tuple[Hypotheses, int]:
    """Decode with `k` turns before each read of the flag; the result and the turns that ran.

    Args:
        k: Turns of a block.
        model: In eval mode.
        encoded: Encoder frames, (B, T, P).
        lengths: (B,).
    """
    greedy = GreedyModel(model, device=encoded.device)
    carry = greedy.initial_carry(encoded)
    B, T = encoded.shape[:2]
    loop = GraphLoop(B, T, greedy, encoded, carry, GreedyOptions(), folds=False)
    loop.load(greedy, encoded, lengths, carry)
    turns = 0

    def block() -> None:
        nonlocal turns
        for _ in range(k):
            loop.turn(greedy)
        turns += k

    loop.repeat(block)
    return loop.hypotheses(lengths, carry, f"{k} turns a block"), turns


@torch.inference_mode()
def dispatch_us(repeats: int) -> tuple[dict[int, float], dict[str, float]]:
    """Microseconds of an addition by the numbers added, and of other ops on a tensor of (2, 8).

    Args:
        repeats: Of the measurement.
    """
    small = torch.ones(2, 8)
    index = torch.zeros(2, 8, dtype=torch.int64)
    mask = torch.ones(2, 8, dtype=torch.bool)
    additions = {}
    for size in (4**power for power in range(10)):
        one, other, out = torch.ones(3, size).unbind()
        additions[size] = partial(torch.add, one, other, out=out)
    kinds: dict[str, Callable[[], Any]] = {
        "view (no kernel)": partial(small.view, -1),
        "add": partial(torch.add, small, small),
        "masked_fill": partial(small.masked_fill, mask, 0),
        "where": partial(torch.where, mask, small, small),
        "gather": partial(small.gather, 1, index),
        "index": partial(small.__getitem__, (index[:, 0], index[:, 1])),
        "max": partial(small.max, -1),
        "log_softmax": partial(small.log_softmax, -1),
        "linear": partial(torch.nn.functional.linear, small, small),
    }
    return _per_call_us(additions, repeats), _per_call_us(kinds, repeats)


def _per_call_us(ops: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    def again(op: Callable[[], Any]) -> None:
        for _ in range(CALLS):
            op()

    arms = {name: partial(again, op) for name, op in ops.items()}
    times = measure(arms, repeats=repeats, enough_s=1)
    return {name: timing.median_ms * 1e3 / CALLS for name, timing in times.items()}


def overhead_us(by_size: dict[int, float]) -> float:
    """What an addition of a few numbers takes: the third smallest time among the short ones.

    Args:
        by_size: Numbers added -> microseconds.
    """
    short = sorted(us for size, us in by_size.items() if size <= SHORT)
    return short[2]


def bucket_sizes(low: int, most: int, growth: float) -> list[int]:
    """Sizes from `low` to `most`, each `growth` times the one before, at least one more.

    Args:
        low: The smallest size.
        most: The largest.
        growth: Factor from one size to the next.
    """
    sizes = [low]
    while sizes[-1] < most:
        following = max(sizes[-1] + 1, math.ceil(sizes[-1] * growth))
        sizes.append(min(most, following))
    return sizes


def wasted(values: Sequence[int], sizes: Sequence[int]) -> float:
    """Share of the padded total that is padding where each value is rounded up to a size.

    Args:
        values: What is padded.
        sizes: Ascending; the last is at least the largest value.
    """
    rounded_up = [next(size for size in sizes if size >= value) for value in values]
    return 1 - sum(values) / sum(rounded_up)


def buffer_bytes(B: int, T: int, P: int) -> Iterator[tuple[str, int]]:
    """What a GraphLoop keeps for an LSTM of one layer: name and bytes of each part.

    Args:
        B: Utterances.
        T: Encoder frames.
        P: Values of a frame, and width of the predictor.
    """
    clocks = 8 * 4 + 4  # time, symbols, count and length; the score
    labels = B * (T * GreedyOptions().max_symbols + 1)
    yield "frames", 4 * B * T * P
    yield "labels", 3 * 8 * labels
    yield "state", B * (4 * 3 * P + clocks)  # predictor output, hidden and cell


def allocated_bytes(model: TransducerModel, encoded: Tensor, B: int, T: int) -> int:
    """Bytes that torch's allocator gives a GraphLoop that folds no weights.

    Args:
        model: In eval mode.
        encoded: Encoder frames of any batch; their width and dtype count.
        B: Utterances of the loop.
        T: Its frames.
    """
    greedy = GreedyModel(model)
    repeated = encoded[:1].expand(B, -1, -1)
    inputs = (greedy, repeated, greedy.initial_carry(repeated), GreedyOptions())
    loops: list[GraphLoop] = []  # keeps the loop alive until its memory has been read
    return peak_memory(lambda: loops.append(GraphLoop(B, T, *inputs, folds=False)))
