import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.text import (
    CharTokenizer,
    SentencePieceTokenizer,
    cer,
    dump_tokenizer,
    load_tokenizer,
    normalize_text,
    wer,
)

WORDS = st.lists(
    st.sampled_from("one two three four".split()), min_size=1, max_size=6
).map(" ".join)


def edit_distance(a: list[str], b: list[str]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = (
                row[j],
                min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y)),
            )
    return row[-1]


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz'", min_size=1))
def test_characters_come_back_as_they_went_in(text):
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_character_is_named():
    with pytest.raises(ValueError, match=r"\['7'\] in 'take 7'"):
        CharTokenizer().encode("take 7")


def test_pieces_come_back_as_words_and_survive_a_dump():
    tokenizer = SentencePieceTokenizer.train(
        ["turn on the light", "turn off the radio"] * 30, vocab_size=30
    )
    assert (
        tokenizer.decode(tokenizer.encode("turn the light off")) == "turn the light off"
    )
    assert load_tokenizer(dump_tokenizer(tokenizer)) == tokenizer
    assert load_tokenizer(dump_tokenizer(CharTokenizer())) == CharTokenizer()


def test_a_tokenizer_that_is_not_there_is_refused():
    with pytest.raises(
        ValueError, match="tokenizer: expected 'char' or a SentencePiece .model file"
    ):
        load_tokenizer("nowhere.model")


@given(st.lists(st.tuples(WORDS, WORDS | st.just("")), min_size=1, max_size=5))
def test_word_errors_are_the_edit_distance_over_the_reference_words(pairs):
    references, hypotheses = zip(*pairs, strict=True)
    result = wer(references, hypotheses, resamples=10)
    errors = sum(edit_distance(r.split(), h.split()) for r, h in pairs)
    assert result.substitutions + result.insertions + result.deletions == errors
    assert result.units == sum(len(r.split()) for r in references)
    assert result.rate == errors / result.units


def test_the_interval_holds_the_rate_and_shrinks_with_more_utterances():
    few = wer(["a b c d", "a b c d"], ["a b c d", "a b x y"])
    many = wer(["a b c d", "a b c d"] * 100, ["a b c d", "a b x y"] * 100)
    assert few.low <= few.rate <= few.high
    assert many.low <= many.rate <= many.high
    assert many.high - many.low < few.high - few.low


def test_character_errors_count_characters():
    assert cer(["abc"], ["abd"]).rate == 1 / 3


@pytest.mark.parametrize(
    ("references", "hypotheses"), [([], []), (["a"], []), ([""], ["a"])]
)
def test_what_cannot_be_scored_is_refused(references, hypotheses):
    with pytest.raises(ValueError, match="expected"):
        wer(references, hypotheses)


@pytest.mark.parametrize("space", ["\n", "\u00a0", " \t "])
def test_any_space_parts_words(space):
    assert (
        wer([f"one{space}two"], ["one two"]).rate,
        wer(["one two"], [f" one{space}two "]).units,
    ) == (0, 2)
    assert cer([f"a{space}b"], ["a b"]).rate == 0


def test_one_text_is_not_taken_for_a_list_of_letters():
    with pytest.raises(
        ValueError,
        match=r"references, hypotheses: expected a list of texts each, got one text\. Pass \[text\]",
    ):
        wer("hello", "hallo")
    with pytest.raises(ValueError, match="resamples: expected at least 1, got 0"):
        wer(["a"], ["a"], resamples=0)


def test_padding_is_no_letter():
    pieces = SentencePieceTokenizer.train(["turn on the light"] * 9, vocab_size=20)
    for tokenizer in (CharTokenizer(), pieces):
        for token in (-1, tokenizer.vocab_size):
            with pytest.raises(
                ValueError,
                match=rf"tokens: expected 0 to {tokenizer.vocab_size - 1}, got \[{token}\]",
            ):
                tokenizer.decode([1, token])


@pytest.mark.parametrize("content", [b"", b"RIFF not a model"])
def test_what_is_no_sentencepiece_model_is_refused(content, tmp_path):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(
        ValueError,
        match=f"tokenizer: expected a SentencePiece model, got {len(content)} bytes",
    ):
        load_tokenizer(tmp_path / "x.model")


SAID = [
    "the cat sat on the mat",
    "a thin tin in the attic",
    "she sees the sea in the east and sits",
    "Ｆｕｌｌ width, ½ a café",
]


