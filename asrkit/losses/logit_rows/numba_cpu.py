"""Both passes over the logits compiled for the CPU, parallel over frames: log-softmax fused with
the arc log-probabilities, softmax fused with the gradient.

Floor: the logits are read twice and the gradient is written once, 3 x 4 B T U1 V bytes in float32.
Sums over tokens and exp are float32; the log-normaliser adds a float64 logarithm. Kernels are
compiled on first use and kept on disk (asrkit.runtime.compiled). A forked process runs them on one
thread, since OpenMP does not survive a fork.
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
from asrkit.runtime import forked, settle_after_fork

SUMS = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and infinity keep their meaning
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
BIT_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# Numba's fallback thread pool aborts the process when two threads enter it
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """Where compiled kernels run: one caller at a time, on as many threads as torch uses.

    A forked process inherits no threads, and perhaps a lock that is held.
    """
    if forked():
        settle_after_fork()  # a backward pass may be the first call there
        yield
        return
    with ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        before = get_num_threads()
        set_num_threads(max(1, min(threads, config.NUMBA_NUM_THREADS)))
        try:
            yield
        finally:
            set_num_threads(before)
            # Numba's first launch sets it for the OpenMP that both share
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as a NumPy array; half precision as bit patterns."""
    return tensor.detach().view(BIT_PATTERNS.get(tensor.dtype, tensor.dtype)).numpy()


def flat(logits: Tensor) -> Tensor:
    """The logits' storage from their first element on, as a vector; needs last stride 1."""
    steps = zip(logits.shape, logits.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)
    return logits.detach().as_strided((extent,), (1,))


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Arc log-probabilities of all `nodes`, (N,) each, from `logits`, `targets` and `options`.

    They are float32.
    """
    n = len(options.durations)
    log_z, blank_logp, label_logp = torch.empty((3, nodes.count), **FLOAT).unbind()
    duration_logp = torch.empty((nodes.count, n), **FLOAT)
    with pool():
        _scores(
            array(flat(logits)),
            array(targets.contiguous()),
            nodes.table.numpy(),
            nodes.rows,
            logits.shape[-1] - n,
            options.blank,
            options.fused_log_softmax,
            log_z.numpy(),
            blank_logp.numpy(),
            label_logp.numpy(),
            duration_logp.numpy(),
        )
    if n == 0:
        return ArcLogProbs(log_z, blank_logp, label_logp)
    return ArcLogProbs(log_z, blank_logp, label_logp, duration_logp)


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over the `logits` into all of `out`.

    Takes logits, out, targets, nodes, options, saved and incoming as
    asrkit.losses.gradient.LogitRows says.
    """
    by_duration = saved.duration_gradient
    if by_duration is None:
        by_duration = saved.log_z.new_empty((len(saved.log_z), 0))
    clamp = np.inf
    if options.clamp > 0:
        clamp = options.clamp
    with pool():
        _gradient(
            array(flat(logits)),
            array(flat(out)),
            array(targets.contiguous()),
            nodes.table.numpy(),
            nodes.strided_like(out).table.numpy(),
            nodes.rows,
            logits.shape[-1] - by_duration.shape[1],
            options.blank,
            options.fused_log_softmax,
            F(clamp),
            saved.log_z.numpy(),
            saved.blank_posterior.numpy(),
            saved.label_posterior.numpy(),
            by_duration.numpy(),
            incoming.float().contiguous().numpy(),
            out.data_ptr() == logits.data_ptr(),
        )


@njit
def _largest(x):
    largest = F(-np.inf)
    for v in range(x.shape[0]):
        largest = larger(largest, load(x[v]))
    return largest


@njit(fastmath=SUMS)
def _log_normaliser(x):
    """log of the sum of exp over a row, in float64; NaN where the row holds one."""
    largest = _largest(x)
    total = F(0.0)
    for v in range(x.shape[0]):
        total += exp(load(x[v]) - largest)
    return np.float64(largest) + np.log(np.float64(total))


