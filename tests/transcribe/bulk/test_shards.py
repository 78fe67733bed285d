"""Shards: their plan, and runs in real processes that are really killed."""

import json
import os
import resource
import shutil
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import soundfile
import torch
from waiting import wait_until, written

from asrkit.cpu import has_int8
from asrkit.files import lock
from asrkit.models import save_checkpoint
from asrkit.sound_files import Sound
from asrkit.transcribe import (
    BeamOptions,
    Layout,
    PipelineConfig,
    Recognizer,
    WindowOptions,
    transcribe,
)
from asrkit.transcribe.bulk import shards as shards_module
from asrkit.transcribe.bulk.shards import (
    PLAN,
    LocalWorkers,
    load_plan,
    plan_shards,
    rows,
    run,
)
from asrkit.transcribe.bulk.workers import ENDED
from asrkit.transcribe.plan import Plan

ON_THIS_CPU = pytest.mark.skipif(not has_int8(), reason="needs a CPU with AVX2")
TWO = LocalWorkers(Layout(cores=((), ()), threads=1))
ONE_THREAD = LocalWorkers(threads=1)
SHORT = 4 / 3600  # hours: more than three shards of the twelve recordings


@pytest.fixture
def settings(model):
    """Model and settings: tiny batches, one reader."""
    return Plan(model=model, windows=WindowOptions(batch_s=4.0, readers=1))


@pytest.fixture
def many(talks, settings, tmp_path):
    """A plan of the twelve recordings in more than three shards."""
    made = plan_shards([talks], settings, tmp_path / "out", shard_h=SHORT)
    assert len(made.shards) > 3
    return made


@pytest.fixture
def lines(tmp_path, make_manifest):
    """A manifest of 200 recordings of 1 to 200 s, which are never opened, and two tars."""
    rows = [{"audio": f"{n}.wav", "duration": 1.0 + n * 37 % 200} for n in range(200)]
    tars = [{"audio": "a.tar", "duration": 50}, {"audio": "b.tar"}]
    return make_manifest(tmp_path / "m.jsonl", rows + tars)


# The plan


def test_a_plan_has_each_recording_once_and_longest_first(lines, settings, tmp_path):
    made = plan_shards([lines], settings, tmp_path / "out", shard_h=0.25)
    held = [shard.recordings() for shard in made.shards]
    every = [one for shard in held for one in shard]
    ids = {one.id: one.planned_s for one in every}
    assert {"a.tar", "b.tar", "0.wav", "199.wav"} < {*ids}
    assert len(ids) == 202
    assert len(every) == 202
    assert [*ids.values()] == sorted(ids.values(), reverse=True)
    sums = [sum(one.planned_s for one in shard) for shard in held]
    assert [shard.planned_s for shard in made.shards] == sums
    assert max(sums) <= 900
    assert len({shard.name for shard in made.shards}) == len(made.shards) > 20


@pytest.mark.parametrize(
    ("device", "hours", "wanted_h"),
    [("cpu", 400, 0.5), ("cuda:1", 400, 10), ("cpu", 5, 0.25)],
)
def test_by_default_a_shard_is_minutes_of_work(
    device, hours, wanted_h, settings, tmp_path, make_manifest
):
    lines = [{"audio": f"{n}.wav", "duration": hours * 36} for n in range(100)]
    manifest = make_manifest(tmp_path / "hours.jsonl", lines)
    made = plan_shards([manifest], settings, tmp_path / "out", device=device)
    assert float(made.head.fingerprint["shard_h"]) == pytest.approx(wanted_h)


def spoil(path):
    """Change the bytes of a file, but neither its size nor its time."""
    before = path.stat()
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_plan_is_reused_without_reading_weights_or_recordings(lines, model, tmp_path):
    copied = tmp_path / "copy.safetensors"
    shutil.copy(model, copied)
    settings = Plan(model=copied, dtype="bfloat16", context=None)
    made = plan_shards([lines], settings, tmp_path / "out", shard_h=0.25)
    assert load_plan(tmp_path / "out") == (made.head, made.shards)
    fingerprint = made.head.fingerprint
    assert fingerprint["dtype"] == "bfloat16"
    for path in (lines, copied):  # touched: read again, and still the same
        os.utime(path, ns=(1, 1))
        assert plan_shards([lines], settings, tmp_path / "out").shards == made.shards
    for path in (lines, copied):
        spoil(path)
    other = replace(settings, windows=replace(settings.windows, batch_s=9.0, readers=2))
    found = plan_shards([lines], other, tmp_path / "out")  # changes no text
    assert (found.shards, found.plan) == (made.shards, other)


