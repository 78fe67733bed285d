"""Decoding by attention in CUDA graphs: the first turn runs as it is, all others are replayed.

What is captured, kept and watched is as in `asrkit.decoders.transducer.graphs`. None of this has
run on a GPU yet.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit import runtime
from asrkit.decoders.attention.loop import AttentionLoop, Batch
from asrkit.decoders.attention.steps import AttentionOptions, Draft
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import map_state
from asrkit.decoders.transducer.graph_capture import CapturedLoop, capture
from asrkit.decoders.transducer.loop_cache import (
    GraphsUnavailable,
    LoopCache,
    cache_of,
    first_cause,
    registry,
)

KEEP = 4  # captured loops of one model, each with the memory of a batch
MIN_ROWS = 8  # the fewest that a loop has room for, but a single utterance has a loop of its own
FRAMES = 128  # of which a loop has a multiple; unused ones are looked at, with weight 0
ROOM = 64  # tokens, of which it has a multiple


class Call(NamedTuple):
    """The arguments of one call of the decoder, all on one device."""

    model: Any
    encoded: Tensor  # (B, T, D)
    lengths: Tensor  # (B,) int64
    prompt: Tensor  # (B, P) int64
    limits: Tensor  # (B,) int64
    draft: Draft
    options: AttentionOptions

    def room(self) -> int:
        """Tokens that the longest text may have, prompt included."""
        return self.prompt.shape[1] + int(self.limits.max())

    def batch(self) -> Batch:
        """What a loop decodes."""
        memory = self.model.remember(self.encoded, self.lengths, cross=self.options.cross)
        return Batch(memory, self.prompt, self.limits, self.lengths)

    def described(self, graphs: str) -> str:
        """`impl` of the result."""
        drafted = ", draft" if self.draft.tokens.shape[1] else ""
        ways = f"cross={self.options.cross}, past={self.options.past}{drafted}"
        return f"attention, {ways}, graphs={graphs}"


def decode(call: Call) -> Hypotheses:
    """Greedy hypotheses, by graphs where the options ask for them and the device has them.

    Raises:
        RuntimeError: A mode asked for by name cannot run.
    """
    auto = call.options.graphs == "auto"
    if call.options.graphs == "off" or not call.encoded.is_cuda:
        return decode_plain(call, "off")
    try:
        cache = cache_of(MODELS, call.model, AttentionCache)
    except GraphsUnavailable as error:
        if not auto:
            raise
        return decode_plain(call, f"off: {error}")
    with cache.lock, torch.cuda.device(call.encoded.device):
        return cache.decode(call)


def decode_plain(call: Call, graphs: str) -> Hypotheses:
    """Hypotheses by a loop that nobody records.

    Args:
        call: The arguments.
        graphs: What `impl` says of graphs.
    """
    room = call.room()
    first = None
    if not call.encoded.is_cuda:  # most texts are far shorter than they may be
        first = min(room, call.prompt.shape[1] + call.draft.tokens.shape[1] + ROOM)
    loop = AttentionLoop(call.model, call.batch(), room, call.options, first=first)
    loop.start(call.model, call.draft)
    loop.run(call.model)
    return loop.hypotheses(call.model, call.described(graphs), len(call.lengths))


class AttentionCache(LoopCache):
    """The captured loops of one model, the one used last at the end."""

    def decode(self, call: Call) -> Hypotheses:
        """Hypotheses by `replay`; "auto" falls back to the plain loop, and `impl` says why."""
        if call.options.graphs != "auto":
            return self.replay(call, call.options.graphs)
        if not self.refused:
            try:
                return self.replay(call, "step")
            except GraphsUnavailable as error:
                self.refused = str(error)
        self.drop(*self.loops)
        return decode_plain(call, f"off: {self.refused}")

    def replay(self, call: Call, mode: str) -> Hypotheses:
        """Hypotheses by a captured loop of these sizes; it is captured first if there is none.

        Args:
            call: The arguments.
            mode: "step" or "full".

        Raises:
            GraphsUnavailable: Nothing could be captured, or the result was wrong.
        """
        if self.done:
            self.done.wait()  # another stream may have used these buffers last
        self.follow(call.model)
        larger = padded(call)
        room = min(_up(larger.room(), ROOM), call.model.most)
        key = _key(larger, mode, room)
        batch = larger.batch()
        if key not in self.loops:
            self.make(key, larger, batch, room)
        self.loops.move_to_end(key)
        loop, run = self.loops[key]
        loop.options = call.options
        expected = None
        if call.options.graphs == "auto" and key not in self.trusted:
            loop.load(batch)
            loop.start(call.model, larger.draft)
            loop.repeat(lambda: loop.turn(call.model))
            expected = loop.hypotheses(call.model, "", len(call.lengths))
        loop.load(batch)
        loop.start(call.model, larger.draft)
        run()
        found = loop.hypotheses(call.model, call.described(mode), len(call.lengths))
        if expected is not None:
            if found.tokens() != expected.tokens():
                raise GraphsUnavailable("the captured loop found other labels than the plain one")
            self.trusted.add(key)
        if call.encoded.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()
        return found

    def make(self, key: tuple, call: Call, batch: Batch, room: int) -> None:
        """Capture a loop; drops the loops used least recently.

        Args:
            key: Of the loop.
            call: The padded arguments.
            batch: Of the call. The loop has a copy.
            room: Tokens that there is room for.

        Raises:
            GraphsUnavailable: The capture failed.
        """
        while len(self.loops) >= KEEP:
            self.drop(next(iter(self.loops)))
        mode = key[0]
        own = Batch(*(_copied(part) for part in batch))
        try:
            loop = AttentionLoop(call.model, own, room, call.options)
            loop.start(call.model, call.draft)
            run = capture(loop, call.model, mode)
        except Exception as error:
            reason = f"graphs={mode!r}: capture failed, {first_cause(error)}"
            raise GraphsUnavailable(reason) from error
        self.watch_reads(call.model, loop.storages_read)
        self.loops[key] = CapturedLoop(loop, run)


MODELS: dict[int, Any] = registry()


def _copied(part: Any) -> Any:
    """A part of a batch in memory of its own."""
    return map_state(Tensor.clone, part)


def _up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def padded(call: Call) -> Call:
    """The call with rows and frames rounded up; the rows that are added have no frames."""
    B, T, D = call.encoded.shape
    rows = 1 if B == 1 else max(MIN_ROWS, 1 << (B - 1).bit_length())
    encoded = call.encoded.new_zeros(rows, _up(T, FRAMES), D)
    encoded[:B, :T] = call.encoded
    prompt = call.prompt[:1].expand(rows, -1).clone()
    prompt[:B] = call.prompt
    draft = Draft(*(_with_rows(part, rows) for part in call.draft))
    return call._replace(
        encoded=encoded,
        prompt=prompt,
        lengths=_with_rows(call.lengths, rows),
        limits=_with_rows(call.limits, rows),
        draft=draft,
    )


def _with_rows(part: Tensor, rows: int) -> Tensor:
    """`part` (B, ...) with rows of zeros behind it."""
    larger = part.new_zeros(rows, *part.shape[1:])
    larger[: len(part)] = part
    return larger


def _key(call: Call, mode: str, room: int) -> tuple:
    """All that a captured loop depends on, but for weights."""
    device_type = call.encoded.device.type
    return (
        mode,
        tuple(call.encoded.shape),
        room,
        call.encoded.dtype,
        call.encoded.device,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        runtime.tf32_asked(),
        replace(call.options, graphs="off", align=False),
        call.model.eos,
    )
