"""The ladder: one recogniser, its speed-ups switched on rung by rung, each rung cumulative and
alone, all in one run.

The baseline reads a batch, computes features and normalises them one utterance after another,
encodes in eager float32, decodes one utterance after another, and takes utterances as they come.
Every rung changes one field of `Pipeline`. Utterances have the lengths of LibriSpeech's dev and
test sets and say 3.5 labels a second; what is heard in the files is beeps in noise.

Weights of the encoder are random, those of predictor and joint planted
(asrkit.workbench.bench.planted). So that tokens depend on all that was computed, the decoder reads
frames + script. The script is what is to be said, less the frames that the encoder gave for that
utterance alone, one at a time, in float32. The frames are `LOUD` times as large as what the labels
differ by, and cancel only where a pipeline computed the same: another utterance's, another
length's, or a NaN drowns the labels. A CTC head reads likewise.

What that proves: order, lengths, padding, batches, streams and graphs are right, and half
precision's error stays far below what tells random frames apart. Not: that a trained model keeps
its error rate. Notebooks 04 and 13 ask one.
"""

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from re import Pattern
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from asrkit.decoders import release_graphs
from asrkit.features import FeatureConfig, log_mel
from asrkit.files import shipped
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.shapes import expect, whole
from asrkit.workbench.bench import guards
from asrkit.workbench.bench.cases import NOTHING, Case, Suite, failure
from asrkit.workbench.bench.ceilings import ceilings, tf32
from asrkit.workbench.bench.guards import barred
from asrkit.workbench.bench.ladder_pipeline import Pipeline, Recogniser, Task, read_wav, write_wav
from asrkit.workbench.bench.planted import LOGIT, Planted, planted
from asrkit.workbench.bench.suites.encoder import recogniser
from asrkit.workbench.cost import encoder_flops, encoder_parameters

Config = TransducerConfig | CTCConfig
RATE_HZ, HOP = 16_000, 160
LOUD = 6.0  # deviation of the encoder's part of a frame, of labels that are signs of 1
HEARD = 0.7  # a CTC label's part of a frame: its norm over the deviation of the encoder's part
RUNGS: dict[str, dict[str, str]] = {
    "batched_frontend": {"frontend": "batched"},
    "batched_decoder": {"decoder": "batched"},
    "windowed_looping": {"decoder": "windowed_looping"},
    "autocast": {"arithmetic": "autocast"},
    "bfloat16": {"arithmetic": "bfloat16"},
    "optimized_encoder": {"encoder": "optimized"},
    "graphed_encoder": {"encoding": "replayed"},
    "graph_of_steps": {"graphs": "step"},
    "graph_whole": {"graphs": "full"},
    "fused_turns": {"turn": "fused"},
    "by_length": {"order": "by_length"},
    "overlapped": {"loading": "overlapped"},
}
OF_CTC = {
    "windowed_looping",
    "graph_of_steps",
    "graph_whole",
    "fused_turns",
}  # rungs that CTC has not
NEEDS = {
    name: {"decoder": "windowed_looping"} for name in ("graph_of_steps", "graph_whole")
}  # what a rung needs to stand alone
NEEDS["fused_turns"] = {"decoder": "windowed_looping", "graphs": "full"}
OF_GPU = {"graphed_encoder", *NEEDS}
MADE_S = {
    "rnnt": 30.0,
    "tdt": 22.0,
    "ctc": 24.0,
}  # estimates for an H100, unmeasured: model, script, graphs, kernels
EACH_S = {
    "rnnt": 1.4,
    "tdt": 0.85,
    "ctc": 0.4,
}  # of an utterance heard by all arms of `few`, four times


class Arm(NamedTuple):
    """A recogniser, the rung that it stands on, and whether the rungs below are switched on too."""

    recogniser: Recogniser
    rung: str
    how: str  # "baseline", "cumulative" or "alone"


class Scripted(NamedTuple):
    """A task whose tokens are known, as one list a file, and how many joints the paths to them take
    (0 for CTC).
    """

    task: Task
    labels: list[list[int]]
    looks: int


