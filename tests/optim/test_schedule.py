"""The learning rate at every corner, against its formula."""

import pytest

from asrkit.optim import WarmUpHoldDecay

# NVIDIA's settings for a batch of 2,048 in MLPerf training 1.1, at 136 steps an epoch
RATE = WarmUpHoldDecay(
    peak=0.007, warm_up_epochs=6, hold_epochs=33, gamma=0.939, steps_per_epoch=136
)
LAST = 39 * 136  # the first step that decays


@pytest.mark.parametrize(("step", "epoch", "wanted"), [
    (0, 1, 0.007 / 817),
    (1, 1, 2 * 0.007 / 817),
    (815, 6, 0.007 * 816 / 817),
    (816, 6, 0.007),
    (817, 7, 0.007),
    (LAST - 1, 39, 0.007),
    (LAST - 1, 45, 0.007),
    (LAST, 39, 0.007),
    (LAST, 40, 0.007 * 0.939),
    (LAST + 1, 40, 0.007 * 0.939),
    (LAST + 137, 41, 0.007 * 0.939**2),
    (20_000, 147, 1e-5),
])  # fmt: skip
def test_every_corner_is_the_formula(step, epoch, wanted):
    assert RATE.rate(step, epoch) == pytest.approx(max(1e-5, wanted), rel=1e-12)


def test_the_least_rate_holds_in_the_warm_up_too():
    assert RATE.rate(0, 1) == 1e-5  # 0.007 / 817 is less
    steep = WarmUpHoldDecay(
        peak=1.0, warm_up_epochs=1, hold_epochs=0, gamma=0.5, steps_per_epoch=4, least=0.0
    )
    assert [steep.rate(step, 1) for step in range(4)] == [0.2, 0.4, 0.6, 0.8]
    assert [steep.rate(step, epoch) for step, epoch in ((4, 1), (5, 2), (9, 3))] == [1, 0.5, 0.25]


def test_without_warm_up_and_plateau_it_decays_at_once():
    rate = WarmUpHoldDecay(peak=1.0, warm_up_epochs=0, hold_epochs=0, gamma=0.5, steps_per_epoch=10)
    assert [rate.rate(0, 0), rate.rate(1, 1)] == [1.0, 0.5]


@pytest.mark.parametrize(("wrong", "said"), [
    ({"peak": 0.0}, "peak: expected above 0, got 0.0."),
    ({"gamma": 1.5}, "gamma: expected above 0, at most 1, got 1.5."),
    ({"gamma": 0.0}, "gamma: expected above 0"),
    ({"steps_per_epoch": 0}, "steps_per_epoch: expected at least 1, got 0."),
    ({"warm_up_epochs": -1}, "warm_up_epochs: expected at least 0, got -1."),
    ({"hold_epochs": 1.5}, "hold_epochs: expected a whole number, got 1.5."),
    ({"least": -1e-5}, "least: expected at least 0"),
])  # fmt: skip
def test_a_wrong_setting_is_named(wrong, said):
    settings = {
        "peak": 0.1,
        "warm_up_epochs": 1,
        "hold_epochs": 1,
        "gamma": 0.9,
        "steps_per_epoch": 5,
    }
    with pytest.raises(ValueError) as raised:
        WarmUpHoldDecay(**(settings | wrong))
    assert said in str(raised.value)