def test_another_plan_in_the_same_folder_is_refused_and_changes_nothing(
    lines, settings, other_model, tmp_path
):
    out, more = tmp_path / "out", tmp_path / "more.jsonl"
    made = plan_shards([lines], settings, out)
    more.write_text(lines.read_text() + '{"audio": "new.wav", "duration": 3}\n')
    for manifest, changed, name, old, new in (
        (more, {}, "files", "202 recordings .*", "203 recordings .*"),
        (lines, {"model": other_model}, "model", "[0-9a-f]{16}", "[0-9a-f]{16}"),
        (lines, {"dtype": "bfloat16"}, "dtype", "float32", "bfloat16"),
        (lines, {"context": (9, 8)}, "context", "None", "\\(9, 8\\)"),
        (lines, {"windows": WindowOptions(window_s=20.0)}, "window_s", "30.0", "20.0"),
        (
            lines,
            {"config": PipelineConfig(search=BeamOptions(beam=2))},
            "beam",
            "None",
            "2",
        ),
    ):
        wanted = f"{name}: expected {old}, with which {out} was begun, got {new}"
        with pytest.raises(ValueError, match=f"^{wanted}. Name another folder.$"):
            plan_shards([manifest], replace(settings, **changed), out)
    with pytest.raises(ValueError, match="^shard_h: expected .* was begun, got 9."):
        plan_shards([lines], settings, out, shard_h=9)
    assert load_plan(out) == (made.head, made.shards)


def test_a_recording_of_the_same_length_in_the_place_of_another_is_refused(
    talks, settings, tmp_path
):
    plan_shards([talks], settings, tmp_path / "out", shard_h=SHORT)
    path = talks / "a" / "0.wav"
    samples, rate = soundfile.read(str(path))
    soundfile.write(str(path), -samples, rate)
    with pytest.raises(ValueError, match="^files: expected 12 rec.*, got 12 rec"):
        plan_shards([talks], settings, tmp_path / "out")


@pytest.mark.parametrize(
    "precision", ["as_loaded", pytest.param("int8", marks=ON_THIS_CPU)]
)
def test_auto_is_the_dtype_and_precision_of_the_first_plan(
    lines, settings, transducer, tmp_path, monkeypatch, precision
):
    out, config = tmp_path / "out", PipelineConfig(precision=precision)
    settings = replace(settings, model=tmp_path / "model.safetensors")
    save_checkpoint(settings.model, transducer)
    first = replace(settings, dtype="bfloat16", config=config)
    planned = plan_shards([lines], first, tmp_path / "elsewhere")
    made = []
    second = threading.Thread(
        target=lambda: made.append(
            plan_shards([lines], replace(settings, dtype="auto"), out)
        )
    )
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # a CPU without bfloat16
    with lock(out):  # while another process plans
        second.start()
        second.join(0.5)
        shutil.copy(planned.out / PLAN, out)
    second.join()
    assert (made[0].plan, made[0].head) == (planned.plan, planned.head)


def test_a_model_that_does_not_support_the_settings_claims_no_folder(
    lines, settings, model, tmp_path
):
    out, broken = tmp_path / "out", tmp_path / "broken.safetensors"
    broken.write_bytes(model.read_bytes()[:-1])
    int8 = PipelineConfig(precision="int8")
    for changed in ({"model": broken}, {"config": int8}, {"context": (9, 8)}):
        with pytest.raises(ValueError, match=r"^(model|int8|context): "):
            plan_shards([lines], replace(settings, **changed), out)
    assert plan_shards([lines], settings, out).shards


