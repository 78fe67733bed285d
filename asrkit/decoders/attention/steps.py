"""What all attention decoders share: the protocol of a model, checks, prompts, limits, drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.transducer.steps import Confidence, token_confidence
from asrkit.runtime import to_device
from asrkit.shapes import dims, expect, whole

EXTRA = 50  # labels that an utterance may have beyond its frames, as NeMo's max_generation_delta
CROSS = ("kept", "absorbed", "recomputed")
PAST = ("kept", "states", "none")
PROTOCOL = ("bos", "eos", "most", "vocab_size", "remember", "begin", "follow")

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Attention(Protocol):
    """What an attention decoder asks of a model, besides `bos`, the token before any text.

    A memory is a nest as `asrkit.decoders.states` walks it, batch first; a state too, and a named
    tuple with a field `place` (B,) int64: how many tokens it has seen. Setting it back undoes them.
    `looks(tokens, memory)`, (B, U, T), is asked of a model by `attention_frames` alone.
    """

    bos: int
    eos: int
    most: int  # tokens that there are positions for, prompt included
    vocab_size: int

    def remember(self, encoded: Tensor, lengths: Tensor, *, cross: Any) -> Any:
        """What is kept of frames (B, T, E) with these lengths (B,); `cross` says in which way."""

    def begin(self, memory: Any, room: int, *, past: Any) -> Any:
        """The state before the first token, with room for so many; `past` says in which way."""

    def follow(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None
    ) -> tuple[Tensor, Any]:
        """Logits (B, K, V) of what follows each of tokens (B, K), and the state after them.

        Args:
            tokens: (B, K) int64.
            state: May be written.
            memory: Of `remember`.
            reach: Tokens that are in the state afterwards, at most; None if nobody knows.
        """


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of `aed_greedy` that its loop needs."""

    past: str = "kept"
    confidence: Confidence = "none"


def check_model(model: Any) -> None:
    """ValueError unless `model` follows the protocol `Attention`."""
    missing = [name for name in PROTOCOL if not hasattr(model, name)]
    got = f"{type(model).__name__} without {', '.join(missing)}"
    expect(not missing, "model", "bos, eos, most, vocab_size, remember, begin and follow", got)


def prompt_of(model: Attention, prompt: Prompt | None, encoded: Tensor) -> Tensor:
    """The prompt of each utterance, (B, P) int64 on the frames' device.

    Args:
        model: Its `bos` is the prompt where there is none.
        prompt: (P,) for all utterances or (B, P), tensor or lists; None.
        encoded: (B, T, E).

    Raises:
        ValueError: The prompts have several lengths, other tokens, or leave no room for a label.
    """
    B = len(encoded)
    if prompt is None:
        prompt = [model.bos]
    try:
        tokens = torch.as_tensor(prompt)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            "prompt: expected token ids (P,) or (B, P), prompts of one length, got "
            f"{str(error)[:100]}. Decode utterances with longer prompts in a batch of their own."
        ) from None
    if tokens.dim() == 1:
        tokens = tokens.expand(B, -1)
    _, P = dims(tokens, "B P", "prompt", B=B)
    room = f"1 to {model.most - 1} tokens, so that a label fits in most={model.most}"
    expect(1 <= P < model.most, "prompt", room, P)
    whole_numbers = tokens.dtype in (torch.int32, torch.int64)
    expect(whole_numbers, "prompt", "int32 or int64 tokens", tokens.dtype)
    low, high = (int(bound) for bound in tokens.aminmax())
    inside = low >= 0 and high < model.vocab_size
    expect(inside, "prompt", f"tokens from 0 to below V={model.vocab_size}", f"{low} to {high}")
    return to_device(tokens.long(), encoded.device)


def limits_of(model: Attention, lengths: Tensor, P: int, most: int | None) -> Tensor:
    """Most labels of each utterance, (B,) int64.

    Args:
        model: Its `most` tokens include the prompt.
        lengths: (B,) valid frames.
        P: Tokens of the prompt.
        most: Most labels; None is `EXTRA` more than an utterance has frames, as NeMo decodes.
    """
    highest = model.most - P
    if most is None:
        return (lengths + EXTRA).clamp(max=highest)
    wanted = f"1 to {highest} labels, or None"
    expect(whole(most, 1, highest), "most", wanted, repr(most), "The model has no more positions.")
    return torch.full_like(lengths, most)


class Draft(NamedTuple):
    """A guess at each text."""

    tokens: Tensor  # (B, N) int64, valid tokens throughout
    lengths: Tensor  # (B,) int64


def draft_of(model: Attention, draft: Hypotheses | None, limits: Tensor) -> Draft:
    """The draft, without what lies beyond the limits; N = 0 without one.

    Args:
        model: Its `eos` may not be in a draft.
        draft: Of B utterances.
        limits: (B,) most labels.

    Raises:
        ValueError: The draft is of another batch, or holds what no text holds.
    """
    B = len(limits)
    if draft is None:
        return Draft(limits.new_zeros(B, 0), torch.zeros_like(limits))
    _check_draft(draft, B)
    lengths = torch.minimum(to_device(draft.lengths, limits.device), limits)
    N = int(lengths.max())
    tokens = to_device(draft.labels, limits.device)[:, :N]
    beyond = torch.arange(N, device=limits.device) >= lengths[:, None]
    valid = (tokens >= 0) & (tokens < model.vocab_size) & (tokens != model.eos)
    wanted = f"tokens below V={model.vocab_size} without eos={model.eos}"
    expect(bool((valid | beyond).all()), "draft", wanted, "others")
    return Draft(tokens.masked_fill(beyond, model.eos), lengths)


def _check_draft(draft: Hypotheses, B: int) -> None:
    """ValueError unless `draft` is hypotheses of B utterances whose labels and lengths fit."""
    is_one = isinstance(draft, Hypotheses)
    expect(is_one, "draft", "Hypotheses", type(draft).__name__, "Try ctc_greedy.")
    _, N = dims(draft.labels, "B N", "draft.labels", B=B)
    low, high = (int(bound) for bound in draft.lengths.aminmax())
    expect(0 <= low <= high <= N, "draft.lengths", f"0 to N={N} labels", f"{low} to {high}")


class BestTokens(NamedTuple):
    """The best token after each prefix; all tensors (...,)."""

    token: Tensor  # int64
    score: Tensor  # float32, log-probability in nats; NaN where a logit is
    confidence: Tensor | None  # float32 in 0..1


def best_tokens(logits: Tensor, confidence: Confidence) -> BestTokens:
    """The best tokens of logits (..., V); the rule of every greedy attention decoder."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.log_softmax(-1, dtype=dtype)
    score, token = logp.max(-1)
    return BestTokens(token, score.float(), token_confidence(confidence, logp, score))


def with_confidence(hypotheses: Hypotheses, confidence: Confidence) -> Hypotheses:
    """The hypotheses, with an empty confidence where one was asked for and nobody has labels."""
    if confidence == "none" or hypotheses.confidence is not None:
        return hypotheses
    empty = torch.empty(hypotheses.labels.shape, device=hypotheses.labels.device)
    return replace(hypotheses, confidence=empty)
