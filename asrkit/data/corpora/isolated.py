"""Synthetic isolated digits, in English voices and with foreign accents: speech to train on.

What a recogniser of isolated words lacks is speakers, so every word has a voice of its own. An
accent is made by a voice of another language, which reads the English word as that language would
spell it.
"""

import random
from typing import Any

import numpy as np
from lhotse import CutSet
from lhotse.utils import fastcopy

from asrkit.data.corpora.synthetic import DIGITS, VARIANTS, spoken, voices_of_splits
from asrkit.shapes import expect, whole

RESPELLED = {  # the digits from zero to nine, for espeak-ng's voices of these languages
    "de": "siro wann tu sri for faif siks sewwen eit nain",
    "el": "ζίροου ουάν του θρι φορ φάιβ σιξ σέβεν έιτ νάιν",
    "es": "sirou uan tu tri for faiv sics seven eit nain",
    "fr": "ziro ouane tou sri for faïve sixe sévène éïte naïne",
    "fr-be": "ziro ouane tou trie for faïve sixe sévène éite naïne",
    "it": "zirou uan tu tri for faiv sics seven eit nain",
    "nl": "zirroo wan toe srie for faif siks zevven eet nain",
    "pl": "ziroł łan tu sri for fajf siks sewen ejt najn",
    "pt": "zirou uãn tu tri for faive sics seven eite naine",
    "sv": "sirå oann to tri får fajv siks seven ejt najn",
}
PROSODY = {  # wider than that of spoken_commands
    "rate": (110, 280),  # words a minute
    "pitch": (15, 90),  # 0 to 99
    "range": (20, 80),  # of the pitch, 0 to 99
    "seed": (0, 2**31 - 1),
}
SPEECH_LEVEL = 0.01  # of the peak: what is quieter at either end is cut off
MARGIN_S = 0.015  # kept around the word


def isolated_digits(
    *, count: int = 2400, seed: int = 0, workers: int | None = None, progress: bool = True
) -> CutSet:
    """Digits said one by one by many voices, half of them with foreign accents; for training.

    The English voices are those of spoken_commands' training set. The corpus is built once and
    kept under home()/corpora; a larger one begins with the smaller one.

    Args:
        count: Number of utterances.
        seed: Of voices and prosody.
        workers: Processes that synthesise; default 2.
        progress: Show a progress bar while the corpus is built.

    Returns:
        Cuts with the silence around the word cut off, of kind "digits".

    Raises:
        RuntimeError: The synthesiser is not installed, or fails.
    """
    expect(whole(count, 1), "count", "a whole number from 1 up", repr(count))
    jobs = [_job(n, seed) for n in range(count)]
    cuts = spoken("isolated_digits", jobs, workers=workers, progress=progress)["train"]
    return CutSet.from_cuts(_with_word(_trimmed(cut)) for cut in cuts)


def _job(n: int, seed: int) -> dict[str, Any]:
    """What the worker is to speak for utterance `n`: an English voice and a foreign one in turn."""
    draw = random.Random(f"isolated {seed} {n}")
    digit = n // 2 % 10
    if n % 2 == 0:
        voice = draw.choice(voices_of_splits()["train"])
        text = DIGITS.split("|")[digit]
    else:
        language = draw.choice(sorted(RESPELLED))
        voice = {"voice": language, "variant": draw.choice(VARIANTS)}
        text = RESPELLED[language].split()[digit]
    prosody = {name: draw.randint(*limits) for name, limits in PROSODY.items()}
    return {"id": f"train-digits-{n:05d}", "text": text, **voice, **prosody}


def _with_word(cut: Any) -> Any:
    """The cut with the English word as its text, and an id that no other corpus has."""
    n = int(cut.id.rpartition("-")[2])
    word = DIGITS.split("|")[n // 2 % 10]

    def name_word(supervision: Any) -> Any:
        return fastcopy(supervision, text=word)

    return cut.map_supervisions(name_word).with_id(f"isolated-{n:05d}")


def _trimmed(cut: Any) -> Any:
    """The cut without the silence before and behind the word."""
    samples = np.abs(cut.load_audio()[0])
    loud = np.flatnonzero(samples > SPEECH_LEVEL * samples.max())
    margin = round(MARGIN_S * cut.sampling_rate)
    first = max(0, loud[0] - margin)
    end = min(len(samples), loud[-1] + margin)
    return cut.truncate(
        offset=first / cut.sampling_rate,
        duration=(end - first) / cut.sampling_rate,
        preserve_id=True,
    )
