"""Every option of the recogniser and of `asrkit transcribe`: defined, described and checked here.

Importing this file needs no torch, so the command line can show these texts at once.
"""

from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Real
from typing import Any, Literal, get_args, get_type_hints

GRAPH_STRATEGIES = ("fastest", "windowed_looping")  # decoders that can run as a CUDA graph
CAPTURED = ("step", "full")  # values of `graphs` that ask for a CUDA graph by name


def described(default: Any, text: str) -> Any:
    """A dataclass field with this default, described by `text`; see `description`."""
    return field(default=default, metadata={"help": text})


def description(config: type, name: str) -> str:
    """The text that describes the field `name` of a config class, as `--help` shows it."""
    return {one.name: one.metadata["help"] for one in fields(config)}[name]


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How recordings are cut into windows and batched. Times are in seconds."""

    batch_s: float = described(120.0, "most audio in one batch, padding included")
    window_s: float = described(30.0, "cut longer recordings into windows of this length")
    overlap_s: float = described(4.0, "audio that a window shares with the next one")
    timestamps: bool = described(
        False,
        "json: add words with times and confidences (srt, vtt and ctm always have them); "
        "an RNN-T's labels have no length, so its words end where their last label starts",
    )

    def __post_init__(self) -> None:
        from asrkit.shapes import expect

        for name in ("batch_s", "window_s", "overlap_s"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            expect(is_number, name, "a number of seconds", repr(value))
        flag = self.timestamps
        expect(isinstance(flag, bool), "timestamps", "True or False", repr(flag))
        expect(self.batch_s > 0, "batch_s", "more than 0 seconds", self.batch_s)
        expect(isfinite(self.batch_s), "batch_s", "a finite number of seconds", self.batch_s)
        expect(1 <= self.window_s <= 86_400, "window_s", "1 to 86,400 seconds", self.window_s)
        fits = 0 <= 2 * self.overlap_s <= self.window_s
        expect(fits, "overlap_s", "0 to half a window", self.overlap_s)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the recogniser computes, from waveforms to hypotheses.

    The defaults run the model as it was loaded, on any device. `asrkit transcribe` takes them too,
    except for encoder="optimized" on a CPU. No option but `precision` and `max_symbols` changes
    what is recognised, except by rounding.
    """

    normalization: Literal["batched", "one_by_one"] = described(
        "batched", "normalise features for the whole batch, or utterance by utterance"
    )
    precision: Literal["as_loaded", "float32", "tf32", "autocast", "bfloat16", "float16"] = (
        described(
            "as_loaded",
            "dtype of the weights and of the products; 'as_loaded' keeps the model's dtype and "
            "torch's settings, 'autocast' casts float32 weights to bfloat16 in the encoder only",
        )
    )
    encoder: Literal["eager", "packed", "optimized", "compiled"] = described(
        "eager",
        "run the model as it is, with linear layers packed for a CPU (asrkit.models.packed), "
        "through asrkit.models.optimize, or with its encoder's blocks compiled by torch.compile",
    )
    encoder_graphs: Literal["off", "per_shape"] = described(
        "off", "replay the encoder as a CUDA graph, captured once for each shape"
    )
    strategy: Literal[
        "fastest", "batched", "one_by_one", "frame_looping", "label_looping", "windowed_looping"
    ] = described(
        "fastest",
        "decoding strategy: 'fastest' for the kind of model, 'batched' with all utterances in step "
        "frame by frame, 'one_by_one' utterance by utterance, or a transducer's loop by name",
    )
    graphs: Literal["auto", "off", "step", "full"] = described(
        "auto", "run the transducer's decoding loop as a CUDA graph of some steps, or of all"
    )
    turn: Literal["auto", "fused", "plain"] = described(
        "auto", "compute a captured step of that loop with fused Triton kernels or plain torch"
    )
    max_symbols: int | None = described(
        None, "most labels on one frame, for a transducer (none: what the checkpoint says, or 10)"
    )
    order: Literal["by_length", "as_given"] = described(
        "by_length", "batch utterances of similar length, or as they come"
    )
    loading: Literal["overlapped", "before"] = described(
        "overlapped", "read the next audio in a thread during computation, or before it"
    )

    def __post_init__(self) -> None:
        from asrkit.shapes import expect, whole

        for name, annotation in get_type_hints(type(self)).items():
            if name != "max_symbols":
                known, value = get_args(annotation), getattr(self, name)
                expect(value in known, name, "one of " + ", ".join(map(repr, known)), repr(value))
        most = self.max_symbols
        expect(most is None or whole(most, 1), "max_symbols", "at least 1, or None", repr(most))
        expect(
            self.graphs not in CAPTURED or self.strategy in GRAPH_STRATEGIES,
            "graphs",
            f"'auto' or 'off' with strategy={self.strategy!r}",
            repr(self.graphs),
            "Only windowed_looping runs as a graph.",
        )
        expect(
            self.turn != "fused" or self.graphs in CAPTURED,
            "turn",
            f"'auto' or 'plain' with graphs={self.graphs!r}",
            repr(self.turn),
            "Only the steps of a graph asked for by name can be fused.",
        )
