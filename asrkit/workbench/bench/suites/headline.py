"""The suite that leads: Parakeet TDT 0.6B whole, from samples in the host's memory to labels.

Weights are random and labels planted with 3.5 a second, as on the ladder
(asrkit.workbench.bench.ladder_script): the decoder finds them only where the encoder gave its own
frames. A call uploads each batch, computes features and frames, decodes, and brings the labels
back. On CUDA every arm is in bfloat16 and decodes by a captured loop.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from asrkit.decoders import release_graphs
from asrkit.models import TransducerConfig, presets
from asrkit.transcribe.options import PipelineConfig
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer, LoadedBatch, Task
from asrkit.workbench.bench.ladder_script import RATE_HZ, Scripted, lengths, scripted
from asrkit.workbench.bench.suites import ladder
from asrkit.workbench.bench.suites.encoders import shrunk

SECONDS = 10  # of each utterance of a full batch
DISTINCT = 32  # utterances with their own audio and labels; larger batches repeat them
BATCHES = {"cpu": (1, 4), "cuda": (128, 1, 32, 256)}  # the first are worth most
BATCHES_OF_SPEECH = 4  # that LibriSpeech's lengths are sorted into
COMPILED = (1, 128)  # batches that torch.compile takes part in: a shape takes it a minute


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield cases by batch size: utterances of ten seconds, then LibriSpeech's lengths.

    Args:
        device: "cuda" for Parakeet TDT 0.6B; "cpu" for a model of 110 million weights.
        quick: a tiny model, and few utterances of two seconds at most.
    """
    cuda = device.startswith("cuda")
    preset, config = _config(cuda, quick)
    sizes = BATCHES["cuda" if cuda and not quick else "cpu"]
    count = DISTINCT if cuda and not quick else max(sizes)
    kinds = {"headline-full": [SECONDS * RATE_HZ] * count, "headline-speech": lengths(count)}
    for what, samples in kinds.items():
        if quick:
            samples = [min(S, 2 * RATE_HZ) for S in samples]
        with tempfile.TemporaryDirectory() as folder:
            try:
                made = scripted(config, samples, Path(folder), batch=count, device=device)
            except (AssertionError, RuntimeError, ValueError) as error:
                yield Case(what=what, refused=failure(what, error))
                continue
            for B in sizes:
                yield _case(what, made, B, preset, quick)
                release_graphs()


def _config(cuda: bool, quick: bool) -> tuple[str, TransducerConfig]:
    """Name and config of the model."""
    if quick:
        return "tiny", shrunk(presets.parakeet_tdt_0_6b())
    if cuda:
        return "parakeet_tdt_0_6b", presets.parakeet_tdt_0_6b()
    return "tdt_ctc_110m", replace(presets.tdt_ctc_110m(), ctc=False)


def _case(what: str, made: Scripted, B: int, preset: str, quick: bool) -> Case:
    """One case of all arms, which is refused where the first does not find what was planted."""
    count = B if what == "headline-full" else max(BATCHES_OF_SPEECH * B, len(made.labels))
    params: dict[str, Any] = {"preset": preset}
    if what == "headline-full":
        params["lengths"] = "equal"
    try:
        speech = repeated(made, count, B)
        arms = arms_of(speech.task, compiled=what == "headline-full" and B in COMPILED)
        made_case = ladder.case(what, speech, arms, params, quick)
        shape = [B, *made_case.params["shape"][1:]]
        return replace(made_case, params=made_case.params | {"shape": shape}, warmup=1)
    except (AssertionError, RuntimeError, ValueError) as error:
        return Case(what=what, params={"shape": [B]}, refused=failure(what, error))


def repeated(made: Scripted, count: int, B: int) -> Scripted:
    """The utterances of a task over and over, as one of `count` utterances in batches of B.

    Args:
        made: the task and its known labels.
        count: utterances.
        B: utterances of a batch.
    """
    task = made.task
    rows = [row % len(made.labels) for row in range(count)]
    labels = [made.labels[row] for row in rows]
    assert task.script is not None
    share = count / len(made.labels)
    return Scripted(
        replace(
            task,
            files=[task.files[row] for row in rows],
            samples=[task.samples[row] for row in rows],
            script=task.script[rows],
            labels=labels,
            batch=B,
        ),
        labels,
        round(share * made.joints),
        round(share * made.decoder_flops),
    )


def arms_of(task: Task, *, compiled: bool = False) -> dict[str, ladder.LadderArm]:
    """Recognisers by name, eager first.

    Args:
        task: what they transcribe.
        compiled: whether torch.compile takes part on CUDA.
    """
    cuda = task.device.startswith("cuda")
    precision: Any = "bfloat16" if cuda else "float32"
    eager = PipelineConfig(precision=precision, encoder="eager", loading="before")
    configs = {"eager": eager}
    if cuda:
        looped = replace(eager, strategy="windowed_looping", graphs="full")
        configs = {"eager": looped, "graph": replace(looped, encoder_graphs="per_shape")}
        if compiled:
            configs["compiled"] = replace(looped, encoder="compiled")
    else:
        configs["optimized"] = replace(eager, encoder="optimized")
    held: dict[int, tuple[Tensor, Tensor]] = {}
    return {
        name: ladder.LadderArm(MemoryRecognizer(task, config, held), "", "alone")
        for name, config in configs.items()
    }


class MemoryRecognizer(FileRecognizer):
    """The recogniser of files whose samples are read once, and kept in the host's memory.

    Args:
        task: files and model.
        config: how to compute.
        held: samples (B, S) int16 and lengths (B,) of batches by their first row, pinned for a GPU;
            shared by the arms of a case.
    """

    def __init__(
        self, task: Task, config: PipelineConfig, held: dict[int, tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(task, config)
        self.held = held

    def _load(self, rows: Sequence[int]) -> LoadedBatch:
        if rows[0] not in self.held:
            self.held[rows[0]] = self._padded(rows, pinned=self.task.device.startswith("cuda"))
        samples, counts = self.held[rows[0]]
        device = self.task.device
        return LoadedBatch(
            samples.to(device, non_blocking=True), counts.to(device, non_blocking=True)
        )


SUITE = Suite(
    name="headline",
    cases=suite,
    gpu_tests=("tests/decoders/test_graphs_gpu.py", "tests/workbench/bench/test_encoders.py"),
)
