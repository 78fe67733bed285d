"""Both passes over the logits compiled for the CPU: log-softmax fused with the scores, softmax with
the gradient.

Parallel over frames. Floor: the logits are read twice and the gradient is written once, 3 x 4 B T
U1 V bytes in float32. Sums over tokens and exp are float32; the log-normaliser adds a float64
logarithm. Kernels are compiled on first use and cached beside this file. A process forked after a
call cannot make one: OpenMP ends it (spawn it, or pass impl='wavefront').
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import config, get_num_threads, njit, prange, set_num_threads
from torch import Tensor

from asrkit.losses.gradient import Saved
from asrkit.losses.nodes import (
    FIRST_LOGIT,
    FIRST_NODE,
    FRAME_STEP,
    FRAMES,
    LABEL_STEP,
    LABELS,
    ROW_NODES,
    ArcLogProbs,
    LatticeOptions,
    Nodes,
)
from asrkit.losses.simd import F, exp, flush, kernel, larger, load, store

SUMS = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and infinity keep their meaning
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
ONE_AT_A_TIME = (
    threading.RLock()
)  # Numba's fallback thread pool aborts the process when two threads enter it


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """Where compiled kernels run: one caller at a time, on as many threads as torch uses."""
    with ONE_AT_A_TIME:
        threads, before = torch.get_num_threads(), get_num_threads()
        set_num_threads(max(1, min(threads, config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            set_num_threads(before)
            if (
                torch.get_num_threads() != threads
            ):  # Numba's first launch sets it for the OpenMP that both share
                torch.set_num_threads(threads)


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as a NumPy array; half precision as bit patterns."""
    bits = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
    return tensor.detach().view(bits.get(tensor.dtype, tensor.dtype)).numpy()


def flat(logits: Tensor) -> Tensor:
    """The logits' storage from their first element on, one-dimensional; tokens must lie side by
    side.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(logits.shape, logits.stride(), strict=True)
    )
    return logits.detach().as_strided((extent,), (1,))


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Scores of all nodes, (N,) each, float32."""
    n = len(options.durations)
    z, stay, emit = torch.empty((3, nodes.count), **FLOAT).unbind()
    durations = torch.empty((nodes.count, n), **FLOAT)
    given = (
        array(flat(logits)),
        array(targets.contiguous()),
        nodes.table.numpy(),
        nodes.rows,
        logits.shape[-1] - n,
        options.blank,
    )
    with pool():
        _scores(
            *given,
            options.fused_log_softmax,
            z.numpy(),
            stay.numpy(),
            emit.numpy(),
            durations.numpy(),
        )
    return ArcLogProbs(z, stay, emit, durations if n else None)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`; see asrkit.losses.gradient.LogitRows."""
    tail = (
        saved.log_z.new_empty((len(saved.log_z), 0))
        if saved.duration_gradient is None
        else saved.duration_gradient
    )
    given = (
        array(targets.contiguous()),
        nodes.table.numpy(),
        nodes.of(out).table.numpy(),
        nodes.rows,
        logits.shape[-1] - tail.shape[1],
    )
    parts = [
        part.numpy()
        for part in (
            saved.log_z,
            saved.blank_posterior,
            saved.label_posterior,
            tail,
            incoming.float().contiguous(),
        )
    ]
    clamp, both = (
        F(options.clamp if options.clamp > 0 else np.inf),
        (array(flat(logits)), array(flat(out))),
    )
    with pool():
        _gradient(
            *both,
            *given,
            options.blank,
            options.fused_log_softmax,
            clamp,
            *parts,
            out.data_ptr() == logits.data_ptr(),
        )


@njit
def _largest(x):
    largest = F(-np.inf)
    for v in range(x.shape[0]):
        largest = larger(largest, load(x[v]))
    return largest


@njit(fastmath=SUMS)
def _normaliser(x):
    """log of the sum of exp over a row, in float64; NaN where the row holds one."""
    largest, total = _largest(x), F(0.0)
    for v in range(x.shape[0]):
        total += exp(load(x[v]) - largest)
    return np.float64(largest) + np.log(np.float64(total))


@kernel
def _scores(logits, targets, table, rows, V, blank, fused, z, stay, emit, durations):
    n = durations.shape[1]
    for row in prange(rows.shape[0]):
        b, t = rows[row, 0], rows[row, 1]
        if t < table[b, FRAMES]:
            U = table[b, LABELS]
            for u in range(U + 1):
                start = table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]
                node = table[b, FIRST_NODE] + t * (U + 1) + u
                x = logits[start : start + V]
                here = _normaliser(x) if fused else 0.0
                z[node] = here
                stay[node] = load(x[blank]) - here
                emit[node] = load(x[targets[b, u]]) - here if u < U else -np.inf
                if n:
                    x = logits[start + V : start + V + n]
                    here = _normaliser(x)
                    for i in range(n):
                        durations[node, i] = load(x[i]) - here


@kernel
def _gradient(
    logits,
    out,
    targets,
    table,
    own,
    rows,
    V,
    blank,
    fused,
    clamp,
    z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
    inplace,
):
    n = duration_gradient.shape[1]
    for row in prange(rows.shape[0]):
        b, t = rows[row, 0], rows[row, 1]
        U, scale = table[b, LABELS], incoming[b]
        valid = U + 1 if t < table[b, FRAMES] else 0
        first = own[b, FIRST_LOGIT] + t * own[b, FRAME_STEP]
        for u in range(own[b, ROW_NODES]):
            g = out[first + u * own[b, LABEL_STEP] : first + u * own[b, LABEL_STEP] + V + n]
            if u >= valid:
                for v in range(V + n):
                    g[v] = store(F(0.0), g[v])
                continue
            start = table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]
            node = table[b, FIRST_NODE] + t * (U + 1) + u
            _node(
                logits[start : start + V],
                g,
                z[node],
                blank_posterior[node],
                label_posterior[node],
                blank,
                targets[b, u] if u < U else -1,
                fused,
                clamp,
                scale,
                inplace,
            )
            for i in range(n):
                g[V + i] = store(
                    min(max(duration_gradient[node, i], -clamp), clamp) * scale, g[V + i]
                )


@njit(fastmath=SUMS)
def _node(x, g, z, stay, emit, blank, label, fused, clamp, scale, inplace):
    """Gradient over one node's logits, rounded once: the two entries with a share of their own are
    made apart.
    """
    share = stay + emit if fused else F(0.0)
    at_blank, at_label, factor = -stay, -emit, share * scale
    if fused:
        at_blank += share * exp(load(x[blank]) - z)
        at_label += share * exp(load(x[label]) - z)  # of no use where no label is left
    if share == F(0.0):
        for v in range(x.shape[0]):
            g[v] = store(F(0.0), g[v])
    elif clamp < F(np.inf):
        for v in range(x.shape[0]):
            g[v] = store(flush(min(share * exp(load(x[v]) - z), clamp) * scale), g[v])
    elif inplace:  # the same loop on one array, so that the compiler sees no overlap to fear
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(g[v]) - z)), g[v])
    else:
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(x[v]) - z)), g[v])
    g[blank] = store(flush(min(max(at_blank, -clamp), clamp) * scale), g[blank])
    if label >= 0:
        g[label] = store(flush(min(max(at_label, -clamp), clamp) * scale), g[label])
