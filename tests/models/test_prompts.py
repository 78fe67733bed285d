import re

import pytest

from asrkit.models.prompts import (
    LANGUAGE,
    PUNCTUATION,
    TARGET,
    TASK,
    PromptFormat,
    languages_of,
)

TEXTS = "<|start|> <|pnc|> <|nopnc|> <|de|> <|en|> <|fr|> <|transcribe|> <|translate|> <|times|>"
VOCABULARY = {text: 10 + id_ for id_, text in enumerate(TEXTS.split())}
TEMPLATES = {
    "canary": ("<|start|>", LANGUAGE, TASK, TARGET, PUNCTUATION),
    "canary2": ("<|start|>", LANGUAGE, TARGET, PUNCTUATION, "<|times|>"),
    "whisper": ("<|start|>", LANGUAGE, TASK, "<|times|>"),
    "english": ("<|start|>", "<|times|>"),
}


def format_of(name: str, **defaults) -> PromptFormat:
    """The format of a template; the last one supports English only."""
    languages = ["en"] if name == "english" else ["de", "en", "fr"]
    template = TEMPLATES[name]
    return PromptFormat(
        template=template, ids=VOCABULARY, languages=languages, **defaults
    )


def text_of(prompt: PromptFormat, **arguments) -> str:
    """The prompt as text, without brackets."""
    texts = {id_: text for text, id_ in VOCABULARY.items()}
    return " ".join(texts[id_].strip("<|>") for id_ in prompt.tokens(**arguments))


@pytest.mark.parametrize("name, arguments, wanted", [
    ("canary", {}, "start en transcribe en pnc"),
    ("canary", {"language": "de"}, "start de transcribe de pnc"),
    ("canary", {"language": "de", "task": "translate"}, "start de translate en pnc"),
    ("canary", {"language": "de", "target_language": "fr"}, "start de translate fr pnc"),
    ("canary", {"target_language": "de", "punctuation": False}, "start en translate de nopnc"),
    ("canary", {"language": "fr", "target_language": "fr", "task": "transcribe"}, "start fr transcribe fr pnc"),
    ("canary2", {"language": "de", "task": "translate", "punctuation": True}, "start de en pnc times"),
    ("whisper", {"language": "de"}, "start de transcribe times"),
    ("whisper", {"language": "de", "task": "translate"}, "start de translate times"),
    ("english", {"task": "transcribe", "language": "en"}, "start times"),
])  # fmt: skip
def test_tokens_fill_the_slots_of_a_prompt(name, arguments, wanted):
    assert text_of(format_of(name), **arguments) == wanted


def test_defaults_are_those_of_the_model():
    prompt = format_of("canary", language="fr", punctuation=False)
    assert text_of(prompt) == "start fr transcribe fr nopnc"
    assert text_of(prompt, punctuation=True) == "start fr transcribe fr pnc"


@pytest.mark.parametrize("name, arguments, message", [
    ("canary", {"language": "xx"}, "language: expected one of 'de', 'en', 'fr', got 'xx'."),
    ("canary", {"task": "sing"}, "task: expected one of 'transcribe', 'translate', got 'sing'."),
    ("canary", {"task": "translate"}, "target_language: expected another language than language='en' to translate into, got 'en'. Name the language of the text."),
    ("canary", {"task": "transcribe", "target_language": "de"}, "target_language: expected 'en' to transcribe, as language, got 'de'. Pass task='translate'."),
    ("whisper", {"language": "de", "target_language": "fr"}, "target_language: expected 'de': the model has no place in its prompt for another one, got 'fr'."),
    ("whisper", {"punctuation": True}, "punctuation: expected none, since the model's prompt has no place for it, got True."),
])  # fmt: skip
def test_unsupported_arguments_are_refused_by_name(name, arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        format_of(name).tokens(**arguments)


def test_notes_store_a_format_as_plain_values():
    prompt = format_of("canary", language="fr")
    assert PromptFormat.from_notes(prompt.to_notes()) == prompt
    assert PromptFormat.from_notes({}) is None


def test_damaged_notes_are_refused_in_one_line():
    values = format_of("canary").to_notes()["prompt"] | {"ids": {"<|start|>": -1}}
    wanted = (
        r"^prompt: expected a token for each of its places, got none for \['<|de|>', "
    )
    with pytest.raises(ValueError, match=wanted):
        PromptFormat.from_notes({"prompt": values})


def test_control_tokens_are_not_languages():
    tokens = [
        "<|itn|>",
        "<|pnc|>",
        "<|en|>",
        "<|pt-BR|>",
        "<|0|>",
        "<|endoftext|>",
        "<|haw|>",
        "de",
    ]
    assert languages_of(tokens) == ["en", "haw", "pt-BR"]
