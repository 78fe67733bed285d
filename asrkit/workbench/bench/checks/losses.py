"""The losses on lattices against the loops of their definition in float64: kernels, tiles, packed
lattices and sub-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

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
from asrkit.workbench.bench.cases import dtype_name
from asrkit.workbench.bench.checks.check import Check
from asrkit.workbench.bench.compare import near
from asrkit.workbench.bench.suites import losses

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LEAN = {
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 0.15,
}  # of a gradient's largest value; halves sum in any order
LEAN_ARMS = {
    torch.float32: "^{}(?!.*_bfloat16$)",
    torch.bfloat16: "^{}.*_bfloat16$",
}  # that are measured in a dtype
ROUNDED = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def _ragged(shape: Sequence[int], n: int = 0, padding: float = torch.nan) -> tuple[Tensor, ...]:
    """Logits (B, T, U1, V + n) in float32, targets (B, U) and ragged lengths (B,), on the CPU;
    padding holds what it is told to.
    """
    B, T, U, V = shape
    draw = torch.Generator().manual_seed(B * T + U)
    logits = 2 * torch.randn(B, T, U + 1, V + n, generator=draw)
    targets = torch.randint(0, V - 1, (B, U), generator=draw)
    frames, labels = (
        torch.linspace(T, max(1, T // 2), B).long(),
        torch.linspace(U // 2, U, B).long(),
    )
    for b in range(B):
        logits[b, frames[b] :] = logits[b, :, labels[b] + 1 :] = padding
    return logits, targets, frames, labels


def _graded(
    loss: Callable[..., Tensor], logits: Tensor, rest: Sequence[Tensor], **how: Any
) -> tuple[Tensor, Tensor]:
    leaf = logits.detach().requires_grad_()
    costs = loss(leaf, *rest, reduction="none", **how)
    weight = torch.linspace(-1, 2, len(costs), dtype=costs.dtype, device=costs.device)
    return costs, torch.autograd.grad(costs, leaf, weight)[0]


def _loss(
    device: str,
    loss: Callable[..., Tensor],
    impl: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    how: dict,
    overwrite: bool,
) -> None:
    """Values and gradients of a loss on logits in `dtype`, against the loops in float64 on the same
    logits.
    """
    n = len(losses.DURATIONS) * (loss is tdt_loss)
    logits, *rest = _ragged(shape, n, 0.0 if impl == "torchaudio" else torch.nan)
    given = logits.to(dtype)
    wanted = _graded(loss, given.double(), rest, impl="reference", **how)
    more = {"overwrite_logits": True} if overwrite else {}
    found = _graded(
        loss, given.to(device), [one.to(device) for one in rest], impl=impl, **how, **more
    )
    near(found[:1], wanted[:1], 2e-3 if impl == "torchaudio" else 2e-5)
    near(found[1:], wanted[1:], max(ROUNDED[dtype], 1e-3 * (impl == "torchaudio")))


def kernels(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the losses on given logits, and of what lies around them.

    numba_cuda's lattices, which triton's rows take along, have one thread a row or frame: longer
    ones than its blocks are among the shapes.
    """
    fast = "numba_cuda" if cuda else "numba_cpu"
    options: dict[str, Any] = {"fastemit_lambda": 0.1, "clamp": 0.05}
    shapes = [
        (3, 6, 4, 9),
        (1, 1, 0, 5),
        *([(2, 40, 300, 65), (2, 300, 20, 1030)] if cuda else [(2, 12, 30, 65)]),
    ]
    doors: Any = rnnt_loss, tdt_loss
    for impl, loss, dtype in product((fast, *["triton"] * cuda, "wavefront"), doors, DTYPES):
        calls: list[tuple] = [(shape, {}, False) for shape in shapes] + [
            (shapes[0], options, False),
            (shapes[0], {}, True),
        ]
        for shape, how, overwrite in calls:
            name = f"{loss.__name__} {impl} {dtype_name(dtype)} {'×'.join(map(str, shape))}"
            name += " options" * bool(how) + " in place" * overwrite
            arms = _arms(loss, impl, impl == fast, bool(how), overwrite)
            yield Check(
                f"losses {impl}",
                name,
                arms,
                partial(_loss, device, loss, impl, dtype, shape, how, overwrite),
            )
    for dtype in DTYPES[:2] if cuda else DTYPES[:1]:
        call = partial(_loss, device, rnnt_loss, "torchaudio", dtype, shapes[0], {}, False)
        yield Check(
            "losses wavefront", f"rnnt_loss torchaudio {dtype_name(dtype)}", "^torchaudio", call
        )
    for impl in (fast, *["triton"] * cuda, "wavefront"):
        vouches = "" if impl == "triton" else "^rnnt-loss-ragged$"
        yield Check(
            f"losses {impl}", f"rnnt_loss_packed {impl}", vouches, partial(_packed, device, impl)
        )
    for activation, rate in product(("none", "relu", "tanh"), (0.0, 0.3)):
        call = partial(_pack_joint, device, activation, rate)
        yield Check("losses wavefront", f"pack_joint {activation} dropout {rate}", "", call)
    yield Check("losses wavefront", "split_batches", "^split$", partial(_split, device))


