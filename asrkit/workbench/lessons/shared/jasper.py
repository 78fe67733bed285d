"""A Jasper with random weights, and latencies of its variants."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from asrkit.models import CTCConfig, CTCModel
from asrkit.models.inference import cast_copy
from asrkit.workbench.lessons.shared.variants import Encode, arm, random_features, weights_dtype
from asrkit.workbench.measure import Timing, measure

WARM_UP = 16  # untimed calls


def random_jasper(config: CTCConfig, device: str) -> CTCModel:
    """A model in eval mode with seeded random weights and batch norm statistics of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(config).requires_grad_(False)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = None  # take the statistics of the next batch
        noise = torch.randn(1, 100, config.encoder.bins)
        model.train()(noise, torch.tensor([100]))
    return model.eval().to(device)


def latencies(
    model: CTCModel,
    B: int,
    seconds: float,
    variants: Iterable[str],
    *,
    repeats: int,
    warmup: int = WARM_UP,
) -> dict[str, Timing]:
    """Times of calls from float32 features to the best token of each frame, with variants in turns.

    Args:
        model: model in float32 and in eval mode, on its device.
        B: utterances per call.
        seconds: length of each utterance.
        variants: names as in variants.py, such as "float32" and "optimized_bfloat16".
        repeats: timed calls.
        warmup: untimed calls.
    """
    device = next(model.parameters()).device.type
    features, _ = random_features(B, seconds, model.encoder.config.bins, device)
    inputs = (features, torch.full((B,), features.shape[1], device=device))
    calls = {}
    for variant in variants:
        encode = arm(cast_copy(model, weights_dtype(variant)), inputs, variant)
        calls[variant] = partial(best_tokens, encode)
    with fastest_convolutions():
        return measure(calls, repeats=repeats, warmup=warmup, device=device)


def best_tokens(encode: Encode) -> Tensor:
    """The best token of each frame (B, T) of the log-probabilities that a call computes."""
    return encode()[0].argmax(-1)


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN choose its fastest convolution for each new shape, as in the published tables."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
