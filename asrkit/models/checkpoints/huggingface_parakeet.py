"""Hugging Face folders of transformers' ParakeetForCTC, ParakeetForRNNT and ParakeetForTDT.

Keys that config.json lacks are as in `asrkit.models.checkpoints.huggingface`. layerdrop,
max_position_embeddings and the initialisers do not matter once trained.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from asrkit.models.transducer import CTCConfig, LSTMConfig, TransducerConfig
from asrkit.shapes import expect, whole
from asrkit.text import SentencePieceTokenizer

KINDS = ("parakeet_ctc", "parakeet_rnnt", "parakeet_tdt")
_ENCODER: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "num_mel_bins": 80,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 256,
    "conv_kernel_size": 9,
    "attention_bias": True,
    "scale_input": True,
    "dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "dropout_positions": 0.0,
}
_ONLY = {"hidden_act": "silu", "subsampling_conv_stride": 2}
_EXTRACTOR: dict[str, Any] = {
    "sampling_rate": 16_000,
    "win_length": 400,
    "hop_length": 160,
    "n_fft": 512,
    "feature_size": 80,
    "preemphasis": 0.97,
}
_EXTRACTOR_CODE = {
    "window": "hann",
    "periodic": False,
    "power": 2,
    "guard": "add",
    "log_guard": 2.0**-24,
    "normalization": "per_feature",
}
# parts of transformers' names, and asrkit's; the subsampling's numbers count activations too
NAMES = {
    "encoder.subsampling.linear.": "encoder.subsampling.out.",
    "encoder.subsampling.layers.0.": "encoder.subsampling.convs.0.",
    "encoder.subsampling.layers.2.": "encoder.subsampling.convs.1.0.",
    "encoder.subsampling.layers.3.": "encoder.subsampling.convs.1.1.",
    "encoder.subsampling.layers.5.": "encoder.subsampling.convs.2.0.",
    "encoder.subsampling.layers.6.": "encoder.subsampling.convs.2.1.",
    "encoder.layers.": "encoder.blocks.",
    ".norm_feed_forward1.": ".feed.0.0.",
    ".feed_forward1.linear1.": ".feed.0.1.",
    ".feed_forward1.linear2.": ".feed.0.4.",
    ".norm_feed_forward2.": ".feed.1.0.",
    ".feed_forward2.linear1.": ".feed.1.1.",
    ".feed_forward2.linear2.": ".feed.1.4.",
    ".norm_self_att.": ".attention_norm.",
    ".self_attn.q_proj.": ".attention.q.",
    ".self_attn.k_proj.": ".attention.k.",
    ".self_attn.v_proj.": ".attention.v.",
    ".self_attn.o_proj.": ".attention.out.",
    ".self_attn.relative_k_proj.": ".attention.position.",
    ".self_attn.bias_u": ".attention.content_bias",
    ".self_attn.bias_v": ".attention.position_bias",
    ".norm_conv.": ".conv_norm.",
    ".conv.pointwise_conv1.": ".gate.",
    ".conv.depthwise_conv.": ".depthwise.",
    ".conv.norm.": ".batch_norm.",
    ".conv.pointwise_conv2.": ".pointwise.",
    ".norm_out.": ".final_norm.",
    "ctc_head.": "output.",
    "joint.head.": "output.",
    "encoder_projector.": "encoder_projection.",
    "decoder.decoder_projector.": "predictor_projection.",
    "decoder.embedding.": "predictor.embedding.",
    "decoder.lstm.": "predictor.lstm.",
}


def read(path: Path, values: dict[str, Any]) -> Contents:
    """Contents of a Parakeet's folder. Blank becomes the last class, wherever it was.

    Args:
        path: The folder.
        values: Of its config.json.

    Raises:
        ValueError: A file is missing, or asks for what is not supported.
    """
    kind = values["model_type"]
    encoder = encoder_config(values["encoder_config"])
    if kind == "parakeet_ctc":
        key = "pad_token_id"
        classes = values.get("vocab_size", 1025)
        blank = values.get(key, 1024)
    else:
        key = "blank_token_id"
        classes = values.get("vocab_size", 8193)
        blank = values.get(key, 8192)
    expect(whole(classes, 2, MAX_SIZE), "vocab_size", f"2 to {MAX_SIZE} classes", classes)
    expect(whole(blank, 0, classes - 1), key, f"one of vocab_size = {classes} classes", blank)
    tokens = [token for token in range(classes) if token != blank]
    version = values.get("transformers_version", "of unknown version")
    notes: dict[str, Any] = {"source": f"transformers {version}, {kind}"}
    config: CTCConfig | TransducerConfig
    if kind == "parakeet_ctc":
        config = CTCConfig(vocab_size=len(tokens), encoder=encoder)
    else:
        config = _transducer(values, len(tokens), encoder)
        notes["max_symbols"] = values.get("max_symbols_per_step", 10)
    features = feature_settings(extractor(path))
    tokenizer = SentencePieceTokenizer.from_json(tokenizer_json(path), tokens)
    weights = renamed(read_weights(path), our_name)
    shape_conformer(weights)
    weights = _with_blank_last(weights, blank, classes)
    return config, weights, tokenizer, features, notes


def _transducer(
    values: dict[str, Any], vocab_size: int, encoder: FastConformerConfig
) -> TransducerConfig:
    width = values.get("decoder_hidden_size", 640)
    durations = ()
    if values["model_type"] == "parakeet_tdt":
        durations = values.get("durations", (0, 1, 2, 3, 4))
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        joint_width=width,
        activation=values.get("hidden_act", "relu"),
        ctc=False,
        predictor=LSTMConfig(width=width, layers=values.get("num_decoder_layers", 2)),
        durations=durations,
    )


def encoder_config(values: dict[str, Any]) -> FastConformerConfig:
    """The encoder of a config's section `encoder_config`; ValueError names what is not done."""
    expect_only(values, _ONLY, "encoder_config")
    get = {**_ENCODER, **values}.__getitem__
    D = get("hidden_size")
    return FastConformerConfig(
        bins=get("num_mel_bins"),
        width=D,
        layers=get("num_hidden_layers"),
        heads=get("num_attention_heads"),
        subsampling=get("subsampling_factor"),
        subsampling_channels=get("subsampling_conv_channels"),
        kernel=get("conv_kernel_size"),
        expansion=get("intermediate_size") // D,
        bias=get("attention_bias"),
        scale_input=get("scale_input"),
        dropout=get("activation_dropout"),
        dropout_input=get("dropout"),
        dropout_attention=get("attention_dropout"),
        dropout_positions=get("dropout_positions"),
    )


