"""Runs in real processes, which are really killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asrkit.cli import main
from asrkit.files import lock
from asrkit.transcribe import endings
from asrkit.transcribe.bulk import Counts, Event, Machine, plan, run, running, workers
from asrkit.transcribe.bulk.hearing import ENDED, Hearer
from asrkit.transcribe.bulk.progress import Progress
from asrkit.transcribe.bulk.running import missing
from asrkit.transcribe.bulk.tasks import as_json
from asrkit.transcribe.bulk.worker import POISONED

ENOUGH_S = 120.0  # what has not come by then will not come
FAULTY = """
import itertools, os, signal, sys, time
import soundfile
import torch
plain, replace, kill_at = soundfile.SoundFile, os.replace, int(os.environ.get("KILL_AT", -1))
replaced = 0

def open_or_die(file, *args, **how):
    name = os.fsdecode(file) if isinstance(file, (str, bytes)) else ""
    print("a line of a library")
    if "THREADS" in os.environ and torch.get_num_threads() != int(os.environ["THREADS"]):
        raise ValueError("other threads")
    if "poison" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hang" in name:
        time.sleep(1e6)
    time.sleep(float(os.environ.get("SLOW_S", 0)))
    return plain(file, *args, **how)

def replace_or_die(source, target):
    global replaced
    replaced += 1
    if replaced == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

if "CLOCK_JUMPS" in os.environ:
    steady, calls = time.time, itertools.count()
    time.time = lambda: steady() + 1e8 * (-1) ** next(calls)
if "MOST_BYTES" in os.environ:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["MOST_BYTES"]),) * 2)
soundfile.SoundFile, os.replace = open_or_die, replace_or_die
from asrkit.transcribe.bulk.worker import main
main()
"""
COMMAND = """
import sys
from asrkit.cli import main
from asrkit.files import lock
from asrkit.transcribe.bulk import workers
workers.WORKER = [sys.executable, "-c", sys.argv[1]]
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Processes take one thread each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def faulty(monkeypatch):
    """Workers that die of a name with `poison`, sleep on one with `hang`, and do as the environment says."""
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", FAULTY])


@pytest.fixture
def nobody(monkeypatch):
    """No worker may be started."""
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", "raise SystemExit(9)"])


@pytest.fixture
def many(talks, task, tmp_path):
    """A plan of the twelve recordings in more than three shards."""
    made = plan(talks, task, tmp_path / "out", shard_h=4 / 3600)
    assert len(made.shards) > 3
    return made


def wait_until(condition, process):
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def written(out):
    """When each result was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}


def test_a_run_hears_all_and_a_finished_one_starts_nothing(many, talks, wanted, found, monkeypatch):
    report = run(many)
    assert found(many.out) == wanted(talks)
    assert (report.done, report.missing) == (len(many.shards), 0)
    assert (report.counts.recordings, report.counts.failed) == (12, 3)
    assert report.heard_s == pytest.approx(report.counts.audio_s) and report.heard_s > 100
    before = written(many.out)
    monkeypatch.setattr(workers, "WORKER", ["/nowhere"])
    again = run(many)
    assert (again.counts, again.heard_s) == (report.counts, 0.0) and written(many.out) == before


def here(made, shards, machine):
    """An executor without a process of its own."""
    heard = []
    hearer = Hearer(made, machine, progress=lambda *one: heard.append(Event("", None, *one)))
    for shard in shards:
        counts = hearer.hear(shard)
        yield from heard
        yield Event(shard=shard.name, counts=counts)
        heard.clear()


def test_parts_share_the_shards_and_each_knows_all_counts(many, talks, wanted, found):
    first = run(many, part=(0, 2), executor=here)
    assert (first.missing, first.done) == (0, -(-len(many.shards) // 2))
    second = run(many, part=(1, 2), executor=here)
    assert (second.missing, second.done) == (0, len(many.shards)) and second.counts.failed == 3
    assert found(many.out) == wanted(talks)


def test_a_worker_killed_in_the_midst_of_writing_is_started_again(
    many, talks, wanted, found, faulty, monkeypatch
):
    monkeypatch.setenv("KILL_AT", "4")  # each worker writes three results and dies of the fourth
    monkeypatch.setattr(workers, "MOST_DEATHS", 2)  # without a result in between
    run(many)
    assert found(many.out) == wanted(talks)
    assert not [path.name for path in many.out.iterdir() if path.name.startswith(".part")]


def test_recordings_that_end_the_process_or_hang_are_errors_and_the_rest_is_heard(
    talks, task, tmp_path, wanted, found, faulty
):
    for long in ("long.flac", "b/torn.flac"):  # whose headers promise two minutes
        (talks / long).unlink()
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "poison.wav")
    shutil.copy(talks / "a" / "1.wav", talks / "hang.wav")
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    report = run(made, machine=Machine(hang_s=0.5, batch_s=0.1))
    assert len(made.shards) == 1 and report.missing == 0 and report.counts.failed == 4
    assert found(made.out) == good | {"poison.wav": ("", ENDED), "hang.wav": ("", ENDED)}


def test_a_command_killed_with_signal_9_goes_on_and_loses_and_doubles_nothing(
    talks, model, tmp_path, wanted, found, capsys
):
    out = tmp_path / "out"
    arguments = ["transcribe", str(talks), "--model", str(model), "--out", str(out), "--shards", "--shard-hours", "0.001", "--batch-seconds", "4", "--no-progress"]  # fmt: skip
    before = {}
    for results in (1, 3):
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, FAULTY, *arguments],
            env=os.environ | {"SLOW_S": "0.3"},
            stdout=subprocess.DEVNULL,
        )
        wait_until(lambda most=results: len(written(out)) >= most, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        time.sleep(0.1)
        before |= {name: at for name, at in written(out).items() if name not in before}
    assert main(arguments) == 1  # three recordings cannot be read
    assert found(out) == wanted(talks)
    assert "12 recordings" in capsys.readouterr().out
    assert before and before.items() <= written(out).items()


def test_a_disk_that_is_full_is_one_line_and_what_was_done_is_kept(
    many, talks, wanted, found, faulty, monkeypatch
):
    monkeypatch.setenv(
        "MOST_BYTES", "800"
    )  # the result of one recording is smaller, some are larger
    with pytest.raises(RuntimeError, match="part-.* cannot be written: File too large. Make room"):
        run(many)
    assert found(many.out).items() < wanted(talks).items()
    monkeypatch.delenv("MOST_BYTES")
    run(many)
    assert found(many.out) == wanted(talks)


def test_a_worker_that_was_stopped_and_writes_late_writes_the_same(
    many, talks, wanted, found, faulty, monkeypatch
):
    shard = many.shards[-1]
    work = many.work / shard.name
    monkeypatch.setenv("SLOW_S", "1")
    late = subprocess.Popen(
        [*workers.WORKER, str(many.out), json.dumps(as_json(Machine(threads=1)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    late.stdin.write(f"{shard.name}\n")
    late.stdin.flush()
    wait_until(lambda: (work / "hung").exists(), late)  # it has begun
    late.send_signal(signal.SIGSTOP)
    shutil.rmtree(work)  # as where a file system gives up the locks of a machine that is silent
    assert run(many, executor=here).missing == 0
    before = many.result(shard).read_bytes()
    assert not work.exists()
    late.send_signal(signal.SIGCONT)
    last = next(event for event in map(json.loads, late.stdout) if "shard" in event)
    late.communicate(timeout=ENOUGH_S)
    assert (last["shard"], last["counts"]["recordings"]) == (shard.name, shard.recordings)
    assert many.result(shard).read_bytes() == before and not work.exists()
    assert found(many.out) == wanted(talks)
    assert not [path.name for path in many.out.iterdir() if path.name.startswith(".part")]


def test_a_clock_that_jumps_by_years_changes_nothing(
    many, talks, wanted, found, faulty, monkeypatch
):
    monkeypatch.setenv("CLOCK_JUMPS", "1")  # in the workers
    monkeypatch.setenv("THREADS", "2")
    machine = Machine(hang_s=30.0, threads=2)
    first = run(many, part=(0, 2), machine=machine)
    for number, path in enumerate(sorted(many.out.glob("part-*"))):
        at_s = (0, 4e9)[number % 2]  # 1970, 2096
        os.utime(path, (at_s, at_s))
    before = written(many.out)
    report = run(many, machine=machine)
    assert before.items() <= written(many.out).items() and len(before) == first.done
    assert (report.missing, report.counts.recordings, report.counts.failed) == (0, 12, 3)
    assert first.heard_s + report.heard_s == pytest.approx(report.counts.audio_s)
    assert found(many.out) == wanted(talks)


def test_a_worker_whose_sender_is_gone_ends(many):
    process = subprocess.Popen(
        [*workers.WORKER, str(many.out), "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == '{"ready": true}\n'
    process.communicate(timeout=ENOUGH_S)
    assert process.returncode == 0 and not many.done()


def test_a_worker_that_never_starts_is_one_line(many, nobody):
    with pytest.raises(
        RuntimeError,
        match="the process that transcribes ended 3 times .exit code 9.. The same command",
    ):
        run(many)


@pytest.fixture
def odd(monkeypatch):
    """Workers that are ended by an error which nothing expects, once they are to hear something."""
    say = "print(json.dumps({{{}}}), flush=True)".format
    worker = f"""
import json
{say('"ready": True')}
input()
{say('"fault": "KeyError: 1", "trace": "Traceback: the long one"')}
"""
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", worker])


def test_an_error_that_ends_each_worker_is_one_line_with_one_traceback(many, odd, capfd):
    line = "the process that transcribes ended 20 times .KeyError: 1.. The same command"
    with pytest.raises(RuntimeError, match=line):
        run(many)
    assert capfd.readouterr().err == "Traceback: the long one\n"


def test_a_worker_says_which_error_nothing_expected(many, monkeypatch, capfd):
    broken = FAULTY.replace(
        "main()", "from asrkit.transcribe.bulk.hearing import Hearer\nHearer.hear = None\nmain()"
    )
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", broken])
    monkeypatch.setattr(endings, "MOST_FAULTS", 1)
    with pytest.raises(RuntimeError, match="ended 1 times .TypeError: 'NoneType' object is not c"):
        run(many)
    assert capfd.readouterr().err.count("Traceback") == 1


def talking(monkeypatch, program):
    """Workers that are a short program."""
    start = "import json, os, sys; print('{\"ready\": true}', flush=True); input(); "
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", start + program])


def test_workers_that_end_again_and_again_are_one_line(many, monkeypatch):
    talking(monkeypatch, "sys.exit(7)")
    monkeypatch.setattr(workers, "MOST_DEATHS", 5)
    with pytest.raises(RuntimeError, match="ended 5 times .exit code 7.. The same command"):
        run(many)


def test_a_worker_has_this_asrkit_and_a_session_of_its_own(many, monkeypatch):
    talking(
        monkeypatch,
        "print(json.dumps({'stop': os.environ['PYTHONPATH'] + f' {os.getsid(0) == os.getpid()}'}))",
    )
    first = str(Path(workers.__file__).parents[3])
    with pytest.raises(RuntimeError, match=f"^{re.escape(first)}.* True$"):
        run(many)


def test_a_worker_on_a_gpu_that_nothing_runs_on_any_more_ends_with_a_code_of_its_own(many):
    broken = FAULTY.replace(
        "main()",
        """
from asrkit.transcribe import Recognizer
def broken(*args, **how):
    raise RuntimeError("CUDA error: device-side assert triggered")
Recognizer.__call__ = broken
main()""",
    )
    process = subprocess.Popen(
        [sys.executable, "-c", broken, str(many.out), "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(f"{many.shards[-1].name}\n")
    process.stdin.flush()
    try:
        code = process.wait(ENOUGH_S)
    finally:
        process.kill()
        _, err = process.communicate()
    assert code == POISONED
    assert "CUDA error: device-side assert" in err and "Traceback" not in err


def test_progress_knows_what_was_done_before(many, monkeypatch):
    sizes = []

    class Noted(Progress):
        def __init__(self, total_s, before_s, *, show):
            super().__init__(total_s, before_s, show=show)
            sizes.append((total_s, before_s))

    monkeypatch.setattr(running, "Progress", Noted)
    planned_s = [shard.planned_s for shard in many.shards]
    run(many, part=(1, 2), executor=here)
    run(many, executor=here)
    whole_s, half_s = sum(planned_s), sum(planned_s[1::2])
    assert sizes == [pytest.approx((half_s, 0.0)), pytest.approx((whole_s, half_s))]


def test_a_model_that_has_changed_since_is_one_line(many, monkeypatch):
    spoilt = bytearray(many.task.model.read_bytes())
    spoilt[-1] ^= 1
    copy = many.out / "model.safetensors"
    copy.write_bytes(spoilt)
    plan_file = many.out / "plan.json"
    plan_file.write_text(plan_file.read_text().replace(str(many.task.model), str(copy)))
    with pytest.raises(RuntimeError, match="^model: expected the model of the plan"):
        run(many)


def test_a_part_that_runs_already_and_one_that_is_none_are_one_line(many, nobody):
    with lock(many.work / "part-0-of-2"):
        with pytest.raises(ValueError, match="^out: part 0/2 of .* is being transcribed already."):
            run(many, part=(0, 2))
    for part in ((2, 2), (-1, 2), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match="^part: expected K/"):
            run(many, part=part)
        with pytest.raises(ValueError, match="^part: expected K/"):
            missing(many, part)


def test_any_executor_that_hears_a_shard_at_least_once_will_do(many, talks, wanted, found):
    def twice(made, shards, machine):
        yield from here(made, [*shards, *shards], machine)

    def lazy(made, shards, machine):
        yield Event(shard=shards[0].name)  # somebody else hears it

    report = run(many, executor=lazy)
    assert report.missing == len(many.shards) and report.counts == Counts()
    assert run(many, executor=twice).missing == 0
    assert found(many.out) == wanted(talks)


def test_what_others_hear_meanwhile_is_counted_and_not_said_to_be_heard_by_this_run(many):
    def meanwhile(made, shards, machine):
        [*here(made, shards[:2], machine)]  # by somebody else
        yield from here(made, shards, machine)

    report = run(many, executor=meanwhile)
    there_s = sum(Hearer(many).hear(shard).audio_s for shard in many.shards[:2])
    assert report.missing == 0 and there_s > 60
    assert report.heard_s == pytest.approx(report.counts.audio_s - there_s)
