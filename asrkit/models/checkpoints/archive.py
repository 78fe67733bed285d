"""Tar files and saved tensors of unknown origin, read without trusting them.

Nothing is unpacked under a name of the archive's choice, no code is run, and sizes have limits.
"""

import contextlib
import gzip
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from asrkit.shapes import expect

# Bytes of a config or a tokenizer: published ones have less than 1 MiB.
SMALL = 16 * 2**20
# Most that a gzip file may unpack to, as a multiple of its size. Weights compress by a tenth, a
# decompression bomb a thousandfold.
UNPACKED = 100
DISTRUST = "Do not trust it."
GZIP = b"\x1f\x8b"  # the first bytes of a gzip file


class Archive:
    """Plain files of an open tar archive, by their names."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name = name
        self._members = dict[str, tarfile.TarInfo]()
        self._tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        member = self._next()
        while member is not None:
            self._add(member)
            member = self._next()

    def _next(self) -> tarfile.TarInfo | None:
        """The archive's next member; None at its end."""
        try:
            return self._tar.next()
        except (OSError, ValueError) as error:  # an offset that no file can have
            raise tarfile.ReadError(f"a member of impossible size: {error}") from None

    def _add(self, member: tarfile.TarInfo) -> None:
        """Note a member that is a plain file; ValueError for what does not belong in an archive."""
        path = Path(member.name)
        inside = not path.is_absolute() and ".." not in path.parts
        shown = repr(member.name)[:80]
        expect(inside, self.name, "members inside the archive", shown, DISTRUST)
        regular = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
        plain = regular and not member.issparse()
        allowed = plain or member.isdir()
        expect(allowed, self.name, "files, no links or devices", shown, DISTRUST)
        if plain:
            key = str(path)
            expect(key not in self._members, self.name, "each member once", shown, DISTRUST)
            self._members[key] = member

    def open(self, member: str) -> IO[bytes]:
        """The member as a seekable file; ValueError names it where it is missing."""
        known = str(sorted(self._members))[:200]
        expect(member in self._members, self.name, f"a member {member!r}", known)
        stream = self._tar.extractfile(self._members[member])
        assert stream is not None  # plain files only
        return stream

    def small(self, member: str) -> bytes:
        """All bytes of a member that must be small."""
        with self.open(member) as stream:
            size = self._members[member].size
            expect(size <= SMALL, f"{self.name}: {member}", f"at most {SMALL} bytes", size)
            return stream.read()

    def weights(self, member: str) -> dict[str, Tensor]:
        """Tensors by name of a member that `torch.save` wrote.

        They are read where they lie in the archive, so none is in memory twice.

        Raises:
            ValueError: The member is missing, damaged, or holds anything but plain tensors.
        """
        what = f"{self.name}: {member}"
        with self.open(member) as stream:
            size = self._members[member].size
            _expect_stored(stream, what, size)
            weights = _load(stream, what)
        return tensors(weights, what, size)


def saved(path: Path) -> tuple[Any, int]:
    """What `torch.save` wrote to the file `path`, and the file's bytes.

    Its tensors stay in the file until they are used, and change with it.

    Raises:
        ValueError: The file is damaged, or holds anything but tensors and plain values.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            _expect_stored(stream, path.name, size)
    except (
        zipfile.BadZipFile,
        EOFError,
        OverflowError,
        NotImplementedError,
        struct.error,
    ) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path.name} is not whole ({why:.200}).") from None
    return _load(path, path.name, mmap=True), size


def tensors(weights: Any, what: str, size: int) -> dict[str, Tensor]:
    """`weights`, each in memory of its own; ValueError unless they are dense tensors by name.

    Args:
        weights: What a file holds.
        what: Its name in errors.
        size: The file's bytes; tensors that share memory add up to more.
    """
    named = isinstance(weights, dict) and all(
        isinstance(name, str) and _dense(value) for name, value in weights.items()
    )
    expect(named, what, "dense tensors by name", type(weights).__name__)
    total = sum(_bytes(value) for value in weights.values())
    got = f"{total} bytes of them in {size}"
    expect(total <= 2 * size, what, "tensors that share little memory", got, DISTRUST)
    return _separate(weights)


def _expect_stored(stream: IO[bytes], what: str, size: int) -> None:
    """ValueError unless `stream` is a zip file whose records are stored as they are.

    Args:
        stream: The file, read from its beginning afterwards.
        what: Name of the file in errors.
        size: Its bytes; records that overlap add up to more.
    """
    zipped = zipfile.is_zipfile(stream)
    wanted = "weights saved by torch 1.6 or later"
    expect(zipped, what, wanted, "something else or a part of it")
    with zipfile.ZipFile(stream) as records:
        entries = records.infolist()
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    total = sum(entry.file_size for entry in entries)
    valid = stored and total <= size
    wanted = "records as torch stores them"
    expect(valid, what, wanted, "compressed or overlapping ones", DISTRUST)
    stream.seek(0)


def _load(source: IO[bytes] | Path, what: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `source`, tensors alone; ValueError for anything else."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged pickle raises anything
        message = str(error).rpartition("WeightsUnpickler error: ")[2]
        first_sentence = message.split(". ")[0]
        why = " ".join(first_sentence.split())
        raise ValueError(f"{what} cannot be read as tensors alone ({why:.200}).") from None


def _separate(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights`, copied where several lie in one piece of memory, as an LSTM's do."""
    addresses = {name: value.untyped_storage().data_ptr() for name, value in weights.items()}
    owners = Counter(addresses.values())
    separate = {}
    for name, value in weights.items():
        shared = owners[addresses[name]] > 1
        if shared:
            value = value.clone()
        separate[name] = value
    return separate


def _bytes(value: Tensor) -> int:
    """Bytes of the tensor's numbers."""
    return value.numel() * value.element_size()


def _dense(value: object) -> bool:
    """Whether `value` is a tensor with memory for each number, not one number shown many times."""
    if not isinstance(value, Tensor):
        return False
    if value.layout != torch.strided or value.device.type != "cpu":
        return False
    return _bytes(value) <= value.untyped_storage().nbytes()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """The tar archive at `path`, plain or gzip.

    Raises:
        ValueError: It is no whole tar archive of plain files.
    """
    try:
        with path.open("rb") as file, contextlib.ExitStack() as stack:
            packed = file.read(2) == GZIP
            file.seek(0)
            plain: IO[bytes] = file
            if packed:
                plain = stack.enter_context(_unpacked(file, path))
            yield Archive(plain, path.name)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        gzip.BadGzipFile,
        MemoryError,
        OverflowError,
    ) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path.name} is not a whole tar archive ({why:.200}).") from None


@contextlib.contextmanager
def _unpacked(file: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """The gzip file's contents in a nameless temporary file.

    Weights are read from their end first, and gzip cannot go back.
    """
    limit = path.stat().st_size * UNPACKED
    with tempfile.TemporaryFile() as unpacked, gzip.open(file) as stream:
        while block := stream.read(2**20):
            fits = unpacked.tell() + len(block) <= limit
            expect(fits, path.name, f"at most {limit} bytes unpacked", "more", DISTRUST)
            unpacked.write(block)
        unpacked.seek(0)
        yield unpacked
