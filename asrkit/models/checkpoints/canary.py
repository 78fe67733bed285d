"""Canary, NeMo's encoder-decoder model: decoder, tokenizer and prompt, in NeMo's archives and in
Hugging Face folders.
"""

from collections.abc import Sequence
from typing import Any

import torch

from asrkit.devices import CPU_FLOAT
from asrkit.models.attention_decoder import AEDConfig, sines
from asrkit.models.checkpoints.folders import expect_only, translated
from asrkit.models.checkpoints.names import SETTINGS
from asrkit.models.checkpoints.own import Values, Weights
from asrkit.models.checkpoints.weights import drop_tied_output, join
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.prompts import (
    ENGLISH,
    LANGUAGE,
    PUNCTUATION,
    TARGET,
    TASK,
    PromptFormat,
    languages_of,
    token_text,
)
from asrkit.shapes import expect
from asrkit.text import SPACE, AggregateTokenizer, SentencePieceTokenizer

BOS = "<|startoftranscript|>"
EOS = "<|endoftext|>"
PAD = "<pad>"
CONTEXT = "<|startofcontext|>"  # before an earlier text, which is always empty in asrkit
# Prompts of nemo_toolkit 3.0.0.
PROMPTS = {
    "canary": (BOS, LANGUAGE, TASK, TARGET, PUNCTUATION),
    "canary2": (
        CONTEXT,
        BOS,
        "{emotion}",
        LANGUAGE,
        TARGET,
        PUNCTUATION,
        "{itn}",
        "{timestamp}",
        "{diarize}",
    ),
}
DEFAULTS = {  # of slots that asrkit does not change: emotion, numerals, timestamps, speakers
    "{emotion}": "<|emo:undefined|>",
    "{itn}": "<|noitn|>",
    "{timestamp}": "<|notimestamp|>",
    "{diarize}": "<|nodiarize|>",
}
NEMO_ROUND = 8  # NeMo rounds the vocabulary up to a multiple of this
# Keys whose values no name or shape of a weight reveals, and the supported values.
NEMO_DECODER = {"pre_ln": True, "hidden_act": "relu", "learn_positional_encodings": False}
Tokens = AggregateTokenizer | SentencePieceTokenizer


