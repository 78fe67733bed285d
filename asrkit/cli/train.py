"""`asrkit train`."""

import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, ProgressOptions, finish, print_text, text_stream
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.shapes import count, expect
from asrkit.training.options import TrainOptions
from asrkit.transcribe.options import described

# Sizes that train on a CPU. The published sizes are in asrkit.models.presets.
CONFORMER_LAYERS = 2  # published: 17 to 42
CONFORMER_SUBSAMPLING = 4  # with the published 8, CTC has fewer frames than there are characters
LSTM_WIDTH = 256  # published: 1024, in mlperf_rnnt
DECODER_WIDTH = 128  # published: 1024, in canary_1b
HEAD_OF_OPTION = {  # options that apply to one kind of model
    "durations": "transducer",
    "joint": "transducer",
    "smoothing": "attention",
}


@dataclass(frozen=True, kw_only=True)
class CommandOptions(ProgressOptions):
    """The options of the command."""

    manifest: list[str] = described(
        ("spoken_commands",),
        "one or more, which are mixed: spoken_commands (synthetic, built in), lhotse cuts, a "
        "folder of lhotse's recordings and supervisions, or JSON lines with audio and text",
        group="speech",
    )
    hold_out: str | None = described(
        None,
        "test on this speaker's utterances, and train on those of all others",
        metavar="SPEAKER",
    )
    kinds: list[Literal["digits", "commands", "sentences"]] | None = described(
        None, "only these kinds of spoken_commands (default: all)"
    )
    encoder: Literal["conv", "fastconformer", "lstm", "jasper"] = described(
        "conv",
        f"type of encoder; fastconformer: {CONFORMER_LAYERS} blocks, one encoder frame for "
        f"{CONFORMER_SUBSAMPLING} feature frames; lstm: MLPerf's, with {LSTM_WIDTH} instead of "
        "1024 cells a layer; jasper: three blocks of two convolutions, 1.66 million weights",
        group="model",
    )
    head: Literal["transducer", "ctc", "attention"] = described(
        "transducer",
        "what follows the encoder; ctc: a linear layer, trained by the CTC loss alone; "
        f"attention: a Transformer decoder with one layer of width {DECODER_WIDTH}, and an "
        "auxiliary CTC head",
    )
    durations: list[int] = described(
        (),
        "train a token-and-duration transducer (TDT) with these durations, such as 0 1 2 3 4 "
        "(default: train an RNN-T)",
        metavar="FRAMES",
    )
    tokenizer: str = described("char", "char, or a SentencePiece .model file", metavar="NAME")
    settings: TrainOptions
    device: str = described(
        "cpu", "device that computes: cpu, cuda or cuda:N", group="device and output"
    )
    out: Path = described(
        MISSING,
        "folder for the log, the state to resume from, model.safetensors with the averaged weights "
        "at the end, best.safetensors with those of the lowest word error rate on the dev set, if "
        "any, and buckets.json if --memory or --bucket-sizes is given",
        metavar="DIR",
    )
    fresh: bool = described(False, "start again instead of resuming from the folder")


def _train(options: CommandOptions) -> int:
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun started this process
    if options.device == "cuda" and is_distributed and "LOCAL_RANK" in os.environ:
        options = replace(options, device=f"cuda:{os.environ['LOCAL_RANK']}")
    prepare_torch(options.device)
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, train

    on_gpu = options.device.startswith("cuda")
    remedy = "Omit --graphs on a CPU."
    expect(on_gpu or not options.settings.graphs, "graphs", "--device cuda", options.device, remedy)
    config = TrainConfig(**vars(options.settings))
    tokenizer = load_tokenizer(options.tokenizer)
    check_writable(options.out)
    model_config = _model_config(options, tokenizer.vocab_size)
    speech = _load_speech(options)
    for text in speech["test"].texts if "test" in speech else ():
        tokenizer.encode(text)  # refuses a text without tokens before training, not after it
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with text_stream(options):
        result = train(
            model_config,
            tokenizer,
            speech["train"],
            speech.get("dev"),
            out=options.out,
            device=options.device,
            resume=restarted or not options.fresh,
            progress=not options.no_progress,
            config=config,
        )
    if is_distributed and int(os.environ["RANK"]) > 0:  # the first process reports the result
        return 0
    steps = len(result.history)
    summary = {"model": str(result.path), "steps": steps, "joint": result.joint}
    text = f"trained for {count(steps, 'step')}"
    padding = ""
    if result.history:  # empty if a finished run has lost its log
        if overflows := result.history[-1].get("overflows"):
            summary["overflows"] = overflows
            text += f", {overflows} skipped since float16 overflowed"
        summary["padding"] = round(result.padding, 4)
        padding = f"; {100 * result.padding:.1f} % of the computed frames were padding"
    summary |= _score(options, result.path, speech)
    finish(options, summary, f"{text}: {result.path}{padding}")
    return 0


