"""Files that asrkit keeps: where they lie, how they are written whole or not at all, and hashes of
what they hold.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def home() -> Path:
    """Folder for what asrkit builds and keeps between runs: $ASRKIT_HOME, or ~/.cache/asrkit;
    created when missing.
    """
    path = Path(os.environ.get("ASRKIT_HOME") or "~/.cache/asrkit").expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def shipped(name: str) -> Path:
    """Path of a file or folder of the repository's `data/`, in a checkout and in an installed wheel
    alike.
    """
    for path in (HERE / "_shipped" / name, HERE.parent / "data" / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"shipped: asrkit ships no {name!r} in this installation.")


@contextlib.contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path`, same suffix: renamed over it when the block ends well,
    removed when it raises.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, or none yet, got a folder or a device.")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}-{os.urandom(4).hex()}{path.suffix}")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path, *, lock: str = "", wait: bool = False, refused: str = "") -> Iterator[None]:
    """Holds `folder`, created when missing, or a file `lock` in it: others wait, or are `refused`,
    until block or process end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / lock, os.O_RDONLY | (os.O_CREAT if lock else 0), 0o644)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            said = f"{folder}: expected a folder that nobody else writes to now. Wait, or name another."
            raise ValueError(refused or said) from None
        yield
    finally:
        os.close(held)


def content_hash(content: Any) -> str:
    """sha256:… of bytes, or of a value's canonical JSON, in which 1.0 is 1 (JavaScript saves
    notebooks so).
    """
    if not isinstance(content, bytes):
        plain = _plain(
            content, lambda text: int(float(text)) if float(text).is_integer() else float(text)
        )
        content = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _plain(value: Any, number: Callable[[str], float] = float) -> Any:
    try:  # scalars of numpy and torch become numbers
        return json.loads(
            json.dumps(value, allow_nan=False, default=lambda scalar: scalar.item()),
            parse_float=number,
        )
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"record: expected finite numbers, text, lists and dicts, got {value!r:.200}."
        ) from error
