"""The forward pass once more, where a hidden value may not be finite.

A weight of 0 does not hide an infinity or a NaN from a product: `0 * NaN` is NaN. The fast kernel
lets that happen and tells: the sum of such a row is not finite. This kernel always follows it where
there is a mask, and returns at once if all sums are finite. If not, it computes everything again:
each product twice, of what is finite, and of who sees what is not.

Slow, and seldom run: one warpgroup loads and computes, one tile after the other.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import (
    Call,
    Place,
    Walk,
    int32,
    over_rows,
    row_layout,
    swizzle_of,
    tiled,
)
from xform.lowering.mosaic_gpu._kernel import in_place, kernel

# As many blocks as an H200 has multiprocessors: each takes its share of the rows.
_BLOCKS = 132
# Rows that one warpgroup's product has.
_ROWS = 64


def careful(call: Call, q, k, v, steps, operands, out, finite, *, interpret=None):
    """Returns `out`, computed anew if it is not `finite`.

    Args:
      call, q, k, v, steps, operands, interpret: as of `forward`.
      out: what it returned.
      finite: int32 `[1]`, 0 if a row of it is not.
    """
    repair = kernel(
        _Careful(call).entry,
        out_type=(),
        grid=(_BLOCKS,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="flex_attention_careful",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    _, (result,) = in_place(partial(repair, finite, q, k, v, *steps, *operands), out)
    return result


@dataclasses.dataclass(frozen=True)
class _Careful:
    """The body of the kernel."""

    call: Call

    def entry(self, finite_ref, *refs):
        plgpu.when(finite_ref[0] == 0)(lambda: self._allocate(refs))

    def _allocate(self, refs):
        call, s, t = self.call, self.call.sizes, self.call.tiles
        chunk = swizzle_of(s.v_size, call.out) // call.out.itemsize
        scratch = {
            "q": tiled((_ROWS, s.qk_size), call.narrow),
            "k": tiled((t.kv, s.qk_size), call.narrow),
            "v": tiled((t.kv, s.v_size), call.narrow),
            "bad": tiled((t.kv, s.v_size), call.narrow),
            "out": tiled((_ROWS, chunk), call.out),
            "vectors": call.vector_buffers(1),
            "sums": call.mma.accumulators(2, _ROWS, s.v_size),
            "scores": call.mma.accumulators(1, _ROWS, t.kv),
            "q_full": plgpu.Barrier(),
            "full": plgpu.Barrier(num_arrivals=2 + call.copies),
        }
        plgpu.run_scoped(
            lambda scratch: self._rows(refs, scratch), scratch, collective_axes="warpgroup"
        )

    def _rows(self, refs, smem: dict):
        """Visits this block's share of all rows of tiles, `_ROWS` rows at a time."""
        s, t = self.call.sizes, self.call.tiles
        rows, parts = s.rows(t), t.rows // _ROWS

        @plgpu.loop(lax.axis_index("block"), s.batch * s.heads * rows * parts, step=_BLOCKS)
        def _(i):
            i, part = lax.div(i, int32(parts)), lax.rem(i, int32(parts))
            i, row = lax.div(i, int32(rows)), lax.rem(i, int32(rows))
            batch, head = lax.div(i, int32(s.heads)), lax.rem(i, int32(s.heads))
            walk = self.call.walk(batch, head, row, refs[3:6])
            self._part(walk, part * _ROWS, refs, smem)

    def _part(self, walk: Walk, start, refs, smem: dict):
        """Computes `_ROWS` rows, from `start` of the block's on."""
        call, s, mma = self.call, self.call.sizes, self.call.mma
        q_ref, out_ref, operands = refs[0], refs[-1], refs[6:-1]
        q0 = walk.row * call.tiles.rows + start
        rows = plgpu.ds(q0, _ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[walk.batch, rows, walk.head], smem["q"], smem["q_full"])
        held = call.held(operands, walk.b, walk.head, q0)
        plgpu.barrier_wait(smem["q_full"])
        vector = lambda x: plgpu.layout_cast(jnp.full((_ROWS,), x, jnp.float32), row_layout())
        shape = (_ROWS, s.v_size)

        def sums(acc):
            def spoilt(bad):

                def step(i, carry):
                    return self._step(walk, i, q0, start, held, refs, smem, acc, bad, carry)

                carry = lax.fori_loop(0, walk.count, step, (vector(-jnp.inf), vector(0.0)))
                return acc[...], bad[...], carry[1]

            return mma.scoped(spoilt, smem["sums"], 1, shape)

        acc, bad, total = mma.scoped(sums, smem["sums"], 0, shape)
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
        out = jnp.where(bad > 0, jnp.nan, acc * over_rows(inverse, shape))
        chunk = smem["out"].shape[-1]
        for n in range(s.v_size // chunk):
            cols = plgpu.ds(n * chunk, chunk)
            smem["out"][...] = out[:, n * chunk : (n + 1) * chunk].astype(call.out)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["out"], out_ref.at[walk.batch, rows, walk.head, cols])
            plgpu.wait_smem_to_gmem(0)

    def _step(self, walk: Walk, i, q0, start, held, refs, smem: dict, acc, bad, carry):
        """One tile: its share of the sums, and who sees what is not finite."""
        call, t, mma = self.call, self.call.tiles, self.call.mma
        _, k_ref, v_ref = refs[:3]
        top, total = carry
        col = walk.col(i)
        kv_head = lax.div(walk.head, int32(call.sizes.heads // call.sizes.kv_heads))
        source = (walk.batch, plgpu.ds(col * t.kv, t.kv), kv_head)
        plgpu.copy_gmem_to_smem(k_ref.at[source], smem["k"], smem["full"])
        plgpu.copy_gmem_to_smem(v_ref.at[source], smem["v"], smem["full"])
        block = Place(walk.row * t.rows, col * t.kv)
        call.copy_vectors(walk.b, walk.head, block, refs[6:-1], smem["vectors"], 0, smem["full"])
        plgpu.barrier_wait(smem["full"])

        def product(s_acc):
            mma.qk(s_acc, smem["q"], smem["k"])
            return mma.read(s_acc, 0, smem["k"])

        s_tile = mma.scoped(product, smem["scores"], 0, call.shape)
        values = call.values(held, smem["vectors"], 0, start)
        place = Place(q0, col * t.kv)
        s_tile, factor = call.scores(s_tile, place, i < walk.count, values)
        new = jnp.maximum(top, s_tile.max(axis=1) * factor)
        base = jnp.where(new == -jnp.inf, 0.0, new)
        keep = jnp.exp2(top - base)
        p = jnp.exp2(s_tile * factor - over_rows(base, call.shape))
        total = total * keep + p.sum(axis=1)
        if call.programs.dropout is not None:
            p = p * call.run(call.programs.dropout, place, values)
        seen = jnp.where(call.visible(place, values), 1.0, 0.0).astype(call.narrow)
        for n in range(0, t.kv, _ROWS):
            part = plgpu.ds(n, _ROWS)
            x = mma.tile(smem["v"].at[part])
            fine = jnp.abs(x.astype(jnp.float32)) < jnp.inf
            smem["v"].at[part][...] = jnp.where(fine, x, jnp.zeros_like(x))
            smem["bad"].at[part][...] = jnp.where(fine, 0.0, 1.0).astype(call.narrow)
        plgpu.commit_smem()
        acc[...] = acc[...] * over_rows(keep, acc.shape)
        mma.pv(acc, p.astype(call.narrow), smem["v"])
        mma.pv(bad, seen, smem["bad"])
        mma.wait(smem["v"])
        return new, total
