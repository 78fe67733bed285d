"""Bulk transcription as a user types it: whole commands, in processes of their own, on given cores.

The suite `bulk` times them. A run is what is typed at once: one command, or a command a part.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asrkit
from asrkit.shapes import expect

SCALE_PYTHON = Path(asrkit.__file__).resolve().parents[1] / ".venv-scale/bin/python"
MOST_LINES = 5  # of a command's stderr in an error
RATE_HZ = 16_000

# Programs that are started with `python -c`, so that they import what they measure and no more.
ASRKIT = "import sys; from asrkit.cli import main; sys.exit(main(sys.argv[1:]))"
WITHOUT_TORCH = f"import sys; sys.modules['torch'] = sys.modules['ray'] = None; {ASRKIT}"
PLAN = """
import json, sys
from pathlib import Path
from asrkit.transcribe.bulk import Task, plan
planned = plan(sys.argv[1], Task(model=Path(sys.argv[2])), sys.argv[3])
status = Path("/proc/self/status").read_text()
peak_kB = int(status.partition("VmHWM:")[2].split()[0])
print(json.dumps({"shards": len(planned.shards), "peak_B": 1024 * peak_kB}))
"""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Recordings of one size of a run, in a folder and in a manifest of the same files.

    Args:
        folder: of the sound files.
        manifest: with an id, a path and a duration a line.
        recordings: how many.
        audio_s: their seconds.
    """

    folder: Path
    manifest: Path
    recordings: int
    audio_s: float


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What a run took.

    Args:
        wall_s: from the start of the first command to the end of the last.
        cpu_s: of all its processes that have ended and were waited for.
        results: what each command printed, as JSON.
    """

    wall_s: float
    cpu_s: float
    results: list[dict[str, Any]]


def write_flac(path: Path, samples: Any) -> Path:
    """Write a FLAC file of 16 kHz; returns its path.

    Args:
        path: of the file.
        samples: (S,) int16.
    """
    import soundfile

    soundfile.write(str(path), samples, RATE_HZ)
    return path


def make_corpus(folder: Path, files: Sequence[Path], samples: Sequence[int], copies: int) -> Corpus:
    """A corpus in which each of some files stands under several names, as hard links.

    Args:
        folder: made here.
        files: sound files.
        samples: of each file.
        copies: names of each file.
    """
    sounds = folder / "sounds"
    sounds.mkdir(parents=True)
    lines = []
    for copy in range(copies):
        for file, size in zip(files, samples, strict=True):
            name = f"{copy:04d}-{file.name}"
            (sounds / name).hardlink_to(file)
            row = {"id": name, "audio_filepath": f"sounds/{name}", "duration": size / RATE_HZ}
            lines.append(json.dumps(row) + "\n")
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(lines))
    return Corpus(
        folder=sounds,
        manifest=manifest,
        recordings=len(lines),
        audio_s=copies * sum(samples) / RATE_HZ,
    )


def write_manifest(path: Path, recordings: int, durations_s: Sequence[float]) -> None:
    """Write a manifest of recordings that do not exist, as a large corpus has it.

    Args:
        path: of the file.
        recordings: lines.
        durations_s: seconds of some recordings; their lengths follow each other again and again,
            each time a little longer.
    """
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, recordings, len(durations_s)):
            longer_s = start / len(durations_s) / 1000
            rows = zip(range(start, recordings), durations_s, strict=False)
            file.writelines(_manifest_line(row, seconds + longer_s) for row, seconds in rows)


def _manifest_line(row: int, seconds: float) -> str:
    """The line of a recording of so many seconds, by its number."""
    path = f"/corpus/{row // 1000:05d}/{row:08d}.flac"
    name = f"speaker-{row % 9973:04d}-{row:08d}"
    return f'{{"id": "{name}", "audio_filepath": "{path}", "duration": {seconds:.3f}}}\n'


def transcribe(*arguments: object, program: str = ASRKIT, python: Path | None = None) -> list[str]:
    """The words of an `asrkit transcribe` that prints JSON.

    Args:
        *arguments: what is typed after it.
        program: what Python runs.
        python: that runs it; None: this one.
    """
    words = ["transcribe", *map(str, arguments), "--no-progress", "--json"]
    return [str(python or sys.executable), "-c", program, *words]


def plan(manifest: Path, model: Path, out: Path) -> list[str]:
    """The words of a process that makes a plan; it prints the number of shards, and its memory.

    Args:
        manifest: what is planned.
        model: that is to hear it.
        out: folder of the plan.
    """
    return [sys.executable, "-c", PLAN, str(manifest), str(model), str(out)]


def run(commands: Sequence[Sequence[str]], cores: Sequence[int] | None = None) -> Finished:
    """Start commands at the same time and wait until all have ended.

    Args:
        commands: words of each; each prints one JSON document.
        cores: the core that each command and all that it starts is pinned to; None: all cores.

    Raises:
        RuntimeError: A command failed; its last lines say why.
    """
    package = str(Path(asrkit.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    how: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": {**os.environ, "PYTHONPATH": path},
    }
    start = time.perf_counter()
    cpu_start_s = children_cpu_s()
    with contextlib.ExitStack() as running:
        processes = []
        for number, command in enumerate(commands):
            with pinned_to(None if cores is None else cores[number]):
                process = running.enter_context(subprocess.Popen(command, **how))
            running.callback(process.kill)
            processes.append(process)
        results = [_result(process) for process in processes]
    wall_s = time.perf_counter() - start
    return Finished(wall_s=wall_s, cpu_s=children_cpu_s() - cpu_start_s, results=results)


def _result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What a process printed, once it has ended."""
    out, err = process.communicate()
    if process.returncode != 0:
        last = " ".join(err.strip().splitlines()[-MOST_LINES:])
        raise RuntimeError(f"a command ended with exit code {process.returncode}: {last} {out}")
    return json.loads(out)


@contextlib.contextmanager
def pinned_to(core: int | None) -> Iterator[None]:
    """Pin this thread, and the processes that it starts meanwhile, to a core.

    Args:
        core: its number; None: pin nothing.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def children_cpu_s() -> float:
    """CPU seconds of the processes that this one started and that have ended."""
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def expect_all_heard(out: Path, corpus: Corpus, finished: Finished) -> None:
    """ValueError unless a run has heard all recordings of a corpus once, and none failed.

    Args:
        out: folder of the results of a bulk run, or of transcripts.
        corpus: what was heard.
        finished: what its commands said.
    """
    from asrkit.transcribe.bulk import rows

    if (out / "plan.json").exists():
        heard = [(row["id"], row["error"]) for row in rows(out)]
    else:
        heard = [(path.name, "") for path in out.glob("*.txt")]
    failed = sum(result["failed"] for result in finished.results)
    expect(failed == 0, "run", "no recording that failed", failed)
    wanted = f"{corpus.recordings} recordings, each once"
    names = {name for name, _ in heard}
    whole = len(heard) == len(names) == corpus.recordings
    expect(whole, "run", wanted, f"{len(heard)} results of {len(names)} recordings")


def shards_s(out: Path) -> list[float]:
    """Seconds of audio in each shard of the plan in a folder; none where there is no plan."""
    from asrkit.transcribe.bulk import load_plan

    if not (out / "plan.json").exists():
        return []
    return [shard.planned_s for shard in load_plan(out).shards]


@contextlib.contextmanager
def removed(folder: Path) -> Iterator[Path]:
    """The name of a folder that is not there yet, and is removed in the end."""
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
