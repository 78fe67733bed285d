"""NeMo's encoder-decoder models, `EncDecMultiTaskModel`: decoder, tokenizers, prompt and names."""

from typing import Any

import torch
from torch import Tensor

from asrkit.models.attention_decoder import AEDConfig
from asrkit.models.checkpoints import canary
from asrkit.models.checkpoints.archive import Archive
from asrkit.models.checkpoints.nemo_config import Section, short
from asrkit.models.fastconformer import FastConformerConfig
from asrkit.models.jasper import JasperConfig
from asrkit.models.prompts import PromptFormat, languages_of, token_text
from asrkit.shapes import expect
from asrkit.text import AggregateTokenizer, SentencePieceTokenizer

SPECIAL = "spl_tokens"  # of an aggregate tokenizer, the model of control symbols
# The vocabulary is rounded up to a multiple of this many tokens.
ROUND = 8
TRUE = ("yes", "1", "True", "true")  # what NeMo takes for a switch that is on
TOKENIZERS = {"agg": "CanaryTokenizer", "bpe": "CanaryBPETokenizer"}
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
    top: Section, nemo: Archive, encoder: FastConformerConfig | JasperConfig
) -> tuple[AEDConfig, Tokens, PromptFormat]:
    """Config, tokenizer and prompt of an archive.

    Args:
        top: Its config.
        nemo: The archive, which holds the tokenizer's files too.
        encoder: Config of its encoder.

    Raises:
        ValueError: A setting is missing, damaged or not supported.
    """
    tokenizer, vocabulary, languages = _tokenizer(top.section("tokenizer"), nemo)
    config = _decoder(top, encoder, tokenizer.vocab_size, canary.special_tokens(vocabulary))
    name = top.take("prompt_format", of=tuple(canary.PROMPTS))
    prompt = canary.prompt_of(name, vocabulary, languages, _chosen(top, languages))
    if isinstance(tokenizer, SentencePieceTokenizer):
        lead = _lead(top.section("tokenizer"), nemo, prompt)
        prompt = canary.led(prompt, lead, vocabulary)
    return config, tokenizer, prompt


def _lead(section: Section, nemo: Archive, prompt: PromptFormat) -> list[str]:
    """Pieces before a prompt that NeMo has the archive's one SentencePiece model split as text."""
    texts = {id_: text for text, id_ in prompt.ids.items()}
    wanted = prompt.tokens()
    model = SentencePieceTokenizer(_contents(section, nemo))
    found = model.encode("".join(texts[id_] for id_ in wanted))
    extra = len(found) - len(wanted)
    alike = extra >= 0 and found[extra:] == wanted
    pieces = model.pieces()
    got = str([pieces[id_] for id_ in found])[:120]
    expect(alike, section.name, "a model in which each token of the prompt is a symbol", got)
    return [pieces[id_] for id_ in found[:extra]]


