"""How the forward kernel multiplies: numbers of 16 bits as they are, or of 8 with scales.

In 8 bits the tensor cores take both operands along their last dimension, so that values come
transposed, `[B,K,V,S]`. They want their first operand in another order than the one in which they
leave a result: of 32 columns of a row, four threads have 4t to 4t+3 and 16+4t to 16+4t+3, where a
result gave them 2t and 2t+1 of each eight. A sum over keys does not ask for their order: the
weights stay in the registers where they are, and the values of every 16 keys lie in the order that
makes it right (`in_order`). The idea is FlashAttention-3's (arXiv:2407.08608, section 3.3).

They also add products up in fewer digits than float32 has, and cut off what is beyond. Added to
sums over 16,384 keys, of values about 1, that made outputs 18 % too small. So the products of each
tile are added up alone here, and tiles in float32.

The exponent of a block of values joins the scores: with `e` that of a value's scale, a weight meets
its value as `2^(s + e - top)`, and rows are taken relative to the largest `s + e`. So blocks of
different scales cost nothing, and no weight that matters is below what 8 bits hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering import _eight as eight
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import LOG2E, Call, Walk, int32, over_rows, row_layout
from xform.lowering.mosaic_gpu._twins import Hardware, Twin


class Scale(NamedTuple):
    """Of one tile: what makes products scores, of each row; of values, the exponent, `2^-that`."""

    scores: jax.Array
    exponent: jax.Array
    inverse: jax.Array


class Weights(NamedTuple):
    """Of one tile, and of its rows so far.

    Attributes:
      p: relative to `top`.
      top, total: what rows are taken relative to, and their sums.
      keep: what makes sums relative to the new `top`.
    """

    p: jax.Array
    top: jax.Array
    total: jax.Array
    keep: jax.Array


@dataclasses.dataclass(frozen=True)
class Sixteen:
    """Numbers of 16 bits, whose products are added to where the sums stay."""

    call: Call

    @property
    def in_scores(self) -> float:
        """What makes `top` a score."""
        return self.call.factor / LOG2E

    def values_tile(self, keys: int) -> tuple[int, int]:
        return keys, self.call.sizes.v_size

    def values_at(self, batch, kv_head, keys) -> tuple:
        return batch, keys, kv_head

    def of_rows(self, refs, walk: Walk, q0):
        """What scales the rows of a warpgroup, and what later tiles are scaled by."""
        del refs, walk, q0

    def of_tile(self, held, walk: Walk, i) -> Scale | None:
        del held, walk, i

    def softmax(self, s_tile, factor, scale, top, total) -> Weights:
        """Weights of a tile of scores, of which `factor` makes exponents of 2."""
        del scale
        # Not scaled: the backward pass gets the same exponents only from the same maximum.
        new = jnp.maximum(top, s_tile.max(axis=1))
        # A row that has seen no key yet has no maximum; its weights are 0 relative to any.
        base = jnp.where(new == -jnp.inf, 0.0, new * factor)
        keep = jnp.exp2(top * factor - base)
        p = jnp.exp2(s_tile * factor - over_rows(base, s_tile.shape))
        return Weights(p, new, total * keep + p.sum(axis=1), keep)

    def narrowed(self, p):
        return p.astype(self.call.narrow)

    def settled(self, p):
        return p

    def scores(self, q, k, then: Callable, scope: Callable):
        """`then(product)`, of `q k'` that has been started."""

        def started(acc):
            self.call.mma.qk(acc, q, k)
            return then(acc)

        return scope(started)

    def read(self, acc, in_flight: int, k):
        """A product, once at most `in_flight` later ones still run."""
        return self.call.mma.read(acc, in_flight, k)

    def summed(self, scope: Callable, walk: Callable):
        """`walk(sums)`, with accumulators from `scope`."""
        return scope(lambda acc: walk(_InPlace(self.call.mma, acc)))


@dataclasses.dataclass(frozen=True)
class Eight:
    """Numbers of 8 bits, whose sums over a tile are added up in float32."""

    call: Call

    in_scores = 1 / LOG2E

    def values_tile(self, keys: int) -> tuple[int, int]:
        return self.call.sizes.v_size, keys

    def values_at(self, batch, kv_head, keys) -> tuple:
        return batch, kv_head, slice(None), keys

    def of_rows(self, refs, walk: Walk, q0):
        of_queries, *of_keys = refs
        sizes, tiles = self.call.sizes, self.call.tiles
        rows = of_queries.at[walk.batch, walk.head, plgpu.ds(q0, tiles.q)]
        kv_head = lax.div(walk.head, int32(sizes.heads // sizes.kv_heads))
        rows = plgpu.load(rows, layout=row_layout(), optimized=False)
        return rows, [ref.at[walk.batch, kv_head] for ref in of_keys]

    def of_tile(self, held, walk: Walk, i) -> Scale:
        rows, (of_keys, of_values) = held
        block = lax.div(walk.col(i) * self.call.tiles.kv, int32(eight.BLOCK))
        return Scale(rows * of_keys[block], of_values[0, block], of_values[1, block])

    def softmax(self, s_tile, factor, scale, top, total) -> Weights:
        rate = self.call.programs.rate
        largest = s_tile.max(axis=1) * factor + scale.exponent
        # The largest weight is what 8 bits hold at most.
        new = jnp.maximum(top, largest - eight.weights_exponent(rate))
        base = jnp.where(new == -jnp.inf, 0.0, new)
        keep = jnp.exp2(top - base)
        of_rows = lambda x: over_rows(x, s_tile.shape)
        factor = factor if isinstance(factor, float) else of_rows(factor)
        # A 256th, which `weights_in_eight` makes good.
        p = jnp.exp2(s_tile * factor - of_rows(base - scale.exponent + 8.0))
        total = total * keep + p.sum(axis=1) * (scale.inverse * 256.0)
        return Weights(p, new, total, keep)

    def narrowed(self, p):
        return self.call.mma.weights_in_eight(p)

    def settled(self, p):
        return self.call.mma.copied(p)

    def scores(self, q, k, then: Callable, scope: Callable):
        del scope
        return then(self.call.mma.started(q, k))

    def read(self, product, in_flight: int, k):
        return self.call.mma.finished(product, in_flight, k)

    def summed(self, scope: Callable, walk: Callable):
        del scope
        return walk(_Apart(self.call.mma, (self.call.tiles.q, self.call.sizes.v_size)))


@dataclasses.dataclass(frozen=True)
class _InPlace:
    """Sums of weights times values, where products are added to.

    `start` a product, `wait` for it, `add` it to the sums so far and say what scales those before
    the next one; `all` of them, the last one with them.
    """

    mma: Hardware | Twin
    acc: Any
    none: tuple = ()

    def start(self, p, v):
        self.mma.pv(self.acc, p, v)

    def wait(self, started, v):
        del started
        self.mma.wait(v)

    def add(self, sums, new, keep):
        del new
        self.acc[...] = self.acc[...] * over_rows(keep, self.acc.shape)
        return sums

    def all(self, sums, new):
        del sums, new
        return self.acc[...]


@dataclasses.dataclass(frozen=True)
class _Apart:
    """The same in float32, apart from the products."""

    mma: Hardware | Twin
    shape: tuple[int, int]

    @property
    def none(self) -> tuple:
        zeros = jnp.zeros(self.shape, jnp.float32)
        ones = jnp.ones(self.shape[:1], jnp.float32)
        return tuple(map(plgpu.layout_cast, (zeros, ones), (plgpu.Layout.WGMMA, row_layout())))

    def start(self, p, v):
        return self.mma.started(p, v)

    def wait(self, started, v):
        return self.mma.finished(started, 0, v)

    def add(self, sums, new, keep):
        return self.all(sums, new), keep

    def all(self, sums, new):
        sums, keep = sums
        return sums * over_rows(keep, self.shape) + new