def _score(options: CommandOptions, model: Path, speech: dict[str, Any]) -> dict[str, float]:
    """Word error rates and RTFx on the dev and test sets, by name."""
    from asrkit.models import load_checkpoint
    from asrkit.training import evaluate

    scores = dict[str, float]()
    for name in ("dev", "test"):
        if name in speech:
            checkpoint = load_checkpoint(model, device=options.device)
            errors, _, rtfx = evaluate(checkpoint, speech[name])
            print_text(options, f"{name} WER {errors} at RTFx {rtfx:.0f}")
            scores |= {f"{name}_wer": errors.rate, f"{name}_rtfx": round(rtfx)}
    return scores


def _model_config(options: CommandOptions, vocab_size: int) -> Any:
    from asrkit import models
    from asrkit.models import presets

    values = vars(options) | vars(options.settings)
    all_fields = (*fields(options), *fields(options.settings))
    defaults = {field.name: field.default for field in all_fields}
    for name, head in HEAD_OF_OPTION.items():
        fits = head == options.head or values[name] == defaults[name]
        expect(fits, name, f"none with --head {options.head}", values[name])
    encoders: dict[str, Any] = {
        "conv": models.ConvConfig(),
        "fastconformer": models.FastConformerConfig(
            layers=CONFORMER_LAYERS, subsampling=CONFORMER_SUBSAMPLING
        ),
        "lstm": models.LSTMEncoderConfig(width=LSTM_WIDTH),
        "jasper": presets.mini_jasper().encoder,
    }
    encoder = encoders[options.encoder]
    if options.head == "ctc":
        return models.CTCConfig(vocab_size=vocab_size, encoder=encoder)
    if options.head == "attention":
        return models.AEDConfig(
            vocab_size=vocab_size + 3,  # the special tokens follow those of the text
            pad=vocab_size,
            bos=vocab_size + 1,
            eos=vocab_size + 2,
            encoder=encoder,
            width=DECODER_WIDTH,
            layers=1,
            ctc=True,
        )
    return models.TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        durations=tuple(options.durations),
    )


def _load_speech(options: CommandOptions) -> dict[str, Any]:
    """Utterances of each split (train, dev, test) that has any; train must have some."""
    from asrkit.data import Utterances, corpora

    progress = not options.no_progress
    splits = corpora.load(
        options.manifest, hold_out=options.hold_out, kinds=options.kinds, progress=progress
    )
    counts = {name: len(cuts) for name, cuts in splits.items()}
    remedy = "Choose other splits, or drop --hold-out."
    expect(counts["train"] > 0, "manifest", "utterances to train on", counts, remedy)
    return {
        name: Utterances.load(cuts, progress=progress) for name, cuts in splits.items() if len(cuts)
    }


COMMAND = Command(
    name="train",
    summary="Train a transducer, an encoder-decoder or a CTC model; run it again to resume.",
    details="Word error rates on the dev and test sets, if there are any, are computed at the end, "
    "by the checkpoint with the lowest one on the dev set. "
    "To train on several GPUs, use torchrun: torchrun --nproc-per-node 8 -m asrkit train --device "
    "cuda.",
    resume="Run the same command, without --fresh, to resume from the last checkpoint.",
    options=CommandOptions,
    run=_train,
    examples=[
        "asrkit train --out models/mine",
        "asrkit train --out models/real --manifest cuts.jsonl --hold-out SPEAKER",
        "asrkit train --out models/tdt --durations 0 1 2 3 4",
        "asrkit train --out models/fastconformer --encoder fastconformer --kinds digits",
        "asrkit train --out models/jasper --head ctc --encoder jasper --optimizer novograd "
        "--kinds digits --steps 900 --seconds inf",
        "asrkit train --out models/aed --head attention --smoothing 0.1 --peak-lr 0.003 "
        "--kinds digits --steps 3000 --seconds inf",
    ],
)
