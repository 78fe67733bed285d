"""The suite of encoders: FastConformers of published sizes by arithmetic, eager, compiled, packed,
optimized, as a CUDA graph, without cuDNN's attention; and one core.

Weights are random and seeded: they change neither the work nor its time, and every rival gets the
same. Utterances last ten seconds, the shortest of a batch half as long; RTFx counts speech,
operations count padding too. Least work is the products' operations, and all weights read once;
`least_ms` is what that takes at the ceilings of the machine, measured in the same run. Each case is
one arithmetic: its arms have to come as near to our eager float32 as TOLERANCE says before they are
timed.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import transducer_greedy
from asrkit.features import log_mel
from asrkit.models import (
    FastConformer,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    optimize,
    presets,
)
from asrkit.models.packed import pack
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings, tf32
from asrkit.workbench.bench.planted import planted
from asrkit.workbench.bench.rivals.peer_encoders import write
from asrkit.workbench.cost import encoder_flops, encoder_parameters

SECONDS, RATE_HZ = 10, 16_000
RIVALS_MOST = 700_000_000  # parameters: every rival's process holds them too
TOLERANCE = {
    "float32": 1e-4,
    "tf32": 0.02,
    "bfloat16": 0.05,
    "float16": 0.01,
}  # distance from eager float32 over its norm
# an arm that computes attention with other kernels than the arm of the same arithmetic
CUDNN = "without_cudnn_"
Inputs = tuple[Tensor, Tensor]
Encode = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an arm computes: the arithmetic of its products, and what is done to the model for it."""

    arithmetic: str = "float32"
    autocast: bool = False  # weights stay float32, products take them cast
    compiled: bool = False  # torch.compile, block by block: all blocks share one program
    graphed: bool = False  # replayed as a CUDA graph
    packed: bool = False  # weights laid out for a CPU's products (asrkit.models.packed)
    # attention by cuDNN where torch prefers that, as on Hopper: it makes a plan for each new (B, T)
    cudnn: bool = True
    optimized: bool = False  # by asrkit.models.optimize: on a CPU folded and packed, on CUDA fused

    @property
    def weights(self) -> torch.dtype:
        """What the model is moved to."""
        return (
            torch.float32
            if self.autocast or self.arithmetic == "tf32"
            else getattr(torch, self.arithmetic)
        )


def suite(device: str, quick: bool, *, compiled: bool | None = None) -> Iterator[Case]:
    """Presets by batch size, each in float32, under autocast and in half precision; on a CPU one
    core with a whole recogniser.

    compiled: whether torch.compile takes part, which is slow to begin; None: unless quick.
    """
    cuda = device.startswith("cuda")
    batches = {"tdt_ctc_110m": (1, 8), "parakeet_ctc_0_6b": (1, 8), "parakeet_ctc_1_1b": (1,)}
    if cuda:
        batches = dict.fromkeys(batches, (1, 32, 128))
    if quick:
        batches = {"tiny": (2,), "tdt_ctc_110m": (1,)}
    yield Case(what="machine-ceiling", measure=lambda: ceilings(device, quick).measurements)
    for preset, sizes in batches.items():
        config = presets.PRESETS[preset]().encoder
        assert isinstance(config, FastConformerConfig)
        encoder = random_encoder(config, device)
        for B in sizes:
            inputs = speech(B, 2 if quick else SECONDS, encoder.config.bins, device)
            for what, ways in groups(
                cuda, compiled=not quick if compiled is None else compiled
            ).items():
                made = case(what, ways, encoder, inputs, device, quick)
                yield from versus_peers(
                    replace(made, params=made.params | {"preset": preset}), encoder, inputs
                )
    if not cuda:
        yield one_core(quick)


def groups(cuda: bool, compiled: bool) -> dict[str, dict[str, Way]]:
    """Arms that share a case, eager float32 first. Half precision is bfloat16, on a GPU float16
    too.
    """
    first, found = {"float32": Way()}, dict[str, dict[str, Way]]()
    for name in ("float32", "bfloat16", "float16") if cuda else ("float32", "bfloat16"):
        ways = {name: Way(arithmetic=name)}
        if compiled and which("g++"):  # torch.compile for a CPU, and Triton too, ask for a compiler
            ways[f"compiled_{name}"] = Way(arithmetic=name, compiled=True)
        if cuda:
            ways[f"graphed_{name}"] = Way(arithmetic=name, graphed=True)
        else:
            ways[f"packed_{name}"] = Way(arithmetic=name, packed=True)
        ways[f"optimized_{name}"] = Way(arithmetic=name, optimized=True)
        if cuda:
            ways[f"optimized_graphed_{name}"] = Way(arithmetic=name, optimized=True, graphed=True)
        if cuda and name != "float32":  # which cuDNN's attention does not take
            ways[CUDNN + name] = Way(arithmetic=name, cudnn=False)
        if name == "float32":
            found["encoder-float32"] = ways | ({"tf32": Way(arithmetic="tf32")} if cuda else {})
        else:
            found[f"encoder-autocast-{name}"] = first | {
                f"autocast_{name}": Way(arithmetic=name, autocast=True)
            }
            found[f"encoder-{name}"] = first | ways
    return found


