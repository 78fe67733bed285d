"""Greedy decoding by attention, the search of `aed_beam`, and CTC prefix scores, in plain loops."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isnan, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import limits_of, prompt_of
from asrkit.decoders.hypotheses import PADDING, Hypotheses


@dataclass(frozen=True, kw_only=True)
class Text:
    """A hypothesis."""

    labels: tuple[int, ...] = ()
    sure: tuple[float, ...] = ()  # confidence, if requested
    score: float = 0.0  # log-probability in nats
    going: bool = True
    ended: bool = False  # by eos

    def rank(self) -> float:
        """The score that orders hypotheses."""
        tokens = len(self.labels) + self.ended
        return self.score / ((5 + tokens) / 6)


class Utterance(NamedTuple):
    """A model with one utterance."""

    model: Any
    memory: Any
    prompt: Tensor  # (P,)
    limit: int

    def log_probs(self, labels: Sequence[int]) -> list[float]:
        """Log-probabilities of every next token, in nats; each call reads the whole text."""
        tokens = torch.cat([self.prompt, self.prompt.new_tensor(labels)])[None]
        state = self.model.init_state(self.memory, tokens.shape[1])
        logits, _ = self.model.step(tokens, state, self.memory, reach=None)
        return logits[0, -1].log_softmax(-1, dtype=torch.float64).tolist()


def utterances(
    model: Any, encoded: Tensor, lengths: Tensor, prompt: Any, max_labels: int | None
) -> Iterator[Utterance | None]:
    """The utterances of a batch, None for those without frames."""
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], max_labels).tolist()
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            yield None
        else:
            memory = model.prefill(encoded[b : b + 1, :length], lengths[b : b + 1])
            yield Utterance(model, memory, prompts[b], limits[b])


def hypotheses(texts: list[Text], confidence: bool = False) -> Hypotheses:
    """The texts as a decoder returns them."""
    rows = [[(label, PADDING, 0) for label in text.labels] for text in texts]
    scores = [torch.tensor(text.score) for text in texts]
    found = Hypotheses.from_lists(rows, scores, "reference")
    sure = torch.full(found.labels.shape, float(PADDING))
    for row, text in zip(sure, texts, strict=True):
        row[: len(text.sure)] = torch.tensor(text.sure)
    ended = torch.tensor([text.ended for text in texts])
    return replace(found, ended=ended, confidence=sure if confidence else None)


EMPTY = Text(going=False, ended=True)


@torch.inference_mode()
def aed_greedy_reference(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Any = None,
    max_labels: int | None = None,
    confidence: bool = False,
) -> Hypotheses:
    """What `aed_greedy` computes, without its checks."""
    texts = []
    for utterance in utterances(model, encoded, lengths, prompt, max_labels):
        text = Text() if utterance else EMPTY
        while text.going:
            text = greedy_step(utterance, text)
        texts.append(text)
    return hypotheses(texts, confidence)


def greedy_step(utterance: Utterance, text: Text) -> Text:
    """The text with its best next token, or ended."""
    scores = utterance.log_probs(text.labels)
    score = max(scores)
    token = scores.index(score)
    total = text.score + score
    if isnan(score):
        return replace(text, score=total, going=False)
    if token == utterance.model.eos:
        return replace(text, score=total, going=False, ended=True)
    if len(text.labels) == utterance.limit:
        return replace(text, going=False)
    labels = (*text.labels, token)
    return replace(text, labels=labels, sure=(*text.sure, exp(score)), score=total)


@torch.inference_mode()
def aed_beam_reference(
    model: Any,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Any = None,
    width: int = 4,
    max_labels: int | None = None,
    ctc: Tensor | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """What `aed_beam` computes, without its checks."""
    texts = []
    batch = utterances(model, encoded, lengths, prompt, max_labels)
    for b, utterance in enumerate(batch):
        if utterance is None:
            texts.append(EMPTY)
            continue
        search = PlainSearch(utterance, width)
        if ctc is not None and ctc_weight:
            own = ctc[b, : lengths[b]].double().tolist()
            search = PlainSearch(utterance, width, own, ctc_weight)
        texts.append(search.run())
    return hypotheses(texts)


@dataclass(frozen=True)
class PlainSearch:
    """The search of one utterance."""

    utterance: Utterance
    width: int
    ctc: list[list[float]] | None = None
    ctc_weight: float = 0.0

    def run(self) -> Text:
        """The best hypothesis when all have ended."""
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
        """(ranked text, resulting text) for each next token of a text."""
        scores = self.utterance.log_probs(text.labels)
        if self.ctc is not None:
            scores = self.joint(text, scores)
        longer = []
        pairs = []
        for token, score in enumerate(scores):
            total = text.score + score
            if isnan(score) or total == -inf:
                continue
            if token == self.utterance.model.eos:
                end = replace(text, score=total, going=False, ended=True)
                pairs.append((end, end))
            else:
                longer.append(replace(text, labels=(*text.labels, token), score=total))
        if len(text.labels) < self.utterance.limit:
            return pairs + [(each, each) for each in longer]
        likeliest = sorted(longer, key=lambda each: -each.score)[:1]
        return pairs + [(each, replace(text, going=False)) for each in likeliest]

    def joint(self, text: Text, attention: list[float]) -> list[float]:
        """What each next token adds to the joint score of a text."""
        if any(isnan(score) for frame in self.ctc for score in frame):
            return [-inf] * len(attention)
        before, whole_text = prefix_score(self.ctc, text.labels)
        added = []
        for token, score in enumerate(attention):
            after = whole_text
            if token != self.utterance.model.eos:
                after = prefix_score(self.ctc, [*text.labels, token]).prefix
            own = self.ctc_weight * (after - before)
            added.append((1 - self.ctc_weight) * score + own)
        return added


class PrefixScore(NamedTuple):
    """Log-probabilities in nats."""

    prefix: float  # of all texts that begin with the labels
    text: float  # of the text itself


def prefix_score(
    log_probs: Sequence[Sequence[float]], labels: Sequence[int]
) -> PrefixScore:
    """CTC's scores of labels below V, from T rows of V + 1 log-probabilities, blank last.

    Graves 2012, section 7.5.3, label by label.
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
