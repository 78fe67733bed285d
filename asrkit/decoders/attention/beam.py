"""Batched beam search for attention decoders, with length normalisation, joint with CTC or not."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.prefix_scores import PrefixScores
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
from asrkit.decoders.beams import check_width
from asrkit.decoders.hypotheses import Hypotheses, check_batch, check_model
from asrkit.decoders.states import map_state
from asrkit.shapes import dims, expect, is_finite
from asrkit.threads import eager


@eager
def aed_beam(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    width: int = 4,
    most: int | None = None,
    ctc: Tensor | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """The best texts of a batch, as `Hypotheses`; with a width of 1 those of `aed_greedy`.

    Each utterance has `width` hypotheses, ended or not. In every step those that have not ended are
    extended by every token, and of all of them, ended ones too, the `width` best stay, by
    log-probability over (5 + n) / 6, where n counts tokens behind the prompt, eos included (arXiv
    1609.08144, equation 14). It ends once all of them have ended. One that has `most` labels is cut
    where it would go on.

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
        most: Most labels; None is 50 more than an utterance has frames.
        ctc: Log-probabilities of the CTC head (B, T, V + 1), blank last, as `model.encode` returns
            them; None for attention alone.
        ctc_weight: Share of CTC in a score, 0 to 1; not used without `ctc`.

    Returns:
        `scores` are log-probabilities in nats, with `ctc` their weighted mean, without
        normalisation; frames are -1 and durations 0. NaN among the logits drops what they would
        extend, and NaN of CTC with a weight drops all of the utterance; where nothing is left, the
        text is empty with score -inf.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model, *NAMES)
    check_width(width)
    if ctc is not None:
        B, T, _ = encoded.shape
        dims(ctc, "B T V", "ctc", B=B, T=T, V=model.vocab_size + 1)
        valid = is_finite(ctc_weight) and 0 <= ctc_weight <= 1
        expect(valid, "ctc_weight", "a share from 0 to 1", f"{ctc_weight!r:.40}")
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    impl = "attention, beam"
    with torch.inference_mode():
        memory = model.remember(heard_frames(encoded, longest), lengths)
        memory = map_state(lambda part: part.repeat_interleave(width, 0), memory)
        prefixes = None
        if ctc is not None and ctc_weight > 0:
            impl += f" with CTC ({ctc_weight:g})"
            prefixes = PrefixScores(ctc[:, :longest], lengths, width, ctc_weight)
        search = Search(
            model=model,
            memory=memory,
            prompts=prompts,
            limits=limits[:, None],
            width=width,
            ctc=prefixes,
        )
        beams = search.run(lengths > 0)
        ranks = normalised(beams.scores, beams.counts + beams.ended)
        best = ranks.argmax(1)
        rows = torch.arange(len(best), device=best.device)
        found = map_state(lambda part: part[rows, best], beams)
        exists = found.scores > -torch.inf
    return texts(
        labels=found.labels,
        lengths=found.counts * exists,
        scores=found.scores,
        ended=found.ended,
        impl=impl,
    )


class Beams(NamedTuple):
    """The hypotheses of every utterance; all tensors (B, K, ...)."""

    labels: Tensor  # (B, K, columns) int64
    counts: Tensor  # (B, K) int64, labels
    scores: Tensor  # (B, K), log-probabilities in nats; -inf of one that does not exist
    last: Tensor  # (B, K) int64, the token to go on from
    going: Tensor  # (B, K) bool, not ended
    ended: Tensor  # (B, K) bool, by eos


def normalised(scores: Tensor, tokens: Tensor) -> Tensor:
    """What hypotheses are ranked by, from log-probabilities and numbers of tokens (...,)."""
    return scores / ((5 + tokens).to(scores.dtype) / 6)


