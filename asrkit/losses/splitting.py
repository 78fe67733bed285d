"""Batch splitting: encoder and predictor process the whole batch, joint and loss a part of it.

The joint is the only tensor of size B T U1 V, so it determines the memory of a transducer, while
encoder and predictor profit from large batches. Backward recomputes the joint of each sub-batch
(torch.utils.checkpoint), so the joint of only one sub-batch exists at any time.

The cost: the forward of the joint runs twice, with four matrix products instead of three, and so
does that of the loss. Other packages make other trade-offs. NVIDIA's MLPerf Training v1.0
submission (batch_split_factor) cuts the graph above the joint and calls backward on each sub-batch
immediately. That takes three products, but also its own training loop, which must know the scale of
the loss. NeMo (fused_batch_size) splits forward only: it keeps the graphs of all sub-batches until
one backward at the end.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asrkit.losses.arguments import Reduction, check_options, reduce
from asrkit.losses.rnnt import rnnt_loss
from asrkit.shapes import dims, expect, whole
from asrkit.threads import eager


@eager
def split_batches(  # noqa: PLR0913 - a loss's arguments, and those that compute its logits
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
    """Return loss(joint(encoded, predicted), targets, ...) of the whole batch, in nats.

    Values and gradients are those of the whole batch. Dropout in the joint uses the same mask in
    forward and backward, but not the mask that the whole batch would draw.
    Memory: the joint of one sub-batch and its gradient, min(size, B) T U1 V numbers each.

    Args:
        joint: Maps encoded (b, T, D) and predicted (b, U1, D) to logits (b, T, U1, V). Each
            sub-batch is cut to its own longest T and U1.
        encoded: (B, T, D).
        predicted: (B, U1, D).
        targets: Labels (B, U), int32 or int64.
        logit_lengths: Frames (B,).
        target_lengths: Labels (B,).
        size: Utterances of a sub-batch. If it is B or more, nothing is recomputed.
        loss: rnnt_loss, tdt_loss, or a function with the same arguments. tdt_loss draws omega once
            for each sub-batch.
        reduction: Reduction over the whole batch: "mean", "sum" or "none".
        options: Further arguments of `loss`.

    Returns:
        The loss in nats: a scalar, or (B,) with reduction="none".

    >>> from asrkit.models import ConvConfig, TransducerConfig, TransducerModel
    >>> encoder = ConvConfig(width=16, layers=1)
    >>> model = TransducerModel(TransducerConfig(vocab_size=5, encoder=encoder))
    >>> targets, lengths = torch.tensor([[0, 1], [2, 0]]), torch.tensor([2, 1])
    >>> encoded, frames, _ = model.encode(torch.zeros(2, 40, 80), torch.tensor([40, 32]))
    >>> join = lambda encoded, predicted: model.join(encoded[:, :, None], predicted[:, None])
    >>> split_batches(join, encoded, model.rows(targets), targets, frames, lengths, size=1).shape
    torch.Size([])
    """
    expect(whole(size, 1), "size", "a number of utterances, at least 1", size)
    check_options(reduction)
    B, _, _ = dims(encoded, "B T D", "encoded")
    dims(predicted, "B U1 D", "predicted", B=B)
    lengths = torch.stack((logit_lengths, target_lengths), 1).cpu()

    def losses(encoded: Tensor, predicted: Tensor, *rest: Tensor) -> Tensor:
        return loss(joint(encoded, predicted), *rest, reduction="none", **options)

    if size >= B:
        whole_batch = (encoded, predicted, targets, logit_lengths, target_lengths)
        return reduce(losses(*whole_batch), reduction)
    batch_tensors = (lengths, encoded, predicted, targets, logit_lengths, target_lengths)
    costs = []
    for longest, e, p, labels, *sizes in zip(
        *(part.split(size) for part in batch_tensors), strict=True
    ):
        T, U = longest.amax(0).tolist()
        sub_batch = (e[:, :T], p[:, : U + 1], labels[:, :U], *sizes)
        costs.append(checkpoint(losses, *sub_batch, use_reentrant=False))
    return reduce(torch.cat(costs), reduction)
