"""Shards on a real Ray, in a network and with process numbers of its own, where processes and nodes are really killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from asrkit.transcribe.bulk import Event, Task, load_plan, plan, run
from asrkit.transcribe.bulk.shards import ENDED, ShardTranscriber

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-scale/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs Ray: make peers")

ADDRESS = "127.0.0.1:6399"
TOKEN = "0123456789abcdef" * 4
ENOUGH_S = 240.0  # what has not come by then will not come
HOLDER = """
import fcntl, os, socket, struct, time
with socket.socket() as any_socket:
    up_and_running = struct.pack("16sh22x", b"lo", 0x1 | 0x40)
    fcntl.ioctl(any_socket, 0x8914, up_and_running)  # SIOCSIFFLAGS
print("up", flush=True)
while True:  # the first process of a namespace has to take in orphans that have ended
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
# Python imports it at its start. Workers open files as slowly as the file `slow_s` says, die of a name with `poison`.
FAULTS = """
import os, sys
if "asrkit.transcribe.bulk.worker" in sys.orig_argv:
    import signal, time
    import soundfile
    plain, here = soundfile.SoundFile, os.path.dirname(__file__)

    def open_or_die(file, *args, **how):
        name = os.fsdecode(file) if isinstance(file, (str, bytes)) else ""
        if "poison" in name:
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(here + "/slow_s") as slow_s:
            time.sleep(float(slow_s.read()))
        return plain(file, *args, **how)

    soundfile.SoundFile = open_or_die
"""


class Network:
    """A namespace with loopback only; whatever runs in it ends when it is left."""

    def __init__(self, folder):
        self.folder = folder  # of faults, and of what Ray writes
        (folder / "sitecustomize.py").write_text(FAULTS)
        self.slow(0)
        self.started = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "ASRKIT_HOME": str(folder / "home"),
            "PYTHONPATH": f"{folder}:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if not shutil.which("unshare"):
            pytest.skip("needs a network namespace: no unshare")
        space = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.holder = subprocess.Popen(
            [*space, sys.executable, "-c", HOLDER],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.holder.stdout.readline() != "up\n":
            why = self.holder.stderr.read().strip().splitlines()[-1:]
            pytest.skip(f"needs a network namespace: {' '.join(why)}")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        self.first = children.read_text().split()[0]

    def slow(self, seconds):
        """How long workers take to open a file, from now on."""
        written = self.folder / "slow_s.new"
        written.write_text(str(seconds))
        written.replace(self.folder / "slow_s")  # workers read it at any moment

    def start(self, *command, **how):
        """A process of this network, in a session of its own."""
        enter = [
            "nsenter",
            f"--target={self.first}",
            "--net",
            "--pid",
            "--mount",
            f"--wd={ROOT}",
        ]
        env = self.env | how.pop("env", {})
        env = {name: value for name, value in env.items() if value is not None}
        how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True} | how
        self.started.append(
            subprocess.Popen([*enter, str(PYTHON), *command], env=env, **how)
        )
        return self.started[-1]

    def node(self, *arguments):
        """A started node of a cluster with one CPU."""
        ray = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        log = self.folder / "node"
        for _ in range(3):  # Ray gives up when a busy machine takes more than 30 s
            with log.open("w") as file:
                process = self.start(
                    *ray, "--object-store-memory=100000000", *arguments, stderr=file
                )
            for line in process.stdout:
                if "Ray runtime started" in line:
                    return process
        raise AssertionError(log.read_text())

    def head(self):
        """The started first node of a cluster, with a token."""
        return self.node(
            "--head",
            "--port=6399",
            "--include-dashboard=false",
            f"--temp-dir={self.folder}",
        )

    def asrkit(self, *arguments, **how):
        """Start `asrkit transcribe --shards --on ray --json`."""
        ray = [
            "-m",
            "asrkit.cli",
            "transcribe",
            "--dtype",
            "float32",
            "--shards",
            "--on",
            "ray",
            "--json",
        ]
        return self.start(
            *ray, "--no-progress", *map(str, arguments), stderr=subprocess.PIPE, **how
        )

    def leave(self):
        """End all that runs in it."""
        self.holder.kill()
        for process in (self.holder, *self.started):
            process.communicate()


@pytest.fixture(scope="module")
def network():
    """A network of the tests of this module."""
    folder = Path(
        tempfile.mkdtemp(prefix="ray", dir="/tmp")
    )  # a socket's path has to be short
    made = Network(folder)
    try:
        yield made
    finally:
        made.leave()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(network):
    """A cluster of one node with one CPU, and a token."""
    network.head()
    return network


@pytest.fixture
def planned(talks, model, tmp_path):
    """Makes the plan of the twelve recordings, in more than three shards; returns the command, which loads no torch then."""

    def make(name="out", shard_h=4 / 3600):
        out = tmp_path / name
        plan(talks, Task(model=model), out, shard_h=shard_h)
        return [
            talks,
            "--model",
            model,
            "--out",
            out,
            "--batch-seconds",
            4,
            "--shard-hours",
            shard_h,
        ]

    return make


@pytest.fixture
def command(planned):
    """What the twelve recordings are transcribed with."""
    return planned()


def done(process):
    """Exit code, stdout and our lines of stderr, once a process has ended."""
    out, err = process.communicate(timeout=ENOUGH_S)
    # the others are of Ray's C++, and of what it says of actors
    ours = [
        line
        for line in err.splitlines()
        if not line.startswith("[20") and "(raylet)" not in line
    ]
    return process.returncode, out, ours


