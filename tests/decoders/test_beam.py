"""Beam search of transducers: against plain loops, against every path there is, and what a batch must not change."""

import itertools
import math
from collections import defaultdict, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from asrkit.decoders import NGram, transducer_beam, transducer_beam_reference, transducer_greedy
from asrkit.losses import rnnt_loss
from asrkit.workbench.bench.planted import planted

DURATIONS = [(), (0, 1, 2, 3, 4), (0, 1, 2, 4, 8), (1, 2), (0, 2)]
Cell = namedtuple("Cell", "hidden")


class Random(nn.Module):
    """A random transducer that shares no code with asrkit, in float64; `nest` says what its state is."""

    def __init__(self, seed, V=4, durations=(), nest="gru", blank=None, bias=0.0, sharp=3.0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.blank, self.durations, self.nest, P = (
            V - 1 if blank is None else blank,
            durations,
            nest,
            6,
        )

        def new(*shape):
            return nn.Parameter(torch.randn(*shape, generator=g, dtype=torch.float64))

        self.embedding, self.mix, self.recall = new(V, P), new(P, P), new(P, P)
        self.encoded, self.out = new(4, P), new(P, V + len(durations))
        with torch.no_grad():
            self.out.mul_(sharp / P**0.5)
        self.bias = torch.zeros(V + len(durations), dtype=torch.float64)
        self.bias[self.blank] = bias

    def predict(self, labels, state=None):
        heard = self.embedding[labels]
        if self.nest == "stateless":
            return (heard @ self.mix).tanh(), None
        before = torch.zeros_like(heard) if state is None else state["cell"][0].hidden[:, 0]
        hidden = (heard @ self.mix + before @ self.recall).tanh()
        return hidden, {"cell": [Cell(hidden[:, None])], "last": (labels, None)}

    def join(self, encoded, predicted):
        assert encoded.isfinite().all(), "padding was read"
        return (encoded @ self.encoded + predicted).tanh() @ self.out + self.bias


def frames(seed, B, T):
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(B, T, 4, generator=g, dtype=torch.float64), torch.randint(
        0, T + 1, (B,), generator=g
    )


def every(found):
    return [found, *found.alternatives]


def same(found, wanted):
    for a, b in zip(every(found), every(wanted), strict=True):
        for name in ("labels", "lengths", "frames", "durations"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


models = st.builds(
    Random, st.integers(0, 10**6), V=st.integers(2, 5), durations=st.sampled_from(DURATIONS),
    nest=st.sampled_from(["gru", "stateless"]), blank=st.sampled_from([None, 0]), bias=st.floats(-2, 4), sharp=st.floats(1, 5),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    models,
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(0, 9),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_the_batched_search_finds_what_plain_loops_find(model, seed, B, T, width, max_symbols):
    encoded, lengths = frames(seed, B, T)
    options = {"width": width, "nbest": width, "max_symbols": max_symbols}
    wanted = transducer_beam_reference(model, encoded, lengths, **options)
    for b in range(B):
        encoded[b, lengths[b] :] = math.nan
    same(transducer_beam(model, encoded, lengths, **options), wanted)


def sentences(V, blank, longest):
    tokens = [token for token in range(V) if token != blank]
    return [
        list(labels) for U in range(longest + 1) for labels in itertools.product(tokens, repeat=U)
    ]


def rows(model, labels):
    """Predictions of every prefix of `labels`: (U1, P)."""
    predicted, state = model.predict(torch.tensor([model.blank]))
    found = [predicted]
    for label in labels:
        predicted, state = model.predict(torch.tensor([label]), state)
        found.append(predicted)
    return torch.cat(found)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 3), st.integers(1, 2), st.floats(-1, 3)
)
def test_a_wide_beam_of_rnnt_is_exact(seed, V, T, max_symbols, bias):
    # Labels a frame are limited here, which the loss does not know: only what stays below the limit everywhere is compared.
    model, (encoded, _) = Random(seed, V=V, bias=bias), frames(seed, 1, T)
    every_one = sentences(V, model.blank, max_symbols)
    cost = [
        rnnt_loss(
            model.join(encoded[:, :, None], rows(model, labels)[None, None]).detach(), torch.tensor([labels], dtype=torch.int64),
            torch.tensor([T]), torch.tensor([len(labels)]), blank=model.blank, reduction="none", impl="reference",
        ).item()
        for labels in every_one
    ]  # fmt: skip
    width = sum((V - 1) ** U for U in range(T * max_symbols + 1)) + 1
    found = transducer_beam(
        model, encoded, torch.tensor([T]), width=width, nbest=width, max_symbols=max_symbols
    )
    scores = {
        tuple(one.tokens()[0]): one.scores.item()
        for one in every(found)
        if one.scores.item() > -math.inf
    }
    assert len(scores) == width - 1
    for labels, nats in zip(every_one, cost, strict=True):
        assert scores[tuple(labels)] == pytest.approx(-nats, abs=1e-5)
    assert max(scores, key=scores.get) == tuple(found.tokens()[0])


def all_paths(model, encoded, max_symbols):
    """Log-probability of every label sequence of encoded (T, E) by walking all its paths."""
    total = defaultdict(lambda: -math.inf)

    def walk(t, labels, said, score, predicted, state):
        if t >= len(encoded):
            total[labels] = torch.logaddexp(
                torch.tensor(total[labels]).double(), torch.tensor(score).double()
            ).item()
            return
        logits = model.join(encoded[None, t], predicted)[0]
        V = len(logits) - len(model.durations)
        logp = logits[:V].log_softmax(-1).tolist()
        spread = (
            zip(model.durations, logits[V:].log_softmax(-1).tolist(), strict=True)
            if model.durations
            else [(None, 0.0)]
        )
        for duration, cost in spread:
            blank = 1 if duration is None else max(1, duration)
            walk(t + blank, labels, 0, score + logp[model.blank] + cost, predicted, state)
            for label in (
                [] if said == max_symbols else [token for token in range(V) if token != model.blank]
            ):
                moves = duration or 0
                after = model.predict(torch.tensor([label]), state)
                walk(
                    t + moves,
                    (*labels, label),
                    0 if moves else said + 1,
                    score + logp[label] + cost,
                    *after,
                )

    walk(0, (), 0, 0.0, *model.predict(torch.tensor([model.blank])))
    return total


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 3), st.floats(-1, 3),
    st.sampled_from([(), (0, 1), (0, 1, 2), (1, 2), (0, 2), (0, 1, 4)]),
)  # fmt: skip
def test_a_wide_beam_equals_the_sum_over_all_paths(seed, V, T, bias, durations):
    model, (encoded, _) = Random(seed, V=V, durations=durations, bias=bias), frames(seed, 1, T)
    with torch.no_grad():
        wanted = all_paths(model, encoded[0], max_symbols=1)
    width = len(wanted) + 1
    found = transducer_beam(
        model, encoded, torch.tensor([T]), width=width, nbest=width, max_symbols=1
    )
    scores = {
        tuple(one.tokens()[0]): one.scores.item()
        for one in every(found)
        if one.scores.item() > -math.inf
    }
    assert scores == pytest.approx(wanted, abs=1e-5)
    assert math.exp(found.scores.item()) == pytest.approx(math.exp(max(wanted.values())), abs=1e-5)
    assert found.tokens() == [list(max(wanted, key=wanted.get))]


