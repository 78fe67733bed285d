"""How long utterances are, in seconds and in tokens: all that batching needs to know of them."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.files import atomic, shipped
from asrkit.shapes import expect, whole
from asrkit.text import Tokenizer

GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of N utterances.

    Attributes:
        seconds: Duration of each utterance, (N,) float64, above 0.
        tokens: Number of tokens of each utterance, (N,) int64; 0 where it is not known.
    """

    seconds: np.ndarray
    tokens: np.ndarray

    def __post_init__(self) -> None:
        tokens_as_passed = self.tokens
        for name, dtype in (("seconds", np.float64), ("tokens", np.int64)):
            try:
                # A copy, so that the caller cannot change it later.
                column = np.array(getattr(self, name), dtype=dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{name}: expected one number an utterance, got some that are none ({error})."
                ) from None
            object.__setattr__(self, name, column)
        N = self.seconds.size
        shapes = (self.seconds.shape, self.tokens.shape)
        expect(shapes == ((N,), (N,)), "seconds, tokens", "one number each an utterance", shapes)
        bad_seconds = ~(np.isfinite(self.seconds) & (self.seconds > 0))
        _expect_none(bad_seconds, "seconds", "finite and above 0", self.seconds)
        bad_tokens = (self.tokens < 0) | (self.tokens != tokens_as_passed)
        _expect_none(bad_tokens, "tokens", "whole numbers, 0 or more", np.array(tokens_as_passed))

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def hours(self) -> float:
        """Total duration in hours."""
        return float(self.seconds.sum()) / 3600

    @property
    def tokens_per_second(self) -> np.ndarray:
        """Tokens per second of each utterance, (N,) float64."""
        return self.tokens / self.seconds

    def take(self, rows: np.ndarray) -> "Lengths":
        """Lengths of a subset.

        Args:
            rows: Row numbers, or a boolean mask (N,).
        """
        return Lengths(self.seconds[rows], self.tokens[rows])

    @classmethod
    def of_cuts(
        cls,
        cuts: Iterable[Any],
        *,
        tokens: Tokenizer | Callable[[str], int] | None = None,
        progress: bool = False,
    ) -> "Lengths":
        """Lengths of lhotse cuts, in their order. No audio is read.

        Args:
            cuts: lhotse cuts; iterated once.
            tokens: A tokenizer, or a function that counts the tokens of a text. None counts
                characters. Cuts without text have 0 tokens.
            progress: Show a progress bar.
        """
        from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

        count_tokens = _token_counter(tokens)
        rows = []
        for cut in tqdm(cuts, "lengths", unit="utt", disable=not progress):
            text = " ".join(part.text for part in cut.supervisions if part.text)
            count = 0
            if text:
                count = count_tokens(text)
            rows.append((cut.duration, count))
        return cls._of_rows(rows)

    @classmethod
    def read(cls, path: str | Path) -> "Lengths":
        """Read a table as `save` writes it.

        Args:
            path: A CSV file, compressed with gzip or not. Its header must have `seconds`; a
                missing or empty `tokens` means 0.

        Raises:
            ValueError: The file cannot be read, or is not such a table.
        """
        path = Path(path)
        try:
            return cls._of_rows(_csv_rows(path.read_bytes()))
        except (
            OSError,
            EOFError,
            zlib.error,
            csv.Error,
            TypeError,
            OverflowError,
            ValueError,
        ) as error:
            got = f"{str(path)!r} ({str(error).rstrip('.')})"
            raise ValueError(
                f"lengths: expected CSV with the columns seconds and tokens, got {got}."
            ) from None

    @classmethod
    def _of_rows(cls, rows: list[tuple[float, int]]) -> "Lengths":
        seconds = np.array([row[0] for row in rows])
        tokens = np.array([row[1] for row in rows])
        return cls(seconds, tokens)

    def save(self, path: str | Path) -> None:
        """Write the lengths as CSV, one utterance a line.

        Args:
            path: Where to write; compressed with gzip where the name ends in `.gz`.
        """
        lines = ["seconds,tokens\n"]
        for seconds, tokens in zip(self.seconds.tolist(), self.tokens.tolist(), strict=True):
            lines.append(f"{seconds},{tokens}\n")
        content = "".join(lines).encode()
        if str(path).endswith(".gz"):
            content = gzip.compress(content, mtime=0)
        with atomic(path) as part:
            part.write_bytes(content)


def _expect_none(bad: np.ndarray, name: str, wanted: str, values: np.ndarray) -> None:
    """Raise ValueError that shows the first three `values` where `bad` is true."""
    rows = np.flatnonzero(bad)
    if len(rows):
        expect(False, name, wanted, f"{values[rows][:3]} for utterances {rows[:3]}")


def _token_counter(tokens: Tokenizer | Callable[[str], int] | None) -> Callable[[str], int]:
    # `encode` is looked for first: some tokenizers can also be called, for something else.
    encode = getattr(tokens, "encode", None)
    known = tokens is None or encode is not None or callable(tokens)
    wanted = "a tokenizer, a function of a text, or None"
    expect(known and not isinstance(tokens, str), "tokens", wanted, repr(tokens))
    if encode is not None:
        return lambda text: len(encode(text))
    if callable(tokens):
        return tokens
    return len


def _csv_rows(content: bytes) -> list[tuple[float, int]]:
    """(seconds, tokens) of each line of a table."""
    if content.startswith(GZIP_MAGIC):
        content = gzip.decompress(content)
    table = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
    header = table.fieldnames
    expect("seconds" in (header or ()), "header", "a column `seconds`", header)
    return [(float(row["seconds"]), int(row.get("tokens") or 0)) for row in table]


def shipped_names() -> list[str]:
    """Names that `shipped_lengths` knows, sorted."""
    return sorted(path.name.removesuffix(".csv.gz") for path in shipped("lengths").glob("*.csv.gz"))


def shipped_lengths(name: str) -> Lengths:
    """Lengths of a corpus that asrkit ships as a table, such as `librispeech_eval`.

    Args:
        name: A table of data/lengths, whose README says what the tables hold.
    """
    known = shipped_names()
    expect(name in known, "name", "one of " + ", ".join(known), repr(name))
    return Lengths.read(shipped("lengths") / f"{name}.csv.gz")


def web_like(
    count: int,
    *,
    seed: int = 0,
    median_s: float = 6.7,
    spread: float = 0.75,
    most_s: float = 40.0,
    rate: float = 4.2,
    rate_spread: float = 0.4,
) -> Lengths:
    """Random lengths that vary as widely as those of speech from the web.

    Seconds and tokens per second are log-normal. No corpus was measured for the defaults: they are
    chosen so that half of a random batch is padding, as arXiv 2503.05931 says of its data.

    Args:
        count: Number of utterances.
        seed: Of the random numbers.
        median_s: Median duration in seconds.
        spread: Standard deviation of the logarithm of the seconds.
        most_s: Longest duration; longer ones are clipped to it, short ones to 0.5 s.
        rate: Median of the tokens per second.
        rate_spread: Standard deviation of the logarithm of the tokens per second.
    """
    expect(whole(count, 0), "count", "a whole number, 0 or more", repr(count))
    expect(whole(seed, 0), "seed", "a whole number, 0 or more", repr(seed))
    random = np.random.default_rng(seed)
    seconds = np.clip(random.lognormal(np.log(median_s), spread, count), 0.5, most_s).round(3)
    rates = np.clip(random.lognormal(np.log(rate), rate_spread, count), 0.5, 25)
    return Lengths(seconds, np.maximum(1, np.rint(seconds * rates)))
