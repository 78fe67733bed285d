"""The gate that every notebook passes: it asks, calls, shows and concludes; code lives in the package.

Each rule is a function of a notebook (a dict, as in its file) and is seen to fail below on a small bad one.
"""

import ast
import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
DEFINITION_LINES = 6
CELL_LINES = 40
FITTING = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
# Drawn with any of these a cell can wait for ever under nbclient; draw into ipywidgets.HTML instead.
HANGING = {"Output", "interact", "interactive", "interactive_output", "interact_manual"}
ABSOLUTE = re.compile(
    r"(?<![\w.:/<])/(?:ho"
    + r"me|Us"
    + r"ers|ro"
    + r"ot|tmp|wo"
    + r"rk|op"
    + r"t|mnt|usr|var|content)/|\b[A-Z]:\\\\?(?:Users|Windows|Program)|(?<!\w)~/"
)


def text_of(cell: dict) -> str:
    """Source of a cell as one string."""
    return "".join(cell["source"])


def code_cells(notebook: dict) -> list[dict]:
    """The code cells, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tags(cell: dict) -> list[str]:
    """Tags of a cell."""
    return cell["metadata"].get("tags", [])


def kinds(cell: dict) -> dict[str, str]:
    """The annotation of each name that a cell declares."""
    return {
        ast.unparse(line.target): ast.unparse(line.annotation)
        for line in parsed(cell).body
        if isinstance(line, ast.AnnAssign)
    }


def parsed(cell: dict) -> ast.Module:
    """Syntax tree of a code cell; lines of IPython's own (%, !, ?) become empty statements."""
    return ast.parse(
        re.sub(r"^(\s*)[%!?].*$", r"\1pass", text_of(cell), flags=re.MULTILINE)
    )


def nodes(notebook: dict) -> Iterator[ast.AST]:
    """Every node of every code cell."""
    for cell in code_cells(notebook):
        yield from ast.walk(parsed(cell))