@settings(max_examples=60, deadline=None)
@given(models, st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 9), st.integers(1, 5))
def test_an_utterance_is_the_same_alone_and_in_any_batch(model, seed, B, T, width):
    encoded, lengths = frames(seed, B, T)
    together = transducer_beam(model, encoded, lengths, width=width, nbest=width)
    for b in range(B):
        alone = transducer_beam(
            model, encoded[b : b + 1, : lengths[b]], lengths[b : b + 1], width=width, nbest=width
        )
        for one, other in zip(every(alone), every(together), strict=True):
            n = int(one.lengths)
            assert n == other.lengths[b]
            for name in ("labels", "frames", "durations"):
                assert getattr(one, name)[0].tolist() == getattr(other, name)[b, :n].tolist()
            torch.testing.assert_close(one.scores[0], other.scores[b], rtol=1e-5, atol=1e-5)


def test_batches_without_frames_and_beams_wider_than_what_exists():
    model = Random(1)
    found = transducer_beam(
        model, torch.zeros(2, 0, 4).double(), torch.tensor([0, 0]), width=3, nbest=3
    )
    assert [one.tokens() for one in every(found)] == [[[], []]] * 3
    assert [one.scores.tolist() for one in every(found)] == [
        [0, 0],
        [-math.inf] * 2,
        [-math.inf] * 2,
    ]
    encoded, lengths = frames(1, 2, 1)
    found = transducer_beam(
        Random(1, V=2), encoded, torch.tensor([1, 0]), width=9, nbest=9, max_symbols=2
    )
    assert [one.lengths.tolist() for one in every(found)][3:] == [
        [0, 0]
    ] * 6  # "", "a" and "aa" are all there is
    assert sum(math.exp(one.scores[0]) for one in every(found)) < 1


