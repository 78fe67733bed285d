"""Greedy decoding by CUDA graphs: turns of a strategy's loop are recorded once and replayed.

Python then launches nothing itself. The parts, from the caller down:

    decode ---> GraphCache (one per model): is there a captured loop for this batch and weights?
                   |
                   +-- graph_loop.GraphLoop: the buffers, and the turn that is recorded
                   |
                   |        frames --> joint --> the next label of each utterance, if found
                   |          ^                              |
                   |          +---- clocks, state <----- predictor
                   |
                   +-- capture_loop: records turns; "full" repeats them by conditional.WhileGraph
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asrkit.cuda_graphs import capture
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer.conditional import WhileGraph
from asrkit.decoders.transducer.graph_loop import LOOPS, GraphLoop
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions
from asrkit.gpu_waits import CaptureGuard

GRAPH_MODES = ("auto", "off", "step", "full")
TURNS = 4  # of the loop in one replay of "step"; turns after the end change nothing
KEEP = 8  # captured loops of one model
MIN_ROWS = 8  # smallest number of rows in a loop, except that one utterance has its own loop
MIN_FRAMES = 512  # smallest number of frames in a loop


class DecoderCall(NamedTuple):
    """The arguments of one call of a decoder."""

    greedy: GreedyModel
    encoded: Tensor  # (B, T, E)
    lengths: Tensor  # (B,) int64
    carry: Carry
    options: GreedyOptions


class GraphsUnavailable(RuntimeError):
    """Graphs cannot run here; the message says why."""


def decode(
    greedy: GreedyModel, encoded: Tensor, lengths: Tensor, carry: Carry, options: GreedyOptions
) -> Hypotheses:
    """Greedy hypotheses by a strategy of `LOOPS` in CUDA graphs.

    `options.graphs` is one of
        "step": the host replays a few turns (`TURNS`) at a time;
        "full": one graph that repeats itself on the device;
        "auto": "full", or "step" where "full" cannot run. Its first result in each size is
            compared with the plain loop's. If neither mode works, the plain loop runs from then
            on, and `impl` gives the reason.

    Graphs are kept until the model is deleted or `release_graphs` is called. Few graphs serve many
    batches: the number of rows is rounded up (`rounded`), and each number of rows has one loop,
    sized for the longest batch so far. The `KEEP` most recently used loops stay. Weights may change
    in place. Graphs are captured again when the address, dtype or shape of a weight or buffer
    changes, or the mode of a module. The child `encoder` is not checked, since no turn reads it.
    Python numbers and functions in `predict` and `join` stay as they were at the capture.

    Threads that decode with one model take turns. A call on another stream waits for the last one.

    Args:
        greedy: The model.
        encoded: (B, T, E), on a CUDA device.
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Options of greedy decoding.

    Raises:
        RuntimeError: A mode that was chosen by name cannot run.
    """
    batch = DecoderCall(greedy, encoded, lengths, carry, options)
    if not isinstance(greedy.model, nn.Module):
        reason = "the model is no torch.nn.Module, so a change of its weights could not be seen"
        if options.graphs != "auto":
            raise GraphsUnavailable(reason)
        return _decode_plain(batch, reason)
    cache = cache_of(greedy.model)
    with cache.lock, torch.cuda.device(encoded.device):
        return cache.decode(batch)


def capture_loop(
    loop: GraphLoop, greedy: GreedyModel, mode: str, stream: torch.cuda.Stream
) -> Callable[[], None]:
    """Record turns of a loaded loop, and return a function that runs it to its end.

    Args:
        loop: A loop with a batch in it.
        greedy: The model.
        mode: "step" records `TURNS` turns in a graph that the host replays. "full" records one turn
            in a graph that repeats itself.
        stream: The stream to record on; graphs that may run at the same time need different ones.

    Raises:
        RuntimeError: The turn contains an op that waits for the GPU, or the capture failed.
    """
    repeats_itself = mode == "full"

    def turns() -> None:
        for _ in range(1 if repeats_itself else TURNS):
            loop.turn(greedy)

    def warm_up() -> None:
        with CaptureGuard():
            loop.turn(greedy)

    # Autocast's cache of casts belongs to the caller's context, which may have ended at a replay.
    device_type = loop.active.device.type
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, dtype, enabled, cache_enabled=False):
        graph, _ = capture(turns, warm_up=warm_up, stream=stream, keep_graph=repeats_itself)
    if repeats_itself:
        return WhileGraph(graph, loop.active).launch
    return partial(loop.repeat, graph.replay)


class GraphCache:
    """The captured loops of one model, the most recently used one last.

    Attributes:
        lock: Held while a thread decodes.
        loops: Captured loops by `_key`, each with the function that runs it on the current stream.
        weights: `weights_read` of the model at the capture.
        trusted: Keys of loops whose first result equalled the plain loop's.
        auto_modes: Modes that "auto" still tries, in this order.
        refused: Why it no longer tries the others; "" while it tries all.
        done: The event after which the device has finished with the buffers.
        stream: The stream that loops are recorded on. It returns to FREE_STREAMS with the cache.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loops = OrderedDict[tuple, tuple[GraphLoop, Callable[[], None]]]()
        self.weights: tuple = ()
        self.trusted = set[tuple]()
        self.auto_modes = ["full", "step"]
        self.refused = ""
        self.done: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None

    def drop(self, *keys: tuple) -> None:
        """Free loops, once the device has finished with them."""
        if self.done:
            self.done.synchronize()
        for key in keys:
            del self.loops[key]
            self.trusted.discard(key)

    def decode(self, batch: DecoderCall) -> Hypotheses:
        """Hypotheses by `replay`; "auto" falls back to the plain loop, and `impl` says why."""
        if batch.options.graphs != "auto":
            return self.replay(batch, batch.options.graphs)
        while self.auto_modes:
            try:
                return self.replay(batch, self.auto_modes[0])
            except GraphsUnavailable as error:
                self.auto_modes.pop(0)
                self.refused = str(error)
        self.drop(*self.loops)
        return _decode_plain(batch, self.refused)

    def replay(self, batch: DecoderCall, mode: str) -> Hypotheses:
        """Hypotheses by the captured loop for this batch, which is captured if there is none.

        Args:
            batch: The batch to decode.
            mode: "step" or "full".

        Raises:
            GraphsUnavailable: Nothing could be captured, or the result was wrong.
        """
        strategy = batch.options.strategy
        if self.done:
            self.done.wait()  # the last call may have used these buffers on another stream
        weights = weights_read(batch.greedy.model)
        if weights != self.weights:
            self.drop(*self.loops)
            self.weights = weights
        key = (mode, *_key(batch))
        if key in self.loops and self.loops[key][0].encoded.shape[1] < batch.encoded.shape[1]:
            self.drop(key)  # a longer loop replaces it, and serves shorter batches too
        if key not in self.loops:
            self.loops[key] = self.captured(batch, mode)
        self.loops.move_to_end(key)
        loop, run = self.loops[key]
        loop.load(batch.encoded, batch.lengths, batch.carry)
        is_new = batch.options.graphs == "auto" and key not in self.trusted
        if is_new:
            # at the graph's own sizes, since rounding depends on them
            state = loop.state
            start = Carry(state.predicted, state.state, state.time, torch.zeros_like(loop.counts))
            expected = LOOPS[strategy].decode(
                batch.greedy, loop.encoded, loop.lengths, start, batch.options
            )
        run()
        result = loop.hypotheses(batch.lengths, batch.carry, f"{strategy}, graphs={mode}")
        if is_new:
            actual = loop.hypotheses(loop.lengths, start, "")
            if not all(map(torch.equal, actual.parts()[:4], expected.parts()[:4])):  # not scores
                raise GraphsUnavailable("the captured loop found other labels than the plain one")
            self.trusted.add(key)
        if batch.encoded.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()
        return result

    def captured(self, batch: DecoderCall, mode: str) -> tuple[GraphLoop, Callable[[], None]]:
        """A new loop for batches of this size; the least recently used loops make room for it.

        Args:
            batch: The batch that is in the loop during the capture.
            mode: "step" or "full".

        Raises:
            GraphsUnavailable: The capture failed.
        """
        while len(self.loops) >= KEEP:
            self.drop(next(iter(self.loops)))
        greedy, encoded, lengths, carry, options = batch
        rows, frames = rounded(*encoded.shape[:2])
        try:
            loop = GraphLoop(rows, frames, greedy, encoded, carry, options)
            loop.load(encoded, lengths, carry)
            if self.stream is None:
                self.stream = free_stream(encoded.device)
                weakref.finalize(self, FREE_STREAMS.append, self.stream).atexit = False
            return loop, capture_loop(loop, greedy, mode, self.stream)
        except Exception as error:
            reason = f"graphs={mode!r}: capture failed, {_first_cause(error)}"
            raise GraphsUnavailable(reason) from error


