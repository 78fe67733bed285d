"""The losses suite: transducer losses on logits, and from the two halves of the joint.

The halves are encoded (B, T, D) and predicted (B, U1, D). A layer with weight (V, D) and bias (V,)
makes logits of their sum.

Every row has its least work. On logits: two reads of the logits and one write of their gradient;
per logit an exponential and an addition in the first pass, an exponential and a product in the
second. From the halves: one read of the halves and weights, one write of their gradients; three
matrix products of 2 N D V operations if the logits are stored, four if they are computed twice.

The last case measures the peak memory of joint and loss over a grid of sizes and dtypes, which
document 003 shows in a figure. Each record also has the counted bytes.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.losses import rnnt_loss, rnnt_loss_lean, tdt_loss
from asrkit.losses.arguments import KERNEL_DEVICES, expect_runs, fastest
from asrkit.memory import peak_memory
from asrkit.workbench import cost
from asrkit.workbench.measure.comparison import Arms
from asrkit.workbench.measure.ops import dtype_name
from asrkit.workbench.records import Measurement
from benchmarks.harness.cases import Case, PeerArms, Suite
from benchmarks.peers.peer_losses import inputs

Shape = tuple[int, ...]
DURATIONS = (0, 1, 2, 3, 4)
# relative distance of gradients, due to rounding
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}
TORCHAUDIO: dict[str, Any] = {"tolerance": 5e-3}  # the error of its float32 recursion is 1e-3
# error of a whole joint in bfloat16
HALF: dict[str, Any] = {"dtype": "bfloat16", "tolerance": 0.05}
MAX_LOGITS = 2**31  # limit of torchaudio's 32-bit offsets
# (B, T, U1, V) of logits, and (B, T, U1, D, V) of halves of a joint; the first GPU sizes are the
# most important ones, with rows of 1025 logits, which are not aligned
TINY = (1, 12, 6, 9)
PEERS = (1, 100, 51, 256)  # the largest lattice that no peer needs minutes for
LARGE = (4, 200, 101, 1024)  # for the fastest peers: the README's size
QUICK_SIZES: Sequence[Shape] = ((2, 40, 11, 28),)
CPU_SIZES: Sequence[Shape] = (PEERS, (1, 200, 101, 1024), LARGE, (8, 200, 101, 28))
GPU_SIZES: Sequence[Shape] = ((32, 200, 101, 1025), (32, 500, 101, 1024), (128, 500, 101, 1024))
QUICK_JOINTS: Sequence[Shape] = ((2, 20, 6, 12, 16),)
CPU_JOINTS: Sequence[Shape] = ((4, 200, 101, 640, 1024), (8, 200, 101, 640, 1024))
GPU_JOINTS: Sequence[Shape] = ((32, 200, 101, 640, 1025),)
# document 003's figure: characters or subwords (V), labels, batch size; T and D do not vary
GRID_V = (28, 1024)
GRID_U = (100, 200)
GRID_B = (1, 2, 4, 8, 16, 32, 64)  # a CPU stops at 8


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield all cases; the smallest also has the reference in plain loops. Sizes that do not fit
    into a GPU's memory are left out.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes.
    """
    gpu = device == "cuda"
    sizes = GPU_SIZES if gpu else CPU_SIZES
    joints = GPU_JOINTS if gpu else CPU_JOINTS
    if quick:
        sizes = QUICK_SIZES
        joints = QUICK_JOINTS
    first, *others = sizes
    joint, *larger = joints
    makers: list[Callable[[str], Case]] = [
        partial(joint_case, joint),
        partial(logits_case, rnnt_loss, first),
        partial(logits_case, tdt_loss, first),
        *(partial(logits_case, rnnt_loss, shape) for shape in (TINY, *others)),
        *(partial(joint_case, shape) for shape in larger),
    ]
    if gpu:
        for dtype in (torch.float16, torch.bfloat16):
            makers.insert(2, partial(logits_case, rnnt_loss, first, dtype=dtype))
    for make in makers:
        with contextlib.suppress(torch.OutOfMemoryError):
            yield make(device)
    yield Case(what="joint-memory", measure=partial(joint_memory, device, quick))


