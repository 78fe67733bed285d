"""Shards: their plan, and runs in real processes, which are really killed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import soundfile
import torch

from asrkit.cli import main
from asrkit.files import lock
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
)
from asrkit.transcribe.shards import (
    PLAN,
    Task,
    load_plan,
    plan,
    rows,
    run,
)
from asrkit.transcribe.windows import Transcriber
from asrkit.transcribe.workers import ENDED

ENOUGH_S = 120.0  # what has not come by then will not come
TWO = Layout(cores=((), ()), threads=1, why="")
SHORT = 4 / 3600  # hours: more than three shards of the twelve recordings


@pytest.fixture
def task(model):
    """What is done with every recording: tiny batches, one reader."""
    return Task(model=model, windows=WindowOptions(batch_s=4.0, readers=1))


@pytest.fixture
def many(talks, task, tmp_path):
    """A plan of the twelve recordings in more than three shards."""
    made = plan([talks], task, tmp_path / "out", shard_h=SHORT)
    assert len(made.shards) > 3
    return made


@pytest.fixture
def lines(tmp_path, make_manifest):
    """A manifest of 200 recordings of 1 to 200 s, which nobody opens, and two tars."""
    rows = [{"audio": f"{n}.wav", "duration": 1.0 + n * 37 % 200} for n in range(200)]
    tars = [{"audio": "a.tar", "duration": 50}, {"audio": "b.tar"}]
    return make_manifest(tmp_path / "m.jsonl", rows + tars)


def written(out):
    """The results and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}


# The plan


def test_a_plan_has_each_recording_once_and_longest_first(lines, task, tmp_path):
    made = plan([lines], task, tmp_path / "out", shard_h=0.25)
    held = [shard.recordings() for shard in made.shards]
    ids = [one.id for shard in held for one in shard]
    assert sorted(ids) == sorted([*(f"{n}.wav" for n in range(200)), "a.tar", "b.tar"])
    lengths = [one.planned_s for shard in held for one in shard]
    assert lengths == sorted(lengths, reverse=True)
    sums = [sum(one.planned_s for one in shard) for shard in held]
    assert [shard.planned_s for shard in made.shards] == sums and max(sums) <= 900
    assert len({shard.name for shard in made.shards}) == len(made.shards) > 20


@pytest.mark.parametrize(
    ("device", "hours", "wanted_h"),
    [("cpu", 400, 0.5), ("cuda:1", 400, 10), ("cpu", 5, 0.25)],
)
def test_where_nobody_says_a_shard_is_minutes_of_work(
    device, hours, wanted_h, task, tmp_path, make_manifest
):
    lines = [{"audio": f"{n}.wav", "duration": hours * 36} for n in range(100)]
    manifest = make_manifest(tmp_path / "hours.jsonl", lines)
    made = plan([manifest], task, tmp_path / "out", device=device)
    assert made.head.shard_h == pytest.approx(wanted_h)


def test_the_same_plan_is_found_again_without_a_look_at_weights_or_recordings(
    lines, model, tmp_path, monkeypatch
):
    copied = tmp_path / "copy.safetensors"
    shutil.copy(model, copied)
    task = Task(model=copied, dtype="bfloat16", context=None)
    made = plan([lines], task, tmp_path / "out", shard_h=0.25)
    assert load_plan(tmp_path / "out") == (made.head, made.shards)
    assert (made.head.dtype, made.head.precision) == ("bfloat16", "as_loaded")
    for path in (lines, copied):  # touched: looked at again, and found to be the same
        os.utime(path, ns=(1, 1))
        assert plan([lines], task, tmp_path / "out").shards == made.shards
    for name in ("_recordings", "_load"):
        monkeypatch.setattr(f"asrkit.transcribe.shards.{name}", lambda *args: 1 / 0)
    other = replace(task, windows=replace(task.windows, batch_s=9.0, readers=2))
    found = plan([lines], other, tmp_path / "out")  # neither changes a text
    assert (found.shards, found.task) == (made.shards, other)


def changed_manifest(lines, task):
    with lines.open("a") as file:
        file.write('{"audio": "new.wav", "duration": 3}\n')
    return task


def changed_model(lines, task):
    other = bytearray(task.model.read_bytes())
    other[-1] ^= 1
    path = lines.parent / "other.safetensors"
    path.write_bytes(other)
    return replace(task, model=path)


