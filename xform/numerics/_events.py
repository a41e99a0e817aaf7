"""What a probe writes down of a value that is not finite: where it was born, and from what.

*Born* is a NaN whose operands at this element hold no NaN, or an infinity whose operands are finite
there. Which elements of the operands count is known for elementwise operations, sums, products of
matrices, and operations that only move elements; of all others every element counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._ops import ELEMENTWISE, MOVES
from xform._program import Node

OPERANDS = 4  # of how many operands of an equation values are written down

_CUMULATIVE = frozenset({"cumsum", "cumprod", "cumlogsumexp", "cummax", "cummin"})
# Sums of moved elements: what they make of a mask says which results a masked element enters.
_LINEAR = frozenset(
    {"gather", "scatter", "scatter-add", "reduce_window_sum", "select_and_scatter_add", "psum",
     "psum_invariant", "reduce_scatter"}
)  # fmt: skip


class Events(NamedTuple):
    """A record of `xform.numerics._run`: one row for each floating-point result of each node."""

    bad: jax.Array
    """Whether any element was ever not finite."""
    born: jax.Array
    """Whether one was born here; the rest is of the first time, and of its first element."""
    nan: jax.Array
    index: Any
    """Its place in the array, elements counted in row-major order."""
    words: jax.Array
    """Of each operand two numbers in 32-bit words: see `_words`."""
    turns: jax.Array
    """The turn of each loop around it."""


def blank(rows: int, levels: int) -> Events:
    """The record of what has not run."""
    no = jnp.zeros(rows, bool)
    index = jnp.zeros(rows, jnp.uint32)
    words = jnp.zeros((rows, OPERANDS, 2), jnp.uint32)
    return Events(no, no, no, index, words, jnp.zeros((rows, levels), jnp.int32))


def merge(old: Events, new: Events, level: int, turn: Any) -> Events:
    """The record of a loop after one more turn."""
    new = new._replace(turns=new.turns.at[:, level].set(turn))
    first = new.born & ~old.born

    def choose(a, b):
        return jnp.where(first.reshape(-1, *[1] * (a.ndim - 1)), b, a)

    merged = Events(*map(choose, old, new))
    return merged._replace(bad=old.bad | new.bad, born=old.born | new.born)


def watched(aval: Any) -> bool:
    """Whether values of a type can fail to be finite."""
    dtype = getattr(aval, "dtype", None)
    return (
        hasattr(aval, "shape")
        and type(aval).__name__ != "AbstractRef"
        and dtype is not None
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
        and jnp.issubdtype(dtype, jnp.inexact)
        and dtype != jnp.float4_e2m1fn
    )


def isnan(x: Any) -> Any:
    """`jnp.isnan`, of numbers of 8 bits too."""
    return jnp.isnan(_readable(x))


def nonfinite(x: Any) -> Any:
    """The elements that are NaN or infinite."""
    return ~jnp.isfinite(_readable(x))


def _readable(x: Any) -> Any:
    small = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    return x.astype(jnp.float32) if small else x


def seen(x: Any, levels: int) -> Events:
    """The record of a value that came from outside: an argument."""
    return _row(nonfinite(x), isnan(x), [], [], x, levels, born=None)


def event(node: Node, ins: Sequence, out: Any, levels: int) -> Events:
    """The record of one result of a node."""
    bad, nan = nonfinite(out), isnan(out)
    name = node.name
    if name in MOVES:
        return blank(1, levels)._replace(bad=jnp.any(bad)[None])
    from_nan = _reached(node, ins, isnan, out)
    from_any = _reached(node, ins, nonfinite, out)
    born = (nan & ~from_nan) | (bad & ~nan & ~from_any)
    operands = ins[:OPERANDS]
    exact = [name in ELEMENTWISE and aligned(x.shape, out.shape) for x in operands]
    return _row(bad, nan, operands, exact, out, levels, born=born)


def aligned(shape: Sequence[int], with_: Sequence[int]) -> bool:
    """Whether an operand of a shape has an element for each element of a result."""
    same = len(shape) == len(with_) and all(a in (1, b) for a, b in zip(shape, with_, strict=True))
    return same or not shape


def _row(bad, nan, operands, exact, out, levels, *, born) -> Events:
    where = bad if born is None else born
    place = _places(out)
    first = jnp.min(jnp.where(where, place, np.uint32(2**32 - 1)), initial=np.uint32(2**32 - 1))
    here = place == first
    words = [_words(x, here if e else None) for x, e in zip(operands, exact, strict=True)]
    words += [jnp.zeros(2, jnp.uint32)] * (OPERANDS - len(words))
    row = Events(
        jnp.any(bad), jnp.any(where), jnp.any(nan & here), first, jnp.stack(words),
        jnp.zeros(levels, jnp.int32),
    )  # fmt: skip
    return Events(*(x[None] for x in row))


def _places(x: Any) -> Any:
    """Of each element its number in row-major order, without a reshape, which may move shards."""
    place = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[dim + 1 :]) % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, x.shape, dim) * stride
    return place


def _words(x: Any, here: Any) -> Any:
    """An operand at an element, to the bit; or its least and its greatest element, as float32."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.zeros(2, jnp.uint32)
    if here is None:
        if x.size == 0:
            return jnp.zeros(2, jnp.uint32)
        x = jnp.abs(x) if jnp.iscomplexobj(x) else x
        wide = _readable(x).astype(jnp.float32)
        known = ~jnp.isnan(wide)
        low = jnp.min(jnp.where(known, wide, jnp.inf))
        high = jnp.max(jnp.where(known, wide, -jnp.inf))
        return lax.bitcast_convert_type(jnp.stack([low, high]), jnp.uint32)
    pair = _bits(x)
    if x.ndim == 0:
        return jnp.stack(pair)
    return jnp.stack([jnp.max(jnp.where(here, bits, np.uint32(0)), initial=0) for bits in pair])


