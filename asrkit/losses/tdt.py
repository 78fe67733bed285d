"""The token-and-duration transducer (TDT) loss: arguments checked, an implementation picked, the
batch reduced.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from asrkit.losses.choice import pick
from asrkit.losses.gradient import lattice_loss
from asrkit.losses.lattice import (
    LatticeOptions,
    Nodes,
    Reduction,
    check_durations,
    check_lengths,
    check_options,
    check_scores,
    reduce,
    takes_plain_loss,
)
from asrkit.shapes import dims, expect
from asrkit.threads import eager

Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "triton"]
IMPLS = get_args(Impl)[1:]  # files of asrkit.losses


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
    impl: Impl = "auto",
) -> Tensor:
    """Negative log-likelihood of the targets in nats (TDT loss), float32 or float64.

    A token moves by a duration of its node: a label by any, blank by those above 0, and the last
    blank has to land on the end of the frames. An utterance that no such path crosses (odd T with
    durations=(2,)) costs inf, as does then the mean or sum of its batch, and has no gradient. All
    else is as in `rnnt_loss`.

    Source: H. Xu et al., arXiv 2304.06795, equations 5 to 9.

    Args:
        logits: (B, T, U1, V + n): V token logits, then one for each of the n durations. Both parts
            have a softmax of their own.
        targets: labels (B, U), int32 or int64. These and both lengths lie on the logits' device,
            or on the host, where checking them waits for no GPU.
        logit_lengths: frames of each utterance, (B,).
        target_lengths: labels of each utterance, (B,).
        blank: index of the blank among the V tokens, -V to V - 1.
        clamp: limits each element of the gradient of an utterance's loss to +-clamp, if > 0.
        reduction: "mean" or "sum" over the batch, or "none".
        durations: in frames, distinct, one of them above 0.
        sigma: nats subtracted from every token's log-probability, which favours long durations
            (paper: 0.05); the loss contains it.
        omega: probability that a call takes the RNN-T loss of the token logits instead, without
            sigma and with no gradient over durations (paper: 0.1). One draw for the batch from
            torch's CPU generator, which omega=0 leaves alone.
        fastemit_lambda: scales the gradient of label arcs by 1 + lambda, as in `rnnt_loss`.
        overwrite_logits: write the gradient over the logits, as in `rnnt_loss`.
        impl: the implementation; "auto" takes the fastest that is known to be.

    Returns:
        A scalar, or (B,) with reduction="none". Losses of half-precision logits are float32.

    Raises:
        ValueError: an argument does not fit; the message names it and a remedy.

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
    picked = pick(impl, IMPLS, logits, overwrite_logits)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
        durations=tuple(durations),
        sigma=sigma,
        as_rnnt=takes_plain_loss(omega),
    )
    costs = lattice_loss(picked, logits, targets, Nodes.padded(logits, lengths), options)
    return reduce(costs, reduction)
