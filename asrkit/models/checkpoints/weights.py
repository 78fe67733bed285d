"""Weights of other programs: read without running code, renamed and reshaped for asrkit."""

import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from asrkit.memory import map_file, return_free_memory
from asrkit.models.checkpoints.own import Weights, tensor_at
from asrkit.shapes import expect

# Linear layers that are convolutions of one frame in other programs.
_POINTWISE = (".gate.weight", ".pointwise.weight", "output.weight", "ctc_head.weight")


def saved(source: IO[bytes] | Path, name: str, path: Path | None = None, start: int = 0) -> Any:
    """Tensors and plain values from a file of `torch.save`; ValueError if it has anything else.

    Args:
        source: The file.
        name: Name of the file in errors.
        path: The file on disk that has `source` from byte `start` on. Tensors in dictionaries stay
            there until they are used, if their bytes are stored as torch stores them. None: they
            are read.
        start: Bytes before `source`.
    """
    records = _records(source) if path else set()
    if not isinstance(source, Path):
        source.seek(0)
    try:
        device = "meta" if records else "cpu"
        values = torch.load(source, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        why = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split())
        why = why.partition("Check the documentation")[0].split(". ")[0].strip()
        raise ValueError(f"{name} cannot be read as tensors alone ({why:.200}).") from None
    if not (records and path):
        return values
    try:
        return _mapped(values, map_file(path), start, records)
    except LookupError:
        return saved(source, name)


def _records(source: IO[bytes] | Path) -> set[tuple[int, int]]:
    """Offset and size of each record in a file of `torch.save` whose bytes can be used in place.

    Compressed records are left out. There is none in a file that is no zip archive, as those of
    torch before 1.6, or whose numbers are not little-endian.
    """
    if not zipfile.is_zipfile(source):
        return set()
    found = set()
    with zipfile.ZipFile(source) as archive:
        for record in archive.infolist():
            if record.filename.endswith("/byteorder") and archive.read(record) != b"little":
                return set()
            file: Any = archive.fp
            file.seek(record.header_offset + 26)  # lengths of the name and of the extra field
            data = record.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
            if record.compress_type == zipfile.ZIP_STORED:
                found.add((data, record.file_size))
    return found


def _mapped(values: Any, data: Any, start: int, records: set[tuple[int, int]]) -> Any:
    """Values that were loaded on "meta", with the tensors in nested dictionaries in a mapped file.

    torch computes where a storage is in the file, and does not look: the file may differ.

    Raises:
        LookupError: There is no such record.
    """
    if isinstance(values, dict):
        return {name: _mapped(value, data, start, records) for name, value in values.items()}
    if getattr(values, "layout", None) != torch.strided:
        return values
    storage: Any = values.untyped_storage()
    place = storage._checkpoint_offset, storage.nbytes()
    if place not in records:
        raise LookupError(place)
    flat = tensor_at(data, start + place[0], values.dtype, [place[1] // values.itemsize])
    return flat.as_strided(values.size(), values.stride(), values.storage_offset())


def replaced(name: str, names: Mapping[str, str]) -> str:
    """`name` with the parts in `names` replaced one after the other.

    The parts are patterns, in which a dot stands for itself.
    """
    for theirs, ours in names.items():
        name = re.sub(theirs.replace(".", r"\."), ours, name)
    return name


def renamed(
    weights: dict[str, Any], our_name: Callable[[str], str], unused: tuple[str, ...] = ()
) -> Weights:
    """`weights` by asrkit's names. `weights` is emptied, so that joined layers are in memory once.

    Args:
        weights: Weights by their names in another program.
        our_name: Maps these names to asrkit's. A name that asrkit does not know stays the same.
        unused: Prefixes of names that are left out.

    Raises:
        ValueError: Two weights get the same name, or a value is not a dense tensor.
    """
    result: Weights = {}
    for theirs in [*weights]:
        weight = weights.pop(theirs)
        if theirs.startswith(unused):
            continue
        ours = our_name(theirs)
        kind = getattr(weight, "layout", type(weight).__name__)
        expect(kind == torch.strided, theirs, "a dense tensor", kind)
        expect(ours not in result, "model", "weights of one model", f"two for {ours}")
        result[ours] = weight
    return result


def shape_conformer(weights: Weights) -> None:
    """Reshape weights of a FastConformer, named as in asrkit, in place.

    Pointwise convolutions become linear layers, biases of attention broadcast over frames, and
    queries, keys and values become one layer.
    """
    for name, value in weights.items():
        if name.endswith(_POINTWISE):
            weights[name] = value.flatten(1)
        if name.endswith((".content_bias", ".position_bias")):
            weights[name] = value[:, None]  # (H, D/H) -> (H, 1, D/H)
    join(weights, "qkv", "qkv")


def join(weights: Weights, parts: Sequence[str], joined: str) -> None:
    """Join layers that share an input into one layer, in place, by concatenating their rows.

    Args:
        weights: Weights, named as in asrkit except for the parts.
        parts: Names of the parts, in the order of their rows.
        joined: Name of the joined layer.
    """
    first = f".{parts[0]}."
    for name in [name for name in weights if first in name]:
        rows = [weights.pop(name.replace(first, f".{part}.")) for part in parts]
        weights[name.replace(first, f".{joined}.")] = torch.cat(rows)
        return_free_memory()


def drop_tied_output(weights: Weights, output: str) -> None:
    """Remove the weight of the output, in place: it is tied to the embedding.

    A file may have either of the two names.

    Raises:
        ValueError: The two differ.
    """
    tied = weights.pop(output, None)
    if tied is not None:
        expect(
            torch.equal(tied, weights.setdefault("embedding.weight", tied)),
            output,
            "the weights of the embedding, to which it is tied",
            "others",
        )
