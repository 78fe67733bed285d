"""LAMB in three passes over memory, compiled for the CPU: float32, contiguous tensors.

Floor: of N weights the passes move

    squared_norms  4 N bytes  read g
    moments       24 N bytes  read g, m, v, p, write m, v
    move          16 N bytes  read m, v, p, write p; it computes the updates again: as many bytes
                              as storing and reading them, without memory for them

44 N bytes in all, where a fused AdamW moves 28 N. The update and its norm stay in registers.

Norms are summed in float32 over BLOCK elements and in float64 over blocks. Blocks are the same for
every number of threads, so what is computed is too. Threads: as many as torch computes with.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from asrkit.optim.step import Coefficients, Tensors
from asrkit.runtime import compiled, eager

F = np.float32
BLOCK = 4096  # elements, whose sum is in float32
SLICE = 64 * BLOCK  # elements that a thread takes at a time
# Sums may be reordered, for vector code; NaN and infinity stay what they are.
FAST = {"reassoc", "contract", "nsz"}
kernel = partial(compiled, fastmath=FAST, error_model="numpy")
block = njit(fastmath=FAST, error_model="numpy", nogil=True)


class Slice(NamedTuple):
    """Elements `start` to `stop` of a tensor, given by its index."""

    tensor: int
    start: int
    stop: int


@eager
def squared_norms(tensors: list[Tensor]) -> Tensor:
    """||x||^2 of each tensor, (N,).

    Args:
        tensors: of any shapes, at least one.
    """
    arrays = _arrays([tensor.contiguous() for tensor in tensors])

    def work(part: Slice) -> float:
        return _squared_norm(arrays[part.tensor], part.start, part.stop)

    return _sums(arrays, work, 1)[0]


@eager
def moments(tensors: Tensors, coefficients: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """Update both moving averages where the step applies.

    Args:
        tensors: of a parameter group.
        coefficients: of this step.

    Returns:
        (squares, updates): ||p||^2 and ||u||^2 of each tensor, (2, N), 1 where the step does not
        apply; and no updates, for `move` computes them again.
    """
    weights = _arrays(tensors.weights)
    gradients = _arrays([gradient.contiguous() for gradient in tensors.gradients])
    exp_avgs = _arrays(tensors.exp_avgs)
    exp_avg_sqs = _arrays(tensors.exp_avg_sqs)
    applies = coefficients.applies.tolist()
    numbers = _numbers(coefficients)
    scale = F(coefficients.scale.item())
    beta1, beta2 = map(F, coefficients.betas)
    rest1 = F(1 - coefficients.betas[0])
    rest2 = F(1 - coefficients.betas[1])

    def work(part: Slice) -> tuple[float, float]:
        if not applies[part.tensor]:
            return (1.0, 1.0)
        return _moments(
            weights[part.tensor],
            gradients[part.tensor],
            exp_avgs[part.tensor],
            exp_avg_sqs[part.tensor],
            part.start,
            part.stop,
            scale,
            beta1,
            rest1,
            beta2,
            rest2,
            *numbers[part.tensor],
        )

    return _sums(weights, work, 2), []


@eager
def move(
    tensors: Tensors, coefficients: Coefficients, rates: Tensor, updates: list[Tensor]
) -> None:
    """p <- p - rate u where the step applies.

    Args:
        tensors: of a parameter group.
        coefficients: of this step.
        rates: (N,) learning rate times ratio, for each tensor.
        updates: not used.
    """
    weights = _arrays(tensors.weights)
    exp_avgs = _arrays(tensors.exp_avgs)
    exp_avg_sqs = _arrays(tensors.exp_avg_sqs)
    applies = coefficients.applies.tolist()
    numbers = _numbers(coefficients)
    rate = [F(value) for value in rates.tolist()]

    def work(part: Slice) -> None:
        if applies[part.tensor]:
            _move(
                weights[part.tensor],
                exp_avgs[part.tensor],
                exp_avg_sqs[part.tensor],
                part.start,
                part.stop,
                rate[part.tensor],
                *numbers[part.tensor],
            )

    _run(work, _slices(weights))
    torch.autograd.graph.increment_version(tensors.weights)


def _arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The memory of each contiguous tensor as a vector."""
    return [tensor.detach().view(-1).numpy() for tensor in tensors]


