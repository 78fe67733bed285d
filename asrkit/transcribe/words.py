"""Labels with times: joined where two windows of one recording overlap, and grouped into words."""

import bisect
import itertools
import math
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from asrkit.text import Tokenizer

JITTER_S = 0.4  # what two windows may differ in the time of one label
# In scripts without spaces a whole recording would be one word, found in quadratic time.
MAX_WORD_LABELS = 64
PAUSE_S = 0.5  # a pause this long is as good a place to cut as any longer one


class Label(NamedTuple):
    """One label of a recording; times in seconds from its start."""

    token: int
    start_s: float
    end_s: float
    confidence: float


class Word(NamedTuple):
    """One word; times in seconds from the recording's start, confidence of its least sure label."""

    text: str
    start_s: float
    end_s: float
    confidence: float


def join(
    before: Sequence[Label], after: Sequence[Label], start_s: float, end_s: float
) -> list[Label]:
    """Labels of two windows, each label once; all of them where the windows do not overlap.

    Labels that both windows have, within JITTER_S, are paired and take the first window's time, so
    that a cut has both on one side: none is doubled, none lost. The cut is made in a long pause of
    both, between paired labels, and close to the middle of the overlap, since near its own edge a
    window has only part of a word.

    Args:
        before: labels of the first window, and of those before it.
        after: labels of the second window.
        start_s: start of the overlap: of the second window.
        end_s: end of the overlap: of the first window.
    """
    if start_s >= end_s:  # a label may lie on the very end of the first
        return [*before, *after]
    head = before[: bisect.bisect_left(before, start_s, key=attrgetter("start_s"))]
    left = before[len(head) :]
    right = [label for label in after if label.start_s < end_s]
    times = [label.start_s for label in right]
    agreed = {start_s, end_s}
    for i, j in _pairs(left, right):
        times[j] = left[i].start_s
        agreed.add(times[j])
    all_times = {label.start_s for label in left} | set(times)
    cut_s = _cut(all_times, agreed, start_s, end_s)
    kept_left = [label for label in left if label.start_s < cut_s]
    kept_right = [label for label, time in zip(right, times, strict=True) if time >= cut_s]
    return [*head, *kept_left, *kept_right, *after[len(right) :]]


def _pairs(left: Sequence[Label], right: Sequence[Label]) -> list[tuple[int, int]]:
    """The longest common subsequence of labels at most JITTER_S apart, the closest of several."""
    gain = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]  # of what follows i and j
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            paired = _match(left[i], right[j]) + gain[i + 1][j + 1]
            gain[i][j] = max(gain[i + 1][j], gain[i][j + 1], paired)
    pairs: list[tuple[int, int]] = []
    i = j = 0
    while gain[i][j]:
        if gain[i][j] == gain[i + 1][j]:
            i += 1
        elif gain[i][j] == gain[i][j + 1]:
            j += 1
        else:
            pairs.append((i, j))
            i += 1
            j += 1
    return pairs


def _match(label: Label, other: Label) -> float:
    """What pairing two labels is worth: 0 where they differ, about 1 where they agree."""
    apart_s = abs(label.start_s - other.start_s)
    if label.token != other.token or apart_s > JITTER_S:
        return 0.0
    return 1 - 0.01 * apart_s


def _cut(times: set[float], agreed: set[float], start_s: float, end_s: float) -> float:
    """A time in the best gap between label times.

    Half a second of pause is worth two seconds off the middle, or two neighbours that are `agreed`.
    """
    middle = (start_s + end_s) / 2
    places = [(-math.inf, middle)]  # the worth of each, and where it is
    for low, high in itertools.pairwise(sorted({start_s, end_s} | times)):
        pause = min(high - low, PAUSE_S)
        place = min(max(middle, low + pause / 2), high - pause / 2)
        neighbours = (low in agreed) + (high in agreed)
        places.append((pause + 0.25 * neighbours - 0.25 * abs(place - middle), place))
    return max(places, key=itemgetter(0))[1]


def words(labels: Sequence[Label], tokenizer: Tokenizer) -> list[Word]:
    """Words of `labels`: split where the text that the tokenizer decodes has white space.

    A label starts a word when it and the labels since the last start decode to two words: this
    needs nothing of a tokenizer but `decode`. After MAX_WORD_LABELS labels without white space
    another word begins. A word ends with the last label that added to its text, so not with a
    space, and before the next one starts.
    """
    result: list[Word] = []
    tokens: list[int] = []  # since the last word started
    for label in labels:
        text = tokenizer.decode([*tokens, label.token]).strip()
        holds_two_words = len(text.split()) > 1
        if not tokens or holds_two_words or len(tokens) == MAX_WORD_LABELS:
            tokens = []
            text = tokenizer.decode([label.token]).strip()
            if not text:  # white space before a word
                continue
            result.append(Word(text, *label[1:]))
        elif text != result[-1].text:
            word = result[-1]
            confidence = min(word.confidence, label.confidence)
            result[-1] = Word(text, word.start_s, label.end_s, confidence)
        tokens.append(label.token)
    for number, (word, following) in enumerate(itertools.pairwise(result)):
        result[number] = word._replace(end_s=min(word.end_s, following.start_s))
    return result
