"""The door to transducer decoding: any model that can `predict` and `join`, any strategy, one
result.
"""

from dataclasses import replace
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check
from asrkit.decoders.transducer import frame_looping, label_looping, one_by_one, windowed_looping
from asrkit.decoders.transducer.graphs import MODES, WAYS
from asrkit.decoders.transducer.graphs import decode as by_graphs
from asrkit.decoders.transducer.reading import Carry, Confidence, Options, Reader, check_rules
from asrkit.runtime import eager
from asrkit.shapes import expect, whole

STRATEGIES = {
    "windowed_looping": windowed_looping.decode,
    "label_looping": label_looping.decode,
    "frame_looping": frame_looping.decode,
    "one_by_one": one_by_one.decode,
}
CONFIDENCE = get_args(Confidence)


class Transducer(Protocol):
    """All that a decoder asks of a model; P is the width that `predict` and `join` agree on.

    What needs only one side (a projection to the joint's width) belongs into the encoder or
    `predict`, where it is done once. A TDT model also has `durations`, a sequence of whole numbers:
    the last logits of `join` are one for each of them.
    """

    blank: int

    def predict(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(predicted (B, P), state) after one more label each (B,). The label blank with state None
        starts.

        A state is a tensor, None, or a tuple, list or dict of states; its tensors have the batch as
        first dimension.
        """

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (..., V), or (..., V + durations), of frames (..., E) and predictions (..., P)
        that broadcast in front.
        """


@eager
def transducer_greedy(
    model: Transducer,
    encoded: Tensor,
    lengths: Tensor,
    *,
    strategy: Literal[
        "windowed_looping", "label_looping", "frame_looping", "one_by_one"
    ] = "windowed_looping",
    graphs: Literal["auto", "off", "step", "full"] = "auto",
    max_symbols: int = 10,
    window: int | None = None,
    confidence: Confidence = "none",
    carry: Carry | None = None,
    turn: Literal["auto", "fused", "plain"] = "auto",
) -> Hypotheses:
    """Greedy hypotheses of encoded (B, T, E) with lengths (B,) in frames, which may be 0; the same
    for every strategy.

    The best token of a frame is taken until it is blank, or until `max_symbols` labels are out:
    then the next frame comes without a blank, and none is in the score. A TDT model (arXiv
    2304.06795) jumps by the best duration of the same joint, after a blank by 1 at least;
    `max_symbols` ends a frame that labels of duration 0 stay on. `model` is a `Transducer`, used in
    the mode it is in: call model.eval() first. An utterance with a NaN among its logits has NaN as
    its score.

    strategy: "windowed_looping", the fastest or within a tenth of it, where every utterance has a
    clock of its own and one call of the joint looks `window` frames ahead (None: 8, or 2 for TDT,
    whose durations skip most blanks; good at batches of 1 to 128 on a CPU); "label_looping", label
    looping as published (arXiv 2406.06220); "frame_looping", where all wait at every frame;
    "one_by_one", the definition. `graphs` runs windowed_looping as a CUDA graph:
    `asrkit.decoders.transducer.graphs.decode` says which there are, when "auto" takes one, and what
    is kept until `release_graphs`. `turn` of a captured loop: "fused" by Triton, "plain" torch, or
    "auto", fused where that can be; the result's `impl` says which it was.

    confidence of each label: "max_prob", its probability; "entropy", 1 - entropy / ln V of the
    tokens; both 1 where the model is sure. `carry` of earlier hypotheses goes on where their frames
    ended.

    >>> found = transducer_greedy(model, encoded, lengths)  # doctest: +SKIP
    >>> more = transducer_greedy(model, later, its_lengths, carry=found.carry)  # doctest: +SKIP
    """
    longest = check(encoded, lengths, "B T E", "encoded")
    expect(
        strategy in [*STRATEGIES],
        "strategy",
        "one of " + ", ".join(map(repr, STRATEGIES)),
        repr(strategy),
    )
    expect(graphs in MODES, "graphs", "one of " + ", ".join(map(repr, MODES)), repr(graphs))
    captures = graphs in ("auto", "off") or strategy == "windowed_looping"
    expect(
        captures,
        "graphs",
        f"'auto' or 'off' with {strategy}",
        repr(graphs),
        "Only windowed_looping runs as a graph.",
    )
    expect(turn in WAYS, "turn", "one of " + ", ".join(map(repr, WAYS)), repr(turn))
    captured = turn == "auto" or graphs in ("step", "full")
    expect(
        captured,
        "turn",
        f"'auto' with graphs={graphs!r}",
        repr(turn),
        "Only a graph asked for by name has a choice.",
    )
    expect(window is None or whole(window, 1), "window", "at least 1 frame, or None", repr(window))
    expect(
        confidence in CONFIDENCE,
        "confidence",
        "one of " + ", ".join(map(repr, CONFIDENCE)),
        repr(confidence),
    )
    check_rules(model, max_symbols)
    if carry is not None:
        expect(
            isinstance(carry, Carry),
            "carry",
            "what hypotheses hold as carry",
            type(carry).__name__,
            "Pass hypotheses.carry.",
        )
        carry.check(encoded)
    with torch.inference_mode():
        read = Reader(model, confidence, encoded.device)
        start = carry or read.start(encoded)
        ahead = window or (2 if read.durations else Options.window)
        options = Options(max_symbols=max_symbols, window=ahead, graphs=graphs, turn=turn)
        decode = (
            by_graphs
            if strategy == "windowed_looping" and graphs != "off"
            else STRATEGIES[strategy]
        )
        found = decode(read, encoded[:, :longest], lengths.long(), start, options)
    if confidence != "none" and found.confidence is None:  # nobody said anything
        return replace(found, confidence=torch.empty(found.labels.shape, device=encoded.device))
    return found
