"""Batched CTC prefix beam search.

A hypothesis is a prefix: a label sequence that the frames so far may stand for. The probabilities
of its alignments are summed, those that end in a blank apart from those that end in its last label:
the same label once more is a new one after a blank only.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hannun et al. 2014, arXiv 1408.2873, algorithm 1.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.beams import (
    Fusion,
    LanguageModel,
    best_first,
    check_lm,
    check_lm_scores,
    check_weights,
    check_width,
    first_best,
    longer_key,
)
from asrkit.decoders.ctc.alignment import best_alignment, possible
from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.states import map_state, select_state
from asrkit.runtime import eager
from asrkit.shapes import expect, whole


def check_ctc_beam(
    V: int,
    width: int,
    nbest: int,
    top_tokens: int | None,
    lm: LanguageModel | None,
    lm_weight: float,
    label_bonus: float,
) -> None:
    """ValueError for arguments of `ctc_beam` that do not fit.

    Args:
        V: Tokens, with blank.
        width: Prefixes that are kept.
        nbest: Hypotheses in the result, at most `width`.
        top_tokens: Labels of a frame that may begin a new prefix, or None.
        lm: The language model, or None.
        lm_weight: Its weight.
        label_bonus: Added per label.
    """
    check_width(width, nbest)
    expect(V > 1, "log_probs", "a blank and at least one label", f"V={V}")
    fits = top_tokens is None or whole(top_tokens, 1)
    expect(fits, "top_tokens", "at least 1, or None", repr(top_tokens))
    check_lm(lm)
    check_weights(lm_weight=lm_weight, label_bonus=label_bonus)


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
    check_ctc_beam(V, width, nbest, top_tokens, lm, lm_weight, label_bonus)
    if not lm_weight:
        lm = None
    with torch.inference_mode():
        log_probs = possible(log_probs[:, :longest])
        lengths = lengths.long()
        fusion = Fusion(lm, lm_weight, label_bonus)
        search = Search(log_probs, blank, fusion, width, top_tokens)
        beam = search.finish(search.run(lengths))
        labels = search.labels(beam)  # (B, K, N)
    ranked = []
    for n in range(nbest):
        counts = beam.length[:, n]
        own = labels[:, n, : int(counts.max())]
        aligned = best_alignment(log_probs, lengths, own, counts, blank)
        ranked.append(
            Hypotheses(
                labels=own.clone(),
                frames=aligned.frames,
                durations=aligned.durations,
                lengths=counts.clone(),
                scores=beam.score[:, n].clone(),
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
    key: Tensor  # int64, hash of the prefix
    parent_key: Tensor  # int64, hash of the prefix without its last label
    length: Tensor  # int64, labels
    node: Tensor  # int64, index of the last label in the history; -1 before the first

    def gather(self, place: Tensor) -> "Beam":
        """The prefixes with indices `place` (B, n)."""
        return map_state(lambda part: part.gather(1, place), self)

    def total(self) -> Tensor:
        """Log-probability of all alignments of each prefix."""
        return self.blank.logaddexp(self.label)


class Search:
    """One search of one batch.

    Attributes:
        K: Width of the beam.
        tokens: (B, T, k) the labels that may begin a new prefix on each frame, ascending.
        token_logp: (B, T, k) their log-probabilities.
        history: (parent node, label) of the K prefixes after each frame, (B, K) each. A node is the
            place of a prefix when it was new: frame * K + place.
        lm: States of the language model, B K of them.
        lm_scores: (B K, V), what it adds to each prefix's next label.
    """

    def __init__(
        self, log_probs: Tensor, blank: int, fusion: Fusion, width: int, top_tokens: int | None
    ) -> None:
        """Prepare a search.

        Args:
            log_probs: (B, T, V).
            blank: Index of the blank.
            fusion: The language model and its weights.
            width: Prefixes that are kept, K.
            top_tokens: Labels of a frame that may begin a new prefix.
        """
        B, T, V = log_probs.shape
        self.log_probs = log_probs
        self.blank = blank
        self.fusion = fusion
        self.K = width
        self.device = log_probs.device
        k = min(V - 1, top_tokens or V)
        if fusion.lm is None:
            # All labels cost fusion the same. Of the K + 1 likeliest, K at least do not repeat a
            # prefix's last label; each leads to a prefix that outranks those of the other labels.
            k = min(k, width + 1)
        others = [token for token in range(V) if token != blank]
        labels = torch.tensor(others, device=self.device)
        place = first_best(log_probs[..., labels], k)
        self.tokens = labels[place]
        self.token_logp = log_probs.gather(2, self.tokens)
        self.history = list[tuple[Tensor, Tensor]]()
        self.lm: Any = None
        self.lm_scores: Tensor | None = None

    def run(self, lengths: Tensor) -> Beam:
        """The K best prefixes of every utterance after its last frame, from lengths (B,)."""
        _, T, V = self.log_probs.shape
        beam = self.start()
        if self.lm_scores is not None:
            check_lm_scores(self.lm_scores, V)
        same_place = torch.arange(self.K, device=self.device)
        for t in range(T):
            goes_on = lengths > t
            after, origin, is_new = self.frame(t, beam)
            beam = select_state(goes_on, after, beam)
            origin = torch.where(goes_on[:, None], origin, same_place)
            self.advance(origin, is_new & goes_on[:, None], beam)
        return beam

    def start(self) -> Beam:
        """The empty prefix of every utterance: (B, K), of which the first place is taken."""
        B = len(self.log_probs)
        zero = torch.zeros(B, self.K, dtype=torch.int64, device=self.device)
        impossible = self.log_probs.new_full((B, self.K), -torch.inf)
        certain = impossible.clone()
        certain[:, 0] = 0
        if self.fusion.lm is not None:
            self.lm = self.fusion.lm.start(B * self.K)
            self.lm_scores = self.fusion.lm_scores(self.lm)
        return Beam(
            score=certain,
            blank=certain,
            label=impossible,
            fused=torch.zeros_like(impossible),
            last=zero - 1,
            key=zero,
            parent_key=zero,
            length=zero,
            node=zero - 1,
        )

    def frame(self, t: int, beam: Beam) -> tuple[Beam, Tensor, Tensor]:
        """The beam after frame t, the place each prefix came from, and whether it is new.

        Args:
            t: The frame.
            beam: The beam before it.
        """
        K = self.K
        kept, parent, has_parent = self.stay(t, beam)
        new_logp, new_fused = self.extend(t, beam, parent, has_parent)  # (B, K k) each
        scores = torch.cat([kept.score, new_logp + new_fused], 1)
        scores = scores.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        place = first_best(scores, K)
        place = place.gather(1, best_first(scores.gather(1, place)))
        is_new = place >= K
        extension = (place - K).clamp(min=0)
        k = self.tokens.shape[-1]
        origin = torch.where(is_new, extension // k, place)
        label = self.tokens[:, t].gather(1, extension % k)
        before = kept.gather(origin)
        self.history.append((before.node, label))
        node = torch.arange(K, device=self.device) + t * K
        new = Beam(
            score=before.score,
            blank=torch.full_like(before.blank, -torch.inf),
            label=new_logp.gather(1, extension),
            fused=new_fused.gather(1, extension),
            last=label,
            key=longer_key(before.key, label),
            parent_key=before.key,
            length=before.length + 1,
            node=node.expand_as(label),
        )
        after = map_state(lambda n, o: torch.where(is_new, n, o), new, before)
        return after._replace(score=scores.gather(1, place)), origin, is_new

    def stay(self, t: int, beam: Beam) -> tuple[Beam, Tensor, Tensor]:
        """The same prefixes after frame t, the place of each one's parent, and whether it has one.

        The parent is the prefix without the last label. Where the beam has both, the parent's
        extension adds to the longer one.
        """
        logp = self.log_probs[:, t]
        last_logp = logp.gather(1, beam.last.clamp(min=0))
        blank = beam.total() + logp[:, self.blank, None]
        alive = beam.score > -torch.inf
        is_parent = beam.parent_key[:, :, None] == beam.key[:, None, :]
        is_parent &= beam.length[:, :, None] == beam.length[:, None, :] + 1
        is_parent &= alive[:, :, None] & alive[:, None, :]
        has_parent = is_parent.any(2)
        parent = is_parent.byte().argmax(2)
        repeats = beam.last.gather(1, parent) == beam.last
        before = torch.where(repeats, beam.blank.gather(1, parent), beam.total().gather(1, parent))
        before = before.masked_fill(~has_parent, -torch.inf)
        label = beam.label.logaddexp(before) + last_logp
        kept = beam._replace(blank=blank, label=label)
        return kept._replace(score=kept.total() + kept.fused), parent, has_parent

    def extend(
        self, t: int, beam: Beam, parent: Tensor, has_parent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, what fusion has added) of every prefix with one more label: (B, K k).

        Those that the beam has already have -inf.

        Args:
            t: The frame.
            beam: The prefixes.
            parent: (B, K) the place of each one's parent.
            has_parent: (B, K) whether the beam has it.
        """
        tokens = self.tokens[:, t]
        k = tokens.shape[-1]
        repeated = tokens[:, None] == beam.last[..., None]  # (B, K, k)
        before = torch.where(repeated, beam.blank[..., None], beam.total()[..., None])
        logp = before + self.token_logp[:, t, None]
        fused = beam.fused[..., None] + self.fusion.bonus
        if self.lm_scores is not None:
            of_tokens = tokens[:, None].expand_as(repeated)
            fused = fused + self.lm_scores.view(*beam.last.shape, -1).gather(2, of_tokens)
        place = parent * k + repeated.byte().argmax(2)
        nowhere = self.K * k
        place = place.masked_fill(~(has_parent & repeated.any(2)), nowhere)
        logp = torch.nn.functional.pad(logp.flatten(1), (0, 1))
        logp = logp.scatter(1, place, -torch.inf)[:, :nowhere]
        return logp, fused.expand_as(repeated).flatten(1)

    def advance(self, origin: Tensor, is_new: Tensor, beam: Beam) -> None:
        """Move the states of the language model to where the prefixes are, and advance new ones.

        Args:
            origin: (B, K) where each prefix was.
            is_new: (B, K) which have one label more than there.
            beam: The prefixes, as they are now.
        """
        lm = self.fusion.lm
        if lm is None or self.lm_scores is None:
            return
        first = torch.arange(0, origin.numel(), self.K, device=self.device)
        cell = (origin + first[:, None]).flatten()
        self.lm = map_state(lambda part: part[cell], self.lm)
        self.lm_scores = self.lm_scores[cell]
        is_new = is_new & (beam.score > -torch.inf)
        rows = is_new.flatten().nonzero()[:, 0]  # the GPU waits for Python here
        if not len(rows):
            return
        states = map_state(lambda part: part[rows], self.lm)
        states = lm.advance(states, beam.last.flatten()[rows])
        self.lm = map_state(lambda all_, own: all_.index_copy(0, rows, own), self.lm, states)
        scores = self.fusion.weight * lm.scores(states)
        self.lm_scores = self.lm_scores.index_copy(0, rows, scores)

    def finish(self, beam: Beam) -> Beam:
        """The prefixes, best first, with the score of the end of the sentence.

        Empty places have no labels.
        """
        lm = self.fusion.lm
        score = beam.score
        if lm is not None:
            end = self.fusion.weight * lm.final(self.lm)
            score = score + end.view_as(score)
            score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        empty = score == -torch.inf
        beam = beam._replace(
            score=score,
            length=beam.length.masked_fill(empty, 0),
            node=beam.node.masked_fill(empty, -1),
        )
        return beam.gather(best_first(score))

    def labels(self, beam: Beam) -> Tensor:
        """The labels of the prefixes, (B, K, N), padded with -1.

        All walk back through the history together, a label at a time.
        """
        N = int(beam.length.max())
        labels = beam.node.new_full((*beam.node.shape, N + 1), PADDING)
        if not N:
            return labels[..., :0]
        parents = torch.cat([parent for parent, _ in self.history], 1)  # (B, T K)
        history = torch.cat([label for _, label in self.history], 1)
        node = beam.node
        place = beam.length - 1
        for _ in range(N):
            # beyond the first label there is nothing: column N collects it
            column = torch.where(node >= 0, place, N)
            label = history.gather(1, node.clamp(min=0))
            labels.scatter_(2, column[..., None], label[..., None])
            parent = parents.gather(1, node.clamp(min=0))
            node = torch.where(node >= 0, parent, node)
            place = place - 1
        return labels[..., :N]
