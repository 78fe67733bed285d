"""Concatenated SentencePiece models: their tokens, texts and languages."""

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from asrkit.text import (
    AggregateTokenizer,
    SentencePieceTokenizer,
    dump_tokenizer,
    load_tokenizer,
    token_texts,
)

USER_DEFINED = 4  # a type of piece in sentencepiece_model.proto
ENGLISH = ["the cat sat on the mat", "a dog had a bone", "she sells sea shells"] * 5
GERMAN = [
    "die katze lag auf der matte",
    "ein hund hat einen knochen",
    "sieben segel",
] * 5


@pytest.fixture(scope="module")
def models(train_pieces):
    return [train_pieces(texts, vocab_size=30) for texts in (ENGLISH, GERMAN)]


@pytest.fixture(scope="module")
def both(models):
    return AggregateTokenizer((("en", models[0]), ("de", models[1])))


def test_tokens_of_a_language_follow_those_of_the_previous_one(both, models):
    start = models[0].vocab_size
    assert both.vocab_size == start + models[1].vocab_size
    assert both.encode("the cat") == models[0].encode("the cat")
    assert AggregateTokenizer(both.parts[1:]).encode("hund") == models[1].encode("hund")
    assert german(both, "die katze")[0] >= start
    assert token_texts(both) == models[0].pieces() + models[1].pieces()


def german(both, text):
    """Tokens of a text by the second model."""
    start = both.parts[0][1].vocab_size
    return [start + token for token in both.parts[1][1].encode(text)]


def test_tokens_decode_to_their_text(both):
    assert both.decode(both.encode("she had a cat")) == "she had a cat"
    text = "der hund lag auf der katze"
    assert both.decode(german(both, text)) == text


def test_a_text_in_two_languages_keeps_its_spaces(both):
    cat, katze = both.encode("the cat"), german(both, "die katze")
    assert both.decode([*cat, *katze, *both.encode("sat")]) == "the cat die katze sat"
    # a piece that begins no word continues the previous one
    assert both.decode([*katze, both.pieces().index("s")]) == "die katzes"


def test_control_symbols_have_no_text(models):
    symbols = ["<|en|>", "<pad>"]
    proto = ModelProto.FromString(models[0].model)
    tokens = [*range(len(proto.pieces), len(proto.pieces) + len(symbols))]
    for symbol in symbols:
        proto.pieces.add(piece=symbol, type=USER_DEFINED)
    plain = SentencePieceTokenizer(proto.SerializeToString())
    assert plain.decode(tokens) == "<|en|><pad>"
    control = plain.with_control()
    assert control.pieces() == plain.pieces()
    assert control.with_control() == control
    tokenizer = AggregateTokenizer((("spl_tokens", control), ("en", models[0])))
    assert (
        tokenizer.decode([*tokens, *tokenizer.encode("the cat"), *tokens]) == "the cat"
    )


def test_a_dump_gives_an_equal_tokenizer(both):
    assert load_tokenizer(dump_tokenizer(both)) == both
    assert load_tokenizer(dump_tokenizer(both)) != AggregateTokenizer(both.parts[::-1])
