"""What attention decoders share: the model's protocol, prompts, limits, and results."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asrkit.decoders.hypotheses import PADDING, Hypotheses
from asrkit.decoders.states import map_state
from asrkit.devices import to_device
from asrkit.shapes import dims, expect, whole

EXTRA = 50  # labels that an utterance may have beyond its frames, as NeMo's max_generation_delta
ROOM = 32  # the room of a state is the number of its tokens, rounded up to a multiple of this
REQUIRED = ("bos", "eos", "max_tokens", "vocab_size", "prefill", "init_state", "step")

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]


class Attention(Protocol):
    """What an attention decoder needs of a model.

    A memory holds what is kept of the frames, and a state what is kept of the tokens so far. Both
    are nests of tensors, batch first, as `asrkit.decoders.states` walks them. A state is a named
    tuple with a field `place` (B,) int64, the number of tokens in it. Setting `place` back removes
    the last tokens. Only the times of words need more: `attention_frames` needs
    `cross_weights(encoded, lengths, tokens, memory)`, which returns (B, U, T), and
    `frames_of_turns` needs `last_weights(attended, memory)`.
    """

    bos: int  # the token before any text
    eos: int
    max_tokens: int  # number of positions, for prompt and text together
    vocab_size: int

    def prefill(self, encoded: Tensor, lengths: Tensor) -> Any:
        """The memory of frames (B, T, E) with these lengths (B,); T is at least 1.

        The text of an utterance of length 0 is not used.
        """

    def init_state(self, memory: Any, room: int) -> Any:
        """The state before the first token, with room for that many tokens."""

    def step(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None
    ) -> tuple[Tensor, Any]:
        """Logits (B, K, V) of the token after each of tokens (B, K), and the state after them.

        Args:
            tokens: (B, K) int64.
            state: May be overwritten.
            memory: The result of `prefill`.
            reach: Upper bound of the number of tokens in the state afterwards; None if unknown.
        """


class Suppressing(nn.Module):
    """Wraps a decoder and masks suppressed tokens.

    Their logits become half the lowest number of the dtype, so their probability is 0. Whisper's
    published settings list such tokens: symbols that are not speech and, as the first token of a
    text, a space and the end. Greedy decoding, beams and drafts take the wrapper like any model.

    Args:
        model: An `Attention`. Its weights are shared, and so is every attribute except `step`.
        always: Tokens that are never written.
        first: Tokens that no text begins with.
        prompt_tokens: Number of tokens in the prompt, P; a text begins after them.

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
            is_list = isinstance(tokens, Sequence)  # a checkpoint's notes may be damaged
            inside = is_list and all(whole(token, 0, V - 1) for token in tokens)
            expect(inside, name, f"tokens from 0 to below V={V}", repr(tokens)[:80])
            self.register_buffer(name, torch.tensor([*tokens], dtype=torch.int64, device=device))
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        """The model's attribute, for every name that this module does not have."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def step(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None = None
    ) -> tuple[Tensor, Any]:
        """The model's logits (B, K, V) with suppressed tokens masked, and its new state."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        begins = state.place[:, None] + steps == self.prompt_tokens - 1  # (B, K)
        logits, after = self.model.step(tokens, state, memory, reach=reach)
        lowest = torch.finfo(logits.dtype).min / 2
        logits.index_fill_(2, self.always, lowest)
        first = logits[..., self.first].masked_fill(begins[..., None], lowest)
        logits[..., self.first] = first
        return logits, after


def prompt_of(model: Attention, prompt: Prompt | None, encoded: Tensor) -> Tensor:
    """The prompt of each utterance, (B, P) int64 on the frames' device.

    Args:
        model: Its `bos` is the prompt if `prompt` is None.
        prompt: (P,) for all utterances or (B, P), tensor or lists; or None.
        encoded: (B, T, E).

    Raises:
        ValueError: The prompts differ in length, hold unknown tokens, or leave no room for a label.
    """
    B = len(encoded)
    prompt = [model.bos] if prompt is None else prompt
    tokens = prompt if isinstance(prompt, Tensor) else torch.tensor(prompt, device="cpu")
    if tokens.dim() == 1:
        tokens = tokens.expand(B, -1)
    _, P = dims(tokens, "B P", "prompt", B=B)
    highest = model.max_tokens - 1
    wanted = f"1 to {highest} tokens, so that a label fits in max_tokens={model.max_tokens}"
    expect(1 <= P <= highest, "prompt", wanted, P)
    low, high = (int(bound) for bound in tokens.aminmax())
    inside = low >= 0 and high < model.vocab_size
    expect(inside, "prompt", f"tokens from 0 to below V={model.vocab_size}", f"{low} to {high}")
    return to_device(tokens.long(), encoded.device)