@pytest.mark.parametrize("durations", [(), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_is_sure_says_the_same_to_beam_and_greedy(durations, width):
    plan = planted(4, 40, durations=durations, V=12, width=240)
    found = transducer_beam(plan.model, plan.encoded, plan.lengths, width=width)
    greedy = transducer_greedy(plan.model, plan.encoded, plan.lengths)
    assert found.tokens() == greedy.tokens() == plan.labels
    torch.testing.assert_close(found.frames, greedy.frames, rtol=0, atol=0)
    torch.testing.assert_close(found.durations, greedy.durations, rtol=0, atol=0)
    assert (
        found.scores >= greedy.scores - 1e-5
    ).all()  # the same path, and what other alignments add


class Unsure:
    """Two alignments of the label 1 have 0.3 each; the one path without a label has 0.36, and greedy takes it."""

    blank, durations = 0, ()
    table = torch.tensor(
        [[[0.6, 0.4], [1.0, 1e-9]], [[0.6, 0.4], [1.0, 1e-9]]]
    )  # frame, labels so far, token

    def predict(self, labels, state=None):
        said = torch.zeros_like(labels) if state is None else (state + 1).clamp(max=1)
        return said[:, None].float(), said

    def join(self, encoded, predicted):
        shape = torch.broadcast_shapes(encoded.shape[:-1], predicted.shape[:-1])
        t, said = encoded[..., 0].long().expand(shape), predicted[..., 0].long().expand(shape)
        return self.table[t, said].log()


def test_alignments_of_one_label_sequence_are_added():
    encoded = torch.arange(2.0).view(1, 2, 1)
    found = transducer_beam(Unsure(), encoded, torch.tensor([2]), width=3, nbest=2)
    assert transducer_greedy(Unsure(), encoded, torch.tensor([2])).tokens() == [[]]
    assert found.tokens() == [[1]]
    assert found.frames.tolist() == [[0]]  # 0.4 on frame 0, 0.6 * 0.4 on frame 1
    assert found.scores.exp().tolist() == pytest.approx([0.4 + 0.6 * 0.4], abs=1e-6)
    assert found.alternatives[0].tokens() == [[]]
    assert found.alternatives[0].scores.exp().tolist() == pytest.approx([0.36], abs=1e-6)


def test_uniform_models_count_alignments_even_where_all_are_equally_likely():
    model, T = Random(1, V=2, sharp=0.0), 3
    found = transducer_beam(
        model, torch.zeros(1, T, 4).double(), torch.tensor([T]), width=12, nbest=10, max_symbols=3
    )
    scores = {int(one.lengths): one.scores.item() for one in every(found)}
    assert len(scores) == 10  # no label sequence twice
    for U in range(4):  # up to here max_symbols limits nothing
        assert scores[U] == pytest.approx(
            math.log(math.comb(T + U - 1, U)) - (T + U) * math.log(2), abs=1e-5
        )


def test_results_may_serve_a_loss_and_name_the_search():
    found = transducer_beam(Unsure(), torch.zeros(1, 2, 1), torch.tensor([2]), width=2, nbest=2)
    assert not any(part.is_inference() for one in every(found) for part in one.parts())
    assert found.impl == "beam, width 2"


@pytest.mark.parametrize(("change", "wanted"), [
    ({"encoded": torch.zeros(2, 5)}, "encoded: expected shape (B, T, E), got (2, 5)."),
    ({"lengths": torch.tensor([1, 5])}, "lengths: expected 0 to T=3 frames, got 1 to 5."),
    ({"width": 0}, "width: expected 1 to 1000 hypotheses, got 0."),
    ({"nbest": 5}, "nbest: expected 1 to width=4 hypotheses, got 5."),
    ({"max_symbols": 0}, "max_symbols: expected 1 to 1000 labels on a frame, got 0."),
])  # fmt: skip
def test_bad_input_is_one_line(change, wanted):
    arguments = {
        "model": Unsure(),
        "encoded": torch.zeros(2, 3, 1),
        "lengths": torch.tensor([3, 2]),
    }
    with pytest.raises(ValueError) as error:
        transducer_beam(**{**arguments, **change})
    assert str(error.value) == wanted


@pytest.fixture(scope="module")
def lm(arpa_of_tokens):
    return lambda V: NGram.read(arpa_of_tokens, range(V))


@settings(max_examples=100, deadline=None)
@given(
    model=models,
    seed=st.integers(0, 10**6),
    B=st.integers(1, 4),
    T=st.integers(0, 7),
    width=st.integers(1, 5),
)
def test_fusion_finds_what_plain_loops_find(lm, model, seed, B, T, width):
    encoded, lengths = frames(seed, B, T)
    options = {
        "width": width,
        "nbest": width,
        "lm": lm(len(model.embedding)),
        "lm_weight": 0.7,
        "label_bonus": 0.2,
    }
    wanted = transducer_beam_reference(model, encoded, lengths, max_symbols=2, **options)
    same(transducer_beam(model, encoded, lengths, max_symbols=2, **options), wanted)


def test_fusion_adds_the_language_models_score_and_a_bonus_for_every_label(lm):
    model, lm = Random(5, V=4, bias=1.0), lm(4)
    encoded, options = frames(5, 1, 3)[0], {"width": 60, "nbest": 20, "max_symbols": 1}
    plain = transducer_beam(model, encoded, torch.tensor([3]), **options)
    fused = transducer_beam(
        model, encoded, torch.tensor([3]), lm=lm, lm_weight=0.5, label_bonus=-0.25, **options
    )
    before = {tuple(one.tokens()[0]): one.scores.item() for one in every(plain)}
    compared = 0
    for one in every(fused):
        labels, states, total = one.tokens()[0], lm.start(1), 0.0
        for label in labels:
            total += lm.scores(states)[0, label].item()
            states = lm.advance(states, torch.tensor([label]))
        total += lm.final(states).item()
        if tuple(labels) in before:
            compared += 1
            assert one.scores.item() == pytest.approx(
                before[tuple(labels)] + 0.5 * total - 0.25 * len(labels), abs=1e-4
            )
    assert compared > 10


class Torn(Unsure):
    """Labels 1 and 2 are nearly equally likely on the first frame, 1 a little more."""

    table = torch.tensor([[[0.02, 0.5, 0.48], [0.98, 0.01, 0.01]], [[0.98, 0.01, 0.01]] * 2])


def test_fusion_moves_the_result_towards_the_language_model(tmp_path):
    def likes(word, other):
        text = (
            f"\\data\\\nngram 1=4\n\\1-grams:\n-99 <s>\n-1 </s>\n-0.1 {word}\n-2 {other}\n\\end\\\n"
        )
        (tmp_path / "lm.arpa").write_text(text)
        return NGram.read(tmp_path / "lm.arpa", range(3))

    def search(**options):
        return transducer_beam(
            Torn(), torch.arange(2.0).view(1, 2, 1), torch.tensor([2]), **options
        )

    assert search().tokens() == [[1]]
    assert search(lm=likes(1, 2)).tokens() == [[1]]
    assert search(lm=likes(2, 1)).tokens() == [[2]]
    assert search(lm=likes(2, 1), lm_weight=0.001).tokens() == [[1]]
    assert search(label_bonus=5.0).lengths > 1
    assert search(label_bonus=-5.0).lengths == 0


@pytest.mark.parametrize("durations", DURATIONS)
def test_a_language_model_without_weight_changes_no_bit(lm, durations):
    model, (encoded, lengths) = Random(7, V=5, durations=durations), frames(7, 4, 9)
    plain = transducer_beam(model, encoded, lengths, nbest=4)
    found = transducer_beam(model, encoded, lengths, nbest=4, lm=lm(5), lm_weight=0.0)
    for a, b in zip(every(plain), every(found), strict=True):
        assert all(torch.equal(*pair) for pair in zip(a.parts(), b.parts(), strict=True))


def test_a_language_model_over_other_tokens_is_refused(lm):
    with pytest.raises(
        ValueError,
        match=r"^lm: expected scores of V=2 tokens, got 3\. Blank has a place among them\.$",
    ):
        transducer_beam(Unsure(), torch.zeros(1, 2, 1), torch.tensor([2]), lm=lm(3))
