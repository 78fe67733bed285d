"""CTranslate2's folders of Whisper, as faster-whisper uses them: JSON files and a model.bin.

model.bin is little endian: the binary version, the specification's name and revision, the variables
(name, rank, shape, type, bytes, values), and aliases, which are pairs of names. The integers of a
quantised weight are divided by the scale of their row, or by the one scale of the weight.
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from asrkit.memory import map_file
from asrkit.models.checkpoints import whisper
from asrkit.models.checkpoints.folders import expect_only, read_json
from asrkit.models.checkpoints.names import LAYERS
from asrkit.models.checkpoints.own import Contents, Values, Weights, tensor_at
from asrkit.models.checkpoints.weights import renamed, replaced
from asrkit.shapes import expect

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
VERSION = 6  # of the binary layout
SPECIFICATION = "WhisperSpec, revision 3"
REMEDY = "Convert the model again: ct2-transformers-converter."
# Variables of one number, and the value that asrkit supports; 3 is GELU.
ONLY = {
    "decoder/activation": 3,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
# Variables that other uses of CTranslate2 need.
UNUSED = {
    "decoder/alibi_use_positive_positions",
    "decoder/alignment_heads",
    "decoder/alignment_layer",
    "decoder/scale_alibi",
}
MAX_FIRST = 50  # limit of the first timestamp, 1 s, in faster-whisper and the published models


class _File:
    """A model.bin, mapped to memory and read from beginning to end."""

    def __init__(self, path: Path) -> None:
        self.data = map_file(path)
        self.at = 0

    def skip(self, size: int) -> int:
        """Position of the next `size` bytes; ValueError if the file is shorter."""
        start = self.at
        self.at += size
        length = len(self.data)
        expect(
            self.at <= length,
            "model.bin",
            f"at least {self.at:,} bytes",
            f"{length:,}",
            "Is it whole? Copy it again.",
        )
        return start

    def number(self, form: str = "I") -> int:
        """The next number, in a format of `struct`."""
        return struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form)))[0]

    def text(self) -> str:
        """The next text, which ends with a zero byte."""
        size = self.number("H")
        start = self.skip(size)
        return self.data[start : start + size].rstrip(b"\0").decode()

    def tensor(self, name: str) -> Tensor:
        """The next tensor, whose values stay in the file until they are used."""
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
        return tensor_at(self.data, self.skip(size), DTYPES[kind], shape)


def read(path: Path, settings: Values) -> Contents:
    """Contents of the folder `path`, whose config.json holds `settings`.

    Raises:
        ValueError: A file is missing or damaged, or has a setting that is not supported.
    """
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    variables = read_variables(path / "model.bin")
    numbers = {name: int(value) for name, value in variables.items() if value.dim() == 0}
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
        "max_initial_timestamp_index": MAX_FIRST,
    }
    for part in ("encoder", "decoder"):
        inner = [len(weight) for name, weight in variables.items() if _is_inner(name, part)]
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
    """Variables of a model.bin by name; quantised ones become float32, others stay in the file.

    Raises:
        ValueError: The file is of another program or version, or damaged.
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
    specification = f"{file.text():.100}, revision {file.number()}"
    expect(specification == SPECIFICATION, "model.bin", SPECIFICATION, specification, REMEDY)
    variables: Weights = {}
    for _ in range(file.number()):
        name = file.text()
        expect(name not in variables, "model.bin", f"one {name!r:.80}", "two", REMEDY)
        variables[name] = file.tensor(name)
    for name in [name for name in variables if name.endswith("_scale")]:
        scale = variables.pop(name)
        name = name.removesuffix("_scale")
        weight = variables[name]
        variables[name] = weight / scale.view(-1, *[1] * (weight.dim() - 1))
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
