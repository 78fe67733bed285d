"""Batch splitting: encoder and predictor see the whole batch, the joint and the loss a few
utterances at a time.

The joint is the only tensor of size B T U1 V, so it sets the memory of a transducer; encoder and
predictor want large batches. What a sub-batch's joint needs for its gradient is computed again in
backward (torch.utils.checkpoint), so no more than one sub-batch's joint exists at any time.
Price: the joint's forward runs twice, four matrix products in place of three, and so does the
loss's. Others pay otherwise. NVIDIA's MLPerf Training v1.0 submission (batch_split_factor) cuts the
graph above the joint and calls backward on each sub-batch at once: three products, but a training
loop of its own, that must know the scale of the loss. NeMo (fused_batch_size) splits the forward
alone: one backward at the end, for which every sub-batch's graph waits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asrkit.losses.checks import Reduction, check_options, reduce
from asrkit.losses.packed import check_halves
from asrkit.losses.rnnt import rnnt_loss
from asrkit.runtime import eager
from asrkit.shapes import dims, expect


@eager
def split_batches(
    joint: Callable[[Tensor, Tensor], Tensor],
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    size: int,
    loss: Callable[..., Tensor] = rnnt_loss,
    reduction: Reduction = "mean",
    **options: Any,
) -> Tensor:
    """loss(joint(encoded, predicted), targets, ...) of the whole batch, in nats, from the joint of
    `size` utterances at a time.

    joint(encoded (b, T, D), predicted (b, U1, D)) returns logits (b, T, U1, V); each sub-batch is
    cut to its own longest T and U1. `options` go to `loss`: rnnt_loss, tdt_loss or one with the
    same arguments (tdt_loss draws omega for each sub-batch). Values and gradients are the whole
    batch's; dropout in the joint repeats its mask in backward, though the draw differs from the
    whole batch's. Memory: the joint and its gradient of one sub-batch, min(size, B) T U1 V each.

    >>> from asrkit.models import ConvConfig, TransducerConfig, TransducerModel
    >>> model = TransducerModel(TransducerConfig(vocab_size=5, encoder=ConvConfig(width=16,
    layers=1)))
    >>> targets, lengths = torch.tensor([[0, 1], [2, 0]]), torch.tensor([2, 1])
    >>> encoded, frames, _ = model.encode(torch.zeros(2, 40, 80), torch.tensor([40, 32]))
    >>> join = lambda encoded, predicted: model.join(encoded[:, :, None], predicted[:, None])
    >>> split_batches(join, encoded, model.rows(targets), targets, frames, lengths, size=1).shape
    torch.Size([])
    """
    expect(isinstance(size, int) and size >= 1, "size", "a number of utterances, at least 1", size)
    check_options(reduction)
    lengths = check_halves(encoded, predicted, logit_lengths, target_lengths)
    dims(targets, "B U", "targets", B=len(encoded), U=predicted.shape[1] - 1)

    def losses(encoded: Tensor, predicted: Tensor, *rest: Tensor) -> Tensor:
        return loss(joint(encoded, predicted), *rest, reduction="none", **options)

    costs, given = [], (lengths, encoded, predicted, targets, logit_lengths, target_lengths)
    for longest, e, p, labels, *sizes in zip(
        *(tensor.split(size) for tensor in given), strict=True
    ):
        T, U = longest.amax(0).tolist()
        costs.append(
            checkpoint(losses, e[:, :T], p[:, : U + 1], labels[:, :U], *sizes, use_reentrant=False)
        )
    return reduce(torch.cat(costs), reduction)
