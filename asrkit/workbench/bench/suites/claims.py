"""The suite of claims: what the ledger says needs a GPU, measured at the sizes that are published,
on a machine without notebooks.

Records carry the ids of claims. On a CPU the same studies run at toy sizes, as a rehearsal that
settles nothing. Weights are random, and what decoders hear is planted
(asrkit.workbench.bench.planted): 3.5 labels a second, in as many frames as the encoder gave.
"""

import csv
import gzip
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from re import Pattern
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.decoders import ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential
from asrkit.files import shipped
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.workbench.bench.cases import NOTHING, Case, Suite
from asrkit.workbench.bench.compare import near
from asrkit.workbench.bench.guards import barred, prove_alive
from asrkit.workbench.bench.planted import ctc_log_probs, planted
from asrkit.workbench.bench.planted import kind as kind_of
from asrkit.workbench.bench.suites import decoders, precision
from asrkit.workbench.bench.suites.encoder import Way, arm, random_encoder, recogniser, speech
from asrkit.workbench.profiling import Timing, measure, ratio
from asrkit.workbench.records import Measurement

WIDTH, INNER, UTTERANCES, SECONDS = (
    1024,
    4096,
    32,
    20,
)  # those of the claim cast-200us, whose table is not read here
FRAMES_PER_SECOND = 12.5
JUMPS: Sequence[tuple[int, ...]] = ((), (0, 1, 2, 3, 4))  # RNN-T, TDT
RATE_HZ = 16_000
MEL = partial(log_mel, config=FeatureConfig(normalization="none"))
Make = Callable[[str, bool, Pattern[str]], Iterable[Measurement]]


def suite(
    device: str, quick: bool, *, only: Sequence[str] = (), without: Pattern[str] = NOTHING
) -> Iterator[Case]:
    """The studies of each group in STUDIES, and the windows; of toy sizes if quick and on a CPU.

    `only`: some of these groups. `without`: arms whose check failed.
    """
    cuda = device.startswith("cuda")
    quick = quick or not cuda
    for group, studies in STUDIES.items():
        for ids, study in studies.items() if not only or group in only else ():
            if here := tuple(name for name in ids if cuda or name not in OF_GPU):
                measure = partial(study, device, quick, without)
                yield Case(what=f"claims: {', '.join(here)}", claims=here, measure=measure)
    if not only or "windows" in only:
        yield from windows(device, quick, without)


def _where(device: str, quick: bool) -> dict[str, Any]:
    return {"device": device, "suite": "claims"} | ({"quick": True} if quick else {})


def _told(
    what: str,
    metric: str,
    unit: str,
    samples: Sequence[float],
    timing: Timing,
    impl: str,
    **params: Any,
) -> Measurement:
    params = {"threads": torch.get_num_threads(), "weights": "random"} | params
    how: dict[str, Any] = {
        "impl": impl,
        "timer": timing.timer,
        "warmup": timing.warmup,
        "params": params,
    }
    return Measurement(what, metric, unit, median(samples), tuple(samples), **how)


def _ratio(
    what: str,
    times: Mapping[str, Timing],
    slow: str,
    fast: str,
    arms: Sequence[str] = (),
    **params: Any,
) -> Measurement:
    params["arms"] = [*arms] or [slow, fast]
    return _told(
        what, "ratio", "1", ratio(times, slow, fast), times[fast], params["arms"][1], **params
    )


def _how(device: str, quick: bool) -> dict[str, Any]:
    return {
        "repeats": 3 if quick else 20,
        "warmup": 1 if quick else 3,
        "enough_s": 1.0,
        "most_s": 10.0,
        "device": device,
    }


