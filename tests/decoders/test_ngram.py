"""ARPA files: every probability against the textbook's recursion, and malformed files."""

import gzip
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asrkit.decoders import NGram, WordNGram


def arpa(grams):
    """The text of an ARPA file: {words: (log10 probability, log10 back-off weight)}."""
    order = max(map(len, grams))
    levels = {n: [g for g in grams if len(g) == n] for n in range(1, order + 1)}
    lines = ["written by a test", "", "\\data\\"]
    lines += [f"ngram {n}={len(level)}" for n, level in levels.items()]
    for n, level in levels.items():
        lines += ["", f"\\{n}-grams:"]
        for gram in level:
            logp, backoff = grams[gram]
            line = f"{logp}\t{' '.join(gram)}"
            lines.append(f"{line}\t{backoff}" if n < order and backoff else line)
    return "\n".join([*lines, "", "\\end\\", ""])


def random_grams(seed, order, tokens, unknown):
    """A random model: contexts of listed n-grams are listed, their suffixes need not be."""
    rng = random.Random(seed)
    known = rng.sample(tokens, rng.randint(1, len(tokens)))
    words = [*known, "<s>", "</s>", *["<unk>"] * unknown, "elsewhere"]

    def numbers():
        return round(rng.uniform(-3, 0), 4), round(rng.uniform(-1, 0.3), 4)

    grams = {(word,): numbers() for word in words}
    level = list(grams)
    for _ in range(order - 1):
        pairs = [
            (*gram, word) for gram in level if gram[-1] != "</s>" for word in words
        ]
        new = [gram for gram in pairs if gram[-1] != "<s>" and rng.random() < 0.4]
        level = new or [(*level[0], "</s>")]
        grams.update((gram, numbers()) for gram in level)
    return grams


def textbook(grams, history, word):
    """log p(word | history) in nats, by recursion."""
    if (*history, word) in grams:
        return grams[(*history, word)][0] * math.log(10)
    if not history:
        return -math.inf
    backoff = grams.get(history, (0, 0.0))[1] * math.log(10)
    return backoff + textbook(grams, history[1:], word)


def last(history, order):
    """The words of a history that an n-gram model uses."""
    return history[max(0, len(history) - order + 1) :]


@given(
    seed=st.integers(0, 10**6),
    order=st.integers(1, 4),
    V=st.integers(1, 6),
    unknown=st.booleans(),
    ids=st.booleans(),
)
def test_every_next_token_has_the_probability_of_the_textbook(
    tmp_path_factory, seed, order, V, unknown, ids
):
    tokens = list(range(V)) if ids else [f"▁{n}" for n in range(V)]
    grams = random_grams(seed, order, [str(token) for token in tokens], unknown)
    path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    path.write_text(arpa(grams), encoding="utf-8")
    lm = NGram.read(path, tokens)
    rng = random.Random(seed)
    spelled = [str(token) if (str(token),) in grams else "<unk>" for token in tokens]
    histories = [("<s>",)] * 3
    states = lm.start(3)
    for _ in range(6):
        past = [last(history, order) for history in histories]
        wanted = [[textbook(grams, own, word) for word in spelled] for own in past]
        ends = [textbook(grams, own, "</s>") for own in past]
        close(lm.scores(states), wanted)
        close(lm.scores(states[:, None])[:, 0], wanted)
        close(lm.final(states), ends)
        tokens = [rng.randrange(V) for _ in histories]
        pairs = zip(histories, tokens, strict=True)
        histories = [(*history, spelled[token]) for history, token in pairs]
        states = lm.advance(states, torch.tensor(tokens))


def close(found, wanted, atol=1e-5):
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=atol)


GOOD = {
    ("<s>",): (-99, -0.5),
    ("</s>",): (-1.0, 0),
    ("a",): (-0.5, -0.25),
    ("b",): (-0.75, 0),
    ("a", "b"): (-0.125, 0),
}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("lm.arpa", str.encode),
        ("lm.arpa.gz", lambda text: gzip.compress(text.encode())),
        # a byte order mark, and lines of Windows
        (
            "lm.arpa",
            lambda text: (
                b"\xef\xbb\xbf"
                + text.partition("\n\n")[2].replace("\n", "\r\n").encode()
            ),
        ),
    ],
    ids=["plain", "gzipped", "of Windows"],
)
def test_files_may_be_gzipped_and_hold_more_than_the_tokens(tmp_path, name, write):
    (tmp_path / name).write_bytes(write(arpa(GOOD)))
    for tokens, wanted in (
        (["a", "b", "<blank>"], [-0.75, -0.125, -math.inf]),
        (["b"], [-0.75]),
    ):
        lm = NGram.read(tmp_path / name, tokens)
        state = lm.advance(lm.start(1), torch.tensor([0]))
        found = lm.scores(state)[0] / math.log(10)
        close(found, wanted)


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "lm.arpa"
    path.write_text(arpa(GOOD))
    return path


def test_to_moves_every_tensor(good):
    moved = WordNGram.read(good, [" ", "a", "b"]).to("meta")
    parts = [*vars(moved).values(), *vars(moved.ngram).values()]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    assert {part.device.type for part in tensors} == {"meta"}


def test_equal_tokens_are_the_same_word(good):
    lm = NGram.read(good, ["a", "b", "a"])
    after = lm.advance(lm.start(1), torch.tensor([2]))
    assert torch.equal(after, lm.advance(lm.start(1), torch.tensor([0])))
    first, b, other = lm.scores(lm.start(1))[0].tolist()
    assert first == other != b


