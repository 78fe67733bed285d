"""The training suite: a training step with each form of the joint, on a GPU also with encoder and
predictor in CUDA graphs, and an LSTM encoder computed in phases.

All arms of a training step start from the same model and take one step on the same batch: forward,
backward, clipping, AdamW. The learning rate is 0, so every call computes the same loss and
gradient.

A step of the encoder is a forward and a backward pass. `cells` is the share of the padded batch's
frames that an arm computes, `useful_cells` the share without padding.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asrkit.data import computed_seconds, shipped_lengths
from asrkit.models import (
    LSTMEncoder,
    LSTMEncoderConfig,
    TransducerConfig,
    TransducerModel,
    presets,
)
from asrkit.models.common import strided
from asrkit.training import Prepared, TrainConfig, training_loss, update
from asrkit.training.graphs import StepGraphs
from asrkit.workbench.lessons.shared.lstm_phases import (
    phased_step,
    random_batch,
    random_encoder,
)
from asrkit.workbench.lessons.shared.planted import seeded
from asrkit.workbench.measure.ops import dtype_name
from benchmarks.harness.cases import Case, Suite
from benchmarks.suites.training_evaluation import evaluation_case

# utterances, feature frames of 10 ms, labels, tokens with blank
DEMO = (7, 160, 27, 28)  # the median batch of `asrkit train` on the spoken digits
SIZES = (DEMO, (*DEMO[:3], 1024), (16, 400, 40, 1024))
QUICK = ((2, 80, 6, 28),)
# of a step in graphs: two kinds of batches of MLPerf's RNN-T on a GPU
GRAPH_SIZES = ((4, 500, 40, 1024), (32, 1500, 120, 1024))
FORMS = ("full", "packed", "split", "lean")
# relative distance of losses and gradient norms, due to rounding of the joint's products
STEP_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
LSTM_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # cuDNN computes an LSTM in TF32
PHASES = (2, 4, 8)


def suite(device: str, quick: bool) -> Iterator[Case]:
    """Yield a training step by size and dtype (float32, and bfloat16 if the hardware supports it),
    and an LSTM encoder on LibriSpeech's lengths and on equal lengths.

    Args:
        device: "cpu" or "cuda".
        quick: small sizes.
    """
    native = TrainConfig().dtype(torch.device(device))
    for size in QUICK if quick else SIZES:
        for dtype in dict.fromkeys((torch.float32, native)):
            yield training_case(size, dtype, device)
    if device == "cuda":
        for size in QUICK if quick else GRAPH_SIZES:
            yield graphs_case(size, native, quick)
    yield from _phases_cases(device, quick)
    if device == "cpu":
        yield evaluation_case(quick)


def training_case(size: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Case:
    """One training step of the default model with each form of the joint.

    Args:
        size: utterances, feature frames, labels, and tokens with blank.
        dtype: autocast dtype; float32: no autocast.
        device: "cpu" or "cuda".
    """
    model = seeded(TransducerModel, TransducerConfig(vocab_size=size[3] - 1))
    model.requires_grad_().to(device).train()
    batch = random_speech(size, device)
    arms = {joint: training_step(copy.deepcopy(model), batch, joint, dtype) for joint in FORMS}
    return _case("training-step", size, model, arms, dtype)


def graphs_case(size: tuple[int, int, int, int], dtype: torch.dtype, quick: bool) -> Case:
    """One training step of MLPerf's RNN-T on a GPU, without dropout: plain, and in CUDA graphs.

    Args:
        size: utterances, feature frames, labels, and tokens with blank.
        dtype: autocast dtype; float32: no autocast.
        quick: a narrow encoder.
    """
    encoder = LSTMEncoderConfig(width=64 if quick else 1024, dropout=0.0)
    predictor: Any = presets.mlperf_rnnt().predictor
    predictor = replace(predictor, dropout=0.0)
    sizes: dict[str, Any] = {"vocab_size": size[3] - 1, "encoder": encoder, "predictor": predictor}
    config = replace(presets.mlperf_rnnt(), **sizes, dropout=0.0)
    model = seeded(TransducerModel, config).requires_grad_().to("cuda").train()
    batch = random_speech(size, "cuda")
    arms = {
        "plain": training_step(copy.deepcopy(model), batch, "lean", dtype),
        "graphs": training_step(model, batch, "lean", dtype, graphed=True),
    }
    return _case("training-step-graphs", size, model, arms, dtype)


def random_speech(size: tuple[int, int, int, int], device: str) -> Prepared:
    """A batch of noise whose shortest utterance is 0.7 of the longest; lengths are on the host.

    Args:
        size: utterances, feature frames, labels, and tokens with blank.
        device: device of the features.
    """
    B, frames, U, V = size
    generator = torch.Generator().manual_seed(0)
    return Prepared(
        features=torch.randn(B, frames, 80, generator=generator).to(device),
        lengths=torch.linspace(frames, 0.7 * frames, B).long(),
        targets=torch.randint(V - 1, (B, U), generator=generator),
        target_lengths=torch.linspace(U, 0.7 * U, B).long(),
        speech_s=0.0,
    )


def _case(
    what: str,
    size: tuple[int, int, int, int],
    model: TransducerModel,
    arms: dict[str, Callable[[], tuple[Tensor, Tensor]]],
    dtype: torch.dtype,
) -> Case:
    """The arms of a training step, which time and peak memory compare."""
    B, frames, U, V = size
    T = strided(frames, model.config.encoder.subsampling)
    first, *others = arms
    return Case(
        what=what,
        arms=arms,
        params={
            "shape": [B, T, U + 1, V],
            "joint_width": model.config.joint_width,
            "dtype": dtype_name(dtype),
        },
        ratios=[(first, name) for name in others],
        tolerance=STEP_TOLERANCES[dtype],
        memory=True,
    )


def training_step(
    model: TransducerModel,
    batch: Prepared,
    joint: Any,
    dtype: torch.dtype,
    *,
    graphed: bool = False,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that takes one training step; returns loss per label in nats and norm of the gradient.

    Args:
        model: model in training mode.
        batch: features and targets.
        joint: the form of the joint.
        dtype: autocast dtype; float32: no autocast.
        graphed: whether encoder and predictor run as CUDA graphs, from the second call on.
    """
    precision: Any = dtype_name(dtype)
    ctc_weight = TrainConfig.ctc_weight if model.config.ctc else 0.0
    config = TrainConfig(joint=joint, precision=precision, ctc_weight=ctc_weight)
    graphs = StepGraphs(model) if graphed else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)

    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)  # for the encoder's dropout
        loss = training_loss(model, batch, config, None, graphs).per_label
        norm = update(model, optimizer, loss, config)
        return loss.detach(), norm

    return step


