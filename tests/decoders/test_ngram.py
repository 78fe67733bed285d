"""ARPA files: every probability against the recursion of the textbook, and every way a file can be wrong."""

import gzip
import math
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asrkit.decoders import NGram, WordNGram


def arpa(grams):
    """The text of an ARPA file: {words: (log10 probability, log10 back-off weight)}."""
    order = max(map(len, grams))
    lines = ["written by a test", "", "\\data\\"]
    lines += [
        f"ngram {n}={sum(len(gram) == n for gram in grams)}"
        for n in range(1, order + 1)
    ]
    for n in range(1, order + 1):
        lines += ["", f"\\{n}-grams:"]
        for gram, (logp, backoff) in grams.items():
            if len(gram) == n:
                lines.append(
                    f"{logp}\t{' '.join(gram)}"
                    + (f"\t{backoff}" if n < order and backoff else "")
                )
    return "\n".join([*lines, "", "\\end\\", ""])


def random_grams(seed, order, tokens, unknown):
    """A random model: contexts of listed n-grams are listed, their suffixes need not be."""
    rng = random.Random(seed)
    words = [
        *rng.sample(tokens, rng.randint(1, len(tokens))),
        "<s>",
        "</s>",
        *["<unk>"] * unknown,
        "elsewhere",
    ]

    def number(low, high):
        return round(rng.uniform(low, high), 4)

    grams = {(word,): (number(-3, 0), number(-1, 0.3)) for word in words}
    level = list(grams)
    for _ in range(order - 1):
        new = [
            (*gram, word)
            for gram in level
            if gram[-1] != "</s>"
            for word in words
            if word != "<s>" and rng.random() < 0.4
        ]
        level = new or [(*level[0], "</s>")]
        grams.update((gram, (number(-3, 0), number(-1, 0.3))) for gram in level)
    return grams


def textbook(grams, history, word):
    """log p(word | history) in nats, by recursion."""
    if (*history, word) in grams:
        return grams[(*history, word)][0] * math.log(10)
    if not history:
        return -math.inf
    return grams.get(history, (0, 0.0))[1] * math.log(10) + textbook(
        grams, history[1:], word
    )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.booleans(),
)
def test_every_next_token_has_the_probability_of_the_textbook(
    tmp_path_factory, seed, order, V, unknown, ids
):
    tokens = list(range(V)) if ids else [f"▁{n}" for n in range(V)]
    grams = random_grams(seed, order, [str(token) for token in tokens], unknown)
    path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    path.write_text(arpa(grams), encoding="utf-8")
    lm, rng = NGram.read(path, tokens), random.Random(seed)
    histories, states = [("<s>",)] * 3, lm.start(3)

    def spell(token):
        return str(token) if (str(token),) in grams else "<unk>"

    for _ in range(6):
        past = [history[max(0, len(history) - order + 1) :] for history in histories]
        wanted = torch.tensor(
            [
                [textbook(grams, history, spell(token)) for token in tokens]
                for history in past
            ]
        )
        torch.testing.assert_close(lm.scores(states), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            lm.scores(states[:, None])[:, 0], wanted, rtol=1e-5, atol=1e-5
        )
        ends = torch.tensor([textbook(grams, history, "</s>") for history in past])
        torch.testing.assert_close(lm.final(states), ends, rtol=1e-5, atol=1e-5)
        said = [rng.randrange(V) for _ in histories]
        histories = [
            (*history, spell(tokens[token]))
            for history, token in zip(histories, said, strict=True)
        ]
        states = lm.advance(states, torch.tensor(said))


GOOD = {
    ("<s>",): (-99, -0.5),
    ("</s>",): (-1.0, 0),
    ("a",): (-0.5, -0.25),
    ("b",): (-0.75, 0),
    ("a", "b"): (-0.125, 0),
}


def test_files_may_be_gzipped_and_hold_more_than_the_tokens(tmp_path):
    plain, zipped = tmp_path / "lm.arpa", tmp_path / "lm.arpa.gz"
    plain.write_text(arpa(GOOD))
    zipped.write_bytes(gzip.compress(arpa(GOOD).encode()))
    for tokens, wanted in (
        (["a", "b", "<blank>"], [-0.75, -0.125, -math.inf]),
        (["b"], [-0.75]),
    ):
        one, other = NGram.read(plain, tokens), NGram.read(zipped, tokens)
        state = one.advance(one.start(1), torch.tensor([0]))
        found = one.scores(state)[0] / math.log(10)
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
        assert torch.equal(one.scores(state), other.scores(state))


