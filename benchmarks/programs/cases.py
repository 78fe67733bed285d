"""Cases of whole programs: files to text, and a cold command to the text of one file.

Each program runs in its own process (program_worker.py) on two threads, with the same weights in
its own form, and programs take turns. Texts are compared with the references, if there are any, and
with those of asrkit in float32. With random weights a program whose features differ, such as
sherpa-onnx, writes other words, but about as many.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asrkit.cpu import fast_dtype, has_int8
from asrkit.text import cer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, read_wav
from asrkit.workbench.measure import Sample, Timing, measure
from asrkit.workbench.measure.publishing import arm_measurements, error_rate, latency, time_ratio
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case
from benchmarks.peers.processes import Peer, Peers, worker_environment
from benchmarks.programs import whisper_programs
from benchmarks.programs.program_worker import PROGRAMS
from benchmarks.programs.recorded import word_errors

WORKER = "benchmarks.programs.program_worker"
THREADS = 2
BASELINE = "asrkit_float32"
MEMORY = "VmHWM of its process"
OURS = (BASELINE, "asrkit_bfloat16", "asrkit_int8")
# other programs by the head of the model; a large model (TDT) leaves out the plain script with ONNX
# Runtime, since onnx-asr has this engine too and the memory of all programs adds up
PEERS: dict[str, tuple[str, ...]] = {
    "ctc": (
        "sherpa_onnx_ctc_float32",
        "sherpa_onnx_ctc_int8",
        "onnx_asr_ctc_float32",
        "onnx_asr_ctc_int8",
        "onnxruntime_ctc_float32",
        "onnxruntime_ctc_int8",
        "openvino_ctc_float32",
        "openvino_ctc_bfloat16",
        "openvino_ctc_int8",
        "nemo",
        "transformers_ctc",
    ),
    "rnnt": (
        "sherpa_onnx_rnnt_float32",
        "sherpa_onnx_rnnt_int8",
        "onnx_asr_rnnt_float32",
        "onnx_asr_rnnt_int8",
        "onnxruntime_rnnt_float32",
        "onnxruntime_rnnt_int8",
        "openvino_rnnt_float32",
        "openvino_rnnt_bfloat16",
        "openvino_rnnt_int8",
        "nemo",
    ),
    "tdt": (
        "sherpa_onnx_tdt_float32",
        "sherpa_onnx_tdt_int8",
        "onnx_asr_tdt_float32",
        "onnx_asr_tdt_int8",
        "openvino_tdt_float32",
        "openvino_tdt_bfloat16",
        "openvino_tdt_int8",
    ),
    "whisper": (*whisper_programs.PROGRAMS,),
}
FLOOR = "import_torch"  # an arm of cold commands: what asrkit's cannot be below
IMPORT_TORCH = """if True:  # with the settings of `asrkit transcribe`
    import gc, os
    gc.disable()
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch
    from benchmarks.peers.serving import resident_B
    print(resident_B("VmHWM"))"""


@dataclass(kw_only=True)
class Program:
    """An arm: a call transcribes all files.

    Attributes:
        peer: process of the program.
        texts: texts of the last call.
        peak_B: peak memory of the process.
    """

    peer: Peer
    texts: list[str] = field(default_factory=list)
    peak_B: int | None = None

    def __call__(self) -> Sample:
        answer = self.peer.request_answer("observe")
        self.texts, self.peak_B = answer["texts"], answer["peak_B"]
        return Sample(wall_ms=answer["wall_ms"], cpu_ms=answer["cpu_ms"])


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Recordings that programs transcribe, and their model.

    Attributes:
        kind: a key of PEERS.
        model: a checkpoint, or a Whisper's folder.
        folder: folder for the model in other forms.
        files: recordings.
        first: recording of a cold command, and of the untimed call of a program.
        params: params of every record.
        references: words of each file, or of the parts of a single file; () for noise.
        rounds: number of turns of each program.
    """

    kind: str
    model: Path
    folder: Path
    files: Sequence[Path]
    first: Path
    params: Mapping[str, Any]
    references: Sequence[str] = ()
    rounds: int = 3

    def models(self, python: str, names: Sequence[str]) -> dict[str, Path]:
        """The model in each program's form; a program whose form fails is reported on stderr."""
        models: dict[str, Path] = {}
        for name in names:
            form = PROGRAMS[name][1]
            path = self.folder / f"{self.kind}-{form}" if form else self.model
            if not path.exists():
                command = [*worker_command(python), "--write", form, str(self.model), str(path)]
                environment = worker_environment()
                writer = subprocess.run(command, capture_output=True, text=True, env=environment)
                if writer.returncode:
                    left_out(name, writer.stderr)
                    continue
            models[name] = path
        return models


def worker_command(python: str) -> list[str]:
    """The command of a program's process, without its arguments."""
    return [python, "-W", "ignore", "-m", WORKER]


def left_out(name: str, errors: str) -> None:
    """Report a program that fails: the last line of its errors."""
    reason = errors.strip().rpartition("\n")[2]
    print(f"{name} is left out: {reason}", file=sys.stderr)


def seconds(files: Sequence[Path]) -> float:
    """Seconds of audio in WAV files."""
    return sum(len(read_wav(file)) for file in files) / RATE_HZ


def ours() -> list[str]:
    """asrkit's precisions that are fast on this CPU."""
    fast = dict(zip(OURS, (True, fast_dtype() == "bfloat16", has_int8()), strict=True))
    for name in OURS:
        if not fast[name]:
            left_out(name, "this CPU has no fast products in this precision")
    return [name for name in OURS if fast[name]]


