"""The suite of the transducer losses: on given logits, padded and packed, and from the two halves
of the joint.

Least work, in every row. On given logits: read them twice, write their gradient; an exponential and
an addition for each in the first pass, an exponential and a product in the second. From the halves:
read these and the weights, write their gradients; three matrix products of 2 N D V where the logits
are kept, four where they are made twice.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from re import Pattern
from typing import Any

import torch
from torch import Tensor

from asrkit.losses import rnnt_loss, rnnt_loss_lean, rnnt_loss_packed, split_batches, tdt_loss
from asrkit.losses.availability import expect_runs
from asrkit.losses.logit_rows import plain
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.rnnt import wavefront
from asrkit.shapes import valid_mask
from asrkit.workbench.bench.cases import NOTHING, Arms, Case, PeerArms, Suite, no_measurements
from asrkit.workbench.bench.rivals.peer_worker import inputs
from asrkit.workbench.bench.row_kernels import counts
from asrkit.workbench.cost import card_called, lean_ms
from asrkit.workbench.records import Measurement

DURATIONS = (0, 1, 2, 3, 4)
LITTLE_B, LITTLE = (
    1 << 26,
    "lean_triton_64MiB_bfloat16",
)  # a tile, beside the usual 256 MiB, and the arm that has it
SKIP = 1e-7  # share of the likelihood up to which lean leaves a node out
ROUNDED = {
    torch.float32: 1e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}  # distance of gradients that rounding excuses
# Distance of a weight's gradient, a sum over all nodes. A GPU's thread adds one node after the
# other in float32: emulated, that is
# 3e-6 off for 121,200 nodes and 3e-5 for 646,400. Not yet measured on hardware.
SUMMED = {"cpu": 1e-5, "cuda": 1e-4}
PEER: dict[str, Any] = {
    "tolerance": 5e-3
}  # torchaudio's recursion is float32: it errs by 1e-3 on large lattices
Shape = tuple[int, ...]


def suite(
    device: str,
    quick: bool,
    *,
    first: bool = False,
    without: Pattern[str] = NOTHING,
    until: float = inf,
) -> Iterator[Case]:
    """All cases, the smallest also against the reference of plain loops. On a GPU: those arms that
    its memory holds.

    There rows of 1025 logits, which are not aligned as 1024 are, come early. `first`: one large
    shape only, on given logits and from the halves of the joint, and no time is taken to count what
    kernels are made of. `without`: names of arms that are not even tried.
    """
    gpu = device.startswith("cuda")
    cpu_sizes = [
        (1, 200, 101, 1024),
        (4, 200, 101, 1024),
        (8, 200, 101, 1024),
        (8, 200, 101, 28),
        (2, 500, 151, 1024),
    ]
    gpu_sizes = [(B, T, 101, 1024) for T in (200, 500) for B in (32, 64, 128)]
    sizes: Sequence[Shape] = [(2, 40, 11, 28)] if quick else gpu_sizes if gpu else cpu_sizes
    wide: Shape = (2, 20, 6, 12, 16) if quick else (4, 200, 101, 640, 1024)
    makers: list[Callable[[str], Case]] = [
        partial(given, rnnt_loss, shape) for shape in [(1, 12, 6, 9), *sizes]
    ]
    if gpu and not quick:
        odd = partial(given, rnnt_loss, (32, 200, 101, 1025))
        makers[1:1] = [
            odd,
            partial(odd, dtype=torch.bfloat16),
            partial(joint, (32, 200, 101, 640, 1025)),
        ]
    if gpu:
        makers += [
            partial(given, rnnt_loss, shape, dtype=half)
            for shape in sizes
            for half in (torch.bfloat16, torch.float16)
        ]
    makers += [partial(given, tdt_loss, sizes[0]), partial(ragged, sizes[len(sizes) // 2])]
    makers += [partial(joint, wide), partial(joint, wide, trained=True)]
    larger: list[Shape] = [
        (8, *wide[1:]),
        *[(B, T, *wide[2:]) for B, T in [(32, 200), (128, 200), (32, 500)] if gpu],
    ]
    makers += [] if quick else [partial(joint, shape) for shape in larger]
    if first:
        large = larger[1] if gpu and not quick else wide
        makers = [partial(joint, large), partial(given, rnnt_loss, large[:3] + large[4:])]
        makers += [partial(given, rnnt_loss, large[:3] + large[4:], dtype=torch.bfloat16)] * gpu
    for make in makers:
        with contextlib.suppress(torch.OutOfMemoryError):  # not even the inputs fit
            case = make(device)
            if gpu:
                arms = {
                    name: arm
                    for name, arm in case.arms.items()
                    if not without.search(name) and fits(partial(case.run, name))
                }
                arms = (
                    arms if next(iter(case.arms)) in arms else {}
                )  # the first is what the others are compared with
                case = replace(
                    case,
                    arms=arms,
                    ratios=[pair for pair in case.ratios or () if {*pair} <= {*arms}],
                )
                case = replace(case, more=no_measurements) if first else case
            if case.arms:
                yield case
    if gpu and not first:
        yield Case(what="rnnt-loss-joint, largest", measure=partial(limits, device, until))


def fits(train: Callable[[], object]) -> bool:
    """Whether `train` runs without exhausting a GPU's memory."""
    try:
        train()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.empty_cache()  # nothing where CUDA was never used
    return True


