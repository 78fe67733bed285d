"""Timestamps among the tokens of a text, as Whisper writes them (arXiv 2212.04356, section 2.3)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import Suppressing
from asrkit.shapes import expect, whole


class TimedMemory(NamedTuple):
    """The memory of `Timestamps`."""

    frames: Any  # the model's own memory
    until: Tensor  # (B,) int64; a later segment that begins before this frame must have text


class TimedState(NamedTuple):
    """The state of `Timestamps`; all tensors except those of `past` are (B,)."""

    place: Tensor  # int64, number of tokens so far
    past: Any  # the model's own state
    time: Tensor  # int64, the last timestamp; `no_times` before the first one
    after_text: Tensor  # bool, whether the last token was text

    @property
    def attended(self) -> Tensor:
        """The field of the model's own state."""
        return self.past.attended


class Timestamps(Suppressing):
    """A `Suppressing` whose texts have timestamps, one before and one after each segment.

    A text begins with a timestamp, and timestamps never go back. A timestamp is taken where all
    timestamps together are likelier than any other token. These are the rules of OpenAI's whisper.
    There is one more: a second or later segment has text if it begins before the frame `until` of
    its memory.

    Args:
        model: An `Attention`; timestamps are the last tokens of its vocabulary.
        no_times: The token before the first timestamp, which is never written.
        most_first: Steps from the first timestamp to the highest that a text may begin with; None
            is any.
        always: Argument of `Suppressing`, like the rest.
    """

    def __init__(
        self, model: Any, *, no_times: int, most_first: int | None, always: list[int], **rest: Any
    ) -> None:
        super().__init__(model, always=[*always, no_times], **rest)
        at_start = most_first is None or whole(most_first, 0)
        expect(at_start, "most_first", "a number of steps, or None", repr(most_first))
        self.no_times = no_times
        V = model.vocab_size
        self.latest = V if most_first is None else no_times + 1 + most_first
        self.register_buffer("ids", torch.arange(no_times + 1, V, device=self.always.device))

    def prefill(self, encoded: Tensor, lengths: Tensor) -> TimedMemory:
        """The memory of frames (B, T, D) with `lengths` (B,); no segment must have text."""
        until = torch.zeros(len(encoded), dtype=torch.int64, device=encoded.device)
        return TimedMemory(self.model.prefill(encoded, lengths), until)

    def last_weights(self, attended: Tensor, memory: TimedMemory) -> Tensor:
        """Those of the model."""
        return self.model.last_weights(attended, memory.frames)

    def init_state(self, memory: TimedMemory, room: int) -> TimedState:
        """The state before the first token."""
        past = self.model.init_state(memory.frames, room)
        none = torch.full_like(past.place, self.no_times)
        return TimedState(past.place, past, none, torch.zeros_like(none, dtype=torch.bool))

    def step(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None = None
    ) -> tuple[Tensor, TimedState]:
        """Logits (B, K, V), whose last row obeys the rules, and the state after it.

        Args:
            tokens: (B, K), the prompt, or one token after it.
            state: The result of `init_state` or `step`.
            memory: The result of `prefill`.
            reach: As the model's `step` takes it.
        """
        logits, past = super().step(tokens, state.past, memory.frames, reach=reach)
        V, eos = self.model.vocab_size, self.model.eos
        last = tokens[:, -1]
        begins = past.place == self.prompt_tokens
        is_time = last > self.no_times
        closes = is_time & state.after_text  # a segment; the end follows, or the next one begins
        opens = is_time & ~closes
        is_first = state.time == self.no_times
        needs_text = opens & ~is_first & (last - self.no_times - 1 < memory.until)
        time = last.where(is_time, state.time)
        earliest = (time + ~closes).masked_fill(opens, V)
        latest = torch.where(begins, self.latest, V)
        lowest = torch.finfo(logits.dtype).min / 2
        sizes = [eos, self.no_times + 1 - eos, len(self.ids)]
        text, ends, stamps = logits[:, -1].split(sizes, 1)  # views
        wrong = (self.ids < earliest[:, None]) | (self.ids > latest[:, None])
        stamps.masked_fill_(wrong, lowest)
        no_text, no_end = begins | closes, begins | needs_text
        best = [text.amax(1).masked_fill(no_text, lowest), ends.amax(1).masked_fill(no_end, lowest)]
        likelier = stamps.float().logsumexp(1) > torch.maximum(*best)
        for part, without in (text, no_text | likelier), (ends, no_end | likelier):
            # on a CPU a sum takes a tenth of the time of masked_fill
            part += part.new_zeros(len(part), 1).masked_fill_(without[:, None], lowest)
        return logits, TimedState(past.place, past, time, ~is_time & ~begins)