def called(node: ast.AST) -> str:
    """Dotted name of the called function; empty if the node is not a call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def one_parameters_cell(notebook: dict) -> str:
    """Exactly one cell is tagged `parameters`; it is the second code cell, and each line is typed and commented."""
    cells = code_cells(notebook)
    marked = [index for index, cell in enumerate(cells) if "parameters" in tags(cell)]
    if marked != [1]:
        return f"code cells tagged `parameters`: {marked}; tag exactly one, the second"
    text = text_of(cells[1])
    for statement in parsed(cells[1]).body:
        line = text.splitlines()[statement.lineno - 1]
        if not isinstance(statement, ast.AnnAssign) or "#" not in line:
            return f"a parameter reads `name: type = value  # what it is`, not {line!r}"
    return ""


def starts_with_imports_and_stamp(notebook: dict) -> str:
    """The first code cell imports, shows the machine stamp, and does nothing else that defines or measures."""
    tree = parsed(code_cells(notebook)[0])
    if not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body):
        return "the first code cell has no imports"
    stamps = [
        name
        for node in ast.walk(tree)
        if (name := called(node)) and re.search(r"stamp|\bmachine$", name)
    ]
    return "" if stamps else "the first code cell shows no machine stamp"


def ids_are_unique(notebook: dict) -> str:
    """Every cell has a unique id, which keeps diffs and links stable."""
    ids = [cell.get("id") for cell in notebook["cells"]]
    return (
        ""
        if all(ids) and len(set(ids)) == len(ids)
        else "cells lack an id or share one"
    )


def defines_nothing_long(notebook: dict) -> str:
    """A definition of more than six lines belongs to the package, unless its cell is tagged `exercise`."""
    for cell in code_cells(notebook):
        for node in ast.walk(parsed(cell)) if "exercise" not in tags(cell) else ():
            inside = getattr(node, "value", None)
            defines = isinstance(
                node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ) or (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and inside
                and any(isinstance(n, ast.Lambda) for n in ast.walk(inside))
            )
            if defines and node.end_lineno - node.lineno + 1 > DEFINITION_LINES:
                return f"{ast.unparse(node).splitlines()[0]!r} has over {DEFINITION_LINES} lines; move it into asrkit"
    return ""


def keeps_cells_short(notebook: dict) -> str:
    """A code cell fits on a screen, except for imports; longer code belongs to the package."""
    for cell in code_cells(notebook)[1:]:
        lines = len(text_of(cell).splitlines())
        if lines > CELL_LINES:
            return f"cell {cell['id']!r} has {lines} lines, more than {CELL_LINES}; move code into asrkit"
    return ""


def uses_no_widget_that_hangs(notebook: dict) -> str:
    """No Output, interact or interactive_output."""
    for node in nodes(notebook):
        names = (
            {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module == "ipywidgets"
            else set()
        )
        names |= {node.attr} if isinstance(node, ast.Attribute) else set()
        if names & HANGING:
            return f"ipywidgets.{min(names & HANGING)} can hang a headless run; draw into ipywidgets.HTML"
    return ""


def runs_no_shell(notebook: dict) -> str:
    """No magics and no shell lines: a notebook installs nothing, and is plain Python."""
    for cell in code_cells(notebook):
        if magic := re.search(r"^\s*[%!].*$", text_of(cell), flags=re.MULTILINE):
            return f"{magic[0].strip()!r} is no Python"
    return ""


def shows_pictures_with_words(notebook: dict) -> str:
    """A figure goes through `show(figure, alt)` with an alternative text; a picture in the text has one too."""
    for node in nodes(notebook):
        name = called(node)
        if name.endswith(".savefig") or re.fullmatch(
            r"(plt|pyplot|fig|figure|\w*\.pyplot)\.show", name
        ):
            return f"{name}() leaves no alternative text; use show(figure, alt)"
        if name == "show" or name.endswith("plots.show"):
            words = node.args[1:2] + [k.value for k in node.keywords if k.arg == "alt"]
            if not words or (
                isinstance(words[0], ast.Constant)
                and not str(words[0].value or "").strip()
            ):
                return (
                    "show(figure, alt) needs words for those who cannot see the picture"
                )
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            bare = re.findall(r"!\[\s*\]\(", text_of(cell)) + re.findall(
                r"<img(?![^>]*\balt=[\"'][^\"']+)[^>]*>", text_of(cell)
            )
            if bare or "attachments" in cell:
                return (
                    "a picture in the text has no alternative text, or is an attachment"
                )
    return ""


def names_no_absolute_path(notebook: dict) -> str:
    """Paths come from the package (`home`, `shipped`), never from somebody's machine."""
    found = [
        found[0]
        for cell in notebook["cells"]
        if (found := ABSOLUTE.search(text_of(cell)))
    ]
    return f"absolute path {found[0]!r}" if found else ""


def runs_on_any_kernel(notebook: dict) -> str:
    """The kernel is `python3`, which every environment has, and cell ids need format 4.5."""
    kernel = notebook["metadata"].get("kernelspec", {}).get("name")
    fits = kernel == "python3" and (
        notebook["nbformat"],
        notebook["nbformat_minor"],
    ) >= (4, 5)
    return (
        ""
        if fits
        else f"kernel {kernel!r}, format {notebook['nbformat']}.{notebook['nbformat_minor']}; want python3 and 4.5"
    )


def asks_a_question(notebook: dict) -> str:
    """The notebook opens with one first-level heading, a question; 00 is the tour and may state."""
    headings = [
        line
        for cell in notebook["cells"]
        if cell["cell_type"] == "markdown"
        for line in re.findall(r"^# .*", text_of(cell), re.MULTILINE)
    ]
    opens = notebook["cells"][0]["cell_type"] == "markdown" and text_of(
        notebook["cells"][0]
    ).startswith("# ")
    if not opens or len(headings) != 1:
        return f"open with the one first-level heading; found {headings}"
    return (
        ""
        if headings[0].rstrip().endswith("?")
        else f"the title {headings[0]!r} is no question"
    )


