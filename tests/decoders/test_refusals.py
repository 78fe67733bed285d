"""Bad calls of the transducer and CTC decoders: one line, never decoded into something else, never without an end."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from asrkit.decoders import (
    ctc_beam,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_greedy,
)
from asrkit.decoders.transducer import STRATEGIES

BATCHED = [strategy for strategy in STRATEGIES if strategy != "one_by_one"]
CTC = {
    "numba_cpu": partial(ctc_greedy, impl="numba_cpu"),
    "batched": partial(ctc_greedy, impl="batched"),
    "sequential": ctc_greedy_sequential,
    "beam": ctc_beam,
}


def refused(call, *given, **options):
    with pytest.raises(ValueError) as error:
        call(*given, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def doubled(model, **changes):
    """The model with some of its attributes replaced."""
    parts = {
        "blank": model.blank,
        "durations": model.durations,
        "predict": model.predict,
        "join": model.join,
    }
    return SimpleNamespace(**{**parts, **changes})


@pytest.fixture
def given(make):
    """A model that speaks on every frame, and three utterances for it: one is silent."""
    generator = torch.Generator().manual_seed(1)
    return (
        make("foreign", 1, bias=-2),
        torch.randn(3, 5, 4, generator=generator).double(),
        torch.tensor([5, 0, 3]),
    )


def joins(spoil):
    return lambda model: {
        "join": lambda frames, before: spoil(model.join(frames, before))
    }


def predicts(spoil):
    return lambda model: {
        "predict": lambda labels, state: spoil(*model.predict(labels, state))
    }


def has(**parts):
    return lambda model: parts


BLANK = "model.blank: expected an index from 0, got "
BAD_MODELS = [
    (joins(lambda logits: logits[..., :4]), "'more than 4'), got ("),
    (joins(lambda logits: logits[None]), "got (1, "),
    (
        predicts(lambda before, state: (before, before.expand(9, -1, -1))),
        "Transpose its state.",
    ),
    (has(blank=-1), f"{BLANK}-1. Count it from the front: V - 1, not -1."),
    (has(blank=None), BLANK),
]


@pytest.mark.parametrize("number", range(len(BAD_MODELS)))
def test_a_model_that_does_not_follow_the_protocol_is_refused(given, number):
    model, encoded, lengths = given
    spoil, wanted = BAD_MODELS[number]
    spoilt = doubled(model, **spoil(model))
    for strategy in STRATEGIES:
        assert wanted in refused(
            transducer_greedy, spoilt, encoded, lengths, strategy=strategy
        )


def test_a_model_that_lacks_something_is_refused(given):
    model, encoded, lengths = given
    part = SimpleNamespace(blank=model.blank, join=model.join)
    wanted = (
        "model: expected blank, predict, join, got SimpleNamespace without predict."
    )
    assert refused(transducer_greedy, part, encoded, lengths) == wanted


def test_logits_of_one_frame_do_not_stand_for_a_window(given):
    model, encoded, lengths = given
    spoilt = doubled(
        model, join=lambda frames, before: model.join(frames[:, :1], before)
    )
    wanted = "model.join: expected logits (3, 2, 'more than 4'), got (3, 1, 5)."
    assert refused(transducer_greedy, spoilt, encoded, lengths, window=2) == wanted


@pytest.mark.parametrize("strategy", BATCHED)
def test_a_prediction_keeps_its_shape(given, strategy):
    model, encoded, lengths = given
    for cut in (lambda part: part[:1], lambda part: part[:, :1]):

        def shrinking(labels, state, cut=cut):
            predicted, after = model.predict(labels, state)
            return predicted if state is None else cut(predicted), after

        spoilt = doubled(model, predict=shrinking)
        text = refused(transducer_greedy, spoilt, encoded, lengths, strategy=strategy)
        assert text.startswith("model.predict: expected shape (3, 6), as before, got (")


MOST = "max_symbols: expected 1 to 1000 labels on a frame, got "
BAD_OPTIONS = [
    ({"max_symbols": 0}, f"{MOST}0."),
    ({"max_symbols": 10**30}, f"{MOST}{10**30}."),
    ({"strategy": ["windowed_looping"]}, "got ['windowed_looping']."),
    ({"window": True}, "window: expected at least 1 frame, or None, got True."),
]


@pytest.mark.parametrize(("options", "wanted"), BAD_OPTIONS)
def test_options_of_greedy_decoding_that_are_no_options(given, options, wanted):
    assert refused(transducer_greedy, *given, **options).endswith(wanted)


@pytest.mark.parametrize(("option", "values"), [
    ("width", (0, 10**4)), ("nbest", (9,)), ("lm_weight", (float("nan"), "1")),
    ("label_bonus", (-float("inf"),)),
])  # fmt: skip
def test_options_of_a_beam_are_numbers_in_range(given, option, values):
    for value in values:
        text = refused(ctc_beam, *given[1:], **{option: value})
        assert text.startswith(f"{option}: expected ") and text.endswith(
            f"got {value!r}."
        )


def test_a_window_costs_no_more_than_the_frames_there_are(given):
    model, encoded, lengths = given
    seen = []
    wide = doubled(
        model,
        join=lambda frames, predicted: (
            seen.append(frames.shape[1]) or model.join(frames, predicted)
        ),
    )
    found = transducer_greedy(wide, encoded, lengths, window=10**12)
    assert set(seen) == {5}
    assert (
        found.tokens() == transducer_greedy(model, encoded, lengths, window=1).tokens()
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_comes_to_an_end_and_shows_in_the_score_of_that_utterance_alone(
    given, strategy
):
    model, encoded, _ = given
    encoded[0, 2] = torch.nan
    lengths = torch.tensor([5, 5, 3])
    found = transducer_greedy(model, encoded, lengths, strategy=strategy, max_symbols=3)
    assert found.scores.isnan().tolist() == [True, False, False]
    assert found.lengths.max() <= 15


@pytest.mark.parametrize("name", CTC)
def test_bad_scores_and_blanks_of_ctc_are_refused(name):
    log_probs, lengths = torch.zeros(2, 3, 4), torch.tensor([3, 2])
    text = refused(CTC[name], log_probs.to(torch.float8_e4m3fn), lengths)
    assert (
        text
        == "log_probs: expected a float dtype of 16 bits or more, got torch.float8_e4m3fn."
    )
    for blank in (4, True, 1.0, None):
        text = refused(CTC[name], log_probs, lengths, blank=blank)
        assert text == f"blank: expected an index of V=4 tokens, got {blank}."


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_what_calls_a_decoder_may_be_compiled(make):
    model, generator = (
        make("foreign", 1, durations=(0, 1)),
        torch.Generator().manual_seed(1),
    )
    encoded, lengths = (
        torch.randn(2, 3, 4, generator=generator).double(),
        torch.tensor([3, 2]),
    )
    calls = [CTC[name] for name in ("numba_cpu", "sequential", "beam")]
    for plain in (*calls, partial(transducer_greedy, model)):
        compiled = torch.compile(
            lambda part, plain=plain: plain(2 * part, lengths).labels + 1,
            backend="eager",
        )
        assert torch.equal(compiled(encoded), plain(2 * encoded, lengths).labels + 1)
