"""Tables that come with asrkit: CSV files with a header."""

import csv

from asrkit import files

Row = dict[str, str]


def read_table(name: str) -> list[Row]:
    """The rows of the table `name`, as text by column."""
    with files.shipped(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
