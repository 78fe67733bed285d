"""The joint's tiles on a CPU: matrix products by BLAS, everything between them by Numba.

The buffers of a tile hold its hidden layer, its logits, then their gradient in place, and the
hidden layer's gradient. In half precision the products have half-precision inputs and outputs;
sums over a tile or over tokens are float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from asrkit.losses.dropout import kept, node_key, threshold
from asrkit.losses.lattice import FIRST_NODE, LABELS
from asrkit.losses.lean.driver import RELU, TANH, NodeTiles
from asrkit.losses.numba_cpu import SUMS, array, pool
from asrkit.losses.simd import F, exp, flush, kernel, larger, load, store, tanh

# Parts of a tile, divided among threads. Their number is fixed, so that sums do not depend on the
# thread count.
CHUNKS = 16
# Columns of the array of each node's inputs.
ENCODED_ROW = 0  # row of encoded (B T, D)
PREDICTED_ROW = 1  # row of predicted (B U1, D)
LABEL = 2  # next label, -1 if none is left
KEY = 3  # key of dropout's mask
INPUT_COLUMNS = 4


class Tiles(NodeTiles):
    """Tiles on a CPU, in float32 or half precision."""

    bias_rows = CHUNKS  # one sum for each part of a tile

    def __init__(self, *call: Any) -> None:
        super().__init__(*call)
        V, D = self.weight.shape
        rows = min(self.tile, self.nodes.count)
        self.hidden = self.weight.new_empty(rows if V else 0, D)
        self.by_hidden = torch.empty_like(self.hidden)
        self.logits = self.weight.new_empty(rows, V)
        self.inputs = np.empty((rows, INPUT_COLUMNS), dtype=np.int64)
        self.keep = F(1 / (1 - self.dropout))  # scale of the elements that dropout keeps
        self.threshold = np.uint32(threshold(self.dropout))

    def tile_log_probs(self, index: Tensor, out: Sequence[Tensor]) -> None:
        """Write the log-probabilities of the arcs of nodes `index` (n,) into `out`."""
        inputs, _, logits = self._logits(index)
        arrays = [array(column) for column in out]
        with pool():
            _arc_log_probs(
                array(logits), array(self.bias), inputs, self.tokens, self.options.blank, *arrays
            )

    def add_gradients(self, index: Tensor, saved: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Add the contribution of nodes `index` (n,) to the gradients `sums`."""
        inputs, hidden, logits = self._logits(index)
        *by_halves, by_weight, by_bias = sums
        arrays = [array(column) for column in (*saved, by_bias)]
        with pool():
            _logits_gradient(
                array(logits), array(self.bias), inputs, self.tokens, self.options.blank, *arrays
            )
        by_logits = logits  # written in place
        by_hidden = torch.mm(by_logits, self.weight, out=self.by_hidden[: len(index)])
        if self.weight.dtype == torch.float32:
            by_weight.addmm_(by_logits.T, hidden)
        else:
            by_weight.add_(by_logits.T @ hidden)
        self._add_to_halves(inputs, hidden, by_hidden, by_halves)

    def tile_hidden(self, index: Tensor, out: Tensor) -> None:
        """Write the hidden layer of nodes `index` (n,) into `out` (n, D)."""
        inputs = self._locate(index)
        with pool():
            _hidden_layer(
                array(self.encoded),
                array(self.predicted),
                inputs,
                self.activation,
                self.keep,
                self.threshold,
                array(out),
            )

    def add_to_halves(
        self, index: Tensor, hidden: Tensor, by_hidden: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add the contribution of nodes `index` (n,) to the gradients of both halves."""
        self._add_to_halves(self._locate(index), hidden, by_hidden, sums)

    def _add_to_halves(
        self, inputs: np.ndarray, hidden: Tensor, by_hidden: Tensor, sums: Sequence[Tensor]
    ) -> None:
        """Add the contribution of located nodes to the gradients of both halves."""
        with pool():
            _add_to_halves(
                array(hidden),
                array(by_hidden),
                inputs,
                self.activation,
                self.keep,
                self.threshold,
                torch.get_num_threads(),
                *map(array, sums),
            )

    def _logits(self, index: Tensor) -> tuple[np.ndarray, Tensor, Tensor]:
        """Return the inputs of nodes (n,), hidden layer (n, D), and logits without bias (n, V).

        All three are buffers that the next tile overwrites.
        """
        n = len(index)
        hidden = self.hidden[:n]
        self.tile_hidden(index, hidden)
        logits = torch.mm(hidden, self.weight.T, out=self.logits[:n])
        return self.inputs[:n], hidden, logits

    def _locate(self, index: Tensor) -> np.ndarray:
        """Return the inputs of nodes (n,), in a buffer that the next tile overwrites."""
        inputs = self.inputs[: len(index)]
        targets = array(self.targets)
        table = array(self.nodes.table)
        with pool():
            _locate(array(index), table, targets, self.T, self.U1, self.seed, inputs)
        return inputs


@kernel
def _locate(index, table, targets, T, U1, seed, inputs):
    """Write the inputs of every node, in the four columns defined above."""
    for r in prange(len(index)):
        b = np.searchsorted(table[:, FIRST_NODE], index[r], side="right") - 1
        rows = table[b, LABELS] + 1
        place = index[r] - table[b, FIRST_NODE]
        t = place // rows
        u = place % rows
        inputs[r, ENCODED_ROW] = b * T + t
        inputs[r, PREDICTED_ROW] = b * U1 + u
        label = -1
        if u + 1 < rows:
            label = targets[b, u]
        inputs[r, LABEL] = label
        inputs[r, KEY] = node_key(seed, b, t, u)


@kernel
def _hidden_layer(encoded, predicted, inputs, activation, keep, least, hidden):
    """Write activation(encoded + predicted) of every node, with dropout."""
    for r in prange(len(inputs)):
        e = encoded[inputs[r, ENCODED_ROW]]
        p = predicted[inputs[r, PREDICTED_ROW]]
        _activate(e, p, hidden[r], activation, keep)
        if least:
            _drop(hidden[r], np.uint32(inputs[r, KEY]), least)


@njit(fastmath=SUMS)
def _activate(e, p, h, activation, keep):
    """Write activation(e + p) keep into h, all (D,)."""
    if activation == TANH:
        for k in range(h.shape[0]):
            h[k] = store(tanh(load(e[k]) + load(p[k])) * keep, h[k])
    else:
        for k in range(h.shape[0]):
            x = load(e[k]) + load(p[k])
            y = x * keep
            if activation == RELU and x < F(0.0):
                y = F(0.0)
            h[k] = store(y, h[k])


@njit
def _drop(h, key, least):
    """Set the elements of h (D,) that dropout drops to 0."""
    for k in range(h.shape[0]):
        # not an if statement: the loop writes every element, so that it can be vectorised
        h[k] = h[k] if kept(key, k, least) else store(F(0.0), h[k])


@kernel
def _arc_log_probs(logits, bias, inputs, V, blank, log_z, blank_logp, label_logp, duration_logp):
    """Write log-normalisers and log-probabilities of the arcs.

    The logits (n, V + durations) do not include the bias.
    """
    for r in prange(len(inputs)):
        x = logits[r]
        label = inputs[r, LABEL]
        normaliser = _log_normaliser(x[:V], bias[:V])
        log_z[r] = normaliser
        blank_logp[r] = load(x[blank]) + bias[blank] - normaliser
        at_label = -np.inf
        if label >= 0:
            at_label = load(x[label]) + bias[label] - normaliser
        label_logp[r] = at_label
        durations = duration_logp.shape[1]
        if durations:
            normaliser = _log_normaliser(x[V:], bias[V:])
            for i in range(durations):
                duration_logp[r, i] = load(x[V + i]) + bias[V + i] - normaliser


@njit(fastmath=SUMS)
def _log_normaliser(x, bias):
    """Return the log of the sum of exp(x + bias), in float64; NaN if the row contains one."""
    largest = F(-np.inf)
    total = F(0.0)
    for v in range(x.shape[0]):
        largest = larger(largest, load(x[v]) + bias[v])
    for v in range(x.shape[0]):
        total += exp(load(x[v]) + bias[v] - largest)
    return np.float64(largest) + np.log(np.float64(total))


@kernel
def _logits_gradient(
    logits,
    bias,
    inputs,
    V,
    blank,
    log_z,
    blank_posterior,
    label_posterior,
    duration_gradient,
    by_bias,
):
    """Turn logits without bias into the gradient over them, in place.

    The sum over the nodes of each part of the tile is added to its row of by_bias (CHUNKS, V).
    """
    size = -(-len(inputs) // CHUNKS)
    for chunk in prange(CHUNKS):
        sums = by_bias[chunk]
        for r in range(chunk * size, min(len(inputs), (chunk + 1) * size)):
            x = logits[r]
            label = inputs[r, LABEL]
            at_blank = load(x[blank]) + bias[blank] - log_z[r]
            at_label = F(0.0)
            if label >= 0:
                at_label = load(x[label]) + bias[label] - log_z[r]
            posterior = blank_posterior[r] + label_posterior[r]
            _row_gradient(x[:V], bias, sums, log_z[r], posterior)
            x[blank] = store(posterior * exp(at_blank) - blank_posterior[r], x[blank])
            sums[blank] -= blank_posterior[r]
            if label >= 0:
                x[label] = store(posterior * exp(at_label) - label_posterior[r], x[label])
                sums[label] -= label_posterior[r]
            for i in range(duration_gradient.shape[1]):
                x[V + i] = store(duration_gradient[r, i], x[V + i])
                sums[V + i] += duration_gradient[r, i]


@njit(fastmath=SUMS)
def _row_gradient(x, bias, sums, log_z, posterior):
    """Turn logits x (V,) without bias into posterior * softmax, in place, and add it to `sums`."""
    for v in range(x.shape[0]):
        gradient = flush(posterior * exp(load(x[v]) + bias[v] - log_z))
        sums[v] += gradient
        x[v] = store(gradient, x[v])


@kernel
def _add_to_halves(
    hidden, by_hidden, inputs, activation, keep, least, chunks, by_encoded, by_predicted
):
    """Add the hidden layer's gradient, times its slope, to the gradients of both halves.

    Each thread has its own columns, so that no two write to the same place.
    """
    D = hidden.shape[1]
    size = -(-D // chunks)
    for chunk in prange(chunks):
        low = min(D, chunk * size)
        high = min(D, (chunk + 1) * size)
        for r in range(len(inputs)):
            key = np.uint32(inputs[r, KEY])
            e = by_encoded[inputs[r, ENCODED_ROW], low:high]
            p = by_predicted[inputs[r, PREDICTED_ROW], low:high]
            h = hidden[r, low:high]
            g = by_hidden[r, low:high]
            _add_node(h, g, e, p, activation, keep, key, least, low)


@njit(fastmath=SUMS, error_model="numpy")
def _add_node(h, g, e, p, activation, keep, key, least, low):
    """Add g times the slope of h to e and p, at the columns of one node from `low` on."""
    if activation == TANH:
        for k in range(h.shape[0]):
            y = load(h[k]) / keep
            step = load(g[k]) * keep * (F(1.0) - y * y)
            if least and not kept(key, low + k, least):
                step = F(0.0)
            e[k] += step
            p[k] += step
    elif activation == RELU:  # a dropped element is 0, like one that relu set to 0
        for k in range(h.shape[0]):
            step = F(0.0)
            if load(h[k]) > F(0.0):
                step = load(g[k]) * keep
            e[k] += step
            p[k] += step
    else:
        for k in range(h.shape[0]):
            step = load(g[k]) * keep
            if least and not kept(key, low + k, least):
                step = F(0.0)
            e[k] += step
            p[k] += step
