"""Keys of the configs of other programs."""

import re
from collections.abc import Mapping
from typing import Any

from asrkit.shapes import expect


def expect_only(values: Mapping[str, Any], only: Mapping[str, Any], name: str) -> None:
    """ValueError unless each key has the one value that asrkit computes, or is not there.

    Args:
        values: A section of a config.
        only: The value of each key whose other values no shape of a weight shows.
        name: Of the section.
    """
    for key, value in only.items():
        got = values.get(key, value)
        remedy = "Other values are not supported."
        expect(got == value, f"{name}.{key}", repr(value), f"{got!r:.80}", remedy)


def section(root: Mapping[str, Any], *path: str) -> dict[str, Any]:
    """The keys of a section of `root`, with references like ${encoder.d_model} followed.

    Args:
        root: A whole config, as YAML has it.
        *path: Keys that lead to the section.
    """
    values: Any = root
    for key in path:
        values = values[key]
    return followed(values, root)


def followed(values: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with references followed, in lists item by item."""
    found = {}
    for key, value in values.items():
        if isinstance(value, list):
            found[key] = [_at_the_end(item, root) for item in value]
        else:
            found[key] = _at_the_end(value, root)
    return found


def _at_the_end(value: Any, root: Mapping[str, Any]) -> Any:
    """What `value` refers to, or itself."""
    for _ in range(8):  # a reference may lead to another, not in circles
        reference = isinstance(value, str) and re.fullmatch(r"\$\{([\w.]+)\}", value)
        if not reference:
            return value
        value = root
        for key in reference[1].split("."):
            value = value.get(key) if isinstance(value, dict) else None
    return None
