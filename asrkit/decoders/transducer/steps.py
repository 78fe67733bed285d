"""What all greedy strategies share: options, states, the best-token rule, and the loop over turns.

`GreedyModel.best_tokens` decides for every strategy and device which token of a joint is best, how
many frames it moves on, and how likely it is. A strategy whose turns can be captured in a CUDA
graph is a function `joint_step`; `emit` and `predictor_step` complete its turn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Emissions, Hypotheses
from asrkit.decoders.states import map_state, select_state, state_tensors
from asrkit.shapes import expect


@dataclass(frozen=True, kw_only=True)
class GreedyOptions:
    """Options of `transducer_greedy` that a strategy needs."""

    max_symbols: int = 10  # labels on one frame
    window: int = 8  # frames that a turn of windowed_looping or label_looping covers
    graphs: str = "off"
    strategy: str = "windowed_looping"


class Carry(NamedTuple):
    """Decoder state of B utterances after their frames so far, to decode the frames that follow."""

    predicted: Tensor  # (B, P), predictor output after the labels so far
    state: Any  # of the predictor
    ahead: Tensor  # (B,) int64, frames to come that a duration of TDT has already jumped over
    frames: Tensor  # (B,) int64, frames decoded so far, added to the frames of later labels

    def select(self, rows: Tensor | slice) -> "Carry":
        """The carry of the utterances `rows`, in that order."""
        return map_state(lambda tensor: tensor[rows], self)

    @staticmethod
    def join(carries: Sequence["Carry"]) -> "Carry":
        """One carry for the utterances of several batches, in the order of `carries`."""
        return map_state(lambda *tensors: torch.cat(tensors), *carries)

    def after(self, time: Tensor, lengths: Tensor, predicted: Tensor, state: Any) -> "Carry":
        """The carry after `lengths` more frames.

        Args:
            time: (B,) the frame that each utterance would decode next.
            lengths: (B,) frames of this call.
            predicted: (B, P) predictor output after the last label.
            state: Predictor state after the last label.
        """
        return Carry(predicted, state, time - lengths, self.frames + lengths)


class BestTokens(NamedTuple):
    """The best token of each joint; all tensors (...,)."""

    token: Tensor  # int64
    # int64, frames to move. RNN-T: 1 after a blank, 0 after a label. TDT: the best duration, at
    # least 1 after a blank.
    jump: Tensor
    score: Tensor  # float32, log-probability in nats of the token, plus that of TDT's duration
    confidence: Tensor | None  # float32, the token's probability


class GreedyModel:
    """A `Transducer` and what greedy decoding derives from it.

    Attributes:
        model: The transducer.
        confidence: Whether `best_tokens` computes the confidence.
        blank: Index of the blank.
        durations: Durations of TDT in frames; () for RNN-T.
        longest_jump: Most frames that one token can advance.
        duration_table: `durations` as an int64 tensor; None for RNN-T.
    """

    def __init__(
        self, model: Any, confidence: bool = False, device: torch.device | None = None
    ) -> None:
        """Wrap `model`.

        Args:
            model: A `Transducer`.
            confidence: Whether `best_tokens` returns confidences.
            device: Device of the encoder frames.
        """
        self.model = model
        self.confidence = confidence
        self.blank = model.blank
        self.durations = tuple(getattr(model, "durations", ()))
        self.longest_jump = max((1, *self.durations))
        self.duration_table: Tensor | None = None
        if self.durations:
            self.duration_table = torch.tensor(self.durations, device=device)

    def best_tokens(self, encoded: Tensor, predicted: Tensor) -> BestTokens:
        """The best tokens of one joint call.

        Args:
            encoded: Frames (..., E).
            predicted: Predictor outputs (..., P) whose leading dimensions broadcast with those of
                `encoded`.

        Raises:
            ValueError: `join` returns logits of an unexpected shape.
        """
        logits = self.model.join(encoded, predicted)
        V = logits.shape[-1] - len(self.durations)
        if logits.shape[:-1] != encoded.shape[:-1] or self.blank >= V:
            least = self.blank + len(self.durations)
            wanted = f"logits {(*encoded.shape[:-1], f'more than {least}')}"
            expect(False, "model.join", wanted, tuple(logits.shape))
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logp = logits[..., :V].log_softmax(-1, dtype=dtype)  # durations have their own softmax
        score, token = logp.max(-1)
        confidence = score.exp().float() if self.confidence else None
        blank = (token == self.blank).long()
        if self.duration_table is None:
            jump = blank
        else:
            duration_logp = logits[..., V:].log_softmax(-1, dtype=dtype)
            duration_score, index = duration_logp.max(-1)
            jump = torch.maximum(self.duration_table[index], blank)
            score = score + duration_score
        return BestTokens(token, jump, score.float(), confidence)

    def initial_carry(self, encoded: Tensor) -> Carry:
        """The carry of the utterances of encoded (B, T, E) before their first frame.

        Raises:
            ValueError: `model.predict` returns no pair, or tensors that are not batch first.
        """
        B = len(encoded)
        blank = torch.full((B,), self.blank, dtype=torch.int64, device=encoded.device)
        result = self.model.predict(blank, None)
        is_pair = isinstance(result, tuple | list) and len(result) == 2
        wanted = "a pair of predictions (B, P) and the state of the predictor, or None"
        many = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        expect(is_pair, "model.predict", wanted, many)
        predicted, state = result
        sizes = {tensor.shape[:1] for tensor in state_tensors((predicted, state))}
        wanted = f"tensors with B={B} as first dimension"
        got = sorted(map(tuple, sizes))
        expect(sizes == {(B,)}, "model.predict", wanted, got, "Transpose its state.")
        return Carry(predicted, state, torch.zeros_like(blank), torch.zeros_like(blank))


class LoopState(NamedTuple):
    """Decoder state of B utterances between two turns of the loop."""

    time: Tensor  # (B,) int64, the frame to decode next
    symbols: Tensor  # (B,) int64, labels emitted on that frame so far
    scores: Tensor  # (B,) float32, log-probability in nats of the path so far
    predicted: Tensor  # (B, P)
    state: Any  # of the predictor


# From the model, encoded (B, T, E), lengths (B,), the state before a turn and the options to the
# state with clocks and scores advanced and the predictor unchanged, and at most one label for each
# utterance. Nothing in it is sent to the host, and no size depends on a result.
JointStep = Callable[
    [GreedyModel, Tensor, Tensor, LoopState, GreedyOptions], tuple[LoopState, Emissions]
]


def initial_state(carry: Carry) -> LoopState:
    """The loop state before the first turn."""
    zero = torch.zeros_like(carry.ahead)
    return LoopState(
        time=carry.ahead,
        symbols=zero,
        scores=zero.float(),
        predicted=carry.predicted,
        state=carry.state,
    )


def emit(
    loop_state: LoopState,
    frame: Tensor,
    scores: Tensor,
    best: BestTokens,
    emitted: Tensor,
    options: GreedyOptions,
) -> tuple[LoopState, Emissions]:
    """The result of a `JointStep`, from the labels that it has found.

    Args:
        loop_state: The state before the turn.
        frame: (B,) int64, the frame after the blanks of the turn.
        scores: (B,) float32, scores up to that frame.
        best: The best token on that frame, (B,) each.
        emitted: (B,) bool, whether this token is a label of the utterance.
        options: Uses `max_symbols`.
    """
    symbols = loop_state.symbols * (frame == loop_state.time) + emitted
    # a frame with max_symbols labels ends without a blank
    full = (best.jump == 0) & (symbols >= options.max_symbols)
    time = frame + (best.jump + full) * emitted
    advanced = loop_state._replace(
        time=time,
        symbols=symbols * (time == frame),
        scores=scores + best.score.masked_fill(~emitted, 0),
    )
    return advanced, Emissions(best.token, frame, best.jump, emitted, best.confidence)


def predictor_step(greedy: GreedyModel, loop_state: LoopState, step: Emissions) -> LoopState:
    """Advance the predictor for utterances that emitted; the others keep their state.

    Args:
        greedy: The model.
        loop_state: The state after the joint's step.
        step: The labels of this step.
    """
    after = greedy.model.predict(step.labels, loop_state.state)
    before = loop_state.predicted, loop_state.state
    predicted, state = select_state(step.emitted, after, before)
    return loop_state._replace(predicted=predicted, state=state)


def decode_by_turns(
    joint_step: JointStep,
    greedy: GreedyModel,
    encoded: Tensor,
    lengths: Tensor,
    carry: Carry,
    options: GreedyOptions,
) -> Hypotheses:
    """Greedy hypotheses by turns of `joint_step` and `predictor_step`.

    The host reads the device once in a turn: whether an utterance has frames left, and whether one
    has emitted a label.

    Args:
        joint_step: The strategy.
        greedy: The model.
        encoded: (B, T, E).
        lengths: (B,) int64, valid frames.
        carry: State before the first frame.
        options: Options of the strategy.
    """
    loop_state = initial_state(carry)
    steps = list[Emissions]()
    active = encoded.shape[1] > 0
    while active:
        loop_state, step = joint_step(greedy, encoded, lengths, loop_state, options)
        flags = torch.stack([loop_state.time < lengths, step.emitted])
        active, emitted = flags.any(1).tolist()
        if emitted:
            steps.append(step._replace(frames=step.frames + carry.frames))
            loop_state = predictor_step(greedy, loop_state, step)
    after = carry.after(loop_state.time, lengths, loop_state.predicted, loop_state.state)
    return Hypotheses.from_steps(steps, loop_state.scores, options.strategy, after)
