"""`AttentionLoop`: greedy decoding by attention, a token of every utterance in each turn."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.steps import (
    AttentionOptions,
    BestTokens,
    Draft,
    best_tokens,
)
from asrkit.decoders.hypotheses import PADDING, Hypotheses
from asrkit.decoders.states import map_state

CHUNK = 16  # tokens of a draft that are checked at a time behind a mistake
WORTH = 0.2  # share of them that has to be right, for such a call costs some steps
NEARBY = (0, 1, -1, 2, -2)  # where a draft may have the token that it lacks at a place
FEW = 0.75  # share of the rows: when at most so many go on, they go on alone
ROOM = 64  # tokens that the state has room for at first, behind prompt and draft


class Batch(NamedTuple):
    """What is decoded, batch first."""

    memory: Any  # of the model
    prompt: Tensor  # (B, P) int64
    limits: Tensor  # (B,) int64, most labels
    lengths: Tensor  # (B,) int64, frames; an utterance without any has no labels


class Found(NamedTuple):
    """What was found so far, a row for each utterance."""

    labels: Tensor  # (B, columns) int64
    counts: Tensor  # (B,) int64, labels
    scores: Tensor  # (B,) float32, in nats
    ended: Tensor  # (B,) bool
    confidence: Tensor | None  # (B, columns) float32


class AttentionLoop:
    """Greedy decoding, a token of every row in each turn.

    Rows that have ended go on computing; what they found does not change any more. Once few go on
    the others are left behind: then all buffers have the rows that go on alone, and `rows` says
    which these are.

    Attributes:
        options: Those of the call.
        batch: The batch.
        rows: (B,) which utterances the rows are.
        whole: What was found for all utterances, once rows were left behind; None before that.
        past: The model's state.
        last: (B,) the token to go on from.
        counts: (B,) labels so far.
        scores: (B,) their log-probabilities in nats, and that of eos.
        going: (B,) bool, rows that have not ended.
        ended: (B,) bool, rows that came to eos, or have no frames.
        labels: (B, columns) so far.
        confidence: (B, columns) of these labels, or None.
    """

    def __init__(self, model: Any, batch: Batch, draft: Draft, options: AttentionOptions) -> None:
        """Begin a batch.

        Args:
            model: An `Attention`.
            batch: The batch.
            draft: N = 0 for none.
            options: Those of the call.
        """
        device = batch.limits.device
        B, P = batch.prompt.shape
        room = P + int(batch.limits.max())
        self.options = options
        self.batch = batch
        self.rows = torch.arange(B, device=device)
        self.whole: Found | None = None
        self.eos = model.eos
        # most texts are far shorter than they may be, so `run` makes this larger where need be
        self.past_room = min(room, P + draft.tokens.shape[1] + ROOM)
        self.past = model.begin(batch.memory, self.past_room, past=options.past)
        self.last = batch.prompt[:, -1].clone()
        self.counts = torch.zeros(B, dtype=torch.int64, device=device)
        self.scores = torch.zeros(B, dtype=torch.float32, device=device)
        self.going = batch.lengths > 0
        self.ended = ~self.going
        self.labels = torch.zeros(B, room + 1, dtype=torch.int64, device=device)
        self.confidence: Tensor | None = None
        if options.confidence != "none":
            self.confidence = torch.zeros(B, room + 1, dtype=torch.float32, device=device)

    def decode(self, model: Any, draft: Draft, impl: str) -> Hypotheses:
        """The texts of the batch.

        Args:
            model: An `Attention`.
            draft: As it was given at the beginning.
            impl: How it is computed.
        """
        self.start(model, draft)
        self.run(model)
        return self.hypotheses(impl)

    def start(self, model: Any, draft: Draft) -> None:
        """The first turn: prompt and draft in one call, and as much of the draft as is right.

        Behind a wrong token the rest of the draft may still be right, so it is checked too, CHUNK
        tokens at a time, until less than WORTH of them is right, twice in a row. What remains is
        what decoding token by token finds.

        Args:
            model: An `Attention`.
            draft: N = 0 for none.
        """
        kept = self._verify(model, self.batch.prompt, draft)
        at = torch.zeros_like(kept)
        poor = 0  # calls in a row that were not worth it
        while draft.tokens.shape[1] and poor < 2:
            at = self._after_mistake(draft, at + kept)
            rest = self._rest(draft, at)
            checked = int(rest.lengths.sum())
            if not checked:
                return
            kept = self._verify(model, self.last[:, None], rest)
            poor = 0 if int(kept.sum()) >= WORTH * checked else poor + 1

    def _after_mistake(self, draft: Draft, wrong: Tensor) -> Tensor:
        """Where a draft goes on (B,) behind the token `wrong` (B,), in place of which another one
        was found: behind that one, if the draft has it nearby, else behind the wrong one.
        """
        N = draft.tokens.shape[1]
        near = wrong[:, None] + torch.tensor(NEARBY, device=wrong.device)
        inside = (near >= 0) & (near < draft.lengths[:, None])
        found = draft.tokens.gather(1, near.clamp(0, N - 1)) == self.last[:, None]
        nearest = (found & inside).long().argmax(1)  # 0 if none is found: the wrong one
        return near.gather(1, nearest[:, None])[:, 0] + 1

    def _rest(self, draft: Draft, at: Tensor) -> Draft:
        """The next CHUNK tokens of a draft from `at` (B,) on, for rows that go on.

        Fewer where one of these lacks room for as many: it would have them put over its last token.
        """
        furthest = int((self.past.place * self.going).max())
        most = self.labels.shape[1] - 2 - furthest
        room = torch.minimum(draft.lengths - at, self.batch.limits - self.counts)
        lengths = room.clamp(max=min(CHUNK, most)).clamp(min=0) * self.going
        columns = torch.arange(int(lengths.max()), device=at.device)
        places = (at[:, None] + columns).clamp(max=draft.tokens.shape[1] - 1)
        return Draft(draft.tokens.gather(1, places), lengths)

    def _verify(self, model: Any, before: Tensor, draft: Draft) -> Tensor:
        """Check a draft in one call, and emit the best token behind what is right of it.

        A draft's token is right if it is the best one after all before it.

        Args:
            model: An `Attention`.
            before: (B, P) tokens that the state does not have yet: the prompt, or the last token.
            draft: N = 0 for none.

        Returns:
            (B,) int64, how many tokens of the draft are right.
        """
        P = before.shape[1]
        N = draft.tokens.shape[1]
        reach = P + N
        if before is not self.batch.prompt:
            reach = min(self.labels.shape[1] - 1, int(self.past.place.max()) + reach)
        if reach > self.past_room:
            self._grow(model, reach)
        tokens = torch.cat([before, draft.tokens], 1)
        logits, after = model.follow(tokens, self.past, self.batch.memory, reach=reach)
        best = best_tokens(logits[:, P - 1 :], self.options.confidence)  # (B, N + 1)
        columns = torch.arange(N, device=before.device)
        guessed = columns < draft.lengths[:, None]
        right = guessed & (best.token[:, :N] == draft.tokens) & ~best.score[:, :N].isnan()
        kept = right.long().cumprod(1).sum(1) * self.going  # (B,)
        # the last column is no label's: what does not fit goes there
        places = (self.counts[:, None] + columns).clamp(max=self.labels.shape[1] - 1)
        self.labels.scatter_(1, places, draft.tokens)
        if self.confidence is not None and best.confidence is not None:
            self.confidence.scatter_(1, places, best.confidence[:, :N])
        self.counts += kept
        within = columns < kept[:, None]
        self.scores += best.score[:, :N].where(within, 0.0).sum(1)
        place = torch.where(self.going, after.place - N + kept, self.past.place)
        self._keep(after._replace(place=place))
        self._emit(map_state(lambda part: part.gather(1, kept[:, None])[:, 0], best))
        return kept

    def turn(self, model: Any, reach: int) -> None:
        """One more token of each row that goes on.

        Args:
            model: An `Attention`.
            reach: Tokens of the longest row once this one is in.
        """
        tokens = self.last[:, None]
        logits, after = model.follow(tokens, self.past, self.batch.memory, reach=reach)
        self._keep(after)
        self._emit(best_tokens(logits[:, 0], self.options.confidence))

    def _keep(self, after: Any) -> None:
        """Bring the model's new state into the buffers of the old one."""

        def keep(buffer: Tensor, new: Tensor) -> Tensor:
            return buffer if new is buffer else buffer.copy_(new)

        map_state(keep, self.past, after)

    def _emit(self, best: BestTokens) -> None:
        """Take the best token (B,) of each row that goes on, or end the row.

        Other rows write too, behind their labels.
        """
        broken = best.score.isnan()
        stops = best.token == self.eos
        emits = self.going & ~broken & ~stops & (self.counts < self.batch.limits)
        ends = self.going & ~broken & stops
        counts = emits | ends | (self.going & broken)
        self.scores.add_(best.score.where(counts, 0.0))
        column = self.counts[:, None]
        self.labels.scatter_(1, column, best.token[:, None])
        if self.confidence is not None and best.confidence is not None:
            self.confidence.scatter_(1, column, best.confidence[:, None])
        self.last.copy_(best.token.where(emits, self.last))
        self.counts += emits
        self.ended |= ends
        self.going &= emits

    def run(self, model: Any) -> None:
        """Turn until every row has ended."""
        room = self.labels.shape[1] - 1
        while rows := int(self.going.sum()):
            if rows <= FEW * len(self.going):
                self._leave_ended()
            reach = min(room, int(self.past.place.max()) + 1)
            if reach > self.past_room:
                self._grow(model, min(room, 2 * reach))
            self.turn(model, reach)

    def _leave_ended(self) -> None:
        """Go on with the rows that have not ended; what the others found is kept in `whole`."""
        self.whole = self._found_by_all()
        going = self.going.nonzero()[:, 0]
        n = len(going)
        # rows in front need no copy, as in a batch that begins with its longest texts
        in_front = int(going[-1]) == n - 1
        keep: Any = slice(n) if in_front else going
        rows = (self.batch, self.past, self.last, self.going, self.rows, self._found())
        kept = map_state(lambda part: part[keep], rows)
        self.batch, self.past, self.last, self.going, self.rows, found = kept
        self.labels, self.counts, self.scores, self.ended, self.confidence = found

    def _found(self) -> Found:
        """What was found for the rows that the buffers have."""
        return Found(self.labels, self.counts, self.scores, self.ended, self.confidence)

    def _found_by_all(self) -> Found:
        """What was found for all utterances, in memory of its own."""
        if self.whole is None:
            return map_state(Tensor.clone, self._found())

        def put(whole: Tensor, part: Tensor) -> Tensor:
            return whole.index_copy(0, self.rows, part)

        return map_state(put, self.whole, self._found())

    def _grow(self, model: Any, room: int) -> None:
        """Give the state room for so many tokens, more than it has."""

        def moved(larger: Tensor, own: Tensor) -> Tensor:
            larger[tuple(map(slice, own.shape))] = own
            return larger

        self.past_room = room
        empty = model.begin(self.batch.memory, room, past=self.options.past)
        self.past = map_state(moved, empty, self.past)

    @torch.inference_mode(False)
    def hypotheses(self, impl: str) -> Hypotheses:
        """The result, in tensors of its own.

        Args:
            impl: How it was computed; rows that did not end by themselves are added.
        """
        found = self._found_by_all()
        counts = found.counts
        N = int(counts.max())
        beyond = torch.arange(N, device=counts.device) >= counts[:, None]
        labels = found.labels[:, :N]
        frames = torch.full_like(labels, PADDING)
        confidence = None
        if found.confidence is not None:
            confidence = found.confidence[:, :N].masked_fill(beyond, PADDING)
        return Hypotheses(
            labels=labels.masked_fill(beyond, PADDING),
            frames=frames,
            durations=torch.zeros_like(frames).masked_fill_(beyond, PADDING),
            lengths=counts,
            scores=found.scores,
            impl=impl + unended(found.ended, found.scores),
            confidence=confidence,
            ended=found.ended,
        )


def unended(ended: Tensor, scores: Tensor) -> str:
    """What `impl` says of utterances that did not come to eos.

    Args:
        ended: (B,) bool.
        scores: (B,), NaN where the logits had one, -inf where nothing was left.
    """
    B = len(ended)
    counts = {
        "NaN logits ended": scores.isnan(),
        "nothing was left of": scores == -torch.inf,
        "no end in": ~ended & scores.isfinite(),
    }
    said = ""
    for what, rows in counts.items():
        if rows.any():
            said += f"; {what} {int(rows.sum())} of {B}"
    return said
