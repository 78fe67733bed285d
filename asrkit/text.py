"""Text to tokens and back, and error rates with their uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asrkit.shapes import expect


class Tokenizer(Protocol):
    """What asrkit asks of a tokenizer; blank is not one of its tokens (models put it at `vocab_size`)."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""


@dataclass(frozen=True)
class CharTokenizer:
    """One token a character of `alphabet`; `encode` lower-cases and refuses what the alphabet lacks."""

    alphabet: str = " 'abcdefghijklmnopqrstuvwxyz"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, blank not counted."""
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; ValueError names the characters that have none."""
        text = text.lower()
        unknown = sorted(set(text) - set(self.alphabet))
        expect(not unknown, "text", f"characters of {self.alphabet!r}", f"{unknown} in {text[:60]!r}", "Spell them out.")
        return [self.alphabet.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, outer and double spaces dropped."""
        _check(tokens, self.vocab_size)
        return " ".join("".join(self.alphabet[token] for token in tokens).split())


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """Subword tokens of a SentencePiece model given as bytes (so that a checkpoint can carry it)."""

    model: bytes

    @classmethod
    def train(cls, texts: Sequence[str], *, vocab_size: int) -> "SentencePieceTokenizer":
        """A unigram model fitted to `texts`."""
        import io

        import sentencepiece

        out = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts), model_writer=out, vocab_size=vocab_size, bos_id=-1, eos_id=-1,
                hard_vocab_limit=False, minloglevel=2,
            )  # fmt: skip
        except RuntimeError as error:
            raise ValueError(f"vocab_size: {vocab_size} does not fit these texts. {error}") from None
        return cls(out.getvalue())

    def __post_init__(self) -> None:
        import sentencepiece

        try:
            pieces: Any = sentencepiece.SentencePieceProcessor(model_proto=self.model) if self.model else []
        except RuntimeError:
            pieces = []
        expect(len(pieces) > 0, "tokenizer", "a SentencePiece model", f"{len(self.model)} bytes of something else")
        object.__setattr__(self, "_pieces", pieces)

    @property
    def vocab_size(self) -> int:
        """Number of pieces, blank not counted."""
        return len(self._pieces)  # type: ignore[attr-defined]

    def encode(self, text: str) -> list[int]:
        """Piece ids of `text`."""
        return self._pieces.encode(text)  # type: ignore[attr-defined]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the piece ids."""
        _check(tokens, self.vocab_size)
        return self._pieces.decode([int(token) for token in tokens])  # type: ignore[attr-defined]


def _check(tokens: Sequence[int], size: int) -> None:
    wrong = [int(token) for token in tokens if not 0 <= token < size]  # -1 would be the alphabet's last letter
    expect(not wrong, "tokens", f"0 to {size - 1}", wrong[:5], "Padding and blank have no text: use Hypotheses.tokens().")


def load_tokenizer(spec: str | Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer a checkpoint or a command line names: "char", a SentencePiece `.model` file, or `dump_tokenizer`'s dict."""
    if isinstance(spec, dict):
        return CharTokenizer(spec["alphabet"]) if "alphabet" in spec else SentencePieceTokenizer(bytes.fromhex(spec["model"]))
    if spec == "char":
        return CharTokenizer()
    expect(Path(spec).is_file(), "tokenizer", "'char' or a SentencePiece .model file", repr(str(spec)))
    return SentencePieceTokenizer(Path(spec).read_bytes())


def dump_tokenizer(tokenizer: Tokenizer) -> dict[str, str]:
    """JSON-able contents from which `load_tokenizer` makes an equal tokenizer."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {"model": tokenizer.model.hex()}
    expect(isinstance(tokenizer, CharTokenizer), "tokenizer", "one of asrkit.text, to be saved", type(tokenizer).__name__)
    return {"alphabet": tokenizer.alphabet}  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class ErrorRate:
    """Errors over reference units; `low`..`high` is the 95 % bootstrap interval over utterances. Rates are fractions."""

    rate: float
    low: float
    high: float
    substitutions: int
    insertions: int
    deletions: int
    units: int

    def __str__(self) -> str:
        return (
            f"{self.rate:.1%} [{self.low:.1%}, {self.high:.1%}] ({self.substitutions} sub, {self.insertions} ins, "
            f"{self.deletions} del of {self.units})"
        )


def wer(references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0) -> ErrorRate:
    """Word error rate over all utterances (errors / reference words), with a bootstrap interval."""
    import jiwer

    return _error_rate(jiwer.process_words, references, hypotheses, resamples, seed)


def cer(references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0) -> ErrorRate:
    """Character error rate (spaces count), with a bootstrap interval."""
    import jiwer

    return _error_rate(jiwer.process_characters, references, hypotheses, resamples, seed)


def _error_rate(process: Any, references: Sequence[str], hypotheses: Sequence[str], resamples: int, seed: int) -> ErrorRate:
    one = isinstance(references, str) or isinstance(hypotheses, str)
    expect(not one, "references, hypotheses", "a list of texts each", "one text", "Pass [text].")
    expect(len(references) == len(hypotheses), "hypotheses", f"{len(references)} texts, as references", len(hypotheses))
    expect(len(references) > 0 and all(r.strip() for r in references), "references", "at least one, none empty", references[:3])
    expect(resamples >= 1, "resamples", "at least 1", resamples)
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        out = process(" ".join(reference.split()), " ".join(hypothesis.split()))  # jiwer takes "\n" for a letter
        rows.append((out.substitutions, out.insertions, out.deletions, out.hits + out.substitutions + out.deletions))
    counts = np.array(rows)  # (N, 4)
    draws = counts[np.random.default_rng(seed).integers(0, len(rows), (resamples, len(rows)))].sum(1)  # (resamples, 4)
    low, high = np.quantile(draws[:, :3].sum(1) / draws[:, 3], [0.025, 0.975])
    substitutions, insertions, deletions, units = (int(n) for n in counts.sum(0))
    rate = (substitutions + insertions + deletions) / units
    return ErrorRate(
        rate=rate, low=float(low), high=float(high), substitutions=substitutions, insertions=insertions,
        deletions=deletions, units=units,
    )  # fmt: skip
