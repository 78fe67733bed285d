"""The claims suite: the ledger's claims that need a GPU, measured at published sizes, on a machine
without notebooks.

A study is a row of STUDIES: the id of a claim, and a function that yields its cases. On a CPU the
studies run at toy sizes, as a rehearsal that settles nothing. Weights are random, and decoders read
planted frames (planted.py), as many as the encoder returns.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

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
from asrkit.models.transducer import make_encoder
from asrkit.workbench.lessons.shared import cache_policies
from asrkit.workbench.lessons.shared.frontends import frontends, log_probs_of, run, set_blank_share
from asrkit.workbench.lessons.shared.planted import (
    FRAMES_PER_SECOND,
    Planted,
    ctc_log_probs,
    planted,
    planted_decoder,
    planted_text,
    seeded,
)
from asrkit.workbench.lessons.shared.precision import cast_and_product
from asrkit.workbench.measure import measure
from asrkit.workbench.measure.publishing import of_samples
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, Suite, study_params

Options = Mapping[str, Any]  # options of transducer_greedy
RATE_HZ = 16_000
PROMPT = 9  # tokens of a Canary-1B-Flash prompt
LOOPS = {name: {"strategy": name, "graphs": "off"} for name in ("frame_looping", "label_looping")}
EAGER = {"graphs": "off"}
GRAPH = {"graphs": "full"}
FRONT_ENDS = {  # claim: the slow variant, and the claim's name of both_batched
    "ctc-greedy-batched": ("sequential_ctc", "batched_ctc"),
    "feature-norm-batched": ("sequential_norm", "batched_norm"),
    "ctc-frontend-batched": ("both_sequential", "both_batched"),
}
mel = partial(log_mel, config=FeatureConfig(normalization="none"))


@dataclass(frozen=True)
class Arm:
    """A call that runs an encoder and then decodes planted frames."""

    plan: Planted
    decode: Callable[[], Hypotheses]
    encode: Callable[[], object] = tuple

    def __call__(self) -> Hypotheses:
        self.encode()
        return self.decode()

    def is_correct(self) -> tuple[Tensor]:
        """Whether it finds the planted labels."""
        return (torch.tensor(self().tokens() == self.plan.labels),)


class Study(NamedTuple):
    """A claim, and the device and size of its cases."""

    claim: str
    device: str
    toy: bool  # whether sizes are toy sizes, which settle nothing

    @property
    def batch(self) -> tuple[int, int]:
        """Number of utterances, and seconds of the longest."""
        return (2, 2) if self.toy else (32, 20)

    def encoder(self, config: Any) -> FastConformerConfig:
        """The encoder of this config, or a tiny one."""
        model: Any = presets.tiny() if self.toy else config
        return model.encoder

    def params(self, shape: Sequence[int], **params: Any) -> dict[str, Any]:
        """Params of the study's records."""
        return study_params(self.device, self.toy, shape=[*shape], **params)

    def decoders(self, arms: Mapping[str, Arm], **params: Any) -> Iterator[Case]:
        """A case of two arms, slow and fast, which are timed if they find the planted labels."""
        compared = {name: arm.is_correct for name, arm in arms.items()}
        first, *_ = arms.values()
        yield Case(
            what=self.claim,
            arms=arms,
            compared_arms={"planted": lambda: (torch.tensor(True),), **compared},
            params=self.params(first.plan.encoded.shape, **params),
        )

    def values(
        self,
        impl: str,
        calls: Sequence[Callable[[], object]],
        params: dict[str, Any],
        value: Callable[..., float],
        unit: str = "1",
    ) -> Iterator[Case]:
        """A case that records a share of the time, or a latency.

        Args:
            impl: impl of the record.
            calls: calls that are timed in turns.
            params: params of the record.
            value: computes the value of one repeat from the milliseconds of each call.
            unit: "1" for a share, else the unit of a latency.
        """
        metric = "share" if unit == "1" else "latency"

        def measured() -> Iterator[Measurement]:
            repeats = 3 if self.toy else 20
            arms = {str(number): call for number, call in enumerate(calls)}
            times = measure(arms, repeats=repeats, enough_s=1.0, most_s=10.0, device=self.device)
            rows = zip(*(timing.samples_ms for timing in times.values()), strict=False)
            samples = [value(*ms) for ms in rows]
            yield of_samples(
                self.claim, metric, unit, samples, times["0"], impl=impl, params=params
            )

        yield Case(what=self.claim, measure=measured)

    def idle(self, impl: str, call: Callable[[], object], params: dict[str, Any]) -> Iterator[Case]:
        """A case that records the share of a call's time in which the GPU is idle."""
        busy_ms = kernels_ms(call)
        return self.values(impl, [call], params, lambda ms: max(0.0, 1 - busy_ms / ms))


