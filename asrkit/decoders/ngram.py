"""N-gram language models from ARPA files, looked up for a whole batch at once, for shallow fusion.

p(w | h) is the listed probability of (h, w). If it is not listed, it is backoff(h) p(w | h without
its first word). A state is the number of the longest listed n-gram that ends the history, so states
are small integers and histories need not be kept.

`NGram` scores the decoder's tokens, `WordNGram` the words that they spell.

No library serves here (as of November 2026). `kenlm` 0.3.0 is on PyPI only as source. `arpa` and
`pyctcdecode` had their last releases in 2018 and 2023. `kaldilm` turns ARPA into the text of an
FST. `camel-kenlm` has wheels of KenLM, which scores one word of one history per call. A beam needs
all V words of every hypothesis, on its own device.
"""

import gzip
import math
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asrkit.decoders.beams import check_weights
from asrkit.devices import CPU_FLOAT
from asrkit.shapes import expect

# log-probability and back-off weight of n-grams, in nats
Table = dict[tuple[str, ...], tuple[float, float]]
LN_10 = math.log(10)
WORD_STARTS = (" ", "▁")  # marks of a word's beginning: of characters, and of SentencePiece
NO_CHARACTER = -1
WordState = tuple[Tensor, Tensor]  # (...) int64 each: state of the n-gram, node of the open word


class OnDevice:
    """A dataclass whose tensors move together."""

    def to(self, device: torch.device | str) -> Self:
        """The same model on a device."""
        moved = {name: part.to(device) for name, part in vars(self).items() if hasattr(part, "to")}
        return replace(self, **moved)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True)
