"""Every option of the recogniser and of `asrkit transcribe`: defined, described and checked here.

Importing this file needs no torch, so the command line can show these texts at once.
"""

from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from asrkit.tasks import TASKS, Task

GRAPH_STRATEGIES = ("fastest", "windowed_looping")  # decoders that can run as a CUDA graph
MOST_READERS = 256  # threads
CAPTURED = ("step", "full")  # values of `graphs` that ask for a CUDA graph by name
CTC_WEIGHT = 0.3  # share of an encoder-decoder model's CTC head in a beam's scores


def described(default: Any, text: str, **cli: str) -> Any:
    """A dataclass field that `text` describes, as `--help` shows it.

    Args:
        default: Of the field.
        text: What it means.
        **cli: `flag` and `metavar` of its option, and the default that is `shown`, where these do
            not follow from its name, type and default.
    """
    return field(default=default, metadata={"help": text, **cli})


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How recordings are cut into windows and batched. Times are in seconds."""

    batch_s: float = described(
        120.0, "most audio in one batch, padding included", flag="batch-seconds", metavar="SECONDS"
    )
    window_s: float = described(
        30.0, "cut longer recordings into windows of this length", flag="window", metavar="SECONDS"
    )
    overlap_s: float = described(
        4.0, "audio that a window shares with the next one", flag="overlap", metavar="SECONDS"
    )
    timestamps: bool = described(
        False,
        "json: add words with times and confidences (srt, vtt and ctm always have them); "
        "an RNN-T's labels have no length, so its words end where their last label starts; those "
        "of an encoder-decoder model without a CTC head are rough",
    )
    readers: int = described(4, "threads that read and decode recordings", metavar="N")

    def __post_init__(self) -> None:
        from asrkit.shapes import expect, whole

        for name in ("batch_s", "window_s", "overlap_s"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            expect(is_number, name, "a number of seconds", repr(value))
        expect(self.batch_s > 0, "batch_s", "more than 0 seconds", self.batch_s)
        expect(isfinite(self.batch_s), "batch_s", "a finite number of seconds", self.batch_s)
        expect(1 <= self.window_s <= 86_400, "window_s", "1 to 86,400 seconds", self.window_s)
        fits = 0 <= 2 * self.overlap_s <= self.window_s
        expect(fits, "overlap_s", "0 to half a window", self.overlap_s)
        threads = whole(self.readers, 1, MOST_READERS)
        expect(threads, "readers", f"1 to {MOST_READERS} threads", repr(self.readers))


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Beam search instead of greedy decoding: its width, and what an n-gram or CTC adds to it.

    The decoders are `asrkit.decoders.ctc_beam` and `aed_beam`, which takes only the width and
    `ctc_weight`. Transducers are decoded greedily.
    """

    beam: int = described(
        8, "beam search that keeps so many hypotheses", metavar="K", shown="greedy decoding"
    )
    lm: Path | None = described(  # noqa: RUF009 - it is dataclasses.field
        None, "n-gram model in ARPA format, plain or gzipped, for the beam", metavar="FILE"
    )
    lm_units: Literal["words", "tokens"] = described(
        "words",
        "what the n-gram model is over: words, scored where they end, or the model's tokens "
        "(characters with <space> for the space, SentencePiece's pieces)",
    )
    lm_weight: float = described(
        0.3, "weight of the n-gram model's log-probability", metavar="WEIGHT"
    )
    label_bonus: float = described(
        0.0, "nats added for each label, against short texts", metavar="NATS"
    )
    word_bonus: float = described(
        0.0,
        "nats added to each word's log-probability before its weight, against short texts: begin "
        "with what an average word costs",
        metavar="NATS",
    )
    top_tokens: int | None = described(
        None,
        "CTC: only so many of the likeliest labels of a frame begin new hypotheses (default: all)",
        metavar="N",
    )
    ctc_weight: float | None = described(
        None,
        "encoder-decoder models with a CTC head: its share in the scores, 0 to 1, where 0 decodes "
        f"by attention alone (default: {CTC_WEIGHT})",
        metavar="WEIGHT",
    )

    def __post_init__(self) -> None:
        from asrkit.shapes import MAX_COUNT, MAX_WEIGHT, expect, is_finite, whole

        wanted = f"1 to {MAX_COUNT} hypotheses"
        expect(whole(self.beam, 1, MAX_COUNT), "beam", wanted, repr(self.beam))
        known = ("words", "tokens")
        units = "one of 'words', 'tokens'"
        expect(self.lm_units in known, "lm_units", units, repr(self.lm_units))
        bounds = f"a number from -{MAX_WEIGHT:,.0f} to {MAX_WEIGHT:,.0f}"
        for name in ("lm_weight", "label_bonus", "word_bonus"):
            value = getattr(self, name)
            inside = is_finite(value) and abs(value) <= MAX_WEIGHT
            expect(inside, name, bounds, repr(value))
        most = self.top_tokens
        expect(most is None or whole(most, 1), "top_tokens", "at least 1, or None", repr(most))
        share = self.ctc_weight
        valid = share is None or (is_finite(share) and 0 <= share <= 1)
        expect(valid, "ctc_weight", "a share from 0 to 1, or None", repr(share))
        over_words = self.lm is not None and self.lm_units == "words"
        expect(
            over_words or not self.word_bonus,
            "word_bonus",
            "an n-gram model over words with it",
            repr(self.word_bonus),
        )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What an encoder-decoder model is asked for, as far as its prompt has a place for it.

    Without any of them it is asked for what its checkpoint has as defaults: mostly to transcribe
    English with punctuation. A multilingual Whisper finds the language itself.
    """

    language: str | None = described(
        None,
        "code of the spoken language, such as de (default: a multilingual Whisper finds that of "
        "each recording; of others the checkpoint's, mostly en)",
        metavar="CODE",
    )
    target_language: str | None = described(
        None,
        "code of the language to write; another one than --language translates (default: the "
        "spoken one, and en with --task translate)",
        metavar="CODE",
    )
    task: Task | None = described(  # noqa: RUF009 - it is dataclasses.field
        None, "write what is said, or translate it (default: translate if the languages differ)"
    )
    punctuation: bool | None = described(
        None,
        "Canary: write punctuation and capitals, or neither (default: the checkpoint's, mostly "
        "to write them)",
    )
    fallback: bool | None = described(
        None,
        "Whisper: decode windows of unlikely or repetitive texts again, by sampling at rising "
        "temperatures, and leave out those without speech (default: yes)",
    )

    def __post_init__(self) -> None:
        from asrkit.shapes import expect

        for name in ("language", "target_language"):
            value = getattr(self, name)
            is_code = value is None or (isinstance(value, str) and bool(value.strip()))
            expect(is_code, name, "a language's code, or None", repr(value))
        known = ", ".join(map(repr, TASKS))
        expect(self.task in (None, *TASKS), "task", f"{known} or None", repr(self.task))
        for name in ("punctuation", "fallback"):
            flag = getattr(self, name)
            expect(flag in (None, True, False), name, "True, False or None", repr(flag))

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the recogniser computes, from waveforms to hypotheses.

    The defaults compute in the dtype in which the model was loaded, on any device. Transcription,
    evaluation and the command line all take them. No option but `precision`, `max_symbols`,
    `search` and `prompt` changes what is recognised, except by rounding.

    Args:
        precision: Dtype of the weights and of the products. "as_loaded" keeps the model's dtype and
            torch's settings, "autocast" casts float32 weights to bfloat16 in the encoder only,
            "int8" computes the linear layers of a FastConformer in int8 on a CPU, all else in
            bfloat16 where it has that, else in float32.
        encoder: Run the model as it is, or through asrkit.models.optimize, which on CUDA replays
            the encoder as a CUDA graph of each shape. "auto" is "optimized" on a CPU, and "eager"
            on CUDA or with precision "autocast".
        encoder_graphs: Replay the encoder as a CUDA graph, captured once for each shape.
        strategy: Of decoding: "fastest" for the kind of model, "batched" with all utterances in
            step frame by frame, "one_by_one" utterance by utterance, or a transducer's loop by
            name.
        graphs: Run the transducer's decoding loop as a CUDA graph of some steps, or of all.
        max_symbols: Most labels on one frame, for a transducer; None: what the checkpoint says, or
            10.
        search: Beam search; None: greedy decoding.
        prompt: What an encoder-decoder model is asked for; None: its defaults.
    """

    precision: Literal[
        "as_loaded", "float32", "tf32", "autocast", "bfloat16", "float16", "int8"
    ] = "as_loaded"
    encoder: Literal["auto", "eager", "optimized"] = "auto"
    encoder_graphs: Literal["off", "per_shape"] = "off"
    strategy: Literal[
        "fastest", "batched", "one_by_one", "frame_looping", "label_looping", "windowed_looping"
    ] = "fastest"
    graphs: Literal["auto", "off", "step", "full"] = "auto"
    max_symbols: int | None = None
    search: BeamOptions | None = None
    prompt: PromptOptions | None = None

    def __post_init__(self) -> None:
        from asrkit.shapes import expect, whole

        for name, annotation in get_type_hints(type(self)).items():
            if name not in ("max_symbols", "search", "prompt"):
                known, value = get_args(annotation), getattr(self, name)
                expect(value in known, name, "one of " + ", ".join(map(repr, known)), repr(value))
        most = self.max_symbols
        expect(most is None or whole(most, 1), "max_symbols", "at least 1, or None", repr(most))
        beam = self.search
        is_search = beam is None or isinstance(beam, BeamOptions)
        expect(is_search, "search", "BeamOptions or None", repr(beam))
        asked = self.prompt
        is_prompt = asked is None or isinstance(asked, PromptOptions)
        expect(is_prompt, "prompt", "PromptOptions or None", repr(asked))
        greedy_only = self.strategy != "fastest" or self.graphs in CAPTURED
        expect(
            beam is None or not greedy_only,
            "search",
            "None with a strategy or graphs of greedy decoding",
            "a beam",
        )
        expect(
            self.graphs not in CAPTURED or self.strategy in GRAPH_STRATEGIES,
            "graphs",
            f"'auto' or 'off' with strategy={self.strategy!r}",
            repr(self.graphs),
            "Only windowed_looping runs as a graph.",
        )
