"""Claims about what surrounds a decoder: casts, half precision, normalisation, CTC's front end, and
launches of an encoder.
"""

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.decoders import Hypotheses, ctc_greedy, ctc_greedy_sequential
from asrkit.features import FeatureConfig, log_mel, normalize, normalize_sequential
from asrkit.files import shipped
from asrkit.models import CTCConfig, CTCModel, FastConformerConfig, presets
from asrkit.models.transducer import log_probs
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.studies import StudyRecords, StudySizes, idle, repeats
from asrkit.workbench.bench.suites import precision
from asrkit.workbench.bench.suites.encoders import random_encoder
from asrkit.workbench.bench.suites.ways import arm, speech
from asrkit.workbench.measure import Timing, measure
from asrkit.workbench.records import Measurement

# sizes of the claim cast-200us, whose table is not read here
WIDTH = 1024
INNER = 4096
UTTERANCES = 32
SECONDS = 20
FRAMES_PER_SECOND = 12.5
RATE_HZ = 16_000
FRAMES = round(SECONDS * FRAMES_PER_SECOND)
PUBLISHED = StudySizes(
    utterances=UTTERANCES,
    seconds=SECONDS,
    layers=42,
    loops=(UTTERANCES, FRAMES),
    planted={},
    frontend=(UTTERANCES, 40),
    product=(round(UTTERANCES * SECONDS * FRAMES_PER_SECOND), WIDTH, INNER),
    product_repeats=50,
)
TOY = StudySizes(
    utterances=2,
    seconds=2,
    layers=2,
    loops=(4, 40),
    planted={"V": 33, "width": 240},
    frontend=(4, 2),
    product=(100, 64, 256),
    product_repeats=5,
)
BLANK_SHARE = 0.72  # of frames, as in speech
way = partial(PipelineConfig, encoder="eager")  # frontend and decoder are what is compared
WAYS = {  # normalisation and CTC decoding, each utterance by utterance or batched
    "both_sequential": way(normalization="one_by_one", strategy="one_by_one"),
    "sequential_ctc": way(normalization="batched", strategy="one_by_one"),
    "sequential_norm": way(normalization="one_by_one", strategy="batched"),
    "both_batched": way(normalization="batched", strategy="batched"),
}
mel = partial(log_mel, config=FeatureConfig(normalization="none"))
Make = Callable[[str, bool], Iterable[Measurement]]


def sizes_of(quick: bool) -> StudySizes:
    """Toy sizes if quick, else those that are published."""
    return TOY if quick else PUBLISHED


@cache
def ctc_model(device: str, quick: bool) -> CTCModel:
    """Parakeet CTC 1.1B with random weights, made on the device; tiny if quick."""
    config = presets.parakeet_ctc_1_1b()
    if quick:
        config = CTCConfig(vocab_size=32, encoder=presets.tiny().encoder)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return CTCModel(config).eval().requires_grad_(False)


def _half_precision(device: str, quick: bool) -> Iterator[Measurement]:
    """Autocast against weights in bfloat16, features to log-probs."""
    what = "half-over-autocast"
    modes = ("autocast", "bfloat16")
    sizes = sizes_of(quick)
    B = sizes.utterances
    T = 100 * sizes.seconds
    features = torch.randn(B, T, 80, generator=torch.Generator().manual_seed(0)).to(device)
    lengths = torch.full((B,), T, device=device)
    model = ctc_model(device, quick)
    arms = {}
    for mode in modes:
        arms[mode] = partial(precision.reader(model, mode), features, lengths, decode=False)
    times = measure(arms, **repeats(device, quick))
    records = StudyRecords(device, quick, shape=[B, T, 80], dtype="bfloat16", layers=sizes.layers)
    yield records.ratio(what, times, "autocast", "bfloat16")


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


def _casts(device: str, quick: bool) -> Iterator[Measurement]:
    """The casts of one product, and the product."""
    sizes = sizes_of(quick)
    options = repeats(device, quick) | {"repeats": sizes.product_repeats}
    times = measure(cast_and_product(device, *sizes.product), **options)
    records = StudyRecords(device, quick, shape=[*sizes.product], dtype="bfloat16")
    for what, name in (("cast-200us", "cast"), ("product-200us", "product")):
        samples_us = [1e3 * ms for ms in times[name].samples_ms]
        yield records.value(what, samples_us, times[name], name, unit="us")
    yield records.ratio("cast-as-long-as-product", times, "cast", "product")


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
        name: partial(Recognizer(variants, config), waveforms, lengths)
        for name, config in WAYS.items()
    }


