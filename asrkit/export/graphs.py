"""A model as the graphs that leave: in the names, shapes and order that clients of NeMo's exports
expect.

    encoder   audio_signal (B, F, T), length (B,)             -> outputs (B, D, T'), encoded_lengths
    decoder   targets (B, 1), target_length (B,), states_in   -> outputs (B, D, 1), lengths, states
    joiner    encoder_outputs (B, D, T'), decoder_outputs     -> logits (B, T', U, V)
    model     audio_signal (B, F, T), length (B,)             -> logprobs (B, T', V), their lengths

`decoder` is the predictor and `joiner` the joint; `model` is a CTC model whole. Source of the
layout: github.com/k2-fsa/sherpa-onnx, scripts/nemo and sherpa-onnx/csrc.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.models import CTCModel, StatelessConfig, TransducerModel
from asrkit.models.transducer import log_probs
from asrkit.shapes import MAX_COUNT, expect

# Of a duration that the model does not have: never the largest, and finite in half precision.
NEVER = -1e4
# Sizes of the example that a graph is traced with: 2 utterances, so that a batch is no constant.
EXAMPLE_B = 2
EXAMPLE_T = 167


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One graph, and all that an exporter asks for.

    Args:
        name: Of the graph and of its file, without suffix.
        module: What it computes, in eval mode.
        inputs: Name of each input, and an example.
        outputs: Names of the outputs.
        dynamic: For each input that varies, the name of each dimension that does.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    dynamic: dict[str, dict[int, str]]


class Encoder(nn.Module):
    """The encoder, channels first."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Frames (B, D, T') in the weights' dtype, and their lengths (B,) int64.

        Args:
            audio_signal: Log-mel features (B, F, T), float32.
            length: Valid frames of each (B,), int64.
        """
        encoded, lengths = self.encoder(audio_signal.transpose(1, 2), length)
        return encoded.transpose(1, 2), lengths


class CTC(nn.Module):
    """The encoder and a CTC head."""

    def __init__(self, encoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T', V) in nats, blank the last, and their lengths (B,) int64.

        Args:
            audio_signal: Log-mel features (B, F, T), float32.
            length: Valid frames of each (B,), int64.
        """
        encoded, lengths = self.encoder(audio_signal.transpose(1, 2), length)
        return log_probs(self.head(encoded)), lengths


