"""NeMo's `.nemo` archives of FastConformer models with CTC, RNN-T, TDT, CTC beside a transducer or
an attention decoder (Canary), and of Jasper.

They become asrkit's config and weights. Keys that choose the arithmetic are read from the archive's
own config, and values that asrkit does not compute are refused by name. Names of keys and classes
are those of nemo_toolkit 3.0.0.
"""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models.assembly import ModelConfig
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import archive, jasper, nemo_canary
from asrkit.models.checkpoints.nemo_config import SIZE, Section, read_config, short
from asrkit.models.checkpoints.own import Contents
from asrkit.models.checkpoints.renaming import join
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, TransducerConfig
from asrkit.shapes import MAX_COUNT, expect, whole
from asrkit.text import CharTokenizer, SentencePieceTokenizer, Tokenizer

Kind = Literal["ctc", "transducer", "hybrid", "attention"]
TARGETS: dict[str, Kind] = {
    "EncDecCTCModel": "ctc",
    "EncDecCTCModelBPE": "ctc",
    "EncDecRNNTModel": "transducer",
    "EncDecRNNTBPEModel": "transducer",
    "EncDecHybridRNNTCTCModel": "hybrid",
    "EncDecHybridRNNTCTCBPEModel": "hybrid",
    "EncDecMultiTaskModel": "attention",
}


def read(path: Path) -> Contents:
    """Contents of the archive `path`.

    Raises:
        ValueError: Something is damaged, missing or not supported; it is named.
    """
    with archive.opened(path) as nemo:
        top = read_config(nemo)
        target = str(top.take("target", "")).rpartition(".")[2]
        remedy = "Other NeMo models are not supported."
        expect(target in TARGETS, "target", f"one of {sorted(TARGETS)}", short(target), remedy)
        kind = TARGETS[target]
        features = _features(top.section("preprocessor"))
        top.take("sample_rate", features["rate_hz"], of=(features["rate_hz"],))
        encoder = _encoder(top.section("encoder"), features["bins"])
        notes: dict[str, Any] = {"source": path.name, "target": target}
        notes["nemo_version"] = str(top.take("nemo_version", ""))
        config: ModelConfig
        tokenizer: Tokenizer
        if kind == "attention":
            config, tokenizer, prompt = nemo_canary.read(top, nemo, encoder)
            notes |= prompt.to_notes()
        else:
            tokenizer = _tokenizer(top, nemo, target)
            config, more = _with_blank(top, encoder, tokenizer, kind)
            notes |= more
        weights = nemo.weights("model_weights.ckpt")
    _check_features(weights, features)
    renamed = _renamed(weights)
    if isinstance(config, AEDConfig):
        renamed = nemo_canary.our_weights(renamed, config)
    return config, renamed, tokenizer, features, notes


def _with_blank(
    top: Section, encoder: FastConformerConfig | JasperConfig, tokenizer: Tokenizer, kind: Kind
) -> tuple[CTCConfig | TransducerConfig, dict[str, Any]]:
    """The config of a CTC model or a transducer, and what its notes say of decoding."""
    if kind == "ctc":
        vocab_size = _ctc_size(top.section("decoder"), tokenizer)
        return CTCConfig(vocab_size=vocab_size, encoder=encoder), {}
    most = _max_symbols(top.section("decoding"))
    config = _transducer(top, encoder, tokenizer, ctc=kind == "hybrid")
    if kind == "hybrid":
        _ctc_size(top.section("aux_ctc").section("decoder"), tokenizer)
    return config, {"max_symbols": most}


def _module(section: Section, name: str) -> None:
    target = str(section.take("_target_", "")).rpartition(".")[2]
    remedy = "Other modules are not supported."
    expect(target == name, f"{section.name}._target_", name, short(target), remedy)


