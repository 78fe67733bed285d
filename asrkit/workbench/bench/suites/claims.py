"""The suite of claims: what the ledger says needs a GPU, measured at the sizes that are published,
on a machine without notebooks. The claims of notebooks 04 and 05 are left to these.

A study is a row of STUDIES: the claim's id, which its records carry, and what makes its cases. On a
CPU the studies run at toy sizes, as a rehearsal that settles nothing. Weights are random, and what
decoders read is planted (asrkit.workbench.bench.planted), in as many frames as the encoder gives.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asrkit.decoders import (
    Hypotheses,
    aed_greedy,
    ctc_greedy,
    transducer_greedy,
)
from asrkit.models import FastConformerConfig, presets
from asrkit.models.transducer import make_encoder
from asrkit.workbench.bench import attention_ways
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.planted import (
    DURATIONS,
    FRAMES_PER_SECOND,
    Planted,
    ctc_log_probs,
    planted,
    planted_decoder,
    planted_text,
)
from asrkit.workbench.bench.studies import StudyRecords
from asrkit.workbench.measure import measure
from asrkit.workbench.records import Measurement

Options = Mapping[str, Any]  # of transducer_greedy
Calls = Sequence[Callable[[], object]]
PROMPT = 9  # tokens of a prompt of Canary-1B-Flash
RNNT, TDT = DURATIONS
LOOPS = {name: {"strategy": name, "graphs": "off"} for name in ("frame_looping", "label_looping")}
EAGER = {"graphs": "off"}
GRAPH = {"graphs": "full"}


@dataclass(frozen=True)
class Arm:
    """A call that decodes a plan, after the encoder's work, whose result is not read."""

    plan: Planted
    decode: Callable[[], Hypotheses]
    encode: Callable[[], object] = tuple

    def __call__(self) -> Hypotheses:
        self.encode()
        return self.decode()

    def right(self) -> tuple[Tensor]:
        """Whether it finds what was planted."""
        return (torch.tensor(self().tokens() == self.plan.labels),)


class Study(NamedTuple):
    """A claim, and where and how large its cases are."""

    claim: str
    device: str
    toy: bool  # sizes that settle nothing

    @property
    def batch(self) -> tuple[int, int]:
        """Utterances, and seconds of the longest."""
        return (2, 2) if self.toy else (32, 20)

    def encoder(self, config: Any) -> FastConformerConfig:
        """The encoder of this config, or a tiny one."""
        found: Any = presets.tiny() if self.toy else config
        return found.encoder

    def records(self, shape: Sequence[int], **params: Any) -> StudyRecords:
        """What makes records with these params."""
        return StudyRecords(self.device, self.toy, shape=[*shape], **params)

    def decoders(self, arms: Mapping[str, Arm], **params: Any) -> Iterator[Case]:
        """A case of two arms, slow and fast, which are timed if they find what was planted."""
        compared = {name: arm.right for name, arm in arms.items()}
        first, *_ = arms.values()
        yield Case(
            what=self.claim,
            arms=arms,
            compared_arms={"planted": lambda: (torch.tensor(True),), **compared},
            params=self.records(first.plan.encoded.shape, **params).params,
        )

    def shares(
        self, impl: str, calls: Calls, records: StudyRecords, value: Callable[..., float]
    ) -> Iterator[Case]:
        """A case that records a share that follows from times.

        Args:
            impl: of the record.
            calls: are timed in turns.
            records: makes the record.
            value: of the milliseconds that each call took in one repeat.
        """

        def measured() -> Iterator[Measurement]:
            repeats = 3 if self.toy else 20
            arms = {str(number): call for number, call in enumerate(calls)}
            times = measure(arms, repeats=repeats, enough_s=1.0, most_s=10.0, device=self.device)
            rows = zip(*(timing.samples_ms for timing in times.values()), strict=False)
            samples = [value(*ms) for ms in rows]
            yield records.value(self.claim, samples, times["0"], impl, metric="share", unit="1")

        yield Case(what=self.claim, measure=measured)

    def idle(self, impl: str, call: Callable[[], object], records: StudyRecords) -> Iterator[Case]:
        """A case that records in which share of a call's time the GPU runs nothing."""
        busy_ms = kernels_ms(call)
        return self.shares(impl, [call], records, lambda ms: max(0.0, 1 - busy_ms / ms))


