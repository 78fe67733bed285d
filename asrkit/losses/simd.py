"""Scalar pieces that Numba's compiler turns into vector code: exp, bit patterns of half precision,
NaN kept as NaN.

LLVM vectorises no call of exp here (Numba's wheels bring no vector library), so exp is range
reduction and a polynomial: exp(x) = 2^n exp(r), |r| <= log(2) / 2, with the coefficients of Cephes'
expf (S. Moshier). Half-precision arrays come as bit patterns, since NumPy knows no bfloat16: uint16
is bfloat16, int16 is float16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from asrkit.runtime import compiled

F = np.float32
TINY = F(
    1e-35
    # smaller gradients become 0: products below float32's normal range take up to a hundred times as
    # long
)
MAGIC = F(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, kept in the lowest bits
LOG2E, LN2_HIGH, LN2_LOW = F(1.44269504088896341), F(0.693359375), F(-2.12194440e-4)
P0, P1, P2, P3, P4, P5 = (
    F(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)


def kernel(function: Callable[..., Any]) -> Any:
    """A function compiled for parallel loops on first use, and kept on disk where some folder can
    be written.
    """
    return compiled(function, parallel=True)


@intrinsic
def float_bits(typingctx, x):
    """The int32 whose bits are those of a float32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.IntType(32)
    )


@intrinsic
def bits_float(typingctx, x):
    """The float32 whose bits are those of an int32."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic
def half_float(typingctx, x):
    """The float32 equal to the float16 whose bits are those of an int16."""

    def build(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), build


@intrinsic
def float_half(typingctx, x):
    """The int16 with the bits of a float32 rounded to float16."""

    def build(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), build


@intrinsic
def larger(typingctx, x, y):
    """The larger of two float32, any of them if one is NaN: what lets a loop that looks for a
    maximum become vector code.
    """

    def build(context, builder, signature, args):
        one = ir.FloatType()
        fn = builder.module.declare_intrinsic(
            "llvm.maxnum", [one], ir.FunctionType(one, [one, one])
        )
        return builder.call(fn, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), build


@njit(fastmath={"contract"})
def exp(x):
    """exp(x) for x <= 88 in float32, within 2 ulp; 0 below -87.7; NaN stays NaN."""
    x = F(-88.0) if x < F(-88.0) else F(x)
    shifted = x * LOG2E + MAGIC
    n = shifted - MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    return (p * (r * r) + r + F(1.0)) * bits_float(
        (float_bits(shifted) << np.int32(23)) + np.int32(0x3F800000)
    )


@njit(
    fastmath={"contract"}, error_model="numpy"
)  # a check for division by zero would keep loops from becoming vector code
def tanh(x):
    """tanh(x) in float32 by exp(-2|x|); NaN stays NaN."""
    e = exp(F(-2.0) * abs(x))
    y = (F(1.0) - e) / (F(1.0) + e)
    return y if x >= F(0.0) else -y


@njit
def flush(x):
    """x, or 0 where it is tiny; NaN stays NaN."""
    return F(0.0) if abs(x) < TINY else x


def load(x):
    """An array's element as float32: itself, or decoded from a half-precision bit pattern."""


def store(x, like):
    """A float32 as an element of the array that `like` comes from."""


@overload(load, inline="always")
def _load(x):
    if x == types.uint16:
        return lambda x: bits_float(np.int32(np.uint32(x) << np.uint32(16)))
    return (lambda x: half_float(x)) if x == types.int16 else (lambda x: x)


@njit
def to_bfloat16(x):
    """Bits of a float32 rounded to the nearest bfloat16, ties to even; NaN stays NaN."""
    u = np.uint32(float_bits(x))
    rounded = np.uint16(
        (u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    )
    return rounded if x == x else np.uint16(0x7FC0)


@overload(store, inline="always")
def _store(x, like):
    if like == types.uint16:
        return lambda x, like: to_bfloat16(x)
    return (lambda x, like: float_half(x)) if like == types.int16 else (lambda x, like: x)
