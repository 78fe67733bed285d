"""Small FastConformer models of known weights and the files they are published in: shared by the peers' process and the tests.

Weights come from a parameter's name and shape (`seeded`), sound from a formula (`speech`), so both sides make the same. Nothing of
asrkit is imported here.
"""

import hashlib
import io
import json
import math
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

MODEL = "0123_tokenizer.model"
V = 31  # tokens; blank is the next
ENCODER = {
    "layers": 2,
    "width": 16,
    "heads": 2,
    "channels": 4,
    "kernel": 9,
    "bins": 80,
    "subsampling": 8,
    "bias": True,
    "scale": True,
}
Case = dict[str, Any]
# Blocks of a Jasper: filters, repeat, kernel, stride, dilation, dense.
JASPER = [
    (16, 1, 5, 2, 1, False),
    (20, 1, 7, 2, 1, False),
    (24, 2, 3, 1, 1, True),
    (32, 3, 5, 1, 1, True),
    (28, 1, 7, 1, 2, False),
    (24, 1, 1, 1, 1, False),
]
DURATIONS = [0, 1, 2, 3, 4]


def golden_cases() -> dict[str, Case]:
    """What both peers compute: the model's kind, how its encoder departs from ENCODER, LSTM layers, durations."""
    return {
        "ctc": {"kind": "ctc"},
        "rnnt": {"kind": "rnnt", "lstm": 1, "durations": [], "bias": False},
        "tdt": {"kind": "tdt", "lstm": 2, "durations": DURATIONS, "scale": False},
    }


def folder_cases() -> dict[str, Case]:
    """Those, and other sizes, of transformers."""
    rnnt = {"kind": "rnnt", "lstm": 2, "durations": [], "bins": 128, "subsampling": 4}
    return {**golden_cases(), "rnnt-128": rnnt}


def nemo_cases() -> dict[str, Case]:
    """Those, and what NeMo alone has: hybrids, Jasper, limited context; `keys` are of its config."""
    local = {"encoder.self_attention_model": "rel_pos_local_attn"}
    magnitudes = {
        "preprocessor.window": "hamming",
        "preprocessor.normalize": "all_features",
        "preprocessor.mag_power": 1.0,
        "preprocessor.log_zero_guard_type": "clamp",
        "preprocessor.log_zero_guard_value": "eps",
        "preprocessor.preemph": None,
    }
    plain = {
        "preprocessor.window": "blackman",
        "preprocessor.normalize": "NA",
        "preprocessor.window_size": 0.02,
    }
    return {
        **golden_cases(),
        "ctc-local": {
            "kind": "ctc",
            "context": [6, 6],
            "subsampling": 4,
            "keys": local,
        },
        "ctc-near": {"kind": "ctc", "context": [4, 2], "subsampling": 4},
        "ctc-magnitudes": {"kind": "ctc", "keys": magnitudes},
        "ctc-plain": {"kind": "ctc", "keys": plain},
        "ctc-jasper": {
            "kind": "ctc",
            "bins": 64,
            "width": 24,
            "blank": 2.0,
            "jasper": JASPER,
        },
        "rnnt-tanh": {
            "kind": "rnnt",
            "lstm": 2,
            "durations": [],
            "bins": 128,
            "context": [8, 0],
            "keys": {"joint.jointnet.activation": "tanh"},
        },
        "tdt-leaps": {
            "kind": "tdt",
            "lstm": 1,
            "durations": [0, 1, 2, 4, 8],
            "subsampling": 4,
        },
        "hybrid": {"kind": "hybrid", "lstm": 1, "durations": DURATIONS},
    }


