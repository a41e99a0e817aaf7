"""The forward kernel in 8 bits: products of e4m3 numbers with scales, the rest as in `_forward`.

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

That a tile of values is awaited before it is wanted keeps the softmax where it is: it is a loop,
and across a loop the assembler moves nothing, while across the wait for a product it moves all it
can, and the two no longer overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering import _eight as eight
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import LOG2E, Place, Walk, int32, over_rows, row_layout
from xform.lowering.mosaic_gpu._forward import Forward


class Scale(NamedTuple):
    """Of one tile: what makes products scores, of each row; of values, the exponent, `2^-that`."""

    scores: jax.Array
    exponent: jax.Array
    inverse: jax.Array


class Rows(NamedTuple):
    """Of a warpgroup's rows, after some tiles.

    Attributes:
      p: the weights of the last tile, in 8 bits, which have not met their values.
      top, total: what weights are relative to, and their sums.
      sums: of weights times values, without the last tile's.
      keep: what makes `sums` relative to `top`.
    """

    p: jax.Array
    top: jax.Array
    total: jax.Array
    sums: jax.Array
    keep: jax.Array


@dataclasses.dataclass(frozen=True)
class ForwardInEight(Forward):
    """The body of the kernel, of the arrays of `InEight`."""

    scales: ClassVar[int] = 3

    @property
    def in_scores(self) -> float:
        return 1 / LOG2E

    def values_tile(self) -> tuple[int, int]:
        return self.call.sizes.v_size, self.call.tiles.kv

    def values_at(self, batch, keys, kv_head) -> tuple:
        return batch, kv_head, slice(None), keys

    def _compute(self, walk: Walk, done, warpgroup, q_ref, scales, operands, results, smem: dict):
        call, t, mma = self.call, self.call.tiles, self.call.mma
        stages = int32(t.stages)
        q0 = walk.row * t.rows + warpgroup * t.q
        source = q_ref.at[walk.batch, plgpu.ds(q0, t.q), walk.head]
        plgpu.copy_gmem_to_smem(source, smem["q"].at[warpgroup], smem["q_full"].at[warpgroup])
        held = call.held(operands, walk.b, walk.head, q0)
        scale_of = self._scales(scales, walk, q0)
        take, give = self._turns(warpgroup, smem)
        plgpu.barrier_wait(smem["q_full"].at[warpgroup])
        slot_of = lambda i: lax.rem(done + i, stages)

        def weigh(i, started: Callable, top, total):
            """Of step `i`: weights, the new `top`, `total` and `keep`; and `started()`."""
            # Read early: they come from far away.
            place, scale = Place(q0, walk.col(i) * t.kv), scale_of(i)
            slot = slot_of(i)
            k_tile = smem["k"].at[slot]
            plgpu.barrier_wait(smem["k_full"].at[slot])
            take()
            # Hidden from the compiler, which would hoist descriptors into registers.
            q_tile = smem["q"].at[lax.optimization_barrier(warpgroup)]
            product = mma.started(q_tile, k_tile)
            others, in_flight = started()
            give()
            s_tile = mma.finished(product, in_flight, k_tile)
            values = call.values(held, smem["vectors"], slot, warpgroup * t.q)
            call.free_keys(smem["k_free"].at[slot])
            s_tile, factor = call.scores(s_tile, place, i < walk.partial, values, scale.scores)
            p, top, total, keep = self._softmax(s_tile, factor, scale, top, total)
            if call.programs.dropout is not None:
                p = p * call.run(call.programs.dropout, place, values)
            weights = mma.weights_in_eight(p), top, total, keep, others
            plgpu.barrier_wait(smem["v_full"].at[slot])
            return weights

        def step(i, rows: Rows) -> Rows:
            slot = slot_of(i - 1)
            v_tile = smem["v"].at[slot]
            start = lambda: (mma.started(rows.p, v_tile), 1)
            p, top, total, keep, new = weigh(i, start, rows.top, rows.total)
            new = mma.finished(new, 0, v_tile)
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            sums = rows.sums * over_rows(rows.keep, new.shape) + new
            return Rows(mma.copied(p), top, total, sums, keep)

        row_of = lambda x: plgpu.layout_cast(jnp.full((t.q,), x, jnp.float32), row_layout())
        none = jnp.zeros((t.q, call.sizes.v_size), jnp.float32)
        none = plgpu.layout_cast(none, plgpu.Layout.WGMMA)
        p, top, total, _, _ = weigh(int32(0), lambda: (None, 0), row_of(-jnp.inf), row_of(0.0))
        rows = Rows(p, top, total, none, row_of(1.0))
        rows = lax.fori_loop(1, walk.count, step, rows)
        slot = slot_of(walk.count - 1)
        v_tile = smem["v"].at[slot]
        take()
        new = mma.started(rows.p, v_tile)
        give()
        new = mma.finished(new, 0, v_tile)
        plgpu.barrier_arrive(smem["v_free"].at[slot])
        acc = rows.sums * over_rows(rows.keep, new.shape) + new
        self._finish(walk, warpgroup, q0, acc, rows.top, rows.total, results, smem)
        return done + walk.count

    def _scales(self, refs, walk: Walk, q0) -> Callable:
        """`scale(i)`, of a warpgroup's rows and the tile of step `i`."""
        of_queries, *of_keys = refs
        sizes, tiles = self.call.sizes, self.call.tiles
        rows = of_queries.at[walk.batch, walk.head, plgpu.ds(q0, tiles.q)]
        kv_head = lax.div(walk.head, int32(sizes.heads // sizes.kv_heads))
        rows = plgpu.load(rows, layout=row_layout(), optimized=False)
        products, values = (ref.at[walk.batch, kv_head] for ref in of_keys)

        def scale(i) -> Scale:
            block = lax.div(walk.col(i) * tiles.kv, int32(eight.BLOCK))
            return Scale(rows * products[block], values[0, block], values[1, block])

        return scale

    def _softmax(self, s_tile, factor, scale: Scale, top, total) -> tuple:
        """Weights of a tile of scores, of which `factor` makes exponents of 2; new statistics."""
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
        return p, new, total, keep

    def _lost(self, top):
        """Nothing: the largest weight is none that 8 bits round."""
        return jnp.zeros_like(top)
