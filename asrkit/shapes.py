"""The legend of shapes, and the one check behind every argument error.

    B   utterances in a batch          V   tokens, blank included
    S   samples of a waveform          D   width of a layer
    T   encoder or feature frames      F   feature bins
    U   labels of a transcript         U1  U + 1, lattice rows

A letter means one thing everywhere in asrkit.
"""

from math import inf
from sys import float_info
from types import UnionType
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

# labels on a frame, frames of a jump, hypotheses of a beam: buffers and tables have a place for
# each
MOST = 1000


def expect(ok: bool, argument: str, wanted: str, got: object, remedy: str = "") -> None:
    """Raise the one-line ValueError `argument: expected wanted, got got. remedy` unless `ok`."""
    if not ok:
        raise ValueError(
            f"{argument}: expected {wanted}, got {got}." + (f" {remedy}" if remedy else "")
        )


def whole(value: object, low: int, high: float = inf) -> bool:
    """Whether `value` is an int in low..high; True is none.

    >>> whole(10, 1), whole(True, 1), whole(2.0, 1), whole(10, 1, 9)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def expect_types(config: object) -> None:
    """Check the fields of a dataclass that are annotated int, float (finite then), bool or with
    classes; True is no number.

    A config may come from a file, where Python's annotations are only hopes.
    """
    kinds: dict[str, Any] = get_type_hints(type(config))
    for name, kind in kinds.items():
        value = getattr(config, name)
        if kind in (int, float):
            number = (
                isinstance(value, int | kind)
                and not isinstance(value, bool)
                and abs(value) <= float_info.max
            )
            expect(
                number, name, "a whole number" if kind is int else "a finite number", repr(value)
            )
        elif isinstance(kind, type | UnionType):
            kinds_named = " or ".join(
                getattr(one, "__name__", "") for one in get_args(kind) or [kind]
            )
            expect(isinstance(value, kind), name, kinds_named, repr(value))


def dims(tensor: Tensor, letters: str, argument: str, **known: int) -> tuple[int, ...]:
    """Sizes of `tensor`, one for each of `letters`; ValueError for a wrong rank or a size that
    contradicts `known`.

    >>> dims(torch.zeros(2, 5, 80), "B T F", "features", F=80)
    (2, 5, 80)
    """
    expect(
        isinstance(tensor, Tensor),
        argument,
        "a tensor",
        type(tensor).__name__,
        "Wrap it in torch.as_tensor.",
    )
    names, shape = letters.split(), tuple(tensor.shape)
    wanted = (
        "(" + ", ".join(f"{name}={known[name]}" if name in known else name for name in names) + ")"
    )
    fits = len(names) == len(shape) and all(
        known.get(name, size) == size for name, size in zip(names, shape, strict=True)
    )
    expect(fits, argument, f"shape {wanted}", shape)
    return shape


def valid_mask(lengths: Tensor, size: int) -> Tensor:
    """True where a position holds data, False in the padding: bool (B, size) from lengths (B,)."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def expect_parameters(
    values: dict[str, object], **wanted: tuple[float, float] | range | set[str] | type
) -> None:
    """Check a notebook's parameters in one call: each name against (low, high), whole numbers, a
    set of choices, or a type.

    papermill injects what it is given unchecked, so `-p seconds "60"` would otherwise fail far from
    its cause.

    >>> expect_parameters({"seconds": 25.0, "batch": 8, "kind": "digits"}, seconds=(1, 600),
    batch=range(1, 65), kind={"digits"})
    """
    for name, rule in wanted.items():
        value = values[name]
        if isinstance(rule, tuple):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            expect(
                number and rule[0] <= value <= rule[1],  # type: ignore[operator]
                name,
                f"a number in {rule[0]}..{rule[1]}",
                repr(value),
            )
        elif isinstance(rule, range):
            expect(
                whole(value, rule[0], rule[-1]),
                name,
                f"a whole number in {rule[0]}..{rule[-1]}",
                repr(value),
            )
        elif isinstance(rule, set):
            expect(value in rule, name, f"one of {sorted(rule)}", repr(value))
        else:
            expect(isinstance(value, rule), name, rule.__name__, repr(value))
