"""Batched beam search for attention decoders, with length normalisation, alone or with CTC."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.prefix_scores import PrefixScores
from asrkit.decoders.attention.protocol import (
    REQUIRED,
    Attention,
    Prompt,
    Steps,
    limits_of,
    prompt_of,
    to_hypotheses,
    trim_frames,
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
    max_labels: int | None = None,
    ctc: Tensor | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """The best texts of a batch, as `Hypotheses`; with a width of 1 those of `aed_greedy`.

    Each utterance has `width` hypotheses, ended or not. A step extends those that have not ended by
    every token. Of these and the ended ones, the `width` best are kept, by log-probability over
    (5 + n) / 6, where n is the number of tokens after the prompt, eos included (arXiv 1609.08144,
    equation 14). The search stops when all hypotheses have ended. One with `max_labels` labels is
    cut when it would become longer.

    With `ctc`, attention and CTC are combined (joint decoding: Hori, Watanabe, Hershey 2017,
    algorithm 2). The log-probability is then (1 - ctc_weight) times attention's plus ctc_weight
    times CTC's. CTC's is that of all texts that begin with the hypothesis, and at eos that of the
    text itself. CTC accounts for every frame in order, so loops and gaps of an attention that has
    lost its place score low.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames; 0 is allowed.
        prompt: Tokens before the text, (P,) or (B, P); None is `model.bos` alone.
        width: Hypotheses of an utterance. The memory of its frames is held as many times.
        max_labels: Most labels; None is 50 more than an utterance has frames.
        ctc: Log-probabilities of the CTC head (B, T, V + 1), blank last, as `model.encode` returns
            them; None for attention alone.
        ctc_weight: Share of CTC in a score, 0 to 1; not used without `ctc`.

    Returns:
        Hypotheses. `scores` are log-probabilities in nats, with `ctc` the weighted mean, without
        normalisation. Frames are -1 and durations 0. A NaN among the logits drops the extensions of
        its hypothesis. A NaN of CTC, if it has a weight, drops the whole utterance. If nothing is
        left, the text is empty with score -inf.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model, *REQUIRED)
    check_width(width)
    if ctc is not None:
        B, T, _ = encoded.shape
        dims(ctc, "B T V", "ctc", B=B, T=T, V=model.vocab_size + 1)
        valid = is_finite(ctc_weight) and 0 <= ctc_weight <= 1
        expect(valid, "ctc_weight", "a share from 0 to 1", f"{ctc_weight!r:.40}")
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], max_labels)
    impl = "attention, beam"
    with torch.inference_mode():
        memory = model.prefill(trim_frames(encoded, longest), lengths)
        memory = map_state(lambda part: part.repeat_interleave(width, 0), memory)
        prefixes = None
        if ctc is not None and ctc_weight > 0:
            impl += f" with CTC ({ctc_weight:g})"
            prefixes = PrefixScores(ctc[:, :longest], lengths, width, ctc_weight)
        steps = Steps(model, memory, prompts, limits)
        beams = Search(steps, prompts, limits[:, None], width, prefixes).run(lengths > 0)
        best = normalised(beams.scores, beams.counts + beams.ended).argmax(1)
        rows = torch.arange(len(best), device=best.device)
        text = map_state(lambda part: part[rows, best], beams)
        counts = text.counts * (text.scores > -torch.inf)
    return to_hypotheses(text.labels, counts, text.scores, text.ended, impl)


class Beams(NamedTuple):
    """The hypotheses of every utterance; all tensors (B, K, ...)."""

    labels: Tensor  # (B, K, columns) int64
    counts: Tensor  # (B, K) int64, labels
    scores: Tensor  # (B, K), log-probabilities in nats; -inf in an empty place
    last: Tensor  # (B, K) int64, the token of the next step
    active: Tensor  # (B, K) bool, not ended
    ended: Tensor  # (B, K) bool, by eos


def normalised(scores: Tensor, tokens: Tensor) -> Tensor:
    """The rank of hypotheses with these log-probabilities and numbers of tokens (...,)."""
    return scores / ((5 + tokens).to(scores.dtype) / 6)


