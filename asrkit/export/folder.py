"""An exported folder: graphs, tokens.txt, and the data of asrkit's decoders.

model.onnx | encoder.onnx, decoder.onnx, joiner.onnx      (.int8.onnx with int8 weights; .xml,
                                                           .bin for OpenVINO)
tokens.txt              a piece and its number in each line, the blank <blk> last
decoding.safetensors    an asrkit checkpoint without the encoder: config, features, tokenizer,
                        notes; for a transducer, weights of predictor and joint
"""

from importlib.util import find_spec
from pathlib import Path

from asrkit.shapes import expect
from asrkit.text import Tokenizer, token_texts

TOKENS = "tokens.txt"
DECODING = "decoding.safetensors"
BLANK = "<blk>"


def is_exported(path: Path | str) -> bool:
    """Whether `path` is a folder from `asrkit export`, complete or not."""
    return (Path(path) / DECODING).is_file()


def require(*packages: str) -> None:
    """ValueError with the command that installs them, if packages are missing."""
    missing = [name for name in packages if not find_spec(name)]
    expect(
        not missing,
        "packages",
        ", ".join(packages),
        f"no {', '.join(missing)}",
        f"Install them: pip install {' '.join(missing)}.",
    )


def write_tokens(path: Path, tokenizer: Tokenizer) -> None:
    """Write tokens.txt: "piece number" in each line, blank last.

    Raises:
        ValueError: Pieces are equal or contain white space, which such a file cannot hold.
    """
    pieces = [*token_texts(tokenizer), BLANK]
    wrong = {piece for piece in pieces if piece != " " and piece.split() != [piece]}
    wrong |= {piece for piece in pieces if pieces.count(piece) > 1}
    expect(not wrong, "tokenizer", "pieces that differ, without white space", sorted(wrong)[:5])
    lines = [f"{piece} {number}\n" for number, piece in enumerate(pieces)]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
