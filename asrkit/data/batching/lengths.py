"""Lengths of utterances in seconds and tokens: all that batching needs to know about them."""

import csv
import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.files import atomic, open_text, shipped
from asrkit.shapes import expect
from asrkit.text import Tokenizer


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of N utterances.

    Attributes:
        seconds: Duration of each utterance, (N,) float64, above 0.
        tokens: Number of tokens of each utterance, (N,) int64; 0 if unknown.
    """

    seconds: np.ndarray
    tokens: np.ndarray

    def __post_init__(self) -> None:
        # copies, so that the caller cannot change them later
        seconds = np.array(self.seconds, dtype=np.float64)
        numbers = np.array(self.tokens)
        tokens = numbers.astype(np.int64)
        shapes = (seconds.shape, tokens.shape)
        N = seconds.size
        expect(shapes == ((N,), (N,)), "seconds, tokens", "one of each for an utterance", shapes)
        possible = np.isfinite(seconds) & (seconds > 0)
        expect(bool(possible.all()), "seconds", "finite and above 0", seconds[~possible][:3])
        possible = (tokens >= 0) & (tokens == numbers)
        expect(bool(possible.all()), "tokens", "whole numbers, 0 or more", numbers[~possible][:3])
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "tokens", tokens)

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
        tokens: Tokenizer | None = None,
    ) -> "Lengths":
        """Lengths of lhotse cuts, in their order. No audio is read.

        Args:
            cuts: lhotse cuts, iterated once.
            tokens: A tokenizer; None counts characters. Cuts without text have 0 tokens.
        """
        utterances = (
            (cut.duration, [part.text for part in cut.supervisions if part.text]) for cut in cuts
        )
        return cls.of_texts(utterances, tokens=tokens)

    @classmethod
    def of_texts(
        cls,
        utterances: Iterable[tuple[float, list[str]]],
        *,
        tokens: Tokenizer | None = None,
        progress: bool = False,
    ) -> "Lengths":
        """Lengths of utterances, each given as (seconds, texts).

        Args:
            utterances: The utterances, iterated once.
            tokens: A tokenizer; None counts characters.
            progress: Show a progress bar.
        """
        from tqdm import tqdm  # lazily, so that a machine without it can import asrkit

        encode = tokens.encode if tokens else list
        seconds = []
        counts = []
        for duration, texts in tqdm(utterances, "lengths", unit="utt", disable=not progress):
            seconds.append(duration)
            counts.append(len(encode(" ".join(texts))))
        return cls(np.array(seconds), np.array(counts))

    @classmethod
    def read(cls, path: str | Path) -> "Lengths":
        """Read a table that `save` wrote.

        Args:
            path: A CSV file, compressed by gzip if its name ends in .gz. Its header must have
                `seconds`; a missing or empty `tokens` means 0.

        Raises:
            ValueError: The file cannot be read, or is not such a table.
        """
        try:
            with open_text(path) as file:
                table = csv.DictReader(file.read().splitlines())
                header = table.fieldnames or ()
                expect("seconds" in header, "header", "a column `seconds`", header)
                rows = list(table)
            seconds = [float(row["seconds"]) for row in rows]
            tokens = [int(row.get("tokens") or 0) for row in rows]
            return cls(np.array(seconds), np.array(tokens))
        except Exception as error:  # errors of csv, gzip, codecs and the file system
            got = f"{str(path)!r} ({str(error).rstrip('.')})"
            raise ValueError(
                f"lengths: expected CSV with the columns seconds and tokens, got {got}."
            ) from None

    def save(self, path: str | Path) -> None:
        """Write the lengths as CSV, one utterance a line.

        Args:
            path: File to write, compressed by gzip if its name ends in .gz.
        """
        rows = zip(self.seconds.tolist(), self.tokens.tolist(), strict=True)
        lines = ["seconds,tokens\n", *(f"{seconds},{tokens}\n" for seconds, tokens in rows)]
        content = "".join(lines).encode()
        if str(path).endswith(".gz"):
            content = gzip.compress(content, mtime=0)
        with atomic(path) as part:
            part.write_bytes(content)


def shipped_names() -> list[str]:
    """Names for `shipped_lengths`, sorted."""
    return sorted(path.name.removesuffix(".csv.gz") for path in shipped("lengths").glob("*.csv.gz"))


def shipped_lengths(name: str) -> Lengths:
    """Lengths of a corpus that asrkit ships as a table, such as `librispeech_eval`.

    Args:
        name: Name of a table in data/lengths, whose README describes the tables.
    """
    known = shipped_names()
    expect(name in known, "name", "one of " + ", ".join(known), repr(name))
    return Lengths.read(shipped("lengths") / f"{name}.csv.gz")


def web_like(
    count: int,
    *,
    seed: int = 0,
    spread: float = 0.75,
    most_s: float = 40.0,
    rate_spread: float = 0.4,
) -> Lengths:
    """Random lengths that vary as widely as those of speech from the web.

    Seconds and tokens per second are log-normal, with medians of 6.7 and 4.2. The defaults are not
    from a corpus: with them half of a random batch is padding, as arXiv 2503.05931 reports for its
    data.

    Args:
        count: Number of utterances.
        seed: Seed of the random numbers.
        spread: Standard deviation of the logarithm of the seconds.
        most_s: Longest duration. Longer ones are clipped to it, short ones to 0.5 s.
        rate_spread: Standard deviation of the logarithm of the tokens per second.
    """
    random = np.random.default_rng(seed)
    seconds = np.clip(random.lognormal(np.log(6.7), spread, count), 0.5, most_s).round(3)
    rates = np.clip(random.lognormal(np.log(4.2), rate_spread, count), 0.5, 25)
    return Lengths(seconds, np.maximum(1, np.rint(seconds * rates)))
