"""The command line: a thin parser over the doors. Errors are one line (exit code 2); results end
with one JSON line.
"""

import argparse
import importlib.metadata
import os
import sys

from asrkit.cli import corpora, cost, measuring, pages, speech
from asrkit.cli.options import Commands

GROUPS = {
    "data": "Prepare speech corpora; see and write down how long their utterances are.",
    "records": "Take in what was measured elsewhere.",
}
COMMANDS: Commands = {
    **pages.COMMANDS,
    **measuring.COMMANDS,
    **speech.COMMANDS,
    **corpora.COMMANDS,
    **cost.COMMANDS,
}


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something: not None, off, or an empty list."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, list) and action.default:
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        said = action.default not in (None, []) and action.default is not False
        return super()._get_help_string(action) if said else action.help


def _version() -> str:
    try:
        return importlib.metadata.version("asrkit")
    except importlib.metadata.PackageNotFoundError:  # a copy of the tree, as on a bare GPU machine
        return "(not installed)"


def parser() -> argparse.ArgumentParser:
    """The whole grammar of `asrkit`, also what `--help` prints."""
    top = argparse.ArgumentParser(
        prog="asrkit", description="Speech recognition made fast, and measured on your machine."
    )
    top.add_argument("--version", action="version", version=f"asrkit {_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    groups = {"": commands}
    for name, (run, text, arguments) in COMMANDS.items():
        group, _, leaf = name.rpartition(" ")
        if (
            group in COMMANDS
        ):  # `report compare` beside `report`: one name of two words, which main() puts together
            group, leaf = "", name
        if group not in groups:
            sub = commands.add_parser(group, help=GROUPS[group], description=GROUPS[group])
            sub.set_defaults(run=lambda args: args.parser.print_help(sys.stderr) or 2, parser=sub)
            groups[group] = sub.add_subparsers(metavar="COMMAND")
        sub = groups[group].add_parser(leaf, help=text, description=text, formatter_class=_Help)
        sub.set_defaults(run=run, parser=sub)
        for flag, rules in arguments:
            sub.add_argument(*(["-p"] if flag == "--parameter" else []), flag, **rules)
    return top


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `asrkit` command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    argv = (
        [" ".join(argv[:2]), *argv[2:]]
        if " ".join(argv[:2]) in COMMANDS and argv[0] in COMMANDS
        else argv
    )
    args = parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except (
        BrokenPipeError
    ):  # nobody reads on, as in `| head -1`: quiet, with the code that a shell gives such a program
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python has yet to flush
        return 141
    except (
        ValueError,
        RuntimeError,
        OSError,
        AssertionError,
    ) as error:  # the last: arms of a benchmark disagree
        print(
            f"{args.parser.prog}: {_typed(' '.join(str(error).split()), args.parser)}",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: stopped", file=sys.stderr)
        return 130


def _typed(message: str, command: argparse.ArgumentParser) -> str:
    """An argument's error with the flag that was typed: `batch_s: expected …` is `--batch-seconds:
    expected …`.
    """
    names, colon, rest = message.partition(": expected ")
    flags = {
        action.dest: action.option_strings[-1]
        for action in command._actions
        if action.option_strings
    }
    return ", ".join(flags.get(name, name) for name in names.split(", ")) + colon + rest
