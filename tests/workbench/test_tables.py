"""Tables of plain text."""

import pytest

from asrkit.workbench.tables import (
    aligned,
    paragraph,
    percent,
    space_percents,
    three_digits,
)

ROWS = [["name", "ms", ""], ["a longer one", "3", "x"], ["b", "12.5", ""]]


def test_columns_are_aligned_and_lines_end_without_spaces():
    assert aligned(ROWS) == [
        "name          ms",
        "a longer one  3     x",
        "b             12.5",
    ]
    assert aligned([]) == []


def test_a_row_with_another_number_of_cells_is_an_error():
    with pytest.raises(ValueError):
        aligned([*ROWS, ["short"]])


def test_a_table_of_limited_width_wraps_its_widest_columns_between_words():
    rows = [["half of it", "tolerance", "ms"], ["all", "within 10% of 200 frames", "3"]]
    assert aligned(rows, width=34) == [
        "half of it  tolerance           ms",
        "all         within 10% of 200   3",
        "            frames",
    ]
    assert aligned(rows, width=100) == aligned(rows)
    assert aligned(rows, width=10)[0] == "half  tolerance  ms"  # no word is broken


def test_a_paragraph_keeps_an_address_whole():
    address = "https://example.org/" + "a" * 120
    assert paragraph(f"{'word ' * 30}{address}")[-1] == address
    assert all(len(line) <= 100 for line in paragraph("word " * 50))


def test_per_cent_has_a_space_before_its_sign():
    assert percent(0.256) == "26 %"
    assert percent(0.0098, 2) == "0.98 %"
    assert percent(-0.031, 1) == "-3.1 %"


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        ("26% of 9.1%", "26\u00a0% of 9.1\u00a0%"),
        ("26 % and 26\u00a0%", "26\u00a0% and 26\u00a0%"),
        ("a % b, 5%d", "a % b, 5%d"),
    ],
)
def test_a_per_cent_has_one_form(text, spaced):
    assert space_percents(text) == spaced


def test_a_number_has_three_digits_or_all_before_the_point():
    numbers = (0.012345, 12.345, 999.4, 2150.3, -2150.3)
    assert [*map(three_digits, numbers)] == ["0.0123", "12.3", "999", "2,150", "-2,150"]
