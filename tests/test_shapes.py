import dataclasses

import pytest
import torch

from asrkit.shapes import (
    dims,
    expect,
    expect_parameters,
    expect_types,
    valid_mask,
    whole,
)


def test_an_error_names_argument_wanted_got_and_remedy():
    with pytest.raises(
        ValueError, match=r"^width: expected at least 1, got 0\. Raise it\.$"
    ):
        expect(False, "width", "at least 1", 0, "Raise it.")


def test_dims_returns_the_sizes_in_the_order_of_the_letters():
    assert dims(torch.zeros(2, 5, 80), "B T F", "features", F=80) == (2, 5, 80)


@pytest.mark.parametrize(
    ("shape", "known"), [((2, 5), {}), ((2, 5, 80, 1), {}), ((2, 5, 79), {"F": 80})]
)
def test_a_wrong_rank_or_size_is_refused(shape, known):
    with pytest.raises(ValueError, match="features: expected shape"):
        dims(torch.zeros(shape), "B T F", "features", **known)


def test_the_mask_is_true_for_the_first_positions_only():
    assert valid_mask(torch.tensor([0, 2, 3]), 3).tolist() == [
        [False] * 3,
        [True, True, False],
        [True] * 3,
    ]


def test_what_is_no_tensor_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"^lengths: expected a tensor, got list\. Wrap it in torch\.as_tensor\.$",
    ):
        dims([4, 3], "B", "lengths")


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (1, True),
        (9, True),
        (0, False),
        (10, False),
        (True, False),
        (2.0, False),
        ("2", False),
    ],
)
def test_a_whole_number_is_an_int_in_range_and_true_is_none(value, fits):
    assert whole(value, 1, 9) is fits


@pytest.mark.parametrize("value", [0, 9, 2.5, 2.0, "2", True])
def test_a_range_of_parameters_is_one_of_whole_numbers(value):
    expect_parameters({"batch": 8}, batch=range(1, 9))
    with pytest.raises(ValueError) as error:
        expect_parameters({"batch": value}, batch=range(1, 9))
    assert str(error.value) == f"batch: expected a whole number in 1..8, got {value!r}."


@pytest.mark.parametrize("value", [2.5, 2.0, True, "2", 65])
def test_a_parameter_annotated_as_int_is_a_whole_number_whatever_form_its_bounds_have(
    value,
):
    values = {
        "__annotations__": {"batch": int, "seconds": float},
        "batch": 2,
        "seconds": 2.5,
    }
    expect_parameters(values, batch=(1, 64), seconds=(1, 64))
    with pytest.raises(
        ValueError, match=r"^batch: expected a whole number in 1..64, got"
    ):
        expect_parameters(values | {"batch": value}, batch=(1, 64))


def test_a_parameter_of_type_int_is_not_true():
    with pytest.raises(ValueError, match="^seed: expected a whole number, got True"):
        expect_parameters({"seed": True}, seed=int)


@dataclasses.dataclass
class Settings:
    size: int = 1
    share: float = 0.5
    on: bool = False
    part: range | slice = range(3)
    name: str = "x"
    sides: tuple[int, int] = (1, 2)
    limit: float | None = None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"share": 1},
        {"part": slice(2)},
        {"sides": None},
        {"size": -(10**30)},
        {"limit": 1},
    ],
)
def test_fields_of_their_types_pass(changes):
    expect_types(Settings(**changes))


@pytest.mark.parametrize("name, value, wanted", [
    ("size", 1.0, "a whole number"), ("size", True, "a whole number"), ("size", "1", "a whole number"),
    ("share", float("nan"), "a finite number"), ("share", float("inf"), "a finite number"), ("share", "x", "a finite number"),
    ("share", False, "a finite number"), ("on", 1, "bool"), ("on", None, "bool"), ("part", [1], "range or slice"),
    ("name", 5, "str"), ("limit", float("nan"), "a finite number, or None"), ("limit", True, "a finite number, or None"),
])  # fmt: skip
def test_a_field_of_another_type_is_named(name, value, wanted):
    with pytest.raises(ValueError, match=f"^{name}: expected {wanted}, got "):
        expect_types(Settings(**{name: value}))
