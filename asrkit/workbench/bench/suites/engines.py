"""The suite of inference engines: a FastConformer on one core of a CPU, ours eager and optimized,
with `--peers` beside OpenVINO and ONNX Runtime in the same run.

Weights are random and seeded. Utterances of ten seconds are whole: the engines' models have neither
lengths nor masks. Beside each time stand its distance from our eager float32, relative to the norm
of that, and the least work as a share of the machine's measured peak. A case is one arithmetic;
peers of one arithmetic end before those of the next start.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.cpu import has_int8
from asrkit.models import CTCConfig, CTCModel, FastConformer, FastConformerConfig, presets
from asrkit.shapes import expect
from asrkit.workbench.bench.agreement import apart
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.peer_encoders import sketch
from asrkit.workbench.bench.peers.peer_engines import write_features, write_model
from asrkit.workbench.bench.peers.processes import NAMES, Peers
from asrkit.workbench.bench.suites import encoder as encoders
from asrkit.workbench.bench.suites.encoder import Way, one_thread
from asrkit.workbench.records import Measurement

SECONDS = 10
SIZES: tuple[tuple[str, int], ...] = (
    ("tdt_ctc_110m", 1),
    ("tdt_ctc_110m", 8),
    ("parakeet_ctc_0_6b", 1),
)
QUICK_SIZES = (("tiny", 1), ("tiny", 2))
QUICK_SECONDS = 2
COLUMNS = 8  # of a sketch, which are numbers of the frames themselves
Encode = Callable[[], tuple[Tensor, Tensor]]


def suite(device: str, quick: bool, *, peers: Peers | None = None) -> Iterator[Case]:
    """Yield the core's ceiling, and each model and batch size by arithmetic.

    Args:
        device: "cpu".
        quick: a tiny model and short utterances.
        peers: whose processes run OpenVINO and ONNX Runtime; None: ours alone.

    Raises:
        ValueError: `device` is a GPU.
    """
    remedy = "On a GPU measure the suite encoder."
    expect(not device.startswith("cuda"), "device", "cpu for the suite engines", device, remedy)
    yield Case(what="machine-ceiling", measure=partial(_ceiling, quick))
    sizes = SIZES
    seconds = SECONDS
    if quick:
        sizes = QUICK_SIZES
        seconds = QUICK_SECONDS
    for preset, B in sizes:
        config = presets.PRESETS[preset]().encoder
        assert isinstance(config, FastConformerConfig)
        encoder = encoders.random_encoder(config, "cpu")
        features, _ = encoders.speech(B, seconds, config.bins, "cpu")
        features = torch.where(features == 0, 0.5, features)  # no utterance has padding
        yield from cases(preset, encoder, features, quick, peers)


def _ceiling(quick: bool) -> tuple[Measurement, ...]:
    with one_thread():
        return ceilings("cpu", quick).measurements


def cases(
    preset: str, encoder: FastConformer, features: Tensor, quick: bool, peers: Peers | None
) -> Iterator[Case]:
    """A case for each arithmetic, with the peers that run.

    Args:
        preset: what the records call the encoder.
        encoder: float32, on the CPU.
        features: (B, T, F) of whole utterances.
        quick: take the ceilings at smaller sizes.
        peers: as `suite` takes them.
    """
    with tempfile.TemporaryDirectory() as folder:
        if peers is not None:
            model = CTCModel(CTCConfig(encoder=encoder.config, vocab_size=1)).eval()
            model.encoder = encoder
            write_model(Path(folder), model)
            write_features(Path(folder), features)
        for name in ("float32", "bfloat16", "int8"):
            loss = f"engines-{name}"
            request: dict[str, Any] = {"loss": loss, "folder": folder, "frames": features.shape[1]}
            if peers is not None:
                peers.arms(**request)  # they start before our arms take memory
            elif name == "int8" and not has_int8():
                continue
            yield case(encoder, features, {"preset": preset}, quick, request, peers)
            if peers is not None:
                peers.end(loss)


def ways(name: str) -> dict[str, Way]:
    """Our arms of an arithmetic, eager float32 first; before int8, which not every CPU has, our
    bfloat16.

    Args:
        name: "float32", "bfloat16" or "int8".
    """
    arms = {"float32": Way()}
    plain = "bfloat16" if name == "int8" else name
    arms[plain] = Way(arithmetic=plain)
    arms[f"optimized_{plain}"] = Way(arithmetic=plain, optimized=True)
    if name == "int8" and has_int8():
        arms["optimized_int8"] = Way(arithmetic="int8", optimized=True)
    return arms


def case(
    encoder: FastConformer,
    features: Tensor,
    more_params: Mapping[str, str],
    quick: bool,
    request: Mapping[str, Any],
    peers: Peers | None,
) -> Case:
    """Arms of one arithmetic on one core.

    Args:
        encoder: float32.
        features: (B, T, F) of whole utterances.
        more_params: of all its records.
        quick: take the ceilings at smaller sizes.
        request: what peers are asked; its "loss" ends with the arithmetic that they compute in.
        peers: as `suite` takes them.
    """
    name = request["loss"].rpartition("-")[2]
    B, T, _ = features.shape
    inputs = (features, torch.full((B,), T))
    arms = {arm: _on_one_core(encoder, inputs, way) for arm, way in ways(name).items()}
    with one_thread():
        params_of_arms = {
            arm: encoders.arm_params(way, encoder.config, (B, T), "cpu", quick)
            for arm, way in ways(name).items()
        }
    ours = [*arms][-1]
    params_of_peers = dict(params_of_arms[ours])
    if name == "int8":  # also where our last arm is bfloat16
        tolerance = encoders.TOLERANCE["int8"]
        FLOP = params_of_peers["floor_FLOP"]
        params_of_peers = {"dtype": "int8", "tolerance": tolerance, "floor_FLOP": FLOP}
    params = {
        "shape": [B, T, encoder.width, len(encoder.blocks)],
        "audio_s": B * T / 100,
        "weights": "random",
        "cores": 1,
        **more_params,
    }
    ratios = [("float32", arm) for arm in arms if arm != "float32"]
    ratios += [("float32", peer) for peer in NAMES[request["loss"]]]
    if "optimized_int8" in arms:
        ratios.append(("optimized_bfloat16", "optimized_int8"))
    return Case(
        what=request["loss"],
        arms=arms,
        params=params,
        arm_params=params_of_arms,
        ratios=ratios,
        warmup=1,
        peers=PeerArms(request=request, ours=ours, params=params_of_peers),
        more=partial(errors, request["loss"], arms, params, params_of_arms, request, peers),
    )


def _on_one_core(encoder: FastConformer, inputs: encoders.Inputs, way: Way) -> Encode:
    call = encoders.arm(encoders.twin(encoder, way.weights), inputs, way)

    def encode() -> tuple[Tensor, Tensor]:
        with one_thread():
            return call()

    return encode


def errors(
    what: str,
    arms: Mapping[str, Encode],
    params: Mapping[str, Any],
    params_of_arms: Mapping[str, Mapping[str, Any]],
    request: Mapping[str, Any],
    peers: Peers | None,
) -> Iterator[Measurement]:
    """Distance of each arm's frames from those of eager float32, over the norm of these.

    A peer's frames are known by their `sketch` alone, so all arms are compared by the eight columns
    of it; the norm of a frame, which a norm layer makes nearly the same for all, would hide errors.
    """
    first, *others = arms
    wanted = sketch(*arms[first]())[..., :COLUMNS]
    found = {name: (sketch(*arms[name]()), params_of_arms[name]) for name in others}
    if peers is not None:
        for name, peer in peers.arms(**request).items():
            dtype = name.rpartition("_")[2]
            found[name] = (peer(observe=True).digest[0], {"dtype": dtype, "peer": peer.version})
    for name, (got, of_arm) in found.items():
        difference, size = apart(wanted, got[..., :COLUMNS])
        shared = {**params, "device": "cpu", "threads": 1, "dtype": of_arm["dtype"]}
        if "peer" in of_arm:
            shared["peer"] = of_arm["peer"]
        yield Measurement(what, "relative_error", "1", difference / size, impl=name, params=shared)


SUITE = Suite(name="engines", cases=suite, cpu_only=True, takes_peers=True)
