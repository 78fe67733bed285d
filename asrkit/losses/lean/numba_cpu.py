"""The joint's tiles on a CPU: matrix products by BLAS, everything between them fused by Numba.

A tile is made in place four times: hidden layer, logits, their gradient, the hidden layer's
gradient. In half precision the products take and give half, what is summed over a tile or over
tokens is float32.
"""

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from asrkit.losses.dropout import kept, node_key, threshold
from asrkit.losses.lean.driver import Joint, NodeTiles
from asrkit.losses.logit_rows.numba_cpu import FLOAT, SUMS, array, pool
from asrkit.losses.nodes import FIRST_NODE, LABELS, ArcLogProbs, LatticeOptions, Nodes
from asrkit.losses.simd import F, exp, flush, kernel, larger, load, store, tanh

# of nodes that threads share out: fixed, so that sums do not depend on the number of threads
CHUNKS = 16


class Tiles(NodeTiles):
    """asrkit.losses.lean.driver.Tiles."""

    def __init__(
        self,
        encoded: Tensor,
        predicted: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        nodes: Nodes,
        options: LatticeOptions,
        joint: Joint,
    ) -> None:
        (_, self.T, D), self.U1, V = encoded.shape, predicted.shape[1], len(weight)
        self.halves = [array(half.reshape(-1, D).contiguous()) for half in (encoded, predicted)]
        self.weight, self.bias, self.targets = (
            weight.detach(),
            bias.detach().float().numpy(),
            targets.numpy(),
        )
        self.nodes, self.table, self.options, self.joint = (
            nodes,
            nodes.table.numpy(),
            options,
            joint,
        )
        self.tokens = V - len(options.durations)
        rows = min(joint.tile, nodes.count)
        self.hidden, self.logits = weight.new_empty(rows, D), weight.new_empty(rows, V)
        self.where = torch.empty(
            (rows, 4), dtype=torch.int64, device="cpu"
        )  # rows of both halves, next label, dropout key
        self.threshold = np.uint32(threshold(joint.dropout))
        self.shapes = encoded.shape, predicted.shape, weight.shape
        self.sums: tuple[Tensor, ...] = ()

    def score(self, first: int, last: int, scores: ArcLogProbs) -> None:
        """Write the scores of nodes first..last-1 into `scores`."""
        where, _, logits = self._logits(torch.arange(first, last, device="cpu"))
        n = last - first
        durations = (
            scores.log_z.new_empty((n, 0))
            if scores.duration_logp is None
            else scores.duration_logp[first:last]
        )
        parts = [
            part[first:last].numpy()
            for part in (scores.log_z, scores.blank_logp, scores.label_logp)
        ]
        with pool():
            _scores(
                array(logits),
                self.bias,
                where,
                self.tokens,
                self.options.blank,
                *parts,
                durations.numpy(),
            )

    def accumulate(
        self,
        index: Tensor,
        z: Tensor,
        blank_posterior: Tensor,
        label_posterior: Tensor,
        durations: Tensor | None,
    ) -> None:
        """Add what the nodes `index` contribute to the gradients."""
        where, hidden, logits = self._logits(index)
        encoded, predicted, weight, bias, by_hidden = self._sums()
        shares = [part.numpy() for part in (z, blank_posterior, label_posterior)]
        rest = (z.new_empty((len(index), 0)) if durations is None else durations).numpy()
        with pool():
            _gradient(
                array(logits),
                self.bias,
                where,
                self.tokens,
                self.options.blank,
                *shares,
                rest,
                bias.numpy(),
            )
        by_hidden = torch.mm(logits, self.weight, out=by_hidden[: len(index)])
        if self.weight.dtype == torch.float32:
            weight.addmm_(logits.T, hidden)
        else:
            weight.add_(logits.T @ hidden)
        keep = 1 / (1 - self.joint.dropout)
        with pool():
            _scatter(
                array(hidden),
                array(by_hidden),
                where,
                self.joint.activation == "tanh",
                F(keep),
                self.threshold,
                torch.get_num_threads(),
                encoded.numpy(),
                predicted.numpy(),
            )

    def totals(self) -> tuple[Tensor, ...]:
        """Sums by encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,)."""
        encoded, predicted, weight, bias, _ = self._sums()
        return encoded.view(self.shapes[0]), predicted.view(self.shapes[1]), weight, bias.sum(0)

    def _sums(self) -> tuple[Tensor, ...]:
        if not self.sums:
            made = [
                torch.zeros(size, **FLOAT)
                for size in (
                    *[half.shape for half in self.halves],
                    self.weight.shape,
                    (CHUNKS, len(self.weight)),
                )
            ]
            self.sums = (*made, torch.empty_like(self.hidden))
        return self.sums

    def _logits(self, index: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
        """Of nodes (n,): where they are, hidden layer (n, D), logits without bias (n, V), the last
        two in tiles.
        """
        n, keep = len(index), 1 / (1 - self.joint.dropout)
        where, hidden, logits = self.where[:n].numpy(), self.hidden[:n], self.logits[:n]
        with pool():
            _locate(
                index.numpy(), self.table, self.targets, self.T, self.U1, self.joint.seed, where
            )
            _join(
                *self.halves,
                where,
                self.joint.activation == "tanh",
                F(keep),
                self.threshold,
                array(hidden),
            )
        return where, hidden, torch.mm(hidden, self.weight.T, out=logits)


@kernel
def _locate(index, table, targets, T, U1, seed, where):
    """Row of encoded, row of predicted, next label (-1: none left) and dropout key of every node."""
    for r in prange(len(index)):
        b = np.searchsorted(table[:, FIRST_NODE], index[r], side="right") - 1
        width, place = table[b, LABELS] + 1, index[r] - table[b, FIRST_NODE]
        t, u = place // width, place % width
        where[r, 0], where[r, 1] = b * T + t, b * U1 + u
        where[r, 2] = targets[b, u] if u + 1 < width else -1
        where[r, 3] = node_key(seed, b, t, u)


@kernel
def _join(encoded, predicted, where, is_tanh, keep, least, hidden):
    """activation(encoded + predicted) of every node, dropped out."""
    for r in prange(len(where)):
        _activate(encoded[where[r, 0]], predicted[where[r, 1]], hidden[r], is_tanh, keep)
        if least:
            _drop(hidden[r], np.uint32(where[r, 3]), least)


@njit(fastmath=SUMS)
def _activate(e, p, h, is_tanh, keep):
    if is_tanh:
        for k in range(h.shape[0]):
            h[k] = store(tanh(load(e[k]) + load(p[k])) * keep, h[k])
    else:
        for k in range(h.shape[0]):
            x = load(e[k]) + load(p[k])
            h[k] = store(F(0.0) if x < F(0.0) else x * keep, h[k])


@njit
def _drop(h, key, least):
    for k in range(h.shape[0]):
        h[k] = h[k] if kept(key, k, least) else store(F(0.0), h[k])


@kernel
def _scores(logits, bias, where, V, blank, z, stay, emit, durations):
    for r in prange(len(where)):
        x, n, label = logits[r], durations.shape[1], where[r, 2]
        here = _normaliser(x[:V], bias[:V])
        z[r] = here
        stay[r] = load(x[blank]) + bias[blank] - here
        emit[r] = load(x[label]) + bias[label] - here if label >= 0 else -np.inf
        if n:
            here = _normaliser(x[V:], bias[V:])
            for i in range(n):
                durations[r, i] = load(x[V + i]) + bias[V + i] - here


@njit(fastmath=SUMS)
def _normaliser(x, bias):
    """log of the sum of exp(x + bias), in float64; NaN where the row holds one."""
    largest, total = F(-np.inf), F(0.0)
    for v in range(x.shape[0]):
        largest = larger(largest, load(x[v]) + bias[v])
    for v in range(x.shape[0]):
        total += exp(load(x[v]) + bias[v] - largest)
    return np.float64(largest) + np.log(np.float64(total))


@kernel
def _gradient(
    logits, bias, where, V, blank, z, blank_posterior, label_posterior, durations, by_bias
):
    """Logits without bias into the gradient over them, in place; its sum over nodes into one of
    CHUNKS rows of by_bias.
    """
    size = -(-len(where) // CHUNKS)
    for chunk in prange(CHUNKS):
        for r in range(chunk * size, min(len(where), (chunk + 1) * size)):
            x, sums, label = logits[r], by_bias[chunk], where[r, 2]
            at_blank, at_label = load(x[blank]) + bias[blank] - z[r], F(0.0)
            if label >= 0:
                at_label = load(x[label]) + bias[label] - z[r]
            share = blank_posterior[r] + label_posterior[r]
            _row(x[:V], bias, sums, z[r], share)
            x[blank] = store(share * exp(at_blank) - blank_posterior[r], x[blank])
            sums[blank] -= blank_posterior[r]
            if label >= 0:
                x[label] = store(share * exp(at_label) - label_posterior[r], x[label])
                sums[label] -= label_posterior[r]
            for i in range(durations.shape[1]):
                x[V + i] = store(durations[r, i], x[V + i])
                sums[V + i] += durations[r, i]


@njit(fastmath=SUMS)
def _row(x, bias, sums, z, share):
    for v in range(x.shape[0]):
        grad = flush(share * exp(load(x[v]) + bias[v] - z))
        sums[v] += grad
        x[v] = store(grad, x[v])


@kernel
def _scatter(hidden, grad, where, is_tanh, keep, least, chunks, by_encoded, by_predicted):
    """Add the hidden layer's gradient to both halves; threads share out the columns, so no two
    write one place.
    """
    D, size = hidden.shape[1], -(-hidden.shape[1] // chunks)
    for chunk in prange(chunks):
        low, high = min(D, chunk * size), min(D, (chunk + 1) * size)
        for r in range(len(where)):
            key, e, p = (
                np.uint32(where[r, 3]),
                by_encoded[where[r, 0], low:high],
                by_predicted[where[r, 1], low:high],
            )
            _add(hidden[r, low:high], grad[r, low:high], e, p, is_tanh, keep, key, least, low)


@njit(fastmath=SUMS, error_model="numpy")
def _add(h, g, e, p, is_tanh, keep, key, least, low):
    if least and is_tanh:
        for k in range(h.shape[0]):
            y = load(h[k]) / keep
            step = load(g[k]) * keep * (F(1.0) - y * y) if kept(key, low + k, least) else F(0.0)
            e[k] += step
            p[k] += step
    elif is_tanh:
        for k in range(h.shape[0]):
            y = load(h[k])
            step = load(g[k]) * (F(1.0) - y * y)
            e[k] += step
            p[k] += step
    else:  # what was dropped is 0 here, like what relu cut off
        for k in range(h.shape[0]):
            step = load(g[k]) * keep if load(h[k]) > F(0.0) else F(0.0)
            e[k] += step
            p[k] += step
