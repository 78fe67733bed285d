"""The ladder: one recogniser, its speed-ups switched on rung by rung, each rung cumulative and
alone, all in one run.

The baseline reads a batch, computes features and normalises them one utterance after another,
encodes in eager float32, decodes one utterance after another, and takes utterances as they come.
Every rung is `replace(config, ...)` of the config below it. Utterances have the lengths of
LibriSpeech's dev and test sets and 3.5 labels a second; the files hold beeps in noise, and what the
recogniser finds in them is known before (asrkit.workbench.bench.ladder_script).

That proves that order, lengths, padding, batches, streams and graphs are right, and that half
precision's error stays far below what tells random frames apart. It does not prove that a trained
model keeps its error rate: notebooks 04 and 13 measure that.
"""

import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from asrkit.decoders import release_graphs
from asrkit.models import CTCConfig, FastConformerConfig, LSTMConfig, TransducerConfig, presets
from asrkit.transcribe.decoding import kind_of
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import WEIGHTS
from asrkit.workbench.bench.cases import Case, Suite, failure
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.ladder_pipeline import FileRecognizer, Task
from asrkit.workbench.bench.ladder_script import HOP, RATE_HZ, Config, Scripted, lengths, scripted
from asrkit.workbench.bench.suites.encoders import work

BASELINE = PipelineConfig(
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
    "graphed_encoder": {"encoder_graphs": "per_shape"},
    "graph_of_steps": {"graphs": "step"},
    "graph_whole": {"graphs": "full"},
    "by_length": {"order": "by_length"},
    "overlapped": {"loading": "overlapped"},
}
NEEDS: dict[str, dict[str, Any]] = {  # what a rung needs to stand alone
    "graph_of_steps": {"strategy": "windowed_looping"},
    "graph_whole": {"strategy": "windowed_looping"},
}
TRANSDUCER_RUNGS = {"windowed_looping", *NEEDS}  # of the loop over labels, which CTC has not
GPU_RUNGS = {"graphed_encoder", *NEEDS}
# Options that a probe tries out before they are measured: kernels of our own, and graphs.
PROBED = {"encoder", "encoder_graphs", "graphs"}

SIZES = {"tiny": (4, 2), "cpu": (12, 4), "cuda": (64, 32)}  # utterances, and those of a batch