MODELS = weakref.WeakKeyDictionary[nn.Module, GraphCache]()
FREE_STREAMS: list[torch.cuda.Stream] = []  # of deleted caches, with their workspaces
REGISTERING = threading.Lock()


def cache_of(model: nn.Module) -> GraphCache:
    """The cache of `model`, which is deleted with the model."""
    with REGISTERING:
        if model not in MODELS:
            MODELS[model] = GraphCache()
        return MODELS[model]


def free_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no living cache records on."""
    with REGISTERING:
        for index, stream in enumerate(FREE_STREAMS):
            if stream.device == device:
                return FREE_STREAMS.pop(index)
    return torch.cuda.Stream(device)


def release_graphs(model: nn.Module | None = None) -> None:
    """Free the memory of the graphs of `model`, or of all models; the next call captures again."""
    with REGISTERING:
        models = list(MODELS) if model is None else [model]
        caches = [MODELS.pop(each) for each in models if each in MODELS]
    for cache in caches:
        with cache.lock:
            cache.drop(*cache.loops)


def weights_read(model: nn.Module) -> tuple:
    """The addresses, dtypes and shapes of a model's tensors, and its modules' modes.

    A captured turn depends on them. The child `encoder` is left out: it has hundreds of tensors,
    and no turn reads them.
    """
    modules = [model]
    for name, child in model.named_children():
        if name != "encoder":
            modules += child.modules()
    facts: list[tuple] = []
    for module in modules:
        facts.append((module.training,))
        for part in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            facts.append((part.data_ptr(), part.dtype, part.shape))
    return tuple(facts)


def _first_cause(error: BaseException) -> str:
    """The first line of the original error: ending a failed capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def _decode_plain(batch: DecoderCall, reason: str) -> Hypotheses:
    strategy = batch.options.strategy
    hypotheses = LOOPS[strategy].decode(*batch)
    return replace(hypotheses, impl=f"{strategy}, graphs=off: {reason}")


def rounded(B: int, T: int) -> tuple[int, int]:
    """Buffer sizes (B, T) for B utterances of T frames.

    Both are powers of two, at least `MIN_ROWS` and `MIN_FRAMES`; B = 1 stays 1. Unused rows are
    computed in every turn. Unused frames cost only memory: 4 P + 24 max_symbols bytes each in
    float32.
    """
    rows = 1 if B == 1 else max(MIN_ROWS, 1 << (B - 1).bit_length())
    return rows, max(MIN_FRAMES, 1 << (T - 1).bit_length())


def _key(batch: DecoderCall) -> tuple:
    """Everything that a captured loop depends on except weights and the number of frames."""
    encoded, options, greedy = batch.encoded, batch.options, batch.greedy
    device_type = encoded.device.type
    parts = state_tensors(batch.carry)
    sizes = tuple((part.shape[1:], part.dtype) for part in parts)
    return (
        rounded(*encoded.shape[:2])[0],
        encoded.shape[2],
        encoded.dtype,
        encoded.device,
        sizes,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.backends.cuda.matmul.fp32_precision,  # TF32 or not, by any of torch's settings
        options.strategy,
        options.max_symbols,
        options.window,
        greedy.confidence,
        greedy.blank,
        greedy.durations,
    )
