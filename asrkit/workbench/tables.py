"""Shipped tables, plain text tables for all commands, and the formatting of numbers.

tabulate would do, but a bare GPU machine lacks it, so it would need a fallback that no test machine
runs.
"""

import csv
import itertools
import re
import textwrap
from collections.abc import Sequence

from asrkit.files import shipped

WIDTH = 100  # columns of a terminal that tables and sentences fit into
GAP = "  "  # between two columns
NO_BREAK_SPACE = "\u00a0"  # between a number and its unit
PERCENT_SIGN = re.compile(r"(?<=\d)[ \u00a0]?%(?!\w)")


def read_table(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file below data/, as text by column."""
    with shipped(name).open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def aligned(rows: Sequence[Sequence[str]], *, width: int = 0) -> list[str]:
    """Lines of text with aligned columns, two spaces apart.

    Args:
        rows: Cells of each row, the same number in all rows; the heading is a row like any other.
        width: Longest line. If the cells need more, the widest columns are narrowed and their cells
            are wrapped between words. 0 allows lines of any length.
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
    """Lines of at most WIDTH columns. A longer word, such as an address, is not broken."""
    return _wrap(text, WIDTH)


def _column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The length of the longest cell of each column, narrowed until the lines fit `width`."""
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, cells)) for cells in columns]
    least = [max(map(len, " ".join(cells).split()), default=0) for cells in columns]  # one word
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
    """`share` as a percentage with a space before the sign: "26 %".

    Args:
        share: A fraction, such as 0.26.
        digits: Digits after the point.
    """
    return f"{100 * share:.{digits}f} %"


def three_digits(value: float) -> str:
    """A number with three significant digits, or as an integer from 1000 on: 0.0123, 2,150."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def space_percents(text: str) -> str:
    """`text` with a no-break space before each percent sign: "26%" becomes "26 %"."""
    return PERCENT_SIGN.sub(f"{NO_BREAK_SPACE}%", text)