def logits_case(
    loss: Callable[..., Tensor], shape: Shape, device: str, dtype: torch.dtype = torch.float32
) -> Case:
    """Forward and backward of a loss on given logits.

    Args:
        loss: rnnt_loss, or tdt_loss, whose logits include DURATIONS.
        shape: (B, T, U1, V).
        device: device of the logits.
        dtype: dtype of the logits.
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

    compiled = compiled_impls(logits, loss)
    overwriting = [f"{impl}_overwrite" for impl in compiled]
    names = ["wavefront"]
    if name == "rnnt" and dtype == torch.float32 and logits.nelement() < MAX_LOGITS:
        names.append("torchaudio")
    slow = names[-1]
    names += [*compiled, *overwriting]
    pairs = [(slow, fast) for fast in names if fast != slow]
    if shape == TINY:
        names.insert(0, "reference")
    peers = None
    if device == "cpu" and shape in (TINY, PEERS, LARGE, *QUICK_SIZES):
        kind = f"{name}-large" if shape == LARGE else name
        request = {"kind": kind, "shape": [*shape], "durations": durations, "memory": True}
        peers = PeerArms(request=request, logits=logits)
    return Case(
        what=f"{name}-loss",
        arms={name: partial(arm, name) for name in names},
        setups=dict.fromkeys(overwriting, lambda: logits.detach().clone().requires_grad_()),
        arm_params={"torchaudio": TORCHAUDIO},
        params={
            "shape": [*shape],
            "dtype": dtype_name(dtype),
            "floor_B": 3 * logits.nbytes,
            "floor_FLOP": 4 * logits.nelement(),
        },
        ratios=pairs,
        tolerance=TOLERANCES[dtype],
        memory=True,
        warmup=_warmup(logits.nelement()),
        peers=peers,
    )


def compiled_impls(logits: Tensor, loss: Callable[..., Tensor] = rnnt_loss) -> list[str]:
    """The compiled implementations of the loss that support these logits."""
    names = []
    for name in KERNEL_DEVICES:
        with contextlib.suppress(ValueError):
            expect_runs(name, logits)
            names.append(name)
    if loss is tdt_loss:
        return [name for name in names if name != "numba_cuda"]
    return names


def _warmup(logits: int) -> int:
    """Rounds to warm up: none for a large case, since the comparison has called every arm once."""
    return 3 if logits < 1e7 else 0


def joint_case(shape: Shape, device: str) -> Case:
    """Forward and backward from the halves of a joint with tanh to the gradients of the leaves.

    Args:
        shape: (B, T, U1, D, V).
        device: device of the leaves.
    """
    B, T, U1, D, V = shape
    leaves, targets = joint_inputs(shape, device)
    gpu = leaves[0].is_cuda
    arms = joint_arms(leaves, targets, gpu)
    product_FLOP = 2 * B * T * U1 * D * V
    params: dict[str, dict[str, Any]] = {}
    for name in arms:
        params[name] = TORCHAUDIO if name.startswith("torchaudio") else {}
        if name.endswith("bfloat16"):
            params[name] = HALF
        if name.startswith("lean"):  # it computes the logits twice
            params[name] = params[name] | {"floor_FLOP": 4 * product_FLOP}
    lean = [name for name in arms if name.startswith("lean")]
    whole = [name for name in arms if name not in lean]
    pairs = [("torchaudio", name) for name in whole if name != "torchaudio"]
    pairs += product([name for name in whole if name != "overwrite"], lean)
    return Case(
        what="rnnt-loss-joint",
        arms=arms,
        params={
            "shape": [*shape],
            "activation": "tanh",
            "lattice": "of random weights",
            "floor_B": 2 * 4 * sum(leaf.nelement() for leaf in leaves),
            "floor_FLOP": 3 * product_FLOP,
        },
        arm_params=params,
        memory=True,
        tolerance=1e-4 if gpu else 1e-5,  # a GPU thread adds the nodes one by one
        warmup=_warmup(B * T * U1 * V),
        ratios=pairs,
    )


def joint_inputs(shape: Shape, device: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Leaves and targets of a joint, seeded with 0.

    Args:
        shape: (B, T, U1, D, V).
        device: device of the tensors.

    Returns:
        (encoded, predicted, weight, bias), which require gradients, and (targets, frames, labels)
        with full lengths.
    """
    B, T, U1, D, V = shape
    draw = torch.Generator().manual_seed(0)
    targets = torch.randint(0, V - 1, (B, U1 - 1), generator=draw)
    halves = (
        torch.randn(B, T, D, generator=draw),
        torch.randn(B, U1, D, generator=draw),
        torch.randn(V, D, generator=draw) / D**0.5,
        torch.zeros(V),
    )
    leaves = [leaf.to(device).requires_grad_() for leaf in halves]
    lengths = (torch.full((B,), T), torch.full((B,), U1 - 1))
    return tuple(leaves), tuple(tensor.to(device) for tensor in (targets, *lengths))