class LadderArm(NamedTuple):
    """A recogniser on the ladder."""

    recognizer: FileRecognizer
    rung: str
    position: str  # "baseline", "cumulative" on all rungs below, or "alone" on the baseline


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield a case each for RNN-T, TDT and CTC: of published sizes on CUDA, of 110 million weights
    on a CPU, tiny if quick.

    Args:
        device: "cpu" or "cuda".
        quick: a few utterances of at most two seconds.
    """
    cuda = device.startswith("cuda")
    size = "tiny" if quick else device.partition(":")[0]
    N, B = SIZES[size]
    for what, config, preset in configs(size):
        samples = lengths(N)
        if quick:
            samples = [min(S, 2 * RATE_HZ) for S in samples]
        try:
            with tempfile.TemporaryDirectory() as folder:
                made = scripted(config, samples, Path(folder), batch=B, device=device)
                say = partial(print, f"{what}:", file=sys.stderr)
                arms = climb(made.task, what=what, say=say, few=cuda)
                yield case(what, made, arms, {"preset": preset}, quick)
        except (AssertionError, RuntimeError, ValueError) as error:
            yield Case(what=what, refused=failure(what, error))
            continue
        # gigabytes, freed before the next model is made, while the case is still referenced
        release_graphs()
        for arm in arms.values():
            vars(arm.recognizer).clear()


def configs(size: str) -> Iterator[tuple[str, Config, str]]:
    """Yield (name, config, preset) of each case; `size` is "tiny", "cpu" or "cuda"."""
    if size == "cuda":
        yield "ladder-rnnt", presets.parakeet_rnnt_1_1b(), "parakeet_rnnt_1_1b"
        yield "ladder-tdt", presets.parakeet_tdt_0_6b(), "parakeet_tdt_0_6b"
        yield "ladder-ctc", presets.parakeet_ctc_1_1b(), "parakeet_ctc_1_1b"
        return
    base = replace(presets.tdt_ctc_110m(), ctc=False)
    preset = "tdt_ctc_110m"
    suffix = ""
    if size == "tiny":
        base = _tiny()
        preset = "tiny"
        suffix = "-tiny"  # no claim takes the tiny ones for published sizes
    ctc = CTCConfig(vocab_size=base.vocab_size, encoder=base.encoder)
    yield f"ladder-rnnt{suffix}", replace(base, durations=()), preset
    yield f"ladder-tdt{suffix}", base, preset
    yield f"ladder-ctc{suffix}", ctc, preset


def _tiny() -> TransducerConfig:
    return TransducerConfig(
        vocab_size=32,
        encoder=FastConformerConfig(width=96, layers=2, heads=4, subsampling_channels=32),
        predictor=LSTMConfig(width=240, layers=1),
        joint_width=240,
        activation="relu",
        durations=presets.TDT,
        ctc=False,
    )


def _silent(message: str) -> None:
    """What `climb` says, where nobody listens."""


def climb(
    task: Task,
    *,
    what: str = "ladder",
    say: Callable[[str], object] = _silent,
    probe: bool | None = None,
    few: bool = False,
) -> dict[str, LadderArm]:
    """Arms by name: "baseline", then of every rung "to_…" with all rungs below it, and "only_…" on
    the baseline. The first rung stands on the baseline either way.

    A rung that cannot run here is left out, and those above it stand on what is left.

    Args:
        task: files and model.
        what: the name of the case.
        say: called with the reason for each rung that is left out.
        probe: try kernels of our own and graphs on one batch first, and leave out what fails or
            finds other labels than are known; None: on CUDA.
        few: of the rungs alone, only those that decode whole batches: the others take longest.
    """
    cuda = task.device.startswith("cuda")
    if probe is None:
        probe = cuda
    climbing = _Climb(task, what, say, probe)
    for rung, change in RUNGS.items():
        if rung in TRANSDUCER_RUNGS and not kind_of(task.model).captures:
            continue
        if rung in GPU_RUNGS and not cuda:
            say(f"{rung.replace('_', ' ')} is left out: needs a GPU")
            continue
        if not climbing.step_up(rung, change):
            continue
        alone = NEEDS.get(rung, {}) | change
        if not few or "strategy" in alone:
            climbing.attempt(f"only_{rung}", rung, "alone", replace(BASELINE, **alone))
    return climbing.arms


class _Climb:
    """The arms that have been made so far, and the config that the next rung stands on."""

    def __init__(
        self,
        task: Task,
        what: str,
        say: Callable[[str], object],
        probe: bool,
    ) -> None:
        self.task = task
        self.what = what
        self.say = say
        self.probe = probe
        self.top = BASELINE
        self.arms = {"baseline": LadderArm(FileRecognizer(task, BASELINE), "", "baseline")}

    def step_up(self, rung: str, change: Mapping[str, Any]) -> bool:
        """Put a rung on the top; False where it cannot run, so that it need not be tried alone."""
        config = replace(self.top, **change)
        name = f"to_{rung}"
        if not self.attempt(name, rung, "cumulative", config):
            return False
        if name in self.arms:
            self.top = config
        return True

    def attempt(self, name: str, rung: str, position: str, config: PipelineConfig) -> bool:
        """Make an arm, unless there is one like it; False where it cannot run.

        Args:
            name: of the arm.
            rung: that it adds.
            position: "cumulative" or "alone", see LadderArm.
            config: how it computes.
        """
        if config in [arm.recognizer.config for arm in self.arms.values()]:
            return True
        try:
            made = FileRecognizer(self.task, config)
            if self.probe and RUNGS[rung].keys() & PROBED:
                made.probe()
        except (ValueError, RuntimeError) as error:
            reason, _, _ = str(error).partition("\n")
            self.say(f"{name} is left out: {reason}")
            return False
        self.arms[name] = LadderArm(made, rung, position)
        return True


def case(
    what: str,
    made: Scripted,
    arms: Mapping[str, LadderArm],
    params: Mapping[str, Any],
    quick: bool = False,
) -> Case:
    """All arms, each compared with the first one and with the rung below.

    Args:
        what: the name of the case.
        made: the task and its known labels.
        arms: of `climb`.
        params: more to say in the records.
        quick: take the machine's ceilings at smaller sizes.

    Raises:
        AssertionError: the first arm finds other labels than were planted.
    """
    task = made.task
    first = next(iter(arms))
    transcribed = arms[first].recognizer()
    assert transcribed.tokens() == made.labels, f"{what}: {first} finds other labels than planted."
    config: Any = task.model.config.encoder
    climbed = [name for name, arm in arms.items() if arm.position != "alone"]
    ratios = [(first, name) for name in arms if name != first]
    ratios += [pair for pair in itertools.pairwise(climbed) if pair[0] != first]
    shared = {
        "shape": [len(task.files), max(task.samples) // HOP, config.width, config.layers],
        "audio_s": sum(task.samples) / RATE_HZ,
        "utterances": len(task.files),
        "batch": task.batch,
        "labels": sum(map(len, made.labels)),
        "looks": made.joints,
        "weights": "random, planted",
        "lengths": "librispeech_eval, at most 2 s" if quick else "librispeech_eval",
        **params,
    }
    return Case(
        what=what,
        arms={name: arm.recognizer for name, arm in arms.items()},
        params=shared,
        arm_params={name: arm_params(made, arm, quick) for name, arm in arms.items()},
        ratios=ratios,
        warmup=0,
    )


def dtype_of(precision: str) -> str:
    """The dtype that the products of the encoder take their factors in."""
    if precision == "autocast":
        return "bfloat16"
    return precision


def arm_params(made: Scripted, arm: LadderArm, quick: bool) -> dict[str, Any]:
    """Params of an arm: its rung and config, its least work, and the time which that takes at the
    machine's ceilings.

    Least work: the encoder's operations on all frames but padding, the joints and predictor's steps
    of the paths; all weights of the encoder read once a batch.

    Args:
        made: the task.
        arm: of `climb`.
        quick: take the ceilings at smaller sizes.
    """
    task = made.task
    config = arm.recognizer.config
    encoder: Any = task.model.config.encoder
    works = [work(encoder, 1, max(S // HOP, 1)) for S in task.samples]
    FLOP = made.decoder_flops + sum(one.FLOP for one in works)
    itemsize = WEIGHTS[config.precision].itemsize
    read_B = len(arm.recognizer.plan) * itemsize * works[0].weights
    dtype = dtype_of(config.precision)
    top = ceilings(task.device, quick)
    return {
        "rung": arm.rung,
        "how": arm.position,
        "pipeline": asdict(config),
        "dtype": dtype,
        "tolerance": 1e-3 if config.precision == "float32" else 0.2,  # of likelihoods
        "floor_FLOP": FLOP,
        "floor_B": read_B,
        "least_ms": top.floor_ms(FLOP, read_B, dtype),
        "peak_FLOP": top.flops[dtype],
        "peak_B": top.bytes_per_s,
    }


SUITE = Suite(name="ladder", cases=suite, gpu_tests=("tests/workbench/bench/test_ladder.py",))
