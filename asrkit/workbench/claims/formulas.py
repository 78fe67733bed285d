"""Formulas of the claims that asrkit ships: arithmetic, means and extremes."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "mean": lambda *values: statistics.fmean(values),
    "stdev": lambda *values: statistics.stdev(values),
    "pstdev": lambda *values: statistics.pstdev(values),
}


def evaluate(formula: str, params: Mapping[str, Any]) -> float:
    """The value of an expression.

    Args:
        formula: Numbers, names, operators, comparisons, and calls of max, min, mean, stdev, pstdev.
        params: Values of the names.
    """
    return eval(formula, {"__builtins__": {}, **FUNCTIONS, **params})
