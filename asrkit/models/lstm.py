"""A recurrent encoder: LSTMs, neighbouring frames stacked, LSTMs again.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out. The
form is that of MLPerf's RNN-T benchmark (github.com/mlcommons/training, rnn_speech_recognition).

A padded batch computes its padding as well. In phases it computes less of it: the utterances are
sorted, all of them run to the end of the first phase, the longer ones continue from their saved
states to the end of the second, and so on. The results of each utterance stay the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import readable, to_device
from asrkit.models.common import Encoded, dtype_of, expect_batch, expect_sizes, strided
from asrkit.shapes import expect, valid_mask, whole

INITIAL_SCALE = 0.5  # of all initial weights and biases, also the forget gate's bias of 1

Lengths = Tensor | np.ndarray | Sequence[int]
States = tuple[Tensor, Tensor] | None  # hidden and cell, (layers, B, D) each; None at the start
Phases = list[tuple[int, int]]  # the end of each phase, and how many of the longest rows it runs


@dataclass(frozen=True, kw_only=True)
class LSTMEncoderConfig:
    """Sizes of an `LSTMEncoder`; the defaults are those of MLPerf's RNN-T benchmark.

    Args:
        bins: Mel bins of the features, F.
        stack_input: Frames of features that are stacked before the first LSTM.
        width: Width of every LSTM layer and of the encoded frames, D.
        before: LSTM layers before the second stacking.
        stack: Frames that are stacked between the LSTMs.
        after: LSTM layers after it.
        dropout: Share dropped after every LSTM layer, in training.
        phases: Most phases of a batch; 1 runs it whole. Only the computed padding depends on it,
            not the results.
    """

    bins: int = 80
    stack_input: int = 3
    width: int = 1024
    before: int = 2
    stack: int = 2
    after: int = 3
    dropout: float = 0.1
    phases: int = 8

    def __post_init__(self) -> None:
        expect_sizes(self, "bins stack_input width before stack after phases")

    @property
    def subsampling(self) -> int:
        """Frames of features for one encoded frame."""
        return self.stack_input * self.stack

    @property
    def layers(self) -> int:
        """All LSTM layers."""
        return self.before + self.after


def phases(lengths: Lengths, count: int, *, stack: int = 2) -> Phases:
    """The phases that compute the fewest frames: (end, rows) of each, ends in frames.

    Phase k runs the `rows` longest utterances from the end of phase k - 1 to its own `end`. Ends
    are multiples of `stack`, so that no stacked frame is in two phases. There are `count` phases,
    or one for each rounded length if those are fewer.

    Args:
        lengths: Frames of each utterance (B,), in any order, on the host.
        count: Most phases, from 1 to the stacked frames of the longest utterance.
        stack: Frames that are stacked after the first LSTMs.

    Raises:
        ValueError: A length is below 1, or there are more phases than stacked frames.

    >>> phases([10, 9, 4, 3], 2)
    [(4, 4), (10, 2)]
    """
    frames = np.asarray(lengths)
    least = int(frames.min())
    expect(least >= 1, "lengths", "at least one frame each", least)
    stacked = strided(frames, stack)
    most = int(stacked.max())
    expect(
        whole(count, 1, most),
        "count",
        f"a whole number from 1 to {most}, the stacked frames of the longest utterance",
        repr(count),
    )
    return [(int(end), rows) for end, rows in fewest_cells(stacked * stack, count)]


def fewest_cells(lengths: np.ndarray, count: int) -> list[tuple[float, int]]:
    """(end, rows) of the `count` phases with the smallest sum of cells, rows times duration.

    A dynamic programme over the distinct lengths: the best k phases up to an end are the best k - 1
    up to some earlier end, and one more. It takes O(count B²) time.

    Args:
        lengths: Length of each utterance (B,), above 0, in any unit.
        count: Number of phases, at least 1. There are fewer if there are fewer distinct lengths.
    """
    ends, utterances = np.unique(lengths, return_counts=True)
    starts = np.concatenate([[0], ends[:-1]])
    longer = len(lengths) - np.cumsum(utterances) + utterances  # utterances that outlast a start
    # cells[i, j]: one phase from starts[i] to ends[j] runs all that outlast its start
    cells = (ends - starts[:, None]) * longer[:, None].astype(np.float64)
    cells[np.tril_indices(len(ends), -1)] = np.inf  # a phase does not end before it starts
    best = cells[0]  # fewest cells up to each end
    choices = []  # for each further phase and each end, where the phase starts
    for _ in range(min(count, len(ends)) - 1):
        before = np.concatenate([[np.inf], best[:-1]])  # fewest cells up to each start
        totals = before[:, None] + cells
        choices.append(totals.argmin(0))
        best = totals.min(0)
    chosen = []
    last = len(ends) - 1
    for choice in reversed(choices):
        start = int(choice[last])
        chosen.append((float(ends[last]), int(longer[start])))
        last = start - 1
    chosen.append((float(ends[last]), int(longer[0])))
    return chosen[::-1]


def stack_frames(x: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Every `count` frames concatenated to one, and the stacked lengths (B,).

    The padding becomes zero first. An LSTM has filled it, and it would otherwise be part of the
    last stacked frame of an utterance whose length is no multiple of `count`.

    Args:
        x: Frames (T, B, D).
        lengths: Frames of each utterance (B,), on the device of `x` or the host.
        count: Frames that are stacked.

    Returns:
        (T', B, count D) with T' = ceil(T / count), and ceil(lengths / count).
    """
    T, B, D = x.shape
    x = _without_padding(x, lengths)
    groups = strided(T, count)
    x = F.pad(x, (0, 0, 0, 0, 0, groups * count - T))
    stacked = x.view(groups, count, B, D).transpose(1, 2).flatten(2)
    return stacked, strided(lengths, count)


