"""Prefix beam search of CTC, against plain loops and all alignments, and with a language model."""

import itertools
import math
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import NGram, WordNGram, ctc_beam

sys.path.insert(0, str(Path(__file__).parent))
from ctc_oracle import ctc_beam_reference

BOTH = pytest.mark.parametrize(
    "search", [ctc_beam, ctc_beam_reference], ids=["batched", "plain"]
)
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
            assert torch.equal(getattr(a, name), getattr(b, name))
        torch.testing.assert_close(a.scores, b.scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["", "words", "tokens"])
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
    models, kind, seed, B, T, V, width, **options
):
    options |= {"width": width, "nbest": width}
    if kind:
        V = max(V, 3)  # a space, a letter and the blank
        options |= {"lm": models(kind, V), "lm_weight": 0.7, "blank": -1}
    log_probs, lengths = scores_of(seed, B, T, V)
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
        nats = sum(log_probs[t, token].item() for t, token in enumerate(path))
        total[labels] += math.exp(nats)
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
    """The word model's score of a text in nats: log-probabilities of WORDS, by hand."""
    words = [word if word in UNIGRAMS else "<unk>" for word in text.split()]
    total = word_bonus * len(words)
    for before, word in itertools.pairwise(["<s>", *words, "</s>"]):
        listed = BIGRAMS.get((before, word), BACKOFF.get(before, 0) + UNIGRAMS[word])
        total += listed * math.log(10)
    return total