def idle(call: Callable[[], object], timing: Timing) -> tuple[float, ...]:
    """Share of each repeat in which a GPU ran nothing: the kernels' time, by torch.profiler in a
    call of its own, over each.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    gpu = torch.autograd.DeviceType.CUDA
    busy_ms = (
        sum(
            event.time_range.elapsed_us()
            for event in profile.events() or ()
            if event.device_type == gpu
        )
        / 1e3
    )
    return tuple(max(0.0, 1 - busy_ms / ms) for ms in timing.samples_ms)


def _graphs(device: str) -> dict[str, dict[str, Any]]:
    """Ways to decode by graphs here, the most promising first; with a plain turn in case no fused
    one is right.
    """
    if not device.startswith("cuda"):
        return {}
    return decoders.by_graphs(("full", "step"), "fused") | decoders.by_graphs(("full",), "plain")


def _right(
    arms: Mapping[str, Callable[[], Any]], labels: list[list[int]], device: str, case: str
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """The arms that find what was planted; and what is wrong with graphs that do not: the others
    are measured all the same.

    AssertionError where a loop without a graph is wrong. A graph that cannot run is left out, and
    named on standard error.
    """
    right, wrong = dict[str, Callable[[], Any]](), list[str]()
    for name, call in arms.items():
        graph = name in _graphs("cuda")
        try:
            found = call().tokens()
        except RuntimeError as error:
            if not graph:
                raise
            prove_alive(device, case, name)
            print(f"{name} of {case} is left out: {error}", file=sys.stderr)
            continue
        if found == labels:
            right[name] = call
            continue
        wrong.append(f"{name} finds other labels than were planted")
        assert graph, wrong[-1]
    return right, wrong


def _loops(
    durations: Sequence[int], device: str, quick: bool, without: Pattern[str]
) -> Iterator[Measurement]:
    """Decoding alone: the published loops, and windowed looping with and without a graph."""
    sizes: dict[str, Any] = {"V": 33, "width": 240} if quick else {}
    B, T = (4, 40) if quick else (UTTERANCES, round(SECONDS * FRAMES_PER_SECOND))
    plan = planted(B, T, durations=durations, **sizes)
    given = plan.model.to(device), plan.encoded.to(device), plan.lengths.to(device)
    ways: dict[str, Any] = {
        name: {"strategy": name, "graphs": "off"}
        for name in ("frame_looping", "label_looping", "windowed_looping")
    }
    case = f"{kind_of(durations)}-greedy"
    ways |= _graphs(device)
    tried = {
        name: partial(transducer_greedy, *given, **way)
        for name, way in ways.items()
        if not barred(without, name, case)
    }
    arms, wrong = _right(tried, plan.labels, device, case)
    times = measure(arms, **_how(device, quick)) if arms else {}
    shape = [*plan.encoded.shape, plan.model.blank + 1]
    params = {
        **_where(device, quick),
        "shape": shape,
        "durations": [*durations],
        "dtype": "float32",
    }
    if {"frame_looping", "label_looping"} <= {*arms}:
        for what in (
            ("label-looping-tdt-3.8x",)
            if durations
            else ("label-looping-2x", "label-looping-faster")
        ):
            yield _ratio(what, times, "frame_looping", "label_looping", **params)
    graph = next((name for name in _graphs(device) if name in arms), None)
    if graph and "windowed_looping" in arms:
        yield _ratio(
            "graphs-cut-launches",
            times,
            "windowed_looping",
            graph,
            ("eager", "graph"),
            graph=graph,
            **params,
        )
    if device.startswith("cuda") and not durations and "frame_looping" in arms:
        shares = idle(arms["frame_looping"], times["frame_looping"])
        yield _told(
            "rnnt-gpu-idle", "share", "1", shares, times["frame_looping"], "frame_looping", **params
        )
    assert not wrong, "; ".join(wrong)


def windows(device: str, quick: bool, without: Pattern[str]) -> Iterator[Case]:
    """Windowed looping that looks at eight frames in one call or at one, launched step by step and by
    graphs, in bfloat16.

    The turns of graphs are fused; of whole graphs there are plain ones too, so that what fusing
    gives is measured. Of one utterance and of sixteen, RNN-T and TDT: cases of their own, which no
    claim is about.
    """
    sizes: dict[str, Any] = {"V": 33, "width": 240} if quick else {}
    modes = ("off", "step", "full") if device.startswith("cuda") else ("off",)
    ways = {f"window_{size}_off": {"window": size, "graphs": "off"} for size in (8, 1)}
    for size in (8, 1):
        ways |= decoders.by_graphs(modes[2:], "plain", f"window_{size}", window=size)
        ways |= decoders.by_graphs(modes[1:], "fused", f"window_{size}", window=size)
    pairs = [("window_1_off", "window_8_off"), (f"window_1_{modes[-1]}", f"window_8_{modes[-1]}")]
    for size in (8, 1):
        pairs += [
            (f"window_{size}_off", name)
            for name, way in ways.items()
            if way["window"] == size and way["graphs"] != "off"
        ]
        pairs += [(f"window_{size}_{mode}_plain", f"window_{size}_{mode}") for mode in modes[2:]]
    for durations, B in product(JUMPS, (2,) if quick else (1, 16)):
        plan = planted(
            B, 30 if quick else round(SECONDS * FRAMES_PER_SECOND), durations=durations, **sizes
        )
        made = decoders.transducer(plan, device, ways, torch.bfloat16, "greedy-graphs", without)
        yield replace(
            made, ratios=[pair for pair in dict.fromkeys(pairs) if {*pair} <= {*made.arms}]
        )


def _recognisers(
    preset: str, device: str, quick: bool, without: Pattern[str]
) -> Iterator[Measurement]:
    """Waveforms to labels in bfloat16: a transducer without and with graphs, and beside RNN-T a CTC
    model of that size.
    """
    B, seconds = (2, 2) if quick else (UTTERANCES, SECONDS)
    wave = (torch.randn(B, seconds * RATE_HZ, generator=torch.Generator().manual_seed(0)) / 10).to(
        device
    )
    lengths = torch.linspace(seconds, seconds / 2, B).mul(RATE_HZ).long().to(device)
    audio_s = lengths.sum().item() / RATE_HZ
    half = torch.bfloat16
    config: Any = presets.PRESETS[preset]()
    if quick:
        config = _shrunk(config)
    T, kind, V = -(-100 * seconds // 8), kind_of(config.durations), config.vocab_size + 1
    sizes: dict[str, Any] = {
        "width": config.joint_width,
        "layers": config.predictor.layers,
        "durations": config.durations,
    }
    plan = planted(B, T, V=V, **sizes)
    with torch.device(device):
        model = recogniser(config, plan.model).to(device, half)
    encoded, ends = plan.encoded.to(device, half), plan.lengths.to(device)

    def recognise(**way: Any) -> Any:
        with torch.inference_mode():
            features, frames = log_mel(wave, lengths)
            model.encode(features.to(half), frames)
            return transducer_greedy(model, encoded, ends, **way)

    ways: dict[str, Any] = {"windowed_looping_off": {"graphs": "off"}} | _graphs(device)
    case = f"{kind}-recogniser"
    tried = {
        name: partial(recognise, **way)
        for name, way in ways.items()
        if not barred(without, name, case, "bfloat16")
    }
    arms, wrong = _right(tried, plan.labels, device, case)
    graph = next(
        (name for name in [*_graphs(device), "windowed_looping_off"] if name in arms), None
    )
    if kind == "rnnt":
        arms["ctc"] = _ctc_of(model, planted_log_probs(plan, device), wave, lengths)
    times = measure(arms, **_how(device, quick)) if arms else {}
    params: dict[str, Any] = {
        **_where(device, quick),
        "shape": [B, T, config.encoder.width, config.encoder.layers],
        "audio_s": audio_s,
        "dtype": "bfloat16",
        "preset": "tiny" if quick else preset,
        "labels": sum(map(len, plan.labels)),
    }
    whole = next(
        (name for name in ("windowed_looping_full", "windowed_looping_full_plain") if name in arms),
        None,
    )
    if whole and "windowed_looping_off" in arms:
        named = (
            "windowed_looping_off",
            "windowed_looping_full",
        )  # by the claim, which asks for a whole graph and not how its turn is made
        yield _ratio(
            f"graphs-label-looping-{kind}",
            times,
            "windowed_looping_off",
            whole,
            named,
            graph=whole,
            **params,
        )
    if graph and kind == "rnnt":  # the paper's RNN-T has graphs
        yield _ratio("rnnt-near-ctc", times, graph, "ctc", ("rnnt", "ctc"), graph=graph, **params)
    for name, timing in times.items():
        rates = [1e3 * audio_s / ms for ms in timing.samples_ms]
        yield _told("recogniser-batch", "rtfx", "s/s", rates, timing, name, **params)
        yield _told("recogniser-batch", "latency", "ms", timing.samples_ms, timing, name, **params)
    assert not wrong, "; ".join(wrong)


def _shrunk(config: TransducerConfig) -> TransducerConfig:
    small = LSTMConfig(width=240, layers=2)
    return replace(
        config, vocab_size=32, joint_width=240, predictor=small, encoder=presets.tiny().encoder
    )


def planted_log_probs(plan: Any, device: str) -> tuple[Tensor, Tensor]:
    """What a CTC model says of the planted speech, and lengths."""
    return ctc_log_probs(plan).to(device), plan.lengths.to(device)


def _ctc_of(
    model: TransducerModel, said: tuple[Tensor, Tensor], wave: Tensor, lengths: Tensor
) -> Callable[[], Any]:
    """The same encoder with a CTC head, whose log-probs are computed and not decoded: planted ones
    are.
    """
    head = torch.nn.Linear(model.config.encoder.width, model.blank + 1).to(
        wave.device, torch.bfloat16
    )

    def recognise() -> Any:
        with torch.inference_mode():
            features, frames = log_mel(wave, lengths)
            encoded = model.encoder(features.to(torch.bfloat16), frames)[0]
            head(encoded).float().log_softmax(-1)
            return ctc_greedy(*said)

    return recognise


@cache
def ctc_model(device: str, quick: bool) -> CTCModel:
    """Parakeet CTC 1.1B with random weights, made on the device."""
    config = (
        CTCConfig(vocab_size=32, encoder=presets.tiny().encoder)
        if quick
        else presets.parakeet_ctc_1_1b()
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return CTCModel(config).eval().requires_grad_(False)


def _autocast(device: str, quick: bool, without: Pattern[str]) -> Iterator[Measurement]:
    B, T = (2, 200) if quick else (UTTERANCES, 100 * SECONDS)
    given = (
        torch.randn(B, T, 80, generator=torch.Generator().manual_seed(0)).to(device),
        torch.full((B,), T, device=device),
    )
    model = ctc_model(device, quick)
    if not any(
        barred(without, mode, "half-over-autocast", "bfloat16") for mode in ("autocast", "bfloat16")
    ):
        arms = {
            mode: partial(precision.reader(model, mode), *given, decode=False)
            for mode in ("autocast", "bfloat16")
        }
        times = measure(arms, **_how(device, quick))
        params: dict[str, Any] = {
            **_where(device, quick),
            "shape": [B, T, 80],
            "dtype": "bfloat16",
            "layers": 2 if quick else 42,
        }
        yield _ratio("half-over-autocast", times, "autocast", "bfloat16", **params)


def cast_and_product(
    device: str, rows: int, width: int, inner: int
) -> dict[str, Callable[[], object]]:
    """Arms: casts of input (rows, width), weight (inner, width) and bias to bfloat16, and the
    matrix product of the casts.
    """
    parts = [torch.randn(size, device=device) for size in ((rows, width), (inner, width), (inner,))]
    half = [part.to(torch.bfloat16) for part in parts]
    return {
        "cast": lambda: [part.to(torch.bfloat16) for part in parts],
        "product": lambda: F.linear(*half),
    }


def _casts(device: str, quick: bool, without: Pattern[str]) -> Iterator[Measurement]:
    shape = (
        (100, 64, 256) if quick else (round(UTTERANCES * SECONDS * FRAMES_PER_SECOND), WIDTH, INNER)
    )
    times = measure(
        cast_and_product(device, *shape), **_how(device, quick) | {"repeats": 5 if quick else 50}
    )
    params: dict[str, Any] = {**_where(device, quick), "shape": [*shape], "dtype": "bfloat16"}
    for what, name in (("cast-200us", "cast"), ("product-200us", "product")):
        yield _told(
            what,
            "latency",
            "us",
            [1e3 * ms for ms in times[name].samples_ms],
            times[name],
            name,
            **params,
        )
    yield _ratio("cast-as-long-as-product", times, "cast", "product", **params)


def frontends(model: CTCModel, wave: Tensor, lengths: Tensor) -> dict[str, Callable[[], Any]]:
    """Waveforms to labels, with normalisation and decoding each one utterance after another, or
    batched.
    """

    def recognise(norm: Callable[..., Tensor], decode: Callable[..., Any]) -> Any:
        with torch.inference_mode():
            features, frames = MEL(wave, lengths)
            encoded, frames = model.encoder(
                norm(features, frames).to(model.output.weight.dtype), frames
            )
            return decode(model.output(encoded).float().log_softmax(-1), frames)

    ways: dict[str, Any] = {
        "both_sequential": (normalize_sequential, ctc_greedy_sequential),
        "sequential_ctc": (normalize, ctc_greedy_sequential),
        "sequential_norm": (normalize_sequential, ctc_greedy),
        "both_batched": (normalize, ctc_greedy),
    }
    return {name: partial(recognise, *way) for name, way in ways.items()}


def _frontend(device: str, quick: bool, without: Pattern[str]) -> Iterator[Measurement]:
    """With a CTC model of 1.1 billion parameters in bfloat16, on lengths like those of
    LibriSpeech's evaluation sets.
    """
    model, B = deepcopy(ctc_model(device, quick)).bfloat16(), 4 if quick else UTTERANCES
    wave, lengths = quantiles(B, device, most_s=2 if quick else 40)
    arms = frontends(model, wave, lengths)
    with torch.inference_mode():
        log_probs, ends = log_probs_of(model, wave, lengths)
        model.output.bias[-1] += (
            (log_probs[..., :-1].amax(-1) - log_probs[..., -1])
            .quantile(0.72)
            .to(model.output.bias.dtype)
        )
    raw = MEL(wave, lengths)
    params: dict[str, Any] = {
        **_where(device, quick),
        "shape": [*wave.shape],
        "dtype": "bfloat16",
        "lengths": "quantiles of LibriSpeech's evaluation sets",
    }
    parts: dict[str, Callable[[], object]] = {
        "mel": partial(MEL, wave, lengths),
        "norm": partial(normalize_sequential, *raw),
        "preprocessor": lambda: normalize_sequential(*MEL(wave, lengths)),
        "model": partial(log_probs_of, model, wave, lengths),
        "ctc": partial(ctc_greedy_sequential, log_probs, ends),
    }
    alone = measure(parts, **_how(device, quick))

    def share(of: str, beside: str) -> list[float]:
        pairs = zip(alone[of].samples_ms, alone[beside].samples_ms, strict=False)
        return [a / (a + b) for a, b in pairs]

    looped = alone["preprocessor"]
    yield _told(
        "preprocessor-norm-share",
        "share",
        "1",
        share("norm", "mel"),
        alone["norm"],
        "sequential",
        **params,
    )
    yield _told(
        "preprocessor-10ms", "latency", "ms", looped.samples_ms, looped, "sequential", **params
    )
    yield _told(
        "ctc-greedy-share",
        "share",
        "1",
        share("ctc", "model"),
        alone["ctc"],
        "sequential",
        **params,
    )

    # The two halves apart: a greedy decode differs where features do in the last digit.
    near([normalize(*raw)], [normalize_sequential(*raw)], 1e-4)
    near(ctc_greedy(log_probs, ends).parts(), ctc_greedy_sequential(log_probs, ends).parts())
    times = measure(arms, **_how(device, quick))
    yield _ratio(
        "ctc-greedy-batched",
        times,
        "sequential_ctc",
        "both_batched",
        ("sequential_ctc", "batched_ctc"),
        **params,
    )
    yield _ratio(
        "feature-norm-batched",
        times,
        "sequential_norm",
        "both_batched",
        ("sequential_norm", "batched_norm"),
        **params,
    )
    yield _ratio("ctc-frontend-batched", times, "both_sequential", "both_batched", **params)


@torch.inference_mode()
def log_probs_of(model: CTCModel, wave: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T, V) in float32 and lengths, all batched."""
    features, frames = log_mel(wave, lengths)
    encoded, frames = model.encoder(features.to(model.output.weight.dtype), frames)
    return model.output(encoded).float().log_softmax(-1), frames


