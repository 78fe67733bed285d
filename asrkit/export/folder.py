"""An exported folder: graphs, tokens.txt, what asrkit's decoders need, and a manifest.

model.onnx | encoder.onnx, decoder.onnx, joiner.onnx      (.int8.onnx with int8 weights; .xml,
                                                           .bin for OpenVINO)
tokens.txt              a piece and its number a line, the blank <blk> last
decoding.safetensors    weights of predictor and joint, of a transducer
asrkit.json             format, model, features, tokenizer, notes, and the file of each graph
"""

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from asrkit.files import plain_json
from asrkit.models import CTCConfig
from asrkit.models.checkpoints import config_from_dict, config_to_dict
from asrkit.shapes import expect
from asrkit.text import Tokenizer, dump_tokenizer, load_tokenizer, token_texts

MANIFEST = "asrkit.json"
TOKENS = "tokens.txt"
DECODING = "decoding.safetensors"
VERSION = 2
BLANK = "<blk>"
AGAIN = "Export it again: asrkit export."


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an exported folder holds.

    Args:
        path: The folder.
        format: "onnx" or "openvino".
        config: Of the model that left: a CTCConfig or a TransducerConfig.
        tokenizer: Of the model.
        features: Arguments of its `FeatureConfig`.
        notes: Of its checkpoint.
        graphs: The file of each graph, by name: "model", or "encoder", "decoder", "joiner".
    """

    path: Path
    format: str
    config: Any
    tokenizer: Tokenizer
    features: dict[str, Any]
    notes: dict[str, Any]
    graphs: dict[str, str]

    @property
    def head(self) -> str:
        """ "ctc" or "transducer": which part of the model left."""
        return "ctc" if isinstance(self.config, CTCConfig) else "transducer"


def require(package: str, extra: str) -> Any:
    """A package that asrkit installs only where it is asked for.

    Args:
        package: As it is imported.
        extra: The extra of asrkit that brings it.

    Raises:
        ValueError: It is not installed; how to install it.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError:
        remedy = f"Install it: pip install 'asrkit[{extra}]'."
        raise ValueError(f"{package}: expected a package, got none. {remedy}") from None


def write_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Write tokens.txt: "piece number" a line, blank last.

    Args:
        path: The file.
        tokenizer: Of the model.

    Raises:
        ValueError: Pieces that such a file cannot hold.
    """
    pieces = [*token_texts(tokenizer), BLANK]
    other = {piece for piece in pieces if piece != " " and piece.split() != [piece]}
    other |= {piece for piece in pieces if pieces.count(piece) > 1}
    expect(not other, "tokenizer", "pieces that differ, without white space", sorted(other)[:5])
    lines = [f"{piece} {number}\n" for number, piece in enumerate(pieces)]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def write_manifest(exported: Exported) -> None:
    """Write asrkit.json of a folder."""
    manifest = {
        "version": VERSION,
        "format": exported.format,
        "head": exported.head,
        "model": config_to_dict(exported.config),
        "features": exported.features,
        "tokenizer": dump_tokenizer(exported.tokenizer),
        "notes": exported.notes,
        "graphs": exported.graphs,
    }
    text = json.dumps(plain_json(manifest), indent=1)
    (exported.path / MANIFEST).write_text(text, encoding="utf-8")


def is_exported(path: Path | str) -> bool:
    """Whether `path` is a folder of `asrkit export`, whole or not."""
    return (Path(path) / MANIFEST).is_file()


def read_exported(path: Path | str) -> Exported:
    """What the manifest of an exported folder says.

    Args:
        path: The folder.

    Raises:
        ValueError: It is no exported folder, of another version, or its manifest is damaged.
    """
    path = Path(path)
    there = is_exported(path)
    expect(there, "model", "a folder of asrkit export", repr(str(path)), "Make one: asrkit export.")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["version"]
        expect(version == VERSION, "model", f"an export of version {VERSION}", version, AGAIN)
        return Exported(
            path=path,
            format=manifest["format"],
            config=config_from_dict(manifest["model"]),
            tokenizer=load_tokenizer(manifest["tokenizer"]),
            features={**manifest["features"]},
            notes=manifest["notes"],
            graphs={**manifest["graphs"]},
        )
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"model: {MANIFEST} of {path} is damaged ({why:.200}). {AGAIN}") from None
