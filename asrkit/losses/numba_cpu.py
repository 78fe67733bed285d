"""The losses compiled for the CPU by Numba.

The passes over the logits are parallel over frames. The lattice is parallel over utterances. The
log-softmax is fused with the arc log-probabilities, and the softmax with the gradient. Floor: the
logits are read twice and the gradient is written once, 3 x 4 B T U1 V bytes in float32. Sums over
tokens and exp are float32; the log-normaliser adds a float64 logarithm. Sums over paths are
float64, 8 bytes a node. The utterances that threads are working on need the same again.

Kernels are compiled on first use and cached on disk (asrkit.compilers.compiled). A forked process
runs them on one thread, because OpenMP does not survive a fork.
"""

import contextlib
import math
import threading
from collections.abc import Iterator
from math import inf, log1p
from typing import Any

import numpy as np
import torch
from numba import config, get_num_threads, njit, prange, set_num_threads
from torch import Tensor

from asrkit.losses.lattice import (
    FIRST_LOGIT,
    FIRST_NODE,
    FRAME_STEP,
    FRAMES,
    LABEL_STEP,
    LABELS,
    PADDED_ROWS,
    ArcLogProbs,
    ArcPosteriors,
    LatticeOptions,
    Nodes,
    Saved,
)
from asrkit.losses.simd import F, exp, flush, kernel, larger, load, store
from asrkit.threads import forked, single_thread_after_fork

SUMS = {"reassoc", "contract", "nsz"}  # sums may be reordered; NaN and infinity keep their meaning
BIT_PATTERNS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# Numba's fallback thread pool aborts the process when two threads enter it
ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def pool() -> Iterator[None]:
    """Context in which compiled kernels run: one caller at a time, with torch's number of threads.

    A forked process inherits no threads, and it may inherit a locked lock, so it takes neither.
    """
    if forked():
        single_thread_after_fork()  # a backward pass may be the first call in this process
        yield
        return
    with ONE_AT_A_TIME:
        threads = torch.get_num_threads()
        before = get_num_threads()
        set_num_threads(min(threads, config.NUMBA_NUM_THREADS))
        try:
            yield
        finally:
            set_num_threads(before)
            # Numba's first launch changes the thread count of OpenMP, which torch shares
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def array(tensor: Tensor) -> np.ndarray:
    """View the tensor's memory as a NumPy array; half precision becomes bit patterns."""
    return tensor.detach().view(BIT_PATTERNS.get(tensor.dtype, tensor.dtype)).numpy()


def arc_log_probs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> ArcLogProbs:
    """Return the arc log-probabilities of all `nodes`, float32, (N,) each."""
    arcs = ArcLogProbs.empty(logits, nodes, len(options.durations))
    with pool():
        _scores(*_pass_inputs(logits, targets, nodes, options), *map(array, arcs))
    return arcs


def gradient(
    logits: Tensor,
    out: Tensor,
    targets: Tensor,
    nodes: Nodes,
    options: LatticeOptions,
    saved: Saved,
    incoming: Tensor,
) -> None:
    """Write the gradient over all of `out`; see `asrkit.losses.wavefront.gradient`."""
    with pool():
        _gradient(
            *_pass_inputs(logits, targets, nodes, options),
            array(out.view(-1)),
            *map(array, saved),
            incoming.float().contiguous().numpy(),
            options.overwrite_logits,
        )


def _pass_inputs(
    logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions
) -> tuple[Any, ...]:
    """Return the arguments that both passes over the logits share."""
    return (
        array(logits.view(-1)),
        targets.contiguous().numpy(),
        nodes.table.numpy(),
        nodes.frames,
        logits.shape[-1] - len(options.durations),
        options.blank,
        options.fused_log_softmax,
    )


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Return log-likelihoods and, with `grad`, posteriors of the `arcs`.

    Arcs are float32, sums float64. It reads `durations` and `fastemit_lambda` from `options`.
    """
    _, *logps = arcs
    inputs = (
        *map(array, logps),
        np.array(options.steps(nodes.longest[0])),
        nodes.table.numpy(),
    )
    beta = np.empty(nodes.count)
    log_likelihood = torch.empty(len(nodes.table), dtype=torch.float64, device="cpu")
    with pool():
        _backward_variables(*inputs, beta, log_likelihood.numpy())
        if not grad:
            return ArcPosteriors(log_likelihood)
        posteriors = [torch.zeros_like(logp) for logp in logps]
        _posteriors(*inputs, beta, *map(array, posteriors), 1 + options.fastemit_lambda)
    return ArcPosteriors(log_likelihood, *posteriors)


@njit
def _largest(x):
    largest = F(-np.inf)
    for v in range(x.shape[0]):
        largest = larger(largest, load(x[v]))
    return largest


@njit(fastmath=SUMS)
def _log_normaliser(x):
    """Return the log of the sum of exp over a row, in float64; NaN if the row contains one."""
    largest = _largest(x)
    total = F(0.0)
    for v in range(x.shape[0]):
        total += exp(load(x[v]) - largest)
    return np.float64(largest) + np.log(np.float64(total))


@njit(inline="always")
def _first_logit(table, b, t, u):
    """Return the element of the logits' storage at which node (t, u) of utterance b starts."""
    return table[b, FIRST_LOGIT] + t * table[b, FRAME_STEP] + u * table[b, LABEL_STEP]


