"""The learning rate of MLPerf's RNN-T: a warm-up by steps, a plateau, an exponential decay by
epochs.
"""

from dataclasses import dataclass

from asrkit.shapes import expect, expect_types


@dataclass(frozen=True, kw_only=True)
class WarmUpHoldDecay:
    """rate(step, epoch): rises linearly, is held, then falls by `gamma` every epoch.

        peak (step + 1) / (W + 1)             while step < W = warm_up_epochs * steps_per_epoch
        peak                                  for hold_epochs * steps_per_epoch steps more
        peak gamma^(epoch - warm_up_epochs - hold_epochs)              from there on

    and at least `least`. Source: MLCommons training results 1.0 to 2.0, NVIDIA's rnnt, `lr_policy`,
    whose steps and epochs both start at 1. So the first decayed epoch has a rate of peak * gamma.

    Args:
        peak: highest learning rate.
        warm_up_epochs: epochs in which the rate rises.
        hold_epochs: epochs at the peak.
        gamma: factor of the rate from one epoch to the next; above 0, at most 1.
        steps_per_epoch: optimizer steps.
        least: lowest rate, of the warm-up too.

    Raises:
        ValueError: a value of the wrong type or out of range.
    """

    peak: float
    warm_up_epochs: int
    hold_epochs: int
    gamma: float
    steps_per_epoch: int
    least: float = 1e-5

    def __post_init__(self) -> None:
        expect_types(self)
        expect(self.peak > 0, "peak", "above 0", self.peak)
        expect(0 < self.gamma <= 1, "gamma", "above 0, at most 1", self.gamma)
        expect(self.steps_per_epoch >= 1, "steps_per_epoch", "at least 1", self.steps_per_epoch)
        for name in ("warm_up_epochs", "hold_epochs", "least"):
            value = getattr(self, name)
            expect(value >= 0, name, "at least 0", value)

    @property
    def decay_step(self) -> int:
        """The first step after warm-up and plateau."""
        return (self.warm_up_epochs + self.hold_epochs) * self.steps_per_epoch

    def rate(self, step: int, epoch: int) -> float:
        """The learning rate.

        Args:
            step: optimizer step of the whole run.
            epoch: its epoch, which only the decay reads.
        """
        warm_up_steps = self.warm_up_epochs * self.steps_per_epoch
        if step < warm_up_steps:
            factor = (step + 1) / (warm_up_steps + 1)
        elif step < self.decay_step:
            factor = 1.0
        else:
            factor = self.gamma ** (epoch - self.warm_up_epochs - self.hold_epochs)
        return max(self.least, self.peak * factor)
