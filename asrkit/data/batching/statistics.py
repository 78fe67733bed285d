"""Lengths of a corpus at a glance: read from any manifest, and told in numbers that a terminal can
show.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from lhotse.audio import AudioLoadingError
from lhotse.serialization import deserialize_item, load_jsonl

from asrkit.data import corpora
from asrkit.data.batching.lengths import Lengths, shipped_lengths
from asrkit.files import shipped
from asrkit.shapes import expect
from asrkit.text import Tokenizer

TABLE, QUANTILES = (
    (".csv", ".csv.gz"),
    {"min": 0.0, "p1": 0.01, "p25": 0.25, "median": 0.5, "p75": 0.75, "p99": 0.99, "max": 1.0},
)


def read_lengths(
    target: str | Path,
    *,
    tokens: Tokenizer | Callable[[str], int] | None = None,
    progress: bool = False,
) -> Lengths:
    """Lengths of a table (.csv, .csv.gz), of a manifest read line by line, or of the table in
    data/lengths of this name.

    Manifest: a file of lhotse cuts, supervisions or recordings, or of JSON lines with duration and
    text, as NeMo writes them; or a folder that holds such files of lhotse. `tokens`: what counts
    those of a text; None: characters. Without text: 0.
    """
    path, name = Path(target), str(target)
    if name.endswith(TABLE):
        return Lengths.read(path)
    known = sorted(
        table.name.removesuffix(".csv.gz") for table in shipped("lengths").glob("*.csv.gz")
    )
    if name in known and not path.exists():
        return shipped_lengths(name)
    expect(
        path.exists(),
        "target",
        f"a manifest, a table (.csv, .csv.gz) or one of {', '.join(known)}",
        repr(name),
    )
    kinds = "cuts*.jsonl*", *(table.format("*") for table in reversed(corpora.TABLES))
    files = (
        [path]
        if path.is_file()
        else next((found for kind in kinds if (found := sorted(path.glob(kind)))), [])
    )
    lengths = Lengths.of_cuts(
        (one for file in files for one in _utterances(file)), tokens=tokens, progress=progress
    )
    expect(len(lengths) > 0, "target", "at least one utterance", f"none in {path}")
    return lengths


def _utterances(file: Path) -> Iterator[Any]:
    """What has `duration` and `supervisions` with `text`, one for each line; no audio is read where
    a line says its duration.
    """
    number = 1
    try:
        for row in load_jsonl(file):
            if "duration" in row:
                said = [
                    SimpleNamespace(text="".join([one.get("text") or ""]))
                    for one in row.get("supervisions", [row])
                ]
                yield SimpleNamespace(duration=0.0 + row["duration"], supervisions=said)
            else:
                yield deserialize_item(row) if "type" in row else corpora._simple(row, file.parent)
            number += 1
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        AudioLoadingError,
        OSError,
        EOFError,
        OverflowError,
        RecursionError,
        zlib.error,
    ) as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"target: expected lines with duration and text, got {got} at {file}:{number}."
        ) from None


def padding_of_random(values: np.ndarray, batch: int) -> float:
    """Share of padding in random batches of `batch`: 1 - mean / expected longest, over all batches
    that there are.
    """
    N = len(values)
    shorter = np.ones(N)  # probability that a whole batch is among the k shortest, k = 1..N
    for drawn in range(batch):
        shorter *= np.maximum(np.arange(1, N + 1) - drawn, 0) / (N - drawn)
    longest = np.sort(values) @ np.diff(shorter, prepend=0)
    return float(1 - np.mean(values) / longest) if longest else 0.0


def length_stats(lengths: Lengths, *, batch: int = 32) -> dict[str, Any]:
    """Utterances, hours, quantiles of seconds, tokens and tokens per second, and the padding of
    random batches of `batch`.

    The padding is exact, not simulated; tokens are left out where none are known.
    """
    expect(len(lengths) > 0, "lengths", "at least one utterance", "none")
    expect(batch >= 1, "batch", "at least 1", batch)
    batch = min(batch, len(lengths))
    columns = {"seconds": lengths.seconds}
    if lengths.tokens.any():
        columns |= {
            "tokens": lengths.tokens.astype(float),
            "tokens_per_second": lengths.tokens_per_second,
        }
    stats: dict[str, Any] = {
        "utterances": len(lengths),
        "hours": round(lengths.hours, 4),
        "tokens": int(lengths.tokens.sum()),
    }
    stats |= {
        "quantiles": {name: _quantiles(values) for name, values in columns.items()},
        "random_batch": batch,
    }
    columns.pop("tokens_per_second", None)
    return {
        **stats,
        "random_batch_padding": {
            name: round(padding_of_random(row, batch), 4) for name, row in columns.items()
        },
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {
        name: round(float(value), 3)
        for name, value in zip(QUANTILES, np.quantile(values, [*QUANTILES.values()]), strict=True)
    }


def length_table(stats: dict[str, Any]) -> str:
    """What `length_stats` found, as lines of text."""
    lines = [f"{'':18}" + "".join(f"{name:>10}" for name in QUANTILES)]
    for name, values in stats["quantiles"].items():
        lines.append(
            f"{name.replace('_', ' '):18}" + "".join(f"{value:10.2f}" for value in values.values())
        )
    shares = " and ".join(
        f"{share:.1%} of their {name}" for name, share in stats["random_batch_padding"].items()
    )
    tokens = f"{stats['tokens']:,} tokens" if stats["tokens"] else "tokens not known"
    lines += [f"{stats['utterances']:,} utterances, {stats['hours']:,.2f} hours, {tokens}"]
    return "\n".join(
        [*lines, f"random batches of {stats['random_batch']} would be padding for {shares}"]
    )


def histogram(seconds: np.ndarray, *, rows: int = 16, width: int = 50) -> str:
    """Utterances by length as lines of text; the last one also holds the longest half percent,
    however long they are.
    """
    end = float(np.quantile(seconds, 0.995))
    step = next(
        step
        for step in (c * 10.0**e for e in range(-3, 308) for c in (1, 2, 5))
        if step * rows >= end
    )
    last, digits = int(np.ceil(end / step)) - 1, max(0, -int(np.floor(np.log10(step))))
    counts = np.bincount(np.minimum(seconds // step, last).astype(int)).tolist()
    lines = []
    for cell, count in enumerate(counts):
        high = (
            f"to {(cell + 1) * step:5.{digits}f} s"
            if cell < last or seconds.max() < (cell + 1) * step
            else "s or more"
        )
        bar = "█" * round(width * count / max(counts)) or "▏" * min(count, 1)
        lines.append(f"{cell * step:8.{digits}f} {high:10} {bar:{width}} {count:,}")
    return "\n".join(lines)
