"""CTranslate2's folders of Whisper, as faster-whisper has them: JSON files beside a model.bin.

model.bin is little endian: the binary version, the specification's name and revision, the variables
(name, rank, shape, type, bytes, values), and aliases, which are pairs of names. An integer of a
quantised weight is to be divided by the scale of its row, or by the one scale of its weight.
"""

import math
import mmap
import struct
from pathlib import Path

import torch
from torch import Tensor

from asrkit.models.checkpoints import whisper
from asrkit.models.checkpoints.folders import expect_only, read_json
from asrkit.models.checkpoints.names import LAYERS
from asrkit.models.checkpoints.own import Contents, Values, Weights
from asrkit.models.checkpoints.weights import renamed, replaced
from asrkit.shapes import expect

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
VERSION = 6  # of the file's layout
SPECIFICATION = "WhisperSpec, revision 3"
REMEDY = "Convert the model again: ct2-transformers-converter."
# Variables that are one number, and the value that asrkit computes; 3 is GELU.
ONLY = {
    "decoder/activation": 3,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
# Those that matter to other uses of CTranslate2 only.
UNUSED = {
    "decoder/alibi_use_positive_positions",
    "decoder/alignment_heads",
    "decoder/alignment_layer",
    "decoder/scale_alibi",
}
MOST_FIRST = 50  # the latest first timestamp, 1 s, of faster-whisper and of the published models


class _File:
    """A model.bin, mapped and read from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # A private copy of what is written to, which is nothing: torch warns of read-only ones.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.at = 0

    def skip(self, size: int) -> int:
        """Position of the next `size` bytes; ValueError where the file ends before."""
        start, self.at = self.at, self.at + size
        found = len(self.data)
        expect(
            self.at <= found,
            "model.bin",
            f"at least {self.at:,} bytes",
            f"{found:,}",
            "Is it whole? Copy it again.",
        )
        return start

    def number(self, form: str = "I") -> int:
        """The next number, of a format of `struct`."""
        return struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form)))[0]

    def text(self) -> str:
        """The next text, which a zero byte ends."""
        size = self.number("H")
        start = self.skip(size)
        return self.data[start : start + size].rstrip(b"\0").decode()

    def tensor(self, name: str) -> Tensor:
        """The next shape, type and values, which stay in the file until they are used."""
        shape = [self.number() for _ in range(self.number("B"))]
        kind = self.number("B")
        expect(
            kind < len(DTYPES),
            "model.bin",
            f"a type below {len(DTYPES)} for {name!r:.80}",
            kind,
            REMEDY,
        )
        count, size = math.prod(shape), self.number()
        expect(
            size == count * DTYPES[kind].itemsize,
            "model.bin",
            f"as many bytes as the shape {shape!s:.80} of {name!r:.80} needs",
            f"{size:,}",
            REMEDY,
        )
        start = self.skip(size)
        flat = torch.frombuffer(self.data, dtype=DTYPES[kind], count=count, offset=start)
        return flat.view(shape)


def read(path: Path, settings: Values) -> Contents:
    """Contents of the folder `path`, whose config.json holds `settings`.

    Raises:
        ValueError: A file is missing or damaged, or asks for what is not supported.
    """
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    variables = read_variables(path / "model.bin")
    numbers = {name: int(one) for name, one in variables.items() if one.dim() == 0}
    expect_only(numbers, ONLY, "model.bin")
    for name in {*ONLY, *UNUSED} & numbers.keys():
        del variables[name]
    D, bins, _ = variables["encoder/conv1/weight"].shape
    values = {
        "d_model": D,
        "num_mel_bins": bins,
        "vocab_size": len(variables["decoder/embeddings/weight"]),
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
        "pad_token_id": None,
        "suppress_tokens": settings.get("suppress_ids"),
        "begin_suppress_tokens": settings.get("suppress_ids_begin"),
        "max_initial_timestamp_index": MOST_FIRST,
    }
    for part in ("encoder", "decoder"):
        inner = [len(one) for name, one in variables.items() if _is_inner(name, part)]
        values[f"{part}_layers"] = len(inner)
        values[f"{part}_ffn_dim"] = max(inner, default=0)
        values[f"{part}_attention_heads"] = int(variables.pop(f"{part}/num_heads"))
    weights = renamed(variables, lambda name: replaced(name, LAYERS["whisper_in_ctranslate2"]))
    extractor = read_json(path, "preprocessor_config.json") or {"feature_size": bins}
    return whisper.contents(values, text, weights, extractor, "CTranslate2, whisper")


def _is_inner(name: str, part: str) -> bool:
    """Whether a variable is the first weight of a feed-forward of the encoder or decoder."""
    return name.startswith(f"{part}/layer_") and name.endswith("/ffn/linear_0/weight")


def read_variables(path: Path) -> Weights:
    """Variables of a model.bin by name; quantised ones are float32, others stay in the file.

    Raises:
        ValueError: It is of another program, of another version or damaged.
    """
    file = _File(path)
    version = file.number()
    expect(
        version == VERSION,
        "model.bin",
        f"a file of CTranslate2, binary version {VERSION}",
        f"version {version}",
        REMEDY,
    )
    found = f"{file.text():.100}, revision {file.number()}"
    expect(found == SPECIFICATION, "model.bin", SPECIFICATION, found, REMEDY)
    variables: Weights = {}
    for _ in range(file.number()):
        name = file.text()
        expect(name not in variables, "model.bin", f"one {name!r:.80}", "two", REMEDY)
        variables[name] = file.tensor(name)
    for name in [name for name in variables if name.endswith("_scale")]:
        scale, quantised = variables.pop(name), name.removesuffix("_scale")
        weight = variables[quantised]
        variables[quantised] = weight / scale.view(-1, *[1] * (weight.dim() - 1))
    for _ in range(file.number()):
        alias, name = file.text(), file.text()
        expect(
            name in variables,
            "model.bin",
            f"a variable to which {alias!r:.80} refers",
            f"no {name!r:.80}",
            REMEDY,
        )
        variables.setdefault(alias, variables[name])
    return variables
