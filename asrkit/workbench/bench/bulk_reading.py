"""How fast one thread reads sound files of several formats: `data/audio_formats.csv` has it.

Beeps in noise are written once in each format by libsndfile, then read as `asrkit.transcribe` reads
them: decoded, mixed to one channel, and resampled to 16 kHz. An hour of speech has another size, as
FLAC most of all, so the sizes of the table are those of speech, and only speeds are measured here.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asrkit.transcribe.audio import convert, read_audio
from asrkit.workbench.bench.cases import median_of
from asrkit.workbench.bench.ladder_script import RATE_HZ, beeps
from asrkit.workbench.records import Measurement


class Format(NamedTuple):
    """A format of sound files.

    Args:
        suffix: of its files.
        rate_hz: its usual sampling rate.
        coding: keywords of `soundfile.write`.
    """

    suffix: str
    rate_hz: int
    coding: dict[str, Any]


FORMATS = {
    "mp3": Format(".mp3", 44_100, {"format": "MP3", "subtype": "MPEG_LAYER_III"}),
    "opus": Format(".opus", 48_000, {"format": "OGG", "subtype": "OPUS"}),
    "flac": Format(".flac", 16_000, {"format": "FLAC", "subtype": "PCM_16"}),
    "wav": Format(".wav", 16_000, {"format": "WAV", "subtype": "PCM_16"}),
}


def write(path: Path, form: Format, seconds: int) -> Path:
    """Write beeps in noise in a format; returns the file's path.

    Args:
        path: of the file.
        form: its format.
        seconds: of audio.
    """
    import soundfile

    sound = torch.from_numpy(beeps(seconds * RATE_HZ, 0)) / 32768
    if form.rate_hz != RATE_HZ:
        sound = convert(sound, RATE_HZ, form.rate_hz)
    soundfile.write(str(path), sound.clamp(-1, 1).numpy(), form.rate_hz, **form.coding)
    return path


def measure_reading(
    what: str, seconds: int, rounds: int, folder: Path, params: dict[str, Any]
) -> Iterator[Measurement]:
    """Seconds of audio that one thread reads in a second, for each format.

    Formats take turns in rounds, after one that does not count.

    Args:
        what: name of the benchmark.
        seconds: of audio in each file.
        rounds: that count.
        folder: of the files.
        params: of the records.
    """
    files = {
        name: write(folder / f"reading{form.suffix}", form, seconds)
        for name, form in FORMATS.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in files}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(rounds + 1):
            for name, file in files.items():
                start = time.perf_counter()
                read_audio(file, RATE_HZ)
                if number > 0:
                    rates[name].append(seconds / (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    for name, samples in rates.items():
        more = {
            "rate_hz": FORMATS[name].rate_hz,
            "audio_s": seconds,
            "MB_per_hour": round(files[name].stat().st_size / 1e6 * 3600 / seconds, 1),
        }
        yield median_of(what, "rtfx", "s/s", samples, params=params | more, warmup=1, impl=name)
