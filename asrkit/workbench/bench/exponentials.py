"""Ways to sum the exponentials of a row, as the losses do for each node."""

from collections.abc import Callable
from math import exp

from torch import Tensor


def sums_of_exponentials(row: Tensor) -> dict[str, Callable[[], float]]:
    """Functions that return the sum of exp(x) over `row`, by name.

    Args:
        row: Values, (N,), float32, on a CPU.
    """
    import numba
    import numpy as np

    from asrkit.losses import simd
    from asrkit.losses.logit_rows.numba_cpu import SUMS

    @numba.njit(fastmath=SUMS)
    def with_library_exp(x):
        total = np.float32(0)
        for v in range(x.size):
            total += np.exp(x[v])
        return total

    @numba.njit(fastmath=SUMS)
    def with_own_exp(x):
        total = np.float32(0)
        for v in range(x.size):
            total += simd.exp(x[v])
        return total

    values = row.numpy()
    as_list = row.tolist()
    return {
        "Python loop": lambda: sum(map(exp, as_list)),
        "compiled, library's exp": lambda: with_library_exp(values),
        "compiled, simd.exp": lambda: with_own_exp(values),
        "torch.exp, then sum": lambda: float(row.exp().sum()),
    }
