"""Shards on a real Ray, in its own network and process namespace, where processes and nodes are really killed."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from waiting import ENOUGH_S, wait_until, written

from asrkit.transcribe import Layout
from asrkit.transcribe.bulk.ray import RayCluster
from asrkit.transcribe.bulk.shards import LocalWorkers, plan_shards, run
from asrkit.transcribe.bulk.workers import ENDED
from asrkit.transcribe.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-scale/bin/python"
pytestmark = pytest.mark.live
needs_ray = pytest.mark.skipif(not PYTHON.exists(), reason="needs Ray: make peers")

ADDRESS = "127.0.0.1:6399"
TOKEN = "0123456789abcdef" * 4
SHORT = 4 / 3600  # hours: more than three shards of the twelve recordings
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


class Network:
    """A namespace with loopback only; all of its processes end with it."""

    def __init__(self, folder, path):
        self.folder = folder  # of what Ray writes
        self.started = []
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "ASRKIT_HOME": str(folder / "home"),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if not shutil.which("unshare"):
            pytest.skip("needs a network namespace: no unshare")
        space = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.holder = subprocess.Popen([*space, sys.executable, "-c", HOLDER], **pipes)
        if self.holder.stdout.readline() != "up\n":
            why = self.holder.stderr.read().strip().splitlines()[-1:]
            pytest.skip(f"needs a network namespace: {' '.join(why)}")
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children")
        self.first = children.read_text().split()[0]

    def start(self, *command, **how):
        """A process of this network, in a session of its own."""
        spaces = ["--net", "--pid", "--mount", f"--wd={ROOT}"]
        enter = ["nsenter", f"--target={self.first}", *spaces, str(PYTHON)]
        how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True} | how
        process = subprocess.Popen([*enter, *command], env=self.env, **how)
        self.started.append(process)
        return process

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

    def asrkit(self, *arguments):
        """Start `asrkit transcribe --shards --on ray --json`."""
        command = ["-m", "asrkit", "transcribe", "--shards", "--on", "ray"]
        options = ["--json", "--no-progress", "--dtype", "float32"]
        arguments = [*command, *options, *map(str, arguments)]
        return self.start(*arguments, stderr=subprocess.PIPE)

    def workers(self):
        """Numbers of the processes that actors have spawned, and of the actors."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                spawned = b"--multiprocessing-fork" in (folder / "cmdline").read_bytes()
                if (
                    spawned
                    and str(self.folder).encode() in (folder / "environ").read_bytes()
                ):
                    stat = (folder / "stat").read_text()
                    found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        return found

    def leave(self):
        """End all processes in it."""
        self.holder.kill()
        for process in (self.holder, *self.started):
            process.communicate()


# Python imports it at its start. A name with `poison` kills a spawned worker; the file `slow_s` slows down its reads.
FAULTS = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    import signal, time
    import soundfile
    plain, here = soundfile.SoundFile, os.path.dirname(__file__)

    def open_or_die(file, *args, **how):
        if isinstance(file, (str, bytes)) and "poison" in os.fsdecode(file):
            os.kill(os.getpid(), signal.SIGSEGV)
        with open(os.path.join(here, "slow_s")) as slow_s:
            time.sleep(float(slow_s.read()))
        return plain(file, *args, **how)

    soundfile.SoundFile = open_or_die
"""


class Faults:
    """Faults of spawned workers whose PYTHONPATH begins with `path`."""

    def __init__(self, folder):
        self.folder = folder
        self.path = f"{folder}{os.pathsep}{ROOT}"
        (folder / "sitecustomize.py").write_text(FAULTS)
        self.slow(0)

    def slow(self, seconds):
        """Set the time that workers take to open a file."""
        made = self.folder / "slow_s.new"
        made.write_text(str(seconds))
        made.replace(self.folder / "slow_s")  # workers read it at any moment


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """Faults of spawned workers."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def cluster(faults):
    """A cluster of one node with one CPU, and a token."""
    # a socket's path has to be short
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    made = Network(folder, faults.path)
    try:
        head = ["--head", "--port=6399", "--include-dashboard=false"]
        made.node(*head, f"--temp-dir={folder}")
        yield made
    finally:
        made.leave()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def command(talks, model, tmp_path):
    """The arguments of the command."""
    options = ["--model", model, "--out", tmp_path / "out", "--address", ADDRESS]
    return [talks, *options, "--batch-seconds", 4, "--shard-hours", SHORT]


def done(process):
    """Exit code, stdout and our lines of stderr, once a process has ended."""
    out, err = process.communicate(timeout=ENOUGH_S)
    # the other lines are from Ray's C++ code, and about actors
    theirs = ("[20", "(")
    ours = [line for line in err.splitlines() if not line.startswith(theirs)]
    return process.returncode, out, ours


def until(condition, process):
    """Wait until a condition holds, while a process runs."""

    def holds():
        assert process.poll() is None, done(process)
        return condition()

    wait_until(holds)


@needs_ray
def test_an_actor_and_a_node_that_are_killed_lose_and_double_nothing_in_a_folder_of_parts(
    cluster, command, faults, talks, model, wanted, found, tmp_path
):
    good, out = wanted(talks), tmp_path / "out"
    shutil.copy(talks / "a" / "0.wav", talks / "poison.wav")
    made = plan_shards([talks], Plan(model=model), out, shard_h=SHORT)
    holds = [
        any(one.id == "poison.wav" for one in shard.recordings())
        for shard in made.shards
    ]
    part = 1 - holds.index(True) % 2
    forked = LocalWorkers(Layout(threads=1))
    run(made, part=(part, 2), executor=forked)
    done_before = len(written(out))
    second = cluster.node(f"--address={ADDRESS}")
    faults.slow(1)
    process = cluster.asrkit(*command, "--actors", 2)
    until(lambda: len(cluster.workers()) == 2, process)
    os.kill(next(iter(cluster.workers().values())), signal.SIGKILL)
    until(lambda: len(written(out)) > done_before, process)
    os.killpg(second.pid, signal.SIGKILL)
    before = written(out)
    faults.slow(0)
    code, stdout, _ = done(process)
    result = json.loads(stdout)  # nothing else is on stdout
    assert (code, result["recordings"], result["failed"]) == (1, 13, 4)
    assert len(before) < result["shards"] == result["done"]
    assert found(out) == good | {"poison.wav": ("", ENDED)}
    assert before.items() <= written(out).items()


@needs_ray
def test_a_cluster_without_room_or_out_of_reach_is_one_line(
    cluster, command, tmp_path, model
):
    for more, message in (
        (["--actors", 3], "--actors: expected room for 3 with {'CPU': 1} each, got room for "),  # 2 while a node dies
        (["--device", "cuda:1"], "--device: expected cpu or cuda on Ray, got cuda:1. Ray gives each actor its GPU."),
        (["--address", "127.0.0.1:1"], "Ray failed: "),
    ):  # fmt: skip
        code, out, err = done(cluster.asrkit(*command, *more))
        assert (code, out, len(err)) == (2, "", 1), err
        assert message in err[0]


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_ray_that_is_absent_is_one_line_that_names_parts():
    wanted = "^on: expected Ray Data, got No module named 'ray'. pip install .* --part K/N, which needs no Ray.$"
    with pytest.raises(ValueError, match=wanted):
        RayCluster(address="local")
