"""`asrkit train`."""

import argparse
from pathlib import Path
from typing import Any

from asrkit.cli.command import Command, finish, say, text_stream
from asrkit.cli.options import (
    add_device,
    add_no_progress,
    apply_runtime_options,
    check_writable,
)


def _train(args: argparse.Namespace) -> int:
    apply_runtime_options(args)
    from asrkit.models import load_checkpoint
    from asrkit.shapes import expect
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, evaluate, train

    config = TrainConfig(seconds=args.seconds, steps=args.steps, seed=args.seed, joint=args.joint)
    tokenizer = load_tokenizer(args.tokenizer)
    expect(not args.out.exists() or args.out.is_dir(), "out", "a folder", repr(str(args.out)))
    check_writable(args.out, folder=True)
    model_config = _model_config(args, tokenizer.vocab_size)
    speech = _load_speech(args)
    if "test" in speech:
        for text in speech["test"].texts:
            tokenizer.encode(text)  # a text that has no tokens is refused now, not after training
    with text_stream(args):
        result = train(
            model_config,
            tokenizer,
            speech["train"],
            speech.get("dev"),
            out=args.out,
            device=args.device,
            resume=not args.fresh,
            progress=not args.no_progress,
            config=config,
        )
    summary: dict[str, Any] = {
        "model": str(result.path),
        "steps": len(result.history),
        "joint": result.joint,
    }
    for name in ("dev", "test"):
        if name in speech:
            checkpoint = load_checkpoint(result.path, device=args.device)
            rate, _, rtfx = evaluate(checkpoint, speech[name])
            say(args, f"{name} WER {rate} at RTFx {rtfx:.0f}")
            summary |= {f"{name}_wer": rate.rate, f"{name}_rtfx": round(rtfx)}
    finish(args, summary, f"trained for {summary['steps']:,} steps: {result.path}")
    return 0


def _model_config(args: argparse.Namespace, vocab_size: int) -> Any:
    from asrkit.models import (
        ConvConfig,
        FastConformerConfig,
        LSTMConfig,
        StatelessConfig,
        TransducerConfig,
    )

    return TransducerConfig(
        vocab_size=vocab_size,
        encoder=ConvConfig() if args.encoder == "conv" else FastConformerConfig(),
        predictor=StatelessConfig() if args.predictor == "stateless" else LSTMConfig(),
        durations=tuple(args.durations),
    )


def _load_speech(args: argparse.Namespace) -> dict[str, Any]:
    """Utterances by split (train, dev, test), those splits that have any; train always does."""
    from asrkit.data import corpora
    from asrkit.data.utterances import Utterances
    from asrkit.shapes import expect

    progress = not args.no_progress
    splits = corpora.load(
        args.manifest,
        hold_out=args.hold_out,
        join_digits=args.join_digits,
        kinds=args.kinds,
        progress=progress,
    )
    counts = {name: len(cuts) for name, cuts in splits.items()}
    expect(
        counts["train"] > 0,
        "manifest",
        "utterances to train on",
        counts,
        "Set another split, or no --hold-out.",
    )
    return {
        name: Utterances.load(cuts, progress=progress) for name, cuts in splits.items() if len(cuts)
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_speech_arguments(parser)
    _add_model_arguments(parser)
    schedule = parser.add_argument_group("training")
    schedule.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="training time; an interrupted run can be resumed, a finished one not extended",
    )
    schedule.add_argument(
        "--steps", type=int, default=100_000, metavar="N", help="most optimizer steps"
    )
    schedule.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of initial weights, batches and augmentation",
    )
    schedule.add_argument(
        "--joint",
        choices=["auto", "full", "lean"],
        default="auto",
        help="full: build the joint's logits; lean: compute the loss tile by tile, in less memory; "
        "auto: whichever is faster or fits, batch by batch",
    )
    add_device(schedule, threads=False)
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
        "--hold-out", metavar="SPEAKER", help="test on this speaker's utterances, train on others"
    )
    speech.add_argument(
        "--join-digits",
        type=int,
        default=0,
        metavar="N",
        help="add N utterances made of 1 to 6 one-word ones",
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
        "--encoder", choices=["conv", "fastconformer"], default="conv", help="type of encoder"
    )
    model.add_argument(
        "--predictor",
        choices=["stateless", "lstm"],
        default="stateless",
        help="type of prediction network",
    )
    model.add_argument(
        "--durations",
        type=int,
        nargs="+",
        default=[],
        metavar="FRAMES",
        help="train a token-and-duration transducer (TDT) with these durations, as 0 1 2 3 4 "
        "(default: an RNN-T)",
    )
    model.add_argument(
        "--tokenizer",
        default="char",
        metavar="NAME",
        help="char, or a SentencePiece .model file",
    )


COMMAND = Command(
    name="train",
    summary="Train a transducer; run it again to resume.",
    details="Ends with the word error rates of the dev and test sets, where there are any.",
    run=_train,
    add_arguments=_add_arguments,
    examples=[
        "asrkit train --out models/mine",
        "asrkit train --out models/real --manifest cuts.jsonl --hold-out SPEAKER",
        "asrkit train --out models/tdt --durations 0 1 2 3 4",
    ],
)
