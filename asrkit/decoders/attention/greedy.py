"""`aed_greedy`, a token of every utterance in each turn, and the drafts that it verifies."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import (
    NAMES,
    ROOM,
    Attention,
    Prompt,
    heard_frames,
    limits_of,
    prompt_of,
    texts,
    with_room,
)
from asrkit.decoders.hypotheses import Hypotheses, check_batch, check_model
from asrkit.decoders.states import map_state
from asrkit.devices import to_device
from asrkit.shapes import dims, expect, valid_mask
from asrkit.threads import eager

CHUNK = 16  # tokens of a draft that are checked at a time behind a mistake
WORTH = 0.2  # share of them that has to be right, for such a call costs some steps
NEARBY = (0, 1, -1, 2, -2)  # where a draft may have the token that it lacks at a place
FEW = 0.75  # share of the rows: when at most so many go on, they go on alone


@eager
def aed_greedy(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    draft: Hypotheses | None = None,
    most: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """Greedy `Hypotheses` of a batch of encoded utterances.

    The best token is taken until it is eos. All utterances take one step at a time; those that have
    ended wait for the last one, or leave the batch once only few go on.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames, int32 or int64; an utterance of 0 frames has no labels.
        prompt: Tokens before the text, (P,) for all or (B, P); None is `model.bos` alone. The texts
            of a batch need prompts of one length.
        draft: A guess at the texts, for instance `ctc_draft`'s of a CTC head. One call of `follow`
            checks all its tokens, and the right beginning is kept; behind a mistake the rest is
            checked as well, 16 tokens a call, while that is worth it. So the result is that without
            a draft but for rounding; a right draft takes one call in all.
        most: Most labels of an utterance; None is 50 more than it has frames. Texts that are still
            without eos there are returned as they are, and `ended` is False for them.
        confidence: Whether to return the confidence of each label, its probability.

    Returns:
        Hypotheses with scores in nats, eos included. NaN among the logits ends an utterance, with
        score NaN; `ended` is False, and `impl` says so. Durations are 0.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.

    >>> frames, ends, ctc = model.encode(features, lengths)  # doctest: +SKIP
    >>> draft = ctc_draft(model, ctc_greedy(ctc, ends))  # doctest: +SKIP
    >>> aed_greedy(model, frames, ends, draft=draft).tokens()  # doctest: +SKIP
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model, *NAMES)
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    with torch.inference_mode():
        guess = draft_of(model, draft, limits)
        memory = model.remember(heard_frames(encoded, longest), lengths)
        drafted = guess.tokens.shape[1]
        loop = GreedyLoop(
            model,
            memory,
            prompts=prompts,
            limits=limits,
            heard=lengths > 0,
            drafted=drafted,
            confidence=confidence,
        )
        if drafted:
            loop.verify_all(prompts, guess)
        else:
            loop.turn(prompts)
        loop.run()
    return loop.texts("attention, draft" if drafted else "attention")


def ctc_draft(model: Attention, heard: Hypotheses) -> Hypotheses:
    """The labels of a CTC head without those that no text holds, for `aed_greedy(draft=...)`.

    Left out are `bos`, `eos` and whatever is no token of the decoder. All else may be wrong: the
    decoder keeps what it would have said itself, so its result does not depend on the draft, only
    its time.

    Args:
        model: Whose decoder is to verify the draft; the CTC head has the same tokens.
        heard: Of `ctc_greedy` or `ctc_beam`, from the CTC head's log-probabilities.

    Returns:
        Hypotheses with the labels, frames and durations that are left. Scores are those of `heard`;
        confidence and alternatives are dropped.
    """
    labels = heard.labels
    spoken = labels < model.vocab_size
    spoken &= labels != model.bos
    spoken &= labels != model.eos
    kept = heard.only(spoken)
    return replace(
        kept,
        impl=f"{heard.impl}, as a draft",
        confidence=None,
        alternatives=(),
    )


class Draft(NamedTuple):
    """A guess at each text."""

    tokens: Tensor  # (B, N) int64, valid tokens throughout
    lengths: Tensor  # (B,) int64


def draft_of(model: Attention, draft: Hypotheses | None, limits: Tensor) -> Draft:
    """The draft within the limits (B,); N = 0 without one."""
    if draft is None:
        return Draft(limits.new_zeros(len(limits), 0), torch.zeros_like(limits))
    is_one = isinstance(draft, Hypotheses)
    expect(is_one, "draft", "Hypotheses", type(draft).__name__, "Try ctc_greedy.")
    dims(draft.labels, "B N", "draft.labels", B=len(limits))
    lengths = torch.minimum(to_device(draft.lengths, limits.device), limits)
    N = int(lengths.max())
    tokens = to_device(draft.labels, limits.device)[:, :N]
    tokens = tokens.clamp(0, model.vocab_size - 1)
    return Draft(tokens, lengths)


