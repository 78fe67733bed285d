"""Records of benchmarks as tables of text: a table for each case, a row for each arm."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from asrkit.workbench.records import Record
from asrkit.workbench.tables import aligned, paragraph, percent, three_digits

UNITS = {  # unit of a record: unit in the table, and its size
    "1": ("", 1),
    "s/s": ("", 1),
    "B": (" MiB", 2**20),
    "FLOP/s": (" GFLOP/s", 1e9),
    "B/s": (" GB/s", 1e9),
}
COUNTS = {  # param: its name in the column "calls"
    "join": "joint",
    "predict": "predictor",
    "follow": "decoder",
    "launches": "launches",
    "syncs": "waits",
}
COLUMNS = {"latency": "time", "rtfx": "RTFx", "cpu_time": "CPU time", "peak_memory": "memory"}
HEADINGS = {  # param: its column in a table of rows
    "duration_s": "seconds",
    "encoder": "encoder layers",
    "decoder": "decoder layers",
}
GRID = "joint-memory"  # a case whose arm is measured at many sizes
FILES, LONG, COLD = "files-", "long-", "cold-"  # cases of whole programs
PROGRAM_COLUMNS = ["RTFx", "RTFx per core", "memory", "cold command", "wer", "same texts"]
LADDER = "ladder-"
LADDER_COLUMNS = ["time", "RTFx", "of the baseline", "of the step before", "published"]
LEGEND = {  # text in a table -> its meaning
    "times as fast as": "another arm's time over this one's",
    "CPU time": "of all threads",
    "per core": "seconds of audio in a second of CPU time",
    "cold command": "from its start to the text of one file; import_torch: torch alone",
    "same texts": "as asrkit in float32",
    "least work": "work that no implementation can avoid, over the measured time, and its share of "
    "the machine's measured peak",
    "calls": "calls of the joint and the predictor, or of an attention decoder; kernels launched "
    "on a GPU, waits for a GPU",
    "of the baseline": "times the speed of the baseline, which the first step follows",
    "published": "the gain of this step in NVIDIA's account of NeMo, in some cases of decoding "
    "alone, and its claim in `asrkit ledger`; its graphs are of label looping",
    "×": "the shape after a name: B×T×U1×V for losses, B×T×D×V or B×T×V for decoders, "
    "B×T×D×layers for attention decoders, B×T×D for whole models, B×T×D×blocks for encoders, "
    "B×T×F for features",
}


def legend(lines: Iterable[str]) -> list[str]:
    """Lines that explain the terms in a table."""
    text = "\n".join(lines)
    terms = [f"{name}: {meaning}." for name, meaning in LEGEND.items() if name in text]
    return paragraph(" ".join(terms)) if terms else []


def table(records: Iterable[Record], *, width: int = 0) -> list[str]:
    """Lines of text: for each case its name and a table with a row for each arm.

    Args:
        records: records of any suites.
        width: longest line, in columns; 0: no limit. Longer rows are wrapped, see `tables.aligned`.
    """
    cases: dict[str, dict[str, dict[str, str]]] = {}
    records = [*records]
    for record in records:
        if record["what"] == GRID:
            continue
        arms = cases.setdefault(_heading(record), {})
        row = arms.setdefault(record["impl"], {})
        cells = _program_cells if record["what"].startswith((FILES, LONG, COLD)) else _cells
        for column, text in cells(record):
            row[column] = f"{row[column]}, {text}" if column in row else text
    lines: list[str] = []
    for heading, arms in cases.items():
        columns = list(dict.fromkeys(column for row in arms.values() for column in row))
        if heading.startswith(LADDER):
            columns = LADDER_COLUMNS
        if heading.startswith((FILES, LONG)):
            columns = [column for column in PROGRAM_COLUMNS if column in columns]
        rows = [[arm, *(row.get(column, "") for column in columns)] for arm, row in arms.items()]
        lines += ["", heading, *aligned([["", *columns], *rows], width=width)]
    if sizes := pivot(GRID, ("B", "T", "U1", "V", "dtype"), grid_columns, records):
        lines += ["", GRID, *rows_table(sizes, width=width)]
    return lines[1:]


def grid_columns(record: Record) -> dict[str, float]:
    """Columns of a record of the memory grid: its peak and the counted one."""
    peaks = {"measured": record["value"], "counted": record["params"]["counted"]}
    return {f"{name}, MiB": peak / 2**20 for name, peak in peaks.items()}


def pivot(
    what: str,
    keys: Sequence[str],
    columns: Callable[[Record], Mapping[str, Any]],
    records: Iterable[Record],
) -> list[dict[str, Any]]:
    """Rows of a table, sorted: one for each combination of params in the records of a case.

    Args:
        what: the case.
        keys: params that identify a row.
        columns: columns of a record, in the row that its params identify.
        records: records of any cases.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        if record["what"] == what:
            row = {HEADINGS.get(key, key): record["params"][key] for key in keys}
            rows.setdefault((*row.values(),), row).update(columns(record))
    return [rows[key] for key in sorted(rows)]


