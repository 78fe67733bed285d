"""How long, how much memory, how many launches and waits: measured on whatever device the work runs on."""

from asrkit.profiling.launches import Launches, launch_profile
from asrkit.profiling.memory import peak_memory
from asrkit.profiling.timing import Sample, Timing, measure, ratio

__all__ = ["Launches", "Sample", "Timing", "launch_profile", "measure", "peak_memory", "ratio"]
