"""Checks of the losses' arguments, as one-line errors, and the reduction over the batch."""

from collections.abc import Sequence
from math import inf, isnan
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

from asrkit.runtime import to_device
from asrkit.shapes import dims, expect, valid_mask

Reduction = Literal["none", "mean", "sum"]


def check_scores(tensor: Tensor, argument: str) -> None:
    """Raise ValueError where `tensor`, the argument of that name, cannot hold scores.

    That is where it holds integers, has no element, or is inside a torch.func transform.
    """
    expect(tensor.is_floating_point(), argument, "floating point", tensor.dtype)
    expect(tensor.numel() > 0, argument, "no empty dimension", tuple(tensor.shape))
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # no public way to ask
    remedy = "Take gradients with torch.autograd."
    expect(not wrapped, argument, "a plain tensor", "one inside torch.func", remedy)


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
    """Frames and labels of each utterance: int64 (B, 2), on the host.

    Where the integers lie on a GPU this fetches the lengths, and so waits for everything that was
    queued before them. Where all three lie on the host they are checked there, and nothing waits.

    Args:
        targets: labels (B, U), int32 or int64.
        logit_lengths: frames (B,), int32 or int64.
        target_lengths: labels (B,), int32 or int64.
        blank: index of the blank, -V to V - 1.
        like: the tensor of scores; the others lie on its device or on the host.
        T: frames of the padded scores; None for packed ones.
        U1: lattice rows of the padded scores; None for packed ones.
        V: tokens, blank included.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an utterance has no lattice.
    """
    is_token = isinstance(blank, Integral) and -V <= int(blank) < V
    expect(is_token, "blank", f"an index of V={V} tokens", repr(blank))
    _check_index_tensors(targets, logit_lengths, target_lengths, like, U1)
    U = targets.shape[1]
    if not _on_host(targets, logit_lengths, target_lengths):
        targets = to_device(targets, like.device)
        logit_lengths = to_device(logit_lengths, like.device)
        target_lengths = to_device(target_lengths, like.device)
    out_of_range = (targets < 0) | (targets >= V)
    is_blank = targets == blank % V
    is_read = valid_mask(target_lengths, U)
    wrong = (out_of_range | is_blank) & is_read
    columns = (logit_lengths, target_lengths, wrong.sum(1))
    counts = torch.stack(columns, 1).cpu()
    for b, (frames, labels, mistakes) in enumerate(counts.tolist()):
        _check_sizes(b, frames, labels, T, U)
        if mistakes:
            wrong_labels = targets[b][wrong[b]]
            label = int(wrong_labels[0])
            wanted = f"labels 0..{V - 1} but blank={blank % V}"
            expect(False, "targets", wanted, f"{label} in utterance {b}")
    return counts[:, :2].long()


def _check_index_tensors(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, like: Tensor, U1: int | None
) -> None:
    """Check shape, dtype and device of the integer arguments."""
    if U1 is None:
        B = dims(target_lengths, "B", "target_lengths")[0]
        dims(targets, "B U", "targets", B=B)
    else:
        B = len(like)
        dims(targets, "B U", "targets", B=B, U=U1 - 1)
    dims(logit_lengths, "B", "logit_lengths", B=B)
    dims(target_lengths, "B", "target_lengths", B=B)
    integers = {
        "targets": targets,
        "logit_lengths": logit_lengths,
        "target_lengths": target_lengths,
    }
    for name, tensor in integers.items():
        is_index = tensor.dtype in (torch.int32, torch.int64)
        expect(is_index, name, "int32 or int64", tensor.dtype)
        wanted = f"a tensor on {like.device}, as the scores"
        if like.device.type != "cpu":
            wanted += ", or on cpu"
        reachable = tensor.device == like.device or tensor.device.type == "cpu"
        expect(reachable, name, wanted, tensor.device)


def _on_host(*tensors: Tensor) -> bool:
    """Whether all `tensors` lie on the host."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _check_sizes(b: int, frames: int, labels: int, T: int | None, U: int) -> None:
    """Check that utterance b has at least a frame, and no more of anything than its padding."""
    if T is None:
        expect(frames > 0, "logit_lengths", "at least 1 frame", f"{frames} in utterance {b}")
    else:
        fits = 0 < frames <= T
        expect(fits, "logit_lengths", f"1 to T={T} frames", f"{frames} in utterance {b}")
    fits = 0 <= labels <= U
    expect(fits, "target_lengths", f"0 to U={U} labels", f"{labels} in utterance {b}")


def as_index(targets: Tensor, device: torch.device) -> Tensor:
    """Targets as int64 on `device`; no CPU waits for the copy there.

    Those made in inference mode, which autograd would not save, are copied in any case.
    """
    indices = to_device(targets.long(), device)
    if indices.is_inference():
        return indices.clone()
    return indices


def check_options(reduction: str, clamp: float = -1.0, fastemit_lambda: float = 0.0) -> None:
    """Raise ValueError where `reduction`, `clamp` or `fastemit_lambda` is outside its range."""
    known = reduction in ("none", "mean", "sum")
    expect(known, "reduction", "'none', 'mean' or 'sum'", repr(reduction))
    finite = isinstance(fastemit_lambda, Real) and 0 <= fastemit_lambda < inf
    expect(finite, "fastemit_lambda", "a finite number, at least 0", fastemit_lambda)
    is_number = isinstance(clamp, Real) and not isnan(clamp)
    expect(is_number, "clamp", "a number", clamp)


def reduce(costs: Tensor, reduction: Reduction) -> Tensor:
    """Losses (B,) as they are, or their mean or sum; one infinite loss makes these infinite too."""
    if reduction == "mean":
        return costs.mean()
    if reduction == "sum":
        return costs.sum()
    return costs


def check_durations(durations: Sequence[int], sigma: float, omega: float) -> None:
    """Raise ValueError where `durations`, `sigma` or `omega` (TDT) describes no lattice."""
    listed: tuple[int, ...] = ()
    if isinstance(durations, list | tuple):
        listed = tuple(durations)
    are_counts = all(isinstance(duration, int) and duration >= 0 for duration in listed)
    are_distinct = len(set(listed)) == len(listed)
    usable = are_counts and are_distinct and any(listed)
    wanted = "distinct frame counts, one of them above 0"
    expect(usable, "durations", wanted, durations, "Blank must be able to advance.")
    finite = isinstance(sigma, Real) and 0 <= sigma < inf
    expect(finite, "sigma", "a finite number of nats, at least 0", sigma)
    is_probability = isinstance(omega, Real) and 0 <= omega <= 1
    expect(is_probability, "omega", "a probability", omega)


def takes_plain_loss(omega: float) -> bool:
    """Whether this call of a TDT loss takes the RNN-T loss instead, with probability `omega`.

    One draw from torch's CPU generator, none for omega = 0.
    """
    return omega > 0 and float(torch.rand((), device="cpu")) < omega
