"""Scalar functions that Numba's compiler vectorises: exp, tanh, and half-precision formats.

LLVM cannot vectorise a call of exp here, because Numba's wheels include no vector library. So exp
is range reduction and a polynomial: exp(x) = 2^n exp(r), |r| <= log(2) / 2, with the coefficients
of Cephes' expf (S. Moshier). All functions keep NaN. Half-precision arrays are bit patterns,
because NumPy has no bfloat16: uint16 for bfloat16, int16 for float16.
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from asrkit.compilers import compiled
from asrkit.losses.lattice import TINY
from asrkit.threads import forked

F = np.float32
MAGIC = F(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, kept in the lowest bits
LOG2E = F(1.44269504088896341)
LN2_HIGH = F(0.693359375)
LN2_LOW = F(-2.12194440e-4)
P0 = F(1.9875691500e-4)
P1 = F(1.3981999507e-3)
P2 = F(8.3334519073e-3)
P3 = F(4.1665795894e-2)
P4 = F(1.6666665459e-1)
P5 = F(5.0000001201e-1)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, compiled for parallel loops on first use and cached on disk if possible.

    A forked process runs a version for one thread; see `asrkit.threads.forked`.
    """
    parallel = compiled(function, parallel=True)
    serial = list[Any]()  # compiled only if a forked process calls it

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not forked():
            return parallel(*args)
        if not serial:
            serial.append(compiled(_renamed(function, f"{function.__name__}_serial")))
        return serial[0](*args)

    return call


def _renamed(function: Any, name: str) -> Any:
    """Return a renamed copy of `function`, because Numba's cache ignores compiler options."""
    copy = FunctionType(function.__code__, function.__globals__, name)
    copy.__module__ = function.__module__
    copy.__qualname__ = name
    return copy


@intrinsic
def half_float(typingctx, x):
    """Convert a float16, as the int16 with its bits, to float32."""

    def _build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), _build


@intrinsic
def float_half(typingctx, x):
    """Round a float32 to float16, and return the int16 with its bits."""

    def _build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), _build


@intrinsic
def larger(typingctx, x, y):
    """Return the larger of two float32, `x` and `y`; if one is NaN, either of them.

    Unlike with max(), a loop that searches for a maximum can be vectorised. `typingctx` comes from
    Numba.
    """

    def _build(context, builder, signature, args):
        float32 = ir.FloatType()
        of_two = ir.FunctionType(float32, [float32, float32])
        fn = builder.module.declare_intrinsic("llvm.maxnum", [float32], of_two)
        return builder.call(fn, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), _build


@njit(fastmath={"contract"})
def exp(x):
    """exp(x) for x <= 88 in float32, within 2 ulp; 0 below -87.7; NaN stays NaN."""
    x = F(x)
    if x < F(-88.0):
        x = F(-88.0)
    shifted = x * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    power_of_2 = np.int32((F(shifted).view(np.int32) << np.int32(23)) + np.int32(0x3F800000))
    return (p * (r * r) + r + F(1.0)) * power_of_2.view(F)


# error_model: a check for division by zero would prevent vectorisation
@njit(fastmath={"contract"}, error_model="numpy")
def tanh(x):
    """tanh(x) in float32 by exp(-2|x|); NaN stays NaN."""
    e = exp(F(-2.0) * abs(x))
    y = (F(1.0) - e) / (F(1.0) + e)
    if x >= F(0.0):
        return y
    return -y


@njit
def flush(x):
    """Return x, or 0 if |x| < TINY; NaN stays NaN."""
    if abs(x) < F(TINY):
        return F(0.0)
    return x


def load(x):
    """Return an array's element as float32; a half-precision bit pattern is decoded."""


def store(x, like):
    """Convert a float32 to an element of the array that contains `like`."""


@overload(load, inline="always")
def _load(x):
    if x == types.uint16:
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(F)
    if x == types.int16:
        return lambda x: half_float(x)
    return lambda x: x


@njit
def to_bfloat16(x):
    """Round a float32 to the nearest bfloat16, ties to even, and return its bits; NaN stays NaN."""
    u = F(x).view(np.uint32)
    odd = (u >> np.uint32(16)) & np.uint32(1)
    rounded = np.uint16((u + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    if x != x:
        return np.uint16(0x7FC0)
    return rounded


@overload(store, inline="always")
def _store(x, like):
    if like == types.uint16:
        return lambda x, like: to_bfloat16(x)
    if like == types.int16:
        return lambda x, like: float_half(x)
    return lambda x, like: x