@pytest.mark.parametrize("ids, message", [
    ("aa", "files: expected ids that are all different, got 'a' twice."),
    ("", "files: expected at least one recording, got none."),
])  # fmt: skip
def test_duplicate_ids_and_no_recordings_are_refused(
    ids, message, settings, tmp_path, make_manifest
):
    manifest = make_manifest(tmp_path / "m.jsonl", [{"audio": one} for one in ids])
    with pytest.raises(ValueError, match=f"^{message}"):
        plan_shards([manifest], settings, tmp_path / "out")


@pytest.mark.parametrize("text", ["{}", "{"])
def test_a_plan_of_another_asrkit_or_a_damaged_one_is_refused(tmp_path, text):
    (tmp_path / PLAN).write_text(text)
    with pytest.raises(ValueError, match="^out: expected a plan of this asrkit, got"):
        load_plan(tmp_path)


# Runs


def test_a_run_transcribes_all_and_a_finished_one_does_nothing(
    many, talks, settings, tmp_path, wanted, found
):
    report = run(many, executor=ONE_THREAD)
    assert found(many.out) == wanted(talks)
    assert report.shards == report.done == len(many.shards)
    assert (report.recordings, report.failed) == (12, 3)
    assert report.audio_s > 100
    assert report.transcribed_s == pytest.approx(report.audio_s)
    before = written(many.out)
    assert run(many) == replace(report, transcribed_s=0.0)
    assert written(many.out) == before
    alone = plan_shards([talks], settings, tmp_path / "forked", shard_h=SHORT)
    run(alone, executor=TWO)  # the same bytes
    for path in many.out.glob("part-*"):
        assert path.read_bytes() == (alone.out / path.name).read_bytes()


@pytest.mark.parametrize("executor", [TWO, ONE_THREAD])
def test_the_bar_moves_within_a_shard_and_ends_at_the_seconds_of_all(
    talks, settings, tmp_path, monkeypatch, executor
):
    made = plan_shards([talks], settings, tmp_path / "out", shard_h=1.0)
    assert len(made.shards) == 1
    moved = []
    bar = SimpleNamespace(total=9, update=moved.append, write=lambda *a, **k: None)
    monkeypatch.setattr(shards_module, "progress_bar", lambda *a, **k: nullcontext(bar))
    report = run(made, executor=executor)
    assert len([one for one in moved if one > 0]) > 9
    assert sum(moved) == pytest.approx(report.audio_s, abs=0.1)


def test_parts_of_recordings_and_members_of_tars_are_transcribed_also_from_a_torn_one(
    speech, long_file, settings, tmp_path, make_manifest, make_tar, learned
):
    tar = make_tar(
        tmp_path / "set.tar", {path.name: path.read_bytes() for path in speech}
    )
    torn = tmp_path / "torn.tar"
    torn.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    late = {"audio": str(long_file), "id": "late", "offset": 500}
    lines = [late, late | {"id": "part", "offset": 3.0, "duration": 4.0}]
    manifest = make_manifest(tmp_path / "m.jsonl", lines)
    made = plan_shards([manifest, tar, torn], settings, tmp_path / "out")
    assert run(made, executor=TWO).failed == 2
    part = Sound(long_file, start_s=3.0, duration_s=4.0)
    *plain, of_part = transcribe(learned, [*speech, part], options=settings.windows)
    found = {row["id"]: row for row in rows(made.out)}
    for one in plain:
        row = found[f"set.tar/{one.path.name}"]
        assert (row["text"], row["file"]) == (one.text, f"{tar}/{one.path.name}")
    assert found["torn.tar/0.wav"]["text"] == plain[0].text
    assert "torn.tar has " in found["torn.tar/"]["error"]
    assert "a part that begins before" in found["late"]["error"]
    row = {"id": "part", "start_s": 3.0, "file": str(long_file), "text": of_part.text}
    assert found["part"] == row | {"audio_s": 4.0, "error": ""}


