"""Synthetic speech: a corpus synthesised by espeak-ng."""

import importlib.metadata
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, Recording
from lhotse.serialization import load_jsonl, save_to_jsonl
from tqdm import tqdm

from asrkit.data.corpora.manifests import RATE_HZ, SPLITS, transcribed_cut
from asrkit.files import content_hash, home, lock, new_folder
from asrkit.shapes import expect

KINDS = ("digits", "commands", "sentences")
WORKER = Path(__file__).with_name("espeak_worker.py")
FORMAT = 1  # version of the corpus, which is rebuilt when this changes
JOBS_PER_PROCESS = 100
ACCENTS = (
    "en en-us en-gb-x-rp en-gb-scotland en-gb-x-gbclan en-gb-x-gbcwmd en-029 en-us-nyc".split()
)
VARIANTS = ["", *(f"m{n}" for n in range(1, 9)), *(f"f{n}" for n in range(1, 6))]
PROSODY = {
    "rate": (130, 210),  # words a minute
    "pitch": (25, 75),  # 0 to 99
    "range": (30, 70),  # of the pitch, 0 to 99
    "seed": (0, 2**31 - 1),
}
DIGITS = "zero|one|two|three|four|five|six|seven|eight|nine"
GRAMMAR = {
    "digits": (f"({DIGITS})", *(f"({DIGITS})" + f" ({DIGITS})" * more for more in range(1, 6))),
    "commands": (
        "(turn on|turn off) the (kitchen|bedroom|garden) (light|heater|fan|radio)(| please| now)",
        "(open|close) the (kitchen|bedroom|garden) (door|window)(| please| now)",
        f"set a timer for ({DIGITS}) (|{DIGITS}) (minutes|hours)",
        f"set the (kitchen|bedroom) heater to ({DIGITS}) ({DIGITS})",
        "(call|find) (anna|peter|maria)(| please| now| again)",
        "play (the radio|music|a song)(| again) "
        "(for (anna|peter|maria)|in the (kitchen|bedroom|garden))",
    ),
    "sentences": (
        "the (old|young|small|happy) (dog|cat|bird|teacher|doctor|farmer) "
        "(walked|slept|waited|sang) (near|behind|under) the (green|old|small) "
        "(river|house|tree|school)",
        "(yesterday|today|every morning) (anna|peter|maria) (saw|found|heard) "
        "the (happy|small|old|green) (dog|cat|bird|teacher|doctor|farmer)( again| near the river|)",
    ),
}


def spoken_commands(
    *,
    train: int = 3000,
    dev: int = 150,
    test: int = 300,
    kinds: Sequence[str] | None = None,
    workers: int = 2,
    progress: bool = True,
) -> dict[str, CutSet]:
    """A corpus of synthetic English of 73 words: digit strings, commands and sentences.

    112 voices (accent and variant) speak at various rates and pitches. No voice, command, sentence
    or string of four or more digits is in two splits. The corpus is built once and kept in
    home()/corpora, in a folder named after its content. A larger corpus starts with the smaller.

    Args:
        train: Number of utterances in the training set.
        dev: Number of utterances in the development set.
        test: Number of utterances in the test set.
        kinds: Kinds of utterances to return: digits, commands or sentences, a third of the sets
            each; None for all. Others are not synthesised.
        workers: Number of processes that synthesise.
        progress: Show a progress bar while the corpus is built.

    Returns:
        Cuts of `train`, `dev` and `test`. Each has one supervision, whose custom `kind` is one of
        digits, commands and sentences.

    Raises:
        RuntimeError: The synthesiser is not installed, or fails.
    """
    sizes = {"train": train, "dev": dev, "test": test}
    wanted = {*(kinds or KINDS)}
    expect(wanted <= {*KINDS}, "kinds", f"some of {', '.join(KINDS)}", sorted(wanted))
    jobs = [job for job in _jobs(sizes) if _kind(job["id"]) in wanted]
    try:
        engine = importlib.metadata.version("espeakng_loader")
    except importlib.metadata.PackageNotFoundError:
        remedy = 'Run pip install -e ".[synth]" in the checkout, or make report.'
        raise RuntimeError(
            f"spoken_commands: the synthesiser espeakng_loader is not installed. {remedy}"
        ) from None
    key = content_hash([FORMAT, jobs, engine, WORKER.read_text(encoding="utf-8")])
    folder = home() / "corpora" / f"spoken_commands-{key.removeprefix('sha256:')[:16]}"
    if not folder.is_dir():
        with lock(
            folder.parent, wait=True, message="Waiting for speech that another process builds."
        ):
            if not folder.is_dir():  # else another process has built it by now
                _build(folder, jobs, workers, progress)
    return {
        split: CutSet.from_dicts(
            load_jsonl(folder / f"cuts_{split}.jsonl.gz")
        ).with_recording_path_prefix(folder)
        for split in SPLITS
    }


