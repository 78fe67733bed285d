"""NeMo's `.nemo` archives of FastConformer models (CTC, RNN-T, TDT, hybrids, Canary) and of Jasper.

Keys are those of nemo_toolkit 3.0.0. `ONLY` lists the keys whose values no weight reveals; other
settings that asrkit does not support give weights of other names or shapes.
"""

import io
import itertools
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import canary, jasper
from asrkit.models.checkpoints.folders import expect_only, translated
from asrkit.models.checkpoints.names import LAYERS, SETTINGS
from asrkit.models.checkpoints.own import Contents, Values, Weights
from asrkit.models.checkpoints.weights import (
    renamed,
    replaced,
    saved,
    shape_conformer,
)
from asrkit.models.ctc import CTCConfig
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.presets import ModelConfig
from asrkit.models.transducer import LSTMConfig, TransducerConfig
from asrkit.shapes import expect
from asrkit.text import CharTokenizer, Tokenizer

TARGETS = {
    "EncDecCTCModel": "ctc",
    "EncDecCTCModelBPE": "ctc",
    "EncDecRNNTBPEModel": "transducer",
    "EncDecHybridRNNTCTCBPEModel": "hybrid",
    "EncDecMultiTaskModel": "attention",
}
SECTIONS = (  # the sections that asrkit reads from an archive's config
    "target",
    "nemo_version",
    "preprocessor",
    "encoder",
    "decoder",
    "joint",
    "decoding",
    "tokenizer",
    "transf_decoder",
    "prompt_format",
    "prompt_defaults",
)
WEIGHTS = "model_weights.ckpt"
MAX_VALUES = 10**6  # in these sections: aliases in YAML make billions of values from a few lines
ONLY: dict[str, Values] = {
    "preprocessor": {
        "log": True,
        "frame_splicing": 1,
        "exact_pad": False,
        "pad_value": 0,
    },
    "encoder": {
        "causal_downsampling": False,
        "reduction": None,
        "att_context_style": "regular",
        "att_chunk_context_size": None,
        "conv_context_style": "regular",
        "global_tokens": 0,
    },
}
UNUSED = (  # prefixes of the names of metrics, tables and features
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


def read(path: Path) -> Contents:
    """Contents of the archive `path`, which is not unpacked.

    Raises:
        ValueError: Something is damaged, missing or not supported; the message names it.
    """
    import yaml

    with tarfile.open(path) as tar:
        members: dict[str, Any] = {}  # open files
        starts: dict[str, int] = {}  # and where they are in the archive
        for member in filter(tarfile.TarInfo.isfile, tar):
            name = member.name.removeprefix("./")
            members[name], starts[name] = tar.extractfile(member), member.offset_data
        # not libyaml, which ends the process at deep nesting
        raw = yaml.safe_load(members["model_config.yaml"])
        count = itertools.count(1)
        config = {key: _resolved(raw[key], raw, count) for key in SECTIONS if key in raw}
        model, tokenizer, features, notes = _settings(config, members)
        stored = members[WEIGHTS]
        name = f"{path.name}: {WEIGHTS}"
        if isinstance(tar.fileobj, io.BufferedReader):
            weights = saved(stored, name, path, starts[WEIGHTS])
        else:
            stored = io.BytesIO(stored.read())  # gzip can seek back to its start only
            weights = saved(stored, name)
    _expect_features(weights, FeatureConfig(**features))
    weights = renamed(weights, our_name, UNUSED)
    shape_conformer(weights)
    if isinstance(model, AEDConfig):
        canary.shape_decoder(weights, model)
    return model, weights, tokenizer, features, {"source": path.name, **notes}


def _resolved(value: Any, root: Any, count: Iterator[int]) -> Any:
    """`value` with references such as ${encoder.d_model} replaced by their values in `root`.

    References to nothing become None. `count` counts the values: ValueError above `MAX_VALUES`.
    """
    expect(next(count) <= MAX_VALUES, "model_config.yaml", f"at most {MAX_VALUES} values", "more")
    if isinstance(value, dict):
        return {key: _resolved(item, root, count) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root, count) for item in value]
    reference = isinstance(value, str) and re.fullmatch(r"\$\{([\w.]+)\}", value)
    if not reference:
        return value
    target = root
    for key in reference[1].split("."):
        target = target.get(key) if isinstance(target, dict) else None
    return _resolved(target, root, count)


