"""Timestamps among the tokens of a text, as Whisper writes them (arXiv 2212.04356, section 2.3)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.attention.protocol import Suppressing
from asrkit.shapes import expect, whole


class TimedMemory(NamedTuple):
    """What `Timestamps` keeps of the frames."""

    frames: Any  # what the model remembers
    until: Tensor  # (B,) int64: a second or later segment that begins before that frame has text


class TimedState(NamedTuple):
    """The state of `Timestamps`; all tensors (B,) but those of `past`."""

    place: Tensor  # int64, tokens seen
    past: Any  # of the model
    time: Tensor  # int64, the last timestamp; the token before all of them where there was none
    behind_text: Tensor  # bool, whether the last token was one of the text


class Timestamps(Suppressing):
    """A `Suppressing` whose texts have timestamps: one before and one behind each segment.

    A text begins with one, they never go back, and one is taken where all of them together are
    likelier than any other token. The rules are those of OpenAI's whisper, and one more: a segment
    behind another one, which begins before the frame `until` of `remember`, has text.

    Args:
        model: An `Attention`; timestamps are the last tokens of its vocabulary.
        no_times: The token before the first timestamp, which is never written.
        most_first: Steps from the first timestamp to the highest that a text begins with; None:
            any.
        always: As `Suppressing` takes it, and the rest too.
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

    def remember(
        self, encoded: Tensor, lengths: Tensor, until: Tensor | None = None
    ) -> TimedMemory:
        """What decoding keeps of frames (B, T, D) with `lengths` (B,).

        Args:
            encoded: Of the model's `encode`.
            lengths: Valid frames.
            until: (B,) int64: a segment behind another one has text if it begins before that frame;
                None: none has to.
        """
        frames = self.model.remember(encoded, lengths)
        if until is None:
            until = torch.zeros(len(encoded), dtype=torch.int64, device=encoded.device)
        return TimedMemory(frames, until.to(encoded.device))

    def begin(self, memory: TimedMemory, room: int) -> TimedState:
        """The state before the first token."""
        past = self.model.begin(memory.frames, room)
        none = torch.full_like(past.place, self.no_times)
        return TimedState(past.place, past, none, torch.zeros_like(none, dtype=torch.bool))

    def follow(
        self, tokens: Tensor, state: Any, memory: Any, *, reach: int | None = None
    ) -> tuple[Tensor, TimedState]:
        """Logits (B, K, V), of which the last row keeps to the rules, and the state after it.

        Args:
            tokens: (B, K), the prompt, or one token behind it.
            state: Of `begin` or `follow`.
            memory: Of `remember`.
            reach: As of the model.
        """
        logits, past = super().follow(tokens, state.past, memory.frames, reach=reach)
        V, eos = self.model.vocab_size, self.model.eos
        last = tokens[:, -1]
        begins = past.place == self.prompt_tokens
        is_time = last > self.no_times
        closes = is_time & state.behind_text  # a segment; the end follows, or the next one begins
        opens = is_time & ~closes
        is_first = state.time == self.no_times
        needs_text = opens & ~is_first & (last - self.no_times - 1 < memory.until)
        time = last.where(is_time, state.time)
        earliest = (time + ~closes).masked_fill(opens, V)
        latest = torch.where(begins, self.latest, V)
        lowest = torch.finfo(logits.dtype).min / 2
        text, stamps = logits[:, -1].split([self.no_times + 1, len(self.ids)], 1)  # views
        wrong = (self.ids < earliest[:, None]) | (self.ids > latest[:, None])
        stamps.masked_fill_(wrong, lowest)
        text[:, :eos].masked_fill_((begins | closes)[:, None], lowest)
        text[:, eos:].masked_fill_((begins | needs_text)[:, None], lowest)
        likelier = stamps.float().logsumexp(1) > text.amax(1)
        text.masked_fill_(likelier[:, None], lowest)
        return logits, TimedState(past.place, past, time, ~is_time & ~begins)
