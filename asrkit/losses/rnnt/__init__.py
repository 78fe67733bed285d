"""The door to the transducer (RNN-T) loss: check once, pick an implementation, reduce."""

from collections.abc import Callable
from typing import Literal

import torch
import torchaudio
from torch import Tensor

from asrkit.losses.rnnt import reference, wavefront
from asrkit.shapes import dims, expect, valid_mask

Impl = Literal["auto", "reference", "wavefront", "torchaudio"]


def _torchaudio(
    logits: Tensor, targets: Tensor, lengths: Tensor, blank: int, clamp: float, fused_log_softmax: bool, fastemit_lambda: float
) -> Tensor:
    """Negative log-likelihood in nats, (B,), by torchaudio's compiled loss, the peer. Memory: 2 B T U1 V."""
    sizes = [column.contiguous() for column in lengths.to(logits.device, torch.int32).unbind(1)]
    costs = torchaudio.functional.rnnt_loss(
        logits.contiguous(), targets.int().contiguous(), *sizes, blank, clamp, "none", fused_log_softmax
    )
    return costs.to(torch.promote_types(costs.dtype, torch.float32))


IMPLS: dict[str, Callable[..., Tensor]]
IMPLS = {"reference": reference.losses, "wavefront": wavefront.losses, "torchaudio": _torchaudio}


def resolve(impl: Impl, logits: Tensor, *, fastemit_lambda: float = 0.0) -> str:
    """Name of the implementation that `rnnt_loss` runs for these arguments; ValueError where a named one cannot run."""
    expect(impl in ("auto", *IMPLS), "impl", "one of 'auto', " + ", ".join(map(repr, IMPLS)), repr(impl))
    if impl == "torchaudio":
        ok, remedy = logits.dtype in (torch.float32, torch.float16), "Pass impl='wavefront'."
        expect(ok, "logits", "float32 or float16 with impl='torchaudio'", logits.dtype, remedy)
        expect(fastemit_lambda == 0, "fastemit_lambda", "0 with impl='torchaudio'", fastemit_lambda, remedy)
    return "wavefront" if impl == "auto" else impl


def rnnt_loss(
    logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int = -1, clamp: float = -1,
    reduction: Literal["none", "mean", "sum"] = "mean", fused_log_softmax: bool = True,
    *, fastemit_lambda: float = 0.0, impl: Impl = "auto",
) -> Tensor:  # fmt: skip
    """Negative log-likelihood of the targets in nats: its mean or sum over the batch, or one per utterance, (B,).

    The positional part is torchaudio.functional.rnnt_loss's (hence ten parameters), so this drops in for it.
    logits (B, T, U1, V), or log-probabilities with fused_log_softmax=False; targets (B, U) and lengths (B,), in frames
    and labels, int32 or int64 on the logits' device. clamp > 0 limits each gradient of an utterance's loss to +-clamp.
    fastemit_lambda scales the gradient of label arcs by 1 + lambda (FastEmit, arXiv 2010.11148), not the loss itself.
    Losses are float32 (float64 for float64). One small copy to the host for the checks is the only wait for a GPU.

    >>> rnnt_loss(torch.zeros(1, 2, 2, 3), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]))  # log(27 / 2)
    tensor(2.6027)
    """
    expect(reduction in ("none", "mean", "sum"), "reduction", "'none', 'mean' or 'sum'", repr(reduction))
    expect(fastemit_lambda >= 0, "fastemit_lambda", "at least 0", fastemit_lambda)
    lengths = _checked(logits, targets, logit_lengths, target_lengths, blank)
    picked = resolve(impl, logits, fastemit_lambda=fastemit_lambda)
    T, U = lengths.amax(0).tolist()  # torchaudio refuses tensors longer than their longest utterance
    options = blank % logits.shape[-1], clamp, fused_log_softmax, fastemit_lambda
    costs = IMPLS[picked](logits[:, :T, : U + 1], targets[:, :U].long(), lengths, *options)
    return costs if reduction == "none" else costs.mean() if reduction == "mean" else costs.sum()


def _checked(logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int) -> Tensor:
    """Frames and labels of each utterance, on the host, int64 (B, 2); ValueError for what has no lattice."""
    B, T, U1, V = dims(logits, "B T U1 V", "logits")
    expect(logits.is_floating_point(), "logits", "floating point", logits.dtype)
    expect(min(B, T, U1, V) > 0, "logits", "no empty dimension", (B, T, U1, V))
    expect(blank in range(-V, V), "blank", f"an index of V={V} tokens", blank)
    sizes = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    for name, tensor in {"targets": targets, **sizes}.items():
        dims(tensor, "B" if name in sizes else "B U", name, B=B, U=U1 - 1)
        expect(tensor.dtype in (torch.int32, torch.int64), name, "int32 or int64", tensor.dtype)
        expect(tensor.device == logits.device, name, f"a tensor on {logits.device}, as the logits", tensor.device)
    wrong = ((targets < 0) | (targets >= V) | (targets == blank % V)) & valid_mask(target_lengths, U1 - 1)
    found = torch.stack((logit_lengths, target_lengths, wrong.sum(1)), 1).cpu()
    for b, (frames, labels, mistakes) in enumerate(found.tolist()):
        expect(0 < frames <= T, "logit_lengths", f"1 to T={T} frames", f"{frames} in utterance {b}")
        expect(0 <= labels < U1, "target_lengths", f"0 to U={U1 - 1} labels", f"{labels} in utterance {b}")
        label = int(targets[b][wrong[b]][0]) if mistakes else 0
        expect(not mistakes, "targets", f"labels 0..{V - 1} but blank={blank % V}", f"{label} in utterance {b}")
    return found[:, :2].long()
