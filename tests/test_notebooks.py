"""The series itself, run headlessly as `make report` runs it, at a size that is quick."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

from asrkit.workbench.records import problem
from asrkit.workbench.report.execute import SITE_PAGES

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def executed(series_home, series_reports):
    """Folder of the report of the whole series, and what the command printed."""
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    folder = series_reports
    command = [sys.executable, "-m", "asrkit", "report", "--json", "--no-progress"]
    command += ["--out", str(folder), "--jobs", "2"]
    # By steps, for a busy machine is slower, not worse; every cell, but smaller models, fewer steps
    # and shorter speech where they only take time; three repeats are what a verdict needs.
    sizes = {
        "train_seconds": 600,
        "passes": 1,  # of notebook 08
        "tdt_steps": 100,  # of 06
        "most_rows": 4,  # of 09
        "lamb_steps": 20,  # of 10
        "process_steps": 4,
        "evaluated_steps": 9,
        "steps": 150,  # of 11
        "longest_s": 2.0,
        "repeats": 3,
    }
    for name, value in sizes.items():
        command += ["-p", name, str(value)]
    environment = {**os.environ, "ASRKIT_HOME": str(series_home)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "latest", json.loads(done.stdout)


@pytest.mark.live
def test_every_notebook_runs_top_to_bottom_and_the_report_says_so(executed):
    folder, told = executed
    assert told["notebooks"] == told["ran"] == len(NAMES) and told["defects"] == 0
    assert sorted(page.stem for page in folder.glob("*.html")) == sorted(
        [*NAMES, *SITE_PAGES]
    )
    for name in NAMES:
        cells = nbformat.read(folder / f"runs/{name}.ipynb", 4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.live
def test_the_model_of_notebook_00_learned_to_hear_voices_it_never_met(executed):
    lines = [
        json.loads(line)
        for line in (executed[0] / "records/00_start_here.jsonl")
        .read_text()
        .splitlines()
    ]
    assert not any(problem(line) for line in lines)
    (wer,) = [
        line["value"]
        for line in lines
        if (line["what"], line["metric"]) == ("demo-unseen-voices", "wer")
    ]
    assert 0 <= wer < 0.3  # about 0.02; an untrained model has 1.0


@pytest.mark.live
def test_every_declared_static_twin_left_a_picture(executed):
    for name in NAMES:
        for cell in nbformat.read(executed[0] / f"runs/{name}.ipynb", 4).cells:
            if "static-twin" in cell.metadata.get("tags", []):
                shown = [
                    output.get("data", {}).get("text/html", "")
                    for output in cell.outputs
                ]
                assert any("data:image/svg+xml" in html for html in shown), (
                    name,
                    cell.id,
                )


@pytest.mark.live
def test_each_slider_has_a_picture_for_every_value_and_no_two_are_alike(executed):
    sliders = 0
    for name in NAMES:
        page = BeautifulSoup(
            (executed[0] / f"{name}.html").read_text("utf-8"), "html.parser"
        )
        for box in page.select("div.frames"):
            pictures = [frame.img["src"] for frame in box.select("div.frame")]
            words = [frame.img["alt"].strip() for frame in box.select("div.frame")]
            assert len(set(pictures)) == len(pictures) >= 2, (name, box["data-label"])
            assert all(words), (name, box["data-label"])
            sliders += 1
    assert sliders >= 4
