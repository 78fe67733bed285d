"""The encoders suite: variants of FastConformers of published sizes and of Jasper 10x5 DR, and a
whole recogniser on one core.

`asrkit.workbench.lessons.shared.variants` lists the variants. Weights are random and seeded, as
they do not change the time, and every peer gets the same ones. The shortest utterance of a batch is
half as long as the longest. RTFx counts speech without padding, operations include padding. The
least work is the operations of the products and one read of all weights; `least_ms` is its time at
the machine's ceilings, measured in the same run. Each case has one arithmetic, and its arms must
agree with our eager float32 within TOLERANCE before they are timed.

With `--peers`, NeMo and transformers encode the same batches on a CPU. OpenVINO and ONNX Runtime
run whole utterances on one core, since their models have neither lengths nor masks. Their times are
recorded together with each arm's relative distance from our eager float32.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.cpu import has_int8
from asrkit.models import (
    CTCConfig,
    CTCModel,
    FastConformer,
    FastConformerConfig,
    JasperConfig,
    LSTMConfig,
    TransducerConfig,
    presets,
)
from asrkit.models.inference import cast_copy
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.recognizer import ModelVariants, Recognizer
from asrkit.workbench.cost import encoder_flops, encoder_parameters
from asrkit.workbench.lessons.shared.jasper import random_jasper
from asrkit.workbench.lessons.shared.one_utterance import one_utterance
from asrkit.workbench.lessons.shared.planted import seeded
from asrkit.workbench.lessons.shared.variants import (
    Inputs,
    Work,
    arithmetic,
    arm,
    arm_params,
    is_supported,
    one_thread,
    random_features,
    weights_dtype,
)
from asrkit.workbench.measure.ceilings import ceilings
from asrkit.workbench.measure.comparison import apart
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, PeerArms, Suite
from benchmarks.peers.peer_encoders import sketch, write
from benchmarks.peers.peer_engines import write_features, write_model
from benchmarks.peers.processes import NAMES, Peers
from benchmarks.suites.jasper import claims

MAX_PEER_SIZE = 1_000_000_000  # parameters times utterances
COLUMNS = 8  # columns of a sketch that are values of the frames

SECONDS = 10  # length of the longest utterance
BATCHES: dict[str, dict[str, tuple[int, ...]]] = {  # preset: batch sizes
    "cpu": {"tdt_ctc_110m": (1, 8), "parakeet_ctc_0_6b": (1, 8), "parakeet_ctc_1_1b": (1,)},
    "cuda": dict.fromkeys(("parakeet_ctc_0_6b", "tdt_ctc_110m", "parakeet_ctc_1_1b"), (1, 32, 128)),
    "quick": {"tiny": (2,)},
}
JASPER_BATCHES = {  # utterances, and seconds of the longest
    "cpu": ((1, 2.0), (1, 7.0), (2, 7.0), (1, 16.7)),
    "cuda": ((1, 2.0), (1, 16.7), (16, 16.7)),
    "quick": ((1, 0.5), (2, 0.5)),
}

VARIANTS = {  # FastConformer, eager float32 first; on a GPU bfloat16 matters most
    "cpu": {
        "encoder-float32": "float32 optimized_float32",
        "encoder-bfloat16": "float32 bfloat16 optimized_bfloat16",
        "encoder-autocast-bfloat16": "float32 autocast_bfloat16",
    },
    "cuda": {
        "encoder-bfloat16": "float32 bfloat16 graphed_bfloat16",
        "encoder-autocast-bfloat16": "float32 autocast_bfloat16",
        "encoder-float32": "float32 graphed_float32 tf32",
    },
}
JASPER_VARIANTS = {
    "cpu": "float32 optimized_float32 bfloat16 optimized_bfloat16",
    "cuda": "float32 optimized_float32 tf32 bfloat16 optimized_bfloat16 optimized_graphed_bfloat16 "
    "float16 optimized_float16 optimized_graphed_float16",
}
ENGINE_VARIANTS = {  # on one core, by the arithmetic of the engines
    "float32": "float32 optimized_float32",
    "bfloat16": "float32 bfloat16 optimized_bfloat16",
    "int8": "float32 bfloat16 optimized_bfloat16 optimized_int8",
}


def suite(device: str, quick: bool, *, peers: Peers | None = None) -> Iterator[Case]:
    """Yield the machine's ceilings, FastConformers, Jasper, and on a CPU a whole recogniser.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes only.
        peers: packages to compare with on a CPU; None: ours alone.
    """
    yield Case(what="machine-ceiling", measure=lambda: ceilings(device, quick).measurements)
    size = "quick" if quick else device
    if device == "cuda":
        yield from jaspers(device, quick, JASPER_BATCHES[size], None)
    for preset, batches in BATCHES[size].items():
        config = presets.PRESETS[preset]().encoder
        assert isinstance(config, FastConformerConfig)
        encoder = random_encoder(config, device)
        for B in batches:
            inputs = random_features(B, 2 if quick else SECONDS, config.bins, device)
            if device == "cuda" or B * encoder_parameters(config) > MAX_PEER_SIZE:
                yield from fastconformer(encoder, inputs, quick, None, preset=preset)
                continue
            yield from fastconformer(encoder, inputs, quick, peers, preset=preset)
            exported = CTCModel(CTCConfig(encoder=config, vocab_size=1)).eval()
            exported.encoder = encoder
            whole = [torch.where(inputs[0] == 0, 0.5, inputs[0])]  # without padding
            yield from engines("engines", encoder, exported, whole, quick, peers, preset=preset)
    if device == "cpu":
        yield from jaspers(device, quick, JASPER_BATCHES[size], peers)
        yield one_core(quick)


def random_encoder(config: FastConformerConfig, device: str) -> FastConformer:
    """An encoder with seeded random weights, in eval mode.

    The biases of attention are random instead of zero, so that a peer without them is detected.
    """
    encoder = seeded(FastConformer, config)
    draw = torch.Generator().manual_seed(0)
    for name, weight in encoder.named_parameters():
        if name.endswith(("content_bias", "position_bias")):
            weight.normal_(0, 0.1, generator=draw)
    return encoder.to(device)


def case(
    what: str, variants: str, model: nn.Module, inputs: Inputs, quick: bool, **params: Any
) -> Case:
    """An arm for each variant that this machine supports, with ratios to the first variant and to
    eager calls in the same arithmetic. With the param `cores=1` all arms run on one core.

    Args:
        what: name of the case.
        variants: names as in variants.py; the first is the reference.
        model: an encoder or a CTC model in float32, on the device of the inputs.
        inputs: features (B, T, F) and lengths (B,).
        quick: measure the ceilings at smaller sizes.
        params: further params of all records.
    """
    features, lengths = inputs
    B, T, _ = features.shape
    device = features.device.type
    config: Any = getattr(model, "encoder", model).config
    shape = [B, T]
    if isinstance(config, FastConformerConfig):
        shape += [config.width, config.layers]
    least = work(config, B, T)
    scope = one_thread if params.get("cores") == 1 else nullcontext
    names = [variant for variant in variants.split() if is_supported(variant)]
    models = {dtype: cast_copy(model, dtype) for dtype in {*map(weights_dtype, names)}}
    with scope():
        params_of_arms = {variant: arm_params(variant, least, device, quick) for variant in names}
    first, *others = names
    pairs = [(first, variant) for variant in others]
    pairs += [
        (arithmetic(variant), variant)
        for variant in others
        if "_" in variant and arithmetic(variant) in others
    ]
    return Case(
        what=what,
        arms={
            variant: arm(models[weights_dtype(variant)], inputs, variant, scope)
            for variant in names
        },
        params={
            "shape": shape,
            "audio_s": lengths.sum().item() / 100,
            "weights": "random",
            **params,
        },
        arm_params=params_of_arms,
        ratios=pairs,
        warmup=1,
    )


def work(config: FastConformerConfig | JasperConfig, B: int, T: int) -> Work:
    """The least work of a call on B utterances of T feature frames."""
    return Work(FLOP=encoder_flops(config, B=B, T=T), weights=encoder_parameters(config))


def fastconformer(
    encoder: FastConformer, inputs: Inputs, quick: bool, peers: Peers | None, **params: Any
) -> Iterator[Case]:
    """A case for each arithmetic, with NeMo and transformers as peers."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.pt"
        if peers is not None:
            write(plan, encoder, *inputs)
        for what, variants in VARIANTS[inputs[0].device.type].items():
            comparison = case(what, variants, encoder, inputs, quick, **params)
            if peers is not None:
                ours = what.removeprefix("encoder-").replace("-", "_")
                mode = ours.removesuffix("_bfloat16")
                request = {"kind": "encoder", "plan": str(plan), "mode": mode}
                arms = PeerArms(request=request, ours=ours, params=comparison.arm_params[ours])
                comparison = replace(comparison, peers=arms)
            yield comparison
        if peers is not None:
            peers.end("encoder")


