"""Write docs/commands.md from the parser that `--help` uses (`make docs`)."""

import argparse
import os
from pathlib import Path

from asrkit.cli import COMMANDS, SECTIONS, parser
from asrkit.files import atomic

HEAD = """# Commands

What `asrkit COMMAND --help` says, on one page. `make docs` writes it, and a test checks that it is
up to date.

Results are text for people; with `--json`, stdout has one JSON document instead. Errors are one
line on stderr and exit code 2.
"""
COLUMNS = "100"


def document() -> str:
    """The text of docs/commands.md."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS  # which argparse asks for
    try:
        parsers = _parsers(parser())
        pages = [_page(parsers[f"asrkit {name}"]) for name in COMMANDS]
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before
    sections = []
    for title, commands in SECTIONS.items():
        links = [_link(command.name) for command in commands]
        sections.append(f"- {title}: {', '.join(links)}\n")
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


def _page(command: argparse.ArgumentParser) -> str:
    return f"\n## {command.prog}\n\n```text\n{command.format_help()}```\n"


if __name__ == "__main__":
    with atomic(Path("docs/commands.md")) as part:
        part.write_text(document(), "utf-8")
