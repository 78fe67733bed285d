"""How long, and how much memory: measured on whatever device the work runs on."""

from asrkit.profiling.memory import peak_memory
from asrkit.profiling.timing import Sample, Timing, measure, ratio

__all__ = ["Sample", "Timing", "measure", "peak_memory", "ratio"]
