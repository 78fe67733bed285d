"""Cases of whole programs: files to text, and a command from its start to the text of one file.

Each program runs in a process of its own (`peer_programs.py`), on two threads, with the same
weights in the form that it reads, and programs take turns. Their texts are compared with what was
said, where that is known, and with those of asrkit in float32: of random weights a program whose
features differ, as sherpa-onnx's do, writes other words, as many of them.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

from asrkit.cpu import fast_dtype, has_int8
from asrkit.text import cer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, read_wav
from asrkit.workbench.measure import Sample, Timing, measure
from asrkit.workbench.measure.publishing import arm_measurements, error_rate, latency, time_ratio
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case
from benchmarks.peers.processes import Peers
from benchmarks.programs import peer_programs, whisper_programs
from benchmarks.programs.recorded import word_errors

SCRIPT = Path(__file__).with_name("peer_programs.py")
THREADS = 2
FIRST = "asrkit_float32"
OURS = ("asrkit_float32", "asrkit_bfloat16", "asrkit_int8")
ONNX = (
    "sherpa_onnx_{}_float32",
    "sherpa_onnx_{}_int8",
    "onnxruntime_{}_float32",
    "onnxruntime_{}_int8",
)
PEERS = {
    "ctc": (*(name.format("ctc") for name in ONNX), "nemo", "transformers_ctc"),
    "rnnt": (*(name.format("rnnt") for name in ONNX), "nemo"),
    "whisper": (*whisper_programs.PROGRAMS,),
}
PROGRAMS = peer_programs.PROGRAMS | whisper_programs.PROGRAMS


@dataclass(kw_only=True)
class Program:
    """An arm: a call transcribes all files.

    Attributes:
        peer: its process.
        texts: of the last call.
        peak_B: the most memory that its process has held.
    """

    peer: Any
    texts: list[str] = field(default_factory=list)
    peak_B: int | None = None

    def __call__(self) -> Sample:
        answer = self.peer.ask("observe")
        self.texts, self.peak_B = answer["texts"], answer["peak_B"]
        return Sample(wall_ms=answer["wall_ms"], cpu_ms=answer["cpu_ms"])


@dataclass(frozen=True, kw_only=True)
class Task:
    """What programs transcribe.

    Attributes:
        kind: "ctc", "rnnt" or "whisper".
        model: a checkpoint, or a Whisper's folder.
        folder: for the model in other forms.
        files: recordings.
        first: what programs transcribe before they are timed, and in a cold command.
        params: of every record.
        said: the words of each file, or of the parts of the one file; () where nobody speaks.
        rounds: in which each program has its turn.
    """

    kind: str
    model: Path
    folder: Path
    files: Sequence[Path]
    first: Path
    params: Mapping[str, Any]
    said: Sequence[str] = ()
    rounds: int = 3

    def models(self, python: str, names: Sequence[str]) -> dict[str, Path]:
        """The model in the form of each program; one that cannot be written is named on stderr."""
        found: dict[str, Path] = {}
        for name in names:
            form = PROGRAMS[name][1]
            path = self.folder / f"{self.kind}-{form}" if form else self.model
            if not path.exists():
                command = [python, "-W", "ignore", str(SCRIPT), "--write", form]
                command += [str(self.model), str(path)]
                made = subprocess.run(command, capture_output=True, text=True)
                if made.returncode:
                    why = made.stderr.strip().rpartition("\n")[2]
                    print(f"{name} is left out: {why}", file=sys.stderr)
                    continue
            found[name] = path
        return found


def seconds(files: Sequence[Path]) -> float:
    """Seconds of audio in WAV files."""
    return sum(len(read_wav(file)) for file in files) / RATE_HZ


def has_bfloat16() -> bool:
    """Whether this CPU is fast in it."""
    return fast_dtype() == "bfloat16"


def ours() -> list[str]:
    """asrkit's ways on this CPU."""
    runs = {"asrkit_float32": True, "asrkit_bfloat16": has_bfloat16()}
    runs["asrkit_int8"] = has_int8()
    for name in (name for name, here in runs.items() if not here):
        print(f"{name} is left out: this CPU has no such products", file=sys.stderr)
    return [name for name, here in runs.items() if here]


def cases(tasks: Mapping[str, Task], peers: Peers | None) -> Iterator[Case]:
    """Yield a case of each name, whose task is measured cold where the name begins so.

    Args:
        tasks: by the name of the case, all with one model.
        peers: other programs beside asrkit.
    """
    (task, *_) = tasks.values()
    pythons = dict.fromkeys(ours(), sys.executable)
    models = dict.fromkeys(pythons, task.model)
    if peers is not None:
        names = [one for one in PEERS[task.kind] if not one.endswith("_bfloat16") or has_bfloat16()]
        theirs = task.models(str(peers.python), names)
        pythons |= dict.fromkeys(theirs, str(peers.python))
        models |= theirs
    for what, task in tasks.items():
        measured = cold if what.startswith("cold-") else files
        yield Case(what=what, measure=partial(measured, what, task, pythons, models))


