"""Batched beam search for attention decoders, with length normalisation, joint with CTC or not."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.loop import unended
from asrkit.decoders.attention.prefix_scores import PrefixScores, check_ctc
from asrkit.decoders.attention.steps import (
    CROSS,
    PAST,
    Attention,
    Prompt,
    check_model,
    limits_of,
    prompt_of,
)
from asrkit.decoders.beams import check_width
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.states import map_state
from asrkit.runtime import eager
from asrkit.shapes import expect, expect_choice, is_finite, valid_mask

MOST_PENALTY = 10  # a text of 1,000 tokens is divided by 10^22 then, still a number with meaning


def check_beam(width: int, nbest: int, length_penalty: float) -> None:
    """ValueError for arguments of `aed_beam` that do not fit.

    Args:
        width: Hypotheses of an utterance.
        nbest: Hypotheses in the result, at most `width`.
        length_penalty: Exponent of the length.
    """
    check_width(width, nbest)
    valid = is_finite(length_penalty) and 0 <= length_penalty <= MOST_PENALTY
    wanted = f"a number from 0 to {MOST_PENALTY}"
    expect(valid, "length_penalty", wanted, f"{length_penalty!r:.40}")


@eager
def aed_beam(  # noqa: PLR0913 - all options of beam search, keyword-only
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    width: int = 4,
    nbest: int = 1,
    length_penalty: float = 1.0,
    most: int | None = None,
    cross: Literal["kept", "absorbed", "recomputed"] = "kept",
    past: Literal["kept", "states", "none"] = "kept",
    ctc: Tensor | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """The best texts of a batch, as `Hypotheses`; with a width of 1 those of `aed_greedy`.

    Each utterance has `width` hypotheses, ended or not. In every step those that have not ended are
    extended by every token, and of all of them, ended ones too, the `width` best stay, by
    log-probability over ((5 + n) / 6) ** length_penalty, where n counts tokens behind the prompt,
    eos included (arXiv 1609.08144, equation 14). It ends once all of them have ended. One that has
    `most` labels is cut where it would go on.

    With `ctc` both have a say (joint decoding: Hori, Watanabe, Hershey 2017, algorithm 2): in place
    of the log-probability stands (1 - ctc_weight) times it plus ctc_weight times that of CTC, which
    is that of all texts that begin so far, and at eos that of the text itself. CTC hears every
    frame in turn, so loops and gaps of an attention that has lost its place score low.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames; 0 is allowed.
        prompt: Tokens before the text, (P,) or (B, P); None is `model.bos` alone.
        width: Hypotheses of an utterance. The memory of its frames is held as many times.
        nbest: Hypotheses per utterance in the result.
        length_penalty: 0 compares plain log-probabilities, which favours short texts; 1 is near to
            a mean over the tokens.
        most: Most labels; None is 50 more than an utterance has frames.
        cross: What is kept of the frames, as in `aed_greedy`.
        past: What is kept of the text so far, as in `aed_greedy`.
        ctc: Log-probabilities of the CTC head (B, T, V + 1), blank last, as `model.encode` returns
            them; None for attention alone.
        ctc_weight: Share of CTC in a score, 0 to 1; not used without `ctc`.

    Returns:
        The best; `alternatives` are the second to nbest-th. `scores` are log-probabilities in nats,
        with `ctc` their weighted mean, without normalisation; frames are -1 and durations 0. NaN
        among the logits drops what they would extend, and NaN of CTC with a weight drops all of the
        utterance; hypotheses that do not exist are empty with score -inf.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model)
    check_beam(width, nbest, length_penalty)
    expect_choice("cross", cross, CROSS)
    expect_choice("past", past, PAST)
    if ctc is not None:
        check_ctc(ctc, ctc_weight, encoded, model.vocab_size)
    lengths = lengths.long()
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    with torch.inference_mode():
        frames = encoded[:, : max(1, longest)]
        if not encoded.shape[1]:
            frames = encoded.new_zeros(len(encoded), 1, encoded.shape[2])
        search = Search(model, prompts, limits, width, length_penalty)
        joint = ""
        if ctc is not None:
            search = JointSearch(
                model,
                prompts,
                limits,
                width,
                length_penalty,
                log_probs=ctc[:, :longest],
                lengths=lengths,
                ctc_weight=ctc_weight,
            )
            joint = f" with CTC ({ctc_weight:g})"
        memory = model.remember(frames, lengths, cross=cross)
        found = search.run(memory, lengths, past)
    impl = f"attention, beam{joint}, cross={cross}, past={past}"
    first, *rest = _ranked(found, length_penalty, nbest, impl)
    return replace(first, alternatives=tuple(rest))


