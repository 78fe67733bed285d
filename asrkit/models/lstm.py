"""A recurrent encoder: LSTMs, neighbouring frames stacked, LSTMs again.

Features (B, T, F) and lengths (B,) in; encoded frames (B, T', D) and their lengths (B,) out. The
form is that of MLPerf's RNN-T benchmark (github.com/mlcommons/training, rnn_speech_recognition).

A padded batch computes its padding as well. In phases it does not: the utterances are sorted, all
of them run to the end of the first phase, those that go on run from their saved state to the end of
the second, and so on. What is computed for an utterance stays the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asrkit.devices import readable, to_device
from asrkit.models.encoders import dtype_of, expect_batch, expect_sizes, strided
from asrkit.shapes import expect, valid_mask, whole

INITIAL_SCALE = 0.5  # of all weights and biases; of the forget gate's bias of 1 too, as published

Lengths = Tensor | np.ndarray | Sequence[int]
States = tuple[Tensor, Tensor] | None  # hidden and cell, (layers, B, D) each; None before a frame
Phases = list[tuple[int, int]]  # where each phase ends, and how many of the longest rows it runs


@dataclass(frozen=True, kw_only=True)
class LSTMEncoderConfig:
    """Sizes of an `LSTMEncoder`; the defaults are those of MLPerf's RNN-T benchmark.

    Args:
        bins: Mel bins of the features, F.
        stack_input: Frames of features that are stacked before the first LSTM.
        width: Width of every LSTM layer and of the encoded frames, D.
        before: LSTM layers before the second stacking.
        stack: Frames that are stacked between the LSTMs.
        after: LSTM layers behind it.
        dropout: Share dropped behind every LSTM layer, in training.
        phases: Phases in which a batch runs at most; 1 runs it whole. What is computed for an
            utterance does not depend on it, only how much padding is computed beside it.
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
    """The phases that compute fewest frames: (end, rows) of each, ends in frames.

    Phase k runs the `rows` longest utterances from the end of phase k - 1 to its own `end`. Ends
    are multiples of `stack`, so that no stacked frame lies in two phases. There are `count` phases,
    or one for each rounded length where those are fewer.

    Args:
        lengths: Frames of each utterance (B,), in any order, on the host.
        count: Phases at most, from 1 up to the stacked frames of the longest utterance.
        stack: Frames that are stacked behind the first LSTMs.

    Raises:
        ValueError: A length below 1; more phases than that.

    >>> phases([10, 9, 4, 3], 2)
    [(4, 4), (10, 2)]
    """
    frames = np.asarray(lengths)
    least = int(frames.min())
    expect(least >= 1, "lengths", "at least one frame each", least)
    stacked = strided(frames, stack)
    most = int(stacked.max())
    wanted = f"a whole number from 1 to {most}, the stacked frames of the longest utterance"
    expect(whole(count, 1, most), "count", wanted, repr(count))
    return [(int(end), rows) for end, rows in fewest_cells(stacked * stack, count)]


def fewest_cells(lengths: np.ndarray, count: int) -> list[tuple[float, int]]:
    """(end, rows) of each of `count` phases whose cells, rows times duration, are fewest in sum.

    A dynamic programme over the different lengths: the best k phases up to an end are the best
    k - 1 up to some earlier end, and one more. It takes O(count B²) time.

    Args:
        lengths: Of each utterance (B,), above 0, in any unit.
        count: Phases, at least 1; where there are fewer different lengths, as many as those.
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
    found = []
    last = len(ends) - 1
    for choice in reversed(choices):
        start = int(choice[last])
        found.append((float(ends[last]), int(longer[start])))
        last = start - 1
    found.append((float(ends[last]), int(longer[0])))
    return found[::-1]


def stack_frames(x: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` frames side by side, and the stacked lengths (B,).

    What lies behind an utterance's length becomes zero first: where a length is no multiple of
    `count`, the last stacked frame would else hold frames of padding, which an LSTM has filled.

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
    """`x` (T, B, D) with zeros behind the lengths (B,)."""
    padding = to_device(~valid_mask(lengths, x.shape[0]), x.device)
    return x.masked_fill(padding.T[..., None], 0.0)


class LSTMEncoder(nn.Module):
    """Stacked features through LSTMs, then pairs of frames through further LSTMs.

    What lies in the padding does not matter, and encoded frames are zero there.

    Where the lengths lie on the host, a batch runs in `config.phases` phases. Lengths on a GPU
    would have to be waited for, so they are not read: the batch runs whole, and they are not
    checked. Both give the same frames but for rounding.
    """

    def __init__(self, config: LSTMEncoderConfig) -> None:
        super().__init__()
        D = config.width
        self.config = config
        self.width = D
        self.before = _lstm(config.bins * config.stack_input, D, config.before, config.dropout)
        self.after = _lstm(D * config.stack, D, config.after, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode a batch of features.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), 1 to T, int64, on the host or on the device of
                `features`. Those on the host are checked, and let the batch run in phases.

        Returns:
            Encoded frames (B, T', D) and their lengths (B,), where `lengths` lie.
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

    def _encode(self, features: Tensor, lengths: Tensor, planned: Phases) -> tuple[Tensor, Tensor]:
        """What `forward` returns; with several phases, `features` are sorted, the longest first."""
        B = len(lengths)
        x, lengths = stack_frames(features.transpose(0, 1), lengths, self.config.stack_input)
        x = x.to(dtype_of(self))  # (T', B, count F)
        encoded_frames = strided(len(x), self.config.stack)
        parts = []
        start = 0
        before_states: States = None
        after_states: States = None
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
    """The states of the first `rows` utterances: those that go on in the next phase."""
    if states is None:
        return None
    hidden, cell = states
    return hidden[:, :rows].contiguous(), cell[:, :rows].contiguous()


def _lstm(inputs: int, D: int, layers: int, dropout: float) -> nn.LSTM:
    """LSTM layers, started as MLPerf's are."""
    between = dropout if layers > 1 else 0.0  # of one layer torch warns that nothing is between
    lstm = nn.LSTM(inputs, D, layers, dropout=between)
    scale_first_weights(lstm)
    return lstm


def scale_first_weights(lstm: nn.LSTM) -> None:
    """Turn the weights that torch has drawn into those that MLPerf's RNN-T starts with.

    The forget gate's bias is 1, all of it in `bias_ih`, and then all weights and biases are
    multiplied by INITIAL_SCALE.

    Args:
        lstm: As torch made it; changed in place.
    """
    D = lstm.hidden_size
    forget_gate = slice(D, 2 * D)  # torch's order: input, forget, cell, output
    with torch.no_grad():
        for name, weight in lstm.named_parameters():
            if name.startswith("bias_ih"):
                weight[forget_gate] = 1.0
            if name.startswith("bias_hh"):
                weight[forget_gate] = 0.0
            weight.mul_(INITIAL_SCALE)
