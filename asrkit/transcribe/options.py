"""Every option of the recogniser and of `asrkit transcribe`: defined, described and checked here.

`asrkit.cli.command` turns these fields into the options of the command. Importing this file needs
no torch, so that `--help` is immediate.
"""

import re
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from asrkit.shapes import MAX_COUNT, expect, expect_types, whole
from asrkit.tasks import Task
from asrkit.transcribe.formats import FORMATS, TIMED

MOST_READERS = 256  # threads
LM_WEIGHT = 0.3  # weight of an n-gram model in the scores of a beam
CTC_WEIGHT = 0.3  # share of an encoder-decoder model's CTC head in the scores of a beam


def described(default: Any, text: str, **cli: Any) -> Any:
    """A dataclass field with the description that `--help` shows.

    Args:
        default: Default of the field; `dataclasses.MISSING`: the option is required.
        text: Description of the option.
        **cli: Whatever does not follow from the field's name, type and default: `flag`, "" for a
            positional argument; `group`, the heading of this option and those after it; `shown`,
            the default to show; and other arguments of `argparse.ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"help": text, **cli})


def expect_all(options: object, **rules: tuple[object, str]) -> None:
    """Check the fields of a dataclass; ValueError names the first one that fails.

    Args:
        options: The dataclass.
        **rules: For each field, whether its value is allowed, and what is expected.
    """
    for name, (fits, wanted) in rules.items():
        expect(bool(fits), name, wanted, repr(getattr(options, name)))


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What `asrkit transcribe` reads and writes.

    Args:
        files: Sound files, folders and "-" for standard input; with --shards also manifests and
            containers.
        channel: The channel to read, from 0; None: the mean of all.
        strict: Whether a recording that breaks off gets no transcript.
        format: One of `asrkit.transcribe.formats.FORMATS`; None: the default.
        out: Folder of the transcripts; None: standard output.
    """

    files: list[Path] = described(
        MISSING,
        "sound files and videos of any sample rate, folders, searched to any depth, or - for "
        "standard input",
        flag="",
        group="what to transcribe, and where to write it",
    )
    channel: int | None = described(
        None,
        "read this channel, from 0 (default: the mean of all; where channels cancel each other, "
        "a loud one, which a line reports)",
        metavar="N",
    )
    strict: bool = described(
        False,
        "write no transcript of a recording that breaks off (default: the text before the break, "
        "with --out as NAME.txt.partial)",
    )
    format: str | None = described(
        None,
        "with --out: text, JSON, subtitles or CTM (default: txt; with --shards always JSON)",
        choices=[*FORMATS],
    )
    out: Path | None = described(
        None,
        "write one transcript a file into this folder, and skip those already done",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        expect_types(self)
        expect_all(self, channel=(self.channel is None or self.channel >= 0, "0 or more"))


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Bulk transcription, on one machine or on many."""

    shards: bool = described(
        False,
        "with --out: transcribe in shards, each with one file of results, one line a recording; "
        "FILES may also be manifests (.jsonl, .json: NeMo's or lhotse's cuts) and .tar with audio. "
        "After a kill, the same command resumes",
        group="bulk transcription",
    )
    part: str | None = described(
        None,
        "transcribe every N-th shard from the K-th on, K from 0: for N processes, a GPU each, or "
        "an array of jobs (default: 0/1, all)",
        metavar="K/N",
    )
    shard_h: float | None = described(
        None,
        "audio in a shard (default: 0.5 on a CPU, 10 on a GPU, less for less than 20 shards)",
        flag="--shard-hours",
        metavar="HOURS",
    )
    on: Literal["ray"] | None = described(
        None,
        "with --shards, in place of --part: actors of a Ray cluster transcribe the shards; all "
        "its machines need files and model under the same paths. Ray has to be installed: "
        "pip install 'ray[data]'",
    )
    address: str | None = described(
        None,
        "address of the Ray cluster (default: RAY_ADDRESS, else the cluster of this machine); "
        "local starts one here, for a try",
        metavar="HOST:PORT",
    )
    actors: int | None = described(
        None,
        "processes of the Ray cluster that transcribe, each with --threads CPUs (default: 1) and, "
        "with --device cuda, a GPU (default: as many as there is room for)",
        metavar="N",
    )

    def numbers(self) -> tuple[int, int]:
        """(K, N) of the part; by default (0, 1), all shards."""
        match = re.fullmatch("([0-9]+)/([0-9]+)", self.part or "0/1")
        number, parts = map(int, match.groups()) if match else (0, 0)
        expect(number < parts, "part", "K/N with K from 0 to N - 1, such as 0/8", self.part)
        return number, parts


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a command, and the processors it runs on."""

    model: Path | None = described(
        None,
        "training folder, .safetensors, .nemo, .pt of Jasper, or folder of Hugging Face or "
        "faster-whisper (default: the published weights of Whisper tiny.en, or, if they are not "
        "installed, the demo of notebook 00; stderr names it)",
        metavar="PATH",
        group="model and device",
    )
    engine: Literal["torch", "onnxruntime", "openvino"] = described(
        "torch",
        "what computes the encoder, on a CPU; onnxruntime and openvino run a --model that asrkit "
        "export wrote, and have to be installed: pip install onnxruntime or openvino; decoding "
        "is the same",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = described(
        "auto",
        "precision of the model; features stay float32; auto: that of the transcripts in --out, if "
        "there are any; else bfloat16 on a CPU with AMX or avx512_bf16 and on a GPU that supports "
        "it, int8 for a folder of a Whisper on another CPU with AVX2, and float32 otherwise or "
        "with another --engine; int8, on an x86 CPU with AVX2: the linear layers of a "
        "FastConformer, or the output layer of a Whisper, and the rest in bfloat16 if the CPU "
        "supports it",
    )
    context: tuple[int, int] | None = described(
        None,
        "FastConformer: limit attention to this many encoder frames to the left and right",
        metavar=("LEFT", "RIGHT"),
    )
    device: str = described("cpu", "where to compute: cpu, cuda or cuda:N")
    threads: int | None = described(None, "CPU threads (default: torch's default)", metavar="N")
    workers: str | None = described(
        None,
        "transcribe in N processes that share one model in memory, each on its own cores; auto: "
        "one for each core, as far as memory allows (default: in this process alone)",
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How recordings are cut into windows and batched; times are in seconds."""

    batch_s: float | None = described(
        None,
        "most audio in one batch, padding included (default: 120; for a Whisper up to 8 windows, "
        "as many as have keys and values in 600 MB)",
        flag="--batch-seconds",
        metavar="SECONDS",
        group="windows and batches",
    )
    window_s: float = described(
        30.0,
        "cut longer recordings into windows of this length; for a Whisper at pauses if possible",
        flag="--window",
        metavar="SECONDS",
    )
    overlap_s: float = described(
        4.0,
        "audio that a window shares with the next one; windows of a Whisper share none",
        flag="--overlap",
        metavar="SECONDS",
    )
    previous_text: bool = described(
        False,
        "Whisper: decode each window of a recording with the text before it as a prompt; windows "
        "are then decoded one by one",
    )
    timestamps: bool = described(
        False,
        f"json: add words with times and confidences (always in {', '.join(TIMED)}); "
        "labels of an RNN-T have no length, so its words end where their last label starts; "
        "times of an encoder-decoder model without a CTC head are rough",
    )
    readers: int = described(4, "threads that read and decode recordings", metavar="N")

    def __post_init__(self) -> None:
        expect_types(self)
        expect_all(
            self,
            batch_s=(self.batch_s is None or self.batch_s > 0, "more than 0 seconds"),
            window_s=(1 <= self.window_s <= 86_400, "1 to 86,400 seconds"),
            overlap_s=(0 <= 2 * self.overlap_s <= self.window_s, "0 to half a window"),
            readers=(1 <= self.readers <= MOST_READERS, f"1 to {MOST_READERS} threads"),
        )


@dataclass(frozen=True, kw_only=True)
class BeamOptions:
    """Beam search instead of greedy decoding: its width, and what an n-gram or CTC adds to it.

    The decoders are `asrkit.decoders.ctc_beam` and `aed_beam`, which takes only the width and
    `ctc_weight`. Transducers are decoded greedily.
    """

    beam: int = described(
        8,
        "beam search that keeps this many hypotheses (default: greedy decoding, and 8 with any "
        "other option of a beam)",
        metavar="K",
        shown=None,
        group="beam search",
    )
    lm: Path | None = described(
        None, "n-gram model in ARPA format, plain or gzipped, for the beam", metavar="FILE"
    )
    lm_units: Literal["words", "tokens"] = described(
        "words",
        "units of the n-gram model: words, scored where they end, or the model's tokens "
        "(characters with <space> for the space, SentencePiece's pieces)",
    )
    lm_weight: float = described(
        LM_WEIGHT, "weight of the n-gram model's log-probability", metavar="WEIGHT"
    )
    label_bonus: float = described(
        0.0, "nats added for each label, against short texts", metavar="NATS"
    )
    word_bonus: float = described(
        0.0,
        "nats added to each word's log-probability before its weight, against short texts: begin "
        "with the cost of an average word",
        metavar="NATS",
    )
    top_tokens: int | None = described(
        None,
        "CTC: only this many of a frame's likeliest labels begin new hypotheses (default: all)",
        metavar="N",
    )
    ctc_weight: float = described(
        CTC_WEIGHT,
        "encoder-decoder models with a CTC head: its share in the scores, 0 to 1; 0 decodes by "
        "attention alone",
        metavar="WEIGHT",
    )

    def __post_init__(self) -> None:
        expect_types(self)
        most = self.top_tokens
        expect_all(
            self,
            beam=(1 <= self.beam <= MAX_COUNT, f"1 to {MAX_COUNT} hypotheses"),
            top_tokens=(most is None or whole(most, 1), "at least 1, or None"),
            ctc_weight=(0 <= self.ctc_weight <= 1, "a share from 0 to 1"),
        )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompt of an encoder-decoder model, as far as it has places for these options.

    By default it has the values in the checkpoint: usually to transcribe English with punctuation.
    A multilingual Whisper detects the language itself.
    """

    language: str | None = described(
        None,
        "code of the spoken language, such as de (default: a multilingual Whisper detects that of "
        "each recording; other models use the checkpoint's, usually en)",
        metavar="CODE",
        group="encoder-decoder models (others refuse these)",
    )
    target_language: str | None = described(
        None,
        "code of the language to write; if it is not --language, the text is translated (default: "
        "the spoken language, and en with --task translate)",
        metavar="CODE",
    )
    task: Task | None = described(
        None, "transcribe or translate the speech (default: translate if the languages differ)"
    )
    punctuation: bool | None = described(
        None,
        "Canary: write punctuation and capitals, or neither (default: the checkpoint's, usually "
        "to write them)",
    )
    fallback: bool | None = described(
        None,
        "Whisper: decode windows with unlikely or repetitive texts again, by sampling at rising "
        "temperatures, and drop the text of windows without speech (default: yes)",
    )

    def given(self) -> dict[str, Any]:
        """The options that are set, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How the recogniser computes, from waveforms to hypotheses.

    The defaults compute in the dtype in which the model was loaded, on any device. Transcription,
    evaluation and the command line all take them. Only `precision`, `search` and `prompt` change
    what is recognised, rounding aside.

    Args:
        precision: Dtype of the weights and of the products. "as_loaded" keeps the model's dtype and
            torch's settings. "autocast" casts float32 weights to bfloat16 in the encoder only.
            "int8" computes the linear layers of a FastConformer, or the output layer of a Whisper,
            in int8 on an x86 CPU with AVX2, and everything else in bfloat16 or, without its
            instructions, float32.
        encoder: "eager" runs the model as it is. "optimized" runs it through
            asrkit.models.optimize, and on CUDA replays a CUDA graph for each shape. "auto" is
            "optimized" on a CPU, and "eager" on CUDA or with precision "autocast".
        strategy: Strategy of decoding: "fastest" for the kind of model, "batched" with one frame of
            all utterances at a time, "one_by_one" one utterance at a time, or the name of a
            transducer's loop.
        graphs: Whether the transducer's decoding loop is a CUDA graph of a few steps or of all
            steps; for all its loops on CUDA.
        search: Beam search; None: greedy decoding, by `strategy`.
        prompt: Prompt of an encoder-decoder model; None: its defaults.
    """

    precision: Literal[
        "as_loaded", "float32", "tf32", "autocast", "bfloat16", "float16", "int8"
    ] = "as_loaded"
    encoder: Literal["auto", "eager", "optimized"] = "auto"
    strategy: Literal[
        "fastest", "batched", "one_by_one", "frame_looping", "label_looping", "windowed_looping"
    ] = "fastest"
    graphs: Literal["auto", "off", "step", "full"] = "auto"
    search: BeamOptions | None = None
    prompt: PromptOptions | None = None

    def __post_init__(self) -> None:
        expect_types(self)
        fits = self.encoder != "eager" or self.precision != "int8"
        expect_all(self, encoder=(fits, "'auto' or 'optimized' with int8"))