def says_how_large_it_may_run(notebook: dict) -> str:
    """`metadata.asrkit` has the minutes of a quick run and, in `full`, parameters worth a longer one, of the declared types."""
    settings = notebook["metadata"].get("asrkit", {})
    if (
        type(settings.get("minutes_quick")) not in (int, float)
        or settings["minutes_quick"] <= 0
    ):
        return "metadata.asrkit.minutes_quick says how long a run at the default sizes takes"
    cell = next(
        (cell for cell in code_cells(notebook) if "parameters" in tags(cell)),
        {"source": []},
    )
    declared = kinds(cell)
    for name, value in settings.get("full", {}).items():
        if type(value) not in FITTING.get(declared.get(name, ""), ()):
            return (
                f"metadata.asrkit.full has {name} = {value!r}; declared are {declared}"
            )
    return ""


def checks_its_whole_numbers(notebook: dict) -> str:
    """Each integer parameter is checked by `expect_parameters`, as papermill injects any value."""
    wanted = set[str]()
    for cell in code_cells(notebook):
        if "parameters" in tags(cell):
            wanted |= {name for name, kind in kinds(cell).items() if kind == "int"}
    for node in nodes(notebook):
        if called(node) == "expect_parameters":
            wanted -= {keyword.arg for keyword in node.keywords}
    return (
        f"no check of {sorted(wanted)}; pass them to expect_parameters"
        if wanted
        else ""
    )


RULES: list[Callable[[dict], str]] = [
    one_parameters_cell, starts_with_imports_and_stamp, ids_are_unique, defines_nothing_long,
    keeps_cells_short, uses_no_widget_that_hangs, runs_no_shell, shows_pictures_with_words, names_no_absolute_path, runs_on_any_kernel,
    asks_a_question, says_how_large_it_may_run, checks_its_whole_numbers,
]  # fmt: skip


def problems(notebook: dict, name: str) -> list[str]:
    """The problems of a notebook, a line for each rule."""
    rules = [
        rule
        for rule in RULES
        if not (name.startswith("00_") and rule is asks_a_question)
    ]
    try:
        return [
            f"{rule.__name__}: {problem}"
            for rule in rules
            if (problem := rule(notebook))
        ]
    except SyntaxError as error:
        return [f"a cell is no Python: {error.msg}, {error.text!r}"]


NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_series_is_there_and_numbered():
    assert NOTEBOOKS, "no notebook to check"
    numbers = [path.name[:3] for path in NOTEBOOKS]
    assert all(
        re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", path.name) for path in NOTEBOOKS
    ) and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_passes_the_gate(path):
    assert problems(json.loads(path.read_text(encoding="utf-8")), path.name) == []


def cell(kind: str, source: str, identity: str, *marks: str) -> dict:
    """A cell as in a notebook file."""
    made = {
        "cell_type": kind,
        "id": identity,
        "metadata": {"tags": list(marks)} if marks else {},
        "source": source.splitlines(keepends=True),
    }
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {})


GOOD = {
    "nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": {"name": "python3"}, "asrkit": {"minutes_quick": 1}},
    "cells": [
        cell("markdown", "# Why is it slow?\n![one lattice](../figures/lattice.png)", "a"),
        cell("code", "import torch\nfrom asrkit.workbench.plots import machine_stamp, show\nmachine_stamp()", "b"),
        cell("code", "frames: int = 200  # T\nquick: bool = True  # small sizes", "c", "parameters"),
        cell("code", "expect_parameters(globals(), frames=int)", "e"),
        cell("code", "def twice(x):\n    return 2 * x\nshow(figure, 'time grows with frames')", "d"),
    ],
}  # fmt: skip
LONG = "def f(x):\n" + "    x += 1\n" * DEFINITION_LINES


