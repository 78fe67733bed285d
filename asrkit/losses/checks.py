"""What every loss asks of its arguments, in one-line errors, and how it reduces."""

from collections.abc import Sequence
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from asrkit.shapes import dims, expect, valid_mask

Reduction = Literal["none", "mean", "sum"]


def check_scores(tensor: Tensor, argument: str) -> None:
    """ValueError for what cannot carry scores: integers, nothing at all, or a tensor under a
    torch.func transform.
    """
    expect(tensor.is_floating_point(), argument, "floating point", tensor.dtype)
    expect(tensor.numel() > 0, argument, "no empty dimension", tuple(tensor.shape))
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # no public way to ask
    expect(
        not wrapped,
        argument,
        "a plain tensor",
        "one inside torch.func",
        "Take gradients with torch.autograd.",
    )


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
    """Frames and labels of each utterance, on the host, int64 (B, 2); ValueError for what has no
    lattice.

    `like` is the tensor whose device the others share. T and U1 are the sizes of the padded tensor,
    None for a packed one. On a GPU this fetches the lengths, and so waits for whatever was queued
    before them.
    """
    B = dims(target_lengths, "B", "target_lengths")[0] if U1 is None else len(like)
    expect(
        isinstance(blank, int) and blank in range(-V, V),
        "blank",
        f"an index of V={V} tokens",
        repr(blank),
    )
    sizes = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    for name, tensor in {"targets": targets, **sizes}.items():
        dims(
            tensor,
            "B" if name in sizes else "B U",
            name,
            B=B,
            **({} if U1 is None else {"U": U1 - 1}),
        )
        expect(tensor.dtype in (torch.int32, torch.int64), name, "int32 or int64", tensor.dtype)
        expect(
            tensor.device == like.device,
            name,
            f"a tensor on {like.device}, as the scores",
            tensor.device,
        )
    U = targets.shape[1]
    wrong = ((targets < 0) | (targets >= V) | (targets == blank % V)) & valid_mask(
        target_lengths, U
    )
    found = torch.stack((logit_lengths, target_lengths, wrong.sum(1)), 1).cpu()
    most = f"1 to T={T} frames" if T else "at least 1 frame"
    for b, (frames, labels, mistakes) in enumerate(found.tolist()):
        expect(0 < frames <= (T or frames), "logit_lengths", most, f"{frames} in utterance {b}")
        expect(
            0 <= labels <= U, "target_lengths", f"0 to U={U} labels", f"{labels} in utterance {b}"
        )
        label = int(targets[b][wrong[b]][0]) if mistakes else 0
        expect(
            not mistakes,
            "targets",
            f"labels 0..{V - 1} but blank={blank % V}",
            f"{label} in utterance {b}",
        )
    return found[:, :2].long()


def as_index(targets: Tensor) -> Tensor:
    """Targets as int64; a copy of those that inference mode made, which autograd would not keep."""
    return targets.long().clone() if targets.is_inference() else targets.long()


def check_options(reduction: str, clamp: float = -1.0, fastemit_lambda: float = 0.0) -> None:
    """ValueError for options outside their range."""
    expect(
        reduction in ("none", "mean", "sum"),
        "reduction",
        "'none', 'mean' or 'sum'",
        repr(reduction),
    )
    ok = isinstance(fastemit_lambda, Real) and 0 <= fastemit_lambda < float("inf")
    expect(ok, "fastemit_lambda", "a finite number, at least 0", fastemit_lambda)
    expect(isinstance(clamp, Real) and clamp == clamp, "clamp", "a number", clamp)


def reduce(costs: Tensor, reduction: Reduction) -> Tensor:
    """Losses (B,) as they are, or their mean or sum; one infinite loss makes these infinite too."""
    return costs if reduction == "none" else costs.mean() if reduction == "mean" else costs.sum()


def check_durations(durations: Sequence[int], sigma: float, omega: float) -> None:
    """ValueError for TDT options that describe no lattice."""
    listed = tuple(durations) if isinstance(durations, list | tuple) else ()
    whole = all(isinstance(duration, int) and duration >= 0 for duration in listed)
    ok = whole and len(set(listed)) == len(listed) and any(listed)
    expect(
        ok,
        "durations",
        "distinct frame counts, one of them above 0",
        durations,
        "Blank must be able to advance.",
    )
    ok = isinstance(sigma, Real) and 0 <= sigma < float("inf")
    expect(ok, "sigma", "a finite number of nats, at least 0", sigma)
    expect(isinstance(omega, Real) and 0 <= omega <= 1, "omega", "a probability", omega)


def takes_plain_loss(omega: float) -> bool:
    """Whether this call of a TDT loss is one of the share `omega` that take the RNN-T loss; drawn
    as torch.manual_seed rules.
    """
    return omega > 0 and float(torch.rand((), device="cpu")) < omega
