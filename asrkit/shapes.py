"""The legend of shapes, the one check behind every argument error, and what an error says.

    B   utterances in a batch          V   tokens, blank included
    S   samples of a waveform          D   width of a layer
    T   encoder or feature frames      F   feature bins
    U   labels of a transcript         U1  U + 1, lattice rows

A letter means one thing everywhere in asrkit. Importing this file loads no torch: what only checks
arguments starts at once.
"""

from collections.abc import Sequence
from math import inf
from numbers import Number
from sys import float_info
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from asrkit import conflict as _conflict  # noqa: F401 - refuses files of another project

if TYPE_CHECKING:
    from torch import Tensor

# Upper limit of the labels on a frame, the frames of a duration and the hypotheses of a beam, whose
# buffers and tables grow with them.
MAX_COUNT = 1000
# The largest weight or bonus of a score: more would leave nothing of the rest in float32.
MAX_WEIGHT = 1e6


def expect(ok: bool, argument: str, wanted: str, got: object, remedy: str = "") -> None:
    """Raise ValueError("`argument`: expected `wanted`, got `got`. `remedy`") unless `ok`.

    Args:
        ok: Whether the argument is as expected.
        argument: Its name.
        wanted: What is expected of it.
        got: What it is.
        remedy: What to do about it, as a sentence.
    """
    if not ok:
        raise ValueError(f"{argument}: expected {wanted}, got {got}. {remedy}".rstrip())


def message(error: BaseException) -> str:
    """What an error says, in one line; the name of its class where that is nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def count(number: int, noun: str) -> str:
    """A number and its noun: "1 record", "1,200 records".

    Args:
        number: How many.
        noun: The singular.
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def expect_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """ValueError unless `value` is one of `choices`."""
    expect(value in choices, argument, "one of " + ", ".join(map(repr, choices)), repr(value))


def whole(value: object, low: float, high: float = inf) -> bool:
    """Whether `value` is an int from `low` to `high`; True and False are not.

    >>> whole(10, 1), whole(True, 1), whole(2.0, 1), whole(10, 1, 9)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return low <= value <= high


def expect_types(config: object) -> None:
    """Check the fields of a dataclass against their annotations; ValueError names the field.

    A config may come from a file, where annotations guarantee nothing. Numbers of NumPy become
    Python's. Checked are fields annotated with int, float (finite; bools do not count as numbers),
    a pair of floats (a tuple), float or None, bool, choices (Literal), or classes.
    """
    annotations: dict[str, Any] = get_type_hints(type(config))
    for name, annotation in annotations.items():
        value = getattr(config, name)
        if isinstance(value, Number) and hasattr(value, "item"):  # of NumPy, which JSON lacks
            value = value.item()
            object.__setattr__(config, name, value)
        if annotation is int:
            is_number = is_finite(value) and isinstance(value, int)
            expect(is_number, name, "a whole number", repr(value))
        elif annotation is float:
            expect(is_finite(value), name, "a finite number", repr(value))
        elif annotation == tuple[float, float]:
            fits = isinstance(value, tuple) and len(value) == 2 and all(map(is_finite, value))
            expect(fits, name, "a tuple of two finite numbers", repr(value))
        elif annotation == float | None:
            is_number = value is None or is_finite(value)
            expect(is_number, name, "a finite number, or None", repr(value))
        elif get_origin(annotation) is Literal:
            expect_choice(name, value, get_args(annotation))
        elif isinstance(annotation, type | UnionType):
            classes = get_args(annotation) or [annotation]
            names = [getattr(class_, "__name__", "") for class_ in classes]
            wanted = " or ".join(names).replace("NoneType", "None")
            expect(isinstance(value, annotation), name, wanted, repr(value))


def is_finite(value: object) -> bool:
    """Whether `value` is an int or a float within the range of a float; a bool is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= float_info.max


def dims(tensor: "Tensor", letters: str, argument: str, **known: int) -> tuple[int, ...]:
    """The sizes of `tensor`; ValueError for a wrong rank, or a size that contradicts `known`.

    Args:
        tensor: A tensor of any dtype.
        letters: One letter of the legend per dimension, separated by spaces.
        argument: Name of `tensor` in the error message.
        **known: Sizes that are known, by letter.

    >>> import torch
    >>> dims(torch.zeros(2, 5, 80), "B T F", "features", F=80)
    (2, 5, 80)
    """
    import torch

    is_tensor = isinstance(tensor, torch.Tensor)
    got = type(tensor).__name__
    expect(is_tensor, argument, "a tensor", got, "Wrap it in torch.as_tensor.")
    names = letters.split()
    shape = tuple(tensor.shape)
    fits = len(names) == len(shape) and all(
        known.get(name, size) == size for name, size in zip(names, shape, strict=True)
    )
    if not fits:
        parts = [f"{name}={known[name]}" if name in known else name for name in names]
        expect(False, argument, f"shape ({', '.join(parts)})", shape)
    return shape


def valid_mask(lengths: "Tensor", size: int) -> "Tensor":
    """(B, size) bool, True where a position holds data; False in the padding.

    Args:
        lengths: (B,) valid positions.
        size: Positions in all.
    """
    import torch

    return torch.arange(size, device=lengths.device) < lengths[:, None]


def expect_parameters(
    values: dict[str, object], **wanted: tuple[float, float] | range | set[str] | type
) -> None:
    """Check a notebook's parameters in one call; ValueError names the one that does not fit.

    papermill injects parameters unchecked, so `-p seconds "60"` would otherwise fail far from its
    cause.

    Args:
        values: The parameters by name, as `globals()`. Where they are annotated, one that is
            annotated as int has to be a whole number.
        **wanted: For each name (low, high), a range of whole numbers, a set of choices, or a type.

    >>> expect_parameters({"seconds": 25.0, "batch": 8, "kind": "digits"}, seconds=(1, 600),
    ...                   batch=range(1, 65), kind={"digits"})
    """
    annotations: Any = values.get("__annotations__", {})
    for name, rule in wanted.items():
        value = values[name]
        if isinstance(rule, range) or (isinstance(rule, tuple) and annotations.get(name) is int):
            ok = whole(value, rule[0], rule[-1])
            allowed = f"a whole number in {rule[0]}..{rule[-1]}"
        elif isinstance(rule, tuple):
            low, high = rule
            ok = is_finite(value) and low <= value <= high  # type: ignore[operator]
            allowed = f"a number in {low}..{high}"
        elif isinstance(rule, set):
            ok = value in rule
            allowed = f"one of {sorted(rule)}"
        elif rule is int:
            ok = whole(value, -inf)
            allowed = "a whole number"
        else:
            ok = isinstance(value, rule)
            allowed = rule.__name__
        expect(ok, name, allowed, repr(value))
