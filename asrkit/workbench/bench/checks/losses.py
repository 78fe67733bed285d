"""The losses on lattices against the loops of their definition in float64: kernels, tiles, packed
lattices and sub-batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.losses import (
    pack_joint,
    rnnt_loss,
    rnnt_loss_lean,
    rnnt_loss_packed,
    split_batches,
    tdt_loss,
    tdt_loss_lean,
)
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.agreement import near
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.suites import losses
from asrkit.workbench.profiling.ops import dtype_name

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Tolerances of gradients, relative to the largest value. The lean losses sum halves in any order.
LEAN_TOLERANCES = {
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 0.15,
}
LOGITS_TOLERANCES = {
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
# Patterns of the lean arms that are measured in a dtype.
LEAN_ARMS = {torch.float32: "^{}(?!.*_bfloat16$)", torch.bfloat16: "^{}.*_bfloat16$"}
ACTIVATIONS = ("none", "relu", "tanh")
DROPOUTS = (0.0, 0.3)
ALIGNED = (3, 5, 3, 20, 9)  # B, T, U, D, V
UNALIGNED = (2, 9, 5, 640, 1025)  # rows that are not aligned, in several blocks
SMALL = (3, 6, 4, 9)  # B, T, U, V


class LogitsCall(NamedTuple):
    """One call of a loss on given logits: their shape (B, T, U, V), and the options."""

    shape: tuple[int, int, int, int]
    options: Mapping[str, Any] = {}
    overwrite: bool = False


class LeanCall(NamedTuple):
    """One call of a lean loss: its options, and the sizes B, T, U, D, V."""

    impl: Any
    activation: Any = "tanh"
    dtype: torch.dtype = torch.float32
    dropout: float = 0.0
    durations: tuple[int, ...] = ()
    sizes: Sequence[int] = ALIGNED


def _ragged(
    shape: Sequence[int], num_durations: int = 0, padding: float = torch.nan
) -> tuple[Tensor, ...]:
    """Logits (B, T, U + 1, V + durations) in float32 whose padding holds `padding`, targets (B, U)
    and ragged lengths (B,), on the CPU.
    """
    B, T, U, V = shape
    U1 = U + 1
    outputs = V + num_durations
    draw = torch.Generator().manual_seed(B * T + U)
    logits = 2 * torch.randn(B, T, U1, outputs, generator=draw)
    targets = torch.randint(0, V - 1, (B, U), generator=draw)
    fewest_frames = max(1, T // 2)
    frames = torch.linspace(T, fewest_frames, B).long()
    labels = torch.linspace(U // 2, U, B).long()
    valid = _valid_nodes(frames, labels, T, U1)
    logits[~valid] = padding
    return logits, targets, frames, labels


def _valid_nodes(frames: Tensor, labels: Tensor, T: int, U1: int) -> Tensor:
    """Which nodes of the padded lattices are no padding, (B, T, U1)."""
    valid_frames = valid_mask(frames, T)
    valid_rows = valid_mask(labels + 1, U1)
    return valid_frames[:, :, None] & valid_rows[:, None]


def _costs_and_gradient(
    loss: Callable[..., Tensor], logits: Tensor, targets: Sequence[Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    """Costs (B,), and the gradient of their weighted sum with respect to the logits."""
    leaf = logits.detach().requires_grad_()
    costs = loss(leaf, *targets, reduction="none", **options)
    weight = torch.linspace(-1, 2, len(costs)).to(costs)
    (gradient,) = torch.autograd.grad(costs, leaf, weight)
    return costs, gradient


def _check_logits_loss(
    device: str, loss: Callable[..., Tensor], impl: str, dtype: torch.dtype, call: LogitsCall
) -> None:
    """Values and gradients of a loss on logits in `dtype`, against the loops in float64 on the same
    logits.
    """
    num_durations = 0
    if loss is tdt_loss:
        num_durations = len(losses.DURATIONS)
    padding = torch.nan
    cost_tolerance = 2e-5
    gradient_tolerance = LOGITS_TOLERANCES[dtype]
    if impl == "torchaudio":
        padding = 0.0
        cost_tolerance = 2e-3
        gradient_tolerance = max(gradient_tolerance, 1e-3)
    drawn, *targets = _ragged(call.shape, num_durations, padding)
    logits = drawn.to(dtype)
    wanted_costs, wanted_gradient = _costs_and_gradient(
        loss, logits.double(), targets, impl="reference", **call.options
    )
    options = dict(call.options)
    if call.overwrite:
        options["overwrite_logits"] = True
    targets = [tensor.to(device) for tensor in targets]
    costs, gradient = _costs_and_gradient(loss, logits.to(device), targets, impl=impl, **options)
    near([costs], [wanted_costs], cost_tolerance)
    near([gradient], [wanted_gradient], gradient_tolerance)


def kernels(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the losses on given logits, and of what lies around them.

    numba_cuda's lattices, which triton's rows take along, have one thread a row or frame: longer
    ones than its blocks are among the shapes.

    Args:
        device: where the losses run.
        cuda: whether that is a GPU.
    """
    fast = "numba_cpu"
    impls = ["numba_cpu", "wavefront"]
    torchaudio_dtypes: Sequence[torch.dtype] = DTYPES[:1]
    if cuda:
        fast = "numba_cuda"
        impls = ["numba_cuda", "triton", "wavefront"]
        torchaudio_dtypes = DTYPES[:2]
    yield from _logits_checks(device, impls, cuda)
    for dtype in torchaudio_dtypes:
        name = f"rnnt_loss torchaudio {dtype_name(dtype)}"
        call = LogitsCall(SMALL)
        check = partial(_check_logits_loss, device, rnnt_loss, "torchaudio", dtype, call)
        yield Check("losses wavefront", name, "^torchaudio", check)
    for impl in impls:
        vouches = ""
        if impl in (fast, "wavefront"):
            vouches = "^rnnt-loss-ragged$"
        name = f"rnnt_loss_packed {impl}"
        packed_check = partial(_check_packed, device, impl)
        yield Check(f"losses {impl}", name, vouches, packed_check)
    for activation, dropout in product(ACTIVATIONS, DROPOUTS):
        name = f"pack_joint {activation} dropout {dropout}"
        joint_check = partial(_check_pack_joint, device, activation, dropout)
        yield Check("losses wavefront", name, "", joint_check)
    split_check = partial(_check_split, device)
    yield Check("losses wavefront", "split_batches", "^split$", split_check)


