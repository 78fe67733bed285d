"""What is written about asrkit beside its code: commands, links, tables and the citation have to be true."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from asrkit.cli import COMMANDS, PARENTS, parser
from asrkit.cli import _join_words as join_words
from asrkit.cli.docs import document

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "COMMANDS.md", "data/published/README.md"]


def commands_of(top):
    """The parser of each command by what is typed after `asrkit`."""
    found = {}
    for action in top._subparsers._group_actions:
        for name, sub in action.choices.items():
            if sub._subparsers:
                found |= {f"{name} {leaf}": one for leaf, one in commands_of(sub).items()}
            else:
                found[name] = sub
    return found


SHELL = re.findall(r"^    (?:make \w+ && )?(asrkit .+?)(?:\s+#.*)?$", README, re.MULTILINE)
INLINE = re.findall(r"`(asrkit [a-z][^`…]*)`", README)


def test_the_page_of_commands_says_what_help_says():
    assert (ROOT / "COMMANDS.md").read_text(encoding="utf-8") == document(), "run `make docs`"


def test_the_page_of_commands_has_every_command_and_every_option():
    page, parsers = document(), commands_of(parser())
    for name, command in COMMANDS.items():
        (section,) = re.findall(
            rf"^## asrkit {name}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL
        )
        assert command.summary in section
        flags = [flag for action in parsers[name]._actions for flag in action.option_strings]
        assert "--json" in flags
        assert [flag for flag in flags if f"`{flag}`" not in section] == ["-h", "--help"]


def test_every_example_of_the_help_can_be_typed():
    lines = [example for command in COMMANDS.values() for example in command.examples]
    assert len(lines) > 20 and all(command.examples for command in COMMANDS.values())
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        assert words[0] == "asrkit"
        args = parser().parse_args(join_words(words[1:]))
        assert args.parser.prog.startswith("asrkit ") and args.run


def test_there_are_examples_to_check():
    assert len(SHELL) > 10 and len(INLINE) > 5


@pytest.mark.parametrize("line", sorted({*SHELL, *INLINE}))
def test_every_command_in_the_readme_can_be_typed(line):
    words = shlex.split(line)[1:]
    if " ".join(words) not in {
        *COMMANDS,
        *PARENTS,
        "--version",
    }:  # a name alone is no whole command
        parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_pictures_lead_to_files_that_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        assert target.startswith("https:") or ((ROOT / page).parent / target).exists(), target


def test_the_readme_lists_every_notebook():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"[{path.stem}](notebooks/{path.name})" in README


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["version"] == project["version"] and [*cited["license"]] == project[
        "license"
    ].split(" AND ")
    assert {"cff-version", "message", "title", "authors", "type"} <= {*cited}
