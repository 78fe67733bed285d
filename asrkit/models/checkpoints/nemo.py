"""NeMo's `.nemo` archives: FastConformer with CTC, RNN-T, TDT or both, read as asrkit's config and
names of weights.

Every key that bears on the numbers is read from the archive's own config, or refused by name; none
is assumed. Key and class names are those of nemo_toolkit 3.0.0.
"""

import math
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models.checkpoints import archive
from asrkit.models.checkpoints.own import Contents
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.transducer import CTCConfig, LSTMConfig, TransducerConfig
from asrkit.shapes import MOST, expect, whole
from asrkit.text import CharTokenizer, SentencePieceTokenizer, Tokenizer

SIZE = 65_536  # of a layer, and how many: what asks for more is damaged
NODES = (
    10**6
    # values of a config: published ones list their vocabulary two or three times, some thousands each
)
Kind = Literal["ctc", "transducer", "hybrid"]
TARGETS: dict[str, Kind] = {
    "EncDecCTCModel": "ctc",
    "EncDecCTCModelBPE": "ctc",
    "EncDecRNNTModel": "transducer",
    "EncDecRNNTBPEModel": "transducer",
    "EncDecHybridRNNTCTCModel": "hybrid",
    "EncDecHybridRNNTCTCBPEModel": "hybrid",
}


def read(path: Path) -> Contents:
    """Contents of the archive `path`; ValueError names what is damaged, missing or not supported."""
    with archive.opened(path) as nemo:
        top = _yaml(nemo)
        target = str(top.take("target", "")).rpartition(".")[2]
        expect(
            target in TARGETS,
            "target",
            f"one of {sorted(TARGETS)}",
            _short(target),
            "Other NeMo models are not supported.",
        )
        kind = TARGETS[target]
        features = _features(top.section("preprocessor"))
        top.take("sample_rate", features["rate_hz"], of=(features["rate_hz"],))
        encoder = _encoder(top.section("encoder"), features["bins"])
        tokenizer = _tokenizer(top, nemo, target)
        config: TransducerConfig | CTCConfig
        limit = {} if kind == "ctc" else {"max_symbols": _max_symbols(top.section("decoding"))}
        if kind == "ctc":
            config = CTCConfig(
                vocab_size=_ctc_size(top.section("decoder"), tokenizer), encoder=encoder
            )
        else:
            config = _transducer(top, encoder, tokenizer, ctc=kind == "hybrid")
        if kind == "hybrid":
            _ctc_size(top.section("aux_ctc").section("decoder"), tokenizer)
        weights = nemo.weights("model_weights.ckpt")
    _check_features(weights, features)
    notes = {
        "source": path.name,
        "target": target,
        "nemo_version": str(top.take("nemo_version", "")),
    } | limit
    return config, _renamed(weights), tokenizer, features, notes


class _Section:
    """A section of the config. Each key is taken with NeMo's default; `done` refuses those that
    nobody took.
    """

    def __init__(self, name: str, values: dict[str, Any], root: dict[str, Any]) -> None:
        self.name, self.values, self.root = name, values, root
        self.taken = {"_target_"}

    def take(self, key: str, *default: Any, of: tuple[Any, ...] = ()) -> Any:
        """The value of `key`, references followed; one of `of` where given."""
        expect(
            key in self.values or bool(default),
            self.name,
            f"a key {key!r}",
            _short(sorted(map(str, self.values))),
        )
        value = self._followed(self.values[key]) if key in self.values else default[0]
        self.taken.add(key)
        unset = isinstance(value, str) and (value == "???" or "${" in value)
        expect(not unset, f"{self.name}.{key}", "a value", _short(value))
        expect(
            not of or value in of,
            f"{self.name}.{key}",
            f"{' or '.join(map(repr, of))} (others are not supported)",
            _short(value),
        )
        return value

    def number(self, key: str, *default: Any) -> float:
        """The finite number that `key` has; YAML reads 1e-5 as text."""
        value = self.take(key, *default)
        try:
            finite = math.isfinite(number := float(value))
        except (TypeError, ValueError, OverflowError):
            finite = False
        expect(finite, f"{self.name}.{key}", "a number", _short(value))
        return number

    def count(self, key: str, *default: Any) -> int:
        """The whole number that `key` has, of a size that some model may have."""
        value = self.take(key, *default)
        expect(
            whole(value, 1, SIZE),
            f"{self.name}.{key}",
            f"a whole number in 1..{SIZE}",
            _short(value),
        )
        return value

    def section(self, key: str) -> "_Section":
        """The section under `key`."""
        values = self.take(key)
        expect(isinstance(values, dict), f"{self.name}.{key}", "a section", _short(values))
        return _Section(f"{self.name}.{key}".removeprefix("config."), values, self.root)

    def done(self, ignored: str) -> None:
        """Refuse keys that were not taken, but for `ignored`: they bear on training, speed or
        memory only.
        """
        unknown = sorted(map(str, self.values.keys() - self.taken - {*ignored.split()}))
        expect(
            not unknown,
            self.name,
            "known keys",
            _short(unknown),
            "What they change is not supported.",
        )

    def _followed(self, value: Any) -> Any:
        value = self._referred(value)
        return [self._referred(item) for item in value] if isinstance(value, list) else value

    def _referred(self, value: Any) -> Any:
        for _ in range(8):  # a reference may lead to another, not in circles
            reference = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
            if not reference:
                break
            found: Any = self.root
            for part in reference[1].split("."):
                found = found.get(part) if isinstance(found, dict) else None
            value = found
        return value


