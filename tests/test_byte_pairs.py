"""Byte-level BPE: the tokens of Hugging Face's tokenizers, and a text for all bytes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.byte_pairs import BytePairTokenizer, byte_letters, split_merge, split_words
from asrkit.text import dump_tokenizer, load_tokenizer, token_texts

# tokenizers 0.23.3: trained on the first ten texts, then all encoded.
GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "byte_pairs.json").read_text("utf-8")
)


def made(vocab=None, merges=None):
    texts = {token: text for text, token in (vocab or GOLDEN["vocab"]).items()}
    vocabulary = tuple(texts.get(token, "") for token in range(max(texts) + 1))
    pairs = GOLDEN["merges"] if merges is None else merges
    return BytePairTokenizer(vocabulary, tuple(split_merge(pair) for pair in pairs))


TRAINED = made()


@pytest.mark.parametrize("text", GOLDEN["texts"])
def test_tokens_are_those_of_tokenizers(text):
    assert TRAINED.encode(text) == GOLDEN["texts"][text]


@given(st.text())
def test_every_text_has_tokens_that_say_it(text):
    assert "".join(split_words(text)) == text
    said = TRAINED.decode(TRAINED.encode(text))
    assert said == " ".join(text.encode(errors="replace").decode().split())


@given(st.lists(st.integers(0, TRAINED.vocab_size - 1)))
def test_all_tokens_have_a_text_whole_characters_or_not(tokens):
    assert "  " not in TRAINED.decode(tokens)


def test_the_split_is_gpt_2s():
    assert split_words("It's 1 a.m.  now") == [
        "It",
        "'s",
        " 1",
        " a",
        ".",
        "m",
        ".",
        " ",
        " now",
    ]
    assert split_words("½x ٣ é_b\n\n c") == [
        "½",
        "x",
        " ٣",
        " é",
        "_",
        "b",
        "\n\n",
        " c",
    ]


def test_the_pair_learned_first_is_merged_first():
    letters = {letter: token for token, letter in enumerate(byte_letters())}
    vocab = letters | {"bc": 256, "ab": 257}
    assert made(vocab, ["b c", "a b"]).encode("abc") == [letters["a"], 256]
    assert made(vocab, ["a b", "b c"]).encode("abc") == [257, letters["c"]]
    assert made(vocab | {"aa": 258}, ["a a"]).encode("aaa") == [258, letters["a"]]


def test_every_byte_has_its_own_letter():
    letters = byte_letters()
    assert len({*letters}) == 256
    assert (letters[32], letters[0], letters[10], letters[255]) == ("Ġ", "Ā", "Ċ", "ÿ")


def test_a_saved_tokenizer_is_the_same_again():
    assert load_tokenizer(dump_tokenizer(TRAINED)) == TRAINED
    assert load_tokenizer(json.loads(json.dumps(dump_tokenizer(TRAINED)))) == TRAINED


def test_pieces_show_where_words_begin():
    texts = token_texts(TRAINED)
    assert texts[TRAINED.encode(" the")[0]] == "▁the"
    assert texts[TRAINED.encode("é")[0]] in ("é", "\ufffd")
    assert len(texts) == TRAINED.vocab_size


def test_what_is_no_tokenizer_is_refused():
    letters = {letter: token for token, letter in enumerate(byte_letters())}
    for said, call in {
        "^tokenizer: expected a byte-level vocabulary, got": lambda: BytePairTokenizer((), ()),
        "^tokenizer: expected a byte-level vocabulary, got \\['a b'\\]": lambda: BytePairTokenizer(("a b",), ()),
        "^tokenizer: expected each text once, got 'a' twice": lambda: BytePairTokenizer(("a", "a"), ()),
        "^tokenizer: expected a token for what each merge makes": lambda: made(letters, ["a b"]),
        "^tokenizer: expected merges of two parts, got 'a b c'": lambda: split_merge("a b c"),
        "^tokens: expected 0 to 399, got \\[400, -1\\]": lambda: TRAINED.decode([0, 400, -1]),
        "^text: expected bytes that the tokenizer has": lambda: BytePairTokenizer(("a",), ()).encode("ab"),
        "^tokenizer: its vocabulary is damaged": lambda: BytePairTokenizer.from_json("{"),
        "^tokenizer: its vocabulary is damaged \\(KeyError": lambda: BytePairTokenizer.from_json("{}"),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=said):
            call()