class NGram(OnDevice):
    """A back-off model over V tokens; a `LanguageModel`.

    Its words are the tokens, then </s>, <s> and <unk> unless they are tokens. The C contexts are
    all n-grams below the highest order; context 0 is the empty one. An arc is a listed n-gram, as a
    context and its next word. Arcs are sorted by context, then by word.
    """

    order: int
    word: Tensor  # (V,) int64, the word of each token; <unk>'s if the file does not list the token
    end: Tensor  # () int64, the word </s>
    first: Tensor  # () int64, the state in which a sentence starts
    backoff: Tensor  # (C,) float32, nats
    shorter: Tensor  # (C,) int64, the longest context that is a proper suffix
    begins: Tensor  # (C + 1,) int64, the first arc of each context
    arcs: Tensor  # (A,) int64, context * words + word
    logp: Tensor  # (A,) float32, nats
    leads: Tensor  # (A,) int64, the state after each arc
    unigrams: Tensor  # (words,) float32, nats; -inf for words that are not listed

    @classmethod
    def read(cls, path: str | Path, tokens: Sequence[object]) -> Self:
        """The model of an ARPA file, for a decoder's V tokens.

        Args:
            path: The file, plain, or gzipped if its name ends in .gz.
            tokens: The file's spelling of each token, with a place for the blank: str(tokens[i]) is
                token i. Pass range(V) for a file over ids. Tokens that the file does not list are
                scored as <unk>, or -inf if it has no <unk>. N-grams with words that are not tokens
                are ignored.

        Raises:
            ValueError: A line of the file is wrong; the message names it.
        """
        words = [str(token) for token in tokens]
        invalid = [word for word in words if word.split() != [word]]
        wanted = "words that an ARPA file can hold"
        remedy = "Use another spelling in both, such as '<space>'."
        expect(not invalid, "tokens", wanted, repr(invalid[:1]), remedy)
        path = Path(path)
        return cls.from_table(read_arpa(path), words, path.name)

    @classmethod
    def from_table(cls, grams: Table, words: Sequence[str], name: str) -> Self:
        """The model for the tokens `words`, from the n-grams of the file with this name."""
        index: dict[str, int] = {}
        for word in (*words, "</s>", "<s>", "<unk>"):
            index.setdefault(word, len(index))
        order = max(map(len, grams), default=0)
        listed = {gram: grams[gram] for gram in grams if index.keys() >= set(gram)}
        remedy = f"An example of a token: {words[:1]!r:.40}."
        fits = any((word,) in listed for word in words)
        expect(fits, name, "a word that is a token", "none", remedy)
        contexts: dict[tuple[str, ...], int] = {(): 0}
        for gram in listed:
            if len(gram) < order:
                contexts[gram] = len(contexts)

        def state(gram: tuple[str, ...]) -> int:
            """The longest context that ends `gram`."""
            while gram not in contexts:
                gram = gram[1:]
            return contexts[gram]

        rows = []
        for gram, (logp, _) in listed.items():
            *context, word = gram
            arc = contexts[tuple(context)] * len(index) + index[word]
            rows.append((arc, logp, state(gram)))
        columns = [*zip(*sorted(rows), strict=True)]
        arcs, leads = torch.tensor(columns[::2], device="cpu")
        logps = torch.tensor(columns[1], **CPU_FLOAT)
        first_arcs = torch.arange(len(contexts) + 1, device="cpu") * len(index)
        begins = torch.searchsorted(arcs, first_arcs)
        of_unigrams = slice(begins[1])
        unigrams = torch.full((len(index),), -math.inf, **CPU_FLOAT)
        unigrams[arcs[of_unigrams]] = logps[of_unigrams]
        known = [word if (word,) in listed else "<unk>" for word in words]
        backoffs = [listed[gram][1] for gram in contexts if gram]
        return cls(
            order=order,
            word=torch.tensor([index[word] for word in known], device="cpu"),
            end=torch.tensor(index["</s>"], device="cpu"),
            first=torch.tensor(state(("<s>",)), device="cpu"),
            backoff=torch.tensor([0.0, *backoffs], **CPU_FLOAT),
            shorter=torch.tensor([state(gram[1:]) for gram in contexts], device="cpu"),
            begins=begins,
            arcs=arcs,
            logp=logps,
            leads=leads,
            unigrams=unigrams,
        )

    def start(self, B: int) -> Tensor:
        """The states (B,) of B empty sentences, after <s>."""
        return self.first.repeat(B)

    def scores(self, states: Tensor) -> Tensor:
        """Log-probability in nats of every next token, (..., V), for states (...,).

        The contexts are applied from the empty one to the longest. Each adds its back-off weight to
        all words, then replaces the scores of the words that it lists.
        """
        words = len(self.unigrams)
        contexts = [states.flatten()]
        for _ in range(self.order - 2):
            contexts.append(self.shorter[contexts[-1]])
        scores = self.unigrams.repeat(len(contexts[0]), 1)  # (states, words)
        rows = torch.arange(len(scores), device=scores.device)
        for context in reversed(contexts):
            scores = scores + self.backoff[context, None]
            ends = self.begins[context + 1]
            counts = (ends - self.begins[context]).masked_fill(context == 0, 0)
            row = rows.repeat_interleave(counts)  # of each arc
            shift = ends - counts.cumsum(0)
            arc = torch.arange(len(row), device=row.device) + shift[row]
            scores[row, self.arcs[arc] % words] = self.logp[arc]
        return scores[:, self.word].view(*states.shape, len(self.word))

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The states after one more token each, same shape."""
        return self.step(states, self.word[tokens])[1]

    def final(self, states: Tensor) -> Tensor:
        """Log-probability in nats of </s> after each of the states."""
        return self.step(states, self.end)[0]

    def step(self, states: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability in nats of one word after each state, state after it), same shape.

        Both come from the first listed arc, from the longest history to shorter ones.
        """
        backoff = torch.zeros(states.shape, device=states.device, dtype=torch.float32)
        logp = backoff - math.inf
        after = torch.zeros_like(states)
        missing = torch.ones_like(states, dtype=torch.bool)
        for _ in range(self.order):
            key = states * len(self.unigrams) + word
            arc = torch.searchsorted(self.arcs, key).clamp(max=len(self.arcs) - 1)
            is_listed = missing & (self.arcs[arc] == key)
            logp = torch.where(is_listed, backoff + self.logp[arc], logp)
            after = torch.where(is_listed, self.leads[arc], after)
            missing = missing & ~is_listed
            backoff = backoff + self.backoff[states]
            states = self.shorter[states]
        return logp, after