def given(
    loss: Callable[..., Tensor], shape: Shape, device: str, dtype: torch.dtype = torch.float32
) -> Case:
    """Forward and backward on logits (B, T, U1, V), of TDT with its durations beside them."""
    tdt, T = loss is tdt_loss, shape[1]
    logits, *rest = inputs(shape, len(DURATIONS) * tdt, device)
    logits = logits.to(dtype).requires_grad_()

    def arm(name: str, given: Tensor = logits) -> tuple[Tensor, Tensor]:
        cost = loss(
            given,
            *rest,
            impl=name.removesuffix("_overwrite"),
            overwrite_logits=name.endswith("_overwrite"),
        )
        return cost.detach(), torch.autograd.grad(cost, given)[0]

    rival = ["torchaudio"] * (
        not tdt and dtype != torch.bfloat16 and logits.nelement() < 2**31
    )  # its offsets have 32 bits
    names = ["reference"] * (T < 20) + ["wavefront", *rival, *_compiled(logits)]
    overwriting = [f"{name}_overwrite" for name in _compiled(logits)]
    slow = "torchaudio" if rival else "wavefront"
    params = {
        "shape": [*shape],
        "dtype": str(dtype)[6:],
        "floor_B": 3 * logits.nbytes,
        "floor_FLOP": 4 * logits.nelement(),
    }
    request = {"loss": "tdt" if tdt else "rnnt", "shape": [*shape], "durations": [*DURATIONS] * tdt}
    what = f"{request['loss']}-loss"
    counting = (
        partial(counted, what, _compiled(logits), logits, len(DURATIONS) * tdt)
        if logits.is_cuda
        else no_measurements
    )
    return Case(
        what=what,
        arms={name: partial(arm, name) for name in names + overwriting},
        setups=dict.fromkeys(overwriting, lambda: logits.detach().clone().requires_grad_()),
        arm_params={"torchaudio": PEER},
        more=counting,
        params=params,
        ratios=[(slow, name) for name in names + overwriting if name not in ("reference", slow)],
        tolerance=ROUNDED[dtype],
        memory=True,
        warmup=_warmup(logits),
        peers=PeerArms(request=request, logits=logits) if device == "cpu" else None,
    )


def counted(what: str, impls: Sequence[str], logits: Tensor, n: int) -> Iterator[Measurement]:
    """Instructions and bytes a logit of the row kernels, from their binaries: after the times, for
    compiling takes seconds.
    """
    params = {"shape": [*logits.shape], "dtype": str(logits.dtype)[6:], "device": "cuda"}
    for impl in impls:
        told = counts(impl, logits, n)["sass"]
        if isinstance(told, str):
            print(f"{what}: kernels of {impl}: {told}", file=sys.stderr)
            continue
        for (kernel, numbers), metric in product(
            told.items(), ("instructions_a_logit", "bytes_a_logit")
        ):
            unit = "B" if metric.startswith("bytes") else "1"
            yield Measurement(
                what,
                metric,
                unit,
                numbers[metric],
                impl=impl,
                params=params | {"kernel": kernel},
                timer="none",
            )


def _compiled(logits: Tensor) -> list[str]:
    """The compiled implementations that run here; ragged batches take the first."""
    names = []
    for name in ("numba_cuda", "triton") if logits.is_cuda else ("numba_cpu",):
        with contextlib.suppress(ValueError):
            expect_runs(name, logits)
            names.append(name)
    return names


