"""Tables of plain text."""

import pytest

from asrkit.workbench.tables import aligned

ROWS = [["name", "ms", ""], ["a longer one", "3", "x"], ["b", "12.5", ""]]


def test_columns_are_aligned_left_or_right_and_lines_end_without_spaces():
    assert aligned(ROWS) == ["name          ms", "a longer one  3     x", "b             12.5"]
    assert aligned(ROWS, right=[1]) == [
        "name            ms",
        "a longer one     3  x",
        "b             12.5",
    ]
    assert aligned([]) == []


def test_a_row_with_another_number_of_cells_is_an_error():
    with pytest.raises(ValueError):
        aligned([*ROWS, ["short"]])