def _jobs(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Jobs for the worker: one for each utterance of each split."""
    voices = [{"voice": accent, "variant": variant} for accent in ACCENTS for variant in VARIANTS]
    random.Random("voices").shuffle(voices)
    of_split = {"test": voices[:12], "dev": voices[12:22], "train": voices[22:]}
    jobs = []
    for split, n in [(split, n) for split, size in sizes.items() for n in range(size)]:
        # a generator for each job, so that a small corpus is the beginning of a large one
        draw = random.Random(f"0 {split} {n}")
        kind = KINDS[n % len(KINDS)]
        # drawn once: rejecting strings of another split would leave short ones for dev and test
        digits_rule = draw.choice(GRAMMAR["digits"])
        text = ""
        while not text or split != _split_of(text, split):
            rule = digits_rule if kind == "digits" else draw.choice(GRAMMAR[kind])
            text = _expand(rule, draw)
        prosody = {name: draw.randint(*limits) for name, limits in PROSODY.items()}
        job = {"id": f"{split}-{kind}-{n:05d}", "text": text}
        jobs.append(job | draw.choice(of_split[split]) | prosody)
    return jobs


def _kind(id_: str) -> str:
    """The kind of the utterance with an id such as train-digits-00000."""
    return id_.split("-")[1]


def _expand(rule: str, draw: random.Random) -> str:
    """A random text of a rule, in which (a|b|c) means one of a, b and c."""

    def choose(group: re.Match[str]) -> str:
        return draw.choice(group[1].split("|"))

    while "(" in rule:
        rule = re.sub(r"\(([^()]*)\)", choose, rule)
    return " ".join(rule.split())


def _split_of(text: str, default: str) -> str:
    """The only split that may contain `text`, by its hash.

    `default` for up to three digits: there are too few such strings to divide.
    """
    words = text.split()
    if len(words) <= 3 and set(words) <= set(DIGITS.split("|")):
        return default
    first_digit = content_hash(text.encode()).removeprefix("sha256:")[0]
    return {"0": "test", "1": "dev"}.get(first_digit, "train")


def _build(folder: Path, jobs: list[dict[str, Any]], workers: int, progress: bool) -> None:
    """Synthesise `jobs` into `folder`, which appears when it is complete."""
    chunks = [
        jobs[first : first + JOBS_PER_PROCESS] for first in range(0, len(jobs), JOBS_PER_PROCESS)
    ]
    with new_folder(folder) as new:
        (new / "audio").mkdir()
        with ThreadPoolExecutor(workers) as pool:
            spoken = pool.map(_synthesise, chunks, repeat(new))
            bar = tqdm(spoken, "building speech", len(chunks), disable=not progress)
            cuts = [cut for chunk in bar for cut in chunk]
        for split in SPLITS:
            rows = (cut.to_dict() for cut in cuts if cut.id.startswith(split))
            save_to_jsonl(rows, new / f"cuts_{split}.jsonl.gz")


def _synthesise(jobs: list[dict[str, Any]], new: Path) -> list[Any]:
    """Synthesise jobs in a separate process; returns cuts of the FLAC files written to `new`."""
    with tempfile.TemporaryDirectory(dir=new) as wavs:
        jobs_file = Path(wavs, "jobs.json")
        jobs_file.write_text(json.dumps(jobs))
        worker = subprocess.run(
            [sys.executable, WORKER, jobs_file, wavs], capture_output=True, text=True
        )
        if worker.returncode:
            last_line = worker.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"{WORKER.name}: exit status {worker.returncode}: {last_line}")
        cuts = []
        for job in jobs:
            id_ = job["id"]
            samples = _to_flac(Path(wavs, f"{id_}.wav"), new / f"audio/{id_}.flac")
            source = AudioSource("file", [0], f"audio/{id_}.flac")
            recording = Recording(id_, [source], RATE_HZ, samples, samples / RATE_HZ)
            speaker = f"{job['voice']}+{job['variant']}".rstrip("+")
            cuts.append(
                transcribed_cut(recording.to_cut(), job["text"], speaker, {"kind": _kind(id_)})
            )
        return cuts


def _to_flac(wav: Path, flac: Path) -> int:
    """Write a 22,050 Hz WAV file as FLAC at 16 kHz; returns its number of samples.

    Resampled by FFT, which runs on one thread and gives equal bytes for equal input.
    """
    pcm, _ = soundfile.read(wav)
    # blocks of 441 samples become 320; a multiple of 8 blocks keeps the transform fast
    blocks = -(-len(pcm) // (8 * 441)) * 8
    spectrum = np.fft.rfft(pcm, blocks * 441)[: blocks * 160 + 1]
    resampled = np.fft.irfft(spectrum, blocks * 320) * (320 / 441)
    soundfile.write(flac, resampled, RATE_HZ, format="FLAC")
    return blocks * 320