@njit(inline="always")
def _first_logit(table, b, t, u):
    """Element of the logits' storage at which node (t, u) of utterance b starts."""
    return table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]


@kernel
def _scores(
    logits,
    targets,
    table,
    rows,
    V,
    blank,
    fused,
    log_z,
    blank_logp,
    label_logp,
    duration_logp,
):
    n = duration_logp.shape[1]
    for row in prange(rows.shape[0]):
        b = rows[row, 0]
        t = rows[row, 1]
        if t < table[b, FRAMES]:
            U = table[b, LABELS]
            for u in range(U + 1):
                start = _first_logit(table, b, t, u)
                node = table[b, FIRST_NODE] + t * (U + 1) + u
                x = logits[start : start + V]
                z = 0.0
                if fused:
                    z = _log_normaliser(x)
                log_z[node] = z
                blank_logp[node] = load(x[blank]) - z
                at_label = -np.inf
                if u < U:
                    at_label = load(x[targets[b, u]]) - z
                label_logp[node] = at_label
                if n:
                    x = logits[start + V : start + V + n]
                    z = _log_normaliser(x)
                    for i in range(n):
                        duration_logp[node, i] = load(x[i]) - z


@kernel
def _gradient(
    logits,
    out,
    targets,
    table,
    out_table,
    rows,
    V,
    blank,
    fused,
    clamp,
    log_z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
    inplace,
):
    n = duration_gradient.shape[1]
    for row in prange(rows.shape[0]):
        b = rows[row, 0]
        t = rows[row, 1]
        U = table[b, LABELS]
        scale = incoming[b]
        valid = 0
        if t < table[b, FRAMES]:
            valid = U + 1
        for u in range(out_table[b, ROW_NODES]):
            first = _first_logit(out_table, b, t, u)
            g = out[first : first + V + n]
            if u >= valid:
                for v in range(V + n):
                    g[v] = store(F(0.0), g[v])
                continue
            start = _first_logit(table, b, t, u)
            node = table[b, FIRST_NODE] + t * (U + 1) + u
            label = -1
            if u < U:
                label = targets[b, u]
            _node_gradient(
                logits[start : start + V],
                g,
                log_z[node],
                blank_posterior[node],
                label_posterior[node],
                blank,
                label,
                fused,
                clamp,
                scale,
                inplace,
            )
            for i in range(n):
                grad = min(max(duration_gradient[node, i], -clamp), clamp)
                g[V + i] = store(grad * scale, g[V + i])


@njit(fastmath=SUMS)
def _node_gradient(
    x, g, log_z, blank_posterior, label_posterior, blank, label, fused, clamp, scale, inplace
):
    """Gradient over one node's logits, rounded once: blank and label are computed apart."""
    posterior = F(0.0)
    at_blank = -blank_posterior
    at_label = -label_posterior
    if fused:
        posterior = blank_posterior + label_posterior
        at_blank += posterior * exp(load(x[blank]) - log_z)
        at_label += posterior * exp(load(x[label]) - log_z)  # unused where no label is left
    factor = posterior * scale
    if posterior == F(0.0):
        for v in range(x.shape[0]):
            g[v] = store(F(0.0), g[v])
    elif clamp < F(np.inf):
        for v in range(x.shape[0]):
            grad = min(posterior * exp(load(x[v]) - log_z), clamp)
            g[v] = store(flush(grad * scale), g[v])
    elif inplace:  # the same loop on one array: the compiler sees that nothing overlaps
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(g[v]) - log_z)), g[v])
    else:
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(x[v]) - log_z)), g[v])
    at_blank = min(max(at_blank, -clamp), clamp)
    g[blank] = store(flush(at_blank * scale), g[blank])
    if label >= 0:
        at_label = min(max(at_label, -clamp), clamp)
        g[label] = store(flush(at_label * scale), g[label])
