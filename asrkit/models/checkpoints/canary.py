"""What Canary's NeMo archives and Hugging Face folders share: prompts, special tokens, weights."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from asrkit.models.checkpoints.renaming import drop_tied_output, join
from asrkit.models.prompts import (
    ENGLISH,
    LANGUAGE,
    PUNCTUATION,
    TARGET,
    TASK,
    PromptFormat,
)
from asrkit.shapes import expect

BOS = "<|startoftranscript|>"
EOS = "<|endoftext|>"
PAD = "<pad>"
CONTEXT = "<|startofcontext|>"  # before an earlier text, which asrkit leaves empty
PROMPTS = {  # names and tokens of nemo_toolkit 3.0.0
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
# What stands in places that nobody asks for: no numerals, times or speakers, no feeling.
DEFAULTS = {
    "{emotion}": "<|emo:undefined|>",
    "{itn}": "<|noitn|>",
    "{timestamp}": "<|notimestamp|>",
    "{diarize}": "<|nodiarize|>",
}


def prompt_of(
    name: str, vocabulary: dict[str, int], languages: list[str], chosen: dict[str, Any]
) -> PromptFormat:
    """The form of a model's prompt.

    Args:
        name: One of `PROMPTS`.
        vocabulary: Token ids by text.
        languages: Codes of languages, each with a token.
        chosen: Tokens by their places (`{itn}`), where they are others than `DEFAULTS`; `language`
            and `punctuation` as in `PromptFormat`.

    Raises:
        ValueError: The vocabulary lacks a token.
    """
    found = "no token like <|en|>"
    expect(len(languages) > 0, "tokenizer", "tokens of the languages of its prompt", found)
    first = ENGLISH if ENGLISH in languages else languages[0]
    tokens = DEFAULTS | chosen
    language = tokens.pop("language", first)
    punctuation = tokens.pop("punctuation", True)
    template = [tokens.get(piece, piece) for piece in PROMPTS[name]]
    return PromptFormat.of_vocabulary(
        template, vocabulary, languages, language=language, punctuation=punctuation
    )


def led(prompt: PromptFormat, lead: list[str], vocabulary: dict[str, int]) -> PromptFormat:
    """`prompt` behind the tokens `lead`; of one vocabulary.

    A SentencePiece model that puts a space before every text puts one before the prompt as well,
    where the prompt is text to it.
    """
    ids = prompt.ids | {text: vocabulary[text] for text in lead}
    return replace(prompt, template=(*lead, *prompt.template), ids=ids)


def special_tokens(vocabulary: dict[str, int]) -> dict[str, int]:
    """`bos`, `eos` and `pad` of an `AEDConfig`; ValueError names one that is missing."""
    names = {"bos": BOS, "eos": EOS, "pad": PAD}
    missing = [text for text in names.values() if text not in vocabulary]
    expect(not missing, "tokenizer", f"tokens {BOS}, {EOS} and {PAD}", f"none for {missing}")
    return {name: vocabulary[text] for name, text in names.items()}


def shape_decoder(weights: dict[str, Tensor], output: str) -> None:
    """Join queries, keys and values as asrkit's layers have them, in place.

    Args:
        weights: By asrkit's names, but for `q`, `k` and `v` of attention of the decoder, where
            asrkit has one layer.
        output: Name of the output's weight, which has to be the embedding's where there is one.

    Raises:
        ValueError: The output has weights of its own.
    """
    drop_tied_output(weights, output)
    join(weights, ".self_attention", "qkv", "qkv")
    join(weights, ".cross_attention", "kv", "key_value")


def sines_first(table: Tensor) -> Tensor:
    """Positions (most, D) whose first half are the sines, of an interleaved table.

    NeMo has sine and cosine of a frequency side by side; transformers has all sines and then all
    cosines. The weights were trained with one of them, and nothing in them says with which.
    """
    return torch.cat([table[:, 0::2], table[:, 1::2]], 1)
