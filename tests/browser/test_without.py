"""Where there is no browser, its tests are skipped and counted; under FAIL_ON_SKIP=1 the run fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("required, code, said", [
    ("", 0, ["1 tests were skipped: 1 no chromium", "SKIPPED [1]"]),
    ("1", 1, ["1 tests were skipped: 1 no chromium", "FAIL_ON_SKIP: these reasons can be mended: no chromium"]),
])  # fmt: skip
def test_without_a_chromium_its_tests_are_skipped_and_counted_unless_no_skip_is_allowed(
    tmp_path, required, code, said
):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n0",
        "tests/browser/test_lab.py",
        "-k",
        "does_nothing",
    ]
    environment = os.environ | {"PATH": str(tmp_path), "FAIL_ON_SKIP": required}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code and all(words in done.stdout for words in said), (
        done.stdout + done.stderr
    )
