"""What inference makes of a weight alone, kept for the next call where a caller has promised to
leave weights as they are.

That is asrkit.models.optimize and asrkit.models.fused.fuse. A promise that is broken is mostly
seen: see Kept.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

MOST = 2**21  # elements of what is kept, for each keeper: a model of many layers has one in each


class Kept:
    """The last value made of a weight. It is never copied, saved or moved along with the module
    that holds it.

    The weight is known by its memory and by torch's count of changes in place (`Tensor._version`),
    which sees load_state_dict and edits under no_grad. It sees neither a fused optimizer nor an
    edit through `weight.data`, by which averages of weights are often swapped in: torch counts none
    of these. So a model as it was built keeps nothing.
    """

    def __init__(self) -> None:
        self._held: tuple[Any, ...] | None = None

    def value(self, weight: Any, question: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, or what it gave the last time, if `question` and `weight` are the same and the
        value may be kept at all.
        """
        if not keeps(weight):
            return make()
        stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
        question = question, stream  # another stream would not wait for what this one makes
        held = self._held  # once: another thread may change it
        if held is not None:
            known, version, asked, value = held
            if _same(known, weight) and version == weight._version and asked == question:
                return value
        value = make()
        # `detach` keeps the old memory alive: no other weight can come to lie where this one was.
        known = weight if weight.is_mkldnn else weight.detach()
        self._held = (known, weight._version, question, value) if value.numel() <= MOST else None
        return value

    def __deepcopy__(self, memo: Any) -> "Kept":
        return Kept()

    def __getstate__(self) -> dict[str, None]:
        return {"_held": None}


def _same(known: Tensor, weight: Tensor) -> bool:
    if weight.is_mkldnn:  # packed: its memory has no address, and nobody edits it
        return known is weight
    return (
        known.data_ptr() == weight.data_ptr()
        and known.dtype == weight.dtype
        and known.shape == weight.shape
    )


def keeps(weight: Any) -> bool:
    """Whether a value made of `weight` may outlive this call.

    Not where it is part of a gradient, of a program that is being compiled or captured, or of a
    region of autocast; and not of weights that count no changes: those made in inference mode,
    those without memory.
    """
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.is_autocast_enabled(weight.device.type)
    ):
        return False
    if weight.is_inference() or type(weight) not in (Tensor, torch.nn.Parameter):
        return False
    return not (weight.is_cuda and torch.cuda.is_current_stream_capturing())
