"""The formulas of claims, and the published tables that they are computed over."""

import functools
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from asrkit.workbench.claims.claims import Claim
from asrkit.workbench.tables import read_table

Line = Mapping[str, Any]
FUNCTIONS = {
    "max": max,
    "min": min,
    "mean": lambda *values: statistics.fmean(values),
    "pstdev": lambda *values: statistics.pstdev(values),
}


class GridLine(NamedTuple):
    """A line of a claim's grid: its name, the formula's value, and the printed value."""

    name: str
    value: float
    printed: float


def evaluate(formula: str, params: Mapping[str, Any]) -> float:
    """The value of an expression.

    Args:
        formula: Numbers, names, operators, comparisons, and calls to max, min, mean and pstdev.
        params: The value of each name.
    """
    return eval(formula, {"__builtins__": {}, **FUNCTIONS, **params})


@functools.cache
def published(name: str) -> list[Line]:
    """The lines of a table in data/published, with numbers as floats and empty cells left out."""
    rows = read_table(f"published/{name}")
    return [{key: _number_or_text(text) for key, text in row.items() if text} for row in rows]


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def grid_lines(claim: Claim) -> Iterator[GridLine]:
    """The lines of a claim's grid that count, and that have a line to be compared with."""
    lines = published(claim.grid)
    for line in lines:
        if claim.column in line or not claim.column:
            key_values = {key: line[key] for key in claim.keys}
            base_keys = key_values | dict(claim.base)
            base_lines = [other for other in lines if _matches(other, base_keys)]
            if base_lines and _matches(line, claim.where):
                (base,) = base_lines  # the keys identify one line
                base_params = {f"base_{key}": value for key, value in base.items()}
                value = evaluate(claim.formula, {**claim.params, **line, **base_params})
                name = ", ".join(_key_text(key, value) for key, value in key_values.items())
                yield GridLine(name, value, line.get(claim.column, 1.0))


def _matches(line: Line, conditions: Mapping[str, Any]) -> bool:
    """Whether each column has its value, or one of its list of values, in `conditions`."""
    for column, condition in conditions.items():
        values = condition if isinstance(condition, list) else [condition]
        if line.get(column) not in values:
            return False
    return True


def _key_text(column: str, value: float | str) -> str:
    if isinstance(value, float):
        return f"{column} {value:g}"
    return value
