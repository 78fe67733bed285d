"""NeMo's `.nemo` archives of FastConformer models with CTC, RNN-T, TDT, CTC beside a transducer or
an attention decoder (Canary), and of Jasper.

They become asrkit's config and weights. Keys whose values no weight shows are in `ONLY`; others
that asrkit does not know give weights of other names or shapes. Names of keys and classes are those
of nemo_toolkit 3.0.0.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import archive, jasper, nemo_canary
from asrkit.models.checkpoints.own import Contents
from asrkit.models.checkpoints.renaming import beginning_replaced, renamed, shape_conformer
from asrkit.models.checkpoints.settings import expect_only, section
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.presets import ModelConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, TransducerConfig
from asrkit.shapes import expect
from asrkit.text import CharTokenizer, SentencePieceTokenizer, Tokenizer

TARGETS = {
    "EncDecCTCModel": "ctc",
    "EncDecCTCModelBPE": "ctc",
    "EncDecRNNTModel": "transducer",
    "EncDecRNNTBPEModel": "transducer",
    "EncDecHybridRNNTCTCModel": "hybrid",
    "EncDecHybridRNNTCTCBPEModel": "hybrid",
    "EncDecMultiTaskModel": "attention",
}
ONLY: dict[str, dict[str, Any]] = {
    "preprocessor": {"log": True, "frame_splicing": 1, "exact_pad": False, "pad_value": 0},
    "encoder": {
        "causal_downsampling": False,
        "reduction": None,
        "att_context_style": "regular",
        "att_chunk_context_size": None,
        "conv_context_style": "regular",
        "global_tokens": 0,
    },
}
NORMALIZATIONS = {
    "per_feature": "per_feature",
    "all_features": "all_features",
    "NA": "none",
    "": "none",
    None: "none",
    False: "none",
}


def read(path: Path) -> Contents:
    """Contents of the archive `path`.

    Raises:
        ValueError: Something is damaged, missing or not supported; it is named.
    """
    with archive.opened(path) as nemo:
        config = archive.read_yaml(nemo, "model_config.yaml")
        target = str(config.get("target")).rpartition(".")[2]
        remedy = "Other NeMo models are not supported."
        expect(target in TARGETS, "target", f"one of {sorted(TARGETS)}", f"{target!r:.80}", remedy)
        features = _features(section(config, "preprocessor"))
        encoder = _encoder(config, features["bins"])
        version = str(config.get("nemo_version", ""))
        notes: dict[str, Any] = {"source": path.name, "target": target, "nemo_version": version}
        model: ModelConfig
        tokenizer: Tokenizer
        if TARGETS[target] == "attention":
            model, tokenizer, prompt = nemo_canary.read(config, nemo, encoder)
            notes |= prompt.to_notes()
        else:
            tokenizer = _tokenizer(config, nemo, target)
            model = CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder)
        if TARGETS[target] in ("transducer", "hybrid"):
            model = _transducer(config, encoder, tokenizer, ctc=TARGETS[target] == "hybrid")
            notes["max_symbols"] = _max_symbols(section(config, "decoding"))
        weights = nemo.weights("model_weights.ckpt")
    features["periodic"] = _is_periodic(weights, features)
    kept = {name: weights[name] for name in weights if not name.startswith(_NO_WEIGHTS)}
    del weights
    found = renamed(kept, our_name)
    shape_conformer(found)
    if isinstance(model, AEDConfig):
        nemo_canary.shape_decoder(found, model)
    return model, found, tokenizer, features, notes


def _features(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments of FeatureConfig, all but `periodic`."""
    expect_only(values, ONLY["preprocessor"], "preprocessor")
    rate = values.get("sample_rate", 16_000)
    sizes = (rate, values.get("window_size", 0.02), values.get("window_stride", 0.01))
    numbers = all(isinstance(size, int | float) and 0 < size < 10**6 for size in sizes)
    named = "preprocessor.sample_rate, window_size, window_stride"
    expect(numbers, named, "numbers above 0", f"{sizes!r:.80}")
    window = int(sizes[1] * rate)  # NeMo cuts off
    hop = int(sizes[2] * rate)
    single = torch.finfo(torch.float32)
    guards = {"tiny": single.tiny, "eps": single.eps}
    log_guard = values.get("log_zero_guard_value", 2.0**-24)
    power = values.get("mag_power", 2.0)
    expect(power in (1, 2), "preprocessor.mag_power", "1 or 2", f"{power!r:.80}")
    return {
        "rate_hz": rate,
        "window_s": window / rate,
        "hop_s": hop / rate,
        "bins": values.get("features", 64),
        "fft": values.get("n_fft") or 2 ** (window - 1).bit_length(),
        "window": values.get("window", "hann"),
        "preemphasis": float(values.get("preemph", 0.97) or 0.0),
        "power": int(power),
        "guard": values.get("log_zero_guard_type", "add"),
        "log_guard": float(guards.get(log_guard, log_guard)),  # YAML reads 1e-5 as text
        "normalization": NORMALIZATIONS[values.get("normalize", "per_feature")],
    }


