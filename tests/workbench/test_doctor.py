"""asrkit doctor: missing things come first and have a remedy; only required ones make it fail."""

import json
import sys
from types import SimpleNamespace

import pytest

from asrkit.cli import main
from asrkit.workbench import doctor

LOADS = dict(doctor.LOADS)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """An empty cache, and no process that loads a library unless the test starts one."""
    monkeypatch.setenv("ASRKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(doctor, "LOADS", {})


def status(name):
    """The finding called `name`."""
    (check,) = [check for check in doctor.diagnose() if check.name == name]
    return check


def test_everything_that_asrkit_needs_is_installed_here(monkeypatch):
    monkeypatch.setattr(doctor, "LOADS", LOADS)
    monkeypatch.delitem(sys.modules, "espeakng_loader", raising=False)
    found = {check.name: check.status for check in doctor.diagnose()}
    assert "missing" not in found.values()
    named = {"packages", "memory", "cache", "GPU", "torchaudio", "espeak-ng", "weights"}
    assert named | {"onnx", "openvino", "scale", "peers"} <= {*found}
    # A GPL library stays out of this process.
    assert "espeakng_loader" not in sys.modules


@pytest.mark.parametrize("extra, state", [("", "missing"), ("notebooks", "note")])
def test_only_a_required_package_that_is_absent_counts_as_missing(
    monkeypatch, extra, state
):
    monkeypatch.setitem(doctor.EXTRAS, extra, ("somebody", "torch no_such_module"))
    check = status(extra or "packages")
    assert check.status == state
    assert "absent: no_such_module" in check.detail
    assert "pip install" in check.remedy


def test_a_library_that_crashes_on_loading_is_reported(monkeypatch):
    harmful = {("torchaudio", "notebooks"): "import os; os.abort()"}
    monkeypatch.setattr(doctor, "LOADS", harmful)
    assert status("torchaudio").detail == "does not load"
    assert "torchaudio 2.11.0" in status("torchaudio").remedy


def test_missing_peers_are_a_note_with_a_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "PEERS", tmp_path)
    assert status("peers").status == "ok"
    monkeypatch.setattr(doctor, "PEERS", tmp_path / "none")
    check = status("peers")
    assert (check.status, check.remedy) == ("note", "make peers, in a checkout")


def test_the_command_prints_text_and_with_json_every_check(capsys, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "", ("somebody", "no_such_module"))
    free = SimpleNamespace(free=2**33)  # the same both times
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    assert main(["doctor"]) == main(["doctor", "--json"]) == 1
    *text, last, result = capsys.readouterr().out.splitlines()
    result = json.loads(result)
    assert last == "{missing} missing, {note} worth knowing, {ok} ok".format(**result)
    # Missing things come first.
    assert text[0] == "[missing] packages: for somebody; absent: no_such_module"
    for check in result["checks"]:
        assert bool(check["remedy"]) == (check["status"] != "ok")
        assert f"[{check['status']:^7}] {check['name']}: {check['detail']}" in text
