"""The transducer loss on a GPU: Triton's passes over the logits, and the lattice of RNN-T and TDT.

A program processes one direction of one utterance, anti-diagonal by anti-diagonal, with a barrier
after each. A diagonal longer than a block takes several blocks. Sums are float64 and pass from
diagonal to diagonal through memory, so that an arc may start on any earlier diagonal: d diagonals
back for a blank with a duration of d frames, d + 1 for a label. The terms of a node share one
logarithm. Backward variables are the forward variables of the lattice turned by 180 degrees.
Memory: 16 bytes a node for the sums, 8 for the posteriors, and 4 for each duration.

On an H100 the loss agrees with the reference and is the fastest of the package. On a CPU it runs in
Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from asrkit.devices import to_device
from asrkit.losses.lattice import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes
from asrkit.losses.triton_rows import FUSED, arc_log_probs, gradient, lattice_size

__all__ = ["arc_log_probs", "gradient", "lattice"]

BLOCK = 1024  # terms in a block of a sweep: nodes times durations
POSTERIOR_BLOCK = 256  # terms in a block of the posteriors
MAX_WARPS = 8  # of a program


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and, with `grad`, posteriors of the `arcs`.

    Arcs are float32, sums float64. It reads `durations` and `fastemit_lambda` from `options`.
    """
    device = arcs.blank_logp.device
    n = len(options.durations)
    directions = 2 if grad else 1
    sums = torch.empty((directions, nodes.count), dtype=torch.float64, device=device)
    log_likelihood = torch.empty(len(nodes.table), dtype=torch.float64, device=device)
    T, U1 = nodes.longest
    steps = nodes.on(device)  # unused without durations, but the kernel needs a pointer
    if n:
        clipped = torch.tensor(options.steps(T), device="cpu")[:, 1]
        steps = to_device(clipped.contiguous(), device)
    _, *logps = arcs
    inputs = (*logps, nodes.on(device), steps, sums)
    sizes = {"N": n, "ROOM": triton.next_power_of_2(max(1, n))}
    widest = triton.next_power_of_2(min(T, U1))  # diagonal
    width = min(max(1, BLOCK // sizes["ROOM"]), max(32, widest))
    warps = max(1, min(MAX_WARPS, width * sizes["ROOM"] // 32))
    with torch.cuda.device_of(sums):
        _sweep[len(nodes.table), directions](
            *inputs,
            log_likelihood,
            nodes.count,
            BLOCK=width,
            **sizes,
            num_warps=warps,
            num_stages=1,
            **FUSED,
        )
        if not grad:
            return ArcPosteriors(log_likelihood)
        posteriors = [torch.empty_like(logp) for logp in logps]
        block = max(1, POSTERIOR_BLOCK // sizes["ROOM"])
        _posteriors[triton.cdiv(int(nodes.sizes.max()), block), len(nodes.table)](
            *inputs,
            *posteriors,
            nodes.count,
            1 + options.fastemit_lambda,
            BLOCK=block,
            **sizes,
            **FUSED,
        )
    return ArcPosteriors(log_likelihood, *posteriors)


@triton.jit
def _steps(durations, N: tl.constexpr, ROOM: tl.constexpr):
    """Return the frames of blank arcs and of label arcs, (1, ROOM) each.

    A blank of 0 or -1 frames is no arc, and neither is a label of -1.
    """
    i = tl.arange(0, ROOM)
    if N > 0:
        blank = tl.load(durations + i, mask=i < N, other=-1).to(tl.int32)
        label = blank
    else:
        blank = i + 1
        label = i
    return blank[None, :], label[None, :]


@triton.jit
def _duration(duration_logp, node, here, N: tl.constexpr, ROOM: tl.constexpr):
    """Load the log-probabilities of the durations at `node`, under the mask `here`; 0 for RNN-T."""
    if N > 0:
        i = tl.arange(0, ROOM)[None, :]
        return tl.load(duration_logp + node * N + i, mask=here & (i < N), other=0.0)
    else:
        return 0.0


@triton.jit
def _sweep(
    blank_logp,
    label_logp,
    duration_logp,
    table,
    durations,
    sums,
    log_likelihood,
    count,
    N: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write log beta(t, u) into row 0 of `sums` (2, count), and log alpha(t, u) into row 1."""
    b = tl.program_id(0)
    forward = tl.program_id(1) == 1
    T, U1, first = lattice_size(table, b)
    blank_frames, label_frames = _steps(durations, N, ROOM)
    sums += tl.program_id(1).to(tl.int64) * count
    sign = tl.where(forward, -1, 1)  # towards the nodes that are finished
    start = tl.where(forward, first, first + T * U1 - 1)
    last_row = tl.where(forward, -1, 0)  # of the turned lattice; the other has none
    origin = tl.where(forward, -1, first)
    k = 0
    while k < T + U1 - 1:
        u0 = tl.maximum(0, k - T + 1)
        end = tl.minimum(k + 1, U1)
        while u0 < end:
            u = u0 + tl.arange(0, BLOCK)[:, None]
            t = k - u
            here = u < end
            node = start - sign * (t * U1 + u)
            # the turned lattice has an additional node at (-1, 0), where all paths begin
            ends = (blank_frames == t + 1) & (u == last_row)
            inside = here & (blank_frames > 0) & (blank_frames <= t)
            valid = inside | (here & ends)
            other = node + sign * blank_frames * U1
            arc = tl.where(forward, other, node)
            x = tl.load(sums + other, mask=inside, other=0.0)
            x += tl.load(blank_logp + arc, mask=valid, other=-float("inf"))
            x += _duration(duration_logp, arc, valid, N, ROOM)
            valid = here & (label_frames >= 0) & (label_frames <= t) & (u > 0)
            other = node + sign * (label_frames * U1 + 1)
            arc = tl.where(forward, other, node)
            y = tl.load(sums + other, mask=valid, other=0.0)
            y += tl.load(label_logp + arc, mask=valid, other=-float("inf"))
            y += _duration(duration_logp, arc, valid, N, ROOM)
            largest = tl.maximum(tl.max(x, axis=1), tl.max(y, axis=1))
            largest = tl.where(largest == -float("inf"), 0.0, largest)
            total = tl.sum(tl.exp(x - largest[:, None]), axis=1)
            total += tl.sum(tl.exp(y - largest[:, None]), axis=1)
            total = (largest + tl.log(total))[:, None]
            total = tl.where(forward & (k == 0), 0.0, total)
            tl.store(sums + node, total, mask=here)
            tl.store(log_likelihood + b + 0 * u, total, mask=here & (node == origin))
            u0 += BLOCK
        tl.debug_barrier()  # the next diagonal reads values that other lanes wrote
        k += 1


@triton.jit
def _posteriors(
    blank_logp,
    label_logp,
    duration_logp,
    table,
    durations,
    sums,
    blank_posterior,
    label_posterior,
    duration_posterior,
    count,
    label_factor,
    N: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(1)
    T, U1, first = lattice_size(table, b)
    blank_frames, label_frames = _steps(durations, N, ROOM)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    here = place < T * U1
    t = place // U1
    u = place % U1
    node = first + place
    total = tl.load(sums + first)
    # if an utterance has no path, its posteriors must be 0, not 0 / 0
    total = tl.where(total == -float("inf"), 0.0, total)
    alpha = tl.load(sums + count + node, mask=here, other=0.0) - total
    alpha += _duration(duration_logp, node, here, N, ROOM)

    ends = (t + blank_frames == T) & (u + 1 == U1)
    inside = here & (blank_frames > 0) & (t + blank_frames < T)
    x = tl.load(sums + node + blank_frames * U1, mask=inside, other=0.0)
    x += tl.load(blank_logp + node, mask=here, other=0.0) + alpha
    valid = inside | (here & ends & (blank_frames > 0))
    by_blank = tl.where(valid, tl.exp(x), 0.0)

    valid = here & (label_frames >= 0) & (t + label_frames < T) & (u + 1 < U1)
    x = tl.load(sums + node + label_frames * U1 + 1, mask=valid, other=0.0)
    x += tl.load(label_logp + node, mask=valid, other=0.0) + alpha
    by_label = tl.where(valid, tl.exp(x) * label_factor, 0.0)
    if N > 0:
        i = tl.arange(0, ROOM)[None, :]
        tl.store(duration_posterior + node * N + i, by_blank + by_label, mask=here & (i < N))
    tl.store(blank_posterior + node, tl.sum(by_blank, axis=1)[:, None], mask=here)
    tl.store(label_posterior + node, tl.sum(by_label, axis=1)[:, None], mask=here)
