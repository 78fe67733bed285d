# SPDX-License-Identifier: GPL-3.0-or-later
# This file alone is GPL-3: it loads the GPL-3 library espeak-ng through ctypes. asrkit only starts
# it as a separate program.
"""Synthesise a list of jobs as WAV files: `python espeak_worker.py JOBS.json OUTDIR`.

Each job {id, text, voice, seed, optional variant, rate, pitch, range} becomes OUTDIR/<id>.wav
(mono, 16 bit, 22,050 Hz). Its bytes depend on the job alone: the library is loaded anew for each
job, since espeak-ng keeps state that neither a seed nor espeak_Terminate clears.
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

# constants of speak_lib.h
SYNCHRONOUS = 2
DONT_EXIT = 0x8000
UTF8 = 1
PARAMETERS = {"rate": 1, "pitch": 3, "range": 4}
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
unload = getattr(_ctypes, "dlclose" if os.name == "posix" else "FreeLibrary")


def speak(job: dict[str, Any]) -> tuple[bytes, int]:
    """16-bit samples of one job and their rate in Hz; RuntimeError for a voice espeak-ng lacks."""
    pieces: list[bytes] = []

    def collect(samples: int | None, count: int, events: int | None) -> int:
        pieces.append(ctypes.string_at(samples or 0, 2 * count))
        return 0  # continue

    callback = Callback(collect)
    library = ctypes.CDLL(espeakng_loader.get_library_path())
    # a relative path of the data: espeak-ng silently truncates long ones
    rate_hz = library.espeak_Initialize(SYNCHRONOUS, 0, b".", DONT_EXIT)
    if rate_hz <= 0:
        raise RuntimeError("espeak-ng cannot read its data")
    library.espeak_SetSynthCallback(callback)
    voice = job["voice"]
    if job.get("variant"):
        voice += f"+{job['variant']}"
    if library.espeak_SetVoiceByName(voice.encode()):
        raise RuntimeError(f"espeak-ng has no voice {voice!r}")
    for name in PARAMETERS.keys() & job.keys():
        library.espeak_SetParameter(PARAMETERS[name], int(job[name]), 0)
    library.espeak_ng_SetRandSeed(ctypes.c_long(job["seed"]))
    text = job["text"].encode() + b"\0"
    library.espeak_Synth(text, ctypes.c_size_t(len(text)), 0, 0, 0, UTF8, None, None)
    library.espeak_Terminate()
    unload(library._handle)
    return b"".join(pieces), rate_hz


def main(jobs_path: str, out: str) -> None:
    """Write one WAV file for each job, renamed into place when it is complete."""
    jobs = json.loads(Path(jobs_path).read_text())
    folder = Path(out).resolve()
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
