"""Models to decode with: ours with either predictor, a foreign module, and a plain object."""

from collections import namedtuple

import pytest
import torch
from torch import nn

from asrkit.decoders.states import state_tensors
from asrkit.models import (
    ConvConfig,
    LSTMConfig,
    StatelessConfig,
    TransducerConfig,
    TransducerModel,
)

Cell = namedtuple("Cell", "hidden")
V, E = 5, 4
TOKENS_ARPA = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-99\t<s>\t-0.3
-0.6\t</s>
-0.9\t0\t-0.2
-0.5\t1\t-0.4
-2\t<unk>

\\2-grams:
-0.1\t<s> 0
-0.3\t0 1
-1.5\t1 1

\\end\\
"""


class Foreign(nn.Module):
    """A GRU transducer of random weights; its state nests every kind that the protocol allows."""

    def __init__(self, blank=V - 1, durations=()):
        super().__init__()
        self.blank, self.durations = blank, durations
        self.embedding, self.cell = nn.Embedding(V, 6), nn.GRUCell(6, 6)
        self.encoded, self.output = nn.Linear(E, 6), nn.Linear(6, V + len(durations))

    def predict(self, labels, state=None):
        hidden = None if state is None else state["cell"][0].hidden
        hidden = self.cell(self.embedding(labels), hidden)
        return hidden, {"cell": [Cell(hidden)], "last": (labels[:, None], None)}

    def join(self, encoded, predicted):
        return self.output((self.encoded(encoded) + predicted).tanh())


class Table:
    """Not a module: the token comes from a hash of frame and history, and its logit is far above the others.

    All numbers are whole and below 256, so float32 and bfloat16 give the results of float64.
    """

    def __init__(self, seed, blank_share, blank=V - 1, durations=()):
        self.seed, self.blank_share, self.blank, self.durations = (
            seed,
            blank_share,
            blank,
            durations,
        )

    def predict(self, labels, state=None):
        history = (
            labels * 0 + self.seed % 251
            if state is None
            else (state * 7 + labels + 1) % 251
        )
        return history[:, None].float(), history

    def join(self, encoded, predicted):
        frame = encoded.nan_to_num(0, 0, 0)[..., :1].long() % 251
        mixed = (
            (frame * 1103 + predicted.long() * 7919 + self.seed) * 2654435761 >> 8
        )[..., 0] % 100_003
        label = (self.blank + 1 + mixed // 100 % (V - 1)) % V
        token = torch.where(mixed % 100 < 100 * self.blank_share, self.blank, label)
        logits = [nn.functional.one_hot(token, V)]
        if self.durations:
            logits.append(
                nn.functional.one_hot(
                    mixed // 700 % len(self.durations), len(self.durations)
                )
            )
        return (8 * torch.cat(logits, -1)).to(encoded.dtype)


@pytest.fixture(autouse=True)
def small_batches(one_thread):
    """Every test of this folder starts on one thread."""


@pytest.fixture(scope="session")
def make():
    """make(kind, seed, durations, bias, blank): a model of random weights, in float64 unless it is a table."""

    def of(kind, seed, *, durations=(), bias=0.0, blank=V - 1):
        torch.manual_seed(seed)
        if kind == "table":
            return Table(seed, min(0.95, max(0.05, 0.5 + bias / 8)), blank, durations)
        if kind == "foreign":
            model = Foreign(blank, durations)
        else:
            predictor = (
                StatelessConfig(width=6)
                if kind == "stateless"
                else LSTMConfig(width=6, layers=2)
            )
            sizes = {
                "encoder": ConvConfig(width=4, layers=1),
                "predictor": predictor,
                "joint_width": E,
            }
            model = TransducerModel(
                TransducerConfig(
                    vocab_size=V - 1, durations=durations, activation="relu", **sizes
                )
            )
            model.predictor_projection.weight.data.mul_(4)
        model.output.weight.data.mul_(4)  # else the bias decides
        model.output.bias.data[model.blank] += bias
        return model.double().eval()

    return of


@pytest.fixture(scope="session")
def speak():
    """speak(kind, B, T, seed): frames (B, T, E) for a model of that kind, and lengths (B,) from 0 to T."""

    def of(kind, B, T, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, T + 1, (B,), generator=generator)
        if kind == "table":
            return torch.randint(
                0, 251, (B, T, E), generator=generator
            ).float(), lengths
        return 2 * torch.randn(
            B, T, E, generator=generator, dtype=torch.float64
        ), lengths

    return of


@pytest.fixture(scope="session")
def same():
    """same(found, wanted): tokens exactly, the rest of hypotheses and their carries to 1e-5."""

    def compare(found, wanted):
        assert found.tokens() == wanted.tokens()
        for a, b in zip(found.parts(), wanted.parts(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(
            state_tensors(found.carry), state_tensors(wanted.carry), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    return compare


@pytest.fixture(scope="session")
def arpa_of_tokens(tmp_path_factory):
    """An n-gram model over tokens, of order 2, in a file."""
    path = tmp_path_factory.mktemp("lm") / "tokens.arpa"
    path.write_text(TOKENS_ARPA)
    return path
