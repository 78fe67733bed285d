"""CTC scores of prefixes, for texts that an attention decoder writes from left to right.

The score of a prefix is the probability of all texts that begin with it, summed over their
alignments. So it can be compared with the attention's score before the text has ended.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hori, Watanabe, Hershey 2017, Joint CTC/attention decoding for end-to-end speech recognition,
algorithm 2. Its loop over frames is replaced here by sums over all frames at once.
"""

import torch
from torch import Tensor

from asrkit.shapes import valid_mask

LEAST = -1e4  # nats; lower log-probabilities of a frame are raised to it, so sums have no -inf


class PrefixScores:
    """CTC's scores of the prefixes of a beam.

    Attributes:
        blank: (B, K, T + 1) log-probability of the alignments of K prefixes with the first t
            frames, t from 0 to T, that end in a blank.
        label: (B, K, T + 1) log-probability of the alignments that end in the last label.
        last: (B, K) the last label, V in an empty prefix.
        scores: (B, K) scores of the prefixes.
        longer: (B, K, V + 1) the last result of `after`.
    """

    longer: Tensor

    def __init__(self, log_probs: Tensor, lengths: Tensor, K: int, weight: float) -> None:
        """Start with K empty prefixes of each utterance.

        Args:
            log_probs: (B, T, V + 1) in nats, blank last; values that are not finite become `LEAST`.
            lengths: (B,) valid frames; the frames after them are blank.
            K: Hypotheses of an utterance.
            weight: Share of CTC in `joint`, above 0.
        """
        B, T, width = log_probs.shape
        valid = valid_mask(lengths, T)[..., None]
        self.weight = weight
        is_broken = (log_probs.isnan() & valid).any((1, 2))
        self.is_broken = is_broken[:, None, None]  # (B, 1, 1)
        wide = log_probs.double()
        wide = wide.where(wide.isfinite(), LEAST).clamp(min=LEAST)
        silence = torch.full_like(wide[:1, :1], LEAST)
        silence[..., -1] = 0
        self.log_probs = torch.where(valid, wide, silence)
        self.frames = self.log_probs.exp()
        self.blank_frames = self.log_probs[..., -1]
        blanks = wide.new_zeros(B, T + 1)
        blanks[:, 1:] = self.blank_frames.cumsum(1)
        self.blank = blanks[:, None].expand(B, K, T + 1)
        self.label = torch.full_like(self.blank, -torch.inf)
        self.scores = wide.new_zeros(B, K)
        self.last = lengths.new_full((B, K), width - 1, dtype=torch.int64)

    def joint(self, attention: Tensor, eos: int) -> Tensor:
        """What each next token adds to the joint score, (B, K, V) in nats.

        Args:
            attention: (B, K, V) what it adds to the attention's score; -inf if impossible.
            eos: Token that ends a text.
        """
        scores = self.after()
        scores[..., eos] = scores[..., -1]  # the text itself
        gained = scores[..., :-1] - self.scores[..., None]
        total = (1 - self.weight) * attention + self.weight * gained
        impossible = total.isnan() | self.is_broken
        return total.masked_fill(impossible, -torch.inf)

    def after(self) -> Tensor:
        """Scores of prefixes with one more token, (B, K, V + 1); the last is the text's own."""
        every = self.blank.logaddexp(self.label)
        # A label other than the last one: the sum over frames of (alignments before the frame) x
        # (label on the frame) is a matrix product. It loses terms below e^-700 of the largest.
        before = every[..., :-1]  # (B, K, T)
        highest = before.amax(2, keepdim=True)
        highest = highest.clamp(min=LEAST * every.shape[2])
        shares = (before - highest).exp()
        longer = (shares @ self.frames).log() + highest
        # The last label again is a new label only after a blank.
        after_blank = self.blank[..., :-1] + self._on_frames(self.last)
        again = after_blank.logsumexp(2, keepdim=True)
        longer = longer.scatter(2, self.last[..., None], again)
        longer[..., -1] = every[..., -1]
        self.longer = longer
        return longer

    def advance(self, parents: Tensor, tokens: Tensor, moves: Tensor) -> None:
        """Replace the prefixes by the chosen ones.

        Args:
            parents: (B, K) the prefix that each comes from.
            tokens: (B, K) its new label.
            moves: (B, K) bool, whether it has a new label.
        """
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        last = self.last[rows, parents]
        before_blank = self.blank[rows, parents]
        before_label = self.label[rows, parents]
        every = before_blank.logaddexp(before_label)
        repeats = (tokens == last)[..., None]
        enters = torch.where(repeats, before_blank, every)
        label = _accumulated(enters, self._on_frames(tokens))
        blank = _accumulated(label, self.blank_frames[:, None])
        score = self.longer[rows, parents, tokens]
        moved = moves[..., None]
        self.blank = torch.where(moved, blank, before_blank)
        self.label = torch.where(moved, label, before_label)
        self.scores = torch.where(moves, score, self.scores[rows, parents])
        self.last = torch.where(moves, tokens, last)

    def _on_frames(self, tokens: Tensor) -> Tensor:
        """Log-probability of one token for each prefix (B, K) on every frame: (B, K, T)."""
        T = self.log_probs.shape[1]
        index = tokens[:, None].expand(-1, T, -1)
        return self.log_probs.gather(2, index).transpose(1, 2)


def _accumulated(before: Tensor, stays: Tensor) -> Tensor:
    """x(t) = (x(t - 1) + before(t - 1)) stays(t) from x(0) = 0 (B, K, T + 1), all in logarithms.

    x(t) is the sum over s <= t of before(s - 1) times all `stays` (B, K, T) from s to t.
    """
    sums = stays.cumsum(2)
    enters = before[..., :-1] - (sums - stays)
    result = torch.full_like(before, -torch.inf)
    result[..., 1:] = sums + enters.logcumsumexp(2)
    return result