def read_nemo(
    config: Values, members: dict[str, Any], encoder: FastConformerConfig | JasperConfig
) -> tuple[AEDConfig, Tokens, PromptFormat]:
    """Config, tokenizer and prompt of an archive.

    Args:
        config: Config of the archive.
        members: Files of the archive.
        encoder: Config of the encoder.

    Raises:
        ValueError: A setting is missing, damaged or not supported.
    """
    decoder = config["transf_decoder"]
    expect_only(decoder, {"pre_ln_final_layer_norm": True}, "transf_decoder")
    decoder = {"pre_ln": False, **decoder["config_dict"]}
    expect_only(decoder, NEMO_DECODER, "transf_decoder.config_dict")
    name = config["prompt_format"]
    expect(name in PROMPTS, "prompt_format", f"one of {[*PROMPTS]}", f"{name!r:.80}")
    values = config["tokenizer"]
    parts = []
    for language, part in values.get("langs", {}).items():
        parts.append((language, piece_model(part, members).with_control()))
    plain = None if parts else piece_model(values, members)
    tokenizer = plain.with_control() if plain else AggregateTokenizer(tuple(parts))
    pieces = tokenizer.pieces()
    # If two tokens have the same text, the first one counts: control symbols come first.
    ids = {pieces[token]: token for token in reversed(range(len(pieces)))}
    # Control symbols name some 180 languages; an aggregate tokenizer names the trained ones.
    languages = [language for language, _ in parts if token_text(language) in ids]
    languages = languages or languages_of([*ids])
    template = PROMPTS[name]
    prompt = _prompt(template, ids, languages, _slots(config))
    if plain:
        # NeMo encodes the prompt as text, so a token that starts every text starts the prompt too.
        expected = prompt.tokens()
        encoded = plain.encode("".join(pieces[token] for token in expected))
        lead = [pieces[token] for token in encoded[: -len(expected)]]
        prompt = _prompt((*lead, *template), ids, languages, _slots(config))
    sizes = translated(decoder, SETTINGS["canary_in_nemo"])
    sizes["vocab_size"] = -(-tokenizer.vocab_size // NEMO_ROUND) * NEMO_ROUND
    return AEDConfig(**sizes, **_special(ids), encoder=encoder), tokenizer, prompt


def piece_model(values: Values, members: dict[str, Any]) -> SentencePieceTokenizer:
    """The SentencePiece model named in a section of an archive's config."""
    expect_only({"type": None, **values}, {"type": "bpe"}, "tokenizer")
    return SentencePieceTokenizer(members[values["model_path"].removeprefix("nemo:")].read())


def _special(ids: dict[str, int]) -> Values:
    """Arguments of AEDConfig for the special tokens, from the ids of all texts."""
    return {"bos": ids[BOS], "eos": ids[EOS], "pad": ids[PAD]}


def _slots(config: Values) -> Values:
    """An archive's default values of the slots of its prompt."""
    slots: Values = {}
    for turn in config.get("prompt_defaults") or []:
        if turn["role"] == "user":
            slots = {key: value for key, value in turn["slots"].items() if value is not None}
    expect_only(slots, {"decodercontext": ""}, "prompt_defaults")
    return slots


def _prompt(
    template: Sequence[str], ids: dict[str, int], languages: list[str], slots: Values
) -> PromptFormat:
    """The prompt format of a model.

    Args:
        template: Texts of tokens, and slots.
        ids: Ids of the special tokens, by their texts.
        languages: Codes of languages, each with a token.
        slots: Default values of slots in the archive, as NeMo spells them.
    """
    tokens = {slot: slots.get(slot.strip("{}"), token) for slot, token in DEFAULTS.items()}
    filled = [tokens.get(piece, piece) for piece in template]
    first = ENGLISH if ENGLISH in languages else languages[0]
    language = slots.get("source_lang", first).removeprefix("<|").removesuffix("|>")
    punctuation = slots.get("pnc") not in ("no", False, "<|nopnc|>")
    return PromptFormat(
        template=filled, ids=ids, languages=languages, language=language, punctuation=punctuation
    )


def read_folder(
    values: Values, ids: dict[str, int], encoder: FastConformerConfig
) -> tuple[AEDConfig, PromptFormat]:
    """Config and prompt of a Hugging Face folder.

    Args:
        values: Contents of config.json.
        ids: Ids of all tokens, by their texts.
        encoder: Config of the encoder.

    Raises:
        ValueError: A setting is missing, damaged or not supported.
    """
    section = values.get("decoder_config") or {}
    expect_only(section, {"hidden_act": "relu"}, "decoder_config")
    sizes = translated(section, SETTINGS["canary_in_transformers"])
    config = AEDConfig(**sizes, **_special(ids), encoder=encoder)
    template = PROMPTS["canary2" if CONTEXT in ids else "canary"]
    if values.get("decoder_start_token_id", 7) == ids.get(SPACE):
        template = (SPACE, *template)
    return config, _prompt(template, ids, languages_of([*ids]), {})


def shape_decoder(weights: Weights, config: AEDConfig) -> None:
    """Reshape weights of a decoder, named as in asrkit, in place; its output is tied.

    NeMo saves its table of positions, perhaps longer than the model's, because the table grows in
    use. It interleaves sines and cosines. transformers computes a table with all sines first.
    Weights were trained with one of the two, and nothing in them says with which.
    """
    if "positions" in weights:
        weights["positions"] = weights["positions"][: config.most].clone()
    else:
        table = sines(config.most, config.width, torch.zeros((), **CPU_FLOAT))
        weights["positions"] = torch.cat([table[:, 0::2], table[:, 1::2]], 1)
    drop_tied_output(weights, "output.weight")
    join(weights, "kv", "key_value")
