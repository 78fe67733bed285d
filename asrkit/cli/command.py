"""What commands share: options declared as dataclass fields, and how results are printed."""

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

MIN_TABLE_WIDTH = 100  # also if the output is not a terminal


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every command."""

    json: bool = described(
        False, "print the result as JSON on stdout, and text for people on stderr"
    )


@dataclass(frozen=True, kw_only=True)
class ProgressOptions(Options):
    """The options of every command that may take long."""

    no_progress: bool = described(False, "show no progress bars")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `asrkit`: its options, its help and the function that runs it.

    Attributes:
        name: What is typed after `asrkit`, one word or two ("data prepare").
        summary: One line.
        run: Takes an object of type `options` and returns the exit code.
        options: A dataclass whose fields were declared by `described`, or are such dataclasses.
        details: Sentences that follow the summary in the help.
        examples: Command lines that work as they are.
        resume: A sentence, printed after Ctrl-C, on how to continue.
    """

    name: str
    summary: str
    run: Callable[[Any], int]
    options: type[Options]
    details: str = ""
    examples: Sequence[str] = ()
    resume: str = ""


def add_fields(parser: argparse.ArgumentParser, kind: type) -> None:
    """Add an option for each field of a dataclass. An option that is not typed is parsed as None.

    Args:
        parser: The parser that gets the options.
        kind: The dataclass, as in `Command.options`.
    """
    group: argparse._ActionsContainer = parser
    for field, hint in _typed_fields(kind):
        if is_dataclass(hint):
            add_fields(parser, hint)  # type: ignore[arg-type]
            continue
        settings = {**_of_type(hint, field.default), **field.metadata}
        if "group" in settings:
            group = parser.add_argument_group(settings.pop("group"))
        flags = settings.pop("flag", "--" + field.name.replace("_", "-")).split()
        default = settings.pop("shown", field.default)
        if isinstance(default, tuple):
            default = " ".join(default)
        if default not in (None, MISSING, "") and default is not False:
            settings["help"] += f" (default: {default})"
        if flags:
            settings |= {"dest": field.name, "required": field.default is MISSING}
        group.add_argument(*flags or [field.name], default=None, **settings)


def _typed_fields(kind: type) -> Iterator[tuple[Field[Any], Any]]:
    """The fields of a dataclass, each with its type; the type of `X | None` is X."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        hint = hints[field.name]
        yield field, get_args(hint)[0] if NoneType in get_args(hint) else hint


def _of_type(hint: Any, default: Any) -> dict[str, Any]:
    """The arguments of `add_argument` that follow from a field's type."""
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


def options_from(args: argparse.Namespace, kind: type) -> Any:
    """The dataclass of the parsed options; options that were not typed have their defaults.

    A nested dataclass that may be None is None unless one of its options was typed.

    Args:
        args: The result of the parser.
        kind: The dataclass, as in `add_fields`.
    """
    values: dict[str, Any] = {}
    for field, hint in _typed_fields(kind):
        if not is_dataclass(hint):
            values[field.name] = getattr(args, field.name)
        elif field.default is MISSING or any(
            getattr(args, inner.name) is not None for inner in fields(hint)
        ):
            values[field.name] = options_from(args, hint)  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if value is not None})


def text_stream(options: Options) -> contextlib.AbstractContextManager[Any]:
    """A context that sends prints to stderr with --json, which keeps stdout for the result."""
    if options.json:
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def print_text(options: Options, *lines: str) -> None:
    """Print lines for people, on stdout or, with --json, on stderr."""
    with text_stream(options):
        print(*lines, sep="\n")


def finish(options: Options, result: Mapping[str, Any], text: str) -> None:
    """Print the result of a command on stdout: one JSON document with --json, else text.

    Args:
        options: The command's options.
        result: The result for programs, as JSON values.
        text: The result for people. Its last line names the written files.
    """
    print(json.dumps(result) if options.json else text)


def progress(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def table_width() -> int:
    """Columns that a table may take: the width of the terminal, and at least 100."""
    return max(MIN_TABLE_WIDTH, shutil.get_terminal_size().columns)
