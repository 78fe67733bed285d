"""Greedy transducer decoding: `transducer_greedy`, for any model that can `predict` and `join`."""

from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, check_batch, check_model
from asrkit.decoders.states import state_tensors
from asrkit.decoders.transducer import one_by_one
from asrkit.decoders.transducer.graph_loop import LOOPS
from asrkit.decoders.transducer.graphs import GRAPH_MODES
from asrkit.decoders.transducer.graphs import decode as decode_with_graphs
from asrkit.decoders.transducer.steps import Carry, GreedyModel, GreedyOptions
from asrkit.shapes import MAX_COUNT, expect, expect_choice, whole
from asrkit.threads import eager

STRATEGIES = {name: loop.decode for name, loop in (LOOPS | {"one_by_one": one_by_one}).items()}
LABEL_WINDOW = 4  # default window of label_looping: a longer one has more launches
TDT_WINDOW = 2  # default window of TDT, except for windowed_looping on a GPU: it skips most blanks


class Transducer(Protocol):
    """What a decoder needs of a model; `predict` and `join` agree on a width P.

    Work that depends on one side only, such as a projection to the joint's width, belongs in the
    encoder or in `predict`, where it is done once. A TDT model also has `durations`, a sequence of
    whole numbers; the last logits of `join` score them. Neither method reads a module's child
    `encoder`.
    """

    blank: int

    def predict(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """(predicted (B, P), state) after one more label for each utterance.

        Args:
            labels: (B,) int64; the blank at the start of the text.
            state: The state of the last call, None at the start. It is a tensor, None, or a tuple,
                list or dict of states; the first dimension of every tensor is the batch.
        """

    def join(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        """Logits (..., V), or (..., V + durations).

        Args:
            encoded: Frames (..., E).
            predicted: Predictions (..., P); the leading dimensions of both broadcast.
        """


@eager
def transducer_greedy(  # noqa: PLR0913 - all options of greedy decoding, keyword-only
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
    confidence: bool = False,
    carry: Carry | None = None,
) -> Hypotheses:
    """Greedy `Hypotheses` of a batch of encoded utterances; the same labels by every strategy.

    On each frame the best token is taken until it is blank. After `max_symbols` labels on a frame,
    decoding moves to the next frame without a blank and its score. A TDT model (arXiv 2304.06795)
    moves by the best duration of the same joint, after a blank by at least 1 frame.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, E) encoder frames.
        lengths: (B,) valid frames, int32 or int64; 0 is allowed.
        strategy: "windowed_looping" is the fastest, or within a tenth of it: every utterance has
            its own clock, and one joint call covers `window` frames. "label_looping" follows arXiv
            2406.06220: a loop over labels around a loop over blanks, with `window` joint calls of
            one frame in the inner loop. With "frame_looping" all utterances wait at every frame.
            "one_by_one" is the definition, one utterance and one symbol at a time.
        graphs: Whether the loop runs as a CUDA graph: "off", "step" (the host replays a few turns
            at a time), "full" (one graph that loops on the device), or "auto". one_by_one never
            does. See `asrkit.decoders.transducer.graphs.decode`.
        max_symbols: Most labels on one frame.
        window: Frames that a turn covers at most. None is 8 for windowed_looping, and 2 for TDT on
            a CPU; for label_looping it is 4, and 2 for TDT. These suit batches of 1 to 128 on a
            CPU; other windows were not timed on a GPU.
        confidence: Whether to return the confidence of each label, its probability.
        carry: The `carry` of earlier hypotheses; decoding continues where their frames ended.

    Returns:
        Hypotheses with scores in nats; an utterance with a NaN among its logits has score NaN.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.
        RuntimeError: The chosen mode of `graphs` cannot run here.

    >>> first = transducer_greedy(model, encoded, lengths)  # doctest: +SKIP
    >>> rest = transducer_greedy(model, later, its_lengths, carry=first.carry)  # doctest: +SKIP
    """
    longest = check_batch(encoded, lengths, "B T E", "encoded")
    check_model(model, "blank", "predict", "join")
    width = encoded.shape[2]
    joint = getattr(getattr(model, "config", None), "joint_width", width)
    wanted = f"frames of width {joint}, as model.join takes"
    expect(width == joint, "encoded", wanted, f"width {width}", "Call model.encode first.")
    remedy = "Pass a Python int, counted from the front: V - 1, not -1."
    expect(whole(model.blank, 0), "model.blank", "an index from 0", repr(model.blank), remedy)
    expect_choice("strategy", strategy, list(STRATEGIES))
    expect_choice("graphs", graphs, GRAPH_MODES)
    can_graph = strategy in LOOPS and encoded.is_cuda
    wanted = f"'auto' or 'off' with {strategy} on {encoded.device}"
    remedy = "All strategies but one_by_one run as a graph, on a CUDA device."
    expect(can_graph or graphs in ("auto", "off"), "graphs", wanted, repr(graphs), remedy)
    wanted = f"1 to {MAX_COUNT} labels on a frame"
    expect(whole(max_symbols, 1, MAX_COUNT), "max_symbols", wanted, repr(max_symbols))
    expect(window is None or whole(window, 1), "window", "at least 1 frame, or None", repr(window))
    if carry is not None:
        sizes = sorted({len(part) for part in state_tensors(carry)})
        remedy = "Regroup it with select and join."
        expect(sizes == [len(encoded)], "carry", f"B={len(encoded)} utterances", sizes, remedy)
    with torch.inference_mode():
        greedy = GreedyModel(model, confidence, encoded.device)
        if window is None:
            is_label = strategy == "label_looping"
            window = LABEL_WINDOW if is_label else GreedyOptions.window
            if greedy.durations and (is_label or not encoded.is_cuda):
                window = TDT_WINDOW
        options = GreedyOptions(
            max_symbols=max_symbols, window=window, graphs=graphs, strategy=strategy
        )
        decode = decode_with_graphs if can_graph and graphs != "off" else STRATEGIES[strategy]
        start = carry or greedy.initial_carry(encoded)
        hypotheses = decode(greedy, encoded[:, :longest], lengths.long(), start, options)
    if confidence and hypotheses.confidence is None:  # no labels at all
        empty = torch.empty(hypotheses.labels.shape, device=encoded.device)
        return replace(hypotheses, confidence=empty)
    return hypotheses