def test_to_moves_every_tensor(tmp_path):
    (tmp_path / "lm.arpa").write_text(arpa(GOOD))
    moved = WordNGram.read(tmp_path / "lm.arpa", [" ", "a", "b"]).to("meta")
    parts = [*vars(moved).values(), *vars(moved.ngram).values()]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(tensors) == 15 and {part.device.type for part in tensors} == {"meta"}


WEIGHTS = "line: expected a log10 probability of 0 or less, and a finite back-off weight, got "


@pytest.mark.parametrize(("old", "new", "wanted"), [
    ("\\end\\\n", "", "lm.arpa:15: file: expected \\end\\ in a line of its own, got none."),
    ("\\2-grams:\n", "", "lm.arpa:13: could not convert string to float: 'b'"),
    ("-0.75\tb", "-0.75", "lm.arpa:11: line: expected a log-probability and 1 words, got '-0.75'."),
    ("-0.75\tb", "nan\tb", f"lm.arpa:11: {WEIGHTS}'nan\\tb'."),
    ("-0.75\tb", "0.1\tb", f"lm.arpa:11: {WEIGHTS}'0.1\\tb'."),
    ("-0.125\ta b", "-0.125\tc b", "lm.arpa:14: line: expected an n-gram whose first words are listed above, got '-0.125\\tc b'."),
    ("a\t-0.25", "a\tinf", f"lm.arpa:10: {WEIGHTS}'-0.5\\ta\\tinf'."),
])  # fmt: skip
def test_a_malformed_file_is_one_line_that_names_its_line(tmp_path, old, new, wanted):
    text = arpa(GOOD)
    assert old in text
    (tmp_path / "lm.arpa").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        NGram.read(tmp_path / "lm.arpa", ["a", "b"])
    assert str(error.value) == wanted


def test_a_file_cut_anywhere_is_refused(tmp_path):
    text = arpa(GOOD).rstrip()
    for size in range(len(text)):
        (tmp_path / "lm.arpa").write_text(text[:size])
        with pytest.raises(ValueError, match=r"^lm\.arpa(:\d+)?: "):
            NGram.read(tmp_path / "lm.arpa", ["a", "b"])
    whole = gzip.compress(text.encode())
    for damaged in (
        whole[: len(whole) // 2],
        whole[:20] + b"\xff\xff\xff" + whole[23:],
        text.encode(),
    ):
        (tmp_path / "lm.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"^lm\.gz:\d+: "):
            NGram.read(tmp_path / "lm.gz", ["a", "b"])


def test_tokens_that_are_the_same_are_the_same_word(tmp_path):
    (tmp_path / "lm.arpa").write_text(arpa(GOOD))
    lm = NGram.read(tmp_path / "lm.arpa", ["a", "b", "a"])
    after = lm.advance(lm.start(1), torch.tensor([2]))
    assert torch.equal(after, lm.advance(lm.start(1), torch.tensor([0])))
    first, b, other = lm.scores(lm.start(1))[0].tolist()
    assert first == other != b


def test_tokens_that_no_file_would_list_are_refused_and_not_scored_as_impossible(
    tmp_path,
):
    (tmp_path / "lm.arpa").write_text(arpa(GOOD))
    for tokens in (["x", "y"], range(3)):
        with pytest.raises(ValueError) as error:
            NGram.read(tmp_path / "lm.arpa", tokens)
        wanted = f"lm.arpa: expected a word that is a token, got none. A token reads like this: {[*map(str, tokens)][:1]}."
        assert str(error.value) == wanted
    for token in (" ", "", "two words"):  # the space of a character tokenizer, for one
        with pytest.raises(
            ValueError,
            match=r"^tokens: expected words that an ARPA file can hold, got \['.*'\]\. Write it otherwise",
        ):
            NGram.read(tmp_path / "lm.arpa", ["a", token])


def test_a_byte_order_mark_and_lines_of_windows_are_read(tmp_path):
    (tmp_path / "lm.arpa").write_bytes(
        b"\xef\xbb\xbf" + arpa(GOOD).partition("\n\n")[2].replace("\n", "\r\n").encode()
    )
    assert NGram.read(tmp_path / "lm.arpa", ["a", "b"]).order == 2


def spellings(words):
    """Pieces that cut words in several ways; "▁" alone and "" for blank are among them."""
    return ["", "▁", *(f"▁{word}" for word in words), *"abc", "ab", "bc", "▁ab", "▁▁c"]


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 3), st.booleans(), st.sampled_from(["▁", " "])
)
def test_words_have_the_probability_of_the_textbook(
    tmp_path_factory, seed, order, unknown, mark
):
    words = ["a", "b", "ab", "abc", "ba", "cab"]
    grams = random_grams(seed, order, words, unknown)
    path = tmp_path_factory.mktemp("lm") / "words.arpa"
    path.write_text(arpa(grams), encoding="utf-8")
    pieces = [piece.replace("▁", mark) for piece in spellings(words)]
    lm, rng = WordNGram.read(path, pieces, word_bonus=0.25), random.Random(seed)
    states, said, total = lm.start(4), [""] * 4, torch.zeros(4)
    for _ in range(rng.randint(0, 9)):
        tokens = [rng.randrange(1, len(pieces)) for _ in said]
        total = total + lm.scores(states)[range(4), tokens]
        states = lm.advance(states, torch.tensor(tokens))
        said = [text + pieces[token] for text, token in zip(said, tokens, strict=True)]
    total = total + lm.final(states)
    wanted = []
    for text in said:
        history, cost = ("<s>",), 0.0
        for word in [*text.replace(mark, " ").split(), "</s>"]:
            word = word if (word,) in grams else "<unk>"
            past = history[max(0, len(history) - order + 1) :]
            cost += textbook(grams, past, word) + 0.25 * (word != "</s>")
            history = (*history, word)
        wanted.append(cost)
    torch.testing.assert_close(total, torch.tensor(wanted), rtol=1e-5, atol=1e-4)


