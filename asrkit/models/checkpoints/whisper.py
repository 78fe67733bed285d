"""Hugging Face folders of transformers' WhisperForConditionalGeneration.

A key that config.json lacks has the value that transformers 5.23 gives it. What generation_config
says of tokens goes before config.json. layerdrop, dropout of activations and of attention weights,
SpecAugment and the initialisers do not matter once trained.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from asrkit.byte_pairs import BytePairTokenizer, split_merge
from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import folders
from asrkit.models.checkpoints.own import Contents
from asrkit.models.checkpoints.renaming import drop_tied_output, join, renamed, replaced
from asrkit.models.checkpoints.settings import expect_only
from asrkit.models.prompts import LANGUAGE, SUPPRESSED, TASK, PromptFormat, languages_of
from asrkit.models.whisper import WhisperEncoderConfig
from asrkit.shapes import expect, whole

_MODEL: dict[str, Any] = {
    "vocab_size": 51_865,
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "dropout": 0.0,
    "pad_token_id": 50_256,
}
_ONLY = {"scale_embedding": False, "activation_function": "gelu"}
_GENERATION: dict[str, Any] = {
    "decoder_start_token_id": 50_257,
    "eos_token_id": 50_256,
    "suppress_tokens": None,
    "begin_suppress_tokens": (220, 50_256),
}
_MULTILINGUAL = 51_865  # tokens of the smallest multilingual vocabulary; English ones have fewer
_EXTRACTOR: dict[str, Any] = {
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
}
_EXTRACTOR_ONLY: dict[str, Any] = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "padding_value": 0.0,
    "sampling_rate": 16_000,  # of another rate, transformers' mel bands end at 8 kHz all the same
    "dither": 0.0,
}
# Arguments of FeatureConfig that are not in the file: transformers' extractor has them in its code.
_EXTRACTOR_CODE: dict[str, Any] = {
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
NO_TIMES = "<|notimestamps|>"
_ENCODER = "model.encoder."
_DECODER = "model.decoder."
# parts of transformers' names, and asrkit's
_ENCODER_NAMES = {
    "conv1.": "conv.",
    "conv2.": "stride.",
    "embed_positions.weight": "positions",
    ".self_attn_layer_norm.": ".attention_norm.",
    ".self_attn.q_proj.": ".q.",
    ".self_attn.k_proj.": ".k.",
    ".self_attn.v_proj.": ".v.",
    ".self_attn.out_proj.": ".out.",
    ".final_layer_norm.": ".feed_forward_norm.",
    ".fc1.": ".feed_forward.0.",
    ".fc2.": ".feed_forward.2.",
    "layer_norm.": "norm.",
}
_DECODER_NAMES = {
    "embed_tokens.": "embedding.",
    "embed_positions.weight": "positions",
    ".self_attn_layer_norm.": ".self_norm.",
    ".self_attn.q_proj.": ".self_attention.q.",
    ".self_attn.k_proj.": ".self_attention.k.",
    ".self_attn.v_proj.": ".self_attention.v.",
    ".self_attn.out_proj.": ".self_attention.out.",
    ".encoder_attn_layer_norm.": ".cross_norm.",
    ".encoder_attn.q_proj.": ".cross_attention.query.",
    ".encoder_attn.k_proj.": ".cross_attention.k.",
    ".encoder_attn.v_proj.": ".cross_attention.v.",
    ".encoder_attn.out_proj.": ".cross_attention.out.",
    ".final_layer_norm.": ".feed_forward_norm.",
    ".fc1.": ".feed_forward.0.",
    ".fc2.": ".feed_forward.2.",
    "layer_norm.": "norm.",
}


def read(path: Path, values: dict[str, Any]) -> Contents:
    """Contents of the folder `path`, whose config.json holds `values`.

    The notes hold the form of the prompt, and under `SUPPRESSED` the tokens that decoding never
    writes ("always") or not as its first one ("first").

    Raises:
        ValueError: A file is missing or damaged, or asks for what is not supported.
    """
    generation = folders.read_json(path, "generation_config.json")
    said = _GENERATION | values | generation
    config = _config(values, said)
    features = _features(folders.extractor(path), (_MODEL | values)["max_source_positions"])
    texts, merges = _vocabulary(path)
    special = {text: token for token, text in texts.items() if _is_special(text)}
    multilingual = generation.get("is_multilingual", config.vocab_size >= _MULTILINGUAL)
    prompt = _prompt(special, bool(multilingual))
    starts = prompt.tokens()[0] == config.bos
    got = f"{START!r} for {prompt.tokens()[0]}"
    expect(starts, "decoder_start_token_id", f"the tokenizer's {START!r}", config.bos, got)
    tokenizer = _tokenizer(texts, merges, min(special.values()), config.vocab_size)
    version = values.get("transformers_version", "of unknown version")
    notes = {
        "source": f"transformers {version}, whisper",
        **prompt.to_notes(),
        SUPPRESSED: {
            "always": _tokens(said, "suppress_tokens", config.vocab_size),
            "first": _tokens(said, "begin_suppress_tokens", config.vocab_size),
        },
    }
    return config, _our_weights(folders.read_weights(path)), tokenizer, features, notes


def _config(values: dict[str, Any], said: dict[str, Any]) -> AEDConfig:
    """The model's config.

    Args:
        values: Of config.json.
        said: What is said of generation.
    """
    expect_only(values, _ONLY, "config.json")
    get = (_MODEL | values).__getitem__
    D = get("d_model")
    encoder = WhisperEncoderConfig(
        bins=get("num_mel_bins"),
        width=D,
        layers=get("encoder_layers"),
        heads=get("encoder_attention_heads"),
        expansion=get("encoder_ffn_dim") // D,
        most=get("max_source_positions"),
        dropout=get("dropout"),
    )
    eos = said["eos_token_id"]
    pad = get("pad_token_id")
    return AEDConfig(
        vocab_size=get("vocab_size"),
        bos=said["decoder_start_token_id"],
        eos=eos,
        pad=eos if pad is None else pad,
        encoder=encoder,
        width=D,
        layers=get("decoder_layers"),
        heads=get("decoder_attention_heads"),
        expansion=get("decoder_ffn_dim") // D,
        most=get("max_target_positions"),
        dropout=get("dropout"),
        activation="gelu",
        positions="learned",
        embedding_norm=False,
        output_bias=False,
    )


def _features(values: dict[str, Any], most: int) -> dict[str, Any]:
    """Arguments of FeatureConfig; `most` encoded frames are those of a chunk."""
    expect_only(values, _EXTRACTOR_ONLY, "preprocessor_config.json")
    get = (_EXTRACTOR | values).__getitem__
    rate = get("sampling_rate")
    frames = get("chunk_length") * rate / get("hop_length")
    fits = frames == 2 * most
    wanted = f"one for {2 * most} frames, twice max_source_positions"
    expect(fits, "chunk_length", wanted, f"{get('chunk_length')} s, {frames:g} frames")
    return _EXTRACTOR_CODE | {
        "rate_hz": rate,
        "window_s": get("n_fft") / rate,
        "hop_s": get("hop_length") / rate,
        "fft": get("n_fft"),
        "bins": get("feature_size"),
        "fill_s": float(get("chunk_length")),
    }


def _is_special(text: str) -> bool:
    return text.startswith("<|") and text.endswith("|>")


def _vocabulary(path: Path) -> tuple[dict[int, str], list[Any]]:
    """Texts of all tokens by id, and the merges, of tokenizer.json or of the files before it."""
    whole_tokenizer = folders.read_json(path, "tokenizer.json")
    if whole_tokenizer:
        model = whole_tokenizer["model"]
        kind = model.get("type", "BPE")
        expect(kind == "BPE", "tokenizer", "a model of BPE", repr(kind))
        texts = {token: text for text, token in model["vocab"].items()}
        for token in whole_tokenizer.get("added_tokens") or ():
            texts[token["id"]] = token["content"]
        return texts, model["merges"]
    vocabulary = folders.read_json(path, "vocab.json")
    there = bool(vocabulary) and (path / "merges.txt").is_file()
    wanted = "tokenizer.json, or vocab.json and merges.txt"
    expect(there, "model", wanted, f"neither in {path.name}")
    added = folders.read_json(path, "added_tokens.json")
    texts = {token: text for text, token in (vocabulary | added).items()}
    lines = (path / "merges.txt").read_text(encoding="utf-8").splitlines()
    return texts, [line for line in lines if line and not line.startswith("#version")]


def _tokenizer(
    texts: dict[int, str], merges: list[Any], first_special: int, V: int
) -> BytePairTokenizer:
    """The tokenizer of the tokens below the first special one; the others have no text.

    Args:
        texts: Of all tokens, by id.
        merges: Pairs.
        first_special: `<|endoftext|>` in Whisper's vocabularies.
        V: Tokens of the model.
    """
    behind = [text for token, text in texts.items() if token > first_special]
    plain = [text for text in behind if not _is_special(text)]
    wanted = "special tokens alone behind the first one"
    expect(not plain, "tokenizer", wanted, plain[:5])
    low, high = min(texts), max(texts)
    wanted = f"tokens from 0 to below vocab_size = {V}"
    expect(low >= 0 and high < V, "tokenizer", wanted, f"{low} to {high}")
    vocabulary = tuple(texts.get(token, "") for token in range(first_special))
    return BytePairTokenizer(vocabulary, tuple(split_merge(merge) for merge in merges))


def _prompt(special: dict[str, int], multilingual: bool) -> PromptFormat:
    """The prompt of a text without times."""
    missing = [text for text in (START, NO_TIMES) if text not in special]
    expect(not missing, "tokenizer", f"{START} and {NO_TIMES}", f"none for {missing}")
    if not multilingual:
        return PromptFormat.of_vocabulary((START, NO_TIMES), special, ("en",))
    languages = languages_of([*special])
    remedy = "Is it an English model? Then is_multilingual is false in its generation_config.json."
    expect(bool(languages), "tokenizer", "a token for each language", "none", remedy)
    language = "en" if "en" in languages else languages[0]
    template = (START, LANGUAGE, TASK, NO_TIMES)
    return PromptFormat.of_vocabulary(template, special, languages, language=language)


def _tokens(said: dict[str, Any], key: str, V: int) -> list[int]:
    """The tokens that `said` lists under `key`."""
    tokens = said[key] or ()
    listed = isinstance(tokens, list | tuple) and all(whole(token, 0, V - 1) for token in tokens)
    expect(listed, key, f"tokens from 0 to below vocab_size = {V}", repr(tokens)[:80])
    return sorted(set(tokens))


def _our_name(name: str) -> str:
    """asrkit's name of a weight; one that is of neither encoder nor decoder keeps its own."""
    if name.startswith(_ENCODER):
        return "encoder." + replaced(name.removeprefix(_ENCODER), _ENCODER_NAMES)
    if name.startswith(_DECODER):
        return replaced(name.removeprefix(_DECODER), _DECODER_NAMES)
    return name


def _our_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by asrkit's names.

    Queries, keys and values are one layer, whose bias is zero for the keys. The output is the
    embedding, so a copy of it is left out.
    """
    found = renamed(weights, _our_name)
    drop_tied_output(found, "proj_out.weight")
    for name in [name for name in found if name.endswith(".k.weight")]:
        bias = name.removesuffix("weight") + "bias"
        found.setdefault(bias, found[name].new_zeros(found[name].shape[:1]))
    join(found, "", "qkv", "qkv")
    join(found, ".cross_attention", "kv", "key_value")
    return found
