"""Notebooks in a real JupyterLab: every cell runs, and the keyboard moves each slider and its picture.

It takes minutes a notebook. ASRKIT_LAB names others than these four, or all:
ASRKIT_LAB=all .venv/bin/python -m pytest tests/browser/test_lab.py
"""

import os
import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.live]

CHOSEN = os.environ.get("ASRKIT_LAB", "00 02 06 12").split()
NOTEBOOKS = [
    path
    for path in sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
    if {"all", path.stem[:2]} & {*CHOSEN}
]
LONGEST_MS = 1_200_000  # of a notebook, on a busy machine
PATIENCE_MS = 60_000
ALL_CELLS_RAN = """() => {
  const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")];
  const shown = prompts.map(prompt => prompt.textContent).join();  // not of hidden cells
  const idle = document.querySelector(".jp-Notebook-ExecutionIndicator[data-status=idle]");
  return /\\d/.test(shown) && !shown.includes("*") && idle;
}"""
HEIGHT = "panel => { panel.scrollTop = 0; return 100 + panel.scrollHeight; }"
HIGHEST = 16_000  # pixels that chromium draws


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_sliders_move_its_pictures(lab, window, shots, path):
    from playwright.sync_api import expect

    shutil.copy(path, lab.folder)
    with lab.opened(window(), path.name) as page:
        for name in ("Run", "Run All Cells"):
            page.get_by_role("menuitem", name=name, exact=True).click()
        page.wait_for_function(ALL_CELLS_RAN, timeout=LONGEST_MS, polling=500)
        assert page.locator("[data-mime-type$=stderr]").all_inner_texts() == []
        boxes = page.locator(".widget-vbox:has(img)")
        drawn = path.read_text("utf-8").count("plots.explore(")
        expect(boxes).to_have_count(drawn, timeout=PATIENCE_MS)
        for number, box in enumerate(boxes.all()):
            picture = box.locator("img")
            for slider in box.get_by_role("slider").all():
                last = slider.get_attribute("aria-valuemax")
                is_last = slider.get_attribute("aria-valuenow") == last
                before = picture.get_attribute("src")
                slider.press("ArrowLeft" if is_last else "ArrowRight")
                changed = expect(picture).not_to_have_attribute
                changed("src", before, timeout=PATIENCE_MS)
            box.screenshot(path=shots / f"lab_{path.stem}_{number}.png")
        height = page.locator(".jp-WindowedPanel-outer").evaluate(HEIGHT)
        page.set_viewport_size({"width": 1280, "height": min(height, HIGHEST)})
        page.screenshot(path=shots / f"lab_{path.stem}.png")
