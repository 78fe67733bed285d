"""Plain text tables, for every command that prints one.

Written here, not taken from tabulate: a bare GPU machine has no such package, so a second printer
would be needed beside it, and only the one that no test machine uses would run there.
"""

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Lines of text with the cells of each column below each other, two spaces between columns.

    Args:
        rows: cells of each row, as many in all rows; the heading is a row like the others.
        right: numbers of the columns, from 0, that are aligned to the right.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    lines = []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if number in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines
