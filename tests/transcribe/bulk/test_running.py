"""Runs in real processes, which are really killed."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from asrkit.cli import main
from asrkit.files import lock
from asrkit.transcribe.bulk import Counts, Event, plan, run, workers
from asrkit.transcribe.bulk.running import missing
from asrkit.transcribe.bulk.shards import ENDED, ShardTranscriber

ENOUGH_S = 120.0  # what has not come by then will not come
FAULTY = """
import os, signal, sys, time
import soundfile
plain, replace, kill_at = soundfile.SoundFile, os.replace, int(os.environ.get("KILL_AT", -1))
replaced = 0

def open_or_die(file, *args, **how):
    name = os.fsdecode(file) if isinstance(file, (str, bytes)) else ""
    print("a line of a library")
    if "poison" in name:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(float(os.environ.get("SLOW_S", 0)))
    return plain(file, *args, **how)

def replace_or_die(source, target):
    global replaced
    replaced += 1
    if replaced == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

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
    """Workers that die of a name with `poison`, and do as the environment says."""
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", FAULTY])


@pytest.fixture
def nobody(monkeypatch):
    """No worker may be started."""
    monkeypatch.setattr(
        workers, "WORKER", [sys.executable, "-c", "raise SystemExit(9)"]
    )


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


def test_a_run_transcribes_all_and_a_finished_one_starts_nothing(
    many, talks, wanted, found, monkeypatch
):
    report = run(many)
    assert found(many.out) == wanted(talks)
    assert (report.done, report.missing) == (len(many.shards), 0)
    assert (report.counts.recordings, report.counts.failed) == (12, 3)
    assert (
        report.transcribed_s == pytest.approx(report.counts.audio_s)
        and report.transcribed_s > 100
    )
    before = written(many.out)
    monkeypatch.setattr(workers, "WORKER", ["/nowhere"])
    again = run(many)
    assert (again.counts, again.transcribed_s) == (report.counts, 0.0) and written(
        many.out
    ) == before


def here(made, shards, machine):
    """An executor without a process of its own."""
    heard = []
    transcriber = ShardTranscriber(
        made, machine, progress=lambda *one: heard.append(Event("", None, *one))
    )
    for shard in shards:
        counts = transcriber.transcribe(shard)
        yield from heard
        yield Event(shard=shard.name, counts=counts)
        heard.clear()


def test_parts_share_the_shards_and_each_knows_all_counts(many, talks, wanted, found):
    first = run(many, part=(0, 2), executor=here)
    assert (first.missing, first.done) == (0, -(-len(many.shards) // 2))
    second = run(many, part=(1, 2), executor=here)
    assert (second.missing, second.done) == (
        0,
        len(many.shards),
    ) and second.counts.failed == 3
    assert found(many.out) == wanted(talks)


def test_a_worker_killed_in_the_midst_of_writing_is_started_again(
    many, talks, wanted, found, faulty, monkeypatch
):
    monkeypatch.setenv(
        "KILL_AT", "4"
    )  # each worker writes three results and dies of the fourth
    monkeypatch.setattr(workers, "MOST_DEATHS", 2)  # without a result in between
    run(many)
    assert found(many.out) == wanted(talks)
    assert not [
        path.name for path in many.out.iterdir() if path.name.startswith(".part")
    ]


def test_a_recording_that_ends_the_process_is_an_error_and_the_rest_is_transcribed(
    talks, task, tmp_path, wanted, found, faulty
):
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "poison.wav")
    made = plan(talks, task, tmp_path / "out", shard_h=1.0)
    report = run(made)
    assert len(made.shards) == 1 and report.missing == 0 and report.counts.failed == 4
    assert found(made.out) == good | {"poison.wav": ("", ENDED)}


def test_a_command_killed_with_signal_9_goes_on_and_loses_and_doubles_nothing(
    talks, model, tmp_path, wanted, found, capsys
):
    out = tmp_path / "out"
    arguments = ["transcribe", "--dtype", "float32", str(talks), "--model", str(model), "--out", str(out), "--shards", "--shard-hours", "0.001", "--batch-seconds", "4", "--no-progress"]  # fmt: skip
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
    with pytest.raises(
        RuntimeError, match="part-.* cannot be written: File too large. Make room"
    ):
        run(many)
    assert found(many.out).items() < wanted(talks).items()
    monkeypatch.delenv("MOST_BYTES")
    run(many)
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


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("raise SystemExit(9)", "ended 3 times .exit code 9.. The same command"),
        (
            "print('{\"ready\": true}', flush=True); input(); raise SystemExit(7)",
            "ended 5 times .exit code 7.. The same command",
        ),
    ],
)
def test_workers_that_end_again_and_again_are_one_line(
    many, monkeypatch, program, wanted
):
    monkeypatch.setattr(workers, "MOST_DEATHS", 5)
    monkeypatch.setattr(workers, "WORKER", [sys.executable, "-c", program])
    with pytest.raises(RuntimeError, match=f"the process that transcribes {wanted}"):
        run(many)


def test_a_part_that_runs_already_and_one_that_is_none_are_one_line(many, nobody):
    with lock(many.work / "part-0-of-2"):
        with pytest.raises(
            ValueError, match="^out: part 0/2 of .* is being transcribed already."
        ):
            run(many, part=(0, 2))
    for part in ((2, 2), (-1, 2), (0, 0), (0, -1)):
        with pytest.raises(ValueError, match="^part: expected K/"):
            run(many, part=part)
        with pytest.raises(ValueError, match="^part: expected K/"):
            missing(many, part)


def test_any_executor_that_transcribes_a_shard_at_least_once_will_do(
    many, talks, wanted, found
):
    def twice(made, shards, machine):
        yield from here(made, [*shards, *shards], machine)

    def lazy(made, shards, machine):
        yield Event(shard=shards[0].name)  # somebody else transcribes it

    report = run(many, executor=lazy)
    assert report.missing == len(many.shards) and report.counts == Counts()
    assert run(many, executor=twice).missing == 0
    assert found(many.out) == wanted(talks)
