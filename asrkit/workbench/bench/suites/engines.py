"""The suite of inference engines: a FastConformer on one core of a CPU, ours eager and optimized,
with `--peers` beside OpenVINO and ONNX Runtime in the same run.

Weights are random and seeded. Utterances of ten seconds are whole: the engines' models have neither
lengths nor masks. Beside each time stand its distance from our eager float32, relative to the norm
of that, and the least work as a share of the machine's measured peak. A case is one arithmetic;
peers of one arithmetic end before those of the next start.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.cpu import has_int8
from asrkit.models import CTCConfig, CTCModel, FastConformerConfig, presets
from asrkit.shapes import expect
from asrkit.workbench.bench.agreement import apart
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.ceilings import ceilings
from asrkit.workbench.bench.peers.peer_encoders import sketch
from asrkit.workbench.bench.peers.peer_engines import write_features, write_model
from asrkit.workbench.bench.peers.processes import NAMES, Peers
from asrkit.workbench.bench.suites import encoder as encoders
from asrkit.workbench.bench.suites import ways
from asrkit.workbench.bench.suites.ways import Encode, Way, Work, one_thread
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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What ours and the engines compute.

    Attributes:
        name: of the cases, before the arithmetic, as in peers.processes.NAMES.
        model: float32, on the CPU: what our arms call.
        exported: the model that peers get.
        features: (B, T, F) of whole utterances, a case each.
        works: least work of each.
        params: of all records.
    """

    name: str
    model: nn.Module
    exported: CTCModel
    features: Sequence[Tensor]
    works: Sequence[Work]
    params: Mapping[str, Any]


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
        features, _ = ways.speech(B, seconds, config.bins, "cpu")
        features = torch.where(features == 0, 0.5, features)  # no utterance has padding
        yield from cases(conformer(preset, encoder, features), quick, peers)


def _ceiling(quick: bool) -> tuple[Measurement, ...]:
    with one_thread():
        return ceilings("cpu", quick).measurements


def conformer(preset: str, encoder: encoders.FastConformer, features: Tensor) -> Subject:
    """A FastConformer, which peers get as part of a CTC model.

    Args:
        preset: what the records call the encoder.
        encoder: float32, on the CPU.
        features: (B, T, F) of whole utterances.
    """
    B, T, _ = features.shape
    exported = CTCModel(CTCConfig(encoder=encoder.config, vocab_size=1)).eval()
    exported.encoder = encoder
    return Subject(
        name="engines",
        model=encoder,
        exported=exported,
        features=[features],
        works=[encoders.work(encoder.config, B, T)],
        params={"preset": preset, "shape": [B, T, encoder.width, len(encoder.blocks)]},
    )


def cases(
    subject: Subject,
    quick: bool,
    peers: Peers | None,
    arithmetics: Sequence[str] = ("float32", "bfloat16", "int8"),
) -> Iterator[Case]:
    """A case for each arithmetic and each batch, with the peers that run.

    Args:
        subject: what is computed.
        quick: take the ceilings at smaller sizes.
        peers: as `suite` takes them.
        arithmetics: of the cases.
    """
    with tempfile.TemporaryDirectory() as folder:
        if peers is not None:
            write_model(Path(folder), subject.exported)
        for name in arithmetics:
            if peers is None and name == "int8" and not has_int8():
                continue
            what = f"{subject.name}-{name}"
            for features, work in zip(subject.features, subject.works, strict=True):
                request: dict[str, Any] = {
                    "loss": what,
                    "folder": folder,
                    "frames": features.shape[1],
                }
                if peers is not None:
                    write_features(Path(folder), features)
                    peers.arms(**request)  # they start before our arms take memory
                yield case(subject, features, work, quick, request, peers)
            if peers is not None:
                peers.end(what)


def ways_of(name: str) -> dict[str, Way]:
    """Our arms of an arithmetic, eager float32 first; before int8, which not every CPU has, our
    bfloat16.

    Args:
        name: "float32", "bfloat16" or "int8".
    """
    plain = "bfloat16" if name == "int8" else name
    arms = {
        "float32": Way(),
        plain: Way(arithmetic=plain),
        f"optimized_{plain}": Way(arithmetic=plain, form="optimized"),
    }
    if name == "int8" and has_int8():
        arms["optimized_int8"] = Way(arithmetic="int8", form="int8")
    return arms


def case(
    subject: Subject,
    features: Tensor,
    work: Work,
    quick: bool,
    request: Mapping[str, Any],
    peers: Peers | None,
) -> Case:
    """Arms of one arithmetic on one core.

    Args:
        subject: what is computed.
        features: (B, T, F) of whole utterances.
        work: least work of them.
        quick: take the ceilings at smaller sizes.
        request: what peers are asked; its "loss" ends with the arithmetic that they compute in.
        peers: as `suite` takes them.
    """
    what = request["loss"]
    name = what.rpartition("-")[2]
    B, T, _ = features.shape
    inputs = (features, torch.full((B,), T))
    params: dict[str, Any] = {"cores": 1, **subject.params}
    made = ways.case(what, ways_of(name), subject.model, inputs, work, quick, **params)
    ours = [*made.arms][-1]
    params_of_peers = dict(made.arm_params[ours])
    if name == "int8":  # also where our last arm is bfloat16
        params_of_peers = ways.arm_params(Way(arithmetic="int8"), work, "cpu", quick)
    ratios = [*made.pairs(), *[("float32", peer) for peer in NAMES[what]]]
    if "optimized_int8" in made.arms:
        ratios.append(("optimized_bfloat16", "optimized_int8"))
    return replace(
        made,
        ratios=ratios,
        peers=PeerArms(request=request, ours=ours, params=params_of_peers),
        more=partial(errors, made, request, peers),
    )


def errors(made: Case, request: Mapping[str, Any], peers: Peers | None) -> Iterator[Measurement]:
    """Distance of each arm's frames from those of eager float32, over the norm of these.

    A peer's frames are known by their `sketch` alone, so all arms are compared by the eight columns
    of it; the norm of a frame, which a norm layer makes nearly the same for all, would hide errors.
    """
    arms: Mapping[str, Encode] = made.arms
    first, *others = arms
    wanted = sketch(*arms[first]())[..., :COLUMNS]
    found: dict[str, tuple[Tensor, dict[str, Any]]] = {
        name: (sketch(*arms[name]()), {"dtype": made.arm_params[name]["dtype"]}) for name in others
    }
    if peers is not None:
        for name, peer in peers.arms(**request).items():
            of_peer = {"dtype": name.rpartition("_")[2], "peer": peer.version}
            found[name] = (peer(observe=True).digest[0], of_peer)
    for name, (got, of_arm) in found.items():
        difference, size = apart(wanted, got[..., :COLUMNS])
        params = {**made.params, "device": "cpu", "threads": 1, **of_arm}
        error = difference / size
        yield Measurement(made.what, "relative_error", "1", error, impl=name, params=params)


SUITE = Suite(name="engines", cases=suite, cpu_only=True, takes_peers=True)