def random_encoder(config: FastConformerConfig, device: str) -> FastConformer:
    """Seeded random weights; the biases of attention are not zero as at birth, so a rival that
    lacks them is found out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = FastConformer(config).eval().requires_grad_(False)
        for name, weight in encoder.named_parameters():
            if name.endswith(("content_bias", "position_bias")):
                weight.normal_(0, 0.1)
    return encoder.to(device)


def speech(B: int, seconds: int, bins: int, device: str) -> Inputs:
    """Noise for features (B, T, F), zeros in the padding, and lengths (B,) from T down to T / 2."""
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
    """
    models = {dtype: twin(encoder, dtype) for dtype in {way.weights for way in ways.values()}}
    arms = {name: arm(models[way.weights], inputs, way) for name, way in ways.items()}
    B, T, _ = inputs[0].shape
    told = {name: told_of(way, encoder.config, B, T, device, quick) for name, way in ways.items()}
    params = {
        "shape": [B, T, encoder.width, len(encoder.blocks)],
        "audio_s": inputs[1].sum().item() / 100,
        "weights": "random",
    }
    ours = [name for name in arms if name.startswith(("float32", "autocast", "bfloat16"))][-1]
    ratios = [("float32", name) for name in arms if name != "float32"]
    ratios += [(name.removeprefix(CUDNN), name) for name in arms if name.startswith(CUDNN)]
    return Case(
        what=what,
        arms=arms,
        params=params,
        arm_params=told,
        ratios=ratios,
        warmup=1,
        peers=PeerArms(request={}, ours=ours, params=told[ours]),
    )


def told_of(
    way: Way, config: FastConformerConfig, B: int, T: int, device: str, quick: bool
) -> dict[str, Any]:
    """Params of an arm: its arithmetic, its least work, and the time that this takes at the
    ceilings of that arithmetic.
    """
    sizes = {
        name: getattr(config, name)
        for name in ("bins", "width", "layers", "subsampling", "kernel", "expansion")
    }
    sizes["channels"] = config.subsampling_channels
    FLOP, top = encoder_flops(B=B, T=T, context=config.context, **sizes), ceilings(device, quick)
    read = encoder_parameters(bias=config.bias, **sizes) * way.weights.itemsize
    return {
        "dtype": way.arithmetic,
        "tolerance": TOLERANCE[way.arithmetic],
        "floor_FLOP": FLOP,
        "floor_B": read,
        "least_ms": top.floor_ms(FLOP, read, way.arithmetic),
        "peak_FLOP": top.flops[way.arithmetic],
        "peak_B": top.bytes_per_s,
    }


def twin(encoder: FastConformer, dtype: torch.dtype) -> FastConformer:
    """Another encoder with these weights in `dtype`: not copies of them where that is theirs."""
    with torch.device("meta"):
        made = FastConformer(encoder.config)
    state = {
        name: one.to(dtype) if one.is_floating_point() else one
        for name, one in encoder.state_dict().items()
    }
    made.load_state_dict(state, assign=True)
    return made.eval().requires_grad_(False)


