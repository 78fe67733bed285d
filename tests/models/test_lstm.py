"""The LSTM encoder: phases change nothing but the padding that is computed."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch

from asrkit.models import (
    LSTMConfig,
    LSTMEncoder,
    LSTMEncoderConfig,
    phases,
    presets,
)
from asrkit.models.lstm import INITIAL_SCALE, stack_frames
from asrkit.models.transducer import LSTMPredictor
from asrkit.workbench.measure import host_reads

SMALL = LSTMEncoderConfig(
    bins=6, width=8, before=2, after=2, stack_input=3, dropout=0.0
)
BATCHES = {
    "ragged": [50, 33, 1, 8, 27, 50, 12],
    "odd": [59, 51, 47, 41, 35, 31, 25, 21],
    "equal": [24, 24, 24],
    "one row": [37],
    "one frame": [1, 1],
}


def encoder(count, config=SMALL):
    torch.manual_seed(0)
    return LSTMEncoder(replace(config, phases=count)).double()


def speech(lengths, seed=0):
    """Random features, in the padding too, and the lengths."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(len(lengths), max(lengths) + 3, SMALL.bins, generator=draw)
    return features.double(), torch.tensor(lengths)


def alone(model, features, lengths):
    """The reference: each utterance by itself, without padding; its encoded frames."""
    found = []
    for row, length in zip(features, lengths.tolist(), strict=True):
        encoded, _ = model(row[None, :length], torch.tensor([length]))
        found.append(encoded[0])
    return found


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
def test_phases_give_the_frames_and_gradients_of_each_utterance_alone(name, count):
    features, lengths = speech(BATCHES[name])
    results = []
    for phased in (False, True):
        model = encoder(count)
        given = features.clone().requires_grad_()
        if phased:
            encoded, ends = model(given, lengths)
            rows = [row[:end] for row, end in zip(encoded, ends.tolist(), strict=True)]
            assert ends.tolist() == [-(-length // 6) for length in lengths.tolist()]
        else:
            rows = alone(model, given, lengths)
        loss = sum(
            (row * torch.arange(1, row.numel() + 1).view_as(row)).sum() for row in rows
        )
        loss.backward()
        weights = [weight.grad for weight in model.parameters()]
        results.append([*rows, given.grad, *weights])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("filler", [1e3, float("nan")])
def test_what_lies_in_the_padding_cannot_matter_where_lengths_are_odd(count, filler):
    """Without a mask before stacking, the last pair holds a frame that the LSTM has filled."""
    features, lengths = speech(
        [59, 49, 41, 25, 7, 5]
    )  # all odd, in stacked frames too: 20 17 14
    model = encoder(count)
    wanted, _ = model(features, lengths)
    for row, length in enumerate(lengths.tolist()):
        features[row, length:] = filler
    got, ends = model(features, lengths)
    assert torch.equal(got, wanted)
    for row, end in enumerate(ends.tolist()):
        assert not got[row, end:].any()


def test_frames_are_masked_before_they_are_stacked():
    x = torch.arange(1.0, 11.0).view(5, 2, 1)  # (T, B, D)
    stacked, lengths = stack_frames(x, torch.tensor([5, 3]), 2)
    assert stacked[:, 0].tolist() == [[1, 3], [5, 7], [9, 0]]
    assert stacked[:, 1].tolist() == [[2, 4], [6, 0], [0, 0]]
    assert lengths.tolist() == [3, 2]


def cells(planned):
    starts = [0, *[end for end, _ in planned]]
    return sum(
        (end - start) * rows
        for start, (end, rows) in zip(starts, planned, strict=False)
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_dynamic_programme_finds_the_fewest_cells_of_all_divisions(seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (7,), generator=draw).tolist()
    rounded = [-(-length // 2) * 2 for length in lengths]
    ends = sorted(set(rounded))
    for count in range(1, min(len(ends), max(rounded) // 2) + 1):
        fewest = min(
            sum(
                (end - start) * sum(length > start for length in rounded)
                for start, end in pairwise([0, *chosen, ends[-1]])
            )
            for chosen in combinations(ends[:-1], count - 1)
        )
        planned = phases(lengths, count)
        assert cells(planned) == fewest
        assert len(planned) == count
        assert planned[0][1] == len(lengths) and planned[-1][0] == ends[-1]


def test_enough_phases_leave_no_padding_but_that_of_stacking():
    lengths = [21, 14, 14, 9, 3]
    assert cells(phases(lengths, 8)) == sum(-(-length // 2) * 2 for length in lengths)
    assert phases([24] * 5, 8) == [(24, 5)], "equal lengths are one phase"


def test_the_forget_gate_starts_as_published():
    model = encoder(1)
    for lstm in (model.before, model.after):
        D = lstm.hidden_size
        for name, weight in lstm.named_parameters():
            bound = INITIAL_SCALE / D**0.5  # torch draws up to 1 / sqrt(D)
            if name.startswith("bias"):
                wanted = INITIAL_SCALE * name.startswith("bias_ih")
                assert weight[D : 2 * D].eq(wanted).all()
                weight = torch.cat([weight[:D], weight[2 * D :]])
            assert 0 < weight.abs().max() <= bound


def predictor(**settings):
    torch.manual_seed(0)
    return LSTMPredictor(9, LSTMConfig(width=8, layers=2, **settings)).double()


def test_a_predictor_starts_as_published_or_as_torch_starts_it():
    plain = predictor()
    scaled = predictor(start="mlperf")
    for name, weight in plain.named_parameters():
        wanted = weight.clone()
        if name.startswith("lstm."):
            if "bias_ih" in name:
                wanted[8:16] = 1
            if "bias_hh" in name:
                wanted[8:16] = 0
            wanted *= INITIAL_SCALE
        torch.testing.assert_close(scaled.state_dict()[name], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("U", [1, 5])
def test_dropout_of_a_predictor_adds_no_weights_and_drops_in_training_only(U):
    plain = predictor()
    dropping = predictor(dropout=0.5)
    assert dropping.state_dict().keys() == plain.state_dict().keys()
    labels = torch.arange(3 * U).reshape(3, U) % 9
    wanted, wanted_state = plain(labels, None)
    got, state = dropping.eval()(labels, None)
    torch.testing.assert_close((got, state), (wanted, wanted_state), rtol=0, atol=0)
    torch.manual_seed(1)
    dropped, state = dropping.train()(labels, None)
    assert 0.2 < dropped.eq(0).double().mean() < 0.8
    assert not state[0].eq(0).any(), "the state that the next label takes is whole"
    assert not torch.allclose(state[0][:, 1], wanted_state[0][:, 1]), (
        "dropped between layers"
    )
    torch.testing.assert_close(state[0][:, 0], wanted_state[0][:, 0])


def test_bfloat16_and_autocast_run_in_phases():
    features, lengths = speech(BATCHES["ragged"])
    model = encoder(4)
    exact, _ = model(features, lengths)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = model.float()(features.float(), lengths)
    half, _ = model.bfloat16()(features.float(), lengths)
    for encoded in (cast, half):
        assert encoded.dtype == torch.bfloat16
        assert (encoded.double() - exact).abs().max() < 0.01 * exact.abs().max()


def test_a_step_in_phases_with_lengths_on_the_host_never_waits_for_the_device():
    """At the published width; meta tensors stand for those of a GPU."""
    with torch.device("meta"):
        model = LSTMEncoder(presets.mlperf_rnnt().encoder)
        features = torch.zeros(64, 60, 80)
    lengths = torch.arange(64) % 60 + 1

    def step():
        encoded, ends = model(features, lengths)
        assert encoded.device.type == "meta" and ends.device.type == "cpu"
        encoded.sum().backward()

    planned = model._plan(lengths, 60)
    assert len(planned) == 8
    assert host_reads(step, device="meta") == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LSTMEncoderConfig(phases=0),
            "phases: expected at least 1, got 0",
        ),
        (
            lambda: phases([9, 4], 0),
            "count: expected a whole number from 1 to 5, .*got 0",
        ),
        (lambda: phases([9, 0], 2), "lengths: expected at least one frame each, got 0"),
        (
            lambda: encoder(2)(*speech([9, 0])),
            "lengths: expected at least one frame each, got 0",
        ),
        (
            lambda: encoder(2)(torch.zeros(1, 9, 6), torch.tensor([10])),
            "lengths: expected at most 9, the frames of features, got 10",
        ),
    ],
)
def test_bad_input_is_one_clear_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()