def jaspers(
    device: str, quick: bool, batches: Sequence[tuple[int, float]], peers: Peers | None
) -> Iterator[Case]:
    """Jasper 10x5 DR: on a GPU its claims and inference; on a CPU inference on one core, and with
    peers also OpenVINO and ONNX Runtime on single utterances.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper.
        batches: utterances, and seconds of the longest.
        peers: processes of the engines, on a CPU; None: ours alone.
    """
    preset = "mini_jasper" if quick else "jasper_10x5dr"
    config = presets.PRESETS[preset]()
    assert isinstance(config, CTCConfig)
    model = random_jasper(config, device)
    params: dict[str, Any] = {"preset": preset}
    if device == "cpu":
        params["cores"] = 1
    else:
        yield from claims(model, device, quick)
    drawn = [random_features(B, seconds, config.encoder.bins, device) for B, seconds in batches]
    for inputs in drawn:
        yield case("jasper-inference", JASPER_VARIANTS[device], model, inputs, quick, **params)
    if device == "cpu":
        whole = [features for features, lengths in drawn if len(lengths) == 1]
        yield from engines("jasper-engines", model, model, whole, quick, peers, preset=preset)


def engines(
    name: str,
    model: nn.Module,
    exported: CTCModel,
    batches: Sequence[Tensor],
    quick: bool,
    peers: Peers | None,
    **params: Any,
) -> Iterator[Case]:
    """A case on one core for each arithmetic and each batch, with engines as peers.

    Args:
        name: prefix of the cases' names, as in peers.processes.NAMES.
        model: model in float32, on the CPU.
        exported: model that the engines get.
        batches: features (B, T, F) of whole utterances; a single batch for a FastConformer.
        quick: measure the ceilings at smaller sizes.
        peers: processes of the engines; None: ours alone.
        params: further params of all records.
    """
    with tempfile.TemporaryDirectory() as folder:
        if peers is not None:
            write_model(Path(folder), exported)
        for kind, variants in ENGINE_VARIANTS.items():
            what = f"{name}-{kind}"
            if what not in NAMES or (kind == "int8" and not has_int8()):
                continue
            for features in batches:
                B, T, _ = features.shape
                request: dict[str, Any] = {"kind": what, "folder": folder, "frames": T}
                if peers is not None:
                    write_features(Path(folder), features)
                    peers.arms(**request)  # start them before our arms take memory
                inputs = (features, torch.full((B,), T))
                comparison = case(what, variants, model, inputs, quick, cores=1, **params)
                *_, ours = comparison.arms
                yield replace(
                    comparison,
                    peers=PeerArms(request=request, ours=ours, params=comparison.arm_params[ours]),
                    more=partial(errors, comparison, request, peers),
                )
            if peers is not None:
                peers.end(what)