def _features(section: Section) -> dict[str, Any]:
    """Arguments of FeatureConfig."""
    _module(section, "AudioToMelSpectrogramPreprocessor")
    for key, only in {
        "log": True,
        "frame_splicing": 1,
        "exact_pad": False,
        "lowfreq": 0,
        "highfreq": None,
        "mel_norm": "slaney",
        "pad_value": 0,
        "n_window_size": None,
        "n_window_stride": None,
    }.items():
        section.take(key, only, of=(only,))
    rate = section.count("sample_rate", 16_000)
    seconds = (section.number("window_size", 0.02), section.number("window_stride", 0.01))
    # NeMo cuts off, asrkit rounds: where the two differ the features would.
    fit = all(
        1 <= part * rate <= SIZE and int(part * rate) == round(part * rate) for part in seconds
    )
    named = f"{section.name}.window_size, window_stride"
    expect(fit, named, "a number of samples, rounded or cut off", seconds)
    single = torch.finfo(torch.float32)
    guards = {"tiny": single.tiny, "eps": single.eps}
    log_guard = guards.get(str(section.take("log_zero_guard_value", 2.0**-24)))
    if log_guard is None:
        log_guard = section.number("log_zero_guard_value", 2.0**-24)
    known = ("per_feature", "all_features", "NA", "", None, False)
    normalization = section.take("normalize", "per_feature", of=known)
    if normalization not in ("per_feature", "all_features"):
        normalization = "none"
    preemphasis = 0.0
    if section.take("preemph", 0.97) is not None:
        preemphasis = section.number("preemph", 0.97)
    samples = int(seconds[0] * rate)
    features = {
        "rate_hz": rate,
        "window_s": seconds[0],
        "hop_s": seconds[1],
        "bins": section.count("features", 64),
        "fft": section.count("n_fft", 2 ** (samples - 1).bit_length()),
        "window": section.take("window", "hann", of=("hann", "hamming", "blackman")),
        "preemphasis": preemphasis,
        "power": int(section.take("mag_power", 2.0, of=(1, 2))),
        "guard": section.take("log_zero_guard_type", "add", of=("add", "clamp")),
        "log_guard": log_guard,
        "normalization": normalization,
    }
    return features


def _check_features(weights: dict[str, Tensor], features: dict[str, Any]) -> None:
    """Compare the window and the mel bands that the archive holds with asrkit's.

    Sets features["periodic"]: only the window's own numbers say whether it is periodic.
    """
    bank = weights.pop("preprocessor.featurizer.fb", None)
    window = weights.pop("preprocessor.featurizer.window", None)
    samples = round(features["window_s"] * features["rate_hz"])
    make_window = {
        "hann": torch.hann_window,
        "hamming": torch.hamming_window,
        "blackman": torch.blackman_window,
    }[features["window"]]
    symmetric = _close(window, make_window(samples, periodic=False))
    periodic = _close(window, make_window(samples, periodic=True))
    wanted = f"a {features['window']} window of {samples}"
    expect(symmetric or periodic, "preprocessor.featurizer.window", wanted, _other(window))
    features["periodic"] = periodic
    mel = mel_bands(FeatureConfig(**features)).T[None]  # (1, F, fft / 2 + 1)
    wanted = f"Slaney's mel bands {tuple(mel.shape)}"
    expect(_close(bank, mel), "preprocessor.featurizer.fb", wanted, _other(bank))


def _close(held: Tensor | None, made: Tensor) -> bool:
    if held is None or held.shape != made.shape:
        return False
    rounding = max(1e-5, torch.finfo(held.dtype).eps)  # buffers of half precision are rounded
    return torch.allclose(held.float(), made, rtol=rounding, atol=1e-6)


def _other(held: Tensor | None) -> str:
    return "none" if held is None else f"one of {tuple(held.shape)} with other numbers"


def _encoder(section: Section, bins: int) -> FastConformerConfig | JasperConfig:
    if str(section.take("_target_", "")).endswith(".ConvASREncoder"):
        return jasper.nemo_encoder(section, bins)
    return _conformer(section, bins)


