"""The suite of the transducer losses: on given logits, padded and packed, and from the two halves
of the joint.

Least work, in every row. On given logits: read them twice, write their gradient; an exponential and
an addition for each in the first pass, an exponential and a product in the second. From the halves:
read these and the weights, write their gradients; three matrix products of 2 N D V where the logits
are kept, four where they are made twice.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.losses import rnnt, rnnt_loss, rnnt_loss_packed, tdt, tdt_loss
from asrkit.losses.availability import expect_runs
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.cases import Case, PeerArms, Suite
from asrkit.workbench.bench.peers.peer_worker import inputs
from asrkit.workbench.bench.suites.joint_arms import (
    OFFSETS,
    Shape,
    excluded_arms,
    joint_arms,
    joint_inputs,
)
from asrkit.workbench.measure.ops import dtype_name

DURATIONS = (0, 1, 2, 3, 4)
ROUNDED = {  # relative distance of gradients that rounding excuses
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}
# Relative distance of a weight's gradient, a sum over all nodes. A GPU's thread adds one node after
# the other in float32: emulated, that is 3e-6 off for 121,200 nodes and 3e-5 for 646,400. Not yet
# measured on hardware.
SUMMED = {"cpu": 1e-5, "cuda": 1e-4}
PEER: dict[str, Any] = {"tolerance": 5e-3}  # torchaudio's float32 recursion errs by 1e-3
QUICK_SIZE = (2, 40, 11, 28)
CPU_SIZES = (
    (1, 200, 101, 1024),
    (4, 200, 101, 1024),
    (8, 200, 101, 1024),
    (8, 200, 101, 28),
    (2, 500, 151, 1024),
)
ODD = (32, 200, 101, 640, 1025)  # (B, T, U1, D, V): rows of 1025 logits are not aligned
GPU_SIZES = tuple((B, T, 101, 1024) for T in (200, 500) for B in (32, 64, 128))
Make = Callable[[str], Case]


def suite(device: str, quick: bool) -> Iterator[Case]:
    """All cases, the smallest also against the reference of plain loops.

    Args:
        device: "cpu" or "cuda", where the arms are those that its memory holds.
        quick: small sizes.
    """
    gpu = device.startswith("cuda")
    for make in _cases(gpu, quick):
        with contextlib.suppress(torch.OutOfMemoryError):  # not even the inputs fit
            case = make(device)
            if gpu:
                case = _that_fits(case)
            if case.arms:
                yield case


def _cases(gpu: bool, quick: bool) -> list[Make]:
    """Makers of all cases; on a GPU `_first_cases` come early."""
    sizes: Sequence[Shape] = GPU_SIZES if gpu else CPU_SIZES
    if quick:
        sizes = [QUICK_SIZE]
    wide = _wide(quick)
    makers: list[Make] = []
    if gpu and not quick:
        makers += _first_cases()
    makers.append(partial(logits_case, rnnt_loss, (1, 12, 6, 9)))
    makers += [partial(logits_case, rnnt_loss, shape) for shape in sizes]
    if gpu:
        for shape in sizes:
            for half in (torch.bfloat16, torch.float16):
                makers.append(partial(logits_case, rnnt_loss, shape, dtype=half))
    makers.append(partial(logits_case, tdt_loss, sizes[0]))
    makers.append(partial(ragged_case, sizes[len(sizes) // 2]))
    makers += [partial(joint_case, wide), partial(joint_case, wide, trained=True)]
    if not quick:
        makers += [partial(joint_case, shape) for shape in _larger(wide, gpu)]
    return makers


def _first_cases() -> list[Make]:
    """Makers of the cases at the shape that is asked for most, on a GPU."""
    on_logits = partial(logits_case, rnnt_loss, ODD[:3] + ODD[4:])
    return [partial(joint_case, ODD), on_logits, partial(on_logits, dtype=torch.bfloat16)]


def _wide(quick: bool) -> Shape:
    """(B, T, U1, D, V) of the smallest case from the halves of the joint."""
    if quick:
        return (2, 20, 6, 12, 16)
    return (4, 200, 101, 640, 1024)


def _larger(wide: Shape, gpu: bool) -> list[Shape]:
    shapes: list[Shape] = [(8, *wide[1:])]
    if gpu:
        shapes += [(B, T, *wide[2:]) for B, T in ((32, 200), (128, 200), (32, 500))]
    return shapes


def _that_fits(case: Case) -> Case:
    """The case with the arms that fit into memory; with none if the first does not."""
    arms = {}
    for name, arm in case.arms.items():
        if fits(partial(case.run, name)):
            arms[name] = arm
    if next(iter(case.arms)) not in arms:
        arms = {}
    pairs = [pair for pair in case.ratios or () if arms.keys() >= {*pair}]
    return replace(case, arms=arms, ratios=pairs)


def fits(train: Callable[[], object]) -> bool:
    """Whether `train` runs without exhausting a GPU's memory."""
    try:
        train()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()  # nothing where CUDA was never used
    return True


