"""A file from the network that goes on where it was cut off, and bears its name only once its
checksum is right.

Not lhotse's `resumable_download`, which takes a connection that ended early for the end of the
file, appends the whole file to its part where a server ignores Range, and waits for ever for a
server that fell silent.
"""

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from asrkit.files import atomic
from asrkit.shapes import expect

WAITS_S, SILENCE_S, BLOCK = (0, 2, 10, 30), 60, 1 << 20


def fetch(url: str, path: str | Path, *, checksum: str = "", progress: bool = True) -> str:
    """sha256 of `path`, which then holds the file at `url` and has `path`.sha256 beside it; loaded
    only where it is absent.

    `path`.part holds what has come so far; a connection that ends early is taken up again as long
    as anything comes.
    checksum: "sha256:…" or "md5:…"; a copy that differs is removed. Proxies are those of the
    environment, such as https_proxy.
    """
    path, remedy = Path(path), "Remove the file, or pass another --out."
    held = path if path.exists() else path.with_name(f"{path.name}.part")
    if held != path:
        _load(url, held, progress)
    kind, _, wanted = (checksum or "sha256:").partition(":")
    found = _digests(held, {kind, "sha256"}, progress)
    if held != path and found[kind] != (wanted or found[kind]):
        held.unlink()
        remedy = "It was removed: run again, or pass another --mirror."
    expect(
        found[kind] == (wanted or found[kind]),
        "mirror",
        f"{kind} {wanted} of {path}",
        found[kind],
        remedy,
    )
    with atomic(f"{path}.sha256") as note:
        note.write_text(f"{found['sha256']}  {path.name}\n")
    os.replace(held, path)
    return found["sha256"]


def _digests(path: Path, kinds: set[str], progress: bool) -> dict[str, str]:
    digests = {kind: hashlib.new(kind, usedforsecurity=False) for kind in kinds}
    bar = tqdm(
        desc=f"checking {path.name}",
        total=path.stat().st_size,
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with path.open("rb") as file, bar:
        while block := file.read(BLOCK):
            for digest in digests.values():
                digest.update(block)
            bar.update(len(block))
    return {kind: digest.hexdigest() for kind, digest in digests.items()}


def _load(url: str, part: Path, progress: bool) -> None:
    """Connect until `part` is whole; ConnectionError in one line where nothing comes any more."""
    waits: Iterator[int] = iter(())
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _connect(url, part, before, progress):
                return
            why = "a connection that ended early"
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
        ) as error:  # the last where an URL or a length is none
            reason = getattr(
                error, "reason", error
            )  # of an URLError, which may say more than errno
            why = str(getattr(reason, "strerror", None) or reason) or type(error).__name__
            why = f"{error.code} {why}" if isinstance(error, urllib.error.HTTPError) else why
        if part.exists() and part.stat().st_size > before:
            waits = iter(WAITS_S)
        wait = next(waits, None)
        if wait is None:
            remedy = f"Run again to go on, pass another --mirror, or put the file at {part.with_suffix('')} yourself."
            raise ConnectionError(
                f"mirror: expected {url} to answer, got {why}. {remedy}"
            ) from None
        time.sleep(wait)


def _connect(url: str, part: Path, have: int, progress: bool) -> bool:
    """Append to the `have` bytes of `part` what one connection brings; whether the file is whole
    then.
    """
    request = urllib.request.Request(
        url, headers={"Range": f"bytes={have}-", "User-Agent": "asrkit"}
    )
    try:
        answer = urllib.request.urlopen(request, timeout=SILENCE_S)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        whole = error.headers.get("Content-Range") == f"bytes */{have}"
        return whole or _connect(
            url, part, 0, progress
        )  # what is longer than the file is not of it
    part.parent.mkdir(parents=True, exist_ok=True)
    with answer, part.open("ab") as file:
        have = have if answer.status == 206 else 0  # this server knows no Range and sends all
        file.truncate(have)
        size = answer.headers.get("Content-Length")
        total = have + int(size) if size else None
        name = f"loading {part.stem}"
        with tqdm(
            desc=name, initial=have, total=total, unit="B", unit_scale=True, disable=not progress
        ) as bar:
            while block := answer.read1(BLOCK):
                file.write(block)
                bar.update(len(block))
    return total is None or part.stat().st_size == total
