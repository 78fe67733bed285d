"""The suite that leads: one recogniser whole from samples in the host's memory to labels, and on a
CPU whole programs from files to text, asrkit and others (asrkit.workbench.bench.programs).

Of the recogniser, weights are random and labels planted with 3.5 a second, as on the ladder
(asrkit.workbench.bench.scripted): the decoder finds them only where the encoder gave its own
frames. A call uploads each batch, computes features and frames, decodes, and brings the labels
back. On CUDA every arm is in bfloat16 and decodes by a captured loop.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from asrkit.decoders import release_graphs
from asrkit.models import CTCConfig, presets
from asrkit.workbench.bench import programs
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.file_recognizer import RATE_HZ, FileRecognizer, Task, Way
from asrkit.workbench.bench.peers.processes import Peers
from asrkit.workbench.bench.scripted import lengths, scripted
from asrkit.workbench.bench.speaking import (
    PIECES,
    recordings,
    write_ctc,
    write_transducer,
    write_whisper,
)
from asrkit.workbench.bench.suites import ladder

SECONDS = 10  # of each utterance of a full batch
DISTINCT = 32  # utterances with their own audio and labels; larger batches repeat them
BATCHES = (128, 1, 32, 256)  # on a GPU; the first are worth most
FEW_BATCHES = (1, 4)  # on a CPU, or if quick
PROGRAM_MINUTES = 9  # of audio that programs transcribe in each of three rounds
MEAN_S = 7.0  # of LibriSpeech's recordings
BATCHES_OF_SPEECH = 4  # that LibriSpeech's lengths are sorted into


def suite(device: str, quick: bool, peers: Peers | None = None) -> Iterator[Case]:
    """Yield cases by batch size: utterances of ten seconds, then LibriSpeech's lengths. With peers,
    on a CPU, first those of whole programs.

    Args:
        device: "cuda" for Parakeet TDT 0.6B; "cpu" for a model of 110 million weights.
        quick: a tiny model, and few utterances of two seconds at most.
        peers: other programs beside asrkit.
    """
    if device == "cpu" and peers is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield from whole_programs(Path(folder), quick, peers)
    large = device == "cuda" and not quick
    count = DISTINCT if large else max(FEW_BATCHES)
    size = "tiny" if quick else device
    preset = ladder.PRESETS[size][1]
    config = ladder.config_of(preset, presets.TDT)
    most_s = 2 if quick else inf
    equal = [int(min(SECONDS, most_s) * RATE_HZ)] * count
    kinds = {"headline-full": equal, "headline-speech": lengths(count, most_s=most_s)}
    for what, samples in kinds.items():
        with tempfile.TemporaryDirectory() as folder:
            task = scripted(config, samples, Path(folder), batch=count, device=device)
            for B in BATCHES if large else FEW_BATCHES:
                yield _case(what, task, B, preset, quick)
                release_graphs()


def whole_programs(folder: Path, quick: bool, peers: Peers) -> Iterator[Case]:
    """Yield the cases of programs: a CTC model and an RNN-T of 110 million weights over recordings
    of LibriSpeech's lengths, a Whisper of base's size over recordings of 30 s.

    Args:
        folder: for models and recordings, gigabytes.
        quick: tiny models, and a minute of audio.
        peers: other programs beside asrkit.
    """
    minutes = 0.5 if quick else PROGRAM_MINUTES
    spoken = [min(S / RATE_HZ, 30.0) for S in lengths(round(60 * minutes / MEAN_S))]
    short = recordings(folder / "short", [10.0, *spoken])
    long = recordings(folder / "long", [30.0] * round(2 * minutes))
    preset = presets.tiny if quick else presets.tdt_ctc_110m
    rnnt: Any = replace(preset(vocab_size=PIECES), durations=(), ctc=False)
    ctc = CTCConfig(vocab_size=PIECES, encoder=rnnt.encoder)
    width, layers, heads = (64, 2, 2) if quick else (512, 6, 8)
    whisper = partial(write_whisper, width=width, layers=layers, heads=heads)
    made = {
        "ctc": (preset.__name__, partial(write_ctc, config=ctc, sound=long[0])),
        "rnnt": (preset.__name__, partial(write_transducer, config=rnnt, sound=long[0])),
        "whisper": ("tiny" if quick else "whisper_base", whisper),
    }
    for kind, (name, write) in made.items():
        with torch.inference_mode():
            model = write(folder / (kind if kind == "whisper" else f"{kind}.safetensors"))
        heard = long if kind == "whisper" else short
        params = {"files": len(heard), "audio_s": programs.seconds(heard), "preset": name}
        params |= {"device": "cpu", "dtype": "", "threads": programs.THREADS, "weights": "random"}
        rounds = 1 if quick else 3
        task = programs.Task(
            kind=kind, model=model, files=heard, first=short[0], params=params, rounds=rounds
        )
        yield from programs.cases(task, peers)


def _case(what: str, task: Task, B: int, preset: str, quick: bool) -> Case:
    """One case of all arms, which is refused where the first does not find what was planted."""
    full = what == "headline-full"
    params: dict[str, Any] = {"preset": preset}
    if full:
        params["lengths"] = "equal"
    try:
        speech = repeated(task, B if full else max(BATCHES_OF_SPEECH * B, len(task.files)), B)
        made = ladder.case(what, speech, arms_of(speech), params, quick)
    except (AssertionError, RuntimeError, ValueError) as error:
        return Case(what=what, params={"shape": [B]}, refused=failure(what, error))
    shape = [B, *made.params["shape"][1:]]
    return replace(made, params=made.params | {"shape": shape})


def repeated(task: Task, count: int, B: int) -> Task:
    """A task's utterances over and over, `count` in all, in batches of B that stay in memory."""
    rows = [row % len(task.files) for row in range(count)]
    assert task.script is not None
    return replace(
        task,
        files=[task.files[row] for row in rows],
        samples=[task.samples[row] for row in rows],
        labels=[task.labels[row] for row in rows],
        script=task.script[rows],
        batch=B,
        in_memory=True,
    )


def arms_of(task: Task) -> dict[str, FileRecognizer]:
    """Recognisers by name, eager first."""
    eager = Way(precision="float32", encoder="eager", loading="before")
    configs = {"eager": eager, "optimized": replace(eager, encoder="optimized")}
    if task.device == "cuda":
        loop: dict[str, Any] = {"strategy": "windowed_looping", "graphs": "full"}
        eager = replace(eager, precision="bfloat16", **loop)
        configs = {"eager": eager, "graph": replace(eager, encoder="optimized")}
    return {name: FileRecognizer(task, config) for name, config in configs.items()}


SUITE = Suite(
    name="transcription",
    cases=suite,
    takes_peers=True,
    gpu_tests=("tests/decoders/test_graphs_gpu.py", "tests/workbench/bench/test_encoders.py"),
)