def changed(index: int, source: str | None = None, **fields: object) -> dict:
    """GOOD with one cell's source or fields replaced."""
    notebook = copy.deepcopy(GOOD)
    notebook["cells"][index] |= fields | (
        {} if source is None else {"source": source.splitlines(keepends=True)}
    )
    return notebook


def with_metadata(**metadata: object) -> dict:
    """GOOD with other metadata."""
    return GOOD | {"metadata": {**GOOD["metadata"], **metadata}}


BAD = [
    (one_parameters_cell, changed(2, metadata={})),
    (one_parameters_cell, changed(2, "frames = 200  # untyped")),
    (one_parameters_cell, changed(2, "frames: int = 200")),
    (starts_with_imports_and_stamp, changed(1, "machine_stamp()")),
    (starts_with_imports_and_stamp, changed(1, "import torch")),
    (ids_are_unique, changed(4, id="c")),
    (checks_its_whole_numbers, changed(3, "expect_parameters(globals(), seed=int)")),
    (defines_nothing_long, changed(4, LONG)),
    (
        defines_nothing_long,
        changed(4, "f = lambda x: [\n" + "    x,\n" * DEFINITION_LINES + "]"),
    ),
    (keeps_cells_short, changed(4, "x = 1\n" * (CELL_LINES + 1))),
    (uses_no_widget_that_hangs, changed(4, "import ipywidgets as W\nout = W.Output()")),
    (uses_no_widget_that_hangs, changed(4, "from ipywidgets import interact")),
    (runs_no_shell, changed(4, "!pip install asrkit")),
    (shows_pictures_with_words, changed(4, "plt.show()")),
    (shows_pictures_with_words, changed(4, "plots.show(figure, alt=' ')")),
    (shows_pictures_with_words, changed(0, "# Why?\n![](figures/a.png)")),
    (shows_pictures_with_words, changed(0, "# Why?\n<img src='a.png'>")),
    (names_no_absolute_path, changed(4, "open('/ho" + "me/ann/speech.wav')")),
    (runs_on_any_kernel, with_metadata(kernelspec={"name": "my-venv"})),
    (runs_on_any_kernel, GOOD | {"nbformat_minor": 4}),
    (asks_a_question, changed(0, "# It is slow")),
    (asks_a_question, changed(0, "# Why?\n# And how?")),
    (says_how_large_it_may_run, with_metadata(asrkit={})),
    (
        says_how_large_it_may_run,
        with_metadata(asrkit={"minutes_quick": 1, "full": {"frame": 2000}}),
    ),
    (
        says_how_large_it_may_run,
        with_metadata(asrkit={"minutes_quick": 1, "full": {"frames": 2000.0}}),
    ),
]


@pytest.mark.parametrize(
    "rule, notebook", BAD, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_rule_fails_on_what_it_is_for_and_on_nothing_else(rule, notebook):
    assert [
        problem.split(":")[0] for problem in problems(notebook, "01_bad.ipynb")
    ] == [rule.__name__]
    assert {rule for rule, _ in BAD} == set(RULES)


@pytest.mark.parametrize("notebook, name", [
    (GOOD, "01_good.ipynb"),
    (changed(4, LONG, metadata={"tags": ["exercise"]}), "01_exercise.ipynb"),
    (changed(4, "x = 1\n" * CELL_LINES), "01_as_long_as_may_be.ipynb"),
    (changed(0, "# Start here"), "00_start_here.ipynb"),
    (with_metadata(asrkit={"minutes_quick": 0.5, "full": {"frames": 2000, "quick": False}}), "01_full.ipynb"),
    (changed(4, "ratio = a / b\nshare = f'{x:.1f}/{y}'\nspeed = 'https://example.org/usr/page'"), "01_divides.ipynb"),
    (changed(0, "# Why?\n<img src='a.png' alt='a lattice'>"), "01_html.ipynb"),
])  # fmt: skip
def test_what_is_allowed_passes(notebook, name):
    assert problems(notebook, name) == []
