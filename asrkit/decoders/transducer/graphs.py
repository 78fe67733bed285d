"""Label looping by CUDA graphs: its turn is recorded once, on buffers that stay, and replayed
without Python launching anything.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asrkit import runtime
from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.nests import leaves, nest_map
from asrkit.decoders.transducer import windowed_looping
from asrkit.decoders.transducer.conditional import WhileGraph
from asrkit.decoders.transducer.reading import Carry, Options, Reader
from asrkit.decoders.transducer.weights import Watch, fingerprint
from asrkit.decoders.transducer.windowed_looping import begin, look, speak
from asrkit.runtime import waits
from asrkit.shapes import expect

MODES = ("auto", "off", "step", "full")
WAYS = ("auto", "fused", "plain")  # to compute a captured turn
TURNS = 4  # of the loop in one replay of "step"; those after the end change nothing
KEEP = 8  # loops captured for one model
ROWS, FRAMES = (
    8,
    512,
)  # the fewest that a loop has room for; a single utterance has a loop of its own
CAPTURING, REGISTERING = threading.Lock(), threading.Lock()  # torch records one graph at a time


class Loop:
    """Label looping on buffers that stay where they are: for B utterances of T frames, or for fewer
    and shorter ones.

    `turn` sends nothing to the host, so it can be recorded. Rows and frames that a batch leaves
    unused lie beyond its lengths.
    """

    def __init__(
        self,
        B: int,
        T: int,
        encoded: Tensor,
        carry: Carry,
        options: Options,
        read: Reader,
        lacks: str = "as asked",
    ) -> None:
        """`lacks`: why the turn cannot be fused; "" if it shall be."""
        cuda, columns = encoded.is_cuda, T * options.max_symbols + 1
        self.options, self.table = options, read.table  # kept: a graph has its address
        self.encoded = encoded.new_zeros(B, T, encoded.shape[2])
        self.lengths = carry.ahead.new_zeros(B)
        self.place = nest_map(lambda part: part.new_zeros(B, *part.shape[1:]), begin(carry))
        self.count = self.lengths.clone()  # labels so far
        self.said = self.lengths.new_zeros(3, B, columns)  # labels, frames, durations
        self.sure = (
            torch.zeros(B, columns, dtype=torch.float32, device=encoded.device)
            if read.confidence != "none"
            else None
        )
        self.active = torch.zeros((), dtype=torch.bool, device=encoded.device)
        self.flags = torch.zeros(2, dtype=torch.bool, pin_memory=cuda)
        self.sent = [torch.cuda.Event() for _ in range(2)] if cuda else None
        self.fused, self.way = not lacks, f"not fused: {lacks}" if lacks else "fused"
        self.read_at: set[int] | None = (
            None  # where the tensors lie that a turn has read, once it was recorded
        )

    def load(self, encoded: Tensor, lengths: Tensor, carry: Carry) -> None:
        """Takes a batch in; what the last one left beyond it is never looked at."""
        B, T, _ = encoded.shape
        self.encoded[:B, :T].copy_(encoded)
        self.lengths.zero_()[:B].copy_(lengths)
        nest_map(lambda own, given: own[:B].copy_(given), self.place, begin(carry))
        self.count.zero_()

    def turn(self, read: Reader) -> None:
        """At most one label more for each utterance."""
        if self.fused:
            from asrkit.decoders.transducer import triton

            triton.turn(self, read)
        else:
            self.plain_turn(read)

    def plain_turn(self, read: Reader) -> None:
        """The turn to read. What is written without a label is overwritten by the next, or not
        counted.
        """
        after, step = look(read, self.encoded, self.lengths, self.place, self.options)
        column = self.count[:, None]
        said = torch.stack([step.labels, step.frames, step.durations])
        self.said.scatter_(2, column.expand(3, -1, -1), said[..., None])
        if self.sure is not None:
            self.sure.scatter_(1, column, step.confidence[:, None])  # type: ignore[index]
        self.count += step.emitted
        nest_map(_overwrite, self.place, speak(read, after, step))
        torch.any(self.place.time < self.lengths, out=self.active)

    def repeat(self, turns: Callable[[], None]) -> None:
        """`turns` until nobody has frames left. The flag travels, and is read, while the next turns
        are already under way.
        """
        turns()
        self._send(0)
        for slot in cycle((1, 0)):
            turns()
            self._send(slot)
            if not self._received(1 - slot):
                return

    def _send(self, slot: int) -> None:
        self.flags[slot].copy_(self.active, non_blocking=True)
        if self.sent:
            self.sent[slot].record()

    def _received(self, slot: int) -> bool:
        if self.sent:
            self.sent[slot].synchronize()
        return bool(self.flags[slot])

    @torch.inference_mode(False)
    def hypotheses(self, lengths: Tensor, carry: Carry, impl: str) -> Hypotheses:
        """What was found for the batch with these lengths (B,), in tensors of its own."""
        B, N = len(lengths), int(self.count[: len(lengths)].max())
        place, counts = nest_map(lambda part: part[:B].clone(), (self.place, self.count))
        beyond = torch.arange(N, device=counts.device) >= counts[:, None]
        labels, frames, durations = (part[:B, :N] for part in self.said)
        return Hypotheses(
            labels=labels.masked_fill(beyond, -1),
            frames=(frames + carry.frames[:, None]).masked_fill(beyond, -1),
            durations=durations.masked_fill(beyond, -1),
            lengths=counts,
            scores=place.scores,
            impl=impl,
            confidence=None if self.sure is None else self.sure[:B, :N].masked_fill(beyond, -1),
            carry=carry.after(place.time, lengths, place.predicted, place.state),
        )


def _overwrite(own: Tensor, new: Tensor) -> Tensor:
    """`new` in the place of `own`."""
    expect(
        own.dtype == new.dtype,
        "model.predict",
        f"{own.dtype}, as it began with",
        new.dtype,
        "Keep one dtype.",
    )
    return own.copy_(new)


class Recordable(TorchDispatchMode):
    """RuntimeError for an op that decides a value or a size in Python: a capture that fails there
    may leave traces in torch.

    `read_at` collects where the tensors lie that ops were given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read_at = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.read_at |= {tensor.untyped_storage().data_ptr() for tensor in given}
        if waits(func, args, kwargs):
            raise RuntimeError(f"{func} waits for the GPU")
        with self:  # in inference mode ops arrive whole that are made of others
            parts = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if parts is NotImplemented else parts


