"""Checkpoints with random weights that emit about three labels a second on any sound, and sounds.

Whole programs transcribe these sounds, each with the same weights in its own form. Plain random
weights emit far too many labels or none. Here `scripted.spread_features` makes the frames differ,
and bisection finds the bias of the blank.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders import ctc_greedy, transducer_greedy
from asrkit.features import FeatureConfig, log_mel
from asrkit.models import (
    Checkpoint,
    CTCConfig,
    CTCModel,
    TransducerConfig,
    TransducerModel,
    save_checkpoint,
)
from asrkit.text import SentencePieceTokenizer
from asrkit.workbench.lessons.shared.file_recognizer import RATE_HZ, read_wav, write_wav
from asrkit.workbench.lessons.shared.planted import seeded
from asrkit.workbench.lessons.shared.scripted import beeps, spread_features, standardize

LABELS_PER_SECOND = 3.0
PIECES = 1024


def recordings(folder: Path, seconds: Sequence[float]) -> list[Path]:
    """Write files of beeps in noise with these lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = [int(length * RATE_HZ) for length in seconds]
    return [write_wav(folder / f"{row}.wav", beeps(S, row)) for row, S in enumerate(counts)]


def write_ctc(path: Path, config: CTCConfig, sound: Path) -> Path:
    """Write a CTC checkpoint that emits `LABELS_PER_SECOND` on a sound; returns its path."""
    model, frames, lengths = _model_and_frames(CTCModel, config, sound)
    _spread(model.output, frames[0])

    def labels() -> int:
        scores = model.output(frames).log_softmax(-1)
        return int(ctc_greedy(scores, lengths).lengths)

    return _write(path, model, sound, labels)


def write_transducer(path: Path, config: TransducerConfig, sound: Path) -> Path:
    """Write an RNN-T checkpoint that emits `LABELS_PER_SECOND` on a sound; returns its path.

    In the joint the previous labels outweigh the frame, so a label does not make another one on the
    same frame likely.
    """
    model, frames, lengths = _model_and_frames(TransducerModel, config, sound)
    standardize(model.encoder_projection, model.encoder_projection(frames[0]))
    model.predictor.embedding.weight.mul_(3)
    history = torch.randint(PIECES, (1, 400), generator=torch.Generator().manual_seed(0))
    predicted = model.predictor(history, None)[0][0]
    standardize(model.predictor_projection, model.predictor_projection(predicted), 1.5)
    frames = model.encoder_projection(frames)
    drawn = model.predictor_projection(predicted)[:, None] + frames[0, :100]
    _spread(model.output, model.activation(drawn).flatten(0, 1))

    def labels() -> int:
        return int(transducer_greedy(model, frames, lengths).lengths)

    return _write(path, model, sound, labels)


def _model_and_frames(kind: Any, config: Any, sound: Path) -> tuple[Any, Tensor, Tensor]:
    """A model with seeded random weights whose frames of a sound differ, these frames (1, T, D) and
    their length.
    """
    model = seeded(kind, config)
    samples = torch.tensor(read_wav(sound))[None] / 32768
    features = log_mel(
        samples, torch.tensor([samples.shape[1]]), config=FeatureConfig(bins=config.encoder.bins)
    )
    spread_features(model.encoder, *features)
    return model, *model.encoder(*features)


def _spread(output: Any, inputs: Tensor) -> None:
    """Make an output layer's logits differ for inputs (N, D), and `<unk>` never the best."""
    standardize(output, output(inputs), 4.0)
    output.bias[0] = -1e4


def _write(path: Path, model: Any, sound: Path, labels: Callable[[], int]) -> Path:
    """Find the bias of the blank by bisection, and write the checkpoint; `labels` counts labels."""
    wanted = LABELS_PER_SECOND * len(read_wav(sound)) / RATE_HZ
    low, high = 0.0, 40.0
    misses: dict[float, float] = {}  # for an RNN-T they need not be monotonic
    for _ in range(12):
        bias = (low + high) / 2
        model.output.bias[PIECES] = bias
        miss = labels() - wanted
        misses[bias] = abs(miss)
        low, high = (bias, high) if miss > 0 else (low, bias)
    model.output.bias[PIECES] = min(misses, key=misses.__getitem__)
    save_checkpoint(path, Checkpoint(model, tokenizer(), {"bins": model.config.encoder.bins}, {}))
    return path


def pieces() -> list[str]:
    """`PIECES` pieces of SentencePiece: `<unk>`, syllables that begin a word, other syllables."""
    consonants, vowels = "bcdfghjklmnprstvwyz", "aeiou"
    syllables = ["".join(parts) for parts in product(consonants, vowels, "lmnrst")]
    half = PIECES // 2
    return ["<unk>", *("▁" + piece for piece in syllables[: half - 1]), *syllables[:half]]


def tokenizer() -> SentencePieceTokenizer:
    """A SentencePiece model of `pieces`."""
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto()
    for number, piece in enumerate(pieces()):
        proto.pieces.add(piece=piece, score=-float(number), type=2 if number == 0 else 1)
    proto.trainer_spec.model_type = 1
    return SentencePieceTokenizer(proto.SerializeToString())