def rows_table(rows: Sequence[Mapping[str, Any]], *, width: int = 0) -> list[str]:
    """Lines of text: a table of rows, whose keys are the headings.

    Args:
        rows: numbers or words by column.
        width: longest line, as of `table`.
    """
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    cells = [[row.get(column, "") for column in columns] for row in rows]
    texts = [
        [three_digits(cell) if isinstance(cell, float) else str(cell) for cell in row]
        for row in cells
    ]
    return aligned([columns, *texts], width=width)


def _heading(record: Record) -> str:
    """The case of a record: what, preset, shape, and the kind of weights. A cold command of a
    program is in the case of its files.
    """
    params = record["params"]
    shape = "×".join(map(str, params.get("shape", ())))
    what = re.sub(f"^{COLD}", FILES, record["what"])
    words = [what, params.get("preset"), params.get("case"), shape]
    if "weights" in params:
        words.append(f"({params['weights']} weights)")
    return " ".join(filter(None, words))


def _cells(record: Record) -> Iterator[tuple[str, str]]:
    """The cells of a record: (column, text)."""
    metric = record["metric"]
    params = record["params"]
    unit, size = UNITS.get(record["unit"], (f" {record['unit']}", 1))
    value = three_digits(record["value"] / size)
    column = COLUMNS.get(metric, metric.replace("_", " "))
    if record["what"].startswith(LADDER) and metric == "ratio":
        if params["arms"][0] == "baseline":
            yield "of the baseline", value
            yield "published", params.get("published", "")
        else:
            yield "of the step before", value
    elif metric == "ratio" and "arms" in params:
        yield "times as fast as", f"{params['arms'][0]} {value}"
    elif record["unit"] == "fraction":
        text = percent(record["value"], 2)
        if "low" in params:
            text += f" [{percent(params['low'], 2)}, {percent(params['high'], 2)}]"
        yield column, text.replace(" %", "\u00a0%")  # no line break there
    elif record["unit"] == metric:
        yield column, value
    else:
        yield column, value + unit.replace(" ", "\u00a0")
    if metric == "latency":
        low, high = record["stats"]["p25"], record["stats"]["p75"]
        yield "quartiles", f"{three_digits(low)}–{three_digits(high)}"
        rates = ", ".join(_least_work(record))
        if rates:
            yield "least work", rates
        calls = [f"{params[key]} {name}" for key, name in COUNTS.items() if key in params]
        if calls:
            yield "calls", ", ".join(calls)


def _program_cells(record: Record) -> Iterator[tuple[str, str]]:
    """The cells of a record of a whole program: of its files, or of a cold command."""
    params, value = record["params"], record["value"]
    match record["metric"]:
        case "latency" if record["what"].startswith(COLD):
            yield "cold command", f"{three_digits(value / 1e3)}\u00a0s"
        case "latency":
            yield "same texts", f"{params['same_texts']} of {params['files']}"
        case "cpu_time":
            yield "RTFx per core", three_digits(1e3 * params["audio_s"] / value)
        case _:
            yield from _cells(record)


def _least_work(record: Record) -> Iterator[str]:
    """The least work, floor_FLOP and floor_B, as rates and as shares of the measured peaks."""
    params = record["params"]
    for unit in ("FLOP", "B"):
        if f"floor_{unit}" in params:
            rate = 1e3 * params[f"floor_{unit}"] / record["value"]
            share = ""
            if f"peak_{unit}" in params:
                share = f" ({percent(rate / params[f'peak_{unit}'])})".replace(" %", "\u00a0%")
            yield f"{three_digits(rate / 1e9)} G{unit}/s{share}"
