"""An exported folder: graphs, tokens.txt, and what asrkit's decoders need.

model.onnx | encoder.onnx, decoder.onnx, joiner.onnx      (.int8.onnx with int8 weights; .xml,
                                                           .bin for OpenVINO)
tokens.txt              a piece and its number a line, the blank <blk> last
decoding.safetensors    an asrkit checkpoint without the encoder: config, features, tokenizer,
                        notes; weights of predictor and joint, of a transducer
"""

from importlib.util import find_spec
from pathlib import Path

from asrkit.shapes import expect
from asrkit.text import Tokenizer, token_texts

TOKENS = "tokens.txt"
DECODING = "decoding.safetensors"
BLANK = "<blk>"


def is_exported(path: Path | str) -> bool:
    """Whether `path` is a folder of `asrkit export`, whole or not."""
    return (Path(path) / DECODING).is_file()


def require(*packages: str) -> None:
    """Raise ValueError, which says how to install them, where packages are missing."""
    missing = [name for name in packages if not find_spec(name)]
    expect(
        not missing,
        "packages",
        ", ".join(packages),
        f"no {', '.join(missing)}",
        f"Install them: pip install {' '.join(missing)}.",
    )


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
