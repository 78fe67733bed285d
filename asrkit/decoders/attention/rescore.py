"""Texts that another decoder has found, scored by an attention decoder and put in another order."""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from asrkit.decoders.attention.prefix_scores import check_weight
from asrkit.decoders.attention.steps import (
    CROSS,
    Attention,
    Prompt,
    check_model,
    expect_choice,
    expect_texts,
    prompt_of,
)
from asrkit.decoders.hypotheses import PADDING, Hypotheses, check_batch
from asrkit.decoders.states import map_state
from asrkit.runtime import eager
from asrkit.shapes import expect


def ranks_of(texts: Hypotheses, encoded: Tensor) -> list[Hypotheses]:
    """The hypotheses and their alternatives; ValueError unless they are of the frames' batch.

    Args:
        texts: `Hypotheses`.
        encoded: (B, T, D).
    """
    B = len(encoded)
    expect_texts("texts", texts, B, "Try ctc_beam.")
    same_device = texts.labels.device == encoded.device
    expect(same_device, "texts", f"labels on {encoded.device}", texts.labels.device)
    for alternative in texts.alternatives:
        expect_texts("texts.alternatives", alternative, B, "Try ctc_beam.")
    return [texts, *texts.alternatives]


@eager
def aed_rescore(
    model: Attention,
    encoded: Tensor,
    lengths: Tensor,
    texts: Hypotheses,
    *,
    prompt: Prompt | None = None,
    ctc_weight: float = 0.3,
    cross: Literal["kept", "absorbed", "recomputed"] = "kept",
) -> Hypotheses:
    """The texts in the order of what attention and CTC say of them together.

    The decoder reads all of them in one pass (teacher forcing), so nothing is searched, and no text
    can win that `texts` lacks. Unlike `aed_beam` it keeps the frames that CTC found. Equals stay in
    their order. `aed_rescore_reference` is the same in plain loops.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, D) frames, of `model.encode`.
        lengths: (B,) valid frames; 0 is allowed.
        texts: The best of each utterance and its alternatives, as `ctc_beam` returns them for the
            CTC head, with scores in nats.
        prompt: Tokens before the text, (P,) or (B, P); None is `model.bos` alone.
        ctc_weight: Share of the texts' own scores, 0 to 1; the rest is attention's.
        cross: What is kept of the frames, as in `aed_greedy`.

    Returns:
        The best, and as many alternatives as `texts` has. `scores` are the weighted means in nats;
        attention's include eos. A text whose score is not finite comes last, with -inf.

    Raises:
        ValueError: An argument does not fit, or a text is longer than the model's `most`.

    >>> frames, ends, ctc = model.encode(features, lengths)  # doctest: +SKIP
    >>> aed_rescore(model, frames, ends, ctc_beam(ctc, ends, nbest=8))  # doctest: +SKIP
    """
    longest = check_batch(encoded, lengths, "B T D", "encoded")
    check_model(model)
    check_weight(ctc_weight)
    expect_choice("cross", cross, CROSS)
    ranks = ranks_of(texts, encoded)
    prompts = prompt_of(model, prompt, encoded)
    lengths = lengths.long()
    labels, counts = stacked(model, ranks, prompts.shape[1])
    with torch.inference_mode():
        frames = encoded[:, : max(1, longest)]
        if not encoded.shape[1]:
            frames = encoded.new_zeros(len(encoded), 1, encoded.shape[2])
        memory = model.remember(frames, lengths, cross=cross)
        attention = attention_scores(model, memory, prompts, labels, counts)
        attention = attention.masked_fill(lengths[:, None] == 0, 0.0)
    own = torch.stack([rank.scores.double() for rank in ranks], 1)
    attention = attention.clone()  # a tensor of inference mode is not to leave it
    return reordered(ranks, weighed(attention, own, ctc_weight))


