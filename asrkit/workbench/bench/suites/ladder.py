"""The ladder: one recogniser, its speed-ups switched on rung by rung, all in one run.

The baseline reads a batch, computes features and normalises them one utterance after another,
encodes in eager float32, decodes one utterance after another, and takes utterances as they come.
Every rung is `replace(config, ...)` of the config below it. Utterances have the lengths of
LibriSpeech's dev and test sets and 3.5 labels a second; the files hold beeps in noise, and what the
recogniser finds in them is known before (asrkit.workbench.bench.scripted).

That proves that order, lengths, padding, batches and graphs are right, and that half precision's
error stays far below what tells random frames apart. It does not prove that a trained model keeps
its error rate: notebooks 04 and 13 measure that.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from asrkit.decoders import release_graphs
from asrkit.models import LSTMConfig, TransducerConfig, presets
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.file_recognizer import RATE_HZ, FileRecognizer, Task, Way
from asrkit.workbench.bench.scripted import HOP, lengths, scripted
from asrkit.workbench.bench.suites import ways
from asrkit.workbench.cost import encoder_flops, encoder_parameters

BASELINE = Way(
    normalization="one_by_one",
    precision="float32",
    encoder="eager",
    strategy="one_by_one",
    graphs="off",
    order="as_given",
    loading="before",
)
RUNGS: dict[str, dict[str, Any]] = {
    "batched_frontend": {"normalization": "batched"},
    "batched_decoder": {"strategy": "batched"},
    "windowed_looping": {"strategy": "windowed_looping"},
    "autocast": {"precision": "autocast"},
    "bfloat16": {"precision": "bfloat16"},
    "optimized_encoder": {"encoder": "optimized"},
    "graph_of_steps": {"graphs": "step"},
    "graph_whole": {"graphs": "full"},
    "by_length": {"order": "by_length"},
    "overlapped": {"loading": "overlapped"},
}
GPU_RUNGS = ("graph_of_steps", "graph_whole")
SIZES = {"tiny": (4, 2), "cpu": (12, 4), "cuda": (64, 32)}  # utterances, and those of a batch
PRESETS = {  # of RNN-T and of TDT
    "tiny": ("tiny", "tiny"),
    "cpu": ("tdt_ctc_110m", "tdt_ctc_110m"),
    "cuda": ("parakeet_rnnt_1_1b", "parakeet_tdt_0_6b"),
}
KINDS: dict[str, Sequence[int]] = {"ladder-rnnt": (), "ladder-tdt": presets.TDT}  # durations


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield a case for RNN-T and one for TDT: of published sizes on CUDA, of 110 million weights
    on a CPU, tiny if quick.

    Args:
        device: "cpu" or "cuda".
        quick: a few utterances of at most two seconds.
    """
    size = "tiny" if quick else device
    N, B = SIZES[size]
    samples = lengths(N, most_s=2 if quick else inf)
    cut = {"lengths": "librispeech_eval, at most 2 s"} if quick else {}
    for (name, durations), preset in zip(KINDS.items(), PRESETS[size], strict=True):
        what = f"{name}-tiny" if quick else name  # no claim takes these for published sizes
        with tempfile.TemporaryDirectory() as folder:
            try:
                config = config_of(preset, durations)
                task = scripted(config, samples, Path(folder), batch=B, device=device)
                arms = climb(task, say=partial(print, f"{what}:", file=sys.stderr))
                made = case(what, task, arms, {"preset": preset, **cut}, quick)
                del task, arms  # gigabytes, which end with the case
            except (AssertionError, RuntimeError, ValueError) as error:
                made = Case(what=what, refused=failure(what, error))
            yield made
        del made
        release_graphs()


def config_of(preset: str, durations: Sequence[int]) -> TransducerConfig:
    """A preset without a CTC head; the tiny one wide enough to be planted."""
    config: Any = presets.PRESETS[preset]()
    if preset == "tiny":
        predictor = LSTMConfig(width=240, layers=1)
        encoder = replace(config.encoder, width=96)
        config = replace(config, encoder=encoder, predictor=predictor, joint_width=240)
    return replace(config, ctc=False, durations=durations)


def climb(task: Task, say: Callable[[str], object] = bool) -> dict[str, FileRecognizer]:
    """Recognisers by name: "baseline", then of every rung "to_…" with all rungs below it.

    A rung that needs a GPU is left out where there is none, and `say` is called with a line on it.
    """
    config = BASELINE
    arms = {"baseline": FileRecognizer(task, config)}
    for rung, change in RUNGS.items():
        if rung in GPU_RUNGS and task.device != "cuda":
            say(f"{rung.replace('_', ' ')} is left out: needs a GPU")
            continue
        config = replace(config, **change)
        arms[f"to_{rung}"] = FileRecognizer(task, config)
    return arms


def case(
    what: str,
    task: Task,
    arms: Mapping[str, FileRecognizer],
    params: Mapping[str, Any],
    quick: bool = False,
) -> Case:
    """All arms, each compared with the first one and with the one before.

    Args:
        what: the name of the case.
        task: files whose labels are known.
        arms: recognisers of these files.
        params: more to say in the records.
        quick: take the machine's ceilings at smaller sizes.

    Raises:
        AssertionError: the first arm finds other labels than were planted.
    """
    first, *others = arms
    found = arms[first]().tokens()
    assert found == task.labels, f"{what}: {first} finds other labels than planted."
    config: Any = task.model.config.encoder
    return Case(
        what=what,
        arms=arms,
        params={
            "shape": [len(task.files), max(task.samples) // HOP, config.width, config.layers],
            "audio_s": sum(task.samples) / RATE_HZ,
            "utterances": len(task.files),
            "batch": task.batch,
            "labels": sum(map(len, task.labels)),
            "weights": "random, planted",
            "lengths": "librispeech_eval",
            **params,
        },
        arm_params={name: arm_params(arm, quick) for name, arm in arms.items()},
        ratios=[(first, name) for name in others] + [*pairwise(others)],
        warmup=1,
    )


def arm_params(arm: FileRecognizer, quick: bool) -> dict[str, Any]:
    """Params of an arm: its config, its least work, and the time which that takes at the machine's
    ceilings, at smaller sizes if quick.

    Least work: the encoder's operations on all frames but padding; all weights of the encoder read
    once a batch.
    """
    config = arm.config
    encoder: Any = arm.task.model.config.encoder
    work = ways.Work(
        FLOP=sum(encoder_flops(encoder, B=1, T=max(S // HOP, 1)) for S in arm.task.samples),
        weights=len(arm.plan) * encoder_parameters(encoder),
    )
    way = "autocast_bfloat16" if config.precision == "autocast" else config.precision
    return ways.arm_params(way, work, arm.task.device, quick) | {
        "pipeline": asdict(config),
        "tolerance": 1e-3 if config.precision == "float32" else 0.2,  # of likelihoods
    }


SUITE = Suite(name="ladder", cases=suite, gpu_tests=("tests/workbench/bench/test_ladder.py",))