def _warmup(work: Tensor) -> int:
    return (
        3 if work.nelement() < 1e7 else 0
    )  # the check has called every arm once, and a large one takes seconds


def ragged(shape: Shape, device: str) -> Case:
    """Lengths from T and U down to half of them: with the padding, and packed without it."""
    B, T, U1, V = shape
    logits, targets, *_ = inputs(shape, device=device)
    frames, labels = (
        torch.linspace(size, size / 2, B, device=device).long() for size in (T, U1 - 1)
    )
    valid = valid_mask(frames, T)[:, :, None] & valid_mask(labels + 1, U1)[:, None]  # (B, T, U1)
    leaves = {"padded": logits.requires_grad_(), "packed": logits.detach()[valid].requires_grad_()}
    impl: Any = (_compiled(logits) or ["wavefront"])[0]

    def arm(name: str) -> tuple[Tensor, Tensor]:
        cost = {"padded": rnnt_loss, "packed": rnnt_loss_packed}[name](
            leaves[name], targets, frames, labels, impl=impl
        )
        return cost.detach(), torch.autograd.grad(cost, leaves[name])[0]

    def unpadded() -> tuple[Tensor, Tensor]:
        cost, gradient = arm("padded")
        return cost, gradient[valid]

    arms, size = {name: partial(arm, name) for name in leaves}, leaves["packed"].nelement()
    params = {
        "shape": [*shape],
        "lengths": "T, U to T/2, U/2",
        "impl": impl,
        "floor_B": 3 * 4 * size,
        "floor_FLOP": 4 * size,
    }
    proof: Arms = {**arms, "padded": unpadded}
    pair = [("padded", "packed")]
    return Case(
        what="rnnt-loss-ragged",
        arms=arms,
        params=params,
        compared_arms=proof,
        ratios=pair,
        memory=True,
        warmup=_warmup(logits),
    )


def joint(shape: Shape, device: str, *, trained: bool = False) -> Case:
    """Forward and backward from the halves of the joint, (B, T, U1, D, V) with tanh, to the
    gradients of these and the weights.

    What the lean loss in bfloat16 is to be set against on a GPU is torchaudio_bfloat16: a joint
    under autocast whose logits are cast to float32, for torchaudio takes no bfloat16. Its offsets
    have 32 bits, so it has no arm where there are more logits.
    """
    B, T, U1, D, V = shape
    leaves, rest = halves(shape, device, trained)
    arms, share = variants(leaves, rest), active(leaves, rest)
    left_out = left_out_of(shape, trained)
    multiplying = 2 * B * T * U1 * D * V
    skipping = {"skip": SKIP, "active": share, "floor_FLOP": round((1 + 3 * share) * multiplying)}
    half = {
        "dtype": "bfloat16",
        "tolerance": 0.1 if trained else 0.05,
    }  # as far as a whole joint in bfloat16 is off
    twice = {"floor_FLOP": 4 * multiplying}  # the logits are computed again
    arm_params: dict[str, dict[str, Any]] = {
        "torchaudio": PEER,
        "torchaudio_flushed": PEER,
        "lean_skip": skipping,
    }
    arm_params |= dict.fromkeys(("split", "lean", "lean_triton"), twice)
    arm_params |= {
        f"{name}_bfloat16": told | half
        for name, told in arm_params.items()
        if name.startswith("lean")
    }
    arm_params |= {
        "torchaudio_bfloat16": half,
        LITTLE: arm_params["lean_triton_bfloat16"] | {"tile": little(D, V)},
    }
    for name, itemsize in (("lean_triton", 4), ("lean_triton_bfloat16", 2)):
        arm_params[name] = arm_params[name] | predicted(device, shape, itemsize)
    lattice = "built so that one alignment dominates" if trained else "of random weights"
    params: dict[str, Any] = {"shape": [*shape], "activation": "tanh", "lattice": lattice}
    params |= {
        "floor_B": 2 * 4 * sum(leaf.nelement() for leaf in leaves),
        "floor_FLOP": 3 * multiplying,
    }
    arms = {name: arm for name, arm in arms.items() if name not in left_out}
    return Case(
        what="rnnt-loss-joint" + "-aligned" * trained,
        arms=arms,
        params=params,
        arm_params=arm_params,
        memory=True,
        tolerance=PEER["tolerance"] if trained else SUMMED[leaves[0].device.type],
        warmup=0 if T > 100 else 3,
        ratios=[
            ("torchaudio", name) for name in arms if name != "torchaudio" and "torchaudio" in arms
        ]
        + [
            ("torchaudio_bfloat16", name)
            for name in arms
            if "torchaudio_bfloat16" in arms and re.match("lean.*bfloat16", name)
        ]
        + [
            ("torchaudio_flushed", name)
            for name in arms
            if "torchaudio_flushed" in arms and name.startswith("lean")
        ],
    )


