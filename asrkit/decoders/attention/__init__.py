"""Decoding by attention, for models that remember and follow: `aed_greedy`, `aed_beam`, which CTC
may join, and `ctc_draft`, which `aed_greedy` verifies.
"""

from typing import Literal

import torch
from torch import Tensor

from asrkit.decoders.attention.alignment import attention_frames
from asrkit.decoders.attention.beam import aed_beam
from asrkit.decoders.attention.drafts import ctc_draft
from asrkit.decoders.attention.loop import AttentionLoop, Batch
from asrkit.decoders.attention.steps import (
    CROSS,
    PAST,
    Attention,
    AttentionOptions,
    Prompt,
    check_model,
    draft_of,
    limits_of,
    prompt_of,
    with_confidence,
)
from asrkit.decoders.attention.suppressed import Suppressing
from asrkit.decoders.hypotheses import Hypotheses, check_batch
from asrkit.decoders.transducer.steps import CONFIDENCE, Confidence
from asrkit.runtime import eager
from asrkit.shapes import expect_choice

__all__ = [
    "Attention",
    "Suppressing",
    "aed_beam",
    "aed_greedy",
    "attention_frames",
    "ctc_draft",
]


@eager
def aed_greedy(  # noqa: PLR0913 - all options of greedy decoding, keyword-only
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    *,
    prompt: Prompt | None = None,
    cross: Literal["kept", "absorbed", "recomputed"] = "kept",
    past: Literal["kept", "states", "none"] = "kept",
    draft: Hypotheses | None = None,
    most: int | None = None,
    confidence: Confidence = "none",
) -> Hypotheses:
    """Greedy `Hypotheses` of a batch of encoded utterances, the same labels in every way.

    The best token is taken until it is eos. All utterances take one step at a time; those that have
    ended wait for the last one, or leave the batch once only few go on.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames, int32 or int64; an utterance of 0 frames has no labels.
        prompt: Tokens before the text, (P,) for all or (B, P); None is `model.bos` alone. The texts
            of a batch need prompts of one length.
        cross: What is kept of the frames: "kept", their keys and values in every layer, "absorbed",
            the frames alone (exact as well, see `asrkit.models.attention_memory`); "recomputed"
            projects the frames in every layer of every step, as NeMo 3.0 does.
        past: What is kept of the text so far: "kept", keys and values; "states", what each layer
            was given, projected again in every step (NeMo 3.0); "none", all is computed again.
        draft: A guess at the texts, for instance `ctc_draft`'s of a CTC head. One call of `follow`
            checks all its tokens, and the right beginning is kept; behind a mistake the rest is
            checked as well, 16 tokens a call, while that is worth it. So the result is that without
            a draft but for rounding; a right draft takes one call in all.
        most: Most labels of an utterance; None is 50 more than it has frames. Texts that are still
            without eos there are returned as they are, and `ended` is False for them.
        confidence: Confidence of each label: "max_prob", its probability; "entropy",
            1 - entropy / ln V. Both are 1 where the model is sure.

    Returns:
        Hypotheses with scores in nats, eos included. NaN among the logits ends an utterance, with
        score NaN; `ended` is False, and `impl` says so. Durations are 0.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.

    >>> frames, ends, ctc = model.encode(features, lengths)  # doctest: +SKIP
    >>> draft = ctc_draft(model, ctc_greedy(ctc, ends))  # doctest: +SKIP
    >>> aed_greedy(model, frames, ends, draft=draft).tokens()  # doctest: +SKIP
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model)
    expect_choice("cross", cross, CROSS)
    expect_choice("past", past, PAST)
    expect_choice("confidence", confidence, CONFIDENCE)
    lengths = lengths.long()
    prompts = prompt_of(model, prompt, encoded)
    limits = limits_of(model, lengths, prompts.shape[1], most)
    options = AttentionOptions(past=past, confidence=confidence)
    with torch.inference_mode():
        guess = draft_of(model, draft, limits)
        if longest == 0:
            return _nothing(limits, options)
        memory = model.remember(encoded[:, :longest], lengths, cross=cross)
        loop = AttentionLoop(model, Batch(memory, prompts, limits, lengths), guess, options)
        drafted = ", draft" if guess.tokens.shape[1] else ""
        return loop.decode(model, guess, f"attention, cross={cross}, past={past}{drafted}")


def _nothing(limits: Tensor, options: AttentionOptions) -> Hypotheses:
    """The texts of utterances without frames."""
    empty = [()] * len(limits)
    scores = [torch.zeros((), device=limits.device)] * len(limits)
    ended = torch.ones_like(limits, dtype=torch.bool)
    found = Hypotheses.from_lists(empty, scores, "attention, no frames", ended=ended)
    return with_confidence(found, options.confidence)
