"""Which arms must not run, and whether the device survived an error.

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
    """What a process died of: the title of a case, and an arm of it; arm "" for the whole case."""

    case: str
    arm: str

    def __str__(self) -> str:
        if not self.arm:
            return self.case
        return f"{self.arm} of {self.case}"


NO_BLAME = Blame("", "")


class DeviceLost(Exception):
    """The device answers no more.

    It is neither a RuntimeError nor a ValueError, so that code that catches those does not go on.
    """

    def __init__(self, blame: Blame, why: str) -> None:
        super().__init__(f"{blame}: the device is lost: {why}")
        self.blame = blame
        self.why = f"the device is lost: {why}"


def synchronize(device: str) -> None:
    """Wait for all work of a GPU; RuntimeError if any of it failed, or anything before it did."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def prove_alive(device: str, case: str, arm: str = "") -> None:
    """Raise DeviceLost, with this case and arm to blame, unless the device still answers.

    Args:
        device: to ask.
        case: title of the case.
        arm: name of the arm; "" for the whole case.
    """
    try:
        synchronize(device)
    except RuntimeError as error:
        raise DeviceLost(Blame(case, arm), str(error).partition("\n")[0]) from error


def guarded(call: Callable[..., Any], device: str, case: str, arm: str) -> Callable[..., Any]:
    """`call`, after whose errors the device is asked whether it still answers.

    Args:
        call: to wrap.
        device: to ask.
        case: title of the case to blame.
        arm: name of the arm to blame.
    """

    @wraps(call, assigned=())
    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception:
            prove_alive(device, case, arm)
            raise

    return run


def way(arm: str, what: str, dtype: str) -> str:
    """An arm with its case and arithmetic, for patterns that leave out more than a name does.

    Args:
        arm: name of the arm.
        what: of the case.
        dtype: of the arm.

    >>> way("windowed_looping", "rnnt-greedy", "float32")
    'rnnt-greedy in float32: windowed_looping'
    """
    return f"{what} in {dtype}: {arm}"


def barred(names: Pattern[str], arm: str, what: str, dtype: str = "float32") -> bool:
    """Whether a pattern leaves the arm out, by its name alone or as a `way`.

    Args:
        names: pattern of what to leave out.
        arm: name of the arm.
        what: of the case.
        dtype: of the arm.
    """
    return bool(names.search(arm) or names.search(way(arm, what, dtype)))


def without_lost(names: Pattern[str], lost: Iterable[Blame]) -> Pattern[str]:
    """`names` together with the cases, and arms as `way`s, that processes died of."""
    patterns = [names.pattern]
    for blame in lost:
        pattern = f"^{re.escape(blame.case)}"
        if blame.arm:
            pattern += rf" in \S+: {re.escape(blame.arm)}"
        patterns.append(f"{pattern}$")
    return re.compile("|".join(patterns))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing in this block name the file: the system's "No space left" names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, path.name) from error
        raise
