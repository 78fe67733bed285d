"""One form of per cent for all that people read: "26 %", whose parts no line break separates."""

import re

NO_BREAK_SPACE = "\u00a0"  # between a number and its unit
PERCENT = re.compile(r"(?<=\d)[ \u00a0]?%(?!\w)")


def space_percents(text: str) -> str:
    """`text` with a no-break space before the sign of each per cent: "26%" becomes "26 %"."""
    return PERCENT.sub(f"{NO_BREAK_SPACE}%", text)
