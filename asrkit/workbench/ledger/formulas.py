"""Formulas of claims: arithmetic expressions that come from a file."""

import ast
import statistics
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from asrkit.shapes import expect

ARITHMETIC = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.operator,
    ast.unaryop,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Compare,
    ast.cmpop,
    ast.Call,
)


def _mean(*values: float) -> float:
    return statistics.fmean(values)


def _stdev(*values: float) -> float:
    return statistics.stdev(values)


def _pstdev(*values: float) -> float:
    return statistics.pstdev(values)


FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "mean": _mean,
    "stdev": _stdev,
    "pstdev": _pstdev,
}


def evaluate(formula: str, params: Mapping[str, Any]) -> float:
    """The value of an arithmetic expression, computed in floats.

    Whole numbers become floats, because one of a million digits would take for ever.

    Args:
        formula: Numbers, names, operators, comparisons, and calls of max, min, mean, stdev, pstdev.
        params: Values of the names.

    Raises:
        ValueError: The formula holds something else, or its value is not a finite number.
    """
    tree = ast.parse(formula, mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not _is_allowed(node, params, called=id(node) in called):
            raise ValueError(
                f"formula: expected numbers, {', '.join(params)} and operators, "
                f"got {ast.unparse(node)!r}."
            )
        if isinstance(node, ast.Constant):
            node.value = float(node.value)  # type: ignore[arg-type]
    names: dict[str, Any] = {"__builtins__": {}, **FUNCTIONS}
    for name, value in params.items():
        names[name] = value
        if isinstance(value, int | float):
            names[name] = float(value)
    value = eval(compile(tree, "formula", "eval"), names)
    is_finite = isinstance(value, int | float) and isfinite(value)
    expect(is_finite, "formula", "a finite number", repr(value))
    return value


def _is_allowed(node: ast.AST, params: Mapping[str, Any], *, called: bool) -> bool:
    if not isinstance(node, ARITHMETIC):
        return False
    if called:
        return isinstance(node, ast.Name) and node.id in FUNCTIONS
    if isinstance(node, ast.Name):
        return node.id in params
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    return True
