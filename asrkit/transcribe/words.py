"""Labels with times: joined where two windows of one recording overlap, and grouped into words."""

import bisect
import itertools
import math
import re
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from asrkit.text import Tokenizer

JITTER_S = 0.4  # largest difference between the times that two windows give one label
MAX_WORD = 64  # characters in a word; labels that may write one character together
PAUSE_S = 0.5  # a longer pause is no better place to cut
PART = "\ufffd"  # decoded text of an incomplete character
# Scripts without spaces, Thai to Myanmar, Khmer and CJK: a word may begin with each character,
SPACELESS = re.compile(
    r"[\u0e00-\u109f\u1780-\u17ff\u2e80-\u312f\u31a0-\u9fff\uf900-\ufaff\uff66-\uff9f"
    r"\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
# but not after an opening bracket or a leading vowel, nor with a closing, marking or small one
_OPENING = r"(\[{（［｛「『【〈《〔“‘เ-ไເ-ໄ\u1039\u17d2"
_SMALL = (
    r"ーｰ々〻ゝゞヽヾぁぃぅぇぉっゃゅょゎゕゖァィゥェォッャュョヮヵヶㇰ-ㇿｧ-ｯๆะ-ำๅໆະ-ຳ\u1039\u17d2"
)
TIED = re.compile(rf"[{_OPENING}].|.[^\w{_OPENING}]|.[{_SMALL}]", re.DOTALL)


class Label(NamedTuple):
    """One label of a recording; times in seconds from its start."""

    token: int
    start_s: float
    end_s: float
    confidence: float


class Word(NamedTuple):
    """One word; times in seconds from the recording's start, least confidence of its labels."""

    text: str
    start_s: float
    end_s: float
    confidence: float
    joined: bool = False  # to the word before, without white space


def join(
    before: Sequence[Label], after: Sequence[Label], start_s: float, end_s: float
) -> list[Label]:
    """Labels of two windows in order of time, each label once; all labels if they do not overlap.

    A label that both windows have, within JITTER_S, is a pair and takes the first window's time.
    So both are on one side of the cut, and no label is doubled or lost. Labels between two pairs
    stay between them. The cut is made in a pause that both windows have, between paired labels, and
    close to the middle of the overlap, since near its edge a window has only a part of a word.

    Args:
        before: Labels of the first window and of all windows before it.
        after: Labels of the second window.
        start_s: Start of the second window, where the overlap starts.
        end_s: End of the first window, where the overlap ends.
    """
    if start_s >= end_s:  # a label may be exactly at the end of the first window
        return [*before, *after]
    head = before[: bisect.bisect_left(before, start_s, key=attrgetter("start_s"))]
    left = before[len(head) :]
    right = [label for label in after if label.start_s < end_s]
    paired = {j: left[i].start_s for i, j in _pairs(left, right)}
    agreed = {start_s, end_s, *paired.values()}
    times: list[float] = []
    for j, label in enumerate(right):
        times.append(paired.get(j, max([label.start_s, *times[-1:]])))
    times = [*itertools.accumulate(reversed(times), min)][::-1]
    all_times = {label.start_s for label in left} | set(times)
    cut_s = _cut(all_times, agreed, start_s, end_s)
    kept_left = [label for label in left if label.start_s < cut_s]
    kept_right = [
        label._replace(start_s=time, end_s=label.end_s + (time - label.start_s))
        for label, time in zip(right, times, strict=True)
        if time >= cut_s
    ]
    return [*head, *kept_left, *kept_right, *after[len(right) :]]


def _pairs(left: Sequence[Label], right: Sequence[Label]) -> list[tuple[int, int]]:
    """The longest common subsequence of labels at most JITTER_S apart; the closest if several."""
    gain = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]  # of labels from i and j on
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
    """The gain of pairing two labels: 0 if they differ, about 1 if they agree."""
    apart_s = abs(label.start_s - other.start_s)
    if label.token != other.token or apart_s > JITTER_S:
        return 0.0
    return 1 - 0.01 * apart_s


def _cut(times: set[float], agreed: set[float], start_s: float, end_s: float) -> float:
    """A time in the best gap between label times.

    A pause of half a second outweighs two seconds from the middle, or two `agreed` neighbours.
    """
    middle = (start_s + end_s) / 2
    places = [(-math.inf, middle)]  # (worth, time)
    for low, high in itertools.pairwise(sorted({start_s, end_s} | times)):
        pause = min(high - low, PAUSE_S)
        place = min(max(middle, low + pause / 2), high - pause / 2)
        neighbours = (low in agreed) + (high in agreed)
        places.append((pause + 0.25 * neighbours - 0.25 * abs(place - middle), place))
    return max(places, key=itemgetter(0))[1]


def words(labels: Sequence[Label], tokenizer: Tokenizer) -> list[Word]:
    """Words of `labels`, with the text that the tokenizer decodes.

    The text is split at white space, in scripts without spaces between labels, and after MAX_WORD
    characters. A word ends with the last label that adds to its text, which a space does not, and
    before the next word starts.

    Args:
        labels: Labels in order of time.
        tokenizer: Any object with `decode`.
    """
    result: list[Word] = []
    for part in _characters(labels, tokenizer):
        if part.joined and _is_one_word(result[-1].text, part.text):
            result[-1] = _extended(result[-1], result[-1].text + part.text, part)
        else:
            result.append(part)
    for number, (word, following) in enumerate(itertools.pairwise(result)):
        result[number] = word._replace(end_s=min(word.end_s, following.start_s))
    return result


def _is_one_word(before: str, after: str) -> bool:
    """Whether text continues the word before it, with no white space between them."""
    pair = before[-1] + after[0]
    apart = SPACELESS.search(pair) and not TIED.match(pair)
    return len(before) < MAX_WORD and not apart


def _extended(word: Word, text: str, by: Label | Word) -> Word:
    """`word` with this text; it ends with the label or part `by`."""
    return word._replace(text=text, end_s=by.end_s, confidence=min(word.confidence, by.confidence))


def _characters(labels: Sequence[Label], tokenizer: Tokenizer) -> list[Word]:
    """The text that each label adds; labels that write a character together count as one."""
    parts: list[Word] = []
    tokens: list[int] = []  # of the last part, and of white space after it
    text = ""
    for label in labels:
        before = text
        tokens.append(label.token)
        text = tokenizer.decode(tokens).strip()
        added = text.removeprefix(before)
        if not added:
            del tokens[MAX_WORD:]
            continue
        whole = not before.endswith(PART) or added[0].isspace() or len(tokens) > MAX_WORD
        if whole and text.startswith(before):
            tokens = [label.token]
            text = added.strip()
            joined = before != "" and not added[0].isspace()
            parts.append(Word(text, *label[1:], joined))
        else:
            parts[-1] = _extended(parts[-1], text, label)
    return parts
