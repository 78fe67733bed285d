"""The graphs of an exported model, with the names, shapes and order that clients of NeMo's exports
expect.

    encoder   audio_signal (B, F, T), length (B,)             -> outputs (B, D, T'), encoded_lengths
    decoder   targets (B, 1), target_length (B,), states_in   -> outputs (B, D, 1), lengths, states
    joiner    encoder_outputs (B, D, T'), decoder_outputs     -> logits (B, T', U, V)
    model     audio_signal (B, F, T), length (B,)             -> logprobs (B, T', V), their lengths

`decoder` is the predictor and `joiner` the joint; `model` is a whole CTC model. Source of the
layout: github.com/k2-fsa/sherpa-onnx, scripts/nemo and sherpa-onnx/csrc.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.devices import CPU_FLOAT
from asrkit.models import CTCModel, StatelessConfig, TransducerModel
from asrkit.models.ctc import log_probs

# Version of ONNX's operators: the lowest that torch writes. Engines since 2023 read it.
OPSET = 18
# Sizes of the example that a graph is traced with: 2 utterances, so that B does not become
# constant.
EXAMPLE_B = 2
EXAMPLE_T = 167


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One graph, and what an exporter needs to write it.

    Args:
        name: Name of the graph and of its file, without suffix.
        module: The module that the graph computes.
        inputs: Name of each input, with an example.
        outputs: Names of the outputs.
        dynamic: For each input, the dimensions that vary and their names.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    dynamic: tuple[dict[int, str], ...]


class Acoustic(nn.Module):
    """The encoder, channels first; or log-probabilities, with the head of a CTC model."""

    def __init__(self, encoder: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, D, T') or log-probabilities (B, T', V) in nats; their lengths (B,) int64.

        Args:
            audio_signal: Log-mel features (B, F, T), float32.
            length: Valid frames of each (B,), int64.
        """
        encoded, lengths = self.encoder(audio_signal.transpose(1, 2), length)
        if self.head is None:
            return encoded.transpose(1, 2), lengths
        return log_probs(self.head(encoded)), lengths


class _Decoder(nn.Module):
    """A predictor, one label at a time."""

    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.predictor = predictor


