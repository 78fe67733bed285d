import shutil
from dataclasses import replace

import pytest
import soundfile

from asrkit.files import lock
from asrkit.transcribe import Recognizer, transcribe
from asrkit.transcribe.bulk import Machine, plan, rows
from asrkit.transcribe.bulk.shards import TRIES, PoisonedDeviceError, ShardTranscriber


class DeathError(BaseException):
    """Stands for the end of a process: nothing in asrkit catches it."""


def test_all_texts_are_those_of_transcribe_and_the_counts_say_what_failed(
    talks, task, tmp_path, wanted, found
):
    made = plan(talks, task, tmp_path / "out", shard_h=30 / 3600)
    transcriber = ShardTranscriber(made)
    counts = [transcriber.transcribe(shard) for shard in made.shards]
    assert found(tmp_path / "out") == wanted(talks)
    assert (
        sum(one.recordings for one in counts) == 12
        and sum(one.failed for one in counts) == 3
    )
    assert sum(one.audio_s for one in counts) > 100
    before = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")
    }
    assert [
        ShardTranscriber(made).transcribe(shard) for shard in made.shards[:1]
    ] == counts[:1]
    assert before == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("part-*")
    }


def test_parts_of_recordings_and_members_of_containers_are_transcribed(
    speech, long_file, task, tmp_path, make_manifest, make_tar, learned
):
    tar = make_tar(
        tmp_path / "set.tar",
        {f"{n}.wav": path.read_bytes() for n, path in enumerate(speech)},
    )
    lines = [
        {"audio": str(long_file), "id": "whole"},
        {"audio": str(long_file), "id": "late", "offset": 500},
    ]
    lengths = [soundfile.info(str(path)).duration for path in speech]
    whole = soundfile.read(str(speech[2]))[0]
    both = tmp_path / "both.wav"
    soundfile.write(str(both), [*soundfile.read(str(speech[1]))[0], *whole], 16_000)
    lines += [
        {
            "audio": "both.wav",
            "id": "second",
            "offset": lengths[1],
            "duration": lengths[2],
        }
    ]
    made = plan(
        [make_manifest(tmp_path / "m.jsonl", lines), tar], task, tmp_path / "out"
    )
    transcriber = ShardTranscriber(made)
    for shard in made.shards:
        transcriber.transcribe(shard)
    heard = {row["id"]: row for row in rows(tmp_path / "out")}
    plain = [one.text for one in transcribe(learned, speech, options=task.windows)]
    assert [heard[f"set.tar/{n}.wav"]["text"] for n in range(6)] == plain
    assert (heard["second"]["text"], heard["second"]["audio_s"]) == (
        plain[2],
        round(lengths[2], 3),
    )
    assert heard["second"]["start_s"] == lengths[1] and heard["second"][
        "source"
    ] == str(both)
    assert "a part that begins before" in heard["late"]["error"]
    assert heard["whole"]["text"] and len(heard) == 9


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


def test_another_model_than_the_one_of_the_plan_is_refused(
    talks, task, model, tmp_path, learned
):
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
    with pytest.raises(
        ValueError, match="^asrkit: expected version 0.0.1, which made the plan in"
    ):
        ShardTranscriber(made)
