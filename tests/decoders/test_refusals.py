"""What callers and models get wrong: refused in one line, never decoded into something else, never without an end."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asrkit.decoders import (
    ctc_beam,
    ctc_beam_reference,
    ctc_greedy,
    ctc_greedy_sequential,
    transducer_beam,
    transducer_beam_reference,
    transducer_greedy,
)
from asrkit.decoders.transducer import STRATEGIES
from asrkit.decoders.transducer.steps import Carry, first_prediction
from asrkit.models import ConvConfig, LSTMConfig, TransducerConfig, TransducerModel

BEAMS = {"beam": transducer_beam, "reference": transducer_beam_reference}
DECODERS = [*STRATEGIES, *BEAMS]
CTC = {
    "numba_cpu": ctc_greedy,
    "batched": ctc_greedy,
    "sequential": ctc_greedy_sequential,
    "ctc_beam": ctc_beam,
    "ctc_beam_reference": ctc_beam_reference,
}


def decode(name, model, encoded, lengths, **options):
    if name in BEAMS:
        return BEAMS[name](model, encoded, lengths, **{"max_symbols": 2, **options})
    return transducer_greedy(model, encoded, lengths, strategy=name, **options)


def by_ctc(name, log_probs, lengths, **options):
    if CTC[name] is ctc_greedy:
        options["impl"] = name
    return CTC[name](log_probs, lengths, **options)


def refused(call):
    with pytest.raises(ValueError) as error:
        call()
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


WRONG_JOINS = {
    "nothing": (lambda logits: None, "got NoneType."),
    "a tuple": (lambda logits: (logits, 1), "got tuple of ("),
    "fewer tokens than blank": (lambda logits: logits[..., :4], ", 4) torch.float64."),
    "no tokens": (lambda logits: logits[..., :0], ", 0) torch.float64."),
    "one number": (lambda logits: logits.sum(), "got () torch.float64."),
    "another rank": (lambda logits: logits.flatten(), "got ("),
    "a dimension more": (lambda logits: logits[None], "got (1, "),
    "integers": (lambda logits: logits.long(), "torch.int64."),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("wrong", WRONG_JOINS)
def test_logits_that_are_none_are_refused(given, name, wrong):
    model, encoded, lengths = given
    spoil, got = WRONG_JOINS[wrong]
    spoilt = doubled(model, join=lambda frames, predicted: spoil(model.join(frames, predicted)))
    text = refused(lambda: decode(name, spoilt, encoded, lengths))
    assert text.startswith("model.join: expected float logits (") and ", more than 4), got " in text
    assert got in text


def test_logits_of_one_frame_do_not_stand_for_a_window(given):
    model, encoded, lengths = given
    spoilt = doubled(model, join=lambda frames, predicted: model.join(frames[:, :1], predicted))
    text = refused(lambda: transducer_greedy(spoilt, encoded, lengths, window=2))
    assert (
        text
        == "model.join: expected float logits (3, 2, more than 4), got (3, 1, 5) torch.float64."
    )


WRONG_STARTS = {
    "nothing": (
        lambda predicted, state: None,
        "model.predict: expected the pair predicted (B, P), state, got NoneType.",
    ),
    "three": (lambda predicted, state: (predicted, None, None), "state, got tuple of ("),
    "a column": (lambda predicted, state: (predicted[:, 0], None), "state, got tuple of ("),
    "one utterance": (
        lambda predicted, state: (predicted[:1].expand(9, -1), None),
        "model.predict: expected tensors with B=",
    ),
    "layers first": (
        lambda predicted, state: (predicted, predicted.expand(9, -1, -1)),
        "got another. Transpose its state.",
    ),
}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("wrong", WRONG_STARTS)
def test_a_first_prediction_that_is_none_is_refused(given, name, wrong):
    model, encoded, lengths = given
    spoil, wanted = WRONG_STARTS[wrong]
    spoilt = doubled(model, predict=lambda labels, state: spoil(*model.predict(labels, state)))
    assert wanted in refused(lambda: decode(name, spoilt, encoded, lengths))


WRONG_STATES = {
    "appears": (None, ()), "vanishes": ((), None), "grows": ((None,), (None, None)), "other keys": ({"a": None}, {"b": None}),
    "another kind": (torch.zeros(3, 1), (torch.zeros(3, 1),)),
}  # fmt: skip


def test_a_state_with_layers_first_is_refused_where_there_are_as_many_as_utterances():
    class LayersFirst(TransducerModel):
        def predict(self, labels, state):
            if state is not None:
                state = tuple(part.transpose(0, 1) for part in state)
            predicted, after = super().predict(labels, state)
            return predicted, tuple(part.transpose(0, 1) for part in after)

    config = TransducerConfig(
        vocab_size=5, encoder=ConvConfig(width=16, layers=1), predictor=LSTMConfig(layers=2)
    )
    model = LayersFirst(config).eval()
    with pytest.raises(ValueError, match="model.predict: expected tensors with B=3 as first"):
        first_prediction(model, torch.full((2,), 5))
    predicted, _ = first_prediction(TransducerModel(config).eval(), torch.full((2,), 5))
    assert len(predicted) == 2


@pytest.mark.parametrize("name", ["windowed_looping", "label_looping", "frame_looping"])
@pytest.mark.parametrize("wrong", WRONG_STATES)
def test_a_state_keeps_its_structure(given, name, wrong):
    model, encoded, lengths = given
    first, then = WRONG_STATES[wrong]
    spoilt = doubled(
        model,
        predict=lambda labels, state: (
            model.predict(labels)[0],
            first if not (labels < 4).any() else then,
        ),
    )
    assert refused(lambda: decode(name, spoilt, encoded, lengths)).startswith(
        "state: expected one structure throughout, got "
    )


@pytest.mark.parametrize("name", ["windowed_looping", "label_looping", "frame_looping"])
@pytest.mark.parametrize(
    "cut", [lambda part: part[:1], lambda part: part[:, :1]], ids=["one utterance", "one column"]
)
def test_a_later_prediction_is_not_stretched_to_the_batch(given, name, cut):
    model, encoded, lengths = given

    def predict(labels, state):
        predicted, after = model.predict(labels, state)
        return predicted if state is None else cut(predicted), after

    text = refused(lambda: decode(name, doubled(model, predict=predict), encoded, lengths))
    assert text.startswith("model.predict: expected shape (3, 6), as before, got (")


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("blank", [True, np.int64(4), 4.0, torch.tensor(4), None, "4"], ids=repr)
def test_blank_is_an_int(given, name, blank):
    model, encoded, lengths = given
    text = refused(lambda: decode(name, doubled(model, blank=blank), encoded, lengths))
    assert (
        text
        == f"model.blank: expected an index from 0, got {blank!r}. Count it from the front: V - 1, not -1."
    )


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(
    "durations",
    [None, 3, {0, 1}, (True, 0), (0, 10**9), torch.tensor([0, 1]), np.array([0, 1]), iter((0, 1))],
    ids=lambda given: type(given).__name__,
)
def test_durations_are_a_short_sequence_of_ints(make, given, name, durations):
    model = doubled(make("foreign", 1, durations=(0, 1)), durations=durations)
    assert refused(lambda: decode(name, model, *given[1:])).startswith(
        "model.durations: expected a sequence of whole numbers"
    )


@pytest.mark.parametrize("name", DECODERS)
def test_a_model_that_lacks_something_is_told_so(given, name):
    model, encoded, lengths = given
    for missing in ("blank", "predict", "join"):
        part = doubled(model)
        delattr(part, missing)
        text = refused(lambda part=part: decode(name, part, encoded, lengths))
        assert (
            text
            == f"model: expected blank, predict and join, got SimpleNamespace without {missing}."
        )


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("bad", [0, True, 2.0, np.int64(2), None, 10**30], ids=repr)
def test_max_symbols_is_an_int_of_a_size_that_ends(given, name, bad):
    text = refused(lambda: decode(name, *given, max_symbols=bad))
    assert text == f"max_symbols: expected 1 to 1000 labels on a frame, got {bad!r}."


@pytest.mark.parametrize("name", [*BEAMS, "ctc_beam", "ctc_beam_reference"])
@pytest.mark.parametrize(("option", "values"), [
    ("width", (True, 2.0, 10**4)), ("nbest", (True, 1.0)), ("lm_weight", (float("nan"), float("inf"), None, "1")),
    ("label_bonus", (float("nan"), -float("inf"), None)),
])  # fmt: skip
def test_options_of_a_beam_are_numbers_in_range(given, name, option, values):
    for value in values:
        call = partial(by_ctc, name, *given[1:]) if name in CTC else partial(decode, name, *given)
        text = refused(lambda call=call, value=value: call(**{option: value}))
        assert text.startswith(f"{option}: expected ") and text.endswith(f"got {value!r}.")


def test_options_of_greedy_decoding_that_are_no_options(given):
    assert refused(lambda: transducer_greedy(*given, strategy=["windowed_looping"])).endswith(
        "got ['windowed_looping']."
    )
    assert (
        refused(lambda: transducer_greedy(*given, window=True))
        == "window: expected at least 1 frame, or None, got True."
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
    assert found.tokens() == transducer_greedy(model, encoded, lengths, window=1).tokens()


@pytest.mark.parametrize("change", [
    lambda carry: carry._replace(predicted=None), lambda carry: carry._replace(ahead=None),
    lambda carry: carry._replace(frames=carry.frames.float()), lambda carry: carry._replace(ahead=carry.ahead[:, None]),
    lambda carry: carry._replace(predicted=carry.frames),
])  # fmt: skip
def test_a_carry_that_was_taken_apart_is_refused(given, change):
    carry = change(transducer_greedy(*given).carry)
    for name in STRATEGIES:
        text = refused(lambda name=name: decode(name, *given, carry=carry))
        assert (
            text
            == "carry: expected predicted (B, P), and ahead and frames (B,) int64, got others. Pass hypotheses.carry."
        )


@pytest.mark.parametrize("name", ["windowed_looping", "label_looping", "frame_looping"])
def test_a_carry_of_a_model_with_another_state_is_refused(make, speak, given, name):
    carry = transducer_greedy(make("lstm", 1), *speak("lstm", 3, 5, 1)).carry._replace(
        predicted=torch.zeros(3, 6).double()
    )
    model = doubled(
        given[0], predict=lambda labels, state: given[0].predict(labels)
    )  # takes any state
    assert refused(lambda: decode(name, model, *given[1:], carry=carry)).startswith(
        "state: expected one structure throughout"
    )


def test_carries_of_different_models_do_not_join(make, speak, given):
    own, other = (
        transducer_greedy(*given).carry,
        transducer_greedy(make("lstm", 1), *speak("lstm", 3, 5, 1)).carry,
    )
    text = refused(lambda: Carry.join([own, other]))
    assert (
        text
        == "carries: expected states of one model, got (4,) torch.float64 beside (6,) torch.float64."
    )
    text = refused(lambda: Carry.join([own, own._replace(predicted=own.predicted.float())]))
    assert (
        text
        == "carries: expected states of one model, got (6,) torch.float32 beside (6,) torch.float64."
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_nan_comes_to_an_end_and_shows_in_the_score_of_that_utterance_alone(given, name):
    model, encoded, _ = given
    encoded[0, 2] = torch.nan
    found = decode(name, model, encoded, torch.tensor([5, 5, 3]), max_symbols=3)
    assert found.scores.isnan().tolist() == [True, False, False]
    assert found.lengths.max() <= 15


@pytest.mark.parametrize("name", BEAMS)
def test_of_an_utterance_with_nan_a_beam_keeps_nothing(given, name):
    model, encoded, _ = given
    encoded[0, 2] = torch.nan
    found = decode(name, model, encoded, torch.tensor([5, 5, 3]))
    assert found.scores.isfinite().tolist() == [False, True, True]
    assert found.tokens()[0] == []


ODD = {
    "sparse": lambda dense: dense.to_sparse(), "meta": lambda dense: dense.to("meta"),
    "nested": lambda dense: torch.nested.nested_tensor([dense[0], dense[1]], layout=torch.jagged),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DECODERS, *CTC])
@pytest.mark.parametrize("kind", ODD)
def test_tensors_without_plain_numbers_are_refused(given, name, kind):
    call, lengths = (by_ctc, ()) if name in CTC else (decode, (given[0],))
    argument = "log_probs" if name in CTC else "encoded"
    text = refused(lambda: call(name, *lengths, ODD[kind](given[1][:2]), given[2][:2]))
    assert text == f"{argument}: expected a dense tensor with numbers in it, got another kind."
    text = refused(lambda: call(name, *lengths, given[1][:2], given[2][:2].to_sparse()))
    assert text == "lengths: expected a dense tensor with numbers in it, got another kind."


@pytest.mark.parametrize("name", CTC)
def test_scores_of_eight_bits_and_under_vmap_are_refused(name):
    log_probs, lengths = torch.zeros(2, 3, 4), torch.tensor([3, 2])
    text = refused(lambda: by_ctc(name, log_probs.to(torch.float8_e4m3fn), lengths))
    assert text == "log_probs: expected a float dtype of 16 bits or more, got torch.float8_e4m3fn."
    text = refused(
        lambda: torch.vmap(lambda part: by_ctc(name, part, lengths).scores)(log_probs[None])
    )
    assert text == "log_probs: expected a dense tensor with numbers in it, got another kind."


@pytest.mark.parametrize("name", CTC)
@pytest.mark.parametrize(
    "blank",
    [True, np.True_, 1.0, torch.tensor(1), torch.tensor([1, 2]), np.array([1]), None],
    ids=repr,
)
def test_blank_of_ctc_is_a_whole_number(name, blank):
    text = refused(lambda: by_ctc(name, torch.zeros(2, 3, 4), torch.tensor([3, 2]), blank=blank))
    assert text == f"blank: expected an index of V=4 tokens, got {blank}."


@pytest.mark.parametrize("name", CTC)
def test_numbers_of_numpy_and_negated_views_are_what_they_stand_for(name):
    log_probs, lengths = (
        torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([7, 5]),
    )
    found = by_ctc(name, torch._neg_view(log_probs), lengths, blank=np.int32(-4))
    assert (
        found.tokens()
        == by_ctc(name, -log_probs, lengths, blank=0).tokens()
        != by_ctc(name, log_probs, lengths).tokens()
    )


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_what_calls_a_decoder_may_be_compiled(make):
    model, generator = make("foreign", 1, durations=(0, 1)), torch.Generator().manual_seed(1)
    encoded, lengths = torch.randn(2, 3, 4, generator=generator).double(), torch.tensor([3, 2])
    for name in ("numba_cpu", "sequential", "windowed_looping", "beam", "reference", "ctc_beam"):
        plain = partial(by_ctc, name) if name in CTC else partial(decode, name, model)
        found = torch.compile(
            lambda part, plain=plain: plain(2 * part, lengths).labels + 1, backend="eager"
        )(encoded)
        assert torch.equal(found, plain(2 * encoded, lengths).labels + 1), name


@pytest.mark.parametrize("name", [*DECODERS, *CTC])
def test_defaults_for_new_tensors_do_not_matter(given, name):
    model, encoded, lengths = given
    call = (
        (lambda: by_ctc(name, encoded, lengths))
        if name in CTC
        else (lambda: decode(name, model, encoded, lengths))
    )
    wanted = call()
    with torch.device("meta"):
        found = call()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        wide = call()
    finally:
        torch.set_default_dtype(before)
    for other in (found, wide):
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype
            for a, b in zip(other.parts(), wanted.parts(), strict=True)
        )