def _phases_cases(device: str, quick: bool) -> Iterator[Case]:
    """Cases of the LSTM encoder: on a GPU MLPerf's sizes in bfloat16, with batches of 64 and 256;
    on a CPU a quarter as wide, with batches of 32.
    """
    config = LSTMEncoderConfig(width=256, dropout=0.0)
    sizes: tuple[int, ...] = (32,)
    dtype = torch.float32
    shorter = 1
    if quick:
        config = LSTMEncoderConfig(bins=8, width=16, dropout=0.0)
        sizes = (4,)
        shorter = 20
    elif device == "cuda":
        config = replace(config, width=1024)
        sizes = (64, 256)
        dtype = torch.bfloat16
    encoder = random_encoder(config).to(device, dtype)
    seconds = shipped_lengths("librispeech_train_clean_100").seconds
    for B in sizes:
        drawn = np.random.default_rng(0).choice(seconds, B)
        lengths = torch.from_numpy(100 * drawn).long() // shorter
        equal = torch.full_like(lengths, int(lengths.float().mean()))
        yield _phases_case("lstm-phases-librispeech", encoder, lengths)
        yield _phases_case("lstm-phases-equal", encoder, equal)


def _phases_case(what: str, encoder: LSTMEncoder, lengths: Tensor) -> Case:
    """The whole batch, and in phases."""
    config = encoder.config
    batch = random_batch(encoder, lengths)
    counts = {"whole": 1} | {f"phases_{count}": count for count in PHASES}
    frames = lengths.numpy()
    whole = computed_seconds(frames)
    B, T, _ = batch.features.shape
    dtype = batch.features.dtype
    return Case(
        what=what,
        arms={name: partial(phased_step, encoder, batch, n) for name, n in counts.items()},
        params={
            "shape": [B, T, config.width, config.layers],
            "dtype": dtype_name(dtype),
            "useful_cells": frames.sum() / whole,
        },
        arm_params={
            name: {"cells": computed_seconds(frames, n) / whole} for name, n in counts.items()
        },
        ratios=[("whole", name) for name in counts if name != "whole"],
        tolerance=LSTM_TOLERANCES[dtype],
        warmup=1,
    )


SUITE = Suite(name="training", cases=suite, gpu_tests=("tests/training/test_graphs.py",), share=3)
