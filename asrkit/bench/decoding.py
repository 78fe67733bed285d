"""Suites of what surrounds the losses: greedy decoding, and features."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial

import torch

from asrkit.bench.cases import Arms, Case, rows
from asrkit.decoders import ctc_greedy, ctc_greedy_sequential, transducer_greedy
from asrkit.features import normalize, normalize_sequential
from asrkit.models import LSTMConfig, TransducerConfig, TransducerModel


def greedy(device: str, quick: bool) -> Iterator[Case]:
    """Greedy CTC, one by one and batched, then a transducer of random weights. Least work: read once; one joint a step."""
    B, T, V = (8, 50, 129) if quick else (32, 250, 1025)
    logits, lengths = rows(B, T, V, device)
    both = {"sequential": ctc_greedy_sequential, "batched": ctc_greedy}
    arms: Arms = {name: partial(decode, logits.log_softmax(-1), lengths) for name, decode in both.items()}
    yield Case(what="ctc-greedy-batched", arms=arms, params={"shape": [B, T, V], "floor_B": 4 * B * T * V})
    V, D, T = (33, 32, 20) if quick else (1025, 320, 50)
    config = TransducerConfig(vocab_size=V - 1, predictor=LSTMConfig(width=D), joint_width=D)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        weights = TransducerModel(config).eval()
        start = weights.join(3 * rows(32, T, D, "cpu")[0], weights.predict(torch.tensor([V - 1]))[0])
        weights.output.bias[-1] += (start[..., :-1].amax(-1) - start[..., -1]).quantile(0.75)  # a label on a frame in four

    def pair(dtype: torch.dtype) -> Arms:
        call = partial(transducer_greedy, deepcopy(weights).to(device, dtype), 3 * encoded.to(dtype), lengths)
        return {"one_by_one": partial(call, strategy="one_by_one"), "frame_looping": partial(call, strategy="frame_looping")}

    for B in (1, 4) if quick else (1, 8, 32):
        encoded, lengths = rows(B, T, D, device)
        arms, proof = pair(torch.float32), pair(torch.float64)
        steps = int(lengths.sum() + arms["frame_looping"]().lengths.sum())
        params = {"shape": [B, T, D, V], "steps": steps, "floor_FLOP": steps * 2 * D * V}
        yield Case(what="transducer-frame-looping", arms=arms, params=params, proof=proof)


def features(device: str, quick: bool) -> Iterator[Case]:
    """Per-feature normalisation, one utterance after another and batched. Least work: read once, write once."""
    B, T, F = (8, 200, 80) if quick else (32, 1600, 80)
    mel = rows(B, T, F, device)
    arms = {"sequential": lambda: (normalize_sequential(*mel),), "batched": lambda: (normalize(*mel),)}
    yield Case(what="feature-norm-batched", arms=arms, params={"shape": [B, T, F], "floor_B": 2 * 4 * B * T * F})
