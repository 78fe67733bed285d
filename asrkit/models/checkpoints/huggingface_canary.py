"""Hugging Face folders of transformers' CanaryForConditionalGeneration.

Keys that config.json lacks are as in `asrkit.models.checkpoints.huggingface`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.models.attention_decoder import AEDConfig, sines
from asrkit.models.checkpoints import canary, huggingface_parakeet
from asrkit.models.checkpoints.folders import (
    MAX_SIZE,
    extractor,
    read_weights,
    tokenizer_json,
)
from asrkit.models.checkpoints.own import Contents
from asrkit.models.checkpoints.renaming import renamed, replaced, shape_conformer
from asrkit.models.checkpoints.settings import expect_only
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.prompts import PromptFormat, languages_of
from asrkit.shapes import expect, whole
from asrkit.text import SPACE, SentencePieceTokenizer

_DECODER: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
    "attention_dropout": 0.0,
}
_ONLY = {"hidden_act": "relu"}
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}
NAMES = {
    "model.decoder.embed_tokens.": "embedding.",
    "model.decoder.embedding_layernorm.": "embedding_norm.",
    "model.decoder.norm.": "norm.",
    "model.decoder.layers.": "layers.",
    "proj_out.weight": "output.weight",
    "proj_out.bias": "output_bias",
    ".input_layernorm.": ".self_norm.",
    ".self_attn.q_proj.": ".self_attention.q.",
    ".self_attn.k_proj.": ".self_attention.k.",
    ".self_attn.v_proj.": ".self_attention.v.",
    ".self_attn.o_proj.": ".self_attention.out.",
    ".post_attention_layernorm.": ".cross_norm.",
    ".encoder_attn.q_proj.": ".cross_attention.query.",
    ".encoder_attn.k_proj.": ".cross_attention.k.",
    ".encoder_attn.v_proj.": ".cross_attention.v.",
    ".encoder_attn.o_proj.": ".cross_attention.out.",
    ".final_layernorm.": ".feed_forward_norm.",
    ".mlp.fc1.": ".feed_forward.0.",
    ".mlp.fc2.": ".feed_forward.2.",
}
_ENCODER = "model.encoder."
_NO_WEIGHTS = "preprocessor.featurizer."  # left by a conversion; transformers ignores them too


def read(path: Path, values: dict[str, Any]) -> Contents:
    """Contents of the folder `path`.

    Args:
        path: The folder.
        values: Of its config.json.

    Raises:
        ValueError: A file is damaged or missing, or asks for what is not supported.
    """
    encoder = huggingface_parakeet.encoder_config(values["encoder_config"])
    tokenizer = _tokenizer(tokenizer_json(path))
    vocabulary = {text: id_ for id_, text in enumerate(tokenizer.pieces())}
    special = canary.special_tokens(vocabulary)
    config = _decoder(values, encoder, special)
    name = "canary2" if canary.CONTEXT in vocabulary else "canary"
    prompt = canary.prompt_of(name, vocabulary, languages_of([*vocabulary]), {})
    prompt = canary.led(prompt, _lead(values, prompt, tokenizer), vocabulary)
    version = values.get("transformers_version", "of unknown version")
    notes = {"source": f"transformers {version}, canary", **prompt.to_notes()}
    features = huggingface_parakeet.feature_settings(extractor(path))
    return config, _weights(read_weights(path), config), tokenizer, features, notes


def _lead(
    values: dict[str, Any], prompt: PromptFormat, tokenizer: SentencePieceTokenizer
) -> list[str]:
    """Pieces before the prompt: the one that decoding starts with, if it is a space."""
    pieces = tokenizer.pieces()
    start = values.get("decoder_start_token_id", 7)
    first = prompt.template[0]
    known = whole(start, 0, len(pieces) - 1) and pieces[start] in (first, SPACE)
    expect(known, "decoder_start_token_id", f"that of {first}, or of a space", start)
    return [] if pieces[start] == first else [SPACE]


def _tokenizer(contents: dict[str, Any]) -> SentencePieceTokenizer:
    """The tokenizer of all pieces, from the first id to the last."""
    vocab = contents["model"]["vocab"]
    ids = [*range(len(vocab))]
    if isinstance(vocab, dict):
        ids = [*vocab.values()]
    ids += [token["id"] for token in contents.get("added_tokens") or ()]
    inside = all(whole(id_, 0, MAX_SIZE) for id_ in ids)
    expect(inside, "tokenizer", f"token ids up to {MAX_SIZE}", "others")
    return SentencePieceTokenizer.from_json(contents, range(max(ids) + 1)).with_control()


def _decoder(
    values: dict[str, Any], encoder: FastConformerConfig, special: dict[str, int]
) -> AEDConfig:
    section = values.get("decoder_config") or {}
    ids = {key: special[name] for name, key in _SPECIAL.items()}
    expect_only(values, ids, "config.json")
    expect_only(section, ids | _ONLY, "decoder_config")
    get = {**_DECODER, **section}.__getitem__
    D = get("hidden_size")
    most = get("max_position_embeddings")
    wanted = f"1 to {MAX_SIZE} positions"  # their table is made here
    expect(whole(most, 1, MAX_SIZE), "decoder_config.max_position_embeddings", wanted, most)
    return AEDConfig(
        vocab_size=get("vocab_size"),
        encoder=encoder,
        width=D,
        layers=get("num_hidden_layers"),
        heads=get("num_attention_heads"),
        expansion=get("intermediate_size") // D,
        most=most,
        dropout=get("attention_dropout") or 0.0,
        bos=special["bos"],
        eos=special["eos"],
        pad=special["pad"],
    )


def _our_name(name: str) -> str:
    """asrkit's name of a weight: of the encoder, which is Parakeet's, or of the decoder."""
    if name.startswith(_ENCODER):
        return huggingface_parakeet.our_name(name.removeprefix("model."))
    return replaced(name, NAMES)


def _weights(weights: dict[str, Tensor], config: AEDConfig) -> dict[str, Tensor]:
    """Weights by asrkit's names, and the table of positions, which the files do not have."""
    kept = {name: one for name, one in weights.items() if not name.startswith(_NO_WEIGHTS)}
    found = renamed(kept, _our_name)
    shape_conformer(found)
    table = sines(config.most, config.width, torch.zeros(()))
    found["positions"] = canary.sines_first(table)
    canary.shape_decoder(found, "output.weight")
    return found