class Captured(NamedTuple):
    """A loop, and how to run it on the current stream once it is loaded."""

    loop: Loop
    run: Callable[[], None]

    def holds(self, T: int) -> bool:
        """Whether there is room for T frames."""
        return self.loop.encoded.shape[1] >= T


def capture(loop: Loop, read: Reader, mode: str) -> Callable[[], None]:
    """Records turns of the loaded loop: `TURNS` in a graph that the host replays, or one in a graph
    that repeats itself.
    """
    stream, kind = (
        torch.cuda.Stream(),
        loop.encoded.device.type,
    )  # its own: matrix products keep a workspace for each stream
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph(keep_graph=mode == "full")
    # Casts that autocast remembers belong to whoever entered it, and may be gone at a replay.
    cast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    with CAPTURING, cast, torch.cuda.stream(stream):
        for _ in range(
            2
            # libraries set themselves up, and kernels are compiled, at first calls: not within a
            # capture
        ):
            with Recordable() as seen:
                loop.turn(read)
        loop.read_at = seen.read_at
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(1 if mode == "full" else TURNS):
                loop.turn(read)
    torch.cuda.current_stream().wait_stream(stream)
    return (
        WhileGraph(graph, loop.active).launch
        if mode == "full"
        else lambda: loop.repeat(graph.replay)
    )


class Refused(RuntimeError):
    """Why graphs cannot run."""


