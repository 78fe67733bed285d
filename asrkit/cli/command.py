"""What every command is made of: options of dataclass fields, and how it says what it did."""

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from asrkit.transcribe.options import described

MIN_TABLE_WIDTH = 100  # also where the output is no terminal


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command takes."""

    json: bool = described(
        False, "print the result as JSON on stdout; text for people goes to stderr"
    )


@dataclass(frozen=True, kw_only=True)
class ProgressOptions(Options):
    """What a command takes that may take long."""

    no_progress: bool = described(False, "show no progress bars")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `asrkit`: what `--help` says of it, its options, and the function behind it.

    Args:
        name: What is typed after `asrkit`, one word or two ("data prepare").
        summary: A line.
        run: Takes an object of `options`, and returns the exit code.
        options: A dataclass of fields that `described` made, or of such dataclasses.
        details: Sentences behind the summary.
        examples: Lines that can be typed.
        goes_on: After Ctrl-C, what goes on from there.
    """

    name: str
    summary: str
    run: Callable[[Any], int]
    options: type[Options]
    details: str = ""
    examples: Sequence[str] = ()
    goes_on: str = ""


def add_fields(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add an option for each field of a dataclass; one that is not given is None.

    Args:
        parser: Gets the options.
        kind: As `Command.options`.
    """
    group: argparse._ActionsContainer = parser
    for one, hint in _hinted(kind):
        if is_dataclass(hint):
            add_fields(parser, hint)  # type: ignore[arg-type]
            continue
        how = {**_of_type(hint, one.default), **one.metadata}
        if "group" in how:
            group = parser.add_argument_group(how.pop("group"))
        flags = how.pop("flag", "--" + one.name.replace("_", "-")).split()
        default = how.pop("shown", one.default)
        if isinstance(default, tuple):
            default = " ".join(default)
        if default not in (None, MISSING, "") and default is not False:
            how["help"] += f" (default: {default})"
        if flags:
            how |= {"dest": one.name, "required": one.default is MISSING}
        group.add_argument(*flags or [one.name], default=None, **how)


def _hinted(kind: type) -> Iterator[tuple[Field[Any], Any]]:
    """The fields of a dataclass, each with its type; of `X | None` that is X."""
    hints = get_type_hints(kind)
    for one in fields(kind):
        hint = hints[one.name]
        yield one, get_args(hint)[0] if NoneType in get_args(hint) else hint


def _of_type(hint: Any, default: Any) -> dict[str, Any]:
    """What argparse has to know of a field's type."""
    inner = get_args(hint)
    if hint is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": inner}
    if get_origin(hint) is list:
        return {"nargs": "+", **_of_type(inner[0], None)}
    if get_origin(hint) is tuple:
        return {"nargs": len(inner), "type": inner[0]}
    return {"type": hint}


def made(args: argparse.Namespace, kind: type) -> Any:
    """The dataclass of the options that were parsed, with its defaults for the others.

    A dataclass inside it that may be None is None where none of its options was given.

    Args:
        args: As the parser returns them.
        kind: As `add_fields` took it.
    """
    values: dict[str, Any] = {}
    for one, hint in _hinted(kind):
        if not is_dataclass(hint):
            values[one.name] = getattr(args, one.name)
        elif one.default is MISSING or any(
            getattr(args, inner.name) is not None for inner in fields(hint)
        ):
            values[one.name] = made(args, hint)  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if value is not None})


def text_stream(options: Options) -> contextlib.AbstractContextManager[Any]:
    """A context whose prints are all text for people: with --json they go to stderr."""
    if options.json:
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def say(options: Options, *lines: str) -> None:
    """Print text for people: on stdout, or on stderr where --json keeps stdout for the result.

    Args:
        options: Of the command.
        lines: Lines of text.
    """
    with text_stream(options):
        print(*lines, sep="\n")


def finish(options: Options, result: Mapping[str, Any], text: str) -> None:
    """Print the result of a command on stdout: one JSON document with --json, else text.

    Args:
        options: Of the command.
        result: The result for programs; has to be JSON.
        text: The result for people; its last line says where files were written.
    """
    print(json.dumps(result) if options.json else text)


def progress(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def table_width() -> int:
    """Columns that a table may take: the width of the terminal, and at least 100."""
    return max(MIN_TABLE_WIDTH, shutil.get_terminal_size().columns)
