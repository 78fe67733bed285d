import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile

from asrkit.cli import COMMANDS, main
from asrkit.cli.command import add_fields, options_from
from asrkit.transcribe.options import described
from asrkit.workbench import records


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    version = importlib.metadata.version("asrkit-workbench")
    assert (stop.value.code, capsys.readouterr().out) == (0, f"asrkit {version}\n")


def test_a_closed_output_ends_any_command_silently():
    command = [sys.executable, "-m", "asrkit", "ledger"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        running.stdout.close()
        err = running.stderr.read()
    assert (running.returncode, err) == (141, "")


@pytest.mark.parametrize("run, absent", [
    ("[p.format_help() for p in c.parsers().values()]", "torch numpy lhotse matplotlib"),
    ("c.main(['ledger'])", "torch numba lhotse matplotlib"),
])  # fmt: skip
def test_the_help_and_the_ledger_need_neither_torch_nor_its_libraries(run, absent):
    code = f"import sys, asrkit.cli as c; {run}; print({{*{absent.split()}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_ctrl_c_prints_how_to_continue(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("asrkit.workbench.report.report", stopped)
    assert main(["report"]) == 130
    message = "asrkit report: stopped. Run the same command with --resume to continue: "
    assert capsys.readouterr().err.startswith(message)
    for name in ("transcribe", "train", "report", "data prepare"):
        assert COMMANDS[name].resume


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Options that are all optional."""

    width: int = described(8, "how wide", metavar="N", group="an inner group")


@dataclass(frozen=True, kw_only=True)
class Every:
    """A field of each kind."""

    paths: list[Path] = described(MISSING, "files", flag="")
    kind: Literal["one", "two"] = described("one", "which")
    pair: tuple[int, int] | None = described(None, "two numbers", metavar=("A", "B"))
    sure: bool | None = described(None, "yes or no")
    loud: bool = described(False, "a switch")
    batch_s: float = described(2.5, "seconds", flag="--batch-seconds")
    names: list[str] = described((), "some names")
    inner: Inner | None = None


@pytest.mark.parametrize("typed, made_of_it", [
    ("a b", {}),
    ("a b --kind two --pair 3 4 --no-sure --loud --batch-seconds 1 --names x y",
     {"kind": "two", "pair": [3, 4], "sure": False, "loud": True, "batch_s": 1.0, "names": ["x", "y"]}),
    ("a b --width 8", {"inner": Inner(width=8)}),
])  # fmt: skip
def test_options_are_built_from_fields_and_nested_options(typed, made_of_it):
    parser = argparse.ArgumentParser()
    add_fields(parser, Every)
    wanted = Every(paths=[Path("a"), Path("b")], **made_of_it)
    assert options_from(parser.parse_args(typed.split()), Every) == wanted
    text = " ".join(parser.format_help().split())
    assert "seconds (default: 2.5)" in text and "an inner group: --width N" in text
    assert "a switch (default" not in text and "--kind {one,two}" in text


@pytest.mark.parametrize(("arguments", "message"), [
    ("train --manifest nowhere.jsonl --out OUT", "nowhere.jsonl"),
    ("train --tokenizer nowhere.model --out OUT", "nowhere"),
    ("train --device tpu --out OUT", "--device: expected cpu, or cuda where there is a GPU, got tpu"),
    ("train --out /proc/x", "asrkit train: /proc/x cannot be written: "),
    ("ledger --document 005", "--document: expected one of 000, 001"),
])  # fmt: skip
def test_bad_arguments_give_one_line_and_write_nothing(
    arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    err = capsys.readouterr().err.strip()
    assert message in err and "\n" not in err
    assert not list(tmp_path.iterdir())


def test_speech_that_cannot_be_tested_on_is_refused_before_training(tmp_path, capsys):
    rows = []
    for split, text in (("train", "one"), ("test", "2")):
        soundfile.write(str(tmp_path / f"{split}.wav"), np.ones(8000) / 9, 16_000)
        rows.append({"audio": f"{split}.wav", "text": text, "split": split})
    manifest, out = tmp_path / "m.jsonl", tmp_path / "out"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    command = f"train --manifest {manifest} --out {out} --no-progress"
    assert main(command.split()) == 2
    err = capsys.readouterr().err.strip()
    assert "['2'] in '2'" in err and "\n" not in err and not out.exists()


def test_the_ledger_prints_an_answer_a_document_and_a_line_a_claim(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["ledger", "--document", "003"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "003: Training NeMo RNN-T Models Efficiently with Numba FP16 Support" in out
    assert re.search(r"frames-after-8x +200 frames +within 10 %", out)


def test_the_ledger_judges_by_more_records_that_it_is_given(tmp_path, capsys):
    made = records.Measurement("librispeech-longest", "longest", "s", 17.0).record()
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(made) + "\n")
    assert main(["ledger", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    rows = {row["id"]: row for row in found["claims"]}
    longest = rows["librispeech-longest"]
    assert (longest["verdict"], longest["measured"]) == ("reproduced", "17 s")
    assert rows["frames-of-20s"]["appendix"] == "tautology"
    # the shipped ones, of several machines, still count
    assert any(" on " in row["recorded"] for row in found["claims"])
    printed = " ".join(err.split())
    assert all(one["sentence"] in printed for one in found["documents"])
