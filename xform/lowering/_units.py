"""How the heads of a batch are laid out and scheduled: the unit of work is one key/value head.

A user's rows are `[*hidden, B, T, H, ...]` and columns `[*hidden, B, S, K, ...]`, where each
hidden dimension (one per enclosing vmap) has its full size or 1. A *unit* sees the `g = H/K`
query heads that share one key/value head: rows `[g, T, ...]`, columns `[S, ...]`, captured arrays
whole. Where the mask tells heads apart, every query head is a unit of its own.

Units that share a block map run as one batched product; units whose block maps differ run one after
the other, since a batched loop runs as long as its longest member and masks the rest (measured on a
CPU: 1.8 times the time).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._tile_fn import COL, ROW, Kind, merge


@dataclasses.dataclass(frozen=True)
class Units:
    """The grid of units, and how many of each dimension run at once.

    Attributes:
      sizes: of the hidden dimensions, B, K, and query heads per key/value head where `split`.
      batch: how many of each dimension run as one batched product; it divides the size.
      group: query heads in one unit.
      split: whether the query heads of one key/value head are units of their own.
    """

    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    group: int
    split: bool

    @classmethod
    def plan(
        cls, hidden: Sequence[int], batch: int, heads: int, kv_heads: int, *,
        apart: Sequence[bool], by_batch: bool, by_head: bool, limit: int,
    ) -> Units:  # fmt: skip
        """At most `limit` query heads at once; never batches a dimension along which maps differ.

        Args:
          hidden: sizes of the hidden dimensions.
          batch, heads, kv_heads: B, H and K.
          apart: which hidden dimensions must run one after the other.
          by_batch, by_head: whether units differ in their block maps along B, along H.
          limit: query heads in one batched product.
        """
        group = heads // kv_heads
        sizes = (*hidden, batch, kv_heads, *((group,) if by_head else ()))
        alone = (*apart, by_batch, by_head, *((True,) if by_head else ()))
        group = 1 if by_head else group
        room, at_once = max(1, limit // group), []
        for size, one in zip(reversed(sizes), reversed(alone), strict=True):
            n = 1 if one else max(d for d in range(1, min(size, room) + 1) if size % d == 0)
            room //= n
            at_once.append(n)
        return cls(sizes, tuple(reversed(at_once)), group, by_head)

    @property
    def heads_at_once(self) -> int:
        """Query heads in one batched product."""
        count = self.group
        for n in self.batch:
            count *= n
        return count

    @property
    def _hidden(self) -> int:
        return len(self.sizes) - 2 - self.split

    def index(self, origin=(0, 0)) -> tuple[jax.Array, jax.Array]:
        """The operands `b` (a scalar in the unit) and `h` (`[group]`), int32, from `origin` on."""
        b, kv_heads = self.sizes[self._hidden : self._hidden + 2]
        split = (self.sizes[-1],) if self.split else ()
        lead = (1,) * self._hidden
        h = jnp.arange(kv_heads * (self.sizes[-1] if self.split else self.group), dtype=jnp.int32)
        return (
            origin[0] + jnp.arange(b, dtype=jnp.int32).reshape(*lead, b, 1, *(1 for _ in split)),
            origin[1] + h.reshape(*lead, 1, kv_heads, *split, self.group),
        )

    def rows(self, x, length: int):
        """`[*hidden,B,T,H,...]` to units of `[g,length,...]`, padded with zeros."""
        d, kv_heads = self._hidden, self.sizes[self._hidden + 1]
        x = jnp.moveaxis(_pad(x, d + 1, length), d + 2, d + 1)
        lead = (kv_heads, self.sizes[-1], 1) if self.split else (kv_heads, self.group)
        return x.reshape(*x.shape[: d + 1], *lead, *x.shape[d + 2 :])

    def cols(self, x, length: int):
        """`[*hidden,B,S,K,...]` to units of `[length,...]`, padded with zeros."""
        d = self._hidden
        x = jnp.moveaxis(_pad(x, d + 1, length), d + 2, d + 1)
        return jnp.expand_dims(x, d + 2) if self.split else x

    def whole(self, x):
        """`[*hidden,...]` to the same array in every unit."""
        d = self._hidden
        return x.reshape(*x.shape[:d], *(1,) * (len(self.sizes) - d), *x.shape[d:])

    def user_rows(self, x, length: int):
        """The inverse of `rows`."""
        d = self._hidden
        x = x.reshape(*x.shape[: d + 1], -1, *x.shape[len(self.sizes) + 1 :])
        return jnp.moveaxis(x, d + 1, d + 2)[(slice(None),) * (d + 1) + (slice(length),)]

    def user_cols(self, x, length: int):
        """The inverse of `cols`."""
        d = self._hidden
        x = x.reshape(*x.shape[: d + 1], -1, *x.shape[len(self.sizes) :])
        return jnp.moveaxis(x, d + 1, d + 2)[(slice(None),) * (d + 1) + (slice(length),)]

    def user_whole(self, x):
        """The inverse of `whole`, for a result that was summed over units."""
        return x.reshape(*x.shape[: self._hidden], *x.shape[len(self.sizes) :])

    def kept(self, kind: Kind, hidden: Sequence[int]) -> tuple[bool, ...]:
        """`run`'s `keep` for a result of `kind` whose hidden dimensions have these sizes."""
        lead = [n != 1 or size == 1 for n, size in zip(hidden, self.sizes, strict=False)]
        own: dict[Kind, tuple[bool, ...]] = {ROW: (True, True, True), COL: (True, True, False)}
        last = own.get(kind, (False, False, False))
        return (*lead, *last[: len(self.sizes) - self._hidden])

    def run(self, unit: Callable, operands: Sequence, keep: Sequence[tuple[bool, ...]]) -> list:
        """Evaluates `unit` everywhere.

        Args:
          unit: takes one slice of every operand and returns a list of arrays.
          operands: arrays whose leading dimensions are the grid's, each of full size or 1.
          keep: for each result and grid dimension, whether results are stacked along it; they
            are summed otherwise, in order, in one accumulator.
        """
        for d in reversed(range(len(self.sizes))):
            unit = _along(unit, self.sizes[d], self.batch[d], [k[d] for k in keep])
        return unit(*operands)


