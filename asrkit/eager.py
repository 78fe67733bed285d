"""Losses and decoders stay out of torch.compile: they read lengths on the host, run kernels that it cannot see into, and loop
as often as what they find asks for."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable when it is first needed: as a decorator it would load the whole compiler on import."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
