"""The suite of encoders: FastConformers of published sizes by arithmetic, eager, compiled, packed,
optimized, as a CUDA graph, without cuDNN's attention; and a whole recogniser on one core.

Weights are random and seeded: they change neither the work nor its time, and every peer gets the
same. Utterances last ten seconds, the shortest of a batch half as long; RTFx counts speech,
operations count padding too. Least work is the products' operations, and all weights read once;
`least_ms` is what that takes at the ceilings of the machine, measured in the same run. Each case is
one arithmetic: its arms have to come as near to our eager float32 as TOLERANCE says before they are
timed.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

from asrkit.cpu import fast_dtype, has_int8
from asrkit.models import (
    FastConformer,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.models.execution import EncoderForm, capture, cast_copy, prepare, tf32
from asrkit.models.packed import multiplies
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.peer_encoders import write
from asrkit.workbench.bench.planted import planted
from asrkit.workbench.cost import encoder_flops, encoder_parameters
from asrkit.workbench.machine import this_machine

SECONDS = 10
RATE_HZ = 16_000
PEERS_MOST = 700_000_000  # parameters: every peer's process holds them too
TOLERANCE = {  # distance from eager float32 over its norm
    "float32": 1e-4,
    "tf32": 0.02,
    "bfloat16": 0.05,
    "float16": 0.01,
    "int8": 0.1,
}
# prefix of an arm that computes attention with other kernels than the arm of the same arithmetic
CUDNN = "without_cudnn_"
Inputs = tuple[Tensor, Tensor]
Encode = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an arm computes: the arithmetic of its products, and how the encoder is executed."""

    arithmetic: str = "float32"
    autocast: bool = False  # weights stay float32, products take them cast
    compiled: bool = False  # torch.compile, block by block: all blocks share one program
    graphed: bool = False  # replayed as a CUDA graph
    packed: bool = False  # weights laid out for a CPU's products (asrkit.models.packed)
    # attention by cuDNN where torch prefers that, as on Hopper: it makes a plan for each new (B, T)
    cudnn: bool = True
    optimized: bool = False  # by asrkit.models.optimize, on a CPU

    @property
    def weights(self) -> torch.dtype:
        """The dtype of the weights."""
        if self.autocast or self.arithmetic == "tf32":
            return torch.float32
        if self.arithmetic == "int8":  # those that do not become int8
            return getattr(torch, fast_dtype())
        return getattr(torch, self.arithmetic)

    @property
    def form(self) -> EncoderForm:
        """How the encoder is prepared."""
        if self.arithmetic == "int8":
            return "int8"
        if self.compiled:
            return "compiled"
        if self.packed:
            return "packed"
        if self.optimized:
            return "optimized"
        return "eager"


def suite(device: str, quick: bool, *, compiled: bool | None = None) -> Iterator[Case]:
    """Yield cases of presets by batch size, each in float32, under autocast and in half precision;
    on a CPU one core with a whole recogniser.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes only.
        compiled: whether torch.compile takes part, which is slow to begin; None: unless quick.
    """
    cuda = device.startswith("cuda")
    if compiled is None:
        compiled = not quick
    yield Case(what="machine-ceiling", measure=lambda: ceilings(device, quick).measurements)
    for preset, sizes in _batches(cuda, quick).items():
        config = presets.PRESETS[preset]().encoder
        assert isinstance(config, FastConformerConfig)
        encoder = random_encoder(config, device)
        for B in sizes:
            inputs = speech(B, 2 if quick else SECONDS, config.bins, device)
            for what, ways in groups(cuda, compiled=compiled).items():
                made = case(what, ways, encoder, inputs, device, quick)
                made = replace(made, params=made.params | {"preset": preset})
                yield from versus_peers(made, encoder, inputs)
    if not cuda:
        yield one_core(quick)