def test_recordings_that_end_a_worker_twice_are_errors_and_the_rest_is_transcribed(
    talks, settings, tmp_path, wanted, found, make_tar, break_reading
):
    good = wanted(talks)
    first, second = ((talks / "a" / name).read_bytes() for name in ("0.wav", "2.wav"))
    (talks / "poison.wav").write_bytes(first)
    (talks / "once.wav").write_bytes(second)
    members = {"poison.wav": first + b"poison", "fine.wav": second}
    make_tar(talks / "set.tar", members)
    made = plan_shards([talks], settings, tmp_path / "out", shard_h=1.0)
    assert len(made.shards) == 1
    break_reading()
    report = run(made, executor=TWO)
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
    run(many, executor=TWO)
    assert found(many.out) == good


def test_parts_share_the_shards_and_each_reports_all_counts(many, talks, wanted, found):
    first = run(many, part=(0, 2), executor=TWO)
    assert first.done == -(-len(many.shards) // 2)
    with lock(many.out / ".part-1-of-2"):
        taken = "^out: part 1/2 of .* transcribed already"
        with pytest.raises(ValueError, match=taken):
            run(many, part=(1, 2))
    second = run(many, part=(1, 2), executor=TWO)
    assert (second.done, second.failed) == (len(many.shards), 3)
    assert found(many.out) == wanted(talks)


def test_another_model_than_that_of_the_plan_is_refused_by_its_worker(
    talks, settings, tmp_path, other_model
):
    copy = tmp_path / "copy.safetensors"
    shutil.copy(settings.model, copy)
    made = plan_shards([talks], replace(settings, model=copy), tmp_path / "out")
    shutil.copy(other_model, copy)
    wanted = "^model: expected model, settings and version of asrkit of the plan, got"
    with pytest.raises(ValueError, match=wanted):
        run(made, executor=TWO)
    assert not written(made.out)


def test_a_damaged_result_is_one_line_that_names_it(many):
    for shard in many.shards:
        many.result(shard).write_text("")
    assert run(many).recordings == 0
    path = many.result(many.shards[-1])
    message = f"^out: expected a result of asrkit, got something else in {path}. Remove"
    for data in (b'{"id": "a", "au', b"\xff\n", b'{"id": "a"}\n'):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            run(many)


# The command


@pytest.fixture
def shards(talks, typed, tmp_path):
    """Runs `asrkit transcribe --shards` on the recordings with one forked worker."""
    small = f"--batch-seconds 4 --shard-hours {SHORT} --workers 1 --threads 1"
    out = f"--no-progress --shards --out {tmp_path / 'out'}"
    return lambda *more: typed(talks, small, out, *more)


def test_a_command_killed_with_signal_9_resumes_and_loses_and_doubles_nothing(
    shards, talks, tmp_path, wanted, found, forked, break_reading
):
    out = tmp_path / "out"
    shutil.copy(talks / "a" / "0.wav", talks / "stuck.wav")
    shards("--part 99/100")  # plans
    process = forked(lambda: break_reading() or shards())
    wait_until(lambda: len(written(out)) >= 2)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    before = written(out)
    code, message, _ = shards()
    assert code == 1
    assert "; recordings: 13, 3 failed; " in message  # three cannot be read
    assert found(out) == wanted(talks)
    after = written(out)
    assert before.items() < after.items()
    _, message, _ = shards("--json")
    counts = json.loads(message)
    assert (counts["recordings"], counts["failed"], counts["rtfx"]) == (13, 3, 0.0)
    assert written(out) == after


def test_a_disk_that_is_full_is_one_line_and_what_was_done_is_kept(
    shards, talks, wanted, found, forked, tmp_path
):
    def on_a_small_disk():
        # results of one recording are smaller, some are larger
        resource.setrlimit(resource.RLIMIT_FSIZE, (800, 800))
        return shards()[0]

    out = tmp_path / "out"
    shards("--part 99/100")  # plans
    process = forked(on_a_small_disk)
    process.join()
    *_, line = (tmp_path / "stderr").read_text().splitlines()
    assert process.exitcode == 2
    assert line.startswith("asrkit transcribe: ")
    assert "File too large: '/" in line
    assert "/out/part-" in line
    assert {} != found(out).items() < wanted(talks).items()
    shards()
    assert found(out) == wanted(talks)
