"""The suite of encoders: FastConformers of published sizes and Jasper 10x5 DR in every way that
`asrkit.workbench.lessons.shared.variants` names, and a whole recogniser on one core.

Weights are random and seeded: they change neither the work nor its time, and every peer gets the
same. The shortest utterance of a batch is half as long as the longest; RTFx counts speech,
operations count padding too. Least work is the products' operations, and all weights read once;
`least_ms` is what that takes at the ceilings of the machine, measured in the same run. Each case is
one arithmetic: its arms have to come as near to our eager float32 as TOLERANCE says before they are
timed.

With `--peers`, NeMo and transformers encode the same batches on a CPU; OpenVINO and ONNX Runtime
run whole utterances on one core, since the models they get have neither lengths nor masks. Beside
those times stands each arm's distance from our eager float32, over the norm of that.
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
    one_thread,
    runs,
    speech,
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

RATE_HZ = 16_000
PEERS_MOST = 1_000_000_000  # parameters times utterances
COLUMNS = 8  # of a sketch, which are numbers of the frames themselves

SECONDS = 10  # of the longest utterance
BATCHES: dict[str, dict[str, tuple[int, ...]]] = {  # utterances
    "cpu": {"tdt_ctc_110m": (1, 8), "parakeet_ctc_0_6b": (1, 8), "parakeet_ctc_1_1b": (1,)},
    "cuda": dict.fromkeys(("parakeet_ctc_0_6b", "tdt_ctc_110m", "parakeet_ctc_1_1b"), (1, 32, 128)),
    "quick": {"tiny": (2,)},
}
JASPER_BATCHES = {  # utterances, and seconds of the longest
    "cpu": ((1, 2.0), (1, 7.0), (2, 7.0), (1, 16.7)),
    "cuda": ((1, 2.0), (1, 16.7), (16, 16.7)),
    "quick": ((1, 0.5), (2, 0.5)),
}

WAYS = {  # of a FastConformer, eager float32 first; on a GPU bfloat16 is worth most
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
JASPER_WAYS = {
    "cpu": "float32 optimized_float32 bfloat16 optimized_bfloat16",
    "cuda": "float32 optimized_float32 tf32 bfloat16 optimized_bfloat16 optimized_graphed_bfloat16 "
    "float16 optimized_float16 optimized_graphed_float16",
}
ENGINE_WAYS = {  # on one core, in the arithmetic of the engines beside them
    "float32": "float32 optimized_float32",
    "bfloat16": "float32 bfloat16 optimized_bfloat16",
    "int8": "float32 bfloat16 optimized_bfloat16 optimized_int8",
}


def suite(device: str, quick: bool, *, peers: Peers | None = None) -> Iterator[Case]:
    """Yield the machine's ceilings, FastConformers, Jasper, and on a CPU a whole recogniser.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes only.
        peers: on a CPU the packages that take part; None: ours alone.
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
            inputs = speech(B, 2 if quick else SECONDS, config.bins, device)
            if device == "cuda" or B * encoder_parameters(config) > PEERS_MOST:
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

    The biases of attention are not zero as at birth, so a peer that lacks them is found out.
    """
    encoder = seeded(FastConformer, config)
    draw = torch.Generator().manual_seed(0)
    for name, weight in encoder.named_parameters():
        if name.endswith(("content_bias", "position_bias")):
            weight.normal_(0, 0.1, generator=draw)
    return encoder.to(device)


def case(
    what: str, ways: str, model: nn.Module, inputs: Inputs, quick: bool, **params: Any
) -> Case:
    """An arm for each way that this machine has, set against the first, and against eager calls in
    its own arithmetic; `cores=1` among the params keeps all on one core.

    Args:
        what: the name of the case.
        ways: names of `asrkit.workbench.lessons.shared.variants`, the first of which the others have to agree with.
        model: float32, an encoder or a CTC model, where the inputs are.
        inputs: features (B, T, F) and lengths (B,).
        quick: with the ceilings at smaller sizes.
        params: more params of all records.
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
    names = [way for way in ways.split() if runs(way)]
    models = {dtype: cast_copy(model, dtype) for dtype in {*map(weights_dtype, names)}}
    with scope():
        params_of_arms = {way: arm_params(way, least, device, quick) for way in names}
    first, *others = names
    pairs = [(first, way) for way in others]
    pairs += [(arithmetic(way), way) for way in others if "_" in way and arithmetic(way) in others]
    return Case(
        what=what,
        arms={way: arm(models[weights_dtype(way)], inputs, way, scope) for way in names},
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
    """Least work of a call on B utterances of T feature frames."""
    return Work(FLOP=encoder_flops(config, B=B, T=T), weights=encoder_parameters(config))


def fastconformer(
    encoder: FastConformer, inputs: Inputs, quick: bool, peers: Peers | None, **params: Any
) -> Iterator[Case]:
    """A case for each arithmetic, on a CPU beside NeMo and transformers where they take part."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.pt"
        if peers is not None:
            write(plan, encoder, *inputs)
        for what, ways in WAYS[inputs[0].device.type].items():
            made = case(what, ways, encoder, inputs, quick, **params)
            if peers is not None:
                ours = what.removeprefix("encoder-").replace("-", "_")
                mode = ours.removesuffix("_bfloat16")
                request = {"kind": "encoder", "plan": str(plan), "mode": mode}
                theirs = PeerArms(request=request, ours=ours, params=made.arm_params[ours])
                made = replace(made, peers=theirs)
            yield made
        if peers is not None:
            peers.end("encoder")


def jaspers(
    device: str, quick: bool, batches: Sequence[tuple[int, float]], peers: Peers | None
) -> Iterator[Case]:
    """Jasper 10x5 DR: on a GPU the claims about it and inference, on a CPU inference on one core,
    with peers beside OpenVINO and ONNX Runtime, which take one utterance of any length.

    Args:
        device: "cpu" or "cuda".
        quick: a small Jasper.
        batches: utterances, and seconds of the longest.
        peers: whose processes run the engines, on a CPU; None: ours alone.
    """
    preset = "mini_jasper" if quick else "jasper_10x5dr"
    config = presets.PRESETS[preset]()
    assert isinstance(config, CTCConfig)
    model = random_jasper(config, device)
    params: dict[str, Any] = {"preset": preset}
    ways = JASPER_WAYS["cpu"]
    if device == "cpu":
        params["cores"] = 1
    else:
        ways = JASPER_WAYS["cuda"]
        yield from claims(model, device, quick)
    made = [speech(B, seconds, config.encoder.bins, device) for B, seconds in batches]
    for inputs in made:
        yield case("jasper-inference", ways, model, inputs, quick, **params)
    if device == "cpu":
        whole = [features for features, lengths in made if len(lengths) == 1]
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
    """A case on one core for each arithmetic and each batch, with the engines that run.

    Args:
        name: of the cases, before the arithmetic, as in peers.processes.NAMES.
        model: float32, on the CPU.
        exported: the model that engines get.
        batches: features (B, T, F) of whole utterances; of a FastConformer one batch.
        quick: take the ceilings at smaller sizes.
        peers: whose processes run the engines; None: ours alone.
        params: more params of all records.
    """
    with tempfile.TemporaryDirectory() as folder:
        if peers is not None:
            write_model(Path(folder), exported)
        for kind, ways in ENGINE_WAYS.items():
            what = f"{name}-{kind}"
            if what not in NAMES or (kind == "int8" and not has_int8()):
                continue
            for features in batches:
                B, T, _ = features.shape
                request: dict[str, Any] = {"kind": what, "folder": folder, "frames": T}
                if peers is not None:
                    write_features(Path(folder), features)
                    peers.arms(**request)  # they start before our arms take memory
                inputs = (features, torch.full((B,), T))
                made = case(what, ways, model, inputs, quick, cores=1, **params)
                *_, ours = made.arms
                theirs = PeerArms(request=request, ours=ours, params=made.arm_params[ours])
                yield replace(made, peers=theirs, more=partial(errors, made, request, peers))
            if peers is not None:
                peers.end(what)


def errors(made: Case, request: Mapping[str, Any], peers: Peers | None) -> Iterator[Measurement]:
    """Distance of each arm's frames from those of eager float32, over the norm of these.

    A peer's frames are known by their `sketch` alone, so all arms are compared by the eight columns
    of it; the norm of a frame, which a norm layer makes nearly the same for all, would hide errors.
    """
    sketches = {way: sketch(*encode()) for way, encode in made.arms.items()}
    params = {way: {"dtype": arithmetic(way)} for way in made.arms}
    if peers is not None:
        for name, peer in peers.arms(**request).items():
            sketches[name] = peer(observe=True).digest[0]
            params[name] = {"dtype": arithmetic(name), "peer": peer.version}
    wanted = sketches.pop("float32")[..., :COLUMNS]
    common = {**made.params, "device": "cpu", "threads": 1}
    for name, got in sketches.items():
        difference, size = apart(wanted, got[..., :COLUMNS])
        yield Measurement(
            made.what,
            "relative_error",
            "1",
            difference / size,
            impl=name,
            params=common | params[name],
        )


def one_core(quick: bool) -> Case:
    """Parakeet RNN-T 1.1B whole, one utterance of 16 seconds on one core: features, encoder, label
    looping.
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
    for way in filter(runs, ("float32", "bfloat16", "optimized_bfloat16", "optimized_int8")):
        precision: Any = arithmetic(way)
        options = PipelineConfig(
            precision=precision,
            encoder="optimized" if "optimized" in way else "eager",
            graphs="off",
        )
        arms[way] = partial(utterance.recognise, Recognizer(variants, options))
        with one_thread():
            params_of_arms[way] = arm_params(way, work(encoder, 1, 100 * seconds), "cpu", quick)
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
        ratios=[(first, way) for way in others],
        warmup=1,
    )


def shrunk(config: TransducerConfig) -> TransducerConfig:
    """`config` at a toy size, for a rehearsal."""
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
    gpu_tests=("tests/benchmarks/test_encoders.py",),
)
