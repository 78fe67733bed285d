"""`PromptFormat`: the tokens that an encoder-decoder model expects before its text.

A checkpoint stores it as a dict of plain values, `notes["prompt"]`. Without it the prompt is the
model's token `bos` alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from asrkit.shapes import expect, expect_choice, whole
from asrkit.tasks import TASKS, Task

LANGUAGE = "{language}"
TASK = "{task}"
TARGET = "{target_language}"
PUNCTUATION = "{punctuation}"
# Keys of a checkpoint's notes:
PROMPT = "prompt"  # the prompt format
SUPPRESSED = "suppressed"  # tokens that decoding never writes: "always", or as the "first" one
WHISPER = "whisper"  # for timestamps: the token "no_times", and "most_first", the latest first one
ENGLISH = "en"
# Control tokens of Canary that look like tokens of a language.
_NO_LANGUAGES = ("pnc", "itn")


def token_text(name: str) -> str:
    """The text of the token of a language or control: "<|de|>" for "de"."""
    return f"<|{name}|>"


def languages_of(tokens: Sequence[str]) -> list[str]:
    """Codes of the languages among the tokens of a vocabulary, sorted.

    >>> languages_of(["<|de|>", "<|pnc|>", "<|pt-BR|>", "<|endoftext|>", "de"])
    ['de', 'pt-BR']
    """
    matches = [re.fullmatch(r"<\|([a-z]{2,3}(-[A-Za-z]{2,4})?)\|>", token) for token in tokens]
    return sorted({match[1] for match in matches if match} - {*_NO_LANGUAGES})


def _texts(template: Sequence[str], languages: Sequence[str]) -> set[str]:
    """Texts of all tokens that may occur in a prompt."""
    slots = {LANGUAGE: languages, TARGET: languages, TASK: TASKS, PUNCTUATION: ("pnc", "nopnc")}
    texts = set()
    for piece in template:
        texts |= {token_text(name) for name in slots[piece]} if piece in slots else {piece}
    return texts


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The prompt of a model, with slots for language, task and punctuation.

    >>> canary = PromptFormat(
    ...     template=("<|startoftranscript|>", LANGUAGE, TASK, TARGET, PUNCTUATION),
    ...     ids={"<|startoftranscript|>": 4, "<|pnc|>": 5, "<|nopnc|>": 6, "<|en|>": 7, "<|de|>": 8,
    ...          "<|transcribe|>": 9, "<|translate|>": 10},
    ...     languages=("de", "en"),
    ... )
    >>> canary.tokens(language="de", task="translate", punctuation=False)
    [4, 8, 10, 7, 6]

    Args:
        template: The prompt from first token to last: texts of tokens, and slots that `tokens`
            fills.
        ids: Token ids by text. Kept are those of the template and of all that may fill its slots:
            `<|de|>` for each language, `<|transcribe|>`, `<|translate|>`, `<|pnc|>`, `<|nopnc|>`.
        languages: Codes of the supported languages.
        language: Default spoken language.
        punctuation: Whether texts have punctuation and capitals by default.
    """

    template: Sequence[str]
    ids: dict[str, int] = field(hash=False)
    languages: Sequence[str]
    language: str = ENGLISH
    punctuation: bool = True

    def __post_init__(self) -> None:
        # The notes of a checkpoint have lists.
        object.__setattr__(self, "template", tuple(self.template))
        object.__setattr__(self, "languages", tuple(self.languages))
        expect_choice("prompt.language", self.language, self.languages)
        needed = sorted(_texts(self.template, self.languages))
        ids = {text: self.ids[text] for text in needed if whole(self.ids.get(text), 0)}
        missing = [text for text in needed if text not in ids]
        expect(not missing, "prompt", "a token for each of its places", f"none for {missing[:5]}")
        object.__setattr__(self, "ids", ids)

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Self | None:
        """The prompt format in the notes of a checkpoint; None if they have none."""
        values = notes.get(PROMPT)
        return None if values is None else cls(**values)

    def to_notes(self) -> dict[str, Any]:
        """Notes with this format, in types that JSON keeps."""
        values = asdict(self)
        return {PROMPT: values | {name: [*values[name]] for name in ("template", "languages")}}

    def tokens(
        self,
        *,
        language: str | None = None,
        target_language: str | None = None,
        task: Task | None = None,
        punctuation: bool | None = None,
    ) -> list[int]:
        """Token ids of the prompt. The default is transcription in `self.language`.

        Args:
            language: Code of the spoken language.
            target_language: Code of the language of the text. The default is the spoken language,
                and English for a translation.
            task: The default is "translate" if the two languages differ. A model without a slot for
                the task translates by its target language alone; a model without a slot for the
                target language translates into English only.
            punctuation: Whether the text has punctuation and capitals.

        Raises:
            ValueError: The model does not support a language, or has no slot for an argument.
        """
        if task is not None:
            expect_choice("task", task, TASKS)
        if language is None:
            language = self.language
        target = target_language
        if target is None:
            target = ENGLISH if task == "translate" else language
        expect_choice("language", language, self.languages)
        expect_choice("target_language", target, self.languages)
        translates = target != language
        if translates:
            expect(
                task != "transcribe",
                "target_language",
                f"{language!r} to transcribe, as language",
                repr(target),
                "Pass task='translate'.",
            )
            expect(
                TARGET in self.template or (TASK in self.template and target == ENGLISH),
                "target_language",
                f"{language!r}: the model has no place in its prompt for another one",
                repr(target),
            )
        else:
            expect(
                task != "translate",
                "target_language",
                f"another language than language={language!r} to translate into",
                repr(target),
                "Name the language of the text.",
            )
        expect(
            PUNCTUATION in self.template or punctuation is None,
            "punctuation",
            "none, since the model's prompt has no place for it",
            punctuation,
        )
        if punctuation is None:
            punctuation = self.punctuation
        values = {
            LANGUAGE: language,
            TASK: "translate" if translates else "transcribe",
            TARGET: target,
            PUNCTUATION: "pnc" if punctuation else "nopnc",
        }
        texts = [token_text(values[piece]) if piece in values else piece for piece in self.template]
        return [self.ids[text] for text in texts]