def _arms(
    loss: Callable[..., Tensor], impl: str, fast: bool, options: bool, overwrite: bool
) -> str:
    """The arms and cases that a check of a loss on given logits vouches for; the benchmark has no
    options on.
    """
    if options or (overwrite and impl == "wavefront"):
        return ""
    if loss is tdt_loss:
        return "^tdt-loss$"  # arms of RNN-T have the same names
    if overwrite:
        return f"^{impl}_overwrite"
    return f"^{impl}|^rnnt-loss-ragged$" if fast else f"^{impl}"


def _packed(device: str, impl: str) -> None:
    logits, targets, frames, labels = _ragged((3, 6, 4, 9))
    valid = valid_mask(frames, 6)[:, :, None] & valid_mask(labels + 1, 5)[:, None]
    cost, gradient = _graded(
        rnnt_loss, logits.double(), (targets, frames, labels), impl="reference"
    )
    rest = [one.to(device) for one in (targets, frames, labels)]
    near(
        _graded(rnnt_loss_packed, logits[valid].to(device), rest, impl=impl),
        (cost, gradient[valid]),
        2e-5,
    )


def _pack_joint(device: str, activation: Any, rate: float) -> None:
    """Of halves in float32 on the device, against float64 on the CPU: the mask is a hash, and so
    the same.
    """
    draw = torch.Generator().manual_seed(0)
    halves = [torch.randn(2, size, 16, generator=draw) for size in (5, 4)]
    lengths, results = (torch.tensor([5, 3]), torch.tensor([1, 3])), []
    for to in ({"dtype": torch.float64}, {"device": device}):
        leaves = [half.to(**to).requires_grad_() for half in halves]
        sizes = [length.to(leaves[0].device) for length in lengths]
        joint = pack_joint(*leaves, *sizes, activation=activation, dropout=rate, seed=3)
        results.append([joint, *torch.autograd.grad(joint.square().sum(), leaves)])
    near(results[1], results[0])


def _split(device: str) -> None:
    """Sub-batches of two, from the halves of a joint, against the whole batch in float64."""
    leaves, rest = losses.joint_inputs((5, 8, 4, 12, 9), device)

    def graded(leaves: Sequence[Tensor], **how: Any) -> Sequence[Tensor]:
        encoded, predicted, weight, bias = leaves

        def build(encoded: Tensor, predicted: Tensor) -> Tensor:
            return torch.nn.functional.linear(
                torch.tanh(encoded[:, :, None] + predicted[:, None]), weight, bias
            )

        if how:
            cost = split_batches(build, encoded, predicted, *rest, **how)
        else:
            cost = rnnt_loss(build(encoded, predicted), rest[0], rest[1], rest[2], impl="wavefront")
        return [cost, *torch.autograd.grad(cost, leaves)]

    wanted = graded([leaf.detach().double().requires_grad_() for leaf in leaves])
    near(graded(leaves, size=2, overwrite_logits=True), wanted)


