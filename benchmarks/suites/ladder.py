"""The ladder: one recogniser, its speed-ups switched on rung by rung, all in one run.

The baseline reads a batch, computes features and normalises them one utterance after another,
encodes in eager float32, decodes one utterance after another, and takes utterances as they come.
Every rung is `replace(config, ...)` of the config below it. Utterances have the lengths of
LibriSpeech's dev and test sets and 3.5 labels a second; the files hold beeps in noise, and what the
recogniser finds in them is known before (asrkit.workbench.lessons.shared.scripted).

That proves that order, lengths, padding, batches and graphs are right, and that half precision's
error stays far below what tells random frames apart. It does not prove that a trained model keeps
its error rate: notebooks 04 and 13 measure that.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from asrkit.decoders import release_graphs
from asrkit.models import LSTMConfig, TransducerConfig, presets
from asrkit.workbench.lessons.shared.ladder import ladder_arms, ladder_comparison
from asrkit.workbench.lessons.shared.scripted import lengths, scripted
from benchmarks.harness.cases import Case, Suite, failure

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
                arms = ladder_arms(task, say=partial(print, f"{what}:", file=sys.stderr))
                compared = ladder_comparison(what, task, arms, {"preset": preset, **cut}, quick)
                made = Case(**vars(compared))
                del task, arms, compared  # gigabytes, which end with the case
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


SUITE = Suite(name="ladder", cases=suite, gpu_tests=("tests/benchmarks/test_ladder.py",))
