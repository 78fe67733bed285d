"""N-gram language models from ARPA files, looked up for a whole batch at once, for shallow fusion.

p(w | h) is the listed probability of (h, w); where there is none, it is backoff(h) p(w | h without
its first word). A state is the number of the longest listed n-gram that ends the history, so states
are small integers and histories need not be kept.

Why not a library (looked up in November 2026): `kenlm` 0.3.0 is on PyPI as source only; `arpa` and
`pyctcdecode` had their last releases in 2018 and 2023; `kaldilm` turns ARPA into a text of an FST;
`camel-kenlm` has wheels of KenLM, which scores one word of one history per call. A beam needs all V
words of every hypothesis, on the device it runs on.
"""

import contextlib
import gzip
import itertools
import math
import re
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Self, cast

import torch
from torch import Tensor

from asrkit.shapes import expect

Gram = tuple[int, ...]
# log10 of the probability and of the back-off weight of each n-gram
Table = dict[Gram, tuple[float, float]]
LN_10 = math.log(10)


@dataclass(frozen=True, kw_only=True)
class NGram:
    """A back-off model over V tokens.

    Its words are the tokens 0 to V - 1, then </s>, <s> and <unk> unless they are tokens. The C
    contexts are all n-grams below the highest order; context 0 is the empty one. An arc is a listed
    n-gram, seen as a context and its next word; arcs are sorted by both, so those of a context lie
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
    # most arcs of any context of order 0, of at most 1, at most 2 and so on; the empty one aside
    widest: tuple[int, ...]

    @classmethod
    def read(cls, path: str | Path, tokens: Sequence[object]) -> Self:
        """The model of an ARPA file, for a decoder's V tokens.

        Args:
            path: The file, plain or gzipped.
            tokens: What the file writes for each token, the blank's place included: str(tokens[i])
                is token i. Pass range(V) for a file over ids. Tokens that the file does not list
                are scored as <unk>, or -inf if it lists none; n-grams with words that no token has
                are left out.

        Raises:
            ValueError: Names the line that is wrong.
        """
        path = Path(path)
        words = [str(token) for token in tokens]
        distinct = len(set(words))
        expect(
            distinct == len(words) > 0,
            "tokens",
            "at least one, all different",
            f"{len(words)}, {distinct} different",
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
        order = len(tables)
        words = len(index)
        contexts: dict[Gram, int] = {(): 0}
        for table in tables[:-1]:
            for gram in table:
                contexts[gram] = len(contexts)
        listed: Table = {}
        for table in tables:
            listed.update(table)

        def state(gram: Gram) -> int:
            """The longest context that ends `gram`."""
            while gram not in contexts:
                gram = gram[1:]
            return contexts[gram]

        rows = []
        for gram, (logp, _) in listed.items():
            arc = contexts[gram[:-1]] * words + gram[-1]
            rows.append((arc, logp * LN_10, state(gram)))
        rows.sort()
        arcs = torch.tensor([arc for arc, _, _ in rows])
        first_of_context = torch.arange(len(contexts) + 1) * words
        begins = torch.searchsorted(arcs, first_of_context)
        unigrams = torch.full((words,), -math.inf)
        token_words = [n if (n,) in tables[0] else index["<unk>"] for n in range(V)]
        for (word,), (logp, _) in tables[0].items():
            unigrams[word] = logp * LN_10
        backoffs = [0.0]  # of the empty context
        backoffs += [listed[gram][1] * LN_10 for gram in contexts if gram]
        shorter = [state(gram[1:]) for gram in contexts]
        return cls(
            V=V,
            order=order,
            end=torch.tensor(index["</s>"]),
            first=torch.tensor(state((index["<s>"],))),
            word=torch.tensor(token_words),
            backoff=torch.tensor(backoffs),
            shorter=torch.tensor(shorter),
            begins=begins,
            arcs=arcs,
            unigrams=unigrams,
            logp=torch.tensor([logp for _, logp, _ in rows]),
            leads=torch.tensor([after for _, _, after in rows]),
            widest=_widest(contexts, begins, order),
        )

    def to(self, device: torch.device | str) -> Self:
        """The same model on a device."""
        moved: dict[str, Any] = {}
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                moved[name] = part.to(device)
        return replace(self, **moved)

    def start(self, B: int) -> Tensor:
        """The states (B,) of B empty sentences, after <s>."""
        return self.first.repeat(B)

    def scores(self, states: Tensor) -> Tensor:
        """Log-probability in nats of every next token, (..., V), for states (...,).

        Goes from the shortest suffix of the history to the longest: adds the back-off weight to
        all, then overwrites what the context lists.
        """
        words = len(self.unigrams)
        last_arc = len(self.arcs) - 1
        chain = [states.flatten()]
        for _ in range(self.order - 2):
            chain.append(self.shorter[chain[-1]])
        # one column more, for places that hold no arc
        row = torch.nn.functional.pad(self.unigrams, (0, 1)).repeat(len(chain[0]), 1)
        for context, most in zip(reversed(chain), self.widest[1:], strict=False):
            row = row + self.backoff[context, None]
            offsets = torch.arange(most, device=states.device)
            at = self.begins[context, None] + offsets
            end = self.begins[context + 1, None]
            is_empty = (context == 0)[:, None]
            real = (at < end) & ~is_empty
            at = at.clamp(max=last_arc)
            word = torch.where(real, self.arcs[at] % words, words)
            row.scatter_(1, word, self.logp[at])
        of_tokens = row[:, self.word]
        return of_tokens.view(*states.shape, self.V)

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states after one more token each, same shape."""
        return self.step(states, tokens)[1]

    def step(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability in nats of one token after each state, state after it), same shape."""
        return self._arc(states, self.word[tokens])

    def final(self, states: Tensor) -> Tensor:
        """Log-probability in nats of </s> after each of the states."""
        return self._arc(states, self.end.expand_as(states))[0]

    def _arc(self, states: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability in nats, state after) of one word after each state.

        The first that is listed on the way to shorter histories.
        """
        words = len(self.unigrams)
        last_arc = len(self.arcs) - 1
        backoff = torch.zeros(states.shape, device=states.device)
        logp = backoff - math.inf
        after = torch.zeros_like(states)
        missing = torch.ones_like(states, dtype=torch.bool)
        for _ in range(self.order):
            key = states * words + word
            at = torch.searchsorted(self.arcs, key)
            at = at.clamp(max=last_arc)
            is_listed = missing & (self.arcs[at] == key)
            logp = torch.where(is_listed, backoff + self.logp[at], logp)
            after = torch.where(is_listed, self.leads[at], after)
            missing = missing & ~is_listed
            backoff = backoff + self.backoff[states]
            states = self.shorter[states]
        return logp, after


