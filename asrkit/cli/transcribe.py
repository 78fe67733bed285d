"""`asrkit transcribe`: its options, what is refused, and the way from recordings to transcripts."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.cli.command import Command, ProgressOptions, count, finish
from asrkit.cli.options import check_device, check_writable, prepare_torch
from asrkit.files import home
from asrkit.shapes import expect
from asrkit.transcribe.options import (
    BeamOptions,
    FileOptions,
    ModelOptions,
    PipelineConfig,
    PromptOptions,
    ShardOptions,
    WindowOptions,
)

NEEDED = {  # option -> the one it has a meaning with
    "part": "shards",
    "shard_h": "shards",
    "on": "shards",
    "address": "on",
    "actors": "on",
    "shards": "out",
    "engine": "model",
}
EXCLUDED = {  # option -> those that say the same of something else
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
    from asrkit.transcribe import TIMED

    use, windows = asked.use, asked.windows
    usual = "json" if asked.bulk.shards or (asked.json and not asked.io.out) else "txt"
    format_ = asked.io.format or usual
    timed = format_ in TIMED
    check_device(use.device, use.threads, here=not asked.bulk.on)
    _check(asked, format_, timed=timed)
    if asked.io.out:
        check_writable(asked.io.out)  # now, not when the first file is done
    dtype = _dtype(asked)
    windows = replace(windows, timestamps=windows.timestamps or timed)
    config = PipelineConfig(precision=dtype.precision, search=asked.search, prompt=asked.prompt)
    if asked.bulk.shards:
        return _transcribe_shards(asked, windows, config, dtype)
    return _transcribe_files(asked, windows, config, dtype, format_)


def _check(asked: TranscribeOptions, format_: str, *, timed: bool) -> None:
    """ValueError for options that do not go together."""
    given: dict[str, Any] = {}
    for part in (asked.io, asked.bulk, asked.use):
        for one in fields(part):
            value = getattr(part, one.name)
            if value != one.default:
                given[one.name] = value
    for name, other in NEEDED.items():
        expect(name not in given or other in given, name, f"--{other} with it", given.get(name))
    for name, others in EXCLUDED.items():
        for other in others:
            both = name in given and other in given
            expect(not both, other, f"none with --{name} {given.get(name)}", given.get(other))
    int8 = "engine" in given and asked.use.dtype == "int8"
    expect(not int8, "dtype", "float32 or bfloat16 with --engine", "int8", "Export with --int8.")
    rows = format_ == "json"
    expect("out" in given or not timed, "format", "txt or json without --out", format_)
    expect("shards" not in given or rows, "format", "json with --shards", format_)
    numbered = "on" in given and asked.use.device not in ("cpu", "cuda")
    expect(not numbered, "device", "cpu or cuda with --on ray", asked.use.device)
    wanted = "--out DIR, or transcripts in JSON"
    expect("out" in given or rows or not asked.json, "json", wanted, f"--format {format_}")
    wanted = "a --format with times: json, srt, vtt or ctm"
    expect(format_ != "txt" or not asked.windows.timestamps, "timestamps", wanted, format_)


class _Dtype(NamedTuple):
    """The dtype to load a model in, the recogniser's precision, and why --dtype auto is that."""

    name: str
    precision: Any = "as_loaded"
    why: str = ""


def _dtype(asked: TranscribeOptions) -> _Dtype:
    use, out = asked.use, asked.io.out
    if use.dtype == "int8":
        from asrkit.models.int8 import loaded_dtype

        return _Dtype(loaded_dtype("int8"), "int8")
    if use.dtype != "auto":
        return _Dtype(use.dtype)
    if use.engine != "torch":
        return _Dtype("float32")
    from asrkit.transcribe.shards import PLAN, load_plan

    if out and asked.bulk.shards and (out / PLAN).is_file():
        head, _ = load_plan(out)
        return _Dtype(head.dtype, head.precision, f"the plan in {out} has it")
    from asrkit.cpu import fast_dtype

    name = fast_dtype(use.device)
    has = "has" if name == "bfloat16" else "lacks"
    return _Dtype(name, why=f"this {use.device} {has} products of bfloat16")