def fields(message):
    """(number, value) of a protocol buffer's fields: bytes, or four or more bytes of a number."""
    at = 0

    def varint():
        nonlocal at
        value, shift = 0, 0
        while True:
            value |= (message[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 128:
                return value

    while at < len(message):
        key = varint()
        size = {0: None, 1: 8, 2: -1, 5: 4}[key & 7]
        size = varint() if size == -1 else size
        value = varint() if size is None else message[(at := at + size) - size : at]
        yield key >> 3, value


def as_json(model, algorithm, **more):
    """What transformers' converter makes of a SentencePiece model: tokenizer.json."""
    parts = [*fields(model)]
    pieces = [dict(fields(row)) for number, row in parts if number == 1]
    (normalizer,) = [dict(fields(part)) for number, part in parts if number == 3]
    names = [piece[1].decode() for piece in pieces]
    scores = [struct.unpack("<f", piece[2])[0] for piece in pieces]
    kinds = {
        id: piece[3] for id, piece in enumerate(pieces) if piece.get(3) in (3, 4)
    }  # special, and as it is
    added = [
        {"id": id, "content": names[id], "special": kind == 3}
        for id, kind in kinds.items()
    ]
    body = {"type": "Unigram", "unk_id": 0, "vocab": [*zip(names, scores, strict=True)]}
    if algorithm == "BPE":
        vocab = {name: id for id, name in enumerate(names)}
        merges = [
            f"{n[:i]} {n[i:]}"
            for n in names
            for i in range(1, len(n))
            if {n[:i], n[i:]} <= vocab.keys()
        ]
        body = {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": merges}
    table = base64.b64encode(normalizer[2]).decode()
    steps = [{"type": "Precompiled", "precompiled_charsmap": table}, {"type": "Strip"}]
    return {
        "model": body,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        **more,
    }


@pytest.fixture(scope="module", params=["Unigram", "BPE"])
def converted(request):
    """An algorithm, a SentencePiece model of it with bytes and an added token, and the tokenizer.json made of it."""
    import io

    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SAID * 20), model_writer=out, vocab_size=320, model_type=request.param.lower(), bos_id=-1, eos_id=-1,
        hard_vocab_limit=False, minloglevel=2, byte_fallback=True, user_defined_symbols=["<pad>"], control_symbols=["<|x|>"],
    )  # fmt: skip
    return SentencePieceTokenizer(out.getvalue()), as_json(
        out.getvalue(), request.param
    )


@pytest.mark.parametrize(
    "text",
    [*SAID, "", "  two   spaces ", "ｗｉｄｅ ½", "日本", "<pad>the", "zebra quiz"],
)
def test_a_tokenizer_json_becomes_the_sentencepiece_model_it_was(converted, text):
    source, contents = converted
    made = SentencePieceTokenizer.from_json(contents, range(source.vocab_size))
    assert made.encode(text) == source.encode(text)
    assert made.decode(source.encode(text)) == source.decode(source.encode(text))


def test_pieces_of_a_tokenizer_json_come_in_the_order_asked_for(converted):
    source, contents = converted
    order = [*range(10, source.vocab_size), *range(10)]
    made = SentencePieceTokenizer.from_json(contents, order)
    assert [order[token] for token in made.encode("the cat sat")] == source.encode(
        "the cat sat"
    )
    control = order.index(
        next(token["id"] for token in contents["added_tokens"] if token["special"])
    )
    assert made.decode([control, *made.encode("the cat"), control]) == "the cat"
    assert load_tokenizer(dump_tokenizer(made)) == made


def test_no_space_is_put_in_front_where_a_tokenizer_json_has_none(converted):
    source, contents = converted
    made = SentencePieceTokenizer.from_json(
        {**contents, "pre_tokenizer": {"prepend_scheme": "never"}},
        range(source.vocab_size),
    )
    assert made.encode("the") != source.encode("the")
    assert made.decode(made.encode("the")) == "the"


def test_what_no_piece_spells_is_the_unknown_one(converted):
    _, contents = converted
    names = [*contents["model"]["vocab"]]  # of BPE; Unigram has pairs
    kept = [
        id
        for id, name in enumerate(names)
        if not (name if isinstance(name, str) else name[0]).startswith("<0x")
    ][::-1]
    made = SentencePieceTokenizer.from_json(
        contents, kept
    )  # without bytes, and <unk> is the last
    assert made.encode("日本")[-1] == len(kept) - 1
    assert made.decode([len(kept) - 1]).strip() == "⁇"


def test_error_rates_count_case_until_texts_are_normalised():
    reference, hypothesis = "Turn  ON the light", "turn on the\nlight"
    assert wer([reference], [hypothesis]).substitutions == 2
    texts = [normalize_text(reference)], [normalize_text(hypothesis)]
    assert wer(*texts).rate == cer(*texts).rate == 0
