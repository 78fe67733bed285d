"""Tokenizers, text normalisation, and word and character error rates with their uncertainty."""

import itertools
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asrkit.shapes import expect

SPACE = "▁"  # a space, as SentencePiece writes it
_CONTROL = 3  # type of control symbols in sentencepiece_model.proto
RESAMPLES = 1000  # bootstrap samples of the utterances for the interval of an error rate
_PART = "part "  # prefix of the models' names in a saved aggregate tokenizer


class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Blank is not one of its tokens; models put it at index `vocab_size`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""


@dataclass(frozen=True)
class CharTokenizer:
    """One token per character of `alphabet`; `encode` lower-cases the text first."""

    alphabet: str = " 'abcdefghijklmnopqrstuvwxyz"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, blank not counted."""
        return len(self.alphabet)

    def pieces(self) -> list[str]:
        """The characters."""
        return [*self.alphabet]

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` in lower case; ValueError names characters outside of the alphabet."""
        text = text.lower()
        unknown = sorted(set(text) - set(self.alphabet))
        expect(
            not unknown,
            "text",
            f"characters of {self.alphabet!r}",
            f"{unknown} in {text[:60]!r}",
            "Spell them out.",
        )
        return [self.alphabet.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, without outer or double spaces."""
        _check_tokens(tokens, self.vocab_size)
        return " ".join("".join(self.alphabet[token] for token in tokens).split())


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """Subword tokens of a SentencePiece model, stored as bytes so that checkpoints contain it."""

    model: bytes

    def __post_init__(self) -> None:
        try:
            size = self.vocab_size
        except RuntimeError:
            size = 0
        got = f"{len(self.model)} bytes of something else"
        expect(size > 0, "tokenizer", "a SentencePiece model", got)

    @cached_property
    def _processor(self) -> Any:
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.model)

    def with_control(self) -> "SentencePieceTokenizer":
        """The same model with `<pad>` and pieces such as `<|en|>` as control symbols, without text.

        NeMo's models have them as user-defined symbols, which decode to their names.
        """
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        proto = ModelProto.FromString(self.model)
        for piece in proto.pieces:
            if piece.piece == "<pad>" or re.fullmatch(r"<\|.+\|>", piece.piece):
                piece.type = _CONTROL
        return SentencePieceTokenizer(proto.SerializeToString())

    @property
    def vocab_size(self) -> int:
        """Number of pieces, blank not counted."""
        return len(self._processor)

    @property
    def unknown(self) -> int:
        """The token of text without a piece; -1 in a model without such a token."""
        return self._processor.unk_id()

    def pieces(self) -> list[str]:
        """The pieces as the model writes them, with "▁" for a space."""
        return [self._processor.id_to_piece(token) for token in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        """Piece ids of `text`."""
        return self._processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the piece ids."""
        _check_tokens(tokens, self.vocab_size)
        return self._processor.decode([int(token) for token in tokens])


@dataclass(frozen=True)
class AggregateTokenizer:
    """Concatenated SentencePiece models, one for each language, as in NeMo's Canary.

    The first token of a model is the number of tokens of all models before it.

    Args:
        parts: (language, model) in the order of their tokens. A model that has only control symbols
            has its own name, such as "spl_tokens".
    """

    parts: tuple[tuple[str, SentencePieceTokenizer], ...]

    @cached_property
    def _starts(self) -> list[int]:
        """The first token of each model, and the number of all tokens."""
        return [0, *itertools.accumulate(part.vocab_size for _, part in self.parts)]

    @cached_property
    def _pieces(self) -> list[str]:
        return [piece for _, part in self.parts for piece in part.pieces()]

    @property
    def vocab_size(self) -> int:
        """Number of tokens of all models."""
        return self._starts[-1]

    def pieces(self) -> list[str]:
        """The pieces of all models, with "▁" for a space."""
        return [*self._pieces]

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` by the model for "en", or by the last one without that."""
        names = [name for name, _ in self.parts]
        number = names.index("en") if "en" in names else len(names) - 1
        start = self._starts[number]
        return [start + token for token in self.parts[number][1].encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, which may belong to several models."""
        _check_tokens(tokens, self.vocab_size)
        starts = self._starts
        text = ""
        for number, run in itertools.groupby(tokens, lambda token: bisect_right(starts, token) - 1):
            ids = [int(token) for token in run]
            if self._pieces[ids[0]].startswith(SPACE):
                text += " "
            text += self.parts[number][1].decode([id_ - starts[number] for id_ in ids])
        return " ".join(text.split())


@dataclass(frozen=True)
class JsonTokenizer:
    """Tokens of a tokenizer.json, by Hugging Face's `tokenizers`.

    Args:
        contents: The text of the file, so that checkpoints contain it.
        vocab_size: Number of text tokens. Tokens of prompts and times, and blank, follow them.
    """

    contents: str
    vocab_size: int

    def __post_init__(self) -> None:
        known = self._tokenizer.get_vocab_size()
        kind = type(self._tokenizer.model).__name__
        decoder = self._tokenizer.decoder
        fits = kind in ("BPE", "Unigram") and decoder is not None
        wanted = "a BPE or Unigram model with a decoder"
        expect(fits, "tokenizer", wanted, f"{kind} with decoder {decoder!s:.60}")
        expect(self.vocab_size <= known, "tokenizer", f"{self.vocab_size} tokens", known)

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        """Pickle and copy the arguments alone: `_tokenizer` would forget that "<|en|>" is text."""
        return JsonTokenizer, (self.contents, self.vocab_size)

    @cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.contents)
        except Exception as error:  # from Rust, without a class of its own
            raise ValueError(f"tokenizer: tokenizer.json is damaged ({error!s:.200}).") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<|en|>" in a text is text
        return tokenizer

    def pieces(self) -> list[str]:
        """Text of each token, with "▁" for a space and U+FFFD for part of a character."""
        tokens = range(self.vocab_size)
        if type(self._tokenizer.decoder).__name__ == "ByteLevel":
            return [self._tokenizer.decode([token]).replace(" ", SPACE) for token in tokens]
        return [self._tokenizer.id_to_token(token) for token in tokens]

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`. Byte-level tokens include the space before a word."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, with single spaces; special tokens have no text."""
        _check_tokens(tokens, self.vocab_size)
        return " ".join(self._tokenizer.decode([int(token) for token in tokens]).split())


def byte_level_json(vocabulary: dict[str, int], merges: Sequence[Sequence[str]]) -> str:
    """The tokenizer.json of a byte-level BPE such as Whisper's.

    Args:
        vocabulary: Token ids by their text, in which a letter represents a byte.
        merges: Pairs of such texts, in the order in which they were learned.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocabulary, [(first, second) for first, second in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


def _check_tokens(tokens: Sequence[int], size: int) -> None:
    """ValueError for tokens out of range; -1 would index the alphabet's last letter."""
    wrong = [int(token) for token in tokens if not 0 <= token < size]
    remedy = "Padding and blank have no text: use Hypotheses.tokens()."
    expect(not wrong, "tokens", f"0 to {size - 1}", wrong[:5], remedy)


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """Text of each token of a tokenizer, with " " or SentencePiece's "▁" at the start of a word.

    Raises:
        ValueError: The tokenizer is not from asrkit.text.
    """
    if not hasattr(tokenizer, "pieces"):
        name = type(tokenizer).__name__
        raise ValueError(f"tokenizer: expected one of asrkit.text, got {name}.")
    return tokenizer.pieces()


def load_tokenizer(spec: str | Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint or a command line names.

    Args:
        spec: "char", the path of a SentencePiece `.model` file, or a dict from `dump_tokenizer`.

    Raises:
        ValueError: `spec` is none of these.
    """
    match spec:
        case "char":
            return CharTokenizer()
        case {"alphabet": alphabet}:
            is_text = isinstance(alphabet, str)
            expect(is_text, "tokenizer", "an alphabet of text", type(alphabet).__name__)
            return CharTokenizer(alphabet)
        case {"json": contents, "tokens": vocab_size}:
            return JsonTokenizer(contents, int(vocab_size))
        case {"model": model}:
            return SentencePieceTokenizer(bytes.fromhex(model))
        case dict():
            models = [
                (name.removeprefix(_PART), SentencePieceTokenizer(bytes.fromhex(model)))
                for name, model in spec.items()
            ]
            return AggregateTokenizer(tuple(models))
    wanted = "'char' or a SentencePiece .model file"
    expect(Path(spec).is_file(), "tokenizer", wanted, repr(str(spec)))
    return SentencePieceTokenizer(Path(spec).read_bytes())


def dump_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """A JSON-compatible dict from which `load_tokenizer` creates an equal tokenizer."""
    match tokenizer:
        case CharTokenizer():
            return {"alphabet": tokenizer.alphabet}
        case SentencePieceTokenizer():
            return {"model": tokenizer.model.hex()}
        case AggregateTokenizer():
            return {_PART + name: part.model.hex() for name, part in tokenizer.parts}
        case JsonTokenizer():
            return {"json": tokenizer.contents, "tokens": tokenizer.vocab_size}
    name = type(tokenizer).__name__
    raise ValueError(f"tokenizer: expected one of asrkit.text, to be saved, got {name}.")


def normalize_text(text: str) -> str:
    """Text in lower case and Unicode's form NFC, as asrkit compares it for error rates.

    `wer` and `cer` are case-sensitive, so normalise references and hypotheses first. White space
    and Unicode forms need no care: both compare words in NFC, separated by single spaces.
    """
    return unicodedata.normalize("NFC", text.lower())


@dataclass(frozen=True, kw_only=True)
class ErrorRate:
    """Errors over reference units, as a fraction, with a 95 % interval by bootstrap."""

    rate: float
    low: float  # lower end of the interval
    high: float
    substitutions: int
    insertions: int
    deletions: int
    units: int  # words or characters of the references

    def __str__(self) -> str:
        return (
            f"{100 * self.rate:.1f} % [{100 * self.low:.1f} %, {100 * self.high:.1f} %] "
            f"({self.substitutions} sub, {self.insertions} ins, {self.deletions} del "
            f"of {self.units})"
        )


def wer(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRate:
    """Word error rate over all utterances: errors / reference words.

    Args:
        references: Spoken text of each utterance. If it is empty, all recognised words are
            insertions. Case counts: see `normalize_text`.
        hypotheses: Recognised texts, in the same order.

    Raises:
        ValueError: The lists do not match, or all references are empty.
    """
    import jiwer

    return _error_rate(jiwer.process_words, references, hypotheses)


def cer(references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRate:
    """Character error rate over all utterances: errors / reference characters, spaces included.

    Args:
        references: Spoken text of each utterance. If it is empty, all recognised words are
            insertions. Case counts: see `normalize_text`.
        hypotheses: Recognised texts, in the same order.

    Raises:
        ValueError: The lists do not match, or all references are empty.
    """
    import jiwer

    return _error_rate(jiwer.process_characters, references, hypotheses)


def _error_rate(process: Any, references: Sequence[str], hypotheses: Sequence[str]) -> ErrorRate:
    one_text = isinstance(references, str) or isinstance(hypotheses, str)
    wanted = "a list of texts each"
    expect(not one_text, "references, hypotheses", wanted, "one text", "Pass [text].")
    wanted = f"{len(references)} texts, as references"
    expect(len(references) == len(hypotheses), "hypotheses", wanted, len(hypotheses))
    filled = any(text.strip() for text in references)
    expect(filled, "references", "at least one that is not empty", references[:3])
    rows = []
    for pair in zip(references, hypotheses, strict=True):
        # single spaces, since jiwer treats "\n" as a letter
        out = process(*(" ".join(unicodedata.normalize("NFC", text).split()) for text in pair))
        units = out.hits + out.substitutions + out.deletions
        rows.append((out.substitutions, out.insertions, out.deletions, units))
    counts = np.array(rows)  # (N, 4)
    samples = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    draws = counts[samples].sum(1)  # (RESAMPLES, 4)
    draws = np.where(draws[:, 3:] > 0, draws, counts.sum(0))  # if all its references are empty
    low, high = np.quantile(draws[:, :3].sum(1) / draws[:, 3], [0.025, 0.975])
    substitutions, insertions, deletions, units = (int(n) for n in counts.sum(0))
    return ErrorRate(
        rate=(substitutions + insertions + deletions) / units,
        low=float(low),
        high=float(high),
        substitutions=substitutions,
        insertions=insertions,
        deletions=deletions,
        units=units,
    )
