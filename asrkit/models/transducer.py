"""Transducers: predictors, the joint, and the model that joins them to an encoder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from asrkit.models.common import expect_sizes
from asrkit.models.conv import ConvConfig
from asrkit.models.ctc import EncodingModel
from asrkit.models.encoders import EncoderConfig, make_encoder
from asrkit.models.lstm import make_lstm
from asrkit.shapes import MAX_COUNT, dims, expect, whole

State = tuple[Tensor, Tensor]  # of an LSTM predictor: hidden and cell, (B, layers, D) each


@dataclass(frozen=True, kw_only=True)
class StatelessConfig:
    """Predictor that sees only the last labels (arXiv 1911.01629, section 3).

    Args:
        width: Width of the embedding and of the prediction, D.
        context: Number of last labels that it sees.
    """

    width: int = 128
    context: int = 2

    def __post_init__(self) -> None:
        expect_sizes(self, "width context")


@dataclass(frozen=True, kw_only=True)
class LSTMConfig:
    """Recurrent predictor, as in Graves 2012 (arXiv 1211.3711).

    Args:
        width: Width of the embedding, of every layer and of the prediction, D.
        layers: LSTM layers.
        dropout: Share dropped after every LSTM layer, in training.
        start: Initial weights of the LSTM: "torch" as torch draws them; "mlperf" as in MLPerf's
            RNN-T, which sets the forget gate's bias to 1 and then halves all weights and biases.
    """

    width: int = 128
    layers: int = 1
    dropout: float = 0.0
    start: Literal["torch", "mlperf"] = "torch"

    def __post_init__(self) -> None:
        expect_sizes(self, "width layers")


@dataclass(frozen=True, kw_only=True)
class TransducerConfig:
    """Sizes of a `TransducerModel`.

    Args:
        vocab_size: Tokens without blank. Blank is the last index, and V = vocab_size + 1.
        encoder: Sizes of the encoder.
        predictor: Sizes of the predictor.
        joint_width: Width of the joint's hidden layer, D.
        dropout: Share of the joint's hidden layer dropped in training.
        durations: Frames that a token may last, for a token-and-duration transducer (arXiv
            2304.06795). Its joint has one logit for each duration, after the tokens' logits. Empty
            for RNN-T.
        activation: Activation of the joint's hidden layer, "tanh" or "relu".
        ctc: Whether the encoder has a CTC head as well.
    """

    vocab_size: int
    encoder: EncoderConfig = field(default_factory=ConvConfig)
    predictor: StatelessConfig | LSTMConfig = field(default_factory=StatelessConfig)
    joint_width: int = 128
    dropout: float = 0.0
    durations: Sequence[int] = ()
    activation: Literal["tanh", "relu"] = "tanh"
    ctc: bool = True

    def __post_init__(self) -> None:
        expect_sizes(self, "vocab_size joint_width")
        expect(
            isinstance(self.durations, Sequence),
            "durations",
            "a sequence of numbers of frames",
            self.durations,
        )
        durations = tuple(self.durations)  # JSON brings lists
        expect(
            all(whole(duration, 0, MAX_COUNT) for duration in durations)
            and (len(set(durations)) == len(durations))
            and (any(durations) or not durations),
            "durations",
            f"distinct whole numbers of frames up to {MAX_COUNT}, one above 0",
            durations,
        )
        object.__setattr__(self, "durations", durations)


class StatelessPredictor(nn.Module):
    """Embeddings of the last labels, mixed by one linear layer.

    Its state is the last context - 1 labels, (B, context - 1), int64.
    """

    def __init__(self, V: int, config: StatelessConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, config.width)
        self.context = config.context
        self.blank = V - 1
        self.mix = nn.Linear(config.width * config.context, config.width)

    def forward(self, labels: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Predictions (B, U, D) for labels (B, U) that follow `state`, and the state after them."""
        B, U = labels.shape
        if state is None:
            state = labels.new_full((B, self.context - 1), self.blank)
        history = torch.cat([state, labels], 1)
        windows = self.embedding(history).unfold(1, self.context, 1)  # (B, U, D, context)
        return self.mix(windows.flatten(2)).relu(), history[:, U:]


