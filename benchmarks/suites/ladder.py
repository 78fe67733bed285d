"""The ladder suite: one recogniser whose speed-ups are switched on one by one, all in one run.

The baseline batches utterances in the order of the files, reads a batch, normalises features one
utterance after another, encodes in eager float32, and decodes one utterance after another. Every
rung is `replace(config, ...)` of the previous config. Utterances have the lengths of LibriSpeech's
dev and test sets and 3.5 labels a second. The files contain beeps in noise, and their labels are
known (asrkit.workbench.lessons.shared.scripted). Rungs that are steps of NVIDIA's account of NeMo
have their published gain in the table.

Correct labels prove that order, lengths, padding, batches and graphs are right, and that the error
of half precision is far smaller than the differences of random frames. They do not prove that a
trained model keeps its error rate; notebooks 04 and 13 measure that.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from asrkit.decoders import release_graphs
from asrkit.models import CTCConfig, LSTMConfig, presets
from asrkit.workbench.lessons.shared.ladder import (
    ladder_arms,
    ladder_comparison,
    published_gains,
)
from asrkit.workbench.lessons.shared.scripted import lengths, scripted
from benchmarks.harness.cases import Case, Suite

SIZES = {"tiny": (4, 2), "cpu": (12, 4), "cuda": (64, 32)}  # utterances, batch size
PRESETS = {  # for each of KINDS
    "tiny": ("tiny", "tiny", "tiny"),
    "cpu": ("tdt_ctc_110m", "tdt_ctc_110m", "tdt_ctc_110m"),
    "cuda": ("parakeet_rnnt_1_1b", "parakeet_tdt_0_6b", "parakeet_ctc_1_1b"),
}
KINDS: dict[str, Sequence[int] | None] = {  # durations of a transducer; None: a CTC model
    "ladder-rnnt": (),
    "ladder-tdt": presets.TDT,
    "ladder-ctc": None,
}


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield a case for RNN-T, TDT and CTC each: published sizes on CUDA, 110 million weights on a
    CPU, tiny if quick.

    Args:
        device: "cpu" or "cuda".
        quick: a few utterances of at most two seconds.
    """
    size = "tiny" if quick else device
    N, B = SIZES[size]
    samples = lengths(N, most_s=2 if quick else inf)
    cut = {"lengths": "librispeech_eval, at most 2 s"} if quick else {}
    for (name, durations), preset in zip(KINDS.items(), PRESETS[size], strict=True):
        what = f"{name}-tiny" if quick else name  # no claim may use the tiny sizes
        with tempfile.TemporaryDirectory() as folder:
            try:
                config = config_of(preset, durations)
                task = scripted(config, samples, Path(folder), batch=B, device=device)
                arms = ladder_arms(task, log=partial(print, f"{what}:", file=sys.stderr))
                compared = ladder_comparison(what, task, arms, {"preset": preset, **cut}, quick)
                with suppress(ModuleNotFoundError):  # a machine that cannot read the ledger
                    for arm, gain in published_gains(name.removeprefix("ladder-")).items():
                        compared.arm_params.get(arm, {})["published"] = gain
                case = Case(**vars(compared))
                del task, arms, compared  # so that their gigabytes are freed with the case
            except (AssertionError, RuntimeError, ValueError) as error:
                case = Case.refused(what, error)
            yield case
        del case
        release_graphs()


def config_of(preset: str, durations: Sequence[int] | None) -> Any:
    """A preset without a CTC head, or with nothing else; the tiny one is made wide enough for
    planted labels.
    """
    config: Any = presets.PRESETS[preset]()
    if preset == "tiny":
        predictor = LSTMConfig(width=240, layers=1)
        encoder = replace(config.encoder, width=96)
        config = replace(config, encoder=encoder, predictor=predictor, joint_width=240)
    if durations is None:
        return CTCConfig(vocab_size=config.vocab_size, encoder=config.encoder)
    return replace(config, ctc=False, durations=durations)


SUITE = Suite(name="ladder", cases=suite, gpu_tests=("tests/benchmarks/test_ladder.py",), share=2)