def _short(value: Any) -> str:
    return repr(value)[:120]


def _yaml(nemo: archive.Archive) -> _Section:
    import yaml

    try:
        config = yaml.safe_load(nemo.small("model_config.yaml"))
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{nemo.name}: model_config.yaml is damaged ({' '.join(str(error).split()):.200})."
        ) from None
    expect(isinstance(config, dict), "model_config.yaml", "keys and values", type(config).__name__)
    nodes, count = [config], 1
    # an alias stands for all that it names: a few lines of them can stand for more than memory
    # holds
    while nodes:
        node = nodes.pop()
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        count += len(inner)
        expect(
            count <= NODES,
            "model_config.yaml",
            "a config",
            "one that aliases make endless",
            "Do not trust it.",
        )
        nodes += inner
    return _Section("config", config, config)


def _module(section: _Section, name: str) -> None:
    target = str(section.take("_target_", "")).rpartition(".")[2]
    expect(
        target == name,
        f"{section.name}._target_",
        name,
        _short(target),
        "Other modules are not supported.",
    )


def _features(section: _Section) -> dict[str, Any]:
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
    seconds = section.number("window_size", 0.02), section.number("window_stride", 0.01)
    fit = all(
        1 <= part * rate <= SIZE and int(part * rate) == round(part * rate) for part in seconds
    )  # NeMo cuts off
    expect(
        fit,
        f"{section.name}.window_size, window_stride",
        "a number of samples, rounded or cut off",
        seconds,
    )
    single = torch.finfo(torch.float32)
    guard = {"tiny": single.tiny, "eps": single.eps}.get(
        str(section.take("log_zero_guard_value", 2.0**-24))
    )
    normalization = section.take(
        "normalize", "per_feature", of=("per_feature", "all_features", "NA", "", None, False)
    )
    samples = int(seconds[0] * rate)
    features = {
        "rate_hz": rate,
        "window_s": seconds[0],
        "hop_s": seconds[1],
        "bins": section.count("features", 64),
        "fft": section.count("n_fft", 2 ** (samples - 1).bit_length()),
        "window": section.take("window", "hann", of=("hann", "hamming", "blackman")),
        "preemphasis": 0.0
        if section.take("preemph", 0.97) is None
        else section.number("preemph", 0.97),
        "power": int(section.take("mag_power", 2.0, of=(1, 2))),
        "guard": section.take("log_zero_guard_type", "add", of=("add", "clamp")),
        "log_guard": guard or section.number("log_zero_guard_value", 2.0**-24),
        "normalization": normalization
        if normalization in ("per_feature", "all_features")
        else "none",
    }
    section.done(
        "dither pad_to nb_augmentation_prob nb_max_freq rng use_torchaudio stft_conv stft_exact_pad use_grads max_duration"
    )
    return features


def _check_features(weights: dict[str, Tensor], features: dict[str, Any]) -> None:
    """Compare the window and the mel bands that the archive holds with asrkit's; the window says
    whether it is periodic.
    """
    bank, window = (
        weights.pop(f"preprocessor.featurizer.{name}", None) for name in ("fb", "window")
    )
    samples = round(features["window_s"] * features["rate_hz"])
    make = {
        "hann": torch.hann_window,
        "hamming": torch.hamming_window,
        "blackman": torch.blackman_window,
    }[features["window"]]
    fits = [
        window is not None and _close(window, make(samples, periodic=periodic))
        for periodic in (False, True)
    ]
    expect(
        any(fits),
        "preprocessor.featurizer.window",
        f"a {features['window']} window of {samples}",
        _shape(window),
    )
    features["periodic"] = fits[1]
    mel = mel_bands(FeatureConfig(**features)).T[None]  # (1, F, fft / 2 + 1)
    fits = [bank is not None and _close(bank, mel)]
    expect(
        all(fits),
        "preprocessor.featurizer.fb",
        f"Slaney's mel bands {tuple(mel.shape)}",
        _shape(bank),
    )


