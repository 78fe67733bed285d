"""The suite of claims: what the ledger says needs a GPU, measured at the sizes that are published,
on a machine without notebooks.

A study is a row of STUDIES: the claim's id, which its records carry, and what makes its cases. On a
CPU the studies run at toy sizes, as a rehearsal that settles nothing. Weights are random, and what
decoders read is planted (asrkit.workbench.bench.planted), in as many frames as the encoder gives.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asrkit.data import shipped_lengths
from asrkit.decoders import (
    Hypotheses,
    aed_greedy,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_greedy,
)
from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential
from asrkit.models import CTCModel, FastConformerConfig, presets
from asrkit.models.encoders import make_encoder
from asrkit.transcribe.recognizer import ModelVariants
from asrkit.workbench.bench import cache_policies
from asrkit.workbench.bench.cases import Case, Suite
from asrkit.workbench.bench.file_recognizer import Way, WayRecognizer
from asrkit.workbench.bench.planted import (
    FRAMES_PER_SECOND,
    Planted,
    ctc_log_probs,
    planted,
    planted_decoder,
    planted_text,
    seeded,
)
from asrkit.workbench.bench.studies import StudyRecords
from asrkit.workbench.measure import measure
from asrkit.workbench.records import Measurement

Options = Mapping[str, Any]  # of transducer_greedy
RATE_HZ = 16_000
BLANK_SHARE = 0.72  # of frames, as in speech
PROMPT = 9  # tokens of a prompt of Canary-1B-Flash
LOOPS = {name: {"strategy": name, "graphs": "off"} for name in ("frame_looping", "label_looping")}
EAGER = {"graphs": "off"}
GRAPH = {"graphs": "full"}
way = partial(Way, encoder="eager")  # front end and decoder are what is compared
WAYS = {  # normalisation and CTC decoding, each utterance by utterance or batched
    "both_sequential": way(normalization="one_by_one", strategy="one_by_one"),
    "sequential_ctc": way(normalization="batched", strategy="one_by_one"),
    "sequential_norm": way(normalization="one_by_one", strategy="batched"),
    "both_batched": way(normalization="batched", strategy="batched"),
}
FRONT_ENDS = {  # what claims call a slow way and both_batched
    "ctc-greedy-batched": ("sequential_ctc", "batched_ctc"),
    "feature-norm-batched": ("sequential_norm", "batched_norm"),
    "ctc-frontend-batched": ("both_sequential", "both_batched"),
}
mel = partial(log_mel, config=FeatureConfig(normalization="none"))


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

    def values(
        self,
        impl: str,
        calls: Sequence[Callable[[], object]],
        records: StudyRecords,
        value: Callable[..., float],
        unit: str = "1",
    ) -> Iterator[Case]:
        """A case that records what follows from times: a share, or a latency in `unit`.

        Args:
            impl: of the record.
            calls: are timed in turns.
            records: makes the record.
            value: of the milliseconds that each call took in one repeat.
            unit: of the value.
        """
        metric = "share" if unit == "1" else "latency"

        def measured() -> Iterator[Measurement]:
            repeats = 3 if self.toy else 20
            arms = {str(number): call for number, call in enumerate(calls)}
            times = measure(arms, repeats=repeats, enough_s=1.0, most_s=10.0, device=self.device)
            rows = zip(*(timing.samples_ms for timing in times.values()), strict=False)
            samples = [value(*ms) for ms in rows]
            yield records.value(self.claim, samples, times["0"], impl, metric=metric, unit=unit)

        yield Case(what=self.claim, measure=measured)

    def idle(self, impl: str, call: Callable[[], object], records: StudyRecords) -> Iterator[Case]:
        """A case that records in which share of a call's time the GPU runs nothing."""
        busy_ms = kernels_ms(call)
        return self.values(impl, [call], records, lambda ms: max(0.0, 1 - busy_ms / ms))


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
    with torch.device(device):
        return seeded(make, config)


