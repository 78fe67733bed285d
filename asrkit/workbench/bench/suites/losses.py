"""The suite of the transducer losses: on given logits, padded and packed, and from the two halves
of the joint.

Least work, in every row. On given logits: read them twice, write their gradient; an exponential and
an addition for each in the first pass, an exponential and a product in the second. From the halves:
read these and the weights, write their gradients; three matrix products of 2 N D V where the logits
are kept, four where they are made twice.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.losses import rnnt_loss, rnnt_loss_packed, tdt_loss
from asrkit.losses.availability import expect_runs
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.cases import Case, PeerArms, Suite, no_measurements
from asrkit.workbench.bench.peers.peer_worker import inputs
from asrkit.workbench.bench.row_kernels import counts
from asrkit.workbench.bench.suites.joint_arms import (
    OFFSETS,
    SKIP,
    SMALL_TILE,
    Shape,
    active_share,
    excluded_arms,
    joint_arms,
    joint_inputs,
    small_tile_nodes,
)
from asrkit.workbench.cost import card_called, lean_ms
from asrkit.workbench.profiling.ops import dtype_name
from asrkit.workbench.records import Measurement

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
GPU_SIZES = tuple((B, T, 101, 1024) for T in (200, 500) for B in (32, 64, 128))
MOST_B = 2**12  # utterances of the largest batch that is tried
Make = Callable[[str], Case]


def suite(
    device: str,
    quick: bool,
    *,
    first: bool = False,
) -> Iterator[Case]:
    """All cases, the smallest also against the reference of plain loops.

    Args:
        device: "cpu" or "cuda", where the arms are those that its memory holds.
        quick: small sizes.
        first: one large shape only, on given logits and from the halves of the joint, and nothing
            is counted of kernels.
    """
    gpu = device.startswith("cuda")
    makers = _first_cases(gpu, quick) if first else _cases(gpu, quick)
    for make in makers:
        with contextlib.suppress(torch.OutOfMemoryError):  # not even the inputs fit
            case = make(device)
            if gpu:
                case = _that_fits(case)
                if first:
                    case = replace(case, more=no_measurements)
            if case.arms:
                yield case
    if gpu and not first:
        yield Case(what="rnnt-loss-joint, largest", measure=partial(limits, device))


def _cases(gpu: bool, quick: bool) -> list[Make]:
    """Makers of all cases; rows of 1025 logits, which are not aligned as 1024 are, come early."""
    sizes: Sequence[Shape] = GPU_SIZES if gpu else CPU_SIZES
    if quick:
        sizes = [QUICK_SIZE]
    wide = _wide(quick)
    makers: list[Make] = [partial(logits_case, rnnt_loss, (1, 12, 6, 9))]
    if gpu and not quick:
        odd = partial(logits_case, rnnt_loss, (32, 200, 101, 1025))
        makers += [odd, partial(odd, dtype=torch.bfloat16)]
        makers.append(partial(joint_case, (32, 200, 101, 640, 1025)))
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


def _first_cases(gpu: bool, quick: bool) -> list[Make]:
    """Makers of the cases at one large shape."""
    shape = _wide(quick)
    if gpu and not quick:
        shape = _larger(shape, gpu)[1]
    on_logits = partial(logits_case, rnnt_loss, shape[:3] + shape[4:])
    makers: list[Make] = [partial(joint_case, shape), on_logits]
    if gpu:
        makers.append(partial(on_logits, dtype=torch.bfloat16))
    return makers


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

    compiled = compiled_impls(logits)
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
    counting: Callable[[], Iterable[Measurement]] = no_measurements
    if logits.is_cuda:
        counting = partial(counted, what, compiled, logits, len(durations))
    peers = None
    if device == "cpu":
        request = {"loss": name, "shape": [*shape], "durations": durations}
        peers = PeerArms(request=request, logits=logits)
    return Case(
        what=what,
        arms={name: partial(arm, name) for name in names},
        setups=dict.fromkeys(overwriting, lambda: logits.detach().clone().requires_grad_()),
        arm_params={"torchaudio": PEER},
        more=counting,
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


def counted(what: str, impls: Sequence[str], logits: Tensor, n: int) -> Iterator[Measurement]:
    """Instructions and bytes a logit of the row kernels, read from their binaries.

    It comes after the times, for compiling takes seconds. Kernels that cannot be read are named on
    standard error.

    Args:
        what: of the measurements.
        impls: implementations to count.
        logits: the logits (B, T, U1, V + n), on a GPU.
        n: number of durations.
    """
    params = {"shape": [*logits.shape], "dtype": dtype_name(logits.dtype), "device": "cuda"}
    for impl in impls:
        kernels = counts(impl, logits, n)["sass"]
        if isinstance(kernels, str):
            print(f"{what}: kernels of {impl}: {kernels}", file=sys.stderr)
            continue
        for kernel, numbers in kernels.items():
            shared: dict[str, Any] = {
                "impl": impl,
                "params": {**params, "kernel": kernel},
                "timer": "none",
            }
            instructions = numbers["instructions_a_logit"]
            yield Measurement(what, "instructions_a_logit", "1", instructions, **shared)
            yield Measurement(what, "bytes_a_logit", "B", numbers["bytes_a_logit"], **shared)


def compiled_impls(logits: Tensor) -> list[str]:
    """Names of the compiled implementations that run here, the one for ragged batches first."""
    candidates = ["numba_cpu"]
    if logits.is_cuda:
        candidates = ["numba_cuda", "triton"]
    names = []
    for name in candidates:
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
    impl: Any = (compiled_impls(logits) or ["wavefront"])[0]

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

    What the lean loss in bfloat16 is to be set against on a GPU is torchaudio_bfloat16: a joint
    under autocast whose logits are cast to float32, for torchaudio takes no bfloat16. Its offsets
    have 32 bits, so it has no arm where there are more logits.

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
        arm_params=_joint_params(shape, device, trained, active_share(leaves, targets)),
        memory=True,
        tolerance=tolerance,
        warmup=warmup,
        ratios=_joint_pairs(list(arms)),
    )


def _joint_params(
    shape: Shape, device: str, trained: bool, active: float
) -> dict[str, dict[str, Any]]:
    """Params of each arm: its least work, tolerance, and the time that is predicted for it."""
    B, T, U1, D, V = shape
    product = 2 * B * T * U1 * D * V
    twice: dict[str, Any] = {"floor_FLOP": 4 * product}  # the logits are computed again
    # as far off as a whole joint in bfloat16
    half: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.05}
    if trained:
        half["tolerance"] = 0.1
    skipping = {"skip": SKIP, "active": active, "floor_FLOP": round((1 + 3 * active) * product)}
    lean = {
        "lean_skip": skipping,
        "lean": twice,
        "lean_triton": twice | predicted(device, shape, 4),
        "lean_bfloat16": twice | half,
        "lean_skip_bfloat16": skipping | half,
        "lean_triton_bfloat16": twice | half | predicted(device, shape, 2),
        SMALL_TILE: twice | half | {"tile": small_tile_nodes(D, V)},
    }
    others = {"torchaudio": PEER, "torchaudio_flushed": PEER, "torchaudio_bfloat16": half}
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
    return [pair for pair in pairs if pair[0] in names]


def predicted(device: str, shape: Shape, itemsize: int) -> dict[str, float]:
    """`predicted_ms` of the lean loss in Triton, by asrkit.workbench.cost.lean.

    Args:
        device: where it runs; a device that the formulas do not know gives nothing.
        shape: (B, T, U1, D, V).
        itemsize: bytes of a hidden value.
    """
    if not device.startswith("cuda"):
        return {}
    card = card_called(torch.cuda.get_device_name(device))
    if not card:
        return {}
    sizes = dict(zip(("B", "T", "U1", "D", "V"), shape, strict=True))
    return {"predicted_ms": round(sum(lean_ms(card, itemsize=itemsize, **sizes).values()), 3)}


def limits(device: str) -> Iterator[Measurement]:
    """For each arm from the halves: nodes B T U1 of the largest batch that trains, T = 200.

    Not yet run on hardware.
    """
    _, T, U1, D, V = _wide(quick=False)
    for name in joint_arms(*joint_inputs((1, 2, 2, 2, 2), device)):

        def train(B: int, name: str = name) -> None:
            joint_arms(*joint_inputs((B, T, U1, D, V), device))[name]()

        most = MOST_B
        if name.startswith("torchaudio"):
            most = 100  # utterances of this size are as many as its offsets reach
        B = largest(train, most=most)
        yield Measurement(
            "rnnt-loss-joint",
            "largest_lattice",
            "nodes",
            B * T * U1,
            impl=name,
            params={"shape": [B, T, U1, D, V], "device": device},
            timer="none",
        )


def largest(train: Callable[[int], object], most: int = MOST_B) -> int:
    """Largest batch up to `most` for which train(B) fits in memory, to one part in sixteen; 0 if
    none does.
    """
    low = 0
    high = 1
    while high <= most and fits(partial(train, high)):
        low = high
        high *= 2
    while high <= most and high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(partial(train, middle)):
            low = middle
        else:
            high = middle
    return low


SUITE = Suite(
    name="losses",
    cases=suite,
    gpu_tests=(
        "tests/losses/test_rows_triton.py",
        "tests/losses/test_lean_triton.py",
        "tests/losses/test_numba_cuda.py",
        "tests/losses/test_packed.py",
    ),
)
