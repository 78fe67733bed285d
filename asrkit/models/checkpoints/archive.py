"""Tar files and saved tensors of unknown origin: no code is run, nothing is unpacked to disk."""

import contextlib
import io
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from asrkit.shapes import expect


class Archive:
    """The files of an open tar archive, by their names."""

    def __init__(self, tar: tarfile.TarFile, name: str) -> None:
        self.name = name
        self._tar = tar
        self._members = {
            member.name.removeprefix("./"): member for member in tar if member.isfile()
        }

    def open(self, member: str) -> IO[bytes]:
        """The member as a seekable file; ValueError names it where it is missing."""
        known = str(sorted(self._members))[:200]
        expect(member in self._members, self.name, f"a member {member!r}", known)
        stream = self._tar.extractfile(self._members[member])
        assert stream is not None  # files only
        return stream

    def bytes(self, member: str) -> bytes:
        """All bytes of a member."""
        with self.open(member) as stream:
            return stream.read()

    def weights(self, member: str) -> dict[str, Tensor]:
        """Tensors by name of a member that `torch.save` wrote.

        In a plain archive they are read where they lie, so none is in memory twice.

        Raises:
            ValueError: The member is missing, damaged, or holds anything but tensors.
        """
        what = f"{self.name}: {member}"
        with self.open(member) as stream:
            if isinstance(self._tar.fileobj, tarfile.ExFileObject | io.BufferedReader):
                return tensors(_load(stream, what), what)
            # torch reads from the end first, and gzip cannot go back
            return tensors(_load(io.BytesIO(stream.read()), what), what)


def read_yaml(tar: Archive, member: str) -> dict[str, Any]:
    """The keys and values of a member in YAML; ValueError where it is damaged."""
    import yaml

    try:
        values = yaml.safe_load(tar.bytes(member))
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{tar.name}: {member} is damaged ({why:.200}).") from None
    expect(isinstance(values, dict), member, "keys and values", type(values).__name__)
    return values


def saved(path: Path) -> Any:
    """What `torch.save` wrote to the file `path`; ValueError where it holds more than plain values.

    Its tensors stay in the file until they are used, and change with it.
    """
    return _load(path, path.name, mmap=True)


def tensors(weights: Any, what: str) -> dict[str, Tensor]:
    """`weights`, each in memory of its own; ValueError unless they are tensors by name.

    Args:
        weights: What a file holds.
        what: Its name in errors.
    """
    dense = isinstance(weights, dict) and all(
        isinstance(value, Tensor) and value.layout == torch.strided for value in weights.values()
    )
    expect(dense, what, "dense tensors by name", type(weights).__name__)
    addresses = {name: value.untyped_storage().data_ptr() for name, value in weights.items()}
    owners = Counter(addresses.values())
    return {  # copied where several lie in one piece of memory, as an LSTM's do
        name: value.clone() if owners[addresses[name]] > 1 else value
        for name, value in weights.items()
    }


def _load(source: IO[bytes] | Path, what: str, *, mmap: bool = False) -> Any:
    """What `torch.save` wrote to `source`, tensors alone; ValueError for anything else."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a damaged pickle raises anything
        message = str(error).rpartition("WeightsUnpickler error: ")[2]
        why = " ".join(message.split(". ")[0].split())
        raise ValueError(f"{what} cannot be read as tensors alone ({why:.200}).") from None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """The tar archive at `path`, plain or gzip; ValueError where it is not whole."""
    try:
        with tarfile.open(path) as tar:
            yield Archive(tar, path.name)
    except (tarfile.TarError, zlib.error, EOFError, MemoryError, OverflowError, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path.name} is not a whole tar archive ({why:.200}).") from None