def little(D: int, V: int) -> int:
    """Nodes of a tile of LITTLE_B in bfloat16, of hidden numbers and of the gradient of logits."""
    return LITTLE_B // (2 * (D + V))


def left_out_of(shape: Shape, trained: bool) -> list[str]:
    """Variants that take no part at (B, T, U1, D, V)."""
    B, T, U1, _, V = shape
    left_out = ["split", "overwrite"] if trained else ["split"] * (B > 4) + ["lean_skip_bfloat16"]
    return left_out + ["torchaudio", "torchaudio_bfloat16"] * (B * T * U1 * V >= 2**31)


def predicted(device: str, shape: Shape, itemsize: int) -> dict[str, float]:
    """`predicted_ms` of the lean loss in Triton, (B, T, U1, D, V), by asrkit.workbench.cost.lean;
    nothing where it does not know the GPU.
    """
    card = card_called(torch.cuda.get_device_name(device)) if device.startswith("cuda") else None
    sizes = dict(zip(("B", "T", "U1", "D", "V"), shape, strict=True))
    return (
        {"predicted_ms": round(sum(lean_ms(card, itemsize=itemsize, **sizes).values()), 3)}
        if card
        else {}
    )


def variants(leaves: tuple[Tensor, ...], rest: Any, *, gpu: bool | None = None) -> Arms:
    """Ways from encoded (B, T, D), predicted (B, U1, D), weight (V, D) and bias (V,) to the loss
    and their gradients.

    gpu: those of a GPU, too; None: where the leaves are on one.
    """
    encoded, predicted, weight, bias = leaves
    gpu = encoded.is_cuda if gpu is None else gpu

    def build(encoded: Tensor, predicted: Tensor) -> Tensor:
        return torch.nn.functional.linear(
            torch.tanh(encoded[:, :, None] + predicted[:, None]), weight, bias
        )

    def eager() -> Tensor:
        """torchaudio on a joint under autocast: it takes no bfloat16."""
        return rnnt_loss(build(encoded, predicted).float(), *rest, impl="torchaudio")

    def arm(loss: Callable[[], Tensor], half: bool = False) -> tuple[Tensor, ...]:
        with torch.autocast(encoded.device.type, torch.bfloat16, enabled=half):
            cost = loss()
        return cost.detach(), *torch.autograd.grad(cost, leaves)

    def flushed() -> tuple[Tensor, ...]:
        """torchaudio's gradient holds denormal numbers, and products of these are slow: here they
        count as 0.
        """
        torch.set_flush_denormal(True)
        try:
            return arm(ways["torchaudio"])
        finally:
            torch.set_flush_denormal(False)

    lean = partial(rnnt_loss_lean, *leaves, *rest, activation="tanh")
    ways: dict[str, Callable[[], Tensor]] = {
        "overwrite": lambda: rnnt_loss(build(encoded, predicted), *rest, overwrite_logits=True),
        "torchaudio": eager,
        "split": lambda: split_batches(
            build, encoded, predicted, *rest, size=1, overwrite_logits=True
        ),
        "lean": lean,
        "lean_skip": partial(lean, skip=SKIP),
    }
    if gpu:
        ways["lean_triton"] = partial(lean, impl="triton")
    halved = {
        f"{name}_bfloat16": partial(arm, way, half=True)
        for name, way in ways.items()
        if name.startswith("lean")
    }
    if gpu:
        small = partial(lean, impl="triton", tile=little(weight.shape[1], weight.shape[0]))
        halved |= {
            "torchaudio_bfloat16": partial(arm, eager, half=True),
            LITTLE: partial(arm, small, half=True),
        }
    flush: Arms = {} if encoded.is_cuda else {"torchaudio_flushed": flushed}
    return {**{name: partial(arm, way) for name, way in ways.items()}, **flush, **halved}


