"""Ragged batches of logits for the tests of kernels."""

import math

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def batch(
    seed,
    B,
    T,
    U,
    V,
    *,
    n=0,
    dtype=torch.float32,
    blank=-1,
    fused=True,
    device="cpu",
):
    """Random ragged (logits, targets, logit_lengths, target_lengths), with NaN for padding."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(B, T, U + 1, V + n, generator=g)
    logits = (logits if fused else logits.log_softmax(-1)).to(dtype)
    targets = torch.randint(0, V - 1, (B, U), generator=g)
    targets += (targets >= blank % V).long()
    frames, labels = torch.full((B,), T), torch.full((B,), U)
    frames[1:], labels[:-1] = (
        torch.randint(1, T + 1, (B - 1,), generator=g),
        torch.randint(0, U + 1, (B - 1,), generator=g),
    )
    for b in range(B):
        logits[b, frames[b] :] = logits[b, :, labels[b] + 1 :] = math.nan
        targets[b, labels[b] :] = -100
    logits = logits.to(device)
    return logits, targets.to(device), frames.to(device), labels.to(device)
