"""asrkit doctor: what is missing comes first, has a remedy, and only what is required makes it fail."""

import json
import sys
from types import SimpleNamespace

import pytest

from asrkit.cli import main
from asrkit.workbench import doctor


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A cache of this test's own."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))


def status(name):
    """The finding called `name`."""
    (check,) = [check for check in doctor.diagnose() if check.name == name]
    return check


def test_everything_that_asrkit_needs_is_found_here():
    checks = doctor.diagnose()
    assert not [check for check in checks if check.status == "missing"]
    assert {
        "packages",
        "pins",
        "memory",
        "cache",
        "GPU",
        "torchaudio",
        "espeak-ng",
    } <= {c.name for c in checks}


@pytest.mark.parametrize("extra, state", [("", "missing"), ("notebooks", "note")])
def test_only_a_required_package_that_is_absent_counts_as_missing(
    monkeypatch, extra, state
):
    monkeypatch.setitem(doctor.EXTRAS, extra, ("somebody", "torch no_such_module"))
    check = status(extra or "packages")
    assert (
        check.status == state
        and "absent: no_such_module" in check.detail
        and check.remedy.startswith("pip install")
    )


def test_a_library_that_does_not_load_is_found_without_harm(monkeypatch):
    monkeypatch.setitem(doctor.LOADS, ("torchaudio", ""), "import os; os.abort()")
    monkeypatch.delitem(sys.modules, "espeakng_loader", raising=False)
    assert (
        status("torchaudio").status == "missing" and status("espeak-ng").status == "ok"
    )
    assert (
        "espeakng_loader" not in sys.modules
    )  # a GPL library stays out of this process


def test_a_version_that_is_not_the_locks_is_named(monkeypatch, tmp_path):
    (tmp_path / "lock").write_text("numpy==0.0.1\nnot-installed==1.0\n")
    monkeypatch.setattr(doctor, "LOCK", tmp_path / "lock")
    check = status("pins")
    assert (
        check.status == "note"
        and check.detail.startswith("1 differ from requirements.lock: ")
        and "numpy" in check.detail
    )


def test_the_command_prints_text_and_with_json_every_check(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**33)
    )
    code = main(["doctor"])
    *text, last = capsys.readouterr().out.splitlines()
    assert main(["doctor", "--json"]) == code
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert err == "" and [*told] == ["missing", "note", "ok", "checks"]
    assert code == bool(told["missing"]) and len(told["checks"]) > 6
    assert last == "{missing} missing, {note} worth knowing, {ok} ok".format(**told)
    marks = [
        line.partition("]")[0].strip("[ ") for line in text if line.startswith("[")
    ]
    assert marks == sorted(
        marks, key=doctor.STATUSES.index
    )  # what is missing comes first
    for check in told["checks"]:
        assert bool(check["remedy"]) == (check["status"] != "ok")
        assert f"[{check['status']:^7}] {check['name']}: {check['detail']}" in text
