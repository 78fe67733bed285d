"""Records of benchmarks as tables of text: a table for each case, a row for each arm."""

from collections.abc import Iterable, Iterator

from asrkit.workbench.records import Record
from asrkit.workbench.tables import aligned, paragraph, percent, three_digits

UNITS = {  # of records: their unit in the table, and its size
    "1": ("", 1),
    "s/s": ("", 1),
    "B": (" MiB", 2**20),
    "FLOP/s": (" GFLOP/s", 1e9),
    "B/s": (" GB/s", 1e9),
}
COUNTS = {  # params: what is called in the column "calls"
    "join": "joint",
    "predict": "predictor",
    "follow": "decoder",
    "launches": "launches",
    "syncs": "waits",
}
COLUMNS = {"latency": "time", "rtfx": "RTFx", "cpu_time": "CPU time", "peak_memory": "memory"}
LEGEND = {  # what stands in a table -> what it means
    "times as fast as": "another arm's time over this one's",
    "CPU time": "of all threads",
    "least work": "what no implementation can do without, by the time it took, and its share of "
    "the machine's measured peak",
    "calls": "of the joint and the predictor, or of a decoder by attention; what they start on a "
    "GPU, waits for a GPU",
    "×": "behind a name its shape: of losses B×T×U1×V, of decoders B×T×D×V or B×T×V, of decoders "
    "by attention B×T×D×layers, of whole models B×T×D, of encoders B×T×D×blocks, of features "
    "B×T×F",
}


def legend(lines: Iterable[str]) -> list[str]:
    """Lines on what the words mean that stand in the lines of a table."""
    text = "\n".join(lines)
    found = [f"{name}: {meaning}." for name, meaning in LEGEND.items() if name in text]
    return paragraph(" ".join(found)) if found else []


def table(records: Iterable[Record], *, width: int = 0) -> list[str]:
    """Lines of text, a table for each case below its name, with a row for each arm.

    Args:
        records: of any suites.
        width: longest line, in columns; 0 for any. Longer rows are wrapped, see `tables.aligned`.
    """
    cases: dict[str, dict[str, dict[str, str]]] = {}
    for record in records:
        arms = cases.setdefault(_heading(record), {})
        row = arms.setdefault(record["impl"], {})
        for column, text in _cells(record):
            row[column] = f"{row[column]}, {text}" if column in row else text
    lines: list[str] = []
    for heading, arms in cases.items():
        columns = list(dict.fromkeys(column for row in arms.values() for column in row))
        rows = [[arm, *(row.get(column, "") for column in columns)] for arm, row in arms.items()]
        lines += ["", heading, *aligned([["", *columns], *rows], width=width)]
    return lines[1:]


def _heading(record: Record) -> str:
    """The case of a record: what, preset, shape, and whether its weights are random or trained."""
    params = record["params"]
    shape = "×".join(map(str, params.get("shape", ())))
    words = [record["what"], params.get("preset"), params.get("case"), shape]
    if "weights" in params:
        words.append(f"({params['weights']} weights)")
    return " ".join(filter(None, words))


def _cells(record: Record) -> Iterator[tuple[str, str]]:
    """Columns, and what a record puts into them."""
    metric = record["metric"]
    params = record["params"]
    unit, size = UNITS.get(record["unit"], (f" {record['unit']}", 1))
    value = three_digits(record["value"] / size)
    column = COLUMNS.get(metric, metric.replace("_", " "))
    if metric == "ratio" and "arms" in params:
        yield "times as fast as", f"{params['arms'][0]} {value}"
    elif record["unit"] == "fraction":
        text = percent(record["value"], 2)
        if "low" in params:
            text += f" [{percent(params['low'], 2)}, {percent(params['high'], 2)}]"
        yield column, text.replace(" %", "\u00a0%")  # no line is broken there
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


def _least_work(record: Record) -> Iterator[str]:
    """Rates of the least work, floor_FLOP and floor_B, with shares of the measured peaks."""
    params = record["params"]
    for unit in ("FLOP", "B"):
        if f"floor_{unit}" in params:
            rate = 1e3 * params[f"floor_{unit}"] / record["value"]
            share = ""
            if f"peak_{unit}" in params:
                share = f" ({percent(rate / params[f'peak_{unit}'])})".replace(" %", "\u00a0%")
            yield f"{three_digits(rate / 1e9)} G{unit}/s{share}"
