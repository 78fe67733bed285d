"""Lengths of a corpus at a glance: read from any manifest, as numbers, a table and a histogram."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from lhotse.serialization import deserialize_item

from asrkit.data.batching.lengths import Lengths, shipped_lengths, shipped_names
from asrkit.data.batching.padding import computed_seconds
from asrkit.data.corpora.manifests import TABLES, read_rows, simple_cut
from asrkit.shapes import expect
from asrkit.text import Tokenizer

DRAWN_BATCHES = 200  # of which the padding in phases is the mean
TABLE = (".csv", ".csv.gz")
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
    tokens: Tokenizer | Callable[[str], int] | None = None,
    progress: bool = False,
) -> Lengths:
    """Lengths of the utterances of a manifest or a table. Manifests are read line by line.

    Args:
        target: A table (.csv, .csv.gz); a file of lhotse cuts, supervisions or recordings; a file
            of JSON lines with duration and text, as NeMo writes them; a folder that holds such
            files of lhotse; or the name of a table of data/lengths.
        tokens: A tokenizer, or a function that counts the tokens of a text. None counts
            characters. Utterances without text have 0 tokens.
        progress: Show a progress bar.

    Raises:
        ValueError: `target` is none of these, cannot be read, or holds no utterance.
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
    utterances = (row for file in _manifest_files(path) for row in _utterances(file))
    lengths = Lengths.of_cuts(utterances, tokens=tokens, progress=progress)
    expect(len(lengths) > 0, "target", "at least one utterance", f"none in {path}")
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


def _utterances(file: Path) -> Iterator[Any]:
    """An object with `duration` and `supervisions`, which have `text`, for each line of a file.

    No audio is read where the line states its duration.
    """

    def utterance(row: dict[str, Any]) -> Any:
        return _utterance(row, file.parent)

    wanted = "lines with duration and text"
    return read_rows(file, utterance, argument="target", wanted=wanted)


def _utterance(row: dict[str, Any], folder: Path) -> Any:
    if "duration" in row:
        parts = row.get("supervisions", [row])
        supervisions = [_supervision(part) for part in parts]
        duration = 0.0 + row["duration"]  # a TypeError unless it is a number
        return SimpleNamespace(duration=duration, supervisions=supervisions)
    if "type" in row:
        return deserialize_item(row)
    return simple_cut(row, folder)


def _supervision(part: dict[str, Any]) -> Any:
    text = part.get("text") or ""
    return SimpleNamespace(text="".join([text]))  # `join` refuses a text that is none


def padding_of_random(values: np.ndarray, batch: int) -> float:
    """Expected share of padding in random batches: 1 - mean / expected longest.

    Exact, over all batches that can be drawn.

    Args:
        values: Lengths, (N,).
        batch: Utterances in a batch, at most N.
    """
    N = len(values)
    all_among_shortest = np.ones(N)  # [k - 1]: probability that a batch is among the k shortest
    k = np.arange(1, N + 1)
    for drawn in range(batch):
        left = np.maximum(k - drawn, 0)
        all_among_shortest *= left / (N - drawn)
    is_longest = np.diff(all_among_shortest, prepend=0)  # probability of each length
    longest = np.sort(values) @ is_longest
    if longest == 0:
        return 0.0
    return float(1 - np.mean(values) / longest)


def padding_in_phases(seconds: np.ndarray, batch: int, phases: int) -> float:
    """Share of padding in random batches that a recurrent encoder runs in phases.

    Estimated from DRAWN_BATCHES batches, which are the same in every call.

    Args:
        seconds: Lengths, (N,).
        batch: Utterances in a batch, at most N.
        phases: Phases of a batch at most, as LSTMEncoderConfig has them.
    """
    random = np.random.default_rng(0)
    useful = 0.0
    computed = 0.0
    for _ in range(DRAWN_BATCHES):
        drawn = random.choice(seconds, batch, replace=False)
        useful += float(drawn.sum())
        computed += computed_seconds(drawn, phases)
    return 1 - useful / computed


