"""N-gram models over words for models that write characters or word pieces.

The state is that of the n-gram after the words that are complete, and how far the present word has
been spelled: a node of the tree of all listed words, character by character. A word is scored when
the next one begins, or the sentence ends; until then its letters cost nothing. So any cut of a word
into pieces gives the same score.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from asrkit.decoders.beams import check_weights
from asrkit.decoders.ngram import NGram, listed_words
from asrkit.shapes import expect

WORD_STARTS = (" ", "▁")  # how tokens write that a word begins: characters, SentencePiece
SPECIAL = ("<s>", "</s>", "<unk>")
NO_CHARACTER = -1
State = tuple[Tensor, Tensor]  # (...) int64 each: state of the n-gram, node of the present word


@dataclass(frozen=True, kw_only=True)
class WordNGram:
    """A back-off model over words, for a decoder's V tokens; a `LanguageModel`.

    Nodes of the tree are 0, where no letter has been spelled, to N - 1; node N is off the tree: no
    listed word begins so. An edge is a node and the character that leads on from it.
    """

    V: int
    ngram: NGram  # its tokens are the words, then <unk>
    word_bonus: float  # added to each word's log-probability
    starts_word: Tensor  # (V,) bool, tokens that begin with a word start
    # (V, L) int64, numbers of each token's other characters, then NO_CHARACTER
    characters: Tensor
    alphabet: Tensor  # () int64, different characters in the tokens, A
    edges: Tensor  # (N - 1,) int64, node * A + character, ascending
    leads: Tensor  # (N - 1,) int64, the node after it
    word: Tensor  # (N + 1,) int64, the word that ends at a node, or <unk>

    @classmethod
    def read(cls, path: str | Path, tokens: Sequence[str], *, word_bonus: float = 0.0) -> Self:
        """The model of an ARPA file over words.

        Args:
            path: The file, plain or gzipped.
            tokens: What each of the decoder's V tokens writes, the blank's place included: "" for
                blank. A word begins with a space or SentencePiece's "▁", which no token has but as
                its first characters. Words that the tokens cannot spell are never scored.
            word_bonus: Nats added to each word's log-probability, so times `lm_weight` in the
                score: what an average word costs makes up for the length of a text. The beta of
                Hannun et al. 2014 is lm_weight * word_bonus.

        Words that the file does not list are scored as <unk>, or -inf if it lists none.

        Raises:
            ValueError: Names the line of the file, or the argument, that is wrong.
        """
        check_weights(word_bonus=word_bonus)
        rests = [token.lstrip("".join(WORD_STARTS)) for token in tokens]
        starts = [len(rest) < len(token) for rest, token in zip(rests, tokens, strict=True)]
        _check_tokens(tokens, rests, starts)
        alphabet = {char: n for n, char in enumerate(sorted(set("".join(rests))))}
        path = Path(path)
        words = [word for word in dict.fromkeys(listed_words(path)) if word not in SPECIAL]
        part = next((word for word in words if word == "<space>" or word[0] in WORD_STARTS), None)
        remedy = "Read a model over tokens by NGram.read, or pass --lm-units tokens."
        expect(part is None, path.name, "a model over words", f"one that lists {part!r}", remedy)
        spelled = [word for word in words if alphabet.keys() >= set(word)]
        expect(
            len(spelled) > 0,
            path.name,
            "a word that the tokens can spell",
            f"{len(words)} others, as {words[:1]}",
            "Are both in lower case?",
        )
        spelled.append("<unk>")
        edges, ends = _spelling_tree(spelled[:-1], alphabet)
        nodes = len(edges) + 1
        word_at = [ends.get(node, len(spelled) - 1) for node in range(nodes + 1)]
        keys = sorted((node * len(alphabet) + char, after) for (node, char), after in edges.items())
        longest = max(1, *map(len, rests))
        characters = torch.full((len(tokens), longest), NO_CHARACTER)
        for row, rest in zip(characters, rests, strict=True):
            numbers = [alphabet[char] for char in rest]
            row[: len(rest)] = torch.tensor(numbers, dtype=torch.int64)
        return cls(
            V=len(tokens),
            ngram=NGram.read(path, spelled),
            word_bonus=float(word_bonus),
            starts_word=torch.tensor(starts),
            characters=characters,
            alphabet=torch.tensor(len(alphabet)),
            edges=torch.tensor([key for key, _ in keys]),
            leads=torch.tensor([after for _, after in keys]),
            word=torch.tensor(word_at),
        )

    def to(self, device: torch.device | str) -> Self:
        """The same model on a device."""
        moved: dict[str, Any] = {"ngram": self.ngram.to(device)}
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                moved[name] = part.to(device)
        return replace(self, **moved)

    def start(self, B: int) -> State:
        """The states of B empty sentences, after <s>."""
        ngram = self.ngram.start(B)
        return ngram, torch.zeros_like(ngram)

    def scores(self, states: State) -> Tensor:
        """Log-probability in nats of every next token, (..., V), for states (...,) each.

        Tokens that begin a word have that of the word before them, the others 0.
        """
        logp, _ = self._complete(states)
        return torch.where(self.starts_word, logp[..., None], 0.0)

    def advance(self, states: State, tokens: Tensor) -> State:
        """The states after one more token (...,) each."""
        ngram, node = states
        starts = self.starts_word[tokens]
        ngram = torch.where(starts, self._complete(states)[1], ngram)
        node = node.masked_fill(starts, 0)
        for character in self.characters[tokens].unbind(-1):
            node = torch.where(character == NO_CHARACTER, node, self._spell(node, character))
        return ngram, node

    def final(self, states: State) -> Tensor:
        """Log-probability in nats of the last word, and of </s> after it."""
        logp, ngram = self._complete(states)
        return logp + self.ngram.final(ngram)

    def _complete(self, states: State) -> tuple[Tensor, Tensor]:
        """(log-probability in nats of the present word, state of the n-gram after it).

        Where no letter has been spelled there is no word: 0, and the state as it is.
        """
        ngram, node = states
        logp, after = self.ngram.step(ngram, self.word[node])
        empty = node == 0
        return (logp + self.word_bonus).masked_fill(empty, 0), torch.where(empty, ngram, after)

    def _spell(self, node: Tensor, character: Tensor) -> Tensor:
        """The nodes after one more character each."""
        off_tree = len(self.word) - 1
        key = node * self.alphabet + character
        at = torch.searchsorted(self.edges, key).clamp(max=len(self.edges) - 1)
        return torch.where(self.edges[at] == key, self.leads[at], off_tree)


def _check_tokens(tokens: Sequence[str], rests: Sequence[str], starts: Sequence[bool]) -> None:
    """ValueError unless words begin at the first characters of some tokens, and only there."""
    marks = " or ".join(map(repr, WORD_STARTS))
    inside = [
        token
        for token, rest in zip(tokens, rests, strict=True)
        if any(mark in rest for mark in WORD_STARTS)
    ]
    expect(not inside, "tokens", f"{marks} as first characters only", repr(inside[:3]))
    expect(any(starts), "tokens", f"some that begin with {marks}", repr([*tokens[:3]]))


def _spelling_tree(
    words: Sequence[str], alphabet: dict[str, int]
) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """The tree of all words: (node, character) to the next node, and node to the word it ends."""
    edges: dict[tuple[int, int], int] = {}
    ends: dict[int, int] = {}
    for number, word in enumerate(words):
        node = 0
        for char in word:
            # the root is node 0, and each edge leads to a node of its own
            node = edges.setdefault((node, alphabet[char]), len(edges) + 1)
        ends[node] = number
    return edges, ends
