"""Sums of squares of whole parameters, of which a rank may hold only a part.

A rank holds N tensors, parts of P parameters. `total` goes from values of tensors to sums over the
parameters, `of_tensors` back to the tensors.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Norms(Protocol):
    """From tensors to parameters and back.

    Attributes:
        dtype: of the sums.
    """

    dtype: torch.dtype

    def total(self, squares: Tensor) -> Tensor:
        """Sums over the tensors of each parameter, on all ranks, (K, P).

        Args:
            squares: (K, N) sums of squares of this rank's tensors.
        """

    def of_tensors(self, values: Tensor) -> Tensor:
        """The value of each tensor's parameter, (N,).

        Args:
            values: (P,) of the parameters.
        """


class WholeNorms:
    """For tensors that are whole parameters: there is nothing to sum.

    Args:
        dtype: of the sums.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def total(self, squares: Tensor) -> Tensor:
        """The `squares` as they are, (K, P)."""
        return squares

    def of_tensors(self, values: Tensor) -> Tensor:
        """The `values` as they are, (P,)."""
        return values


class MeshNorms:
    """For the local parts of DTensors, one a parameter, as FSDP2 makes them.

    A part is summed over the dimensions of the mesh that cut its parameter, and not over those that
    repeat it. Parameters of one placement share a collective.

    Args:
        parameters: P DTensors.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.dtype = parameters[0].dtype
        self.placed: dict[tuple[Any, Any], list[int]] = {}
        for index, parameter in enumerate(parameters):
            placement = (parameter.device_mesh, tuple(parameter.placements))
            self.placed.setdefault(placement, []).append(index)

    def total(self, squares: Tensor) -> Tensor:
        """Sums of the `squares` of the local parts over the ranks, (K, P)."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        totals = torch.empty_like(squares)
        for (mesh, placements), indices in self.placed.items():
            sums: list[Any] = []
            for placement in placements:
                sums.append(Replicate() if placement.is_replicate() else Partial())
            mine = squares[:, indices].contiguous()
            partial = DTensor.from_local(mine, mesh, sums, run_check=False)
            totals[:, indices] = partial.full_tensor()
        return totals

    def of_tensors(self, values: Tensor) -> Tensor:
        """The `values` as they are, (P,): a rank has one part of each parameter."""
        return values


def is_dtensor(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor, without importing torch.distributed to ask."""
    return hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """What this rank holds of `tensor`, sharing its memory: a DTensor's part, else itself.

    To be called under torch.no_grad().
    """
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor.detach()
