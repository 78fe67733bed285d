"""Notebook 03: the phases of the loss and its rounding, TDT's penalty, and k2's pruning.

The logits are random, or those of one utterance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn.functional import pad

from asrkit.losses import numba_cpu, reference, rnnt_loss, tdt_loss, wavefront
from asrkit.losses.lattice import LatticeOptions, Nodes, Saved
from asrkit.workbench.lessons.joint_memory import Targets, full_targets
from asrkit.workbench.plots.palette import BLUE, PALE_GREY, RED

PHASES = ("scores", "lattice", "gradient")
OVERWRITE = "_overwrite"  # suffix of versions whose gradient overwrites the logits
UNREACHED = -3e4  # nats of a node that no path reaches; float16 ends at -65504
NO_ARC = -1e4
IN_FORMAT = "in the format"
IN_FLOAT64 = "float64"


def random_lattices(B: int, T: int, U1: int, V: int, *, seed: int = 0) -> tuple[Tensor, Targets]:
    """Random float32 logits (B, T, U1, V) that require a gradient, and targets of full length."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, T, U1, V, generator=generator).requires_grad_()
    return logits, full_targets(B, T, U1 - 1, V, seed=seed)


def loss_and_gradient(version: str, targets: Targets, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The loss in nats and its gradient (B, T, U1, V).

    Args:
        version: An `impl` of `rnnt_loss`, with the suffix "_overwrite" if the gradient overwrites
            the logits.
        targets: Labels, and numbers of frames and labels.
        logits: Logits (B, T, U1, V), a leaf.
    """
    impl: Any = version.removesuffix(OVERWRITE)
    loss = rnnt_loss(logits, *targets, impl=impl, overwrite_logits=version.endswith(OVERWRITE))
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def phase_arms(logits: Tensor, targets: Targets) -> dict[tuple[str, str], Callable[[], Any]]:
    """A function for each phase of the loss, by (version, phase).

    The scores are log-probabilities of the arcs, the lattice computes their posteriors, and the
    gradient reads the logits again. The versions are "wavefront" in torch and the compiled
    "numba_cpu"; of the plain "loops" there is only the lattice.

    Args:
        logits: Logits (B, T, U1, V), float32, on a CPU.
        targets: Labels, and numbers of frames and labels, all of full length.
    """
    B, T, U1, V = logits.shape
    labels, *lengths = targets
    nodes = Nodes.padded(logits, torch.stack(lengths, 1))
    options = LatticeOptions(blank=V - 1)
    arms: dict[tuple[str, str], Callable[[], Any]] = {}
    for version, kernels in (("wavefront", wavefront), ("numba_cpu", numba_cpu)):
        on_logits = (labels, nodes, options)
        scores = partial(kernels.arc_log_probs, logits, *on_logits)
        arcs = scores()
        recursions = partial(kernels.lattice, arcs, nodes, options, True)
        posteriors = recursions()
        saved = Saved.from_forward(arcs, posteriors)
        buffer = torch.empty_like(logits)
        gradient = partial(kernels.gradient, logits, buffer, *on_logits, saved, torch.ones(B))
        for phase, arm in zip(PHASES, (scores, recursions, gradient), strict=True):
            arms[version, phase] = arm
    blank_logp = arcs.blank_logp.view(B, T, U1).tolist()
    label_logp = arcs.label_logp.view(B, T, U1)[..., :-1].tolist()
    arms["loops", "lattice"] = lambda: [*map(reference.gradient, blank_logp, label_logp)]
    return arms


def arc_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities in nats of blank arcs (T, U1) and label arcs (T, U) of one lattice.

    Args:
        logits: Logits (T, U1, V); blank is the last token.
        labels: Labels (U,), int64.
    """
    log_probs = logits.log_softmax(-1)
    index = labels.expand(len(log_probs), -1)[..., None]
    return log_probs[..., -1], log_probs[:, :-1].gather(-1, index)[..., 0]


def loss_summed_in(dtype: torch.dtype, blank_logp: Tensor, label_logp: Tensor) -> Tensor:
    """The loss of one lattice in nats, float64, with every sum of the recursion in `dtype`.

    The recursion runs over the anti-diagonals, as on a GPU.

    Args:
        dtype: dtype of the arcs' log-probabilities and of the sums.
        blank_logp: Log-probabilities of blank arcs (T, U1).
        label_logp: Log-probabilities of label arcs (T, U).
    """
    above_last_row = pad(label_logp, (0, 1), value=NO_ARC)
    alpha = torch.full(blank_logp.shape[1:], UNREACHED, dtype=dtype)
    alpha[0] = 0
    diagonals = zip(_by_diagonal(blank_logp), _by_diagonal(above_last_row), strict=True)
    for blank, label in diagonals:
        from_below = (alpha + label.to(dtype)).roll(1)
        alpha = torch.logaddexp(alpha + blank.to(dtype), from_below).clamp(min=UNREACHED)
    return -alpha[-1].double()


def _by_diagonal(arcs: Tensor) -> Tensor:
    """(T, U1) -> (T + U1 - 1, U1): row k has the arcs that start on anti-diagonal k."""
    U1 = arcs.shape[1]
    padded = pad(arcs.T, (0, U1), value=NO_ARC)  # (U1, T + U1)
    # with rows shorter by one, each row starts one place later than the row before
    return padded.flatten()[:-U1].view(U1, -1).T


def rounding_errors(
    lengths: Sequence[int], formats: Mapping[str, torch.dtype], *, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Relative errors of loss and gradient against float64, two rows for each length and format.

    The first row has logits in the format and the package's float64 sums, compared with the
    reference on the same rounded logits. The second has the sums in the format as well.

    Args:
        lengths: Numbers of frames T of the lattices; each has 11 rows and 16 tokens.
        formats: Name -> dtype.
        seed: Seed of logits and labels.
    """
    for T in lengths:
        logits, targets = random_lattices(1, T, 11, 16, seed=seed)
        exact = _exact(logits, targets)
        for name, dtype in formats.items():
            rounded = logits.detach().to(dtype).requires_grad_()
            ours = _with_gradient(rnnt_loss(rounded, *targets), rounded)
            errors = _relative_errors(ours, _exact(rounded, targets))
            yield {"T": T, "format": name, "sums": IN_FLOAT64, **errors}
            arcs = arc_log_probs(logits[0], targets[0][0])
            naive = _with_gradient(loss_summed_in(dtype, *arcs), logits)
            yield {"T": T, "format": name, "sums": IN_FORMAT, **_relative_errors(naive, exact)}


def _with_gradient(loss: Tensor, leaf: Tensor) -> tuple[float, Tensor]:
    return loss.item(), torch.autograd.grad(loss, leaf)[0].double()


def _exact(logits: Tensor, targets: Targets) -> tuple[float, Tensor]:
    wide = logits.detach().double().requires_grad_()
    return _with_gradient(rnnt_loss(wide, *targets, impl="reference"), wide)


def _relative_errors(value: tuple[float, Tensor], exact: tuple[float, Tensor]) -> dict[str, float]:
    gradient_error = (value[1] - exact[1]).norm() / exact[1].norm()
    return {"loss": abs(value[0] - exact[0]) / exact[0], "gradient": float(gradient_error)}


def expected_tokens(sigma: float, T: int, U: int, durations: Sequence[int]) -> float:
    """Average number of tokens of a TDT alignment if all logits are equal.

    It is the derivative of the loss with respect to sigma, by a central difference.

    Args:
        sigma: Nats that the loss subtracts for each token.
        T: Number of frames.
        U: Number of labels.
        durations: Numbers of frames that a token may advance by.
    """
    step = 1e-3
    logits = torch.zeros(1, T, U + 1, 4 + len(durations), dtype=torch.float64)
    targets = (torch.zeros(1, U, dtype=torch.long), torch.tensor([T]), torch.tensor([U]))
    loss = partial(tdt_loss, logits, *targets, durations=tuple(durations))
    return (loss(sigma=sigma + step) - loss(sigma=sigma - step)).item() / (2 * step)


def band(posterior: Tensor, span: int) -> Tensor:
    """The band of rows with the largest posterior: the first row of each frame, (T,), int64.

    The band begins at row 0 and ends with the last row. From one frame to the next it rises by less
    than `span` rows, so that the rows of neighbouring frames overlap. The paper (arXiv 2206.13236,
    section 3.2) chooses the rows of each frame independently and adjusts them; here the best
    connected band is found.

    Args:
        posterior: Probability that a path visits a node, (T, U1).
        span: Number of rows of each frame, large enough for a connected band.
    """
    inside = posterior.unfold(1, span, 1).sum(-1)  # (T, positions of the band)
    best = torch.full_like(inside[0], -inf)
    best[0] = inside[0, 0]
    rises = []
    for row in inside[1:]:
        # the best of the positions from span - 1 rows below up to the same row
        previous, index = pad(best, (span - 1, 0), value=-inf).unfold(0, span, 1).max(-1)
        best = previous + row
        rises.append(span - 1 - index)
    starts = [inside.shape[1] - 1]
    for rise in reversed(rises):
        starts.append(starts[-1] - int(rise[starts[-1]]))
    return torch.tensor(starts[::-1])


def nats_lost_in_band(logits: Tensor, labels: Tensor, spans: Sequence[int]) -> list[float]:
    """Nats that the loss grows by if the joint is computed only in a band of rows.

    The band is chosen by the exact posteriors, which is the best that a simple joint could do.
    Outside of it no arc is possible.

    Args:
        logits: Logits of one lattice, (T, U1, V); blank is the last token.
        labels: Labels (U,), int64.
        spans: Numbers of rows of each frame in the band.
    """
    blank_logp, label_logp = arc_log_probs(logits, labels)
    arcs = (blank_logp.tolist(), label_logp.tolist())
    alpha = torch.tensor(reference.forward_variables(*arcs), dtype=torch.float64)
    beta = torch.tensor(reference.backward_variables(*arcs), dtype=torch.float64)
    posterior = (alpha + beta - beta[0, 0]).exp()
    rows = torch.arange(logits.shape[1])
    lost = []
    for span in spans:
        first = band(posterior, span)[:, None]
        outside = (rows < first) | (rows >= first + span)  # (T, U1)
        by_blank = blank_logp.masked_fill(outside, -inf)
        by_label = label_logp.masked_fill(outside[:, :-1], -inf)
        kept = reference.backward_variables(by_blank.tolist(), by_label.tolist())[0][0]
        lost.append(beta[0, 0].item() - kept)
    return lost


def diagonal(k: int, frames: int, rows: int, ax: Axes) -> Axes:
    """Draw the nodes of a lattice with their steps; circles and arrows mark those of step k.

    Args:
        k: Step, t + u.
        frames: Number of frames T.
        rows: Number of rows U1.
        ax: Axes to draw on; returned.
    """
    t, u = (axis.ravel() for axis in np.meshgrid(np.arange(frames), np.arange(rows)))
    now = t + u == k
    shades = np.where(t + u < k, BLUE, PALE_GREY)
    ax.scatter(t[~now], u[~now], s=330, color=shades[~now], alpha=0.4, lw=0)
    ax.scatter(t[now], u[now], s=330, facecolors="none", edgecolors=RED, lw=2)
    arrow = {"arrowstyle": "->", "lw": 1.3, "shrinkA": 8, "shrinkB": 9}
    for x, y in zip(t.tolist(), u.tolist(), strict=True):
        ax.text(x, y, str(x + y), ha="center", va="center", fontsize=9)
        for before in ((x - 1, y), (x, y - 1)):
            if x + y == k and min(before) >= 0:
                ax.annotate("", (x, y), before, arrowprops=arrow)
    ax.set(xlabel="encoder frame t", ylabel="labels emitted so far, u")
    ax.set(xlim=(-0.6, frames - 0.4), ylim=(-0.6, rows - 0.4))
    return ax
