"""Controls in a real JupyterLab: the keyboard moves each one, and its picture changes.

Sliders of `plots.frames` are one widget, so one notebook stands for all that have them: that their pictures differ is
tested on the report of the series. A control that a notebook makes by itself is moved in that notebook. Only the cells
that controls need are run, at small sizes.
"""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell
from playwright.sync_api import TimeoutError as TooLate

ROOT = Path(__file__).resolve().parents[2]
OWN = re.compile(r"ipywidgets\.(\w*Slider|Dropdown|Checkbox)\(")
CONTROL = re.compile(OWN.pattern + r"|plots\.frames\(")
EXAMPLE = "03_loss_kernels"  # for all that call plots.frames
KEYS = {
    "slider": ("ArrowRight", "ArrowLeft"),
    "combobox": ("End", "Home"),
    "checkbox": ("Space",),
}  # Lab keeps the arrows of lists
SMALL = {  # sizes that take seconds; where a notebook is not named it runs as it is
    "03_loss_kernels": {"batch": 1, "frames": 20, "rows": 11, "tokens": 64, "width": 32, "longest": 100, "repeats": 3},
}  # fmt: skip
OVER = """() => { const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputArea-prompt")].map(one => one.textContent);
  return prompts.some(one => /\\d/.test(one)) && !prompts.some(one => one.includes("*")) }"""

pytestmark = [pytest.mark.browser, pytest.mark.live]


def code(notebook):
    """Cells that a run numbers."""
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.source.strip()
    ]


def to_try():
    """The example, and each notebook that makes a slider, a list or a box to tick by itself."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return [
        path
        for path in paths
        if path.stem == EXAMPLE
        or any(OWN.search(cell.source) for cell in code(nbformat.read(path, 4)))
    ]


def smaller(notebook, sizes):
    """`notebook` with a cell behind its parameters that sets `sizes`, which they declare."""
    (at,) = (
        i
        for i, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    )
    declared = re.findall(r"^\w+(?=:)", notebook.cells[at].source, re.MULTILINE)
    assert set(sizes) <= set(declared)
    notebook.cells.insert(
        at + 1,
        new_code_cell(
            "\n".join(f"{name} = {value!r}" for name, value in sizes.items())
        ),
    )
    return notebook


def controls_only(notebook):
    """`notebook` without the code cells that its controls do not need."""
    needed, names = [], set()
    for cell in reversed(code(notebook)):
        bound, used = bound_and_used(cell.source)
        declares = "parameters" in cell.metadata.get("tags", [])
        if declares or CONTROL.search(cell.source) or bound & names:
            needed.append(cell)
            names |= used
    notebook.cells = needed[::-1]
    return notebook


def bound_and_used(source):
    """Names that a cell binds, and names that it reads."""
    bound, used = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
    return bound, used


def run_all(page):
    """Every cell, by the menu, until the last has run or one has failed: nothing is left to wait for."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.wait_for_function(OVER, polling=100, timeout=120_000)


def label(control):
    """(role, name) of a control. ipywidgets ties no name to the handle of a slider: there it is what stands before it."""
    role, name = re.match(r'- (\w+)(?: "(.*?)")?', control.aria_snapshot()).groups()
    beside = control.locator(
        "xpath=ancestor::*[contains(@class, 'widget-slider')]"
    ).locator("label")
    return role, name or (beside.inner_text().strip() if beside.count() else "")


def state(control):
    """What a control says its value is; a slider's aria-valuenow has one decimal only."""
    return control.evaluate(
        "one => one.getAttribute('aria-valuetext') ?? (one.type == 'checkbox' ? one.checked : one.value)"
    )


def move(page, control, patience_s):
    """What changes beside `control` once the keyboard has moved it: "picture", only its "words", or nothing, ""."""
    role, _ = label(control)
    area = control.locator(
        "xpath=ancestor::*[contains(concat(' ', @class, ' '), ' jp-OutputArea ')]"
    )
    shown = "one => [...one.querySelectorAll('img')].map(img => [img.src, img.alt])"
    before, value = area.evaluate(shown), state(control)
    control.scroll_into_view_if_needed()
    for key in KEYS[role]:
        control.focus()
        page.keyboard.press(key)
        if state(control) != value:
            break
    else:
        return ""
    changed = (
        f"([area, before]) => JSON.stringify(({shown})(area)) != JSON.stringify(before)"
    )
    try:
        page.wait_for_function(
            changed,
            arg=[area.element_handle(), before],
            polling=50,
            timeout=1000 * patience_s,
        )
    except TooLate:
        return ""
    return (
        "picture"
        if [src for src, _ in area.evaluate(shown)] != [src for src, _ in before]
        else "words"
    )


def problems(page, patience_s=60.0):
    """What is wrong with a notebook that has run: its cells, controls and pictures."""
    told = page.locator(
        "[data-mime-type$=stderr]"
    ).all_inner_texts()  # JupyterLab puts exceptions there as well
    found, moved = [f"a cell says {text.strip().splitlines()[-1]}" for text in told], []
    for control in (
        page.locator(".jupyter-widgets")
        .locator("[role=slider], select, input[type=checkbox]")
        .all()
    ):
        role, name = label(control)
        moved.append(move(page, control, patience_s))
        found += [] if name else [f"a {role} has no name"]
        found += [] if moved[-1] else [f"{role} {name!r} changes nothing"]
    found += [] if "picture" in moved else ["no control changes a picture"]
    mute = [
        picture
        for picture in page.locator(".jp-OutputArea img").all()
        if not (picture.get_attribute("alt") or "").strip()
    ]
    return found + ["a picture has no words"] * len(mute)


@pytest.mark.parametrize("path", to_try(), ids=lambda path: path.stem)
def test_in_jupyterlab_every_control_changes_its_picture(path, lab, desk, shots):
    notebook = controls_only(smaller(nbformat.read(path, 4), SMALL.get(path.stem, {})))
    nbformat.write(notebook, lab.folder / path.name)
    with lab.opened(desk, path.name) as page:
        run_all(page)
        assert problems(page) == []
        page.screenshot(path=shots / f"lab_{path.stem}.png")
    assert desk.forget() == ([], [])
