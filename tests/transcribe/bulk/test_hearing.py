import contextlib
import faulthandler
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import soundfile

from asrkit.files import lock
from asrkit.transcribe import Recognizer, transcribe
from asrkit.transcribe.bulk import Counts, Machine, containers, hear, hearing, plan, results, rows
from asrkit.transcribe.bulk.hearing import BLAMED, ENDED, TRIES, Hearer, PoisonedDeviceError
from asrkit.transcribe.windows import POOL


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


def hear_until_done(made):
    """Hear every shard with a new process after each death; returns the number of processes."""
    processes = 0
    todo = [shard for shard in made.shards if shard.name not in made.done()]
    while todo:
        processes += 1
        hearer = Hearer(made)
        try:
            while todo:
                assert hearer.hear(todo[-1]) is not None
                todo.pop()
        except DeathError:
            assert processes < 50
    return processes


def test_all_texts_are_those_of_transcribe_and_the_counts_say_what_failed(
    talks, task, tmp_path, wanted, found
):
    made = plan(talks, task, tmp_path / "out", shard_h=30 / 3600)
    hearer = Hearer(made)
    counts = [hearer.hear(shard) for shard in made.shards]
    assert found(tmp_path / "out") == wanted(talks)
    assert sum(one.recordings for one in counts) == 12 and sum(one.failed for one in counts) == 3
    assert sum(one.audio_s for one in counts) > 100
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}
    assert [hear(made, shard) for shard in made.shards[:1]] == counts[:1]
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")}


def test_parts_of_recordings_and_members_of_containers_are_heard(
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
    hearer = Hearer(made)
    for shard in made.shards:
        hearer.hear(shard)
    heard = {row["id"]: row for row in rows(tmp_path / "out")}
    plain = [one.text for one in transcribe(learned, speech, options=task.windows)]
    assert [heard[f"set.tar/{n}.wav"]["text"] for n in range(6)] == plain
    assert (heard["second"]["text"], heard["second"]["audio_s"]) == (plain[2], round(lengths[2], 3))
    assert heard["second"]["start_s"] == lengths[1] and heard["second"]["source"] == str(both)
    assert "a part that begins before" in heard["late"]["error"]
    assert heard["whole"]["text"] and len(heard) == 9


def test_a_recording_that_ends_its_process_is_an_error_and_the_rest_is_heard(
    talks, task, tmp_path, wanted, found, deaths
):
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "a" / "POISON.wav")
    shutil.copy(talks / "a" / "0.wav", talks / "b" / "POISON.wav")
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    assert len(made.shards) == 1
    counts = deaths()
    processes = hear_until_done(made)
    assert found(tmp_path / "out") == good | {f"{sub}/POISON.wav": ("", ENDED) for sub in "ab"}
    assert processes - 1 == counts["deaths"] == TRIES + 2 * BLAMED
    assert [path.name for path in made.work.iterdir()] == ["plan"]


def test_a_poisoned_member_of_a_tar_is_an_error_and_the_rest_is_heard(
    speech, task, tmp_path, found, deaths, make_tar
):
    data = [path.read_bytes() for path in speech]
    members = {f"{n}.wav": one for n, one in enumerate(data)} | {"3.wav": b"POISON"}
    tar = make_tar(tmp_path / "set.tar", members)
    made = plan(tar, task, tmp_path / "out")
    deaths()
    assert hear_until_done(made) == 1 + TRIES + BLAMED
    results = found(tmp_path / "out")
    assert [*results] == [f"set.tar/{n}.wav" for n in range(6)]
    assert {label for label, (text, error) in results.items() if error} == {"set.tar/3.wav"}


def test_a_container_that_cannot_be_read_without_ending_the_process_is_kept_up_to_there(
    speech, task, tmp_path, found, make_tar, monkeypatch
):
    tar = make_tar(
        tmp_path / "set.tar", {f"{n}.wav": one.read_bytes() for n, one in enumerate(speech)}
    )
    made = plan(tar, task, tmp_path / "out")
    plain = containers._tar

    def read_or_die(path):
        for number, member in enumerate(plain(path)):
            if number == 4:
                raise DeathError
            yield member

    written = []

    def die_or_write(path, rows):
        written.append(path)
        if len(written) == 1:
            raise DeathError
        return write(path, rows)

    monkeypatch.setattr(containers, "_tar", read_or_die)
    write = results.write
    monkeypatch.setattr(results, "write", die_or_write)
    assert hear_until_done(made) == 1 + TRIES + BLAMED + 1
    heard = found(tmp_path / "out")
    assert [*heard] == [*(f"set.tar/{n}.wav" for n in range(4)), "set.tar/"]
    assert heard["set.tar/"] == ("", ENDED) and heard["set.tar/0.wav"][0]


