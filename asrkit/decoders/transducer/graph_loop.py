"""`GraphLoop`: a strategy's loop on buffers with fixed addresses, so that it can be recorded."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses
from asrkit.decoders.states import map_state
from asrkit.decoders.transducer import frame_looping, label_looping, windowed_looping
from asrkit.decoders.transducer.steps import (
    Carry,
    GreedyModel,
    GreedyOptions,
    initial_state,
    predictor_step,
)

LOOPS: dict[str, Any] = {  # the strategies that can be recorded
    "windowed_looping": windowed_looping,
    "label_looping": label_looping,
    "frame_looping": frame_looping,
}


class GraphLoop:
    """The loop of a strategy for batches of up to B utterances of up to T frames, in fixed buffers.

    `turn` sends nothing to the host, so it can be recorded. Rows and frames that a batch does not
    use are beyond its lengths and are never read.

    Attributes:
        options: The options that `turn` uses.
        encoded: (B, T, E) frames of the batch.
        lengths: (B,) valid frames.
        state: The `LoopState` of the batch.
        counts: (B,) labels so far.
        outputs: (3, B, columns) labels, frames and durations so far.
        confidence: (B, columns) confidence of these labels, or None.
        active: () bool on the device, written by every turn: whether another turn is needed.
    """

    def __init__(
        self,
        B: int,
        T: int,
        greedy: GreedyModel,
        encoded: Tensor,
        carry: Carry,
        options: GreedyOptions,
    ) -> None:
        """Allocate buffers; nothing is loaded.

        Args:
            B: Most utterances.
            T: Most frames.
            greedy: The model.
            encoded: An example of the frames, for width, dtype and device.
            carry: An example of the model's state, for sizes and dtypes.
            options: Options of the strategy.
        """
        device = encoded.device
        columns = T * options.max_symbols + 1
        self.options = options
        self.duration_table = greedy.duration_table  # kept alive: a graph reads its address
        self.encoded = encoded.new_zeros(B, T, encoded.shape[2])
        self.lengths = carry.ahead.new_zeros(B)
        self.state = map_state(
            lambda part: part.new_zeros(B, *part.shape[1:]), initial_state(carry)
        )
        self.counts = self.lengths.clone()
        self.outputs = self.lengths.new_zeros(3, B, columns)
        self.confidence: Tensor | None = None
        if greedy.confidence:
            self.confidence = torch.zeros(B, columns, dtype=torch.float32, device=device)
        self.active = torch.zeros((), dtype=torch.bool, device=device)
        self.host_flags = torch.zeros(2, dtype=torch.bool, pin_memory=device.type == "cuda")
        self.flag_sent: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.flag_sent = [torch.cuda.Event(), torch.cuda.Event()]

    def load(self, encoded: Tensor, lengths: Tensor, carry: Carry) -> None:
        """Copy a batch into the buffers.

        Args:
            encoded: Frames, no larger than the buffers.
            lengths: (B,) valid frames.
            carry: State before the first frame.
        """
        B, T, _ = encoded.shape
        self.encoded[:B, :T].copy_(encoded)
        self.lengths.zero_()[:B].copy_(lengths)
        map_state(lambda own, new: own[:B].copy_(new), self.state, initial_state(carry))
        self.counts.zero_()

    def turn(self, greedy: GreedyModel) -> None:
        """Decode at most one more label of each utterance.

        Utterances that emit nothing write a column too. Their next label overwrites it, or it stays
        beyond `counts`.
        """
        joint_step = LOOPS[self.options.strategy].joint_step
        advanced, step = joint_step(greedy, self.encoded, self.lengths, self.state, self.options)
        column = self.counts[:, None]
        columns = column.expand(3, -1, -1)
        outputs = torch.stack([step.labels, step.frames, step.durations])
        self.outputs.scatter_(2, columns, outputs[..., None])
        if self.confidence is not None:
            self.confidence.scatter_(1, column, step.confidence[:, None])
        self.counts += step.emitted
        map_state(Tensor.copy_, self.state, predictor_step(greedy, advanced, step))
        torch.any(self.state.time < self.lengths, out=self.active)

    def repeat(self, turns: Callable[[], None]) -> None:
        """Call `turns` until no utterance is active.

        The flag `active` is copied to the host while the next turns already run. So there is one
        call more than needed; turns after the end change nothing.
        """
        is_first = True
        for slot in cycle((0, 1)):
            turns()
            self.host_flags[slot].copy_(self.active, non_blocking=True)
            if self.flag_sent:
                self.flag_sent[slot].record()
            if not is_first:
                if self.flag_sent:
                    self.flag_sent[1 - slot].synchronize()
                if not self.host_flags[1 - slot]:
                    return
            is_first = False

    @torch.inference_mode(False)
    def hypotheses(self, lengths: Tensor, carry: Carry, impl: str) -> Hypotheses:
        """The result of the loaded batch, copied from the buffers.

        Args:
            lengths: (B,) as in `load`.
            carry: As in `load`.
            impl: How the result was computed.
        """
        B = len(lengths)
        state, counts = map_state(lambda part: part[:B].clone(), (self.state, self.counts))
        labels, frames, durations = self.outputs[:, :B]
        frames = frames + carry.frames[:, None]
        confidence = None if self.confidence is None else self.confidence[:B]
        return Hypotheses.from_columns(
            (labels, frames, durations, confidence),
            counts,
            state.scores,
            impl,
            carry=carry.after(state.time, lengths, state.predicted, state.state),
        )
