"""Prefix beam search of CTC: against plain loops, against every alignment there is, and with a language model."""

import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import ctc_loss

from asrkit.decoders import NGram, WordNGram, ctc_beam, ctc_greedy
from asrkit.workbench.bench.planted import ctc_log_probs, planted

sys.path.insert(0, str(Path(__file__).parent))
from ctc_oracle import ctc_beam_reference

SEARCHES = {"batched": ctc_beam, "plain": ctc_beam_reference}
# The alphabet of the word model: a space, two letters, and the blank in its place.
LETTERS = [" ", "a", "b", ""]
WORDS = """\\data\\
ngram 1=7
ngram 2=4

\\1-grams:
-99\t<s>\t-0.3
-0.6\t</s>
-0.9\ta\t-0.2
-0.5\tab\t-0.4
-1.1\tba
-1.3\tc
-2\t<unk>\t-0.1

\\2-grams:
-0.1\t<s> ab
-0.3\tab a
-1.5\ta a
-0.7\t<unk> ba

\\end\\
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory, arpa_of_tokens):
    """models(kind, V): an n-gram over words or tokens, or None."""
    folder = tmp_path_factory.mktemp("lm")
    (folder / "words.arpa").write_text(WORDS)

    def of(kind, V):
        if kind == "words":
            # V tokens with the blank last, whatever V is
            tokens = [*LETTERS[: min(V - 1, 3)], *"cdef"[: max(0, V - 4)], ""]
            return WordNGram.read(folder / "words.arpa", tokens, word_bonus=0.3)
        if kind == "tokens":
            return NGram.read(arpa_of_tokens, range(V))
        return None

    return of


def scores_of(seed, B, T, V, sharp=2.0):
    g = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(B, T, V, generator=g, dtype=torch.float64)
    return logits.log_softmax(-1), torch.randint(0, T + 1, (B,), generator=g)


def every(found):
    return [found, *found.alternatives]


def same(found, wanted):
    for a, b in zip(every(found), every(wanted), strict=True):
        for name in ("labels", "lengths", "frames", "durations"):
            torch.testing.assert_close(
                getattr(a, name), getattr(b, name), rtol=0, atol=0
            )
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 5),
    T=st.integers(0, 9),
    V=st.integers(2, 7),
    width=st.integers(1, 7),
    blank=st.sampled_from([0, -1, 1]),
    top_tokens=st.sampled_from([None, 1, 2, 50]),
    label_bonus=st.sampled_from([0.0, 0.7]),
)
def test_the_batched_search_finds_what_plain_loops_find(
    seed, B, T, V, width, **options
):
    log_probs, lengths = scores_of(seed, B, T, V)
    options |= {"width": width, "nbest": width}
    wanted = ctc_beam_reference(log_probs, lengths, **options)
    for b in range(B):
        log_probs[b, lengths[b] :] = math.nan
    same(ctc_beam(log_probs, lengths, **options), wanted)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 4),
    T=st.integers(0, 8),
    V=st.integers(3, 6),
    width=st.integers(1, 6),
    kind=st.sampled_from(["words", "tokens"]),
    top_tokens=st.sampled_from([None, 1, 2]),
)
def test_fusion_finds_what_plain_loops_find(
    models, seed, B, T, V, width, kind, top_tokens
):
    log_probs, lengths = scores_of(seed, B, T, V)
    options = {
        "width": width,
        "nbest": width,
        "top_tokens": top_tokens,
        "lm": models(kind, V),
        "lm_weight": 0.7,
        "label_bonus": 0.2,
    }
    wanted = ctc_beam_reference(log_probs, lengths, **options)
    for b in range(B):
        log_probs[b, lengths[b] :] = math.nan
    same(ctc_beam(log_probs, lengths, **options), wanted)


def posteriors(log_probs):
    """Probability of every label sequence of log_probs (T, V), blank last, by all V^T alignments."""
    T, V = log_probs.shape
    total = defaultdict(float)
    for path in itertools.product(range(V), repeat=T):
        labels = tuple(token for token, _ in itertools.groupby(path) if token != V - 1)
        total[labels] += math.exp(
            sum(log_probs[t, token].item() for t, token in enumerate(path))
        )
    return total


BACKOFF = {"<s>": -0.3, "a": -0.2, "ab": -0.4, "<unk>": -0.1}
UNIGRAMS = {"</s>": -0.6, "a": -0.9, "ab": -0.5, "ba": -1.1, "<unk>": -2}
BIGRAMS = {
    ("<s>", "ab"): -0.1,
    ("ab", "a"): -0.3,
    ("a", "a"): -1.5,
    ("<unk>", "ba"): -0.7,
}


def text_cost(text, word_bonus):
    """What the word model says to a text, in nats: log-probabilities of WORDS, by hand."""
    words = [word if word in UNIGRAMS else "<unk>" for word in text.split()]
    total = word_bonus * len(words)
    for before, word in itertools.pairwise(["<s>", *words, "</s>"]):
        listed = BIGRAMS.get((before, word), BACKOFF.get(before, 0) + UNIGRAMS[word])
        total += listed * math.log(10)
    return total


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("T", "V", "kind"),
    [
        (0, 2, ""),
        (1, 2, ""),
        (5, 2, ""),
        (1, 4, "words"),
        (4, 3, ""),
        (4, 4, ""),
        (5, 4, "words"),
    ],
)
def test_a_wide_beam_is_exact(models, search, T, V, kind):
    log_probs, _ = scores_of(T + 10 * V, 1, T, V, sharp=1.0)
    wanted = posteriors(log_probs[0])
    assert sum(wanted.values()) == pytest.approx(1)
    for labels, probability in wanted.items():
        wanted[labels] = math.log(probability)
        if kind:
            text = "".join(LETTERS[label] for label in labels)
            wanted[labels] += 0.5 * text_cost(text, 0.3) - 0.25 * len(labels)
    width = len(wanted)
    options = {
        "lm": models(kind, V),
        "lm_weight": 0.5,
        "label_bonus": -0.25 if kind else 0.0,
    }
    found = SEARCHES[search](
        log_probs, torch.tensor([T]), width=width + 1, nbest=width + 1, **options
    )
    *real, none = every(found)
    assert none.scores.item() == -math.inf and none.tokens() == [[]]
    scores = {tuple(one.tokens()[0]): one.scores.item() for one in real}
    assert scores == pytest.approx(
        wanted, abs=1e-5
    )  # the words' log-probabilities are float32
    assert [one.scores.item() for one in real] == sorted(scores.values(), reverse=True)
    if not kind:
        assert scores == pytest.approx(wanted, abs=1e-12)
        assert sum(map(math.exp, scores.values())) == pytest.approx(1)


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(2, 6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from(["", "words", "tokens"]),
)
def test_an_utterance_is_the_same_alone_and_in_any_batch(
    models, seed, B, T, width, kind
):
    log_probs, lengths = scores_of(seed, B, T, 4)
    options = {"width": width, "nbest": width, "lm": models(kind, 4)}
    together = ctc_beam(log_probs, lengths, **options)
    for b in range(B):
        own = lengths[b : b + 1]
        alone = ctc_beam(log_probs[b : b + 1, : lengths[b]], own, **options)
        for one, other in zip(every(alone), every(together), strict=True):
            n = int(one.lengths)
            assert n == other.lengths[b]
            for name in ("labels", "frames", "durations"):
                assert (
                    getattr(one, name)[0].tolist()
                    == getattr(other, name)[b, :n].tolist()
                )
            torch.testing.assert_close(
                one.scores[0], other.scores[b], rtol=1e-5, atol=1e-5
            )


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 9), st.integers(2, 5))
def test_frames_and_durations_are_an_alignment_of_the_labels(seed, B, T, V):
    log_probs, lengths = scores_of(seed, B, T, V)
    found = ctc_beam(log_probs, lengths, width=4)
    for b, labels in enumerate(found.tokens()):
        path = [V - 1] * int(lengths[b])
        for label, frame, duration in zip(
            labels, found.frames[b].tolist(), found.durations[b].tolist(), strict=False
        ):
            path[frame : frame + duration] = [label] * duration
        assert len(path) == lengths[b]
        assert [
            token for token, _ in itertools.groupby(path) if token != V - 1
        ] == labels
        likelihood = sum(log_probs[b, t, token].item() for t, token in enumerate(path))
        assert likelihood <= found.scores[b].item() + 1e-9


@pytest.mark.parametrize("width", [1, 4])
def test_a_model_that_is_sure_says_the_same_to_beam_and_greedy(width):
    plan = planted(4, 40, V=12, width=240)
    log_probs = ctc_log_probs(plan)
    found = ctc_beam(log_probs, plan.lengths, width=width)
    greedy = ctc_greedy(log_probs, plan.lengths)
    for name in ("labels", "lengths", "frames", "durations"):
        assert torch.equal(getattr(found, name), getattr(greedy, name))
    assert (
        found.scores >= greedy.scores - 1e-4
    ).all()  # the same path, and what others add


def by_hand(*frames):
    """Log-probabilities (1, T, V) of frames of probabilities."""
    return torch.tensor([frames], dtype=torch.float64).log(), torch.tensor(
        [len(frames)]
    )


@pytest.mark.parametrize("search", SEARCHES)
def test_alignments_of_one_label_sequence_are_added(search):
    # the label has 0.4 on each frame, so 0.64 in all; greedy takes the two blanks, 0.36
    given = by_hand([0.4, 0.6], [0.4, 0.6])
    assert ctc_greedy(*given).tokens() == [[]]
    found = SEARCHES[search](*given, width=2, nbest=2)
    assert [one.tokens() for one in every(found)] == [[[0]], [[]]]
    assert [one.scores.exp().item() for one in every(found)] == pytest.approx(
        [0.64, 0.36]
    )
    assert found.frames.tolist() == [[0]] and found.durations.tolist() == [[1]]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_beam_of_one_is_not_greedy_decoding(search):
    # after the first frame "a" stays; on the second it has 0.3 + 0.3, and "ab" only 0.4
    given = by_hand([0.5, 0.1, 0.4], [0.3, 0.4, 0.3])
    assert ctc_greedy(*given).tokens() == [[0, 1]]
    assert SEARCHES[search](*given, width=1).tokens() == [[0]]


@pytest.mark.parametrize("search", SEARCHES)
def test_the_likeliest_label_may_be_a_repetition_that_falls_behind_the_second(search):
    # "a" ends in "a" or in a blank, half each: "a" and "aa" get 0.255, and "ab" gets 0.49
    given = by_hand([1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.51, 0.49, 0.0])
    found = SEARCHES[search](*given, width=1)
    assert found.tokens() == [[0, 1]] and found.scores.exp().item() == pytest.approx(
        0.49
    )


@pytest.mark.parametrize("search", SEARCHES)
def test_a_label_is_repeated_after_a_blank_only(search):
    sure = [1.0, 0.0]
    blank = [0.0, 1.0]
    assert SEARCHES[search](*by_hand(sure, sure)).tokens() == [[0]]
    assert SEARCHES[search](*by_hand(sure, blank, sure)).tokens() == [[0, 0]]
    found = SEARCHES[search](*by_hand(sure, blank, sure, sure))
    assert found.frames.tolist() == [[0, 2]] and found.durations.tolist() == [[1, 2]]


@pytest.mark.parametrize("search", SEARCHES)
def test_of_equal_prefixes_the_shorter_then_the_lower_label_stays(search):
    given = by_hand([0.2] * 5)
    for blank, wanted in ((-1, [[], [0], [1]]), (0, [[], [1], [2]])):
        found = SEARCHES[search](*given, width=3, nbest=3, blank=blank)
        assert [one.tokens()[0] for one in every(found)] == wanted
        pruned = SEARCHES[search](*given, width=3, nbest=3, blank=blank, top_tokens=1)
        assert [one.tokens()[0] for one in every(pruned)] == [*wanted[:2], []]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_lost_prefix_may_come_back(search):
    # "a" falls out of a beam of 2 on the second frame, and is begun anew on the third
    given = by_hand([0.05, 0.45, 0.5], [0.02, 0.08, 0.9], [0.9, 0.0, 0.1])
    found = SEARCHES[search](*given, width=2, nbest=2)
    assert found.tokens() == [[1, 0]] and found.alternatives[0].tokens() == [[0]]


@pytest.mark.parametrize("search", SEARCHES)
def test_what_is_not_finite_is_impossible(search):
    log_probs, lengths = scores_of(3, 3, 4, 4)
    log_probs[0, 1] = math.nan
    log_probs[1, 2, 1] = math.inf
    found = SEARCHES[search](log_probs, lengths.fill_(4), width=3)
    assert found.scores.isfinite().tolist() == [False, True, True]
    assert found.tokens()[0] == []
    log_probs[1, 2, 1] = -math.inf
    again = SEARCHES[search](log_probs, lengths, width=3)
    assert torch.equal(found.scores, again.scores)


def test_half_precision_is_computed_in_float32():
    log_probs, lengths = scores_of(5, 3, 9, 6)
    for dtype in (torch.float16, torch.bfloat16):
        short = log_probs.to(dtype)
        found = ctc_beam(short, lengths)
        same(found, ctc_beam(short.float(), lengths))
        assert found.scores.dtype == torch.float32


def test_results_may_serve_a_loss_and_name_the_search():
    found = ctc_beam(*scores_of(1, 2, 5, 3), width=2, nbest=2)
    assert not any(part.is_inference() for one in every(found) for part in one.parts())
    assert found.impl == "ctc beam, width 2"
    assert ctc_beam(
        scores_of(1, 2, 5, 3)[0].requires_grad_(), torch.tensor([5, 5])
    ).lengths.any()


def test_a_wide_beam_finds_at_least_the_likelihood_of_greedy():
    log_probs, lengths = scores_of(11, 24, 30, 9, sharp=1.5)
    found = ctc_beam(log_probs, lengths, width=200)
    greedy = ctc_greedy(log_probs, lengths)

    def nats(one):
        labels = one.labels.clamp(min=0)
        frames_first = log_probs.transpose(0, 1)
        return -ctc_loss(
            frames_first, labels, lengths, one.lengths, blank=8, reduction="none"
        )

    assert (nats(found) >= nats(greedy) - 1e-9).all()
    assert (nats(found) > nats(greedy) + 0.1).any()
    assert (
        found.scores <= nats(found) + 1e-9
    ).all()  # the beam may have lost alignments


# "ab" or "ba", a little more the latter: each letter is sure but for the first and second place.
TORN = by_hand(
    [0.01, 0.47, 0.52, 0.0],
    [0.0, 0.0, 0.0, 1.0],
    [0.01, 0.52, 0.47, 0.0],
    [0.9, 0.0, 0.0, 0.1],
)


def spelled(found):
    return "".join(LETTERS[label] for label in found.tokens()[0]).strip()


@pytest.mark.parametrize("search", SEARCHES)
def test_a_word_model_decides_between_words(models, search):
    lm = models("words", 4)
    decode = SEARCHES[search]
    assert spelled(decode(*TORN)) == "ba"
    assert spelled(decode(*TORN, lm=lm)) == "ab"
    assert spelled(decode(*TORN, lm=lm, lm_weight=0.001)) == "ba"
    short = decode(*TORN, lm=lm, lm_weight=2.0)
    assert spelled(short) in ("ab", "a")


def test_the_last_word_is_scored_without_a_space_after_it(models):
    lm = models("words", 4)
    log_probs, lengths = TORN
    found = ctc_beam(log_probs[:, :3], lengths - 1, lm=lm)
    assert spelled(found) == "ab"


@pytest.mark.parametrize("kind", ["words", "tokens"])
def test_a_language_model_without_weight_changes_no_bit(models, kind):
    log_probs, lengths = scores_of(7, 4, 9, 4)
    plain = ctc_beam(log_probs, lengths, nbest=4)
    found = ctc_beam(log_probs, lengths, nbest=4, lm=models(kind, 4), lm_weight=0.0)
    for a, b in zip(every(plain), every(found), strict=True):
        assert all(
            torch.equal(*pair) for pair in zip(a.parts(), b.parts(), strict=True)
        )


@pytest.mark.parametrize(("change", "wanted"), [
    ({"nbest": 9}, "nbest: expected 1 to width=8 hypotheses, got 9."),
    ({"top_tokens": 0}, "top_tokens: expected at least 1, or None, got 0."),
    ({"lm": "words.arpa"}, "lm: expected a language model, or None, got str. Read a file by NGram.read or WordNGram.read."),
])  # fmt: skip
def test_bad_input_is_one_line(change, wanted):
    arguments = {"log_probs": torch.zeros(2, 3, 4), "lengths": torch.tensor([3, 2])}
    with pytest.raises(ValueError) as error:
        ctc_beam(**{**arguments, **change})
    assert str(error.value) == wanted


def test_a_language_model_over_other_tokens_is_refused(models):
    given = torch.zeros(1, 2, 5), torch.tensor([2])
    for kind in ("words", "tokens"):
        with pytest.raises(
            ValueError, match=r"^lm: expected scores of V=5 tokens, got 4\."
        ):
            ctc_beam(*given, lm=models(kind, 4))