def draws(seed: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of mean 0 and variance 1 from the bits of PCG64, which no version of NumPy changes."""
    source = np.random.PCG64(
        int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    )
    bits = source.random_raw(math.prod(shape)) >> np.uint64(11)
    return (bits.reshape(shape) * 2.0**-53 - 0.5) * math.sqrt(12)


def seeded(name: str, shape: tuple[int, ...]) -> Tensor:
    """The parameter `name`: drawn with its name as the seed, in sizes that keep signals alive and logits apart."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(1)
    values = draws(name, shape)
    if name.endswith("running_var"):
        values = 0.5 + values**2
    elif len(shape) == 1:  # norms' weights around 1, everything else small
        values = (1.0 if name.endswith("weight") else 0.0) + 0.1 * values
    elif "embed" not in name:
        louder = "joint.pred" in name or "decoder_projector" in name
        values *= (3.0 if louder else 1.0) / math.sqrt(math.prod(shape[1:]))
        if spread(name):
            # rows of sum zero: what all frames share favours no label
            values = 6.0 * (values - values.mean(1, keepdims=True))
    return torch.from_numpy(values).float()


def spread(name: str) -> bool:
    """Whether `name` is a last layer's: its logits are spread, so that no arg-max is nearly a tie."""
    heads = ("joint.head", "joint_net.2", "ctc_head", "decoder_layers.0")
    return any(part in name for part in heads)


def fill(state: dict[str, Tensor], blank: float = 4.0) -> dict[str, Tensor]:
    """Seeded weights for the names and shapes of `state`; `blank` is added to its bias. NeMo's window and mel filters stay."""
    made = {}
    for name, value in state.items():
        kept = name.endswith(("featurizer.window", "featurizer.fb"))
        made[name] = value if kept else seeded(name, tuple(value.shape))
    for name in made:
        if name.endswith("prediction.embed.weight"):
            made[name][-1] = 0  # NeMo keeps blank's embedding at zero
        if spread(name) and name.endswith("bias"):
            made[name][V] += blank  # blank, or a label on every frame
    return made


def speech(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Voiced sound: harmonics of a gliding pitch under a moving envelope, and a little noise. (B, S), lengths (B,)."""
    rows = np.zeros((len(lengths), max(lengths)))
    for b, n in enumerate(lengths):
        t = np.arange(n) / 16_000
        pitch = 110 + 20 * b + 40 * np.sin(2 * np.pi * (1.3 + 0.2 * b) * t)
        phase = 2 * np.pi * np.cumsum(pitch) / 16_000
        for k in range(1, 13):
            envelope = 1 + np.sin(2 * np.pi * (3 + k) * t + k)
            rows[b, :n] += 0.1 * np.sin(k * phase) / k * envelope
        rows[b, :n] += 0.01 * draws(f"noise {b}", (n,))
    return torch.from_numpy(rows).float(), torch.tensor(lengths)


# 1.5 s and shorter; 640 samples are one frame after a subsampling of 4 or 8. None is a whole number of frames but the last.
LENGTHS = (24_005, 15_999, 8_077, 640)


# Labels for which the joint's logits are compared: a lattice of 6 rows for each utterance.
TARGETS = torch.tensor(
    [[5, 2, 9, 9, 1], [3, 3, 30, 4, 8], [7, 1, 2, 11, 6], [12, 20, 5, 5, 10]]
)
# Which numbers of a stage are committed: (utterance, frames, rest).
PLACES = {
    "features": (0, slice(3, 150, 49), slice(None, None, 8)),
    "encoded": (1, slice(0, 13, 2), slice(None)),
    "log_probs": (2, slice(0, 7, 2), slice(None)),
    "joint": (2, slice(0, 7, 3), slice(0, 6, 2)),
}


def picked(stage: str, values: Tensor) -> Tensor:
    """Numbers of `values` that are committed, in one row."""
    utterance, frames, rest = PLACES[stage]
    return values[utterance, frames, rest].flatten()


def pieces() -> list[tuple[str, float, int]]:
    """The vocabulary: (piece, score, type) of V SentencePiece pieces; type 1 is normal, 2 unknown."""
    joined = "▁t he at ▁a ▁the is ea in ▁s on ▁h ▁se th ee an ▁m m f"
    found = [*"▁etahsnoicrd", *joined.split()]
    normal = [(piece, -float(i), 1) for i, piece in enumerate(found)]
    return [("<unk>", 0.0, 2), *normal]


def model_of_pieces(rows: list[tuple[str, float, int]]) -> bytes:
    """A BPE model of SentencePiece: (piece, score, type) of each; type 1 is normal, 2 unknown, 4 a symbol that a user defined."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    for piece, score, kind in rows:
        model.pieces.add(piece=piece, score=score, type=kind)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    return model.SerializeToString()


def sentencepiece_model() -> bytes:
    """The vocabulary as a BPE model of SentencePiece."""
    return model_of_pieces(pieces())


def tokenizer_json(texts: list[str], added: dict[str, int]) -> dict[str, Any]:
    """A vocabulary as transformers' converter writes it: BPE that merges `pieces`, and added tokens."""
    words = {row[0] for row in pieces()} - {"<unk>"}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in texts
        if piece in words
        for cut in range(1, len(piece))
        if {piece[:cut], piece[cut:]} <= words
    ]
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    metaspace = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    }
    return {
        "version": "1.0",
        "pre_tokenizer": metaspace,
        "decoder": metaspace,
        "added_tokens": [
            {"id": id_, "content": text, **marks, "special": True}
            for text, id_ in added.items()
        ],
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": False,
            "vocab": {text: id_ for id_, text in enumerate(texts)},
            "merges": merges,
        },
    }


