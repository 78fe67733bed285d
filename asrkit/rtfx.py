"""RTFx, the speed of a recogniser, as commands, records and notebooks report it."""


def rtfx(speech_s: float, compute_s: float) -> float:
    """Seconds of speech that are recognised in a second: 100 is 100 times faster than real time."""
    return speech_s / compute_s
