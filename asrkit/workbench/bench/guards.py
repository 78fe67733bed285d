"""What keeps a run from harm: arms that must not run, and a device that an error left dead.

A CUDA error such as an illegal address stays with its process: every later call fails as well. So
after an error the device is asked whether it still answers, and where it does not the process has
to end.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple

import torch


class Blame(NamedTuple):
    """What a process died of: a case by name, and an arm of it; arm "" for all of them."""

    case: str
    arm: str

    def __str__(self) -> str:
        return f"{self.arm} of {self.case}" if self.arm else self.case


class DeviceLost(Exception):
    """The device answers no more. Neither a RuntimeError nor a ValueError, so that nobody who lives
    with those goes on.
    """

    def __init__(self, blame: Blame, why: str) -> None:
        super().__init__(f"{blame}: the device is lost: {why}")
        self.blame, self.why = blame, f"the device is lost: {why}"


def synchronize(device: str) -> None:
    """Waits for all that a GPU was given; RuntimeError if any of it failed, or anything before it
    did.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def prove_alive(device: str, case: str, arm: str = "") -> None:
    """DeviceLost, with this case and arm to blame, unless the device still answers."""
    try:
        synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(Blame(case, arm), str(error).partition("\n")[0]) from error


def guarded(call: Callable[..., Any], device: str, case: str, arm: str) -> Callable[..., Any]:
    """`call`, after whose errors the device has to prove that it is alive."""

    @wraps(call, assigned=())
    def run(*given: Any) -> Any:
        try:
            return call(*given)
        except Exception:
            prove_alive(device, case, arm)
            raise

    return run


def way(arm: str, what: str, dtype: str) -> str:
    """An arm behind its case and arithmetic, as patterns of what is left out may want it.

    >>> way("windowed_looping", "rnnt-greedy", "float32")
    'rnnt-greedy in float32: windowed_looping'
    """
    return f"{what} in {dtype}: {arm}"


def barred(names: Pattern[str], arm: str, what: str, dtype: str = "float32") -> bool:
    """Whether `names` finds the arm, by its name alone or as a `way`."""
    return bool(names.search(arm) or names.search(way(arm, what, dtype)))


def without_lost(names: Pattern[str], lost: Iterable[Blame]) -> Pattern[str]:
    """`names`, and what is to blame for a process that died, arms as `way`s and whole cases."""
    more = [
        rf"^{re.escape(one.case)}" + (rf" in \S+: {re.escape(one.arm)}$" if one.arm else "$")
        for one in lost
    ]
    return re.compile("|".join([names.pattern, *more]))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing in this block name the file: the system's "No space left" names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path.name) from error
        raise
