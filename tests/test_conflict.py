"""The other project named asrkit, installed into the same folder before or after this one."""

import shutil
import subprocess
import sys

import pytest

from asrkit.files import HERE

OTHER = "asrkit: expected no other package of this name, got asrkit-0.5.5 in"


@pytest.mark.parametrize(
    "last, module",
    [
        ("ours", "asrkit"),
        ("ours", "asrkit.cli"),
        ("theirs", "asrkit.shapes"),
        ("theirs", "asrkit.cli"),
    ],
)
def test_files_of_two_projects_are_not_mixed(last, module, tmp_path):
    shutil.copytree(HERE, tmp_path / "asrkit", ignore=lambda *_: ["__pycache__"])
    if last == "theirs":
        (tmp_path / "asrkit/__init__.py").write_text("")

    def imported(name):
        command = [sys.executable, "-P", "-c", f"import {name}"]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )

    (tmp_path / "asrkit_workbench-0.4.0.dist-info").mkdir()
    assert imported("asrkit.shapes").returncode == 0
    (tmp_path / "asrkit-0.5.5.dist-info").mkdir()
    assert (
        imported("asrkit.shapes").returncode == 0
    )  # an uninstallation may leave this file
    (tmp_path / "asrkit-0.5.5.dist-info/METADATA").touch()
    error = imported(module).stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {OTHER} {tmp_path}. Remove both (pip")