def ctc_model(study: Study) -> CTCModel:
    """Parakeet CTC 1.1B with random weights."""
    config = presets.parakeet_ctc_1_1b()
    return random_model(CTCModel, replace(config, encoder=study.encoder(config)), study.device)


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


def cast_and_product(
    device: str, rows: int, width: int, inner: int
) -> dict[str, Callable[[], object]]:
    """Arms "cast", of a product's factors to bfloat16, and "product", of the casts.

    Args:
        device: of the tensors.
        rows: of the input (rows, width).
        width: of the input.
        inner: of the weight (inner, width) and the bias (inner,).
    """
    parts = [torch.randn(size, device=device) for size in ((rows, width), (inner, width), (inner,))]
    half = [part.to(torch.bfloat16) for part in parts]

    def cast() -> list[Tensor]:
        return [part.to(torch.bfloat16) for part in parts]

    return {"cast": cast, "product": partial(F.linear, *half)}


def casts(study: Study) -> Iterator[Case]:
    """The casts of the first linear layer of a feed-forward module of Parakeet CTC 1.1B, and its
    product: the time of either, or the ratio.
    """
    shape = (100, 64, 256) if study.toy else (8000, 1024, 4096)
    arms = cast_and_product(study.device, *shape)
    records = study.records(shape, dtype="bfloat16")
    name = study.claim.removesuffix("-200us")
    if name in arms:
        return study.values(name, [arms[name]], records, lambda ms: 1e3 * ms, "us")
    unlike = dict.fromkeys(arms, tuple)  # they do different things: nothing is to agree
    return iter([Case(what=study.claim, arms=arms, compared_arms=unlike, params=records.params)])


def half_precision(study: Study) -> Iterator[Case]:
    """Autocast against weights in bfloat16, features to log-probs."""
    model = ctc_model(study)
    half = deepcopy(model).bfloat16()
    features, lengths = noise_features(study, *study.batch, bins=80)

    def autocast() -> Any:
        with torch.autocast(features.device.type, torch.bfloat16):
            return run(model, features, lengths)

    yield Case(
        what=study.claim,
        arms={"autocast": autocast, "bfloat16": lambda: run(half, features.bfloat16(), lengths)},
        params=study.records(features.shape, dtype="bfloat16").params,
        tolerance=0.05,
    )


def frontends(
    model: CTCModel, waveforms: Tensor, lengths: Tensor
) -> dict[str, Callable[[], Hypotheses]]:
    """Arms from waveforms to labels, by name as in WAYS.

    Args:
        model: on the device of the waveforms.
        waveforms: (B, S).
        lengths: (B,) samples.
    """
    variants = ModelVariants(model)
    return {
        name: partial(WayRecognizer(variants, config), waveforms, lengths)
        for name, config in WAYS.items()
    }


def log_probs_of(model: CTCModel, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T, V) float32 and lengths (B,) in frames.

    Args:
        model: on the device of the waveforms.
        waveforms: (B, S).
        lengths: (B,) samples.
    """
    features, frames = log_mel(waveforms, lengths)
    return run(model, features.to(model.output.weight.dtype), frames)


@torch.inference_mode()
def set_blank_share(model: CTCModel, scores: Tensor) -> None:
    """Set the blank's bias so that BLANK_SHARE of the frames with these log-probs become blank."""
    behind = scores[..., :-1].amax(-1) - scores[..., -1]
    model.output.bias[-1] += behind.quantile(BLANK_SHARE).to(model.output.bias.dtype)


