"""The command line: a thin parser over the package.

A command prints text for people on stdout or, with --json, one JSON document. An error is one line
on stderr with exit code 2.
"""

import argparse
import io
import os
import sys
import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

from asrkit.cli import cost, data, doctor, export, ledger, report, train, transcribe
from asrkit.cli.command import Command, add_fields, options_from
from asrkit.files import version

SECTIONS: Mapping[str, tuple[Command, ...]] = {  # as `asrkit --help` lists them
    "recognise speech": (transcribe.COMMAND, train.COMMAND, export.COMMAND),
    "prepare speech": (data.PREPARE, data.STATS, data.LENGTHS),
    "measure this machine": (doctor.COMMAND, cost.COMMAND),
    "reports and records": (report.COMMAND, ledger.COMMAND),
}
COMMANDS = {command.name: command for section in SECTIONS.values() for command in section}
DESCRIPTION = "Speech recognition made fast, and measured on your machine."
MOVED = "asrkit bench is now `python -m benchmarks`, in a checkout: see docs/benchmarks.md."
TEXT_WIDTH = 78  # of descriptions; options fill the terminal


def _overview() -> str:
    """The description in `asrkit --help`: every command under the heading of its section."""
    lines = [DESCRIPTION]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {command.name:15} {command.summary}" for command in commands]
    return "\n".join(lines)


def parsers(width: int | None = None) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name; that of `asrkit` itself has the name "".

    Args:
        width: Columns of the help text; None takes the width of the terminal.
    """
    formatter = partial(argparse.RawDescriptionHelpFormatter, width=width)
    top = argparse.ArgumentParser(
        prog="asrkit",
        usage="asrkit [-h] [--version] COMMAND ...",
        description=_overview(),
        epilog="`asrkit COMMAND --help` explains a command and shows examples.",
        formatter_class=formatter,
    )
    top.add_argument("--version", action="version", version=f"asrkit {version()}")
    # the overview lists the commands by section, so argparse's own list is left out
    first = top.add_subparsers(prog="asrkit", metavar="COMMAND", help=argparse.SUPPRESS)
    data = first.add_parser("data", description="Prepare corpora, and list their lengths.")
    groups = {"": first, "data": data.add_subparsers(metavar="COMMAND")}
    by_name = {"": top, "data": data}
    for name, command in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        by_name[name] = groups[group].add_parser(
            last, help=command.summary, formatter_class=formatter, **_explained(command)
        )
        add_fields(by_name[name], command.options)
    for name, parser in by_name.items():
        parser.set_defaults(parser=parser, command=COMMANDS.get(name))
    return by_name


def _explained(command: Command) -> dict[str, Any]:
    """What the help of a command shows around its options."""
    return {
        "description": textwrap.fill(f"{command.summary} {command.details}", TEXT_WIDTH),
        "epilog": "\n  ".join(["examples:", *command.examples]),
    }


def _streams_ready() -> bool:
    """Let stdout and stderr print any text; False, and a line on stderr, if stdout is closed."""
    if sys.stdout is None:  # as after `>&-`
        print("asrkit: standard output is closed. Redirect it: > FILE.", file=sys.stderr)
        return False
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be no UTF-8
    return True


def run_alone(command: Command, prog: str, argv: list[str] | None = None) -> int:
    """Run one command as a program of its own; returns the exit code, as `main` does.

    Args:
        command: The command.
        prog: What is typed to start it.
        argv: Its arguments; None takes those of the process.
    """
    if not _streams_ready():
        return 2
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, formatter_class=formatter, **_explained(command))
    add_fields(parser, command.options)
    parser.set_defaults(parser=parser, command=command)
    return _run(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    """Run the `asrkit` command and return its exit code.

    0: success. 1: something failed, and the output has the details. 2: a wrong argument or an
    error, reported in one line on stderr. 130: stopped by Ctrl-C. 141: the reader of the output
    has closed it.
    """
    if not _streams_ready():
        return 2
    if (sys.argv[1:] if argv is None else argv)[:1] == ["bench"]:
        print(MOVED, file=sys.stderr)
        return 2
    args = parsers()[""].parse_args(argv)
    if args.command is None:
        args.parser.print_help(sys.stderr)
        return 2
    return _run(args)


def _run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; an error becomes one line on stderr."""
    try:
        code = args.command.run(options_from(args, args.command.options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `| head -1`: end quietly, with the code that a shell uses
        # Python flushes stdout again at exit, so it needs somewhere to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    # ImportError: an extra is missing; AssertionError: the arms of a benchmark disagree
    except (ValueError, RuntimeError, OSError, ImportError, AssertionError) as error:
        message = _name_the_flag(" ".join(str(error).split()), args.parser)
        print(f"{args.parser.prog}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: stopped. {args.command.resume}".rstrip(), file=sys.stderr)
        return 130


def _name_the_flag(message: str, command: argparse.ArgumentParser) -> str:
    """Replace an argument's name by its flag: `batch_s: expected` → `--batch-seconds: expected`."""
    names, colon, rest = message.partition(": expected ")
    actions = [action for action in command._actions if action.option_strings]
    flags = {action.dest: action.option_strings[0] for action in actions}
    return ", ".join(flags.get(name, name) for name in names.split(", ")) + colon + rest
