"""What notebook 07_cuda_graphs measures and draws beyond its cells."""

from asrkit.workbench.lessons.cuda_graphs.five_waits import counted
from asrkit.workbench.lessons.cuda_graphs.turns import (
    allocated_bytes,
    blocks_of_turns,
    empty_turn_us,
    one_turn,
)

__all__ = ["allocated_bytes", "blocks_of_turns", "counted", "empty_turn_us", "one_turn"]