def length_stats(lengths: Lengths, *, batch: int = 32, phases: int = 1) -> dict[str, Any]:
    """Utterances, hours, quantiles of lengths, and the padding of random batches, as JSON.

    Args:
        lengths: Of at least one utterance. Tokens are left out of the result where none are known.
        batch: Utterances in a random batch. Its padding is exact, not simulated.
        phases: Above 1, the padding of a recurrent encoder that runs a batch in so many phases is
            estimated as well.
    """
    expect(len(lengths) > 0, "lengths", "at least one utterance", "none")
    expect(batch >= 1, "batch", "at least 1", batch)
    expect(phases >= 1, "phases", "at least 1", phases)
    batch = min(batch, len(lengths))
    columns = {"seconds": lengths.seconds}
    if lengths.tokens.any():
        columns["tokens"] = lengths.tokens.astype(float)
    padding = {}
    for name, values in columns.items():
        share = padding_of_random(values, batch)
        padding[name] = round(share, 4)
    if "tokens" in columns:
        columns["tokens_per_second"] = lengths.tokens_per_second
    in_phases = {}
    if phases > 1:
        share = padding_in_phases(lengths.seconds, batch, phases)
        in_phases[str(phases)] = round(share, 4)
    return {
        "utterances": len(lengths),
        "hours": round(lengths.hours, 4),
        "tokens": int(lengths.tokens.sum()),
        "quantiles": {name: _quantiles(values) for name, values in columns.items()},
        "random_batch": batch,
        "random_batch_padding": padding,
        "padding_in_phases": in_phases,
    }


def _quantiles(values: np.ndarray) -> dict[str, float]:
    shares = [*QUANTILES.values()]
    quantiles = np.quantile(values, shares).tolist()
    rounded = [round(value, 3) for value in quantiles]
    return dict(zip(QUANTILES, rounded, strict=True))


def length_table(stats: dict[str, Any]) -> str:
    """The result of `length_stats` as lines of text."""
    names = "".join(f"{name:>10}" for name in QUANTILES)
    lines = [f"{'':18}{names}"]
    for name, values in stats["quantiles"].items():
        cells = "".join(f"{value:10.2f}" for value in values.values())
        label = name.replace("_", " ")
        lines.append(f"{label:18}{cells}")
    tokens = "tokens not known"
    if stats["tokens"]:
        tokens = f"{stats['tokens']:,} tokens"
    lines.append(f"{stats['utterances']:,} utterances, {stats['hours']:,.2f} hours, {tokens}")
    padding = stats["random_batch_padding"]
    shares = " and ".join(f"{100 * share:.1f} % of their {name}" for name, share in padding.items())
    lines.append(f"random batches of {stats['random_batch']} would be padding for {shares}")
    for phases, share in stats["padding_in_phases"].items():
        lines.append(f"an encoder that runs them in {phases} phases would pad {100 * share:.1f} %")
    return "\n".join(lines)


def histogram(seconds: np.ndarray, *, rows: int = 16, width: int = 50) -> str:
    """Number of utterances by length, as lines of text.

    Args:
        seconds: Duration of each utterance, (N,).
        rows: Most lines. The last one also counts the longest half percent, however long.
        width: Characters of the longest bar.
    """
    end = float(np.quantile(seconds, 0.995))
    step = _round_step(end, rows)
    last = math.ceil(end / step) - 1
    magnitude = math.floor(math.log10(step))
    digits = max(0, -magnitude)
    cells = np.minimum(seconds // step, last)
    counts = np.bincount(cells.astype(int)).tolist()
    most = max(counts)
    longest = seconds.max()
    lines = []
    for cell, count in enumerate(counts):
        lower = cell * step
        upper = (cell + 1) * step
        if cell < last or longest < upper:
            border = f"to {upper:5.{digits}f} s"
        else:
            border = "s or more"
        bar = "█" * round(width * count / most)
        if count and not bar:
            bar = "▏"
        lines.append(f"{lower:8.{digits}f} {border:10} {bar:{width}} {count:,}")
    return "\n".join(lines)


def _round_step(end: float, rows: int) -> float:
    """The smallest of 1, 2 or 5 times a power of ten with which `rows` steps reach `end`."""
    for exponent in range(-3, 308):
        for factor in (1, 2, 5):
            step = factor * 10.0**exponent
            if step * rows >= end:
                return step
    raise ValueError(f"seconds: expected lengths below 1e308, got {end}.")
