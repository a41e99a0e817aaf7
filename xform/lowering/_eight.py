"""Attention's operands in 8 bits: e4m3, with powers of two as scales.

A query of a head has a scale of its own. Keys share one by blocks of 128 and head, and so do
values. It is the power of two that brings the largest number of a block to (224, 448], of which 448
is the largest of e4m3. So numbers of 16 bits hold what is rounded exactly, and rounding it once
more changes nothing: attention in e4m3 is attention of rounded arrays, the same everywhere, and
only the weights, which are rounded too where they meet values, depend on how a lowering walks along
the keys. They are rounded relative to the largest of their row so far, and what is divided by is
the sum of unrounded ones, so that the log-sum-exp is exact.

Scales have bounds, so that no product of two leaves float32: of queries and keys, what is below
2^-67 becomes 0, and of values, what is below 2^-99. A number that is not finite becomes NaN, and
has no influence on the scale of its block.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FORMATS = (None, "e4m3")
BLOCK = 128
"""Keys that share scales."""

_LARGEST, _LEAST, _DIGITS = 448.0, -6, 3
"""Of e4m3: the largest number, the least exponent of a normal one, digits after the first."""
_FLOOR, VALUES_FLOOR = -58, -90


class Blocks(NamedTuple):
    """An array, and the exponents of its scales."""

    x: jax.Array
    """float32."""
    exponents: jax.Array
    """int32, in a shape that broadcasts against that of `x`."""

    @property
    def scaled(self) -> jax.Array:
        """Numbers up to 448 in size, and NaN."""
        y = self.x * power_of_two(-self.exponents)
        return jnp.where(jnp.isfinite(y), jnp.clip(y, -_LARGEST, _LARGEST), jnp.nan)

    @property
    def elements(self) -> jax.Array:
        return self.scaled.astype(jnp.float8_e4m3fn)

    @property
    def rounded(self) -> jax.Array:
        return to_e4m3(self.scaled) * power_of_two(self.exponents)


def of_queries(q) -> Blocks:
    """`[..., T, H, D]`, exponents `[..., T, H, 1]`."""
    x = q.astype(jnp.float32)
    return Blocks(x, _exponents(x, -1, floor_of(q.dtype)))


def of_keys(k) -> Blocks:
    """`[..., C, 128, K, D]` of `[..., S, K, D]`, exponents `[..., C, 1, K, 1]`."""
    x = _cut(k.astype(jnp.float32))
    return Blocks(x, _exponents(x, (-3, -1), floor_of(k.dtype)))


def of_values(v) -> Blocks:
    """As `of_keys`."""
    x = _cut(v.astype(jnp.float32))
    return Blocks(x, _exponents(x, (-3, -1), floor_of(v.dtype, VALUES_FLOOR)))


@jax.custom_jvp
def rounded(q, k, v) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is attended to, `[..., T, H, D]`, in the dtypes of the arrays.

    Straight through: the derivative is that of doing nothing.
    """
    whole = lambda b, x: b.reshape(*x.shape[:-3], -1, *x.shape[-2:])[..., : x.shape[-3], :, :]
    return (
        of_queries(q).rounded.astype(q.dtype),
        whole(of_keys(k).rounded, k).astype(k.dtype),
        whole(of_values(v).rounded, v).astype(v.dtype),
    )


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents))


def weights_exponent(dropout: float = 0.0) -> int:
    """Of what weights, which are `1 / (1 - dropout)` at most, are multiplied by for rounding."""
    return math.floor(math.log2(_LARGEST * (1 - dropout)))


def rounded_weights(p, dropout: float = 0.0):
    """Weights as they meet values."""
    factor = 2.0 ** weights_exponent(dropout)
    return (to_e4m3(p.astype(jnp.float32) * factor) / factor).astype(p.dtype)


def to_e4m3(x):
    """Float32 numbers up to 448, rounded to the nearest of e4m3, ties to even.

    By arithmetic, since compilers leave out a cast to and fro.
    """
    step = 2.0 ** (_LEAST - _DIGITS)
    small = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < 2.0**_LEAST, small, lax.reduce_precision(x, 8, _DIGITS))


def _cut(x):
    """`[..., S, K, D]` as `[..., C, 128, K, D]`, zeros at its end."""
    extra = -x.shape[-3] % BLOCK
    x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 3), (0, extra), (0, 0), (0, 0)]) if extra else x
    return x.reshape(*x.shape[:-3], -1, BLOCK, *x.shape[-2:])


def floor_of(dtype, least: int = _FLOOR) -> int:
    """The least exponent of a scale: what `dtype` holds near 0 is not cut finer."""
    tiny = math.log2(float(jnp.finfo(dtype).smallest_subnormal)) - (_LEAST - _DIGITS)
    return max(least, math.ceil(tiny))


def _exponents(x, dims, floor: int):
    size = jnp.where(jnp.isfinite(x), jnp.abs(x), 0).max(dims, keepdims=True)
    return exponent(size, floor)


def exponent(size, floor: int):
    """Of the scale of a block whose largest number is `size`, float32; int32."""
    # One more where the number is above 1.75 times a power of two, as 448 = 1.75 * 2^8 is.
    bits = lax.bitcast_convert_type(size, jnp.int32) + ((1 << 21) - 1)
    return jnp.maximum(lax.shift_right_logical(bits, jnp.full_like(bits, 23)) - (127 + 8), floor)


def power_of_two(n):
    """`2^n` in float32, for `n` from -126 to 127."""
    n = n + 127
    return lax.bitcast_convert_type(lax.shift_left(n, jnp.full_like(n, 23)), jnp.float32)
