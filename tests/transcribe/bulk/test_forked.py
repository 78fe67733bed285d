"""Shards transcribed by processes that share one model, which are really killed."""

import os
import shutil
from functools import partial

import pytest

from asrkit.transcribe import Layout
from asrkit.transcribe.bulk import plan, run
from asrkit.transcribe.bulk.forked import in_processes
from asrkit.transcribe.bulk.shards import ENDED

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="this system forks no process"
)
TWO = Layout(cores=((), ()), threads=1, why="")


def test_shards_are_those_of_one_process(talks, task, tmp_path, wanted, found):
    made = plan(talks, task, tmp_path / "out", shard_h=4 / 3600)
    report = run(made, executor=partial(in_processes, layout=TWO))
    assert found(made.out) == wanted(talks) and len(made.shards) > 3
    assert (report.done, report.missing) == (len(made.shards), 0)
    assert (report.counts.recordings, report.counts.failed) == (12, 3)
    assert report.transcribed_s == pytest.approx(report.counts.audio_s)
    before = {path.name: path.read_bytes() for path in made.out.glob("part-*")}
    alone = plan(talks, task, tmp_path / "alone", shard_h=4 / 3600)
    run(alone)
    assert before == {path.name: path.read_bytes() for path in alone.out.glob("part-*")}


def test_recordings_that_end_a_process_are_errors_and_the_rest_is_transcribed(
    talks, task, tmp_path, wanted, found, break_reading
):
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "poison.wav")
    shutil.copy(talks / "a" / "2.wav", talks / "odd.wav")
    made = plan(talks, task, tmp_path / "out", shard_h=4 / 3600)
    break_reading()  # in the processes: the plan has read the headers
    warned = []
    report = run(made, executor=partial(in_processes, layout=TWO, warn=warned.append))
    assert report.missing == 0 and report.counts.failed == 5
    assert found(made.out) == good | dict.fromkeys(
        ("poison.wav", "odd.wav"), ("", ENDED)
    )
    names = {shard.name for shard in made.shards}
    assert len(warned) >= 4
    lost = [
        line.split("; shard ")[1].removesuffix(" is transcribed again")
        for line in warned
    ]
    assert {*lost} <= names
