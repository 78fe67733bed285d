"""Predictors, the joint, and the two assembled models: a transducer (with an optional CTC head) and
CTC.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from asrkit.models.encoders import ConvConfig, ConvEncoder
from asrkit.models.fastconformer import FastConformer, FastConformerConfig
from asrkit.shapes import MOST, dims, expect, expect_types, whole

EncoderConfig = ConvConfig | FastConformerConfig


@dataclass(frozen=True, kw_only=True)
class StatelessConfig:
    """Predictor that sees the last `context` labels only (arXiv 1911.01629, section 3)."""

    width: int = 128
    context: int = 2

    def __post_init__(self) -> None:
        expect_types(self)
        expect(min(self.width, self.context) >= 1, "width, context", "at least 1", self)


@dataclass(frozen=True, kw_only=True)
class LSTMConfig:
    """Recurrent predictor, as in Graves 2012."""

    width: int = 128
    layers: int = 1

    def __post_init__(self) -> None:
        expect_types(self)
        expect(min(self.width, self.layers) >= 1, "config", "sizes of at least 1", self)


@dataclass(frozen=True, kw_only=True)
class TransducerConfig:
    """A transducer. `vocab_size` counts tokens without blank; blank is the last index, V =
    vocab_size + 1.

    With `durations` it is a token-and-duration transducer: the joint has one more logit for each of
    them, behind the tokens'. `ctc` adds a CTC head on the encoder.
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
        expect_types(self)
        sizes = (self.vocab_size, self.joint_width)
        expect(min(sizes) >= 1, "vocab_size, joint_width", "at least 1", sizes)
        expect(0 <= self.dropout < 1, "dropout", "a share from 0 to below 1", self.dropout)
        frames = isinstance(self.durations, Sequence) and all(
            whole(duration, 0, MOST) for duration in self.durations
        )
        moves = (
            frames
            and len({*self.durations}) == len(self.durations)
            and (not self.durations or max(self.durations) > 0)
        )
        expect(
            moves,
            "durations",
            f"distinct whole numbers of frames up to {MOST}, one above 0",
            self.durations,
        )
        expect(
            self.activation in ("tanh", "relu"),
            "activation",
            "'tanh' or 'relu'",
            repr(self.activation),
        )
        object.__setattr__(self, "durations", tuple(self.durations))  # JSON brings lists


@dataclass(frozen=True, kw_only=True)
class CTCConfig:
    """An encoder with one linear layer; blank is the last index."""

    vocab_size: int
    encoder: EncoderConfig = field(default_factory=ConvConfig)

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.vocab_size >= 1, "vocab_size", "at least 1", self.vocab_size)


def make_encoder(config: EncoderConfig) -> ConvEncoder | FastConformer:
    """The encoder `config` describes."""
    return ConvEncoder(config) if isinstance(config, ConvConfig) else FastConformer(config)


def log_probs(logits: Tensor) -> Tensor:
    """Float32 log-probs: in half precision a frame's sum over V tokens would have three digits."""
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def make_model(config: "TransducerConfig | CTCConfig") -> "TransducerModel | CTCModel":
    """The model `config` describes, with random weights: `make_model(presets.parakeet_ctc_0_6b())`."""
    return CTCModel(config) if isinstance(config, CTCConfig) else TransducerModel(config)


