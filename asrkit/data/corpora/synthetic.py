"""Synthetic speech: a corpus spoken by espeak-ng."""

import gzip
import importlib.metadata
import inspect
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, Recording
from lhotse.serialization import load_jsonl
from tqdm import tqdm

from asrkit.data.corpora.manifests import RATE_HZ, SPLITS, transcribed_cut
from asrkit.files import atomic, content_hash, home
from asrkit.shapes import expect, whole

KINDS = ("digits", "commands", "sentences")
WORKER = Path(__file__).with_name("espeak_worker.py")
ESPEAK_RATE_HZ = 22_050
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
    seed: int = 0,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, CutSet]:
    """A corpus of synthetic English of 73 words: digit strings, commands and sentences.

    112 voices (accent and variant) speak at varied rate and pitch. No voice, command, sentence or
    string of four digits or more is in two splits. The corpus is built once and kept under
    home()/corpora, in a folder named by its content. A larger corpus begins with the smaller one.

    Args:
        train: Number of utterances in the training set.
        dev: Number of utterances in the development set.
        test: Number of utterances in the test set.
        kinds: Which utterances of these sets are wanted, of digits, commands and sentences, a third
            each; None for all. Others are not synthesised.
        seed: Of texts, voices and prosody.
        workers: Processes that synthesise; default 2.
        progress: Show a progress bar while the corpus is built.

    Returns:
        Cuts of `train`, `dev` and `test`. Each has one supervision, whose custom `kind` is one of
        digits, commands and sentences.

    Raises:
        RuntimeError: The synthesiser is not installed, or fails.
    """
    sizes = {"train": train, "dev": dev, "test": test}
    positive = all(whole(size, 0) for size in sizes.values())
    expect(positive, "train, dev, test", "whole numbers, 0 or more", tuple(sizes.values()))
    wanted = {*(kinds or KINDS)}
    expect(wanted <= {*KINDS}, "kinds", f"some of {', '.join(KINDS)}", sorted(wanted))
    jobs = _jobs(sizes, seed)
    if not intact(_folder("spoken_commands", jobs)):
        jobs = [job for job in jobs if _kind(job["id"]) in wanted]
    sets = spoken("spoken_commands", jobs, workers=workers, progress=progress)
    return {
        split: CutSet.from_cuts(cut for cut in cuts if _kind(cut.id) in wanted)
        for split, cuts in sets.items()
    }


def spoken(
    name: str, jobs: list[dict[str, Any]], *, workers: int | None, progress: bool
) -> dict[str, CutSet]:
    """Cuts of what jobs of `espeak_worker` say, by split; built once and kept.

    Args:
        name: Of the corpus.
        jobs: Their ids begin with the split and the kind: train-digits-00000.
        workers: Processes that synthesise; None is 2.
        progress: Show a progress bar while the corpus is built.

    Raises:
        RuntimeError: The synthesiser is not installed, or fails.
    """
    folder = _folder(name, jobs)
    if not intact(folder):
        _build(folder, jobs, workers or 2, progress)
    sets = {}
    for split in SPLITS:
        cuts = CutSet.from_dicts(load_jsonl(folder / f"cuts_{split}.jsonl.gz"))
        sets[split] = cuts.with_recording_path_prefix(folder)
    return sets


def _folder(name: str, jobs: list[dict[str, Any]]) -> Path:
    """Where the corpus of these jobs lies, whether it has been built or not."""
    try:
        engine = importlib.metadata.version("espeakng_loader")
    except importlib.metadata.PackageNotFoundError:
        remedy = 'Run pip install -e ".[synth]" in the checkout, or make report.'
        raise RuntimeError(
            f"{name}: the synthesiser espeakng_loader is not installed. {remedy}"
        ) from None
    steps = (_build, _synthesise, _to_flac, _job_cut, transcribed_cut, _write_manifests)
    sources = [inspect.getsource(step) for step in steps]
    key = content_hash([jobs, engine, WORKER.read_text(encoding="utf-8"), sources])
    return home() / "corpora" / f"{name}-{key.removeprefix('sha256:')[:16]}"


def voices_of_splits() -> dict[str, list[dict[str, str]]]:
    """Accents and variants that speak in each split, as jobs name them."""
    voices = [{"voice": accent, "variant": variant} for accent in ACCENTS for variant in VARIANTS]
    random.Random("voices").shuffle(voices)
    return {"test": voices[:12], "dev": voices[12:22], "train": voices[22:]}


def _jobs(sizes: dict[str, int], seed: int) -> list[dict[str, Any]]:
    """What the worker is to speak: a job for each utterance of each split."""
    of_split = voices_of_splits()
    return [
        _job(split, n, of_split[split], seed) for split, size in sizes.items() for n in range(size)
    ]


def _job(split: str, n: int, voices: list[dict[str, str]], seed: int) -> dict[str, Any]:
    # A generator for each job, so that a small corpus is the beginning of a large one.
    draw = random.Random(f"{seed} {split} {n}")
    kind = KINDS[n % len(KINDS)]
    # Drawn once: rejecting strings of another split would leave dev and test with short ones.
    digits_rule = draw.choice(GRAMMAR["digits"])
    text = ""
    while not text or split != _split_of(text, split):
        rule = digits_rule if kind == "digits" else draw.choice(GRAMMAR[kind])
        text = _expand(rule, draw)
    prosody = {name: draw.randint(*limits) for name, limits in PROSODY.items()}
    return {"id": f"{split}-{kind}-{n:05d}", "text": text, **draw.choice(voices), **prosody}


