"""Speech with transcripts as lhotse cuts at 16 kHz: synthesised here, or read from a manifest."""

import gzip
import importlib.metadata
import inspect
import json
import random
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import AudioSource, CutSet, Recording, RecordingSet, SupervisionSegment, SupervisionSet
from lhotse.audio import AudioLoadingError
from lhotse.serialization import load_jsonl
from lhotse.utils import fastcopy
from tqdm import tqdm

from asrkit.files import atomic, content_hash, home
from asrkit.shapes import expect

RATE_HZ, SPLITS, KINDS = 16_000, ("train", "dev", "test"), ("digits", "commands", "sentences")
TABLES = "*recordings{}.jsonl*", "*supervisions{}.jsonl*"
WORKER = Path(__file__).with_name("espeak_worker.py")
ACCENTS = (
    "en en-us en-gb-x-rp en-gb-scotland en-gb-x-gbclan en-gb-x-gbcwmd en-029 en-us-nyc".split()
)
VARIANTS = ["", *(f"m{n}" for n in range(1, 9)), *(f"f{n}" for n in range(1, 6))]
LIMITS = {
    "rate": (130, 210),
    "pitch": (25, 75),
    "range": (30, 70),
    "seed": (0, 2**31 - 1),
}  # words a minute; 0..99
DIGITS = "zero|one|two|three|four|five|six|seven|eight|nine"
GRAMMAR = {
    "digits": (f"({DIGITS})", *(f"({DIGITS})" + f" ({DIGITS})" * more for more in range(1, 6))),
    "commands": (
        "(turn on|turn off) the (kitchen|bedroom|garden) (light|heater|fan|radio)(| please| now)",
        "(open|close) the (kitchen|bedroom|garden) (door|window)(| please| now)",
        f"set a timer for ({DIGITS}) (|{DIGITS}) (minutes|hours)",
        f"set the (kitchen|bedroom) heater to ({DIGITS}) ({DIGITS})",
        "(call|find) (anna|peter|maria)(| please| now| again)",
        "play (the radio|music|a song)(| again) (for (anna|peter|maria)|in the (kitchen|bedroom|garden))",
    ),
    "sentences": (
        "the (old|young|small|happy) (dog|cat|bird|teacher|doctor|farmer) (walked|slept|waited|sang) "
        "(near|behind|under) the (green|old|small) (river|house|tree|school)",
        "(yesterday|today|every morning) (anna|peter|maria) (saw|found|heard) "
        "the (happy|small|old|green) (dog|cat|bird|teacher|doctor|farmer)( again| near the river|)",
    ),
}


def spoken_commands(
    *,
    train: int = 3000,
    dev: int = 150,
    test: int = 300,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, CutSet]:
    """{train, dev, test} of synthetic English: digit strings, commands and sentences (custom
    `kind`) of 73 words in all.

    112 voices (accent + variant) at varied rate and pitch; no voice, command, sentence or string of
    four digits or more is in two splits. Built once, by `workers` processes (default 2), and kept
    under home()/corpora by content.
    """
    try:
        engine = importlib.metadata.version("espeakng_loader")
    except importlib.metadata.PackageNotFoundError:
        remedy = 'Run pip install -e ".[synth]" in the checkout, or make report.'
        raise RuntimeError(
            f"spoken_commands: the synthesiser espeakng_loader is not installed. {remedy}"
        ) from None
    jobs = _jobs({"train": train, "dev": dev, "test": test}, seed)
    key = content_hash(
        [
            jobs,
            engine,
            WORKER.read_text(),
            [inspect.getsource(step) for step in (_build, _flac, _cut, _said)],
        ]
    )
    folder = home() / "corpora" / f"spoken_commands-{key.removeprefix('sha256:')[:16]}"
    if not intact(folder):
        _build(folder, jobs, workers or 2, progress)
    cuts = {
        split: CutSet.from_dicts(load_jsonl(folder / f"cuts_{split}.jsonl.gz")) for split in SPLITS
    }
    return {split: some.with_recording_path_prefix(folder) for split, some in cuts.items()}