def _along(unit: Callable, size: int, batch: int, keep: list[bool]) -> Callable:
    """Maps `unit` over one leading dimension, `batch` at a time."""

    def batched(*xs):
        """All of the leading dimension at once."""
        if all(x.shape[0] == 1 for x in xs):
            return [y[None] for y in unit(*(x[0] for x in xs))]
        axes = tuple(None if x.shape[0] == 1 else 0 for x in xs)
        ys = jax.vmap(unit, in_axes=axes)(
            *(x[0] if a is None else x for x, a in zip(xs, axes, strict=True))
        )
        return [y if k else y.sum(0, keepdims=True) for y, k in zip(ys, keep, strict=True)]

    def chunked(*xs):
        """`batch` at a time, one chunk after the other."""
        moving = tuple(x.shape[0] > 1 for x in xs)
        still = [x for x, m in zip(xs, moving, strict=True) if not m]
        chunks = [x.reshape(-1, batch, *x.shape[1:]) for x, m in zip(xs, moving, strict=True) if m]
        of_chunk = lambda chunk: batched(*merge(moving, chunk, still))
        pick = lambda ys, kept: [y for y, k in zip(ys, keep, strict=True) if k == kept]

        def step(sums, chunk):
            ys = of_chunk(chunk)
            return [s + y for s, y in zip(sums, pick(ys, False), strict=True)], pick(ys, True)

        start = []
        if not all(keep):
            shapes = jax.eval_shape(of_chunk, [c[0] for c in chunks])
            start = [jnp.zeros(s.shape, s.dtype) for s in pick(shapes, False)]
        sums, stacked = lax.scan(step, start, chunks)
        return merge(tuple(keep), [y.reshape(size, *y.shape[2:]) for y in stacked], sums)

    return batched if batch == size else chunked


def _pad(x, dim: int, length: int):
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, length - x.shape[dim])
    return x if x.shape[dim] == length else jnp.pad(x, widths)
