"""Tokenizers, text normalisation, and word and character error rates with their uncertainty."""

import base64
import itertools
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from asrkit.byte_pairs import BytePairTokenizer
from asrkit.shapes import expect

# Numbers of sentencepiece_model.proto: algorithms of TrainerSpec, types of a piece.
_ALGORITHMS = {"Unigram": 1, "BPE": 2}
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_BYTE = 6
SPACE = "▁"  # a space, as SentencePiece writes it
_PART = "part "  # before the names of an aggregate tokenizer's models, where it is saved


class Tokenizer(Protocol):
    """What asrkit asks of a tokenizer.

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

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` in lower case; ValueError names the characters that have none."""
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
        """Text of `tokens`, without outer and double spaces."""
        _check_tokens(tokens, self.vocab_size)
        return " ".join("".join(self.alphabet[token] for token in tokens).split())


@dataclass(frozen=True)
class SentencePieceTokenizer:
    """Subword tokens of a SentencePiece model, held as bytes for checkpoints to carry."""

    model: bytes

    @classmethod
    def train(cls, texts: Sequence[str], *, vocab_size: int) -> "SentencePieceTokenizer":
        """A unigram model trained on `texts`, with at most `vocab_size` pieces."""
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
        """The SentencePiece model that a Hugging Face tokenizer.json was converted from.

        Converted back, because sentencepiece then does everything: the score of a piece is the rank
        of its merge (BPE) or its log-probability (Unigram), and the table of the normaliser is
        kept. Added tokens are indivisible; special ones have no text.

        Args:
            contents: The parsed tokenizer.json.
            tokens: Ids of the pieces to keep, in the order of the new model.

        Raises:
            ValueError: An unknown kind of model, or an id without a piece.
        """
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        model = contents["model"]
        expect(
            model["type"] in _ALGORITHMS,
            "tokenizer",
            f"a model of {sorted(_ALGORITHMS)}",
            repr(model["type"]),
        )
        added = {token["id"]: token for token in contents.get("added_tokens") or ()}
        pieces, scores, unknown = _vocabulary(model)
        pieces |= {id_: token["content"] for id_, token in added.items()}
        absent = [token for token in tokens if token not in pieces]
        wanted = f"a piece for each of {len(tokens)} tokens"
        expect(not absent, "tokenizer", wanted, f"none for {absent[:5]}")
        proto = ModelProto()
        for token in tokens:
            piece = pieces[token]
            piece_type = _piece_type(piece, unknown, added.get(token))
            proto.pieces.add(piece=piece, score=scores.get(piece, 0.0), type=piece_type)
        proto.trainer_spec.model_type = _ALGORITHMS[model["type"]]
        proto.trainer_spec.byte_fallback = "<0x00>" in {pieces[token] for token in tokens}
        proto.normalizer_spec.precompiled_charsmap = _charsmap(contents)
        pre_tokenizer = contents.get("pre_tokenizer") or {}
        scheme = pre_tokenizer.get("prepend_scheme", "always")
        proto.normalizer_spec.add_dummy_prefix = scheme != "never"
        return cls(proto.SerializeToString())

    def __post_init__(self) -> None:
        import sentencepiece

        pieces: Any = []
        if self.model:
            try:
                pieces = sentencepiece.SentencePieceProcessor(model_proto=self.model)
            except RuntimeError:
                pieces = []
        got = f"{len(self.model)} bytes of something else"
        expect(len(pieces) > 0, "tokenizer", "a SentencePiece model", got)
        object.__setattr__(self, "_pieces", pieces)

    def with_control(self) -> "SentencePieceTokenizer":
        """The same model with `<pad>` and pieces such as `<|en|>` as control symbols: without text.

        NeMo's models have them as symbols that a user defined, which are text like any other.
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
        return len(self._pieces)  # type: ignore[attr-defined]

    def pieces(self) -> list[str]:
        """The pieces as the model writes them, with "▁" for a space."""
        number = range(self.vocab_size)
        return [self._pieces.id_to_piece(n) for n in number]  # type: ignore[attr-defined]

    def encode(self, text: str) -> list[int]:
        """Piece ids of `text`."""
        return self._pieces.encode(text)  # type: ignore[attr-defined]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the piece ids."""
        _check_tokens(tokens, self.vocab_size)
        return self._pieces.decode([int(token) for token in tokens])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class AggregateTokenizer:
    """SentencePiece models one behind the other, each for a language, as NeMo's Canary has them.

    The first token of a model is the number of tokens of all models before it.

    Args:
        parts: (language, model) in the order of their tokens. A model of control symbols alone has
            a name of its own, such as "spl_tokens".
    """

    parts: tuple[tuple[str, SentencePieceTokenizer], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        distinct = len(names) > 0 and len(set(names)) == len(names)
        expect(distinct, "tokenizer", "models of different languages", names)
        starts = []  # the first token of each model
        size = 0
        for _, part in self.parts:
            starts.append(size)
            size += part.vocab_size
        pieces = [piece for _, part in self.parts for piece in part.pieces()]
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_texts", pieces)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of all models."""
        return len(self._texts)  # type: ignore[attr-defined]

    @property
    def languages(self) -> list[str]:
        """Names of the models, in their order."""
        return [name for name, _ in self.parts]

    def pieces(self) -> list[str]:
        """The pieces of all models, with "▁" for a space."""
        return list(self._texts)  # type: ignore[attr-defined]

    def encode(self, text: str, language: str | None = None) -> list[int]:
        """Tokens of `text`.

        Args:
            text: In the language.
            language: One of `languages`; None: "en", or the last one where there is none.

        Raises:
            ValueError: There is no model for the language.
        """
        names = self.languages
        if language is None:
            language = "en" if "en" in names else names[-1]
        expect(language in names, "language", f"one of {', '.join(names)}", repr(language))
        number = names.index(language)
        start = self._starts[number]  # type: ignore[attr-defined]
        return [start + token for token in self.parts[number][1].encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, which may be of several models."""
        _check_tokens(tokens, self.vocab_size)
        starts = self._starts  # type: ignore[attr-defined]
        text = ""
        for number, run in itertools.groupby(tokens, lambda token: bisect_right(starts, token) - 1):
            ids = [int(token) for token in run]
            if self._texts[ids[0]].startswith(SPACE):  # type: ignore[attr-defined]
                text += " "
            text += self.parts[number][1].decode([id_ - starts[number] for id_ in ids])
        return " ".join(text.split())


def _vocabulary(model: dict[str, Any]) -> tuple[dict[int, str], dict[str, float], str | None]:
    """Pieces by id, scores by piece, and the unknown piece of a tokenizer.json's model."""
    if model["type"] == "BPE":
        pieces = {id_: piece for piece, id_ in model["vocab"].items()}
        merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
        merged = dict.fromkeys("".join(merge) for merge in merges)  # the first rank of each
        scores = {piece: -float(rank) for rank, piece in enumerate(merged)}
        return pieces, scores, model.get("unk_token")
    pieces = {id_: piece for id_, (piece, _) in enumerate(model["vocab"])}
    return pieces, dict(model["vocab"]), pieces.get(model.get("unk_id"))


def _piece_type(piece: str, unknown: str | None, added: dict[str, Any] | None) -> int:
    if piece == unknown:
        return _UNKNOWN
    if added is not None:
        return _CONTROL if added.get("special") else _USER_DEFINED
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return _BYTE
    return _NORMAL


def _charsmap(contents: dict[str, Any]) -> bytes:
    """The compiled table of the normaliser; b"" if it has none."""
    normalizer = contents.get("normalizer") or {}
    for step in normalizer.get("normalizers", [normalizer]):
        if step.get("precompiled_charsmap"):
            return base64.b64decode(step["precompiled_charsmap"])
    return b""


def _check_tokens(tokens: Sequence[int], size: int) -> None:
    """ValueError for tokens out of range; -1 would be the alphabet's last letter."""
    wrong = [int(token) for token in tokens if not 0 <= token < size]
    remedy = "Padding and blank have no text: use Hypotheses.tokens()."
    expect(not wrong, "tokens", f"0 to {size - 1}", wrong[:5], remedy)


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """What each token of a tokenizer writes, with " " or SentencePiece's "▁" where a word begins.

    Raises:
        ValueError: The tokenizer is not one of asrkit.text.
    """
    if isinstance(tokenizer, SentencePieceTokenizer | AggregateTokenizer | BytePairTokenizer):
        return tokenizer.pieces()
    expect(
        isinstance(tokenizer, CharTokenizer),
        "tokenizer",
        "one of asrkit.text",
        type(tokenizer).__name__,
    )
    return [*tokenizer.alphabet]  # type: ignore[attr-defined]


def load_tokenizer(spec: str | Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer that a checkpoint or a command line names.

    Args:
        spec: "char", the path of a SentencePiece `.model` file, or the dict of `dump_tokenizer`.

    Raises:
        ValueError: It is none of these.
    """
    if isinstance(spec, dict):
        all_text = all(isinstance(part, str) for part in spec.values())
        expect(all_text, "tokenizer", "text for its parts", repr(spec)[:80])
        if "alphabet" in spec:
            return CharTokenizer(spec["alphabet"])
        if "byte_pairs" in spec:
            return BytePairTokenizer.from_json(spec["byte_pairs"])
        if spec and all(name.startswith(_PART) for name in spec):
            models = {name: SentencePieceTokenizer(bytes.fromhex(spec[name])) for name in spec}
            parts = [(name.removeprefix(_PART), model) for name, model in models.items()]
            return AggregateTokenizer(tuple(parts))
        return SentencePieceTokenizer(bytes.fromhex(spec["model"]))
    if spec == "char":
        return CharTokenizer()
    expect(
        Path(spec).is_file(), "tokenizer", "'char' or a SentencePiece .model file", repr(str(spec))
    )
    return SentencePieceTokenizer(Path(spec).read_bytes())


def dump_tokenizer(tokenizer: Tokenizer) -> dict[str, str]:
    """A JSON-able dict from which `load_tokenizer` makes an equal tokenizer."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {"model": tokenizer.model.hex()}
    if isinstance(tokenizer, AggregateTokenizer):
        return {_PART + name: part.model.hex() for name, part in tokenizer.parts}
    if isinstance(tokenizer, BytePairTokenizer):
        return {"byte_pairs": tokenizer.to_json()}
    expect(
        isinstance(tokenizer, CharTokenizer),
        "tokenizer",
        "one of asrkit.text, to be saved",
        type(tokenizer).__name__,
    )
    return {"alphabet": tokenizer.alphabet}  # type: ignore[attr-defined]


def normalize_text(text: str) -> str:
    """Text as error rates of asrkit compare it: in lower case.

    `wer` and `cer` count case as written, so normalise references and hypotheses first. White space
    needs no care: they compare words with single spaces between them.
    """
    return text.lower()


@dataclass(frozen=True, kw_only=True)
class ErrorRate:
    """Errors over reference units, as a fraction, with a 95 % interval by bootstrap."""

    rate: float
    low: float  # of the interval
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


def wer(
    references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> ErrorRate:
    """Word error rate over all utterances: errors / reference words.

    Args:
        references: What was said, one text per utterance, none empty. Case counts: see
            `normalize_text`.
        hypotheses: What was recognised, in the same order.
        resamples: Bootstrap samples of utterances for the 95 % interval.
        seed: Of the bootstrap.

    Raises:
        ValueError: The lists do not match, or a reference is empty.
    """
    import jiwer

    return _error_rate(jiwer.process_words, references, hypotheses, resamples, seed)


def cer(
    references: Sequence[str], hypotheses: Sequence[str], *, resamples: int = 1000, seed: int = 0
) -> ErrorRate:
    """Character error rate over all utterances: errors / reference characters, spaces included.

    Args:
        references: What was said, one text per utterance, none empty. Case counts: see
            `normalize_text`.
        hypotheses: What was recognised, in the same order.
        resamples: Bootstrap samples of utterances for the 95 % interval.
        seed: Of the bootstrap.

    Raises:
        ValueError: The lists do not match, or a reference is empty.
    """
    import jiwer

    return _error_rate(jiwer.process_characters, references, hypotheses, resamples, seed)


def _error_rate(
    process: Any, references: Sequence[str], hypotheses: Sequence[str], resamples: int, seed: int
) -> ErrorRate:
    _check_texts(references, hypotheses)
    expect(resamples >= 1, "resamples", "at least 1", resamples)
    rows = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        # single spaces, since jiwer takes "\n" for a letter
        out = process(" ".join(reference.split()), " ".join(hypothesis.split()))
        units = out.hits + out.substitutions + out.deletions
        rows.append((out.substitutions, out.insertions, out.deletions, units))
    counts = np.array(rows)  # (N, 4)
    samples = np.random.default_rng(seed).integers(0, len(rows), (resamples, len(rows)))
    draws = counts[samples].sum(1)  # (resamples, 4)
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


def _check_texts(references: Sequence[str], hypotheses: Sequence[str]) -> None:
    one_text = isinstance(references, str) or isinstance(hypotheses, str)
    expect(
        not one_text, "references, hypotheses", "a list of texts each", "one text", "Pass [text]."
    )
    same_number = len(references) == len(hypotheses)
    wanted = f"{len(references)} texts, as references"
    expect(same_number, "hypotheses", wanted, len(hypotheses))
    filled = len(references) > 0 and all(text.strip() for text in references)
    expect(filled, "references", "at least one, none empty", references[:3])
