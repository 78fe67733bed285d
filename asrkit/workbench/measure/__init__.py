"""How long, how much memory, how many launches, waits and casts: measured on whatever device the
work runs on.
"""

from asrkit.runtime import peak_memory
from asrkit.workbench.measure.casts import (
    CastProfile,
    Op,
    cast_profile,
    median_profile,
    profiles_in_turns,
)
from asrkit.workbench.measure.host_reads import fake_peak, host_reads
from asrkit.workbench.measure.launches import Launches, launch_profile
from asrkit.workbench.measure.timing import Sample, Timing, measure, ratio

__all__ = [
    "CastProfile",
    "Launches",
    "Op",
    "Sample",
    "Timing",
    "cast_profile",
    "fake_peak",
    "host_reads",
    "launch_profile",
    "measure",
    "median_profile",
    "peak_memory",
    "profiles_in_turns",
    "ratio",
]
