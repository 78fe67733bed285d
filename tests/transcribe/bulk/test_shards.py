import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import soundfile

from asrkit.files import lock
from asrkit.transcribe import Recognizer, transcribe
from asrkit.transcribe.bulk import Machine, plan, rows
from asrkit.transcribe.bulk.shards import ENDED, TRIES, PoisonedDeviceError, ShardTranscriber


class DeathError(BaseException):
    """Stands for the end of a process: nothing in asrkit catches it."""


@pytest.fixture
def deaths(monkeypatch):
    """Switches on that recordings which say POISON end the process that opens them, and counts it."""
    counts = Counter()
    plain = soundfile.SoundFile

    def open_or_die(file, *args, **how):
        data = file.getvalue() if hasattr(file, "getvalue") else b""
        if b"POISON" in data or "POISON" in str(file):
            counts["deaths"] += 1
            raise DeathError
        return plain(file, *args, **how)

    def switch_on():
        monkeypatch.setattr(soundfile, "SoundFile", open_or_die)
        return counts

    return switch_on


def transcribe_all(made):
    """Transcribe every shard with a new process after each death; returns the number of processes."""
    processes = 0
    todo = [shard for shard in made.shards if shard.name not in made.done()]
    while todo:
        processes += 1
        transcriber = ShardTranscriber(made)
        try:
            while todo:
                assert transcriber.transcribe(todo[-1]) is not None
                todo.pop()
        except DeathError:
            assert processes < 50
    return processes


def test_all_texts_are_those_of_transcribe_and_the_counts_say_what_failed(
    talks, task, tmp_path, wanted, found
):
    made = plan(talks, task, tmp_path / "out", shard_h=30 / 3600)
    transcriber = ShardTranscriber(made)
    counts = [transcriber.transcribe(shard) for shard in made.shards]
    assert found(tmp_path / "out") == wanted(talks)
    assert sum(one.recordings for one in counts) == 12 and sum(one.failed for one in counts) == 3
    assert sum(one.audio_s for one in counts) > 100
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert [ShardTranscriber(made).transcribe(shard) for shard in made.shards[:1]] == counts[:1]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}


def test_parts_of_recordings_and_members_of_containers_are_transcribed(
    speech, long_file, task, tmp_path, make_manifest, make_tar, learned
):
    tar = make_tar(
        tmp_path / "set.tar", {f"{n}.wav": path.read_bytes() for n, path in enumerate(speech)}
    )
    lines = [
        {"audio": str(long_file), "id": "whole"},
        {"audio": str(long_file), "id": "late", "offset": 500},
    ]
    lengths = [soundfile.info(str(path)).duration for path in speech]
    whole = soundfile.read(str(speech[2]))[0]
    both = tmp_path / "both.wav"
    soundfile.write(str(both), [*soundfile.read(str(speech[1]))[0], *whole], 16_000)
    lines += [{"audio": "both.wav", "id": "second", "offset": lengths[1], "duration": lengths[2]}]
    made = plan([make_manifest(tmp_path / "m.jsonl", lines), tar], task, tmp_path / "out")
    transcriber = ShardTranscriber(made)
    for shard in made.shards:
        transcriber.transcribe(shard)
    heard = {row["id"]: row for row in rows(tmp_path / "out")}
    plain = [one.text for one in transcribe(learned, speech, options=task.windows)]
    assert [heard[f"set.tar/{n}.wav"]["text"] for n in range(6)] == plain
    assert (heard["second"]["text"], heard["second"]["audio_s"]) == (plain[2], round(lengths[2], 3))
    assert heard["second"]["start_s"] == lengths[1] and heard["second"]["source"] == str(both)
    assert "a part that begins before" in heard["late"]["error"]
    assert heard["whole"]["text"] and len(heard) == 9


def test_a_recording_that_ends_its_process_is_an_error_and_the_rest_is_transcribed(
    talks, task, tmp_path, wanted, found, deaths
):
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "a" / "POISON.wav")
    shutil.copy(talks / "a" / "0.wav", talks / "b" / "POISON.wav")
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    assert len(made.shards) == 1
    counts = deaths()
    processes = transcribe_all(made)
    assert found(tmp_path / "out") == good | {f"{sub}/POISON.wav": ("", ENDED) for sub in "ab"}
    assert processes - 1 == counts["deaths"] == TRIES + 2 * TRIES
    assert [path.name for path in made.work.iterdir()] == ["plan"]


