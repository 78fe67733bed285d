"""`RepeatedTurns`: a loop of turns on the device whose end the host learns of one turn late."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch


class RepeatedTurns:
    """Turns of a decoding loop that send nothing to the host but one flag.

    Attributes:
        active: () bool on the device, written by every turn: whether another one is needed.
        storages_read: Addresses of the memory that a recorded turn reads; None before that.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the flag.

        Args:
            device: Where the turns run.
        """
        self.storages_read: set[int] | None = None
        cuda = device.type == "cuda"
        self.active = torch.zeros((), dtype=torch.bool, device=device)
        self.host_flags = torch.zeros(2, dtype=torch.bool, pin_memory=cuda)
        self.flag_sent: list[torch.cuda.Event] = []
        if cuda:
            self.flag_sent = [torch.cuda.Event(), torch.cuda.Event()]

    def turn(self, model: Any) -> None:
        """One turn; where it is to be recorded, it never waits for the device."""
        raise NotImplementedError

    def repeat(self, turns: Callable[[], None]) -> None:
        """Call `turns` until no utterance is active.

        The flag `active` travels to the host while the next turns already run, so there is one call
        more than needed; turns after the end change nothing.
        """
        turns()
        self._send_flag(0)
        for slot in cycle((1, 0)):
            turns()
            self._send_flag(slot)
            if not self._received_flag(1 - slot):
                return

    def _send_flag(self, slot: int) -> None:
        self.host_flags[slot].copy_(self.active, non_blocking=True)
        if self.flag_sent:
            self.flag_sent[slot].record()

    def _received_flag(self, slot: int) -> bool:
        if self.flag_sent:
            self.flag_sent[slot].synchronize()
        return bool(self.host_flags[slot])
