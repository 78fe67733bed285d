"""The door to transducer decoding: any model that can `predict` and `join`, any strategy, one result."""

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check
from asrkit.decoders.transducer import frame_looping, one_by_one
from asrkit.shapes import expect

STRATEGIES = {"frame_looping": frame_looping.decode, "one_by_one": one_by_one.decode}


class Transducer(Protocol):
    """All that a decoder asks of a model; P is the width that `predict` and `join` agree on."""

    blank: int

    def predict(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(predicted (B, P), state) after one more label each (B,). The label blank with state None starts.

        A state is a tensor, None, or a tuple, list or dict of states; its tensors have the batch as first dimension.
        """

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (..., V) of frames (..., E) and predictions (..., P) whose leading dimensions broadcast."""


def transducer_greedy(
    model: Transducer, encoded: Tensor, lengths: Tensor,
    *, strategy: Literal["frame_looping", "one_by_one"] = "frame_looping", max_symbols: int = 10,
) -> Hypotheses:  # fmt: skip
    """Greedy hypotheses of encoded (B, T, E) with lengths (B,) in frames, which may be 0; the same for every strategy.

    At each frame the best label is taken until blank wins, or until `max_symbols` labels are out: then the next frame
    comes without a blank, and none is in the score. Modules are used in the mode they are in: call model.eval() first.
    """
    longest = check(encoded, lengths, "B T E", "encoded")
    expect(strategy in STRATEGIES, "strategy", "one of " + ", ".join(map(repr, STRATEGIES)), repr(strategy))
    expect(max_symbols >= 1, "max_symbols", "at least 1", max_symbols)
    expect(model.blank >= 0, "model.blank", "an index from 0", model.blank, "Count it from the front: V - 1, not -1.")
    with torch.inference_mode():
        return STRATEGIES[strategy](model, encoded[:, :longest], lengths, max_symbols)