def errors(
    comparison: Case, request: Mapping[str, Any], peers: Peers | None
) -> Iterator[Measurement]:
    """The relative distance of each arm's frames from those of eager float32.

    A peer sends only a `sketch` of its frames, so all arms are compared by its eight columns. The
    norm of a frame would hide errors, because a norm layer makes it nearly the same for all frames.
    """
    sketches = {variant: sketch(*encode()) for variant, encode in comparison.arms.items()}
    params = {variant: {"dtype": arithmetic(variant)} for variant in comparison.arms}
    if peers is not None:
        for name, peer in peers.arms(**request).items():
            sketches[name] = peer(observe=True).digest[0]
            params[name] = {"dtype": arithmetic(name), "peer": peer.version}
    reference = sketches.pop("float32")[..., :COLUMNS]
    shared = {**comparison.params, "device": "cpu", "threads": 1}
    for name, frames in sketches.items():
        difference, size = apart(reference, frames[..., :COLUMNS])
        error = difference / size
        own = shared | params[name]
        yield Measurement(comparison.what, "relative_error", "1", error, impl=name, params=own)


def one_core(quick: bool) -> Case:
    """The whole Parakeet RNN-T 1.1B on one core: features, encoder and decoder for one utterance of
    16 seconds.
    """
    preset, config = "parakeet_rnnt_1_1b", presets.parakeet_rnnt_1_1b()
    seconds = 16
    if quick:
        preset, config = "tiny", shrunk(config)
        seconds = 2
    encoder: Any = config.encoder
    utterance = one_utterance(config, seconds)
    variants = ModelVariants(utterance.model)
    arms = {}
    params_of_arms = {}
    for variant in filter(
        is_supported, ("float32", "bfloat16", "optimized_bfloat16", "optimized_int8")
    ):
        precision: Any = arithmetic(variant)
        options = PipelineConfig(
            precision=precision,
            encoder="optimized" if "optimized" in variant else "eager",
            graphs="off",
        )
        arms[variant] = partial(utterance.recognise, Recognizer(variants, options))
        with one_thread():
            params_of_arms[variant] = arm_params(
                variant, work(encoder, 1, 100 * seconds), "cpu", quick
            )
    first, *others = arms
    return Case(
        what="recogniser-one-core",
        arms=arms,
        params={
            "shape": [1, utterance.planted_frames.shape[1], encoder.width, encoder.layers],
            "audio_s": seconds,
            "weights": "random",
            "labels": utterance.labels,
            "cores": 1,
            "threads": 1,
            "preset": preset,
        },
        arm_params=params_of_arms,
        ratios=[(first, variant) for variant in others],
        warmup=1,
    )


def shrunk(config: TransducerConfig) -> TransducerConfig:
    """The config at a toy size, for a rehearsal."""
    return replace(
        config,
        vocab_size=32,
        joint_width=240,
        predictor=LSTMConfig(width=240, layers=2),
        encoder=presets.tiny().encoder,
    )


SUITE = Suite(
    name="encoders",
    cases=suite,
    takes_peers=True,
)