@torch.inference_mode()
def log_probs_of(model: CTCModel, waveforms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs (B, T, V) float32 and lengths (B,) in frames.

    Args:
        model: on the device of the waveforms.
        waveforms: (B, S).
        lengths: (B,) samples.
    """
    recognizer = Recognizer(model, way())
    encoded, ends = recognizer.encode(*recognizer.features(waveforms, lengths))
    return log_probs(model.output(encoded)), ends


@torch.inference_mode()
def set_blank_share(model: CTCModel, scores: Tensor) -> None:
    """Set the blank's bias so that BLANK_SHARE of the frames with these log-probs become blank."""
    behind = scores[..., :-1].amax(-1) - scores[..., -1]
    model.output.bias[-1] += behind.quantile(BLANK_SHARE).to(model.output.bias.dtype)


def _frontend(device: str, quick: bool) -> Iterator[Measurement]:
    """With a CTC model of 1.1 billion parameters in bfloat16, on lengths like those of
    LibriSpeech's evaluation sets.
    """
    model = deepcopy(ctc_model(device, quick)).bfloat16()
    B, most_s = sizes_of(quick).frontend
    waveforms, lengths = quantiles(B, device, most_s)
    arms = frontends(model, waveforms, lengths)
    scores, ends = log_probs_of(model, waveforms, lengths)
    set_blank_share(model, scores)
    raw = mel(waveforms, lengths)
    records = StudyRecords(
        device,
        quick,
        shape=[*waveforms.shape],
        dtype="bfloat16",
        lengths="quantiles of LibriSpeech's evaluation sets",
    )

    def preprocess() -> Tensor:
        return normalize_sequential(*mel(waveforms, lengths))

    steps: dict[str, Callable[[], object]] = {
        "mel": partial(mel, waveforms, lengths),
        "norm": partial(normalize_sequential, *raw),
        "preprocessor": preprocess,
        "model": partial(log_probs_of, model, waveforms, lengths),
        "ctc": partial(ctc_greedy_sequential, scores, ends),
    }
    yield from _shares(measure(steps, **repeats(device, quick)), records)
    # The two halves apart: a greedy decode differs where features do in the last digit.
    near([normalize(*raw)], [normalize_sequential(*raw)], 1e-4)
    near(ctc_greedy(scores, ends).parts(), ctc_greedy_sequential(scores, ends).parts())
    times = measure(arms, **repeats(device, quick))
    for what, slow, names in (
        ("ctc-greedy-batched", "sequential_ctc", ("sequential_ctc", "batched_ctc")),
        ("feature-norm-batched", "sequential_norm", ("sequential_norm", "batched_norm")),
        ("ctc-frontend-batched", "both_sequential", ("both_sequential", "both_batched")),
    ):
        yield records.ratio(what, times, slow, "both_batched", arms=names)


def _shares(times: dict[str, Timing], records: StudyRecords) -> Iterator[Measurement]:
    """The loops' shares of the time of what they belong to, and the preprocessor's time."""

    def share(what: str, loop: str, rest: str) -> Measurement:
        """The loop's share of the time that it and `rest` take; `what` is the claim."""
        pairs = zip(times[loop].samples_ms, times[rest].samples_ms, strict=False)
        shares = [ms / (ms + rest_ms) for ms, rest_ms in pairs]
        return records.value(what, shares, times[loop], "sequential", metric="share", unit="1")

    preprocessor = times["preprocessor"]
    yield share("preprocessor-norm-share", "norm", "mel")
    yield records.value("preprocessor-10ms", preprocessor.samples_ms, preprocessor, "sequential")
    yield share("ctc-greedy-share", "ctc", "model")


def quantiles(B: int, device: str, most_s: float) -> tuple[Tensor, Tensor]:
    """Noise as waveforms (B, S), as long as quantiles of LibriSpeech's evaluation sets, and lengths
    (B,) in samples.

    Args:
        B: utterances.
        device: of the tensors.
        most_s: seconds of the longest at most.
    """
    with gzip.open(shipped("lengths/librispeech_eval.csv.gz"), "rt") as file:
        seconds = sorted(float(row["seconds"]) for row in csv.DictReader(file))
    places = [round((b + 0.5) / B * (len(seconds) - 1)) for b in range(B)]
    picked = [min(most_s, seconds[place]) for place in places]
    lengths = torch.tensor(picked).mul(RATE_HZ).long()
    noise = torch.randn(B, int(lengths.max()), generator=torch.Generator().manual_seed(0)) / 10
    return noise.to(device), lengths.to(device)


def launches(device: str, quick: bool) -> Iterator[Measurement]:
    """Share of an encoder's time in which the GPU runs nothing, at small and large batches of ten
    seconds; nothing on a CPU.

    Args:
        device: "cpu" or "cuda".
        quick: a tiny encoder.
    """
    if not device.startswith("cuda"):
        return
    config: Any = presets.tdt_ctc_110m().encoder
    if quick:
        config = presets.tiny().encoder
    assert isinstance(config, FastConformerConfig)
    encoder = random_encoder(config, device).bfloat16()
    for B in (1, 8, 32, 128):
        features, lengths = speech(B, 10, config.bins, device)
        call = arm(encoder, (features.bfloat16(), lengths), "bfloat16")
        timing = measure({"eager": call}, **repeats(device, quick))["eager"]
        shape = [*features.shape]
        records = StudyRecords(device, quick, shape=shape, dtype="bfloat16", preset="tdt_ctc_110m")
        shares = idle(call, timing)
        yield records.value(
            "launch-bound-small-batch", shares, timing, "eager", metric="share", unit="1"
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
    "half": {("half-over-autocast",): _half_precision},
}
