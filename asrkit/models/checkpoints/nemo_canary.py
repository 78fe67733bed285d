"""NeMo's encoder-decoder models, `EncDecMultiTaskModel`: decoder, tokenizers, prompt and names."""

from typing import Any

from torch import Tensor

from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import canary
from asrkit.models.checkpoints.archive import Archive
from asrkit.models.checkpoints.renaming import beginning_replaced
from asrkit.models.checkpoints.settings import expect_only, section
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.prompts import PromptFormat, languages_of, token_text
from asrkit.shapes import expect
from asrkit.text import AggregateTokenizer, SentencePieceTokenizer

SPECIAL = "spl_tokens"  # of an aggregate tokenizer, the model of control symbols
# The vocabulary is rounded up to a multiple of this many tokens.
ROUND = 8
TRUE = ("yes", "1", "True", "true")  # what NeMo takes for a switch that is on
# Keys whose other values no name or shape of a weight shows.
ONLY: dict[str, dict[str, Any]] = {
    "transf_decoder": {"pre_ln_final_layer_norm": True},
    "config_dict": {"pre_ln": True, "hidden_act": "relu", "learn_positional_encodings": False},
}
NAMES = {
    "transf_decoder._embedding.token_embedding": "embedding",
    "transf_decoder._embedding.position_embedding.pos_enc": "positions",
    "transf_decoder._embedding.layer_norm": "embedding_norm",
    "transf_decoder._decoder.final_layer_norm": "norm",
    "log_softmax.mlp.layer0.weight": "output.weight",
    "log_softmax.mlp.layer0.bias": "output_bias",
    "encoder_decoder_proj": "encoder_projection",
}
LAYERS = "transf_decoder._decoder.layers."
LAYER_NAMES = {
    "layer_norm_1": "self_norm",
    "first_sub_layer.query_net": "self_attention.q",
    "first_sub_layer.key_net": "self_attention.k",
    "first_sub_layer.value_net": "self_attention.v",
    "first_sub_layer.out_projection": "self_attention.out",
    "layer_norm_2": "cross_norm",
    "second_sub_layer.query_net": "cross_attention.query",
    "second_sub_layer.key_net": "cross_attention.k",
    "second_sub_layer.value_net": "cross_attention.v",
    "second_sub_layer.out_projection": "cross_attention.out",
    "layer_norm_3": "feed_forward_norm",
    "third_sub_layer.dense_in": "feed_forward.0",
    "third_sub_layer.dense_out": "feed_forward.2",
}

Tokens = AggregateTokenizer | SentencePieceTokenizer


def read(
    config: dict[str, Any], nemo: Archive, encoder: FastConformerConfig | JasperConfig
) -> tuple[AEDConfig, Tokens, PromptFormat]:
    """Config, tokenizer and prompt of an archive.

    Args:
        config: Its config.
        nemo: The archive, which holds the tokenizer's files too.
        encoder: Config of its encoder.

    Raises:
        ValueError: A setting is missing, damaged or not supported.
    """
    tokenizer, vocabulary, languages = _tokenizer(config, nemo)
    special = canary.special_tokens(vocabulary)
    name = config["prompt_format"]
    known = name in canary.PROMPTS
    expect(known, "prompt_format", f"one of {[*canary.PROMPTS]}", f"{name!r:.80}")
    prompt = canary.prompt_of(name, vocabulary, languages, _chosen(config, languages))
    if isinstance(tokenizer, SentencePieceTokenizer):
        prompt = canary.led(prompt, _lead(config, nemo, prompt), vocabulary)
    return _decoder(config, encoder, tokenizer.vocab_size, special), tokenizer, prompt


def piece_model(values: dict[str, Any], nemo: Archive) -> bytes:
    """The bytes of the SentencePiece model that a section of the config names."""
    expect_only({"type": None, **values}, {"type": "bpe"}, "tokenizer")
    return nemo.bytes(values["model_path"].removeprefix("nemo:"))


def _lead(config: dict[str, Any], nemo: Archive, prompt: PromptFormat) -> list[str]:
    """Pieces before a prompt that NeMo has the archive's one SentencePiece model split as text."""
    texts = {id_: text for text, id_ in prompt.ids.items()}
    wanted = prompt.tokens()
    model = SentencePieceTokenizer(piece_model(section(config, "tokenizer"), nemo))
    found = model.encode("".join(texts[id_] for id_ in wanted))
    extra = len(found) - len(wanted)
    alike = extra >= 0 and found[extra:] == wanted
    pieces = model.pieces()
    got = str([pieces[id_] for id_ in found])[:120]
    expect(alike, "tokenizer", "a model in which each token of the prompt is a symbol", got)
    return [pieces[id_] for id_ in found[:extra]]