def files(
    what: str, task: Task, pythons: Mapping[str, str], models: Mapping[str, Path]
) -> Iterator[Measurement]:
    """Measure all programs over all files, in turns.

    Args:
        what: name of the case.
        task: what they transcribe.
        pythons: the Python of each program.
        models: its form of the model.
    """
    request = {"threads": THREADS, "first": str(task.first)}
    request["files"] = [*map(str, task.files)]
    arms: dict[str, Program] = {}
    kinds = {name: (name,) for name in pythons}
    with ExitStack() as stack:
        processes = {
            python: stack.enter_context(Peers(python, kinds, SCRIPT))
            for python in {*pythons.values()}
        }
        for name, python in pythons.items():
            started = processes[python].arms(name, **request, model=str(models[name]))
            arms |= {name: Program(peer=peer) for name, peer in started.items()}
        timings = measure(arms, repeats=task.rounds, warmup=0)
    for name, timing in timings.items():
        program = arms[name]
        params = {**task.params, "peer": program.peer.version, **agreement(arms[FIRST], program)}
        if task.kind == "whisper":
            params["decoding"] = decoding(name)
        shared: dict[str, Any] = {"impl": name, "params": params}
        yield from arm_measurements(
            what,
            timing,
            audio_s=params["audio_s"],
            peak_B=program.peak_B,
            memory_timer="VmHWM of its process",
            **shared,
        )
        if task.said:
            yield error_rate(what, "wer", word_errors(task.said, program.texts), **shared)
    yield from ratios(what, timings, task.params)


def decoding(name: str) -> str:
    """How a program decodes by a Whisper."""
    table = whisper_programs.DECODING
    return next(text for beginning, text in table.items() if name.startswith(beginning))


def agreement(first: Program, other: Program) -> dict[str, Any]:
    """Files with the same text, and edits of characters over those of the first."""
    same = [one == two for one, two in zip(first.texts, other.texts, strict=True)]
    return {
        "same_texts": sum(same),
        "characters": sum(map(len, other.texts)),
        "edited": cer(first.texts, other.texts).rate,
    }


def ratios(
    what: str, timings: Mapping[str, Timing], params: Mapping[str, Any]
) -> Iterator[Measurement]:
    """How many times as long asrkit in float32 took as each other program."""
    for name in timings:
        if name != FIRST:
            named = {**params, "arms": [FIRST, name]}
            yield time_ratio(what, timings, FIRST, name, impl=name, params=named)


def cold(
    what: str, task: Task, pythons: Mapping[str, str], models: Mapping[str, Path]
) -> Iterator[Measurement]:
    """Measure commands from their start to the text of one file, in turns, with a warm cache.

    Args:
        what: name of the case.
        task: whose `first` they transcribe.
        pythons: the Python of each program.
        models: its form of the model.
    """
    arms = {}
    for name, python in pythons.items():
        arm = Command(command(name, python, models[name], task.first))
        try:
            arm()
            arms[name] = arm
        except RuntimeError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    timings = measure(arms, repeats=task.rounds, warmup=0)
    params = {**task.params, "files": 1, "audio_s": seconds([task.first])}
    for name, timing in timings.items():
        yield latency(what, replace(timing, warmup=1), impl=name, params=params)
    yield from ratios(what, timings, params)


def command(name: str, python: str, model: Path, file: Path) -> list[str]:
    """A command that prints the text of a file first."""
    if name not in OURS:
        return [python, "-W", "ignore", str(SCRIPT), name, str(model), str(THREADS), str(file)]
    dtype = ["--dtype", name.partition("_")[2], "--threads", str(THREADS)]
    return [python, "-m", "asrkit", "transcribe", str(file), "--model", str(model), *dtype]


@dataclass(frozen=True)
class Command:
    """An arm: a call runs a command, and takes the time until its first line."""

    words: Sequence[str]

    def __call__(self) -> Sample:
        start = time.perf_counter_ns()
        with subprocess.Popen(self.words, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert process.stdout
            text = process.stdout.readline()
            wall_ns = time.perf_counter_ns() - start
            _, errors = process.communicate()
        if not text.strip():
            raise RuntimeError(errors.strip().rpartition("\n")[2])
        return Sample(wall_ms=wall_ns / 1e6, cpu_ms=None)