class Graphs:
    """The loops captured for one model, the one used last at the end. Whoever decodes with them
    holds `lock`.
    """

    def __init__(self) -> None:
        self.lock, self.loops = threading.Lock(), OrderedDict[tuple, Captured]()
        self.weights: tuple = ()
        self.watch: Watch | None = None  # of the weights that the loops read
        self.trusted, self.refused = set[tuple](), ""
        self.unfused = ""  # why no turn is fused any more
        self.done: torch.cuda.Event | None = None  # when the device has finished with the buffers

    def decode(
        self, read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
    ) -> Hypotheses:
        """What `replay` finds; for "auto" the plain loop stands in, with the reason, once that was
        refused.
        """
        auto = options.graphs == "auto"
        try:
            if auto and self.refused:
                raise Refused(self.refused)
            return self.replay(
                read, encoded, lengths, carry, options, "step" if auto else options.graphs
            )
        except Refused as error:
            if not auto:
                raise
            self.refused = str(error)
            self.drop(*self.loops)
        return _plain(read, encoded, lengths, carry, options, self.refused)

    def replay(
        self,
        read: Reader,
        encoded: Tensor,
        lengths: Tensor,
        carry: Carry,
        options: Options,
        mode: str,
    ) -> Hypotheses:
        """By a captured loop that fits, captured first if there is none."""
        if self.done:
            self.done.wait()  # another stream may have used these buffers last
        self.follow(read.model)
        key = (mode, *_key(read, encoded, carry, options))
        if key in self.loops and not self.loops[key].holds(encoded.shape[1]):
            self.drop(key)  # for one with more room, which serves the shorter ones too
        if key not in self.loops:
            self.loops[key] = self.make(read, encoded, lengths, carry, options, mode)
        self.loops.move_to_end(key)
        loop, run = self.loops[key]
        loop.load(encoded, lengths, carry)
        start = Carry(
            loop.place.predicted, loop.place.state, loop.place.time, torch.zeros_like(loop.count)
        )
        wanted = None
        if (
            options.graphs == "auto" and key not in self.trusted
        ):  # in the graph's own sizes: rounding depends on them
            wanted = windowed_looping.decode(read, loop.encoded, loop.lengths, start, options)
        run()
        found = loop.hypotheses(lengths, carry, f"windowed_looping, graphs={mode}, {loop.way}")
        if wanted is not None:
            if not _same(loop.hypotheses(loop.lengths, start, ""), wanted):
                if not loop.fused:
                    raise Refused("the captured loop found other labels than the plain one")
                self.unfused = "the fused turn found other labels than the plain loop"
                self.drop(key)
                return self.replay(read, encoded, lengths, carry, options, mode)
            self.trusted.add(key)
        if encoded.is_cuda:
            self.done = torch.cuda.Event()
            self.done.record()
        return found

    def make(
        self,
        read: Reader,
        encoded: Tensor,
        lengths: Tensor,
        carry: Carry,
        options: Options,
        mode: str,
    ) -> Captured:
        """A loop for batches of this size, captured with this batch in it; the one used least
        recently makes room.

        Its turn is fused where it can be; if not, the loop's `way` has the reason.
        """
        while len(self.loops) >= KEEP:
            self.drop(next(iter(self.loops)))
        given = read, encoded, lengths, carry, options, mode
        lacks = "as asked" if options.turn == "plain" else self.unfused or _lacks(encoded)
        try:
            if not lacks:
                try:
                    return self.record(*given, "")
                except Exception as error:
                    lacks = _cause(error)
            if options.turn == "fused":
                raise RuntimeError(f"turn='fused': {lacks}")
            return self.record(*given, lacks)
        except Exception as error:
            raise Refused(f"graphs={mode!r}: capture failed, {_cause(error)}") from error

    def record(
        self,
        read: Reader,
        encoded: Tensor,
        lengths: Tensor,
        carry: Carry,
        options: Options,
        mode: str,
        lacks: str,
    ) -> Captured:
        """A captured loop, with its turn fused unless that `lacks` something."""
        loop = Loop(*rounded(*encoded.shape[:2]), encoded, carry, options, read, lacks)
        loop.load(encoded, lengths, carry)
        run = capture(loop, read, mode)
        known = self.watch.read if self.watch else set()
        both = None if loop.read_at is None or known is None else known | loop.read_at
        self.watch = Watch(read.model, both)
        return Captured(loop, run)

    def follow(self, model: Any) -> None:
        """Drops all loops if weights have moved, or changed dtype or shape: a graph knows them by
        their addresses.

        What the loops read is looked at every time; the whole model only where something of that
        has changed.
        """
        if self.watch and self.watch.still(model):
            return
        weights = tuple(fingerprint(model))
        if not any(len(entry) > 2 for entry in weights):
            raise Refused(
                "the model's attributes hold no tensors, so a change of its weights could not be seen"
            )
        if weights != self.weights:
            self.drop(*self.loops)
            self.weights = weights
        self.watch = Watch(model, self.watch.read) if self.watch and self.loops else None

    def drop(self, *keys: tuple) -> None:
        """Frees loops, once the device has finished with them."""
        if self.done:
            self.done.synchronize()
        for key in keys:
            del self.loops[key]
            self.trusted.discard(key)


