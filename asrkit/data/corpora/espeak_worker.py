# SPDX-License-Identifier: GPL-3.0-or-later
# This one file is GPL-3: it loads the GPL-3 library espeak-ng through ctypes. asrkit only starts it
# as a separate program.
"""Spoken WAV files (mono, 16 bit, 22,050 Hz) from a list of jobs: `python espeak_worker.py
JOBS.json OUTDIR`.

Each job {id, text, voice, seed, optional variant, rate, pitch, range} becomes OUTDIR/<id>.wav. Its
bytes depend on the job
alone: espeak-ng keeps state that neither a seed nor espeak_Terminate clears, so the library is
loaded anew for each.
"""

import _ctypes
import ctypes
import json
import os
import sys
import wave
from pathlib import Path
from typing import Any

import espeakng_loader

SYNCHRONOUS, DONT_EXIT, UTF8, PARAMETERS = 2, 0x8000, 1, {"rate": 1, "pitch": 3, "range": 4}
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
unload = getattr(_ctypes, "dlclose" if os.name == "posix" else "FreeLibrary")


def speak(job: dict[str, Any]) -> tuple[bytes, int]:
    """16-bit samples of one job and their rate in Hz; RuntimeError for a voice espeak-ng lacks."""
    pieces: list[bytes] = []

    def collect(samples: int | None, count: int, events: int | None) -> int:
        pieces.append(ctypes.string_at(samples or 0, 2 * count))
        return 0  # go on

    callback = Callback(collect)
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    rate_hz = library.espeak_Initialize(
        SYNCHRONOUS, 0, b".", DONT_EXIT
    )  # relative: long data paths are cut off unsaid
    library.espeak_SetSynthCallback(callback)
    voice = job["voice"] + (f"+{job['variant']}" if job.get("variant") else "")
    if rate_hz <= 0 or library.espeak_SetVoiceByName(voice.encode()):
        raise RuntimeError(
            f"espeak-ng has no voice {voice!r}" if rate_hz > 0 else "espeak-ng cannot read its data"
        )
    for name in PARAMETERS.keys() & job.keys():
        library.espeak_SetParameter(PARAMETERS[name], int(job[name]), 0)
    library.espeak_ng_SetRandSeed(ctypes.c_long(job["seed"]))
    text = job["text"].encode() + b"\0"
    library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, UTF8, None, None)
    library.espeak_Terminate()
    unload(library._handle)
    return b"".join(pieces), rate_hz


def main(jobs_path: str, out: str) -> None:
    """Write one WAV a job, each renamed into place when whole."""
    jobs, folder = json.loads(Path(jobs_path).read_text()), Path(out).resolve()
    os.chdir(espeakng_loader.get_data_path())
    for job in jobs:
        pcm, rate_hz = speak(job)
        part = folder / f".{job['id']}.{os.getpid()}"
        with part.open("wb") as raw, wave.open(raw, "wb") as file:
            file.setparams((1, 2, rate_hz, 0, "NONE", ""))
            file.writeframes(pcm)
        os.replace(part, folder / f"{job['id']}.wav")


if __name__ == "__main__":
    main(*sys.argv[1:])
