"""`asrkit train`."""

import argparse
import os
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, finish, say, text_stream
from asrkit.cli.options import (
    add_device,
    add_no_progress,
    apply_runtime_options,
    check_writable,
)

CONFORMER_LAYERS = 2  # trains on a CPU; the published 17 to 42 are in asrkit.models.presets
CONFORMER_SUBSAMPLING = 4  # the published 8 leaves CTC fewer frames than there are characters
LSTM_WIDTH = 256  # trains on a CPU; the published 1024 are asrkit.models.presets.mlperf_rnnt
DECODER_WIDTH = 128  # likewise; Canary's 1024 are asrkit.models.presets.canary_1b
DECODER_LAYERS = 1
MOST_DECODER_LAYERS = 100  # four times those of Canary-1B
# options about the parts of one kind of model: --head of that kind, and the default
PARTS: dict[str, tuple[str, Any]] = {
    "predictor": ("transducer", "stateless"),
    "durations": ("transducer", []),
    "joint": ("transducer", "auto"),
    "decoder_layers": ("attention", DECODER_LAYERS),
    "smoothing": ("attention", 0.0),
}


def _train(args: argparse.Namespace) -> int:
    if args.device == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun started this process
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    apply_runtime_options(args)
    from asrkit.shapes import expect
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, train

    config = TrainConfig(
        seconds=args.seconds,
        steps=args.steps,
        seed=args.seed,
        optimizer=args.optimizer,
        peak_lr=args.peak_lr,
        ema=args.ema,
        joint=args.joint,
        evaluate=args.evaluate,
        checkpoint_s=args.checkpoint_seconds,
        accumulate=args.accumulate,
        smoothing=args.smoothing,
    )
    tokenizer = load_tokenizer(args.tokenizer)
    expect(not args.out.exists() or args.out.is_dir(), "out", "a folder", repr(str(args.out)))
    check_writable(args.out, folder=True)
    model_config = _model_config(args, tokenizer.vocab_size)
    speech = _load_speech(args)
    if "test" in speech:
        for text in speech["test"].texts:
            tokenizer.encode(text)  # a text that has no tokens is refused now, not after training
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with text_stream(args):
        result = train(
            model_config,
            tokenizer,
            speech["train"],
            speech.get("dev"),
            out=args.out,
            device=args.device,
            resume=restarted or not args.fresh,
            progress=not args.no_progress,
            config=config,
        )
    if int(os.environ.get("RANK", "0")) > 0:  # the first process says what became of it
        return 0
    summary: dict[str, Any] = {"model": str(result.path), "steps": len(result.history)}
    if result.joint is not None:
        summary["joint"] = result.joint
    summary |= _score(args, result.path, speech)
    finish(args, summary, f"trained for {len(result.history):,} steps: {result.path}")
    return 0


def _score(args: argparse.Namespace, model: Path, speech: dict[str, Any]) -> dict[str, float]:
    """Word error rates and RTFx on dev and test speech, by name."""
    from asrkit.models import load_checkpoint
    from asrkit.training import evaluate

    scores = dict[str, float]()
    for name in ("dev", "test"):
        if name in speech:
            checkpoint = load_checkpoint(model, device=args.device)
            rate, _, rtfx = evaluate(checkpoint, speech[name])
            say(args, f"{name} WER {rate} at RTFx {rtfx:.0f}")
            scores |= {f"{name}_wer": rate.rate, f"{name}_rtfx": round(rtfx)}
    return scores


def _model_config(args: argparse.Namespace, vocab_size: int) -> Any:
    from asrkit.models import (
        AEDConfig,
        ConvConfig,
        CTCConfig,
        FastConformerConfig,
        LSTMConfig,
        LSTMEncoderConfig,
        StatelessConfig,
        TransducerConfig,
        presets,
    )
    from asrkit.models.transducer import EncoderConfig
    from asrkit.shapes import expect

    encoders: dict[str, EncoderConfig] = {
        "conv": ConvConfig(),
        "fastconformer": FastConformerConfig(
            layers=CONFORMER_LAYERS, subsampling=CONFORMER_SUBSAMPLING
        ),
        "lstm": LSTMEncoderConfig(width=LSTM_WIDTH),
        "jasper": presets.mini_jasper().encoder,
    }
    _expect_parts_of_its_own(args)
    layers = f"1 to {MOST_DECODER_LAYERS} layers"
    fits = 1 <= args.decoder_layers <= MOST_DECODER_LAYERS
    expect(fits, "decoder_layers", layers, args.decoder_layers)
    if args.head == "ctc":
        return CTCConfig(vocab_size=vocab_size, encoder=encoders[args.encoder])
    if args.head == "attention":
        return AEDConfig(
            vocab_size=vocab_size + 3,  # the special tokens come behind those of the text
            pad=vocab_size,
            bos=vocab_size + 1,
            eos=vocab_size + 2,
            encoder=encoders[args.encoder],
            width=DECODER_WIDTH,
            layers=args.decoder_layers,
            ctc=True,
        )
    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoders[args.encoder],
        predictor=StatelessConfig() if args.predictor == "stateless" else LSTMConfig(),
        durations=tuple(args.durations),
    )


def _expect_parts_of_its_own(args: argparse.Namespace) -> None:
    """ValueError for a choice about parts that models of this --head have not."""
    from asrkit.shapes import expect

    for name, (head, default) in PARTS.items():
        value = getattr(args, name)
        fits = head == args.head or value == default
        remedy = f"Leave it out, or pass --head {head}."
        expect(fits, name, f"none with --head {args.head}", value, remedy)


