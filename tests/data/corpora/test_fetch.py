import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lhotse.utils import resumable_download

from asrkit.data.corpora import fetch as module
from asrkit.data.corpora.fetch import fetch

DATA = random.Random(0).randbytes(200_000)  # the same in every process: tests are named by it
SHA256, MD5 = hashlib.sha256(DATA).hexdigest(), hashlib.md5(DATA).hexdigest()
ROOT = Path(module.__file__).resolve().parents[3]


@pytest.fixture
def url(mirror):
    mirror.files["/a.bin"] = DATA
    return f"{mirror.url}/a.bin"


@pytest.mark.parametrize("checksum", ["", f"sha256:{SHA256}", f"md5:{MD5}"])
def test_a_file_is_loaded_checked_and_noted_as_sha256sum_reads_it(url, mirror, tmp_path, checksum):
    path = tmp_path / "new" / "a.bin"
    assert fetch(url, path, checksum=checksum, progress=False) == SHA256
    assert path.read_bytes() == DATA and sorted(one.name for one in path.parent.iterdir()) == [
        "a.bin",
        "a.bin.sha256",
    ]
    assert (path.parent / "a.bin.sha256").read_text() == f"{SHA256}  a.bin\n"
    fetch(url, path, checksum=checksum, progress=False)
    assert len(mirror.asked) == 1  # what is there is checked, not loaded


def test_a_connection_that_ends_early_is_taken_up_where_it_ended_and_lhotse_takes_it_for_the_end(
    url, mirror, tmp_path
):
    mirror.cuts = [70_000, 70_000, 0, 50_000]
    fetch(url, tmp_path / "a.bin", checksum=f"sha256:{SHA256}", progress=False)
    assert [ranges for _, ranges in mirror.asked] == [
        "bytes=0-",
        "bytes=70000-",
        "bytes=140000-",
        "bytes=140000-",
        "bytes=190000-",
    ]
    mirror.cuts = [70_000]
    resumable_download(url, tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_size == 70_000


def test_a_server_that_knows_no_range_sends_all_again_and_lhotse_appends_it(url, mirror, tmp_path):
    mirror.ranges = False
    for name in ("a.bin.part", "theirs"):
        (tmp_path / name).write_bytes(DATA[:60_000])
    assert fetch(url, tmp_path / "a.bin", checksum=f"md5:{MD5}", progress=False) == SHA256
    resumable_download(url, tmp_path / "theirs")
    assert (tmp_path / "theirs").stat().st_size == 260_000


@pytest.mark.parametrize(("held", "asked"), [
    (DATA[:50], ["bytes=50-"]), (DATA, ["bytes=200000-"]), (DATA + b"more", ["bytes=200004-", "bytes=0-"]),
])  # fmt: skip
def test_what_a_run_left_is_gone_on_from_taken_as_whole_or_begun_anew(
    url, mirror, tmp_path, held, asked
):
    (tmp_path / "a.bin.part").write_bytes(held)
    fetch(url, tmp_path / "a.bin", checksum=f"sha256:{SHA256}", progress=False)
    assert [ranges for _, ranges in mirror.asked] == asked


def test_a_copy_that_came_wrong_is_named_and_removed_and_one_that_was_there_is_named_and_kept(
    url, mirror, tmp_path
):
    path = tmp_path / "a.bin"
    mirror.files["/a.bin"] = DATA[:-1] + b"?"
    with pytest.raises(
        ValueError,
        match=rf"^mirror: expected sha256 {SHA256} of .*a\.bin, got [0-9a-f]{{64}}\. It was removed: run ",
    ):
        fetch(url, path, checksum=f"sha256:{SHA256}", progress=False)
    assert not list(tmp_path.iterdir())
    path.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"Remove the file"):
        fetch(url, path, checksum=f"sha256:{SHA256}", progress=False)
    assert path.read_bytes() == b"half" and len(mirror.asked) == 1


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_server_that_does_not_answer_or_lacks_the_file_gives_one_line_and_leaves_nothing(
    mirror, tmp_path
):
    for url, why in (
        (f"http://127.0.0.1:{free_port()}/a.bin", "Connection refused"),
        (f"{mirror.url}/b.bin", "404 Not Found"),
    ):
        with pytest.raises(ConnectionError) as error:
            fetch(url, tmp_path / "a.bin", progress=False)
        line = f"mirror: expected {url} to answer, got {why}. Run again to go on, pass another --mirror, or put the file at "
        assert str(error.value) == f"{line}{tmp_path / 'a.bin'} yourself."
    assert not list(tmp_path.iterdir())


def test_a_server_that_falls_silent_is_left_after_a_while_and_tried_again(
    url, mirror, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "SILENCE_S", 0.3)
    mirror.cuts, mirror.stall_s = [150_000], 20.0
    assert fetch(url, tmp_path / "a.bin", checksum=f"sha256:{SHA256}", progress=False) == SHA256
    assert [ranges for _, ranges in mirror.asked] == ["bytes=0-", "bytes=150000-"]


def test_a_mirror_that_stops_for_good_gives_up_after_some_waits_and_keeps_what_came(
    url, mirror, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "WAITS_S", (0, 0.01))
    mirror.cuts = [1000, 0, 0, 0, 0]
    with pytest.raises(ConnectionError, match="got a connection that ended early"):
        fetch(url, tmp_path / "a.bin", progress=False)
    assert len(mirror.asked) == 3 and (tmp_path / "a.bin.part").stat().st_size == 1000


def test_a_run_killed_while_loading_is_gone_on_from(url, mirror, tmp_path):
    mirror.cuts, mirror.stall_s = [90_000], 30.0
    code = f"from asrkit.data.corpora.fetch import fetch; fetch({url!r}, {str(tmp_path / 'a.bin')!r}, progress=False)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    part, limit = tmp_path / "a.bin.part", time.monotonic() + 60
    while time.monotonic() < limit and not (part.exists() and part.stat().st_size > 0):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = part.stat().st_size
    assert 0 < held <= 90_000 and not (tmp_path / "a.bin").exists()
    assert fetch(url, tmp_path / "a.bin", checksum=f"sha256:{SHA256}", progress=False) == SHA256
    assert mirror.asked[-1][1] == f"bytes={held}-"
