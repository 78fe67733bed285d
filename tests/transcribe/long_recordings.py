"""Long recordings whose words are known: recorded speech joined with pauses, noise, music, or nothing."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asrkit.data import Utterances, corpora
from asrkit.data.utterances import FULL_SCALE, RATE_HZ
from asrkit.files import shipped

SILENCES, SOUNDS = ("digital", "room"), ("white", "pink", "music")
FRAME = 480  # samples that energy is taken of: 30 ms
CHORDS_HZ = ((220.0, 277.2, 329.6), (185.0, 220.0, 277.2), (146.8, 220.0, 293.7))


class Piece(NamedTuple):
    """One recording: (S,) float32 at 16 kHz, and its words."""

    samples: np.ndarray
    text: str


@dataclass(frozen=True)
class LongRecording:
    """Pieces joined: (S,) float32 at 16 kHz, all words, and (start_s, end_s, words) of each piece."""

    name: str
    samples: np.ndarray
    text: str
    spans: tuple[tuple[float, float, str], ...]


def read_pieces(manifest=None):
    """Pieces of a manifest that `corpora.from_manifest` reads; None: the recordings that asrkit ships."""
    cuts = corpora.from_manifest(manifest or shipped("speech/manifest.jsonl"))
    speech = Utterances.load(cuts, progress=False)
    waves = (wave.numpy() / np.float32(FULL_SCALE) for wave in speech.waveforms)
    return [*map(Piece, waves, speech.texts)]


def between(kind, seconds, random):
    """One of SILENCES or SOUNDS, (S,) float32."""
    count = round(seconds * RATE_HZ)
    if kind == "digital" or count == 0:
        return np.zeros(count, np.float32)
    if kind == "music":  # a chord every half second, plucked
        when = np.arange(count) / RATE_HZ
        tones = np.array(CHORDS_HZ)[(when * 2).astype(int) % len(CHORDS_HZ)]  # (S, 3)
        chords = np.sin(2 * np.pi * tones * when[:, None]).sum(1)
        return (0.08 * chords * np.exp(-4 * (when % 0.5))).astype(np.float32)
    sound = random.normal(size=count)
    if kind != "white":  # equal energy in each octave
        spectrum = np.fft.rfft(sound)
        sound = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 1), count)
    sound *= (0.001 if kind == "room" else 0.05) / np.sqrt(np.mean(sound**2))
    return sound.astype(np.float32)


def trimmed(piece):
    """The piece without the silence at its ends: frames 20 dB below its loud ones."""
    frames = piece.samples[: len(piece.samples) // FRAME * FRAME].reshape(-1, FRAME)
    level_db = 10 * np.log10(np.mean(frames**2, 1) + 1e-10)
    loud = np.flatnonzero(level_db > np.quantile(level_db, 0.95) - 20)
    first, last = max(0, loud[0] - 2), loud[-1] + 3  # consonants are quiet
    return Piece(piece.samples[first * FRAME : last * FRAME], piece.text)


def orders(pieces, random, speech_s=0.0):
    """The pieces in a random order, then in others until there are `speech_s` seconds of them."""
    total_s = sum(len(piece.samples) for piece in pieces) / RATE_HZ
    times = max(1, int(np.ceil(speech_s / total_s)))
    return [pieces[n] for _ in range(times) for n in random.permutation(len(pieces))]


def join(name, pieces, kind, pauses_s, random):
    """One recording of the pieces, with so many seconds of `kind` between each two."""
    parts, spans, start = [], [], 0
    for piece, pause_s in zip(pieces, [*pauses_s, 0], strict=True):
        end = start + len(piece.samples)
        spans.append((start / RATE_HZ, end / RATE_HZ, piece.text))
        parts += [piece.samples, between(kind, pause_s, random)]
        start = end + len(parts[-1])
    text = " ".join(piece.text for piece in pieces)
    return LongRecording(name, np.concatenate(parts), text, tuple(spans))


def spaced(pieces, seed=0, kind="digital", pauses_s=(0.0, 2.0), speech_s=0.0):
    """All pieces in random orders, with `kind` between them for times drawn from `pauses_s`."""
    random = np.random.default_rng(seed)
    ordered = orders(pieces, random, speech_s)
    drawn_s = random.uniform(*pauses_s, len(ordered) - 1)
    return join(f"spaced-{kind}-{seed}", ordered, kind, drawn_s, random)


def unbroken(pieces, seed=0, speech_s=60.0):
    """Trimmed pieces in random orders with no pause between them, `speech_s` seconds or a little more."""
    random = np.random.default_rng(seed)
    ordered = orders([*map(trimmed, pieces)], random, speech_s)
    ends_s = np.cumsum([len(piece.samples) for piece in ordered]) / RATE_HZ
    last = int(np.searchsorted(ends_s, speech_s))
    return join(f"unbroken-{seed}", ordered[: last + 1], "digital", [0] * last, random)


def interrupted(pieces, seed=0, kind="digital", silent_s=30.0):
    """All pieces half a second apart, and `silent_s` in the middle."""
    random = np.random.default_rng(seed)
    pauses_s = np.full(len(pieces) - 1, 0.5)
    pauses_s[len(pauses_s) // 2] = silent_s
    return join(f"silent-{kind}-{seed}", orders(pieces, random), kind, pauses_s, random)


def long_recordings(pieces):
    """Yield eleven: several orders, without pauses, with sounds, with a long silence, and 20 minutes."""
    yield from (spaced(pieces, seed) for seed in range(3))
    yield from (unbroken(pieces, seed) for seed in range(2))
    yield from (spaced(pieces, 3, kind, (0.5, 3.0)) for kind in SOUNDS)
    yield from (interrupted(pieces, 4, kind) for kind in SILENCES)
    yield spaced(pieces, 5, "room", speech_s=1080.0)