def _widest(contexts: dict[Gram, int], begins: Tensor, order: int) -> tuple[int, ...]:
    """The most arcs of any context of order 0, of at most 1 and so on; the empty one aside."""
    arcs_of = begins.diff().tolist()
    most_arcs = [0] * order
    for gram, number in contexts.items():
        if gram:
            n = len(gram)
            most_arcs[n] = max(most_arcs[n], arcs_of[number])
    return tuple(itertools.accumulate(most_arcs, max))


def listed_words(path: str | Path) -> list[str]:
    """The words that an ARPA file lists, in its order, with </s>, <s> and <unk> if they are there.

    Raises:
        ValueError: Names the line that is wrong, of those up to the last word.
    """
    with contextlib.closing(_entries(Path(path))) as entries:
        unigrams = itertools.takewhile(lambda entry: len(entry[0]) == 1, entries)
        return [words[0] for words, _, _ in unigrams]


def _open(path: Path) -> IO[bytes]:
    """The file, opened; through gzip if it begins as gzip's files do."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    if zipped:
        return cast(IO[bytes], gzip.open(path))
    return path.open("rb")


def _entries(path: Path) -> Generator[tuple[tuple[str, ...], float, float]]:
    """(words, log10 of the probability, log10 of the back-off weight) of every n-gram of a file.

    Raises:
        ValueError: Names the line that is wrong, or what the file lacks at its end.
    """
    counts: list[int] = []  # n-grams of each order, as the file says
    found: list[int] = []  # and as they were read
    place = path.name
    ended = False
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                place = f"{path.name}:{number}"
                text = line.decode("utf-8-sig").strip(" \t\r\n")  # a byte order mark may come first
                count = re.fullmatch(r"ngram\s+\d+\s*=\s*(\d+)", text)
                if count and not found:
                    counts.append(int(count[1]))
                elif text == f"\\{len(found) + 1}-grams:":
                    found.append(0)
                elif text == "\\end\\":
                    ended = True
                elif text and found and not ended:
                    found[-1] += 1
                    yield _entry(text, len(found))
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{place}: {error!s:.200}") from None
    wanted = f"{counts} n-grams of each order, as \\data\\ says, and \\end\\"
    expect(ended and found == counts != [], place, wanted, f"{found} in all")


def _entry(text: str, n: int) -> tuple[tuple[str, ...], float, float]:
    """One n-gram of `n` words; ValueError where it is none."""
    fields = re.split(r"[ \t]+", text)
    expect(len(fields) > n, "line", f"a log-probability and {n} words", repr(text))
    logp = float(fields[0])
    backoff = float(fields[n + 1]) if len(fields) > n + 1 else 0.0
    in_float32 = -1e38 < logp <= 0 or logp == -math.inf
    expect(in_float32, "line", "a log10 probability from -1e38 to 0, or -inf", logp)
    expect(abs(backoff) < 1e38, "line", "a finite back-off weight", backoff)
    return tuple(fields[1 : n + 1]), logp, backoff


def _parse(path: Path, index: dict[str, int]) -> list[Table]:
    """The n-grams of every order over the words of `index`; others are left out."""
    tables: list[Table] = []
    for words, logp, backoff in _entries(path):
        n = len(words)
        if n > len(tables):
            tables.append({})
        if all(word in index for word in words):
            gram = tuple(index[word] for word in words)
            listed = n == 1 or gram[:-1] in tables[n - 2]
            wanted = f"each n-gram's first {n - 1} words to be listed"
            expect(listed, path.name, wanted, f"{' '.join(words)!r} without them")
            tables[n - 1][gram] = (logp, backoff)
    return tables
