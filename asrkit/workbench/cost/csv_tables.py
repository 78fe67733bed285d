"""Tables that come with asrkit, or a reader's own: CSV files with a header."""

import csv
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from asrkit import files
from asrkit.shapes import expect

Row = dict[str, str]
Parsed = TypeVar("Parsed")


def read_table(table: str | Path, parse: Callable[[Row], Parsed]) -> list[Parsed]:
    """What `parse` returns for each row of a CSV file.

    Args:
        table: a path, or as str the name of a table that comes with asrkit.
        parse: called with each row, as text by column.

    Raises:
        ValueError: a row has too many or too few cells, or `parse` raised ValueError or KeyError;
            the message begins with file and line.
    """
    path = table
    if isinstance(path, str):
        path = files.shipped(path)
    parsed = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = len(reader.fieldnames or ())
        for row in reader:
            place = f"{path.name}:{reader.line_num}"
            # DictReader puts what is too much under None, and None where something is missing
            complete = None not in row and None not in row.values()
            try:
                expect(complete, "row", f"{columns} cells", "others")
                parsed.append(parse(row))
            except KeyError as error:
                raise ValueError(f"{place}: expected a column {error}") from error
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    return parsed


def parse_day(text: str, argument: str) -> str:
    """`text` as YYYY-MM-DD; ValueError names `argument` if it is no day."""
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except (TypeError, ValueError):
        raise ValueError(f"{argument}: expected a day such as 2024-09-24, got {text!r}.") from None