def _numbers(coefficients: Coefficients) -> list[tuple[np.float32, ...]]:
    """What turns the averages of each tensor into its update.

    They are 1 / (1 - beta1^t), 1 / (1 - beta2^t), eps and weight decay.
    """
    correction1, correction2 = coefficients.corrections
    eps = F(coefficients.eps)
    weight_decay = F(coefficients.weight_decay)
    numbers: list[tuple[np.float32, ...]] = []
    for first, second in zip(correction1.tolist(), correction2.tolist(), strict=True):
        # a parameter that was never updated has corrections of 0, and does not read them
        numbers.append((F(1 / (first or 1)), F(1 / (second or 1)), eps, weight_decay))
    return numbers


def _slices(arrays: Sequence[np.ndarray]) -> list[Slice]:
    """The elements of all arrays, in slices of at most SLICE."""
    slices = []
    for index, array in enumerate(arrays):
        for start in range(0, array.size, SLICE):
            stop = min(start + SLICE, array.size)
            slices.append(Slice(tensor=index, start=start, stop=stop))
    return slices


def _sums(arrays: Sequence[np.ndarray], work: Callable[[Slice], object], rows: int) -> Tensor:
    """What `work` returns of each slice, `rows` numbers, added up for each array: (rows, N)."""
    slices = _slices(arrays)
    indices = [part.tensor for part in slices]
    values = np.array(_run(work, slices), dtype=np.float64).reshape(len(slices), rows)
    sums = np.zeros((rows, len(arrays)))
    for row in range(rows):
        np.add.at(sums[row], indices, values[:, row])
    return torch.from_numpy(sums).float()


def _run(work: Callable[[Slice], object], slices: list[Slice]) -> list[object]:
    """What `work` returns of each slice.

    The threads end with the call: a process forked later would not have them.
    """
    threads = min(torch.get_num_threads(), len(slices))
    if threads <= 1:
        return [work(part) for part in slices]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, slices))


@block
def _block_square(x):
    """Sum of squares of a block, in float32."""
    total = F(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@kernel
def _squared_norm(x, start, stop):
    """Sum of squares of x[start:stop], in float64 over blocks."""
    total = 0.0
    for first in range(start, stop, BLOCK):
        total += _block_square(x[first : min(first + BLOCK, stop)])
    return total


@block
def _block_moments(
    p, g, m, v, scale, beta1, rest1, beta2, rest2, correction1, correction2, eps, weight_decay
):
    """Update m and v of a block; its sums of squares of p and u, in float32."""
    weight_square = F(0)
    update_square = F(0)
    for i in range(p.size):
        gradient = g[i] * scale
        m[i] = beta1 * m[i] + rest1 * gradient
        v[i] = beta2 * v[i] + rest2 * (gradient * gradient)
        adam = (m[i] * correction1) / (np.sqrt(v[i] * correction2) + eps)
        update = adam + weight_decay * p[i]
        weight_square += p[i] * p[i]
        update_square += update * update
    return weight_square, update_square


@kernel
def _moments(
    p,
    g,
    m,
    v,
    start,
    stop,
    scale,
    beta1,
    rest1,
    beta2,
    rest2,
    correction1,
    correction2,
    eps,
    weight_decay,
):
    """Update m and v from start to stop; sums of squares of p and u, in float64 over blocks."""
    weight_square = 0.0
    update_square = 0.0
    for first in range(start, stop, BLOCK):
        last = min(first + BLOCK, stop)
        squares = _block_moments(
            p[first:last],
            g[first:last],
            m[first:last],
            v[first:last],
            scale,
            beta1,
            rest1,
            beta2,
            rest2,
            correction1,
            correction2,
            eps,
            weight_decay,
        )
        weight_square += squares[0]
        update_square += squares[1]
    return weight_square, update_square


@block
def _block_move(p, m, v, rate, correction1, correction2, eps, weight_decay):
    """p <- p - rate u of a block."""
    for i in range(p.size):
        adam = (m[i] * correction1) / (np.sqrt(v[i] * correction2) + eps)
        p[i] -= rate * (adam + weight_decay * p[i])


@kernel
def _move(p, m, v, start, stop, rate, correction1, correction2, eps, weight_decay):
    """p <- p - rate u from start to stop."""
    _block_move(
        p[start:stop],
        m[start:stop],
        v[start:stop],
        rate,
        correction1,
        correction2,
        eps,
        weight_decay,
    )
