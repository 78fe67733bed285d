"""How processes end, and what errors say, in one line each; this file loads no torch."""


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