def quantiles(B: int, device: str, most_s: float) -> tuple[Tensor, Tensor]:
    """Noise (B, S) for waveforms, as long as B quantiles of LibriSpeech's evaluation sets, and
    samples (B,).
    """
    with gzip.open(shipped("lengths/librispeech_eval.csv.gz"), "rt") as file:
        seconds = sorted(float(row["seconds"]) for row in csv.DictReader(file))
    picked = [min(most_s, seconds[round((b + 0.5) / B * (len(seconds) - 1))]) for b in range(B)]
    lengths = torch.tensor(picked).mul(RATE_HZ).long()
    wave = torch.randn(B, int(lengths.max()), generator=torch.Generator().manual_seed(0)) / 10
    return wave.to(device), lengths.to(device)


def _launches(device: str, quick: bool, without: Pattern[str]) -> Iterator[Measurement]:
    """Share of an encoder's time in which the GPU runs nothing, at small and large batches of ten
    seconds.
    """
    if not device.startswith("cuda"):
        return
    config: Any = presets.tiny().encoder if quick else presets.tdt_ctc_110m().encoder
    assert isinstance(config, FastConformerConfig)
    encoder = random_encoder(config, device).bfloat16()
    for B in (1, 8, 32, 128):
        features, lengths = speech(B, 10, config.bins, device)
        call = arm(encoder, (features.bfloat16(), lengths), Way(arithmetic="bfloat16"))
        timing = measure({"eager": call}, **_how(device, quick))["eager"]
        params = {
            **_where(device, quick),
            "shape": [*features.shape],
            "dtype": "bfloat16",
            "preset": "tdt_ctc_110m",
        }
        yield _told(
            "launch-bound-small-batch", "share", "1", idle(call, timing), timing, "eager", **params
        )


