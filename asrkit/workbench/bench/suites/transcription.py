"""The suite that leads: Parakeet TDT 0.6B whole, from samples in the host's memory to labels.

Weights are random and labels planted with 3.5 a second, as on the ladder
(asrkit.workbench.bench.scripted): the decoder finds them only where the encoder gave its own
frames. A call uploads each batch, computes features and frames, decodes, and brings the labels
back. On CUDA every arm is in bfloat16 and decodes by a captured loop.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from asrkit.decoders import release_graphs
from asrkit.models import presets
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.file_recognizer import RATE_HZ, FileRecognizer, Task, Way
from asrkit.workbench.bench.scripted import lengths, scripted
from asrkit.workbench.bench.suites import ladder

SECONDS = 10  # of each utterance of a full batch
DISTINCT = 32  # utterances with their own audio and labels; larger batches repeat them
BATCHES = (128, 1, 32, 256)  # on a GPU; the first are worth most
FEW_BATCHES = (1, 4)  # on a CPU, or if quick
BATCHES_OF_SPEECH = 4  # that LibriSpeech's lengths are sorted into


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield cases by batch size: utterances of ten seconds, then LibriSpeech's lengths.

    Args:
        device: "cuda" for Parakeet TDT 0.6B; "cpu" for a model of 110 million weights.
        quick: a tiny model, and few utterances of two seconds at most.
    """
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
    gpu_tests=("tests/decoders/test_graphs_gpu.py", "tests/workbench/bench/test_encoders.py"),
)
