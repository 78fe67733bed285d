"""Versions of the RNN-T loss beside each other: whole, phase by phase, and through the joint."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from asrkit.losses import rnnt_loss, rnnt_loss_lean
from asrkit.losses.gradient import LogitRows, Saved
from asrkit.losses.logit_rows import plain
from asrkit.losses.nodes import LatticeOptions, Nodes
from asrkit.losses.rnnt import reference, wavefront

Targets = tuple[Any, ...]  # labels (B, U), frames (B,) and numbers of labels (B,)
PHASES = ("scores", "lattice", "gradient")
OVERWRITE = "_overwrite"  # the end of the names of versions whose gradient overwrites the logits


def random_lattices(B: int, T: int, U1: int, V: int, *, seed: int = 0) -> tuple[Tensor, Targets]:
    """Random logits (B, T, U1, V), float32, that require a gradient, and their targets.

    The targets are labels (B, U), frames (B,) and numbers of labels (B,), all of full length.

    Args:
        B: Utterances.
        T: Frames.
        U1: Lattice rows, labels + 1.
        V: Tokens with blank, which is the last one.
        seed: Of logits and labels.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, U1, V, generator=generator).requires_grad_()
    labels = torch.randint(0, V - 1, (B, U1 - 1), generator=generator)
    return logits, (labels, torch.full((B,), T), torch.full((B,), U1 - 1))


def loss_and_gradient(version: str, targets: Targets, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss in nats and its gradient (B, T, U1, V).

    Args:
        version: An `impl` of `rnnt_loss`, with "_overwrite" if the gradient overwrites the logits.
        targets: Labels, frames and numbers of labels.
        logits: (B, T, U1, V), a leaf.
    """
    overwrite = version.endswith(OVERWRITE)
    impl: Any = version.removesuffix(OVERWRITE)
    loss = rnnt_loss(logits, *targets, impl=impl, overwrite_logits=overwrite)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def phase_arms(logits: Tensor, targets: Targets) -> dict[tuple[str, str], Callable[[], Any]]:
    """A function for each phase of the loss, by (version, phase).

    The scores make log-probabilities of the arcs, the lattice makes their posteriors, and the
    gradient goes over the logits again. Versions are "wavefront" in torch and the compiled
    "numba_cpu"; of the plain "loops" there is the lattice alone.

    Args:
        logits: (B, T, U1, V), float32, on a CPU.
        targets: Labels, frames and numbers of labels, all of full length.
    """
    from asrkit.losses.logit_rows import numba_cpu as compiled_rows
    from asrkit.losses.rnnt import numba_cpu

    phases_of = partial(_phases, logits, targets)
    functions = {
        "wavefront": phases_of(plain, wavefront.lattice),
        "numba_cpu": phases_of(compiled_rows, numba_cpu.lattice),
    }
    arms = {("loops", "lattice"): _lattice_in_loops(logits, targets)}
    for version, by_phase in functions.items():
        for phase, function in by_phase.items():
            arms[version, phase] = function
    return arms


def _phases(
    logits: Tensor, targets: Targets, logit_rows: LogitRows, lattice: Callable[..., Any]
) -> dict[str, Callable[[], Any]]:
    """The three phases of one version, each with what the phase before it has computed."""
    labels, *lengths = targets
    nodes = Nodes.padded(logits, torch.stack(lengths, 1))
    options = LatticeOptions(blank=logits.shape[-1] - 1)
    scores = partial(logit_rows.arc_log_probs, logits, labels, nodes, options)
    arcs = scores()
    recursions = partial(lattice, arcs, nodes, options, True)
    posteriors = recursions()
    saved = Saved(arcs.log_z, posteriors.blank_posterior, posteriors.label_posterior, None)
    gradient = partial(
        logit_rows.gradient,
        logits,
        torch.empty_like(logits),
        labels,
        nodes,
        options,
        saved,
        torch.ones(len(logits)),
    )
    return dict(zip(PHASES, (scores, recursions, gradient), strict=True))


def _lattice_in_loops(logits: Tensor, targets: Targets) -> Callable[[], Any]:
    """Both recursions of every utterance in Python's loops."""
    B, T, U1, _ = logits.shape
    nodes = Nodes.padded(logits, torch.stack(targets[1:], 1))
    options = LatticeOptions(blank=logits.shape[-1] - 1)
    arcs = plain.arc_log_probs(logits, targets[0], nodes, options)
    blank_logp = arcs.blank_logp.view(B, T, U1).tolist()
    label_logp = arcs.label_logp.view(B, T, U1)[..., :-1].tolist()

    def loops() -> list[Any]:
        pairs = zip(blank_logp, label_logp, strict=True)
        return [reference.gradient(blank, label) for blank, label in pairs]

    return loops


def joint_leaves(B: int, T: int, U1: int, D: int, V: int, *, seed: int = 0) -> list[Tensor]:
    """Random inputs of a joint that require gradients: encoded, predicted, weight and bias.

    Their shapes are (B, T, D), (B, U1, D), (V, D) and (V,).

    Args:
        B: Utterances.
        T: Frames.
        U1: Lattice rows.
        D: Width of the hidden layer.
        V: Tokens with blank.
        seed: Of all values.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves = []
    for size in ((B, T, D), (B, U1, D), (V, D), (V,)):
        values = torch.randn(size, generator=generator) / D**0.25
        leaves.append(values.requires_grad_())
    return leaves


def joint_versions(leaves: list[Tensor], targets: Targets) -> Mapping[str, Callable[[], Any]]:
    """From the inputs of a joint to the loss and all four gradients, a function for each version.

    All but "lean" compute the whole joint, with tanh as its activation.

    Args:
        leaves: Encoded, predicted, weight and bias, see `joint_leaves`.
        targets: Labels, frames and numbers of labels.
    """
    names = ("torchaudio", "wavefront", "numba_cpu", f"numba_cpu{OVERWRITE}")
    versions: dict[str, Callable[[], Any]] = {}
    for name in names:
        versions[name] = partial(_through_joint, name, leaves, targets)
    versions["lean"] = partial(_without_joint, leaves, targets)
    return versions


def _through_joint(version: str, leaves: list[Tensor], targets: Targets) -> tuple[Tensor, ...]:
    encoded, predicted, weight, bias = leaves
    hidden = torch.tanh(encoded[:, :, None] + predicted[:, None])
    logits = torch.nn.functional.linear(hidden, weight, bias)
    overwrite = version.endswith(OVERWRITE)
    impl: Any = version.removesuffix(OVERWRITE)
    loss = rnnt_loss(logits, *targets, impl=impl, overwrite_logits=overwrite)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def _without_joint(leaves: list[Tensor], targets: Targets) -> tuple[Tensor, ...]:
    loss = rnnt_loss_lean(*leaves, *targets, activation="tanh")
    return loss.detach(), *torch.autograd.grad(loss, leaves)