class LSTMDecoder(nn.Module):
    """A recurrent predictor, one label at a time."""

    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(
        self, targets: Tensor, target_length: Tensor, hidden: Tensor, cell: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predictions (B, D, 1), the lengths as they came, and both new states (layers, B, D).

        Args:
            targets: The last label of each utterance (B, 1), int32; the blank before the first.
            target_length: Labels in `targets` (B,), int32: 1 each. Only handed back.
            hidden: States of the LSTM (layers, B, D), float32; zeros before the first label.
            cell: Its cells (layers, B, D), likewise.
        """
        state = (hidden.transpose(0, 1), cell.transpose(0, 1))
        embedded = self.predictor.embedding(targets[:, 0])
        predicted, (hidden, cell) = self.predictor.step(embedded, state)
        states = (hidden.transpose(0, 1), cell.transpose(0, 1))
        return predicted.transpose(1, 2), target_length + 0, *states


class StatelessDecoder(nn.Module):
    """A predictor that sees the last labels, which its client keeps as states of an LSTM.

    Clients start with zeros, so a label is held as its distance from the blank, in float32.
    """

    def __init__(self, predictor: Any) -> None:
        super().__init__()
        self.predictor = predictor
        self.before = predictor.context - 1  # labels of the state
        self.size = max(self.before, 1)

    def forward(
        self, targets: Tensor, target_length: Tensor, labels: Tensor, unused: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Predictions (B, D, 1), the lengths as they came, and both new states (1, B, size).

        Args:
            targets: The last label of each utterance (B, 1), int32; the blank before the first.
            target_length: Labels in `targets` (B,), int32: 1 each. Only handed back.
            labels: Those before the last, less the blank (1, B, size), float32; zeros at first.
            unused: In the place of an LSTM's cells (1, B, size), float32. Only handed back.
        """
        blank = self.predictor.blank
        known = labels[0, :, : self.before].to(targets.dtype) + blank
        history = torch.cat([known, targets], 1)  # (B, context)
        embedded = self.predictor.embedding(history)
        window = embedded.transpose(1, 2).flatten(1)  # (B, D context)
        predicted = self.predictor.mix(window).relu()
        kept = (history[:, -self.size :] - blank).to(labels.dtype)
        return predicted[:, :, None], target_length + 0, kept[None], unused + 0


class Joiner(nn.Module):
    """The joint with the projections before it.

    Clients take the place of a duration for its number of frames, so there is a logit for each
    number up to the largest one.
    """

    def __init__(self, model: TransducerModel) -> None:
        super().__init__()
        self.encoder_projection = model.encoder_projection
        self.predictor_projection = model.predictor_projection
        self.activation = model.activation
        self.output = _with_all_durations(model)

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        """Logits (B, T', U, V + durations); there are 0 durations for RNN-T.

        Args:
            encoder_outputs: Frames of `Encoder` (B, D, T').
            decoder_outputs: Predictions of the decoder (B, D, U), in the same dtype.
        """
        encoded = self.encoder_projection(encoder_outputs.transpose(1, 2))
        predicted = self.predictor_projection(decoder_outputs.transpose(1, 2))
        hidden = self.activation(encoded[:, :, None] + predicted[:, None])
        return self.output(hidden)


def _with_all_durations(model: TransducerModel) -> nn.Linear:
    """The joint's output layer with a row for every number of frames up to the longest duration."""
    output = model.output
    if not model.durations:
        return output
    V = model.blank + 1
    size = max(model.durations) + 1
    weight = torch.zeros(V + size, output.in_features)
    bias = torch.full((V + size,), NEVER)
    rows = torch.tensor([*range(V), *(V + frames for frames in model.durations)])
    weight[rows] = output.weight.detach()
    bias[rows] = output.bias.detach()
    layer = nn.Linear(output.in_features, V + size, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def ctc_graphs(model: Any) -> list[Graph]:
    """The graph of a CTC model, or of the CTC head of a transducer.

    Args:
        model: A CTCModel, or a TransducerModel with a CTC head, in eval mode in float32.
    """
    head = model.output if isinstance(model, CTCModel) else model.ctc_head
    module = CTC(model.encoder, head)
    return [_acoustic("model", module, model.config.encoder.bins, ("logprobs", "logprobs_lengths"))]


def transducer_graphs(model: TransducerModel) -> list[Graph]:
    """The graphs of a transducer: encoder, decoder (the predictor) and joiner (the joint).

    Args:
        model: In eval mode in float32.
    """
    bins = model.config.encoder.bins
    outputs = ("outputs", "encoded_lengths")
    encoder = _acoustic("encoder", Encoder(model.encoder), bins, outputs)
    return [encoder, _decoder(model), _joiner(model)]


def _acoustic(name: str, module: nn.Module, bins: int, outputs: tuple[str, ...]) -> Graph:
    """The graph of what takes features and lengths."""
    signal = torch.zeros(EXAMPLE_B, bins, EXAMPLE_T)
    length = torch.tensor([EXAMPLE_T, EXAMPLE_T // 2])
    return Graph(
        name=name,
        module=module.eval(),
        inputs={"audio_signal": signal, "length": length},
        outputs=outputs,
        dynamic={"audio_signal": {0: "B", 2: "T"}, "length": {0: "B"}},
    )


def state_sizes(model: TransducerModel) -> tuple[int, int]:
    """(layers, width) of the states that a client keeps for the predictor, float32.

    Args:
        model: A transducer, whose predictor is an LSTM or stateless.
    """
    config = model.config.predictor
    if isinstance(config, StatelessConfig):
        return 1, max(config.context - 1, 1)
    return config.layers, config.width


def _decoder(model: TransducerModel) -> Graph:
    if isinstance(model.config.predictor, StatelessConfig):
        module: nn.Module = StatelessDecoder(model.predictor)
    else:
        module = LSTMDecoder(model.predictor)
    layers, width = state_sizes(model)
    state = torch.zeros(layers, EXAMPLE_B, width)
    names = ("states.1", "onnx::Slice_3")
    # Clients count labels in 32 bits.
    inputs = {
        "targets": torch.full((EXAMPLE_B, 1), model.blank, dtype=torch.int32),
        "target_length": torch.ones(EXAMPLE_B, dtype=torch.int32),
        names[0]: state,
        names[1]: state.clone(),
    }
    dynamic = {"targets": {0: "B"}, "target_length": {0: "B"}}
    dynamic |= {name: {1: "B"} for name in names}
    outputs = ("outputs", "prednet_lengths", "states", "162")
    return Graph(
        name="decoder", module=module.eval(), inputs=inputs, outputs=outputs, dynamic=dynamic
    )


def _joiner(model: TransducerModel) -> Graph:
    longest = max(model.durations, default=0)
    wanted = f"durations of at most {MAX_COUNT} frames"
    expect(longest <= MAX_COUNT, "model", wanted, longest)
    frames = torch.zeros(EXAMPLE_B, model.encoder.width, 3)
    predictions = torch.zeros(EXAMPLE_B, model.config.predictor.width, 2)
    return Graph(
        name="joiner",
        module=Joiner(model).eval(),
        inputs={"encoder_outputs": frames, "decoder_outputs": predictions},
        outputs=("outputs",),
        dynamic={"encoder_outputs": {0: "B", 2: "T"}, "decoder_outputs": {0: "B", 2: "U"}},
    )
