"""docs/scale.md: its commands run as they are written, its manifest is well-formed, its figures are what is computed."""

import json
import os
import re
import shutil
import subprocess
import sys
from math import exp
from pathlib import Path

import pytest
import soundfile
import torch
import yaml

from asrkit.cli import main
from asrkit.transcribe.bulk import load_plan, rows
from asrkit.workbench.cost import Fleet, equal_shards, simulate

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
RUN = re.findall(r"^    ((?:asrkit transcribe|for k in|cat) .+)$", PAGE, re.MULTILINE)
BLOCKS = dict(reversed(re.findall(r"```(bash|yaml)\n(.*?)```", PAGE, re.DOTALL)))
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
    assert shell(eight, place).returncode == 0  # of `wait`; nothing is left to hear
    assert before == {path: path.stat().st_mtime_ns for path in (place / "text").glob("part-*")}
    shutil.rmtree(place / "text")
    said = shell(two, place)
    assert {*heard(place)} == ALL and said.stdout.count(" shards done: ") == 2, said.stderr


def test_the_script_for_slurm_hears_its_part(place):
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


def test_the_job_for_kubernetes_is_well_formed_and_each_index_hears_its_part(place):
    job = yaml.safe_load(BLOCKS["yaml"])
    assert {*job} == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert 0 < spec["parallelism"] <= spec["completions"]
    pod = spec["template"]["spec"]
    # podFailurePolicy and backoffLimitPerIndex are refused with any other
    assert pod["restartPolicy"] == "Never" and spec["backoffLimitPerIndex"] > 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {volume["name"] for volume in pod["volumes"]} == {*mounts}
    assert mounts["speech"] == container["workingDir"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert container["command"] == ["sh", "-c"]
    (command,) = container["args"]
    assert f'"$JOB_COMPLETION_INDEX/{spec["completions"]}"' in command
    for index in ("0", "63"):  # an index without a shard is no failure
        done = shell(command, place, JOB_COMPLETION_INDEX=index)
        assert done.returncode == 0, done.stderr
    made = load_plan(place / "text")
    assert {*heard(place)} == {one.id for one in made.recordings(made.shards[0])}
    assert shell(command, place, JOB_COMPLETION_INDEX="64").returncode == 1


def test_the_page_shows_what_asrkit_scale_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["scale"]) == 0
    printed = capsys.readouterr().out.rstrip().splitlines()
    indented = "\n".join(f"    {line}".rstrip() for line in printed)
    assert f"    asrkit scale\n\n{indented}\n\n" in PAGE


def test_the_table_of_failures_is_what_is_simulated_and_near_the_formula():
    table = re.findall(r"^\| ([\d.]+) h \| ([\d.]+) h \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, re.M)
    assert len(table) >= 3
    for shard_h, work_h, lost, days, queue_days in table:
        shards = equal_shards(1e6, float(shard_h))
        told = []
        for order in ("parts", "queue"):
            fleet = Fleet(workers=1000, rtfx=4.5, spread=0.05, startup_s=60, failure_h=24, order=order)  # fmt: skip
            told.append(simulate(shards, fleet))
        assert work_h == f"{float(shard_h) / 4.5:.3g}"
        parts, queue = told
        heard_s = parts.paid_s - parts.idle_s
        assert lost == f"{100 * parts.lost_s / heard_s:.3g} %"
        assert (days, queue_days) == (f"{parts.days:.3g}", f"{queue.days:.3g}")
        work = float(work_h) / 24
        assert parts.lost_s / heard_s == pytest.approx(1 - work / (exp(work) - 1), rel=0.15)