def parakeet_json(kind: str) -> dict[str, Any]:
    """The tokenizer of a Parakeet."""
    blank = "<pad>" if kind == "ctc" else "<blank>"
    return tokenizer_json([row[0] for row in pieces()], {"<unk>": 0, blank: V})


def write_nemo(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Any],
    mode: Any = "w",
    files: dict[str, bytes] | None = None,
) -> Path:
    """A .nemo archive: a tar of model_config.yaml, model_weights.ckpt and the tokenizer's files."""
    import yaml

    stored = io.BytesIO()
    torch.save(weights, stored)
    members = {
        "model_config.yaml": yaml.safe_dump(config, sort_keys=False).encode(),
        "model_weights.ckpt": stored.getvalue(),
        **(files or {MODEL: sentencepiece_model()}),
    }
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_folder(
    path: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder: configs, safetensors weights, tokenizer."""
    from safetensors.torch import save_file

    path.mkdir(exist_ok=True)
    extractor = {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": config["encoder_config"]["num_mel_bins"],
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 512,
        "win_length": 400,
        "preemphasis": 0.97,
    }
    parts = {
        "config.json": config,
        "preprocessor_config.json": extractor,
        "tokenizer.json": tokenizer
        or parakeet_json(config["model_type"].removeprefix("parakeet_")),
    }
    for name, part in parts.items():
        (path / name).write_text(json.dumps(part, ensure_ascii=False))
    save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def nemo_config(case: Case) -> dict[str, Any]:
    """The archive's yaml, with the keys of NeMo's published models."""
    how = ENCODER | case
    kind = case["kind"]
    labels = [piece for piece, _, _ in pieces()]
    modules = "nemo.collections.asr.modules."
    config: dict[str, Any] = {
        "sample_rate": 16000,
        "log_prediction": False,
        "skip_nan_grad": False,
        "labels": labels,
        "tokenizer": {
            "dir": "tok",
            "type": "bpe",
            "model_path": f"nemo:{MODEL}",
        },
        "preprocessor": {
            "_target_": f"{modules}AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": how["bins"],
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": 1e-5,
            "pad_to": 0,
            "pad_value": 0.0,
        },
        "encoder": {
            "_target_": f"{modules}ConformerEncoder",
            "feat_in": how["bins"],
            "feat_out": -1,
            "n_layers": how["layers"],
            "d_model": how["width"],
            "use_bias": how["bias"],
            "subsampling": "dw_striding",
            "subsampling_factor": how["subsampling"],
            "subsampling_conv_channels": how["channels"],
            "causal_downsampling": False,
            "reduction": None,
            "reduction_position": None,
            "reduction_factor": 1,
            "ff_expansion_factor": 4,
            "self_attention_model": "rel_pos",
            "n_heads": how["heads"],
            "att_context_size": how.get("context", [-1, -1]),
            "att_context_style": "regular",
            "xscaling": how["scale"],
            "untie_biases": True,
            "pos_emb_max_len": 5000,
            "conv_kernel_size": how["kernel"],
            "conv_norm_type": "batch_norm",
            "conv_context_size": None,
            "dropout": 0.1,
            "dropout_pre_encoder": 0.1,
            "dropout_emb": 0.0,
            "dropout_att": 0.1,
            "stochastic_depth_drop_prob": 0.0,
            "stochastic_depth_mode": "linear",
            "stochastic_depth_start_layer": 1,
        },
    }
    if "jasper" in how:
        config["encoder"] = jasper_config(how)
    ctc = {
        "_target_": f"{modules}ConvASRDecoder",
        "feat_in": how["width"],
        "num_classes": V,
        "vocabulary": labels,
    }
    if kind == "ctc":
        config |= {"decoder": ctc, "decoding": {"strategy": "greedy_batch"}}
        return keyed(config | {"target": CLASSES[kind]}, case)
    durations = case["durations"]
    config |= {
        "decoder": {
            "_target_": f"{modules}RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {
                "pred_hidden": 24,
                "pred_rnn_layers": case["lstm"],
                "t_max": None,
                "dropout": 0.2,
            },
            "vocab_size": V,
        },
        "joint": {
            "_target_": f"{modules}RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": False,
            "fused_batch_size": 4,
            "num_classes": V,
            "vocabulary": labels,
            "num_extra_outputs": len(durations),
            "jointnet": {
                "joint_hidden": 20,
                "activation": "relu",
                "dropout": 0.2,
                "encoder_hidden": how["width"],
                "pred_hidden": 24,
            },
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}},
        "target": CLASSES[kind],
    }
    if durations:
        config["decoding"] |= {"model_type": "tdt", "durations": durations}
    if kind == "hybrid":
        config["aux_ctc"] = {"ctc_loss_weight": 0.3, "use_cer": False, "decoder": ctc}
    return keyed(config, case)


def jasper_config(how: Case) -> dict[str, Any]:
    """The encoder's section of a Jasper, with the keys of NeMo's published config."""
    blocks = []
    for filters, repeat, kernel, stride, dilation, dense in how["jasper"]:
        block = {
            "filters": filters,
            "repeat": repeat,
            "kernel": [kernel],
            "stride": [stride],
            "dilation": [dilation],
            "dropout": 0.2,
            "residual": dense,
            "residual_dense": dense,
        }
        blocks.append(block)
    return {
        "_target_": "nemo.collections.asr.modules.ConvASREncoder",
        "feat_in": how["bins"],
        "activation": "relu",
        "conv_mask": True,
        "jasper": blocks,
    }


def keyed(config: dict[str, Any], case: Case) -> dict[str, Any]:
    """`config` with the values of the case's dotted `keys`."""
    for key, value in case.get("keys", {}).items():
        *sections, last = key.split(".")
        section = config
        for name in sections:
            section = section[name]
        section[last] = value
    return config


MODELS = "nemo.collections.asr.models."
CLASSES = {
    "ctc": MODELS + "ctc_bpe_models.EncDecCTCModelBPE",
    "rnnt": MODELS + "rnnt_bpe_models.EncDecRNNTBPEModel",
    "tdt": MODELS + "rnnt_bpe_models.EncDecRNNTBPEModel",
    "hybrid": MODELS + "hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel",
}


def folder_config(case: Case) -> dict[str, Any]:
    """The folder's config.json."""
    how = ENCODER | case
    kind = case["kind"]
    encoder = {
        "model_type": "parakeet_encoder",
        "hidden_size": how["width"],
        "num_hidden_layers": how["layers"],
        "num_attention_heads": how["heads"],
        "intermediate_size": 4 * how["width"],
        "hidden_act": "silu",
        "attention_bias": how["bias"],
        "convolution_bias": how["bias"],
        "conv_kernel_size": how["kernel"],
        "subsampling_factor": how["subsampling"],
        "subsampling_conv_channels": how["channels"],
        "num_mel_bins": how["bins"],
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "dropout": 0.1,
        "dropout_positions": 0.0,
        "layerdrop": 0.1,
        "activation_dropout": 0.1,
        "attention_dropout": 0.1,
        "max_position_embeddings": 5000,
        "scale_input": how["scale"],
    }
    config = {
        "architectures": [f"ParakeetFor{kind.upper()}"],
        "model_type": f"parakeet_{kind}",
        "encoder_config": encoder,
        "vocab_size": V + 1,
        "pad_token_id": V,
        "dtype": "float32",
    }
    if kind == "ctc":
        return config
    if kind == "tdt":
        config["durations"] = case["durations"]
    return config | {
        "blank_token_id": V,
        "decoder_hidden_size": 24,
        "num_decoder_layers": case["lstm"],
        "hidden_act": "relu",
        "max_symbols_per_step": 10,
        "is_encoder_decoder": True,
    }
