"""The token-and-duration transducer (TDT) loss.

Its arcs, blanks among them, are those of `LatticeOptions.steps` in lattice.py.
"""

from collections.abc import Sequence
from typing import get_args

from torch import Tensor

from asrkit.losses.arguments import (
    Reduction,
    TdtImpl,
    check_durations,
    check_lengths,
    check_options,
    check_scores,
    choose,
    draws_rnnt,
    reduce,
)
from asrkit.losses.gradient import lattice_loss
from asrkit.losses.lattice import LatticeOptions, Nodes
from asrkit.shapes import dims, expect
from asrkit.threads import eager

IMPLS = get_args(TdtImpl)[1:]  # files of asrkit.losses


@eager
def tdt_loss(  # noqa: PLR0913 - rnnt_loss's arguments and those of the durations
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = -1,
    clamp: float = -1,
    reduction: Reduction = "mean",
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    sigma: float = 0.0,
    omega: float = 0.0,
    fastemit_lambda: float = 0.0,
    overwrite_logits: bool = False,
    impl: TdtImpl = "auto",
) -> Tensor:
    """Negative log-likelihood of the targets in nats (TDT loss), float32 or float64.

    Each token advances by a duration: a label by any of them, blank by one above 0. The last blank
    must land exactly on the end of the frames. If an utterance has no such path (odd T with
    durations=(2,)), its loss is inf, as is the mean or sum of its batch, and its gradient is 0.
    Everything else is as in `rnnt_loss`.

    Source: H. Xu et al., arXiv 2304.06795, equations 5 to 9.

    Args:
        logits: (B, T, U1, V + n): V token logits, then one logit for each of the n durations. Each
            part has its own softmax.
        targets: Labels (B, U), int32 or int64. Targets and both lengths may be on the logits'
            device or on the host. On the host they are checked without waiting for a GPU.
        logit_lengths: Frames of each utterance, (B,).
        target_lengths: Labels of each utterance, (B,).
        blank: Index of blank among the V tokens, -V to V - 1.
        clamp: If > 0, limits each element of the gradient of an utterance's loss to +-clamp.
        reduction: "mean" or "sum" over the batch, or "none".
        durations: Distinct numbers of frames, one of them above 0.
        sigma: Nats subtracted from every token's log-probability, which favours long durations
            (paper: 0.05). The returned loss includes it.
        omega: Probability that a call computes the RNN-T loss of the token logits instead, without
            sigma and without a gradient over durations (paper: 0.1). The call draws once for the
            whole batch from torch's CPU generator, and not at all if omega is 0.
        fastemit_lambda: Scales the gradient of label arcs by 1 + lambda, as in `rnnt_loss`.
        overwrite_logits: Write the gradient over the logits, as in `rnnt_loss`.
        impl: The implementation; "auto" chooses the fastest for the device and dtype.

    Returns:
        A scalar, or (B,) with reduction="none". Losses of half-precision logits are float32.

    Raises:
        ValueError: An argument does not fit; the message names it and a remedy.

    >>> logits, targets = torch.zeros(1, 2, 2, 5), torch.tensor([[0]])
    >>> tdt_loss(logits, targets, torch.tensor([2]), torch.tensor([1]), durations=(0, 1))
    tensor(3.2958)
    """
    check_options(reduction, clamp, fastemit_lambda)
    check_durations(durations, sigma, omega)
    _, T, U1, width = dims(logits, "B T U1 V", "logits")
    V = width - len(durations)
    check_scores(logits, "logits")
    wanted = f"token logits before the {len(durations)} of the durations"
    expect(V > 0, "logits", wanted, f"{width} logits in all")
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=logits, T=T, U1=U1, V=V
    )
    chosen = choose(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
        durations=tuple(durations),
        sigma=sigma,
        as_rnnt=draws_rnnt(omega),
    )
    costs = lattice_loss(chosen, logits, targets, Nodes.padded(logits, lengths), options)
    return reduce(costs, reduction)
