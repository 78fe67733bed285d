"""What `asrkit cost` prints for people."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asrkit.cli.command import count, table_width

LEGEND = "RTFx: seconds of speech that one core or GPU transcribes in a second"
WIDER = (  # why these costs differ from those of notebook 12
    "a row for each RTFx that is known, published or recorded; document 000 and notebook 12\n"
    "compare the published ones of c7a.48xlarge and p4de.24xlarge alone (--document)"
)


def cost_lines(result: Mapping[str, Any]) -> Iterable[str]:
    """The lines of the text: tables of costs and of sources, then what was assumed.

    Args:
        result: What --json prints.
    """
    rows = result["rows"]
    yield from _table([_cost_cells(*row, result["hours"]) for row in enumerate(rows, 1)])
    yield LEGEND
    if any(row["origin"] == "recorded" for row in rows):
        yield WIDER
    yield ""
    yield from _table([_source_cells(*row) for row in enumerate(rows, 1)])
    yield ""
    if result["left_out"]:
        yield f"left out, for want of an RTFx: {', '.join(result['left_out'])}"
    if "cores_over_gpus" in result:
        ratio = _range_text(result["cores_over_gpus"])
        model = result["model"] or "at the RTFx given"
        yield f"{model}: the cheapest on cores costs {ratio} times as much as the cheapest on GPUs"
    caveats = dict.fromkeys(caveat for row in rows for caveat in row["caveats"])
    if caveats:
        yield "assumptions"
    for caveat in caveats:
        names = dict.fromkeys(row["instance"] for row in rows if caveat in row["caveats"])
        yield f"  {', '.join(names)}: {caveat}"
    for difference in result.get("unequal", []):
        yield f"  the cheapest of each: {difference}"
    if "not_stated" in result:
        yield from _unstated(result["not_stated"])


def _unstated(taken: Mapping[str, str]) -> Iterable[str]:
    """What document 000 leaves open, and what is assumed here instead."""
    from asrkit.workbench import claims as ledger

    sources = {claim.id: claim.source for claim in ledger.load_claims()}
    source = sources["cpu-rtfx-parakeet"]
    yield ""
    yield f"not stated in document 000, {source['title']} ({source['url']})"
    for name, value in taken.items():
        yield f"  {name}; here {value}"


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Aligned lines, one for each row, below the keys of the first row."""
    from asrkit.workbench.tables import aligned

    cells = [[*rows[0]], *([*row.values()] for row in rows)]
    return aligned(cells, width=table_width())


def _cost_cells(number: int, row: Mapping[str, Any], hours: float) -> dict[str, str]:
    """What a row costs; ranges as middle (lowest–highest)."""
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
    return cells | {"kWh": _range_text(row["kWh"])}


def _source_cells(number: int, row: Mapping[str, Any]) -> dict[str, str]:
    """Model and source of a row's RTFx, and the RTFx at which it would cost as much as another."""
    return {
        "#": str(number),
        "model": row["model"] or "–",
        "RTFx is from": ", ".join(filter(None, [row["origin"], row["device"], row["date"]])),
        "costs as much as": row["against"] or "–",
        "at an RTFx of": _range_text(row["break_even_rtfx"]),
    }


def _range_text(ends: Sequence[float] | None) -> str:
    from asrkit.workbench.cost.money import range_text

    return range_text(ends)