@dataclass(frozen=True)
class Search:
    """One beam search of one batch."""

    model: Any
    memory: Any  # of each of B K hypotheses
    prompts: Tensor  # (B, P)
    limits: Tensor  # (B, 1), most labels
    width: int  # K
    ctc: PrefixScores | None

    def run(self, heard: Tensor) -> Beams:
        """The hypotheses once all have ended; those of utterances not `heard` (B,) are empty."""
        B, P = self.prompts.shape
        K = self.width
        first = torch.arange(0, B * K, K, device=heard.device)[:, None]
        longest = int(self.limits.max())
        room = min(P + longest, P + ROOM)
        state = self.model.begin(self.memory, room)
        exists = torch.arange(K, device=heard.device).expand(B, K) == 0
        counts = self.prompts.new_zeros(B, K)
        beams = Beams(
            labels=counts.new_zeros(B, K, longest + 1),
            counts=counts,
            scores=counts.double().masked_fill(~exists, -torch.inf),
            last=counts + self.prompts[:, -1:],
            going=exists & heard[:, None],
            ended=exists & ~heard[:, None],
        )
        tokens = self.prompts.repeat_interleave(K, 0)
        reach = P
        while bool(beams.going.any()):
            if reach > room:
                room = min(P + longest, 2 * reach)
                state = with_room(self.model, self.memory, state, room)
            logits, state = self.model.follow(tokens, state, self.memory, reach=reach)
            logits = logits[:, -1].unflatten(0, (B, K))
            beams, parents = self.step(beams, logits)
            rows = (first + parents).flatten()
            state = map_state(lambda part, rows=rows: part[rows], state)
            tokens = beams.last.flatten()[:, None]
            reach = min(P + longest, reach + 1)
        return beams

    def step(self, beams: Beams, logits: Tensor) -> tuple[Beams, Tensor]:
        """The best hypotheses with one more token, and which (B, K) of those before each is from.

        Args:
            beams: The hypotheses.
            logits: (B, K, V) of what follows each.
        """
        V = logits.shape[2]
        eos = self.model.eos
        added = logits.log_softmax(-1, dtype=torch.float64)
        added = added.masked_fill(added.isnan(), -torch.inf)
        if self.ctc is not None:
            added = self.ctc.joint(added, eos)
        values, index = self.ranked(beams, added).topk(self.width, 1)
        parents = index // (V + 1)
        tokens = index % (V + 1)  # V stands for none
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before = map_state(lambda part: part[rows, parents], beams)
        label = tokens.clamp(max=V - 1)
        gained = added[rows, parents, label]
        moves = before.going & (tokens < V)
        ends = moves & (tokens == eos)
        emits = moves & ~ends & (before.counts < self.limits)
        if self.ctc is not None:
            self.ctc.advance(parents, label, emits)
        exists = values > -torch.inf  # others were chosen for want of any
        scores = before.scores + gained.where(ends | emits, 0.0)
        column = before.counts[..., None]
        after = Beams(
            labels=before.labels.scatter(2, column, label[..., None]),
            counts=before.counts + emits,
            scores=scores.masked_fill(~exists, -torch.inf),
            last=torch.where(emits, label, before.last),
            going=emits & exists,
            ended=(before.ended | ends) & exists,
        )
        return after, parents

    def ranked(self, beams: Beams, added: Tensor) -> Tensor:
        """What each hypothesis is worth with each next token, and as it is: (B, K (V + 1)).

        Args:
            beams: The hypotheses.
            added: (B, K, V) what each token adds to their scores.
        """
        total = beams.scores[..., None] + added
        # Any label cuts a hypothesis at its limit: the likeliest stands for all, beside eos.
        tokens = torch.arange(added.shape[2], device=added.device)
        is_eos = tokens == self.model.eos
        likeliest = total.masked_fill(is_eos, -torch.inf).argmax(2, keepdim=True)
        at_limit = (beams.counts >= self.limits)[..., None]
        is_cut = at_limit & (tokens != likeliest) & ~is_eos
        has_ended = ~beams.going[..., None]
        total = total.masked_fill(is_cut | has_ended, -torch.inf)
        total = normalised(total, beams.counts[..., None] + 1)
        stays = normalised(beams.scores, beams.counts + beams.ended)
        stays = stays.masked_fill(beams.going, -torch.inf)
        return torch.cat([total, stays[..., None]], 2).flatten(1)
