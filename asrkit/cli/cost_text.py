"""What `asrkit cost` prints for people."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asrkit.cli.command import count, table_width

LEGEND = "RTFx: seconds of speech that one core or GPU transcribes in a second"


def cost_lines(args: argparse.Namespace, result: Mapping[str, Any]) -> Iterable[str]:
    """The lines of the text: tables of costs, sources and break-even, then what was assumed.

    Args:
        args: As the parser returns them.
        result: What --json prints.
    """
    rows = result["rows"]
    yield from _cost_table(rows, result["hours"])
    yield LEGEND
    yield ""
    yield from _source_table(rows)
    break_even = _break_even_table(rows)
    if break_even:
        yield ""
        yield from break_even
    if result["left_out"]:
        missing = "RTFx"
        if args.model:
            missing += f" of {args.model}"
        if args.measured:
            missing += " measured on such cores"
        yield ""
        yield f"left out: {', '.join(result['left_out'])}: no {missing} is known"
    if result.get("cores_over_gpus"):
        ratio = _range_text(result["cores_over_gpus"])
        model = result["model"] or "at the RTFx given"
        yield ""
        yield f"{model}: the cheapest on cores costs {ratio} times as much as the cheapest on GPUs"
    elif "cores_over_gpus" in result:
        yield ""
        yield "no model here has an RTFx on cores and on GPUs: what they cost is not compared"
    yield from _assumptions(rows, result.get("unequal", []))
    if args.document:
        yield from _unstated()


def _assumptions(rows: Sequence[Mapping[str, Any]], unequal: Sequence[str]) -> Iterable[str]:
    instances: dict[str, list[str]] = {}  # by caveat
    for row in rows:
        for caveat in row["caveats"]:
            names = instances.setdefault(caveat, [])
            if row["instance"] not in names:
                names.append(row["instance"])
    if instances or unequal:
        yield ""
        yield "assumptions"
    for caveat, names in instances.items():
        yield f"  {', '.join(names)}: {caveat}"
    for difference in unequal:
        yield f"  the cheapest of each: {difference}"


def _unstated() -> Iterable[str]:
    """What document 000 leaves open, and what is assumed here instead."""
    from asrkit.workbench import cost, ledger

    sources = {claim.id: claim.source for claim in ledger.load_claims()}
    source = sources["cpu-rtfx-parakeet"]
    yield ""
    yield f"not stated in document 000, {source['title']} ({source['url']})"
    for row in cost.stated_inputs():
        if not row["stated"]:
            yield f"  {row['input']}; here {row['taken']}"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Aligned lines, one for each row, below the keys of the first row."""
    from asrkit.workbench.tables import aligned

    cells = [[*rows[0]], *([*row.values()] for row in rows)]
    return aligned(cells, width=table_width())


def _cost_table(rows: Sequence[Mapping[str, Any]], hours: float) -> list[str]:
    """What each row costs; ranges as middle (lowest–highest)."""
    table = []
    for number, row in enumerate(rows, 1):
        cells = {
            "#": str(number),
            "instance": row["instance"],
            "units": count(row["units"], row["per"]),
            "RTFx of one": _range_text(row["rtfx"]),
            "batch": str(row["batch"] or "–"),
            "USD/1M hours": _range_text(row["usd_per_million_hours"]),
        }
        if hours != 1e6:
            cells[f"USD/{hours:,.0f} hours"] = _range_text(row["usd"])
        table.append(cells | {"kWh": _range_text(row["kWh"])})
    return _table(table)


def _source_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Model and source of the RTFx of each row of the table of costs."""
    table = []
    for number, row in enumerate(rows, 1):
        source = ", ".join(filter(None, [row["origin"], row["device"], row["date"]]))
        table.append({"#": str(number), "model": row["model"] or "–", "RTFx is from": source})
    return _table(table)


def _break_even_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The RTFx at which an instance would cost as much as another; empty where there is none."""
    table: list[dict[str, str]] = []
    for row in rows:
        if not row["break_even_rtfx"]:
            continue
        cells = {
            "instance": row["instance"],
            "costs as much as": row["against"],
            "at an RTFx of": _range_text(row["break_even_rtfx"]),
        }
        if cells not in table:
            table.append(cells)
    if not table:
        return []
    return _table(table)


def _range_text(ends: Sequence[float] | None) -> str:
    from asrkit.workbench.cost import Range

    if not ends:
        return "–"
    return str(Range(*ends))
