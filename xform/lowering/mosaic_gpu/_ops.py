"""The operations of a mod inside a kernel: those that Mosaic GPU lowers, and those spelled out.

`OPS` is keyed by the name of a primitive. A rule takes arrays of one shape (scalars and rows are
broadcast before) and the equation's parameters. Kernels run with approximate math, so an operation
stays as it is only where the hardware's approximation is good to a few units in the last place:
`tanh.approx` is not (11 bits), nor `sin.approx` outside of (-pi, pi). A mod that allows more error
says so with an operation's `accuracy`. Of numbers of 16 bits a function is taken in 32, and rounded
once: in steps of 16 bits a series has no digits left, and the unit of functions knows 32 alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax


def evaluate(jaxpr, args: list, join: Callable) -> list:
    """Runs a program of elementwise equations on values of several shapes.

    Args:
      jaxpr: its equations are all in `OPS`.
      args: one value for each of its invars.
      join: takes values and returns them with one shape.
    """
    env = dict(zip(jaxpr.invars, args, strict=True))
    env.update(zip(jaxpr.constvars, getattr(jaxpr, "consts", ()), strict=True))
    for eqn in jaxpr.eqns:
        values = [env[v] if not hasattr(v, "val") else v.val for v in eqn.invars]
        by_scalar = eqn.primitive.name == "div" and jnp.ndim(values[1]) == 0
        if by_scalar and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
            # One division instead of one for each pair, for half a unit in the last place.
            out = lax.mul(*join([values[0], 1 / values[1]]))
        else:
            out = OPS[eqn.primitive.name](*join(values), **eqn.params)
        env[eqn.outvars[0]] = out
    return [env[v] if not hasattr(v, "val") else v.val for v in jaxpr.outvars]


def _native(f: Callable) -> Callable:
    """As it is, without the parameters that speak of types and layouts."""
    return lambda *xs, **_: f(*xs)


def _horner(y, coefficients):
    """The polynomial `c0 + c1 y + c2 y**2 + ...`."""
    *rest, last = coefficients
    return functools.reduce(lambda acc, c: acc * y + c, reversed(rest), jnp.full_like(y, last))


def _wide(f: Callable) -> Callable:
    """A function of floats, of 16 bits in 32, which is rounded once."""

    def wide(*xs, **params):
        dtype = xs[0].dtype
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize != 2:
            return f(*xs, **params)
        narrow = lambda x: x.dtype == dtype
        return f(*(x.astype(jnp.float32) if narrow(x) else x for x in xs), **params).astype(dtype)

    return wide


# x P(x^2) / Q(x^2), fitted to tanh on [-7.9, 7.9] with the least relative error: 1.3e-7, in float32
# 4.5e-7. Beyond, tanh is 1 to 2.8e-7.
_TANH_END = 7.9
_TANH_P = (0.9999998702590709, 0.12934437170106283, 0.0029604917765701675, 1.153198388165075e-05)
_TANH_Q = (1.0, 0.46267664263732544, 0.02385416532850044, 0.00024001434091317446, 2.4925834465e-07)
TANH_APPROX = 2.0**-11
"""How far the hardware's own tanh may be off, relative (PTX ISA, `tanh.approx.f32`)."""
TANH_BY_EXP = 6e-7
"""How far tanh by an exponential may be off, absolute: small numbers lose digits."""


def _tanh(x, *, accuracy=None, **_):
    """By a rational function: the unit that makes exponentials, and tanh, is the narrow one.

    Two shorter forms are for those who allow their errors, by `lax.tanh(x, accuracy=...)`: the
    hardware's own, and `1 - 2 / (1 + exp(2 x))`.
    """
    stated = isinstance(accuracy, lax.Tolerance)
    if stated and accuracy.rtol >= TANH_APPROX:
        return lax.tanh(x)
    if stated and accuracy.atol >= TANH_BY_EXP:
        root = lax.rsqrt(1 + jnp.exp2(x * (2 * math.log2(math.e))))
        return 1 - 2 * (root * root)
    x = jnp.minimum(jnp.maximum(x, -_TANH_END), _TANH_END)
    y = x * x
    root = lax.rsqrt(_horner(y, _TANH_Q))
    return x * _horner(y, _TANH_P) * (root * root)


def _logistic(x, **_):
    """By `exp`: where it overflows, the quotient is 0, as it should be."""
    return 1 / (1 + lax.exp(-x))