def tiles(device: str, cuda: bool) -> Iterator[Check]:
    """Checks of the losses that never make the joint."""
    for impl in ("plain", "triton" if cuda else "numba_cpu"):
        taken = impl == ("plain" if cuda else "numba_cpu")  # by arms that name no implementation
        arms = "lean(?!_triton)" if taken else "lean_triton"
        for activation, dtype, rate, durations in product(
            ("relu", "tanh"), DTYPES, (0.0, 0.3), ((), (0, 2))
        ):
            name = f"lean {impl} {activation} {dtype_name(dtype)} dropout {rate}"
            name += f" durations {list(durations)}"
            measured = (activation, rate, durations) == ("tanh", 0.0, ()) and (
                taken or impl == "triton"
            )
            vouches = LEAN_ARMS.get(dtype, "").format(arms) if measured else ""
            yield Check(
                f"lean {impl}",
                name,
                vouches,
                partial(_one_lean, device, impl, activation, dtype, rate, durations),
            )
        for dtype, vouches in (
            LEAN_ARMS.items() if impl == "triton" else ()
        ):  # rows that are not aligned, in several blocks
            call = partial(
                _one_lean, device, impl, "tanh", dtype, 0.0, (), sizes=(2, 9, 5, 640, 1025)
            )
            yield Check(
                f"lean {impl}",
                f"lean {impl} {dtype_name(dtype)} 2×9×5×640×1025",
                vouches.format(arms),
                call,
            )
        yield Check(
            f"lean {impl}",
            f"lean {impl} skips",
            "^lean_skip" if taken else "",
            partial(_skips, device, impl),
        )


def _one_lean(
    device: str,
    impl: Any,
    activation: Any,
    dtype: torch.dtype,
    rate: float,
    durations: tuple[int, ...],
    sizes: Sequence[int] = (3, 5, 3, 20, 9),
) -> None:
    """Loss and four gradients against the plain tiles in float64 on the CPU, of the same rounded
    numbers. sizes: B, T, U, D, V.
    """
    draw = torch.Generator().manual_seed(0)
    B, T, U, D, V = sizes
    shapes = (B, T, D), (B, U + 1, D), (V + len(durations), D), (V + len(durations),)
    given = [torch.randn(*shape, generator=draw).to(dtype) for shape in shapes]
    given[2] = (given[2] * min(1.0, 4 / D**0.5)).to(
        dtype
    )  # logits of some units, however many numbers they are sums of
    rest = [
        torch.randint(0, V - 1, (B, U), generator=draw),
        torch.tensor([T, 2, 1][:B]),
        torch.tensor([U - 1, U, 0][:B]),
    ]
    results = []
    for to, way in (({"dtype": torch.float64}, "plain"), ({"device": device}, impl)):
        leaves = [one.to(**to).requires_grad_() for one in given]
        places = [one.to(leaves[0].device) for one in rest]
        how: dict[str, Any] = {
            "activation": activation,
            "dropout": rate,
            "seed": 3,
            "tile": 8,
            "reduction": "none",
            "impl": way,
        }
        costs = (
            tdt_loss_lean(*leaves, *places, durations=durations, **how)
            if durations
            else rnnt_loss_lean(*leaves, *places, **how)
        )
        weight = torch.tensor([1.0, -2, 3][:B]).to(costs) * costs.isfinite()
        results.append([costs, *torch.autograd.grad(costs, leaves, weight)])
    near(results[1], results[0], LEAN[dtype])


def _skips(device: str, impl: Any) -> None:
    """With skipping on, on a lattice in which one alignment dominates: no worse than what is
    skipped allows.
    """
    leaves, rest = losses.joint_inputs((2, 60, 21, 64, 32), device, trained=True)
    results = []
    ways: Any = ("plain", 0.0), (impl, losses.SKIP)
    for way, skip in ways:
        cost = rnnt_loss_lean(*leaves, *rest, activation="tanh", impl=way, skip=skip)
        results.append([cost, *torch.autograd.grad(cost, leaves)])
    near(results[1], results[0], 1e-4)