def joint_arms(leaves: tuple[Tensor, ...], targets: Any, gpu: bool) -> Arms:
    """Arms by name, from a joint's halves to the loss and the gradients of the leaves.

    On a GPU the lean loss in bfloat16 is compared with two joints under autocast:
    torchaudio_bfloat16, whose logits are cast to float32, since torchaudio supports no bfloat16,
    and joint_triton_bfloat16, whose gradient overwrites the logits.

    Args:
        leaves: encoded, predicted, weight and bias.
        targets: targets and both lengths.
        gpu: whether to return the arms for a GPU.
    """
    encoded, predicted, weight, bias = leaves

    def logits() -> Tensor:
        hidden = torch.tanh(encoded[:, :, None] + predicted[:, None])
        return F.linear(hidden, weight, bias)

    def overwrite(impl: Any = "auto") -> Tensor:
        return rnnt_loss(logits(), *targets, impl=impl, overwrite_logits=True)

    def torchaudio() -> Tensor:
        return rnnt_loss(logits().float(), *targets, impl="torchaudio")

    def gradients(loss: Callable[[], Tensor], half: bool = False) -> tuple[Tensor, ...]:
        """The loss and the gradients of all leaves; with `half` under autocast to bfloat16."""
        with torch.autocast(encoded.device.type, torch.bfloat16, enabled=half):
            cost = loss()
        return cost.detach(), *torch.autograd.grad(cost, leaves)

    def flushed() -> tuple[Tensor, ...]:
        """torchaudio with denormal numbers flushed to 0: its gradient has some, and products with
        them are slow.
        """
        torch.set_flush_denormal(True)
        try:
            return gradients(torchaudio)
        finally:
            torch.set_flush_denormal(False)

    lean = partial(rnnt_loss_lean, *leaves, *targets, activation="tanh")
    arms: dict[str, Callable[[], Any]] = {
        "overwrite": partial(gradients, overwrite),
        "torchaudio": partial(gradients, torchaudio),
    }
    if gpu:
        in_place = partial(overwrite, "triton")
        arms["torchaudio_bfloat16"] = partial(gradients, torchaudio, half=True)
        arms["joint_triton_bfloat16"] = partial(gradients, in_place, half=True)
        arms["lean_triton"] = partial(gradients, lean)
        arms["lean_triton_bfloat16"] = partial(gradients, lean, half=True)
    else:
        arms["torchaudio_flushed"] = flushed
        arms["lean"] = partial(gradients, lean)
        arms["lean_bfloat16"] = partial(gradients, lean, half=True)
    return arms


def joint_memory(device: str, quick: bool) -> Iterator[Measurement]:
    """Yield the measured peak of joint and loss in bytes, with the counted one, for each size.

    A CPU measures bfloat16 as half precision, since products in float16 can take minutes there.
    """
    gpu = device == "cuda"
    half = torch.float16 if gpu else torch.bfloat16
    T = 20 if quick else 200
    batches = GRID_B[: 1 if quick else 7 if gpu else 4]
    for V, U, dtype, B in product(GRID_V, GRID_U, (torch.float32, half), batches):
        size = {"B": B, "T": T, "U1": U + 1, "V": V, "D": 640}
        leaves, targets = joint_inputs((B, T, U + 1, 640, V), device)
        inputs = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        with contextlib.suppress(torch.OutOfMemoryError):
            step = partial(joint_gradients, inputs, targets)
            peak_B = peak_memory(step, device=device)
            # a CPU keeps the memory of a large gradient for the next one
            kept = not (gpu or quick) and V == 1024
            counted = cost.joint_bytes("numba", **size, itemsize=dtype.itemsize, kept=kept)
            params = {**size, "dtype": dtype_name(dtype), "device": device}
            params["counted"] = counted.total
            impl = fastest(inputs[0])
            yield Measurement("joint-memory", "peak", "B", peak_B, params=params, impl=impl)


def joint_gradients(leaves: Sequence[Tensor], targets: Any) -> object:
    """Gradients of the loss by the halves, the weight and the bias of a joint with ReLU."""
    encoded, predicted, weight, bias = leaves
    hidden = (encoded[:, :, None] + predicted[:, None]).relu()
    loss = rnnt_loss(F.linear(hidden, weight, bias), *targets)
    return torch.autograd.grad(loss, leaves)


SUITE = Suite(
    name="losses",
    cases=suite,
    gpu_tests=(
        "tests/losses/test_triton.py",
        "tests/losses/test_lean_triton.py",
        "tests/losses/test_numba_cuda.py",
        "tests/losses/test_packed.py",
    ),
    share=4,
)