def stacked(model: Attention, ranks: list[Hypotheses], P: int) -> tuple[Tensor, Tensor]:
    """Labels (B, R, N), `PADDING` behind each text, and their counts (B, R).

    Args:
        model: Its `most` bounds the texts.
        ranks: R hypotheses of B utterances.
        P: Tokens of the prompt.

    Raises:
        ValueError: A text does not fit.
    """
    counts = torch.stack([rank.lengths for rank in ranks], 1)
    N = int(counts.max())
    room = f"at most {model.most - P} labels, which most={model.most} leaves"
    fits = model.most >= P + N
    expect(fits, "texts", room, N)
    columns = torch.arange(N, device=counts.device)
    labels = counts.new_full((*counts.shape, N), PADDING)
    for number, rank in enumerate(ranks):
        width = min(N, rank.labels.shape[1])
        labels[:, number, :width] = rank.labels[:, :width]
    beyond = columns >= counts[..., None]
    inside = (labels >= 0) & (labels < model.vocab_size)
    valid = bool((inside | beyond).all())
    expect(valid, "texts", f"tokens from 0 to below V={model.vocab_size}", "others")
    return labels.masked_fill(beyond, PADDING), counts


def attention_scores(
    model: Any, memory: Any, prompts: Tensor, labels: Tensor, counts: Tensor
) -> Tensor:
    """Log-probabilities of whole texts, eos included, in nats: (B, R) in float64.

    Args:
        model: An `Attention`.
        memory: Of `remember`, for B utterances.
        prompts: (B, P).
        labels: (B, R, N), `PADDING` behind each text.
        counts: (B, R) labels of each.
    """
    B, R, N = labels.shape
    P = prompts.shape[1]
    eos = model.eos
    given = torch.cat([prompts[:, None].expand(B, R, P), labels.clamp(min=0)], 2).flatten(0, 1)
    memory = map_state(lambda part: part.repeat_interleave(R, 0), memory)
    state = model.begin(memory, P + N, past="kept")
    logits, _ = model.follow(given, state, memory, reach=P + N)
    logp = logits[:, P - 1 :].log_softmax(-1, dtype=torch.float64)  # (B R, N + 1, V)
    place = torch.arange(N + 1, device=labels.device)
    ends = counts.flatten()[:, None]  # (B R, 1)
    right = torch.cat([labels.flatten(0, 1), ends.new_full((B * R, 1), eos)], 1)
    right = torch.where(place == ends, eos, right)
    nats = logp.gather(2, right.clamp(min=0)[..., None])[..., 0]
    return nats.masked_fill(place > ends, 0.0).sum(1).view(B, R)


def weighed(attention: Tensor, own: Tensor, ctc_weight: float) -> Tensor:
    """What texts are ordered by; -inf where a part that counts is not finite.

    Args:
        attention: Log-probabilities of attention, of any shape.
        own: The texts' own scores.
        ctc_weight: Their share.
    """
    exists = own > -torch.inf
    total = torch.zeros_like(own)
    if ctc_weight < 1:
        total = total + (1 - ctc_weight) * attention
    if ctc_weight > 0:
        total = total + ctc_weight * own
    return total.masked_fill(~exists | ~total.isfinite(), -torch.inf)


def reordered(ranks: list[Hypotheses], totals: Tensor) -> Hypotheses:
    """The hypotheses with these scores, best first.

    Args:
        ranks: R of B utterances.
        totals: (B, R).
    """
    order = totals.argsort(dim=1, descending=True, stable=True)
    N = max(rank.labels.shape[1] for rank in ranks)
    rows = torch.arange(len(totals), device=totals.device)

    def every(name: str) -> Tensor:
        """One tensor of all hypotheses, (B, R, N)."""
        padded = []
        for rank in ranks:
            part = getattr(rank, name)
            padded.append(F.pad(part, (0, N - part.shape[1]), value=PADDING))
        return torch.stack(padded, 1)

    labels = every("labels")
    frames = every("frames")
    durations = every("durations")
    counts = torch.stack([rank.lengths for rank in ranks], 1)
    found = []
    for chosen in order.unbind(1):
        scores = totals[rows, chosen].float()
        lengths = counts[rows, chosen]
        longest = int(lengths.max())
        found.append(
            Hypotheses(
                labels=labels[rows, chosen, :longest],
                frames=frames[rows, chosen, :longest],
                durations=durations[rows, chosen, :longest],
                lengths=lengths,
                scores=scores,
                impl=f"{ranks[0].impl}, rescored by attention",
                ended=scores > -torch.inf,
            )
        )
    return replace(found[0], alternatives=tuple(found[1:]))
