"""The search of `ctc_beam` in plain loops, for one utterance at a time, in float64.

A prefix is a tuple of labels, a beam a dict of prefixes.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from attention_oracle import log_add
from torch import Tensor

from asrkit.decoders.beams import LanguageModel
from asrkit.decoders.ctc.beam import possible
from asrkit.decoders.hypotheses import Hypotheses

Prefix = tuple[int, ...]
Row = list[float]  # log-probabilities of V tokens on one frame


@dataclass(frozen=True, kw_only=True)
class Path:
    """A prefix with its log-probabilities in nats and its state of the language model."""

    blank: float  # of the alignments that end in a blank
    label: float  # of those that end in the last label
    fused: float = 0.0  # what fusion has added
    lm: Any = None

    @property
    def total(self) -> float:
        """Log-probability of all alignments."""
        return log_add(self.blank, self.label)

    @property
    def score(self) -> float:
        """The score that orders prefixes."""
        return self.total + self.fused


Beam = dict[Prefix, Path]


def ctc_beam_reference(
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
    """What `ctc_beam` computes, without its checks."""
    V = log_probs.shape[-1]
    blank %= V
    if not lm_weight:
        lm = None
    search = PlainSearch(blank, width, top_tokens or V, lm, lm_weight, label_bonus)
    results = []
    with torch.inference_mode():
        clean = possible(log_probs, lengths, blank)
        for frames, length in zip(clean, lengths.tolist(), strict=True):
            results.append(search.utterance(frames[:length].tolist()))
    ranks = []
    for n in range(nbest):
        rows = []
        scores = []
        for ranked in results:
            steps: list = []
            score = -inf
            if n < len(ranked):
                steps, score = ranked[n]
            rows.append(steps)
            scores.append(torch.tensor(score, dtype=clean.dtype))
        ranks.append(Hypotheses.from_lists(rows, scores, "ctc beam, reference"))
    return replace(ranks[0], alternatives=tuple(ranks[1:]))


@dataclass(frozen=True)
class PlainSearch:
    """The search of one utterance; its fields are arguments of `ctc_beam`."""

    blank: int
    width: int
    top_tokens: int
    lm: LanguageModel | None
    lm_weight: float
    label_bonus: float

    def utterance(self, frames: list[Row]) -> list[tuple[list, float]]:
        """(runs, score) of the best label sequences of T frames, best first."""
        start = Path(blank=0.0, label=-inf)
        if self.lm is not None:
            start = replace(start, lm=self.lm.start(1))
        beam: Beam = {(): start}
        for logp in frames:
            beam = self.frame(logp, beam)
        ended = []
        for prefix, path in beam.items():
            score = path.score + self.end(path)
            if score > -inf:
                ended.append((plain_alignment(frames, prefix, self.blank), score))
        return sorted(ended, key=lambda item: -item[1])

    def frame(self, logp: Row, beam: Beam) -> Beam:
        """The best prefixes after one more frame, best first."""
        candidates = {}
        for prefix, path in beam.items():
            candidates[prefix] = self.stay(logp, beam, prefix, path)
        labels = self.labels(logp)
        for prefix, path in beam.items():
            for label in labels:
                longer = (*prefix, label)
                if longer not in candidates:  # else `stay` has added this
                    candidates[longer] = self.extend(logp, prefix, path, label)
        ranked = sorted(candidates.items(), key=lambda item: -item[1].score)
        kept = {
            prefix: path for prefix, path in ranked[: self.width] if path.score > -inf
        }
        return {
            prefix: self.advance(beam, prefix, path) for prefix, path in kept.items()
        }

    def stay(self, logp: Row, beam: Beam, prefix: Prefix, path: Path) -> Path:
        """The same prefix: after a blank, its last label again, or as its parent's extension."""
        blank = path.total + logp[self.blank]
        label = -inf
        if prefix:
            label = path.label + logp[prefix[-1]]
            parent = prefix[:-1]
            if parent in beam:
                arrived = (
                    self.before(parent, beam[parent], prefix[-1]) + logp[prefix[-1]]
                )
                label = log_add(label, arrived)
        return replace(path, blank=blank, label=label)

    def extend(self, logp: Row, prefix: Prefix, path: Path, label: int) -> Path:
        """The prefix with one more label, with the language model's state still before it."""
        fused = path.fused + self.label_bonus
        if self.lm is not None:
            fused += self.lm_weight * float(self.lm.scores(path.lm)[0, label])
        arrived = self.before(prefix, path, label) + logp[label]
        return Path(blank=-inf, label=arrived, fused=fused, lm=path.lm)

    def before(self, prefix: Prefix, path: Path, label: int) -> float:
        """Log-probability of the alignments after which `label` is a new label."""
        if prefix and prefix[-1] == label:
            return path.blank
        return path.total

    def labels(self, logp: Row) -> list[int]:
        """The labels that may begin a new prefix on this frame, ascending."""
        others = [token for token in range(len(logp)) if token != self.blank]
        best = sorted(others, key=lambda token: -logp[token])
        return sorted(best[: self.top_tokens])

    def advance(self, beam: Beam, prefix: Prefix, path: Path) -> Path:
        """The path, with the language model's state after the last label if that is new."""
        if self.lm is None or prefix in beam:
            return path
        token = torch.tensor([prefix[-1]])
        return replace(path, lm=self.lm.advance(path.lm, token))

    def end(self, path: Path) -> float:
        """The fusion term of the end of the sentence."""
        if self.lm is None:
            return 0.0
        return self.lm_weight * float(self.lm.final(path.lm)[0])


def plain_alignment(
    frames: list[Row], labels: Prefix, blank: int
) -> list[tuple[int, int, int]]:
    """(label, first frame, frames) of each label's run in the likeliest alignment (Viterbi)."""
    tokens = [blank]
    for label in labels:
        tokens += [label, blank]
    # (log-probability, states of the frames so far) of the best alignment in each state
    best: list[tuple[float, list[int]]] = [(-inf, []) for _ in tokens]
    best[0] = (0.0, [])
    for logp in frames:
        now = []
        for state, token in enumerate(tokens):
            came_from = [state]
            if state > 0:
                came_from.append(state - 1)
            if state > 2 and token not in (blank, tokens[state - 2]):
                came_from.append(state - 2)
            score, path = max((best[before] for before in came_from), key=_score)
            now.append((score + logp[token], [*path, state]))
        best = now
    _, states = max(best[:-3:-1], key=_score)
    runs = []
    for number, label in enumerate(labels):
        own = [t for t, state in enumerate(states) if state == 2 * number + 1]
        runs.append((label, own[0], len(own)))
    return runs


def _score(item: tuple[float, list[int]]) -> float:
    return item[0]
