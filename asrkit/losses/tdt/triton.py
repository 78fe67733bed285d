"""The TDT loss on a GPU: Triton's passes over the logits, and the lattice of rnnt/triton.py."""

from torch import Tensor

from asrkit.losses.gradient import kernel_loss
from asrkit.losses.logit_rows import triton as rows
from asrkit.losses.nodes import ArcLogProbs, ArcPosteriors, LatticeOptions, Nodes
from asrkit.losses.rnnt.triton import solve


def losses(logits: Tensor, targets: Tensor, nodes: Nodes, options: LatticeOptions) -> Tensor:
    """Loss of each utterance in nats, (B,), from checked logits, targets, nodes and options."""
    return kernel_loss(logits, targets, nodes, options, rows, lattice)


def lattice(arcs: ArcLogProbs, nodes: Nodes, options: LatticeOptions, grad: bool) -> ArcPosteriors:
    """Log-likelihoods and, with `grad`, posteriors of the `arcs` that leave the `nodes`.

    Arcs are float32, sums float64. Of `options` it reads durations and fastemit_lambda.
    """
    return solve(arcs, nodes, options.durations, 1 + options.fastemit_lambda, grad)