class Beams(NamedTuple):
    """The hypotheses of every utterance; all tensors (B, K, ...)."""

    labels: Tensor  # (B, K, columns) int64
    counts: Tensor  # (B, K) int64, labels
    scores: Tensor  # (B, K), log-probabilities in nats; -inf of one that does not exist
    last: Tensor  # (B, K) int64, the token to go on from
    going: Tensor  # (B, K) bool, not ended
    ended: Tensor  # (B, K) bool, by eos

    def sizes(self) -> Tensor:
        """(B, K) tokens behind the prompt, eos included."""
        return self.counts + self.ended


class Choice(NamedTuple):
    """Which hypotheses stay; all tensors (B, K)."""

    parents: Tensor  # int64, which of those before each comes from
    tokens: Tensor  # int64, its new token; V for none
    exists: Tensor  # bool; others were chosen for want of any


def normalised(scores: Tensor, tokens: Tensor, length_penalty: float) -> Tensor:
    """What hypotheses are ranked by (arXiv 1609.08144, equation 14).

    Args:
        scores: Log-probabilities in nats (...,).
        tokens: Tokens of each, eos included (...,).
        length_penalty: Exponent.
    """
    return scores / ((5 + tokens) / 6) ** length_penalty


class Search:
    """One beam search of one batch."""

    def __init__(
        self, model: Any, prompts: Tensor, limits: Tensor, width: int, length_penalty: float
    ) -> None:
        """Prepare a search.

        Args:
            model: An `Attention`.
            prompts: (B, P).
            limits: (B,) most labels.
            width: Hypotheses of an utterance, K.
            length_penalty: Exponent of the length.
        """
        self.model = model
        self.prompts = prompts
        self.limits = limits[:, None]
        self.width = width
        self.length_penalty = length_penalty

    def run(self, memory: Any, lengths: Tensor, past: str) -> Beams:
        """The hypotheses once all have ended.

        Args:
            memory: Of the model, B rows.
            lengths: (B,) frames.
            past: What the model is to keep of the texts.
        """
        B, P = self.prompts.shape
        K = self.width
        room = P + int(self.limits.max())
        memory = map_state(lambda part: part.repeat_interleave(K, 0), memory)
        state = self.model.begin(memory, room, past=past)
        beams = self.start(lengths, room)
        tokens = self.prompts.repeat_interleave(K, 0)
        seen = P
        while bool(beams.going.any()):
            logits, state = self.model.follow(tokens, state, memory, reach=seen)
            logits = logits[:, -1].unflatten(0, (B, K))
            added = self.added(beams, logits)
            choice = self.choose(beams, added)
            self.advance(beams, choice)
            beams = self.extend(beams, added, choice)
            rows = choice.parents + K * torch.arange(B, device=logits.device)[:, None]
            state = self._reordered(state, rows.flatten())
            tokens = beams.last.flatten()[:, None]
            seen = min(room, seen + 1)
        return beams

    def start(self, lengths: Tensor, room: int) -> Beams:
        """One empty hypothesis for each utterance, ended already where it has no frames."""
        B, K = len(lengths), self.width
        counts = lengths.new_zeros(B, K)
        exists = torch.arange(K, device=lengths.device).expand(B, K) == 0
        zeros = torch.zeros(B, K, dtype=torch.float64, device=lengths.device)
        heard = lengths[:, None] > 0
        return Beams(
            labels=lengths.new_zeros(B, K, room + 1),
            counts=counts,
            scores=zeros.masked_fill(~exists, -torch.inf),
            last=counts + self.prompts[:, -1:],
            going=exists & heard,
            ended=exists & ~heard,
        )

    def choose(self, beams: Beams, added: Tensor) -> Choice:
        """The best after one more token.

        Args:
            beams: The hypotheses.
            added: (B, K, V) what each token adds to their scores.
        """
        V = added.shape[2]
        total = beams.scores[..., None] + added
        at_limit = (beams.counts >= self.limits) & beams.going
        others = total.clone()
        others[..., self.model.eos] = -torch.inf
        best_other = others.argmax(2, keepdim=True)
        tokens = torch.arange(V, device=added.device)
        # Any label cuts a hypothesis at its limit: the likeliest stands for all, beside eos.
        may_end = (tokens == best_other) | (tokens == self.model.eos)
        total = total.masked_fill(at_limit[..., None] & ~may_end, -torch.inf)
        total = total.masked_fill(~beams.going[..., None], -torch.inf)
        total = normalised(total, beams.counts[..., None] + 1, self.length_penalty)
        stays = normalised(beams.scores, beams.sizes(), self.length_penalty)
        stays = stays.masked_fill(beams.going, -torch.inf)
        ranked = torch.cat([total, stays[..., None]], 2).flatten(1)  # (B, K (V + 1))
        values, index = ranked.topk(self.width, 1)
        return Choice(index // (V + 1), index % (V + 1), values > -torch.inf)

    def extend(self, beams: Beams, added: Tensor, choice: Choice) -> Beams:
        """The hypotheses after one more token.

        Args:
            beams: Those before.
            added: (B, K, V) what each token adds to their scores.
            choice: Of `choose`.
        """
        parents, chosen, exists = choice
        V = added.shape[2]
        index = chosen.clamp(max=V - 1)[..., None]
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before = map_state(lambda part: part[rows, parents], beams)
        gained = added[rows, parents].gather(2, index)[..., 0]
        moves = before.going & (chosen < V)
        ends = moves & (chosen == self.model.eos)
        emits = moves & ~ends & (before.counts < self.limits)
        scores = before.scores + gained.where(ends | emits, 0.0)
        column = before.counts[..., None]
        kept = before.labels.gather(2, column)
        label = torch.where(emits[..., None], index, kept)
        return Beams(
            labels=before.labels.scatter(2, column, label),
            counts=before.counts + emits,
            scores=scores.masked_fill(~exists, -torch.inf),
            last=torch.where(emits, index[..., 0], before.last),
            going=emits & exists,
            ended=(before.ended | ends) & exists,
        )

    def added(self, beams: Beams, logits: Tensor) -> Tensor:
        """What each next token adds to the scores, (B, K, V) in nats in float64; -inf for NaN.

        Args:
            beams: The hypotheses.
            logits: (B, K, V) of what follows each.
        """
        logp = logits.log_softmax(-1, dtype=torch.float64)
        return logp.masked_fill(logp.isnan(), -torch.inf)

    def advance(self, beams: Beams, choice: Choice) -> None:
        """Bring what the search itself remembers of the hypotheses to those that were chosen.

        Args:
            beams: Those before.
            choice: Of `choose`.
        """

    def _reordered(self, state: Any, rows: Tensor) -> Any:
        """The model's state with its rows in another order."""
        same = bool((rows == torch.arange(len(rows), device=rows.device)).all())
        return state if same else map_state(lambda part: part[rows], state)


class JointSearch(Search):
    """A search in which CTC has a say."""

    def __init__(
        self,
        model: Any,
        prompts: Tensor,
        limits: Tensor,
        width: int,
        length_penalty: float,
        *,
        log_probs: Tensor,
        lengths: Tensor,
        ctc_weight: float,
    ) -> None:
        """Prepare a search.

        Args:
            model: As in `Search`, like the next four.
            prompts: (B, P).
            limits: (B,) most labels.
            width: Hypotheses of an utterance, K.
            length_penalty: Exponent of the length.
            log_probs: (B, T, V + 1) of CTC, blank last.
            lengths: (B,) valid frames.
            ctc_weight: Share of CTC in a score.
        """
        super().__init__(model, prompts, limits, width, length_penalty)
        self.ctc = PrefixScores.start(log_probs, lengths, width)
        self.ctc_weight = ctc_weight
        heard = valid_mask(lengths, log_probs.shape[1])[..., None]
        self.is_broken = (log_probs.isnan() & heard).any((1, 2))[:, None, None]  # (B, 1, 1)
        # scores of CTC in nats: (B, K, 1) of the hypotheses, and (B, K, V) with one more token
        B = len(prompts)
        self.ctc_scores = torch.zeros(B, width, 1, dtype=torch.float64, device=prompts.device)
        self.longer_ctc_scores = self.ctc_scores

    def added(self, beams: Beams, logits: Tensor) -> Tensor:
        """As `Search.added`: what attention adds and what CTC does, weighed."""
        attention = super().added(beams, logits)
        scores = self.ctc.after(beams.last, beams.counts > 0)  # (B, K, V + 1)
        scores[..., self.model.eos] = scores[..., -1]  # the text itself
        self.longer_ctc_scores = scores[..., :-1]
        weight = self.ctc_weight
        if weight == 0:
            return attention  # 0 times -inf is no number
        if weight == 1:
            attention = torch.zeros_like(attention).where(attention.isfinite(), -torch.inf)
        by_ctc = self.longer_ctc_scores - self.ctc_scores
        total = (1 - weight) * attention + weight * by_ctc
        return total.masked_fill(total.isnan() | self.is_broken, -torch.inf)

    def advance(self, beams: Beams, choice: Choice) -> None:
        """As `Search.advance`: the prefixes of CTC."""
        parents, chosen, _ = choice
        V = self.longer_ctc_scores.shape[2]
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        tokens = chosen.clamp(max=V - 1)
        going = beams.going[rows, parents] & (beams.counts < self.limits)[rows, parents]
        moves = going & (chosen < V) & (chosen != self.model.eos)
        repeats = (beams.last[rows, parents] == tokens) & (beams.counts[rows, parents] > 0)
        longer = self.longer_ctc_scores[rows, parents].gather(2, tokens[..., None])
        same = self.ctc_scores[rows, parents]
        self.ctc_scores = torch.where(moves[..., None], longer, same)
        self.ctc.advance(parents, tokens, moves, repeats)


@torch.inference_mode(False)
def _ranked(beams: Beams, length_penalty: float, nbest: int, impl: str) -> list[Hypotheses]:
    """The hypotheses by rank, the best first."""
    beams = map_state(Tensor.clone, beams)
    values = normalised(beams.scores, beams.sizes(), length_penalty)
    order = values.argsort(dim=1, descending=True, stable=True)
    ranks = []
    for rank in order[:, :nbest].unbind(1):
        rows = torch.arange(len(rank), device=rank.device)
        best = map_state(lambda part, rows=rows, rank=rank: part[rows, rank], beams)
        exists = best.scores > -torch.inf
        lengths = best.counts * exists
        N = int(lengths.max())
        beyond = torch.arange(N, device=rank.device) >= lengths[:, None]
        nothing = torch.full_like(best.labels[:, :N], PADDING)
        scores = best.scores.float()
        ended = best.ended & exists
        found = Hypotheses(
            labels=best.labels[:, :N].masked_fill(beyond, PADDING),
            frames=nothing,
            durations=nothing.masked_fill(~beyond, 0),
            lengths=lengths,
            scores=scores,
            impl=impl + unended(ended, scores),
            ended=ended,
        )
        ranks.append(found)
    return ranks