def _kind(id_: str) -> str:
    """The kind of the utterance with this id: train-digits-00000."""
    return id_.split("-")[1]


def _expand(rule: str, draw: random.Random) -> str:
    """A text of a rule, in which (a|b|c) stands for one of a, b and c."""

    def choose(group: re.Match[str]) -> str:
        return draw.choice(group[1].split("|"))

    while "(" in rule:
        rule = re.sub(r"\(([^()]*)\)", choose, rule)
    return " ".join(rule.split())


def _split_of(text: str, default: str) -> str:
    """The only split that may hold `text`, by its hash.

    `default` for up to three digits: there are too few such strings to divide them.
    """
    words = text.split()
    if len(words) <= 3 and set(words) <= set(DIGITS.split("|")):
        return default
    first_digit = content_hash(text.encode()).removeprefix("sha256:")[0]
    return {"0": "test", "1": "dev"}.get(first_digit, "train")


def intact(folder: Path) -> bool:
    """Whether a corpus is complete: its index as written, and each file of the right size.

    Args:
        folder: Of the corpus.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
        if content_hash(index["files"]) != index["content_sha256"]:
            return False
        for name, (size, sha256) in index["files"].items():
            file = folder / name
            if file.stat().st_size != size:
                return False
            if name.endswith(".gz") and content_hash(file.read_bytes()) != sha256:
                return False
    except (OSError, ValueError, KeyError):
        return False
    return True


def _build(folder: Path, jobs: list[dict[str, Any]], workers: int, progress: bool) -> None:
    """Synthesise `jobs` beside `folder`, then rename the result, so that `folder` is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(jobs), desc="building speech", unit="utt", disable=not progress)
    with (
        tempfile.TemporaryDirectory(
            prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as scratch,
        bar,
    ):
        new = Path(scratch, "new")
        (new / "audio").mkdir(parents=True)

        def speak(chunk: list[dict[str, Any]]) -> list[Any]:
            cuts = _synthesise(chunk, new, scratch)
            bar.update(len(chunk))
            return cuts

        starts = range(0, len(jobs), JOBS_PER_PROCESS)
        chunks = [jobs[first : first + JOBS_PER_PROCESS] for first in starts]
        with ThreadPoolExecutor(workers) as pool:
            cuts = [cut for chunk in pool.map(speak, chunks) for cut in chunk]
        _write_manifests(new, cuts)
        if not intact(folder):  # it is where another process was quicker, with the same content
            if folder.exists():
                folder.rename(Path(scratch, "damaged"))
            new.rename(folder)


def _synthesise(jobs: list[dict[str, Any]], new: Path, scratch: str) -> list[Any]:
    """Speak jobs in a process of its own; the cuts of the FLAC files that are made in `new`."""
    with tempfile.TemporaryDirectory(dir=scratch) as wavs:
        jobs_file = Path(wavs, "jobs.json")
        jobs_file.write_text(json.dumps(jobs))
        worker = subprocess.run(
            [sys.executable, WORKER, jobs_file, wavs], capture_output=True, text=True
        )
        if worker.returncode:
            lines = worker.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"{WORKER.name}: exit status {worker.returncode}: {lines[-1]}")
        cuts = []
        for job in jobs:
            wav = Path(wavs, f"{job['id']}.wav")
            samples = _to_flac(wav, new / f"audio/{job['id']}.flac")
            cuts.append(_job_cut(job, samples))
        return cuts


def _write_manifests(new: Path, cuts: list[Any]) -> None:
    """Write the cuts of each split, and an index with the size and hash of every file."""
    for split in SPLITS:
        lines = [json.dumps(cut.to_dict()) + "\n" for cut in cuts if cut.id.startswith(split)]
        packed = gzip.compress("".join(lines).encode(), mtime=0)
        (new / f"cuts_{split}.jsonl.gz").write_bytes(packed)
    files = {}
    for path in sorted(path for path in new.rglob("*") if path.is_file()):
        name = path.relative_to(new).as_posix()
        files[name] = (path.stat().st_size, content_hash(path.read_bytes()))
    with atomic(new / "index.json") as part:
        part.write_text(json.dumps({"content_sha256": content_hash(files), "files": files}))


def _to_flac(wav: Path, flac: Path) -> int:
    """Write a 22,050 Hz WAV file as FLAC at 16 kHz; the number of its samples.

    Resampled by FFT: it runs on one thread, and equal input gives equal bytes.
    """
    pcm, rate_hz = soundfile.read(wav)
    assert rate_hz == ESPEAK_RATE_HZ, rate_hz
    # Blocks of 441 samples become 320; a multiple of 8 blocks keeps the transform fast.
    blocks = -(-len(pcm) // (8 * 441)) * 8
    spectrum = np.fft.rfft(pcm, blocks * 441)[: blocks * 160 + 1]
    resampled = np.fft.irfft(spectrum, blocks * 320) * (320 / 441)
    soundfile.write(flac, resampled, RATE_HZ, format="FLAC")
    return blocks * 320


def _job_cut(job: dict[str, Any], samples: int) -> Any:
    id_ = job["id"]
    speaker = f"{job['voice']}+{job['variant']}".rstrip("+")
    source = AudioSource("file", [0], f"audio/{id_}.flac")
    recording = Recording(id_, [source], RATE_HZ, samples, samples / RATE_HZ)
    return transcribed_cut(recording, job["text"], speaker, {"kind": id_.split("-")[1]})
