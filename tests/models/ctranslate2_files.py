"""Whisper's folders as CTranslate2's converter writes them, from weights by transformers' names."""

import json
import struct
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent))
import whisper_cases as known

GOLDEN = Path(__file__).resolve().parents[1] / "golden/whisper.json"

TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)  # fmt: skip
LINEAR = {  # of a layer: CTranslate2's name -> transformers' parts, one after the other
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}  # fmt: skip
NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}
ALIASES = {"decoder/projection/weight": "decoder/embeddings/weight"}


def variables_of(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Variables of a model.bin."""

    def norm(name: str, theirs: str) -> None:
        found[f"{name}/gamma"] = weights[f"{theirs}.weight"]
        found[f"{name}/beta"] = weights[f"{theirs}.bias"]

    found = {
        "decoder/activation": torch.tensor(3, dtype=torch.int8),
        "decoder/alignment_heads": torch.tensor(1, dtype=torch.int16),
        "decoder/pre_norm": torch.tensor(1, dtype=torch.int8),
        "decoder/scale_embeddings": torch.tensor(0, dtype=torch.int8),
        "decoder/embeddings/weight": weights["model.decoder.embed_tokens.weight"],
    }
    for conv in ("encoder/conv1", "encoder/conv2"):
        for end in ("weight", "bias"):
            found[f"{conv}/{end}"] = weights[f"model.{conv}/{end}".replace("/", ".")]
    for part in ("encoder", "decoder"):
        found[f"{part}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        places = weights[f"model.{part}.embed_positions.weight"]
        found[f"{part}/position_encodings/encodings"] = places
        norm(f"{part}/layer_norm", f"model.{part}.layer_norm")
        number = 0
        while (layer := f"model.{part}.layers.{number}") + ".fc1.weight" in weights:
            ours = f"{part}/layer_{number}"
            number += 1
            for name, theirs in NORMS.items():
                if f"{layer}.{theirs}.weight" in weights:
                    norm(f"{ours}/{name}", f"{layer}.{theirs}")
            for name, parts in LINEAR.items():
                rows = [weights.get(f"{layer}.{one}.weight") for one in parts]
                if rows[0] is None:
                    continue  # an encoder has no cross-attention
                found[f"{ours}/{name}/weight"] = torch.cat(rows)
                biases = [
                    weights.get(f"{layer}.{one}.bias", row.new_zeros(len(row)))
                    for one, row in zip(parts, rows, strict=True)
                ]
                found[f"{ours}/{name}/bias"] = torch.cat(biases)
    return found


def quantised(variables: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Variables in float32, float16 or bfloat16; or with weights in int8 or int16 and their scales."""
    found = {}
    for name, value in variables.items():
        if not value.dim():
            found[name] = value
        elif kind in ("int8", "int16") and name.endswith("weight"):
            rows = value.float().reshape(len(value), -1)
            scale = 127 / rows.abs().amax(1)
            if kind == "int16":
                scale = 2**10 / rows.abs().max()
            kept = (rows * scale.reshape(-1, 1)).round().to(getattr(torch, kind))
            found[name] = kept.view(value.shape)
            found[f"{name}_scale"] = scale
        else:
            found[name] = value.to(
                getattr(
                    torch, kind.replace("int8", "float16").replace("int16", "float32")
                )
            )
    return found


def model_bin(
    variables: dict[str, Tensor],
    aliases: dict[str, str] = ALIASES,
    header: tuple[int, str, int] = (6, "WhisperSpec", 3),
) -> bytes:
    """A model.bin."""

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    version, name, revision = header
    data = struct.pack("<I", version) + text(name)
    data += struct.pack("<II", revision, len(variables))
    for name, value in sorted(variables.items()):
        held = bytes(value.contiguous().view(-1).view(torch.uint8).numpy())
        data += text(name) + struct.pack("<B", value.dim())
        data += struct.pack(f"<{value.dim()}I", *value.shape)
        data += struct.pack("<BI", TYPES.index(value.dtype), len(held)) + held
    data += struct.pack("<I", len(aliases))
    for alias, name in aliases.items():
        data += text(alias) + text(name)
    return data


def weights_of(name: str) -> dict[str, Tensor]:
    """Weights of a case of whisper_cases, by transformers' names."""
    shapes = json.loads(GOLDEN.read_text())[name]["shapes"]
    return known.fill({key: torch.zeros(shape) for key, shape in shapes.items()})


def case_variables(name: str, kind: str = "float32") -> dict[str, Tensor]:
    """Variables of a case of whisper_cases."""
    variables = variables_of(weights_of(name), known.CASES[name]["heads"])
    return quantised(variables, kind)


def whisper(path: Path, name: str, kind: str = "float32") -> Path:
    """A folder of a case of whisper_cases; it is a new one."""
    case = known.CASES[name]
    settings = known.generation_json(case)
    parts = {
        "config.json": {
            "suppress_ids": settings["suppress_tokens"],
            "suppress_ids_begin": settings["begin_suppress_tokens"],
            "lang_ids": [282, 283],
            "alignment_heads": [[0, 0]],
        },
        "tokenizer.json": known.tokenizer_json(),
        "preprocessor_config.json": known.extractor_json(case["bins"]),
    }
    path.mkdir()
    (path / "model.bin").write_bytes(model_bin(case_variables(name, kind)))
    for file, part in parts.items():
        (path / file).write_text(json.dumps(part, ensure_ascii=False), "utf-8")
    return path
