"""The command line: a thin parser over the package.

Text for people goes to stdout, or one JSON document with --json. An error is one line on stderr and
exit code 2.
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
from asrkit.cli.command import Command, add_fields, made
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
    """The description of `asrkit --help`: every command under the heading of its section."""
    lines = [DESCRIPTION]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {command.name:15} {command.summary}" for command in commands]
    return "\n".join(lines)


def parsers(width: int | None = None) -> dict[str, argparse.ArgumentParser]:
    """The parser of `asrkit` by the name "", and those of its commands by theirs.

    Args:
        width: Columns of the help; None: those of the terminal.
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
    rooms = {"": first, "data": data.add_subparsers(metavar="COMMAND")}
    found = {"": top, "data": data}
    for name, command in COMMANDS.items():
        room, _, last = name.rpartition(" ")
        found[name] = rooms[room].add_parser(last, **_explained(command), formatter_class=formatter)
        add_fields(found[name], command.options)
    for name, one in found.items():
        one.set_defaults(parser=one, command=COMMANDS.get(name))
    return found


def _explained(command: Command) -> dict[str, Any]:
    """What argparse shows about a command."""
    return {
        "help": command.summary,
        "description": textwrap.fill(f"{command.summary} {command.details}", TEXT_WIDTH),
        "epilog": "\n  ".join(["examples:", *command.examples]),
    }


def run_alone(command: Command, prog: str, argv: list[str] | None = None) -> int:
    """Run one command as a program of its own; returns the exit code, as `main` does.

    Args:
        command: The command.
        prog: What is typed to start it.
        argv: Its arguments; None takes those of the process.
    """
    explained = _explained(command)
    del explained["help"]
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, **explained, formatter_class=formatter)
    add_fields(parser, command.options)
    parser.set_defaults(parser=parser, command=command)
    return _run(parser.parse_args(argv))


def main(argv: list[str] | None = None) -> int:
    """Run the `asrkit` command; returns the exit code.

    0 is success; 1: something failed, as the output says; 2: a wrong argument or an error, told in
    one line on stderr; 130: stopped by Ctrl-C; 141: nobody reads the output any more.
    """
    if sys.stdout is None:  # as after `>&-`
        print("asrkit: standard output is closed. Redirect it: > FILE.", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be no UTF-8
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
        code = args.command.run(made(args, args.command.options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `| head -1`: end quietly, with a shell's code for this
        # Python flushes it once more at exit: give it somewhere to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    # ImportError: of an extra; AssertionError: the arms of a benchmark disagree
    except (ValueError, RuntimeError, OSError, ImportError, AssertionError) as error:
        message = _name_the_flag(" ".join(str(error).split()), args.parser)
        print(f"{args.parser.prog}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: stopped. {args.command.goes_on}".rstrip(), file=sys.stderr)
        return 130


def _name_the_flag(message: str, command: argparse.ArgumentParser) -> str:
    """Name the flag that was typed: `batch_s: expected` becomes `--batch-seconds: expected`."""
    names, colon, rest = message.partition(": expected ")
    flags = {one.dest: one.option_strings[0] for one in command._actions if one.option_strings}
    return ", ".join(flags.get(name, name) for name in names.split(", ")) + colon + rest
