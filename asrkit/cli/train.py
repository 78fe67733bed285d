"""`asrkit train`."""

import os
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from asrkit.cli.command import Command, ProgressOptions, finish, say, text_stream
from asrkit.cli.options import check_writable, prepare_torch
from asrkit.shapes import expect
from asrkit.transcribe.options import described

CONFORMER_LAYERS = 2  # trains on a CPU; the published 17 to 42 are in asrkit.models.presets
CONFORMER_SUBSAMPLING = 4  # the published 8 leaves CTC fewer frames than there are characters
LSTM_WIDTH = 256  # trains on a CPU; the published 1024 are asrkit.models.presets.mlperf_rnnt
DECODER_WIDTH = 128  # likewise; Canary's 1024 are asrkit.models.presets.canary_1b
OF_HEAD = {  # options about the parts of one kind of model
    "predictor": "transducer",
    "durations": "transducer",
    "joint": "transducer",
    "decoder_layers": "attention",
    "smoothing": "attention",
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ProgressOptions):
    """The options of the command; those with the name of a field of `TrainConfig` set it."""

    manifest: list[str] = described(
        ("spoken_commands",),
        "one or several, mixed: spoken_commands (synthetic, built in), lhotse cuts, or JSON "
        "lines with audio and text",
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
        f"attention: a Transformer decoder of width {DECODER_WIDTH} (an encoder-decoder model), "
        "with a CTC head beside it",
    )
    predictor: Literal["stateless", "lstm"] = described(
        "stateless", "type of prediction network of a transducer"
    )
    durations: list[int] = described(
        (),
        "train a token-and-duration transducer (TDT) with these durations, such as 0 1 2 3 4 "
        "(default: an RNN-T)",
        metavar="FRAMES",
    )
    tokenizer: str = described("char", "char, or a SentencePiece .model file", metavar="NAME")
    decoder_layers: int = described(
        1, "layers of the decoder", metavar="N", group="attention decoder, with --head attention"
    )
    smoothing: float = described(
        0.0,
        "label smoothing: the share of a target's probability that all other tokens get",
        metavar="SHARE",
    )
    seconds: float = described(
        300.0,
        "training time; an interrupted run can be resumed, a finished one cannot be extended",
        group="training",
    )
    steps: int = described(100_000, "optimizer steps at most", metavar="N")
    seed: int = described(0, "seed of weights, batches and augmentation", metavar="N")
    optimizer: Literal["adamw", "lamb", "novograd"] = described(
        "adamw",
        "lamb: LAMB, for large batches; its steps are in proportion to each tensor's norm; "
        "novograd: NovoGrad, as for Jasper; its steps do not depend on the scale of the gradients",
    )
    peak_lr: float | None = described(
        None,
        "highest learning rate (default: 0.005 for adamw, 0.002 for it with a fastconformer, "
        "0.01 for lamb, 0.02 for novograd)",
        metavar="RATE",
    )
    ema: float = described(
        0.998,
        "decay of the moving average of the weights, which is what is exported; 0: no average",
        metavar="SHARE",
    )
    joint: Literal["auto", "full", "lean"] = described(
        "auto",
        "full: build the joint's logits; lean: compute the loss tile by tile, in less memory; "
        "auto: batch by batch, lean on a GPU in half precision or where the joint would fill half "
        "of it, and on a CPU where it is expected to be about as fast",
    )
    evaluate: Literal["in turn", "beside"] = described(
        "in turn",
        "in turn: training waits while the dev set is scored; beside: a process of its own "
        "scores it meanwhile",
    )
    checkpoint_s: float = described(
        30.0,
        "training time between two checkpoints: what a crash can lose",
        flag="--checkpoint-seconds",
        metavar="S",
    )
    device: str = described("cpu", "where to compute: cpu, cuda or cuda:N")
    accumulate: int = described(
        1,
        "batches that each process, or the only one, takes in a step; the loss is the mean over "
        "the labels of all batches",
        metavar="N",
        group="several processes, which torchrun starts",
    )
    out: Path = described(
        MISSING,
        "folder for the log, the state to resume from, and model.safetensors",
        metavar="DIR",
        group="output",
    )
    fresh: bool = described(False, "start again instead of resuming what the folder holds")


def _train(asked: TrainOptions) -> int:
    if asked.device == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun started this process
        asked = replace(asked, device=f"cuda:{os.environ['LOCAL_RANK']}")
    prepare_torch(asked.device)
    from asrkit.text import load_tokenizer
    from asrkit.training import TrainConfig, train

    settings = {one.name for one in fields(TrainConfig)} & vars(asked).keys()
    config = TrainConfig(**{name: getattr(asked, name) for name in settings})
    tokenizer = load_tokenizer(asked.tokenizer)
    out = asked.out
    expect(not out.exists() or out.is_dir(), "out", "a folder", repr(str(out)))
    check_writable(out)
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
            out=out,
            device=asked.device,
            resume=restarted or not asked.fresh,
            progress=not asked.no_progress,
            config=config,
        )
    if int(os.environ.get("RANK", "0")) > 0:  # the first process says what became of it
        return 0
    summary: dict[str, Any] = {"model": str(result.path), "steps": len(result.history)}
    if result.joint is not None:
        summary["joint"] = result.joint
    summary |= _score(asked, result.path, speech)
    finish(asked, summary, f"trained for {len(result.history):,} steps: {result.path}")
    return 0


def _score(asked: TrainOptions, model: Path, speech: dict[str, Any]) -> dict[str, float]:
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


def _model_config(asked: TrainOptions, vocab_size: int) -> Any:
    from asrkit import models
    from asrkit.models import presets

    for one in fields(asked):
        head = OF_HEAD.get(one.name, asked.head)
        fits = head == asked.head or getattr(asked, one.name) == one.default
        remedy = f"Leave it out, or pass --head {head}."
        wanted = f"none with --head {asked.head}"
        expect(fits, one.name, wanted, getattr(asked, one.name), remedy)
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
            layers=asked.decoder_layers,
            ctc=True,
        )
    predictor = models.StatelessConfig() if asked.predictor == "stateless" else models.LSTMConfig()
    return models.TransducerConfig(
        vocab_size=vocab_size,
        encoder=encoder,
        predictor=predictor,
        durations=tuple(asked.durations),
    )


def _load_speech(asked: TrainOptions) -> dict[str, Any]:
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
    options=TrainOptions,
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