def share(ms: float, rest_ms: float) -> float:
    """The share of the first in the time of both."""
    return ms / (ms + rest_ms)


def kernels_ms(call: Callable[[], object]) -> float:
    """Time that kernels of a call take on the GPU, by torch's profiler."""
    call()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    return sum(
        event.time_range.elapsed_us() / 1e3
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def noise(*shape: int) -> Tensor:
    """Reproducible random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_model(make: Callable[..., Any], config: object, device: str) -> Any:
    """A model with random weights, drawn on the device, where a billion are drawn faster."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return make(config).eval().requires_grad_(False)


@torch.inference_mode()
def run(model: nn.Module, *inputs: Tensor) -> Any:
    """What the model makes of its inputs."""
    return model(*inputs)


def noise_features(study: Study, B: int, seconds: int, bins: int) -> tuple[Tensor, Tensor]:
    """Features (B, T, bins) of noise and lengths (B,), all of them full."""
    T = 100 * seconds
    return noise(B, T, bins).to(study.device), torch.full((B,), T, device=study.device)


def encoding(study: Study, config: Any, B: int, seconds: int) -> Callable[[], object]:
    """A call of a model's encoder in bfloat16, from features of noise.

    Args:
        study: of the claim.
        config: of the model.
        B: utterances.
        seconds: of each.
    """
    encoder = study.encoder(config)
    model = random_model(make_encoder, encoder, study.device).bfloat16()
    features, lengths = noise_features(study, B, seconds, encoder.bins)
    return partial(run, model, features.bfloat16(), lengths)


def transducer(study: Study, durations: tuple[int, ...], layers: int = 1) -> Planted:
    """A batch for a transducer of Parakeet's sizes, with so many layers of its LSTM."""
    B, seconds = study.batch
    sizes: Options = {"V": 33, "width": 240} if study.toy else {}
    frames = round(seconds * FRAMES_PER_SECOND)
    plan = planted(B, frames, durations=durations, layers=layers, **sizes)
    return plan.to(study.device, torch.float32)


def decode(plan: Planted, options: Options) -> Hypotheses:
    """Greedy hypotheses of a planted transducer."""
    return transducer_greedy(plan.model, plan.encoded, plan.lengths, **options)


def looping(
    ways: Mapping[str, Options], durations: tuple[int, ...], study: Study
) -> Iterator[Case]:
    """Transducers' decoding alone, in two ways.

    Args:
        ways: options by name of arm.
        durations: of a TDT model; none for an RNN-T.
        study: of the claim.
    """
    plan = transducer(study, durations)
    arms = {name: Arm(plan, partial(decode, plan, options)) for name, options in ways.items()}
    return study.decoders(arms, durations=[*durations])


def idle_looping(study: Study) -> Iterator[Case]:
    """Share of frame looping's time in which the GPU runs nothing."""
    plan = transducer(study, RNNT)
    call = partial(decode, plan, LOOPS["frame_looping"])
    return study.idle("frame_looping", call, study.records(plan.encoded.shape))


def idle_encoder(study: Study) -> Iterator[Case]:
    """Share of an encoder's time in which the GPU runs nothing, at a large and a small batch of ten
    seconds; the newest record is that of the claim.
    """
    for B in (128, 1):
        call = encoding(study, presets.tdt_ctc_110m(), B, 10)
        records = study.records([B, 1000], dtype="bfloat16", preset="tdt_ctc_110m")
        yield from study.idle("eager", call, records)


def recognizers(ways: Mapping[str, Options], config: Any, study: Study) -> Iterator[Case]:
    """Features to labels in bfloat16 with 1.1 billion parameters, in two ways.

    Args:
        ways: options by name of arm; "ctc" is a CTC model of the same size.
        config: of the transducer.
        study: of the claim.
    """
    plan = transducer(study, config.durations, layers=2).to(study.device, torch.bfloat16)
    encode = encoding(study, config, *study.batch)
    scores = ctc_log_probs(plan).to(study.device)
    arms = {name: Arm(plan, partial(decode, plan, own), encode) for name, own in ways.items()}
    if "ctc" in arms:
        arms["ctc"] = Arm(plan, partial(ctc_greedy, scores, plan.lengths), encode)
    return study.decoders(arms, dtype="bfloat16", audio_s=math.prod(study.batch))


def canary(study: Study, config: Any) -> Arm:
    """Features to tokens in bfloat16; the frames are projected in every step of the decoder, as
    NeMo does.
    """
    B, seconds = study.batch
    sizes = {name: getattr(config, name) for name in ("width", "heads", "most")}
    sizes["V"] = config.vocab_size
    if study.toy:
        sizes = {"V": 33, "width": 120, "heads": 2, "most": 64}
    decoder = planted_decoder(layers=config.layers, **sizes)
    frames = round(seconds * FRAMES_PER_SECOND)
    plan = planted_text(decoder, B, frames, prompt=PROMPT).to(study.device, torch.bfloat16)
    model = attention_ways.in_a_way(plan.model, attention_ways.WAYS["NeMo 3.0"])
    call = partial(aed_greedy, model, plan.encoded, plan.lengths, prompt=plan.prompt)
    return Arm(plan, call, encoding(study, config, B, seconds))


def decoder_share(study: Study) -> Iterator[Case]:
    """Share of decoding in the time of Canary-1B."""
    arm = canary(study, presets.canary_1b())
    assert arm().tokens() == arm.plan.labels, "other labels than were planted"
    records = study.records(arm.plan.encoded.shape, dtype="bfloat16", prompt=PROMPT)
    return study.shares("recomputed", [arm.decode, arm.encode], records, share)


def moved_layers(study: Study) -> Iterator[Case]:
    """Canary-1B against Canary-1B-Flash, whose layers are in the encoder."""
    arms = {
        "deep_decoder": canary(study, presets.canary_1b()),
        "shallow_decoder": canary(study, presets.canary_1b_flash()),
    }
    return study.decoders(arms, dtype="bfloat16", prompt=PROMPT)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases of every claim in STUDIES that this device can measure or rehearse.

    Args:
        device: "cpu" or "cuda".
        quick: toy sizes, as always on a CPU.
    """
    cuda = device == "cuda"
    for claim, cases in STUDIES.items():
        if cuda or claim not in GPU_CLAIMS:
            yield from cases(Study(claim, device, quick or not cuda))


WINDOWED = {"windowed_looping_off": EAGER, "windowed_looping_full": GRAPH}
PARAKEET_RNNT = presets.parakeet_rnnt_1_1b()
PARAKEET_TDT = presets.parakeet_tdt_1_1b()
STUDIES: dict[str, Callable[[Study], Iterator[Case]]] = {
    "label-looping-2x": partial(looping, LOOPS, RNNT),
    "label-looping-faster": partial(looping, LOOPS, RNNT),
    "label-looping-tdt-3.8x": partial(looping, LOOPS, TDT),
    "graphs-cut-launches": partial(looping, {"eager": EAGER, "graph": GRAPH}, RNNT),
    "rnnt-gpu-idle": idle_looping,
    "launch-bound-small-batch": idle_encoder,
    "graphs-label-looping-rnnt": partial(recognizers, WINDOWED, PARAKEET_RNNT),
    "graphs-label-looping-tdt": partial(recognizers, WINDOWED, PARAKEET_TDT),
    "rnnt-near-ctc": partial(recognizers, {"rnnt": GRAPH, "ctc": {}}, PARAKEET_RNNT),
    "decoder-bottleneck": decoder_share,
    "decoder-3x": moved_layers,
}
GPU_CLAIMS = {  # which a CPU cannot rehearse
    "graphs-cut-launches",
    "rnnt-gpu-idle",
    "launch-bound-small-batch",
    "graphs-label-looping-rnnt",
    "graphs-label-looping-tdt",
    "rnnt-near-ctc",
}


SUITE = Suite(name="claims", cases=suite, gpu_tests=("tests/decoders/test_graphs_gpu.py",))
