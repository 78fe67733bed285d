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
            step = min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
            diagonal, row[j] = row[j], step
    return row[-1]


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz'", min_size=1))
def test_characters_decode_to_their_text(text):
    tokenizer = CharTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_pieces_decode_to_words_and_survive_a_dump(train_pieces):
    texts = ["turn on the light", "turn off the radio"] * 30
    tokenizer = train_pieces(texts, vocab_size=30)
    text = "turn the light off"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(dump_tokenizer(tokenizer)) == tokenizer
    assert load_tokenizer(dump_tokenizer(CharTokenizer())) == CharTokenizer()
    for one in (CharTokenizer(), tokenizer):
        for token in (-1, one.vocab_size):  # padding is not a letter
            message = rf"^tokens: expected 0 to {one.vocab_size - 1}, got \[{token}\]"
            with pytest.raises(ValueError, match=message):
                one.decode([1, token])


@given(st.lists(st.tuples(WORDS, WORDS | st.just("")), min_size=1, max_size=5))
def test_word_errors_are_the_edit_distance_over_the_reference_words(pairs):
    references, hypotheses = zip(*pairs, strict=True)
    result = wer(references, hypotheses)
    errors = sum(edit_distance(r.split(), h.split()) for r, h in pairs)
    assert result.substitutions + result.insertions + result.deletions == errors
    assert result.units == sum(len(r.split()) for r in references)
    assert result.rate == errors / result.units


def test_the_interval_contains_the_rate_and_shrinks_with_more_utterances():
    few = wer(["a b c d", "a b c d"], ["a b c d", "a b x y"])
    many = wer(["a b c d", "a b c d"] * 100, ["a b c d", "a b x y"] * 100)
    assert few.low <= few.rate <= few.high
    assert many.low <= many.rate <= many.high
    assert many.high - many.low < few.high - few.low


def test_character_errors_count_characters():
    assert cer(["abc"], ["abd"]).rate == 1 / 3


@pytest.mark.parametrize("space", ["\n", "\u00a0", " \t "])
def test_any_space_separates_words(space):
    assert wer([f"one{space}two"], ["one two"]).rate == 0
    assert wer(["one two"], [f" one{space}two "]).units == 2
    assert cer([f"a{space}b"], ["a b"]).rate == 0


@pytest.mark.parametrize("rate", [wer, cer])
def test_with_an_empty_reference_all_words_are_insertions(rate):
    whole = rate(["", "a b c d", " "], ["a", "a b c d", ""])
    assert (whole.insertions, whole.substitutions, whole.deletions) == (1, 0, 0)
    assert whole.units == rate(["a b c d"], [""]).units
    assert 0 <= whole.low <= whole.rate <= whole.high < float("inf")
    one = rate(["", "a"], ["b", "a"])  # draws without any word
    assert (one.rate, one.low, one.high) == (1.0, 0.0, 1.0)


@pytest.mark.parametrize("rate", [wer, cer])
def test_forms_of_unicode_are_not_errors(rate):
    assert rate(["caf\u00e9 \uac00"], ["cafe\u0301 \u1100\u1161"]).rate == 0
    assert rate(["cafe\u0301"], ["caf\u00e9"]).units == (4 if rate is cer else 1)
    assert normalize_text("Cafe\u0301") == "caf\u00e9"


@pytest.mark.parametrize("call, message", [
    (lambda: wer("hello", "hallo"), r"references, hypotheses: expected a list of texts each, got one text\. Pass \[text\]"),
    (lambda: wer([], []), "references: expected at least one that is not empty"),
    (lambda: wer(["a"], []), "hypotheses: expected 1 texts"),
    (lambda: wer([""], ["a"]), "references: expected at least one that is not empty"),
    (lambda: CharTokenizer().encode("take 7"), r"text: expected .*\['7'\] in 'take 7'"),
    (lambda: load_tokenizer("nowhere.model"), "tokenizer: expected 'char' or a SentencePiece .model file"),
    (lambda: load_tokenizer({"model": b"RIFF".hex()}), "tokenizer: expected a SentencePiece model, got 4 bytes"),
    (lambda: load_tokenizer({"alphabet": ["a"]}), "tokenizer: expected an alphabet of text, got list"),
])  # fmt: skip
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_error_rates_count_case_until_texts_are_normalised():
    reference, hypothesis = "Turn  ON the light", "turn on the\nlight"
    assert wer([reference], [hypothesis]).substitutions == 2
    texts = [normalize_text(reference)], [normalize_text(hypothesis)]
    assert wer(*texts).rate == cer(*texts).rate == 0
