"""The config of a `.nemo` archive, read key by key."""

import math
import re
from typing import Any

from asrkit.models.checkpoints.archive import Archive
from asrkit.shapes import expect, whole

# Largest width or count of layers; a config with more is taken for damaged.
SIZE = 65_536


class Section:
    """A section of the config. Each key is taken with NeMo's default."""

    def __init__(self, name: str, values: dict[str, Any], root: dict[str, Any]) -> None:
        self.name = name
        self.values = values
        self.root = root

    def take(self, key: str, *default: Any, of: tuple[Any, ...] = ()) -> Any:
        """The value of `key`, with references resolved.

        Args:
            key: The key.
            default: What it is where the config lacks it; without it the key must be there.
            of: The values that are supported; empty for any.

        Raises:
            ValueError: The key is missing, unset or not one of `of`.
        """
        name = f"{self.name}.{key}"
        known = short(sorted(map(str, self.values)))
        there = key in self.values
        expect(there or bool(default), self.name, f"a key {key!r}", known)
        if there:
            value = self._resolve(self.values[key])
        else:
            value = default[0]
        unset = isinstance(value, str) and (value == "???" or "${" in value)
        expect(not unset, name, "a value", short(value))
        supported = " or ".join(map(repr, of))
        wanted = f"{supported} (others are not supported)"
        expect(not of or value in of, name, wanted, short(value))
        return value

    def number(self, key: str, *default: Any) -> float:
        """The finite number that `key` has; YAML reads 1e-5 as text."""
        value = self.take(key, *default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        expect(math.isfinite(number), f"{self.name}.{key}", "a number", short(value))
        return number

    def count(self, key: str, *default: Any) -> int:
        """The whole number that `key` has, of a size that some model may have."""
        value = self.take(key, *default)
        wanted = f"a whole number in 1..{SIZE}"
        expect(whole(value, 1, SIZE), f"{self.name}.{key}", wanted, short(value))
        return value

    def section(self, key: str) -> "Section":
        """The section under `key`."""
        values = self.take(key)
        name = f"{self.name}.{key}"
        expect(isinstance(values, dict), name, "a section", short(values))
        return Section(name.removeprefix("config."), values, self.root)

    def _resolve(self, value: Any) -> Any:
        """`value` with references like ${encoder.d_model} replaced, in a list item by item."""
        value = self._resolve_one(value)
        if isinstance(value, list):
            return [self._resolve_one(item) for item in value]
        return value

    def _resolve_one(self, value: Any) -> Any:
        for _ in range(8):  # a reference may lead to another, not in circles
            if not isinstance(value, str):
                return value
            reference = re.fullmatch(r"\$\{([\w.]+)\}", value)
            if reference is None:
                return value
            value = self._at(reference[1])
        return value

    def _at(self, path: str) -> Any:
        """The value at `path` (encoder.d_model) of the whole config; None where there is none."""
        value: Any = self.root
        for key in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value


def short(value: Any) -> str:
    """`value` as an error shows it."""
    return repr(value)[:120]


def read_config(nemo: Archive) -> Section:
    """The config of the archive `nemo`; ValueError where it is damaged."""
    import yaml

    try:
        config = yaml.safe_load(nemo.bytes("model_config.yaml"))
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        damaged = f"{nemo.name}: model_config.yaml is damaged ({reason:.200})."
        raise ValueError(damaged) from None
    expect(isinstance(config, dict), "model_config.yaml", "keys and values", type(config).__name__)
    return Section("config", config, config)