@dataclass(frozen=True)
class Search:
    """The beam search of one batch."""

    steps: Steps  # of B K hypotheses
    prompts: Tensor  # (B, P)
    limits: Tensor  # (B, 1), most labels
    width: int  # K
    ctc: PrefixScores | None

    def run(self, has_frames: Tensor) -> Beams:
        """The hypotheses when all have ended; those of utterances without frames are empty.

        Args:
            has_frames: (B,) bool.
        """
        B = len(self.prompts)
        K = self.width
        first = torch.arange(0, B * K, K, device=has_frames.device)[:, None]
        exists = torch.arange(K, device=has_frames.device).expand(B, K) == 0
        counts = self.prompts.new_zeros(B, K)
        beams = Beams(
            labels=counts.new_zeros(B, K, int(self.limits.max()) + 1),
            counts=counts,
            scores=counts.double().masked_fill(~exists, -torch.inf),
            last=counts + self.prompts[:, -1:],
            active=exists & has_frames[:, None],
            ended=exists & ~has_frames[:, None],
        )
        tokens = self.prompts.repeat_interleave(K, 0)
        while bool(beams.active.any()):
            logits = self.steps(tokens)[:, -1].unflatten(0, (B, K))
            beams, parents = self.step(beams, logits)
            rows = (first + parents).flatten()
            self.steps.state = map_state(lambda part, rows=rows: part[rows], self.steps.state)
            tokens = beams.last.flatten()[:, None]
        return beams

    def step(self, beams: Beams, logits: Tensor) -> tuple[Beams, Tensor]:
        """The best hypotheses after one more token, and the parent (B, K) of each.

        Args:
            beams: The hypotheses.
            logits: (B, K, V) of the token after each.
        """
        V = logits.shape[2]
        eos = self.steps.model.eos
        added = logits.log_softmax(-1, dtype=torch.float64)
        added = added.masked_fill(added.isnan(), -torch.inf)
        if self.ctc is not None:
            added = self.ctc.joint(added, eos)
        values, index = self.ranked(beams, added).topk(self.width, 1)
        parents = index // (V + 1)
        tokens = index % (V + 1)  # V means no token
        rows = torch.arange(len(parents), device=parents.device)[:, None]
        before = map_state(lambda part: part[rows, parents], beams)
        label = tokens.clamp(max=V - 1)
        gained = added[rows, parents, label]
        moves = before.active & (tokens < V)
        ends = moves & (tokens == eos)
        emits = moves & ~ends & (before.counts < self.limits)
        if self.ctc is not None:
            self.ctc.advance(parents, label, emits)
        exists = values > -torch.inf  # the others only fill the beam
        scores = before.scores + gained.where(ends | emits, 0.0)
        column = before.counts[..., None]
        after = Beams(
            labels=before.labels.scatter(2, column, label[..., None]),
            counts=before.counts + emits,
            scores=scores.masked_fill(~exists, -torch.inf),
            last=torch.where(emits, label, before.last),
            active=emits & exists,
            ended=(before.ended | ends) & exists,
        )
        return after, parents

    def ranked(self, beams: Beams, added: Tensor) -> Tensor:
        """The rank of each hypothesis with each next token, and without one: (B, K (V + 1)).

        Args:
            beams: The hypotheses.
            added: (B, K, V) what each token adds to their scores.
        """
        total = beams.scores[..., None] + added
        # At its limit any label cuts a hypothesis, so only the likeliest label and eos compete.
        tokens = torch.arange(added.shape[2], device=added.device)
        is_eos = tokens == self.steps.model.eos
        likeliest = total.masked_fill(is_eos, -torch.inf).argmax(2, keepdim=True)
        at_limit = (beams.counts >= self.limits)[..., None]
        is_cut = at_limit & (tokens != likeliest) & ~is_eos
        has_ended = ~beams.active[..., None]
        total = total.masked_fill(is_cut | has_ended, -torch.inf)
        total = normalised(total, beams.counts[..., None] + 1)
        stays = normalised(beams.scores, beams.counts + beams.ended)
        stays = stays.masked_fill(beams.active, -torch.inf)
        return torch.cat([total, stays[..., None]], 2).flatten(1)
