"""Plain text tables, for every command that prints one, and one form of per cent.

Written here, not taken from tabulate: a bare GPU machine has no such package, so a second printer
would be needed beside it, and only the one that no test machine uses would run there.
"""

import itertools
import re
import textwrap
from collections.abc import Sequence

WIDTH = 100  # columns of a terminal that tables and sentences fit into
GAP = "  "  # between two columns
NO_BREAK_SPACE = "\u00a0"  # between a number and its unit
PERCENT = re.compile(r"(?<=\d)[ \u00a0]?%(?!\w)")


def aligned(rows: Sequence[Sequence[str]], *, width: int = 0) -> list[str]:
    """Lines of text with the cells of each column below each other, two spaces between columns.

    Args:
        rows: cells of each row, as many in all rows; the heading is a row like the others.
        width: longest line. Where the cells need more, the widest columns are narrowed and their
            cells wrapped between words. 0 for lines of any length.
    """
    widths = _column_widths(rows, width)
    lines = []
    for row in rows:
        wrapped = [_wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
        for texts in itertools.zip_longest(*wrapped, fillvalue=""):
            cells = [text.ljust(size) for text, size in zip(texts, widths, strict=True)]
            lines.append(GAP.join(cells).rstrip())
    return lines


def paragraph(text: str) -> list[str]:
    """Lines of at most WIDTH columns; a longer word, such as an address, is not broken."""
    return _wrap(text, WIDTH)


def _column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The longest cell of each column, or less where `width` asks for it."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, cells)) for cells in columns]
    least = [max(map(len, " ".join(cells).split()), default=0) for cells in columns]  # a word
    while width and len(GAP.join("x" * size for size in widths)) > width:
        spare = [column for column, size in enumerate(widths) if size > least[column]]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def _wrap(text: str, width: int) -> list[str]:
    if len(text) <= width:  # wrapping would drop spaces that align cells
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def percent(share: float, digits: int = 0) -> str:
    """`share` in per cent, with a space before the sign: "26 %".

    Args:
        share: A fraction, as 0.26.
        digits: Digits after the point.
    """
    return f"{100 * share:.{digits}f} %"


def three_digits(value: float) -> str:
    """A number with three digits, or all digits before the point: 0.0123, 12.3, 2,150."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def space_percents(text: str) -> str:
    """`text` with a no-break space before the sign of each per cent: "26%" becomes "26 %"."""
    return PERCENT.sub(f"{NO_BREAK_SPACE}%", text)
