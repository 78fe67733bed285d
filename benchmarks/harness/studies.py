"""The records of claims that are measured together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asrkit.workbench.measure import Timing
from asrkit.workbench.measure.publishing import of_samples, time_ratio
from asrkit.workbench.records import Measurement


class StudyRecords:
    """Makes the measurements of one study, which share these params.

    Args:
        device: that is measured.
        quick: sizes are toy sizes, which settle no claim.
        params: more params of every record.
    """

    def __init__(self, device: str, quick: bool, **params: Any) -> None:
        toy = {"quick": True} if quick else {}  # on a CPU sizes are toy sizes without --quick too
        self.params = {"weights": "random", "device": device, "suite": "claims", **toy, **params}

    def value(
        self,
        what: str,
        samples: Sequence[float],
        timing: Timing,
        impl: str,
        *,
        metric: str = "latency",
        unit: str = "ms",
        **params: Any,
    ) -> Measurement:
        """A measurement of one arm.

        Args:
            what: the claim's or benchmark's id.
            samples: one value a repeat, in `unit`.
            timing: that they were taken in.
            impl: the arm's name.
            metric: what the samples are.
            unit: of the samples.
            params: of this record alone.
        """
        shared = {"threads": torch.get_num_threads(), **self.params, **params}
        return of_samples(what, metric, unit, samples, timing, impl=impl, params=shared)

    def ratio(
        self,
        what: str,
        times: Mapping[str, Timing],
        slow: str,
        fast: str,
        *,
        arms: Sequence[str] = (),
        **params: Any,
    ) -> Measurement:
        """How many times as fast one arm is as another.

        Args:
            what: the claim's id.
            times: of all arms, taken in turns.
            slow: the arm that is divided.
            fast: the arm that it is divided by.
            arms: what the claim calls them, where that differs.
            params: of this record alone.
        """
        names = [*arms] or [slow, fast]
        shared = {"threads": torch.get_num_threads(), **self.params, **params, "arms": names}
        return time_ratio(what, times, slow, fast, impl=names[1], params=shared)