def _expect_features(weights: Weights, config: FeatureConfig) -> None:
    """ValueError unless the window and mel bands in an archive are those of `config`."""
    make_window = getattr(torch, f"{config.window}_window")
    expected = {
        "preprocessor.featurizer.window": make_window(config.window_samples, periodic=False),
        "preprocessor.featurizer.fb": mel_bands(config).T[None],
    }
    wanted = f"a {config.window} window, not periodic, and Slaney's mel bands up to rate / 2"
    for name, ours in expected.items():
        theirs = weights[name]
        rounding = max(1e-5, torch.finfo(theirs.dtype).eps)  # coarser in half precision
        same = theirs.shape == ours.shape
        same = same and torch.allclose(theirs.float(), ours, rtol=rounding, atol=1e-6)
        expect(same, name, wanted, f"other numbers, of shape {tuple(theirs.shape)}")


def _settings(
    config: Values, members: dict[str, Any]
) -> tuple[ModelConfig, Tokenizer, Values, Values]:
    """Config of the model, tokenizer, features and notes from an archive's config and files."""
    target = str(config["target"]).rpartition(".")[2]
    expect(
        target in TARGETS,
        "target",
        f"one of {sorted(TARGETS)}",
        f"{target!r:.80}",
        "Other NeMo models are not supported.",
    )
    kind = TARGETS[target]
    features = _features(config["preprocessor"])
    encoder = _encoder(config["encoder"], features["bins"])
    notes: Values = {"target": target, "nemo_version": str(config.get("nemo_version", ""))}
    tokenizer: Tokenizer
    if kind == "attention":
        model, tokenizer, prompt = canary.read_nemo(config, members, encoder)
        return model, tokenizer, features, notes | prompt.to_notes()
    if "BPE" in target:
        tokenizer = canary.piece_model(config["tokenizer"], members)
    else:
        tokenizer = CharTokenizer("".join(config["decoder"]["vocabulary"]))
    if kind == "ctc":
        ctc = CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder)
        return ctc, tokenizer, features, notes
    decoding = config["decoding"]
    greedy = decoding.get("greedy") or {}
    notes["max_symbols"] = greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or 10
    predictor = config["decoder"]["prednet"]
    joint = config["joint"]["jointnet"]
    transducer = TransducerConfig(
        vocab_size=tokenizer.vocab_size,
        encoder=encoder,
        predictor=LSTMConfig(width=predictor["pred_hidden"], layers=predictor["pred_rnn_layers"]),
        joint_width=joint["joint_hidden"],
        durations=decoding.get("durations") or (),
        ctc=kind == "hybrid",
        dropout=joint.get("dropout", 0.0),
        activation=joint["activation"],
    )
    return transducer, tokenizer, features, notes


def _features(values: Values) -> Values:
    """Arguments of FeatureConfig. NeMo's windows are never periodic, which is the default."""
    expect_only(values, ONLY["preprocessor"], "preprocessor")
    features = translated(values, SETTINGS["nemo_features"])
    rate = features["rate_hz"]
    window = int(float(features["window_s"]) * rate)  # NeMo truncates
    features["window_s"] = window / rate
    features["hop_s"] = int(float(features["hop_s"]) * rate) / rate
    features["fft"] = features["fft"] or 2 ** (window - 1).bit_length()
    features["preemphasis"] = float(features["preemphasis"] or 0.0)
    single = torch.finfo(torch.float32)
    guard: Any = features["log_guard"]
    guard = {"tiny": single.tiny, "eps": single.eps}.get(guard, guard)
    features["log_guard"] = float(guard)  # YAML reads 1e-5 as a string
    if features["normalization"] in ("NA", "", None, False):
        features["normalization"] = "none"
    return features


def _encoder(values: Values, bins: int) -> FastConformerConfig | JasperConfig:
    if values["_target_"].endswith(".ConvASREncoder"):
        return jasper.nemo_encoder(values, bins)
    expect_only(values, ONLY["encoder"], "encoder")
    sizes = translated(values, SETTINGS["nemo_encoder"])
    if sizes["subsampling_channels"] == -1:
        sizes["subsampling_channels"] = sizes["width"]
    around = [sizes["kernel"] // 2] * 2
    context = values.get("conv_context_size") or around
    expect_only({"conv_context_size": context}, {"conv_context_size": around}, "encoder")
    context = values.get("att_context_size") or (-1, -1)
    # With unequal sides NeMo adds the positions of one distance to the scores of another, which
    # gives other numbers than asrkit's.
    local = values.get("self_attention_model", "rel_pos") == "rel_pos_local_attn"
    expect(
        not local or context[0] == context[-1] > 0,
        "encoder.att_context_size",
        "equal sides of local attention",
        context,
    )
    return FastConformerConfig(bins=bins, context=context, **sizes)


def our_name(name: str) -> str:
    """asrkit's name of a NeMo weight, or an unknown name itself."""
    if name.startswith(("transf_decoder.", "log_softmax.", "encoder_decoder_proj.")):
        return replaced(name, LAYERS["canary_in_nemo"])
    return replaced(jasper.our_name(name), LAYERS["conformer"] | LAYERS["nemo"])
