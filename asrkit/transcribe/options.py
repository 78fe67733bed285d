"""Every option of the recogniser and of `asrkit transcribe`: defined, described and checked here.

`asrkit.cli.command` makes the command's options of these fields. Importing this file needs no
torch, so the command line can show these texts at once.
"""

import re
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal

from asrkit.shapes import MAX_COUNT, expect, expect_types, whole
from asrkit.tasks import Task
from asrkit.transcribe.formats import FORMATS, TIMED

MOST_READERS = 256  # threads
LM_WEIGHT = 0.3  # of an n-gram model in a beam's scores
CTC_WEIGHT = 0.3  # share of an encoder-decoder model's CTC head in a beam's scores


def described(default: Any, text: str, **cli: Any) -> Any:
    """A dataclass field that `text` describes, as `--help` shows it.

    Args:
        default: Of the field; `dataclasses.MISSING`: it has to be given.
        text: What it means.
        **cli: What does not follow from its name, type and default: `flag`, "" for an argument
            without one; `group`, the heading of this option and those after it; the default that is
            `shown`; and what else `argparse.ArgumentParser.add_argument` takes.
    """
    return field(default=default, metadata={"help": text, **cli})


def expect_all(options: object, **rules: tuple[object, str]) -> None:
    """Check rules for the fields of a dataclass; ValueError names the first that fails.

    Args:
        options: The dataclass.
        **rules: For each field whether it is as expected, and what is expected.
    """
    for name, (fits, wanted) in rules.items():
        expect(bool(fits), name, wanted, repr(getattr(options, name)))


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """What `asrkit transcribe` reads and writes.

    Args:
        files: Sound files, folders and "-", standard input; with --shards manifests and containers.
        channel: The channel to read, from 0; None: the mean of all.
        strict: Whether a recording that breaks off has no transcript.
        format: One of `asrkit.transcribe.formats.FORMATS`; None for the usual one.
        out: Folder of the transcripts; None: standard output.
    """

    files: list[Path] = described(
        MISSING,
        "sound files and videos of any sample rate, folders, searched to any depth, or - for "
        "standard input",
        flag="",
        group="what to transcribe, and where to",
    )
    channel: int | None = described(
        None,
        "read this channel, from 0 (default: the mean of all; where channels cancel each other, "
        "the loudest one, and a line says so)",
        metavar="N",
    )
    strict: bool = described(
        False,
        "write nothing of a recording that breaks off (default: what comes before the break, with "
        "--out as NAME.txt.partial)",
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
        "with --out: transcribe in shards, a file of results each, with a line a recording; FILES "
        "may also be manifests (.jsonl, .json: NeMo's or lhotse's cuts) and .tar with audio. The "
        "same command goes on where a killed one stopped",
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
        "its machines have to see files and model under the same paths. Has to be installed: "
        "pip install 'ray[data]'",
    )
    address: str | None = described(
        None,
        "of the Ray cluster (default: RAY_ADDRESS, else that of this machine); local starts one "
        "here, for a try",
        metavar="HOST:PORT",
    )
    actors: int | None = described(
        None,
        "processes of the Ray cluster that transcribe, each with --threads CPUs (1 where it is not "
        "given) and, with --device cuda, a GPU (default: as many as there is room for)",
        metavar="N",
    )

    def numbers(self) -> tuple[int, int]:
        """(K, N) of the part; (0, 1), all shards, where none is named."""
        found = re.fullmatch("([0-9]+)/([0-9]+)", self.part or "0/1")
        number, parts = map(int, found.groups()) if found else (0, 0)
        expect(number < parts, "part", "K/N with K from 0 to N - 1, such as 0/8", self.part)
        return number, parts


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of a command, and the processors it runs on."""

    model: Path | None = described(
        None,
        "training folder, .safetensors, .nemo, .pt of Jasper, or folder of Hugging Face or "
        "faster-whisper (default: the published weights of Whisper tiny.en, where they are not "
        "installed the demo of notebook 00; stderr says which)",
        metavar="PATH",
        group="model and device",
    )
    engine: Literal["torch", "onnxruntime", "openvino"] = described(
        "torch",
        "what computes the encoder, on a CPU; onnxruntime and openvino run a --model that asrkit "
        "export wrote, and have to be installed: pip install onnxruntime or openvino; decoding "
        "stays the same",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = described(
        "auto",
        "precision of the model; features stay float32; auto: bfloat16 on a CPU with AMX or "
        "avx512_bf16 and on a GPU that has it, else and with another --engine float32, and in a "
        "folder --out that was begun the one of its transcripts; int8, on a CPU: the "
        "linear layers of a FastConformer, with VNNI or AMX, or the output layer of a Whisper, all "
        "else in bfloat16 where it has that",
    )
    context: tuple[int, int] | None = described(
        None,
        "FastConformer: limit attention to so many encoder frames to the left and right",
        metavar=("LEFT", "RIGHT"),
    )
    device: str = described("cpu", "where to compute: cpu, cuda or cuda:N")
    threads: int | None = described(
        None, "CPU threads (default: as many as torch takes)", metavar="N"
    )
    workers: str | None = described(
        None,
        "transcribe in N processes that have one model in memory, each on its own cores; auto: one "
        "a core, as far as memory goes (default: in this process alone)",
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How recordings are cut into windows and batched. Times are in seconds."""

    batch_s: float | None = described(
        None,
        "most audio in one batch, padding included (default: 120; for a Whisper up to 6 windows, "
        "as many as 600 MB hold the keys and values of)",
        flag="--batch-seconds",
        metavar="SECONDS",
        group="windows and batches",
    )
    window_s: float = described(
        30.0,
        "cut longer recordings into windows of this length; for a Whisper at pauses, where it can",
        flag="--window",
        metavar="SECONDS",
    )
    overlap_s: float = described(
        4.0,
        "audio that a window shares with the next one; a Whisper's share none",
        flag="--overlap",
        metavar="SECONDS",
    )
    previous_text: bool = described(
        False,
        "Whisper: show each window of a recording the text before it; windows are then decoded one "
        "by one",
    )
    timestamps: bool = described(
        False,
        f"json: add words with times and confidences (always in {', '.join(TIMED)}); "
        "an RNN-T's labels have no length, so its words end where their last label starts; those "
        "of an encoder-decoder model without a CTC head are rough",
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
        "beam search that keeps so many hypotheses (default: greedy decoding, and 8 with any other "
        "option of a beam)",
        metavar="K",
        shown=None,
        group="beam search",
    )
    lm: Path | None = described(
        None, "n-gram model in ARPA format, plain or gzipped, for the beam", metavar="FILE"
    )
    lm_units: Literal["words", "tokens"] = described(
        "words",
        "what the n-gram model is over: words, scored where they end, or the model's tokens "
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
        "with what an average word costs",
        metavar="NATS",
    )
    top_tokens: int | None = described(
        None,
        "CTC: only so many of the likeliest labels of a frame begin new hypotheses (default: all)",
        metavar="N",
    )
    ctc_weight: float = described(
        CTC_WEIGHT,
        "encoder-decoder models with a CTC head: its share in the scores, 0 to 1, where 0 decodes "
        "by attention alone",
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
    """What an encoder-decoder model is asked for, as far as its prompt has a place for it.

    Without any of them it is asked for what its checkpoint has as defaults: mostly to transcribe
    English with punctuation. A multilingual Whisper finds the language itself.
    """

    language: str | None = described(
        None,
        "code of the spoken language, such as de (default: a multilingual Whisper finds that of "
        "each recording; of others the checkpoint's, mostly en)",
        metavar="CODE",
        group="encoder-decoder models (others refuse these)",
    )
    target_language: str | None = described(
        None,
        "code of the language to write; another one than --language translates (default: the "
        "spoken one, and en with --task translate)",
        metavar="CODE",
    )
    task: Task | None = described(
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
            "int8" computes the linear layers of a FastConformer, or the output layer of a Whisper,
            in int8 on a CPU, all else in bfloat16 where it has that, else in float32.
        encoder: Run the model as it is, or through asrkit.models.optimize, which on CUDA replays
            the encoder as a CUDA graph of each shape. "auto" is "optimized" on a CPU, and "eager"
            on CUDA or with precision "autocast".
        strategy: Of decoding: "fastest" for the kind of model, "batched" with all utterances in
            step frame by frame, "one_by_one" utterance by utterance, or a transducer's loop by
            name.
        graphs: Run the transducer's decoding loop as a CUDA graph of some steps, or of all; for
            "fastest" and "windowed_looping" on CUDA.
        max_symbols: Most labels on one frame, for a transducer; None: what the checkpoint says, or
            10.
        search: Beam search; None: greedy decoding, by `strategy`.
        prompt: What an encoder-decoder model is asked for; None: its defaults.
    """

    precision: Literal[
        "as_loaded", "float32", "tf32", "autocast", "bfloat16", "float16", "int8"
    ] = "as_loaded"
    encoder: Literal["auto", "eager", "optimized"] = "auto"
    strategy: Literal[
        "fastest", "batched", "one_by_one", "frame_looping", "label_looping", "windowed_looping"
    ] = "fastest"
    graphs: Literal["auto", "off", "step", "full"] = "auto"
    max_symbols: int | None = None
    search: BeamOptions | None = None
    prompt: PromptOptions | None = None

    def __post_init__(self) -> None:
        expect_types(self)
        most, packed = self.max_symbols, self.encoder != "eager"
        expect_all(
            self,
            max_symbols=(most is None or whole(most, 1), "at least 1, or None"),
            encoder=(packed or self.precision != "int8", "'auto' or 'optimized' with int8"),
        )