def _reduced(f: Callable) -> Callable:
    """A function of period 2 pi, of an argument brought into (-pi, pi), to 1e-6 below 1e4."""
    high, low = 6.28125, 2 * math.pi - 6.28125

    def reduced(x, **_):
        turns = lax.round(x * (0.5 / math.pi), lax.RoundingMethod.TO_NEAREST_EVEN)
        return f((x - turns * high) - turns * low)

    return reduced


def _floor(x, **_):
    near = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(near > x, near - 1, near)


def _ceil(x, **_):
    return -_floor(-x)


def _log1p(x, **_):
    """Kahan: the rounding of 1 + x cancels in the quotient."""
    u = 1 + x
    exact = u == 1
    return jnp.where(exact, x, lax.log(u) * (x / jnp.where(exact, 1.0, u - 1)))


def _expm1(x, **_):
    """By its series below 0.1, where `exp(x) - 1` cancels."""
    series = x * _horner(x, (1, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720))
    return jnp.where(lax.abs(x) < 0.1, series, lax.exp(x) - 1)


def _pow(x, y, **_):
    """`|x|**y` by logarithms, with the sign, and NaN for a root of a negative number."""
    if jnp.issubdtype(y.dtype, jnp.integer):
        y = y.astype(x.dtype)
    size = lax.exp2(y * lax.log2(lax.abs(x)))
    whole = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN) == y
    half = y * 0.5
    odd = lax.round(half, lax.RoundingMethod.TO_NEAREST_EVEN) != half
    signed = jnp.where(whole, jnp.where(odd, -size, size), jnp.nan)
    return jnp.where(y == 0, 1.0, jnp.where(x < 0, signed, size))


def _integer_pow(x, *, y: int, **_):
    if y < 0:
        return 1 / _integer_pow(x, y=-y)
    out = None
    while y:
        if y & 1:
            out = x if out is None else out * x
        x, y = x * x, y >> 1
    return jnp.ones_like(x) if out is None else out


def _select_n(which, *cases, **_):
    if which.dtype == jnp.bool_:
        return jnp.where(which, cases[1], cases[0])
    out = cases[0]
    for n, case in enumerate(cases[1:], 1):
        out = jnp.where(which == n, case, out)
    return out


def _not(x, **_):
    return x == jnp.zeros_like(x) if x.dtype == jnp.bool_ else x ^ jnp.full_like(x, -1)


def _convert(x, *, new_dtype, **_):
    if x.dtype == jnp.bool_ and jnp.issubdtype(new_dtype, jnp.number):
        one, zero = (jnp.full(x.shape, n, new_dtype) for n in (1, 0))
        return jnp.where(x, one, zero)
    if jnp.dtype(new_dtype) == jnp.bool_:
        return x != jnp.zeros_like(x)
    return x.astype(new_dtype)


def _reduce_precision(x, *, exponent_bits, mantissa_bits):
    narrow = {(8, 7): jnp.bfloat16, (5, 10): jnp.float16, (8, 23): jnp.float32}
    return x.astype(narrow[exponent_bits, mantissa_bits]).astype(x.dtype)


def _round(x, *, rounding_method):
    return lax.round(x, rounding_method)


def _population_count(x, **_):
    """By halves: bits of pairs, of fours, of eights."""
    word = lax.bitcast_convert_type(x, jnp.uint32)
    u = lambda n: jnp.full_like(word, n)
    word = word - ((word >> u(1)) & u(0x55555555))
    word = (word & u(0x33333333)) + ((word >> u(2)) & u(0x33333333))
    word = (word + (word >> u(4))) & u(0x0F0F0F0F)
    return ((word * u(0x01010101)) >> u(24)).astype(x.dtype)


def _clz(x, **_):
    """By halves: which of the upper 16, 8, 4, 2 bits are all 0."""
    word = lax.bitcast_convert_type(x, jnp.uint32)
    u = lambda n: jnp.full_like(word, n)
    count = u(0)
    for n in (16, 8, 4, 2, 1):
        empty = word < u(1 << (32 - n))
        count = jnp.where(empty, count + u(n), count)
        word = jnp.where(empty, word << u(n), word)
    return jnp.where(word == u(0), u(32), count).astype(x.dtype)