def halves(
    shape: Shape, device: str, trained: bool = False
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Encoded, predicted, weight and bias, as leaves, and targets and full lengths; seeded with 0.

    `trained` stands for a trained model without having one: half of the hidden layer compares the
    frame with where label u belongs, t_u = (u + 1/2) T / U, and decides on blank; the other half
    holds the label's code. So blank is likely before frame t_u and the label from there on, the
    border two or three frames wide, and one alignment dominates.
    """
    B, T, U1, D, V = shape
    generator, U, H = torch.Generator().manual_seed(0), U1 - 1, D // 2
    targets = torch.randint(0, V - 1, (B, U), generator=generator)
    encoded, predicted = (torch.randn(B, size, D, generator=generator) for size in (T, U1))
    weight, bias = torch.randn(V, D, generator=generator) / D**0.5, torch.zeros(V)
    if trained:
        codes = torch.randn(V, D - H, generator=generator).sign()
        codes[-1] = 0
        place = torch.cat(
            ((torch.arange(U) + 0.5) * T / U, torch.tensor([2.0 * T]))
        )  # after the last label: blank to the end
        encoded[..., :H] = 0.5 * torch.arange(T)[:, None]
        predicted[..., :H] = -0.5 * place[:, None]
        encoded[..., H:] *= 0.3
        predicted[..., H:] = 2 * torch.nn.functional.pad(codes[targets], (0, 0, 0, 1))
        weight[:, :H], weight[:, H:] = 0, 14 / (D - H) * codes
        weight[-1, :H] = -20 / H
    leaves = (encoded, predicted, weight, bias)
    rest = targets, torch.full((B,), T), torch.full((B,), U)
    return tuple(leaf.to(device).requires_grad_() for leaf in leaves), tuple(
        one.to(device) for one in rest
    )


@torch.no_grad()
def active(leaves: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> float:
    """Part of the nodes that more than SKIP of the likelihood passes through."""
    (encoded, predicted, weight, bias), (targets, *lengths) = leaves, rest
    above = []
    for b, sizes in enumerate(torch.stack(lengths, 1).cpu()):
        logits = torch.nn.functional.linear(
            torch.tanh(encoded[b, None, :, None] + predicted[b, None, None]), weight, bias
        )
        nodes, options = Nodes.padded(logits, sizes[None]), LatticeOptions(blank=len(bias) - 1)
        shares = wavefront.lattice(
            plain.arc_log_probs(logits, targets[b, None], nodes, options), nodes, options, True
        )
        assert shares.blank_posterior is not None and shares.label_posterior is not None
        above.append((shares.blank_posterior + shares.label_posterior > SKIP).float().mean())
    return torch.stack(above).mean().item()


def limits(device: str, until: float = inf) -> Iterator[Measurement]:
    """For each variant from the halves: nodes B T U1 of the largest batch that trains, T = 200. Not
    yet run on hardware.

    TimeoutError where time.monotonic() reaches `until`.
    """
    T, U1, D, V = 200, 101, 640, 1024
    for name in variants(*halves((1, 2, 2, 2, 2), device)):

        def train(B: int, name: str = name) -> None:
            if time.monotonic() >= until:
                raise TimeoutError(f"no time for the largest batch of {name}, and what follows it")
            variants(*halves((B, T, U1, D, V), device))[name]()

        B = largest(
            train, most=100 if name.startswith("torchaudio") else 2**12
        )  # its offsets have 32 bits
        params = {"shape": [B, T, U1, D, V], "device": device}
        yield Measurement(
            "rnnt-loss-joint",
            "largest_lattice",
            "nodes",
            B * T * U1,
            impl=name,
            params=params,
            timer="none",
        )


def largest(train: Callable[[int], object], most: int = 2**12) -> int:
    """Largest batch up to `most` for which train(B) fits in memory, to one part in sixteen; 0 if
    none does.
    """
    low, high = 0, 1
    while high <= most and fits(partial(train, high)):
        low, high = high, 2 * high
    while high <= most and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(partial(train, middle)) else (low, middle)
    return low


SUITE = Suite(name="losses", cases=suite, takes=("without", "until"))
