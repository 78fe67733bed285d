"""Write docs/commands.md from the parser that `--help` uses (`make docs`)."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from asrkit.cli import COMMANDS, SECTIONS, parser
from asrkit.files import atomic

HEAD = """# Commands

What `asrkit COMMAND --help` says, on one page. `make docs` writes it from the parser, and a test
checks that it is up to date.

Results are text for people; with `--json`, stdout has one JSON document instead. Errors are one
line on stderr and exit code 2.
"""


def document() -> str:
    """The text of docs/commands.md."""
    parsers = _parsers(parser())
    sections = []
    for title, commands in SECTIONS.items():
        links = [_link(command.name) for command in commands]
        sections.append(f"- {title}: {', '.join(links)}\n")
    pages = [_page(parsers[f"asrkit {name}"], name) for name in COMMANDS]
    return "".join([HEAD, "\n", *sections, *pages])


def _link(name: str) -> str:
    anchor = name.replace(" ", "-")
    return f"[{name}](#asrkit-{anchor})"


def _parsers(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser of `command` and those of all its subcommands, by what is typed."""
    parsers = {command.prog: command}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand in action.choices.values():
                parsers |= _parsers(subcommand)
    return parsers


def _page(command: argparse.ArgumentParser, name: str) -> str:
    """What a command does, examples, and a table for each group of its arguments, as Markdown."""
    lines = ["", f"## {command.prog}", "", command.description or ""]
    examples = COMMANDS[name].examples
    if examples:
        lines += ["", *(f"    {example}" for example in examples)]
    for group in command._action_groups:
        rows = [*_rows(command, group._group_actions)]
        if rows:
            title = (group.title or "").replace("positional arguments", "arguments")
            title = title[:1].upper() + title[1:]  # what is a GPU stays one
            lines += ["", f"| {title} | |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _rows(command: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> Iterable[str]:
    formatter = command._get_formatter()
    for action in actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        parts = [", ".join(f"`{flag}`" for flag in action.option_strings)]
        if action.nargs != 0:
            parts.append(f"`{formatter._format_args(action, _metavar(action))}`")
        text = formatter._expand_help(action)
        if action.option_strings and action.required:
            text += " (required)"
        text = text.replace("|", r"\|").replace("<", "&lt;")
        yield f"| {' '.join(filter(None, parts))} | {text} |"


def _metavar(action: argparse.Action) -> str:
    if action.choices and not action.metavar:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


if __name__ == "__main__":
    with atomic(Path("docs/commands.md")) as part:
        part.write_text(document(), "utf-8")
