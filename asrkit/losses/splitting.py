"""Batch splitting: encoder and predictor see the whole batch, the joint and the loss a few
utterances at a time.

The joint is the only tensor of size B T U1 V, so it sets the memory of a transducer, while encoder
and predictor want large batches. What a sub-batch's joint needs for its gradient is computed again
in backward (torch.utils.checkpoint), so no more than one sub-batch's joint exists at any time.

The price: the joint's forward runs twice, four matrix products instead of three, and so does the
loss's. Others pay differently. NVIDIA's MLPerf Training v1.0 submission (batch_split_factor) cuts
the graph above the joint and calls backward on each sub-batch at once: three products, but a
training loop of its own, which must know the scale of the loss. NeMo (fused_batch_size) splits the
forward only: one backward at the end, until which every sub-batch's graph is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asrkit.losses.lattice import Reduction, check_options, reduce
from asrkit.losses.rnnt import rnnt_loss
from asrkit.shapes import dims, expect, whole
from asrkit.threads import eager


@eager
def split_batches(  # noqa: PLR0913 - a loss's arguments, and how to make its logits
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
    """loss(joint(encoded, predicted), targets, ...) of the whole batch, in nats.

    Values and gradients are those of the whole batch. Dropout in the joint repeats its mask in
    backward, though the draw differs from the whole batch's.
    Memory: the joint and its gradient of one sub-batch, min(size, B) T U1 V each.

    Args:
        joint: takes encoded (b, T, D) and predicted (b, U1, D), returns logits (b, T, U1, V). Each
            sub-batch is cut to its own longest T and U1.
        encoded: (B, T, D).
        predicted: (B, U1, D).
        targets: labels (B, U), int32 or int64.
        logit_lengths: frames (B,).
        target_lengths: labels (B,).
        size: utterances of a sub-batch.
        loss: rnnt_loss, tdt_loss, or one with the same arguments. tdt_loss draws omega for each
            sub-batch.
        reduction: over the whole batch, "mean", "sum" or "none".
        options: further arguments of `loss`.

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

    batch_tensors = (lengths, encoded, predicted, targets, logit_lengths, target_lengths)
    costs = []
    for longest, e, p, labels, *sizes in zip(
        *(part.split(size) for part in batch_tensors), strict=True
    ):
        T, U = longest.amax(0).tolist()
        sub_batch = (e[:, :T], p[:, : U + 1], labels[:, :U], *sizes)
        costs.append(checkpoint(losses, *sub_batch, use_reentrant=False))
    return reduce(torch.cat(costs), reduction)
