"""Text to tokens and back, and error rates with their uncertainty."""

import base64
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asrkit.shapes import expect

# Numbers of sentencepiece_model.proto: algorithms of TrainerSpec, types of a piece.
_ALGORITHMS = {"Unigram": 1, "BPE": 2}
_NORMAL, _UNKNOWN, _CONTROL, _WHOLE, _BYTE = 1, 2, 3, 4, 6


class Tokenizer(Protocol):
    """What asrkit asks of a tokenizer; blank is not one of its tokens (models put it at
    `vocab_size`).
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
    """One token a character of `alphabet`; `encode` lower-cases and refuses what the alphabet
    lacks.
    """

    alphabet: str = " 'abcdefghijklmnopqrstuvwxyz"

    @property
    def vocab_size(self) -> int:
        """Number of tokens, blank not counted."""
        return len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`; ValueError names the characters that have none."""
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
                sentence_iterator=iter(texts),
                model_writer=out,
                vocab_size=vocab_size,
                bos_id=-1,
                eos_id=-1,
                hard_vocab_limit=False,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(
                f"vocab_size: {vocab_size} does not fit these texts. {error}"
            ) from None
        return cls(out.getvalue())

    @classmethod
    def from_json(cls, contents: dict[str, Any], tokens: Sequence[int]) -> "SentencePieceTokenizer":
        """The model a Hugging Face tokenizer.json was converted from: the pieces of the ids
        `tokens`, in that order.

        Converted back, because sentencepiece then does all of it: a piece's score is the place of
        its merge (BPE) or its log-probability (Unigram), the table of the normaliser is kept, added
        tokens are whole: special ones have no text.
        """
        model, added = (
            contents["model"],
            {token["id"]: token for token in contents.get("added_tokens") or ()},
        )
        expect(
            model["type"] in _ALGORITHMS,
            "tokenizer",
            f"a model of {sorted(_ALGORITHMS)}",
            repr(model["type"]),
        )
        if model["type"] == "BPE":
            pieces, unknown = (
                {id: piece for piece, id in model["vocab"].items()},
                model.get("unk_token"),
            )
            merged = (
                "".join(merge if isinstance(merge, list) else merge.split(" "))
                for merge in model["merges"]
            )
            scores = {piece: -float(place) for place, piece in enumerate(dict.fromkeys(merged))}
        else:
            pieces, scores = (
                {id: piece for id, (piece, _) in enumerate(model["vocab"])},
                dict(model["vocab"]),
            )
            unknown = pieces.get(model.get("unk_id"))
        pieces |= {id: token["content"] for id, token in added.items()}
        absent = [token for token in tokens if token not in pieces]
        expect(
            not absent,
            "tokenizer",
            f"a piece for each of {len(tokens)} tokens",
            f"none for {absent[:5]}",
        )
        rows = list[tuple[int, bytes]]()
        for token in tokens:
            piece = pieces[token]
            byte = re.fullmatch("<0x[0-9A-F]{2}>", piece) is not None
            whole = _CONTROL if added.get(token, {}).get("special") else _WHOLE
            kind = (
                _UNKNOWN
                if piece == unknown
                else whole
                if token in added
                else _BYTE
                if byte
                else _NORMAL
            )
            rows.append(
                (1, _message((1, piece.encode()), (2, float(scores.get(piece, 0.0))), (3, kind)))
            )
        normalizer = contents.get("normalizer") or {}
        steps = [
            step
            for step in normalizer.get("normalizers", [normalizer])
            if step.get("precompiled_charsmap")
        ]
        table = base64.b64decode(steps[0]["precompiled_charsmap"]) if steps else b""
        prefix = (contents.get("pre_tokenizer") or {}).get("prepend_scheme", "always") != "never"
        trainer = _message(
            (3, _ALGORITHMS[model["type"]]),
            (35, int("<0x00>" in {pieces[token] for token in tokens})),
        )
        return cls(_message(*rows, (2, trainer), (3, _message((2, table), (3, int(prefix))))))

    def __post_init__(self) -> None:
        import sentencepiece

        try:
            pieces: Any = (
                sentencepiece.SentencePieceProcessor(model_proto=self.model) if self.model else []
            )
        except RuntimeError:
            pieces = []
        expect(
            len(pieces) > 0,
            "tokenizer",
            "a SentencePiece model",
            f"{len(self.model)} bytes of something else",
        )
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