STUDIES: dict[str, dict[tuple[str, ...], Make]] = {
    "casts": {("cast-200us", "product-200us", "cast-as-long-as-product"): _casts},
    "frontends": {
        (
            "preprocessor-norm-share",
            "preprocessor-10ms",
            "ctc-greedy-batched",
            "feature-norm-batched",
            "ctc-frontend-batched",
        ): _frontend
    },
    "half": {("half-over-autocast",): _autocast},
    "loops": {
        (
            "label-looping-2x",
            "label-looping-faster",
            "graphs-cut-launches",
            "rnnt-gpu-idle",
        ): partial(_loops, JUMPS[0]),
        ("label-looping-tdt-3.8x", "graphs-cut-launches"): partial(_loops, JUMPS[1]),
    },
    "recognisers": {
        ("graphs-label-looping-rnnt", "rnnt-near-ctc"): partial(_recognisers, "parakeet_rnnt_1_1b"),
        ("graphs-label-looping-tdt",): partial(_recognisers, "parakeet_tdt_1_1b"),
    },
    "idle": {("launch-bound-small-batch",): _launches},
}
OF_GPU = {
    "graphs-cut-launches",
    "rnnt-gpu-idle",
    "graphs-label-looping-rnnt",
    "launch-bound-small-batch",
}  # which a CPU has not

SUITE = Suite(name="claims", cases=suite, takes=("without",))
