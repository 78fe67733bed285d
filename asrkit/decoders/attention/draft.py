"""Drafts of texts, for instance by a CTC head, and how greedy decoding verifies them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.loop import GreedyLoop
from asrkit.decoders.attention.protocol import Attention
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.devices import to_device
from asrkit.shapes import dims, expect, valid_mask

CHUNK = 16  # tokens of a draft that one call verifies after a mistake
MIN_ACCEPTED = 0.2  # share of them that must be right for such a call to be worth its time
NEARBY = (0, 1, -1, 2, -2)  # where a draft may have the token that it lacks at a place


def ctc_draft(model: Attention, ctc: Hypotheses) -> Hypotheses:
    """The labels of a CTC head that can occur in a text, for `aed_greedy(draft=...)`.

    `bos`, `eos` and tokens that the decoder does not have are removed. All other labels may be
    wrong: a draft changes the time of decoding and not its result.

    Args:
        model: Its decoder will verify the draft; the CTC head has the same tokens.
        ctc: The result of `ctc_greedy` or `ctc_beam`.

    Returns:
        Hypotheses with the remaining labels, their frames and durations, and the scores of `ctc`.
        Confidence and alternatives are dropped.
    """
    labels = ctc.labels
    in_text = (labels < model.vocab_size) & (labels != model.bos) & (labels != model.eos)
    impl = f"{ctc.impl}, as a draft"
    return replace(ctc.filter(in_text), impl=impl, confidence=None, alternatives=())


class Draft(NamedTuple):
    """A guess at each text."""

    tokens: Tensor  # (B, N) int64, valid tokens throughout
    lengths: Tensor  # (B,) int64


def draft_of(model: Attention, draft: Hypotheses, limits: Tensor) -> Draft:
    """The labels of a draft up to the limits (B,).

    Raises:
        ValueError: It is not `Hypotheses` of B utterances.
    """
    is_draft = isinstance(draft, Hypotheses)
    expect(is_draft, "draft", "Hypotheses", type(draft).__name__, "Try ctc_greedy.")
    dims(draft.labels, "B N", "draft.labels", B=len(limits))
    lengths = torch.minimum(to_device(draft.lengths, limits.device), limits)
    tokens = to_device(draft.labels, limits.device)[:, : int(lengths.max())]
    return Draft(tokens.clamp(0, model.vocab_size - 1), lengths)


def verify_draft(loop: GreedyLoop, draft: Draft) -> None:
    """Emit as much of a draft as is right, before the loop takes its first turn.

    The whole draft is verified in one call, with the prompt. After a wrong token the rest may still
    be right. So the rest is verified too, CHUNK tokens a call, until less than MIN_ACCEPTED of them
    is right twice in a row. The loop decodes what remains.

    Args:
        loop: A loop that has not begun.
        draft: (B, N), N at least 1.
    """
    accepted = _verify(loop, draft)
    start = torch.zeros_like(accepted)
    poor_calls = 0  # in a row
    while poor_calls < 2:
        start = _after_mistake(draft, start + accepted, loop.pending)
        rest = _rest(loop, draft, start)
        verified = int(rest.lengths.sum())
        if not verified:
            return
        accepted = _verify(loop, rest)
        poor_calls = 0 if int(accepted.sum()) >= MIN_ACCEPTED * verified else poor_calls + 1


def _verify(loop: GreedyLoop, draft: Draft) -> Tensor:
    """Verify a draft (B, N) in one call, N at least 1, and emit its right beginning and one more.

    A token of the draft is right if it is the best token after all tokens before it.

    Returns:
        (B,) int64, how many tokens of the draft are right.
    """
    N = draft.tokens.shape[1]
    steps = loop.steps
    place = steps.state.place
    logits = steps(torch.cat([loop.pending, draft.tokens], 1))
    tokens, scores = loop.choose(logits[:, -N - 1 :])
    right = tokens[:, :N] == draft.tokens
    right &= draft.tokens != loop.eos
    right &= ~scores[:, :N].isnan()
    right &= valid_mask(draft.lengths, N)
    accepted = right.long().cumprod(1).sum(1) * loop.active
    after = steps.state.place - N + accepted
    steps.state = steps.state._replace(place=torch.where(loop.active, after, place))
    loop.emit(tokens, scores, accepted)
    return accepted


def _after_mistake(draft: Draft, wrong: Tensor, last: Tensor) -> Tensor:
    """The place (B,) from which a draft is verified next.

    It is after the decoder's token if the draft has that token near its mistake, else after the
    mistake.

    Args:
        draft: The whole draft.
        wrong: (B,) the place of each mistake.
        last: (B, 1) the decoder's token at that place.
    """
    near = wrong[:, None] + torch.tensor(NEARBY, device=wrong.device)
    inside = (near >= 0) & (near < draft.lengths[:, None])
    tokens = draft.tokens.gather(1, near.clamp(0, draft.tokens.shape[1] - 1))
    fits = inside & (tokens == last)
    nearest = fits.long().argmax(1, keepdim=True)  # 0, the mistake itself, if none fits
    return near.gather(1, nearest)[:, 0] + 1


def _rest(loop: GreedyLoop, draft: Draft, start: Tensor) -> Draft:
    """The next CHUNK tokens of a draft from `start` (B,) on, for the active rows.

    There are fewer if the state of a row lacks room for CHUNK: it would overwrite its last token.
    """
    seen = int((loop.steps.state.place * loop.active).max())
    most = min(CHUNK, loop.steps.room - 1 - seen)
    left = torch.minimum(draft.lengths - start, loop.limits - loop.counts)
    lengths = left.clamp(max=most).clamp(min=0) * loop.active
    places = start[:, None] + torch.arange(int(lengths.max()), device=start.device)
    tokens = draft.tokens.gather(1, places.clamp(max=draft.tokens.shape[1] - 1))
    return Draft(tokens, lengths)