def changed_window(lines, task):
    windows = replace(task.windows, window_s=20.0)
    return replace(task, windows=windows)


def changed_beam(lines, task):
    config = PipelineConfig(search=BeamOptions(beam=2))
    return replace(task, config=config)


@pytest.mark.parametrize(
    "change", [changed_manifest, changed_model, changed_window, changed_beam]
)
def test_another_plan_in_the_same_folder_is_refused_and_changes_nothing(
    change, lines, task, tmp_path
):
    made = plan([lines], task, tmp_path / "out")
    other = change(lines, task)
    wanted = "^out: .* was begun with another model, .* Name another folder.$"
    with pytest.raises(ValueError, match=wanted):
        plan([lines], other, tmp_path / "out")
    assert load_plan(tmp_path / "out") == (made.head, made.shards)
    names = {shard.name for shard in plan([lines], other, tmp_path / "other").shards}
    assert not names >= {shard.name for shard in made.shards}


def test_a_recording_of_the_same_length_in_the_place_of_another_is_refused(
    talks, task, tmp_path
):
    made = plan([talks], task, tmp_path / "out", shard_h=SHORT)
    path = talks / "a" / "0.wav"
    samples, rate = soundfile.read(str(path))
    soundfile.write(str(path), -samples, rate)
    with pytest.raises(ValueError, match="^out: .* other recordings"):
        plan([talks], task, tmp_path / "out")
    assert load_plan(tmp_path / "out") == (made.head, made.shards)


