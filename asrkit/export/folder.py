"""An exported folder: graphs, tokens.txt, what asrkit's decoders need, and a manifest of it all.

model.onnx | encoder.onnx, decoder.onnx, joiner.onnx      (.int8.onnx with int8 weights; .xml,
                                                           .bin for OpenVINO)
tokens.txt              a piece and its number a line, the blank <blk> last
decoding.safetensors    weights of predictor and joint, of a transducer
asrkit.json             format, model, features, tokenizer, notes, and the hash of every file
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrkit.files import plain_json
from asrkit.models.checkpoints import config_from_dict, config_to_dict
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer, token_texts

MANIFEST = "asrkit.json"
TOKENS = "tokens.txt"
DECODING = "decoding.safetensors"
VERSION = 1
BLANK = "<blk>"
AGAIN = "Export it again: asrkit export."
FORMATS = ("onnx", "openvino")
HEADS = ("ctc", "transducer")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an exported folder holds.

    Args:
        path: The folder.
        format: "onnx" or "openvino".
        int8: Whether weights have 8 bits.
        head: "ctc" or "transducer": which part of the model left.
        config: Of the model.
        tokenizer: Of the model.
        features: Arguments of its `FeatureConfig`.
        notes: Of its checkpoint.
        graphs: The file of each graph, by name: "model", or "encoder", "decoder", "joiner".
        files: SHA-256 of each file, by name.
    """

    path: Path
    format: str
    int8: bool
    head: str
    config: Any
    tokenizer: Tokenizer
    features: dict[str, Any]
    notes: dict[str, Any]
    graphs: dict[str, str]
    files: dict[str, str]

    @property
    def acoustic(self) -> str:
        """The graph that takes features: "model" of CTC, "encoder" of a transducer."""
        return "model" if self.head == "ctc" else "encoder"


def write_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Write tokens.txt: "piece number" a line, blank last.

    Args:
        path: The file.
        tokenizer: Of the model.

    Raises:
        ValueError: Pieces that such a file cannot hold.
    """
    pieces = token_texts(tokenizer)
    split = [piece for piece in pieces if piece != " " and len(piece.split()) != 1]
    split += [piece for piece in pieces if piece != " " and piece != piece.strip()]
    wanted = f"pieces without white space, as {TOKENS} holds"
    expect(not split, "tokenizer", wanted, split[:5])
    taken = BLANK in pieces or len({*pieces}) < len(pieces)
    expect(not taken, "tokenizer", f"pieces that differ, none of them {BLANK}", "others")
    lines = [f"{piece} {number}" for number, piece in enumerate([*pieces, BLANK])]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def write_manifest(exported: Exported) -> None:
    """Write asrkit.json of a folder whose other files are there.

    Args:
        exported: The folder and what it holds; the hashes of its files are taken here.
    """
    listed = {file.name: {"sha256": _sha256(file)} for file in sorted(exported.path.iterdir())}
    manifest = {
        "version": VERSION,
        "format": exported.format,
        "int8": exported.int8,
        "head": exported.head,
        "model": config_to_dict(exported.config),
        "features": exported.features,
        "tokenizer": dump_tokenizer(exported.tokenizer),
        "notes": exported.notes,
        "graphs": exported.graphs,
        "files": listed,
    }
    text = json.dumps(plain_json(manifest), indent=1)
    (exported.path / MANIFEST).write_text(text, encoding="utf-8")


def is_exported(path: Path | str) -> bool:
    """Whether `path` is a folder of `asrkit export`, whole or not."""
    return (Path(path) / MANIFEST).is_file()


def read_exported(path: Path | str) -> Exported:
    """What an exported folder holds; its files are there, and as they were written.

    Args:
        path: The folder.

    Raises:
        ValueError: It is no exported folder, or is incomplete or damaged: which file, and what to
            do.
    """
    path = Path(path)
    there = is_exported(path)
    expect(there, "model", "a folder of asrkit export", repr(str(path)), "Make one: asrkit export.")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        known = "Is it of a newer asrkit?"
        expect(version == VERSION, "model", f"an export of version {VERSION}", version, known)
        features = {**manifest["features"]}
        exported = Exported(
            path=path,
            format=manifest["format"],
            int8=manifest["int8"],
            head=manifest["head"],
            config=config_from_dict(manifest["model"]),
            tokenizer=load_tokenizer(manifest["tokenizer"]),
            features=features,
            notes=manifest["notes"],
            graphs={**manifest["graphs"]},
            files={name: file["sha256"] for name, file in manifest["files"].items()},
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model: {MANIFEST} of {path} is damaged ({why:.200}). {AGAIN}") from None
    _expect_unchanged(exported)
    return exported


def _expect_unchanged(exported: Exported) -> None:
    """ValueError unless the files are there and have the hashes that they had."""
    for name, digest in exported.files.items():
        file = exported.path / name
        wanted = f"{name} in {exported.path} as it was written"
        expect(file.is_file(), "model", wanted, "none", AGAIN)
        expect(_sha256(file) == digest, "model", wanted, "another", AGAIN)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
