"""What notebook 12_cost measures and draws beyond its cells."""

from asrkit.workbench.lessons.cost.core import time_ways
from asrkit.workbench.lessons.cost.cores import core_rates, usable_cores
from asrkit.workbench.lessons.cost.figures import break_even, cost_bars, ways_on_core

__all__ = ["break_even", "core_rates", "cost_bars", "time_ways", "usable_cores", "ways_on_core"]