def limits_of(model: Attention, lengths: Tensor, P: int, max_labels: int | None) -> Tensor:
    """The most labels of each utterance, (B,) int64.

    Args:
        model: Its `max_tokens` include the prompt.
        lengths: (B,) valid frames.
        P: Number of tokens in the prompt.
        max_labels: The limit; None is `EXTRA` more than an utterance has frames, as NeMo decodes.
    """
    highest = model.max_tokens - P
    if max_labels is None:
        return (lengths.long() + EXTRA).clamp(max=highest)
    wanted = f"1 to {highest} labels, or None"
    remedy = "The model has no more positions."
    expect(whole(max_labels, 1, highest), "max_labels", wanted, repr(max_labels), remedy)
    return torch.full_like(lengths, max_labels, dtype=torch.int64)


def trim_frames(encoded: Tensor, longest: int) -> Tensor:
    """Frames (B, T, D) without those after the longest utterance; one of zeros if all are empty."""
    if longest == 0:
        return encoded.new_zeros(len(encoded), 1, encoded.shape[2])
    return encoded[:, :longest]


class Steps:
    """The steps of one search; the state grows as tokens enter it.

    Most texts are far shorter than their limit, so the state has room for its tokens only, rounded
    up to a multiple of `ROOM`.

    Attributes:
        model: An `Attention`.
        memory: Its memory of the rows.
        state: Its state.
        room: Most tokens of the state, prompt included.
    """

    def __init__(self, model: Any, memory: Any, prompts: Tensor, limits: Tensor) -> None:
        """Make the state before the prompts.

        Args:
            model: An `Attention`.
            memory: Its memory of the rows.
            prompts: (B, P) tokens before the texts.
            limits: Most labels of each text, of any shape.
        """
        P = prompts.shape[1]
        self.model = model
        self.memory = memory
        self.room = P + int(limits.max())
        self._present_room = self._room_for(P)
        self.state = model.init_state(memory, self._present_room)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (n, K, V) after each of these tokens (n, K), which enter the state."""
        reach = min(self.room, int(self.state.place.max()) + tokens.shape[1])
        if reach > self._present_room:
            self._present_room = self._room_for(reach)
            larger = self.model.init_state(self.memory, self._present_room)
            self.state = map_state(_moved, larger, self.state)
        logits, self.state = self.model.step(tokens, self.state, self.memory, reach=reach)
        return logits

    def _room_for(self, tokens: int) -> int:
        return min(self.room, math.ceil(tokens / ROOM) * ROOM)

    def select(self, rows: Tensor | slice) -> None:
        """Keep the state and memory of these rows only."""
        self.memory, self.state = map_state(lambda part: part[rows], (self.memory, self.state))


def _moved(larger: Tensor, own: Tensor) -> Tensor:
    """`larger`, whose leading slots hold the tensor `own`."""
    larger[tuple(map(slice, own.shape))] = own
    return larger


@torch.inference_mode(False)
def to_hypotheses(
    labels: Tensor,
    lengths: Tensor,
    scores: Tensor,
    ended: Tensor,
    impl: str,
    confidence: Tensor | None = None,
) -> Hypotheses:
    """The result of a search as `Hypotheses`, in tensors of their own.

    Args:
        labels: (B, columns) int64; columns after `lengths` are ignored.
        lengths: (B,) int64.
        scores: (B,) in nats; NaN if a logit was NaN, -inf if no hypothesis is left.
        ended: (B,) bool, whether a text came to eos.
        impl: How the texts were found; the number of texts without eos is added.
        confidence: (B, columns), or None.
    """
    endless = int((~ended).sum())
    if endless:
        impl += f"; no end in {endless} of {len(ended)}"
    no_frames = torch.full_like(labels, PADDING)
    columns = (labels, no_frames, torch.zeros_like(labels), confidence)
    return Hypotheses.from_columns(columns, lengths, scores.float(), impl, ended=ended.clone())
