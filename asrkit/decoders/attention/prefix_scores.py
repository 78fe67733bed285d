"""Scores of CTC for texts that a decoder by attention writes from left to right.

The score of a prefix is the probability of all texts that begin with it, summed over their
alignments, so it can be compared with what attention says before the text has ended.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hori, Watanabe, Hershey 2017, Joint CTC/attention decoding for end-to-end speech recognition,
algorithm 2. There a loop over frames adds up each extension; here sums over all frames at once do.
"""

import torch
from torch import Tensor

from asrkit.shapes import dims, expect, is_finite, valid_mask

LEAST = -1e4  # nats; a frame's log-probability below it counts as this, so that sums have no -inf


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
    valid = is_finite(ctc_weight) and 0 <= ctc_weight <= 1
    expect(valid, "ctc_weight", "a share from 0 to 1", f"{ctc_weight!r:.40}")


class PrefixScores:
    """What CTC says of the prefixes of a beam, and its say in their scores.

    Attributes:
        blank: (B, K, T + 1) log-probability of the alignments of K prefixes of each utterance with
            its first t frames, t from 0 to T, that end in a blank.
        label: (B, K, T + 1) that of those that end in the last label.
        scores: (B, K, 1) of the prefixes.
        longer: (B, K, V + 1), what `after` found last.
    """

    def __init__(self, log_probs: Tensor, lengths: Tensor, K: int) -> None:
        """Begin with K empty prefixes of each utterance.

        Args:
            log_probs: (B, T, V + 1) in nats, blank last; what is not finite counts as `LEAST`.
            lengths: (B,) valid frames; behind them there is blank alone.
            K: Hypotheses of an utterance.
        """
        B, T, _ = log_probs.shape
        heard = valid_mask(lengths, T)[..., None]
        self.is_broken = (log_probs.isnan() & heard).any((1, 2))[:, None, None]  # (B, 1, 1)
        wide = log_probs.double()
        wide = wide.where(wide.isfinite(), LEAST).clamp(min=LEAST)
        silence = torch.full_like(wide[:1, :1], LEAST)
        silence[..., -1] = 0
        self.log_probs = torch.where(heard, wide, silence)
        self.frames = self.log_probs.exp()
        blanks = torch.cat([wide.new_zeros(B, 1), self.log_probs[..., -1].cumsum(1)], 1)
        self.blank = blanks[:, None].expand(B, K, T + 1)
        self.label = torch.full_like(self.blank, -torch.inf)
        self.scores = self.longer = wide.new_zeros(B, K, 1)

    def joint(
        self, attention: Tensor, weight: float, last: Tensor, any_label: Tensor, eos: int
    ) -> Tensor:
        """What each next token adds to the scores of attention and CTC together, (B, K, V) in nats.

        Args:
            attention: (B, K, V) what it adds to that of attention; -inf for what cannot be.
            weight: Share of CTC, above 0.
            last: As of `after`.
            any_label: Likewise.
            eos: Token that ends a text.
        """
        scores = self.after(last, any_label)
        scores[..., eos] = scores[..., -1]  # the text itself
        if weight == 1:
            attention = torch.zeros_like(attention).where(attention.isfinite(), -torch.inf)
        total = (1 - weight) * attention + weight * (scores[..., :-1] - self.scores)
        return total.masked_fill(total.isnan() | self.is_broken, -torch.inf)

    def after(self, last: Tensor, any_label: Tensor) -> Tensor:
        """Scores of each prefix with one more token, (B, K, V + 1); of the text itself, the last.

        Args:
            last: (B, K) last label of each prefix; any token where there is none.
            any_label: (B, K) whether there is one.
        """
        every = self.blank.logaddexp(self.label)
        # of labels that do not repeat the last one: the sum over frames of (alignments before the
        # frame) x (label on the frame), a product; terms of e^-700 of the likeliest are lost
        before = every[..., :-1]  # (B, K, T)
        highest = before.amax(2, keepdim=True).clamp(min=LEAST * every.shape[2])
        longer = ((before - highest).exp() @ self.frames[..., :-1]).log() + highest  # (B, K, V)
        # the same label once more is a new one only behind a blank
        again = (self.blank[..., :-1] + self._frames_of(last)).logsumexp(2, keepdim=True)
        place = last[..., None]
        again = torch.where(any_label[..., None], again, longer.gather(2, place))
        self.longer = torch.cat([longer.scatter(2, place, again), every[..., -1:]], 2)
        return self.longer

    def advance(self, parents: Tensor, tokens: Tensor, moves: Tensor, repeats: Tensor) -> None:
        """Go on to the prefixes that were chosen.

        Args:
            parents: (B, K) which prefix each comes from.
            tokens: (B, K) its new label.
            moves: (B, K) bool, whether it has one; else the prefix stays as it is.
            repeats: (B, K) bool, whether the new label is the last one once more.
        """
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before_blank, before_label = self.blank[rows, parents], self.label[rows, parents]
        every = before_blank.logaddexp(before_label)
        enters = torch.where(repeats[..., None], before_blank, every)[..., :-1]
        label = _held(enters, self._frames_of(tokens))
        blank = _held(label[..., :-1], self.log_probs[..., -1][:, None])
        moved = moves[..., None]
        self.blank = torch.where(moved, blank, before_blank)
        self.label = torch.where(moved, label, before_label)
        longer = self.longer[rows, parents].gather(2, tokens[..., None])
        self.scores = torch.where(moved, longer, self.scores[rows, parents])

    def _frames_of(self, tokens: Tensor) -> Tensor:
        """Log-probability of one token for each prefix (B, K) on every frame: (B, K, T)."""
        T = self.log_probs.shape[1]
        index = tokens[:, None].expand(-1, T, -1)
        return self.log_probs.gather(2, index).transpose(1, 2)


def _held(enters: Tensor, stays: Tensor) -> Tensor:
    """x(t) = (x(t - 1) + enters(t)) stays(t) from x(0) = 0 (B, K, T + 1), all in logarithms.

    x(t) is the sum over s <= t of enters(s) and all stays from s to t.
    """
    sums = stays.cumsum(2)
    before = sums - stays
    held = sums + (enters - before).logcumsumexp(2)
    return torch.cat([torch.full_like(held[..., :1], -torch.inf), held], 2)