@dataclass(frozen=True, kw_only=True)
class WordNGram(OnDevice):
    """A back-off model over words, for V tokens that are characters or word pieces.

    A `LanguageModel`. A state has two parts: the state of the n-gram after the complete words, and
    a node of the tree of all listed words, which the letters of the open word lead to. A word is
    scored when the next word begins or the sentence ends; until then its letters cost nothing. So
    the score of a word does not depend on how it is cut into pieces.

    Nodes of the tree are 0, before the first letter, to N - 1. Node N is off the tree: no listed
    word begins with these letters. An edge is a node and the next character.
    """

    ngram: NGram  # its tokens are the words, then <unk>
    word_bonus: float  # added to each word's log-probability
    starts_word: Tensor  # (V,) bool, tokens that begin with a word start
    characters: Tensor  # (V, L) int64, each token's other characters, then NO_CHARACTER
    alphabet: int  # number of different characters
    edges: Tensor  # (N - 1,) int64, node * alphabet + character, ascending
    leads: Tensor  # (N - 1,) int64, the node after each edge
    word: Tensor  # (N + 1,) int64, the n-gram's word that ends at each node, or <unk>

    @classmethod
    def read(cls, path: str | Path, tokens: Sequence[str], *, word_bonus: float = 0.0) -> Self:
        """The model of an ARPA file over words.

        Args:
            path: The file, plain, or gzipped if its name ends in .gz.
            tokens: The text of each of the decoder's V tokens; "" for the blank. A word begins with
                a space or SentencePiece's "▁", which occur only at the start of a token. Words that
                the tokens cannot spell are never scored.
            word_bonus: Nats added to each word's log-probability, and multiplied by `lm_weight`
                with it. The cost of an average word makes up for the length of a text. The beta of
                Hannun et al. 2014 is lm_weight * word_bonus.

        Words that the file does not list are scored as <unk>, or -inf if it has no <unk>.

        Raises:
            ValueError: A line of the file or an argument is wrong; the message names it.
        """
        check_weights(word_bonus=word_bonus)
        letters = [token.lstrip("".join(WORD_STARTS)) for token in tokens]
        starts = [token.startswith(WORD_STARTS) for token in tokens]
        expect(any(starts), "tokens", "some that begin with ' ' or '▁'", repr([*tokens[:3]]))
        alphabet = {char: n for n, char in enumerate(sorted(set("".join(letters))))}
        path = Path(path)
        grams = read_arpa(path)
        special = {("<s>",), ("</s>",), ("<unk>",)}
        listed = [gram[0] for gram in grams if len(gram) == 1 and gram not in special]
        pieces = [word for word in listed if word == "<space>" or word[0] in WORD_STARTS]
        got = f"one that lists {pieces[:1]}"
        remedy = "Read a model over tokens by NGram.read, or pass --lm-units tokens."
        expect(not pieces, path.name, "a model over words", got, remedy)
        words = [word for word in listed if alphabet.keys() >= set(word)]
        wanted = "a word that the tokens can spell"
        got = f"{len(listed)} others, such as {listed[:1]}"
        expect(len(words) > 0, path.name, wanted, got, "Are both in lower case?")
        beginnings = sorted({word[:n] for word in words for n in range(len(word) + 1)})
        nodes = {beginning: node for node, beginning in enumerate(beginnings)}  # "" is node 0
        edges = [
            nodes[beginning[:-1]] * len(alphabet) + alphabet[beginning[-1]]
            for beginning in beginnings[1:]
        ]
        ngram = NGram.from_table(grams, [*words, "<unk>"], path.name)
        unknown = len(words)
        word_at = torch.full((len(nodes) + 1,), unknown, device="cpu")
        word_at[[nodes[word] for word in words]] = torch.arange(unknown, device="cpu")
        numbers = [
            torch.tensor([alphabet[char] for char in rest], dtype=torch.int64, device="cpu")
            for rest in letters
        ]
        ascending, order = torch.tensor(edges, device="cpu").sort()
        return cls(
            ngram=ngram,
            word_bonus=float(word_bonus),
            starts_word=torch.tensor(starts, device="cpu"),
            characters=pad_sequence(numbers, batch_first=True, padding_value=NO_CHARACTER),
            alphabet=len(alphabet),
            edges=ascending,
            leads=order + 1,
            word=ngram.word[word_at],
        )

    def start(self, B: int) -> WordState:
        """The states of B empty sentences, after <s>."""
        ngram = self.ngram.start(B)
        return ngram, torch.zeros_like(ngram)

    def scores(self, states: WordState) -> Tensor:
        """Log-probability in nats of every next token, (..., V), for states (...,) each.

        A token that begins a word has the log-probability of the word before it, the others 0.
        """
        logp, _ = self._complete(states)
        return torch.where(self.starts_word, logp[..., None], 0.0)

    def advance(self, states: WordState, tokens: Tensor) -> WordState:
        """The states after one more token (...,) each."""
        ngram, node = states
        starts = self.starts_word[tokens]
        ngram = torch.where(starts, self._complete(states)[1], ngram)
        node = node.masked_fill(starts, 0)
        off_tree = len(self.word) - 1
        for character in self.characters[tokens].unbind(-1):
            key = node * self.alphabet + character
            edge = torch.searchsorted(self.edges, key).clamp(max=len(self.edges) - 1)
            after = torch.where(self.edges[edge] == key, self.leads[edge], off_tree)
            node = torch.where(character == NO_CHARACTER, node, after)
        return ngram, node

    def final(self, states: WordState) -> Tensor:
        """Log-probability in nats of the last word and of </s> after it."""
        logp, ngram = self._complete(states)
        return logp + self.ngram.final(ngram)

    def _complete(self, states: WordState) -> tuple[Tensor, Tensor]:
        """(log-probability in nats of the open word, state of the n-gram after it).

        Before the first letter there is no word: 0, and the same state.
        """
        ngram, node = states
        logp, after = self.ngram.step(ngram, self.word[node])
        is_empty = node == 0
        logp = (logp + self.word_bonus).masked_fill(is_empty, 0)
        return logp, torch.where(is_empty, ngram, after)