class LSTMDecoder(_Decoder):
    """A recurrent predictor, one label at a time."""

    def forward(
        self, targets: Tensor, target_length: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predictions (B, D, 1), the lengths unchanged, and both new states (layers, B, D).

        Args:
            targets: The last label of each utterance (B, 1), int32; the blank at the start.
            target_length: Labels in `targets` (B,), int32: 1 each. They are returned unchanged.
            hidden: Hidden states of the LSTM (layers, B, D), float32; zeros at the start.
            cell: Cells of the LSTM (layers, B, D), likewise.
        """
        state = (hidden.transpose(0, 1), cell.transpose(0, 1))
        predicted, (hidden, cell) = self.predictor(targets, state)
        states = (hidden.transpose(0, 1), cell.transpose(0, 1))
        return predicted.transpose(1, 2), target_length + 0, *states


class StatelessDecoder(_Decoder):
    """A predictor of the last labels, which its client keeps as if they were states of an LSTM.

    Clients start with zeros, so a state has the difference of each label and the blank, in float32.
    """

    def forward(
        self, targets: Tensor, target_length: Tensor, labels: Tensor, unused: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predictions (B, D, 1), the lengths unchanged, and both new states (1, B, context).

        Args:
            targets: The last label of each utterance (B, 1), int32; the blank at the start.
            target_length: Labels in `targets` (B,), int32: 1 each. They are returned unchanged.
            labels: Earlier labels minus the blank (1, B, context), float32; zeros at the start.
            unused: In place of an LSTM's cells (1, B, context), float32. Returned unchanged.
        """
        blank = self.predictor.blank
        before = labels[0, :, 1:].to(targets.dtype) + blank  # (B, context - 1)
        predicted, _ = self.predictor(targets, before)
        kept = torch.cat([before, targets], 1) - blank
        return predicted.transpose(1, 2), target_length + 0, kept[None].to(labels.dtype), unused + 0


class Joiner(nn.Module):
    """The joint with the projections before it."""

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.encoder_projection = model.encoder_projection
        self.predictor_projection = model.predictor_projection
        self.activation = model.activation
        self.output = model.output

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        """Logits (B, T', U, V + durations), with 0 durations for RNN-T.

        Args:
            encoder_outputs: Frames from `Acoustic` (B, D, T').
            decoder_outputs: Predictions of the decoder (B, D, U), in the same dtype.
        """
        encoded = self.encoder_projection(encoder_outputs.transpose(1, 2))
        predicted = self.predictor_projection(decoder_outputs.transpose(1, 2))
        return self.output(self.activation(encoded[:, :, None] + predicted[:, None]))


def graphs(model: CTCModel | TransducerModel) -> list[Graph]:
    """The graphs of a model: one for CTC; encoder, decoder and joiner for a transducer.

    Args:
        model: A model in eval mode, in float32 on a CPU.
    """
    signal = torch.zeros(EXAMPLE_B, model.config.encoder.bins, EXAMPLE_T, **CPU_FLOAT)
    inputs = {
        "audio_signal": signal,
        "length": torch.tensor([EXAMPLE_T, EXAMPLE_T // 2], device="cpu"),
    }
    dynamic = ({0: "B", 2: "T"}, {0: "B"})
    if isinstance(model, CTCModel):
        return [
            Graph(
                name="model",
                module=Acoustic(model.encoder, model.output),
                inputs=inputs,
                outputs=("logprobs", "logprobs_lengths"),
                dynamic=dynamic,
            )
        ]
    encoder = Graph(
        name="encoder",
        module=Acoustic(model.encoder),
        inputs=inputs,
        outputs=("outputs", "encoded_lengths"),
        dynamic=dynamic,
    )
    predictions = torch.zeros(EXAMPLE_B, model.config.predictor.width, 2, **CPU_FLOAT)
    joiner = Graph(
        name="joiner",
        module=Joiner(model),
        inputs={
            "encoder_outputs": torch.zeros(EXAMPLE_B, model.encoder.width, 3, **CPU_FLOAT),
            "decoder_outputs": predictions,
        },
        outputs=("outputs",),
        dynamic=({0: "B", 2: "T"}, {0: "B", 2: "U"}),
    )
    return [encoder, _decoder(model), joiner]


def state_sizes(model: TransducerModel) -> tuple[int, int]:
    """(layers, width) of the states that a client keeps for the predictor, float32."""
    config = model.config.predictor
    if isinstance(config, StatelessConfig):
        return 1, config.context
    return config.layers, config.width


def _decoder(model: TransducerModel) -> Graph:
    stateless = isinstance(model.config.predictor, StatelessConfig)
    module = StatelessDecoder if stateless else LSTMDecoder
    layers, width = state_sizes(model)
    state = torch.zeros(layers, EXAMPLE_B, width, **CPU_FLOAT)
    return Graph(
        name="decoder",
        module=module(model.predictor),
        inputs={  # clients use int32 for labels
            "targets": torch.full((EXAMPLE_B, 1), model.blank, dtype=torch.int32, device="cpu"),
            "target_length": torch.ones(EXAMPLE_B, dtype=torch.int32, device="cpu"),
            "states.1": state,
            "onnx::Slice_3": state.clone(),
        },
        outputs=("outputs", "prednet_lengths", "states", "162"),
        dynamic=({0: "B"}, {0: "B"}, {1: "B"}, {1: "B"}),
    )


def trace(graph: Graph) -> "torch.onnx.ONNXProgram":
    """Trace the graph in float32 by torch's exporter.

    Raises:
        ValueError: The exporter cannot write the graph.
    """
    try:
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                graph.module.eval(),
                tuple(graph.inputs.values()),
                dynamo=True,
                input_names=[*graph.inputs],
                output_names=[*graph.outputs],
                opset_version=OPSET,
                dynamic_shapes=graph.dynamic,
                verbose=False,
            )
    except Exception as error:  # many classes, with messages of pages
        why = " ".join(str(error).split())
        raise ValueError(
            f"model: torch's exporter cannot write its {graph.name} ({why:.300}). "
            "Versions that are known to work are in requirements-peers.txt."
        ) from error
    assert program is not None
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters, which log and print pages for their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    silence = io.StringIO()
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            yield
    finally:
        logging.disable(before)
