"""Download a file: resumed where it was cut off, and checked before it gets its name.

Not lhotse's `resumable_download`, which takes a connection that ended early for the end of the
file, appends the whole file to its part where a server ignores Range, and has no timeout for a
server that stops sending.
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

WAITS_S = (0, 2, 10, 30)  # before each attempt after one that brought nothing
SILENCE_S = 60  # after which a connection is given up
BLOCK = 1 << 20  # bytes read at once
RANGE_NOT_SATISFIABLE = 416
PARTIAL_CONTENT = 206


def fetch(url: str, path: str | Path, *, checksum: str = "", progress: bool = True) -> str:
    """Load a file where it is absent, and check it.

    `path`.part holds what has been loaded so far. A connection that ends early is resumed for as
    long as each attempt brings something. Proxies are those of the environment, such as
    https_proxy.

    Args:
        url: Where to load from.
        path: The file; `path`.sha256 is written beside it.
        checksum: "sha256:…" or "md5:…". A newly loaded file that differs is removed.
        progress: Show progress bars.

    Returns:
        The file's sha256.

    Raises:
        ValueError: The checksum differs.
        ConnectionError: Nothing comes any more.
    """
    path = Path(path)
    file = path
    is_new = not path.exists()
    if is_new:
        file = path.with_name(f"{path.name}.part")
        _load(url, file, progress)
    checksum = checksum or "sha256:"
    algorithm, _, wanted = checksum.partition(":")
    digests = _digests(file, {algorithm, "sha256"}, progress)
    if wanted and digests[algorithm] != wanted:
        remedy = "Remove the file, or pass another --out."
        if is_new:
            file.unlink()
            remedy = "It was removed: run again, or pass another --mirror."
        expect(False, "mirror", f"{algorithm} {wanted} of {path}", digests[algorithm], remedy)
    with atomic(f"{path}.sha256") as note:
        note.write_text(f"{digests['sha256']}  {path.name}\n")
    os.replace(file, path)
    return digests["sha256"]


def _digests(path: Path, algorithms: set[str], progress: bool) -> dict[str, str]:
    """Hexadecimal digest of a file by each algorithm; the file is read once."""
    digests = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
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
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _load(url: str, part: Path, progress: bool) -> None:
    """Connect until `part` is complete; ConnectionError in one line where nothing comes."""
    waits: Iterator[int] = iter(())
    while True:
        size_before = _size(part)
        try:
            if _connect(url, part, size_before, progress):
                return
            why = "a connection that ended early"
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: the URL, or a length that the server states, is malformed.
            why = _reason(error)
        if _size(part) > size_before:
            waits = iter(WAITS_S)
        wait = next(waits, None)
        if wait is None:
            raise ConnectionError(
                f"mirror: expected {url} to answer, got {why}. Run again to go on, pass another "
                f"--mirror, or put the file at {part.with_suffix('')} yourself."
            ) from None
        time.sleep(wait)


def _size(path: Path) -> int:
    """Bytes of the file; 0 where there is none."""
    if not path.exists():
        return 0
    return path.stat().st_size


def _reason(error: Exception) -> str:
    """Why a connection failed, in few words."""
    # The reason of an URLError may say more than its errno.
    reason = getattr(error, "reason", error)
    why = str(getattr(reason, "strerror", None) or reason) or type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        return f"{error.code} {why}"
    return why


def _connect(url: str, part: Path, have: int, progress: bool) -> bool:
    """Append what one connection brings to the `have` bytes of `part`; whether it is complete."""
    headers = {"Range": f"bytes={have}-", "User-Agent": "asrkit"}
    request = urllib.request.Request(url, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=SILENCE_S)
    except urllib.error.HTTPError as error:
        if error.code != RANGE_NOT_SATISFIABLE or not have:
            raise
        complete = error.headers.get("Content-Range") == f"bytes */{have}"
        # A part that is longer than the file belongs to another file: start anew.
        return complete or _connect(url, part, 0, progress)
    part.parent.mkdir(parents=True, exist_ok=True)
    with answer, part.open("ab") as file:
        if answer.status != PARTIAL_CONTENT:
            have = 0  # this server ignores Range and sends the whole file
        file.truncate(have)
        size = answer.headers.get("Content-Length")
        total = None
        if size:
            total = have + int(size)
        bar = tqdm(
            desc=f"loading {part.stem}",
            initial=have,
            total=total,
            unit="B",
            unit_scale=True,
            disable=not progress,
        )
        with bar:
            while block := answer.read1(BLOCK):
                file.write(block)
                bar.update(len(block))
    return total is None or part.stat().st_size == total
