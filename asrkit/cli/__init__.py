"""The command line: a thin parser over the package.

Text for people goes to stdout, or one JSON document with --json. An error is one line on stderr and
exit code 2.
"""

import argparse
import importlib.metadata
import io
import os
import sys
from collections.abc import Mapping

from asrkit.cli import (
    bench,
    cost,
    data,
    doctor,
    export,
    ledger,
    report,
    train,
    transcribe,
)
from asrkit.cli.command import Command
from asrkit.cli.options import add_json

SECTIONS: Mapping[str, tuple[Command, ...]] = {  # as `asrkit --help` lists them
    "recognise speech": (transcribe.COMMAND, train.COMMAND, export.COMMAND),
    "prepare speech": (data.PREPARE, data.STATS, data.LENGTHS),
    "measure this machine": (doctor.COMMAND, bench.COMMAND, cost.COMMAND),
    "reports and records": (
        report.COMMAND,
        ledger.COMMAND,
    ),
}
COMMANDS = {command.name: command for section in SECTIONS.values() for command in section}
PARENTS = {  # first words that do nothing by themselves
    "data": "Prepare speech corpora, and list how long their utterances are.",
}
DESCRIPTION = "Speech recognition made fast, and measured on your machine."


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults that say something (not None, False or []), and keeps lines of examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, list) and action.default:
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "\n".join(indent + line for line in text.splitlines())


def _version() -> str:
    try:
        return importlib.metadata.version("asrkit")
    except importlib.metadata.PackageNotFoundError:  # a copied source tree
        return "(not installed)"


def _overview() -> str:
    """The description of `asrkit --help`: every command under the heading of its section."""
    lines = [DESCRIPTION]
    for title, commands in SECTIONS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {command.name:15} {command.summary}" for command in commands]
    return "\n".join(lines)


def _print_help(args: argparse.Namespace) -> int:
    args.parser.print_help(sys.stderr)
    return 2


def _add_command(
    subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: Command
) -> None:
    epilog = None
    if command.examples:
        epilog = "\n  ".join(["examples:", *command.examples])
    parser = subparsers.add_parser(
        name,
        help=command.summary,
        description=" ".join(filter(None, [command.summary, command.details])),
        epilog=epilog,
        formatter_class=_Help,
    )
    parser.set_defaults(run=command.run, parser=parser)
    command.add_arguments(parser)
    add_json(parser)


def parser() -> argparse.ArgumentParser:
    """The parser of the `asrkit` command, with all subcommands."""
    top = argparse.ArgumentParser(
        prog="asrkit",
        usage="asrkit [-h] [--version] COMMAND ...",
        description=_overview(),
        epilog="`asrkit COMMAND --help` explains a command and shows examples.",
        formatter_class=_Help,
    )
    top.add_argument("--version", action="version", version=f"asrkit {_version()}")
    top.set_defaults(run=_print_help, parser=top)
    # the overview lists the commands by section, so argparse's own list is left out
    commands = top.add_subparsers(prog="asrkit", metavar="COMMAND", help=argparse.SUPPRESS)
    children = {}
    for name, text in PARENTS.items():
        parent = commands.add_parser(name, help=text, description=text)
        parent.set_defaults(run=_print_help, parser=parent)
        children[name] = parent.add_subparsers(metavar="COMMAND")
    for name, command in COMMANDS.items():
        first, _, last = name.rpartition(" ")
        _add_command(children.get(first, commands), last, command)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run the `asrkit` command; returns the exit code.

    0 is success; 1: something failed, as the output says; 2: a wrong argument or an error, told in
    one line on stderr; 130: stopped by Ctrl-C; 141: nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be no UTF-8
    if argv is None:
        argv = sys.argv[1:]
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `| head -1`: end quietly, with a shell's code for this
        # Python flushes it once more at exit: give it somewhere to write
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    # AssertionError: the arms of a benchmark disagree
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        message = _name_the_flag(" ".join(str(error).split()), args.parser)
        print(f"{args.parser.prog}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: stopped", file=sys.stderr)
        return 130


def _name_the_flag(message: str, command: argparse.ArgumentParser) -> str:
    """Name the flag that was typed: `batch_s: expected` becomes `--batch-seconds: expected`."""
    names, colon, rest = message.partition(": expected ")
    flags = {}
    for action in command._actions:
        if isinstance(action, argparse.BooleanOptionalAction):
            flags[action.dest] = action.option_strings[0]  # --punctuation, --no-punctuation
        elif action.option_strings:
            flags[action.dest] = action.option_strings[-1]
    return ", ".join(flags.get(name, name) for name in names.split(", ")) + colon + rest
