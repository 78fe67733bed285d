"""Where there is no browser, its tests are skipped and counted, or fail if a browser is required."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("required, code, said", [
    ("", 0, ["1 browser tests were skipped: no chromium", "SKIPPED [1]"]),
    ("1", 1, ["REQUIRE_BROWSER is set, and there is no chromium", "1 error"]),
])  # fmt: skip
def test_without_a_chromium_its_tests_are_skipped_and_counted_unless_it_is_required(
    tmp_path, required, code, said
):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/browser/test_lab.py",
        "-k",
        "does_nothing",
    ]
    environment = os.environ | {"PATH": str(tmp_path), "REQUIRE_BROWSER": required}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == code and all(words in done.stdout for words in said), (
        done.stdout + done.stderr
    )