WEIGHTS = "line: expected a log10 probability of 0 or less, and a finite back-off weight, got "


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (
            "\\end\\\n",
            "",
            "lm.arpa:15: file: expected \\end\\ in a line of its own, got none.",
        ),
        ("\\2-grams:\n", "", "lm.arpa:13: could not convert string to float: 'b'"),
        (
            "-0.75\tb",
            "-0.75",
            "lm.arpa:11: line: expected a log-probability and 1 words, got '-0.75'.",
        ),
        ("-0.75\tb", "nan\tb", f"lm.arpa:11: {WEIGHTS}'nan\\tb'."),
        ("-0.75\tb", "0.1\tb", f"lm.arpa:11: {WEIGHTS}'0.1\\tb'."),
        (
            "-0.125\ta b",
            "-0.125\tc b",
            "lm.arpa:14: line: expected an n-gram whose first words are listed above, got '-0.125\\tc b'.",
        ),
        ("a\t-0.25", "a\tinf", f"lm.arpa:10: {WEIGHTS}'-0.5\\ta\\tinf'."),
    ],
)
def test_a_malformed_file_is_one_line_that_names_its_line(good, old, new, wanted):
    text = good.read_text()
    assert old in text
    good.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError) as error:
        NGram.read(good, ["a", "b"])
    assert str(error.value) == wanted


def test_a_file_cut_anywhere_is_refused(tmp_path):
    text = arpa(GOOD).rstrip()
    whole = gzip.compress(text.encode())
    scrambled = whole[:20] + b"\xff\xff\xff" + whole[23:]
    damaged = [("lm.arpa", text[:size].encode()) for size in range(len(text))]
    for content in (whole[: len(whole) // 2], scrambled, text.encode()):
        damaged.append(("lm.gz", content))
    for name, content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{name}(:\d+)?: "):
            NGram.read(tmp_path / name, ["a", "b"])


WRITABLE = (
    "tokens: expected words that an ARPA file can hold, got [' ']. Use another spelling"
)
OVER_WORDS = "lm.arpa: expected a model over words, got one that lists "


@pytest.mark.parametrize(
    ("read", "b", "tokens", "wanted"),
    [
        (
            NGram.read,
            "b",
            ["x", "y"],
            "lm.arpa: expected a word that is a token, got none. An example of a token: ['x'].",
        ),
        (NGram.read, "b", ["a", " "], WRITABLE),
        (
            WordNGram.read,
            "b",
            ["a", "b"],
            "tokens: expected some that begin with ' ' or '▁', got ['a', 'b'].",
        ),
        (
            WordNGram.read,
            "b",
            [" ", "A"],
            "lm.arpa: expected a word that the tokens can spell, got 2 others, such as ['a']. Are both in lower",
        ),
        (WordNGram.read, "<space>", [" ", "a"], f"{OVER_WORDS}['<space>']."),
        (WordNGram.read, "▁b", [" ", "a"], f"{OVER_WORDS}['▁b']."),
    ],
)
def test_tokens_of_another_kind_than_the_files_words_are_refused(
    good, read, b, tokens, wanted
):
    text = good.read_text().replace("\tb", f"\t{b}").replace("a b", f"a {b}")
    good.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read(good, tokens)
    assert str(error.value).startswith(wanted)


def spellings(words):
    """Pieces that allow several cuts of a word, with "▁" alone and "" for blank."""
    return ["", "▁", *(f"▁{word}" for word in words), *"abc", "ab", "bc", "▁ab", "▁▁c"]


@given(
    seed=st.integers(0, 10**6),
    order=st.integers(1, 3),
    unknown=st.booleans(),
    mark=st.sampled_from(["▁", " "]),
)
def test_words_have_the_probability_of_the_textbook(
    tmp_path_factory, seed, order, unknown, mark
):
    words = ["a", "b", "ab", "abc", "ba", "cab"]
    grams = random_grams(seed, order, words, unknown)
    path = tmp_path_factory.mktemp("lm") / "words.arpa"
    path.write_text(arpa(grams), encoding="utf-8")
    pieces = [piece.replace("▁", mark) for piece in spellings(words)]
    inside = [not piece.startswith(mark) for piece in pieces]
    lm = WordNGram.read(path, pieces, word_bonus=0.25)
    rng = random.Random(seed)
    states = lm.start(4)
    texts = [""] * 4
    total = torch.zeros(4)
    for _ in range(rng.randint(0, 9)):
        tokens = [rng.randrange(1, len(pieces)) for _ in texts]
        scores = lm.scores(states)
        assert not scores[:, inside].any()  # a word is scored when the next begins
        total = total + scores[range(4), tokens]
        states = lm.advance(states, torch.tensor(tokens))
        texts = [
            text + pieces[token] for text, token in zip(texts, tokens, strict=True)
        ]
    wanted = []
    for text in texts:
        history = ("<s>",)
        cost = 0.0
        for word in [*text.replace(mark, " ").split(), "</s>"]:
            word = word if (word,) in grams else "<unk>"
            cost += textbook(grams, last(history, order), word)
            cost += 0.25 * (word != "</s>")
            history = (*history, word)
        wanted.append(cost)
    found = total + lm.final(states)
    close(found, wanted, atol=1e-4)