def test_a_poisoned_member_of_a_tar_is_an_error_and_the_rest_is_transcribed(
    speech, task, tmp_path, found, deaths, make_tar
):
    data = [path.read_bytes() for path in speech]
    members = {f"{n}.wav": one for n, one in enumerate(data)} | {"3.wav": b"POISON"}
    tar = make_tar(tmp_path / "set.tar", members)
    made = plan(tar, task, tmp_path / "out")
    deaths()
    assert transcribe_all(made) == 1 + TRIES + TRIES
    results = found(tmp_path / "out")
    assert [*results] == [f"set.tar/{n}.wav" for n in range(6)]
    assert {label for label, (text, error) in results.items() if error} == {"set.tar/3.wav"}


def test_one_by_one_gives_what_all_at_once_gives_killed_at_any_step(
    talks, task, tmp_path, wanted, found, monkeypatch
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    (shard,) = made.shards
    work = made.work / shard.name
    work.mkdir()
    (work / "steps").write_text("shard\n" * TRIES)
    transcriber, good = ShardTranscriber(made), wanted(talks)
    call, left = Recognizer.__call__, iter(range(100))

    def die_now_and_then(*args, **how):
        if next(left) % 8 == 1:
            raise DeathError
        return call(*args, **how)

    monkeypatch.setattr(Recognizer, "__call__", die_now_and_then)
    deaths = 0
    while not made.result(shard).exists():
        try:
            transcriber.transcribe(shard)
        except DeathError:
            deaths += 1
            with (work / "rows.jsonl").open("ab") as file:
                file.write(b'{"id": "torn')
    assert deaths >= 2 and found(tmp_path / "out") == good


def test_a_shard_that_another_process_transcribes_is_left_to_it(talks, task, tmp_path):
    made = plan(talks, task, tmp_path / "out")
    shard = made.shards[-1]
    with lock(made.work / shard.name):
        assert ShardTranscriber(made).transcribe(shard) is None
    assert not made.result(shard).exists()
    assert ShardTranscriber(made).transcribe(shard).recordings == shard.recordings


def test_what_a_killed_process_was_writing_is_removed(talks, task, tmp_path):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    result = made.result(made.shards[0])
    torn = result.with_name(f".{result.stem}-0123abcd.jsonl")
    torn.write_text('{"id": "tor')
    ShardTranscriber(made).transcribe(made.shards[0])
    assert result.exists() and not torn.exists()


def test_a_cuda_error_that_is_not_about_memory_ends_the_process_and_leaves_no_result(
    talks, task, tmp_path, monkeypatch
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)

    def broken(*args, **how):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Recognizer, "__call__", broken)
    with pytest.raises(PoisonedDeviceError):
        ShardTranscriber(made).transcribe(made.shards[0])
    assert not made.done()


def test_another_model_than_the_one_of_the_plan_is_refused(talks, task, model, tmp_path, learned):
    copy = tmp_path / "copy.safetensors"
    shutil.copy(model, copy)
    made = plan(talks, replace(task, model=copy), tmp_path / "out")
    spoilt = bytearray(copy.read_bytes())
    spoilt[-1] ^= 1
    copy.write_bytes(spoilt)
    with pytest.raises(
        ValueError, match="^model: expected the model of the plan in .*, got another in"
    ):
        ShardTranscriber(made, Machine(threads=1))


def test_another_asrkit_than_the_one_of_the_plan_is_refused(talks, task, tmp_path):
    made = replace(plan(talks, task, tmp_path / "out"), version="0.0.1")
    with pytest.raises(ValueError, match="^asrkit: expected version 0.0.1, which made the plan in"):
        ShardTranscriber(made)


def test_without_pyarrow_parquet_is_refused_at_once_and_no_shard_is_written(
    task, tmp_path, monkeypatch
):
    (tmp_path / "set.parquet").write_bytes(b"PAR1")
    pytest.importorskip("pyarrow")
    made = plan(tmp_path / "set.parquet", task, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for one in (task, replace(task, format="parquet")):
        with pytest.raises(ValueError, match="^parquet: expected the package pyarrow"):
            plan(tmp_path / "set.parquet", one, tmp_path / "other")
    with pytest.raises(ValueError, match="^parquet: expected the package pyarrow"):
        ShardTranscriber(made).transcribe(made.shards[0])
    assert not made.done()