def _model_path(use: ModelOptions) -> Path:
    """--model, or the folder where notebook 00 left one."""
    demo = home(make=False) / "demo"
    there = use.model is not None or (demo / "model.safetensors").is_file()
    remedy = "Run it (make report), or pass --model."
    expect(there, "model", "the demo of notebook 00", f"none in {demo}", remedy)
    return use.model or demo


def _layout(use: ModelOptions, recordings: int | None = None) -> Any:
    """The processes that --workers asks for; None where it was not given.

    Call it before torch computes anything: this process keeps to one thread from here on.
    """
    if use.workers is None:
        return None
    import torch

    from asrkit.transcribe import choose_layout

    asked: Any = int(use.workers) if use.workers.isdecimal() else use.workers
    path = _model_path(use)
    size = sum(file.stat().st_size for file in (path, *path.glob("*.safetensors")))
    layout = choose_layout(asked, threads=use.threads, recordings=recordings, model_bytes=size)
    torch.set_num_threads(1)  # threads do not outlive a fork
    return layout


def _tell(dtype: _Dtype, layout: Any) -> None:
    """Say on stderr what was chosen, in a line; nothing where nothing was."""
    if layout is not None:
        workers, threads = count(layout.workers, "worker"), count(layout.threads, "thread")
        pinned = "pinned to their cores" if layout.pinned else "not pinned"
        line = f"{workers} ({layout.why}), {threads} each, {pinned}; {dtype.name}"
        print(line, file=sys.stderr)
    elif dtype.why:
        print(f"dtype: {dtype.name}, as {dtype.why}", file=sys.stderr)


def _load(use: ModelOptions, dtype: str) -> Any:
    """The checkpoint of --model in the engine of --engine, on the device."""
    from asrkit.export import is_exported

    path = _model_path(use)
    if use.engine != "torch":
        from asrkit.export import load_exported

        return load_exported(path, use.engine, precision=dtype)
    expect(not is_exported(path), "engine", "onnxruntime or openvino for this --model", "torch")
    import torch

    from asrkit.models import limit_context, load_checkpoint

    checkpoint = load_checkpoint(path, device=use.device, dtype=getattr(torch, dtype))
    if use.context:
        left, right = use.context
        limit_context(checkpoint.model, (left, right))
    return checkpoint


def _transcribe_files(
    asked: TranscribeOptions, windows: WindowOptions, config: Any, dtype: _Dtype, format_: str
) -> int:
    """Transcribe file by file, in this process or in --workers; returns the exit code."""
    prepare_torch(asked.use.device, asked.use.threads)
    from asrkit.transcribe import Folder, Recognizer, find, transcribe, transcribe_in_workers

    recordings, folder = find(asked.io.files), None
    layout = _layout(asked.use, len(recordings))
    checkpoint = _load(asked.use, dtype.name)
    todo = [path for path, _ in recordings]
    if asked.io.out:
        out = asked.io.out
        folder = Folder(out, recordings, checkpoint, windows, config=config, kind=format_)
        todo = folder.todo()
    # In place, now that the folder has hashed the weights: a copy would take their memory twice.
    recognizer = Recognizer.from_checkpoint(checkpoint, config, in_place=True)
    how: Any = {"options": windows, "recognizer": recognizer, "progress": not asked.no_progress}
    _tell(dtype, layout)
    start = time.perf_counter()
    if layout is None:
        transcripts = transcribe(checkpoint, todo, **how)
    else:
        transcripts = transcribe_in_workers(checkpoint, todo, layout, **how)
    failed, audio_s = _write(transcripts, folder, format_)
    elapsed_s = time.perf_counter() - start  # with reading and writing, without loading the model
    result = {
        "files": len(recordings),
        "failed": failed,
        "skipped": len(recordings) - len(todo),
        "audio_s": round(audio_s, 2),
        "rtfx": round(audio_s / elapsed_s, 1),
    }
    _report(asked, result)
    return int(failed > 0)


