"""Batched CTC prefix beam search.

A hypothesis is a prefix: a label sequence that the frames so far may stand for. The probabilities
of its alignments are summed, those that end in a blank apart from those that end in its last label:
the same label once more is a new one after a blank only.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hannun et al. 2014, arXiv 1408.2873, algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.beams import LanguageModel, check_weights, check_width, first_best
from asrkit.decoders.ctc.alignment import best_alignment, possible
from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.states import map_state, select_state
from asrkit.runtime import eager
from asrkit.shapes import expect, whole

MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: multiplying by it loses nothing


@eager
def ctc_beam(  # noqa: PLR0913 - all options of beam search, keyword-only
    log_probs: Tensor,
    lengths: Tensor,
    *,
    blank: int = -1,
    width: int = 8,
    nbest: int = 1,
    top_tokens: int | None = None,
    lm: LanguageModel | None = None,
    lm_weight: float = 0.3,
    label_bonus: float = 0.0,
) -> Hypotheses:
    """The best label sequences of a batch of CTC outputs, as `Hypotheses`.

    The search: after each frame the `width` likeliest prefixes are kept, by the summed probability
    of all their alignments so far plus what fusion adds. The next frame continues each by a blank
    or its last label, and by every label as a new prefix, or one that is kept already, to which it
    then adds. Where no more than `width` prefixes exist nothing is lost and the scores are exact.
    Of prefixes with equal scores those that were kept before stay, in their order, then new ones in
    the order of the prefix they extend and of their label. With width=1 it is not greedy decoding,
    which takes the likeliest alignment: it sums alignments, but keeps one prefix. All utterances go
    frame by frame together.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more; computed in
            float32 or float64. One that is not finite counts as -inf.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        blank: Index of the blank; negative counts from the end.
        width: Prefixes that are kept after each frame.
        nbest: Hypotheses per utterance in the result.
        top_tokens: Only so many of the likeliest labels of a frame begin new prefixes; None: all.
            Time falls with it where V is large. Prefixes that are kept already are not affected.
        lm: Language model for shallow fusion: an `NGram` over tokens, a `WordNGram` over words.
        lm_weight: Weight of its log-probability, of labels and end of sentence, in the ranking.
        label_bonus: Added per label. With an `NGram` every label costs what it says, so texts come
            out short without it: begin with lm_weight times the nats that a label costs. A
            `WordNGram` has a bonus of its own.

    Returns:
        The best; `alternatives` are the second to nbest-th. `scores` are log-probabilities in nats,
        summed over the alignments that the beam kept, plus the terms of fusion. `frames` and
        `durations` are of the likeliest alignment of the labels: first frame of each run, and its
        length. Hypotheses that do not exist are empty with score -inf, as is the best itself where
        nothing is possible: NaN in a frame, or a word that `lm` excludes.

    Raises:
        ValueError: An argument does not fit.
    """
    longest = check_batch(log_probs, lengths, "B T V", "log_probs")
    V = log_probs.shape[-1]
    blank = blank_index(blank, V)
    expect(V > 1, "log_probs", "a blank and at least one label", f"V={V}")
    check_width(width)
    expect(whole(nbest, 1, width), "nbest", f"1 to width={width} hypotheses", repr(nbest))
    fits = top_tokens is None or whole(top_tokens, 1)
    expect(fits, "top_tokens", "at least 1, or None", repr(top_tokens))
    fits = lm is None or isinstance(lm, LanguageModel)
    remedy = "Read a file by NGram.read or WordNGram.read."
    expect(fits, "lm", "a language model, or None", type(lm).__name__, remedy)
    check_weights(lm_weight=lm_weight, label_bonus=label_bonus)
    if not lm_weight:
        lm = None
    with torch.inference_mode():
        log_probs = possible(log_probs[:, :longest], lengths, blank)
        search = Search(log_probs, blank, width, top_tokens, lm, lm_weight, label_bonus)
        scores, labels = search.run()
        counts = (labels != PADDING).sum(2)
    ranked = []
    for n in range(nbest):
        count = counts[:, n].clone()
        own = labels[:, n, : int(count.max())].clone()
        aligned = best_alignment(log_probs, own, count, blank)
        ranked.append(
            Hypotheses(
                labels=own,
                frames=aligned.frames,
                durations=aligned.durations,
                lengths=count,
                scores=scores[:, n].clone(),
                impl=f"ctc beam, width {width}",
            )
        )
    return replace(ranked[0], alternatives=tuple(ranked[1:]))


class Beam(NamedTuple):
    """K prefixes of each utterance, best first; all tensors (B, K).

    A score of -inf marks an empty place.
    """

    score: Tensor  # log-probability of all alignments, fusion included
    blank: Tensor  # log-probability of the alignments that end in a blank
    label: Tensor  # log-probability of the alignments that end in the last label
    fused: Tensor  # what fusion has added
    last: Tensor  # int64, the last label; -1 in the empty prefix
    # int64, hash of the prefix: of 64 bits, so different prefixes are taken for one once in 10^13
    # times a million comparisons
    key: Tensor
    parent_key: Tensor  # int64, hash of the prefix without its last label


class Search:
    """One search of one batch.

    Attributes:
        tokens: (B, T, k) the labels that may begin a new prefix on each frame, ascending.
        lm_state: States of the language model, B K of them.
        lm_scores: (B K, V), what it adds to each prefix's next label.
    """

    def __init__(
        self,
        log_probs: Tensor,
        blank: int,
        width: int,
        top_tokens: int | None,
        lm: LanguageModel | None,
        lm_weight: float,
        label_bonus: float,
    ) -> None:
        """Prepare a search of log_probs (B, T, V) with the arguments of `ctc_beam`."""
        V = log_probs.shape[-1]
        self.log_probs = log_probs
        self.blank = blank
        self.width = width
        self.lm = lm
        self.lm_weight = lm_weight
        self.label_bonus = label_bonus
        self.lm_state: Any
        self.lm_scores: Tensor
        k = min(V - 1, top_tokens or V)
        if lm is None:
            # All labels cost fusion the same. Of the K + 1 likeliest, K at least do not repeat a
            # prefix's last label; each leads to a prefix that outranks those of the other labels.
            k = min(k, width + 1)
        tokens = torch.arange(V, device=log_probs.device)
        labels = tokens[tokens != blank]
        self.tokens = labels[first_best(log_probs[..., labels], k)]

    def run(self) -> tuple[Tensor, Tensor]:
        """(scores (B, K), labels (B, K, T) padded with -1) of the prefixes after the last frames.

        Best first, with the score of the end of the sentence. Empty places have no labels.
        """
        beam = self.start()
        history = []
        for t in range(self.log_probs.shape[1]):
            beam, origin, added = self.frame(t, beam)
            history.append((origin, added))
            if self.lm is not None:
                self.fuse(self.lm, origin, added)
        score = beam.score
        if self.lm is not None:
            score = score + self.lm_weight * self.lm.final(self.lm_state).view_as(score)
        score, place = score.sort(dim=1, descending=True, stable=True)
        labels = labels_of(history, place)
        return score, labels.masked_fill(score[..., None] == -torch.inf, PADDING)

    def start(self) -> Beam:
        """The empty prefix of every utterance: (B, K), of which the first place is taken."""
        B, _, V = self.log_probs.shape
        impossible = self.log_probs.new_full((B, self.width), -torch.inf)
        certain = impossible.clone()
        certain[:, 0] = 0
        zero = torch.zeros_like(impossible, dtype=torch.int64)
        if self.lm is not None:
            self.lm_state = self.lm.start(zero.numel())
            self.lm_scores = self.lm_weight * self.lm.scores(self.lm_state)
            size = self.lm_scores.shape[-1]
            remedy = "Blank has a place among them."
            expect(size == V, "lm", f"scores of V={V} tokens", size, remedy)
        return Beam(
            score=certain,
            blank=certain,
            label=impossible,
            fused=torch.zeros_like(impossible),
            last=zero - 1,
            key=zero,
            parent_key=zero - 1,
        )

    def frame(self, t: int, beam: Beam) -> tuple[Beam, Tensor, Tensor]:
        """The beam after frame t, where each prefix was in it before, and its new label or -1."""
        K = self.width
        kept, new_logp, new_fused = self.candidates(t, beam)
        new_score = new_logp + new_fused
        scores = torch.cat([kept.score, new_score], 1)
        place = first_best(scores, K)
        best_first = scores.gather(1, place).sort(dim=1, descending=True, stable=True).indices
        place = place.gather(1, best_first)
        is_new = place >= K
        extension = (place - K).clamp(min=0)
        k = self.tokens.shape[-1]
        origin = torch.where(is_new, extension // k, place)
        label = self.tokens[:, t].gather(1, extension % k)
        before = Beam(*(part.gather(1, origin) for part in kept))
        new = Beam(
            score=new_score.gather(1, extension),
            blank=torch.full_like(before.blank, -torch.inf),
            label=new_logp.gather(1, extension),
            fused=new_fused.gather(1, extension),
            last=label,
            key=(before.key + label + 1) * MIX,
            parent_key=before.key,
        )
        after = map_state(partial(torch.where, is_new), new, before)
        return after, origin, label.masked_fill(~is_new, PADDING)

    def candidates(self, t: int, beam: Beam) -> tuple[Beam, Tensor, Tensor]:
        """The same prefixes after frame t, and those with one more label.

        Of these (log-probability, what fusion has added), (B, K k) each. One that the beam has
        already adds to that, and has -inf here.
        """
        logp = self.log_probs[:, t]
        B, V = logp.shape
        total = beam.blank.logaddexp(beam.label)
        last = beam.last.clamp(min=0)
        last_logp = logp.gather(1, last)
        longer = total[..., None] + logp[:, None]  # (B, K, V)
        # the last label is new after a blank only
        longer.scatter_(2, last[..., None], (beam.blank + last_logp)[..., None])
        longer[..., self.blank] = -torch.inf
        longer = longer.flatten(1)

        is_parent = beam.parent_key[:, :, None] == beam.key[:, None, :]
        own = is_parent.byte().argmax(2) * V + last
        own = torch.where(is_parent.any(2), own, self.blank)  # without a parent -inf
        blank = total + logp[:, self.blank, None]
        label = (beam.label + last_logp).logaddexp(longer.gather(1, own))
        score = blank.logaddexp(label) + beam.fused
        longer.scatter_(1, own, -torch.inf)

        tokens = self.tokens[:, t, None].expand(-1, self.width, -1)
        fused = beam.fused[..., None] + self.label_bonus
        if self.lm is not None:
            fused = fused + self.lm_scores.view(B, self.width, V).gather(2, tokens)
        fused = fused.expand_as(tokens).flatten(1)
        longer = longer.view(B, self.width, V).gather(2, tokens).flatten(1)
        return beam._replace(blank=blank, label=label, score=score), longer, fused

    def fuse(self, lm: LanguageModel, origin: Tensor, added: Tensor) -> None:
        """Move the states of the language model to where the prefixes are, and advance new ones.

        Args:
            lm: The language model.
            origin: (B, K) where each prefix was.
            added: (B, K) its new label, or -1.
        """
        first = torch.arange(0, origin.numel(), self.width, device=origin.device)
        cell = (origin + first[:, None]).flatten()
        before = map_state(lambda part: part[cell], self.lm_state)
        added = added.flatten()
        after = lm.advance(before, added.clamp(min=0))
        self.lm_state = select_state(added != PADDING, after, before)
        self.lm_scores = self.lm_weight * lm.scores(self.lm_state)


def labels_of(history: Sequence[tuple[Tensor, Tensor]], place: Tensor) -> Tensor:
    """Labels (B, K, T) of the prefixes at `place` (B, K) after the last frame, padded with -1.

    Args:
        history: After each of T frames where each prefix was before, and its new label or -1.
        place: After the last frame.
    """
    steps = [torch.full_like(place, PADDING)]
    for origin, added in reversed(history):
        steps.append(added.gather(1, place))
        place = origin.gather(1, place)
    path = torch.stack(steps[::-1], 2)
    labels_first = (path == PADDING).byte().sort(dim=2, stable=True).indices
    return path.gather(2, labels_first)
