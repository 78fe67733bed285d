"""Notebook 07: turns of a decoder's loop, either one, or several before each read of the flag.

A turn is one iteration of the loop: the joint's step and one call of the predictor.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.graph_loop import LOOPS, GraphLoop
from asrkit.decoders.transducer.steps import (
    GreedyModel,
    GreedyOptions,
    initial_state,
    predictor_step,
)
from asrkit.models import TransducerModel


def one_turn(
    model: TransducerModel, encoded: Tensor, lengths: Tensor, **options: Any
) -> Callable[[], Any]:
    """A function that runs the first turn of a loop.

    Args:
        model: A model in eval mode, on the device of the frames.
        encoded: Encoder frames, (B, T, P).
        lengths: Number of valid frames, (B,).
        options: Fields of `GreedyOptions`, such as strategy="label_looping".
    """
    greedy = GreedyModel(model, device=encoded.device)
    state = initial_state(greedy.initial_carry(encoded))
    own = GreedyOptions(**options)
    batch = (greedy, encoded, lengths, state, own)
    joint_step = LOOPS[own.strategy].joint_step
    return lambda: predictor_step(greedy, *joint_step(*batch))


def blocks_of_turns(
    k: int, model: TransducerModel, encoded: Tensor, lengths: Tensor, **options: Any
) -> tuple[Hypotheses, int]:
    """Decode with `k` turns before each read of the flag.

    Args:
        k: Number of turns in a block.
        model: A model in eval mode.
        encoded: Encoder frames, (B, T, P).
        lengths: Number of valid frames, (B,).
        options: As of `one_turn`.

    Returns:
        The hypotheses, and the number of turns that ran.
    """
    greedy = GreedyModel(model, device=encoded.device)
    carry = greedy.initial_carry(encoded)
    B, T = encoded.shape[:2]
    loop = GraphLoop(B, T, greedy, encoded, carry, GreedyOptions(**options))
    loop.load(encoded, lengths, carry)
    turns = 0

    def block() -> None:
        nonlocal turns
        for _ in range(k):
            loop.turn(greedy)
        turns += k

    loop.repeat(block)
    return loop.hypotheses(lengths, carry, f"{k} turns a block"), turns
