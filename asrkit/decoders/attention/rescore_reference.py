"""What `aed_rescore` computes, in plain loops: one text at a time, a token at a time, no memory."""

from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.attention.prefix_scores import check_weight
from asrkit.decoders.attention.rescore import ranks_of, stacked
from asrkit.decoders.attention.steps import Attention, Prompt, check_model, prompt_of
from asrkit.decoders.hypotheses import Hypotheses, check_batch
from asrkit.runtime import eager


@eager
def aed_rescore_reference(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    texts: Hypotheses,
    *,
    prompt: Prompt | None = None,
    ctc_weight: float = 0.3,
) -> Hypotheses:
    """What `aed_rescore` computes; slow and readable.

    Args:
        model: As in `aed_rescore`, like everything that follows.
        encoded: (B, T, D) frames.
        lengths: (B,) valid frames.
        texts: The best of each utterance and its alternatives.
        prompt: Tokens before the text.
        ctc_weight: Share of the texts' own scores.
    """
    check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model)
    check_weight(ctc_weight)
    ranks = ranks_of(texts, encoded)
    prompts = prompt_of(model, prompt, encoded)
    stacked(model, ranks, prompts.shape[1])  # its checks
    ordered = []
    for b, length in enumerate(lengths.tolist()):
        scored = []
        for rank in ranks:
            count = int(rank.lengths[b])
            labels = rank.labels[b, :count].tolist()
            frames = rank.frames[b, :count].tolist()
            durations = rank.durations[b, :count].tolist()
            row = list(zip(labels, frames, durations, strict=True))
            attention = 0.0
            if length > 0:
                with torch.inference_mode():
                    attention = _score(model, encoded[b : b + 1, :length], prompts[b], labels)
            own = float(rank.scores[b])
            total = -inf
            if own > -inf:
                total = _mean(attention, own, ctc_weight)
            scored.append((total, row))
        ordered.append(sorted(scored, key=lambda pair: -pair[0]))
    found = []
    for n in range(len(ranks)):
        scores = encoded.new_tensor([row[n][0] for row in ordered], dtype=torch.float32)
        impl = f"{texts.impl}, rescored by attention, one by one"
        rows = [row[n][1] for row in ordered]
        ended = scores > -inf
        found.append(Hypotheses.from_lists(rows, list(scores), impl, ended=ended))
    return replace(found[0], alternatives=tuple(found[1:]))


def _score(model: Any, frames: Tensor, prompt: Tensor, labels: list[int]) -> float:
    """Log-probability of a text, eos included, given frames (1, T, D), in nats."""
    lengths = torch.tensor([frames.shape[1]], device=frames.device)
    memory = model.remember(frames, lengths, cross="recomputed")
    text = prompt.tolist()
    total = 0.0
    for label in [*labels, model.eos]:
        state = model.begin(memory, len(text), past="none")
        logits, _ = model.follow(prompt.new_tensor([text]), state, memory, reach=None)
        total += float(logits[0, -1].log_softmax(-1, dtype=torch.float64)[label])
        text.append(label)
    return total


def _mean(attention: float, own: float, ctc_weight: float) -> float:
    """The weighted mean of two scores; -inf where it is not finite."""
    total = 0.0
    if ctc_weight < 1:
        total += (1 - ctc_weight) * attention
    if ctc_weight > 0:
        total += ctc_weight * own
    return total if isfinite(total) else -inf
