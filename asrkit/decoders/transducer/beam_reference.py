"""The search of `transducer_beam` in plain loops: one utterance at a time, prefixes are tuples in a
dict.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check
from asrkit.decoders.transducer import Transducer
from asrkit.decoders.transducer.beam import LanguageModel, check_beam
from asrkit.decoders.transducer.steps import first_prediction, vocabulary
from asrkit.runtime import eager

Prefix = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """A prefix: its log-probability so far, where its labels are on the alignment that is kept, and
    who has heard it.
    """

    score: float
    steps: tuple[tuple[int, int, int], ...] = ()  # label, frame, duration
    predicted: Any
    state: Any
    lm: Any


Set = dict[Prefix, Path]


@eager
def transducer_beam_reference(
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
    """What `transducer_beam` computes, and its arguments; slow and readable."""
    check(encoded, lengths, "B T E", "encoded")
    check_beam(model, width, nbest, max_symbols, lm_weight, label_bonus)
    with torch.inference_mode():
        search = Plain(model, width, max_symbols, lm if lm_weight else None, lm_weight, label_bonus)
        found = [
            search.utterance(frames[:length])
            for frames, length in zip(encoded, lengths.tolist(), strict=True)
        ]
    ranks = []
    for n in range(nbest):
        best = [paths[n] if n < len(paths) else ((), -inf) for paths in found]
        scores = [
            torch.tensor(score, dtype=torch.float32, device=encoded.device) for _, score in best
        ]
        ranks.append(Hypotheses.from_lists([steps for steps, _ in best], scores, "beam, reference"))
    return replace(ranks[0], alternatives=tuple(ranks[1:]))


@dataclass(frozen=True)
class Plain:
    """The search of one utterance."""

    model: Transducer
    width: int
    max_symbols: int
    lm: LanguageModel | None
    lm_weight: float
    label_bonus: float

    def utterance(self, encoded: Tensor) -> list[tuple[tuple, float]]:
        """(steps, score) of the best label sequences of encoded (T, E), best first."""
        predicted, state = first_prediction(
            self.model, torch.tensor([self.model.blank], device=encoded.device)
        )
        lm = None if self.lm is None else self.lm.start(1)
        sets: dict[int, Set] = defaultdict(dict)  # by the frame that they have reached
        sets[0] = {(): Path(score=0.0, predicted=predicted, state=state, lm=lm)}
        T = len(encoded)
        for t in range(T):
            now = self.alive(sets.pop(t, {}), sets)
            for symbols in range(self.max_symbols + 1):
                now = self.round(t, encoded[t], now, sets, symbols == self.max_symbols)
        end = self.merge(
            [pair for kept in sets.values() for pair in kept.items()]
        )  # a jump past the end ends there
        ended = [(path.steps, path.score + self.end(path)) for path in end.values()]
        return sorted((pair for pair in ended if pair[1] > -inf), key=lambda pair: -pair[1])

    def round(self, t: int, frame: Tensor, now: Set, sets: dict[int, Set], last: bool) -> Set:
        """Every hypothesis goes on by a blank or by a label; what stays on this frame comes back
        for the next round.
        """
        arrivals: dict[int, list[tuple[Prefix, Path]]] = defaultdict(list)
        children: dict[int, list[tuple[Prefix, Path]]] = defaultdict(list)
        for prefix, path in now.items():
            tokens, blank_hops, label_hops = self.scores(frame, path)
            for hop, score in blank_hops.items():
                arrivals[hop].append(
                    (prefix, replace(path, score=path.score + tokens[self.model.blank] + score))
                )
            lm_scores = (
                self.lm_weight * self.lm.scores(path.lm)[0]
                if self.lm is not None
                else [0.0] * len(tokens)
            )
            for label, score in enumerate(tokens):
                for hop, cost in {} if last or label == self.model.blank else label_hops.items():
                    total = path.score + score + cost + float(lm_scores[label]) + self.label_bonus
                    steps = (*path.steps, (label, t, hop))
                    children[hop].append(
                        ((*prefix, label), replace(path, score=total, steps=steps))
                    )
        best = {
            hop: sorted(those, key=lambda pair: -pair[1].score)[: self.width]
            for hop, those in children.items()
        }
        for hop in {*arrivals, *best} - {0}:
            fresh = [(prefix, self.hear(prefix[-1], path)) for prefix, path in best.get(hop, ())]
            sets[t + hop] = self.merge([*sets[t + hop].items(), *arrivals[hop], *fresh])
        stay = self.alive(dict(best.get(0, ())), sets)
        return {prefix: self.hear(prefix[-1], path) for prefix, path in stay.items()}

    def scores(
        self, frame: Tensor, path: Path
    ) -> tuple[list[float], dict[int, float], dict[int, float]]:
        """Log-probabilities of the tokens, of a blank's hops and of a label's hops."""
        durations = tuple(getattr(self.model, "durations", ()))
        logits = self.model.join(frame[None], path.predicted)
        V = vocabulary(logits, frame[None], self.model.blank, durations)
        logits = logits[0].to(torch.promote_types(frame.dtype, torch.float32))
        tokens = logits[:V].log_softmax(-1).tolist()
        if not durations:
            return tokens, {1: 0.0}, {0: 0.0}
        blank: dict[int, float] = {}
        label: dict[int, float] = {}
        for duration, score in zip(durations, logits[V:].log_softmax(-1).tolist(), strict=True):
            blank[max(1, duration)] = log_add(blank.get(max(1, duration), -inf), score)
            label[duration] = log_add(label.get(duration, -inf), score)
        return tokens, blank, label

    def merge(self, paths: list[tuple[Prefix, Path]]) -> Set:
        """The best prefixes: probabilities of equal ones are added, the likelier alignment stays."""
        merged: Set = {}
        heaviest: dict[Prefix, float] = {}
        for prefix, path in paths:
            total = log_add(merged[prefix].score, path.score) if prefix in merged else path.score
            if path.score > heaviest.get(prefix, -inf):
                heaviest[prefix], merged[prefix] = path.score, path
            if prefix in merged:
                merged[prefix] = replace(merged[prefix], score=total)
        return dict(sorted(merged.items(), key=lambda pair: -pair[1].score)[: self.width])

    def alive(self, now: Set, sets: dict[int, Set]) -> Set:
        """Without those that `width` hypotheses of one set ahead have overtaken."""
        full = [
            min(path.score for path in kept.values())
            for kept in sets.values()
            if len(kept) == self.width
        ]
        return {
            prefix: path for prefix, path in now.items() if path.score > max(full, default=-inf)
        }

    def hear(self, label: int, path: Path) -> Path:
        """The predictor and the language model hear a label."""
        token = torch.tensor([label], device=path.predicted.device)
        predicted, state = self.model.predict(token, path.state)
        return replace(
            path,
            predicted=predicted,
            state=state,
            lm=None if self.lm is None else self.lm.advance(path.lm, token),
        )

    def end(self, path: Path) -> float:
        """What fusion adds at the end."""
        return 0.0 if self.lm is None else self.lm_weight * float(self.lm.final(path.lm)[0])


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high = max(a, b)
    return high if high == -inf else high + log(exp(a - high) + exp(b - high))
