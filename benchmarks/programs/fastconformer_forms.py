"""Forms of FastConformer checkpoints that other programs read; see FORMS and program_worker.py."""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from asrkit.features import FeatureConfig, mel_bands
from asrkit.models import CTCModel, load_checkpoint
from benchmarks.peers.peer_encoders import load, nemo_settings, transformers_settings
from benchmarks.programs.fastconformer_programs import MAX_SYMBOLS

# Inputs, then outputs, of predictor and joint in one graph, as NeMo exports them
JOINED = "targets target_length input_states_1 input_states_2 encoder_outputs"
JOINED += " prednet_lengths output_states_1 output_states_2 outputs"


def write_exported(
    source: str, target: str, format: Literal["onnx", "openvino"], int8: bool
) -> None:
    """Write a checkpoint as `asrkit export` does, with the mel filters for a plain script, and in
    ONNX also under the names that onnx-asr reads, which are those of NeMo's exporter.
    """
    from asrkit.export import export
    from asrkit.export.graphs import state_sizes

    checkpoint: Any = load_checkpoint(source)
    export(checkpoint, target, format=format, int8=int8)
    folder = Path(target)
    features = FeatureConfig(**checkpoint.features)
    np.save(folder / "bands.npy", mel_bands(features).numpy())
    model = checkpoint.model
    kind = "ctc"
    states: list[int] = []
    if not isinstance(model, CTCModel):
        kind = "tdt" if model.durations else "rnnt"
        layers, width = state_sizes(model)
        states = [layers, 1, width]
    settings = {"model_type": f"nemo-conformer-{kind}", "features_size": features.bins}
    (folder / "config.json").write_text(json.dumps({**settings, "states": states}))
    if format == "onnx":
        (folder / "vocab.txt").hardlink_to(folder / "tokens.txt")
        if states:
            write_joined(folder, ".int8.onnx" if int8 else ".onnx")


def write_joined(folder: Path, suffix: str) -> None:
    """Add a transducer's graphs by NeMo's names: the encoder, and predictor and joint as one."""
    import onnx

    (folder / f"encoder-model{suffix}").hardlink_to(folder / f"encoder{suffix}")
    decoder, joiner = (onnx.load(folder / f"{name}{suffix}") for name in ("decoder", "joiner"))
    predicted = [("outputs", "decoder_outputs")]
    joined = onnx.compose.merge_models(decoder, joiner, predicted, prefix1="decoder/")
    ports = [*joined.graph.input, *joined.graph.output]
    names = dict(zip([port.name for port in ports], JOINED.split(), strict=True))
    for port in ports:
        port.name = names[port.name]
    for node in joined.graph.node:
        for edges in (node.input, node.output):
            edges[:] = [names.get(edge, edge) for edge in edges]
    onnx.save(joined, folder / f"decoder_joint-model{suffix}")


def write_transformers(source: str, target: str) -> None:
    """Write a CTC checkpoint as a folder of transformers' Parakeet."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import (
        ParakeetCTCConfig,
        ParakeetFeatureExtractor,
        ParakeetForCTC,
        ParakeetTokenizer,
    )

    from asrkit.models.checkpoints.huggingface import our_name

    checkpoint: Any = load_checkpoint(source)
    sizes = vars(checkpoint.model.config.encoder)
    blank = checkpoint.model.blank
    encoder = transformers_settings(sizes)
    config = ParakeetCTCConfig(vocab_size=blank + 1, pad_token_id=blank, encoder_config=encoder)
    model = ParakeetForCTC(config)
    load(model, "", our_name, checkpoint.model.state_dict())
    model.save_pretrained(target)
    ParakeetFeatureExtractor(feature_size=sizes["bins"]).save_pretrained(target)
    scores = [(piece, -float(n)) for n, piece in enumerate(checkpoint.tokenizer.pieces())]
    words = Tokenizer(models.Unigram([*scores, ("<pad>", 0.0)], unk_id=0))
    words.decoder = decoders.Metaspace()
    tokenizer = ParakeetTokenizer(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.save_pretrained(target)


def write_nemo(source: str, target: str) -> None:
    """Write a CTC or RNN-T checkpoint as NeMo's archive."""
    from nemo.collections.asr.models import EncDecCTCModelBPE, EncDecRNNTBPEModel
    from omegaconf import OmegaConf, open_dict

    from asrkit.models.checkpoints.nemo import our_name

    checkpoint: Any = load_checkpoint(source)
    model = checkpoint.model
    sizes = vars(model.config.encoder)
    modules = "nemo.collections.asr.modules."
    V = model.blank
    features = {"window_size": 0.025, "features": sizes["bins"], "n_fft": 512, "dither": 0.0}
    config = {
        "sample_rate": 16_000,
        "preprocessor": {"_target_": f"{modules}AudioToMelSpectrogramPreprocessor", **features},
        "encoder": {"_target_": f"{modules}ConformerEncoder", **nemo_settings(sizes)},
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": MAX_SYMBOLS}},
    }
    kind = EncDecCTCModelBPE
    if isinstance(model, CTCModel):
        width = sizes["width"]
        config["decoder"] = {
            "_target_": f"{modules}ConvASRDecoder",
            "feat_in": width,
            "num_classes": V,
            "vocabulary": [],
        }
    else:
        kind = EncDecRNNTBPEModel
        width = model.config.predictor.width
        net = {"pred_hidden": width, "pred_rnn_layers": model.config.predictor.layers}
        joint = {"joint_hidden": model.config.joint_width, "activation": "relu"}
        joint |= {"encoder_hidden": sizes["width"], "pred_hidden": width}
        config["model_defaults"] = {"enc_hidden": sizes["width"], **net}
        config["decoder"] = {"_target_": f"{modules}RNNTDecoder", "prednet": net, "vocab_size": V}
        config["joint"] = {
            "_target_": f"{modules}RNNTJoint",
            "jointnet": joint,
            "num_classes": V,
            "vocabulary": [],
        }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(checkpoint.tokenizer.model)
        lines = (f"{piece}\n" for piece in checkpoint.tokenizer.pieces())
        Path(folder, "vocab.txt").write_text("".join(lines))
        config["tokenizer"] = {"dir": folder, "type": "bpe"}
        archive = kind(OmegaConf.create(config)).eval()
        for part in {"encoder", "decoder", "joint"} & config.keys():
            load(getattr(archive, part), f"{part}.", our_name, model.state_dict())
        with open_dict(archive.cfg):  # `transcribe` reads it
            archive.cfg.validation_ds = {"manifest_filepath": None}
        archive.save_to(target)


FORMS: dict[str, Callable[[str, str], None]] = {  # source and target path
    "onnx": partial(write_exported, format="onnx", int8=False),
    "onnx-int8": partial(write_exported, format="onnx", int8=True),
    "ir": partial(write_exported, format="openvino", int8=False),
    "ir-int8": partial(write_exported, format="openvino", int8=True),
    "parakeet": write_transformers,
    "model.nemo": write_nemo,
}
