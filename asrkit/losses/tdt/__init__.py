"""The door to the token-and-duration transducer (TDT) loss: check once, pick an implementation,
reduce.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from torch import Tensor

from asrkit.losses.availability import pick
from asrkit.losses.checks import (
    Reduction,
    as_index,
    check_durations,
    check_lengths,
    check_options,
    check_scores,
    reduce,
    takes_plain_loss,
)
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.runtime import eager
from asrkit.shapes import dims, expect

Impl = Literal["auto", "reference", "wavefront", "numba_cpu", "numba_cuda", "triton"]
IMPLS = (
    "reference",
    "wavefront",
    "numba_cpu",
    "numba_cuda",
    "triton",
)  # modules of this folder, each with `losses`


def resolve(impl: Impl, logits: Tensor, *, overwrite_logits: bool = False) -> str:
    """Name of the implementation that `tdt_loss` runs for these arguments; ValueError where a named
    one cannot run.
    """
    return pick(impl, IMPLS, logits, overwrite_logits)


@eager
def tdt_loss(
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
    """Negative log-likelihood of the targets in nats: its mean or sum over the batch, or one per
    utterance, (B,).

    logits (B, T, U1, V + n): V token logits, blank = -1 the last of these, then one logit for each
    of the n `durations`; both parts have a softmax of their own. A token moves by a duration of its
    node: a label by any, blank by those above 0, and the last blank has to land on the end of the
    frames. An utterance that no such path crosses (odd T with durations=(2,)) costs inf, as does
    then the mean or sum of its batch, and has no gradient.
    Source: H. Xu et al., arXiv 2304.06795, equations 5 to 9. All else is as in `rnnt_loss`.

    sigma (paper: 0.05) is subtracted from every token's log-probability, so long durations pay; the
    loss contains it. omega (paper: 0.1) is the probability that a call takes the RNN-T loss of the
    token logits instead, without sigma and with no gradient over durations: one draw for the batch
    from torch's CPU generator, which omega=0 leaves alone.

    >>> tdt_loss(torch.zeros(1, 2, 2, 5), torch.tensor([[0]]), torch.tensor([2]), torch.tensor([1]),
    durations=(0, 1)) tensor(3.2958)
    """
    check_options(reduction, clamp, fastemit_lambda)
    check_durations(durations, sigma, omega)
    _, T, U1, width = dims(logits, "B T U1 V", "logits")
    V = width - len(durations)
    check_scores(logits, "logits")
    expect(
        V > 0,
        "logits",
        f"token logits before the {len(durations)} of the durations",
        f"{width} logits in all",
    )
    lengths = check_lengths(
        targets, logit_lengths, target_lengths, blank, like=logits, T=T, U1=U1, V=V
    )
    picked = resolve(impl, logits, overwrite_logits=overwrite_logits)
    sampled = takes_plain_loss(omega)
    options = LatticeOptions(
        blank=blank % V,
        clamp=clamp,
        fastemit_lambda=fastemit_lambda,
        overwrite_logits=overwrite_logits,
        durations=tuple(durations),
        sigma=0.0 if sampled else sigma,
    )
    run = import_module(f"asrkit.losses.{'rnnt' if sampled else 'tdt'}.{picked}").losses
    return reduce(run(logits, as_index(targets), Nodes.padded(logits, lengths), options), reduction)
