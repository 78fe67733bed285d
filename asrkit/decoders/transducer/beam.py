"""Beam search for transducers, batched and time-synchronous: a hypothesis is a label sequence, its
alignments are summed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asrkit.decoders.hypotheses import Hypotheses, Step, check
from asrkit.decoders.states import map_state, select_state
from asrkit.decoders.transducer import Transducer
from asrkit.decoders.transducer.steps import check_rules, first_prediction, vocabulary
from asrkit.runtime import eager
from asrkit.shapes import MOST, expect, whole

MIX = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: multiplying by it loses nothing
LOW = (1 << 35) - 1
EMPTY = {True: -torch.inf, False: 0}  # floats and integers of hypotheses that are not there


class LanguageModel(Protocol):
    """All that shallow fusion asks of a language model; `NGram` is one. A state is a nest of
    tensors, batch first.
    """

    def start(self, B: int) -> Any:
        """States of B empty sentences."""

    def scores(self, states: Any) -> Tensor:
        """Log-probability in nats of every next token: (B, V). What it holds for blank is not used."""

    def advance(self, states: Any, tokens: Tensor) -> Any:
        """States after one more token each, (B,)."""

    def final(self, states: Any) -> Tensor:
        """Log-probability in nats that the sentence ends here: (B,)."""


def check_beam(
    model: Transducer,
    width: int,
    nbest: int,
    max_symbols: int,
    lm_weight: float,
    label_bonus: float,
) -> None:
    """ValueError for a beam that cannot be searched."""
    check_rules(model, max_symbols)
    expect(whole(width, 1, MOST), "width", f"1 to {MOST} hypotheses", repr(width))
    expect(whole(nbest, 1, width), "nbest", f"1 to width={width} hypotheses", repr(nbest))
    for name, value in (("lm_weight", lm_weight), ("label_bonus", label_bonus)):
        expect(
            isinstance(value, int | float) and math.isfinite(value),
            name,
            "a finite number",
            repr(value),
        )


@eager
def transducer_beam(
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
    """The best label sequence of encoded (B, T, E) with lengths (B,) in frames, which may be 0;
    RNN-T and TDT.

    Best first: `alternatives` are the second to nbest-th. Where fewer exist they are empty and
    score -inf; so is the best itself where a NaN among the logits, or a blank that is impossible,
    leaves nothing. `scores` are log-probabilities in nats of the label sequence, summed over the
    alignments that the beam kept; exact where `width` is more than the number of label sequences
    there are. With fusion lm_weight * (log-probability of the labels and of the end by `lm`) +
    label_bonus * labels is added, and ranks are by the sum. Every label costs what `lm` says of it,
    so without a bonus to make up for that, texts come out short: begin with label_bonus near
    lm_weight * the nats a label costs. `frames` and `durations` are of one alignment: wherever two
    meet, that of the likelier one goes on.

    A frame is a row of rounds. In round s stand at most `width` hypotheses with s labels on this
    frame; one call of the joint serves those of the whole batch. Their blanks go into the set of
    the frame they lead to, their labels to the next round; of TDT (arXiv 2304.06795) labels with a
    duration go into the set of the frame that they jump to. A set holds the `width` best, merged by
    prefix. No hypothesis goes on from a frame when `width` in one set ahead are likelier, since
    probabilities only fall (with a label_bonus they may rise: then it is a guess); what it would
    have added to one of them is missing there. After `max_symbols` labels on a frame only blank may
    follow. A jump past the end ends there, a blank of duration 0 moves 1 frame.
    `transducer_beam_reference` is the same search in plain loops.
    """
    longest = check(encoded, lengths, "B T E", "encoded")
    check_beam(model, width, nbest, max_symbols, lm_weight, label_bonus)
    with torch.inference_mode():
        fusion = Fusion(lm if lm_weight else None, lm_weight, label_bonus)
        search = Search(model, fusion, encoded[:, :longest], width, max_symbols)
        best = search.run(lengths.long())
        first, *rest = search.trace(map_state(lambda part: part[:, :nbest], best))
    return replace(first, alternatives=tuple(rest))


class Fusion(NamedTuple):
    """What is added to the model's scores."""

    lm: LanguageModel | None
    weight: float
    bonus: float

    def lm_scores(self, states: Any) -> Tensor | None:
        """What the next label adds, (B, V), or None."""
        return None if self.lm is None else self.weight * self.lm.scores(states)


