"""How long utterances are, in seconds and in tokens: all that batching has to know of them."""

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from asrkit.files import atomic, shipped
from asrkit.shapes import expect
from asrkit.text import Tokenizer


@dataclass(frozen=True, eq=False)
class Lengths:
    """N utterances: their seconds (N,) float64 and tokens (N,) int64, which are 0 where nobody
    knows them.
    """

    seconds: np.ndarray
    tokens: np.ndarray

    def __post_init__(self) -> None:
        given = self.tokens
        for name, kind in (("seconds", np.float64), ("tokens", np.int64)):
            try:
                object.__setattr__(
                    self, name, np.array(getattr(self, name), dtype=kind)
                )  # a copy: nobody changes it later
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"{name}: expected one number an utterance, got some that are none ({error})."
                ) from None
        N, sizes = self.seconds.size, (self.seconds.shape, self.tokens.shape)
        expect(sizes == ((N,), (N,)), "seconds, tokens", "one number each an utterance", sizes)
        wrong = np.flatnonzero(~(np.isfinite(self.seconds) & (self.seconds > 0)))
        expect(
            not len(wrong),
            "seconds",
            "finite and above 0",
            f"{self.seconds[wrong][:3]} for utterances {wrong[:3]}",
        )
        wrong = np.flatnonzero((self.tokens < 0) | (self.tokens != given))
        expect(
            not len(wrong),
            "tokens",
            "whole numbers, 0 or more",
            f"{np.array(given)[wrong][:3]} for utterances {wrong[:3]}",
        )

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def hours(self) -> float:
        """Hours of speech in all."""
        return float(self.seconds.sum()) / 3600

    @property
    def tokens_per_second(self) -> np.ndarray:
        """(N,)."""
        return self.tokens / self.seconds

    def take(self, rows: np.ndarray) -> "Lengths":
        """Those of `rows`, numbers or a mask."""
        return Lengths(self.seconds[rows], self.tokens[rows])

    @classmethod
    def of_cuts(
        cls,
        cuts: Iterable[Any],
        *,
        tokens: Tokenizer | Callable[[str], int] | None = None,
        progress: bool = False,
    ) -> "Lengths":
        """Of lhotse cuts, read once. `tokens`: a tokenizer, or what counts the tokens of a text;
        None: characters.
        """
        encode = getattr(
            tokens, "encode", None
        )  # first, as some tokenizers can be called too, for something else
        count: Any = (lambda text: len(encode(text))) if encode else tokens or len
        rows = [
            (
                cut.duration,
                count(text)
                if (text := " ".join(one.text for one in cut.supervisions if one.text))
                else 0,
            )
            for cut in tqdm(cuts, "lengths", unit="utt", disable=not progress)
        ]
        return (
            cls(*(np.array(column) for column in zip(*rows, strict=True)))
            if rows
            else cls(np.empty(0), np.empty(0))
        )

    @classmethod
    def read(cls, path: str | Path) -> "Lengths":
        """Of a table as `save` writes it: CSV or CSV.gz with a header that has `seconds`, and
        `tokens` where known.
        """
        path = Path(path)
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
            table = csv.DictReader(io.StringIO(text))
            expect(
                "seconds" in (table.fieldnames or ()),
                "header",
                "a column `seconds`",
                table.fieldnames,
            )
            rows = [(float(row["seconds"]), int(row.get("tokens") or 0)) for row in table]
            return (
                cls(*(np.array(column) for column in zip(*rows, strict=True)))
                if rows
                else cls(np.empty(0), np.empty(0))
            )
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

    def save(self, path: str | Path) -> None:
        """Write the table, one utterance a row, compressed where the name ends in .gz."""
        rows = zip(self.seconds.tolist(), self.tokens.tolist(), strict=True)
        text = "seconds,tokens\n" + "".join(f"{seconds},{tokens}\n" for seconds, tokens in rows)
        with atomic(path) as part:
            part.write_bytes(
                gzip.compress(text.encode(), mtime=0)
                if str(path).endswith(".gz")
                else text.encode()
            )


def shipped_lengths(name: str) -> Lengths:
    """A table of data/lengths, which says in its README what the tables hold: librispeech_eval,
    ami_segments, …
    """
    known = sorted(
        path.name.removesuffix(".csv.gz") for path in shipped("lengths").glob("*.csv.gz")
    )
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
    """Lengths as wide as those of speech from the web: log-normal seconds, and log-normal tokens
    per second.

    `spread` and `rate_spread` are deviations of the logarithms. No corpus was measured for them:
    they are chosen so that half of a random batch is padding, which document 002 says of its data.
    """
    random = np.random.default_rng(seed)
    seconds = np.clip(random.lognormal(np.log(median_s), spread, count), 0.5, most_s).round(3)
    rates = np.clip(random.lognormal(np.log(rate), rate_spread, count), 0.5, 25)
    return Lengths(seconds, np.maximum(1, np.rint(seconds * rates)))
