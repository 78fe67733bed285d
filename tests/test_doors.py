"""The doors: every name of asrkit that a notebook, the README or a guide imports opens.

The list is made from these files, so a door that moves is changed there in the same commit.
"""

import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from asrkit.files import version

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> str:
    """The Python code of a notebook, or of a page's snippets, without lines of IPython's syntax."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"^(\s*)[%!?].*$", r"\1pass", code, flags=re.MULTILINE)


def doors_of(code: str) -> tuple[set[tuple[str, str]], dict[str, tuple[str, str]]]:
    """(module, name) of each import from asrkit, and their local names."""
    doors, local = set(), {}
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "asrkit"
        ):
            for alias in node.names:
                doors.add((node.module, alias.name))
                local[alias.asname or alias.name] = (node.module, alias.name)
        elif isinstance(node, ast.Import):
            doors |= {
                (a.name, "") for a in node.names if a.name.split(".")[0] == "asrkit"
            }
    return doors, local


def opened(module: str, name: str) -> object:
    """The object that `from module import name` imports."""
    found = importlib.import_module(module)
    if name and not hasattr(found, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(found, name) if name else found


@pytest.mark.parametrize("path", [*NOTEBOOKS, *PAGES], ids=lambda path: path.name)
def test_every_name_that_a_reader_imports_opens(path):
    code = code_of(path)
    doors, local = doors_of(code)
    for module, name in doors:
        opened(module, name)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = opened(*local[node.value.id]) if node.value.id in local else None
            if isinstance(found, ModuleType):
                assert hasattr(found, node.attr), (
                    f"{path.name}: {node.value.id}.{node.attr}"
                )


@pytest.mark.parametrize("name", ["asrkit.transcribe", "asrkit.training"])
def test_a_room_that_opens_late_lists_all_its_names(name):
    room = importlib.import_module(name)
    assert sorted(room.__all__) == dir(room)
    assert all(hasattr(room, door) for door in room.__all__)


def test_the_package_knows_its_version():
    assert importlib.import_module("asrkit").__version__ == version()


def test_the_doors_are_found():
    doors = set().union(*(doors_of(code_of(path))[0] for path in [*NOTEBOOKS, *PAGES]))
    assert {
        ("asrkit.losses", "rnnt_loss"),
        ("asrkit.decoders", "transducer_greedy"),
        ("asrkit.models", "make_model"),
        ("asrkit.transcribe", "transcribe"),
    } <= doors
