"""The worker, which runs in the Python of `make peers`, and that Python."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers.processes import PYTHON

WORKER = Path(__file__).with_name("export_worker.py")
RUN_ALL = """
import contextlib, io, json, sys
from asrkit.cli import main
done = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""


@pytest.fixture(autouse=True)
def small_tensors(one_thread):
    """Every test of this folder runs on one thread."""


@pytest.fixture(scope="session")
def in_peers():
    """in_peers(*arguments): what Python with the engines installed prints, and its errors and exit code."""
    if not PYTHON.exists():
        pytest.skip("needs .venv-peers: `make peers` installs the engines")

    def run(*arguments):
        environment = os.environ | {
            "PYTHONPATH": str(WORKER.parents[2]),
            "OMP_NUM_THREADS": "1",
        }
        command = [str(PYTHON), "-W", "ignore", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=1800, env=environment
        )

    return run


@pytest.fixture(scope="session")
def commands(in_peers):
    """commands([argument, ...], ...): (exit code, stdout, stderr) of each `asrkit` command.

    One process runs them all, for torch and the engines load slowly.
    """

    def run(*all_arguments):
        given = [[*map(str, arguments)] for arguments in all_arguments]
        done = in_peers("-c", RUN_ALL, json.dumps(given))
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])  # libraries may print before

    return run


@pytest.fixture(scope="session")
def worker():
    """The file that computes in the Python of `make peers`, imported here."""
    spec = importlib.util.spec_from_file_location("export_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
