"""Hugging Face folders of transformers' WhisperForConditionalGeneration.

A key that is missing from config.json has the value that transformers 5.23 gives it.
generation_config.json overrides config.json. layerdrop, dropout of activations and of attention
weights, SpecAugment and the initialisers do not matter for a trained model.
"""

from pathlib import Path

from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints.folders import (
    expect_only,
    extractor,
    read_json,
    read_weights,
    translated,
    vocabulary,
)
from asrkit.models.checkpoints.names import LAYERS, SETTINGS
from asrkit.models.checkpoints.own import Contents, Values, Weights
from asrkit.models.checkpoints.weights import drop_tied_output, join, renamed, replaced
from asrkit.models.prompts import LANGUAGE, SUPPRESSED, TASK, WHISPER, PromptFormat, languages_of
from asrkit.models.whisper import WhisperEncoderConfig
from asrkit.text import JsonTokenizer, byte_level_json

_ONLY = {"scale_embedding": False, "activation_function": "gelu"}
_MULTILINGUAL = 51_865  # tokens of the smallest multilingual vocabulary; English ones have fewer
_EXTRACTOR_ONLY = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "padding_value": 0.0,
    "sampling_rate": 16_000,  # at other rates transformers' mel bands end at 8 kHz too
    "dither": 0.0,
}
# Arguments of FeatureConfig that the code of transformers' extractor fixes.
_EXTRACTOR_CODE = {
    "window": "hann",
    "periodic": True,
    "preemphasis": 0.0,
    "power": 2,
    "guard": "clamp",
    "log_guard": 1e-10,
    "range_db": 80.0,
    "normalization": "whisper",
    "edges": "reflect",
}
START = "<|startoftranscript|>"
END = "<|endoftext|>"  # the first of the special tokens, which have no text
NO_TIMES = "<|notimestamps|>"


def read(path: Path, values: Values) -> Contents:
    """Contents of the folder `path`, whose config.json holds `values`.

    Raises:
        ValueError: A file is missing or damaged, or has a setting that is not supported.
    """
    expect_only(values, _ONLY, "config.json")
    generation = read_json(path, "generation_config.json")
    weights = renamed(read_weights(path), _our_name)
    # Queries, keys and values become one layer; the keys have no bias, so theirs is zero.
    for name in [name for name in weights if name.endswith(".k.weight")]:
        bias = name.removesuffix("weight") + "bias"
        weights.setdefault(bias, weights[name].new_zeros(weights[name].shape[:1]))
    join(weights, "qkv", "qkv")
    join(weights, "kv", "key_value")
    version = values.get("transformers_version", "of unknown version")
    source = f"transformers {version}, whisper"
    return contents(values | generation, _tokenizer_json(path), weights, extractor(path), source)


def contents(
    values: Values,
    text: str,
    weights: Weights,
    settings: Values,
    source: str,
) -> Contents:
    """Contents of a Whisper.

    The notes have the prompt format; under `SUPPRESSED` the tokens that decoding never writes
    ("always") or never writes first ("first"); and under `WHISPER` the tokens for timestamps.

    Args:
        values: Contents of config.json and generation_config.json, as in transformers.
        text: Text of tokenizer.json.
        weights: Weights by asrkit's names; that of the output, if any, as "proj_out.weight".
        settings: Contents of preprocessor_config.json.
        source: Program that wrote the files, for the notes.

    Raises:
        ValueError: A setting is not supported.
    """
    ids = vocabulary(text)
    encoder = translated(values, SETTINGS["whisper_encoder"])
    decoder = translated(values, SETTINGS["whisper_decoder"])
    config = AEDConfig(
        encoder=WhisperEncoderConfig(**encoder),
        bos=ids[START],
        eos=ids[END],
        activation="gelu",
        positions="learned",
        embedding_norm=False,
        output_bias=False,
        **decoder | {"pad": ids[END] if decoder["pad"] is None else decoder["pad"]},
    )
    template, languages = [START, NO_TIMES], ["en"]
    if values.get("is_multilingual", config.vocab_size >= _MULTILINGUAL):
        template, languages = [START, LANGUAGE, TASK, NO_TIMES], languages_of([*ids])
    prompt = PromptFormat(template=template, ids=ids, languages=languages)
    first = values.get("begin_suppress_tokens", (220, 50_256))
    notes = {
        "source": source,
        **prompt.to_notes(),
        SUPPRESSED: {
            "always": sorted(set(values.get("suppress_tokens") or ())),
            "first": sorted(set(first or ())),
        },
        WHISPER: {
            "no_times": ids[NO_TIMES],  # no_speech is the token before; times from 0.00 s follow it
            "most_first": values.get("max_initial_timestamp_index"),
        },
    }
    drop_tied_output(weights, "proj_out.weight")
    return config, weights, JsonTokenizer(text, ids[END]), feature_settings(settings), notes


def _our_name(name: str) -> str:
    """asrkit's name of a weight, also of a model that was saved without its head."""
    if name.startswith(("encoder.", "decoder.")):
        name = f"model.{name}"
    return replaced(name, LAYERS["whisper_in_transformers"])


def _tokenizer_json(path: Path) -> str:
    """The text of tokenizer.json, or the same made from the older files."""
    if (path / "tokenizer.json").is_file():
        return (path / "tokenizer.json").read_text(encoding="utf-8")
    ids = read_json(path, "vocab.json") | read_json(path, "added_tokens.json")
    lines = (path / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return byte_level_json(ids, merges)


def feature_settings(values: Values) -> Values:
    """Arguments of FeatureConfig from the contents of preprocessor_config.json."""
    expect_only(values, _EXTRACTOR_ONLY, "preprocessor_config.json")
    features = translated(values, SETTINGS["whisper_features"])
    features["window_s"] = features["fft"] / features["rate_hz"]
    features["hop_s"] /= features["rate_hz"]
    features["fill_s"] = float(features["fill_s"])
    return _EXTRACTOR_CODE | features