def counts(process, code=1):
    """What --json prints; nothing else is on stdout."""
    returned, out, err = done(process)
    assert returned == code and out.count("\n") == 1, (returned, out, err)
    return json.loads(out)


def written(out):
    """When each result was written."""
    return {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}


def until(condition, process):
    """Wait until a condition holds, while a process runs."""
    deadline = time.monotonic() + ENOUGH_S
    while not condition():
        assert process.poll() is None, done(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes(*words):
    """Numbers of the processes with all of these words in their command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            if all(str(word) in line for word in words) and "nsenter" not in line:
                found.append(int(folder.name))
    return found


def workers_of(out):
    """Numbers of the processes that transcribe shards into a folder."""
    return processes("asrkit.transcribe.bulk.worker", out)


def parent(number):
    """The number of a process's parent."""
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_node_that_is_killed_loses_and_doubles_nothing(
    cluster, command, talks, wanted, found, tmp_path
):
    out = tmp_path / "out"
    second = cluster.node(f"--address={ADDRESS}")
    cluster.slow(0.5)
    process = cluster.asrkit(*command, "--address", ADDRESS, "--actors", 2)
    until(lambda: len(written(out)) >= 2 and len(workers_of(out)) == 2, process)
    os.killpg(second.pid, signal.SIGKILL)
    before = written(out)
    cluster.slow(0)
    result = counts(process)
    assert len(before) < result["shards"] == result["done"]
    assert (result["recordings"], result["failed"], result["missing"]) == (12, 3, 0)
    assert found(out) == wanted(talks)
    assert before.items() <= written(out).items()


def test_an_actor_that_is_killed_is_started_again_and_parts_share_the_folder(
    cluster, command, talks, wanted, found, tmp_path
):
    def here(made, shards, machine):
        transcriber = ShardTranscriber(made, machine)
        for shard in shards:
            yield Event(shard=shard.name, counts=transcriber.transcribe(shard))

    out = tmp_path / "out"
    assert run(load_plan(out), part=(0, 2), executor=here).missing == 0
    before = written(out)
    cluster.slow(0.5)
    process = cluster.asrkit(*command, "--address", ADDRESS)
    until(lambda: len(written(out)) > len(before) and workers_of(out), process)
    (worker,) = workers_of(out)
    os.kill(parent(worker), signal.SIGKILL)
    cluster.slow(0)
    result = counts(process)
    assert (result["recordings"], result["failed"], result["missing"]) == (12, 3, 0)
    assert found(out) == wanted(talks)
    assert before.items() <= written(out).items()
    assert not Path(f"/proc/{worker}").exists()


def test_a_command_killed_with_signal_9_goes_on_and_a_finished_one_imports_no_ray(
    cluster, command, talks, wanted, found, tmp_path
):
    out = tmp_path / "out"
    cluster.slow(0.5)
    env = {"RAY_AUTH_TOKEN": None, "RAY_AUTH_MODE": None}
    killed = cluster.asrkit(*command, "--address", "local", "--actors", 1, env=env)
    until(lambda: len(written(out)) >= 2, killed)
    for number in processes("address", "local", out):
        os.kill(number, signal.SIGKILL)
    assert killed.wait() != 0
    before = written(out)
    cluster.slow(0)
    result = counts(cluster.asrkit(*command, "--address", ADDRESS))
    assert (result["recordings"], result["failed"], result["missing"]) == (12, 3, 0)
    assert len(before) < result["shards"]
    assert found(out) == wanted(talks)
    assert before.items() <= written(out).items()
    program = "import sys; from asrkit.cli import main; code = main(sys.argv[1:]); print(code, 'ray' in sys.modules)"
    again = [
        "transcribe",
        "--dtype",
        "float32",
        "--shards",
        "--on",
        "ray",
        "--address",
        "127.0.0.1:1",
        "--json",
    ]
    finished = cluster.start(
        "-c", program, *again, *map(str, command), stderr=subprocess.PIPE
    )
    code, said, err = done(finished)
    first, second = said.splitlines()
    assert json.loads(first) == result | {"transcribed_s": 0.0, "rtfx": 0.0}
    assert (code, second, err) == (0, "1 False", [])


def test_a_recording_that_ends_its_process_is_an_error_and_the_rest_is_transcribed(
    cluster, planned, talks, wanted, found, tmp_path
):
    good = wanted(talks)
    shutil.copy(talks / "a" / "0.wav", talks / "poison.wav")
    result = counts(cluster.asrkit(*planned(shard_h=1.0), "--address", ADDRESS))
    assert (result["shards"], result["failed"], result["missing"]) == (1, 4, 0)
    assert found(tmp_path / "out") == good | {"poison.wav": ("", ENDED)}


NO_ROOM = {
    "actors": (
        ["--actors", 2],
        "--actors: expected room for 2 with 1 CPU each, got room for 1.",
    ),
    "gpu": (
        ["--device", "cuda"],
        "--actors: expected room for 1 with 1 CPU and 1 GPU each, got room for 0.",
    ),
}


def test_what_the_cluster_refuses_is_one_line(cluster, planned):
    asked = {
        name: cluster.asrkit(*planned(name), "--address", ADDRESS, *more)
        for name, (more, _) in NO_ROOM.items()
    }
    for name, process in asked.items():
        code, out, err = done(process)
        assert (code, out, err) == (2, "", [f"asrkit transcribe: {NO_ROOM[name][1]}"])
