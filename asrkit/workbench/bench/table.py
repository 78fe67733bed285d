"""Records of benchmarks as tables of text: a line for each arm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asrkit.workbench.bench.suites import SUITES
from asrkit.workbench.tables import aligned

Record = Mapping[str, Any]
UNITS = {"1": ("", 1), "B": ("MiB", 2**20), "FLOP/s": ("GFLOP/s", 1e9), "B/s": ("GB/s", 1e9)}
COUNTS = {"join": "joint", "predict": "predictor", "launches": "launches", "syncs": "waits"}
COLUMNS = (
    "what",
    "shape",
    "implementation",
    "time",
    "quartiles",
    "times as fast as",
    "RTFx",
    "CPU time",
    "MiB",
    "least work",
    "calls",
    "also",
)
METRIC_COLUMNS = {"latency": "time", "rtfx": "RTFx", "cpu_time": "CPU time", "peak_memory": "MiB"}
WITHOUT_UNIT = ("rtfx", "peak_memory")  # the heading has it
LEGEND = (
    "times as fast as: another arm's time over this one's. CPU time: of all threads. least work: "
    "what no implementation can do without, by the time it took, and its share of the machine's "
    "measured peak. calls: of the joint and the predictor, what they start on a GPU, waits for a "
    "GPU. shape: of losses B×T×U1×V, of decoders B×T×D×V or B×T×V, of encoders B×T×D×blocks, of "
    "features and precision B×T×F. noise: error over what tells frames apart; flips: share of "
    "frames with another best token; kl: nats a frame; token_errors: edits of the tokens over "
    "their number; all against float64. With random weights these four say nothing of a trained "
    "model."
)


def table(records: Iterable[Record]) -> list[str]:
    """Lines of text, one for each arm: time, ratios, memory, rates of the least work, calls.

    Records for which a suite declares a table of its own (`Suite.tables`) come last, in that.
    """
    general, own = _split(records)
    lines: list[str] = []
    if general or not any(own.values()):
        lines = _arms_table(general)
    for suite in SUITES.values():
        for what, print_own in suite.tables.items():
            lines += print_own(own[what])
    return lines


def legend(records: Iterable[Record]) -> list[str]:
    """What the columns of `table` mean, as a list of one line; empty if nothing needs it."""
    general, _ = _split(records)
    if not general:
        return []
    return [LEGEND]


def _split(records: Iterable[Record]) -> tuple[list[Record], dict[str, list[Record]]]:
    """Records for the general table, and by `what` those with a table of their own."""
    general: list[Record] = []
    own: dict[str, list[Record]] = {what: [] for suite in SUITES.values() for what in suite.tables}
    for record in records:
        own.get(record["what"], general).append(record)
    return general, own


def _arms_table(records: Sequence[Record]) -> list[str]:
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        key = _row_key(record)
        row = rows.setdefault(key, dict(zip(COLUMNS, key, strict=False)))
        _add(row, record)
    columns = [name for name in COLUMNS if any(row.get(name) for row in rows.values())]
    cells = [[row.get(name, "") for name in columns] for row in rows.values()]
    return aligned([columns, *cells])


def _row_key(record: Record) -> tuple[str, str, str]:
    """The first three columns, by which records share a line."""
    params = record["params"]
    what = " ".join(filter(None, (record["what"], params.get("preset"))))
    shape = "×".join(map(str, params.get("shape", [])))
    implementation = record["impl"]
    if record["unit"] in ("nats", "fraction") and "random" in params.get("weights", ""):
        implementation += " (random weights)"
    if params.get("dtype") == "bfloat16" and "bfloat16" not in implementation:
        implementation += " (bfloat16)"
    return what, shape, implementation


def _add(row: dict[str, str], record: Record) -> None:
    """Put the value of a record into its row."""
    params = record["params"]
    metric = record["metric"]
    unit, size = UNITS.get(record["unit"], (record["unit"], 1))
    value = f"{record['value'] / size:.3g}"
    if metric == "ratio" and "arms" in params:
        _append(row, "times as fast as", f"{params['arms'][0]} {value}")
    elif metric not in METRIC_COLUMNS:
        _append(row, "also", f"{metric} {value} {unit}".rstrip())
    elif metric in WITHOUT_UNIT:
        row[METRIC_COLUMNS[metric]] = value
    else:
        row[METRIC_COLUMNS[metric]] = f"{value} {unit}"
    if metric == "latency":
        stats = record["stats"]
        row["quartiles"] = f"{stats['p25'] / size:.3g}–{stats['p75'] / size:.3g}"
        row["least work"] = _least_work(record)
        counted = [f"{params[key]} {name}" for key, name in COUNTS.items() if key in params]
        row["calls"] = ", ".join(counted)


def _append(row: dict[str, str], column: str, text: str) -> None:
    if row.get(column):
        text = f"{row[column]}, {text}"
    row[column] = text


def _least_work(record: Record) -> str:
    """Rates of the least work, floor_FLOP and floor_B, with shares of the measured peaks."""
    rates = []
    for key, least in record["params"].items():
        if not key.startswith("floor_"):
            continue
        unit = key.removeprefix("floor_")
        giga_per_s = least / record["value"] / 1e6
        text = f"{giga_per_s:.3g} G{unit}/s"
        peak = record["params"].get(f"peak_{unit}")
        if peak:
            text += f" ({1e9 * giga_per_s / peak:.0%})"
        rates.append(text)
    return ", ".join(rates)