@pytest.mark.parametrize("precision", ["as_loaded", "int8"])
def test_auto_is_dtype_and_precision_of_whoever_planned_first(
    lines, task, tmp_path, monkeypatch, precision
):
    out, config = tmp_path / "out", PipelineConfig(precision=precision)
    first = replace(task, dtype="bfloat16", config=config)
    made = []
    second = threading.Thread(
        target=lambda: made.append(plan([lines], replace(task, dtype="auto"), out))
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # a CPU without bfloat16
    with lock(out):  # while another one plans
        second.start()
        second.join(0.5)
        planned = plan([lines], first, tmp_path / "elsewhere")
        shutil.copy(planned.out / PLAN, out)
    second.join()
    assert (made[0].task, made[0].head) == (planned.task, planned.head)


def test_bad_arguments_and_damaged_plans_are_one_line(
    lines, task, tmp_path, make_manifest
):
    out = tmp_path / "out"
    twice = make_manifest(tmp_path / "twice.jsonl", [{"audio": "a"}, {"audio": "a"}])
    none = make_manifest(tmp_path / "none.jsonl", [])
    for call, said in {
        lambda: plan([lines], task, out, shard_h=float("nan")): "shard_h: expected more than 0 hours",
        lambda: plan([tmp_path / "none"], task, out): "files: expected .* Check the path",
        lambda: plan([twice], task, out): "files: expected ids that are all different, got 'a' twice.",
        lambda: plan([none], task, out): "files: expected at least one recording, got none.",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"^{said}") as error:
            call()
        assert "\n" not in str(error.value)
    plan([lines], task, out)
    head, shard = (out / PLAN).read_text().splitlines()[:2]
    for text in ("", "{", "[]", "{}", shard, f"{head}\n{shard[:99]}", f"{head}\n[]"):
        (out / PLAN).write_text(text)
        with pytest.raises(
            ValueError, match="^out: expected a plan of this asrkit, got"
        ):
            load_plan(out)


def test_who_plans_waits_for_the_one_who_plans_already(lines, task, tmp_path):
    out = tmp_path / "out"
    second = threading.Thread(target=plan, args=([lines], task, out))
    with lock(out):
        second.start()
        second.join(0.5)
        assert second.is_alive() and not (out / PLAN).exists()
    second.join()
    assert (out / PLAN).exists()


# Runs


def test_a_run_transcribes_all_and_a_finished_one_does_nothing(
    many, talks, task, tmp_path, wanted, found
):
    report = run(many, threads=1)
    assert found(many.out) == wanted(talks)
    assert report.shards == report.done == len(many.shards)
    assert (report.recordings, report.failed) == (12, 3) and report.audio_s > 100
    assert report.transcribed_s == pytest.approx(report.audio_s)
    before = written(many.out)
    assert run(many) == replace(report, transcribed_s=0.0)
    assert written(many.out) == before
    alone = plan([talks], task, tmp_path / "forked", shard_h=SHORT)
    run(alone, workers=TWO)  # the same bytes
    for path in many.out.glob("part-*"):
        assert path.read_bytes() == (alone.out / path.name).read_bytes()


def test_parts_of_recordings_and_members_of_tars_are_transcribed_also_from_a_torn_one(
    speech, long_file, task, tmp_path, make_manifest, make_tar, learned
):
    files = {f"{n}.wav": path.read_bytes() for n, path in enumerate(speech)}
    tar = make_tar(tmp_path / "set.tar", files)
    torn = tmp_path / "torn.tar"
    torn.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    lengths = [soundfile.info(str(path)).duration for path in speech]
    both = [*soundfile.read(str(speech[1]))[0], *soundfile.read(str(speech[2]))[0]]
    soundfile.write(str(tmp_path / "both.wav"), both, 16_000)
    second = {"audio": "both.wav", "id": "second", "offset": lengths[1]}
    lines = [
        {"audio": str(long_file), "id": "late", "offset": 500},
        second | {"duration": lengths[2]},
    ]
    manifest = make_manifest(tmp_path / "m.jsonl", lines)
    windows = replace(task.windows, timestamps=True)
    made = plan([manifest, tar, torn], replace(task, windows=windows), tmp_path / "out")
    assert run(made, workers=TWO).failed == 2
    texts = {row["id"]: row for row in rows(tmp_path / "out")}
    plain = [one.text for one in transcribe(learned, speech, options=windows)]
    assert [texts[f"set.tar/{n}.wav"]["text"] for n in range(6)] == plain
    assert texts["torn.tar/0.wav"]["text"] == plain[0]
    assert "torn.tar has " in texts["torn.tar/"]["error"]
    assert "a part that begins before" in texts["late"]["error"]
    row = texts["second"]
    assert (row["text"], row["start_s"]) == (plain[2], lengths[1])
    assert [*row] == ["id", "start_s", "file", "text", "audio_s", "words", "error"]
    assert row["file"] == str(tmp_path / "both.wav")
    assert texts["set.tar/0.wav"]["file"] == f"{tar}/0.wav"


def test_recordings_that_end_a_worker_twice_are_errors_and_the_rest_is_transcribed(
    talks, task, tmp_path, wanted, found, make_tar, monkeypatch
):
    good, plain = wanted(talks), Transcriber._windows
    first, second = ((talks / "a" / name).read_bytes() for name in ("0.wav", "2.wav"))
    (talks / "poison.wav").write_bytes(first)
    (talks / "once.wav").write_bytes(second)
    make_tar(talks / "set.tar", {"poison.wav": first, "fine.wav": second})
    made = plan([talks], task, tmp_path / "out", shard_h=1.0)
    assert len(made.shards) == 1
    died = tmp_path / "died"

    def die(transcriber, sound):
        name = sound.path.name
        if name == "poison.wav" or (name == "once.wav" and not died.exists()):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(transcriber, sound)

    monkeypatch.setattr(Transcriber, "_windows", die)
    report = run(made, workers=TWO)
    ended = dict.fromkeys(("poison.wav", "set.tar/poison.wav"), ("", ENDED))
    fine = dict.fromkeys(("once.wav", "set.tar/fine.wav"), good["a/2.wav"])
    assert found(made.out) == good | ended | fine
    assert (report.done, report.failed) == (1, 5)


def test_a_cuda_error_that_is_not_about_memory_ends_the_worker(
    many, talks, wanted, found, tmp_path, monkeypatch
):
    good, call = wanted(talks), Recognizer.__call__

    def broken_once(*args, **how):
        if (tmp_path / "broken").exists():
            return call(*args, **how)
        (tmp_path / "broken").touch()
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Recognizer, "__call__", broken_once)
    run(many, workers=TWO)
    assert found(many.out) == good


