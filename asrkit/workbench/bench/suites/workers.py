"""The suite of workers: what `asrkit transcribe --workers` does from files to transcripts in order.

A FastConformer with CTC and random weights hears beeps in noise, in files with the lengths of
LibriSpeech's utterances. It is loaded and prepared once, outside the time; forking, reading and
batching are inside. "one_process" is no worker: this process with a thread a core. "one_worker" is
a process pinned to one core, and "workers" are one a core. The CPU time is that of all processes.

Arms are compared by the seconds of each recording, and no recording may fail. That their texts are
equal is for models that have learnt something (tests/transcribe/processes): between the labels of
random weights, rounding decides.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.cpu import fast_dtype
from asrkit.models import Checkpoint, CTCConfig, CTCModel, FastConformerConfig, presets
from asrkit.runtime import usable_cores
from asrkit.shapes import expect
from asrkit.text import CharTokenizer
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.ladder_pipeline import write_wav
from asrkit.workbench.bench.ladder_script import RATE_HZ, beeps, lengths
from asrkit.workbench.profiling import Sample
from asrkit.workbench.records import Measurement

PRESET = "tdt_ctc_110m"  # its encoder
UTTERANCES = 240
QUICK_PRESET = "tiny"
QUICK_UTTERANCES = 4
Run = Callable[[], Iterator[Any]]


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield a case for float32, and one for bfloat16 where this CPU multiplies it fast.

    Args:
        device: "cpu".
        quick: a tiny model and few recordings.

    Raises:
        ValueError: `device` is a GPU.
    """
    remedy = "A GPU is one process: --shards --part K/N."
    expect(not device.startswith("cuda"), "device", "cpu for the suite workers", device, remedy)
    preset, utterances = PRESET, UTTERANCES
    if quick:
        preset, utterances = QUICK_PRESET, QUICK_UTTERANCES
    dtypes = ["float32"]
    if fast_dtype() != "float32":
        dtypes.append(fast_dtype())
    with tempfile.TemporaryDirectory() as folder:
        samples = lengths(utterances)
        files = [
            write_wav(Path(folder) / f"{number}.wav", beeps(size, number))
            for number, size in enumerate(samples)
        ]
        for dtype in dtypes:
            yield case(preset, files, sum(samples) / RATE_HZ, dtype)


def case(preset: str, files: Sequence[Path], audio_s: float, dtype: str) -> Case:
    """One process with all threads, one worker, and a worker a core.

    Args:
        preset: whose encoder the model has.
        files: recordings.
        audio_s: their seconds.
        dtype: of the weights, by name.
    """
    from asrkit.transcribe import Recognizer, transcribe, transcribe_in_processes
    from asrkit.transcribe.processes import choose_layout

    encoder: Any = presets.PRESETS[preset]().encoder
    checkpoint = random_ctc(encoder)
    checkpoint.model.to(getattr(torch, dtype))
    weights = [*checkpoint.model.parameters()]
    weights_B = sum(weight.numel() * weight.element_size() for weight in weights)
    cores = usable_cores()
    recognizer = Recognizer.from_checkpoint(checkpoint)
    in_processes = partial(transcribe_in_processes, checkpoint, [*files], recognizer=recognizer)
    runs: dict[str, Run] = {
        "one_process": partial(transcribe, checkpoint, files, recognizer=recognizer),
        "one_worker": partial(in_processes, layout=choose_layout(1, threads=1)),
        "workers": partial(in_processes, layout=choose_layout(cores, threads=1)),
    }
    params = {"dtype": dtype, "audio_s": audio_s, "preset": preset, "recordings": len(files)}
    return Case(
        what="transcription-workers",
        arms={name: partial(_timed, run) for name, run in runs.items()},
        compared_arms={name: partial(_seconds, run) for name, run in runs.items()},
        params=params | {"weights": "random", "workers": cores},
        arm_params={
            "one_process": {"threads": torch.get_num_threads(), "workers": 0},
            "one_worker": {"threads": 1, "workers": 1},
            "workers": {"threads": 1},
        },
        ratios=[("one_worker", "workers"), ("one_process", "workers")],
        warmup=1,
        more=partial(_memory, runs["workers"], params | {"weights_B": weights_B}),
    )


def random_ctc(encoder: FastConformerConfig) -> Checkpoint:
    """A CTC model over characters with random weights, always the same, in float32.

    Args:
        encoder: its encoder.
    """
    tokenizer = CharTokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(CTCConfig(vocab_size=tokenizer.vocab_size, encoder=encoder))
    return Checkpoint(model.eval().requires_grad_(False), tokenizer, {"bins": encoder.bins}, {})


def _seconds(run: Run) -> Tensor:
    """Seconds of each recording, in order; AssertionError if one failed."""
    transcripts = [*run()]
    failed = [one.error for one in transcripts if one.error]
    assert not failed, f"transcription-workers: {failed[0]}"
    return torch.tensor([one.audio_s for one in transcripts])


def _timed(run: Run) -> Sample:
    """Time from the first file to the last transcript, and that of all processes on cores."""
    start = time.perf_counter()
    cpu_start_s = _cpu_s()
    for _ in run():
        pass
    cpu_s = _cpu_s() - cpu_start_s
    return Sample(wall_ms=1e3 * (time.perf_counter() - start), cpu_ms=1e3 * cpu_s)


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    import resource

    total_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total_s += usage.ru_utime + usage.ru_stime
    return total_s


def _memory(run: Run, params: dict[str, Any]) -> Iterator[Measurement]:
    """Memory of one worker in mid-run: that no other process has, its share, and all it uses.

    Nothing where the system does not say.
    """
    from asrkit.transcribe.processes import process_memory

    transcripts = run()
    for _ in range(params["recordings"] // 2):
        next(transcripts)
    found = [process_memory(child.pid) for child in multiprocessing.active_children()]
    transcripts.close()  # type: ignore[attr-defined]
    sizes = [size for size in found if size is not None]
    if not sizes:
        return
    for kind in ("own", "share", "all"):
        largest = max(size[kind] for size in sizes)
        timer = "/proc/PID/smaps_rollup"
        yield Measurement(
            "transcription-workers",
            f"{kind}_memory",
            "B",
            largest,
            params=params,
            impl="workers",
            timer=timer,
        )


SUITE = Suite(name="workers", cases=suite)
