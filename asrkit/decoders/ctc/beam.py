"""Batched CTC prefix beam search.

A hypothesis is a prefix: a label sequence that the frames so far may spell. The probabilities of
its alignments are summed. Alignments that end in a blank are summed apart from those that end in
the last label, because the same label again is a new label only after a blank.
Sources: Graves 2012, Supervised Sequence Labelling with Recurrent Neural Networks, section 7.5.3;
Hannun et al. 2014, arXiv 1408.2873, algorithm 1.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.beams import LanguageModel, check_weights, check_width, first_best
from asrkit.decoders.ctc.sequential import blank_index
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.states import map_state, select_state
from asrkit.shapes import expect, valid_mask, whole
from asrkit.threads import eager

MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: multiplying by it is reversible


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

    After each frame the `width` likeliest prefixes are kept, by the summed probability of all their
    alignments so far plus the terms of fusion. The next frame continues each prefix by a blank or
    its last label. It also extends each by every label, to a new prefix or to one that is already
    kept, whose probability then grows. While no more than `width` prefixes exist, nothing is lost
    and the scores are exact. Of prefixes with equal scores, those that were kept before come first,
    in their order, then new ones in the order of the prefix they extend and of their label.
    All utterances advance frame by frame together.

    A width of 1 is not greedy decoding, which takes the likeliest alignment: it keeps one prefix,
    and sums its alignments.

    Args:
        log_probs: (B, T, V) log-probabilities in nats, float of 16 bits or more; computed in
            float32 or float64. Values that are not finite count as -inf.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        blank: Index of the blank; negative counts from the end.
        width: Prefixes that are kept after each frame.
        nbest: Hypotheses per utterance in the result.
        top_tokens: Only this many of the likeliest labels of a frame begin new prefixes; None is
            all of them. It saves time where V is large. Prefixes that are already kept are not
            affected.
        lm: Language model for shallow fusion: an `NGram` over tokens, a `WordNGram` over words.
        lm_weight: Weight of its log-probability, of labels and end of sentence, in the ranking.
        label_bonus: Added per label. An `NGram` makes every label cost something, so texts come out
            short without a bonus: begin with lm_weight times the nats that a label costs. A
            `WordNGram` has its own bonus.

    Returns:
        The best hypotheses; `alternatives` are the second to nbest-th. `scores` are
        log-probabilities in nats, summed over the alignments that the beam kept, plus the terms of
        fusion. `frames` and `durations` come from the likeliest alignment of the labels: the first
        frame of each run, and its length. Missing hypotheses are empty with score -inf. So is the
        best if nothing is possible: NaN in a frame, or a word that `lm` excludes.

    Raises:
        ValueError: An argument does not fit.
    """
    longest = check_batch(log_probs, lengths, "B T V", "log_probs")
    V = log_probs.shape[-1]
    blank = blank_index(blank, V)
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
        k = min(V - 1, top_tokens or V)
        if lm is None:
            # All labels have the same fusion term. Of the K + 1 likeliest, at least K do not repeat
            # a prefix's last label; each gives a prefix that outranks those of the other labels.
            k = min(k, width + 1)
        every = torch.arange(V, device=log_probs.device)
        every = every[every != blank]
        tokens = every[first_best(log_probs[..., every], k)]
        scores, labels = search(log_probs, tokens, blank, width, lm, lm_weight, label_bonus)
        counts = (labels != PADDING).sum(2)
    from asrkit.decoders.ctc.numba_cpu import align

    ranked = []
    for n in range(nbest):
        count = counts[:, n].clone()
        N = int(count.max())
        own = labels[:, n, :N].clone()
        frames, durations, _ = align(log_probs, own, count, lengths, blank)
        ranked.append(
            Hypotheses(
                labels=own,
                frames=frames,
                durations=durations,
                lengths=count,
                scores=scores[:, n].clone(),
                impl=f"ctc beam, width {width}",
            )
        )
    return replace(ranked[0], alternatives=tuple(ranked[1:]))


