"""Write docs/commands.md from the parsers that `--help` uses (`make docs`)."""

from pathlib import Path

from asrkit.cli import COMMANDS, parsers

HEAD = """# Commands

The help of every command on one page. `make docs` writes it, and a test checks that it is
up to date.

Results are text for people; with `--json`, stdout has one JSON document instead. Errors are one
line on stderr and exit code 2.

"""
COLUMNS = 98


def document() -> str:
    """The text of docs/commands.md."""
    texts = {name: one.format_help() for name, one in parsers(COLUMNS).items()}
    pages = [f"\n## asrkit {name}\n\n```text\n{texts[name]}```\n" for name in COMMANDS]
    return "".join([HEAD, f"```text\n{texts['']}```\n", *pages])


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(document(), "utf-8")