def _logits_checks(device: str, impls: Sequence[str], cuda: bool) -> Iterator[Check]:
    """Checks of both losses on given logits; the first of `impls` is the default."""
    shapes = [SMALL, (1, 1, 0, 5)]
    if cuda:
        shapes.append((2, 40, 300, 65))
        shapes.append((2, 300, 20, 1030))
    else:
        shapes.append((2, 12, 30, 65))
    calls = [LogitsCall(shape) for shape in shapes]
    calls.append(LogitsCall(SMALL, options={"fastemit_lambda": 0.1, "clamp": 0.05}))
    calls.append(LogitsCall(SMALL, overwrite=True))
    doors: Any = (rnnt_loss, tdt_loss)
    for impl, loss, dtype, call in product(impls, doors, DTYPES, calls):
        default = impl == impls[0]
        name = f"{loss.__name__} {impl} {dtype_name(dtype)} {_times(call.shape)}"
        if call.options:
            name += " options"
        if call.overwrite:
            name += " in place"
        arms = _arms(loss, impl, default, call)
        check = partial(_check_logits_loss, device, loss, impl, dtype, call)
        yield Check(f"losses {impl}", name, arms, check)


def _times(shape: Sequence[int]) -> str:
    """A shape as text, such as "3×6×4×9"."""
    return "×".join(map(str, shape))