def decode(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options
) -> Hypotheses:
    """windowed_looping by CUDA graphs, which are kept for the model until it is gone or
    `release_graphs` is called.

    "step": the host replays `TURNS` turns at a time. "full": one graph that repeats itself on the
    device; by name only, until it has been measured. "auto": "step" on a GPU, provided that its
    first result in each size is the plain loop's. If not, its turns are fused no longer; if that
    was not it, or if capture failed, the plain loop runs from then on. `impl` says why. A mode
    asked for by name is a RuntimeError if it cannot run, and a ValueError without a CUDA device.

    The turn is fused into a dozen kernels by Triton (`asrkit.decoders.transducer.triton`); where
    that cannot be, it is `Loop.plain_turn`, and `impl` says why. `turn` asks for one of them. None
    of this has met a GPU yet.

    Few graphs serve many batches: rows are rounded up as `rounded` has it, and there is one loop
    for each number of rows, with frames for the longest so far. `KEEP` of them stay. Weights may
    change in place; graphs are captured again when addresses, dtypes or shapes change of what a
    turn reads, or a module's mode. Weights outside the model's attributes, and Python's numbers and
    functions in `predict` and `join`, are as they were at the capture.

    Threads that decode with one model take turns. On another stream, a call waits for what the last
    one did to the buffers.
    """
    auto = options.graphs == "auto"
    if not encoded.is_cuda:
        expect(
            auto,
            "graphs",
            f"'auto' or 'off' on {encoded.device}",
            repr(options.graphs),
            "CUDA graphs need a CUDA device.",
        )
        return windowed_looping.decode(read, encoded, lengths, carry, options)
    try:
        graphs = _graphs_of(read.model)
    except Refused as error:
        if not auto:
            raise
        return _plain(read, encoded, lengths, carry, options, str(error))
    with graphs.lock, torch.cuda.device(encoded.device):
        return graphs.decode(read, encoded, lengths, carry, options)


def _plain(
    read: Reader, encoded: Tensor, lengths: Tensor, carry: Carry, options: Options, why: str
) -> Hypotheses:
    found = windowed_looping.decode(read, encoded, lengths, carry, options)
    return replace(found, impl=f"windowed_looping, graphs=off: {why}")


MODELS = dict[int, Graphs]()  # by identity: a model need not be hashable


def _graphs_of(model: Any) -> Graphs:
    with REGISTERING:
        if id(model) not in MODELS:
            try:
                weakref.finalize(model, MODELS.pop, id(model), None).atexit = False
            except TypeError as error:
                raise Refused(f"the model's graphs could not go when it goes: {error}") from error
            MODELS[id(model)] = Graphs()
        return MODELS[id(model)]


def release_graphs(model: Any = None) -> None:
    """Frees what graphs of `model`, or of all models, hold; the next call captures anew."""
    with REGISTERING:
        chosen = list(MODELS) if model is None else [id(model)]
        freed = [MODELS.pop(key) for key in chosen if key in MODELS]
    for graphs in freed:
        with graphs.lock:
            graphs.drop(*graphs.loops)


def rounded(B: int, T: int) -> tuple[int, int]:
    """Sizes (B, T) of the buffers for B utterances of T frames: powers of two, not below `ROWS` and
    `FRAMES`; B = 1 stays.

    Rows that nobody needs are computed in each turn. Frames take memory only, 4 P + 24 max_symbols
    bytes each in float32.
    """
    rows = 1 if B == 1 else max(ROWS, 1 << (B - 1).bit_length())
    return rows, max(FRAMES, 1 << (T - 1).bit_length())


def _lacks(encoded: Tensor) -> str:
    """Why a turn on this device cannot be fused; "" if it can."""
    if not (encoded.is_cuda or runtime.INTERPRETED):
        return f"Triton has nothing for {encoded.device}"
    return runtime.lacks("triton")


def _key(read: Reader, encoded: Tensor, carry: Carry, options: Options) -> tuple:
    """What a captured loop is good for, weights and frames aside."""
    kind = encoded.device.type
    sizes = tuple((part.shape[1:], part.dtype) for part in leaves(carry))
    rounding = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), runtime.tf32_asked()
    asked = (
        options.max_symbols,
        options.window,
        options.turn,
        read.confidence,
        read.blank,
        read.durations,
    )
    return (
        rounded(*encoded.shape[:2])[0],
        encoded.shape[2],
        encoded.dtype,
        encoded.device,
        sizes,
        rounding,
        asked,
    )


def _same(found: Hypotheses, wanted: Hypotheses) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(found.parts()[:4], wanted.parts()[:4], strict=True)
    )


def _cause(error: BaseException) -> str:
    """The first line of the error that began it: leaving a capture that failed raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
