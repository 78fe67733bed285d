"""Ragged batches of logits and of a joint's halves, and their losses and gradients, for tests of kernels."""

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def integers(generator, B, T, U, V, blank=-1):
    """Random (targets, logit_lengths, target_lengths); at least one utterance has T frames, and one U labels."""
    targets = torch.randint(0, V - 1, (B, U), generator=generator)
    targets += (targets >= blank % V).long()
    frames = torch.full((B,), T)
    labels = torch.full((B,), U)
    others = (B - 1,)
    frames[1:] = torch.randint(1, T + 1, others, generator=generator)
    labels[:-1] = torch.randint(0, U + 1, others, generator=generator)
    return targets, frames, labels


def lattice(seed, B, T, U, V, *, n=0, dtype=torch.float64, blank=-1):
    """Random logits (B, T, U + 1, V + n), of tokens and then of durations, and `integers`."""
    g = torch.Generator().manual_seed(seed)
    size = B, T, U + 1, V + n
    logits = 2 * torch.randn(size, generator=g, dtype=torch.float64)
    return logits.to(dtype), *integers(g, B, T, U, V, blank)


def halves(seed, B, T, U, D, V, *, n=0, dtype=torch.float32, blank=-1):
    """Random [encoded, predicted, weight, bias] of a joint with V + n outputs, and `integers`."""
    g = torch.Generator().manual_seed(seed)
    sizes = [
        (B, T, D),
        (B, U + 1, D),
        (V + n, D),
        (V + n,),
    ]
    drawn = [torch.randn(size, generator=g, dtype=torch.float64) for size in sizes]
    tensors = [tensor.to(dtype) for tensor in drawn]
    return tensors, integers(g, B, T, U, V, blank)


def poisoned(logits, targets, frames, labels, filler=math.nan):
    """The same lattice with `filler`, infinity and invalid labels in the padding."""
    logits = logits.clone()
    targets = targets.clone()
    for b in range(len(logits)):
        logits[b, frames[b] :] = filler
        logits[b, :, labels[b] + 1 :] = math.inf
        targets[b, labels[b] :] = -100 if b % 2 else 10**6
    return logits, targets, frames, labels


def poisoned_halves(tensors, targets, frames, labels):
    """The same halves with NaN, infinity and invalid labels in the padding."""
    encoded, predicted, *output = (tensor.clone() for tensor in tensors)
    targets = targets.clone()
    for b in range(len(encoded)):
        encoded[b, frames[b] :] = math.nan
        predicted[b, labels[b] + 1 :] = math.inf
        targets[b, labels[b] :] = 10**6
    return [encoded, predicted, *output], (targets, frames, labels)


def batch(seed, *sizes, dtype=torch.float32, fused=True, device="cpu", **options):
    """A `lattice` with poisoned padding on a device; log-probabilities unless `fused`."""
    logits, *rest = lattice(seed, *sizes, **options)
    if not fused:
        logits = logits.log_softmax(-1)
    return [part.to(device) for part in poisoned(logits.to(dtype), *rest)]


def graded(loss, logits, *rest, **options):
    """The losses (B,), and the gradient of their weighted sum by the logits, or by each tensor of a list."""
    inputs = logits if isinstance(logits, list) else [logits]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    costs = loss(*leaves, *rest, reduction="none", **options)
    weight = torch.linspace(-1, 2.5, len(costs), device=costs.device).to(costs)
    gradients = torch.autograd.grad(costs, leaves, weight)
    return costs.detach(), *gradients


def expect_no_worse_than(rival, actual, truth, tiny):
    """Assert errors of at most twice the `rival`'s plus `tiny` times the largest value, in each tensor."""
    for place, parts in enumerate(zip(rival, actual, truth, strict=True)):
        # an utterance without a path costs infinity
        infinite = [part.isinf().cpu() for part in parts[1:]]
        assert torch.equal(*infinite)
        theirs, ours, expected = (
            part.detach().cpu().double().nan_to_num(math.nan, posinf=0)
            for part in parts
        )
        size = expected.abs().max().clamp(min=1)
        allowed = 2 * (theirs - expected).abs().max() + tiny * size
        assert (ours - expected).abs().max() <= allowed, place