@BOTH
@pytest.mark.parametrize(
    ("T", "V", "kind"),
    [
        (0, 2, ""),
        (1, 2, ""),
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
    width = len(wanted) + 1
    options = {"lm": models(kind, V), "lm_weight": 0.5}
    options["label_bonus"] = -0.25 if kind else 0.0
    lengths = torch.tensor([T])
    found = search(log_probs, lengths, width=width, nbest=width, **options)
    *real, none = every(found)
    assert none.scores.item() == -math.inf
    assert none.tokens() == [[]]
    scores = {tuple(one.tokens()[0]): one.scores.item() for one in real}
    exact = 1e-5 if kind else 1e-12  # the words' log-probabilities are float32
    assert scores == pytest.approx(wanted, abs=exact)
    assert [one.scores.item() for one in real] == sorted(scores.values(), reverse=True)


def by_hand(*frames):
    """Log-probabilities (1, T, V) of frames of probabilities, and their length."""
    log_probs = torch.tensor([frames], dtype=torch.float64).log()
    return log_probs, torch.tensor([len(frames)])


A = [1.0, 0.0]
BLANK = [0.0, 1.0]
ALIKE = [[0.2] * 5]
WORKED = {  # frames, width and other options: label sequences with their probabilities
    # greedy takes the two blanks
    "alignments of one label sequence are added": (
        [[0.4, 0.6], [0.4, 0.6]],
        2,
        {},
        [([0], 0.64), ([], 0.36)],
    ),
    # after the first frame "a" stays; on the second it has 0.3 + 0.3, and "ab" only 0.4
    "a beam of one is not greedy decoding": (
        [[0.5, 0.1, 0.4], [0.3, 0.4, 0.3]],
        1,
        {},
        [([0], 0.3)],
    ),
    # "a" ends in "a" or in a blank, half each: "a" and "aa" get 0.255, and "ab" gets 0.49
    "the likeliest label may be a repetition that falls below the second": (
        [[1.0, 0.0, 0.0], [0.5, 0.0, 0.5], [0.51, 0.49, 0.0]],
        1,
        {},
        [([0, 1], 0.49)],
    ),
    "a label is not repeated without a blank": ([A, A], 1, {}, [([0], 1.0)]),
    "a label is repeated after a blank": ([A, BLANK, A, A], 1, {}, [([0, 0], 1.0)]),
    "of equals the shorter, then the lower label stays": (
        ALIKE,
        3,
        {},
        [([], 0.2), ([0], 0.2), ([1], 0.2)],
    ),
    "so with another blank": (
        ALIKE,
        3,
        {"blank": 0},
        [([], 0.2), ([1], 0.2), ([2], 0.2)],
    ),
    "so where a frame has one label": (
        ALIKE,
        3,
        {"top_tokens": 1},
        [([], 0.2), ([0], 0.2), ([], 0.0)],
    ),
    # "a" falls out of a beam of 2 on the second frame, and is begun anew on the third
    "a lost prefix may come back": (
        [[0.05, 0.45, 0.5], [0.02, 0.08, 0.9], [0.9, 0.0, 0.1]],
        2,
        {},
        [([1, 0], 0.4329), ([0], 0.405)],
    ),
}


@BOTH
@pytest.mark.parametrize(
    ("frames", "width", "options", "wanted"), WORKED.values(), ids=WORKED
)
def test_worked_examples(search, frames, width, options, wanted):
    found = search(*by_hand(*frames), width=width, nbest=width, **options)
    assert [one.tokens()[0] for one in every(found)] == [labels for labels, _ in wanted]
    found_scores = [one.scores.exp().item() for one in every(found)]
    assert found_scores == pytest.approx([probability for _, probability in wanted])


@BOTH
def test_values_that_are_not_finite_are_impossible(search):
    log_probs, lengths = scores_of(3, 3, 4, 4)
    log_probs[0, 1] = math.nan
    log_probs[1, 2, 1] = math.inf
    found = search(log_probs, lengths.fill_(4), width=3)
    assert found.scores.isfinite().tolist() == [False, True, True]
    assert found.tokens()[0] == []
    log_probs[1, 2, 1] = -math.inf
    again = search(log_probs, lengths, width=3)
    assert torch.equal(found.scores, again.scores)


def test_half_precision_is_computed_in_float32():
    log_probs, lengths = scores_of(5, 3, 9, 6)
    for dtype in (torch.float16, torch.bfloat16):
        short = log_probs.to(dtype)
        found = ctc_beam(short, lengths)
        same(found, ctc_beam(short.float(), lengths))
        assert found.scores.dtype == torch.float32


def test_results_may_serve_a_loss_and_name_the_search():
    log_probs, lengths = scores_of(1, 2, 5, 3)
    found = ctc_beam(log_probs.requires_grad_(), lengths, width=2, nbest=2)
    assert not any(part.is_inference() for one in every(found) for part in one.parts())
    assert found.impl == "ctc beam, width 2"


# "ab" or "ba", a little more the latter: each letter is sure but for the first and second place.
TORN = by_hand(
    [0.01, 0.47, 0.52, 0.0],
    [0.0, 0.0, 0.0, 1.0],
    [0.01, 0.52, 0.47, 0.0],
    [0.9, 0.0, 0.0, 0.1],
)


@BOTH
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"lm_weight": 0.0}, "ba"),
        ({}, "ab"),
        ({"lm_weight": 0.001}, "ba"),
    ],
)
def test_a_word_model_decides_between_words(models, search, options, wanted):
    log_probs, lengths = TORN
    for T in (3, 4):  # the last word is scored without a space after it too
        found = search(
            log_probs[:, :T], lengths - 4 + T, lm=models("words", 4), **options
        )
        letters = [LETTERS[label] for label in found.tokens()[0]]
        assert "".join(letters).strip() == wanted


@pytest.mark.parametrize("kind", ["words", "tokens"])
def test_a_language_model_without_weight_changes_no_bit(models, kind):
    log_probs, lengths = scores_of(7, 4, 9, 4)
    plain = ctc_beam(log_probs, lengths, nbest=4)
    found = ctc_beam(log_probs, lengths, nbest=4, lm=models(kind, 4), lm_weight=0.0)
    for a, b in zip(every(plain), every(found), strict=True):
        for one, other in zip(a.parts(), b.parts(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["words", "tokens"])
def test_a_language_model_over_other_tokens_is_refused(models, kind):
    batch = torch.zeros(1, 2, 5), torch.tensor([2])
    with pytest.raises(
        ValueError, match=r"^lm: expected scores of V=5 tokens, got 4\."
    ):
        ctc_beam(*batch, lm=models(kind, 4))
