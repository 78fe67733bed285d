"""Hugging Face folders of transformers' Parakeet (CTC, RNN-T, TDT), Canary and Whisper.

transformers leaves defaults out of config.json: a missing key has the value that transformers 5.23
gives it. Unsupported values of keys that no weight reveals are refused by name. layerdrop, an
encoder's max_position_embeddings and the initialisers do not matter for a trained model.
"""

from pathlib import Path

from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import canary, ctranslate2, whisper
from asrkit.models.checkpoints.folders import (
    expect_only,
    extractor,
    read_json,
    read_weights,
    translated,
    vocabulary,
)
from asrkit.models.checkpoints.names import LAYERS, SETTINGS
from asrkit.models.checkpoints.own import Contents, Values
from asrkit.models.checkpoints.weights import renamed, replaced, shape_conformer
from asrkit.models.ctc import CTCConfig
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.presets import TDT, ModelConfig
from asrkit.models.transducer import LSTMConfig, TransducerConfig
from asrkit.shapes import expect
from asrkit.text import JsonTokenizer

BLANKS = {  # kinds of Parakeet, and the key of the blank token
    "parakeet_ctc": "pad_token_id",
    "parakeet_rnnt": "blank_token_id",
    "parakeet_tdt": "blank_token_id",
}
ENCODER_ONLY = {"hidden_act": "silu", "subsampling_conv_stride": 2}
UNUSED = ("preprocessor.featurizer.",)  # left by a conversion; transformers ignores them too


def read(path: Path) -> Contents:
    """Contents of the folder `path` of transformers or CTranslate2.

    Raises:
        ValueError: A file is damaged or missing, or has a setting that is not supported.
    """
    values = read_json(path, "config.json")
    if "model_type" not in values:
        wanted = "a model_type in config.json, or CTranslate2's model.bin"
        expect((path / "model.bin").is_file(), "model", wanted, "neither")
        return ctranslate2.read(path, values)
    kind = str(values.get("model_type"))
    kinds = [*BLANKS, "canary", "whisper"]
    expect(kind in kinds, "model_type", f"one of {kinds}", repr(kind))
    if kind == "whisper":
        return whisper.read(path, values)
    section = values["encoder_config"]
    expect_only(section, ENCODER_ONLY, "encoder_config")
    encoder = FastConformerConfig(**translated(section, SETTINGS["parakeet_encoder"]))
    text = (path / "tokenizer.json").read_text(encoding="utf-8")
    version = values.get("transformers_version", "of unknown version")
    notes = {"source": f"transformers {version}, {kind}"}
    config: ModelConfig
    if kind == "canary":
        ids = vocabulary(text)
        tokens = max(ids.values()) + 1
        config, prompt = canary.read_folder(values, ids, encoder)
        notes |= prompt.to_notes()
    else:
        config, tokens = _parakeet(values, encoder)
    if isinstance(config, TransducerConfig):
        notes["max_symbols"] = values.get("max_symbols_per_step", 10)
    weights = renamed(read_weights(path), our_name, UNUSED)
    shape_conformer(weights)
    if isinstance(config, AEDConfig):
        canary.shape_decoder(weights, config)
    settings = extractor(path)
    expect_only(
        settings, {"feature_extractor_type": "ParakeetFeatureExtractor"}, "preprocessor_config.json"
    )
    features = translated(settings, SETTINGS["parakeet_features"])
    features["window_s"] /= features["rate_hz"]
    features["hop_s"] /= features["rate_hz"]
    features["preemphasis"] = features["preemphasis"] or 0.0  # null: no preemphasis
    return config, weights, JsonTokenizer(text, tokens), features, notes


def _parakeet(
    values: Values, encoder: FastConformerConfig
) -> tuple[CTCConfig | TransducerConfig, int]:
    """Config of a Parakeet and its number of tokens; the blank has to be the token after them."""
    kind = values["model_type"]
    default = 1025 if kind == "parakeet_ctc" else 8193
    tokens = values.get("vocab_size", default) - 1
    expect_only(values, {BLANKS[kind]: tokens}, "config.json")
    if kind == "parakeet_ctc":
        return CTCConfig(vocab_size=tokens, encoder=encoder), tokens
    width = values.get("decoder_hidden_size", 640)
    durations = values.get("durations", TDT) if kind == "parakeet_tdt" else ()
    return TransducerConfig(
        vocab_size=tokens,
        encoder=encoder,
        joint_width=width,
        activation=values.get("hidden_act", "relu"),
        ctc=False,
        predictor=LSTMConfig(width=width, layers=values.get("num_decoder_layers", 2)),
        durations=durations,
    ), tokens


def our_name(name: str) -> str:
    """asrkit's name of a weight of transformers' Parakeet or Canary, or an unknown name itself.

    A Canary has the encoder of a Parakeet.
    """
    if name.startswith(("model.decoder.", "proj_out.")):
        return replaced(name, LAYERS["canary_in_transformers"])
    return replaced(name.removeprefix("model."), LAYERS["conformer"] | LAYERS["parakeet"])
