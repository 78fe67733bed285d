import json
import subprocess
import sys

import pytest

from asrkit.cli import main
from asrkit.transcribe import transcribe
from asrkit.transcribe.bulk import rows, workers


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Processes take one thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def command(talks, model, tmp_path):
    """`asrkit transcribe --shards` of the twelve recordings."""
    out = ["--out", str(tmp_path / "out"), "--shards", "--no-progress"]
    return [
        "transcribe",
        "--dtype",
        "float32",
        str(talks),
        "--model",
        str(model),
        *out,
        "--shard-hours",
        "0.01",
    ]


def said(capsys):
    """What --json prints, and what is on stderr."""
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_the_counts_are_of_all_results_also_when_nothing_is_left_to_do(
    command, talks, learned, tmp_path, capsys, monkeypatch
):
    assert (
        main([*command, "--json", "--timestamps", "--readers", "2"]) == 1
    )  # three cannot be read
    first, err = said(capsys)
    assert [*first] == [
        "recordings",
        "failed",
        "audio_s",
        "shards",
        "done",
        "missing",
        "transcribed_s",
        "rtfx",
        "out",
    ]
    assert (first["recordings"], first["failed"], first["missing"], err) == (
        12,
        3,
        0,
        "",
    )
    plain = {str(one.path): one.text for one in transcribe(learned, talks)}
    found = {row["source"]: row["text"] for row in rows(tmp_path / "out")}
    assert found == plain
    assert all(row["words"] for row in rows(tmp_path / "out") if row["text"])
    monkeypatch.setattr(workers, "WORKER", ["/nowhere"])
    assert main([*command, "--json", "--timestamps"]) == 1
    again, _ = said(capsys)
    assert again == first | {"transcribed_s": 0.0, "rtfx": 0.0}
    assert main([*command, "--timestamps"]) == 1
    line = capsys.readouterr().out
    assert f"{first['done']} of {first['shards']} shards done: 12 recordings, " in line
    assert (
        " s of audio, 3 failed; now 0 s at RTFx 0.0. Results: " in line
        and line.count("\n") == 1
    )


def test_a_finished_run_answers_without_torch(command, capsys, tmp_path):
    assert main([*command, "--threads", "1"]) == 1
    capsys.readouterr()
    without_torch = "import sys; sys.modules['torch'] = None; from asrkit.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", without_torch, *command, "--threads", "1"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 1 and "12 recordings" in done.stdout, done.stderr
    (tmp_path / "out" / "plan.json").unlink()  # a new plan needs the hash of the model
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 2 and "torch" in done.stderr


def test_without_errors_the_exit_code_is_0(speech, model, tmp_path, learned):
    files = [
        "transcribe",
        "--dtype",
        "float32",
        *map(str, speech),
        "--model",
        str(model),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*files, "--shards", "--no-progress"]) == 0
    found = {row["source"]: row["text"] for row in rows(tmp_path / "out")}
    assert found == {str(one.path): one.text for one in transcribe(learned, speech)}


def test_a_part_that_leaves_a_shard_to_another_process_says_so_and_fails(
    command, capsys, monkeypatch, tmp_path
):
    worker = 'import sys; print(\'{"ready": true}\', flush=True)\nfor line in sys.stdin: print(\'{"shard": "x", "counts": null}\', flush=True)'
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", worker])
    assert main([*command, "--part", "1/2"]) == 1
    line = capsys.readouterr().out
    assert (
        " of this part missing: another process has them, or run it again. Results: "
        in line
    )