def _conformer(section: Section, bins: int) -> FastConformerConfig:
    _module(section, "ConformerEncoder")
    width = section.count("d_model")
    kernel = section.count("conv_kernel_size", 31)
    section.take("feat_in", of=(bins,))
    section.take("feat_out", -1, of=(-1, width))
    section.take("conv_context_size", None, of=(None, [kernel // 2, kernel // 2]))
    section.take("subsampling", "striding", of=("dw_striding",))
    for key, only in {
        "causal_downsampling": False,
        "reduction": None,
        "att_context_style": "regular",
        "att_chunk_context_size": None,
        "conv_norm_type": "batch_norm",
        "conv_context_style": "regular",
        "global_tokens": 0,
    }.items():
        section.take(key, only, of=(only,))
    attention = ("rel_pos", "rel_pos_local_attn")
    local = section.take("self_attention_model", "rel_pos", of=attention) == "rel_pos_local_attn"
    context = _context(section, local)
    # Where biases are tied, each layer's entry holds the same numbers.
    section.take("untie_biases", True, of=(True, False))
    channels = width
    if section.take("subsampling_conv_channels", -1) != -1:
        channels = section.count("subsampling_conv_channels")
    config = FastConformerConfig(
        bins=bins,
        width=width,
        layers=section.count("n_layers"),
        heads=section.count("n_heads", 4),
        subsampling=section.take("subsampling_factor", 4, of=(2, 4, 8)),
        subsampling_channels=channels,
        kernel=kernel,
        expansion=section.count("ff_expansion_factor", 4),
        dropout=section.number("dropout", 0.1),
        dropout_attention=section.number("dropout_att", 0.0),
        dropout_input=section.number("dropout_pre_encoder", 0.1),
        dropout_positions=section.number("dropout_emb", 0.1),
        bias=section.take("use_bias", True, of=(True, False)),
        scale_input=section.take("xscaling", True, of=(True, False)),
        context=context,
    )
    return config


def _context(section: Section, local: bool) -> tuple[int, int]:
    """Frames that a frame attends to on its left and right; -1 is all."""
    context = section.take("att_context_size", None) or [-1, -1]
    least = 0 if local else -1
    pair = (
        isinstance(context, list)
        and len(context) == 2
        and all(whole(side, least) for side in context)
    )
    name = f"{section.name}.att_context_size"
    expect(pair, name, "one pair of frames (others are not supported)", short(context))
    left, right = context
    # With unequal sides NeMo adds the position terms of one distance to the scores of another,
    # which are not our numbers.
    fits = not local or left == right > 0
    expect(fits, name, "equal sides of local attention", context)
    return left, right


def _ctc_size(section: Section, tokenizer: Tokenizer) -> int:
    _module(section, "ConvASRDecoder")
    section.take("add_blank", True, of=(True,))
    classes = section.take("num_classes", -1)
    if whole(classes, 1):
        return classes
    return tokenizer.vocab_size  # NeMo counts the vocabulary too


def _max_symbols(decoding: Section) -> int:
    """The most labels on one frame in greedy decoding, which NeMo writes under either name."""
    greedy = Section("greedy", {}, {})
    if isinstance(decoding.values.get("greedy"), dict):
        greedy = decoding.section("greedy")
    most = greedy.take("max_symbols", None) or greedy.take("max_symbols_per_step", None) or 10
    name = f"{decoding.name}.greedy.max_symbols"
    expect(whole(most, 1, MAX_COUNT), name, f"1 to {MAX_COUNT}", short(most))
    return most


def _transducer(
    top: Section, encoder: FastConformerConfig | JasperConfig, tokenizer: Tokenizer, ctc: bool
) -> TransducerConfig:
    decoder = top.section("decoder")
    joint = top.section("joint")
    _module(decoder, "RNNTDecoder")
    decoder.take("blank_as_pad", True, of=(True,))
    decoder.take("normalization_mode", None, of=(None,))
    predictor = decoder.section("prednet")
    net = joint.section("jointnet")
    predictor.take("rnn_hidden_size", -1, of=(-1,))
    width = predictor.count("pred_hidden")
    lstm = LSTMConfig(width=width, layers=predictor.count("pred_rnn_layers"))
    V = decoder.count("vocab_size", tokenizer.vocab_size)
    _module(joint, "RNNTJoint")
    joint.take("log_softmax", None, of=(None, True))
    extra = joint.take("num_extra_outputs", 0)
    decoding = top.section("decoding")
    decoding.take("big_blank_durations", None, of=(None, []))
    durations = decoding.take("durations", None) or []
    same = isinstance(durations, list) and extra == len(durations)
    wanted = f"{short(extra)}, as joint.num_extra_outputs"
    expect(same, "decoding.durations", wanted, short(durations))
    config = TransducerConfig(
        vocab_size=V,
        encoder=encoder,
        predictor=lstm,
        joint_width=net.count("joint_hidden"),
        durations=durations,
        ctc=ctc,
        dropout=net.number("dropout", 0.0),
        activation=net.take("activation", of=("relu", "tanh")),
    )
    return config


def _tokenizer(top: Section, nemo: archive.Archive, target: str) -> Tokenizer:
    if "BPE" in target:
        section = top.section("tokenizer")
        section.take("type", of=("bpe",))
        section.take("custom_tokenizer", None, of=(None,))
        member = str(section.take("model_path"))[:200].removeprefix("nemo:")
        return SentencePieceTokenizer(nemo.bytes(member))
    if TARGETS[target] == "ctc":
        labels = top.section("decoder").take("vocabulary")
    else:
        labels = top.take("labels")
    distinct = (
        isinstance(labels, list)
        and all(isinstance(label, str) and len(label) == 1 for label in labels)
        and len(set(labels)) == len(labels)
    )
    expect(distinct, "labels", "distinct single characters", short(labels))
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
_NO_WEIGHTS = (  # beginnings of names: metrics, tables
    "loss.",
    "wer.",
    "_wer.",
    "ctc_loss.",
    "ctc_wer.",
    "val_loss.",
    "metric.",
    "spec_augmentation.",
    "encoder.pos_enc.",
)
_CONVOLUTIONS_OF_ONE = (  # convolutions of one frame in NeMo, linear layers here
    "gate.weight",
    "pointwise.weight",
    "output.weight",
    "ctc_head.weight",
)


def _ours(name: str) -> str | None:
    """asrkit's name of a NeMo weight, None for one it does not know."""
    block = re.match(r"encoder\.layers\.(\d+)\.", name)
    if block is None:
        other = jasper.our_name(name) or nemo_canary.our_name(name)
        return other or _replaced(name, MODEL_NAMES)
    inner = _replaced(name[block.end() :], BLOCK_NAMES)
    if inner is None:
        return None
    return f"encoder.blocks.{block[1]}.{inner}"


def _replaced(name: str, names: dict[str, str]) -> str | None:
    """`name` with the beginning that `names` has replaced; None where it has none."""
    for theirs, ours in names.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name[len(theirs) :]
    return None


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by asrkit's names, in its shapes.

    Empties `weights` on the way, so that no layer is in memory twice.
    """
    names = {name: _ours(name) for name in weights if not name.startswith(_NO_WEIGHTS)}
    unknown = sorted(name for name, ours in names.items() if ours is None)
    got = f"{str(unknown)[:200]}, {len(unknown)} unknown in all"
    expect(not unknown, "model_weights.ckpt", "weights of a FastConformer, Jasper or Canary", got)
    distinct = len(set(names.values())) == len(names)
    got = "joint_net.1 and joint_net.2, or a weight of two names"
    expect(distinct, "model_weights.ckpt", "one output layer", got)
    renamed = dict[str, Tensor]()
    for name, ours in names.items():
        value = weights.pop(name)
        if name.endswith(("pos_bias_u", "pos_bias_v")) and value.ndim == 2:
            value = value.unsqueeze(1)  # (H, D/H) -> (H, 1, D/H)
        elif str(ours).endswith(_CONVOLUTIONS_OF_ONE) and value.ndim == 3:
            value = value.squeeze(-1)
        renamed[str(ours)] = value
    for query in [name for name in renamed if ".attention.q." in name]:
        whole = all(query.replace(".q.", f".{part}.") in renamed for part in "kv")
        expect(whole, query, "linear_q, linear_k and linear_v", "fewer")
    join(renamed, ".attention", "qkv", "qkv")
    embedding = renamed.get("predictor.embedding.weight")
    if embedding is not None and embedding.ndim == 2:  # another is refused later
        zeros = not embedding[-1].any()
        expect(zeros, "decoder.prediction.embed", "zeros for blank", "others")
    return renamed