def _decoder(
    top: Section,
    encoder: FastConformerConfig | JasperConfig,
    tokens: int,
    special: dict[str, int],
) -> AEDConfig:
    """Config of the model that the archive's sections describe; ValueError names what is not done.

    Args:
        top: The archive's config.
        encoder: Config of its encoder.
        tokens: Of its tokenizer.
        special: Ids of "bos", "eos" and "pad".
    """
    _expect_no_layers_between(top)
    sizes = _decoder_sizes(top.section("transf_decoder"))
    width = sizes.count("hidden_size")
    inner = sizes.count("inner_size")
    expect(inner % width == 0, f"{sizes.name}.inner_size", f"a multiple of {width}", inner)
    config = AEDConfig(
        vocab_size=-(-tokens // ROUND) * ROUND,
        encoder=encoder,
        width=width,
        layers=sizes.count("num_layers"),
        heads=sizes.count("num_attention_heads"),
        expansion=inner // width,
        most=sizes.count("max_sequence_length", 512),
        dropout=sizes.number("ffn_dropout", 0.0),
        bos=special["bos"],
        eos=special["eos"],
        pad=special["pad"],
    )
    _expect_one_linear_head(top.section("head"), config)
    return config


def _expect_no_layers_between(top: Section) -> None:
    """ValueError for Transformer layers between encoder and decoder."""
    between = top.take("transf_encoder", None) or {}
    nothing = isinstance(between, dict) and between.get("num_layers", 0) == 0
    expect(nothing, "transf_encoder.num_layers", "0 (others are not supported)", short(between))


def _decoder_sizes(section: Section) -> Section:
    """The decoder's sizes; ValueError unless it is a Transformer with layer norms first, sines and
    ReLU.
    """
    _expect_class(section, "get_nemo_transformer")
    section.take("model_name", None, of=(None,))
    section.take("pretrained", False, of=(False,))
    section.take("encoder", of=(None, False))
    section.take("pre_ln_final_layer_norm", True, of=(True,))
    sizes = section.section("config_dict")
    # what a key has to be, and what NeMo takes where it is not there
    sizes.take("num_token_types", 2, of=(0,))
    sizes.take("learn_positional_encodings", False, of=(False,))
    sizes.take("hidden_act", "relu", of=("relu",))
    sizes.take("pre_ln", False, of=(True,))
    return sizes


def _expect_one_linear_head(head: Section, config: AEDConfig) -> None:
    """ValueError unless logits come from one linear layer of the model's sizes."""
    _expect_class(head, "TokenClassifier")
    head.take("num_layers", 1, of=(1,))
    head.take("hidden_size", of=(config.width,))
    head.take("num_classes", config.vocab_size, of=(config.vocab_size,))


def _expect_class(section: Section, name: str) -> None:
    """ValueError unless a section is for a class, or function, of this name."""
    target = str(section.take("_target_", "")).rpartition(".")[2]
    expect(target == name, f"{section.name}._target_", name, short(target))


def _tokenizer(section: Section, nemo: Archive) -> tuple[Tokens, dict[str, int], list[str]]:
    """The tokenizer, ids of special tokens by their text, and languages."""
    kind = section.take("type", of=tuple(TOKENIZERS))
    custom = section.take("custom_tokenizer", None) or {}
    held = isinstance(custom, dict)
    target = str(custom.get("_target_", "")).rpartition(".")[2] if held else short(custom)
    name = f"{section.name}.custom_tokenizer"
    expect(target == TOKENIZERS[kind], name, TOKENIZERS[kind], short(target))
    if kind == "bpe":
        alone = _model(section, nemo)
        texts = alone.pieces()
        return alone, _numbered(texts), languages_of(texts)
    langs = section.section("langs")
    has_special = SPECIAL in langs.values
    expect(has_special, langs.name, f"a model {SPECIAL!r}", short(sorted(langs.values)))
    parts = [(str(name), _model(langs.section(name), nemo)) for name in langs.values]
    tokenizer = AggregateTokenizer(tuple(parts))
    start = sum(part.vocab_size for part in _before(parts))
    texts = dict(parts)[SPECIAL].pieces()
    vocabulary = {text: start + id_ for text, id_ in _numbered(texts).items()}
    return tokenizer, vocabulary, _languages(tokenizer.languages, vocabulary)


def _model(section: Section, nemo: Archive) -> SentencePieceTokenizer:
    section.take("type", of=("bpe",))
    return SentencePieceTokenizer(_contents(section, nemo)).with_control()


def _contents(section: Section, nemo: Archive) -> bytes:
    """The bytes of the SentencePiece model that a section names."""
    member = str(section.take("model_path"))[:200].removeprefix("nemo:")
    return nemo.bytes(member)


def _before(parts: list[tuple[str, SentencePieceTokenizer]]) -> list[SentencePieceTokenizer]:
    """The models before the one of control symbols."""
    names = [name for name, _ in parts]
    return [part for _, part in parts[: names.index(SPECIAL)]]


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


def _chosen(top: Section, languages: list[str]) -> dict[str, Any]:
    """What the archive sets in its prompt where nobody asks for anything else."""
    turns = top.take("prompt_defaults", None) or []
    listed = isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)
    expect(listed, "prompt_defaults", "a list of turns", short(turns))
    slots: Any = {}
    for turn in turns:
        if turn.get("role") == "user":
            slots = turn.get("slots") or {}
    held = isinstance(slots, dict)
    expect(held, "prompt_defaults", "slots of the user's turn", short(slots))
    section = Section("prompt_defaults", {str(key): value for key, value in slots.items()}, {})
    section.take("decodercontext", "", of=("", None))
    chosen: dict[str, Any] = {}
    for key in ("itn", "timestamp", "diarize"):
        if section.take(key, None) is not None:
            chosen[f"{{{key}}}"] = token_text(key if _on(section, key) else f"no{key}")
    if section.take("emotion", None) is not None:
        chosen["{emotion}"] = str(section.take("emotion"))
    if section.take("pnc", None) is not None:
        chosen["punctuation"] = _on(section, "pnc")
    language = section.take("source_lang", None)
    if language is not None:
        code = str(language).removeprefix("<|").removesuffix("|>")
        expect(code in languages, "prompt_defaults.source_lang", f"one of {languages}", short(code))
        chosen["language"] = code
    return chosen


def _on(section: Section, key: str) -> bool:
    """Whether a switch of the prompt is on, as NeMo reads it."""
    return str(section.take(key)) in (*TRUE, key, token_text(key))


def our_name(name: str) -> str | None:
    """asrkit's name of a weight of the decoder; None for another weight."""
    names = NAMES
    prefix = ""
    if name.startswith(LAYERS):
        number, _, name = name.removeprefix(LAYERS).partition(".")
        prefix = f"layers.{number}."
        names = LAYER_NAMES
    for theirs, ours in names.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return prefix + ours + name[len(theirs) :]
    return None


def our_weights(weights: dict[str, Tensor], config: AEDConfig) -> dict[str, Tensor]:
    """`weights` in asrkit's shapes; by asrkit's names already.

    NeMo saves its table of positions, in its own order, and one that grew while it was used whole.
    """
    table = weights.get("positions")
    if table is not None and table.ndim == 2:
        finite = bool(torch.isfinite(table).all())
        expect(finite, "pos_enc", "finite numbers", "others", "Is the archive whole?")
        weights["positions"] = table[: config.most].clone()
    return canary.our_weights(weights, "output.weight")
