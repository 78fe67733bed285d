"""A slider of `plots.frames` in a real JupyterLab: the keyboard moves it, and its picture changes.

It is the only control of the notebooks, so a small one stands for all. That the pictures of each slider differ is tested on the
report of the series.
"""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytestmark = [pytest.mark.browser, pytest.mark.live]

SLIDER = """from asrkit.workbench import plots
def draw(size):
    figure, ax = plots.canvas(f"{size} bars")
    ax.bar(range(size), range(1, size + 1))
    return figure, f"A slider's {size} bars, each higher"
plots.frames(draw, [2, 3, 5], "bars", start=3)"""
PATIENCE_MS = 300_000


def test_in_jupyterlab_the_keyboard_moves_a_slider_and_its_picture(lab, window, shots):
    notebook = new_notebook(cells=[new_code_cell(SLIDER)])
    nbformat.write(notebook, lab.folder / "slider.ipynb")
    with lab.opened(window(), "slider.ipynb") as page:
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        slider = page.get_by_role("slider")
        slider.wait_for(timeout=PATIENCE_MS)
        assert page.locator("[data-mime-type$=stderr]").count() == 0
        assert page.locator(".widget-slider label").inner_text() == "bars"
        picture = page.locator(".jp-OutputArea img")
        assert picture.get_attribute("alt") == "A slider's 3 bars, each higher"
        before = picture.get_attribute("src")
        slider.press("ArrowRight")
        page.get_by_alt_text("5 bars").wait_for(timeout=PATIENCE_MS)
        assert picture.get_attribute("src") != before
        page.screenshot(path=shots / "lab_slider.png")
