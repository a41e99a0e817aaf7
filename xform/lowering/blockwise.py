"""Attention tile by tile in plain XLA, for any device: O(T V) memory, live tiles only.

Two programs. `attend` is the forward pass with online softmax (Milakov and Gimelshein,
arXiv:1805.02867; tiled as in FlashAttention-2, arXiv:2307.08691, algorithm 1). `tile_sum`
evaluates any `TileFn`, which is every derivative: where a column result is asked for (a key
gradient) it walks key tiles outside and query tiles inside, else the other way round, and adds to
each result in place and in a fixed order, so that a second run gives the same bits.

Known limits: one unit with a sparse mask uses one core for its small products; on GPUs and TPUs
this runs at XLA's speed, not at a fused kernel's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._contract import wide_of
from xform.lowering._spec import FULL, PARTIAL, At, Spec
from xform.lowering._tile_fn import COL, ROW, Kind, TileFn, base, scores, weighted
from xform.lowering._units import Units

# Scores of one step, all batched heads together: 1 MiB in float32, about one core's L2 cache.
_STEP = 2**18
# More heads than this in one batched product only spill the cache.
_HEADS = 16
_MIN_TILE, _MAX_TILE = 128, 512
# A captured array larger than this gets one gradient accumulator, not one per batched head.
_LARGE = 2**16

BlockMap = Callable[..., jax.Array]
"""`block_map(mask, context, *, b, h, q_len, kv_len, q_tile, kv_tile) -> int8 [rows, cols]`."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the grid of tiles: `dim` of a unit's arrays is cut into `count` tiles."""

    length: int
    tile: int
    dim: int

    @classmethod
    def cut_evenly(cls, length: int, heads: int, dim: int) -> Side:
        """Tiles of a multiple of 8, or one tile of all of it; smaller ones for more heads."""
        target = 2 ** int(math.log2(math.sqrt(_STEP / heads)))
        target = min(_MAX_TILE, max(_MIN_TILE, target))
        count = max(1, round(length / target))
        return cls(length, length if count == 1 else 8 * math.ceil(length / count / 8), dim)

    @property
    def count(self) -> int:
        return math.ceil(self.length / self.tile)

    @property
    def padded(self) -> int:
        return self.count * self.tile

    def positions(self, i):
        """True indices of tile `i`, those of the padding clipped to the last one."""
        return jnp.minimum(i * self.tile + jnp.arange(self.tile, dtype=jnp.int32), self.length - 1)

    def inside(self, i):
        """Which positions of tile `i` are not padding."""
        return i * self.tile + jnp.arange(self.tile, dtype=jnp.int32) < self.length

    def take(self, x, i):
        """Tile `i` of `x`."""
        if self.count == 1:
            return x
        return lax.dynamic_slice_in_dim(x, i * self.tile, self.tile, self.dim)

    def put(self, x, i, tile):
        """`x` with tile `i` replaced."""
        if self.count == 1:
            return tile
        return lax.dynamic_update_slice_in_dim(x, tile, i * self.tile, self.dim)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The tiles of one unit: T x S cut into rows and columns, and what a mask leaves of each.

    Attributes:
      row, col: the two sides.
      spec: the user's program.
      at: b, h and context of the unit.
      kinds: int8 `[rows, cols]`; None where all tiles are full, or there is only one.
    """

    row: Side
    col: Side
    spec: Spec
    at: At
    kinds: jax.Array | None

    @classmethod
    def of(cls, row: Side, col: Side, spec: Spec, at: At, block_map: BlockMap) -> Grid:
        grid = cls(row, col, spec, at, None)
        if grid.all_full or row.count == col.count == 1:
            return grid
        kinds = block_map(
            spec.mask, at.context, b=at.b, h=at.h[0],
            q_len=row.length, kv_len=col.length, q_tile=row.tile, kv_tile=col.tile,
        )  # fmt: skip
        return dataclasses.replace(grid, kinds=kinds)

    @property
    def ragged(self) -> bool:
        return self.row.padded > self.row.length or self.col.padded > self.col.length

    @property
    def all_full(self) -> bool:
        return self.spec.mask is None and not self.ragged

    def tile(self, i, j, masked: bool) -> At:
        """The coordinates of one tile, with its mask where it is partial."""
        at = dataclasses.replace(self.at, q=self.row.positions(i), k=self.col.positions(j))
        if not masked:
            return at
        visible = jnp.ones((1, 1, 1), bool) if self.spec.mask is None else self.spec.visible(at)
        if self.ragged:
            inside = self.row.inside(i)[:, None] & self.col.inside(j)[None]
            visible &= inside[None]
        return dataclasses.replace(at, visible=visible)

    def fold(self, along: str, index, step: Callable, carry):
        """Folds `step(masked, n, carry)` over the live tiles of row or column `index`.

        Partial tiles come first, then full ones, each in order.
        """
        count = (self.col if along == ROW else self.row).count
        if self.all_full:
            return _loop(count, partial(step, False), carry)
        if self.kinds is None:
            return step(True, 0, carry)
        codes = self.kinds[index] if along == ROW else self.kinds[:, index]
        for code, masked in ((PARTIAL, True), (FULL, False)):
            seen = jnp.cumsum((codes == code).astype(jnp.int32))
            nth = lambda n, seen=seen: jnp.sum(seen <= n, dtype=jnp.int32)
            carry = lax.fori_loop(
                0, seen[-1], lambda n, c, nth=nth, masked=masked: step(masked, nth(n), c), carry
            )
        return carry


def _loop(count: int, body: Callable, carry):
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def attend(
    spec: Spec, block_map: BlockMap, hidden: int, q, k, v, captures, context, *,
    origin=(0, 0), peak: bool = False, weights=None,
):  # fmt: skip
    """The forward pass.

    Args:
      spec: the user's program.
      block_map: classifies the tiles of one unit.
      hidden: number of hidden dimensions.
      q, k, v: `[*hidden,B,T,H,D]`, `[*hidden,B,S,K,D]`, `[*hidden,B,S,K,V]`.
      captures: arrays that the score mod reads, `[*hidden,...]`.
      context: arrays that masks and indices read, `[*hidden,...]`.
      origin: the b and h of the first unit, where these arrays are a device's part of others.
      peak: whether to say where the maximum is.
      weights: what weights and values are rounded to where they meet; the spec's dtype if None.

    Returns:
      out `[*hidden,B,T,H,V]`, the maximum of each row's scores and the sum of their exponentials
      relative to it, `[*hidden,B,T,H]`, all in the wide dtype; with `peak`, also a key that has
      the maximum, int32. A row with no key: 0, -inf, 0, -1.
    """
    units, row, col = _plan(spec, hidden, q, k, (q, k, v, *captures, *context), context, False)
    finite = _all_finite((q, k, v))

    def unit(b, h, q, k, v, *arrays):
        captures, context = arrays[: len(spec.reads)], arrays[len(spec.reads) :]
        grid = Grid.of(row, col, spec, spec.unit(b, h, context, finite), block_map)
        return _attend_unit(grid, q, k, v, captures, peak, weights)

    operands = [
        *units.index(origin),
        units.rows(q, row.padded), units.cols(k, col.padded), units.cols(v, col.padded),
        *map(units.whole, (*captures, *context)),
    ]  # fmt: skip
    results = units.run(unit, operands, [(True,) * len(units.sizes)] * (4 if peak else 3))
    return [units.user_rows(x, row.length) for x in results]


def _attend_unit(grid: Grid, q, k, v, captures, peak: bool, weights):
    """Online softmax of one unit: out `[g,T,V]`, maximum, sum and, with `peak`, argmax `[g,T]`."""
    spec, wide = grid.spec, grid.spec.wide
    shape = (q.shape[0], grid.row.tile)

    def line(_, i):
        q_tile = grid.row.take(q, i)

        def step(masked, j, carry):
            top, total, acc, *argmax = carry
            at = grid.tile(i, j, masked)
            reads = [_load(g, x, at) for g, x in zip(spec.reads, captures, strict=True)]
            s = scores(spec, at, q_tile, grid.col.take(k, j), reads)
            highest = s.max(-1)
            new = jnp.maximum(top, highest)
            e, keep = jnp.exp(s - base(new)[..., None]), jnp.exp(top - base(new))
            ev = weighted(spec, at, e, grid.col.take(v, j), weights)
            argmax = [jnp.where(highest > top, at.k[s.argmax(-1)], x) for x in argmax]
            return new, total * keep + e.sum(-1), acc * keep[..., None] + ev, *argmax

        empty = jnp.zeros((*shape, v.shape[-1]), wide)
        start = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide), empty
        nowhere = [jnp.full(shape, -1, jnp.int32)] if peak else []
        top, total, acc, *argmax = grid.fold(ROW, i, step, (*start, *nowhere))
        return None, (acc * inverse(total)[..., None], top, total, *argmax)

    if grid.row.count == 1:
        return list(line(None, 0)[1])
    _, tiles = lax.scan(line, None, jnp.arange(grid.row.count, dtype=jnp.int32))
    return [jnp.moveaxis(x, 0, 1).reshape(shape[0], -1, *x.shape[3:]) for x in tiles]


def inverse(total):
    """`1 / total`, and 0 for a row that sums over nothing."""
    return jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))


def tile_sum(
    fn: TileFn, block_map: BlockMap, hidden: int, outs: Sequence, operands, context, *,
    origin=(0, 0),
):  # fmt: skip
    """Evaluates a tile sum.

    Args:
      fn: the function of tiles.
      block_map: classifies the tiles of one unit.
      hidden: number of hidden dimensions.
      outs: shape and dtype of each result. Where a hidden dimension of a result is 1, or the result
        belongs to a captured array, it is summed over.
      operands: one array for each of `fn.operands`.
      context: arrays that masks and indices read, `[*hidden,...]`.
      origin: the b and h of the first unit, where these arrays are a device's part of others.

    Returns:
      One array for each of `outs`.
    """
    first = lambda kind: next(x for x, k in zip(operands, fn.operands, strict=True) if k == kind)
    large = any(
        k not in (ROW, COL) and math.prod(o.shape) > _LARGE
        for k, o in zip(fn.results, outs, strict=True)
    )
    arrays = (*operands, *context)
    units, row, col = _plan(fn.spec, hidden, first(ROW), first(COL), arrays, context, large)
    finite = _all_finite(x for x, k in zip(operands, fn.operands, strict=True) if k in (ROW, COL))
    enter: dict[Kind, Callable] = {
        ROW: partial(units.rows, length=row.padded),
        COL: partial(units.cols, length=col.padded),
    }
    leave: dict[Kind, Callable] = {
        ROW: partial(units.user_rows, length=row.length),
        COL: partial(units.user_cols, length=col.length),
    }

    def unit(b, h, *arrays):
        arrays, context = arrays[: len(operands)], arrays[len(operands) :]
        grid = Grid.of(row, col, fn.spec, fn.spec.unit(b, h, context, finite), block_map)
        return _tile_sum_unit(fn, grid, arrays, trailing)

    trailing = [
        o.shape[hidden + 3 * (k in (ROW, COL)) :] for k, o in zip(fn.results, outs, strict=True)
    ]
    inputs = [enter.get(k, units.whole)(x) for x, k in zip(operands, fn.operands, strict=True)]
    keep = [units.kept(k, o.shape[:hidden]) for k, o in zip(fn.results, outs, strict=True)]
    sums = units.run(unit, [*units.index(origin), *inputs, *map(units.whole, context)], keep)
    return [
        leave.get(k, units.user_whole)(x).astype(o.dtype)
        for x, k, o in zip(sums, fn.results, outs, strict=True)
    ]


def _tile_sum_unit(fn: TileFn, grid: Grid, arrays, trailing):
    """One unit: rows `[g,T,...]`, columns `[S,...]`, captured arrays whole; results likewise.

    `outer` is the side whose results are finished tile by tile; the other side's are added to in
    place.
    """
    wide = fn.spec.wide
    outer = COL if COL in fn.results else ROW
    sides: dict[Kind, Side] = {ROW: grid.row, COL: grid.col}
    group = (grid.at.h.shape[0],)
    lead: dict[Kind, tuple[int, ...]] = {ROW: group, COL: ()}

    def evaluate(at, index):
        """Loads one tile of every operand and applies `fn`."""
        tiles = [
            _widen(sides[k].take(x, index[k]), wide) if k in sides else _load(k, x, at)
            for x, k in zip(arrays, fn.operands, strict=True)
        ]
        return fn(at, *tiles)

    def add(total, value, kind, at, index):
        """Adds a tile's result to its total, which is whole unless `kind` is `outer`."""
        if kind == outer:
            return total + value
        if kind in sides:
            side, i = sides[kind], index[kind]
            return side.put(total, i, side.take(total, i) + value)
        for read, ct in zip(kind, value, strict=True):
            total = read.store(total, read.starts(at), ct)
        return total

    def line(n, wholes):
        def step(masked, m, totals):
            index: dict[Kind, jax.Array] = {ROW: m, COL: n} if outer == COL else {ROW: n, COL: m}
            at = grid.tile(index[ROW], index[COL], masked)
            values = evaluate(at, index)
            return [
                add(t, v, k, at, index) for t, v, k in zip(totals, values, fn.results, strict=True)
            ]

        totals = [
            jnp.zeros((*lead[k], sides[k].tile, *shape), wide) if k == outer else whole
            for whole, k, shape in zip(wholes, fn.results, trailing, strict=True)
        ]
        totals = grid.fold(outer, n, step, totals)
        return [
            sides[k].put(whole, n, total) if k == outer else total
            for whole, k, total in zip(wholes, fn.results, totals, strict=True)
        ]

    def nothing(kind: Kind, shape):
        """What a result is added to, all of it."""
        if isinstance(kind, str):
            return jnp.zeros((*lead[kind], sides[kind].padded, *shape), wide)
        return jnp.zeros(shape, kind[0].dtype)

    wholes = [nothing(k, shape) for k, shape in zip(fn.results, trailing, strict=True)]
    return _loop(sides[outer].count, line, wholes)