def test_tokens_inside_a_word_cost_nothing_until_the_next_begins(tmp_path):
    (tmp_path / "lm.arpa").write_text(arpa(GOOD))
    lm = WordNGram.read(tmp_path / "lm.arpa", [" ", "a", "b"])
    state = lm.start(1)
    assert lm.scores(state).tolist() == [
        [0, 0, 0]
    ]  # a space before the first word is no word
    state = lm.advance(state, torch.tensor([1]))
    found = lm.scores(state)[0] / math.log(10)
    # <s> is listed with no "<s> a": its back-off weight, and "a"
    torch.testing.assert_close(found, torch.tensor([-1.0, 0, 0]), rtol=1e-5, atol=1e-5)
    state = lm.advance(lm.advance(state, torch.tensor([0])), torch.tensor([0]))
    assert lm.scores(state).tolist() == [
        [0, 0, 0]
    ]  # nor is what lies between two spaces
    state = lm.advance(state, torch.tensor([2]))
    found = lm.final(state) / math.log(10)  # "a b" is listed, then "</s>" after "b"
    torch.testing.assert_close(
        found, torch.tensor([-0.125 - 1.0]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("tokens", "wanted"), [
    (["a", "b"], "tokens: expected some that begin with ' ' or '▁', got ['a', 'b']."),
    ([" ", "A"], "lm.arpa: expected a word that the tokens can spell, got 2 others, as ['a']. Are both in lower case?"),
])  # fmt: skip
def test_tokens_that_spell_no_words_are_refused(tmp_path, tokens, wanted):
    (tmp_path / "lm.arpa").write_text(arpa(GOOD))
    with pytest.raises(ValueError) as error:
        WordNGram.read(tmp_path / "lm.arpa", tokens)
    assert str(error.value) == wanted


@pytest.mark.parametrize("token", ["<space>", "▁b"])
def test_a_model_over_tokens_is_not_taken_for_one_over_words(tmp_path, token):
    (tmp_path / "lm.arpa").write_text(
        arpa(GOOD).replace("\tb", f"\t{token}").replace("a b", f"a {token}")
    )
    said = f"lm.arpa: expected a model over words, got one that lists {[token]!r}. "
    with pytest.raises(ValueError, match=re.escape(said)):
        WordNGram.read(tmp_path / "lm.arpa", [" ", "a", "b"])
