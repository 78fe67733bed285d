"""Published tables, and formulas computed for each of their lines."""

import csv
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from asrkit.files import shipped
from asrkit.workbench.claims.claims import Claim
from asrkit.workbench.claims.formulas import evaluate

Line = Mapping[str, Any]


class GridLine(NamedTuple):
    """A line of a claim's grid: its name, the formula's value, and what is printed there."""

    name: str
    value: float
    printed: float


@functools.cache
def published(name: str) -> list[Line]:
    """The lines of a table of data/published, numbers as floats.

    A cell that is empty in the table is no key of its line.
    """
    with shipped(f"published/{name}").open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: _number_or_text(text) for key, text in row.items() if text} for row in rows]


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def grid_lines(claim: Claim) -> Iterator[GridLine]:
    """The lines of a claim's grid that it means and that have a line to be compared with."""
    for line in published(claim.grid):
        lacks_column = bool(claim.column) and claim.column not in line
        if lacks_column or not _fits(line, claim.where):
            continue
        key_values = {key: line[key] for key in claim.keys}
        base_lines = [
            other for other in published(claim.grid) if _fits(other, key_values | dict(claim.base))
        ]
        if not base_lines:
            continue
        assert len(base_lines) == 1, f"{claim.id}: its keys name several lines"
        name = ", ".join(_named(key, value) for key, value in key_values.items())
        base_params = {f"base_{key}": value for key, value in base_lines[0].items()}
        value = evaluate(claim.formula, {**claim.params, **line, **base_params})
        yield GridLine(name, value, line.get(claim.column, 1.0))


def _fits(line: Line, conditions: Mapping[str, Any]) -> bool:
    """Whether each column has the value, or one of the list of values, that `conditions` name."""
    for column, wanted in conditions.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        if line.get(column) not in values:
            return False
    return True


def _named(column: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{column} {value:g}"
    return value