def _jobs(sizes: dict[str, int], seed: int) -> list[dict[str, Any]]:
    voices = [{"voice": accent, "variant": variant} for accent in ACCENTS for variant in VARIANTS]
    random.Random("voices").shuffle(voices)
    of_split = {"test": voices[:12], "dev": voices[12:22], "train": voices[22:]}
    return [
        _job(split, n, of_split[split], seed) for split, size in sizes.items() for n in range(size)
    ]


def _job(split: str, n: int, voices: list[dict[str, str]], seed: int) -> dict[str, Any]:
    draw, kind, text = (
        random.Random(f"{seed} {split} {n}"),
        KINDS[n % 3],
        "",
    )  # of its own: small corpora begin large ones
    digits = draw.choice(
        GRAMMAR["digits"]
    )  # drawn once: else rejection would leave dev and test with short strings
    while not text or split != _split_of(text, split):
        text = digits if kind == "digits" else draw.choice(GRAMMAR[kind])
        while "(" in text:
            text = re.sub(r"\(([^()]*)\)", lambda found: draw.choice(found[1].split("|")), text)
        text = " ".join(text.split())
    how = {name: draw.randint(*limits) for name, limits in LIMITS.items()}
    return {"id": f"{split}-{kind}-{n:05d}", "text": text, **draw.choice(voices), **how}


def _split_of(text: str, default: str) -> str:
    """The one split that may hold `text`, by its hash; `default` for up to three digits, of which
    there are too few.
    """
    if set(text.split()) <= set(DIGITS.split("|")) and text.count(" ") < 3:
        return default
    return {"0": "test", "1": "dev"}.get(
        content_hash(text.encode())[7], "train"
    )  # first of 16 hexadecimal digits


