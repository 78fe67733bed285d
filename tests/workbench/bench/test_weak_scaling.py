"""Weak scaling: processes that train together, and those that cannot be started."""

import argparse
import os

import pytest

from asrkit.runtime import usable_cores
from asrkit.workbench.bench import weak_scaling as tool
from asrkit.workbench.bench.gang import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"batch": 1, "frames": 40, "steps": 1}
# Rank 1 fails at once, and rank 0, as one that waits for it would, is still there.
FAILING = """
import os, pathlib, time
number = pathlib.Path(__file__).with_name("number")
if os.environ["RANK"] == "0":
    number.with_suffix(".new").write_text(str(os.getpid()))
    number.with_suffix(".new").replace(number)
    time.sleep(60)
while not number.exists():
    time.sleep(0.01)
raise ValueError("no room")
"""
# Rank 0 ends well, and rank 1 waits for it for ever.
WAITING = """
import os, pathlib, sys, time
if os.environ["RANK"] == "1":
    pathlib.Path(sys.argv[1], "number").write_text(str(os.getpid()))
    print("waiting for rank 0", file=sys.stderr, flush=True)
    while True:
        time.sleep(1)
"""


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_two_processes_train_together_and_their_rates_are_summed():
    found = tool.weak_scaling((2,), **SMALL)
    assert found.keys() == {2} and found[2]["processes"] == 2
    assert found[2]["utterances_per_s"] > 0 and found[2]["agree_ms"] > 0


@pytest.mark.skipif(usable_cores() < 2, reason="one core")
def test_when_a_process_fails_the_others_are_ended_and_one_line_says_so(monkeypatch, tmp_path):
    (tmp_path / "failing_rank.py").write_text(FAILING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tool, "MODULE", "failing_rank")
    with pytest.raises(RuntimeError) as caught:
        tool.weak_scaling((2,), **SMALL)
    said = "rank 1 of 2 ended with 1, so the others were ended: ValueError: no room"
    assert str(caught.value) == said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


def test_processes_that_do_not_end_in_time_are_ended_and_one_line_says_so(monkeypatch, tmp_path):
    (tmp_path / "waiting_rank.py").write_text(WAITING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        run_ranks("waiting_rank", 2, [str(tmp_path)], limit_s=3)
    said = "rank 1 of 2 had not ended after 3 s, so all were ended: waiting for rank 0"
    assert str(caught.value) == said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "number").read_text()), 0)


def test_a_process_alone_needs_no_group():
    args = argparse.Namespace(
        preset="mini_jasper", precision="mixed", device="cpu", threads=1, **SMALL
    )
    result = tool.train(args)
    assert result["processes"] == 1 and result["utterances_per_s"] > 0
    with pytest.raises(ValueError, match="preset: expected one of a Jasper, got 'tiny'"):
        tool.train(argparse.Namespace(**{**vars(args), "preset": "tiny"}))


@pytest.mark.parametrize("count", [0, usable_cores() + 1])
def test_more_processes_than_cores_are_refused(count):
    with pytest.raises(
        ValueError, match=f"ranks: expected from 1 to the .* cores here, got {count}"
    ):
        tool.weak_scaling((count,), **SMALL)