def _arms(loss: Callable[..., Tensor], impl: str, default: bool, call: LogitsCall) -> str:
    """The arms and cases that a check of a loss on given logits vouches for; the benchmark has no
    options on.
    """
    if call.options or (call.overwrite and impl == "wavefront"):
        return ""
    if loss is tdt_loss:
        return "^tdt-loss$"  # arms of RNN-T have the same names
    if call.overwrite:
        return f"^{impl}_overwrite"
    if default:
        return f"^{impl}|^rnnt-loss-ragged$"
    return f"^{impl}"


def _check_packed(device: str, impl: str) -> None:
    """The packed loss in float32, against the loops on the padded lattice in float64."""
    logits, *targets = _ragged(SMALL)
    _, frames, labels = targets
    _, T, U1, _ = logits.shape
    valid = _valid_nodes(frames, labels, T, U1)
    wide = logits.double()
    costs, gradient = _costs_and_gradient(rnnt_loss, wide, targets, impl="reference")
    wanted = (costs, gradient[valid])
    packed = logits[valid].to(device)
    targets = [tensor.to(device) for tensor in targets]
    got = _costs_and_gradient(rnnt_loss_packed, packed, targets, impl=impl)
    near(got, wanted, 2e-5)


def _check_pack_joint(device: str, activation: Any, dropout: float) -> None:
    """Of halves in float32 on the device, against float64 on the CPU: the mask is a hash, and so
    the same.
    """
    draw = torch.Generator().manual_seed(0)
    encoded = torch.randn(2, 5, 16, generator=draw)
    predicted = torch.randn(2, 4, 16, generator=draw)
    lengths = [torch.tensor([5, 3]), torch.tensor([1, 3])]
    pack = partial(pack_joint, activation=activation, dropout=dropout, seed=3)

    def joint_and_gradients(where: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [half.to(where, dtype).requires_grad_() for half in (encoded, predicted)]
        sizes = [length.to(where) for length in lengths]
        joint = pack(*leaves, *sizes)
        cost = joint.square().sum()
        return [joint, *torch.autograd.grad(cost, leaves)]

    wanted = joint_and_gradients("cpu", torch.float64)
    got = joint_and_gradients(device, torch.float32)
    near(got, wanted)


def _build_joint(encoded: Tensor, predicted: Tensor, *, weight: Tensor, bias: Tensor) -> Tensor:
    """Logits (B, T, U + 1, V) from the halves of a joint with tanh."""
    summed = encoded[:, :, None] + predicted[:, None]
    hidden = torch.tanh(summed)
    return torch.nn.functional.linear(hidden, weight, bias)


def _check_split(device: str) -> None:
    """Sub-batches of two, from the halves of a joint, against the whole batch in float64."""
    leaves, targets = losses.joint_inputs((5, 8, 4, 12, 9), device)

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    encoded, predicted, weight, bias = wide
    logits = _build_joint(encoded, predicted, weight=weight, bias=bias)
    labels, frames, counts = targets
    cost = rnnt_loss(logits, labels, frames, counts, impl="wavefront")
    wanted = [cost, *torch.autograd.grad(cost, wide)]

    encoded, predicted, weight, bias = leaves
    build = partial(_build_joint, weight=weight, bias=bias)
    cost = split_batches(
        build,
        encoded,
        predicted,
        *targets,
        size=2,
        overwrite_logits=True,
    )
    got = [cost, *torch.autograd.grad(cost, leaves)]
    near(got, wanted)


def tiles(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the losses that never make the joint.

    Args:
        device: where the losses run.
        cuda: whether that is a GPU.
    """
    default = "numba_cpu"  # of arms that name no implementation
    compiled = "numba_cpu"
    if cuda:
        default = "plain"
        compiled = "triton"
    for impl in ("plain", compiled):
        arms = "lean_triton"
        skipping_arms = ""
        if impl == default:
            arms = "lean(?!_triton)"
            skipping_arms = "^lean_skip"
        measured = impl in (default, "triton")
        yield from _lean_checks(device, impl, arms, measured)
        name = f"lean {impl} skips"
        skipping_check = partial(_check_skips, device, impl)
        yield Check(f"lean {impl}", name, skipping_arms, skipping_check)


def _lean_checks(device: str, impl: str, arms: str, measured: bool) -> Iterator[Check]:
    """Checks of one lean implementation, which vouch for `arms` if the benchmark measures it."""
    grid = product(("relu", "tanh"), DTYPES, DROPOUTS, ((), (0, 2)))
    group = f"lean {impl}"
    for activation, dtype, dropout, durations in grid:
        call = LeanCall(impl, activation, dtype, dropout, durations)
        words = [
            group,
            activation,
            dtype_name(dtype),
            f"dropout {dropout}",
            f"durations {list(durations)}",
        ]
        vouches = ""
        if measured and call == LeanCall(impl, dtype=dtype):
            pattern = LEAN_ARMS.get(dtype, "")
            vouches = pattern.format(arms)
        check = partial(_check_lean, device, call)
        yield Check(group, " ".join(words), vouches, check)
    if impl != "triton":
        return
    for dtype, pattern in LEAN_ARMS.items():
        call = LeanCall(impl, dtype=dtype, sizes=UNALIGNED)
        name = f"{group} {dtype_name(dtype)} {_times(UNALIGNED)}"
        vouches = pattern.format(arms)
        check = partial(_check_lean, device, call)
        yield Check(group, name, vouches, check)


def _check_lean(device: str, call: LeanCall) -> None:
    """Loss and four gradients against the plain tiles in float64 on the CPU, of the same rounded
    numbers.
    """
    draw = torch.Generator().manual_seed(0)
    B, T, U, D, V = call.sizes
    outputs = V + len(call.durations)
    shapes = (
        (B, T, D),
        (B, U + 1, D),
        (outputs, D),
        (outputs,),
    )
    inputs = []
    for shape in shapes:
        values = torch.randn(*shape, generator=draw)
        inputs.append(values.to(call.dtype))
    # keeps the logits in the order of a few units, however many numbers each is the sum of
    weight_scale = min(1.0, 4 / D**0.5)
    inputs[2] = (inputs[2] * weight_scale).to(call.dtype)
    targets = [
        torch.randint(0, V - 1, (B, U), generator=draw),
        torch.tensor([T, 2, 1][:B]),
        torch.tensor([U - 1, U, 0][:B]),
    ]
    wide = [tensor.double() for tensor in inputs]
    plain_call = call._replace(impl="plain")
    wanted = _lean_costs_and_gradients(plain_call, wide, targets)
    moved = [tensor.to(device) for tensor in inputs]
    targets = [tensor.to(device) for tensor in targets]
    got = _lean_costs_and_gradients(call, moved, targets)
    near(got, wanted, LEAN_TOLERANCES[call.dtype])


def _lean_costs_and_gradients(
    call: LeanCall, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[Tensor]:
    """Costs (B,) of a lean loss, and the four gradients of their weighted sum."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    options: dict[str, Any] = {
        "activation": call.activation,
        "dropout": call.dropout,
        "seed": 3,
        "tile": 8,
        "reduction": "none",
        "impl": call.impl,
    }
    if call.durations:
        costs = tdt_loss_lean(*leaves, *targets, durations=call.durations, **options)
    else:
        costs = rnnt_loss_lean(*leaves, *targets, **options)
    weight = torch.tensor([1.0, -2, 3][: len(costs)]).to(costs)
    weight[~costs.isfinite()] = 0  # no alignment, so no gradient
    return [costs, *torch.autograd.grad(costs, leaves, weight)]


def _check_skips(device: str, impl: Any) -> None:
    """With skipping on, on a lattice in which one alignment dominates: no worse than what is
    skipped allows.
    """
    leaves, targets = losses.joint_inputs((2, 60, 21, 64, 32), device, trained=True)
    loss = partial(rnnt_loss_lean, *leaves, *targets, activation="tanh")
    cost = loss(impl="plain", skip=0.0)
    wanted = [cost, *torch.autograd.grad(cost, leaves)]
    cost = loss(impl=impl, skip=losses.SKIP)
    got = [cost, *torch.autograd.grad(cost, leaves)]
    near(got, wanted, 1e-4)