@kernel
def _scores(
    logits,
    targets,
    table,
    frames,
    V,
    blank,
    fused,
    log_z,
    blank_logp,
    label_logp,
    duration_logp,
):
    n = duration_logp.shape[1]
    for place in prange(frames.shape[0]):
        b = frames[place, 0]
        t = frames[place, 1]
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
    targets,
    table,
    frames,
    V,
    blank,
    fused,
    out,
    log_z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    incoming,
    inplace,
):
    n = duration_gradient.shape[1]
    for place in prange(frames.shape[0]):
        b = frames[place, 0]
        t = frames[place, 1]
        U = table[b, LABELS]
        scale = incoming[b]
        valid = 0
        if t < table[b, FRAMES]:
            valid = U + 1
        for u in range(table[b, PADDED_ROWS]):
            start = _first_logit(table, b, t, u)
            g = out[start : start + V + n]
            if u >= valid:
                for v in range(V + n):
                    g[v] = store(F(0.0), g[v])
                continue
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
                scale,
                inplace,
            )
            for i in range(n):
                g[V + i] = store(duration_gradient[node, i] * scale, g[V + i])


@njit(fastmath=SUMS)
def _node_gradient(
    x, g, log_z, blank_posterior, label_posterior, blank, label, fused, scale, inplace
):
    """Write the gradient over one node's logits, rounded once.

    The elements of blank and label are computed separately and overwrite those of the softmax.
    """
    posterior = F(0.0)
    at_blank = -blank_posterior
    at_label = -label_posterior
    if fused:
        posterior = blank_posterior + label_posterior
        at_blank += posterior * exp(load(x[blank]) - log_z)
        at_label += posterior * exp(load(x[label]) - log_z)  # unused if no label is left
    factor = posterior * scale
    if posterior == F(0.0):
        for v in range(x.shape[0]):
            g[v] = store(F(0.0), g[v])
    elif inplace:  # on a single array the compiler knows that nothing overlaps
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(g[v]) - log_z)), g[v])
    else:
        for v in range(x.shape[0]):
            g[v] = store(flush(factor * exp(load(x[v]) - log_z)), g[v])
    g[blank] = store(flush(at_blank * scale), g[blank])
    if label >= 0:
        g[label] = store(flush(at_label * scale), g[label])


@njit(inline="always")
def log_add(a, b):
    """log(exp(a) + exp(b)), for terms that exp() would flush to zero."""
    high = a
    low = b
    if a < b:
        high = b
        low = a
    if low != -inf:
        high += log1p(math.exp(low - high))
    return high


@njit(inline="always")
def _next_betas(beta, node, t, u, blank_frames, label_frames, T, U):
    """Return log beta at the ends of the node's blank and label arcs; -inf if there is no arc."""
    blank = -inf
    label = -inf
    if blank_frames == T - t and u == U:
        blank = 0.0
    elif 0 < blank_frames < T - t:
        blank = beta[node + blank_frames * (U + 1)]
    if label_frames < T - t and u < U:
        label = beta[node + label_frames * (U + 1) + 1]
    return blank, label


@kernel
def _backward_variables(blank_logp, label_logp, duration_logp, steps, table, beta, log_likelihood):
    """Write log beta(t, u), the probability of all paths from (t, u) to the end."""
    n = duration_logp.shape[1]
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        for t in range(T - 1, -1, -1):
            for u in range(U, -1, -1):
                node = first + t * (U + 1) + u
                total = -inf
                for i in range(steps.shape[0]):
                    blank, label = _next_betas(beta, node, t, u, steps[i, 0], steps[i, 1], T, U)
                    by_arc = log_add(blank_logp[node] + blank, label_logp[node] + label)
                    if n:
                        by_arc += duration_logp[node, i]
                    total = log_add(total, by_arc)
                beta[node] = total
        log_likelihood[b] = beta[first]


@kernel
def _posteriors(
    blank_logp,
    label_logp,
    duration_logp,
    steps,
    table,
    beta,
    blank_posterior,
    label_posterior,
    duration_posterior,
    label_factor,
):
    """Write the posteriors of the arcs, without forward variables.

    A node distributes its own posterior, which is 1 at the first node, over its arcs. The arc to
    node (t', u') gets the share arc beta(t', u') / beta(t, u) and adds it to that node's posterior.
    """
    n = duration_logp.shape[1]
    for b in prange(table.shape[0]):
        T = table[b, FRAMES]
        U = table[b, LABELS]
        first = table[b, FIRST_NODE]
        node_posterior = np.zeros(T * (U + 1))
        node_posterior[0] = 0.0 if beta[first] == -inf else 1.0
        for t in range(T):
            for u in range(U + 1):
                place = t * (U + 1) + u
                node = first + place
                here = node_posterior[place]
                if here == 0.0:
                    continue
                for i in range(steps.shape[0]):
                    blank_frames = steps[i, 0]
                    label_frames = steps[i, 1]
                    blank, label = _next_betas(beta, node, t, u, blank_frames, label_frames, T, U)
                    rest = -beta[node]
                    if n:
                        rest += duration_logp[node, i]
                    by_blank = here * math.exp(blank_logp[node] + rest + blank)
                    by_label = here * math.exp(label_logp[node] + rest + label)
                    if blank_frames < T - t:
                        node_posterior[place + blank_frames * (U + 1)] += by_blank
                    if label_frames < T - t and u < U:
                        node_posterior[place + label_frames * (U + 1) + 1] += by_label
                    by_label *= label_factor
                    blank_posterior[node] += by_blank
                    label_posterior[node] += by_label
                    if n:
                        duration_posterior[node, i] += by_blank + by_label
