"""Reads of an array at an index that is only known as an interval: the extremes over a range.

The least value of `x[lo : hi + 1]` is found without a table of all ranges: the ends of the range
are read element by element, and the whole blocks between them come from a table that holds the
minimum over 1, 2, 4, … blocks from each block on. A range of blocks is the union of two entries.
With blocks of 16 the table is as large as the array, for a million elements too. Several indices
are taken one dimension after the other.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from xform.jaxpr import interpret
from xform.primitives._intervals import (
    RULES,
    Interval,
    default,
    interval,
    ordered,
    point,
    union,
    unknown,
)

# Elements that are read at once, and not in a loop: a GPU pays for each trip, not for elements.
_AT_ONCE = 2**22


def over_range(x: Interval, first: Array, last: Array) -> Interval:
    """The union of `x[i]` over `first <= i <= last`.

    Args:
      x: an interval whose arrays are `[n, *rest]`, n > 0.
      first, last: int32 of one shape, `0 <= first <= last < n`.

    Returns:
      An interval whose arrays are `[*first.shape, *rest]`.
    """
    n, *rest = x.lo.shape
    # A wide row costs as much to read as to look up, and its table should be small.
    block = 16 if math.prod(rest) <= 8 else 128

    edges = _edges(x, first, last, min(block, n))
    if n <= 2 * block:
        return edges
    levels = _levels(jax.tree.map(partial(_blocks, block=block), x))
    start, end = first // block + 1, last // block
    level = 31 - lax.clz(jnp.maximum(end - start, 1))
    inner = union(_at(levels, (level, start)), _at(levels, (level, end - (1 << level))))
    several = (end > start).reshape(*first.shape, *[1] * len(rest))
    return jax.tree.map(partial(jnp.where, several), union(edges, inner), edges)


def _edges(x: Interval, first: Array, last: Array, count: int) -> Interval:
    """The union over the first `count` and the last `count` indices of each range."""
    if first.size * count * math.prod(x.lo.shape[1:]) <= _AT_ONCE:
        offsets = lax.broadcasted_iota(jnp.int32, (*first.shape, count), first.ndim)
        first, last = first[..., None], last[..., None]
        near, far = jnp.minimum(first + offsets, last), jnp.maximum(last - offsets, first)
        return hull(_at(x, jnp.concatenate([near, far], -1)), first.ndim - 1)

    def ends(i, seen):
        near, far = _at(x, jnp.minimum(first + i, last)), _at(x, jnp.maximum(last - i, first))
        return union(seen, union(near, far))

    return lax.fori_loop(1, count, ends, union(_at(x, first), _at(x, last)))


def hull(x: Interval, dim: int) -> Interval:
    """The union along a dimension."""
    bits = None if x.residues is None else jnp.bitwise_or.reduce(x.residues, axis=dim)
    return Interval(x.lo.min(dim), x.hi.max(dim), bits)


def _at(x: Interval, index) -> Interval:
    return jax.tree.map(lambda a: a[index], x)


def _blocks(x: Array, block: int) -> Array:
    """`[ceil(n / block), block, *rest]`, filled up with the last element."""
    x = jnp.pad(x, [(0, -x.shape[0] % block), *[(0, 0)] * (x.ndim - 1)], mode="edge")
    return x.reshape(-1, block, *x.shape[1:])


def _levels(x: Interval) -> Interval:
    """Of blocks `[n, block, *rest]`, `[levels, n, *rest]`: level j unites `2**j` from each on."""
    n = x.lo.shape[0]

    def ahead(a: Array, by: int) -> Array:
        return jnp.concatenate([a[by:], jnp.repeat(a[-1:], by, axis=0)])

    # Without a loop: on a GPU each of its steps would be a launch for every array that it carries.
    levels = [hull(x, 1)]
    for j in range(n.bit_length() - 1):
        levels.append(union(levels[-1], jax.tree.map(partial(ahead, by=1 << j), levels[-1])))
    return jax.tree.map(lambda *level: jnp.stack(level), *levels)


def read(x: Array, indices: Mapping[int, Interval]) -> Interval:
    """The values of `x` where the indices of some dimensions are intervals.

    Args:
      x: an array of a dtype with an order.
      indices: for a dimension, which elements take its place: in-range intervals of shape `[s]`.
        Indices of several dimensions combine as a product.

    Returns:
      An interval of the shape of `x`, with these dimensions replaced.
    """
    out = point(x[None, None])
    for dim, index in indices.items():
        if any(a > 1 and b > 1 for a, b in zip(index.tiles, out.tiles, strict=True)):
            # Two indices follow the same side. The second counts as any: its extremes still hold.
            anywhere = jnp.zeros((1, 1, *index.lo.shape[2:]), jnp.int32)
            index = Interval(anywhere, anywhere + x.shape[dim] - 1)
        out = _read_dim(out, dim + 2, *jnp.broadcast_arrays(index.lo, index.hi))
    return out


def _read_dim(x: Interval, dim: int, first: Array, last: Array) -> Interval:
    tiles = [a * b for a, b in zip(first.shape[:2], x.tiles, strict=True)]

    def merge(a: Array) -> Array:
        # `[rows, cols, s, R, C, *rest]`: one of rows and R is 1, and one of cols and C.
        a = jnp.moveaxis(a, (3, 4), (1, 3))
        return jnp.moveaxis(a.reshape(*tiles, *a.shape[4:]), 2, dim)

    x = jax.tree.map(lambda a: jnp.moveaxis(a, dim, 0), x)
    return jax.tree.map(merge, over_range(x, first, last))


def _dynamic_slice(x, *starts, slice_sizes: Sequence[int]):
    """A slice that would stick out is moved back into the array."""
    if isinstance(x, Interval) or not ordered(x.dtype):
        return unknown(slice_sizes, _dtype(x))
    indices = {}
    for dim, (start, size) in enumerate(zip(starts, slice_sizes, strict=True)):
        last = x.shape[dim] - size
        if last == 0:
            continue
        if isinstance(start, Interval):
            offsets = jnp.arange(size, dtype=jnp.int32)[None, None]
            start = _clipped(start, last)
            indices[dim] = Interval(start.lo[..., None] + offsets, start.hi[..., None] + offsets)
        else:
            x = lax.dynamic_slice_in_dim(x, jnp.clip(start, 0, last), size, dim)
    return read(x, indices)


def _gather(x, index, *, dimension_numbers, slice_sizes, mode, fill_value, **_):
    """What `jnp.take`, `.at[].get` and an array of indices make: `x[..., i, ...]`, or `x[i, j]`."""
    numbers, dims = dimension_numbers, dimension_numbers.start_index_map
    index = interval(index)
    batch = index.lo.shape[2:-1]
    rest = [d for d in range(len(slice_sizes)) if d not in dims]
    out = [slice_sizes[d] for d in rest]
    free = [d for d in range(len(out) + len(batch)) if d not in numbers.offset_dims]
    for position, size in zip(free, batch, strict=True):
        out.insert(position, size)
    if isinstance(x, Interval) or not ordered(x.dtype):
        return unknown(out, _dtype(x))
    simple = (
        not numbers.operand_batching_dims
        and numbers.collapsed_slice_dims == tuple(sorted(dims))
        and all(x.shape[d] == slice_sizes[d] for d in rest)
        and all(x.shape[d] > 0 for d in dims)
        and (not batch or (len(batch) == 1 and len(dims) == 1))
    )
    if not simple:
        return unknown(out, x.dtype)
    indices, inside = {}, interval(True)
    for j, dim in enumerate(dims):
        at = jax.tree.map(lambda end, j=j: end[..., j].reshape(*end.shape[:2], -1), index)
        last = x.shape[dim] - 1
        indices[dim] = _clipped(at, last)
        within = Interval((at.lo >= 0) & (at.hi <= last), (at.hi >= 0) & (at.lo <= last))
        beside = [-1 if d == dim else 1 for d in range(x.ndim)]
        within = jax.tree.map(lambda end, s=beside: end.reshape(*end.shape[:2], *s), within)
        inside = RULES[lax.and_p](inside, within)
    values = read(x, indices)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        shape = values.lo.shape[2:]
        known = fill_value is not None
        fill = jnp.full(shape, fill_value, x.dtype) if known else unknown(shape, x.dtype)
        values = RULES[lax.select_n_p](inside, fill, values)
    if not batch:
        return RULES[lax.squeeze_p](values, dimensions=tuple(sorted(dims)))
    return jax.tree.map(lambda end: jnp.moveaxis(end, dims[0] + 2, free[0] + 2), values)


def _clipped(index: Interval, last: int) -> Interval:
    return Interval(*(jnp.clip(end, 0, last).astype(jnp.int32) for end in (index.lo, index.hi)))


def _dtype(x):
    return x.lo.dtype if isinstance(x, Interval) else x.dtype


def _cond(which, *operands, branches, **_):
    """Any branch may run, and may read."""
    cases = [interpret(branch, RULES | READS, default=default)(*operands) for branch in branches]
    return [RULES[lax.select_n_p](which, *outs) for outs in zip(*cases, strict=True)]


READS: dict = {lax.dynamic_slice_p: _dynamic_slice, lax.gather_p: _gather, lax.cond_p: _cond}
"""The rules of the primitives that read an array at an index, and of those that may."""
