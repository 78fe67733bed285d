"""docs/scale.md: its commands run as they are written, and so does its script for Slurm."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
import torch

from asrkit.transcribe.bulk import load_plan, rows

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
RUN = re.findall(r"^    ((?:asrkit transcribe|for k in|cat) .+)$", PAGE, re.MULTILINE)
BLOCKS = dict(reversed(re.findall(r"```(bash)\n(.*?)```", PAGE, re.DOTALL)))
NEEDS_RAY = "--on ray"


@pytest.fixture
def place(tmp_path, archive, tiny_speech):
    """A folder with the names that the page takes for granted: a model, a manifest, and `asrkit`."""
    shutil.copy(archive, tmp_path / "parakeet.nemo")
    lines = []
    for number in range(4):
        samples = tiny_speech.waveforms[number].repeat(100)[: 65 * 16_000]  # a shard of its own
        soundfile.write(tmp_path / f"{number}.flac", samples.numpy(), 16_000)
        lines.append({"audio": f"{number}.flac", "duration": len(samples) / 16_000})
    (tmp_path / "broken.wav").write_text("no sound")
    lines.append({"audio": "broken.wav", "duration": 3.0})  # in the last shard
    manifest = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "manifest.jsonl").write_text(manifest)
    script = tmp_path / "bin" / "asrkit"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m asrkit.cli "$@"\n')
    script.chmod(0o755)
    return tmp_path


def shell(command, place, **environment):
    """Run a command of the page in its folder; on a machine without a GPU, on the CPU."""
    if not torch.cuda.is_available():
        command = re.sub(r"--device cuda(:\$k)?", "--device cpu", command)
    names = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    names["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=os.environ | names | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def heard(place):
    """id -> error of what is in the folder `text`."""
    return {row["id"]: row["error"] for row in rows(place / "text")}


ALL = {"0.flac", "1.flac", "2.flac", "3.flac", "broken.wav"}


def test_the_commands_of_one_machine_run_as_they_are_written(place):
    commands = [line for line in RUN if NEEDS_RAY not in line]
    first = commands[0]
    (errors,) = [line for line in commands if line.startswith("cat ")]
    (two,) = [line for line in commands if "--part $k/2 " in line]
    (eight,) = [line for line in commands if "--part $k/8 " in line]
    others = [line for line in commands if line not in (first, errors, two, eight)]
    done = shell(first, place)
    assert done.returncode == 1, done.stderr  # one recording cannot be read
    assert {name for name, error in heard(place).items() if error} == {"broken.wav"}
    listed = shell(errors, place).stdout.splitlines()
    assert [json.loads(line)["id"] for line in listed] == ["broken.wav"]
    for command in others:
        assert shell(command, place).returncode in (0, 1), command
    before = {path: path.stat().st_mtime_ns for path in (place / "text").glob("part-*")}
    assert shell(eight, place).returncode == 0  # of `wait`; nothing is left to do
    assert before == {path: path.stat().st_mtime_ns for path in (place / "text").glob("part-*")}
    shutil.rmtree(place / "text")
    said = shell(two, place)
    assert {*heard(place)} == ALL and said.stdout.count(" shards done: ") == 2, said.stderr


def test_the_script_for_slurm_transcribes_its_part(place):
    script = BLOCKS["bash"]
    directives = dict(re.findall(r"^#SBATCH --(\w+)=?(.*)$", script, re.MULTILINE))
    first, last = map(int, directives["array"].split("-"))
    assert (first, last + 1) == (0, int(re.search(r"ID/(\d+)", script)[1]))
    assert directives["gpus"] == "1" and "requeue" in directives
    done = shell(script, place, SLURM_ARRAY_TASK_ID="1")
    assert done.returncode in (0, 1), done.stderr
    made = load_plan(place / "text")
    mine = {one.id for one in made.recordings(made.shards[1])}
    assert len(made.shards) > 1 and {*heard(place)} == mine
