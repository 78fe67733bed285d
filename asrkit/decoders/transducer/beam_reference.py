"""The search of `transducer_beam` in plain loops, for one utterance at a time.

A prefix is a tuple of labels, a set of hypotheses a dict of prefixes.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.beams import LanguageModel, log_add
from asrkit.decoders.hypotheses import Hypotheses, check_batch
from asrkit.decoders.transducer import Transducer
from asrkit.decoders.transducer.beam import check_beam
from asrkit.decoders.transducer.steps import first_prediction, vocabulary
from asrkit.runtime import eager

Prefix = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """What is known of a prefix: score, the best alignment so far, and the states after it."""

    score: float  # log-probability in nats, of all alignments
    steps: tuple[tuple[int, int, int], ...] = ()  # (label, frame, duration) each
    predicted: Any
    state: Any
    lm: Any


Hypothesis = tuple[Prefix, Path]
Set = dict[Prefix, Path]


@eager
def transducer_beam_reference(  # noqa: PLR0913 - the arguments of transducer_beam
    model: Transducer,
    encoded: Tensor,
    lengths: Tensor,
    *,
    width: int = 4,
    nbest: int = 1,
    max_symbols: int = 10,
    lm: LanguageModel | None = None,
    lm_weight: float = 0.3,
    label_bonus: float = 0.0,
) -> Hypotheses:
    """What `transducer_beam` computes; slow and readable.

    Args:
        model: As in `transducer_beam`, like everything that follows.
        encoded: (B, T, E) encoder frames.
        lengths: (B,) valid frames.
        width: Hypotheses in a set.
        nbest: Hypotheses per utterance in the result.
        max_symbols: Most labels on one frame.
        lm: Language model for shallow fusion.
        lm_weight: Weight of its log-probability.
        label_bonus: Added per label.
    """
    check_batch(encoded, lengths, "B T E", "encoded")
    check_beam(model, width, nbest, max_symbols, lm, lm_weight, label_bonus)
    if not lm_weight:
        lm = None
    with torch.inference_mode():
        search = PlainSearch(model, width, max_symbols, lm, lm_weight, label_bonus)
        results = []
        for frames, length in zip(encoded, lengths.tolist(), strict=True):
            results.append(search.utterance(frames[:length]))
    ranks = []
    for n in range(nbest):
        rows = []
        scores = []
        for ranked in results:
            steps: tuple = ()
            score = -inf
            if n < len(ranked):
                steps, score = ranked[n]
            rows.append(steps)
            scores.append(torch.tensor(score, dtype=torch.float32, device=encoded.device))
        ranks.append(Hypotheses.from_lists(rows, scores, "beam, reference"))
    return replace(ranks[0], alternatives=tuple(ranks[1:]))


@dataclass(frozen=True)
class PlainSearch:
    """The search of one utterance; its fields are arguments of `transducer_beam`."""

    model: Transducer
    width: int
    max_symbols: int
    lm: LanguageModel | None
    lm_weight: float
    label_bonus: float

    def utterance(self, encoded: Tensor) -> list[tuple[tuple, float]]:
        """(steps, score) of the best label sequences of encoded (T, E), best first."""
        blank = torch.tensor([self.model.blank], device=encoded.device)
        predicted, state = first_prediction(self.model, blank)
        lm = None
        if self.lm is not None:
            lm = self.lm.start(1)
        sets: dict[int, Set] = defaultdict(dict)  # by the frame that they have reached
        start = Path(score=0.0, predicted=predicted, state=state, lm=lm)
        sets[0] = {(): start}
        for t in range(len(encoded)):
            reached = sets.pop(t, {})
            now = self.alive(reached, sets)
            for symbols in range(self.max_symbols + 1):
                last = symbols == self.max_symbols
                now = self.round(t, encoded[t], now, sets, last)
        # a jump past the end ends there
        arrived = [item for paths in sets.values() for item in paths.items()]
        ended = []
        for path in self.merge(arrived).values():
            score = path.score + self.end(path)
            if score > -inf:
                ended.append((path.steps, score))
        return sorted(ended, key=lambda item: -item[1])

    def round(self, t: int, frame: Tensor, now: Set, sets: dict[int, Set], last: bool) -> Set:
        """The hypotheses that stay on this frame, with one more label each.

        Args:
            t: The frame.
            frame: (E,) its encoder output.
            now: The hypotheses to extend, by a blank or a label.
            sets: The sets ahead; those that moved on are added.
            last: Whether only a blank may follow.
        """
        arrivals: dict[int, list[Hypothesis]] = defaultdict(list)
        children: dict[int, list[Hypothesis]] = defaultdict(list)
        for prefix, path in now.items():
            tokens, blank_hops, label_hops = self.scores(frame, path)
            for hop, hop_score in blank_hops.items():
                score = path.score + tokens[self.model.blank] + hop_score
                moved = replace(path, score=score)
                arrivals[hop].append((prefix, moved))
            if last:
                continue
            for hop, child in self.extend(t, prefix, path, tokens, label_hops):
                children[hop].append(child)
        best = {}
        for hop, items in children.items():
            ranked = sorted(items, key=_by_score)
            best[hop] = ranked[: self.width]
        for hop in {*arrivals, *best} - {0}:
            jumped = self.with_states(dict(best.get(hop, ())))
            there = sets[t + hop]
            sets[t + hop] = self.merge([*there.items(), *arrivals[hop], *jumped.items()])
        stay = self.alive(dict(best.get(0, ())), sets)
        return self.with_states(stay)

    def with_states(self, paths: Set) -> Set:
        """The hypotheses with the states after their last labels."""
        return {prefix: self.predict(prefix[-1], path) for prefix, path in paths.items()}

    def extend(
        self,
        t: int,
        prefix: Prefix,
        path: Path,
        tokens: list[float],
        label_hops: dict[int, float],
    ) -> Iterator[tuple[int, Hypothesis]]:
        """Yield (frames to move on, (prefix, path)) for every next label.

        Args:
            t: The frame.
            prefix: The labels so far.
            path: What is known of it.
            tokens: Log-probabilities of the next token.
            label_hops: Log-probabilities of a label's durations.
        """
        lm_scores: Any = [0.0] * len(tokens)
        if self.lm is not None:
            lm_scores = self.lm_weight * self.lm.scores(path.lm)[0]
        for label, score in enumerate(tokens):
            if label == self.model.blank:
                continue
            for hop, hop_score in label_hops.items():
                lm_score = float(lm_scores[label])
                total = path.score + score + hop_score + lm_score + self.label_bonus
                steps = (*path.steps, (label, t, hop))
                extended = replace(path, score=total, steps=steps)
                yield hop, ((*prefix, label), extended)

    def scores(
        self, frame: Tensor, path: Path
    ) -> tuple[list[float], dict[int, float], dict[int, float]]:
        """Log-probabilities in nats of the tokens, of a blank's hops and of a label's hops.

        A hop is a number of frames to move on.
        """
        durations = tuple(getattr(self.model, "durations", ()))
        logits = self.model.join(frame[None], path.predicted)
        V = vocabulary(logits, frame[None], self.model.blank, durations)
        logits = logits[0].to(torch.promote_types(frame.dtype, torch.float32))
        tokens = logits[:V].log_softmax(-1).tolist()
        if not durations:
            return tokens, {1: 0.0}, {0: 0.0}
        blank: dict[int, float] = {}
        label: dict[int, float] = {}
        duration_scores = logits[V:].log_softmax(-1).tolist()
        for duration, score in zip(durations, duration_scores, strict=True):
            blank_hop = max(1, duration)
            blank[blank_hop] = log_add(blank.get(blank_hop, -inf), score)
            label[duration] = log_add(label.get(duration, -inf), score)
        return tokens, blank, label

    def merge(self, paths: list[Hypothesis]) -> Set:
        """The best prefixes, with the probabilities of equal ones added.

        The alignment of the likelier one stays.
        """
        merged: Set = {}
        best_score: dict[Prefix, float] = {}
        for prefix, path in paths:
            total = path.score
            if prefix in merged:
                total = log_add(merged[prefix].score, total)
            if path.score > best_score.get(prefix, -inf):
                best_score[prefix] = path.score
                merged[prefix] = path
            if prefix in merged:
                merged[prefix] = replace(merged[prefix], score=total)
        ranked = sorted(merged.items(), key=_by_score)
        return dict(ranked[: self.width])

    def alive(self, now: Set, sets: dict[int, Set]) -> Set:
        """`now` without those that `width` hypotheses of one set ahead have overtaken."""
        least = -inf
        for kept in sets.values():
            if len(kept) == self.width:
                lowest = min(path.score for path in kept.values())
                least = max(least, lowest)
        return {prefix: path for prefix, path in now.items() if path.score > least}

    def predict(self, label: int, path: Path) -> Path:
        """The path with the states of predictor and language model after a label."""
        token = torch.tensor([label], device=path.predicted.device)
        predicted, state = self.model.predict(token, path.state)
        lm = path.lm
        if self.lm is not None:
            lm = self.lm.advance(lm, token)
        return replace(path, predicted=predicted, state=state, lm=lm)

    def end(self, path: Path) -> float:
        """What fusion adds at the end of the sentence."""
        if self.lm is None:
            return 0.0
        return self.lm_weight * float(self.lm.final(path.lm)[0])


def _by_score(item: Hypothesis) -> float:
    """Sort key: best first."""
    return -item[1].score
