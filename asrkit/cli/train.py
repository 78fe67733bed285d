"""`asrkit train`."""

import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, ProgressOptions, finish, say, text_stream
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.shapes import count, expect
from asrkit.training.options import TrainOptions
from asrkit.transcribe.options import described

CONFORMER_LAYERS = 2  # trains on a CPU; the published 17 to 42 are in asrkit.models.presets
CONFORMER_SUBSAMPLING = 4  # the published 8 leaves CTC fewer frames than there are characters
LSTM_WIDTH = 256  # trains on a CPU; the published 1024 are asrkit.models.presets.mlperf_rnnt
DECODER_WIDTH = 128  # likewise; Canary's 1024 are asrkit.models.presets.canary_1b
OF_HEAD = {  # options about the parts of one kind of model
    "durations": "transducer",
    "joint": "transducer",
    "smoothing": "attention",
}


@dataclass(frozen=True, kw_only=True)
class CommandOptions(ProgressOptions):
    """The options of the command."""

    manifest: list[str] = described(
        ("spoken_commands",),
        "one or several, mixed: spoken_commands (synthetic, built in), lhotse cuts, a folder "
        "of lhotse's recordings and supervisions, or JSON lines with audio and text",
        group="speech",
    )
    hold_out: str | None = described(
        None,
        "test on this speaker's utterances, train on those of the others",
        metavar="SPEAKER",
    )
    kinds: list[Literal["digits", "commands", "sentences"]] | None = described(
        None, "only these kinds of spoken_commands (default: all)"
    )
    encoder: Literal["conv", "fastconformer", "lstm", "jasper"] = described(
        "conv",
        f"type of encoder; fastconformer: {CONFORMER_LAYERS} blocks, and a frame for every "
        f"{CONFORMER_SUBSAMPLING} of features; lstm: MLPerf's with {LSTM_WIDTH} in place of 1024 "
        "cells a layer; jasper: three blocks of two convolutions, 1.66 million weights",
        group="model",
    )
    head: Literal["transducer", "ctc", "attention"] = described(
        "transducer",
        "what follows the encoder; ctc: a linear layer, trained by the CTC loss alone; "
        f"attention: a Transformer decoder of one layer, {DECODER_WIDTH} wide, "
        "with a CTC head beside it",
    )
    durations: list[int] = described(
        (),
        "train a token-and-duration transducer (TDT) with these durations, such as 0 1 2 3 4 "
        "(default: an RNN-T)",
        metavar="FRAMES",
    )
    tokenizer: str = described("char", "char, or a SentencePiece .model file", metavar="NAME")
    settings: TrainOptions
    device: str = described(
        "cpu", "where to compute: cpu, cuda or cuda:N", group="device and output"
    )
    out: Path = described(
        MISSING,
        "folder for the log, the state to resume from, and model.safetensors",
        metavar="DIR",
    )
    fresh: bool = described(False, "start again instead of resuming what the folder holds")


def _train(asked: CommandOptions) -> int:
    among_others = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun started this process
    if asked.device == "cuda" and among_others and "LOCAL_RANK" in os.environ:
        asked = replace(asked, device=f"cuda:{os.environ['LOCAL_RANK']}")
    prepare_torch(asked.device)
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, train

    config = TrainConfig(**vars(asked.settings))
    tokenizer = load_tokenizer(asked.tokenizer)
    check_writable(asked.out)
    model_config = _model_config(asked, tokenizer.vocab_size)
    speech = _load_speech(asked)
    for text in speech["test"].texts if "test" in speech else ():
        tokenizer.encode(text)  # a text that has no tokens is refused now, not after training
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    with text_stream(asked):
        result = train(
            model_config,
            tokenizer,
            speech["train"],
            speech.get("dev"),
            out=asked.out,
            device=asked.device,
            resume=restarted or not asked.fresh,
            progress=not asked.no_progress,
            config=config,
        )
    if among_others and int(os.environ["RANK"]) > 0:  # the first process says what became of it
        return 0
    steps = len(result.history)
    summary = {"model": str(result.path), "steps": steps, "joint": result.joint}
    summary |= _score(asked, result.path, speech)
    finish(asked, summary, f"trained for {count(steps, 'step')}: {result.path}")
    return 0


def _score(asked: CommandOptions, model: Path, speech: dict[str, Any]) -> dict[str, float]:
    """Word error rates and RTFx on dev and test speech, by name."""
    from asrkit.models import load_checkpoint
    from asrkit.training import evaluate

    scores = dict[str, float]()
    for name in ("dev", "test"):
        if name in speech:
            checkpoint = load_checkpoint(model, device=asked.device)
            rate, _, rtfx = evaluate(checkpoint, speech[name])
            say(asked, f"{name} WER {rate} at RTFx {rtfx:.0f}")
            scores |= {f"{name}_wer": rate.rate, f"{name}_rtfx": round(rtfx)}
    return scores


def _model_config(asked: CommandOptions, vocab_size: int) -> Any:
    from asrkit import models
    from asrkit.models import presets

    given = vars(asked) | vars(asked.settings)
    usual = {one.name: one.default for one in (*fields(asked), *fields(asked.settings))}
    for name, head in OF_HEAD.items():
        fits = head == asked.head or given[name] == usual[name]
        expect(fits, name, f"none with --head {asked.head}", given[name])
    encoders: dict[str, Any] = {
        "conv": models.ConvConfig(),
        "fastconformer": models.FastConformerConfig(
            layers=CONFORMER_LAYERS, subsampling=CONFORMER_SUBSAMPLING
        ),
        "lstm": models.LSTMEncoderConfig(width=LSTM_WIDTH),
        "jasper": presets.mini_jasper().encoder,
    }
    encoder = encoders[asked.encoder]
    if asked.head == "ctc":
        return models.CTCConfig(vocab_size=vocab_size, encoder=encoder)
    if asked.head == "attention":
        return models.AEDConfig(
            vocab_size=vocab_size + 3,  # the special tokens come behind those of the text
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
        durations=tuple(asked.durations),
    )


def _load_speech(asked: CommandOptions) -> dict[str, Any]:
    """Utterances by split (train, dev, test), those splits that have any; train has some."""
    from asrkit.data import Utterances, corpora

    progress = not asked.no_progress
    splits = corpora.load(
        asked.manifest, hold_out=asked.hold_out, kinds=asked.kinds, progress=progress
    )
    counts = {name: len(cuts) for name, cuts in splits.items()}
    remedy = "Set another split, or no --hold-out."
    expect(counts["train"] > 0, "manifest", "utterances to train on", counts, remedy)
    return {
        name: Utterances.load(cuts, progress=progress) for name, cuts in splits.items() if len(cuts)
    }


COMMAND = Command(
    name="train",
    summary="Train a transducer, an encoder-decoder or a CTC model; run it again to resume.",
    details="Ends with the word error rates of the dev and test sets, where there are any. Several "
    "processes are started by torchrun: torchrun --nproc-per-node 8 -m asrkit train --device cuda.",
    goes_on="The same command, without --fresh, resumes from the last checkpoint.",
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
