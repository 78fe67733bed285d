"""JSON Schemas of the files that the workbench reads back: claims, and plans of reports."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Schema = Mapping[str, Any]

LARGEST = sys.float_info.max
NUMBER = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST}
INTEGER = {"type": "integer"}
BOOLEAN = {"type": "boolean"}
STRING = {"type": "string"}
STRINGS = {"type": "array", "items": STRING}
NON_EMPTY = {"type": "string", "minLength": 1}
OBJECT = {"type": "object"}
NUMBERS = {"type": "object", "additionalProperties": NUMBER}  # by any names
LINE = {"type": "string", "pattern": r"^[^\x00-\x1f\x7f-\x9f]*\Z"}  # no control characters
LINES = {"type": "array", "items": LINE}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _matching(pattern: str) -> Schema:
    """Text that is `pattern` from its first to its last character.

    `$` would allow a newline at the end.
    """
    return {"type": "string", "pattern": rf"^(?:{pattern})\Z"}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": [*values]}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required]}


APPENDIX = (  # why a claim is listed in the appendix
    "tautology",  # true by the arithmetic or the definition alone
    "not speech",  # about other models, or about machines without a model
    "ours",  # a quantity of this project, beside a claim that cannot be measured as it stands
)
CLAIM = {
    **_object(
        {
            "id": STRING,
            "text": STRING,
            "source": _object(dict.fromkeys(("document", "title", "url", "section"), NON_EMPTY)),
            "kind": _one_of("arithmetic", "ratio", "latency", "throughput", "memory", "quality"),
            "metric": STRING,
            "unit": STRING,
            "quoted": {"type": ["number", "null"]},
            "notebook": STRING,
        },
        optional={
            "needs": _one_of("cpu", "cuda", "cluster"),
            "status": _one_of("measured", "planned"),
            "formula": STRING,
            "params": NUMBERS,
            "grid": STRING,
            "keys": STRINGS,
            "where": OBJECT,
            "base": OBJECT,
            "column": STRING,
            "take": _one_of("", "max", "min"),
            "arms": STRINGS,
            "tolerance": {
                "type": "object",
                "properties": dict.fromkeys(("rel", "abs", "above", "below"), NUMBER),
                "additionalProperties": False,
                "minProperties": 1,
                "maxProperties": 1,
            },
            "least": NUMBERS,
            "evidence": {
                "type": "array",
                "items": {
                    **_object(
                        {"what": NON_EMPTY, "why": NON_EMPTY},
                        optional={"impl": STRING, "arms": STRINGS},
                    ),
                    "additionalProperties": False,
                },
            },
            "appendix": _one_of("", *APPENDIX),
            "noise": NUMBER,
            "notes": STRING,
        },
    ),
    "additionalProperties": False,
}
REPORT_PLAN = _object(
    {"notebooks": STRINGS},
    optional={
        "parameters": OBJECT,
        "size": STRING,
        "device": STRING,
        "timeout_s": _or_null({"type": "number"}),
    },
)


class Mismatch(NamedTuple):
    """Where a value breaks a schema, as "stats.n" (empty: as a whole), and a sentence about it."""

    place: str
    message: str


def validator(schema: Schema) -> Callable[[Any], Mismatch | None]:
    """A function that returns the first mismatch of a value, or None where it fits `schema`.

    Raises:
        ModuleNotFoundError: fastjsonschema is not installed, as on a bare GPU machine.
    """
    import fastjsonschema

    check = fastjsonschema.compile(dict(schema), use_default=False)

    def first_mismatch(value: Any) -> Mismatch | None:
        try:
            check(value)
        except fastjsonschema.JsonSchemaValueException as error:
            return _mismatch(error)
        return None

    return first_mismatch


def _mismatch(error: Any) -> Mismatch:
    path = [str(part) for part in error.path[1:]]  # the first part stands for the whole value
    if error.rule == "required":
        missing = [key for key in error.rule_definition if key not in error.value]
        place = ".".join([*path, missing[0]])
        return Mismatch(place, f"missing field {place}")
    place = ".".join(path)
    if error.rule == "additionalProperties" and not error.rule_definition:
        known = error.definition.get("properties", {})
        unknown = sorted(str(key) for key in error.value if key not in known)
        return Mismatch(place, f"unknown field {', '.join(unknown)}")
    rule = error.message.removeprefix(error.name).strip()
    return Mismatch(place, f"{place or 'value'} {rule}, got {error.value!r:.100}")