def front_end(study: Study) -> Iterator[Case]:
    """Steps around the encoder of a CTC model of 1.1 billion parameters in bfloat16, on lengths
    that are quantiles of LibriSpeech's evaluation sets.
    """
    B, _ = study.batch
    seconds = np.quantile(shipped_lengths("librispeech_eval").seconds, (np.arange(B) + 0.5) / B)
    lengths = torch.from_numpy(RATE_HZ * seconds).long()
    waveforms = noise(B, int(lengths.max())) / 10
    speech = (waveforms.to(study.device), lengths.to(study.device))
    model = ctc_model(study).bfloat16()
    raw = mel(*speech)
    scores = log_probs_of(model, *speech)
    set_blank_share(model, scores[0])
    records = study.records(waveforms.shape, dtype="bfloat16", lengths="as LibriSpeech's")
    normalization = partial(normalize_sequential, *raw)
    decoding = partial(ctc_greedy_sequential, *scores)
    features = [lambda: normalize_sequential(*mel(*speech))]
    with_mel = [normalization, partial(mel, *speech)]
    with_model = [decoding, partial(log_probs_of, model, *speech)]
    timed: dict[str, Any] = {
        "preprocessor-10ms": (features, records, float, "ms"),
        "preprocessor-norm-share": (with_mel, records, share),
        "ctc-greedy-share": (with_model, records, share),
    }
    if study.claim in timed:
        yield from study.values("sequential", *timed[study.claim])
        return
    slow, fast = FRONT_ENDS[study.claim]
    ways = frontends(model, *speech)
    yield Case(
        what=study.claim,
        arms={slow: ways[slow], fast: ways["both_batched"]},
        compared_arms={  # step by step: labels differ where features do in the last digit
            slow: lambda: (normalization(), *decoding().parts()),
            fast: lambda: (normalize(*raw), *ctc_greedy(*scores).parts()),
        },
        params=records.params,
        tolerance=1e-4,
    )


def transducer(study: Study, durations: tuple[int, ...] = (), layers: int = 1) -> Planted:
    """A batch for a transducer of Parakeet's sizes, with so many layers of its LSTM."""
    B, seconds = study.batch
    sizes: Options = {"V": 33, "width": 240} if study.toy else {}
    frames = round(seconds * FRAMES_PER_SECOND)
    plan = planted(B, frames, durations=durations, layers=layers, **sizes)
    return plan.to(study.device, torch.float32)


def decode(plan: Planted, options: Options) -> Hypotheses:
    """Greedy hypotheses of a planted transducer."""
    return transducer_greedy(plan.model, plan.encoded, plan.lengths, **options)


def looping(ways: Mapping[str, Options], study: Study) -> Iterator[Case]:
    """An RNN-T's decoding alone, in two ways.

    Args:
        ways: options by name of arm.
        study: of the claim.
    """
    plan = transducer(study)
    arms = {name: Arm(plan, partial(decode, plan, options)) for name, options in ways.items()}
    return study.decoders(arms)


def idle_looping(study: Study) -> Iterator[Case]:
    """Share of frame looping's time in which the GPU runs nothing."""
    plan = transducer(study)
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
    model = cache_policies.with_policy(plan.model, cache_policies.POLICIES["NeMo 3.0"])
    call = partial(aed_greedy, model, plan.encoded, plan.lengths, prompt=plan.prompt)
    return Arm(plan, call, encoding(study, config, B, seconds))


def decoder_share(study: Study) -> Iterator[Case]:
    """Share of decoding in the time of Canary-1B."""
    arm = canary(study, presets.canary_1b())
    assert arm().tokens() == arm.plan.labels, "other labels than were planted"
    records = study.records(arm.plan.encoded.shape, dtype="bfloat16", prompt=PROMPT)
    return study.values("recomputed", [arm.decode, arm.encode], records, share)


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
    "cast-200us": casts,
    "product-200us": casts,
    "cast-as-long-as-product": casts,
    "half-over-autocast": half_precision,
    "preprocessor-10ms": front_end,
    "preprocessor-norm-share": front_end,
    "ctc-greedy-share": front_end,
    "ctc-greedy-batched": front_end,
    "feature-norm-batched": front_end,
    "ctc-frontend-batched": front_end,
    "label-looping-faster": partial(looping, LOOPS),
    "graphs-cut-launches": partial(looping, {"eager": EAGER, "graph": GRAPH}),
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