def _message(*fields: tuple[int, bytes | float | int]) -> bytes:
    """A protocol buffer of (number, value) fields: bytes with their length, a float in 4 bytes, a
    whole number.
    """
    out = bytearray()
    for number, value in fields:
        kind = 2 if isinstance(value, bytes) else 5 if isinstance(value, float) else 0
        out += _varint(number << 3 | kind)
        if isinstance(value, bytes):
            out += _varint(len(value)) + value
        else:
            out += struct.pack("<f", value) if isinstance(value, float) else _varint(value)
    return bytes(out)


def _varint(value: int) -> bytes:
    low = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([part | 128 for part in low[:-1]] + low[-1:])


def _check(tokens: Sequence[int], size: int) -> None:
    wrong = [
        int(token) for token in tokens if not 0 <= token < size
    ]  # -1 would be the alphabet's last letter
    expect(
        not wrong,
        "tokens",
        f"0 to {size - 1}",
        wrong[:5],
        "Padding and blank have no text: use Hypotheses.tokens().",
    )


def load_tokenizer(spec: str | Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer a checkpoint or a command line names: "char", a SentencePiece `.model` file, or
    `dump_tokenizer`'s dict.
    """
    if isinstance(spec, dict):
        expect(
            all(isinstance(part, str) for part in spec.values()),
            "tokenizer",
            "text for its parts",
            repr(spec)[:80],
        )
        return (
            CharTokenizer(spec["alphabet"])
            if "alphabet" in spec
            else SentencePieceTokenizer(bytes.fromhex(spec["model"]))
        )
    if spec == "char":
        return CharTokenizer()
    expect(
        Path(spec).is_file(), "tokenizer", "'char' or a SentencePiece .model file", repr(str(spec))
    )
    return SentencePieceTokenizer(Path(spec).read_bytes())


def dump_tokenizer(tokenizer: Tokenizer) -> dict[str, str]:
    """JSON-able contents from which `load_tokenizer` makes an equal tokenizer."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {"model": tokenizer.model.hex()}
    expect(
        isinstance(tokenizer, CharTokenizer),
        "tokenizer",
        "one of asrkit.text, to be saved",
        type(tokenizer).__name__,
    )
    return {"alphabet": tokenizer.alphabet}  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class ErrorRate:
    """Errors over reference units; `low`..`high` is the 95 % bootstrap interval over utterances.
    Rates are fractions.
    """

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


def wer(
    references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> ErrorRate:
    """Word error rate over all utterances (errors / reference words), with a bootstrap interval."""
    import jiwer

    return _error_rate(jiwer.process_words, references, hypotheses, resamples, seed)


def cer(
    references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> ErrorRate:
    """Character error rate (spaces count), with a bootstrap interval."""
    import jiwer

    return _error_rate(jiwer.process_characters, references, hypotheses, resamples, seed)


def _error_rate(
    process: Any, references: Sequence[str], hypotheses: Sequence[str], resamples: int, seed: int
) -> ErrorRate:
    one = isinstance(references, str) or isinstance(hypotheses, str)
    expect(not one, "references, hypotheses", "a list of texts each", "one text", "Pass [text].")
    expect(
        len(references) == len(hypotheses),
        "hypotheses",
        f"{len(references)} texts, as references",
        len(hypotheses),
    )
    expect(
        len(references) > 0 and all(r.strip() for r in references),
        "references",
        "at least one, none empty",
        references[:3],
    )
    expect(resamples >= 1, "resamples", "at least 1", resamples)
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        out = process(
            " ".join(reference.split()), " ".join(hypothesis.split())
        )  # jiwer takes "\n" for a letter
        rows.append(
            (
                out.substitutions,
                out.insertions,
                out.deletions,
                out.hits + out.substitutions + out.deletions,
            )
        )
    counts = np.array(rows)  # (N, 4)
    draws = counts[np.random.default_rng(seed).integers(0, len(rows), (resamples, len(rows)))].sum(
        1
    )  # (resamples, 4)
    low, high = np.quantile(draws[:, :3].sum(1) / draws[:, 3], [0.025, 0.975])
    substitutions, insertions, deletions, units = (int(n) for n in counts.sum(0))
    rate = (substitutions + insertions + deletions) / units
    return ErrorRate(
        rate=rate,
        low=float(low),
        high=float(high),
        substitutions=substitutions,
        insertions=insertions,
        deletions=deletions,
        units=units,
    )