def _cbrt(x, **_):
    """By logarithms, and a step of Newton's."""
    size = lax.abs(x)
    root = lax.exp2(lax.log2(jnp.where(size == 0, 1.0, size)) * (1 / 3))
    root = root - (root - size / (root * root)) * (1 / 3)
    return jnp.where((x == 0) | (size == jnp.inf), x, jnp.where(x < 0, -root, root))


def _sinh(x, **_):
    """By `expm1`, where `exp(x) - exp(-x)` cancels; halved first, since `exp` overflows early."""
    small = _expm1(lax.abs(x))
    large = lax.exp(lax.abs(x) - math.log(2.0))
    size = jnp.where(lax.abs(x) < 20.0, 0.5 * (small + small / (small + 1)), large)
    return jnp.where(x < 0, -size, size)


def _cosh(x, **_):
    half = math.log(2.0)
    return lax.exp(lax.abs(x) - half) + lax.exp(-lax.abs(x) - half)


def _asinh(x, **_):
    """By `log1p`, of a sum in which nothing cancels."""
    size = lax.abs(x)
    near = _log1p(size + size * size / (1 + lax.sqrt(size * size + 1)))
    out = jnp.where(size > 1e9, lax.log(jnp.maximum(size, 1.0)) + math.log(2.0), near)
    return jnp.where(x < 0, -out, out)


def _acosh(x, **_):
    above = x - 1
    near = _log1p(above + lax.sqrt(above * (x + 1)))
    return jnp.where(x > 1e9, lax.log(jnp.maximum(x, 1.0)) + math.log(2.0), near)


def _atanh(x, **_):
    size = lax.abs(x)
    out = 0.5 * _log1p(2 * size / (1 - size))
    return jnp.where(x < 0, -out, out)


OPS: dict[str, Callable] = {
    **{
        name: _native(getattr(lax, name))
        for name in (
            "abs", "add", "bitwise_and", "bitwise_or", "bitwise_xor", "div", "eq", "ge", "gt", "le",
            "lt", "max", "min", "mul", "ne", "neg", "rem", "shift_left", "shift_right_arithmetic",
            "shift_right_logical", "sign", "square", "sub",
        )
    },
    **{
        name: _wide(_native(getattr(lax, name)))
        for name in ("atan2", "erf", "exp", "exp2", "log", "rsqrt", "sqrt")
    },
    **{
        name: _wide(f)
        for name, f in {
            "acos": lambda x, **_: lax.atan2(lax.sqrt((1 - x) * (1 + x)), x),
            "acosh": _acosh,
            "asin": lambda x, **_: lax.atan2(x, lax.sqrt((1 - x) * (1 + x))),
            "asinh": _asinh,
            "atan": lambda x, **_: lax.atan2(x, jnp.ones_like(x)),
            "atanh": _atanh,
            "cbrt": _cbrt,
            "cos": _reduced(lax.cos),
            "cosh": _cosh,
            "erfc": lambda x, **_: 1 - lax.erf(x),
            "expm1": _expm1,
            "integer_pow": _integer_pow,
            "log1p": _log1p,
            "logistic": _logistic,
            "one_minus_square": lambda x: 1 - x * x,
            "pow": _pow,
            "sin": _reduced(lax.sin),
            "sinh": _sinh,
            "tan": lambda x, **_: _reduced(lax.sin)(x) / _reduced(lax.cos)(x),
            "tanh": _tanh,
        }.items()
    },
    "add_any": _native(lax.add),
    "and": _native(lax.bitwise_and),
    "bitcast_convert_type": lambda x, *, new_dtype, **_: lax.bitcast_convert_type(x, new_dtype),
    "broadcast_in_dim": lambda x, **_: x,
    "clz": _clz,
    "ceil": _ceil,
    "clamp": lambda low, x, high: jnp.minimum(jnp.maximum(x, low), high),
    "convert_element_type": _convert,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "floor": _floor,
    "is_finite": lambda x: lax.abs(x) < jnp.inf,
    "not": _not,
    "optimization_barrier": lambda x: x,
    "or": _native(lax.bitwise_or),
    "population_count": _population_count,
    "reduce_precision": _reduce_precision,
    "reshape": lambda x, **_: x,
    "round": _round,
    "select_n": _select_n,
    "squeeze": lambda x, **_: x,
    "stop_gradient": lambda x: x,
    "xor": _native(lax.bitwise_xor),
}  # fmt: skip
"""Rules by the name of the primitive."""
