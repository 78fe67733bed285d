import pytest
from hypothesis import given
from hypothesis import strategies as st

from asrkit.text import (
    CharTokenizer,
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


def test_pieces_come_back_as_words_and_survive_a_dump(train_pieces):
    tokenizer = train_pieces(
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


def test_padding_is_no_letter(train_pieces):
    pieces = train_pieces(["turn on the light"] * 9, vocab_size=20)
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


def test_error_rates_count_case_until_texts_are_normalised():
    reference, hypothesis = "Turn  ON the light", "turn on the\nlight"
    assert wer([reference], [hypothesis]).substitutions == 2
    texts = [normalize_text(reference)], [normalize_text(hypothesis)]
    assert wer(*texts).rate == cer(*texts).rate == 0