def _without_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """`x` (T, B, D) with zeros after the lengths (B,)."""
    padding = to_device(~valid_mask(lengths, x.shape[0]), x.device)
    return x.masked_fill(padding.T[..., None], 0.0)


class LSTMEncoder(nn.Module):
    """Stacked features through LSTMs, then stacked frames through further LSTMs.

    The padding has no influence, and encoded frames are zero there.

    With lengths on the host, a batch runs in `config.phases` phases. Lengths on a GPU are neither
    read nor checked, because that would wait for it: the batch runs whole. Both give the same
    frames but for rounding.
    """

    def __init__(self, config: LSTMEncoderConfig) -> None:
        super().__init__()
        D = config.width
        self.config = config
        self.width = D
        inputs = config.bins * config.stack_input
        self.before = make_lstm(inputs, D, config.before, dropout=config.dropout)
        self.after = make_lstm(D * config.stack, D, config.after, dropout=config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> Encoded:
        """Encode a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), 1 to T, int64, on the host or on the device of
                `features`. Lengths on the host are checked, and the batch then runs in phases.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), on the device of `lengths`.
        """
        T = expect_batch(features, lengths, self.config.bins)
        planned = self._plan(lengths, T)
        if len(planned) == 1:
            return self._encode(features, lengths, planned)
        order = lengths.argsort(descending=True, stable=True)
        rank = order.argsort()
        longest_first = features[to_device(order, features.device)]
        encoded, encoded_lengths = self._encode(longest_first, lengths[order], planned)
        return encoded[to_device(rank, features.device)], encoded_lengths[rank]

    def _plan(self, lengths: Tensor, T: int) -> Phases:
        """Phases of a batch of T feature frames, in stacked frames; one if lengths are unread."""
        config = self.config
        if not readable(lengths):
            return [(strided(T, config.stack_input), len(lengths))]
        stacked = strided(lengths, config.stack_input)
        most = strided(int(stacked.max()), config.stack)  # a short batch has no more phases
        return phases(stacked, min(config.phases, most), stack=config.stack)

    def _encode(self, features: Tensor, lengths: Tensor, planned: Phases) -> Encoded:
        """Encode a batch in phases; if there are several, the longest utterances are first."""
        B = len(lengths)
        x, lengths = stack_frames(features.transpose(0, 1), lengths, self.config.stack_input)
        x = x.to(dtype_of(self))  # (T', B, count F)
        encoded_frames = strided(len(x), self.config.stack)
        parts = []
        start = 0
        before_states = after_states = None
        for end, rows in planned:
            before_states = _first_rows(before_states, rows)
            after_states = _first_rows(after_states, rows)
            part, before_states = self.before(x[start:end, :rows], before_states)
            left = lengths[:rows] - start
            part, left = stack_frames(self.dropout(part), left, self.config.stack)
            part, after_states = self.after(part, after_states)
            part = _without_padding(self.dropout(part), left)
            parts.append(F.pad(part, (0, 0, 0, B - rows)))
            start = end
        encoded = torch.cat(parts)
        encoded = F.pad(encoded, (0, 0, 0, 0, 0, encoded_frames - len(encoded)))
        return encoded.transpose(0, 1), strided(lengths, self.config.stack)


def _first_rows(states: States, rows: int) -> States:
    """The states of the first `rows` utterances, which continue in the next phase."""
    if states is None:
        return None
    hidden, cell = states
    return hidden[:, :rows].contiguous(), cell[:, :rows].contiguous()


def make_lstm(
    inputs: int,
    D: int,
    layers: int,
    *,
    dropout: float,
    start: str = "mlperf",
    batch_first: bool = False,
) -> nn.LSTM:
    """LSTM layers with their initial weights.

    Args:
        inputs: Width of the input.
        D: Width of every layer.
        layers: Number of layers.
        dropout: Share dropped between the layers, in training.
        start: "torch" leaves the weights as torch draws them. "mlperf" turns them into those of
            MLPerf's RNN-T: the forget gate's bias is 1, all of it in `bias_ih`, and then all
            weights and biases are multiplied by INITIAL_SCALE.
        batch_first: Whether B is the first dimension of inputs and outputs.
    """
    between = dropout if layers > 1 else 0.0  # torch warns of dropout in a single layer
    lstm = nn.LSTM(inputs, D, layers, dropout=between, batch_first=batch_first)
    if start == "mlperf":
        forget_gate = slice(D, 2 * D)  # torch's order: input, forget, cell, output
        with torch.no_grad():
            for name, weight in lstm.named_parameters():
                if name.startswith("bias_"):
                    weight[forget_gate] = float(name.startswith("bias_ih"))
                weight.mul_(INITIAL_SCALE)
    return lstm
