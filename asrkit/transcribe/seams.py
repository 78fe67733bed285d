"""Labels with times, joined where two windows of one recording overlap, and grouped into words."""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from asrkit.text import Tokenizer

JITTER_S = 0.4  # what two windows may differ in the time of one label
# labels of a word: scripts without spaces would make one of a whole recording, in quadratic time
LONGEST = 64
PAUSE_S = 0.5  # a pause this long is as good a place to cut as any longer one


class Label(NamedTuple):
    """One label of a recording; times in seconds from its start."""

    token: int
    start_s: float
    end_s: float
    confidence: float


class Word(NamedTuple):
    """One word and when it was said, in seconds from the recording's start; confidence is that of
    its least sure label.
    """

    text: str
    start_s: float
    end_s: float
    confidence: float


def join(
    before: Sequence[Label], after: Sequence[Label], start_s: float, end_s: float
) -> list[Label]:
    """Labels of two windows, of which the second starts at `start_s` and the first ends at `end_s`:
    each label once.

    Labels that both heard, within JITTER_S, are paired and take the first window's time, so a cut
    has both on one side: none is doubled, none lost. The cut is in a long pause of both, between
    labels that both heard, and close to the middle of the
    overlap: near its own edge a window has heard half a word.
    """
    head = before[: bisect.bisect_left(before, start_s, key=lambda label: label.start_s)]
    left, right = list(before[len(head) :]), [label for label in after if label.start_s < end_s]
    times, agreed = [label.start_s for label in right], {start_s, end_s}
    for i, j in _pairs(left, right):
        times[j] = left[i].start_s
        agreed.add(times[j])
    cut = _cut({label.start_s for label in left} | {*times}, agreed, start_s, end_s)
    kept = [label for label, time in zip(right, times, strict=True) if time >= cut]
    return [*head, *(label for label in left if label.start_s < cut), *kept, *after[len(right) :]]


def _pairs(left: Sequence[Label], right: Sequence[Label]) -> list[tuple[int, int]]:
    """The longest common subsequence whose partners are at most JITTER_S apart, of several the
    closest in time.
    """
    gain = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]  # of what follows i and j
    for i in reversed(range(len(left))):
        for j in reversed(range(len(right))):
            gain[i][j] = max(
                gain[i + 1][j], gain[i][j + 1], _match(left[i], right[j]) + gain[i + 1][j + 1]
            )
    found, i, j = list[tuple[int, int]](), 0, 0
    while i < len(left) and j < len(right):
        if gain[i][j] == gain[i + 1][j]:
            i += 1
        elif gain[i][j] == gain[i][j + 1]:
            j += 1
        else:
            found.append((i, j))
            i, j = i + 1, j + 1
    return found


def _match(one: Label, other: Label) -> float:
    apart = abs(one.start_s - other.start_s)
    return 1 - 0.01 * apart if one.token == other.token and apart <= JITTER_S else 0.0


def _cut(times: set[float], agreed: set[float], start_s: float, end_s: float) -> float:
    """A time in the best gap between `times`; half a second of pause is worth two seconds off the
    middle, or two neighbours that are `agreed`."""
    middle = (start_s + end_s) / 2
    edges = sorted({start_s, end_s, *(time for time in times if start_s < time < end_s)})
    best, cut = -float("inf"), middle
    for low, high in itertools.pairwise(edges):
        pause = min(high - low, PAUSE_S)
        place = min(max(middle, low + pause / 2), high - pause / 2)
        worth = (
            pause + 0.25 * (low in agreed) + 0.25 * (high in agreed) - 0.25 * abs(place - middle)
        )
        if worth > best:
            best, cut = worth, place
    return cut


def words(labels: Sequence[Label], tokenizer: Tokenizer) -> list[Word]:
    """Words of `labels`: where the text that the tokenizer makes of them has white space.

    A label starts a word when it and the labels since the last start decode to two words: this
    needs nothing of a tokenizer but `decode`. After LONGEST labels without white space another word
    begins. A word ends with the last label that added to its text, so not with a space, and before
    the next one starts.
    """
    found, tokens = list[Word](), list[int]()
    for label in labels:
        text = tokenizer.decode([*tokens, label.token]).strip()
        if not tokens or len(text.split()) > 1 or len(tokens) == LONGEST:
            tokens, text = [], tokenizer.decode([label.token]).strip()
            if not text:  # white space before a word
                continue
            found[-1:] = [
                word._replace(end_s=min(word.end_s, label.start_s)) for word in found[-1:]
            ]
            found.append(Word(text, *label[1:]))
        elif text != found[-1].text:
            found[-1] = Word(
                text, found[-1].start_s, label.end_s, min(found[-1].confidence, label.confidence)
            )
        tokens.append(label.token)
    return found
