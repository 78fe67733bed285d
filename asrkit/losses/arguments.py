"""What every loss does around its kernels: check arguments, choose an implementation, reduce."""

import functools
import warnings
from collections.abc import Sequence
from importlib import import_module
from math import inf, isclose, isnan, log
from numbers import Integral, Real
from typing import Literal, get_args

import torch
from torch import Tensor

from asrkit.compilers import INTERPRETED, SIMULATED, compiler_fails
from asrkit.devices import CPU_FLOAT, to_device
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.shapes import dims, expect, expect_choice, is_finite, valid_mask, whole

Reduction = Literal["none", "mean", "sum"]
TdtImpl = Literal["auto", "reference", "wavefront", "numba_cpu", "triton"]
Impl = Literal[TdtImpl, "numba_cuda"]
IMPLS = get_args(Impl)[1:]  # each is a file of asrkit.losses
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNEL_DEVICES = {
    "numba_cpu": "cpu",
    "numba_cuda": "cpu" if SIMULATED else "cuda",
    "triton": "cpu" if INTERPRETED else "cuda",
}
AUTO = "Pass impl='auto'."


def check_scores(tensor: Tensor, argument: str, encoded: Tensor | None = None) -> None:
    """Raise ValueError unless `tensor` can hold scores: floating point, not empty, a plain tensor.

    Args:
        tensor: The tensor to check.
        argument: Its name in the error message.
        encoded: If given, `tensor` must be on the same device.
    """
    expect(tensor.is_floating_point(), argument, "floating point", tensor.dtype)
    expect(tensor.numel() > 0, argument, "no empty dimension", tuple(tensor.shape))
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # torch has no public check
    remedy = "Take gradients with torch.autograd."
    expect(not wrapped, argument, "a plain tensor", "one inside torch.func", remedy)
    if encoded is not None:
        wanted = f"a tensor on {encoded.device}, as encoded"
        expect(tensor.device == encoded.device, argument, wanted, tensor.device)


def check_halves(encoded: Tensor, predicted: Tensor) -> tuple[int, int, int, int]:
    """Return the sizes B, T, U1 and D of the inputs of a joint, `encoded` and `predicted`.

    Raises:
        ValueError: The halves do not fit together.
    """
    B, T, D = dims(encoded, "B T D", "encoded")
    _, U1, _ = dims(predicted, "B U1 D", "predicted", B=B, D=D)
    check_scores(encoded, "encoded")
    check_scores(predicted, "predicted", encoded)
    same = predicted.dtype == encoded.dtype
    expect(same, "predicted", f"{encoded.dtype}, as encoded", predicted.dtype)
    return B, T, U1, D


