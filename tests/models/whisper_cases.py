"""Small Whisper models of known weights and the folders they are published in: shared by the peer's process and the tests.

Weights, sound and numbers to commit are made as in parity_cases. Nothing of asrkit is imported here.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parent))

from parity_cases import seeded, speech  # noqa: F401 - for who imports this

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "whisper": {
        "bins": 80,
        "encoder": 2,
        "decoder": 2,
        "width": 32,
        "heads": 4,
        "multilingual": True,
        "first": [246],
        "never": [281, 49, 97],
    },
    "whisper-en": {
        "bins": 128,
        "encoder": 1,
        "decoder": 3,
        "width": 24,
        "heads": 2,
        "multilingual": False,
        "first": [200],
        "never": [152, 271],
    },
}
CHUNK_S = 2  # the published models have 30
MOST = 48  # tokens
# In samples; the last one fills the chunk, the third is shorter than a window.
LENGTHS = (24_005, 15_999, 320, 32_000)
# Prompt and text for which logits are compared.
TOKENS = torch.tensor(
    [
        [281, 282, 285, 289, 3, 7],
        [281, 282, 284, 289, 90, 11],
        [281, 283, 285, 289, 4, 4],
        [281, 5, 5, 6, 7, 8],
    ]
)
PROMPTS = ("startoftranscript", "en", "de", "translate", "transcribe", "notimestamps")
# (least log-probability of a token in the mean, most probability of no speech) by which texts are judged
JUDGED = ((-10.0, 0.6), (-1.95, 0.6), (-1.95, 1.36e-5), (0.0, 1.36e-5))
# Which numbers of a stage are committed: (utterance, frames, rest).
PLACES = {
    "features": (0, slice(3, 200, 24), slice(None, None, 8)),
    "published": (1, slice(0, 3000, 171), slice(None, None, 8)),
    "encoded": (1, slice(0, 100, 9), slice(None, None, 3)),
    "logits": (2, slice(None), slice(0, None, 17)),
}


def picked(stage: str, values: Tensor) -> Tensor:
    """Numbers of `values` that are committed, in one row."""
    utterance, frames, rest = PLACES[stage]
    return values[utterance, frames, rest].flatten()


def byte_letters() -> list[str]:
    """The letter of each byte, as GPT-2's published table has them."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(kept)))
    return [letters[byte] for byte in range(256)]


MERGES = [
    "t h",
    "th e",
    "Ġ the",
    "i n",
    "Ġ a",
    "Ġ s",
    "e r",
    "o n",
    "Ġ t",
    "a n",
    "Ġa n",
    "Ġan d",
    "in g",
    "e n",
    "o u",
    "Ġs e",
    "r e",
    "Ġ w",
    "Ġ o",
    "Ġo f",
    "Ã ©",
    "Ġ c",
    "a t",
    "ou t",
]


def base() -> dict[str, int]:
    """Ids of the tokens with a text: 256 bytes and 24 merges."""
    texts = [*byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]
    return {text: token for token, text in enumerate(texts)}


def specials() -> dict[str, int]:
    """Ids of the others: those of Whisper, with two languages and two seconds."""
    words = "endoftext startoftranscript en de translate transcribe startoflm startofprev nospeech notimestamps"
    names = [*words.split(), *(f"{0.02 * n:.2f}" for n in range(50 * CHUNK_S + 1))]
    return {f"<|{name}|>": len(base()) + number for number, name in enumerate(names)}


def vocab_size() -> int:
    """Tokens in all."""
    return len(base()) + len(specials())


def tokenizer_json() -> dict[str, Any]:
    """tokenizer.json of this vocabulary."""
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": token, "content": text, **marks, "special": True}
        for text, token in specials().items()
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": base(),
        "merges": MERGES,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }


def config_json(case: Case) -> dict[str, Any]:
    """config.json."""
    end = len(base())
    start = len(base()) + 1
    D = case["width"]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": vocab_size(),
        "num_mel_bins": case["bins"],
        "d_model": D,
        "encoder_layers": case["encoder"],
        "decoder_layers": case["decoder"],
        "encoder_attention_heads": case["heads"],
        "decoder_attention_heads": case["heads"],
        "encoder_ffn_dim": 4 * D,
        "decoder_ffn_dim": 2 * D,
        "max_source_positions": 50 * CHUNK_S,
        "max_target_positions": MOST,
        "decoder_start_token_id": start,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "activation_function": "gelu",
        "dropout": 0.0,
        "scale_embedding": False,
        "is_encoder_decoder": True,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
        "dtype": "float32",
        "encoder_layerdrop": 0.0,
    }


def generation_json(case: Case) -> dict[str, Any]:
    """generation_config.json: a space may not be the first token."""
    ids = specials()
    end = ids["<|endoftext|>"]
    values = {
        "decoder_start_token_id": end + 1,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "max_length": MOST,
        "begin_suppress_tokens": [base()["Ġ"], end, *case["first"]],
        "suppress_tokens": case["never"],
        "max_initial_timestamp_index": 5,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "is_multilingual": case["multilingual"],
    }
    if case["multilingual"]:
        values["lang_to_id"] = {name: ids[name] for name in ("<|en|>", "<|de|>")}
        tasks = ("transcribe", "translate")
        values["task_to_id"] = {task: ids[f"<|{task}|>"] for task in tasks}
    return values


def extractor_json(bins: int, chunk_s: int = CHUNK_S) -> dict[str, Any]:
    """preprocessor_config.json."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": chunk_s,
        "n_fft": 400,
        "n_samples": 16000 * chunk_s,
        "nb_max_frames": 100 * chunk_s,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": False,
        "dither": 0.0,
    }


def sinusoids(length: int, channels: int) -> Tensor:
    """The encoder's positions, number by number."""
    rows = torch.zeros(length, channels, dtype=torch.float64)
    half = channels // 2
    for t in range(length):
        for i in range(half):
            angle = t * 10_000 ** (-i / (half - 1))
            rows[t, i], rows[t, half + i] = math.sin(angle), math.cos(angle)
    return rows.float()


def fill(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Seeded weights for the names and shapes of `state`; positions of the encoder are its sines, the output its embedding."""
    made = {name: seeded(name, tuple(value.shape)) for name, value in state.items()}
    for name, value in made.items():
        if name == "model.encoder.embed_positions.weight":
            made[name] = sinusoids(*value.shape)
        if name == "model.decoder.embed_tokens.weight":
            value *= 0.4  # else the next token is the last one, whose embedding is the output too
            value[len(base())] *= 1.6  # the end, so that some texts come to it
            ids = specials()  # two languages so alike that each is found for some
            other = seeded(f"{name} 33", (value.shape[1],))
            value[ids["<|de|>"]] = value[ids["<|en|>"]] + 0.2 * other
        if name == "model.decoder.embed_positions.weight":
            value *= 2.0
    return made


def write_folder(path: Path, case: Case, weights: dict[str, Tensor]) -> None:
    """A Hugging Face folder: configs, safetensors weights, tokenizer."""
    from safetensors.torch import save_file

    path.mkdir()
    parts = {
        "config.json": config_json(case),
        "generation_config.json": generation_json(case),
        "preprocessor_config.json": extractor_json(case["bins"]),
        "tokenizer.json": tokenizer_json(),
    }
    for name, part in parts.items():
        (path / name).write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