def _is_periodic(weights: dict[str, Tensor], features: dict[str, Any]) -> bool:
    """Whether the window is periodic, which its own numbers say alone.

    Raises:
        ValueError: The window or the mel bands that the archive holds are not those of `features`.
    """
    config = FeatureConfig(**features)
    window = weights["preprocessor.featurizer.window"]
    bank = weights["preprocessor.featurizer.fb"]
    sizes = (tuple(window.shape), tuple(bank.shape))
    wanted = ((config.window_samples,), (1, config.bins, config.fft // 2 + 1))
    expect(sizes == wanted, "preprocessor.featurizer", f"window and mel bands {wanted}", sizes)
    make_window = getattr(torch, f"{config.window}_window")
    periodic = _close(window, make_window(len(window), periodic=True))
    known = periodic or _close(window, make_window(len(window), periodic=False))
    expect(known, "preprocessor.featurizer.window", f"a {config.window} window", "other numbers")
    slaney = _close(bank, mel_bands(config).T[None])
    expect(slaney, "preprocessor.featurizer.fb", "Slaney's mel bands", "other numbers")
    return periodic


def _close(held: Tensor, made: Tensor) -> bool:
    rounding = max(1e-5, torch.finfo(held.dtype).eps)  # buffers of half precision are rounded
    return torch.allclose(held.float(), made, rtol=rounding, atol=1e-6)


def _encoder(config: dict[str, Any], bins: int) -> FastConformerConfig | JasperConfig:
    values = section(config, "encoder")
    if str(values["_target_"]).endswith(".ConvASREncoder"):
        return jasper.nemo_encoder(values, config, bins)
    expect_only(values, ONLY["encoder"], "encoder")
    width = values["d_model"]
    kernel = values.get("conv_kernel_size", 31)
    around = [kernel // 2, kernel // 2]
    contexts = values.get("conv_context_size") or around
    expect(contexts == around, "encoder.conv_context_size", f"{around} or none", contexts)
    channels = values.get("subsampling_conv_channels", -1)
    return FastConformerConfig(
        bins=bins,
        width=width,
        layers=values["n_layers"],
        heads=values.get("n_heads", 4),
        subsampling=values.get("subsampling_factor", 4),
        subsampling_channels=width if channels == -1 else channels,
        kernel=kernel,
        expansion=values.get("ff_expansion_factor", 4),
        dropout=values.get("dropout", 0.1),
        dropout_attention=values.get("dropout_att", 0.0),
        dropout_input=values.get("dropout_pre_encoder", 0.1),
        dropout_positions=values.get("dropout_emb", 0.1),
        bias=values.get("use_bias", True),
        scale_input=values.get("xscaling", True),
        context=_context(values),
    )


def _context(values: dict[str, Any]) -> Any:
    """Frames that a frame attends to on its left and right; -1 is all."""
    context = values.get("att_context_size") or (-1, -1)
    # With unequal sides NeMo adds the position terms of one distance to the scores of another,
    # which are not our numbers.
    local = values.get("self_attention_model", "rel_pos") == "rel_pos_local_attn"
    fits = not local or context[0] == context[-1] > 0
    expect(fits, "encoder.att_context_size", "equal sides of local attention", context)
    return context


def _max_symbols(decoding: dict[str, Any]) -> int:
    """The most labels on one frame in greedy decoding, which NeMo writes under either name."""
    greedy = decoding.get("greedy") or {}
    return greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or 10


def _transducer(
    config: dict[str, Any],
    encoder: FastConformerConfig | JasperConfig,
    tokenizer: Tokenizer,
    ctc: bool,
) -> TransducerConfig:
    predictor = section(config, "decoder", "prednet")
    joint = section(config, "joint", "jointnet")
    return TransducerConfig(
        vocab_size=tokenizer.vocab_size,
        encoder=encoder,
        predictor=LSTMConfig(width=predictor["pred_hidden"], layers=predictor["pred_rnn_layers"]),
        joint_width=joint["joint_hidden"],
        durations=section(config, "decoding").get("durations") or (),
        ctc=ctc,
        dropout=joint.get("dropout", 0.0),
        activation=joint["activation"],
    )


def _tokenizer(config: dict[str, Any], nemo: archive.Archive, target: str) -> Tokenizer:
    if "BPE" in target:
        return SentencePieceTokenizer(nemo_canary.piece_model(section(config, "tokenizer"), nemo))
    if TARGETS[target] == "ctc":
        labels = section(config, "decoder")["vocabulary"]
    else:
        labels = section(config)["labels"]
    distinct = all(len(label) == 1 for label in labels) and len(set(labels)) == len(labels)
    expect(distinct, "labels", "distinct single characters", f"{labels!r:.80}")
    return CharTokenizer("".join(labels))


BLOCK_NAMES = {
    "norm_feed_forward1": "feed.0.0",
    "feed_forward1.linear1": "feed.0.1",
    "feed_forward1.linear2": "feed.0.4",
    "norm_feed_forward2": "feed.1.0",
    "feed_forward2.linear1": "feed.1.1",
    "feed_forward2.linear2": "feed.1.4",
    "norm_self_att": "attention_norm",
    "self_attn.linear_q": "attention.q",
    "self_attn.linear_k": "attention.k",
    "self_attn.linear_v": "attention.v",
    "self_attn.linear_out": "attention.out",
    "self_attn.linear_pos": "attention.position",
    "self_attn.pos_bias_u": "attention.content_bias",
    "self_attn.pos_bias_v": "attention.position_bias",
    "norm_conv": "conv_norm",
    "conv.pointwise_conv1": "gate",
    "conv.depthwise_conv": "depthwise",
    "conv.batch_norm": "batch_norm",
    "conv.pointwise_conv2": "pointwise",
    "norm_out": "final_norm",
}
MODEL_NAMES = {
    "encoder.pre_encode.out": "encoder.subsampling.out",
    "encoder.pre_encode.conv.0": "encoder.subsampling.convs.0",  # a ReLU lies behind each pair
    "encoder.pre_encode.conv.2": "encoder.subsampling.convs.1.0",
    "encoder.pre_encode.conv.3": "encoder.subsampling.convs.1.1",
    "encoder.pre_encode.conv.5": "encoder.subsampling.convs.2.0",
    "encoder.pre_encode.conv.6": "encoder.subsampling.convs.2.1",
    "decoder.prediction.embed": "predictor.embedding",
    "decoder.prediction.dec_rnn.lstm": "predictor.lstm",
    "joint.enc": "encoder_projection",
    "joint.pred": "predictor_projection",
    "joint.joint_net.1": "output",
    "joint.joint_net.2": "output",  # 2 where a dropout lies between
    "decoder.decoder_layers.0": "output",
    "ctc_decoder.decoder_layers.0": "ctc_head",
}
_NO_WEIGHTS = (  # beginnings of names: metrics, tables, features
    "loss.",
    "wer.",
    "_wer.",
    "ctc_loss.",
    "ctc_wer.",
    "val_loss.",
    "metric.",
    "spec_augmentation.",
    "encoder.pos_enc.",
    "preprocessor.",
)


def our_name(name: str) -> str:
    """asrkit's name of a NeMo weight; one that it does not know keeps its own."""
    block = re.match(r"encoder\.layers\.(\d+)\.", name)
    if block is None:
        other = jasper.our_name(name) or nemo_canary.our_name(name)
        return other or beginning_replaced(name, MODEL_NAMES) or name
    inner = beginning_replaced(name[block.end() :], BLOCK_NAMES)
    if inner is None:
        return name
    return f"encoder.blocks.{block[1]}.{inner}"
