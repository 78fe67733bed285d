"""What every command is made of, and how it says what it did."""

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_TABLE_WIDTH = 100  # also where the output is no terminal


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `asrkit`: what `--help` says of it, its arguments, and the function behind it.

    `name` is what is typed after `asrkit`, one word or two ("data prepare").
    """

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    details: str = ""
    examples: Sequence[str] = ()


def text_stream(args: argparse.Namespace) -> contextlib.AbstractContextManager[Any]:
    """A context whose prints are all text for people: with --json they go to stderr."""
    if args.json:
        return contextlib.redirect_stdout(sys.stderr)
    return contextlib.nullcontext()


def say(args: argparse.Namespace, *lines: str) -> None:
    """Print text for people: on stdout, or on stderr where --json keeps stdout for the result.

    Args:
        args: the parsed arguments.
        lines: lines of text.
    """
    stream = sys.stdout
    if args.json:
        stream = sys.stderr
    for line in lines:
        print(line, file=stream)


def finish(args: argparse.Namespace, result: Mapping[str, Any], text: str) -> None:
    """Print the result of a command on stdout: one JSON document with --json, else text.

    Args:
        args: the parsed arguments.
        result: the result for programs; has to be JSON.
        text: the result for people; its last line says where files were written.
    """
    if args.json:
        print(json.dumps(result))
    else:
        print(text)


def table_width() -> int:
    """Columns that a table may take: the width of the terminal, and at least 100."""
    return max(MIN_TABLE_WIDTH, shutil.get_terminal_size().columns)


def count(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 record", "1,200 records".

    Args:
        number: how many.
        noun: the singular.
        plural: the plural where it is not `noun` with an s.
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"