def _plan(spec: Spec, hidden: int, row, col, arrays, context, one_by_one: bool):
    """Units and the two sides for rows `[*hidden,B,T,H,...]` and columns `[*hidden,B,S,K,...]`."""
    units = Units.plan(
        [max(x.shape[d] for x in arrays) for d in range(hidden)],
        max(row.shape[hidden], col.shape[hidden]), row.shape[hidden + 2], col.shape[hidden + 2],
        apart=[any(x.shape[d] > 1 for x in context) for d in range(hidden)],
        by_batch="b" in spec.mask_dims, by_head="h" in spec.mask_dims,
        limit=1 if one_by_one else _HEADS,
    )  # fmt: skip
    heads = units.heads_at_once
    rows = Side.cut_evenly(row.shape[hidden + 1], heads, 1)
    return units, rows, Side.cut_evenly(col.shape[hidden + 1], heads, 0)


def _load(reads, capture, at: At):
    """What the reads of one captured array load of it."""
    return tuple(read.load(capture, read.starts(at)) for read in reads)


def _widen(x, wide):
    return x.astype(wide) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _all_finite(arrays):
    """Whether all of `arrays` are finite: their sums are, and a maximum may lose a NaN in XLA.

    Where the numbers are finite and their sum is not, that costs time and nothing else.
    """
    total = lambda x: jnp.sum(jnp.abs(x), dtype=wide_of(x.dtype))
    return jnp.isfinite(jnp.stack([total(x).astype(jnp.float32) for x in arrays])).all()
