"""Interval arithmetic on jaxprs: what a value can be, over all the pairs of a tile.

A value that depends on the query or key index is known by its least and greatest value in each
tile, an `Interval`. Everything else (captures, `b`, `h`, what is computed from them) stays an array
of exact values. A boolean is an interval of {False, True}: `lo` proves a tile full, `not hi` empty.

The rules are sound: an interval holds every value that the program can produce in its tile, with
wrapping integers, rounded floats and NaN. What a rule can't bound is the whole range of its dtype.
They are exact for one operation, as far as a set of values is a range; two operands that depend on
each other (`q * q - q`) count as if they did not.

Three facts carry the soundness:

* integers wrap, so bounds are also computed in floating point, and a result that might leave the
  dtype's range is the whole range;
* a float that may be NaN has NaN for both ends, and every comparison is written so that NaN decides
  nothing;
* a kernel may contract or approximate floating-point operations, so computed ends move out by a few
  units in the last place.

The file is longer than others: it is one table, and each rule is read beside those it is like.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Interval:
    """The values that one number, or an array of them, takes in each tile.

    Attributes:
      lo, hi: the least and the greatest, `[rows, cols, *shape]`; 1 in place of rows or cols where
        they do not matter. Both NaN where the value may be NaN.
      residues: for integers read from an array, bit `i` says that some value is `i` modulo 32:
        tells apart sets of ids whose ranges overlap. None where not known.
    """

    lo: Array
    hi: Array
    residues: Array | None = None

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns, each 1 where the value does not depend on it."""
        rows, cols, *_ = self.lo.shape
        return rows, cols


def interval(x) -> Interval:
    """An interval as it is; an array as the exact values it holds, the same in every tile."""
    if isinstance(x, Interval):
        return x
    x = jnp.asarray(x)
    return point(x[None, None]) if ordered(x.dtype) else unknown(x.shape, x.dtype)


def point(x: Array) -> Interval:
    """Exact values `[rows, cols, *shape]`."""
    return Interval(x, x, residues(x))


def unknown(shape: Sequence[int], dtype) -> Interval:
    """Any value of `dtype`. Values without an order (complex, random keys) are told nothing of."""
    return Interval(*(jnp.full((1, 1, *shape), end) for end in _limits(dtype)))


def residues(x: Array) -> Array | None:
    """The residue modulo 32 of each integer as a set of one; None for other dtypes."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return None
    return jnp.uint32(1) << (x & 31).astype(jnp.uint32)


def ordered(dtype) -> bool:
    """Whether an interval of this dtype says anything."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def _limits(dtype) -> tuple[Array, Array]:
    if dtype == jnp.bool_:
        least, most = False, True
    elif jnp.issubdtype(dtype, jnp.integer):
        least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    else:
        least = most = jnp.nan
        dtype = dtype if ordered(dtype) else jnp.float32
    return jnp.array(least, dtype), jnp.array(most, dtype)


def _align(*xs) -> list[Interval]:
    """Operands of one elementwise operation; JAX lets scalars stand beside arrays."""
    xs = [interval(x) for x in xs]
    ndim = max(x.lo.ndim for x in xs)
    pad = lambda a: a.reshape(*a.shape, *[1] * (ndim - a.ndim))
    return [jax.tree.map(pad, x) for x in xs]


# ---- Bounds ----------------------------------------------------------------------------------


def _hull(*values: Array) -> Interval:
    """The smallest interval around values; NaN among them makes both ends NaN."""
    return Interval(reduce(jnp.minimum, values), reduce(jnp.maximum, values))


def union(a: Interval, b: Interval) -> Interval:
    """The smallest interval around both."""
    bits = None if a.residues is None or b.residues is None else a.residues | b.residues
    return Interval(jnp.minimum(a.lo, b.lo), jnp.maximum(a.hi, b.hi), bits)


def _where(known: Array, x: Interval) -> Interval:
    """`x` where `known`, else any value."""
    lo, hi = _limits(x.lo.dtype)
    return Interval(jnp.where(known, x.lo, lo), jnp.where(known, x.hi, hi))


def _rounded(x: Interval) -> Interval:
    """Room for what a kernel may compute in place of a correctly rounded result."""
    info = jnp.finfo(x.lo.dtype)
    room = lambda end: 4 * jnp.abs(end) * info.eps + info.tiny
    return _hull(x.lo - room(x.lo), x.hi + room(x.hi))


