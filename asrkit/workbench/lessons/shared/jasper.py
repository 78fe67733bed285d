"""A Jasper with random weights, and the latencies of its variants."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from asrkit.models import CTCConfig, CTCModel
from asrkit.models.inference import cast_copy
from asrkit.workbench.lessons.shared.variants import Encode, arm, speech, weights_dtype
from asrkit.workbench.measure import Timing, measure

WARM_UP = 16  # calls before those that count


def random_jasper(config: CTCConfig, device: str) -> CTCModel:
    """A model in eval mode with seeded random weights, whose norms have the statistics of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CTCModel(config).requires_grad_(False)
        for part in model.modules():
            if isinstance(part, nn.BatchNorm1d):
                part.momentum = None  # its statistics are those of the next batch
        noise = torch.randn(1, 100, config.encoder.bins)
        model.train()(noise, torch.tensor([100]))
    return model.eval().to(device)


def latencies(
    model: CTCModel,
    B: int,
    seconds: float,
    ways: Iterable[str],
    *,
    repeats: int,
    warmup: int = WARM_UP,
) -> dict[str, Timing]:
    """Times of calls that run a Jasper and take the best token of each frame, the ways in turns.

    Features are ready before, in float32.

    Args:
        model: in eval mode, float32, on its device.
        B: utterances of a call.
        seconds: of each utterance.
        ways: names of `asrkit.workbench.lessons.shared.variants`, such as "float32" and "optimized_bfloat16".
        repeats: calls that count.
        warmup: calls before those.
    """
    device = next(model.parameters()).device.type
    features, _ = speech(B, seconds, model.encoder.config.bins, device)
    inputs = (features, torch.full((B,), features.shape[1], device=device))
    calls = {}
    for way in ways:
        encode = arm(cast_copy(model, weights_dtype(way)), inputs, way)
        calls[way] = partial(best_tokens, encode)
    with fastest_convolutions():
        return measure(calls, repeats=repeats, warmup=warmup, device=device)


def best_tokens(encode: Encode) -> Tensor:
    """The best token of each frame (B, T) of the log-probabilities that a call computes."""
    return encode()[0].argmax(-1)


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN try its convolutions on each new shape, as published."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
