"""Byte-level BPE: tokens whose text is bytes, as in GPT-2 and Whisper.

A text is split into words, numbers, runs of other characters and white space; the UTF-8 bytes of
each are merged pair by pair, the pair that was learned first before all others. So every text has
tokens, and a token may be part of a character.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self

from asrkit.shapes import expect

# GPT-2's pattern, for texts as `_simplified` leaves them: contractions, words, numbers, the rest,
# each with one space before it, and white space, which leaves a last space to what follows.
_PARTS = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_SPACE = "▁"  # how `pieces` write a space, as SentencePiece does


@lru_cache(maxsize=1)
def byte_letters() -> tuple[str, ...]:
    """The letter that stands for each byte in GPT-2's vocabularies.

    A printable character of Latin-1 stands for its own byte; other bytes get the letters from
    U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = []
    others = 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + others))
            others += 1
    return tuple(letters)


@lru_cache(maxsize=1)
def _letter_bytes() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(byte_letters())}


def _simplified(text: str) -> str:
    """`text` with "x" for each letter beyond ASCII, "0" for a number, a tab for white space, "!"
    for the rest: Python's patterns have no Unicode categories.
    """
    simple = []
    for character in text:
        kind = unicodedata.category(character)[0]
        if character.isascii():
            simple.append(character)
        elif kind == "L":
            simple.append("x")
        elif kind == "N":
            simple.append("0")
        elif character.isspace():
            simple.append("\t")
        else:
            simple.append("!")
    return "".join(simple)


def split_words(text: str) -> list[str]:
    """The parts of a text within which bytes are merged, each with the space before it.

    >>> split_words("It's 1 a.m.  now")
    ['It', "'s", ' 1', ' a', '.', 'm', '.', ' ', ' now']
    """
    return [text[match.start() : match.end()] for match in _PARTS.finditer(_simplified(text))]


@dataclass(frozen=True)
class BytePairTokenizer:
    """Tokens of a byte-level BPE, held as its vocabulary and merges for checkpoints to carry.

    Args:
        vocabulary: The text of each token in `byte_letters`; "" where no text has this token.
        merges: Pairs of such texts, in the order in which they were learned.
    """

    vocabulary: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        known = _letter_bytes().keys()
        strange = [text for text in self.vocabulary if not known >= {*text}]
        wanted = "a byte-level vocabulary"
        expect(len(self.vocabulary) > 0 and not strange, "tokenizer", wanted, strange[:5])
        ids: dict[str, int] = {}
        for token, text in enumerate(self.vocabulary):
            if text:
                expect(text not in ids, "tokenizer", "each text once", f"{text!r} twice")
                ids[text] = token
        unknown = [pair for pair in self.merges if "".join(pair) not in ids]
        expect(not unknown, "tokenizer", "a token for what each merge makes", unknown[:3])
        ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        object.__setattr__(self, "_ids", ids)
        object.__setattr__(self, "_ranks", ranks)

    @classmethod
    def from_json(cls, contents: str) -> Self:
        """The tokenizer that `to_json` wrote; ValueError where it is damaged."""
        try:
            values = json.loads(contents)
            vocabulary = tuple(values["vocabulary"])
            merges = tuple(split_merge(merge) for merge in values["merges"])
            return cls(vocabulary, merges)
        except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"tokenizer: its vocabulary is damaged ({why:.200}).") from None

    def to_json(self) -> str:
        """Vocabulary and merges as JSON."""
        merges = [" ".join(pair) for pair in self.merges]
        return json.dumps({"vocabulary": self.vocabulary, "merges": merges}, ensure_ascii=False)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; those of a model's prompts, which come behind, are not among them."""
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; a space before its first word is part of it, as in Whisper's own texts.

        Raises:
            ValueError: The vocabulary lacks a byte of the text.
        """
        ids: dict[str, int] = self._ids  # type: ignore[attr-defined]
        letters = byte_letters()
        tokens = []
        for word in split_words(text):
            parts = self._merged([letters[byte] for byte in word.encode(errors="replace")])
            absent = [part for part in parts if part not in ids]
            expect(not absent, "text", "bytes that the tokenizer has", f"{absent[:5]} in {word!r}")
            tokens += [ids[part] for part in parts]
        return tokens

    def _merged(self, parts: list[str]) -> list[str]:
        """`parts` with all pairs merged that can be, the pair learned first before the others."""
        ranks: dict[tuple[str, str], int] = self._ranks  # type: ignore[attr-defined]
        while True:
            found = {pair for pair in pairwise(parts) if pair in ranks}
            if not found:
                return parts
            first = min(found, key=ranks.__getitem__)
            parts = _with_merged(parts, first)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, with single spaces; bytes that are no character become U+FFFD."""
        size = self.vocab_size
        wrong = [int(token) for token in tokens if not 0 <= token < size]
        remedy = "Tokens of prompts and times have no text."
        expect(not wrong, "tokens", f"0 to {size - 1}", wrong[:5], remedy)
        return " ".join(self._text(tokens).split())

    def _text(self, tokens: Iterable[int]) -> str:
        bytes_of = _letter_bytes()
        letters = "".join(self.vocabulary[token] for token in tokens)
        return bytes(bytes_of[letter] for letter in letters).decode(errors="replace")

    def pieces(self) -> list[str]:
        """What each token writes, with "▁" for a space and U+FFFD for part of a character."""
        return [self._text([token]).replace(" ", _SPACE) for token in range(self.vocab_size)]


def split_merge(merge: str | Sequence[str]) -> tuple[str, str]:
    """The two parts of a merge, which files write as "a b" or as ["a", "b"]."""
    parts = merge.split(" ") if isinstance(merge, str) else [*merge]
    pair = len(parts) == 2 and all(isinstance(part, str) for part in parts)
    expect(pair, "tokenizer", "merges of two parts", repr(merge)[:80])
    return parts[0], parts[1]


def _with_merged(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with each occurrence of `pair` as one, from the left."""
    merged = []
    place = 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            merged.append(parts[place] + parts[place + 1])
            place += 2
        else:
            merged.append(parts[place])
            place += 1
    return merged