class LSTMPredictor(nn.Module):
    """Embedding and LSTM. Its state is (hidden, cell), batch first: (B, layers, D) each."""

    def __init__(self, V: int, config: LSTMConfig) -> None:
        super().__init__()
        width = config.width
        self.embedding = nn.Embedding(V, width)
        dropout, start = config.dropout, config.start
        self.lstm = make_lstm(
            width, width, config.layers, dropout=dropout, start=start, batch_first=True
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, labels: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Predictions (B, U, D) for labels (B, U) that follow `state`, and the state after them."""
        B, U = labels.shape
        embedded = self.embedding(labels)  # (B, U, D)
        if U == 1 and type(self.lstm) is nn.LSTM:  # a quantized LSTM has no plain weights
            if state is None:
                zeros = embedded.new_zeros(B, self.lstm.num_layers, self.lstm.hidden_size)
                state = zeros, zeros
            return self.step(embedded[:, 0], state)
        layers_first = None  # nn.LSTM wants (layers, B, D)
        if state is not None:
            layers_first = tuple(part.transpose(0, 1).contiguous() for part in state)
        predicted, (hidden, cell) = self.lstm(embedded, layers_first)
        return self.dropout(predicted), (hidden.transpose(0, 1), cell.transpose(0, 1))

    def step(self, embedded: Tensor, state: State) -> tuple[Tensor, State]:
        """One step, by LSTM cells: predictions (B, 1, D) and the new state.

        nn.LSTM packs all its weights anew in each call, which costs more than the one product of a
        step. The first label takes a cell as well: under autocast to bfloat16 cuDNN's LSTM takes
        and gives float16, a cell bfloat16, and a captured loop needs the same dtype in every step.

        Args:
            embedded: The label's embedding (B, D).
            state: Hidden and cell (B, layers, D).
        """
        hidden_before, cell_before = state
        hidden_states = []
        cells = []
        below = embedded
        for layer in range(self.lstm.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [getattr(self.lstm, f"{name}_l{layer}") for name in names]
            before = (hidden_before[:, layer], cell_before[:, layer])
            hidden, cell = torch.lstm_cell(below, before, *weights)
            hidden_states.append(hidden)
            cells.append(cell)
            below = hidden
            if self.training:  # saves a decoder one op in each step
                below = self.dropout(hidden)
        if len(cells) == 1:  # a view, where a stack would copy
            return below[:, None], (hidden[:, None], cell[:, None])
        return below[:, None], (torch.stack(hidden_states, 1), torch.stack(cells, 1))


class TransducerModel(EncodingModel):
    """Encoder, predictor and joint. A decoder needs `predict` and `join` only.

    `encode` and `predict` project frames and predictions to the joint's width, so `join` is an
    activation and one linear layer.
    """

    def __init__(self, config: TransducerConfig) -> None:
        super().__init__()
        V = config.vocab_size + 1
        D = config.joint_width
        self.config = config
        self.blank = config.vocab_size
        self.durations = tuple(config.durations)
        self.encoder = make_encoder(config.encoder)
        stateless = isinstance(config.predictor, StatelessConfig)
        predictor: Any = StatelessPredictor if stateless else LSTMPredictor
        self.predictor = predictor(V, config.predictor)
        self.encoder_projection = nn.Linear(self.encoder.width, D)
        self.predictor_projection = nn.Linear(config.predictor.width, D)
        self.activation = getattr(torch, config.activation)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(D, V + len(self.durations))
        self.ctc_head = nn.Linear(self.encoder.width, V) if config.ctc else None

    def predict(self, labels: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Projected prediction (B, D) after one more label each, and the new state.

        Args:
            labels: The last label of each utterance (B,), int64; blank at the start.
            state: The state that the previous call returned; None at the start.
        """
        predicted, state = self.predictor(labels[:, None], state)
        return self.predictor_projection(predicted[:, 0]), state

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (..., V + durations) of projected frames and predictions, both (..., D).

        Args:
            encoded: Frames after `encoder_projection`.
            predicted: Predictions after `predictor_projection`; leading dimensions are broadcast.
        """
        return self.output(self.dropout(self.activation(encoded + predicted)))

    def rows(self, targets: Tensor) -> Tensor:
        """Projected predictions of all lattice rows (B, U1, D).

        Args:
            targets: Labels (B, U), int64; the padding may be negative.
        """
        dims(targets, "B U", "targets")
        start = targets.new_full((len(targets), 1), self.blank)
        labels = torch.cat([start, targets.clamp(min=0)], 1)
        predicted, _ = self.predictor(labels, None)
        return self.predictor_projection(predicted)

    def forward(
        self, features: Tensor, lengths: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Joint logits of every lattice node, in one tensor.

        Args:
            features: Log-mel features (B, T, F).
            lengths: Frames of each utterance (B,), int64.
            targets: Labels (B, U), int64; the padding is any label, or negative.

        Returns:
            Logits (B, T', U1, V + durations), encoded lengths (B,), and the CTC head's
            log-probabilities (B, T', V).
        """
        encoded, lengths, ctc = self.encode(features, lengths)
        predicted = self.rows(targets)
        return self.join(encoded[:, :, None], predicted[:, None]), lengths, ctc