def logits_case(
    loss: Callable[..., Tensor], shape: Shape, device: str, dtype: torch.dtype = torch.float32
) -> Case:
    """Forward and backward of a loss on given logits.

    Args:
        loss: rnnt_loss, or tdt_loss with its durations beside the tokens.
        shape: (B, T, U1, V).
        device: of the logits.
        dtype: of the logits.
    """
    name = "rnnt"
    durations: list[int] = []
    if loss is tdt_loss:
        name = "tdt"
        durations = [*DURATIONS]
    drawn, *targets = inputs(shape, len(durations), device)
    logits = drawn.to(dtype).requires_grad_()

    def arm(name: str, leaf: Tensor = logits) -> tuple[Tensor, Tensor]:
        overwrite = name.endswith("_overwrite")
        impl = name.removesuffix("_overwrite")
        cost = loss(leaf, *targets, impl=impl, overwrite_logits=overwrite)
        return cost.detach(), torch.autograd.grad(cost, leaf)[0]

    compiled = compiled_impls(logits, tdt.IMPLS if durations else rnnt.IMPLS)
    overwriting = [f"{impl}_overwrite" for impl in compiled]
    names = ["wavefront"]
    slow = "wavefront"
    if not durations and dtype != torch.bfloat16 and logits.nelement() < OFFSETS:
        slow = "torchaudio"
        names.append(slow)
    names += [*compiled, *overwriting]
    pairs = [(slow, fast) for fast in names if fast != slow]
    if shape[1] < 20:
        names.insert(0, "reference")
    what = f"{name}-loss"
    peers = None
    if device == "cpu":
        request = {"loss": name, "shape": [*shape], "durations": durations}
        peers = PeerArms(request=request, logits=logits)
    return Case(
        what=what,
        arms={name: partial(arm, name) for name in names},
        setups=dict.fromkeys(overwriting, lambda: logits.detach().clone().requires_grad_()),
        arm_params={"torchaudio": PEER},
        params={
            "shape": [*shape],
            "dtype": dtype_name(dtype),
            "floor_B": 3 * logits.nbytes,
            "floor_FLOP": 4 * logits.nelement(),
        },
        ratios=pairs,
        tolerance=ROUNDED[dtype],
        memory=True,
        warmup=_warmup(logits),
        peers=peers,
    )


def compiled_impls(logits: Tensor, impls: Sequence[str]) -> list[str]:
    """Names of the compiled ones among a loss's `impls` that run here, the one for ragged batches
    first.
    """
    candidates = ["numba_cpu"]
    if logits.is_cuda:
        candidates = ["triton", "numba_cuda"]
    names = []
    for name in candidates:
        if name in impls:
            with contextlib.suppress(ValueError):
                expect_runs(name, logits)
                names.append(name)
    return names


def _warmup(logits: Tensor) -> int:
    """Rounds to warm up: comparing has called every arm once, and a large one takes seconds."""
    if logits.nelement() < 1e7:
        return 3
    return 0