class Kept(NamedTuple):
    """n hypotheses of each utterance, likeliest first, all (B, ..., n). A score of -inf marks an
    empty place.
    """

    score: Tensor  # float
    key: Tensor  # int64, hash of the prefix
    length: Tensor  # int64, labels
    node: Tensor  # int64, where the last label stands in the history; -1 before the first
    cell: Tensor  # int64, where the memory of the prefix, or of all but its last label, stands
    label: Tensor  # int64, the last label if that memory has not heard it yet, else -1

    def gather(self, place: Tensor) -> "Kept":
        """Those at `place` (B, ..., m)."""
        return Kept(*(part.gather(-1, place) for part in self))


class Memory(NamedTuple):
    """What must be known of a prefix to go on, batch first."""

    predicted: Tensor
    state: Any  # of the predictor
    lm: Any  # state of the language model
    lm_scores: Tensor | None  # (..., V), what it adds to the next label


def join_sets(sets: Iterable[Kept]) -> Kept:
    """All hypotheses of several sets as one set, unmerged."""
    return map_state(lambda *parts: torch.cat(parts, -1), *sets)


def merge(kept: Kept, width: int) -> Kept:
    """The `width` best label sequences of (B, ..., n): probabilities of equal ones are added, the
    likelier one stays.

    Two prefixes are equal if length and hash are: 64 bits, so a million comparisons go wrong once
    in 10^13 times.
    """
    mine, other = kept.score[..., :, None], kept.score[..., None, :]
    same = (kept.key[..., :, None] == kept.key[..., None, :]) & (
        kept.length[..., :, None] == kept.length[..., None, :]
    )
    total = torch.where(same, other, -torch.inf).logsumexp(-1)
    earlier = torch.ones_like(same).tril(-1)
    beaten = total.isnan() | (same & ((other > mine) | ((other == mine) & earlier))).any(-1)
    score, place = total.masked_fill(beaten, -torch.inf).topk(width)
    return kept.gather(place)._replace(score=score)


