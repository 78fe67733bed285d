"""Small Canary models of known weights and the files they are published in: shared by the peers' process and the tests.

Nothing of asrkit is imported here. Weights and sound are those of parity_cases.py.
"""

from pathlib import Path
from typing import Any

import torch
from parity_cases import (
    ENCODER,
    Case,
    model_of_pieces,
    nemo_config,
    pieces,
    seeded,
    tokenizer_json,
    write_folder,
    write_nemo,
)
from torch import Tensor

MOST = 40  # positions of the decoder
CONTROL = [  # of published archives, the first of them with the published ids
    "<unk>",
    "<|nospeech|>",
    "<pad>",
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|pnc|>",
    "<|nopnc|>",
    "<|startofcontext|>",
    "<|itn|>",
    "<|noitn|>",
    "<|timestamp|>",
    "<|notimestamp|>",
    "<|diarize|>",
    "<|nodiarize|>",
    "<|emo:undefined|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|de|>",
    "<|en|>",
    "<|fr|>",
    "<|0|>",
    "<|1|>",
]
EOS = CONTROL.index("<|endoftext|>")
PAD = CONTROL.index("<pad>")
# Output and embedding share their weights, so a token would repeat itself. Feed-forwards are therefore scaled up, and the embedding
# is as large as the positions.
LOUD = ("dense_out.weight", "fc2.weight")
EMBEDDING = ("token_embedding.weight", "embed_tokens.weight")
END = 1.0  # nats added to the logit of the end
# Arguments of each prompt, as asrkit spells them; NeMo's are in the worker.
ARGUMENTS = {
    "canary": {"language": "de", "task": "translate", "punctuation": False},
    "canary2": {"language": "en", "target_language": "de"},
}
# Of both peers.
CASE: Case = {"prompt": "canary2", "decoder": 16, "tokenizer": "agg", "scale": False}


def attention_cases() -> dict[str, Case]:
    """NeMo's: both prompts, an aggregate tokenizer and one of all languages, a decoder wider than the encoder."""
    one = {"decoder": 32, "tokenizer": "bpe", "bins": 128}
    return {
        "canary2": CASE,
        "canary": {**CASE, "prompt": "canary"},
        "canary2-bpe": {**CASE, **one},
    }


def vocabulary(case: Case) -> int:
    """Tokens of the model: of its tokenizers, rounded up to a multiple of 8."""
    languages = 2 if case.get("tokenizer") == "agg" else 1
    return -(-(len(CONTROL) + languages * len(pieces())) // 8) * 8


def fill_attention(
    state: dict[str, Tensor], output: str, kept: tuple[str, ...]
) -> dict[str, Tensor]:
    """Seeded weights for the names and shapes of `state`; those ending in `kept` stay. The output's bias favours the end a little."""
    made = {}
    for name, value in state.items():
        made[name] = value if name.endswith(kept) else seeded(name, tuple(value.shape))
        if "decoder" in name and name.endswith(LOUD):
            made[name] *= 8.0
        if name.endswith(EMBEDDING):
            made[name] *= 0.2
    made[output][EOS] += END
    return made


def control_pieces() -> list[tuple[str, float, int]]:
    """The control symbols, as NeMo's build_special_tokenizer makes them: defined by a user."""
    return [(text, 0.0, 4 if number else 2) for number, text in enumerate(CONTROL)]


def one_vocabulary() -> list[tuple[str, float, int]]:
    """Control symbols and pieces in one model, as canary-1b-v2 has them."""
    return [*control_pieces(), *(row for row in pieces() if row[0] != "<unk>")]


def members(case: Case) -> dict[str, bytes]:
    """The tokenizers' files by their names in the archive."""
    if case["tokenizer"] == "bpe":
        return {"9_tokenizer.model": model_of_pieces(one_vocabulary())}
    words = model_of_pieces(pieces())
    parts = (model_of_pieces(control_pieces()), words, words)
    return {f"{number}_tokenizer.model": part for number, part in enumerate(parts, 1)}


def archive_config(case: Case) -> dict[str, Any]:
    """The archive's yaml, with the keys of NeMo's published recipe (fast-conformer_aed.yaml)."""
    how = ENCODER | case
    V = vocabulary(case)
    sizes = {key: value for key, value in case.items() if key in ENCODER}
    ctc = nemo_config({"kind": "ctc", **sizes})
    tokenizers = "nemo.collections.common.tokenizers.canary_tokenizer."
    tokenizer: dict[str, Any] = {"dir": None, "type": case["tokenizer"]}
    if case["tokenizer"] == "agg":
        tokenizer["langs"] = {
            name: {
                "dir": None,
                "type": "bpe",
                "model_path": f"nemo:{number}_tokenizer.model",
            }
            for number, name in enumerate(("spl_tokens", "en", "de"), 1)
        }
        tokenizer["custom_tokenizer"] = {
            "_target_": f"{tokenizers}CanaryTokenizer",
            "tokenizers": None,
        }
    else:
        tokenizer["model_path"] = "nemo:9_tokenizer.model"
        tokenizer["custom_tokenizer"] = {"_target_": f"{tokenizers}CanaryBPETokenizer"}
    D = case["decoder"]
    slots = {
        "decodercontext": "",
        "source_lang": "<|en|>",
        "target_lang": "<|en|>",
        "emotion": "<|emo:undefined|>",
        "pnc": "<|pnc|>",
        "itn": "<|itn|>",
        "diarize": "<|nodiarize|>",
        "timestamp": "<|notimestamp|>",
    }
    user = {"role": "user", "slots": slots}
    defaults = [user, {"role": "user_partial", "slots": {"decodercontext": ""}}]
    return {
        **{key: ctc[key] for key in ("sample_rate", "preprocessor", "encoder")},
        "label_smoothing": 0.0,
        "prompt_format": case["prompt"],
        "tokenizer": tokenizer,
        "prompt_defaults": defaults if case["prompt"] == "canary2" else None,
        "model_defaults": {
            "asr_enc_hidden": how["width"],
            "lm_enc_hidden": 16,
            "lm_dec_hidden": D,
        },
        "transf_encoder": {"num_layers": 0, "hidden_size": 16},
        "transf_decoder": {
            "_target_": "nemo.collections.asr.modules.transformer.get_nemo_transformer",
            "model_name": None,
            "pretrained": False,
            "encoder": None,
            "pre_ln_final_layer_norm": True,
            "config_dict": {
                "max_sequence_length": MOST,
                "num_token_types": 0,
                "embedding_dropout": 0.1,
                "learn_positional_encodings": False,
                "hidden_size": D,
                "inner_size": 4 * D,
                "num_layers": 2,
                "num_attention_heads": 4,
                "ffn_dropout": 0.1,
                "attn_score_dropout": 0.1,
                "attn_layer_dropout": 0.1,
                "hidden_act": "relu",
                "pre_ln": True,
                "vocab_size": V,
            },
        },
        "head": {
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier",
            "num_layers": 1,
            "activation": "relu",
            "log_softmax": True,
            "hidden_size": D,
            "num_classes": V,
            "dropout": 0.0,
            "use_transformer_init": True,
        },
        "decoding": {
            "strategy": "beam",
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50},
        },
        "loss": {"pad_id": PAD},
        "nemo_version": "3.0.0",
        "target": "nemo.collections.asr.models.aed_multitask_models.EncDecMultiTaskModel",
    }