def feature_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of FeatureConfig.

    Those of _EXTRACTOR_CODE are not in the file: transformers' extractor has them in its code.
    """
    only = {"feature_extractor_type": "ParakeetFeatureExtractor"}
    expect_only(values, only, "preprocessor_config.json")
    get = {**_EXTRACTOR, **values}.__getitem__
    rate = get("sampling_rate")
    return _EXTRACTOR_CODE | {
        "rate_hz": rate,
        "window_s": get("win_length") / rate,
        "hop_s": get("hop_length") / rate,
        "fft": get("n_fft"),
        "bins": get("feature_size"),
        "preemphasis": get("preemphasis") or 0.0,
    }


def our_name(name: str) -> str:
    """asrkit's name of a weight of transformers' Parakeet."""
    return replaced(name, NAMES)


def _with_blank_last(weights: dict[str, Tensor], blank: int, classes: int) -> dict[str, Tensor]:
    """`weights` with the row of blank behind the tokens' in embedding and output.

    Rows of durations stay behind it.
    """
    if blank == classes - 1:
        return weights
    for name in ("output.weight", "output.bias", "predictor.embedding.weight"):
        if name in weights:
            rows = weights[name]
            tokens = [rows[:blank], rows[blank + 1 : classes]]
            weights[name] = torch.cat([*tokens, rows[blank : blank + 1], rows[classes:]])
    return weights
