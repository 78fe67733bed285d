"""The ladder: one recogniser whose speed-ups are switched on one by one."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from asrkit.cpu import fast_dtype
from asrkit.models import CTCModel
from asrkit.workbench.cost import encoder_flops, encoder_parameters
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, FileRecognizer, Task, Variant
from asrkit.workbench.lessons.shared.scripted import HOP
from asrkit.workbench.lessons.shared.variants import Work
from asrkit.workbench.lessons.shared.variants import arm_params as variant_params
from asrkit.workbench.measure.comparison import Comparison

BASELINE = Variant(
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
    "label_looping": {"strategy": "label_looping"},
    "windowed_looping": {"strategy": "windowed_looping"},
    "autocast": {"precision": "autocast"},
    "bfloat16": {"precision": "bfloat16"},
    "optimized_encoder": {"encoder": "optimized"},
    "graph_whole": {"graphs": "full"},
    "by_length": {"order": "by_length"},
    "overlapped": {"loading": "overlapped"},
}
HALF_RUNGS = ("autocast", "bfloat16")
LOOP_RUNGS = ("label_looping", "windowed_looping", "graph_whole")  # a CTC model has no loop
EVERY = {"batched_frontend": "feature-norm-batched"}
# Rungs that are steps in NVIDIA's account of NeMo: the claims of data/claims.yaml with their gains,
# by kind of model.
PUBLISHED = {
    "rnnt": {
        **EVERY,
        "label_looping": "label-looping-2x",
        "bfloat16": "half-over-autocast",
        "graph_whole": "graphs-label-looping-rnnt",
    },
    "tdt": {
        **EVERY,
        "label_looping": "label-looping-tdt-3.8x",
        "graph_whole": "graphs-label-looping-tdt",
    },
    "ctc": {
        **EVERY,
        "batched_decoder": "ctc-greedy-batched",
        "bfloat16": "half-over-autocast",
    },
}


def published_gains(kind: str) -> dict[str, str]:
    """The published gains of a kind's rungs, each with its claim, by name of their arm."""
    from asrkit.workbench.claims import load_claims  # needs yaml, which a bare GPU machine lacks

    quoted = {claim.id: claim.quoted for claim in load_claims()}
    rungs = PUBLISHED[kind].items()
    return {f"to_{rung}": f"{quoted[claim]}× ({claim})" for rung, claim in rungs}


def ladder_arms(task: Task, log: Callable[[str], object] = bool) -> dict[str, FileRecognizer]:
    """Recognisers by name: "baseline", then "to_RUNG" with this rung and all rungs below it.

    Rungs that need a GPU, instructions for bfloat16, or the loop of a transducer are left out where
    there are none, and `log` is called with a line on each.
    """
    config = BASELINE
    arms = {"baseline": FileRecognizer(task, config)}
    for rung, change in RUNGS.items():
        lacks = ""
        if rung in LOOP_RUNGS and isinstance(task.model, CTCModel):
            lacks = "a transducer"
        elif rung in HALF_RUNGS and fast_dtype(task.device) == "float32":
            lacks = "instructions for bfloat16"
        elif rung == "graph_whole" and task.device != "cuda":
            lacks = "a GPU"
        if lacks:
            log(f"{rung.replace('_', ' ')} is left out: needs {lacks}")
            continue
        config = replace(config, **change)
        arms[f"to_{rung}"] = FileRecognizer(task, config)
    return arms


def ladder_comparison(
    what: str,
    task: Task,
    arms: Mapping[str, FileRecognizer],
    params: Mapping[str, Any],
    quick: bool = False,
) -> Comparison:
    """All arms, each compared with the first arm and with the previous one.

    Args:
        what: name of the case.
        task: files with known labels.
        arms: recognisers of these files.
        params: further params of the records.
        quick: measure the machine's ceilings at smaller sizes.

    Raises:
        AssertionError: the labels of the first arm are not the planted ones.
    """
    first, *others = arms
    labels = arms[first]().tokens()
    assert labels == task.labels, f"{what}: {first} finds other labels than planted."
    config: Any = task.model.config.encoder
    return Comparison(
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
    """Params of an arm: its config, its least work, and the time of that work at the machine's
    ceilings.

    The least work is the encoder's operations on all frames without padding, and one read of its
    weights per batch.
    """
    config = arm.config
    encoder: Any = arm.task.model.config.encoder
    work = Work(
        FLOP=sum(encoder_flops(encoder, B=1, T=max(S // HOP, 1)) for S in arm.task.samples),
        weights=len(arm.plan) * encoder_parameters(encoder),
    )
    variant = "autocast_bfloat16" if config.precision == "autocast" else config.precision
    return variant_params(variant, work, arm.task.device, quick) | {
        "pipeline": asdict(config),
        "tolerance": 1e-3 if config.precision == "float32" else 0.2,  # for likelihoods
    }