def write_archive(
    path: Path,
    case: Case,
    weights: dict[str, Tensor],
    config: dict[str, Any] | None = None,
) -> Path:
    """A .nemo archive of `case`."""
    return write_nemo(
        path, config or archive_config(case), weights, files=members(case)
    )


def canary_config(case: Case) -> dict[str, Any]:
    """The folder's config.json."""
    how = ENCODER | case
    D = case["decoder"]
    encoder = {
        "model_type": "parakeet_encoder",
        "hidden_size": how["width"],
        "num_hidden_layers": how["layers"],
        "num_attention_heads": how["heads"],
        "intermediate_size": 4 * how["width"],
        "conv_kernel_size": how["kernel"],
        "subsampling_factor": how["subsampling"],
        "subsampling_conv_channels": how["channels"],
        "num_mel_bins": how["bins"],
        "scale_input": how["scale"],
    }
    V = 56  # some tokens more than the tokenizer has
    decoder = {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 4 * D,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": D // 4,
        "max_position_embeddings": MOST,
        "hidden_act": "relu",
        "model_type": "canary_decoder",
    }
    return {
        "architectures": ["CanaryForConditionalGeneration"],
        "model_type": "canary",
        "encoder_config": encoder,
        "decoder_config": decoder,
        "vocab_size": V,
        "decoder_start_token_id": 7,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": 4,
        "tie_word_embeddings": True,
    }


def canary_json() -> dict[str, Any]:
    """The one vocabulary as a converter writes it, its control symbols added tokens."""
    texts = [row[0] for row in one_vocabulary()]
    return tokenizer_json(texts, {text: id_ for id_, text in enumerate(CONTROL)})


def write_canary(path: Path, case: Case, weights: dict[str, Tensor]) -> Path:
    """A Hugging Face folder of `case`."""
    kept = {name: value for name, value in weights.items() if name != "proj_out.weight"}
    return write_folder(path, canary_config(case), kept, canary_json())


# Labels after the prompt for which logits are compared.
TEXT = torch.tensor(
    [
        [24, 30, 41, 41, 23],
        [25, 25, 50, 26, 30],
        [29, 23, 24, 33, 28],
        [34, 42, 27, 27, 32],
    ]
)
# Which numbers of a stage are committed: (utterance, rows, columns).
CHOSEN = {
    "encoded": (1, slice(0, 13, 2), slice(None)),
    "logits": (2, slice(0, 12, 3), slice(0, 56, 5)),
}
