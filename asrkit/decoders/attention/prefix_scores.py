"""Scores of CTC for texts that a decoder by attention writes from left to right.

The score of a prefix is the probability of all texts that begin with it, summed over their
alignments, so it can be compared with what attention says before the text has ended.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hori, Watanabe, Hershey 2017, Joint CTC/attention decoding for end-to-end speech recognition,
algorithm 2. There a loop over frames adds up each extension; here sums over all frames at once do.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from asrkit.shapes import dims, expect, is_finite, valid_mask

LEAST = -1e4  # nats; a frame's log-probability below it counts as this, so that sums have no -inf


class Prefixes(NamedTuple):
    """K prefixes of each utterance: log-probability of their alignments with the first t frames.

    Both (B, K, T + 1) in float64, for t from 0 to T.
    """

    blank: Tensor  # of the alignments that end in a blank
    label: Tensor  # of those that end in the last label

    def total(self) -> Tensor:
        """Log-probability of all alignments, (B, K, T + 1)."""
        return self.blank.logaddexp(self.label)


def check_ctc(ctc: Tensor, ctc_weight: float, encoded: Tensor, V: int) -> None:
    """ValueError for the CTC arguments of a decoder by attention that do not fit.

    Args:
        ctc: Log-probabilities (B, T, V + 1), blank last.
        ctc_weight: Their share of a score.
        encoded: Frames (B, T, D).
        V: Tokens of the decoder.
    """
    B, T, _ = encoded.shape
    remedy = "model.encode gives them, if the model has a CTC head."
    _, _, width = dims(ctc, "B T V", "ctc", B=B, T=T)
    expect(width == V + 1, "ctc", f"log-probabilities of V={V} tokens and blank", width, remedy)
    floating = ctc.is_floating_point()
    expect(floating, "ctc", "log-probabilities of a float dtype", ctc.dtype, remedy)
    same = ctc.device == encoded.device
    expect(same, "ctc", f"a tensor on {encoded.device}", ctc.device)
    valid = is_finite(ctc_weight) and 0 <= ctc_weight <= 1
    expect(valid, "ctc_weight", "a share from 0 to 1", f"{ctc_weight!r:.40}")


class PrefixScores:
    """What CTC says of the prefixes of a beam."""

    def __init__(self, log_probs: Tensor, frames: Tensor, prefixes: Prefixes) -> None:
        """Take what `start` has prepared.

        Args:
            log_probs: (B, T, V + 1) in float64, finite, blank last.
            frames: (B, T, V + 1), their exponentials.
            prefixes: Those of the beam.
        """
        self.log_probs = log_probs
        self.frames = frames
        self.prefixes = prefixes

    @classmethod
    def start(cls, log_probs: Tensor, lengths: Tensor, K: int) -> Self:
        """K empty prefixes of each utterance.

        Args:
            log_probs: (B, T, V + 1) in nats, blank last; what is not finite counts as `LEAST`.
            lengths: (B,) valid frames; behind them there is blank alone.
            K: Hypotheses of an utterance.
        """
        B, T, _ = log_probs.shape
        wide = log_probs.double()
        wide = wide.where(wide.isfinite(), LEAST).clamp(min=LEAST)
        silence = torch.full_like(wide[:1, :1], LEAST)
        silence[..., -1] = 0
        wide = torch.where(valid_mask(lengths, T)[..., None], wide, silence)
        blanks = torch.cat([wide.new_zeros(B, 1), wide[..., -1].cumsum(1)], 1)  # (B, T + 1)
        blank = blanks[:, None].expand(B, K, T + 1)
        label = torch.full_like(blank, -torch.inf)
        return cls(wide, wide.exp(), Prefixes(blank, label))

    def after(self, last: Tensor, any_label: Tensor) -> Tensor:
        """Scores of each prefix with one more token, (B, K, V + 1); of the text itself, the last.

        Args:
            last: (B, K) last label of each prefix; any token where there is none.
            any_label: (B, K) whether there is one.
        """
        every = self.prefixes.total()
        whole_text = every[..., -1:]
        longer = self._extended(every)  # (B, K, V)
        # the same label once more is a new one only behind a blank
        repeated = self._frames_of(last)  # (B, K, T)
        again = (self.prefixes.blank[..., :-1] + repeated).logsumexp(2, keepdim=True)
        place = last[..., None]
        again = torch.where(any_label[..., None], again, longer.gather(2, place))
        return torch.cat([longer.scatter(2, place, again), whole_text], 2)

    def advance(self, parents: Tensor, tokens: Tensor, moves: Tensor, repeats: Tensor) -> None:
        """Go on to the prefixes that were chosen.

        Args:
            parents: (B, K) which prefix each comes from.
            tokens: (B, K) its new label.
            moves: (B, K) bool, whether it has one; else the prefix stays as it is.
            repeats: (B, K) bool, whether the new label is the last one once more.
        """
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before = Prefixes(self.prefixes.blank[rows, parents], self.prefixes.label[rows, parents])
        enters = torch.where(repeats[..., None], before.blank, before.total())[..., :-1]
        label = _held(enters, self._frames_of(tokens))
        nothing = torch.full_like(label[..., :1], -torch.inf)
        label = torch.cat([nothing, label], 2)
        blank = _held(label[..., :-1], self.log_probs[..., -1][:, None])
        blank = torch.cat([nothing, blank], 2)
        moved = moves[..., None]
        self.prefixes = Prefixes(
            torch.where(moved, blank, before.blank), torch.where(moved, label, before.label)
        )

    def _extended(self, every: Tensor) -> Tensor:
        """Scores of all prefixes with every label, (B, K, V), as if none repeated the last one.

        A sum over frames of (alignments before the frame) x (label on the frame): a product of
        matrices. Terms of less than e^-700 of the likeliest are lost.
        """
        before = every[..., :-1]  # (B, K, T)
        highest = before.amax(2, keepdim=True).clamp(min=LEAST * every.shape[2])
        mixed = (before - highest).exp() @ self.frames[..., :-1]
        return mixed.log() + highest

    def _frames_of(self, tokens: Tensor) -> Tensor:
        """Log-probability of one token for each prefix (B, K) on every frame: (B, K, T)."""
        T = self.log_probs.shape[1]
        index = tokens[:, None].expand(-1, T, -1)
        return self.log_probs.gather(2, index).transpose(1, 2)


def _held(enters: Tensor, stays: Tensor) -> Tensor:
    """x(t) = (x(t - 1) + enters(t)) stays(t) from x = 0, all in logarithms; dimension 2 is t.

    x(t) is the sum over s <= t of enters(s) and all stays from s to t.
    """
    sums = stays.cumsum(2)
    before = sums - stays
    return sums + (enters - before).logcumsumexp(2)
