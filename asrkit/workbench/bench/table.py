"""Records of benchmarks as tables of text: a line for each arm."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asrkit.workbench.bench.suites import SUITES
from asrkit.workbench.tables import aligned, percent

Record = Mapping[str, Any]
PERCENT = "\u00a0%"  # which no line is broken before
UNITS = {  # of records: their unit in the table, and its size
    "1": ("", 1),
    "B": ("MiB", 2**20),
    "FLOP/s": ("GFLOP/s", 1e9),
    "B/s": ("GB/s", 1e9),
}
COUNTS = {  # params: what is called in the column "calls"
    "join": "joint",
    "predict": "predictor",
    "follow": "decoder",
    "launches": "launches",
    "syncs": "waits",
}
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
    "measured peak. calls: of the joint and the predictor, or of a decoder by attention, what they "
    "start on a GPU, waits for a GPU. shape: of losses B×T×U1×V, of decoders B×T×D×V or B×T×V, of "
    "decoders by attention B×T×D×layers, of whole models B×T×D, of encoders B×T×D×blocks, of "
    "features and precision B×T×F. token_errors: edits of the tokens over their number, against "
    "float64."
)


def table(records: Iterable[Record], *, width: int = 0) -> list[str]:
    """Lines of text, a row for each arm: time, ratios, memory, rates of the least work, calls.

    Records that a suite declares as `pivoted` come last, a column for each metric.

    Args:
        records: of any suites.
        width: longest line, in columns; 0 for any. Longer rows are wrapped, see `tables.aligned`.
    """
    general, pivoted = _split(records)
    lines: list[str] = []
    if general or not pivoted:
        lines = _arms_table(general, width)
    return lines + _pivot(pivoted, width)


def legend(records: Iterable[Record]) -> list[str]:
    """What the columns of `table` mean, as a list of one line; empty if nothing needs it."""
    general, _ = _split(records)
    if not general:
        return []
    return [LEGEND]


def _split(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """Records for the table of times, and those of which each metric has a column."""
    names = {what for suite in SUITES.values() for what in suite.pivoted}
    general: list[Record] = []
    pivoted: list[Record] = []
    for record in records:
        (pivoted if record["what"] in names else general).append(record)
    return general, pivoted


def _pivot(records: Iterable[Record], width: int) -> list[str]:
    """A table for each `case` of the params, below its name: a row an arm, a column a metric."""
    cases: dict[str, dict[str, dict[str, str]]] = {}
    for record in records:
        arms = cases.setdefault(f"{record['what']}: {record['params']['case']}", {})
        column = record["metric"].replace("_", " ")
        if record["unit"] != "fraction":
            column += f", {record['unit']}"
        arms.setdefault(record["impl"], {})[column] = _cell(record)
    lines: list[str] = []
    for heading, arms in cases.items():
        columns = [*dict.fromkeys(column for cells in arms.values() for column in cells)]
        rows = [["", *columns]]
        for arm, cells in arms.items():
            rows.append([arm, *(cells.get(column, "") for column in columns)])
        lines += [heading, *aligned(rows, right=range(1, len(columns) + 1), width=width)]
    return lines


def _cell(record: Record) -> str:
    """A value, a share in per cent, with its interval where the params have one; not wrapped."""
    params = record["params"]
    if record["unit"] != "fraction":
        return f"{record['value']:.3g}"
    text = percent(record["value"], 2)
    if "low" in params:
        text += f" [{percent(params['low'], 2)}, {percent(params['high'], 2)}]"
    return text.replace(" %", PERCENT)


def _arms_table(records: Sequence[Record], width: int) -> list[str]:
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        key = _row_key(record)
        if key not in rows:
            what, shape, implementation = key
            rows[key] = {"what": what, "shape": shape, "implementation": implementation}
        _add(rows[key], record)
    filled = set()
    for row in rows.values():
        filled |= {name for name, cell in row.items() if cell}
    columns = [name for name in COLUMNS if name in filled]
    cells = [[row.get(name, "") for name in columns] for row in rows.values()]
    lines = aligned([columns, *cells])
    if not width or max(map(len, lines), default=0) <= width:
        return lines
    return _by_case(list(rows.values()), columns, width)


def _by_case(rows: Sequence[Mapping[str, str]], columns: Sequence[str], width: int) -> list[str]:
    """A table for each case below its name and shape, which saves the width of two columns."""
    cases: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        cases.setdefault(f"{row['what']} {row['shape']}".rstrip(), []).append(row)
    lines: list[str] = []
    for case, arms in cases.items():
        filled = [name for name in columns if any(arm.get(name) for arm in arms)]
        names = [name for name in filled if name not in ("what", "shape")]
        cells = [[arm.get(name, "") for name in names] for arm in arms]
        lines += ["", case, *aligned([names, *cells], width=width)]
    return lines[1:]


def _row_key(record: Record) -> tuple[str, str, str]:
    """The first three columns, by which records share a line."""
    params = record["params"]
    what = record["what"]
    if params.get("preset"):
        what += f" {params['preset']}"
    sizes = params.get("shape", [])
    shape = "×".join(map(str, sizes))
    implementation = record["impl"]
    weights = params.get("weights", "")
    if record["unit"] in ("nats", "fraction") and "random" in weights:
        implementation += " (random weights)"
    dtype = params.get("dtype")
    if dtype == "bfloat16" and "bfloat16" not in implementation:
        implementation += " (bfloat16)"
    return what, shape, implementation


def _add(row: dict[str, str], record: Record) -> None:
    """Put the value of a record into its row."""
    params = record["params"]
    metric = record["metric"]
    unit, size = UNITS.get(record["unit"], (record["unit"], 1))
    value = f"{record['value'] / size:.3g}"
    if metric == "ratio" and "arms" in params:
        slow = params["arms"][0]
        _append(row, "times as fast as", f"{slow} {value}")
    elif metric not in METRIC_COLUMNS:
        text = f"{metric} {value} {unit}"
        _append(row, "also", text.rstrip())
    elif metric in WITHOUT_UNIT:
        column = METRIC_COLUMNS[metric]
        row[column] = value
    else:
        column = METRIC_COLUMNS[metric]
        row[column] = f"{value} {unit}"
    if metric == "latency":
        low = record["stats"]["p25"] / size
        high = record["stats"]["p75"] / size
        row["quartiles"] = f"{low:.3g}–{high:.3g}"
        row["least work"] = _least_work(record)
        row["calls"] = _calls(params)


def _calls(params: Mapping[str, Any]) -> str:
    """What an arm calls, as far as its params tell."""
    calls = []
    for key, name in COUNTS.items():
        if key in params:
            calls.append(f"{params[key]} {name}")
    return ", ".join(calls)


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
            text += f" ({100e9 * giga_per_s / peak:.0f} %)"
        rates.append(text)
    return ", ".join(rates)