def _batches(cuda: bool, quick: bool) -> dict[str, tuple[int, ...]]:
    """Batch sizes of each preset."""
    if quick:
        return {"tiny": (2,), "tdt_ctc_110m": (1,)}
    if cuda:
        names = ("tdt_ctc_110m", "parakeet_ctc_0_6b", "parakeet_ctc_1_1b")
        return dict.fromkeys(names, (1, 32, 128))
    return {"tdt_ctc_110m": (1, 8), "parakeet_ctc_0_6b": (1, 8), "parakeet_ctc_1_1b": (1,)}


def groups(cuda: bool, compiled: bool) -> dict[str, dict[str, Way]]:
    """Arms that share a case, eager float32 first. Half precision is bfloat16, on a GPU float16
    too.
    """
    first = {"float32": Way()}
    cases: dict[str, dict[str, Way]] = {}
    names = ["float32", "bfloat16"]
    if cuda:
        names.append("float16")
    for name in names:
        ways = _ways(name, cuda, compiled)
        if name == "float32":
            if cuda:
                ways["tf32"] = Way(arithmetic="tf32")
            cases["encoder-float32"] = ways
        else:
            autocast = {f"autocast_{name}": Way(arithmetic=name, autocast=True)}
            cases[f"encoder-autocast-{name}"] = first | autocast
            cases[f"encoder-{name}"] = first | ways
    return cases


def _ways(name: str, cuda: bool, compiled: bool) -> dict[str, Way]:
    """All ways to compute in one arithmetic, but autocast and TF32."""
    ways = {name: Way(arithmetic=name)}
    if compiled and which("g++"):  # torch.compile for a CPU, and Triton too, ask for a compiler
        ways[f"compiled_{name}"] = Way(arithmetic=name, compiled=True)
    if cuda:
        ways[f"graphed_{name}"] = Way(arithmetic=name, graphed=True)
    elif multiplies(getattr(torch, name)):  # else packing is refused
        ways[f"packed_{name}"] = Way(arithmetic=name, packed=True)
    if not cuda:
        ways[f"optimized_{name}"] = Way(arithmetic=name, optimized=True)
    elif compiled:
        ways[f"compiled_graphed_{name}"] = Way(arithmetic=name, compiled=True, graphed=True)
    if cuda and name != "float32":  # which cuDNN's attention does not take
        ways[CUDNN + name] = Way(arithmetic=name, cudnn=False)
    return ways