def share(ms: float, rest_ms: float) -> float:
    """The share of `ms` in the total time."""
    return ms / (ms + rest_ms)


def kernels_ms(call: Callable[[], object]) -> float:
    """Time of a call's kernels on the GPU, by torch's profiler."""
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
    """Seeded random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_model(make: Callable[..., Any], config: object, device: str) -> Any:
    """A model with random weights, drawn on the device, which is faster for a billion."""
    with torch.device(device):
        return seeded(make, config)


def ctc_model(study: Study) -> CTCModel:
    """Parakeet CTC 1.1B with random weights."""
    config = presets.parakeet_ctc_1_1b()
    return random_model(CTCModel, replace(config, encoder=study.encoder(config)), study.device)


def noise_features(study: Study, B: int, seconds: int, bins: int) -> tuple[Tensor, Tensor]:
    """Noise as features (B, T, bins), and lengths (B,), all of them T."""
    T = 100 * seconds
    return noise(B, T, bins).to(study.device), torch.full((B,), T, device=study.device)


def encoding(study: Study, config: Any, B: int, seconds: int) -> Callable[[], object]:
    """A call of a model's encoder in bfloat16 on noise.

    Args:
        study: study of the claim.
        config: config of the model.
        B: number of utterances.
        seconds: length of each.
    """
    encoder = study.encoder(config)
    model = random_model(make_encoder, encoder, study.device).bfloat16()
    features, lengths = noise_features(study, B, seconds, encoder.bins)
    return partial(run, model, features.bfloat16(), lengths)


def casts(study: Study) -> Iterator[Case]:
    """Casts and product of the first linear layer of a feed-forward module of Parakeet CTC 1.1B:
    the time of one of them, or their ratio.
    """
    shape = (100, 64, 256) if study.toy else (8000, 1024, 4096)
    arms = cast_and_product(study.device, *shape)
    params = study.params(shape, dtype="bfloat16")
    name = study.claim.removesuffix("-200us")
    if name in arms:
        return study.values(name, [arms[name]], params, lambda ms: 1e3 * ms, "us")
    nothing = dict.fromkeys(arms, tuple)  # they do different work, so there is nothing to compare
    return iter([Case(what=study.claim, arms=arms, compared_arms=nothing, params=params)])


def half_precision(study: Study) -> Iterator[Case]:
    """Autocast against weights in bfloat16, from features to log-probs."""
    model = ctc_model(study)
    half = deepcopy(model).bfloat16()
    features, lengths = noise_features(study, *study.batch, bins=80)

    def autocast() -> Any:
        with torch.autocast(features.device.type, torch.bfloat16):
            return run(model, features, lengths)

    yield Case(
        what=study.claim,
        arms={"autocast": autocast, "bfloat16": lambda: run(half, features.bfloat16(), lengths)},
        params=study.params(features.shape, dtype="bfloat16"),
        tolerance=0.05,
    )


def front_end(study: Study) -> Iterator[Case]:
    """Steps before and after the encoder of a CTC model of 1.1 billion parameters in bfloat16. The
    lengths are quantiles of LibriSpeech's evaluation sets.
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
    params = study.params(waveforms.shape, dtype="bfloat16", lengths="as LibriSpeech's")
    normalization = partial(normalize_sequential, *raw)
    decoding = partial(ctc_greedy_sequential, *scores)
    features = [lambda: normalize_sequential(*mel(*speech))]
    with_mel = [normalization, partial(mel, *speech)]
    with_model = [decoding, partial(log_probs_of, model, *speech)]
    timed: dict[str, Any] = {
        "preprocessor-10ms": (features, params, float, "ms"),
        "preprocessor-norm-share": (with_mel, params, share),
        "ctc-greedy-share": (with_model, params, share),
    }
    if study.claim in timed:
        yield from study.values("sequential", *timed[study.claim])
        return
    slow, fast = FRONT_ENDS[study.claim]
    variants = frontends(model, *speech)
    yield Case(
        what=study.claim,
        arms={slow: variants[slow], fast: variants["both_batched"]},
        compared_arms={  # each step alone: rounding of features changes labels
            slow: lambda: (normalization(), *decoding().parts()),
            fast: lambda: (normalize(*raw), *ctc_greedy(*scores).parts()),
        },
        params=params,
        tolerance=1e-4,
    )


def transducer(study: Study, durations: tuple[int, ...] = (), layers: int = 1) -> Planted:
    """A planted batch for a transducer of Parakeet's sizes with an LSTM of `layers` layers."""
    B, seconds = study.batch
    sizes: Options = {"V": 33, "width": 240} if study.toy else {}
    frames = round(seconds * FRAMES_PER_SECOND)
    plan = planted(B, frames, durations=durations, layers=layers, **sizes)
    return plan.to(study.device, torch.float32)


