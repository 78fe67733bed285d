"""The LSTM encoder: phases change only the computed padding."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch

from asrkit.models import LSTMConfig, LSTMEncoder, LSTMEncoderConfig, phases
from asrkit.models.cpu.prepacked import onednn_supports
from asrkit.models.lstm import INITIAL_SCALE, stack_frames
from asrkit.models.transducer import LSTMPredictor

BFLOAT16 = pytest.mark.skipif(
    not onednn_supports(torch.bfloat16),
    reason="needs a CPU with products of bfloat16 in oneDNN",
)

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
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_phases_give_the_frames_and_gradients_of_each_utterance_alone(name, count):
    features, lengths = speech(BATCHES[name])
    results = []
    for phased in (False, True):
        model = encoder(count)
        given = features.clone().requires_grad_()
        rows = alone(model, given, lengths)
        if phased:
            encoded, ends = model(given, lengths)
            rows = [row[:end] for row, end in zip(encoded, ends, strict=True)]
        everything = torch.cat([row.flatten() for row in rows])
        (everything * torch.arange(everything.numel())).sum().backward()
        weights = [weight.grad for weight in model.parameters()]
        results.append([*rows, given.grad, *weights])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("seed", range(5))
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
        assert planned[0][1] == len(lengths)
        assert planned[-1][0] == ends[-1]


def test_enough_phases_leave_no_padding_but_that_of_stacking():
    lengths = [21, 14, 14, 9, 3]
    assert cells(phases(lengths, 8)) == sum(-(-length // 2) * 2 for length in lengths)
    assert phases([24] * 5, 8) == [(24, 5)], "equal lengths are one phase"


def predictor(**settings):
    torch.manual_seed(0)
    return LSTMPredictor(9, LSTMConfig(width=8, layers=2, **settings)).double()


def test_lstms_start_as_published_or_as_torch_starts_them():
    torch.manual_seed(0)
    drawn = torch.nn.LSTM(18, 8, 2).double()
    pairs = [
        (predictor().lstm, predictor(start="mlperf").lstm),
        (drawn, encoder(1).before),
    ]
    for plain, started in pairs:
        for name, weight in plain.state_dict().items():
            if "bias" in name:
                weight[8:16] = float("bias_ih" in name)  # the forget gate's
            weight *= INITIAL_SCALE
            torch.testing.assert_close(started.state_dict()[name], weight)


@pytest.mark.parametrize("U", [1, 5])
def test_dropout_of_a_predictor_adds_no_weights_and_drops_in_training_only(U):
    plain = predictor()
    dropping = predictor(dropout=0.5)
    assert dropping.state_dict().keys() == plain.state_dict().keys()
    labels = torch.arange(3 * U).reshape(3, U) % 9
    wanted, wanted_state = plain(labels, None)
    got, state = dropping.eval()(labels, None)
    torch.testing.assert_close((got, state), (wanted, wanted_state), rtol=0, atol=0)
    dropped, state = dropping.train()(labels, None)
    assert dropped.eq(0).any()
    assert not state[0].eq(0).any(), "the state that the next label takes is whole"
    first, second = state[0].unbind(1)
    torch.testing.assert_close(first, wanted_state[0][:, 0])
    assert not torch.allclose(second, wanted_state[0][:, 1]), "dropped between layers"


@pytest.mark.parametrize("way", ["weights", pytest.param("autocast", marks=BFLOAT16)])
def test_bfloat16_runs_in_phases(way):
    features, lengths = speech(BATCHES["ragged"])
    model = encoder(4)
    exact, _ = model(features, lengths)
    model = model.float() if way == "autocast" else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        half, _ = model(features.float(), lengths)
    assert half.dtype == torch.bfloat16
    assert (half.double() - exact).abs().max() < 0.02 * exact.abs().max()
