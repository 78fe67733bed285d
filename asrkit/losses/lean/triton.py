"""The joint's tiles on CUDA: matrix products by cuBLAS, everything between them fused by Triton.

A program takes a node: its hidden row, its row of logits. Written for a GPU and so far run in Triton's interpreter only
(TRITON_INTERPRET=1 before Python starts), which shows what the kernels compute and nothing about their speed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from asrkit.losses import dropout
from asrkit.losses.lean import plain
from asrkit.losses.nodes import Scores


class Tiles(plain.Tiles):
    """asrkit.losses.lean.driver.Tiles: the plain ones with fused rows."""

    def scores(self, first: int, last: int, scores: Scores) -> None:
        """Write the scores of nodes first..last-1 into `scores`."""
        where = self.locate(torch.arange(first, last, device=self.weight.device))
        logits, to = self._fused_hidden(where) @ self.weight.T, slice(first, last)
        outs = scores.z[to], scores.stay[to], scores.emit[to]
        _scores[(last - first,)](logits, self.bias, where.label, *outs, self.options.blank, *self._sizes(logits))
        if scores.durations is not None:
            scores.durations[to] = (logits[:, self.tokens :].to(self.dtype) + self.bias[self.tokens :]).log_softmax(-1)

    def accumulate(self, index: Tensor, z: Tensor, by_blank: Tensor, by_label: Tensor, durations: Tensor | None) -> None:
        """Add what the nodes `index` contribute to the gradients."""
        where = self.locate(index)
        hidden = self._fused_hidden(where)
        grad, (by_encoded, by_predicted, by_weight, by_bias) = hidden @ self.weight.T, self.totals()
        shares = z, by_blank.contiguous(), by_label.contiguous()
        _gradient[(len(index),)](grad, self.bias, where.label, *shares, self.options.blank, *self._sizes(grad))
        if durations is not None:
            grad[:, self.tokens :] = durations
        by_hidden = torch.empty(hidden.shape, dtype=self.dtype, device=hidden.device)
        _slope[(len(index),)](grad @ self.weight, hidden, where.keys, by_hidden, *self._activation())
        by_encoded.view(-1, self.D).index_add_(0, where.encoded, by_hidden)
        by_predicted.view(-1, self.D).index_add_(0, where.predicted, by_hidden)
        by_weight += grad.T @ hidden
        by_bias += grad.sum(0, dtype=self.dtype)

    def _fused_hidden(self, where: plain.Where) -> Tensor:
        hidden = torch.empty(len(where.label), self.D, dtype=self.weight.dtype, device=self.weight.device)
        _join[(len(hidden),)](*self.halves, where.encoded, where.predicted, where.keys, hidden, *self._activation())
        return hidden

    def _activation(self) -> tuple[float, int, bool, bool, int, int]:
        """keep, least, is_tanh, drops, D, BLOCK of the kernels."""
        p = self.joint.dropout
        return 1 / (1 - p), dropout.threshold(p), self.joint.activation == "tanh", p > 0, self.D, triton.next_power_of_2(self.D)

    def _sizes(self, logits: Tensor) -> tuple[int, int, int]:
        """Row stride, V, BLOCK of the kernels."""
        return logits.stride(0), self.tokens, triton.next_power_of_2(self.tokens)


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(keys, row, k, least):
    key = tl.load(keys + row).to(tl.uint32)
    return _hash32(key ^ (k.to(tl.uint32) * 0x9E3779B9)) >= least.to(tl.uint32)


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x >= 0, 1.0, -1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _join(encoded, predicted, encoded_row, predicted_row, keys, hidden, keep, least, is_tanh: tl.constexpr, drops: tl.constexpr,
          D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = k < D
    x = tl.load(encoded + tl.load(encoded_row + row) * D + k, mask=here, other=0.0).to(tl.float32)
    x += tl.load(predicted + tl.load(predicted_row + row) * D + k, mask=here, other=0.0).to(tl.float32)
    y = _tanh(x) if is_tanh else tl.where(x < 0, 0.0, x)  # NaN passes
    if drops:
        y = tl.where(_kept(keys, row, k, least), y * keep, 0.0)
    tl.store(hidden + row * D + k, y, mask=here)


@triton.jit
def _slope(grad, hidden, keys, out, keep, least, is_tanh: tl.constexpr, drops: tl.constexpr, D: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = k < D
    g = tl.load(grad + row * D + k, mask=here, other=0.0).to(tl.float32)
    y = tl.load(hidden + row * D + k, mask=here, other=0.0).to(tl.float32) / keep
    g = g * keep * (1.0 - y * y) if is_tanh else tl.where(y > 0, g * keep, 0.0)
    if drops:
        g = tl.where(_kept(keys, row, k, least), g, 0.0)
    tl.store(out + row * D + k, g, mask=here)


@triton.jit
def _row(logits, bias, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Place of this program's logits, which of them are tokens, and these with their bias in float32."""
    row, v = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    place = logits + row * stride + v
    x = tl.load(place, mask=v < V, other=-float("inf")).to(tl.float32) + tl.load(bias + v, mask=v < V, other=0.0).to(tl.float32)
    return row, v, place, x


@triton.jit
def _scores(logits, bias, labels, z, stay, emit, blank, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    row, v, place, x = _row(logits, bias, stride, V, BLOCK)
    largest, label = tl.max(x, axis=0), tl.load(labels + row)
    here = largest + tl.log(tl.sum(tl.exp(x - largest), axis=0))
    tl.store(z + row, here)
    tl.store(stay + row, tl.sum(tl.where(v == blank, x, 0.0), axis=0) - here)
    at_label = tl.sum(tl.where(v == label, x, 0.0), axis=0) - here
    tl.store(emit + row, tl.where(label >= 0, at_label, -float("inf")))


@triton.jit
def _gradient(logits, bias, labels, z, by_blank, by_label, blank, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Logits without bias into the gradient over them, in place."""
    row, v, place, x = _row(logits, bias, stride, V, BLOCK)
    stay, emit, label = tl.load(by_blank + row), tl.load(by_label + row), tl.load(labels + row)
    grad = (stay + emit) * tl.exp(x - tl.load(z + row))
    grad -= tl.where(v == blank, stay, 0.0) + tl.where(v == label, emit, 0.0)
    tl.store(place, grad, mask=v < V)