def check_lengths(
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    *,
    like: Tensor,
    T: int | None,
    U1: int | None,
    V: int,
) -> Tensor:
    """Return the frames and labels of each utterance: int64 (B, 2), on the host.

    Integers on the host are checked there, and nothing waits for a GPU. If any of the three tensors
    is on a GPU, the lengths are fetched from it, which waits for all work queued before.

    Args:
        targets: Labels (B, U), int32 or int64.
        logit_lengths: Frames (B,), int32 or int64.
        target_lengths: Labels (B,), int32 or int64.
        blank: Index of blank, -V to V - 1.
        like: The tensor of scores. The integers must be on its device or on the host.
        T: Frames of the padded scores; None for packed scores.
        U1: Lattice rows of the padded scores; None for packed scores.
        V: Number of tokens, including blank.

    Raises:
        ValueError: A shape, dtype or device does not fit, or an utterance has no lattice.
    """
    is_token = isinstance(blank, Integral) and -V <= int(blank) < V
    expect(is_token, "blank", f"an index of V={V} tokens", repr(blank))
    sizes = {} if U1 is None else {"B": len(like)}
    sizes["B"], U = dims(targets, "B U", "targets", **sizes)
    U1 = U1 or U + 1
    rows = "logits have" if like.ndim == 4 else "predicted has"
    wanted = f"shape (B={sizes['B']}, U={U1 - 1})"
    remedy = f"{rows} U1 = U + 1 rows, one more than the labels."
    expect(U == U1 - 1, "targets", wanted, tuple(targets.shape), remedy)
    lengths = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    for name, tensor in lengths.items():
        dims(tensor, "B", name, **sizes)
    integers = {"targets": targets} | lengths
    for name, tensor in integers.items():
        is_index = tensor.dtype in (torch.int32, torch.int64)
        expect(is_index, name, "int32 or int64", tensor.dtype)
        reachable = tensor.device in (like.device, torch.device("cpu"))
        expect(reachable, name, f"a tensor on cpu, or {like.device} as the scores", tensor.device)
    if any(tensor.device.type != "cpu" for tensor in integers.values()):
        moved = [to_device(tensor, like.device) for tensor in integers.values()]
        targets, logit_lengths, target_lengths = moved
    invalid = (targets < 0) | (targets >= V) | (targets == blank % V)
    invalid &= valid_mask(target_lengths, U)
    counts = torch.stack((logit_lengths, target_lengths, invalid.sum(1)), 1).cpu()
    for b, (frames, labels, mistakes) in enumerate(counts.tolist()):
        allowed = "at least 1 frame" if T is None else f"1 to T={T} frames"
        where = f"in utterance {b}"
        expect(0 < frames <= (T or inf), "logit_lengths", allowed, f"{frames} {where}")
        expect(0 <= labels <= U, "target_lengths", f"0 to U={U} labels", f"{labels} {where}")
        if mistakes:
            label = int(targets[b][invalid[b]][0])
            allowed = f"labels 0..{V - 1} but blank={blank % V}"
            expect(False, "targets", allowed, f"{label} {where}")
    return counts[:, :2].long()


def check_options(reduction: str, clamp: float = -1.0, fastemit_lambda: float = 0.0) -> None:
    """Raise ValueError if `reduction`, `clamp` or `fastemit_lambda` is outside its range."""
    expect_choice("reduction", reduction, get_args(Reduction))
    finite = is_finite(fastemit_lambda) and fastemit_lambda >= 0
    expect(finite, "fastemit_lambda", "a finite number, at least 0", repr(fastemit_lambda))
    is_number = isinstance(clamp, Real) and not isnan(clamp)
    expect(is_number, "clamp", "a number", clamp)


def check_durations(durations: Sequence[int], sigma: float, omega: float) -> None:
    """Raise ValueError if `durations`, `sigma` or `omega` (TDT) is outside its range."""
    usable = (
        isinstance(durations, list | tuple)
        and all(whole(duration, 0) for duration in durations)
        and len(set(durations)) == len(durations)
        and any(durations)
    )
    wanted = "a list or tuple of distinct whole numbers, one of them above 0"
    expect(usable, "durations", wanted, repr(durations), "Blank must be able to advance.")
    finite = is_finite(sigma) and sigma >= 0
    expect(finite, "sigma", "a finite number of nats, at least 0", sigma)
    is_probability = is_finite(omega) and 0 <= omega <= 1
    expect(is_probability, "omega", "a probability", omega)


def choose(impl: str, impls: tuple[str, ...], logits: Tensor, overwrite_logits: bool) -> str:
    """Return the name of the implementation that runs.

    Args:
        impl: The caller's choice, "auto" or one of `impls`.
        impls: The implementations of this loss. If the fastest is not one of them, "auto" is
            wavefront.
        logits: The logits that it will read.
        overwrite_logits: Whether it must write the gradient over the logits.

    Raises:
        ValueError: `impl` is none of `impls`, or cannot run on these logits.
    """
    expect_choice("impl", impl, ("auto", *impls))
    chosen = fastest(logits) if impl == "auto" else impl
    if chosen not in impls:
        chosen = "wavefront"
    expect_runs(chosen, logits)
    if overwrite_logits:
        able = chosen not in ("torchaudio", "reference")
        expect(able, "overwrite_logits", f"False with impl={chosen!r}", True, AUTO)
        wanted = "contiguous with overwrite_logits=True"
        expect(logits.is_contiguous(), "logits", wanted, logits.stride())
    return chosen


