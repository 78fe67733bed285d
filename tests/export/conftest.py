"""The cases of the worker, which runs in the Python of `make peers`, and that Python."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest

from asrkit.workbench.bench.peers.processes import PYTHON

HERE = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location(
    "export_worker", HERE / "export_worker.py"
)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
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
            "PYTHONPATH": str(HERE.parents[1]),
            "OMP_NUM_THREADS": "1",
        }
        command = [str(PYTHON), "-W", "ignore", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=900, env=environment
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
def cases():
    """Small models of every encoder and predictor, by name."""
    return {
        name: worker.checkpoint_of(config) for name, config in worker.cases().items()
    }


@pytest.fixture(scope="session")
def batch():
    """batch(B, T): features with NaN in the padding, and lengths."""
    return worker.batch


@pytest.fixture(scope="session")
def client_script():
    """The script whose `client` transcribes by sherpa-onnx."""
    return HERE / "export_worker.py"