def possible(log_probs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """The log-probabilities in float32 or float64, -inf where they are not finite.

    After the end of an utterance only a blank is possible, with probability 1.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    wide = log_probs.to(dtype)
    ended = ~valid_mask(lengths, log_probs.shape[1])[..., None]
    impossible = ~wide.isfinite() | ended
    wide = wide.masked_fill(impossible, -torch.inf)
    wide[..., blank, None].masked_fill_(ended, 0)
    return wide


class Beam(NamedTuple):
    """K prefixes of each utterance, best first; all tensors (B, K).

    In an empty place both log-probabilities are -inf.
    """

    blank: Tensor  # log-probability of the alignments that end in a blank
    label: Tensor  # log-probability of the alignments that end in the last label
    fused: Tensor  # sum of the fusion terms
    last: Tensor  # int64, the last label; -1 in the empty prefix
    # int64, hash of the prefix. A million comparisons of 64-bit hashes confuse two prefixes
    # with a probability of 10^-13.
    key: Tensor
    parent_key: Tensor  # int64, hash of the prefix without its last label

    def scores(self) -> Tensor:
        """Log-probability in nats of all alignments, plus the fusion terms."""
        return self.blank.logaddexp(self.label) + self.fused


def search(
    log_probs: Tensor,
    tokens: Tensor,
    blank: int,
    width: int,
    lm: LanguageModel | None,
    lm_weight: float,
    label_bonus: float,
) -> tuple[Tensor, Tensor]:
    """(scores (B, K), labels (B, K, T) padded with -1) of the prefixes after the last frames.

    The best comes first. Scores include the end of the sentence. Empty places have no labels.

    Args:
        log_probs: (B, T, V), as `possible` returns them.
        tokens: (B, T, k) the labels that may begin a new prefix on each frame, ascending.
        blank: Index of the blank, from 0.
        width: K.
        lm: Language model, or None.
        lm_weight: Weight of its log-probabilities, not 0 if there is a language model.
        label_bonus: Added per label.
    """
    B, _, V = log_probs.shape
    impossible = log_probs.new_full((B, width), -torch.inf)
    certain = impossible.clone()
    certain[:, 0] = 0  # the empty prefix
    zero = torch.zeros_like(impossible, dtype=torch.int64)
    beam = Beam(
        blank=certain,
        label=impossible,
        fused=torch.zeros_like(impossible),
        last=zero - 1,
        key=zero,
        parent_key=zero - 1,
    )
    gain = log_probs.new_full((1, 1, 1), label_bonus).expand(B, width, V)
    lm_state: Any = None
    if lm is not None:
        lm_state = lm.start(B * width)
        lm_scores = lm.scores(lm_state)
        remedy = "Blank has a place among them."
        columns = lm_scores.shape[-1]
        expect(columns == V, "lm", f"scores of V={V} tokens", columns, remedy)
        gain = label_bonus + lm_weight * lm_scores.view(B, width, V)
    first = torch.arange(0, B * width, width, device=log_probs.device)
    first = first[:, None]
    history = []
    for logp, labels in zip(log_probs.unbind(1), tokens.unbind(1), strict=True):
        beam, origin, added = after_frame(logp, labels, blank, beam, gain)
        history.append((origin, added))
        if lm is not None:
            cell = (first + origin).flatten()
            before = map_state(lambda part, cell=cell: part[cell], lm_state)
            label = added.flatten()
            after = lm.advance(before, label.clamp(min=0))
            lm_state = select_state(label != PADDING, after, before)
            gain = label_bonus + lm_weight * lm.scores(lm_state).view(B, width, V)
    score = beam.scores()
    if lm is not None:
        score = score + lm_weight * lm.final(lm_state).view_as(score)
    score, place = score.sort(dim=1, descending=True, stable=True)
    steps = [torch.full_like(place, PADDING)]
    for origin, added in reversed(history):
        steps.append(added.gather(1, place))
        place = origin.gather(1, place)
    path = torch.stack(steps[::-1], 2)
    labels_first = (path == PADDING).byte().sort(dim=2, stable=True).indices
    labels = path.gather(2, labels_first)
    return score, labels.masked_fill(score[..., None] == -torch.inf, PADDING)


def after_frame(
    logp: Tensor, tokens: Tensor, blank: int, beam: Beam, gain: Tensor
) -> tuple[Beam, Tensor, Tensor]:
    """The beam after one more frame.

    Args:
        logp: (B, V) log-probabilities of the frame.
        tokens: (B, k) the labels that may begin a new prefix.
        blank: Index of the blank, from 0.
        beam: The beam before the frame.
        gain: (B, K, V) the fusion term of each prefix for its next label.

    Returns:
        The beam, the place (B, K) in the old beam that each prefix comes from, and its new label
        (B, K) or -1.
    """
    K = gain.shape[1]
    k = tokens.shape[1]
    kept, longer = continued(logp, blank, beam)
    extensions = tokens[:, None].expand(-1, K, -1)
    new_logp = longer.gather(2, extensions).flatten(1)
    new_fused = beam.fused[..., None] + gain.gather(2, extensions)
    new_fused = new_fused.flatten(1)
    scores = torch.cat([kept.scores(), new_logp + new_fused], 1)
    place = first_best(scores, K)
    best_first = scores.gather(1, place).sort(dim=1, descending=True, stable=True).indices
    place = place.gather(1, best_first)
    is_new = place >= K
    extension = (place - K).clamp(min=0)
    origin = torch.where(is_new, extension // k, place)
    label = tokens.gather(1, extension % k)
    before = map_state(lambda part: part.gather(1, origin), kept)
    new = Beam(
        blank=torch.full_like(before.blank, -torch.inf),
        label=new_logp.gather(1, extension),
        fused=new_fused.gather(1, extension),
        last=label,
        key=(before.key + label + 1) * MIX,
        parent_key=before.key,
    )
    after = map_state(partial(torch.where, is_new), new, before)
    return after, origin, label.masked_fill(~is_new, PADDING)


def continued(logp: Tensor, blank: int, beam: Beam) -> tuple[Beam, Tensor]:
    """The same prefixes after a frame, and the log-probabilities (B, K, V) of longer ones.

    A longer prefix that is already in the beam is added there, and has -inf here.
    """
    V = logp.shape[1]
    total = beam.blank.logaddexp(beam.label)
    last = beam.last.clamp(min=0)
    last_logp = logp.gather(1, last)
    longer = total[..., None] + logp[:, None]  # (B, K, V)
    # the last label again is a new label only after a blank
    after_blank = beam.blank + last_logp
    longer.scatter_(2, last[..., None], after_blank[..., None])
    longer[..., blank] = -torch.inf
    parent_key = beam.parent_key[:, :, None]
    is_parent = parent_key == beam.key[:, None]
    own = is_parent.byte().argmax(2) * V + last
    own = torch.where(is_parent.any(2), own, blank)  # the blank has -inf: no parent in the beam
    flat = longer.flatten(1)
    by_parent = flat.gather(1, own)
    flat.scatter_(1, own, -torch.inf)
    kept = beam._replace(
        blank=total + logp[:, blank, None],
        label=(beam.label + last_logp).logaddexp(by_parent),
    )
    return kept, longer
