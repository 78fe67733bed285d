"""Five common reasons why a host waits for a GPU, and what to write instead."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asrkit.shapes import valid_mask
from asrkit.workbench.measure import launch_profile

T = 40


class Cure(NamedTuple):
    """An expression that waits, and one that computes the same without a wait."""

    wanted: str
    written: str
    instead: str


CURES = (
    Cure("the mean of what is valid", "loud[valid].mean()", "(loud * valid).sum() / valid.sum()"),
    Cure(
        "scale what is too loud",
        "loud / loud.max() if loud.max() > 1 else loud",
        "loud / loud.max().clamp(min=1)",
    ),
    Cure("the first loud frame", "(loud[0] > 1).nonzero()[0, 0]", "(loud[0] > 1).int().argmax()"),
    Cure(
        "sums of utterances",
        "torch.stack([row[:n].sum() for row, n in zip(loud, ends.tolist())])",
        "(loud * valid).sum(1)",
    ),
    Cure("durations of the best", 'torch.tensor([0, 1, 2], device="cpu")[best]', "table[best]"),
)


def tensors(B: int, seed: int = 0) -> dict[str, Tensor]:
    """What the expressions of `CURES` read, by name.

    Args:
        B: Utterances.
        seed: Of the values.
    """
    generator = torch.Generator().manual_seed(seed)
    ends = torch.linspace(T - 5, T // 2, B).long()
    return {
        "loud": torch.randn(B, T, generator=generator).abs(),
        "ends": ends,
        "valid": valid_mask(ends, T),
        "best": torch.arange(B) % 3,
        "table": torch.tensor([0, 1, 2]),  # made once, on the device that reads it
    }


def counted(B: int, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each cure: both expressions, and how often each of them would wait.

    Args:
        B: Utterances.
        seed: Of the values.

    Raises:
        AssertionError: The two compute different numbers.
    """
    names = {"torch": torch, **tensors(B, seed)}
    rows = []
    for cure in CURES:
        written = partial(eval, cure.written, names)
        instead = partial(eval, cure.instead, names)
        assert torch.allclose(written().float(), instead().float()), cure.wanted
        rows.append(
            {
                "wanted": cure.wanted,
                "waits": launch_profile(written).syncs,
                "written": cure.written,
                "waits ": launch_profile(instead).syncs,
                "instead": cure.instead,
            }
        )
    return rows
