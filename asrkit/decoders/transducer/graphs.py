"""Windowed looping by CUDA graphs: turns of the loop are recorded once and replayed.

Python then launches nothing itself. The parts, from the caller down:

    decode ---> GraphCache (one per model): is there a captured loop for this batch and weights?
                   |
                   +-- graph_loop.GraphLoop: the buffers, and the turn that is recorded
                   |
                   |        frames --> joint --> first label in the window of each utterance
                   |          ^                              |
                   |          +---- clocks, state <----- predictor
                   |
                   |   fused_turn: the same turn in four Triton kernels
                   +-- graph_capture.capture: records turns; "full" loops by conditional.WhileGraph
                   +-- weights.Watch: have the weights moved since?
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit import runtime
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import windowed_looping
from asrkit.decoders.transducer.graph_capture import CapturedLoop, capture
from asrkit.decoders.transducer.graph_loop import GraphLoop
from asrkit.decoders.transducer.loop_cache import (
    GraphsUnavailable,
    LoopCache,
    cache_of,
    first_cause,
    registry,
)
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions
from asrkit.shapes import expect

GRAPH_MODES = ("auto", "off", "step", "full")
TURN_MODES = ("auto", "fused", "plain")  # to compute a captured turn
KEEP = 8  # captured loops of one model
MIN_ROWS = 8  # the fewest that a loop has room for, but a single utterance has a loop of its own
MIN_FRAMES = 512  # the fewest that a loop has room for


class DecoderCall(NamedTuple):
    """The arguments of one call of a decoder."""

    greedy: GreedyModel
    encoded: Tensor  # (B, T, E)
    lengths: Tensor  # (B,) int64
    carry: Carry
    options: GreedyOptions


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses by windowed looping in CUDA graphs.

    `options.graphs` is one of
        "step": the host replays a few turns (`graph_capture.TURNS`) at a time;
        "full": one graph that repeats itself on the device. By name only, until it is measured;
        "auto": "step" on a GPU, if its first result in each size equals the plain loop's.
            Otherwise turns are fused no longer; if that was not the cause, or capture failed, the
            plain loop runs from then on, and `impl` says why.

    A turn is fused into a dozen kernels by Triton (`fused_turn`); where that is impossible it is
    `GraphLoop.plain_turn`, and `impl` says why. `options.turn` asks for one of them by name. None
    of this has run on a GPU yet.

    Graphs are kept for a model until it is deleted or `release_graphs` is called. Few graphs serve
    many batches: rows are rounded up (`rounded`), and each number of rows has one loop, with frames
    for the longest batch so far; the `KEEP` used last stay. Weights may change in place. Graphs are
    captured again when addresses, dtypes or shapes of what a turn reads change, or a module's mode.
    Weights outside the model's attributes, and Python numbers and functions in `predict` and
    `join`, stay as they were at the capture.

    Threads that decode with one model take turns. A call on another stream waits for the last one.

    Args:
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: All of them count.

    Raises:
        RuntimeError: A mode asked for by name cannot run.
        ValueError: A mode was asked for by name without a CUDA device.
    """
    auto = options.graphs == "auto"
    batch = DecoderCall(greedy, encoded, lengths, carry, options)
    if not encoded.is_cuda:
        expect(
            auto,
            "graphs",
            f"'auto' or 'off' on {encoded.device}",
            repr(options.graphs),
            "CUDA graphs need a CUDA device.",
        )
        return windowed_looping.decode(*batch)
    try:
        cache = _cache_of(greedy.model)
    except GraphsUnavailable as error:
        if not auto:
            raise
        return _decode_plain(batch, str(error))
    with cache.lock, torch.cuda.device(encoded.device):
        return cache.decode(batch)