def _decoder(
    config: dict[str, Any],
    encoder: FastConformerConfig | JasperConfig,
    tokens: int,
    special: dict[str, int],
) -> AEDConfig:
    """Config of the model that the archive's sections describe; ValueError names what is not done.

    Args:
        config: The archive's config.
        encoder: Config of its encoder.
        tokens: Of its tokenizer.
        special: Ids of "bos", "eos" and "pad".
    """
    decoder = section(config, "transf_decoder")
    expect_only(decoder, ONLY["transf_decoder"], "transf_decoder")
    sizes = section(config, "transf_decoder", "config_dict")
    expect_only({"pre_ln": False, **sizes}, ONLY["config_dict"], "transf_decoder.config_dict")
    width = sizes["hidden_size"]
    return AEDConfig(
        vocab_size=-(-tokens // ROUND) * ROUND,
        encoder=encoder,
        width=width,
        layers=sizes["num_layers"],
        heads=sizes["num_attention_heads"],
        expansion=sizes["inner_size"] // width,
        most=sizes.get("max_sequence_length", 512),
        dropout=sizes.get("ffn_dropout", 0.0),
        bos=special["bos"],
        eos=special["eos"],
        pad=special["pad"],
    )


def _tokenizer(config: dict[str, Any], nemo: Archive) -> tuple[Tokens, dict[str, int], list[str]]:
    """The tokenizer, ids of special tokens by their text, and languages."""
    values = section(config, "tokenizer")
    if values["type"] != "agg":
        alone = SentencePieceTokenizer(piece_model(values, nemo)).with_control()
        texts = alone.pieces()
        return alone, _numbered(texts), languages_of(texts)
    parts = []
    for name in values["langs"]:
        contents = piece_model(section(config, "tokenizer", "langs", name), nemo)
        parts.append((name, SentencePieceTokenizer(contents).with_control()))
    control = [name for name, _ in parts].index(SPECIAL)
    start = sum(part.vocab_size for _, part in parts[:control])
    texts = parts[control][1].pieces()
    vocabulary = {text: start + id_ for text, id_ in _numbered(texts).items()}
    tokenizer = AggregateTokenizer(tuple(parts))
    return tokenizer, vocabulary, _languages(tokenizer.languages, vocabulary)


def _numbered(texts: list[str]) -> dict[str, int]:
    return {text: id_ for id_, text in enumerate(texts)}


def _languages(names: list[str], vocabulary: dict[str, int]) -> list[str]:
    """Codes of the languages that have both a model and a token; without any, all with a token.

    The control symbols of published archives name some 180 languages, their other models those that
    were trained. A model may be for "en-US" and the token for "en".
    """
    found = []
    for name in names:
        for code in (name, name.partition("-")[0]):
            if token_text(code) in vocabulary:
                found.append(code)
                break
    return list(dict.fromkeys(found)) or languages_of([*vocabulary])


def _chosen(config: dict[str, Any], languages: list[str]) -> dict[str, Any]:
    """What the archive sets in its prompt where nobody asks for anything else."""
    slots: dict[str, Any] = {}
    for turn in config.get("prompt_defaults") or []:
        if turn.get("role") == "user":
            slots = turn.get("slots") or {}
    if slots.get("decodercontext") is not None:
        expect_only(slots, {"decodercontext": ""}, "prompt_defaults")
    chosen: dict[str, Any] = {}
    for key in ("itn", "timestamp", "diarize"):
        if slots.get(key) is not None:
            chosen[f"{{{key}}}"] = token_text(key if _is_on(slots, key) else f"no{key}")
    if slots.get("emotion") is not None:
        chosen["{emotion}"] = slots["emotion"]
    if slots.get("pnc") is not None:
        chosen["punctuation"] = _is_on(slots, "pnc")
    if slots.get("source_lang") is not None:
        code = slots["source_lang"].removeprefix("<|").removesuffix("|>")
        expect(code in languages, "prompt_defaults.source_lang", f"one of {languages}", code)
        chosen["language"] = code
    return chosen


def _is_on(slots: dict[str, Any], key: str) -> bool:
    """Whether a switch of the prompt is on, as NeMo reads it."""
    return str(slots[key]) in (*TRUE, key, token_text(key))


def our_name(name: str) -> str | None:
    """asrkit's name of a weight of the decoder; None for another weight."""
    if not name.startswith(LAYERS):
        return beginning_replaced(name, NAMES)
    number, _, inner = name.removeprefix(LAYERS).partition(".")
    return f"layers.{number}.{beginning_replaced(inner, LAYER_NAMES) or inner}"


def shape_decoder(weights: dict[str, Tensor], config: AEDConfig) -> None:
    """Give weights of a decoder, by asrkit's names, its shapes, in place.

    NeMo saves its table of positions, in its own order, and one that grew while it was used whole.
    """
    weights["positions"] = weights["positions"][: config.most].clone()
    canary.shape_decoder(weights, "output.weight")