def random_encoder(config: FastConformerConfig, device: str) -> FastConformer:
    """An encoder with seeded random weights, in eval mode.

    The biases of attention are not zero as at birth, so a peer that lacks them is found out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = FastConformer(config).eval().requires_grad_(False)
        for name, weight in encoder.named_parameters():
            if name.endswith(("content_bias", "position_bias")):
                weight.normal_(0, 0.1)
    return encoder.to(device)


def speech(B: int, seconds: int, bins: int, device: str) -> Inputs:
    """Noise as features (B, T, F), zeros in the padding, and lengths (B,) from T down to T / 2.

    Args:
        B: utterances.
        seconds: of the longest.
        bins: F.
        device: of the tensors.
    """
    T = 100 * seconds
    lengths = torch.linspace(T, T // 2, B).long()
    features = torch.randn(B, T, bins, generator=torch.Generator().manual_seed(1))
    features *= (torch.arange(T) < lengths[:, None])[..., None]
    return features.to(device), lengths.to(device)


def case(
    what: str,
    ways: Mapping[str, Way],
    encoder: FastConformer,
    inputs: Inputs,
    device: str,
    quick: bool = False,
) -> Case:
    """An arm for each way, and beside it the least time that its work takes at the machine's
    ceilings.

    Args:
        what: the name of the case.
        ways: by name of the arm; the first is what the others are compared with.
        encoder: float32, on `device`.
        inputs: features (B, T, F) and lengths (B,).
        device: "cpu" or "cuda".
        quick: take the ceilings at smaller sizes.
    """
    models = {dtype: twin(encoder, dtype) for dtype in {way.weights for way in ways.values()}}
    arms = {name: arm(models[way.weights], inputs, way) for name, way in ways.items()}
    B, T, _ = inputs[0].shape
    params = {
        "shape": [B, T, encoder.width, len(encoder.blocks)],
        "audio_s": inputs[1].sum().item() / 100,
        "weights": "random",
    }
    params_of_arms = {
        name: arm_params(way, encoder.config, (B, T), device, quick) for name, way in ways.items()
    }
    ours = [name for name in arms if name.startswith(("float32", "autocast", "bfloat16"))][-1]
    ratios = [("float32", name) for name in arms if name != "float32"]
    ratios += [(name.removeprefix(CUDNN), name) for name in arms if name.startswith(CUDNN)]
    return Case(
        what=what,
        arms=arms,
        params=params,
        arm_params=params_of_arms,
        ratios=ratios,
        warmup=1,
        peers=PeerArms(request={}, ours=ours, params=params_of_arms[ours]),
    )


def arm_params(
    way: Way, config: FastConformerConfig, shape: tuple[int, int], device: str, quick: bool
) -> dict[str, Any]:
    """Params of an arm: its arithmetic, its least work, and the time that this takes at the
    ceilings of that arithmetic, but for int8, whose rate is not measured.

    Args:
        way: how the arm computes.
        config: of the encoder.
        shape: B utterances of T feature frames.
        device: "cpu" or "cuda".
        quick: take the ceilings at smaller sizes.
    """
    B, T = shape
    FLOP = encoder_flops(config, B=B, T=T)
    read_B = encoder_parameters(config) * way.weights.itemsize
    params = {
        "dtype": way.arithmetic,
        "tolerance": TOLERANCE[way.arithmetic],
        "floor_FLOP": FLOP,
    }
    if way.arithmetic == "int8":
        return params
    top = ceilings(device, quick)
    return params | {
        "floor_B": read_B,
        "least_ms": top.floor_ms(FLOP, read_B, way.arithmetic),
        "peak_FLOP": top.flops[way.arithmetic],
        "peak_B": top.bytes_per_s,
    }


def twin(encoder: FastConformer, dtype: torch.dtype) -> FastConformer:
    """Another encoder with these weights in `dtype`: not copies of them where that is theirs."""
    return cast_copy(encoder, dtype).eval().requires_grad_(False)


def arm(encoder: FastConformer, inputs: Inputs, way: Way) -> Encode:
    """A call that encodes the inputs.

    Args:
        encoder: with the weights of `way`.
        inputs: features (B, T, F) and lengths (B,).
        way: how to compute.
    """
    features, lengths = inputs
    if way.form != "eager":
        encoder = prepare(twin(encoder, way.weights), way.form)

    def encode() -> tuple[Tensor, Tensor]:
        autocast: AbstractContextManager[Any] = nullcontext()
        if way.autocast:
            autocast = torch.autocast(features.device.type, getattr(torch, way.arithmetic))
        exact = tf32(way.arithmetic == "tf32")
        with torch.inference_mode(), exact, autocast, cudnn_attention(way.cudnn):
            return encoder(features, lengths)

    if way.graphed:
        return capture(encode)
    return encode


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Whether cuDNN may compute attention inside the block; afterwards it is as before."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed and before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def versus_peers(made: Case, encoder: FastConformer, inputs: Inputs) -> Iterator[Case]:
    """Yield the case, and for its time a file with what NeMo and transformers need to encode the
    same, where they take part.

    Args:
        made: of `case`.
        encoder: its weights.
        inputs: features and lengths.
    """
    weights = sum(weight.numel() for weight in encoder.parameters())
    if inputs[0].is_cuda or weights > PEERS_MOST:
        yield replace(made, peers=None)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        write(path, encoder, *inputs)
        assert made.peers
        mode = made.peers.ours.removesuffix("_bfloat16")
        request = {"loss": "encoder", "plan": str(path), "mode": mode}
        yield replace(made, peers=replace(made.peers, request=request))


@dataclass(frozen=True, kw_only=True)
class OneUtterance:
    """A recogniser with random weights, and one utterance of noise for it.

    Random weights would find far too many labels or none, so predictor and joint are planted ones
    (asrkit.workbench.bench.planted) with 3.5 labels a second in as many frames as the encoder
    gives. What it gives is computed, projected and not decoded.
    """

    model: TransducerModel
    wave: Tensor  # (1, S)
    planted_frames: Tensor  # (1, T, width), what is decoded
    labels: int  # in these frames

    def recognise(self, recognizer: Recognizer) -> tuple[Tensor, Tensor]:
        """Encoded frames (1, T, D) and labels (1, U), by one thread on one core.

        Args:
            recognizer: Of `model`, in any precision.
        """
        length = torch.tensor([self.wave.shape[1]])
        with one_thread():
            encoded, ends = recognizer.encode(*recognizer.features(self.wave, length))
            found = recognizer.decode(self.planted_frames.to(encoded.dtype), ends)
            return encoded, found.labels


def one_utterance(config: TransducerConfig, seconds: float) -> OneUtterance:
    """A recogniser with random weights, and noise for it.

    Args:
        config: Of the recogniser, with an LSTM predictor and an encoder frame for 8 feature frames.
        seconds: Of the noise.
    """
    assert isinstance(config.predictor, LSTMConfig)
    frames = math.ceil(round(100 * seconds) / 8)
    plan = planted(
        1, frames, V=config.vocab_size + 1, width=config.joint_width, layers=config.predictor.layers
    )
    samples = round(seconds * RATE_HZ)
    return OneUtterance(
        model=random_transducer(config, plan.model),
        wave=torch.randn(1, samples, generator=torch.Generator().manual_seed(0)) / 10,
        planted_frames=plan.encoded,
        labels=len(plan.labels[0]),
    )


def one_core(quick: bool) -> Case:
    """Parakeet RNN-T 1.1B whole, one utterance of 16 seconds on one core: features, encoder, label
    looping.
    """
    config = presets.parakeet_rnnt_1_1b()
    seconds = 16
    if quick:
        config = shrunk(config)
        seconds = 2
    encoder: Any = config.encoder
    utterance = one_utterance(config, seconds)
    variants = ModelVariants(utterance.model)
    float32 = PipelineConfig(precision="float32", encoder="eager", graphs="off")
    bfloat16 = replace(float32, precision="bfloat16")
    configs = {
        "float32": float32,
        "bfloat16": bfloat16,
        "optimized_bfloat16": replace(bfloat16, encoder="optimized"),
    }
    if has_int8():
        configs["optimized_int8"] = replace(float32, precision="int8", encoder="optimized")
    arms = {
        name: partial(utterance.recognise, Recognizer(variants, one))
        for name, one in configs.items()
    }
    params = {
        "shape": [1, utterance.planted_frames.shape[1], encoder.width, encoder.layers],
        "audio_s": seconds,
        "weights": "random",
        "labels": utterance.labels,
        "cores": 1,
        "threads": 1,
        "preset": "tiny" if quick else "parakeet_rnnt_1_1b",
    }
    shape = (1, 100 * seconds)
    with one_thread():
        params_of_arms = {
            name: arm_params(Way(arithmetic=one.precision), encoder, shape, "cpu", quick)
            for name, one in configs.items()
        }
    ratios = [("float32", name) for name in arms if name != "float32"]
    return Case(
        what="recogniser-one-core",
        arms=arms,
        params=params,
        arm_params=params_of_arms,
        ratios=ratios,
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


def random_transducer(config: TransducerConfig, decoder: TransducerModel) -> TransducerModel:
    """A model of `config` with random weights, but predictor and joint of `decoder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TransducerModel(config).eval().requires_grad_(False)
    for part in ("predictor", "predictor_projection", "output"):
        getattr(model, part).load_state_dict(getattr(decoder, part).state_dict())
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread on one core inside the block; afterwards all is as before.

    Where the system pins no thread, as macOS does not, the thread moves between cores.
    """
    this_machine()  # whose records, those of the block too, name all of its cores
    threads = torch.get_num_threads()
    cores: set[int] = set()
    if hasattr(os, "sched_setaffinity"):
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


SUITE = Suite(
    name="encoder",
    cases=suite,
    gpu_tests=("tests/workbench/bench/test_encoder.py",),
)
