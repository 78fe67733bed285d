"""Greedy decoding by attention, the search of `aed_beam`, and scores of CTC for prefixes, in plain loops."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isnan, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.greedy import best_tokens
from asrkit.decoders.attention.protocol import limits_of, prompt_of
from asrkit.decoders.hypotheses import PADDING, Hypotheses


@dataclass(frozen=True, kw_only=True)
class Text:
    """A hypothesis: its labels, and how it stands."""

    labels: tuple[int, ...] = ()
    score: float = 0.0  # log-probability in nats
    going: bool = True
    ended: bool = False  # by eos

    def rank(self) -> float:
        """What hypotheses are compared by."""
        tokens = len(self.labels) + self.ended
        return self.score / ((5 + tokens) / 6)


def aed_beam_reference(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Any = None,
    width: int = 4,
    most: int | None = None,
    ctc: Tensor | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """What `aed_beam` computes, of arguments that are valid."""
    lengths = lengths.long()
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    found = []
    with torch.inference_mode():
        for b, length in enumerate(lengths.tolist()):
            if length == 0:
                found.append(Text(going=False, ended=True))
                continue
            frames = encoded[b : b + 1, :length]
            memory = model.remember(frames, lengths[b : b + 1])
            search = PlainSearch(model, memory, prompts[b], int(limits[b]), width)
            if ctc is not None:
                own = ctc[b, :length].double().tolist()
                search = replace(search, ctc=own, ctc_weight=ctc_weight)
            found.append(search.run())
    rows = [[(label, PADDING, 0) for label in text.labels] for text in found]
    scores = encoded.new_tensor([text.score for text in found], dtype=torch.float32)
    ended = torch.tensor([text.ended for text in found], device=encoded.device)
    return replace(Hypotheses.from_lists(rows, list(scores), "reference"), ended=ended)


@dataclass(frozen=True)
class PlainSearch:
    """The search of one utterance."""

    model: Any
    memory: Any
    prompt: Tensor  # (P,)
    limit: int
    width: int
    ctc: list[list[float]] | None = None
    ctc_weight: float = 0.0

    def run(self) -> Text:
        """The best hypothesis once all have ended."""
        texts = [Text()]
        while any(text.going for text in texts):
            candidates = []
            for text in texts:
                candidates += self.extensions(text) if text.going else [(text, text)]
            best = sorted(candidates, key=lambda pair: -pair[0].rank())
            texts = [after for _, after in best[: self.width]]
        missing = Text(score=-inf, going=False)
        return max(texts, key=Text.rank, default=missing)

    def extensions(self, text: Text) -> list[tuple[Text, Text]]:
        """(what is ranked, what becomes of it) for each next token of a text."""
        scores = self.log_probs(text)
        if self.ctc is not None:
            scores = self.joint(text, scores)
        eos = self.model.eos
        longer = []
        pairs = []
        for token, score in enumerate(scores):
            total = text.score + score
            if isnan(score) or total == -inf:
                continue
            if token == eos:
                end = replace(text, score=total, going=False, ended=True)
                pairs.append((end, end))
            else:
                longer.append(replace(text, labels=(*text.labels, token), score=total))
        if len(text.labels) < self.limit:
            return pairs + [(each, each) for each in longer]
        likeliest = sorted(longer, key=lambda each: -each.score)[:1]
        return pairs + [(each, replace(text, going=False)) for each in likeliest]

    def log_probs(self, text: Text) -> list[float]:
        """Log-probabilities of every next token, in nats."""
        labels = self.prompt.new_tensor(text.labels)
        tokens = torch.cat([self.prompt, labels])[None]
        state = self.model.begin(self.memory, tokens.shape[1])
        logits, _ = self.model.follow(tokens, state, self.memory, reach=None)
        return logits[0, -1].log_softmax(-1, dtype=torch.float64).tolist()

    def joint(self, text: Text, attention: list[float]) -> list[float]:
        """What each next token adds to the score of a text, of attention and CTC together."""
        assert self.ctc is not None
        if not self.ctc_weight:
            return attention  # 0 times -inf is no number
        if any(isnan(score) for frame in self.ctc for score in frame):
            return [-inf] * len(attention)
        before, whole_text = prefix_score(self.ctc, text.labels)
        added = []
        for token, score in enumerate(attention):
            after = whole_text
            if token != self.model.eos:
                after = prefix_score(self.ctc, [*text.labels, token]).prefix
            added.append(
                (1 - self.ctc_weight) * score + self.ctc_weight * (after - before)
            )
        return added


class PrefixScore(NamedTuple):
    """Log-probabilities in nats."""

    prefix: float  # of all texts that begin with the labels
    text: float  # of the text itself


def prefix_score(
    log_probs: Sequence[Sequence[float]], labels: Sequence[int]
) -> PrefixScore:
    """What CTC says of labels below V, of T rows of V + 1 log-probabilities, blank last.

    Graves 2012, section 7.5.3, a label after another.
    """
    T = len(log_probs)
    # alignments of the labels so far with the first t frames, by what they end in
    in_label = [-inf] * (T + 1)
    in_blank = [0.0]
    for frame in log_probs:
        in_blank.append(in_blank[-1] + frame[-1])
    prefix = 0.0
    last = None
    for label in labels:
        longer_label = [-inf]
        longer_blank = [-inf]
        prefix = -inf
        for t, frame in enumerate(log_probs):
            enters = in_blank[t]
            if label != last:
                enters = log_add(enters, in_label[t])
            prefix = log_add(prefix, enters + frame[label])
            longer_blank.append(log_add(longer_blank[t], longer_label[t]) + frame[-1])
            longer_label.append(log_add(longer_label[t], enters) + frame[label])
        in_label = longer_label
        in_blank = longer_blank
        last = label
    return PrefixScore(prefix, log_add(in_label[T], in_blank[T]))


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high = max(a, b)
    if high == -inf:
        return high
    return high + log(exp(a - high) + exp(b - high))


def aed_greedy_reference(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Any = None,
    most: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """What `aed_greedy` computes, of arguments that are valid; every step reads the whole text again."""
    lengths = lengths.long()
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    rows: list[list[tuple]] = []
    scores = []
    ended = []
    with torch.inference_mode():
        for b, length in enumerate(lengths.tolist()):
            if length == 0:
                rows.append([])
                scores.append(torch.zeros((), device=encoded.device))
                ended.append(True)
                continue
            frames = encoded[b : b + 1, :length]
            memory = model.remember(frames, lengths[b : b + 1])
            row, score, end = _decode_one(
                model, memory, prompts[b], int(limits[b]), confidence
            )
            rows.append(row)
            scores.append(score)
            ended.append(end)
    flags = torch.tensor(ended, device=encoded.device)
    found = replace(Hypotheses.from_lists(rows, scores, "one by one"), ended=flags)
    if confidence and found.confidence is None:  # nobody has labels
        return replace(found, confidence=scores[0].new_empty(found.labels.shape))
    return found


def _decode_one(
    model: Any, memory: Any, prompt: Tensor, limit: int, confidence: bool
) -> tuple[list[tuple], Tensor, bool]:
    """Labels with frames and durations, score (), and whether eos came, of one utterance."""
    text = prompt.tolist()
    row: list[tuple] = []
    total = torch.zeros((), dtype=torch.float32, device=prompt.device)
    while True:
        state = model.begin(memory, len(text))
        logits, _ = model.follow(prompt.new_tensor([text]), state, memory, reach=None)
        token, score = best_tokens(logits[0, -1])
        if score.isnan():
            return row, total + score, False
        if token == model.eos:
            return row, total + score, True
        if len(row) == limit:
            return row, total, False
        total = total + score
        label = int(token), PADDING, 0
        row.append((*label, float(score.exp())) if confidence else label)
        text.append(int(token))