def arm(encoder: FastConformer, inputs: Inputs, way: Way) -> Encode:
    """A call that encodes the inputs in that way."""
    features, lengths = inputs
    if way.packed:
        encoder = pack(twin(encoder, way.weights))
    if way.optimized:
        encoder = optimize(twin(encoder, way.weights))
    if way.compiled:
        encoder = twin(encoder, way.weights)
        for block in encoder.blocks:
            block.compile(dynamic=False)

    def encode() -> tuple[Tensor, Tensor]:
        half = torch.autocast(
            features.device.type, getattr(torch, way.arithmetic), enabled=way.autocast
        )
        with (
            torch.inference_mode(),
            tf32(way.arithmetic == "tf32"),
            half,
            cudnn_attention(way.cudnn),
        ):
            return encoder(features, lengths)

    return graphed(encode) if way.graphed else encode


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Attention that cuDNN may, or may not, compute; afterwards it is as before."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed and before)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def graphed(call: Encode, pool: Any = None) -> Encode:
    """`call` as a CUDA graph, captured at the first call after three to warm up; its inputs and
    outputs stay where they are.

    Graphs of one `pool` share memory: what one returned is gone when another runs.
    """
    kept = list[Any]()

    def replay() -> tuple[Tensor, Tensor]:
        if not kept:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=pool, capture_error_mode="thread_local"
            ):  # a thread may load sound meanwhile
                found = call()
            kept.extend((graph, found))
        kept[0].replay()
        return kept[1]

    return replay


def versus_peers(made: Case, encoder: FastConformer, inputs: Inputs) -> Iterator[Case]:
    """The case, and for its time a file with what NeMo and transformers need to encode the same,
    where they take part.
    """
    if inputs[0].is_cuda or sum(weight.numel() for weight in encoder.parameters()) > RIVALS_MOST:
        yield replace(made, peers=None)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.pt"
        write(path, encoder, *inputs)
        assert made.peers
        mode = made.peers.ours.removesuffix("_bfloat16")
        request = {"loss": "encoder", "plan": str(path), "mode": mode}
        yield replace(made, peers=replace(made.peers, request=request))


def one_core(quick: bool) -> Case:
    """Parakeet RNN-T 1.1B whole, one utterance of 16 seconds on one core: features, encoder, label
    looping.

    Random weights would say far too much or nothing, so predictor and joint are planted ones
    (asrkit.workbench.bench.planted) that say 3.5 labels a second in as many frames as the encoder
    gave. What it gave is computed, projected and not decoded.
    """
    config = presets.parakeet_rnnt_1_1b()
    if quick:
        small = LSTMConfig(width=240, layers=2)
        config = replace(
            config, vocab_size=32, joint_width=240, predictor=small, encoder=presets.tiny().encoder
        )
    seconds = 2 if quick else 16
    frames = -(-100 * seconds // 8)
    assert isinstance(config.predictor, LSTMConfig) and isinstance(
        config.encoder, FastConformerConfig
    )
    plan = planted(
        1, frames, V=config.vocab_size + 1, width=config.joint_width, layers=config.predictor.layers
    )
    model = recogniser(config, plan.model)
    halved = deepcopy(model).to(torch.bfloat16)
    packed = pack(deepcopy(halved))
    wave = torch.randn(1, seconds * RATE_HZ, generator=torch.Generator().manual_seed(0)) / 10
    length = torch.tensor([wave.shape[1]])

    def recognise(model: TransducerModel) -> tuple[Tensor, Tensor]:
        with one_thread(), torch.inference_mode():
            encoded, ends, _ = model.encode(*log_mel(wave, length))
            return encoded, transducer_greedy(model, plan.encoded.to(encoded.dtype), ends).labels

    models = {"float32": model, "bfloat16": halved, "packed_bfloat16": packed}
    arms = {name: partial(recognise, one) for name, one in models.items()}
    params = {
        "shape": [1, frames, config.encoder.width, config.encoder.layers],
        "audio_s": seconds,
        "weights": "random",
        "labels": len(plan.labels[0]),
        "cores": 1,
        "threads": 1,
        "preset": "tiny" if quick else "parakeet_rnnt_1_1b",
    }
    ways = {name: Way(arithmetic=name.removeprefix("packed_")) for name in arms}
    with one_thread():
        told = {
            name: told_of(way, config.encoder, 1, 100 * seconds, "cpu", quick)
            for name, way in ways.items()
        }
    ratios = [("float32", name) for name in arms if name != "float32"]
    return Case(
        what="recogniser-one-core",
        arms=arms,
        params=params,
        arm_params=told,
        ratios=ratios,
        warmup=1,
    )


def recogniser(config: TransducerConfig, decoder: TransducerModel) -> TransducerModel:
    """A model of `config` with random weights, but predictor and joint of `decoder`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TransducerModel(config).eval().requires_grad_(False)
    for part in ("predictor", "predictor_projection", "output"):
        getattr(model, part).load_state_dict(getattr(decoder, part).state_dict())
    return model


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread on one core; afterwards all is as before."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


SUITE = Suite(name="encoder", cases=suite)
