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
    columns = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        width = max(len(cell) for cell in cells)
        if number in right:
            columns.append([cell.rjust(width) for cell in cells])
        else:
            columns.append([cell.ljust(width) for cell in cells])
    lines = ["  ".join(row) for row in zip(*columns, strict=True)]
    return [line.rstrip() for line in lines]
