"""The loop of greedy decoding by attention: one token of every row in each turn."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import Steps, to_hypotheses
from asrkit.decoders.attention.sampling import likeliest
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.shapes import valid_mask

COMPACT_BELOW = 0.75  # share of active rows from which the finished ones leave the batch


class GreedyLoop:
    """Greedy decoding of a batch.

    Finished rows keep stepping, and their results do not change. Once few rows are active, the
    finished ones leave the batch.

    Attributes:
        steps: The model's steps of the n rows still in the batch.
        limits: (n,) most labels of these rows.
        pending: (n, K) tokens that the state has not seen: the prompt, then the last label.
        active: (n,) bool, rows that have not ended.
        rows: (n,) the utterance of each row.
        labels: (B, columns) so far, of all B utterances, like all that follows.
        counts: (B,) number of labels so far.
        scores: (B,) log-probability in nats of the labels, and of eos.
        ended: (B,) bool, texts that came to eos, and utterances without frames.
        confidence: (B, columns) probabilities of the labels, or None.
        attended: (rows, their counts, `attended` of their state) of each turn; or None.
    """

    def __init__(
        self,
        model: Any,
        memory: Any,
        prompts: Tensor,
        limits: Tensor,
        has_frames: Tensor,
        *,
        confidence: bool,
        attended: bool = False,
        choose: Callable[[Tensor], tuple[Tensor, Tensor]] = likeliest,
    ) -> None:
        """Prepare to decode; no step is taken.

        Args:
            model: An `Attention`.
            memory: Its memory of B utterances.
            prompts: (B, P) tokens before the texts.
            limits: (B,) most labels of each text.
            has_frames: (B,) bool; the other utterances have no labels.
            confidence: Whether probabilities of the labels are kept.
            attended: Whether turns keep what `asrkit.decoders.attention.alignment.frames_of_turns`
                takes. A loop with a draft cannot.
            choose: Tokens and their log-probabilities from logits, as `likeliest`.
        """
        self.steps = Steps(model, memory, prompts, limits)
        self.eos = model.eos
        self.choose = choose
        self.limits = limits
        self.pending = prompts
        self.active = has_frames
        self.rows = torch.arange(len(limits), device=limits.device)
        columns = int(limits.max()) + 1  # the last one is no label's
        self.labels = limits.new_zeros(len(limits), columns)
        self.counts = torch.zeros_like(limits)
        self.scores = torch.zeros_like(limits, dtype=torch.float32)
        self.ended = ~has_frames
        self.confidence = self.labels.float() if confidence else None
        self.attended: list[tuple[Tensor, Tensor, Tensor]] | None = [] if attended else None

    def run(self) -> None:
        """Take turns until every row has ended."""
        while active := int(self.active.sum()):
            if active <= COMPACT_BELOW * len(self.active):
                self._compact()
            tokens, scores = self.choose(self.steps(self.pending)[:, -1:])
            if self.attended is not None:
                counts = self.counts[self.rows]
                self.attended.append((self.rows, counts, self.steps.state.attended))
            self.emit(tokens, scores, torch.zeros_like(self.limits))

    def hypotheses(self, impl: str) -> Hypotheses:
        """The texts so far; `impl` is how they were found."""
        found = (self.labels, self.counts, self.scores, self.ended)
        return to_hypotheses(*found, impl, self.confidence)

    def _compact(self) -> None:
        """Drop the finished rows from the batch."""
        active = self.active.nonzero()[:, 0]
        n = len(active)
        # leading rows need no copy, as in a batch that begins with its longest texts
        keep = slice(n) if int(active[-1]) == n - 1 else active
        self.steps.select(keep)
        for name in ("limits", "pending", "active", "rows"):
            setattr(self, name, getattr(self, name)[keep])

    def emit(self, tokens: Tensor, scores: Tensor, accepted: Tensor) -> None:
        """Give each active row the accepted tokens of a draft and the token after them, or end it.

        Finished rows are written too, beyond their labels.

        Args:
            tokens: (n, N + 1) the chosen tokens: those of the N drafted places, and one more.
            scores: (n, N + 1) their log-probabilities; NaN ends a row.
            accepted: (n,) how many tokens of the draft are right; 0 without a draft.
        """
        rows = self.rows[:, None]
        next_column = accepted[:, None]
        token = tokens.gather(1, next_column)[:, 0]
        is_broken = scores.gather(1, next_column)[:, 0].isnan()
        before = self.counts[self.rows]
        counts = before + accepted
        stops = self.active & is_broken
        ends = self.active & ~is_broken & (token == self.eos)
        emits = self.active & ~stops & ~ends & (counts < self.limits)
        columns = tokens.shape[1]
        is_scored = valid_mask(accepted + (emits | ends | stops), columns)
        places = before[:, None] + torch.arange(columns, device=before.device)
        places = places.clamp(max=self.labels.shape[1] - 1)
        self.scores[self.rows] += scores.where(is_scored, 0.0).sum(1)
        self.labels[rows, places] = tokens
        if self.confidence is not None:
            self.confidence[rows, places] = scores.exp()
        self.counts[self.rows] = counts + emits
        self.ended[self.rows] |= ends
        self.pending = token.where(emits, self.pending[:, -1])[:, None]
        self.active = emits
