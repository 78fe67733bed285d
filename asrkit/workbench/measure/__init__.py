"""Measurements on any device: time, peak memory, launches, waits of the host, and casts."""

from asrkit.workbench.measure.casts import CastProfile, cast_profile, median_profile
from asrkit.workbench.measure.memory import fake_peak, peak_memory
from asrkit.workbench.measure.ops import Launches, Op, host_reads, launch_profile
from asrkit.workbench.measure.times import Sample, Timing, measure, ratio

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
    "ratio",
]