def _close(held: Tensor, made: Tensor) -> bool:
    return held.shape == made.shape and torch.allclose(held.float(), made, rtol=1e-5, atol=1e-6)


def _shape(held: Tensor | None) -> str:
    return "none" if held is None else f"one of {tuple(held.shape)} with other numbers"


def _encoder(section: _Section, bins: int) -> FastConformerConfig:
    _module(section, "ConformerEncoder")
    width, kernel = section.count("d_model"), section.count("conv_kernel_size", 31)
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
    local = (
        section.take("self_attention_model", "rel_pos", of=("rel_pos", "rel_pos_local_attn"))
        == "rel_pos_local_attn"
    )
    context = section.take("att_context_size", None) or [-1, -1]
    sides = (
        isinstance(context, list)
        and len(context) == 2
        and all(whole(side, 0 if local else -1) for side in context)
    )
    expect(
        sides,
        f"{section.name}.att_context_size",
        "one pair of frames (others are not supported)",
        _short(context),
    )
    # With unequal sides NeMo adds the position terms of one distance to the scores of another: not
    # our numbers.
    expect(
        not local or context[0] == context[1] > 0,
        f"{section.name}.att_context_size",
        "equal sides of local attention",
        context,
    )
    section.take(
        "untie_biases", True, of=(True, False)
    )  # tied: each layer's entry holds the same numbers
    every = section.take("subsampling_conv_channels", -1) == -1
    config = FastConformerConfig(
        bins=bins,
        width=width,
        layers=section.count("n_layers"),
        heads=section.count("n_heads", 4),
        subsampling=section.take("subsampling_factor", 4, of=(2, 4, 8)),
        subsampling_channels=width if every else section.count("subsampling_conv_channels"),
        kernel=kernel,
        expansion=section.count("ff_expansion_factor", 4),
        dropout=section.number("dropout", 0.1),
        dropout_attention=section.number("dropout_att", 0.0),
        dropout_input=section.number("dropout_pre_encoder", 0.1),
        dropout_positions=section.number("dropout_emb", 0.1),
        bias=section.take("use_bias", True, of=(True, False)),
        scale_input=section.take("xscaling", True, of=(True, False)),
        context=tuple(context),
    )
    section.done(
        "reduction_position reduction_factor pos_emb_max_len att_context_probs subsampling_conv_chunking_factor "
        "stochastic_depth_drop_prob stochastic_depth_mode stochastic_depth_start_layer global_tokens_spacing "
        "global_attn_separate use_pytorch_sdpa use_pytorch_sdpa_backends sync_max_audio_length"
    )
    return config


def _ctc_size(section: _Section, tokenizer: Tokenizer) -> int:
    _module(section, "ConvASRDecoder")
    section.take("add_blank", True, of=(True,))
    classes = section.take("num_classes", -1)
    section.done("feat_in vocabulary init_mode")
    return classes if whole(classes, 1) else tokenizer.vocab_size  # NeMo then counts the vocabulary


def _max_symbols(decoding: _Section) -> int:
    """Labels on one frame at most in greedy decoding, which NeMo writes under either name."""
    greedy = (
        decoding.section("greedy")
        if isinstance(decoding.values.get("greedy"), dict)
        else _Section("greedy", {}, {})
    )
    most = greedy.take("max_symbols", None) or greedy.take("max_symbols_per_step", None) or 10
    expect(
        whole(most, 1, MOST), f"{decoding.name}.greedy.max_symbols", f"1 to {MOST}", _short(most)
    )
    return most


