"""Reads of an array at an index that is only known as an interval: the extremes over a range.

The least value of `x[lo : hi + 1]` is found without a table of all ranges: the ends of the range
are read element by element, and the whole blocks between them come from a table that holds the
minimum over 1, 2, 4, … blocks from each block on. A range of blocks is the union of two entries.
With blocks of 16 the table is as large as the array, for a million elements too. Several indices
are taken one dimension after the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from xform.primitives._intervals import RULES, Interval, interval, ordered, residues, unknown


def over_range(combine: Callable, x: Array, lo: Array, hi: Array) -> Array:
    """Combines `x[i]` over `lo <= i <= hi`.

    Args:
        combine: an associative, commutative and idempotent function: a minimum, maximum or union.
        x: `[n, *rest]`, n > 0.
        lo, hi: int32 of one shape, `0 <= lo <= hi < n`.

    Returns:
        `[*lo.shape, *rest]`.
    """
    n, rest = x.shape[0], x.shape[1:]
    # A wide row costs as much to read as to look up, and its table should be small.
    block = 16 if math.prod(rest) <= 8 else 128

    def ends(i, so_far):
        both = combine(x[jnp.minimum(lo + i, hi)], x[jnp.maximum(hi - i, lo)])
        return combine(so_far, both)

    edges = lax.fori_loop(1, min(block, n), ends, combine(x[lo], x[hi]))
    if n <= 2 * block:
        return edges
    levels = _levels(combine, _blocks(combine, x, block))
    first, last = lo // block + 1, hi // block - 1
    level = 31 - lax.clz(jnp.maximum(last - first + 1, 1))
    whole = combine(levels[level, first], levels[level, last + 1 - (1 << level)])
    inner = (last >= first).reshape(*lo.shape, *[1] * len(rest))
    return jnp.where(inner, combine(edges, whole), edges)


def _blocks(combine: Callable, x: Array, block: int) -> Array:
    """`[ceil(n / block), *rest]`, each block combined; the last is filled with the last element."""
    x = jnp.pad(x, [(0, -x.shape[0] % block), *[(0, 0)] * (x.ndim - 1)], mode="edge")
    while block > 1:
        x, block = combine(x[::2], x[1::2]), block // 2
    return x


def _levels(combine: Callable, x: Array) -> Array:
    """`[levels, n, *rest]`: level j combines `2**j` elements from each on, as far as there are."""
    n = x.shape[0]
    levels = [x]
    for j in range(n.bit_length() - 1):
        ahead = jnp.minimum(jnp.arange(n) + (1 << j), n - 1)
        levels.append(combine(levels[-1], levels[-1][ahead]))
    return jnp.stack(levels)


def read(x: Array, indices: Mapping[int, Interval]) -> Interval:
    """The values of `x` where the indices of some dimensions are intervals.

    Args:
        x: an array of a dtype with an order.
        indices: for a dimension, which elements take its place: in-range intervals of shape `[s]`.
            Indices of several dimensions combine as a product.

    Returns:
        An interval of the shape of `x`, with these dimensions replaced.
    """
    ends = [(jnp.minimum, x), (jnp.maximum, x), (jnp.bitwise_or, residues(x))]
    return Interval(*(None if v is None else _read(op, v[None, None], indices) for op, v in ends))


def _read(combine: Callable, x: Array, indices: Mapping[int, Interval]) -> Array:
    for axis, index in indices.items():
        dim, size = axis + 2, x.shape[axis + 2]
        if any(a > 1 and b > 1 for a, b in zip(index.tiles, x.shape[:2], strict=True)):
            # Two indices follow the same side. The second counts as any: its extremes still hold.
            anywhere = jnp.zeros((1, 1, *index.lo.shape[2:]), jnp.int32)
            index = Interval(anywhere, anywhere + size - 1)
        lo, hi = jnp.broadcast_arrays(index.lo, index.hi)
        # `[rows, cols, s, R, C, *rest]`: one of rows and R is 1, and one of cols and C.
        out = over_range(combine, jnp.moveaxis(x, dim, 0), lo, hi)
        out = jnp.moveaxis(out, (3, 4), (1, 3))
        tiles = [a * b for a, b in zip(lo.shape[:2], x.shape[:2], strict=True)]
        x = jnp.moveaxis(out.reshape(*tiles, *out.shape[4:]), 2, dim)
    return x


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
            offsets = jnp.arange(size, dtype=jnp.int32)
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
    simple = (
        not isinstance(x, Interval)
        and ordered(x.dtype)
        and not numbers.operand_batching_dims
        and numbers.collapsed_slice_dims == tuple(sorted(dims))
        and all(x.shape[d] == slice_sizes[d] for d in rest)
        and all(x.shape[d] > 0 for d in dims)
        and (not batch or (len(batch) == 1 and len(dims) == 1))
    )
    if not simple:
        return unknown(out, _dtype(x))
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


READS: dict = {lax.dynamic_slice_p: _dynamic_slice, lax.gather_p: _gather}
"""The rules of the primitives that read an array at an index."""