class GraphCache(LoopCache):
    """The captured loops of one model, the one used last at the end.

    Attributes:
        unfused: Why no turn is fused any more; "" while turns are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unfused = ""

    def decode(self, batch: DecoderCall) -> Hypotheses:
        """Hypotheses by `replay`; "auto" falls back to the plain loop, and `impl` says why."""
        if batch.options.graphs != "auto":
            return self.replay(batch, batch.options.graphs)
        if not self.refused:
            try:
                return self.replay(batch, "step")
            except GraphsUnavailable as error:
                self.refused = str(error)
        self.drop(*self.loops)
        return _decode_plain(batch, self.refused)

    def replay(self, batch: DecoderCall, mode: str) -> Hypotheses:
        """Hypotheses by a captured loop that fits; it is captured first if there is none.

        Args:
            batch: The batch to decode.
            mode: "step" or "full".

        Raises:
            GraphsUnavailable: Nothing could be captured, or the result was wrong.
        """
        if self.done:
            self.done.wait()  # another stream may have used these buffers last
        self.follow(batch.greedy.model)
        key = (mode, *_key(batch))
        if key in self.loops and not self.loops[key].holds(batch.encoded.shape[1]):
            self.drop(key)  # for one with more room, which serves the shorter batches too
        if key not in self.loops:
            self.loops[key] = self.make(batch, mode)
        self.loops.move_to_end(key)
        loop, run = self.loops[key]
        loop.load(batch.encoded, batch.lengths, batch.carry)
        expected = start = None
        if batch.options.graphs == "auto" and key not in self.trusted:
            start = _carry_in(loop)
            # in the graph's own sizes, since rounding depends on them
            expected = windowed_looping.decode(
                batch.greedy, loop.encoded, loop.lengths, start, batch.options
            )
        run()
        impl = f"windowed_looping, graphs={mode}, {loop.impl}"
        result = loop.hypotheses(batch.lengths, batch.carry, impl)
        if expected is not None and start is not None:
            if not _same_labels(loop.hypotheses(loop.lengths, start, ""), expected):
                return self._without_fusing(key, batch, mode)
            self.trusted.add(key)
        if batch.encoded.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()
        return result

    def _without_fusing(self, key: tuple, batch: DecoderCall, mode: str) -> Hypotheses:
        """Replay with a plain turn after the loop `key` gave wrong labels."""
        if not self.loops[key].loop.fused:
            raise GraphsUnavailable("the captured loop found other labels than the plain one")
        self.unfused = "the fused turn found other labels than the plain loop"
        self.drop(key)
        return self.replay(batch, mode)

    def make(self, batch: DecoderCall, mode: str) -> CapturedLoop:
        """Capture a loop for batches of this size; drops the loops used least recently.

        Its turn is fused where possible; if not, the loop's `impl` has the reason.

        Args:
            batch: Loaded for the capture.
            mode: "step" or "full".

        Raises:
            GraphsUnavailable: The capture failed.
        """
        while len(self.loops) >= KEEP:
            self.drop(next(iter(self.loops)))
        turn = batch.options.turn
        if turn == "plain":
            unfused_because = "as asked"
        else:
            unfused_because = self.unfused or _why_not_fused(batch.encoded)
        try:
            if not unfused_because:
                try:
                    return self._record(batch, mode, "")
                except Exception as error:
                    unfused_because = first_cause(error)
            if turn == "fused":
                raise RuntimeError(f"turn='fused': {unfused_because}")
            return self._record(batch, mode, unfused_because)
        except Exception as error:
            reason = f"graphs={mode!r}: capture failed, {first_cause(error)}"
            raise GraphsUnavailable(reason) from error

    def _record(self, batch: DecoderCall, mode: str, unfused_because: str) -> CapturedLoop:
        """A captured loop; its turn is fused if `unfused_because` is ""."""
        rows, frames = rounded(*batch.encoded.shape[:2])
        greedy, encoded, _, carry, options = batch
        loop = GraphLoop(rows, frames, greedy, encoded, carry, options, unfused_because)
        loop.load(batch.encoded, batch.lengths, batch.carry)
        run = capture(loop, batch.greedy, mode)
        self.watch_reads(batch.greedy.model, loop.storages_read)
        return CapturedLoop(loop, run)


MODELS: dict[int, Any] = registry()


def _cache_of(model: Any) -> GraphCache:
    """The cache of `model`, made at the first call; it goes when the model is deleted."""
    return cache_of(MODELS, model, GraphCache)


def _decode_plain(batch: DecoderCall, reason: str) -> Hypotheses:
    hypotheses = windowed_looping.decode(*batch)
    return replace(hypotheses, impl=f"windowed_looping, graphs=off: {reason}")


def rounded(B: int, T: int) -> tuple[int, int]:
    """Buffer sizes (B, T) for B utterances of T frames.

    Powers of two, at least `MIN_ROWS` and `MIN_FRAMES`; B = 1 stays. Unused rows are computed in
    every turn. Unused frames cost memory only, 4 P + 24 max_symbols bytes each in float32.
    """
    rows = 1 if B == 1 else max(MIN_ROWS, 1 << (B - 1).bit_length())
    return rows, max(MIN_FRAMES, 1 << (T - 1).bit_length())


def _why_not_fused(encoded: Tensor) -> str:
    """Why a turn on this device cannot be fused; "" if it can."""
    if not (encoded.is_cuda or runtime.INTERPRETED):
        return f"Triton has nothing for {encoded.device}"
    return runtime.lacks("triton")


def _key(batch: DecoderCall) -> tuple:
    """All that a captured loop depends on, but for weights and the number of frames."""
    encoded, options, greedy = batch.encoded, batch.options, batch.greedy
    device_type = encoded.device.type
    sizes = tuple((part.shape[1:], part.dtype) for part in state_tensors(batch.carry))
    return (
        rounded(*encoded.shape[:2])[0],
        encoded.shape[2],
        encoded.dtype,
        encoded.device,
        sizes,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        runtime.tf32_asked(),
        options.max_symbols,
        options.window,
        options.turn,
        greedy.confidence,
        greedy.blank,
        greedy.durations,
    )


def _carry_in(loop: GraphLoop) -> Carry:
    """The carry that a loaded loop starts from, in the sizes of its buffers."""
    state = loop.state
    return Carry(state.predicted, state.state, state.time, torch.zeros_like(loop.counts))


def _same_labels(hypotheses: Hypotheses, expected: Hypotheses) -> bool:
    """Whether labels, lengths, frames and durations are equal."""
    pairs = zip(hypotheses.parts()[:4], expected.parts()[:4], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
