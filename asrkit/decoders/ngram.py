"""N-gram language models from ARPA files, looked up for a whole batch at once: what shallow fusion
asks for.

p(w | h) is the listed probability of (h, w); where there is none, backoff(h) p(w | h without its
first word). A state is the number of the longest listed n-gram that ends the history, so states are
small integers and histories need not be kept.

Why not a library (looked up in November 2026): `kenlm` 0.3.0 is on PyPI as source only; `arpa` and
`pyctcdecode` had their last releases in 2018 and 2023; `kaldilm` turns ARPA into a text of an FST;
`camel-kenlm` has wheels of KenLM, which scores one word of one history a call. A beam needs all V
words of every hypothesis, on the device it runs on.
"""

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from asrkit.shapes import expect

Gram = tuple[int, ...]
Table = dict[
    Gram, tuple[float, float]
]  # n-gram -> log10 of its probability and of its back-off weight


@dataclass(frozen=True, kw_only=True)
class NGram:
    """A back-off model over V tokens. Words inside: the tokens 0 to V - 1, then </s>, <s>, <unk> if
    they are no tokens.

    C contexts are all n-grams below the highest order; context 0 is the empty one. An arc is a
    listed n-gram: its context, then its word; arcs are sorted by both, so those of a context lie
    together.
    """

    V: int
    order: int
    # (V,) int64, the word of each token: itself, or <unk>'s if the file does not list it
    word: Tensor
    end: Tensor  # () int64, the word </s>
    first: Tensor  # () int64, the state in which a sentence starts
    backoff: Tensor  # (C,) float32, natural log
    shorter: Tensor  # (C,) int64, the longest context that is a proper suffix
    begins: Tensor  # (C + 1,) int64, where the arcs of each context begin
    arcs: Tensor  # (A,) int64, context * words + word
    logp: Tensor  # (A,) float32, natural log
    leads: Tensor  # (A,) int64, the state after it
    unigrams: Tensor  # (words,) float32, natural log; -inf for what is not listed
    widest: tuple[
        int, ...
    ]  # most arcs of any context, of order 0, at most 1, at most 2 and so on; the empty one aside

    @classmethod
    def read(cls, path: str | Path, tokens: Sequence[object]) -> Self:
        """The model of an ARPA file, plain or gzipped, for a decoder's V tokens, blank's place
        included.

        The file writes token i as str(tokens[i]): pass range(V) for a file over ids. Tokens that
        the file does not list are scored as <unk>, or -inf if it lists none; n-grams with words
        that no token has are left out. ValueError names the line that is wrong.
        """
        path, words = Path(path), [str(token) for token in tokens]
        distinct = len(set(words))
        expect(
            distinct == len(words) > 0,
            "tokens",
            "at least one, all different",
            f"{len(words)}, {distinct} different",
        )
        expect(
            not isinstance(tokens, Tensor),
            "tokens",
            "words or numbers",
            "a tensor",
            "Pass tokens.tolist().",
        )
        broken = next((word for word in words if word.split() != [word]), None)
        expect(
            broken is None,
            "tokens",
            "words that an ARPA file can hold",
            repr(broken),
            "Write it otherwise in both: '<space>'.",
        )
        index = {word: number for number, word in enumerate(words)}
        for special in ("</s>", "<s>", "<unk>"):
            index.setdefault(special, len(index))
        tables = _parse(path, index)
        listed = any(word < len(words) for (word,) in tables[0])
        expect(
            listed,
            path.name,
            "a word that is a token",
            "none",
            f"A token reads like this: {words[0]!r:.40}.",
        )
        return cls._compile(tables, index, len(words))

    @classmethod
    def _compile(cls, tables: list[Table], index: dict[str, int], V: int) -> Self:
        order, words = len(tables), len(index)
        contexts = {
            gram: number
            for number, gram in enumerate([(), *(gram for table in tables[:-1] for gram in table)])
        }
        listed = {gram: entry for table in tables for gram, entry in table.items()}

        def state(gram: Gram) -> int:
            return next(contexts[gram[n:]] for n in range(len(gram) + 1) if gram[n:] in contexts)

        rows = sorted(
            (contexts[gram[:-1]] * words + gram[-1], entry[0], state(gram))
            for gram, entry in listed.items()
        )
        arcs = torch.tensor([row[0] for row in rows])
        begins = torch.searchsorted(arcs, torch.arange(len(contexts) + 1) * words)
        width, widest = begins.diff().tolist(), [0] * order
        for gram, number in contexts.items():
            widest[len(gram)] = max(widest[len(gram)], width[number] if gram else 0)
        unigrams = torch.full((words,), -math.inf)
        for (word,), (logp, _) in tables[0].items():
            unigrams[word] = logp * math.log(10)
        return cls(
            V=V,
            order=order,
            end=torch.tensor(index["</s>"]),
            first=torch.tensor(state((index["<s>"],))),
            word=torch.tensor([n if (n,) in tables[0] else index["<unk>"] for n in range(V)]),
            backoff=torch.tensor(
                [listed[gram][1] * math.log(10) if gram else 0.0 for gram in contexts]
            ),
            shorter=torch.tensor([state(gram[1:]) for gram in contexts]),
            begins=begins,
            arcs=arcs,
            unigrams=unigrams,
            logp=torch.tensor([row[1] * math.log(10) for row in rows]),
            leads=torch.tensor([row[2] for row in rows]),
            widest=tuple(max(widest[: n + 1]) for n in range(order)),
        )

    def to(self, device: torch.device | str) -> Self:
        """The same model on a device."""
        moved: dict[str, Any] = {
            name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)
        }
        return replace(self, **moved)

    def start(self, B: int) -> Tensor:
        """The states (B,) of B empty sentences, after <s>."""
        return self.first.repeat(B)

    def scores(self, states: Tensor) -> Tensor:
        """Log-probability in nats of every next token, (..., V), for states (...,).

        From the shortest suffix of the history up: lower all by the back-off weight, write what the
        context lists over it.
        """
        shape, words = states.shape, len(self.unigrams)
        chain = [states.flatten()]
        for _ in range(self.order - 2):
            chain.append(self.shorter[chain[-1]])
        row = torch.nn.functional.pad(self.unigrams, (0, 1)).repeat(
            len(chain[0]), 1
        )  # a last column for what is no arc
        for context, most in zip(reversed(chain), self.widest[1:], strict=False):
            row = row + self.backoff[context, None]
            at = self.begins[context, None] + torch.arange(most, device=states.device)
            real = (at < self.begins[context + 1, None]) & (context > 0)[:, None]
            at = at.clamp(max=len(self.arcs) - 1)
            row.scatter_(1, torch.where(real, self.arcs[at] % words, words), self.logp[at])
        return row[:, self.word].view(*shape, self.V)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states after one more token each, same shape."""
        return self._arc(states, self.word[tokens])[1]

    def final(self, states: Tensor) -> Tensor:
        """Log-probability in nats of </s> after each of the states."""
        return self._arc(states, self.end.expand_as(states))[0]

    def _arc(self, states: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, state after) of one word after each state: the first listed on the way
        to shorter histories.
        """
        words = len(self.unigrams)
        paid = torch.zeros(states.shape, device=states.device)
        logp, after = paid - math.inf, torch.zeros_like(states)
        missing = torch.ones_like(states, dtype=torch.bool)
        for _ in range(self.order):
            key = states * words + word
            at = torch.searchsorted(self.arcs, key).clamp(max=len(self.arcs) - 1)
            found = missing & (self.arcs[at] == key)
            logp, after = (
                torch.where(found, paid + self.logp[at], logp),
                torch.where(found, self.leads[at], after),
            )
            missing, paid, states = (
                missing & ~found,
                paid + self.backoff[states],
                self.shorter[states],
            )
        return logp, after


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of every line that is not empty; the last is the end of the file."""
    number = 0
    with path.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if zipped else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
                if text:
                    yield f"{path.name}:{number}", text
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        expect(
            False,
            f"{path.name}:{number + 1}",
            "readable text in UTF-8",
            f"{type(error).__name__}, {error}",
        )
    yield f"{path.name}:{number + 1}", "the end of the file"


def _parse(path: Path, index: dict[str, int]) -> list[Table]:
    """The n-grams of every order over the words of `index`; others are counted and left out."""
    lines = _lines(path)
    place, text = next(pair for pair in lines if pair[1] in ("\\data\\", "the end of the file"))
    expect(text == "\\data\\", place, "a line \\data\\ first", text)
    place, text = next(lines)
    counts: list[int] = []
    while match := re.fullmatch(r"ngram\s+(\d+)\s*=\s*(\d+)", text):
        expect(
            int(match[1]) == len(counts) + 1, place, f"the count of order {len(counts) + 1}", text
        )
        counts.append(int(match[2]))
        place, text = next(lines)
    expect(len(counts) > 0, place, "a line 'ngram 1=count'", text)
    tables: list[Table] = []
    for n, count in enumerate(counts, 1):
        expect(text == f"\\{n}-grams:", place, f"the section \\{n}-grams:", text)
        table: Table = {}
        seen = 0
        place, text = next(lines)
        while not text.startswith("\\") and text != "the end of the file":
            gram, entry = _entry(place, text, n, len(counts), index)
            if gram is not None:
                expect(gram not in table, place, "every n-gram once", text)
                known = n == 1 or gram[:-1] in tables[-1]
                expect(known, place, f"an n-gram whose first {n - 1} words are listed", text)
                table[gram] = entry
            seen += 1
            place, text = next(lines)
        expect(
            seen == count,
            place,
            f"{count} n-grams in \\{n}-grams:, as \\data\\ says",
            f"{seen} before {text!r}",
        )
        tables.append(table)
    expect(text == "\\end\\", place, "\\end\\", text)
    for _ in lines:  # damage of a gzipped file may show at its end only
        pass
    return tables


def _entry(
    place: str, text: str, n: int, order: int, index: dict[str, int]
) -> tuple[Gram | None, tuple[float, float]]:
    """(n-gram, log10 of its probability and back-off weight) of one line; None if a word is not in
    `index`.
    """
    fields = re.split(r"[ \t]+", text)
    most = n + 1 + (n < order)
    expect(
        n + 1 <= len(fields) <= most,
        place,
        f"a log-probability, {n} words" + ", a back-off weight" * (n < order),
        text,
    )
    numbers = []
    for field in (fields[0], *fields[n + 1 :]):
        try:
            numbers.append(float(field))
        except ValueError:
            expect(False, place, "a number", repr(field))
    logp, backoff = numbers[0], numbers[1] if len(numbers) > 1 else 0.0
    expect(logp <= 0, place, "a log10 probability of at most 0", fields[0])
    expect(abs(backoff) < 1e38, place, "a finite back-off weight", fields[-1])
    words = fields[1 : n + 1]
    return (
        tuple(index[word] for word in words) if all(word in index for word in words) else None
    ), (logp, backoff)
