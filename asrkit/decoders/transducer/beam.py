"""Batched, time-synchronous beam search for transducers.

A hypothesis is a label sequence; the probabilities of its alignments are summed.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.decoders.beams import (
    Fusion,
    LanguageModel,
    check_lm,
    check_lm_scores,
    check_weights,
    check_width,
    longer_key,
)
from asrkit.decoders.hypotheses import Emissions, Hypotheses, check_batch
from asrkit.decoders.states import map_state, select_state
from asrkit.decoders.transducer import Transducer
from asrkit.decoders.transducer.beam_sets import (
    HypothesisSet,
    join_sets,
    merge,
    set_at,
    shift_sets,
)
from asrkit.decoders.transducer.steps import check_rules, first_prediction, vocabulary
from asrkit.runtime import eager


def check_beam(
    model: Transducer,
    width: int,
    nbest: int,
    max_symbols: int,
    lm: LanguageModel | None,
    lm_weight: float,
    label_bonus: float,
) -> None:
    """ValueError for arguments of `transducer_beam` that do not fit.

    Args:
        model: A `Transducer`.
        width: Hypotheses in a set.
        nbest: Hypotheses in the result, at most `width`.
        max_symbols: Most labels on one frame.
        lm: The language model, or None.
        lm_weight: Its weight.
        label_bonus: Added per label.
    """
    check_rules(model, max_symbols)
    check_width(width, nbest)
    check_lm(lm)
    check_weights(lm_weight=lm_weight, label_bonus=label_bonus)


@eager
def transducer_beam(  # noqa: PLR0913 - all options of beam search, keyword-only
    model: Transducer,
    encoded: Tensor,
    lengths: Tensor,
    *,
    width: int = 4,
    nbest: int = 1,
    max_symbols: int = 10,
    lm: LanguageModel | None = None,
    lm_weight: float = 0.3,
    label_bonus: float = 0.0,
) -> Hypotheses:
    """The best label sequences of a batch, RNN-T or TDT, as `Hypotheses`.

    The search: on each frame there are rounds. Round s holds at most `width` hypotheses with s
    labels on this frame, and one joint call serves those of the whole batch. Their blanks go into
    the set of the frame that they lead to, their labels into the next round; labels of TDT (arXiv
    2304.06795) with a duration go into the set of the frame that they jump to. A set keeps the
    `width` best, merged by prefix. A hypothesis is dropped from a frame when `width` hypotheses in
    one set ahead are likelier, since probabilities only fall (with a label_bonus they may rise, and
    the rule is a guess); what it would have added to one of them is missing there. After
    `max_symbols` labels on a frame only blank may follow. A jump past the end ends there; a blank
    of duration 0 moves on 1 frame. `transducer_beam_reference` is the same search in plain loops.

    Args:
        model: Used in the mode it is in: call model.eval() first.
        encoded: (B, T, E) encoder frames.
        lengths: (B,) valid frames; 0 is allowed.
        width: Hypotheses in a set.
        nbest: Hypotheses per utterance in the result.
        max_symbols: Most labels on one frame.
        lm: Language model for shallow fusion.
        lm_weight: Weight of its log-probability, of labels and end of sentence, in the ranking.
        label_bonus: Added per label. Every label costs what `lm` says, so texts come out short
            without it: begin with lm_weight times the nats that a label costs.

    Returns:
        The best; `alternatives` are the second to nbest-th. `scores` are log-probabilities
        in nats, summed over the alignments that the beam kept (exact where `width` exceeds the
        number of label sequences there are), plus the terms of fusion. `frames` and `durations` are
        of one alignment: where two meet, that of the likelier one. Hypotheses that do not exist are
        empty with score -inf, as is the best itself where a NaN among the logits or an impossible
        blank leaves nothing.

    Raises:
        ValueError: An argument does not fit, or the model does not follow the protocol.
    """
    longest = check_batch(encoded, lengths, "B T E", "encoded")
    check_beam(model, width, nbest, max_symbols, lm, lm_weight, label_bonus)
    if not lm_weight:
        lm = None
    with torch.inference_mode():
        fusion = Fusion(lm, lm_weight, label_bonus)
        search = Search(model, fusion, encoded[:, :longest], width, max_symbols)
        best = search.run(lengths.long())
        best = map_state(lambda part: part[:, :nbest], best)
        first, *rest = search.trace(best)
    return replace(first, alternatives=tuple(rest))


class PrefixState(NamedTuple):
    """What decoding needs to extend a prefix, batch first."""

    predicted: Tensor
    state: Any  # of the predictor
    lm: Any  # state of the language model
    lm_scores: Tensor | None  # (..., V), what it adds to the next label


class JointScores(NamedTuple):
    """Log-probabilities in nats of what may follow each hypothesis on a frame."""

    blank: Tensor  # (B, K, 1)
    blank_hops: Tensor  # (B, K, hops), of the blank's durations
    labels: Tensor  # (B, K, k), of the k best labels, fusion included
    token: Tensor  # (B, K, k) int64, these labels
    label_hops: Tensor  # (B, K, moves), of a label's durations


class Search:
    """One search of one batch.

    Sets are small: (B, K) numbers per utterance. What is wide (logits, states) is computed only for
    the n of B K rows that are alive.

    Attributes:
        K: Width of the beam.
        rounds: Rounds on one frame: one per label, and one for the last blank.
        hops: Frames that a blank may move on, ascending; `hops[-1]` is R.
        moves: Frames that a label may move on; [0] for RNN-T.
        blank_hop_logits, label_hop_logits: Which duration makes which hop, as logs.
        history: One tensor (B, moves K, 2) of (parent node, label) per round with labels.
        frames: The frame of each of these rounds.
        pool: Prefix states in `turns` B K cells; each round writes B K of them, in turn.
    """

    def __init__(
        self, model: Transducer, fusion: Fusion, encoded: Tensor, width: int, max_symbols: int
    ) -> None:
        """Prepare a search.

        Args:
            model: The transducer.
            fusion: The language model and its weights.
            encoded: (B, T, E).
            width: Hypotheses in a set, K.
            max_symbols: Most labels on one frame.
        """
        self.model = model
        self.fusion = fusion
        self.encoded = encoded
        self.K = width
        self.rounds = max_symbols + 1
        self.device = encoded.device
        self.dtype = torch.promote_types(encoded.dtype, torch.float32)
        self.durations = tuple(getattr(model, "durations", ()))
        self.hops = sorted({1, *self.durations} - {0})
        self.moves = [0]
        if self.durations:
            self.moves += self.hops
        self.slots = torch.tensor(self.hops, device=self.device) - 1
        blank_durations = [max(1, duration) for duration in self.durations]
        self.blank_hop_logits = self._hop_logits(self.hops, blank_durations)
        self.label_hop_logits = self._hop_logits(self.moves, self.durations)
        self.history = list[Tensor]()
        self.frames = list[int]()
        self.pool: Any = None
        self.turns = (self.hops[-1] + 1) * self.rounds + 1
        self.turn = 0

    def _hop_logits(self, hops: Sequence[int], durations: Sequence[int]) -> Tensor:
        """(hops, durations): 0 where the duration makes the hop, else -inf."""
        wanted = torch.tensor(hops, device="cpu")[:, None]
        made = torch.tensor(durations, device="cpu")
        table = torch.zeros(len(hops), len(durations), dtype=self.dtype, device="cpu")
        return table.masked_fill(made != wanted, -torch.inf).to(self.device)

    def run(self, lengths: Tensor) -> HypothesisSet:
        """The K best hypotheses of every utterance, (B, K), from lengths (B,)."""
        B, T, _ = self.encoded.shape
        R = self.hops[-1]
        ends = set(lengths.tolist())
        now = self.start()
        ahead = self.empty(B, R, self.K)  # the sets of the next R frames
        final = self.empty(B, self.K)
        for t in range(T + 1):
            if t in ends:  # hypotheses that jumped past the end have ended too
                arrived = [now]
                arrived += [set_at(ahead, r) for r in range(R)]
                best = self.finish(join_sets(arrived))
                final = select_state(lengths == t, best, final)
            if t == T:
                break
            ended = (lengths <= t)[:, None]
            now = now.without(ended)
            ahead = self.frame(t, now, ahead)
            now = set_at(ahead, 0)
            last = self.empty(B, 1, self.K)
            ahead = map_state(shift_sets, ahead, last)
        return final

    def frame(self, t: int, now: HypothesisSet, ahead: HypothesisSet) -> HypothesisSet:
        """The sets ahead (B, R, K) after all rounds of frame t.

        Args:
            t: The frame.
            now: (B, K), the hypotheses that have reached it.
            ahead: (B, R, K), the sets before.
        """
        for s in range(self.rounds):
            # hypotheses overtaken by K hypotheses of one set ahead are dropped
            least_ahead = ahead.score[..., -1].amax(1, keepdim=True)
            now = now.without(now.score <= least_ahead)
            alive = (now.score > -torch.inf).flatten()
            rows = alive.nonzero()[:, 0]  # the GPU waits for Python here, once a round
            if not len(rows):
                break
            now, prefix = self.advance_prefixes(now, rows, s)
            scores = self.joint_scores(t, rows, prefix)
            blank_scores = scores.blank + scores.blank_hops
            arrivals = [
                map_state(lambda part: part[:, self.slots], ahead),
                self.after_blank(now, blank_scores),
            ]
            if s + 1 < self.rounds:
                children = self.after_label(t, now, scores)  # (B, moves, K)
                now = set_at(children, 0)
                if len(self.moves) > 1:
                    jumped = map_state(lambda part: part[:, 1:], children)
                    arrivals.append(jumped)
            merged = merge(join_sets(arrivals), self.K)
            ahead = map_state(lambda old, new: old.index_copy(1, self.slots, new), ahead, merged)
        return ahead

    def joint_scores(self, t: int, rows: Tensor, prefix: PrefixState) -> JointScores:
        """Scores of blank and the best labels on frame t.

        Args:
            t: The frame.
            rows: (n,) which of the B K hypotheses are alive.
            prefix: Their states, (n, ...).
        """
        frames = self.encoded[rows // self.K, t]
        logits = self.model.join(frames, prefix.predicted)  # (n, V + durations)
        V = vocabulary(logits, frames, self.model.blank, self.durations)
        logp = logits[..., :V].log_softmax(-1, dtype=self.dtype)
        blank = logp[:, self.model.blank, None]
        blank_index = torch.tensor(self.model.blank, device=self.device)
        labels = logp.index_fill(1, blank_index, -torch.inf)
        if prefix.lm_scores is not None:
            check_lm_scores(prefix.lm_scores, V)
            labels = labels + prefix.lm_scores
        best, token = labels.topk(min(self.K, V))  # no more than K of one prefix can be kept
        label_hops = torch.zeros_like(blank)
        blank_hops = label_hops
        if self.durations:
            duration_logp = logits[:, V:].log_softmax(-1, dtype=self.dtype)
            duration_logp = duration_logp[:, None]  # (n, 1, durations)
            label_hops = (duration_logp + self.label_hop_logits).logsumexp(-1)
            blank_hops = (duration_logp + self.blank_hop_logits).logsumexp(-1)
        compact = JointScores(
            blank=blank,
            blank_hops=blank_hops,
            labels=best + self.fusion.bonus,
            token=token,
            label_hops=label_hops,
        )
        return map_state(lambda part: self._spread(rows, part), compact)

    def _spread(self, rows: Tensor, part: Tensor) -> Tensor:
        """(B, K, k) with `part` (n, k) in its `rows`; -inf or 0 for hypotheses not there."""
        fill: float = 0
        if part.is_floating_point():
            fill = -torch.inf
        width = part.shape[1]
        places = len(self.encoded) * self.K
        full = part.new_full((places, width), fill)
        return full.index_copy_(0, rows, part).view(-1, self.K, width)

    def after_blank(self, now: HypothesisSet, score: Tensor) -> HypothesisSet:
        """The same prefixes in the sets that a blank leads to; score (B, K, hops) is its cost."""
        copies = now.repeated(len(self.hops))
        after_score = copies.score + score.transpose(1, 2)
        return copies._replace(score=after_score)

    def after_label(self, t: int, now: HypothesisSet, scores: JointScores) -> HypothesisSet:
        """The K best prefixes with one more label, for each of its moves: (B, moves, K).

        Args:
            t: The frame.
            now: (B, K) the prefixes; they are written into the history.
            scores: Of blank and labels.
        """
        moves = len(self.moves)
        label_scores = now.score[..., None] + scores.labels
        hop_scores = scores.label_hops.transpose(1, 2)
        extended = label_scores[:, None] + hop_scores[..., None]  # (B, moves, K, k)
        score, place = extended.flatten(2).topk(self.K)
        labels_each = scores.token.shape[-1]
        parents = now.repeated(moves).gather(place // labels_each)
        tokens = scores.token.flatten(1)[:, None]
        label = tokens.expand(-1, moves, -1).gather(-1, place)
        size = moves * self.K
        index = torch.arange(size, device=self.device).view(1, moves, self.K)
        node = index + size * len(self.history)
        step = torch.stack([parents.node, label], -1)
        self.history.append(step.flatten(1, 2))
        self.frames.append(t)
        return HypothesisSet(
            score=score,
            key=longer_key(parents.key, label),
            length=parents.length + 1,
            node=node.expand_as(label),
            cell=parents.cell,
            label=label,
        )

    def advance_prefixes(
        self, now: HypothesisSet, rows: Tensor, s: int
    ) -> tuple[HypothesisSet, PrefixState]:
        """`now` with new cells, and the prefix states (n, ...) of its `rows`, stored in them.

        The predictor and the language model take the labels they have not had yet. States stay
        where they are while hypotheses move: sets hold indices of cells. A set is read at most R
        frames after it was written, so the cells of R + 1 frames suffice and are used in turn.

        Args:
            now: (B, K).
            rows: (n,) which of the B K hypotheses are alive.
            s: The round.
        """
        cell = now.cell.flatten()[rows]
        prefix = map_state(lambda pool: pool[cell], self.pool)
        label = now.label.flatten()[rows]
        if s > 0:
            prefix = self.predict(label, prefix)
        elif len(self.moves) > 1:  # TDT: a label may have jumped here
            new = (label >= 0).nonzero()[:, 0]
            if len(new):
                before = map_state(lambda part: part[new], prefix)
                after = self.predict(label[new], before)
                prefix = map_state(lambda old, own: old.index_copy(0, new, own), prefix, after)
        self.turn = (self.turn + 1) % self.turns
        cells = now.cell.numel()
        own_cells = torch.arange(cells, device=self.device) + self.turn * cells
        written = own_cells[rows]
        map_state(lambda pool, part: pool.index_copy_(0, written, part), self.pool, prefix)
        no_label = torch.full_like(now.label, -1)
        moved = now._replace(cell=own_cells.view_as(now.cell), label=no_label)
        return moved, prefix

    def predict(self, label: Tensor, prefix: PrefixState) -> PrefixState:
        """The prefix states (n, ...) after one more label (n,) each."""
        predicted, state = self.model.predict(label, prefix.state)
        lm = self.fusion.advance(prefix.lm, label)
        lm_scores = self.fusion.lm_scores(lm)
        return PrefixState(predicted, state, lm, lm_scores)

    def start(self) -> HypothesisSet:
        """The empty prefix of every utterance: (B, K), of which the first place is taken."""
        B = len(self.encoded)
        K = self.K
        blank = torch.full((B,), self.model.blank, device=self.device)
        predicted, state = first_prediction(self.model, blank)
        lm = None
        if self.fusion.lm is not None:
            lm = self.fusion.lm.start(B)
        lm_scores = self.fusion.lm_scores(lm)
        first = PrefixState(predicted, state, lm, lm_scores)
        cells = self.turns * B * K
        self.pool = map_state(lambda part: part.new_zeros(cells, *part.shape[1:]), first)
        first_places = slice(0, B * K, K)
        map_state(lambda pool, part: pool[first_places].copy_(part), self.pool, first)
        now = self.empty(B, K)
        now.score[:, 0] = 0
        cell = torch.arange(B * K, device=self.device)
        return now._replace(cell=cell.view(B, K))

    def finish(self, arrived: HypothesisSet) -> HypothesisSet:
        """The K best of all that reached the end, with the score of the end of the sentence."""
        best = merge(arrived, self.K)
        lm = self.fusion.lm
        if lm is None:
            return best
        cell = best.cell.flatten()
        states = map_state(lambda pool: pool[cell], self.pool.lm)
        label = best.label.flatten()
        after_label = lm.advance(states, label.clamp(min=0))
        states = select_state(label >= 0, after_label, states)
        end = self.fusion.weight * lm.final(states)
        total = best.score + end.view_as(best.score)
        score, place = total.topk(self.K)
        return best.gather(place)._replace(score=score)

    def trace(self, best: HypothesisSet) -> list[Hypotheses]:
        """Hypotheses of (B, n), one for each of the n.

        All walk back through the history together, a label at a time.
        """
        width = len(self.moves) * self.K
        is_empty = best.score == -torch.inf
        node = best.node.masked_fill(is_empty, -1)
        B = len(node)
        rows = torch.arange(B, device=self.device)[:, None]
        before_first = best.node.new_full((B, 1, 2), -1)  # node -1 is the last entry
        history = torch.cat([*self.history, before_first], 1)
        frames = torch.tensor([*self.frames, -1], device=self.device)
        moves = torch.tensor(self.moves, device=self.device)
        steps = list[Emissions]()
        for _ in range(int(best.length.max())):
            parent, label = history[rows, node].unbind(-1)
            frame = frames[node // width]
            duration = moves[node % width // self.K]
            steps.append(Emissions(label, frame, duration, node >= 0))
            node = parent
        steps.reverse()
        ranked = []
        for n in range(node.shape[1]):
            column = [map_state(lambda part, n=n: part[:, n], step) for step in steps]
            score = best.score[:, n].float()
            ranked.append(Hypotheses.from_steps(column, score, f"beam, width {self.K}"))
        return ranked

    def empty(self, *shape: int) -> HypothesisSet:
        """A set of this shape that holds nothing."""
        zero = torch.zeros(shape, dtype=torch.int64, device=self.device)
        none = zero - 1
        score = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        return HypothesisSet(
            score=score,
            key=zero,
            length=zero,
            node=none,
            cell=zero,
            label=none,
        )
