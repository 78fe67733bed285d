"""NeMo's `.nemo` archives of FastConformer models with CTC, RNN-T, TDT, CTC beside a transducer or
an attention decoder (Canary), and of Jasper.

They become asrkit's config and weights. Keys whose values no weight shows are in `ONLY`; others
that asrkit does not know give weights of other names or shapes. Names of keys and classes are those
of nemo_toolkit 3.0.0.
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
SECTIONS = (  # of an archive's config, with all that asrkit reads
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
MOST_VALUES = 10**6  # in them: aliases of YAML make billions of a few lines
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
NO_WEIGHTS = (  # beginnings of names: metrics, tables, features
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
    """Contents of the archive `path`, which is read where it lies.

    Raises:
        ValueError: Something is damaged, missing or not supported; it is named.
    """
    import yaml

    with tarfile.open(path) as tar:
        members: dict[str, Any] = {}  # open files
        for member in filter(tarfile.TarInfo.isfile, tar):
            members[member.name.removeprefix("./")] = tar.extractfile(member)
        whole = yaml.safe_load(members["model_config.yaml"])
        count = itertools.count(1)
        config = {key: _followed(whole[key], whole, count) for key in SECTIONS if key in whole}
        model, tokenizer, features, notes = _settings(config, members)
        stored = members["model_weights.ckpt"]
        if not isinstance(tar.fileobj, io.BufferedReader):
            stored = io.BytesIO(stored.read())  # of gzip, which goes back from the start only
        weights = saved(stored, f"{path.name}: model_weights.ckpt")
    _expect_features(weights, FeatureConfig(**features))
    kept = {name: one for name, one in weights.items() if not name.startswith(NO_WEIGHTS)}
    del weights
    found = renamed(kept, our_name)
    shape_conformer(found)
    if isinstance(model, AEDConfig):
        canary.shape_decoder(found, model)
    return model, found, tokenizer, features, {"source": path.name, **notes}


def _followed(value: Any, root: Any, count: Iterator[int]) -> Any:
    """`value` with references such as ${encoder.d_model} followed, to None where they miss.

    `count` counts its values: ValueError for more than `MOST_VALUES`.
    """
    expect(next(count) <= MOST_VALUES, "model_config.yaml", f"at most {MOST_VALUES} values", "more")
    if isinstance(value, dict):
        return {key: _followed(item, root, count) for key, item in value.items()}
    if isinstance(value, list):
        return [_followed(item, root, count) for item in value]
    reference = isinstance(value, str) and re.fullmatch(r"\$\{([\w.]+)\}", value)
    if not reference:
        return value
    found = root
    for key in reference[1].split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return _followed(found, root, count)


def _expect_features(weights: Weights, config: FeatureConfig) -> None:
    """ValueError unless an archive's own window and mel bands are those of `config`."""
    make_window = getattr(torch, f"{config.window}_window")
    window = make_window(config.window_samples, periodic=False)
    wanted = f"a {config.window} window, not periodic, and Slaney's mel bands up to rate / 2"
    known = {
        "preprocessor.featurizer.window": window,
        "preprocessor.featurizer.fb": mel_bands(config).T[None],
    }
    for name, ours in known.items():
        held = weights[name]
        rounding = max(1e-5, torch.finfo(held.dtype).eps)  # of half precision
        same = held.shape == ours.shape
        same = same and torch.allclose(held.float(), ours, rtol=rounding, atol=1e-6)
        expect(same, name, wanted, f"other numbers, of shape {tuple(held.shape)}")


def _settings(
    config: Values, members: dict[str, Any]
) -> tuple[ModelConfig, Tokenizer, Values, Values]:
    """Model, tokenizer, features and notes of an archive's config and files."""
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
    most = greedy.get("max_symbols") or greedy.get("max_symbols_per_step")
    notes["max_symbols"] = most or 10
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
    """Arguments of FeatureConfig; windows of NeMo are never periodic, which is the default."""
    expect_only(values, ONLY["preprocessor"], "preprocessor")
    rate = values.get("sample_rate", 16_000)
    window = int(float(values.get("window_size", 0.02)) * rate)  # NeMo cuts off
    hop = int(float(values.get("window_stride", 0.01)) * rate)
    single = torch.finfo(torch.float32)
    guard: Any = values.get("log_zero_guard_value", 2.0**-24)
    log_guard = {"tiny": single.tiny, "eps": single.eps}.get(guard, guard)
    normalize = values.get("normalize", "per_feature")
    return {
        "rate_hz": rate,
        "window_s": window / rate,
        "hop_s": hop / rate,
        "bins": values.get("features", 64),
        "fft": values.get("n_fft") or 2 ** (window - 1).bit_length(),
        "window": values.get("window", "hann"),
        "preemphasis": float(values.get("preemph", 0.97) or 0.0),
        "power": values.get("mag_power", 2.0),
        "guard": values.get("log_zero_guard_type", "add"),
        "log_guard": float(log_guard),  # YAML reads 1e-5 as text
        "normalization": "none" if normalize in ("NA", "", None, False) else normalize,
    }


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
    # With unequal sides NeMo adds the position terms of one distance to the scores of another,
    # which are not our numbers.
    local = values.get("self_attention_model", "rel_pos") == "rel_pos_local_attn"
    expect(
        not local or context[0] == context[-1] > 0,
        "encoder.att_context_size",
        "equal sides of local attention",
        context,
    )
    return FastConformerConfig(bins=bins, context=context, **sizes)


def our_name(name: str) -> str:
    """asrkit's name of a NeMo weight; one that it does not know keeps its own."""
    if name.startswith(("transf_decoder.", "log_softmax.", "encoder_decoder_proj.")):
        return replaced(name, LAYERS["canary_in_nemo"])
    return replaced(jasper.our_name(name), LAYERS["conformer"] | LAYERS["nemo"])
