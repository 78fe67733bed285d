"""How processes end, and what errors say, in one line each; this file loads no torch."""

import sys

MOST_FAULTS = 20  # processes in a row that an error in asrkit ends


class Faults:
    """Errors in asrkit that ended processes in a row; stderr has the traceback of the first one."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._traced = False

    def note(self, trace: str) -> None:
        """Count one.

        Args:
            trace: Its traceback.
        """
        if not self._traced:
            print(trace, file=sys.stderr, flush=True)
        self._traced = True
        self.in_a_row += 1

    def forget(self) -> None:
        """Count from 0 again, since a process has finished something."""
        self.in_a_row = 0

    @property
    def too_many(self) -> bool:
        """Whether to give up."""
        return self.in_a_row >= MOST_FAULTS


def how_it_ended(code: int) -> str:
    """How a process ended: "signal 9", or "exit code 1".

    Args:
        code: Its exit code, as Python has it: below 0 where a signal ended the process.
    """
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code}"


def message(error: BaseException) -> str:
    """What an error of asrkit's says; the name of its class where that is nothing.

    Args:
        error: Any.
    """
    return " ".join(str(error).split()) or type(error).__name__


def class_and_message(error: BaseException) -> str:
    """What an error says that asrkit did not expect: "KeyError: 'x'".

    Args:
        error: Any.
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"