def decode(plan: Planted, options: Options) -> Hypotheses:
    """Greedy hypotheses of a planted transducer."""
    return transducer_greedy(plan.model, plan.encoded, plan.lengths, **options)


def looping(variants: Mapping[str, Options], study: Study) -> Iterator[Case]:
    """Two variants of an RNN-T's decoding alone.

    Args:
        variants: options by name of arm.
        study: study of the claim.
    """
    plan = transducer(study)
    arms = {name: Arm(plan, partial(decode, plan, options)) for name, options in variants.items()}
    return study.decoders(arms)


def idle_looping(study: Study) -> Iterator[Case]:
    """The share of frame looping's time in which the GPU is idle."""
    plan = transducer(study)
    call = partial(decode, plan, LOOPS["frame_looping"])
    return study.idle("frame_looping", call, study.params(plan.encoded.shape))


def idle_encoder(study: Study) -> Iterator[Case]:
    """The share of an encoder's time in which the GPU is idle, for a large and a small batch of ten
    seconds. The claim uses the newest record, that of the small batch.
    """
    for B in (128, 1):
        call = encoding(study, presets.tdt_ctc_110m(), B, 10)
        params = study.params([B, 1000], dtype="bfloat16", preset="tdt_ctc_110m")
        yield from study.idle("eager", call, params)


def recognizers(variants: Mapping[str, Options], config: Any, study: Study) -> Iterator[Case]:
    """Two variants of features to labels in bfloat16 with 1.1 billion parameters.

    Args:
        variants: options by name of arm; "ctc" is a CTC model of the same size.
        config: config of the transducer.
        study: study of the claim.
    """
    plan = transducer(study, config.durations, layers=2).to(study.device, torch.bfloat16)
    encode = encoding(study, config, *study.batch)
    scores = ctc_log_probs(plan).to(study.device)
    arms = {
        name: Arm(plan, partial(decode, plan, options), encode)
        for name, options in variants.items()
    }
    if "ctc" in arms:
        arms["ctc"] = Arm(plan, partial(ctc_greedy, scores, plan.lengths), encode)
    return study.decoders(arms, dtype="bfloat16", audio_s=math.prod(study.batch))


def canary(study: Study, config: Any) -> Arm:
    """Features to tokens in bfloat16. As in NeMo, every step of the decoder projects the frames."""
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
    """The share of decoding in the time of Canary-1B."""
    arm = canary(study, presets.canary_1b())
    assert arm().tokens() == arm.plan.labels, "other labels than were planted"
    params = study.params(arm.plan.encoded.shape, dtype="bfloat16", prompt=PROMPT)
    return study.values("recomputed", [arm.decode, arm.encode], params, share)


def moved_layers(study: Study) -> Iterator[Case]:
    """Canary-1B against Canary-1B-Flash, which moves layers from the decoder to the encoder."""
    arms = {
        "deep_decoder": canary(study, presets.canary_1b()),
        "shallow_decoder": canary(study, presets.canary_1b_flash()),
    }
    return study.decoders(arms, dtype="bfloat16", prompt=PROMPT)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield the cases of every claim in STUDIES that this device can measure or rehearse.

    Args:
        device: "cpu" or "cuda".
        quick: toy sizes; on a CPU always.
    """
    cuda = device == "cuda"
    for claim, cases in STUDIES.items():
        if cuda or claim not in GPU_CLAIMS:
            yield from cases(Study(claim, device, quick or not cuda))


GRAPHS = {  # arms of a loop without a graph, and in one graph
    name: {f"{name}_{mode}": {**options, "graphs": mode} for mode in ("off", "full")}
    for name, options in LOOPS.items()
}
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
    "graphs-rnnt-2.5x": partial(recognizers, GRAPHS["frame_looping"], PARAKEET_RNNT),
    "graphs-label-looping-rnnt": partial(recognizers, GRAPHS["label_looping"], PARAKEET_RNNT),
    "graphs-label-looping-tdt": partial(recognizers, GRAPHS["label_looping"], PARAKEET_TDT),
    "rnnt-near-ctc": partial(recognizers, {"rnnt": GRAPH, "ctc": {}}, PARAKEET_RNNT),
    "decoder-bottleneck": decoder_share,
    "decoder-3x": moved_layers,
}
GPU_CLAIMS = {  # a CPU cannot rehearse these
    "graphs-cut-launches",
    "rnnt-gpu-idle",
    "launch-bound-small-batch",
    "graphs-rnnt-2.5x",
    "graphs-label-looping-rnnt",
    "graphs-label-looping-tdt",
    "rnnt-near-ctc",
}


SUITE = Suite(name="claims", cases=suite, share=2)