def test_one_by_one_gives_what_all_at_once_gives_killed_at_any_step(
    talks, task, tmp_path, wanted, found, monkeypatch
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    (shard,) = made.shards
    work = made.work / shard.name
    work.mkdir()
    (work / "attempts").write_bytes(b"." * TRIES)
    hearer, good = Hearer(made), wanted(talks)
    call, left = Recognizer.__call__, iter(range(100))

    def die_now_and_then(*args, **how):
        if next(left) % 8 == 1:
            raise DeathError
        return call(*args, **how)

    monkeypatch.setattr(Recognizer, "__call__", die_now_and_then)
    deaths = 0
    while not made.result(shard).exists():
        try:
            hearer.hear(shard)
        except DeathError:
            deaths += 1
            with (work / "rows.jsonl").open("ab") as file:
                file.write(b'{"id": "torn')
    assert deaths >= 2 and found(tmp_path / "out") == good


@pytest.fixture
def limits(monkeypatch):
    """The seconds after which the watchdog would end this process, each time that it is told."""
    told = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda limit_s, **how: told.append(limit_s)
    )
    return told


def test_each_recording_gives_the_watchdog_as_long_again_as_the_longest_and_what_is_read_ahead_last(
    talks, task, tmp_path, limits
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    (shard,) = made.shards
    longest_s = soundfile.info(str(talks / "long.flac")).duration
    Hearer(made, Machine(hang_s=7.0, batch_s=2.0), watch=True).hear(shard)
    assert limits == pytest.approx((1 + 12) * [7.0 + longest_s + POOL * 2.0])


def test_the_watchdog_expects_nothing_of_what_has_no_header_and_an_hour_of_a_container(
    talks, task, tmp_path, limits, make_tar
):
    broken = [talks / "a" / "empty.wav", talks / "b" / "text.wav"]
    tar = make_tar(tmp_path / "set.tar", {"a.wav": (talks / "a" / "0.wav").read_bytes()})
    made = plan([*broken, tar], task, tmp_path / "out", shard_h=1.0)
    machine = Machine(hang_s=7.0, batch_s=2.0)
    first_s = []
    for shard in made.shards:
        Hearer(made, machine, watch=True).hear(shard)
        first_s.append(limits[0])
        limits.clear()
    assert sorted(first_s) == [7.0 + POOL * 2.0, 7.0 + 3600.0 + POOL * 2.0]


def test_a_result_that_another_process_wrote_before_this_one_had_the_lock_is_kept(
    talks, task, tmp_path, monkeypatch
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    (shard,) = made.shards
    result = made.result(shard)

    @contextlib.contextmanager
    def late(folder):
        with lock(folder):
            results.write(result, [])
            yield

    monkeypatch.setattr(hearing, "lock", late)
    assert Hearer(made).hear(shard) == Counts() and result.read_bytes() == b""


def test_a_shard_that_another_process_hears_is_left_to_it(talks, task, tmp_path):
    made = plan(talks, task, tmp_path / "out")
    shard = made.shards[-1]
    with lock(made.work / shard.name):
        assert Hearer(made).hear(shard) is None
    assert not made.result(shard).exists()
    assert Hearer(made).hear(shard).recordings == shard.recordings


def test_what_a_killed_process_was_writing_is_removed(talks, task, tmp_path):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    result = made.result(made.shards[0])
    torn = result.with_name(f".{result.stem}-0123abcd.jsonl")
    torn.write_text('{"id": "tor')
    hear(made, made.shards[0])
    assert result.exists() and not torn.exists()


def test_batches_and_patience_may_be_as_long_as_one_likes(talks, task, tmp_path, wanted, found):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    machine = Machine(batch_s=1e300, hang_s=1e300)
    Hearer(made, machine, watch=True).hear(made.shards[0])
    assert found(tmp_path / "out") == wanted(talks)


def test_a_cuda_error_that_is_not_about_memory_ends_the_process_and_leaves_no_result(
    talks, task, tmp_path, monkeypatch
):
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)

    def broken(*args, **how):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(Recognizer, "__call__", broken)
    with pytest.raises(PoisonedDeviceError):
        hear(made, made.shards[0])
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
        Hearer(made, Machine(threads=1))


def test_another_asrkit_than_the_one_of_the_plan_is_refused(talks, task, tmp_path):
    made = replace(plan(talks, task, tmp_path / "out"), version="0.0.1")
    with pytest.raises(ValueError, match="^asrkit: expected version 0.0.1, which made the plan in"):
        Hearer(made)


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
        hear(made, made.shards[0])
    assert not made.done()


def test_progress_is_told_recording_by_recording(talks, task, tmp_path):
    made, told = plan(talks, task, tmp_path / "out", shard_h=1.0), []
    hearer = Hearer(made, progress=lambda audio_s, failed: told.append((audio_s, failed)))
    counts = hearer.hear(made.shards[0])
    assert isinstance(counts, Counts) and len(told) == counts.recordings == 12
    assert sum(failed for _, failed in told) == counts.failed
    assert sum(audio_s for audio_s, _ in told) == pytest.approx(counts.audio_s, abs=0.01)
