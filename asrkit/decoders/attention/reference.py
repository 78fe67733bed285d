"""The definition of greedy decoding by attention: one utterance, one token at a time, no memory."""

from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.attention.loop import unended
from asrkit.decoders.attention.steps import (
    Attention,
    Prompt,
    aligned,
    best_tokens,
    check_model,
    expect_choice,
    limits_of,
    prompt_of,
    with_confidence,
)
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.transducer.steps import CONFIDENCE, Confidence
from asrkit.runtime import eager


@eager
def aed_greedy_reference(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    most: int | None = None,
    confidence: Confidence = "none",
    align: bool = False,
) -> Hypotheses:
    """What `aed_greedy` computes; slow and readable. Every step reads the whole text again.

    Args:
        model: As in `aed_greedy`, like everything that follows.
        encoded: (B, T, D) encoder frames.
        lengths: (B,) valid frames.
        prompt: Tokens before the text.
        most: Most labels.
        confidence: Confidence of each label.
        align: Whether labels get frames.
    """
    check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model)
    expect_choice("confidence", confidence, CONFIDENCE)
    lengths = lengths.long()
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    rows: list[list[tuple]] = []
    scores = []
    ended = []
    with torch.inference_mode():
        for b, length in enumerate(lengths.tolist()):
            if length == 0:
                rows.append([])
                scores.append(torch.zeros((), device=encoded.device))
                ended.append(True)
                continue
            frames = encoded[b : b + 1, :length]
            memory = model.remember(frames, lengths[b : b + 1], cross="recomputed")
            row, score, end = _decode_one(model, memory, prompts[b], int(limits[b]), confidence)
            if align:
                labels = prompts.new_tensor([item[0] for item in row])
                tokens = torch.cat([prompts[b], labels])[None]
                places = aligned(model, tokens, memory, prompts.shape[1])[0].tolist()
                row = [(item[0], place, *item[2:]) for item, place in zip(row, places, strict=True)]
            rows.append(row)
            scores.append(score)
            ended.append(end)
    flags = torch.tensor(ended, device=encoded.device)
    impl = "attention, one by one" + unended(flags, torch.stack(scores))
    found = Hypotheses.from_lists(rows, scores, impl, ended=flags)
    return with_confidence(found, confidence)


def _decode_one(
    model: Any, memory: Any, prompt: Tensor, limit: int, confidence: Confidence
) -> tuple[list[tuple], Tensor, bool]:
    """Labels with frames and durations, score (), and whether eos came, of one utterance."""
    text = prompt.tolist()
    row: list[tuple] = []
    total = torch.zeros((), dtype=torch.float32, device=prompt.device)
    while True:
        state = model.begin(memory, len(text), past="none")
        logits, _ = model.follow(prompt.new_tensor([text]), state, memory, reach=None)
        token, score, sure = best_tokens(logits[0, -1], confidence)
        if score.isnan():
            return row, total + score, False
        if token == model.eos:
            return row, total + score, True
        if len(row) == limit:
            return row, total, False
        total = total + score
        label = int(token), PADDING, 0
        row.append(label if sure is None else (*label, float(sure)))
        text.append(int(token))