def intact(folder: Path, *, thorough: bool = False) -> bool:
    """Whether a corpus is whole: the index as written, each file of its size, manifests (thorough:
    all) of their hash.
    """
    try:
        index = json.loads((folder / "index.json").read_text())
        return content_hash(index["files"]) == index["content_sha256"] and all(
            (folder / name).stat().st_size == size
            and (
                not (thorough or name.endswith(".gz"))
                or content_hash((folder / name).read_bytes()) == sha256
            )
            for name, (size, sha256) in index["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _build(folder: Path, jobs: list[dict[str, Any]], workers: int, progress: bool) -> None:
    """Synthesise `jobs` beside `folder` and rename the result: nothing unfinished ever bears the
    name.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=len(jobs), desc="building spoken_commands", unit="utt", disable=not progress)
    with (
        tempfile.TemporaryDirectory(
            prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as scratch,
        bar,
    ):
        new = Path(scratch, "new")
        (new / "audio").mkdir(parents=True)

        def synthesise(some: list[dict[str, Any]]) -> list[Any]:
            with tempfile.TemporaryDirectory(dir=scratch) as wavs:
                Path(wavs, "jobs.json").write_text(json.dumps(some))
                done = subprocess.run(
                    [sys.executable, WORKER, f"{wavs}/jobs.json", wavs],
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    why = (done.stderr.strip().splitlines() or ["no message"])[-1]
                    raise RuntimeError(f"espeak_worker.py: exit status {done.returncode}: {why}")
                made = [
                    _cut(job, _flac(f"{wavs}/{job['id']}.wav", new / f"audio/{job['id']}.flac"))
                    for job in some
                ]
            bar.update(len(some))
            return made

        with ThreadPoolExecutor(workers) as pool:
            chunks = pool.map(
                synthesise, (jobs[first : first + 100] for first in range(0, len(jobs), 100))
            )
            cuts = [cut for made in chunks for cut in made]
        for split in SPLITS:
            lines = [json.dumps(cut.to_dict()) + "\n" for cut in cuts if cut.id.startswith(split)]
            (new / f"cuts_{split}.jsonl.gz").write_bytes(
                gzip.compress("".join(lines).encode(), mtime=0)
            )
        paths = sorted(path for path in new.rglob("*") if path.is_file())
        files = {
            path.relative_to(new).as_posix(): (path.stat().st_size, content_hash(path.read_bytes()))
            for path in paths
        }
        with atomic(new / "index.json") as part:
            part.write_text(json.dumps({"content_sha256": content_hash(files), "files": files}))
        if not intact(folder):  # else another process was quicker, with the same content
            if folder.exists():
                folder.rename(Path(scratch, "damaged"))
            new.rename(folder)


def _flac(wav: str, flac: Path) -> int:
    """Write a 22,050 Hz WAV as FLAC at 16 kHz; its samples. By FFT: one thread, and equal bytes for
    equal input.
    """
    pcm, rate_hz = soundfile.read(wav)
    assert rate_hz == 22_050, rate_hz
    blocks = (
        -(-len(pcm) // (8 * 441)) * 8
    )  # 441 samples in, 320 out; a multiple of 8 keeps the transform fast
    spectrum = np.fft.rfft(pcm, blocks * 441)[: blocks * 160 + 1]
    soundfile.write(
        flac, np.fft.irfft(spectrum, blocks * 320) * (320 / 441), RATE_HZ, format="FLAC"
    )
    return blocks * 320


def _cut(job: dict[str, Any], samples: int) -> Any:
    id_, speaker = job["id"], f"{job['voice']}+{job['variant']}".rstrip("+")
    recording = Recording(
        id_, [AudioSource("file", [0], f"audio/{id_}.flac")], RATE_HZ, samples, samples / RATE_HZ
    )
    return _said(recording, job["text"], speaker, {"kind": id_.split("-")[1]})


def _said(recording: Recording, text: str, speaker: str, custom: dict[str, Any]) -> Any:
    cut = recording.to_cut()
    spoken = SupervisionSegment(
        cut.id, cut.id, 0, cut.duration, cut.channel, text, "en", speaker, custom=custom
    )
    return fastcopy(cut, supervisions=[spoken])


def from_manifest(path: str | Path, *, part: str = "*") -> CutSet:
    """Cuts at 16 kHz, audio read when used (`Utterances` averages channels); ValueError in one line
    for what cannot serve.

    path: a file of lhotse cuts (.jsonl, .jsonl.gz); a folder with lhotse recordings and
    supervisions; or a file of one JSON object a line with audio, text (and id, speaker, split,
    kind). Audio paths start at the manifest's folder or its parent.
    part: only the folder's tables that end so, `_dev` for recordings_dev.jsonl.gz.
    """
    path = Path(path)
    expect(path.exists(), "manifest", "a file or a folder", repr(str(path)))
    folder, cuts = path if path.is_dir() else path.parent, []
    try:
        if path.is_dir():
            audio, said = (
                [row for file in path.glob(name.format(part)) for row in load_jsonl(file)]
                for name in TABLES
            )
            if audio and said:
                whole = CutSet.from_manifests(
                    RecordingSet.from_dicts(audio), SupervisionSet.from_dicts(said)
                )
                cuts = list(whole.trim_to_supervisions(keep_overlapping=False))
        else:
            rows = list(load_jsonl(path))
            cuts = (
                list(CutSet.from_dicts(rows))
                if rows and "type" in rows[0]
                else [_simple(row, folder) for row in rows]
            )
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        AudioLoadingError,
        OSError,
        EOFError,
        zlib.error,
    ) as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"manifest: expected cuts, or lines with audio and text, got {got} in {path}."
        ) from None
    expect(bool(cuts), "manifest", "at least one utterance", f"none in {path}")
    return CutSet.from_cuts(_ready(cut, folder) for cut in cuts)


def _simple(row: dict[str, Any], folder: Path) -> Any:
    recording = Recording.from_file(
        _find(row["audio"], folder) / row["audio"], recording_id=str(row.get("id", row["audio"]))
    )
    custom: dict[str, Any] = {key: row[key] for key in ("kind", "split") if key in row}
    return _said(recording, row["text"], str(row.get("speaker", "unknown")), custom)


def _find(audio: str, folder: Path) -> Path:
    """The folder that the path `audio` starts from."""
    found = [base for base in (folder, folder.parent) if (base / audio).is_file()]
    expect(bool(found), "manifest", f"audio in {folder} or its parent", f"no file {audio!r}")
    return found[0]


def _ready(cut: Any, folder: Path) -> Any:
    """`cut` with its audio found, resampled when read, and surely with text."""
    texts = [one.text for one in cut.supervisions if one.text]
    said = all(isinstance(text, str) for text in texts) and " ".join(texts).strip()
    expect(bool(said), "manifest", "text for each utterance", f"{texts or 'none'} for {cut.id!r}")
    parts = [track.cut for track in cut.tracks] if hasattr(cut, "tracks") else [cut]
    for source in [part.recording.sources[0] for part in parts if part.has_recording][:1]:
        if source.type == "file" and not Path(source.source).is_absolute():
            cut = cut.with_recording_path_prefix(_find(source.source, folder))
    return cut if cut.sampling_rate == RATE_HZ else cut.resample(RATE_HZ)


def digit_strings(
    cuts: CutSet,
    *,
    count: int,
    digits: tuple[int, int] = (1, 6),
    pause_s: tuple[float, float] = (0.05, 0.25),
    seed: int = 0,
) -> CutSet:
    """`count` cuts, each of several one-word cuts of one speaker joined with pauses; a function of
    (cuts, seed).
    """
    of_speaker: dict[str, list[Any]] = {}
    for cut in cuts:
        if len(cut.supervisions) == 1 and len((cut.supervisions[0].text or "").split()) == 1:
            of_speaker.setdefault(str(cut.supervisions[0].speaker), []).append(cut)
    expect(bool(of_speaker), "cuts", "cuts of one word each", "none")
    draw, joined = random.Random(f"digits {seed}"), []
    for n in range(count):
        speaker = draw.choice(sorted(of_speaker))
        whole, *others = draw.choices(of_speaker[speaker], k=draw.randint(*digits))
        for other in others:
            whole = whole.pad(duration=whole.duration + draw.uniform(*pause_s)).append(other)
        whole = whole.merge_supervisions().with_id(
            f"digits-{seed}-{n:05d}"
        )  # joins the texts, and the speakers too
        joined.append(
            whole.map_supervisions(partial(fastcopy, speaker=speaker, custom={"kind": "digits"}))
        )
    return CutSet.from_cuts(joined)


def load(
    manifests: Sequence[str | Path] = ("spoken_commands",),
    *,
    hold_out: str | None = None,
    join_digits: int = 0,
    kinds: Sequence[str] | None = None,
    progress: bool = True,
) -> dict[str, CutSet]:
    """{train, dev, test} mixed from "spoken_commands" and manifests, whose cuts go where their
    `split` says, else to train.

    hold_out: a speaker of the manifests, who becomes their test set. kinds: of spoken_commands,
    these only.
    join_digits: that many digit strings of one-word cuts join the cuts in train; a tenth of it
    takes their place in the others.
    """
    expect(join_digits >= 0, "join_digits", "a number of strings", join_digits)
    sets: dict[str, list[Any]] = {split: [] for split in SPLITS}
    speakers = set()
    for number, manifest in enumerate(manifests):
        if manifest == "spoken_commands":
            for split, cuts in spoken_commands(progress=progress).items():
                sets[split] += [
                    cut for cut in cuts if cut.supervisions[0].custom["kind"] in (kinds or KINDS)
                ]
            continue
        parts: dict[str, list[Any]] = {split: [] for split in SPLITS}
        for cut in from_manifest(manifest):
            said = cut.supervisions[0]
            split = (
                str((said.custom or {}).get("split")).lower().partition("-")[0]
            )  # test-other is a test set
            speakers.add(str(said.speaker))
            if hold_out is not None:
                split = (
                    "test"
                    if str(said.speaker) == hold_out
                    else "train"
                    if split == "test"
                    else split
                )
            parts.get(split, parts["train"]).append(cut)
        for split, cuts in parts.items():
            count = join_digits if split == "train" else -(-join_digits // 10)
            joined = (
                digit_strings(CutSet.from_cuts(cuts), count=count, seed=number)
                if count and cuts
                else ()
            )
            sets[split] += [*joined, *(cuts if split == "train" or not joined else ())]
    expect(
        hold_out is None or hold_out in speakers,
        "hold_out",
        f"one of the speakers {sorted(speakers)[:9]}",
        repr(hold_out),
    )
    return {split: CutSet.from_cuts(cuts) for split, cuts in sets.items()}