class StatelessPredictor(nn.Module):
    """Embeddings of the last labels, mixed by one linear map. State: the last context - 1 labels
    (B, context - 1).
    """

    def __init__(self, V: int, config: StatelessConfig) -> None:
        super().__init__()
        self.embedding, self.context, self.blank = (
            nn.Embedding(V, config.width),
            config.context,
            V - 1,
        )
        self.mix = nn.Linear(config.width * config.context, config.width)

    def forward(self, labels: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Predictions (B, U, D) for labels (B, U) that follow `state`, and the state after them."""
        if state is None:
            state = labels.new_full((len(labels), self.context - 1), self.blank)
        history = torch.cat([state, labels], 1)
        embedded = self.embedding(history).unfold(1, self.context, 1)  # (B, U, D, context)
        return self.mix(embedded.flatten(2)).relu(), history[:, labels.shape[1] :]


class LSTMPredictor(nn.Module):
    """Embedding and LSTM. State: (hidden, cell), batch first: (B, layers, D) each."""

    def __init__(self, V: int, config: LSTMConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, config.width)
        self.lstm = nn.LSTM(config.width, config.width, config.layers, batch_first=True)

    def forward(
        self, labels: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Predictions (B, U, D) for labels (B, U) that follow `state`, and the state after them."""
        embedded = self.embedding(labels)  # (B, U, D)
        if labels.shape[1] == 1:
            return self.step(embedded[:, 0], state or self.silence(embedded))
        before = (
            None if state is None else tuple(part.transpose(0, 1).contiguous() for part in state)
        )
        out, after = self.lstm(embedded, before)
        return out, tuple(part.transpose(0, 1) for part in after)

    def silence(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The state before the first label: zeros, in the dtype of the weights."""
        zeros = embedded.new_zeros(len(embedded), self.lstm.num_layers, self.lstm.hidden_size)
        return zeros, zeros

    def step(
        self, below: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One label further, by cells: the kernels for sequences pack all weights anew at each
        call, for one product.

        The first label goes this way too. Under autocast to bfloat16 cuDNN's LSTM takes and gives
        float16, a cell bfloat16, and a captured loop needs one dtype from its first state to its
        last.
        """
        after = list[tuple[Tensor, Tensor]]()
        for layer in range(self.lstm.num_layers):
            weights = [
                getattr(self.lstm, f"{name}_l{layer}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            below, cell = torch.lstm_cell(below, (state[0][:, layer], state[1][:, layer]), *weights)
            after.append((below, cell))
        if len(after) == 1:  # a view, where a stack would copy
            return below[:, None], (below[:, None], cell[:, None])
        hidden, cells = (torch.stack(parts, 1) for parts in zip(*after, strict=True))
        return below[:, None], (hidden, cells)


class TransducerModel(nn.Module):
    """Encoder, predictor and joint; `predict` and `join` are all a decoder asks for.

    Both halves are projected to the joint width by `encode` and `predict`, so `join` is an
    activation and one linear layer.
    """

    def __init__(self, config: TransducerConfig) -> None:
        super().__init__()
        expect(
            isinstance(config, TransducerConfig),
            "config",
            "a TransducerConfig",
            type(config).__name__,
            "Try make_model.",
        )
        V, D = config.vocab_size + 1, config.joint_width
        self.config, self.blank, self.durations = config, config.vocab_size, tuple(config.durations)
        self.encoder = make_encoder(config.encoder)
        self.predictor: StatelessPredictor | LSTMPredictor
        if isinstance(config.predictor, StatelessConfig):
            self.predictor = StatelessPredictor(V, config.predictor)
        else:
            self.predictor = LSTMPredictor(V, config.predictor)
        self.encoder_projection = nn.Linear(self.encoder.width, D)
        self.predictor_projection = nn.Linear(config.predictor.width, D)
        self.activation = torch.tanh if config.activation == "tanh" else torch.relu
        self.dropout, self.output = (
            nn.Dropout(config.dropout),
            nn.Linear(D, V + len(self.durations)),
        )
        self.ctc_head = nn.Linear(self.encoder.width, V) if config.ctc else None

    def encode(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projected frames (B, T, D), lengths (B,), and the CTC head's log-probs (B, T, V), (B, T,
        0) where there is none.
        """
        encoded, lengths = self.encoder(features, lengths)
        ctc = (
            log_probs(self.ctc_head(encoded))
            if self.ctc_head
            else encoded.new_empty((*encoded.shape[:2], 0))
        )
        return self.encoder_projection(encoded), lengths, ctc

    def predict(self, labels: Tensor, state: object = None) -> tuple[Tensor, object]:
        """Projected prediction (B, D) after one more label each (B,), and the new state. Blank
        without state starts.
        """
        predicted, state = self.predictor(labels[:, None], state)
        return self.predictor_projection(predicted[:, 0]), state

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (..., V + durations) of projected frames and predictions (..., D) with
        broadcasting leading dimensions.
        """
        return self.output(self.dropout(self.activation(encoded + predicted)))

    def rows(self, targets: Tensor) -> Tensor:
        """Projected predictions of all lattice rows (B, U1, D) for targets (B, U): teacher forcing."""
        dims(targets, "B U", "targets")
        start = targets.new_full((len(targets), 1), self.blank)
        return self.predictor_projection(self.predictor(torch.cat([start, targets], 1), None)[0])

    def forward(
        self, features: Tensor, lengths: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Joint logits (B, T, U1, V + durations), encoded lengths (B,), CTC log-probs (B, T, V)."""
        encoded, lengths, ctc = self.encode(features, lengths)
        return self.join(encoded[:, :, None], self.rows(targets)[:, None]), lengths, ctc


class CTCModel(nn.Module):
    """An encoder and a linear layer to V = vocab_size + 1 classes."""

    def __init__(self, config: CTCConfig) -> None:
        super().__init__()
        expect(
            isinstance(config, CTCConfig),
            "config",
            "a CTCConfig",
            type(config).__name__,
            "Try make_model.",
        )
        self.config, self.blank = config, config.vocab_size
        self.encoder = make_encoder(config.encoder)
        self.output = nn.Linear(self.encoder.width, config.vocab_size + 1)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs (B, T, V) and their lengths (B,)."""
        encoded, lengths = self.encoder(features, lengths)
        return log_probs(self.output(encoded)), lengths