def _bits(x: Any) -> tuple[Any, Any]:
    """Each element as two words."""
    if jnp.iscomplexobj(x):
        parts = (lax.real(x), lax.imag(x))
        low, high = (lax.bitcast_convert_type(p.astype(jnp.float32), jnp.uint32) for p in parts)
        return low, high
    if x.dtype.itemsize == 8:
        both = lax.bitcast_convert_type(x, jnp.uint32)
        return both[..., 0], both[..., 1]
    if jnp.issubdtype(x.dtype, jnp.floating):
        low = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    elif jnp.issubdtype(x.dtype, jnp.signedinteger):
        low = lax.bitcast_convert_type(x.astype(jnp.int32), jnp.uint32)
    else:
        low = x.astype(jnp.uint32)
    return low, jnp.zeros_like(low)


def value_of(words: np.ndarray, dtype: Any) -> Any:
    """The number that `_words` wrote down of an element of an operand."""
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        re, im = words.view(np.float32)
        return complex(re, im)
    if dtype.itemsize == 8:
        return words.view(dtype)[0].item()
    if jnp.issubdtype(dtype, jnp.floating):
        return words[:1].view(np.float32)[0].item()
    if jnp.issubdtype(dtype, jnp.signedinteger):
        return words[:1].view(np.int32)[0].item()
    return bool(words[0]) if dtype == jnp.bool_ else int(words[0])


# ---- which results an operand's elements enter ---------------------------------------------------


def _reached(node: Node, ins: Sequence, test: Any, out: Any) -> Any:
    """The elements of a result that operands' elements with a property enter."""
    name, params = node.name, node.eqn.params
    masks = [test(x) if watched(jax.typeof(x)) else None for x in ins]
    known = [m for m in masks if m is not None]
    if not known:
        return jnp.zeros(out.shape, bool)
    if name in ELEMENTWISE:
        whole = jnp.zeros(out.shape, bool)
        for mask in known:
            whole |= mask
        return whole
    if name in ("reduce_sum", "reduce_prod"):
        return jnp.any(known[0], axis=params["axes"])
    if name in _CUMULATIVE:
        options = dict(axis=params["axis"], reverse=params["reverse"])
        return lax.cummax(known[0].astype(jnp.int32), **options) > 0
    if name == "dot_general":
        return _product_reached(known, params["dimension_numbers"])
    if name in _LINEAR:
        marked = [x if m is None else m.astype(x.dtype) for x, m in zip(ins, masks, strict=True)]
        found = node.eqn.primitive.bind(*marked, **node.eqn.primitive.get_bind_params(params))
        k = next(i for i, v in enumerate(node.outs) if v.aval.shape == out.shape)
        return (found[k] if node.eqn.primitive.multiple_results else found) > 0
    return jnp.broadcast_to(jnp.any(jnp.stack([jnp.any(m) for m in known])), out.shape)


def _product_reached(masks: Sequence, numbers: Any) -> Any:
    """The rows and columns of a product that a masked element of an operand enters."""
    (lhs_in, rhs_in), (lhs_batch, rhs_batch) = numbers
    sides = []
    for mask, summed, batch in zip(masks, (lhs_in, rhs_in), (lhs_batch, rhs_batch), strict=True):
        free = [d for d in range(mask.ndim) if d not in (*summed, *batch)]
        mask = lax.transpose(mask, (*batch, *free, *summed))
        sides.append(jnp.any(mask, axis=tuple(range(len(batch) + len(free), mask.ndim))))
    (lhs, rhs), batch = sides, len(lhs_batch)
    lhs = lax.expand_dims(lhs, range(lhs.ndim, lhs.ndim + rhs.ndim - batch))
    rhs = lax.expand_dims(rhs, range(batch, batch + lhs.ndim - rhs.ndim))
    return lhs | rhs