def test_parts_share_the_shards_and_each_knows_all_counts(many, talks, wanted, found):
    first = run(many, part=(0, 2), workers=TWO)
    half = -(-len(many.shards) // 2)
    assert first.done == half
    with lock(many.out / ".part-1-of-2"):
        with pytest.raises(
            ValueError, match="^out: part 1/2 of .* transcribed already"
        ):
            run(many, part=(1, 2))
    second = run(many, part=(1, 2), workers=TWO)
    assert (second.done, second.failed) == (len(many.shards), 3)
    assert found(many.out) == wanted(talks)
    for part in ((2, 2), (-1, 2), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match="^part: expected K/"):
            run(many, part=part)


def test_another_model_or_asrkit_than_that_of_the_plan_is_refused_by_its_worker(
    talks, task, tmp_path, model
):
    copy = tmp_path / "copy.safetensors"
    shutil.copy(model, copy)
    made = plan([talks], replace(task, model=copy), tmp_path / "out")
    damaged = bytearray(copy.read_bytes())
    damaged[-1] ^= 1
    copy.write_bytes(damaged)
    wanted = (
        "^model: expected model, settings and version of asrkit of the plan, got others"
    )
    with pytest.raises(ValueError, match=wanted):
        run(made, workers=TWO)
    assert not written(made.out)


def test_a_result_that_somebody_changed_is_one_line_that_names_it(many):
    for shard in many.shards:
        many.result(shard).write_text("")
    assert run(many).recordings == 0
    path = many.result(many.shards[-1])
    said = (
        f"out: expected a result of asrkit, got something else in {path}. Remove it: "
    )
    for data in (b'{"id": "a", "au', b"\xff\n", b'{"id": "a"}\n', b"[1]\n", b"1\n"):
        path.write_bytes(data)
        with pytest.raises(ValueError) as error:
            run(many)
        assert str(error.value) == said + "the same command makes it again."


# The command


@pytest.fixture
def command(talks, model, tmp_path):
    """`asrkit transcribe --shards` of the twelve recordings, and its results."""
    options = f"--model {model} --out {tmp_path / 'out'} --shards --no-progress --dtype float32"
    more = f"--batch-seconds 4 --shard-hours {SHORT}"
    return ["transcribe", str(talks), *options.split(), *more.split()]


def start(command, program="from asrkit.cli import main; main(sys.argv[1:])", **how):
    """A process of the command."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    program = f"import sys; {program}"
    return subprocess.Popen([sys.executable, "-c", program, *command], **pipes, **how)


def test_a_command_killed_with_signal_9_goes_on_and_loses_and_doubles_nothing(
    command, talks, tmp_path, wanted, found, capsys, faults
):
    out = tmp_path / "out"
    faults.slow(0.3)
    process = start(command, env=os.environ | {"PYTHONPATH": faults.path})
    deadline = time.monotonic() + ENOUGH_S
    while len(written(out)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = written(out)
    assert (
        main([*command, "--json", "--workers", "1", "--threads", "1"]) == 1
    )  # three cannot be read
    first = json.loads(capsys.readouterr().out)
    assert (first["recordings"], first["failed"]) == (12, 3)
    assert found(out) == wanted(talks)
    assert before and before.items() <= written(out).items()
    # done: neither torch nor a worker is needed to say so
    again = start([*command, "--json"], "sys.modules['torch'] = None; from asrkit.cli import main; sys.exit(main(sys.argv[1:]))")  # fmt: skip
    stdout, stderr = again.communicate()
    assert again.returncode == 1, stderr
    assert json.loads(stdout) == first | {"transcribed_s": 0.0, "rtfx": 0.0}
    assert main(command) == 1
    assert ": 12 recordings, " in capsys.readouterr().out


def test_a_disk_that_is_full_is_one_line_and_what_was_done_is_kept(
    many, command, talks, wanted, found
):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (800, 800))

    # results of one recording are smaller, some are larger
    full = start([*command, "--workers", "1", "--threads", "1"], "from asrkit.cli import main; sys.exit(main(sys.argv[1:]))", preexec_fn=small_files)  # fmt: skip
    _, stderr = full.communicate()
    *_, line = stderr.splitlines()
    assert full.returncode == 2 and line.startswith("asrkit transcribe: ")
    assert "File too large: '/" in line and "/out/part-" in line
    assert {} != found(many.out).items() < wanted(talks).items()
    run(many, workers=TWO)
    assert found(many.out) == wanted(talks)
