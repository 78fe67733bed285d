"""Checks of arguments: accepted values, and the messages of errors."""

import dataclasses
import math

import numpy as np
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
    with pytest.raises(ValueError) as error:
        expect(False, "width", "at least 1", 0, "Raise it.")
    assert str(error.value) == "width: expected at least 1, got 0. Raise it."


def test_dims_returns_the_sizes_in_the_order_of_the_letters():
    assert dims(torch.zeros(2, 5, 80), "B T F", "features", F=80) == (2, 5, 80)


@pytest.mark.parametrize("given, message", [
    (torch.zeros(2, 5), "features: expected shape (B, T, F=80), got (2, 5)."),
    (torch.zeros(2, 5, 79), "features: expected shape (B, T, F=80), got (2, 5, 79)."),
    ([4, 3], "features: expected a tensor, got list. Wrap it in torch.as_tensor."),
])  # fmt: skip
def test_a_tensor_of_another_kind_is_refused(given, message):
    with pytest.raises(ValueError) as error:
        dims(given, "B T F", "features", F=80)
    assert str(error.value) == message


def test_the_mask_is_true_for_the_first_positions_only():
    wanted = [[0, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert valid_mask(torch.tensor([0, 2, 3]), 3).int().tolist() == wanted


def test_a_whole_number_is_an_int_in_range_and_true_is_none():
    assert whole(1, 1, 9) and whole(9, 1, 9)
    for value in (0, 10, True, 2.0, "2"):
        assert not whole(value, 1, 9)


@pytest.mark.parametrize("value", [0, 65, 2.5, 2.0, "2", True])
@pytest.mark.parametrize("rule", [range(1, 65), (1, 64)])
def test_a_parameter_annotated_as_int_is_a_whole_number_in_its_bounds(value, rule):
    given = {"__annotations__": {"batch": int}, "batch": 8}
    expect_parameters(given, batch=rule)
    with pytest.raises(ValueError) as error:
        expect_parameters(given | {"batch": value}, batch=rule)
    message = f"batch: expected a whole number in 1..64, got {value!r}."
    assert str(error.value) == message


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


def test_fields_of_their_types_pass():
    expect_types(Settings())
    expect_types(Settings(size=-(10**30), share=1, part=slice(2), sides=None, limit=1))


def test_numbers_of_numpy_become_pythons():
    settings = Settings(size=np.int64(3), share=np.float32(0.5), limit=np.float64(2))
    expect_types(settings)
    assert repr(settings) == repr(Settings(size=3, limit=2.0))


@pytest.mark.parametrize("name, value, wanted", [
    ("size", 1.0, "a whole number"),
    ("size", True, "a whole number"),
    ("size", "1", "a whole number"),
    ("share", math.nan, "a finite number"),
    ("share", math.inf, "a finite number"),
    ("share", False, "a finite number"),
    ("on", 1, "bool"),
    ("part", [1], "range or slice"),
    ("name", 5, "str"),
    ("limit", math.nan, "a finite number, or None"),
])  # fmt: skip
def test_a_field_of_another_type_is_named(name, value, wanted):
    with pytest.raises(ValueError, match=f"^{name}: expected {wanted}, got "):
        expect_types(Settings(**{name: value}))
