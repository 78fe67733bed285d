"""One check of a fast path."""

from collections.abc import Callable
from typing import NamedTuple


class Check(NamedTuple):
    """One comparison: `call` raises where it disagrees. Those of a `group` share a process."""

    group: str
    name: str
    vouches: str  # a pattern: the arms and cases that are left out where it fails; "" for none
    call: Callable[[], object]
