"""Functions that Numba compiles for the CPU, kept on disk where some folder can be written."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """`function`, compiled on first use by `njit` with `options`; it runs without Python's lock."""
    try:
        return njit(nogil=True, cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's: it is compiled in every process
        return njit(nogil=True, **options)(function)
