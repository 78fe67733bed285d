"""tokenizer.json by Hugging Face's tokenizers: tokens, texts, and saving in checkpoints."""

import copy
import json
import pickle
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.text import (
    JsonTokenizer,
    SentencePieceTokenizer,
    byte_level_json,
    dump_tokenizer,
    load_tokenizer,
    token_texts,
)

HERE = Path(__file__).parent
sys.path.append(str(HERE / "models"))
import parity_cases as known  # noqa: E402

# A byte-level BPE trained on the first ten texts, then all encoded.
GOLDEN = json.loads((HERE / "golden" / "byte_pairs.json").read_text("utf-8"))
MERGES = [merge.split(" ") for merge in GOLDEN["merges"]]
BYTES = JsonTokenizer(byte_level_json(GOLDEN["vocab"], MERGES), len(GOLDEN["vocab"]))
PIECES = JsonTokenizer(json.dumps(known.parakeet_json("ctc")), known.V)


@pytest.mark.parametrize("text", GOLDEN["texts"])
def test_tokens_of_bytes_are_the_committed_ones(text):
    assert BYTES.encode(text) == GOLDEN["texts"][text]


@given(st.text())
def test_every_text_has_tokens_that_decode_to_it(text):
    text = text.encode(errors="replace").decode()
    assert BYTES.decode(BYTES.encode(text)) == " ".join(text.split())


@given(st.lists(st.integers(0, BYTES.vocab_size - 1)))
def test_all_tokens_decode_with_whole_characters_or_not(tokens):
    assert "  " not in BYTES.decode(tokens)


@pytest.mark.parametrize("text", ["the cat", "", "he is in the tea room", "on"])
def test_a_sentencepiece_model_has_the_tokens_of_its_conversion(text):
    source = SentencePieceTokenizer(known.sentencepiece_model())
    assert PIECES.encode(text) == source.encode(text)
    assert PIECES.pieces() == source.pieces()
    assert PIECES.decode(PIECES.encode("the mat")) == "the mat"


def test_pieces_show_where_words_begin():
    texts = token_texts(BYTES)
    assert texts[BYTES.encode(" the")[0]] == "▁the"
    assert texts[BYTES.encode("é")[0]] in ("é", "\ufffd")
    assert len(texts) == BYTES.vocab_size


def test_special_tokens_have_no_text_and_texts_never_contain_them():
    blank = known.V
    whole = JsonTokenizer(json.dumps(known.parakeet_json("ctc")), blank + 1)
    tokens = whole.encode("the <pad>")
    assert blank not in tokens
    assert whole.decode([blank, *whole.encode("the"), blank]) == "the"
    for again in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole)):
        assert again == whole and again.encode("the <pad>") == tokens


def test_truncation_in_the_file_is_ignored():
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}  # fmt: skip
    text = "the mat is in the tea room"
    assert other(truncation=cut).encode(text) == PIECES.encode(text)


def test_a_saved_tokenizer_loads_the_same():
    for tokenizer in (BYTES, PIECES):
        dump = json.loads(json.dumps(dump_tokenizer(tokenizer)))
        assert load_tokenizer(dump) == tokenizer


def other(**changes):
    """PIECES with other values at keys of its tokenizer.json."""
    contents = json.loads(PIECES.contents) | changes
    return JsonTokenizer(json.dumps(contents), known.V)


WORDS = {"type": "WordLevel", "unk_token": "0", "vocab": {str(n): n for n in range(31)}}
KINDS = "a BPE or Unigram model with a decoder"


@pytest.mark.parametrize("call, message", [
    (lambda: other(decoder=None), f"tokenizer: expected {KINDS}, got BPE with decoder None"),
    (lambda: other(model=WORDS), f"tokenizer: expected {KINDS}, got WordLevel"),
    (lambda: JsonTokenizer("{", 3), "tokenizer: tokenizer.json is damaged"),
    (lambda: JsonTokenizer(PIECES.contents, 99), "tokenizer: expected 99 tokens, got 32"),
    (lambda: PIECES.decode([0, 31, -1]), r"tokens: expected 0 to 30, got \[31, -1\]"),
])  # fmt: skip
def test_invalid_tokenizers_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