def fastest(scores: Tensor) -> str:
    """Return the implementation that impl="auto" runs on `scores`.

    It is numba_cpu on a CPU. On a GPU it is triton if Triton works there, and numba_cuda if
    numba-cuda works. Otherwise it is wavefront: for float64, on other devices, and with
    NUMBA_DISABLE_JIT=1.
    """
    if scores.dtype in KERNEL_DTYPES:
        if scores.device.type == "cpu" and not compiler_fails("numba_cpu"):
            return "numba_cpu"
        if scores.device.type == "cuda":
            return fastest_on_gpu(scores.device)
    return "wavefront"


@functools.cache
def fastest_on_gpu(device: torch.device) -> str:
    """Return the first of triton, numba_cuda and wavefront that computes a loss on `device`.

    A process tries this once for each device. If it is not triton, a RuntimeWarning gives the
    reasons.

    Raises:
        RuntimeError: A CUDA graph is being captured, so that nothing can be tried.
    """
    problems = []
    for impl in ("triton", "numba_cuda"):
        problem = compiler_fails(impl) or _try_kernels(impl, device)
        if not problem:
            break
        problems.append(f"{impl} does not work on {device}: {problem}.")
    else:
        impl = "wavefront"
        problems.append("Each diagonal of a lattice takes several launches; install asrkit[cuda].")
    if problems:
        problems.append(f"Losses run with impl={impl!r}.")
        warnings.warn(" ".join(problems), RuntimeWarning, stacklevel=2)
    return impl


def _try_kernels(impl: str, device: torch.device) -> str:
    """Why the kernels of `impl` compute no correct loss of a one-node lattice; "" if they do."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a loss's first call cannot be captured: whether {impl} works is not known yet. "
            "Call the loss once before capturing."
        )
    logits = torch.zeros(1, 1, 1, 2, dtype=torch.float32, device=device)
    targets = torch.zeros(1, 0, dtype=torch.int64, device=device)
    nodes = Nodes.padded(logits, torch.tensor([[1, 0]], device="cpu"))
    options = LatticeOptions(blank=0)
    try:
        kernels = import_module(f"asrkit.losses.{impl}")
        arcs = kernels.arc_log_probs(logits, targets, nodes, options)
        # tolist() waits for the kernels, which is when their errors appear
        (value,) = kernels.lattice(arcs, nodes, options, False).log_likelihood.tolist()
    except Exception as error:
        return repr(error)
    if isclose(value, -log(2), rel_tol=1e-5):
        return ""
    return f"a node of two equal tokens costs {-value} nats"


def expect_runs(impl: str, scores: Tensor, argument: str = "logits") -> None:
    """Raise ValueError unless `impl` runs on `scores`, the argument of that name."""
    if impl not in KERNEL_DEVICES:
        return
    problem = compiler_fails(impl)
    got = f"{impl!r}, which fails here: {problem}"
    expect(not problem, "impl", "another implementation", got, AUTO)
    wanted = f"float32, float16 or bfloat16 with impl={impl!r}"
    expect(scores.dtype in KERNEL_DTYPES, argument, wanted, scores.dtype, AUTO)
    device = KERNEL_DEVICES[impl]
    wanted = f"a {device} tensor with impl={impl!r}"
    expect(scores.device.type == device, argument, wanted, scores.device)


def as_index(targets: Tensor, device: torch.device) -> Tensor:
    """Return the targets as int64 on `device`; the copy does not block the CPU.

    Autograd cannot save a tensor made in inference mode, so such a tensor is always copied.
    """
    indices = to_device(targets.long(), device)
    return indices.clone() if indices.is_inference() else indices


def draws_rnnt(omega: float) -> bool:
    """Whether this call of a TDT loss computes the RNN-T loss instead, with probability `omega`.

    It takes one number from torch's CPU generator, and none if omega is 0.
    """
    return omega > 0 and float(torch.rand((), **CPU_FLOAT)) < omega


def reduce(costs: Tensor, reduction: Reduction) -> Tensor:
    """Return the losses (B,), their mean or their sum; one infinite loss makes these infinite."""
    if reduction == "mean":
        return costs.mean()
    if reduction == "sum":
        return costs.sum()
    return costs