def read_arpa(path: Path) -> Table:
    """The n-grams of a file, of all orders.

    Raises:
        ValueError: A line is wrong, or the end is missing; the message names the line.
    """
    open_text = gzip.open if path.suffix == ".gz" else open
    grams: Table = {}
    order = number = 0
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                number += 1
                text = line.strip(" \t\r\n")
                if text == "\\end\\":
                    return grams
                if text == f"\\{order + 1}-grams:":
                    order += 1
                elif text and order:
                    fields = re.split(r"[ \t]+", text)
                    wanted = f"a log-probability and {order} words"
                    expect(len(fields) > order, "line", wanted, repr(text))
                    logp = float(fields[0])
                    words = tuple(fields[1 : order + 1])
                    wanted = "an n-gram whose first words are listed above"
                    expect(order == 1 or words[:-1] in grams, "line", wanted, repr(text))
                    backoff = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
                    wanted = "a log10 probability of 0 or less, and a finite back-off weight"
                    expect(logp <= 0 and abs(backoff) < 1e38, "line", wanted, repr(text))
                    grams[words] = logp * LN_10, backoff * LN_10
        expect(False, "file", "\\end\\ in a line of its own", "none")
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ValueError(f"{path.name}:{number}: {error!s:.200}") from None
    return grams