def suite(
    device: str,
    quick: bool,
    *,
    utterances: int = 0,
    batch: int = 0,
    kind: str = "",
    few: bool = False,
    without: Pattern[str] = NOTHING,
    until: float = inf,
) -> Iterator[Case]:
    """A case each for RNN-T, TDT and CTC: of published sizes on CUDA, of 110 million weights on a
    CPU, tiny if quick.

    `utterances` and how many of them are a `batch`; 0: a few, and on CUDA two batches of 64, or
    fewer where three rounds of those would not be over before time.monotonic() reaches `until`, as
    far as that can be told; if quick four of two seconds, two a batch. kind: only "rnnt", "tdt" or
    "ctc". few, without: see climb.
    """
    cuda = device.startswith("cuda")
    for what, config, preset in configs("tiny" if quick else "cuda" if cuda else "cpu"):
        if kind in what and not without.search(what):
            most = affordable(what, until - time.monotonic()) if cuda else 12
            N, B = (4, 2) if quick else (utterances or most, batch or (most // 2 if cuda else 4))
            samples = [min(S, 2 * RATE_HZ) if quick else S for S in lengths(N)]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    made = scripted(config, samples, Path(folder), batch=B, device=device)
                    say = partial(print, f"{what}:", file=sys.stderr)
                    arms = climb(made.task, what=what, say=say, few=few, without=without)
                    yield case(what, made, arms, {"preset": preset}, quick)
            except (AssertionError, RuntimeError, ValueError) as error:
                guards.prove_alive(device, what)
                yield Case(what=what, refused=failure(what, error))
                continue
            # before the next model is made, while the case is still held: gigabytes
            release_graphs()
            for arm in arms.values():
                vars(arm.recogniser).clear()


def affordable(what: str, seconds: float) -> int:
    """Utterances, in two batches, of which a ladder takes so many seconds on an H100: by estimates,
    for none has been climbed yet.

    128, or less until it fits, and 8 at least. Making the model and the graphs is the same for all;
    then every utterance is heard by each arm of the few once to be compared, and three times to be
    timed.
    """
    made, each = next((MADE_S[kind], EACH_S[kind]) for kind in EACH_S if kind in what)
    return next((N for N in (128, 64, 32, 16) if made + N * each <= seconds), 8)


def configs(size: str) -> Iterator[tuple[str, Config, str]]:
    """(what, config, name of its sizes) of each case: size "tiny", "cpu" or "cuda"."""
    base = replace(presets.tdt_ctc_110m(), ctc=False)
    name = "tdt_ctc_110m"
    if size == "tiny":
        encoder = FastConformerConfig(width=96, layers=2, heads=4, subsampling_channels=32)
        base = TransducerConfig(
            vocab_size=32,
            encoder=encoder,
            predictor=LSTMConfig(width=240, layers=1),
            joint_width=240,
            activation="relu",
            durations=presets.TDT,
            ctc=False,
        )
        name = "tiny"
    ctc = CTCConfig(vocab_size=base.vocab_size, encoder=base.encoder)
    if size == "cuda":
        yield "ladder-rnnt", presets.parakeet_rnnt_1_1b(), "parakeet_rnnt_1_1b"
        yield "ladder-tdt", presets.parakeet_tdt_0_6b(), "parakeet_tdt_0_6b"
        yield "ladder-ctc", presets.parakeet_ctc_1_1b(), "parakeet_ctc_1_1b"
        return
    end = "-tiny" * (size == "tiny")  # no claim takes the tiny ones for published sizes
    yield f"ladder-rnnt{end}", replace(base, durations=()), name
    yield f"ladder-tdt{end}", base, name
    yield f"ladder-ctc{end}", ctc, name


def lengths(N: int, *, seed: int = 0) -> list[int]:
    """Samples of N utterances: the middles of N equal parts of LibriSpeech's dev and test sets by
    length, in a drawn order.
    """
    expect(whole(N, 1), "utterances", "at least 1", N)
    seconds = np.sort(
        np.loadtxt(shipped("lengths") / "librispeech_eval.csv.gz", delimiter=",", skiprows=1)[:, 0]
    )
    middle = seconds[((np.arange(N) + 0.5) / N * len(seconds)).astype(int)]
    return (np.random.default_rng(seed).permutation(middle) * RATE_HZ).astype(int).tolist()


def beeps(S: int, seed: int) -> np.ndarray:
    """Samples (S,) int16: a tone of another pitch and loudness every 80 ms, in noise, so that no
    encoder frame is like another.
    """
    random, count = np.random.default_rng(seed), -(-S // 1280)
    pitch, loud = (
        random.uniform(low, high, count).repeat(1280)[:S]
        for low, high in ((100, 4000), (0.05, 0.3))
    )
    made = loud * np.sin(2 * np.pi * np.cumsum(pitch) / RATE_HZ) + 0.01 * random.standard_normal(S)
    return (32768 * made).astype(np.int16)


def scripted(
    config: Config, samples: Sequence[int], folder: Path, *, batch: int, device: str = "cpu"
) -> Scripted:
    """Files of so many samples in `folder`, a model of `config`, and the script by which it says
    what is known before.
    """
    assert isinstance(config.encoder, FastConformerConfig)
    features = FeatureConfig(bins=config.encoder.bins)
    files = [write_wav(folder / f"{n}.wav", beeps(S, n)) for n, S in enumerate(samples)]
    ends = [-(-(S // HOP) // config.encoder.subsampling) for S in samples]
    wide = isinstance(config, TransducerConfig)
    sizes: dict[str, Any] = {"V": config.vocab_size + 1, "lengths": ends}
    if isinstance(config, TransducerConfig):
        assert isinstance(config.predictor, LSTMConfig)
        sizes |= {
            "durations": config.durations,
            "width": config.joint_width,
            "layers": config.predictor.layers,
        }
    plan = planted(len(files), max(ends), **sizes)
    with torch.inference_mode(False), torch.no_grad(), tf32(False):
        with (
            torch.device(device),
            torch.random.fork_rng(devices=[]),
        ):  # a billion weights are drawn faster where they stay
            torch.manual_seed(0)
            model = (
                CTCModel(config).eval()
                if isinstance(config, CTCConfig)
                else recogniser(config, plan.model)
            )
        heard = [
            log_mel(
                torch.from_numpy(read_wav(file).copy())[None].to(device) / 32768,
                torch.tensor([S], device=device),
                config=features,
            )
            for file, S in zip(files, samples, strict=True)
        ]
        enliven(model.encoder, *heard[samples.index(max(samples))])
        frames = [
            model.encoder(*one)[0][0] for one in heard
        ]  # each (T, D), one utterance at a time
        aims = plan.encoded.to(device)
        if isinstance(model, TransducerModel):
            frames = loudly(model.encoder_projection, frames)
        labels = plan.labels
        if isinstance(model, CTCModel):
            aims, labels = spell(model.output, plan, torch.cat(frames).std().item())
        script = torch.zeros_like(aims)
        for row, (aim, own) in enumerate(zip(aims, frames, strict=True)):
            script[row, : len(own)] = aim[: len(own)] - own
    task = Task(
        model=model,
        files=files,
        samples=samples,
        batch=batch,
        features=features,
        script=script,
        device=device,
        labels=labels,
    )
    return Scripted(task, labels, plan.looks() if wide else 0)


def enliven(encoder: nn.Module, features: Tensor, lengths: Tensor) -> None:
    """Makes frames of a random encoder differ: what leaves the subsampling has mean 0 and deviation
    1, branches are weakened.

    As it is born, it gives nearly the same frame whatever it hears: products of what a relu lets
    pass have large means.
    """
    assert isinstance(encoder, FastConformer)
    out, x = encoder.subsampling.out, encoder.subsampling(features, lengths)[0][0]
    size = 1 / x.std(0) / (math.sqrt(encoder.width) if encoder.config.scale_input else 1)
    out.weight.mul_(size[:, None])
    out.bias.sub_(x.mean(0)).mul_(size)
    for block in encoder.blocks:
        parts: Any = block
        for last in (parts.feed[0][-1], parts.attention.out, parts.pointwise, parts.feed[1][-1]):
            for weight in last.parameters():
                weight.mul_(0.3)


def loudly(projection: nn.Linear, frames: Sequence[Tensor]) -> list[Tensor]:
    """`frames` projected, each unit with mean 0 and deviation LOUD over all of them, which
    `projection` is changed for.
    """
    projected = projection(torch.cat([*frames]))
    size, mean = LOUD / projected.std(0), projected.mean(0)
    projection.weight.mul_(size[:, None])
    projection.bias.sub_(mean).mul_(size)
    return [projection(one) for one in frames]


def spell(head: nn.Linear, plan: Planted, deviation: float) -> tuple[Tensor, list[list[int]]]:
    """Frames (N, T, D) from which a CTC head reads the plan's labels, by codes that it is given,
    and these labels.

    Of two labels on a frame the second is one later. `deviation` is that of the encoder's frames,
    which the codes hide in.
    """
    V, D = head.weight.shape
    codes = torch.randn(V, D, generator=torch.Generator().manual_seed(0)).sign()
    codes[-1] = 0  # blank has a bias instead
    size = HEARD * deviation / math.sqrt(D)
    aims, said = torch.zeros(*plan.encoded.shape[:2], D), list[list[int]]()
    for row, (labels, frames, end) in enumerate(
        zip(plan.labels, plan.frames, plan.lengths.tolist(), strict=True)
    ):
        places, place = dict[int, int](), -1
        for label, t in zip(labels, frames, strict=True):
            place = min(max(t, place + 1), end - 1)
            places[place] = label
        for place, label in places.items():
            aims[row, place] = size * codes[label]
        said.append([*places.values()])
    head.weight.copy_(codes * LOGIT / (size * D))
    head.bias.zero_()[-1] = LOGIT / 2
    return aims.to(head.weight.device), said


def climb(
    task: Task,
    *,
    what: str = "ladder",
    say: Callable[[str], object] = bool,
    probe: bool | None = None,
    few: bool = False,
    without: Pattern[str] = NOTHING,
) -> dict[str, Arm]:
    """Arms by name: "baseline", then of every rung "to_…" with all rungs below, and "only_…" on the
    baseline.

    What cannot run here is left out by both, and `say` is told why; `probe` (None: on CUDA) hears a
    batch by kernels of our own and by graphs to find out, also whether that says what the script
    says: rungs above are then not wrong for it. The first rung stands on the baseline anyway. few:
    of those alone, none that decodes one utterance after another, which takes longest. without:
    names of arms, or `way`s to climb `what`; rungs above stand on what is left. DeviceLost if a
    device does not survive a probe.
    """
    probe = task.device.startswith("cuda") if probe is None else probe
    now, arms = Pipeline(), {"baseline": Arm(Recogniser(task, Pipeline()), "", "baseline")}
    for rung, change in RUNGS.items():
        if isinstance(task.model, CTCModel) and rung in OF_CTC:
            continue
        alone = NEEDS.get(rung, {}) | change
        for how, fields in (("cumulative", asdict(now) | change), ("alone", alone)):
            name = f"{'to' if how == 'cumulative' else 'only'}_{rung}"
            dtype = dtype_of(fields.get("arithmetic", "float32"))
            if barred(without, name, what, dtype) or (
                few and how == "alone" and "decoder" not in fields
            ):
                continue
            if rung in OF_GPU and not task.device.startswith("cuda"):
                say(f"{rung.replace('_', ' ')} is left out: needs a GPU")
                break
            try:
                made = Recogniser(task, Pipeline(**fields))
                if made.how in [arm.recogniser.how for arm in arms.values()]:
                    continue
                if probe and {"encoder", "encoding", "graphs", "turn"} & change.keys():
                    made.probe()
            except (ValueError, RuntimeError) as error:
                guards.prove_alive(task.device, what, name)
                say(f"{name} is left out: {str(error).partition(chr(10))[0]}")
                if how == "cumulative":
                    break
                continue
            arms[name] = Arm(made, rung, how)
            now = made.how if how == "cumulative" else now
    return arms


def case(
    what: str,
    made: Scripted,
    arms: Mapping[str, Arm],
    params: Mapping[str, Any],
    quick: bool = False,
) -> Case:
    """All arms, each against the baseline and against the rung below; AssertionError if the
    baseline does not say the script.
    """
    task = made.task
    heard = arms["baseline"].recogniser()
    assert heard.tokens() == made.labels, f"{what}: the baseline does not say what the script says."
    config: Any = task.model.config.encoder
    told = {name: told_of(made, arm, quick) for name, arm in arms.items()}
    climbed = [name for name, arm in arms.items() if arm.how != "alone"]
    below = [pair for pair in itertools.pairwise(climbed) if pair[0] != "baseline"]
    shared = {
        "shape": [len(task.files), max(task.samples) // HOP, config.width, config.layers],
        "audio_s": sum(task.samples) / RATE_HZ,
        "utterances": len(task.files),
        "batch": task.batch,
        "labels": sum(map(len, made.labels)),
        "looks": made.looks,
        "weights": "random, planted",
        "lengths": "librispeech_eval" + ", at most 2 s" * quick,
        **params,
    }
    ratios = [*(("baseline", name) for name in arms if name != "baseline"), *below]
    recognisers = {name: arm.recogniser for name, arm in arms.items()}
    return Case(
        what=what,
        arms=recognisers,
        params=shared,
        arm_params=told,
        ratios=ratios,
        warmup=0,
        least_s=15.0,
    )


def dtype_of(arithmetic: str) -> str:
    """The dtype that the products of the encoder take their factors in."""
    return "bfloat16" if arithmetic == "autocast" else arithmetic


def told_of(made: Scripted, arm: Arm, quick: bool) -> dict[str, Any]:
    """Params of an arm: its rung and pipeline, its least work, and the time which that takes at the
    machine's ceilings.

    Least work: the encoder's operations on all frames but padding, the joints and predictor's steps
    of the paths; all weights of the encoder read once a batch.
    """
    task, how = made.task, arm.recogniser.how
    config: Any = task.model.config.encoder
    sizes = {
        name: getattr(config, name)
        for name in ("bins", "width", "layers", "subsampling", "kernel", "expansion")
    }
    sizes["channels"] = config.subsampling_channels
    FLOP = sum(
        encoder_flops(B=1, T=max(S // HOP, 1), context=config.context, **sizes)
        for S in task.samples
    )
    if isinstance(task.model, TransducerModel):
        head, D = task.model.output, task.model.output.in_features
        FLOP += made.looks * 2 * D * head.out_features
        FLOP += sum(map(len, made.labels)) * (
            task.model.config.predictor.layers * 16 * D * D  # type: ignore[union-attr]
            + 2 * D * D
        )
    else:
        FLOP += (
            2
            * task.model.output.weight.numel()
            * sum(-(-(S // HOP) // config.subsampling) for S in task.samples)
        )
    read = (
        len(arm.recogniser.plan)
        * how.weights.itemsize
        * encoder_parameters(bias=config.bias, **sizes)
    )
    arithmetic = dtype_of(how.arithmetic)
    top = ceilings(task.device, quick)
    return {
        "rung": arm.rung,
        "how": arm.how,
        "pipeline": asdict(how),
        "dtype": arithmetic,
        "tolerance": 1e-3 if how.arithmetic == "float32" else 1.0,  # of scores near 0
        "floor_FLOP": FLOP,
        "floor_B": read,
        "least_ms": top.floor_ms(FLOP, read, arithmetic),
        "peak_FLOP": top.flops[arithmetic],
        "peak_B": top.bytes_per_s,
    }


SUITE = Suite(name="ladder", cases=suite, takes=("without", "until"))