class BestTokens(NamedTuple):
    """The best token after each prefix; all tensors (...,)."""

    token: Tensor  # int64
    score: Tensor  # float32, log-probability in nats; NaN where a logit is


def best_tokens(logits: Tensor) -> BestTokens:
    """The best tokens of logits (..., V)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    score, token = logits.log_softmax(-1, dtype=dtype).max(-1)
    return BestTokens(token, score.float())


def drawn_tokens(logits: Tensor, temperature: float, noise: torch.Generator) -> BestTokens:
    """Tokens drawn of logits (n, K, V) at a temperature; their scores are those at temperature 1.

    All rows share the noise, so what one of them gets does not depend on which others there are.
    """
    scores = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    shares = (scores / temperature).softmax(-1)
    waits = torch.empty_like(shares[:1]).exponential_(generator=noise)
    token = (shares / waits).argmax(-1)
    return BestTokens(token, scores.gather(-1, token[..., None])[..., 0].float())


class GreedyLoop:
    """Greedy decoding, a token of every row in each turn; at a temperature tokens are drawn.

    Rows that have ended go on computing; what was found for them does not change any more. Once few
    go on the others are left behind: then memory and state have the rows that go on alone.

    Attributes:
        memory: Of the model, for the n rows that are left, as all else down to `rows`.
        past: The model's state.
        limits: (n,) most labels.
        last: (n,) the token to go on from.
        going: (n,) bool, rows that have not ended.
        rows: (n,) which utterances the rows are.
        labels: (B, columns) so far, of all utterances, as all that follows.
        counts: (B,) labels so far.
        scores: (B,) their log-probabilities in nats, and that of eos.
        ended: (B,) bool, texts that came to eos, and of utterances without frames.
        confidence: (B, columns) of the labels, or None.
    """

    def __init__(
        self,
        model: Any,
        memory: Any,
        prompts: Tensor,
        limits: Tensor,
        heard: Tensor,
        drafted: int,
        confidence: bool,
        temperature: float = 0.0,
    ) -> None:
        B, P = prompts.shape
        longest = int(limits.max())
        self.model = model
        self.temperature = temperature
        self.noise = torch.Generator(limits.device).manual_seed(0)
        self.room = P + longest
        self.past_room = min(self.room, P + drafted + ROOM)
        self.memory = memory
        self.past = model.begin(memory, self.past_room)
        self.limits = limits
        self.last = prompts[:, -1]
        self.going = heard
        self.rows = torch.arange(B, device=limits.device)
        self.labels = limits.new_zeros(B, longest + 1)  # the last column is no label's
        self.counts = torch.zeros_like(limits)
        self.scores = torch.zeros_like(limits, dtype=torch.float32)
        self.ended = ~heard
        self.confidence: Tensor | None = None
        if confidence:
            self.confidence = self.labels.float()

    def run(self) -> None:
        """Turn until every row has ended."""
        while rows := int(self.going.sum()):
            if rows <= FEW * len(self.going):
                self._leave_ended()
            self.turn(self.last[:, None])

    def texts(self, impl: str) -> Hypotheses:
        """What was found, by this decoder."""
        found = (self.labels, self.counts, self.scores, self.ended)
        return texts(*found, impl, self.confidence)

    def best(self, logits: Tensor) -> BestTokens:
        """The tokens that are taken, of logits (n, K, V)."""
        if self.temperature:
            return drawn_tokens(logits, self.temperature, self.noise)
        return best_tokens(logits)

    def _leave_ended(self) -> None:
        """Go on with the rows that have not ended."""
        going = self.going.nonzero()[:, 0]
        n = len(going)
        # rows in front need no copy, as in a batch that begins with its longest texts
        keep = slice(n) if int(going[-1]) == n - 1 else going
        for name in ("memory", "past", "limits", "last", "going", "rows"):
            rows = map_state(lambda part: part[keep], getattr(self, name))
            setattr(self, name, rows)

    def turn(self, tokens: Tensor) -> None:
        """The best token behind these (n, P), of each row that goes on."""
        logits = self._follow(tokens)
        best = self.best(logits[:, -1:])
        nothing = torch.zeros_like(self.limits)
        self._emit(best, nothing)

    def _follow(self, tokens: Tensor) -> Tensor:
        """Logits (n, K, V) of what follows each of these tokens, which the state takes in."""
        seen = int(self.past.place.max())
        reach = min(self.room, seen + tokens.shape[1])
        if reach > self.past_room:
            self.past_room = min(self.room, 2 * reach)
            self.past = with_room(self.model, self.memory, self.past, self.past_room)
        logits, self.past = self.model.follow(tokens, self.past, self.memory, reach=reach)
        return logits

    def _emit(self, best: BestTokens, kept: Tensor) -> None:
        """Take as many of the best tokens (n, N + 1) as were drafted, and the one behind them, of
        each row that goes on, or end the row.

        Other rows write too, behind their labels.
        """
        rows = self.rows[:, None]
        behind = kept[:, None]
        token = best.token.gather(1, behind)[:, 0]
        is_broken = best.score.gather(1, behind)[:, 0].isnan()
        before = self.counts[self.rows]
        counts = before + kept
        stops = self.going & is_broken
        ends = self.going & ~is_broken & (token == self.model.eos)
        emits = self.going & ~stops & ~ends & (counts < self.limits)
        scored = kept + (emits | ends | stops)
        columns = best.token.shape[1]
        scores = best.score.where(valid_mask(scored, columns), 0.0)
        places = before[:, None] + torch.arange(columns, device=kept.device)
        places = places.clamp(max=self.labels.shape[1] - 1)
        self.scores[self.rows] += scores.sum(1)
        self.labels[rows, places] = best.token
        if self.confidence is not None:
            self.confidence[rows, places] = best.score.exp()
        self.counts[self.rows] = counts + emits
        self.ended[self.rows] |= ends
        self.last = token.where(emits, self.last)
        self.going = emits

    def verify_all(self, prompts: Tensor, draft: Draft) -> None:
        """The first turn, before any row is left behind: as much of the draft as is right.

        Behind a wrong token the rest of the draft may still be right, so it is checked too, CHUNK
        tokens at a time, until less than WORTH of them is right, twice in a row. What remains is
        what decoding token by token finds.

        Args:
            prompts: (B, P), in the same call as the whole draft.
            draft: (B, N), N at least 1.
        """
        kept = self._verify(prompts, draft)
        at = torch.zeros_like(kept)
        poor = 0  # calls in a row that were not worth it
        while poor < 2:
            at = self._after_mistake(draft, at + kept)
            rest = self._rest(draft, at)
            checked = int(rest.lengths.sum())
            if not checked:
                return
            kept = self._verify(self.last[:, None], rest)
            poor = 0 if int(kept.sum()) >= WORTH * checked else poor + 1

    def _verify(self, before: Tensor, draft: Draft) -> Tensor:
        """Check a draft in one call, and emit what is right of it and the best token behind that.

        A draft's token is right if it is the best one after all before it.

        Args:
            before: (B, P) tokens that the state does not have yet: the prompt, or the last token.
            draft: (B, N), N at least 1.

        Returns:
            (B,) int64, how many tokens of the draft are right.
        """
        N = draft.tokens.shape[1]
        place = self.past.place
        logits = self._follow(torch.cat([before, draft.tokens], 1))
        best = self.best(logits[:, -N - 1 :])
        right = best.token[:, :N] == draft.tokens
        right &= draft.tokens != self.model.eos
        right &= ~best.score[:, :N].isnan()
        right &= valid_mask(draft.lengths, N)
        kept = right.long().cumprod(1).sum(1) * self.going
        after = self.past.place - N + kept
        place = torch.where(self.going, after, place)
        self.past = self.past._replace(place=place)
        self._emit(best, kept)
        return kept

    def _after_mistake(self, draft: Draft, wrong: Tensor) -> Tensor:
        """Where a draft goes on (B,) behind the token `wrong` (B,), in place of which another one
        was found: behind that one, if the draft has it nearby, else behind the wrong one.
        """
        N = draft.tokens.shape[1]
        near = wrong[:, None] + torch.tensor(NEARBY, device=wrong.device)
        inside = (near >= 0) & (near < draft.lengths[:, None])
        found = draft.tokens.gather(1, near.clamp(0, N - 1))
        is_last = found == self.last[:, None]
        fits = inside & is_last
        nearest = fits.long().argmax(1, keepdim=True)  # 0 if none is found: the wrong one
        behind = near.gather(1, nearest) + 1
        return behind[:, 0]

    def _rest(self, draft: Draft, at: Tensor) -> Draft:
        """The next CHUNK tokens of a draft from `at` (B,) on, for rows that go on.

        Fewer where one of these lacks room for as many: it would have them put over its last token.
        """
        N = draft.tokens.shape[1]
        seen = int((self.past.place * self.going).max())
        most = min(CHUNK, self.room - 1 - seen)
        left = torch.minimum(draft.lengths - at, self.limits - self.counts)
        lengths = left.clamp(max=most).clamp(min=0) * self.going
        columns = torch.arange(int(lengths.max()), device=at.device)
        places = at[:, None] + columns
        tokens = draft.tokens.gather(1, places.clamp(max=N - 1))
        return Draft(tokens, lengths)
