"""COMMANDS.md: every command with its arguments, from the same table that `--help` is made of
(`make docs`).
"""

import argparse
from pathlib import Path

from asrkit.cli import parser
from asrkit.files import atomic

HEAD = """# Commands

What `asrkit COMMAND --help` says, on one page. `make docs` writes it from the parser, and a test holds it to that.
Errors are one line on stderr and exit code 2; results end with one line of JSON on stdout.
"""


def commands(command: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """`command` and every command under it, in the order of the help."""
    below = [
        action.choices or {}
        for action in command._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    return [
        command,
        *(one for choices in below for sub in choices.values() for one in commands(sub)),
    ]


def section(command: argparse.ArgumentParser) -> str:
    """Name, what it does and a table of arguments with their defaults, as Markdown."""
    formatter, rows = command._get_formatter(), list[str]()
    for action in command._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        name = ", ".join(f"`{flag}`" for flag in action.option_strings)
        value = "" if action.nargs == 0 else f"`{formatter._format_args(action, _value(action))}`"
        said = formatter._expand_help(action) + " (required)" * bool(
            action.option_strings and action.required
        )
        rows.append(
            f"| {f'{name} {value}'.strip()} | {said.replace('|', chr(92) + '|').replace('<', '&lt;')} |"
        )
    table = ["", "| Argument | What it is |", "|---|---|", *rows] if rows else []
    return "\n".join([f"\n## {command.prog}\n", command.description or "", *table]) + "\n"


def _value(action: argparse.Action) -> str:
    return (
        "{" + ",".join(map(str, action.choices)) + "}"
        if action.choices and not action.metavar
        else action.dest.upper()
    )


def document() -> str:
    """The whole of COMMANDS.md."""
    return HEAD + "".join(section(command) for command in commands(parser())[1:])


if __name__ == "__main__":
    with atomic(Path("COMMANDS.md")) as part:
        part.write_text(document(), "utf-8")
