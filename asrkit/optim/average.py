"""The exponential moving average of weights, and its exchange with the weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from asrkit.optim.norms import local
from asrkit.shapes import expect


class Average:
    """Averaged weights: after n updates, average <- average + (1 - d) (weight - average).

    Of floating-point tensors it is an average; integers (a count of batches) are copied. Floor of
    an update: 12 bytes a weight in float32, both read and the average written.

    >>> weight = torch.zeros(1)
    >>> average = Average([weight], 0.9, warm_up=False)
    >>> weight.fill_(1.0), average.update()
    (tensor([1.]), None)
    >>> with average.swapped():
    ...     print(weight)
    tensor([0.1000])

    Args:
        source: a module, whose parameters and buffers are averaged by their names; or tensors,
            whose names are "0", "1" and so on. They may be DTensors.
        decay: d, share of the average that stays, from 0 to 1.
        warm_up: whether d is min(decay, (1 + n) / (10 + n)) at update n, counted from 0: the first
            weights, which are random, are forgotten soon.

    Attributes:
        values: the averages by name. In `swapped`, the weights that were trained.
        updates: how many there were.

    Raises:
        ValueError: decay is out of range, or there is nothing to average.
    """

    def __init__(
        self, source: nn.Module | Iterable[Tensor], decay: float, *, warm_up: bool = True
    ) -> None:
        number = isinstance(decay, int | float) and not isinstance(decay, bool)
        expect(number and 0 <= decay <= 1, "decay", "a share from 0 to 1", decay)
        self.decay = decay
        self.warm_up = warm_up
        self.updates = 0
        self._source = source
        if not isinstance(source, nn.Module):
            self._source = list(source)
        with torch.no_grad():
            weights = self._weights()
            self.values = {name: weight.detach().clone() for name, weight in weights.items()}
        expect(bool(self.values), "source", "a module or tensors with weights", "none")
        self._is_swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights; to be called after each optimizer step."""
        self._expect_home("update")
        decay = self.next_decay()
        weights = self._weights()
        averages: list[Tensor] = []
        averaged_weights: list[Tensor] = []
        for name, value in self.values.items():
            if value.is_floating_point():
                averages.append(local(value))
                averaged_weights.append(local(weights[name]))
            else:
                value.copy_(weights[name])
        torch._foreach_lerp_(averages, averaged_weights, 1 - decay)
        self.updates += 1

    def next_decay(self) -> float:
        """The share of the averages that the next update keeps."""
        if not self.warm_up:
            return self.decay
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within it, the weights have the values of the averages; after it, again their own.

        Values are exchanged in place, a tensor at a time: it takes the memory of the largest. The
        weights return bit for bit, also after an exception.
        """
        self._expect_home("swapped")
        weights = self._weights()
        exchanged: list[str] = []
        self._is_swapped = True
        try:
            for name in self.values:
                _exchange(weights[name], self.values[name])
                exchanged.append(name)
            yield
        finally:
            for name in reversed(exchanged):
                _exchange(weights[name], self.values[name])
            self._is_swapped = False

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes: the averages by name, which are not copied, and updates."""
        self._expect_home("state_dict")
        return {"values": dict(self.values), "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take averages and their number of updates.

        Args:
            state_dict: of an average of the same weights; its decay may have been another.

        Raises:
            ValueError: names or shapes differ from those of the weights.
        """
        self._expect_home("load_state_dict")
        saved = state_dict["values"]
        differing = sorted(saved.keys() ^ self.values.keys())
        wanted = f"averages of the same {len(self.values)} weights"
        expect(not differing, "state_dict", wanted, f"others: {', '.join(differing[:3])}")
        for name, value in self.values.items():
            shape = tuple(saved[name].shape)
            wanted = f"{name} of shape {tuple(value.shape)}"
            expect(shape == tuple(value.shape), "state_dict", wanted, shape)
        for name, value in self.values.items():
            value.copy_(saved[name])
        self.updates = state_dict["updates"]

    def _weights(self) -> dict[str, Tensor]:
        """What is averaged, by name, as it is now."""
        if isinstance(self._source, nn.Module):
            return dict(self._source.state_dict())
        return {str(index): weight.detach() for index, weight in enumerate(self._source)}

    def _expect_home(self, name: str) -> None:
        """Raise ValueError while the weights hold the averages."""
        remedy = "Leave `with average.swapped()` first."
        expect(not self._is_swapped, name, "the weights in their place", "them swapped", remedy)


@torch.no_grad()
def _exchange(weight: Tensor, average: Tensor) -> None:
    """Give each tensor the values of the other."""
    mine = local(weight)
    other = local(average)
    kept = mine.clone()
    mine.copy_(other)
    other.copy_(kept)
