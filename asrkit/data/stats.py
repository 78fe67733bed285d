"""`asrkit data stats`: lengths read from any manifest, as numbers, a table and a histogram."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from asrkit.data.batching.lengths import Lengths, shipped_lengths, shipped_names
from asrkit.data.corpora.manifests import LINES, TABLES, row_cut
from asrkit.data.utterances import expect_valid
from asrkit.files import json_lines
from asrkit.shapes import count, expect
from asrkit.text import Tokenizer

TABLE = (".csv", ".csv.gz")
HISTOGRAM_ROWS = 16
LONGEST_BAR = 50  # characters
QUANTILES = {
    "min": 0.0,
    "p1": 0.01,
    "p25": 0.25,
    "median": 0.5,
    "p75": 0.75,
    "p99": 0.99,
    "max": 1.0,
}


def read_lengths(
    target: str | Path,
    *,
    tokens: Tokenizer | None = None,
    progress: bool = False,
) -> Lengths:
    """Lengths of the utterances in a manifest or a table. Manifests are read line by line.

    Args:
        target: A table (.csv, .csv.gz); a file of lhotse cuts, supervisions or recordings; a file
            of JSON lines with duration and text, as NeMo writes them; a folder with such files of
            lhotse; or the name of a table in data/lengths.
        tokens: A tokenizer; None counts characters. Utterances without text have 0 tokens.
        progress: Show a progress bar.

    Raises:
        ValueError: `target` is none of these, cannot be read, or has no utterance.
    """
    path = Path(target)
    name = str(target)
    if name.endswith(TABLE):
        return Lengths.read(path)
    known = shipped_names()
    if name in known and not path.exists():
        return shipped_lengths(name)
    wanted = f"a manifest, a table (.csv, .csv.gz) or one of {', '.join(known)}"
    expect(path.exists(), "target", wanted, repr(name))
    utterances = (
        utterance
        for file in _manifest_files(path)
        for utterance in json_lines(file, partial(_utterance, folder=file.parent), LINES)
    )
    lengths = Lengths.of_texts(utterances, tokens=tokens, progress=progress)
    remedy = "Make cuts of sound files first: asrkit data prepare FOLDER."
    expect(len(lengths) > 0, "target", "at least one utterance", f"none in {path}", remedy)
    return lengths


def _manifest_files(path: Path) -> list[Path]:
    """`path`, or the files of a folder: its cuts, else its supervisions, else its recordings."""
    if path.is_file():
        return [path]
    recordings, supervisions = TABLES
    for pattern in ("cuts*.jsonl*", supervisions, recordings):
        files = sorted(path.glob(pattern))
        if files:
            return files
    return []


def _utterance(row: dict[str, Any], folder: Path) -> tuple[float, list[str]]:
    """Seconds and texts of a line. Audio is read only if the line states no duration."""
    if "type" in row or row.get("duration") is None:
        cut = row_cut(row, folder)
        expect_valid(cut)
        return cut.duration, [part.text for part in cut.supervisions if part.text]
    seconds = float(row["duration"])
    expect(0 < seconds < math.inf, "manifest", "a duration above 0 s", seconds)
    return seconds, ["".join([row.get("text") or ""])]  # a TypeError unless it is text


def padding_of_random(values: np.ndarray, batch: int) -> float:
    """Expected share of padding in random batches: 1 - mean / expected longest.

    Exact, over all possible batches.

    Args:
        values: Lengths, (N,).
        batch: Utterances in a batch, at most N.
    """
    N = len(values)
    all_among_shortest = np.ones(N)  # [k - 1]: probability that a batch is among the k shortest
    k = np.arange(1, N + 1)
    for drawn in range(batch):
        all_among_shortest *= np.maximum(k - drawn, 0) / (N - drawn)
    is_longest = np.diff(all_among_shortest, prepend=0)  # probability of each length
    longest = np.sort(values) @ is_longest
    if longest == 0:
        return 0.0
    return float(1 - np.mean(values) / longest)


def length_stats(lengths: Lengths, *, batch: int = 32) -> dict[str, Any]:
    """Utterances, hours, quantiles of lengths, and the padding of random batches, as JSON.

    Args:
        lengths: Lengths of at least one utterance. The result omits tokens if none are known.
        batch: Utterances in a random batch, whose padding is exact, not simulated.
    """
    expect(batch >= 1, "batch", "at least 1", batch)
    batch = min(batch, len(lengths))
    columns = {"seconds": lengths.seconds}
    if lengths.tokens.any():
        columns["tokens"] = lengths.tokens.astype(float)
    padding = {name: round(padding_of_random(values, batch), 4) for name, values in columns.items()}
    if "tokens" in columns:
        columns["tokens_per_second"] = lengths.tokens_per_second
    quantiles = {}
    for name, values in columns.items():
        row = np.quantile(values, [*QUANTILES.values()]).round(3).tolist()
        quantiles[name] = dict(zip(QUANTILES, row, strict=True))
    return {
        "utterances": len(lengths),
        "hours": round(lengths.hours, 4),
        "tokens": int(lengths.tokens.sum()),
        "quantiles": quantiles,
        "random_batch": batch,
        "random_batch_padding": padding,
    }


def length_table(stats: dict[str, Any]) -> str:
    """The result of `length_stats` as lines of text."""
    lines = [" " * 18 + "".join(f"{name:>10}" for name in QUANTILES)]
    for name, values in stats["quantiles"].items():
        cells = "".join(f"{value:10.2f}" for value in values.values())
        lines.append(f"{name.replace('_', ' '):18}{cells}")
    tokens = f"{stats['tokens']:,} tokens" if stats["tokens"] else "tokens not known"
    utterances = count(stats["utterances"], "utterance")
    lines.append(f"{utterances}, {stats['hours']:,.2f} hours, {tokens}")
    padding = stats["random_batch_padding"]
    shares = " and ".join(f"{100 * share:.1f} % of their {name}" for name, share in padding.items())
    lines.append(f"random batches of {stats['random_batch']} would be padding for {shares}")
    return "\n".join(lines)


def histogram(seconds: np.ndarray) -> str:
    """Histogram of seconds (N,), as HISTOGRAM_ROWS lines of text.

    The last line also counts the longest half per cent, however long.
    """
    end = float(np.quantile(seconds, 0.995))
    counts, borders = np.histogram(seconds.clip(max=end), HISTOGRAM_ROWS, (0.0, end))
    lines = []
    for number, low, high in zip(counts.tolist(), borders, borders[1:], strict=False):
        bar = "█" * math.ceil(LONGEST_BAR * number / counts.max())
        lines.append(f"{low:8.2f} to {high:8.2f} s {bar:{LONGEST_BAR}} {number:,}")
    return "\n".join(lines)
