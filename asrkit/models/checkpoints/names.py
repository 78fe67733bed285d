"""Names in the files of other programs and the corresponding names in asrkit, from names.toml."""

import tomllib
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))
LAYERS: dict[str, dict[str, str]] = _TABLES["layers"]
SETTINGS: dict[str, dict[str, list]] = _TABLES["settings"]