def ragged_case(shape: Shape, device: str) -> Case:
    """Lengths from T and U down to half of them: with the padding, and packed without it."""
    B, T, U1, V = shape
    logits, targets, *_ = inputs(shape, device=device)
    frames = torch.linspace(T, T / 2, B, device=device).long()
    labels = torch.linspace(U1 - 1, (U1 - 1) / 2, B, device=device).long()
    valid = valid_mask(frames, T)[:, :, None] & valid_mask(labels + 1, U1)[:, None]  # (B, T, U1)
    packed = logits.detach()[valid].requires_grad_()
    logits.requires_grad_()
    impl: Any = (compiled_impls(logits, rnnt.IMPLS) or ["wavefront"])[0]

    def of_padded() -> tuple[Tensor, Tensor]:
        cost = rnnt_loss(logits, targets, frames, labels, impl=impl)
        return cost.detach(), torch.autograd.grad(cost, logits)[0]

    def of_packed() -> tuple[Tensor, Tensor]:
        cost = rnnt_loss_packed(packed, targets, frames, labels, impl=impl)
        return cost.detach(), torch.autograd.grad(cost, packed)[0]

    def without_padding() -> tuple[Tensor, Tensor]:
        cost, gradient = of_padded()
        return cost, gradient[valid]

    size = packed.nelement()
    return Case(
        what="rnnt-loss-ragged",
        arms={"padded": of_padded, "packed": of_packed},
        compared_arms={"padded": without_padding, "packed": of_packed},
        params={
            "shape": [*shape],
            "lengths": "T, U to T/2, U/2",
            "impl": impl,
            "floor_B": 3 * 4 * size,
            "floor_FLOP": 4 * size,
        },
        ratios=[("padded", "packed")],
        memory=True,
        warmup=_warmup(logits),
    )


def joint_case(shape: Shape, device: str, *, trained: bool = False) -> Case:
    """Forward and backward from the halves of the joint, with tanh, to the gradients of the leaves.

    On a GPU the lean loss in bfloat16 stands beside two joints under autocast: torchaudio_bfloat16,
    whose logits are cast to float32, for torchaudio takes no bfloat16 (its offsets have 32 bits, so
    it has no arm where there are more logits), and joint_triton_bfloat16, whose gradient overwrites
    the logits.

    Args:
        shape: (B, T, U1, D, V).
        device: of the leaves.
        trained: whether one alignment dominates.
    """
    B, T, U1, D, V = shape
    leaves, targets = joint_inputs(shape, device, trained)
    excluded = excluded_arms(shape, trained)
    arms = {name: arm for name, arm in joint_arms(leaves, targets).items() if name not in excluded}
    what = "rnnt-loss-joint"
    lattice = "of random weights"
    tolerance = SUMMED[leaves[0].device.type]
    if trained:
        what = "rnnt-loss-joint-aligned"
        lattice = "built so that one alignment dominates"
        tolerance = PEER["tolerance"]
    warmup = 3
    if T > 100:
        warmup = 0
    return Case(
        what=what,
        arms=arms,
        params={
            "shape": [*shape],
            "activation": "tanh",
            "lattice": lattice,
            "floor_B": 2 * 4 * sum(leaf.nelement() for leaf in leaves),
            "floor_FLOP": 3 * 2 * B * T * U1 * D * V,
        },
        arm_params=_joint_params(shape, trained),
        memory=True,
        tolerance=tolerance,
        warmup=warmup,
        ratios=_joint_pairs(list(arms)),
    )


def _joint_params(shape: Shape, trained: bool) -> dict[str, dict[str, Any]]:
    """Params of each arm: its least work and its tolerance."""
    B, T, U1, D, V = shape
    product = 2 * B * T * U1 * D * V
    twice: dict[str, Any] = {"floor_FLOP": 4 * product}  # the logits are computed again
    # as far off as a whole joint in bfloat16
    half: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.05}
    if trained:
        half["tolerance"] = 0.1
    lean = {
        "lean": twice,
        "lean_triton": twice,
        "lean_bfloat16": twice | half,
        "lean_triton_bfloat16": twice | half,
    }
    others = {
        "torchaudio": PEER,
        "torchaudio_flushed": PEER,
        "torchaudio_bfloat16": half,
        "joint_triton_bfloat16": half,
    }
    return {**others, "split": twice, **lean}


def _joint_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """(slow, fast) pairs of arms: each arm of torchaudio and what is set against it."""
    pairs = []
    for fast in names:
        if fast != "torchaudio":
            pairs.append(("torchaudio", fast))
        if fast.startswith("lean"):
            pairs.append(("torchaudio_flushed", fast))
            if "bfloat16" in fast:
                pairs.append(("torchaudio_bfloat16", fast))
                pairs.append(("joint_triton_bfloat16", fast))
    return [pair for pair in pairs if pair[0] in names]


SUITE = Suite(
    name="losses",
    cases=suite,
    gpu_tests=(
        "tests/losses/test_triton.py",
        "tests/losses/test_lean_triton.py",
        "tests/losses/test_numba_cuda.py",
        "tests/losses/test_packed.py",
    ),
)
