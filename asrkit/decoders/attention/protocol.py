"""What greedy decoding and beams share: the protocol of a model, suppressed tokens, prompts,
limits, room for the state, and results.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asrkit.decoders.hypotheses import PADDING, Hypotheses
from asrkit.decoders.states import map_state
from asrkit.devices import to_device
from asrkit.shapes import dims, expect, whole

EXTRA = 50  # labels that an utterance may have beyond its frames, as NeMo's max_generation_delta
ROOM = 64  # tokens that a state has room for at first, behind prompt and draft
NAMES = ("bos", "eos", "most", "vocab_size", "remember", "begin", "follow")

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Attention(Protocol):
    """What an attention decoder asks of a model, besides `bos`, the token before any text.

    A memory is a nest as `asrkit.decoders.states` walks it, batch first; a state too, and a named
    tuple with a field `place` (B,) int64: how many tokens it has seen. Setting it back undoes them.
    `looks(encoded, lengths, tokens, memory)`, (B, U, T), is asked of a model by `attention_frames`
    alone.
    """

    bos: int
    eos: int
    most: int  # tokens that there are positions for, prompt included
    vocab_size: int

    def remember(self, encoded: Tensor, lengths: Tensor) -> Any:
        """What is kept of frames (B, T, E) with these lengths (B,), T and each of them 1 at least;
        an utterance without frames may have any text.
        """

    def begin(self, memory: Any, room: int) -> Any:
        """The state before the first token, with room for so many."""

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


class Suppressing(nn.Module):
    """An `Attention` with the logits of another one, but for tokens that it is not to write.

    Their logits are half the lowest number of the dtype, so their probability is 0. Whisper's
    published settings name such tokens: signs that are no speech, and as a text's first token a
    space and the end. Greedy decoding, beams and drafts take it like any other model.

    Args:
        model: An `Attention`; its weights are shared, and all but `follow` is what it is there.
        always: Tokens that are never written.
        first: Tokens that no text begins with.
        prompt_tokens: Tokens of the prompt, P, behind which a text begins.

    Raises:
        ValueError: The model has no such token.

    >>> from asrkit.models import AEDModel, presets
    >>> quiet = Suppressing(AEDModel(presets.tiny_aed()), always=[7], first=[1], prompt_tokens=1)
    """

    always: Tensor
    first: Tensor

    def __init__(
        self, model: Any, *, always: Sequence[int], first: Sequence[int], prompt_tokens: int
    ) -> None:
        super().__init__()
        self.model = model
        self.prompt_tokens = prompt_tokens
        V = model.vocab_size
        device = next(model.parameters()).device
        for name, tokens in (("always", always), ("first", first)):
            listed = isinstance(tokens, Sequence)  # notes of a checkpoint may be damaged
            inside = listed and all(whole(token, 0, V - 1) for token in tokens)
            expect(inside, name, f"tokens from 0 to below V={V}", repr(tokens)[:80])
            listing = torch.tensor([*tokens], dtype=torch.int64, device=device)
            self.register_buffer(name, listing)
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        """The model's own, for all names but those of this module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def follow(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None = None
    ) -> tuple[Tensor, Any]:
        """The model's logits (B, K, V), those of suppressed tokens lowered, and its new state."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        begins = state.place[:, None] + steps == self.prompt_tokens - 1  # (B, K)
        logits, after = self.model.follow(tokens, state, memory, reach=reach)
        lowest = torch.finfo(logits.dtype).min / 2
        logits = logits.index_fill(2, self.always, lowest)
        first = logits[..., self.first].masked_fill(begins[..., None], lowest)
        logits[..., self.first] = first
        return logits, after


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
    given = [model.bos] if prompt is None else prompt
    tokens = given if isinstance(given, Tensor) else torch.tensor(given, device="cpu")
    if tokens.dim() == 1:
        tokens = tokens.expand(B, -1)
    _, P = dims(tokens, "B P", "prompt", B=B)
    room = f"1 to {model.most - 1} tokens, so that a label fits in most={model.most}"
    expect(1 <= P < model.most, "prompt", room, P)
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
        return (lengths.long() + EXTRA).clamp(max=highest)
    wanted = f"1 to {highest} labels, or None"
    expect(whole(most, 1, highest), "most", wanted, repr(most), "The model has no more positions.")
    return torch.full_like(lengths, most, dtype=torch.int64)


def heard_frames(encoded: Tensor, longest: int) -> Tensor:
    """Frames (B, T, D) up to the longest utterance's last one; one of zeros if nobody has any."""
    if longest == 0:
        return encoded.new_zeros(len(encoded), 1, encoded.shape[2])
    return encoded[:, :longest]


def with_room(model: Attention, memory: Any, state: Any, room: int) -> Any:
    """The state with room for so many tokens, more than it has.

    Most texts are far shorter than they may be, so room for them is made as it is needed.
    """

    def moved(larger: Tensor, own: Tensor) -> Tensor:
        larger[tuple(map(slice, own.shape))] = own
        return larger

    return map_state(moved, model.begin(memory, room), state)


@torch.inference_mode(False)
def texts(
    labels: Tensor,
    lengths: Tensor,
    scores: Tensor,
    ended: Tensor,
    impl: str,
    confidence: Tensor | None = None,
) -> Hypotheses:
    """`Hypotheses` in tensors of their own, of what a search has found.

    Args:
        labels: (B, columns) int64; what lies behind `lengths` does not count.
        lengths: (B,) int64.
        scores: (B,) in nats, NaN where the logits had one, -inf where nothing was left.
        ended: (B,) bool, whether eos came.
        impl: How they were found; how many came to no end is added.
        confidence: (B, columns), or None.
    """
    endless = int((~ended).sum())
    if endless:
        impl += f"; no end in {endless} of {len(ended)}"
    nothing = torch.full_like(labels, PADDING)
    columns = (labels, nothing, torch.zeros_like(labels), confidence)
    return Hypotheses.from_columns(columns, lengths, scores.float(), impl, ended=ended.clone())
