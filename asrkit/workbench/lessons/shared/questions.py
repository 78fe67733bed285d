"""Checks of a reader's answers; each prints one line below the question.

A question of a notebook is four cells: its text, a cell tagged `exercise` that sets the answer to
None, a check tagged `exercise` and `hide-input`, and a folded solution.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asrkit.shapes import count

CLOSE = 1e-6  # relative distance of numbers that count as equal


def check(answer: Any, right: Any, why: str = "", *, within: float = CLOSE, hint: str = "") -> None:
    """Print whether an answer is right.

    Args:
        answer: A number, text, tensor or list; None: not answered yet.
        right: The right answer.
        why: Sentence that is printed after a right answer.
        within: Relative distance at which numbers still count as right.
        hint: Sentence that is printed after a wrong answer.
    """
    if answer is None:
        print("Not answered yet.")
    elif _is_same(answer, right, within):
        print(f"Right. {why}".rstrip())
    else:
        print(f"Not yet: {_short(answer)}. {hint}".rstrip())


def check_calls(
    function: Callable[..., Any],
    cases: Sequence[tuple[Sequence[Any], Any]],
    why: str = "",
    *,
    within: float = CLOSE,
    hint: str = "",
) -> None:
    """Print whether a function returns what it should, or its first wrong result.

    Args:
        function: The function that the reader wrote; it returns None until then.
        cases: (arguments, right result) of each call.
        why: Sentence that is printed if all results are right.
        within: Relative distance at which numbers still count as right.
        hint: Sentence that is printed after a wrong result.
    """
    for number, (arguments, right) in enumerate(cases):
        answer = function(*copy.deepcopy(arguments))  # which a function may change
        if answer is None and number == 0:
            print("Not answered yet.")
            return
        if not _is_same(answer, right, within):
            name = getattr(function, "__name__", "your function")
            call = f"{name}({', '.join(map(_short, arguments))})"
            print(f"Not yet: {call} returns {_short(answer)}, not {_short(right)}. {hint}".rstrip())
            return
    print(f"Right in {count(len(cases), 'case')}. {why}".rstrip())


def compare(prediction: float | str | None, measured: float | str, unit: str = "") -> None:
    """Print a prediction beside what was measured.

    Args:
        prediction: What the reader expected, a number in `unit` or a name; None: nothing.
        measured: What this machine measured.
        unit: Unit of both; empty for names.
    """
    found = measured if isinstance(measured, str) else f"{measured:.3g} {unit}".rstrip()
    if prediction is None:
        print(f"No prediction; measured: {found}.")
    elif isinstance(prediction, str) or isinstance(measured, str):
        verdict = "as predicted" if prediction == measured else f"predicted was {prediction}"
        print(f"Measured: {found}, {verdict}.")
    else:
        ratio = f", {measured / prediction:.2f} times as much" if prediction else ""
        print(f"Predicted: {prediction:.3g} {unit}; measured: {found}{ratio}.")


def _is_same(answer: Any, right: Any, within: float) -> bool:
    """Whether two values are equal, or have the same shape and close numbers."""
    if isinstance(answer, str) and isinstance(right, str):
        return answer.strip().casefold() == right.casefold()
    if isinstance(answer, torch.Tensor):  # NumPy takes no bfloat16 and no tensor with a gradient
        answer = answer.detach().double().cpu()
    try:
        found, wanted = np.asarray(answer, dtype=float), np.asarray(right, dtype=float)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # not numbers
        return type(answer) is type(right) and bool(answer == right)
    return found.shape == wanted.shape and np.allclose(found, wanted, rtol=within, atol=1e-9)


def _short(value: Any) -> str:
    """A value in at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