def _bounded(op: Callable, ends: Sequence[tuple], wide: Callable | None = None) -> Interval:
    """The hull of `op` at pairs of ends, where no result in between can wrap or be NaN.

    `wide` is `op` on floats, if it has another name.
    """
    x = _hull(*(op(*pair) for pair in ends))
    dtype = x.lo.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        finite = reduce(operator.and_, (jnp.isfinite(end) for pair in ends for end in pair))
        return _rounded(_where(finite, x))
    info = jnp.iinfo(dtype)
    # float32 knows a bound of `bits` bits to within 2^(bits - 22).
    slack = (1 << info.bits) >> 22
    floats = [[end.astype(jnp.float32) for end in pair] for pair in ends]
    estimate = _hull(*((wide or op)(*pair) for pair in floats))
    least, most = float(info.min + slack), float(info.max - slack)
    fits = (estimate.lo >= least) & (estimate.hi <= most)
    return _where(fits, x)


def _is_float(x: Interval) -> bool:
    return jnp.issubdtype(x.lo.dtype, jnp.floating)


def _is_point(*xs: Interval) -> Array:
    return reduce(operator.and_, (x.lo == x.hi for x in xs))


def _corners(a: Interval, b: Interval) -> list[tuple]:
    return [(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]


# ---- Numbers ---------------------------------------------------------------------------------


def _add(a, b, **_):
    a, b = _align(a, b)
    return _bounded(jnp.add, [(a.lo, b.lo), (a.hi, b.hi)])


def _sub(a, b, **_):
    a, b = _align(a, b)
    return _bounded(jnp.subtract, [(a.lo, b.hi), (a.hi, b.lo)])


def _mul(a, b, **_):
    return _bounded(jnp.multiply, _corners(*_align(a, b)))


def _quotient(op: Callable) -> Callable[..., Interval]:
    """A division that is monotone in each operand while the divisor keeps its sign."""

    def rule(a, b, **_):
        a, b = _align(a, b)
        signed = (b.lo > 0) | (b.hi < 0)
        b = Interval(*(jnp.where(signed, end, jnp.ones_like(end)) for end in (b.lo, b.hi)))
        return _where(signed, _bounded(op, _corners(a, b), jnp.divide))

    return rule


def _floor_divide(a, b, **_):
    a, b = _align(a, b)
    if _is_float(a) or _is_float(b):
        return _unbounded(a, b)
    return _quotient(jnp.floor_divide)(a, b)


def _divide(x: Array, y: Array) -> Array:
    return lax.div(*jnp.broadcast_arrays(x, y))


def _mod(a, n, **_):
    """`jnp.remainder`, of the sign of `n`: a range while `a` stays between multiples of `n`."""
    a, n = _align(a, n)
    if _is_float(a) or _is_float(n):
        return _unbounded(a, n)
    divisor = jnp.where(n.lo == 0, jnp.ones_like(n.lo), n.lo)
    same = _is_point(n) & (a.lo // divisor == a.hi // divisor)
    zero, one = jnp.zeros_like(n.lo), jnp.ones_like(n.lo)
    lo = jnp.where(same, a.lo % divisor, jnp.where(n.lo > 0, zero, n.lo + one))
    hi = jnp.where(same, a.hi % divisor, jnp.where(n.lo > 0, n.hi - one, zero))
    return _where((n.lo > 0) | (n.hi < 0), Interval(lo, hi))


def _rem(a, n, **_):
    """`lax.rem`, of the sign of `a`."""
    a, n = _align(a, n)
    if _is_float(a):
        return _unbounded(a, n)
    least = jnp.iinfo(n.lo.dtype).min
    signed = (n.lo > 0) | ((n.hi < 0) & (n.lo > least))
    size = _hull(*(jnp.abs(jnp.where(signed, end, jnp.ones_like(end))) for end in (n.lo, n.hi)))
    positive = _mod(a, size)
    most = size.hi - jnp.ones_like(size.hi)
    zero = jnp.zeros_like(most)
    lo = jnp.where(a.lo >= 0, positive.lo, zero - most)
    hi = jnp.where(a.lo >= 0, positive.hi, jnp.where(a.hi <= 0, zero, most))
    return _where(signed, Interval(lo, hi))


def _abs(a, **_):
    a = interval(a)
    size = _hull(jnp.abs(a.lo), jnp.abs(a.hi))
    straddles = (a.lo < 0) & (a.hi > 0)
    lo = jnp.where(straddles, jnp.zeros_like(size.lo), size.lo)
    # |-128| is -128 in int8.
    return _where(size.lo >= 0, Interval(lo, size.hi))


def _neg(a, **_):
    a = interval(a)
    return _hull(-a.lo, -a.hi) if _is_float(a) else _sub(jnp.zeros((), a.lo.dtype), a)


def _power(a, *, y: int, **_):
    a = interval(a)
    if y < 0:
        return _unbounded(a)
    base = _abs(a) if y % 2 == 0 else a
    return _bounded(lambda x: lax.integer_pow(x, y), [(base.lo,), (base.hi,)])


def _square(a, **_):
    return _power(a, y=2)


def _extreme(op: Callable) -> Callable[..., Interval]:
    def rule(a, b, **_):
        a, b = _align(a, b)
        return _hull(op(a.lo, b.lo), op(a.hi, b.hi))

    return rule


def _clamp(least, x, most, **_):
    return _extreme(jnp.minimum)(_extreme(jnp.maximum)(least, x), most)


def _monotone(op: Callable) -> Callable[..., Interval]:
    """A function that only rises or only falls, with an exact result."""

    def rule(a, **params):
        a = interval(a)
        return _hull(op(a.lo, **params), op(a.hi, **params))

    return rule


def _approximate(op: Callable) -> Callable[..., Interval]:
    """A monotone function that backends compute with an error of their own."""

    def rule(a, **params):
        a = interval(a)
        return _rounded(_rounded(_hull(op(a.lo, **params), op(a.hi, **params))))

    return rule


def _pointwise(op: Callable) -> Callable[..., Interval]:
    """Any elementwise function: known where its operands are."""

    def rule(*args, **params):
        args = _align(*args)
        values = op(*jnp.broadcast_arrays(*(x.lo for x in args)), **params)
        known = jnp.broadcast_to(_is_point(*args), values.shape)
        return _where(known, Interval(values, values))

    return rule


def _unbounded(*args: Interval) -> Interval:
    shape = jnp.broadcast_shapes(*(x.lo.shape for x in args))[2:]
    return unknown(shape, args[0].lo.dtype)


def _convert(a, *, new_dtype, **_):
    a = interval(a)
    old, new = a.lo.dtype, new_dtype
    if old == new:
        return a
    if not ordered(new):
        return unknown(a.lo.shape[2:], new)
    if new == jnp.bool_:
        return _compare_ne(a, jnp.zeros((), old))
    values = Interval(a.lo.astype(new), a.hi.astype(new))
    if old == jnp.bool_:
        return values
    if jnp.issubdtype(new, jnp.floating):
        # XLA may keep more bits than a narrow type has.
        exact = jnp.finfo(new).bits >= (jnp.finfo(old).bits if _is_float(a) else 32)
        return values if exact else _rounded(values)
    to = jnp.iinfo(new)
    if _is_float(a):
        return _where((a.lo > float(to.min)) & (a.hi < float(to.max)), values)
    source = jnp.iinfo(old)
    if to.min <= source.min and source.max <= to.max:
        return Interval(values.lo, values.hi, a.residues)
    lo, hi = max(to.min, source.min), min(to.max, source.max)
    return _where((a.lo >= jnp.array(lo, old)) & (a.hi <= jnp.array(hi, old)), values)


def _reduce_precision(a, **params):
    return _rounded(_monotone(lax.reduce_precision_p.bind)(a, **params))


# ---- Truth and bits --------------------------------------------------------------------------


def _compare_lt(a, b, **_):
    a, b = _align(a, b)
    return Interval(a.hi < b.lo, ~(a.lo >= b.hi))


def _compare_le(a, b, **_):
    a, b = _align(a, b)
    return Interval(a.hi <= b.lo, ~(a.lo > b.hi))


def _compare_eq(a, b, **_):
    a, b = _align(a, b)
    possible = ~((a.hi < b.lo) | (b.hi < a.lo))
    if a.residues is not None and b.residues is not None:
        possible &= (a.residues & b.residues) != 0
    return Interval(_is_point(a, b) & (a.lo == b.lo), possible)


def _compare_ne(a, b, **_):
    equal = _compare_eq(a, b)
    return Interval(~equal.hi, ~equal.lo)


def _and(a, b, **_):
    a, b = _align(a, b)
    if a.lo.dtype == jnp.bool_:
        return Interval(a.lo & b.lo, a.hi & b.hi)
    zero, most = jnp.zeros_like(a.lo), jnp.full_like(a.lo, jnp.iinfo(a.lo.dtype).max)
    cap = lambda x: jnp.where(x.lo >= 0, x.hi, most)
    bound = Interval(zero, jnp.minimum(cap(a), cap(b)))
    bound = _where((a.lo >= 0) | (b.lo >= 0), bound)
    for x, mask in ((a, b), (b, a)):
        # A mask of the lowest bits is a remainder.
        low = _is_point(mask) & (mask.lo > 0) & (mask.lo < most) & (mask.lo & (mask.lo + 1) == 0)
        bound = _either(low, _mod(x, Interval(*[jnp.where(low, mask.lo + 1, 1)] * 2)), bound)
    return _either(_is_point(a, b), Interval(a.lo & b.lo, a.lo & b.lo), bound)


def _or(a, b, **_):
    a, b = _align(a, b)
    if a.lo.dtype == jnp.bool_:
        return Interval(a.lo | b.lo, a.hi | b.hi)
    return _pointwise(jnp.bitwise_or)(a, b)


def _xor(a, b, **_):
    a, b = _align(a, b)
    if a.lo.dtype == jnp.bool_:
        return _compare_ne(a, b)
    return _pointwise(jnp.bitwise_xor)(a, b)


def _either(first: Array, a: Interval, b: Interval) -> Interval:
    return Interval(jnp.where(first, a.lo, b.lo), jnp.where(first, a.hi, b.hi))


def _shift(op: Callable, wide: Callable | None = None) -> Callable[..., Interval]:
    """A shift, by an amount that is in range; `wide` is the same on floats if it can overflow."""

    def rule(a, s, **_):
        a, s = _align(a, s)
        bits = jnp.iinfo(a.lo.dtype).bits
        amount = Interval(*(jnp.clip(end, 0, bits - 1) for end in (s.lo, s.hi)))
        shift = lambda x, y: op(*jnp.broadcast_arrays(x, y))
        ends = _corners(a, amount)
        x = _bounded(shift, ends, wide) if wide else _hull(*(shift(*pair) for pair in ends))
        known = (s.lo >= 0) & (s.hi < bits)
        if op is lax.shift_right_logical:
            known &= a.lo >= 0
        return _where(known, x)

    return rule


def _is_finite(a):
    a = interval(a)
    return Interval(jnp.isfinite(a.lo) & jnp.isfinite(a.hi), jnp.isfinite(a.lo) | ~(a.lo == a.hi))


# ---- Choice ----------------------------------------------------------------------------------


def _select(which, *cases, **_):
    which, chosen, *others = _align(which, *cases)
    first, last = (jnp.clip(end, 0, len(others)) for end in (which.lo, which.hi))
    for i, case in enumerate(others, start=1):
        both = union(chosen, case)
        before, after = last < i, first >= i
        pick = lambda a, b, ab: jnp.where(before, a, jnp.where(after, b, ab))  # noqa: B023
        bits = None
        if both.residues is not None:
            bits = pick(chosen.residues, case.residues, both.residues)
        lo, hi = pick(chosen.lo, case.lo, both.lo), pick(chosen.hi, case.hi, both.hi)
        chosen = Interval(lo, hi, bits)
    return chosen


def _argmax(a, *, axes, index_dtype, **_):
    """The first True, as in `jnp.select`: one that can be, up to the first that must be."""
    a = interval(a)
    if a.lo.dtype != jnp.bool_ or a.lo.ndim != 3:
        return unknown([n for d, n in enumerate(a.lo.shape[2:]) if d not in axes], index_dtype)
    sure = jnp.any(a.lo, -1)
    first = lambda x: lax.argmax(x, 2, index_dtype)
    final = a.hi.shape[-1] - 1 - first(jnp.flip(a.hi, -1))
    lo = jnp.where(sure, first(a.hi), 0)
    hi = jnp.where(sure, first(a.lo), jnp.where(jnp.any(a.hi, -1), final, 0))
    return Interval(lo, hi)


def default(eqn, *args):
    """What is not in the table can be anything: loops, products, random numbers."""
    del args
    outs = [unknown(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return outs if eqn.primitive.multiple_results else outs[0]


# ---- Shape -----------------------------------------------------------------------------------


def _structural(primitive, *, keeps_values: bool = True) -> Callable:
    """Moves values about (or takes their extremes): the same on both ends, tile by tile."""

    def rule(*args, **params):
        args = [interval(x) for x in args]
        tiles = jnp.broadcast_shapes(*(x.tiles for x in args))

        def apply(*ends):
            ends = [jnp.broadcast_to(x, (*tiles, *x.shape[2:])) for x in ends]
            return jax.vmap(jax.vmap(partial(primitive.bind, **params)))(*ends)

        lo, hi = (apply(*(getattr(x, end) for x in args)) for end in ("lo", "hi"))
        if primitive.multiple_results:
            return [Interval(*ends) for ends in zip(lo, hi, strict=True)]
        moved = keeps_values and len(args) == 1 and args[0].residues is not None
        return Interval(lo, hi, apply(args[0].residues) if moved else None)

    return rule


def _reduce_sum(a, *, axes, **_):
    a = interval(a)
    total = lambda x: jnp.sum(x, [axis + 2 for axis in axes], dtype=x.dtype)
    if _is_float(a):  # the order of a float sum is not known, and so its rounding is not
        whole = jax.eval_shape(total, a.lo)
        return unknown(whole.shape[2:], whole.dtype)
    return _bounded(total, [(a.lo,), (a.hi,)])


RULES: dict = {
    lax.add_p: _add,
    lax.sub_p: _sub,
    lax.mul_p: _mul,
    lax.div_p: _quotient(_divide),
    lax.rem_p: _rem,
    ("jit", "floor_divide"): _floor_divide,
    ("jit", "remainder"): _mod,
    lax.abs_p: _abs,
    lax.integer_pow_p: _power,
    lax.square_p: _square,
    lax.max_p: _extreme(jnp.maximum),
    lax.min_p: _extreme(jnp.minimum),
    lax.clamp_p: _clamp,
    lax.neg_p: _neg,
    lax.not_p: _monotone(jnp.bitwise_not),
    **{p: _monotone(p.bind) for p in (lax.sign_p, lax.floor_p, lax.ceil_p, lax.round_p)},
    **{
        p: _approximate(p.bind)
        for p in (
            lax.exp_p,
            lax.exp2_p,
            lax.expm1_p,
            lax.log_p,
            lax.log1p_p,
            lax.sqrt_p,
            lax.cbrt_p,
            lax.tanh_p,
            lax.logistic_p,
            lax.erf_p,
        )
    },
    **{p: _pointwise(p.bind) for p in (lax.population_count_p, lax.clz_p)},
    lax.convert_element_type_p: _convert,
    lax.reduce_precision_p: _reduce_precision,
    lax.is_finite_p: _is_finite,
    lax.lt_p: _compare_lt,
    lax.le_p: _compare_le,
    lax.gt_p: lambda a, b, **_: _compare_lt(b, a),
    lax.ge_p: lambda a, b, **_: _compare_le(b, a),
    lax.eq_p: _compare_eq,
    lax.ne_p: _compare_ne,
    lax.and_p: _and,
    lax.or_p: _or,
    lax.xor_p: _xor,
    lax.shift_left_p: _shift(lax.shift_left, lambda x, y: x * jnp.exp2(y)),
    lax.shift_right_arithmetic_p: _shift(lax.shift_right_arithmetic),
    lax.shift_right_logical_p: _shift(lax.shift_right_logical),
    lax.select_n_p: _select,
    lax.argmax_p: _argmax,
    **{
        p: _structural(p)
        for p in (
            lax.broadcast_in_dim_p,
            lax.reshape_p,
            lax.squeeze_p,
            lax.transpose_p,
            lax.slice_p,
            lax.rev_p,
            lax.copy_p,
            lax.concatenate_p,
            lax.stack_p,
            lax.unstack_p,
        )
    },
    **{
        p: _structural(p, keeps_values=False)
        for p in (lax.reduce_and_p, lax.reduce_or_p, lax.reduce_max_p, lax.reduce_min_p)
    },
    lax.reduce_sum_p: _reduce_sum,
}
"""A rule for each primitive that can be bounded; `default` serves the rest."""
