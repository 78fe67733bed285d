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
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import Tensor

from asrkit.cpu import has_int8
from asrkit.models import (
    FastConformer,
    FastConformerConfig,
    LSTMConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.models.packed import multiplies
from asrkit.transcribe.options import PipelineConfig
from asrkit.transcribe.pipeline import ModelVariants, Recognizer
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.peer_encoders import write
from asrkit.workbench.bench.planted import planted
from asrkit.workbench.bench.suites import ways
from asrkit.workbench.bench.suites.ways import Inputs, Way, Work, one_thread, speech
from asrkit.workbench.cost import encoder_flops, encoder_parameters

SECONDS = 10
RATE_HZ = 16_000
PEERS_MOST = 700_000_000  # parameters: every peer's process holds them too
# prefix of an arm that computes attention with other kernels than the arm of the same arithmetic
CUDNN = "without_cudnn_"
GPU_PRESETS = ("parakeet_ctc_0_6b", "tdt_ctc_110m", "parakeet_ctc_1_1b")
GPU_BATCHES = (1, 32, 128)


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
        for what, arms in groups(cuda, compiled=compiled).items():
            for B in sizes:
                inputs = speech(B, 2 if quick else SECONDS, config.bins, device)
                made = case(what, arms, encoder, inputs, quick, preset=preset)
                yield from versus_peers(made, encoder, inputs)
    if not cuda:
        yield one_core(quick)


def _batches(cuda: bool, quick: bool) -> dict[str, tuple[int, ...]]:
    """Batch sizes of each preset, on a GPU the one of most interest first."""
    if quick:
        return {"tiny": (2,), "tdt_ctc_110m": (1,)}
    if cuda:
        return dict.fromkeys(GPU_PRESETS, GPU_BATCHES)
    return {"tdt_ctc_110m": (1, 8), "parakeet_ctc_0_6b": (1, 8), "parakeet_ctc_1_1b": (1,)}


def groups(cuda: bool, compiled: bool) -> dict[str, dict[str, Way]]:
    """Arms that share a case, eager float32 first. Half precision is bfloat16, on a GPU float16
    too, and there bfloat16 comes first.
    """
    first = {"float32": Way()}
    cases: dict[str, dict[str, Way]] = {}
    for name in ("bfloat16", "float32", "float16") if cuda else ("float32", "bfloat16"):
        arms = _ways(name, cuda, compiled)
        if name == "float32":
            if cuda:
                arms["tf32"] = Way(arithmetic="tf32")
            cases["encoder-float32"] = arms
        else:
            autocast = {f"autocast_{name}": Way(arithmetic=name, autocast=True)}
            cases[f"encoder-{name}"] = first | arms
            cases[f"encoder-autocast-{name}"] = first | autocast
    return cases


def _ways(name: str, cuda: bool, compiled: bool) -> dict[str, Way]:
    """All ways to compute in one arithmetic, but autocast and TF32."""
    plain = Way(arithmetic=name)
    arms = {name: plain}
    if compiled and which("g++"):  # torch.compile for a CPU, and Triton too, ask for a compiler
        arms[f"compiled_{name}"] = replace(plain, form="compiled")
    if cuda:
        arms[f"graphed_{name}"] = replace(plain, graphed=True)
        if compiled:
            arms[f"compiled_graphed_{name}"] = replace(plain, form="compiled", graphed=True)
        if name != "float32":  # which cuDNN's attention does not take
            arms[CUDNN + name] = replace(plain, cudnn=False)
        return arms
    if multiplies(getattr(torch, name)):  # else packing is refused
        arms[f"packed_{name}"] = replace(plain, form="packed")
    arms[f"optimized_{name}"] = replace(plain, form="optimized")
    return arms


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


def case(
    what: str,
    arms: dict[str, Way],
    encoder: FastConformer,
    inputs: Inputs,
    quick: bool = False,
    **params: Any,
) -> Case:
    """An arm for each way, whose peers are set against the last one that they resemble.

    Args:
        what: the name of the case.
        arms: ways by name; the first is what the others are compared with.
        encoder: float32, where the inputs are.
        inputs: features (B, T, F) and lengths (B,).
        quick: take the ceilings at smaller sizes.
        params: more params of all records.
    """
    B, T, _ = inputs[0].shape
    params["shape"] = [B, T, encoder.width, len(encoder.blocks)]
    made = ways.case(what, arms, encoder, inputs, work(encoder.config, B, T), quick, **params)
    ours = [name for name in arms if name.startswith(("float32", "autocast", "bfloat16"))][-1]
    cudnn = [(name.removeprefix(CUDNN), name) for name in arms if name.startswith(CUDNN)]
    peers = PeerArms(request={}, ours=ours, params=made.arm_params[ours])
    return replace(made, ratios=[*made.pairs(), *cudnn], peers=peers)


def work(config: FastConformerConfig, B: int, T: int) -> Work:
    """Least work of a call on B utterances of T feature frames."""
    return Work(FLOP=encoder_flops(config, B=B, T=T), weights=encoder_parameters(config))


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
    least = work(encoder, 1, 100 * seconds)
    with one_thread():
        params_of_arms = {
            name: ways.arm_params(Way(arithmetic=one.precision), least, "cpu", quick)
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


SUITE = Suite(
    name="encoder",
    cases=suite,
    gpu_tests=("tests/workbench/bench/test_encoder.py",),
)
