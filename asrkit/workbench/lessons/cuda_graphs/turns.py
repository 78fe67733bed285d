"""Turns of the decoder's loop: one alone, several before each read of the flag, and their buffers.

A turn is one iteration of windowed looping: one call of the joint and one of the predictor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.steps import GreedyModel, GreedyOptions
from asrkit.decoders.transducer.windowed_looping import initial_state, joint_step, predictor_step
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel
from asrkit.workbench.measure import measure, peak_memory


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