def _load_speech(args: argparse.Namespace) -> dict[str, Any]:
    """Utterances by split (train, dev, test), those splits that have any; train has some."""
    from asrkit.data import Utterances, corpora
    from asrkit.shapes import expect

    progress = not args.no_progress
    splits = corpora.load(
        args.manifest, hold_out=args.hold_out, kinds=args.kinds, progress=progress
    )
    counts = {name: len(cuts) for name, cuts in splits.items()}
    remedy = "Set another split, or no --hold-out."
    expect(counts["train"] > 0, "manifest", "utterances to train on", counts, remedy)
    return {
        name: Utterances.load(cuts, progress=progress) for name, cuts in splits.items() if len(cuts)
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_speech_arguments(parser)
    _add_model_arguments(parser)
    _add_attention_arguments(parser)
    _add_schedule_arguments(parser)
    processes = parser.add_argument_group("several processes", "torchrun starts them.")
    processes.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="batches that each process, or the only one, takes in a step; the loss is the mean "
        "over the labels of all batches",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        required=True,
        help="folder for the log, the state to resume from, and model.safetensors",
    )
    output.add_argument(
        "--fresh",
        action="store_true",
        help="start again instead of resuming what the folder holds",
    )
    add_no_progress(parser)


def _add_speech_arguments(parser: argparse.ArgumentParser) -> None:
    speech = parser.add_argument_group("speech")
    speech.add_argument(
        "--manifest",
        nargs="+",
        default=["spoken_commands"],
        help="one or several, mixed: spoken_commands (synthetic, built in), lhotse cuts, or JSON "
        "lines with audio and text",
    )
    speech.add_argument(
        "--hold-out",
        metavar="SPEAKER",
        help="test on this speaker's utterances, train on those of the others",
    )
    speech.add_argument(
        "--kinds",
        nargs="+",
        choices=["digits", "commands", "sentences"],
        help="only these kinds of spoken_commands (default: all)",
    )


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--encoder",
        choices=["conv", "fastconformer", "lstm", "jasper"],
        default="conv",
        help=f"type of encoder; fastconformer: {CONFORMER_LAYERS} blocks, and a frame for every "
        f"{CONFORMER_SUBSAMPLING} of features; lstm: MLPerf's with {LSTM_WIDTH} in place of 1024 "
        "cells a layer; jasper: three blocks of two convolutions, 1.66 million weights",
    )
    model.add_argument(
        "--head",
        choices=["transducer", "ctc", "attention"],
        default="transducer",
        help="what follows the encoder; ctc: a linear layer, trained by the CTC loss alone; "
        f"attention: a Transformer decoder of width {DECODER_WIDTH} (an encoder-decoder model), "
        "with a CTC head beside it",
    )
    model.add_argument(
        "--predictor",
        choices=["stateless", "lstm"],
        default="stateless",
        help="type of prediction network of a transducer",
    )
    model.add_argument(
        "--durations",
        type=int,
        nargs="+",
        default=[],
        metavar="FRAMES",
        help="train a token-and-duration transducer (TDT) with these durations, such as 0 1 2 3 4 "
        "(default: an RNN-T)",
    )
    model.add_argument(
        "--tokenizer",
        default="char",
        metavar="NAME",
        help="char, or a SentencePiece .model file",
    )


def _add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    attention = parser.add_argument_group("attention decoder", "Only with --head attention.")
    attention.add_argument(
        "--decoder-layers",
        type=int,
        default=DECODER_LAYERS,
        metavar="N",
        help="layers of the decoder",
    )
    attention.add_argument(
        "--smoothing",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="label smoothing: the share of a target's probability that all other tokens get",
    )


def _add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    schedule = parser.add_argument_group("training")
    schedule.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="training time; an interrupted run can be resumed, a finished one cannot be extended",
    )
    schedule.add_argument(
        "--steps", type=int, default=100_000, metavar="N", help="optimizer steps at most"
    )
    schedule.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of weights, batches and augmentation"
    )
    schedule.add_argument(
        "--optimizer",
        choices=["adamw", "lamb", "novograd"],
        default="adamw",
        help="lamb: LAMB, for large batches; its steps are in proportion to each tensor's norm; "
        "novograd: NovoGrad, as for Jasper; its steps do not depend on the scale of the gradients",
    )
    schedule.add_argument(
        "--peak-lr",
        type=float,
        metavar="RATE",
        help="highest learning rate (default: 0.005 for adamw, 0.002 for it with a fastconformer, "
        "0.01 for lamb, 0.02 for novograd)",
    )
    schedule.add_argument(
        "--ema",
        type=float,
        default=0.998,
        metavar="SHARE",
        help="decay of the moving average of the weights, which is what is exported; 0: no average",
    )
    schedule.add_argument(
        "--joint",
        choices=["auto", "full", "lean"],
        default="auto",
        help="full: build the joint's logits; lean: compute the loss tile by tile, in less memory; "
        "auto: batch by batch, lean on a GPU in half precision or where the joint would fill half "
        "of it, and on a CPU where it is expected to be about as fast",
    )
    schedule.add_argument(
        "--evaluate",
        choices=["in turn", "beside"],
        default="in turn",
        help="in turn: training waits while the dev set is scored; beside: a process of its own "
        "scores it meanwhile",
    )
    schedule.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="training time between two checkpoints: what a crash can lose",
    )
    add_device(schedule, threads=False)


COMMAND = Command(
    name="train",
    summary="Train a transducer, an encoder-decoder or a CTC model; run it again to resume.",
    details="Ends with the word error rates of the dev and test sets, where there are any. Several "
    "processes are started by torchrun: torchrun --nproc-per-node 8 -m asrkit train --device cuda.",
    run=_train,
    add_arguments=_add_arguments,
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