def _write(transcripts: Iterable[Any], folder: Any, format_: str) -> tuple[int, float]:
    """Write each transcript as it comes, to `folder` or else to stdout, and errors to stderr.

    Returns (number of files that failed, seconds of audio transcribed).
    """
    from tqdm import tqdm

    from asrkit.transcribe import summary
    from asrkit.transcribe.manifests import CONTAINERS, MANIFESTS

    failed, audio_s = 0, 0.0
    for one in transcripts:
        audio_s += one.audio_s
        if one.error:
            failed += 1
            hint = ""
            if one.path.name.lower().endswith((*CONTAINERS, *MANIFESTS)):
                hint = " Pass --out DIR --shards to transcribe the recordings in it."
            tqdm.write(f"{one.path}: {one.error}{hint}", file=sys.stderr)
        elif folder:
            folder.write(one)
        else:
            rows = format_ == "json"
            tqdm.write(json.dumps(summary(one)) if rows else f"{one.path}\t{one.text}")
            sys.stdout.flush()  # so that a reader of a pipe sees each as it comes
    return failed, audio_s


def _report(asked: TranscribeOptions, result: dict[str, Any]) -> None:
    """Say how many files were transcribed; on stderr where stdout holds the transcripts."""
    done = result["files"] - result["failed"] - result["skipped"]
    text = f"{done} of {count(result['files'], 'file')} transcribed"
    for words, name in {"done before": "skipped", "failed": "failed"}.items():
        if result[name]:
            text += f", {result[name]} {words}"
    text += f"; {result['audio_s']:,} s of audio at RTFx {result['rtfx']:,}"
    if asked.io.out:
        result["out"] = str(asked.io.out)
        finish(asked, result, f"{text}. Transcripts: {asked.io.out}")
    else:
        print(text, file=sys.stderr)


def _transcribe_shards(
    asked: TranscribeOptions, windows: WindowOptions, config: Any, dtype: _Dtype
) -> int:
    """Plan, or find the plan again, and transcribe a part of it; returns the exit code."""
    from asrkit.transcribe.ray import RayCluster
    from asrkit.transcribe.shards import Task, plan, run

    bulk, use, out = asked.bulk, asked.use, asked.io.out
    assert out is not None, "--shards needs it"
    cluster = RayCluster(address=bulk.address, actors=bulk.actors) if bulk.on else None
    context: Any = tuple(use.context) if use.context else None
    model = _model_path(use)
    task = Task(model=model, dtype=dtype.name, context=context, windows=windows, config=config)
    layout = _layout(use)  # before the model is loaded
    planned = plan(asked.io.files, task, out, shard_h=bulk.shard_h, device=use.device)
    _tell(dtype, layout)
    start, shown = time.perf_counter(), not asked.no_progress
    how: Any = {"device": use.device, "threads": use.threads, "workers": layout}
    report = run(planned, part=bulk.numbers(), cluster=cluster, progress=shown, **how)
    result = {
        **asdict(report),
        "rtfx": round(report.transcribed_s / (time.perf_counter() - start), 1),
        "out": str(out),
    }
    text = (
        "{done:,} of {shards:,} shards done: {recordings:,} recordings, {audio_s:,.0f} s of audio, "
        "{failed:,} failed; now {transcribed_s:,.0f} s at RTFx {rtfx:,}"
    )
    finish(asked, result, f"{text}. Results: {{out}}".format(**result))
    return int(report.failed > 0)


COMMAND = Command(
    name="transcribe",
    summary="Transcribe sound files, long ones in windows.",
    details="A file that cannot be read is reported, the others are transcribed, and the exit "
    "code is 1. With --json, stdout has one JSON line a file, or with --out one JSON document of "
    "counts. With --shards, the counts and the exit code are of all results in the folder, those "
    "of earlier runs included, and of the shards of this part.",
    options=TranscribeOptions,
    run=_transcribe,
    examples=[
        "asrkit transcribe talk.wav",
        "asrkit transcribe talks/ call.mp3 --model models/mine --format srt --out text",
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