def _transducer(
    top: _Section, encoder: FastConformerConfig, tokenizer: Tokenizer, ctc: bool
) -> TransducerConfig:
    decoder, joint = top.section("decoder"), top.section("joint")
    _module(decoder, "RNNTDecoder")
    decoder.take("blank_as_pad", True, of=(True,))
    decoder.take("normalization_mode", None, of=(None,))
    predictor, net = decoder.section("prednet"), joint.section("jointnet")
    predictor.take("rnn_hidden_size", -1, of=(-1,))
    lstm = LSTMConfig(
        width=predictor.count("pred_hidden"), layers=predictor.count("pred_rnn_layers")
    )
    predictor.done("t_max dropout forget_gate_bias weights_init_scale hidden_hidden_bias_scale")
    V = decoder.count("vocab_size", tokenizer.vocab_size)
    decoder.done("random_state_sampling")
    _module(joint, "RNNTJoint")
    joint.take("log_softmax", None, of=(None, True))
    extra = joint.take("num_extra_outputs", 0)
    decoding = top.section("decoding")
    decoding.take("big_blank_durations", None, of=(None, []))
    durations = decoding.take("durations", None) or []
    same = isinstance(durations, list) and extra == len(durations)
    expect(
        same,
        "decoding.durations",
        f"{_short(extra)}, as joint.num_extra_outputs",
        _short(durations),
    )
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
    net.done("encoder_hidden pred_hidden")
    joint.done(
        "num_classes vocabulary preserve_memory fuse_loss_wer fused_batch_size experimental_fuse_loss_wer masking_prob"
    )
    return config


def _tokenizer(top: _Section, nemo: archive.Archive, target: str) -> Tokenizer:
    if "BPE" in target:
        section = top.section("tokenizer")
        section.take("type", of=("bpe",))
        section.take("custom_tokenizer", None, of=(None,))
        return SentencePieceTokenizer(
            nemo.small(str(section.take("model_path"))[:200].removeprefix("nemo:"))
        )
    labels = (
        top.section("decoder").take("vocabulary")
        if "CTC" in target and "RNNT" not in target
        else top.take("labels")
    )
    letters = isinstance(labels, list) and all(
        isinstance(one, str) and len(one) == 1 for one in labels
    )
    expect(
        letters and len({*labels}) == len(labels),
        "labels",
        "distinct single characters",
        _short(labels),
    )
    return CharTokenizer("".join(labels))


_BLOCK = {
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
_MODEL = {
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
_NO_WEIGHTS = (
    "loss.",
    "wer.",
    "_wer.",
    "ctc_loss.",
    "ctc_wer.",
    "spec_augmentation.",
    "encoder.pos_enc.",
)  # metrics, tables
_CONVOLUTIONS_OF_ONE = (
    "gate.weight",
    "pointwise.weight",
    "output.weight",
    "ctc_head.weight",
)  # linear layers here


def _ours(name: str) -> str | None:
    """asrkit's name of a NeMo weight, None for one it does not know."""
    block = re.match(r"encoder\.layers\.(\d+)\.", name)
    inner = name[block.end() :] if block else name
    for theirs, ours in (_BLOCK if block else _MODEL).items():
        if inner == theirs or inner.startswith(f"{theirs}."):
            return (f"encoder.blocks.{block[1]}." if block else "") + ours + inner[len(theirs) :]
    return None


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by asrkit's names, in its shapes. Empties `weights`, so that no layer is in memory
    twice.
    """
    names = {name: _ours(name) for name in weights if not name.startswith(_NO_WEIGHTS)}
    unknown = sorted(name for name, ours in names.items() if ours is None)
    expect(
        not unknown,
        "model_weights.ckpt",
        "weights of a FastConformer",
        f"{str(unknown)[:200]}, {len(unknown)} unknown in all",
    )
    expect(
        len({*names.values()}) == len(names),
        "model_weights.ckpt",
        "one output layer",
        "joint_net.1 and joint_net.2",
    )
    renamed = dict[str, Tensor]()
    for name, ours in names.items():
        value = weights.pop(name)
        if name.endswith(("pos_bias_u", "pos_bias_v")):
            value = value.unsqueeze(1)  # (H, D/H) -> (H, 1, D/H)
        elif str(ours).endswith(_CONVOLUTIONS_OF_ONE) and value.ndim == 3:
            value = value.squeeze(-1)
        renamed[str(ours)] = value
    for query in [name for name in renamed if ".attention.q." in name]:
        thirds = [renamed.pop(query.replace(".q.", f".{part}."), None) for part in "qkv"]
        expect(None not in thirds, query, "linear_q, linear_k and linear_v", "fewer")
        renamed[query.replace(".q.", ".qkv.")] = torch.cat(thirds)  # type: ignore[arg-type]
    embedding = renamed.get("predictor.embedding.weight")
    expect(
        embedding is None or not embedding[-1].any(),
        "decoder.prediction.embed",
        "zeros for blank",
        "others",
    )
    return renamed