class Search:
    """One search of one batch: B utterances, K = width, hops of h >= 1 frames, R the longest.

    Sets are small, (B, K) numbers; what is wide (logits, states) is computed for the n rows of B K
    that are alive.
    """

    def __init__(
        self, model: Transducer, fusion: Fusion, encoded: Tensor, width: int, max_symbols: int
    ) -> None:
        self.model, self.fusion, self.encoded, self.K, self.rounds = (
            model,
            fusion,
            encoded,
            width,
            max_symbols + 1,
        )
        self.device, self.dtype = encoded.device, torch.promote_types(encoded.dtype, torch.float32)
        self.durations = tuple(getattr(model, "durations", ()))
        self.hops = sorted({1, *self.durations} - {0})
        self.moves = (
            [0, *self.hops] if self.durations else [0]
        )  # what a label may do; of RNN-T it stays
        self.slots = torch.tensor(self.hops, device=self.device) - 1
        self.by_label = self.table(self.moves, self.durations)
        self.by_blank = self.table(self.hops, [max(1, duration) for duration in self.durations])
        self.history, self.frames = (
            list[Tensor](),
            list[int](),
        )  # a round each: (B, moves * K, 2) of parent and label; frame
        self.pool: Any = None  # memories (turns B K, ...); a round writes B K of them
        self.turns, self.turn = (self.hops[-1] + 1) * self.rounds + 1, 0

    def table(self, hops: Sequence[int], durations: Sequence[int]) -> Tensor:
        """Log of which duration makes which hop, (hops, durations): 0 or -inf."""
        hits = [[0.0 if duration == hop else -torch.inf for duration in durations] for hop in hops]
        return torch.tensor(hits, dtype=self.dtype, device=self.device)

    def run(self, lengths: Tensor) -> Kept:
        """The K best of every utterance, (B, K)."""
        (B, T, _), R, ends = self.encoded.shape, self.hops[-1], set(lengths.tolist())
        now, ahead, final = self.start(), self.empty(B, R, self.K), self.empty(B, self.K)
        for t in range(T + 1):
            if t in ends:  # what lies beyond the end is there too
                final = select_state(
                    lengths == t,
                    self.finish(join_sets([now, *(self.at(ahead, r) for r in range(R))])),
                    final,
                )
            if t < T:
                now = now._replace(
                    score=now.score.masked_fill((lengths <= t)[:, None], -torch.inf)
                )  # padding is not read
                ahead = self.frame(t, now, ahead)
                now = self.at(ahead, 0)
                ahead = map_state(
                    lambda part, new: torch.cat([part[:, 1:], new], 1),
                    ahead,
                    self.empty(B, 1, self.K),
                )
        return final

    def frame(self, t: int, now: Kept, ahead: Kept) -> Kept:
        """The sets ahead (B, R, K) after all rounds of a frame, which `now` (B, K) have reached."""
        for s in range(self.rounds):
            bar = ahead.score[..., -1].amax(
                1, keepdim=True
            )  # (B, 1), where K hypotheses of one set are ahead
            now = now._replace(score=now.score.masked_fill(now.score <= bar, -torch.inf))
            rows = (
                (now.score > -torch.inf).flatten().nonzero()[:, 0]
            )  # the GPU waits for Python here, once a round
            if not len(rows):
                break
            now, memory = self.remember(now, rows, s)
            blank, by_blank, best, token, by_label = self.read(t, rows, memory)
            into = [
                map_state(lambda part: part[:, self.slots], ahead),
                self.stay(now, blank + by_blank),
            ]
            if s + 1 < self.rounds:
                children = self.extend(t, now, best, token, by_label)  # (B, moves, K)
                now = self.at(children, 0)
                if len(self.moves) > 1:
                    into.append(map_state(lambda part: part[:, 1:], children))
            merged = merge(join_sets(into), self.K)
            ahead = map_state(lambda old, new: old.index_copy(1, self.slots, new), ahead, merged)
        return ahead

    def read(self, t: int, rows: Tensor, memory: Memory) -> list[Tensor]:
        """Scores of blank (B, K, 1) and its hops, of the k best labels (B, K, k), these labels, and
        their moves.
        """
        heard = self.encoded[rows // self.K, t]
        logits = self.model.join(heard, memory.predicted)  # (n, V + durations)
        V = vocabulary(logits, heard, self.model.blank, self.durations)
        logp = logits[..., :V].log_softmax(-1, dtype=self.dtype)
        blank = logp[:, self.model.blank, None]
        others = logp.index_fill(1, torch.tensor(self.model.blank, device=self.device), -torch.inf)
        if memory.lm_scores is not None:
            size = memory.lm_scores.shape[-1]
            expect(
                size == V, "lm", f"scores of V={V} tokens", size, "Blank has a place among them."
            )
            others = others + memory.lm_scores
        best, token = others.topk(min(self.K, V))  # no more than K of one prefix can be kept
        if self.durations:
            spread = logits[:, V:].log_softmax(-1, dtype=self.dtype)[:, None]
            by_label, by_blank = (
                (spread + self.by_label).logsumexp(-1),
                (spread + self.by_blank).logsumexp(-1),
            )
        else:
            by_label = by_blank = torch.zeros_like(blank)
        found = [blank, by_blank, best + self.fusion.bonus, token, by_label]
        whole = [
            part.new_full(
                (self.encoded.shape[0] * self.K, part.shape[1]), EMPTY[part.is_floating_point()]
            )
            for part in found
        ]
        pairs = zip(whole, found, strict=True)
        return [
            full.index_copy_(0, rows, part).view(-1, self.K, part.shape[1]) for full, part in pairs
        ]

    def stay(self, now: Kept, score: Tensor) -> Kept:
        """The same prefixes after a blank, in the sets that it leads to; score (B, K, hops) is what
        it costs.
        """
        spread = map_state(lambda part: part[:, None].expand(-1, len(self.hops), -1), now)
        return spread._replace(score=spread.score + score.transpose(1, 2))

    def extend(self, t: int, now: Kept, best: Tensor, token: Tensor, by_label: Tensor) -> Kept:
        """The K best prefixes with one more label for each of its moves, (B, moves, K). Written
        into the history.
        """
        extended = (now.score[..., None] + best)[:, None] + by_label.transpose(1, 2)[
            ..., None
        ]  # (B, moves, K, k)
        score, place = extended.flatten(2).topk(self.K)
        which = place // token.shape[-1]
        parents = map_state(lambda part: part[:, None].expand(-1, len(self.moves), -1), now).gather(
            which
        )
        label = token.flatten(1)[:, None].expand(-1, len(self.moves), -1).gather(-1, place)
        key = (parents.key ^ (label + 1)) * MIX
        key = key ^ ((key >> 29) & LOW)
        size = label[0].numel()
        node = torch.arange(size, device=self.device).view(1, *label.shape[1:]) + size * len(
            self.history
        )
        self.history.append(torch.stack([parents.node, label], -1).flatten(1, 2))
        self.frames.append(t)
        return Kept(score, key, parents.length + 1, node.expand_as(label), parents.cell, label)

    def remember(self, now: Kept, rows: Tensor, s: int) -> tuple[Kept, Memory]:
        """The memories of `rows` of `now`, (n, ...), stored in new cells. The predictor hears
        labels that are new.

        Memories stay where they are while hypotheses move: sets hold numbers of cells. A set is
        read at most R frames after it was written, so the cells of R + 1 frames suffice and are
        used in turn.
        """
        memory = map_state(lambda pool: pool[now.cell.flatten()[rows]], self.pool)
        label = now.label.flatten()[rows]
        if s > 0:
            memory = self.predict(label, memory)
        elif len(self.moves) > 1:  # TDT: a label may have jumped here
            new = (label >= 0).nonzero()[:, 0]
            if len(new):
                after = self.predict(label[new], map_state(lambda part: part[new], memory))
                memory = map_state(
                    lambda part, heard: part.index_copy(0, new, heard), memory, after
                )
        self.turn = (self.turn + 1) % self.turns
        cell = torch.arange(now.cell.numel(), device=self.device) + self.turn * now.cell.numel()
        map_state(lambda pool, part: pool.index_copy_(0, cell[rows], part), self.pool, memory)
        return now._replace(
            cell=cell.view_as(now.cell), label=torch.full_like(now.label, -1)
        ), memory

    def predict(self, label: Tensor, memory: Memory) -> Memory:
        """The memories (n, ...) after one more label each (n,)."""
        predicted, state = self.model.predict(label, memory.state)
        lm = None if self.fusion.lm is None else self.fusion.lm.advance(memory.lm, label)
        return Memory(predicted, state, lm, self.fusion.lm_scores(lm))

    def start(self) -> Kept:
        """The empty prefix (B, K), of which one place is taken."""
        B, K = len(self.encoded), self.K
        predicted, state = first_prediction(
            self.model, torch.full((B,), self.model.blank, device=self.device)
        )
        lm = None if self.fusion.lm is None else self.fusion.lm.start(B)
        first = Memory(predicted, state, lm, self.fusion.lm_scores(lm))
        self.pool = map_state(
            lambda part: part.new_zeros(self.turns * B * K, *part.shape[1:]), first
        )
        map_state(lambda pool, part: pool[: B * K : K].copy_(part), self.pool, first)
        now = self.empty(B, K)
        now.score[:, 0] = 0
        return now._replace(cell=torch.arange(B * K, device=self.device).view(B, K))

    def finish(self, kept: Kept) -> Kept:
        """The K best of all that reached the end, the end of the sentence included."""
        best = merge(kept, self.K)
        if self.fusion.lm is None:
            return best
        states = map_state(lambda pool: pool[best.cell.flatten()], self.pool.lm)
        label = best.label.flatten()
        states = select_state(
            label >= 0, self.fusion.lm.advance(states, label.clamp(min=0)), states
        )
        score, place = (
            best.score + self.fusion.weight * self.fusion.lm.final(states).view_as(best.score)
        ).topk(self.K)
        return best.gather(place)._replace(score=score)

    def trace(self, best: Kept) -> list[Hypotheses]:
        """Hypotheses of (B, n), one for each of the n: all walk back through the history together,
        a label a step.
        """
        width, steps = len(self.moves) * self.K, list[Step]()
        node = best.node.masked_fill(best.score == -torch.inf, -1)
        rows = torch.arange(len(node), device=self.device)[:, None]
        past = torch.cat(
            [*self.history, best.node.new_full((len(node), 1, 2), -1)], 1
        )  # its last is where -1 leads
        frames = torch.tensor([*self.frames, -1], device=self.device)
        moves = torch.tensor(self.moves, device=self.device)
        for _ in range(int(best.length.max())):
            parent, label = past[rows, node].unbind(-1)
            steps.append(
                Step(label, frames[node // width], moves[node % width // self.K], node >= 0)
            )
            node = parent
        steps = [*reversed(steps)]
        found = []
        for n in range(node.shape[1]):
            column = [map_state(lambda part, n=n: part[:, n], step) for step in steps]
            found.append(
                Hypotheses.from_steps(column, best.score[:, n].float(), f"beam, width {self.K}")
            )
        return found

    def empty(self, *shape: int) -> Kept:
        """A set that holds nothing."""
        whole = torch.zeros(shape, dtype=torch.int64, device=self.device)
        score = torch.full(shape, -torch.inf, dtype=self.dtype, device=self.device)
        return Kept(score, whole, whole, whole - 1, whole, whole - 1)

    @staticmethod
    def at(sets: Kept, index: int) -> Kept:
        """One of the sets (B, n, K)."""
        return map_state(lambda part: part[:, index], sets)