def cases(workloads: Mapping[str, Workload], peers: Peers | None) -> Iterator[Case]:
    """Yield a case per workload; a name that begins with "cold-" measures cold commands.

    Args:
        workloads: by the name of the case, all with one model.
        peers: other programs; None: asrkit alone.
    """
    (workload, *_) = workloads.values()
    pythons = dict.fromkeys(ours(), sys.executable)
    models = dict.fromkeys(pythons, workload.model)
    if peers is not None:
        python = str(peers.python)
        bfloat16 = fast_dtype() == "bfloat16"
        names = [
            name for name in PEERS[workload.kind] if bfloat16 or not name.endswith("_bfloat16")
        ]
        other_models = workload.models(python, names)
        pythons |= dict.fromkeys(other_models, python)
        models |= other_models
    for what, workload in workloads.items():
        measured = cold if what.startswith("cold-") else files
        yield Case(what=what, measure=partial(measured, what, workload, pythons, models))


def files(
    what: str, workload: Workload, pythons: Mapping[str, str], models: Mapping[str, Path]
) -> Iterator[Measurement]:
    """Measure all programs on all files, in turns.

    Args:
        what: name of the case.
        workload: recordings and model.
        pythons: interpreter of each program.
        models: each program's form of the model.
    """
    request = {"threads": THREADS, "first": str(workload.first)}
    request["files"] = [*map(str, workload.files)]
    arms: dict[str, Program] = {}
    kinds = {name: (name,) for name in pythons}
    with ExitStack() as stack:
        processes = {
            python: stack.enter_context(Peers(python, kinds, WORKER))
            for python in {*pythons.values()}
        }
        for name, python in pythons.items():
            started = processes[python].arms(name, **request, model=str(models[name]))
            arms |= {name: Program(peer=peer) for name, peer in started.items()}
        timings = measure(arms, repeats=workload.rounds, warmup=0)
    for name, timing in timings.items():
        program = arms[name]
        params = {**workload.params, "peer": program.peer.version}
        params |= agreement(arms[BASELINE], program)
        if workload.kind == "whisper":
            params["decoding"] = decoding(name)
        shared: dict[str, Any] = {"impl": name, "params": params}
        yield from arm_measurements(
            what,
            timing,
            audio_s=params["audio_s"],
            peak_B=program.peak_B,
            memory_timer=MEMORY,
            **shared,
        )
        if workload.references:
            errors = word_errors(workload.references, program.texts)
            yield error_rate(what, "wer", errors, **shared)
    yield from ratios(what, timings, workload.params)


def decoding(name: str) -> str:
    """How a program decodes with a Whisper."""
    table = whisper_programs.DECODING
    return next(text for prefix, text in table.items() if name.startswith(prefix))


def agreement(baseline: Program, other: Program) -> dict[str, Any]:
    """Number of files with the same text, and the character edit rate."""
    same = [a == b for a, b in zip(baseline.texts, other.texts, strict=True)]
    return {
        "same_texts": sum(same),
        "characters": sum(map(len, other.texts)),
        "edited": cer(baseline.texts, other.texts).rate,
    }


def ratios(
    what: str, timings: Mapping[str, Timing], params: Mapping[str, Any]
) -> Iterator[Measurement]:
    """The time of asrkit in float32 over that of each other program."""
    for name in timings:
        if name != BASELINE:
            arm_params = {**params, "arms": [BASELINE, name]}
            yield time_ratio(what, timings, BASELINE, name, impl=name, params=arm_params)


def cold(
    what: str, workload: Workload, pythons: Mapping[str, str], models: Mapping[str, Path]
) -> Iterator[Measurement]:
    """Measure commands from their start to the text of one file, in turns, with a warm file cache;
    and an import of torch alone, with its memory.

    Args:
        what: name of the case.
        workload: its `first` recording is transcribed.
        pythons: interpreter of each program.
        models: each program's form of the model.
    """
    arms = {}
    commands = {FLOOR: [sys.executable, "-c", IMPORT_TORCH]} | {
        name: command(name, python, models[name], workload.first)
        for name, python in pythons.items()
    }
    for name, words in commands.items():
        arm = Command(words)
        try:
            arm()
            arms[name] = arm
        except RuntimeError as error:
            left_out(name, str(error))
    timings = measure(arms, repeats=workload.rounds, warmup=0)
    params = {**workload.params, "files": 1, "audio_s": seconds([workload.first])}
    for name, timing in timings.items():
        yield latency(what, replace(timing, warmup=1), impl=name, params=params)
    peak_B = int(arms[FLOOR].line)
    yield Measurement(what, "peak_memory", "B", peak_B, timer=MEMORY, impl=FLOOR, params=params)
    yield from ratios(what, timings, params)


def command(name: str, python: str, model: Path, file: Path) -> list[str]:
    """A command whose first line of output is the text of a file."""
    if name not in OURS:
        return [*worker_command(python), name, str(model), str(THREADS), str(file)]
    dtype = ["--dtype", name.partition("_")[2], "--threads", str(THREADS)]
    return [python, "-m", "asrkit", "transcribe", str(file), "--model", str(model), *dtype]


@dataclass
class Command:
    """An arm: a call runs a command and measures the time until its first line of output.

    Attributes:
        words: the command.
        line: first line of output of the last call.
    """

    words: Sequence[str]
    line: str = ""

    def __call__(self) -> Sample:
        pipe = subprocess.PIPE
        environment = worker_environment()
        start = time.perf_counter_ns()
        with subprocess.Popen(
            self.words, stdout=pipe, stderr=pipe, text=True, env=environment
        ) as process:
            assert process.stdout
            self.line = process.stdout.readline()
            wall_ns = time.perf_counter_ns() - start
            _, errors = process.communicate()
        if not self.line.strip():
            raise RuntimeError(errors)
        return Sample(wall_ms=wall_ns / 1e6, cpu_ms=None)
