"""Queries, keys and values in 8 bits as the forward kernel takes them, each read once.

XLA would read each array twice, and turn values round a byte at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering import _eight as eight
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import over_rows, tiled
from xform.lowering.mosaic_gpu._kernel import kernel
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

_E4M3 = jnp.dtype(jnp.float8_e4m3fn)
# Rows of a warpgroup's tile.
_ROWS = 64


class InEight(NamedTuple):
    """The arrays of a call in 8 bits, and their scales.

    Attributes:
      q, k, v: `[B,T,H,D]`, `[B,S,K,D]`, `[B,K,V,S]`, e4m3; S of v is a multiple of 128. Every 16 of
        D, and of the keys of v, are in the order of `in_order`.
      of_queries: what products are multiplied by, `[B,H,T]`, T a multiple of 128.
      of_keys: the same for each 128 keys, `[B,K,C]`.
      of_values: for each 128 keys the exponent of values, and 2 to minus that: `[B,K,2,C]`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    of_queries: jax.Array
    of_keys: jax.Array
    of_values: jax.Array


def in_eight(q, k, v, *, interpret=None) -> InEight:
    """Rounds arrays of 16 bits; the head sizes of q and k are multiples of 32, of v of 64."""
    floor = eight.floor_of(q.dtype)
    q, of_queries = _Narrow("queries", floor)(q, interpret)
    k, of_keys = _Narrow("keys", floor)(k, interpret)
    v, of_values = _Narrow("values", eight.floor_of(v.dtype, eight.VALUES_FLOOR))(v, interpret)
    return InEight(q, k, v, of_queries, of_keys, of_values)


@dataclasses.dataclass(frozen=True)
class _Narrow:
    """One array; a block of the grid has 128 rows of one head.

    Attributes:
      kind: "queries", whose rows have scales of their own, "keys" or "values", which are turned.
      floor: the least exponent of a scale.
    """

    kind: str
    floor: int

    def __call__(self, x, interpret):
        batch, length, heads, size = x.shape
        blocks = -(-length // eight.BLOCK)
        scales = (batch, heads, *self._scales(blocks))
        turned = (batch, heads, size, blocks * eight.BLOCK)
        out = turned if self.kind == "values" else x.shape
        return kernel(
            functools.partial(self._entry, Twin() if interpret else Hardware()),
            out_type=(jax.ShapeDtypeStruct(out, _E4M3), jax.ShapeDtypeStruct(scales, jnp.float32)),
            grid=(batch, blocks, heads),
            grid_names=("batch", "block", "head"),
            num_threads=1,
            thread_name="warpgroup",
            kernel_name=f"{self.kind}_in_eight",
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            **({"interpret": interpret} if interpret else {}),
        )(x)

    def _scales(self, blocks: int) -> tuple[int, ...]:
        rows = blocks * eight.BLOCK
        return {"queries": (rows,), "keys": (blocks,), "values": (2, blocks)}[self.kind]

    def _entry(self, mma, x_ref, out_ref, scales_ref):
        size = x_ref.shape[-1]
        rows = (size, eight.BLOCK) if self.kind == "values" else (eight.BLOCK, size)
        scratch = {
            "x": tiled((eight.BLOCK, size), x_ref.dtype),
            "out": tiled(rows, _E4M3),
            "scales": plgpu.SMEM((eight.BLOCK,), jnp.float32),
            "full": plgpu.Barrier(),
        }
        body = functools.partial(self._body, mma, (x_ref, out_ref, scales_ref))
        plgpu.run_scoped(body, scratch, collective_axes="warpgroup")

    def _body(self, mma, refs, smem: dict):
        x_ref, out_ref, scales_ref = refs
        batch, head, block = map(lax.axis_index, ("batch", "head", "block"))
        rows = plgpu.ds(block * eight.BLOCK, eight.BLOCK)
        plgpu.copy_gmem_to_smem(x_ref.at[batch, rows, head], smem["x"], smem["full"])
        plgpu.barrier_wait(smem["full"])
        tiles = smem["out"].shape[0] // _ROWS

        def tile(n):
            part = plgpu.ds(n * _ROWS, _ROWS)
            turned = self.kind == "values"
            x = mma.turned(smem["x"].at[:, part]) if turned else mma.tile(smem["x"].at[part])
            return x.astype(jnp.float32)

        def write(n, x, factor):
            y = jnp.where(jnp.abs(x) < jnp.inf, x * factor, jnp.nan)
            smem["out"].at[plgpu.ds(n * _ROWS, _ROWS)][...] = mma.in_eight(y)

        if self.kind == "queries":
            for n in range(tiles):
                x = tile(n)
                exponent = eight.exponent(_largest(x), self.floor)
                write(n, x, over_rows(eight.power_of_two(-exponent), x.shape))
                scales = smem["scales"].at[plgpu.ds(n * _ROWS, _ROWS)]
                scales[...] = eight.power_of_two(exponent)
        else:
            largest = functools.reduce(jnp.maximum, (_largest(tile(n)) for n in range(tiles))).max()
            exponent = eight.exponent(largest, self.floor)
            for n in range(tiles):
                x = tile(n)
                write(n, x, jnp.full(x.shape, eight.power_of_two(-exponent)))
            if self.kind == "keys":
                scales_ref[batch, head, block] = eight.power_of_two(exponent)
            else:
                scales_ref[batch, head, 0, block] = exponent.astype(jnp.float32)
                scales_ref[batch, head, 1, block] = eight.power_of_two(-exponent)
        plgpu.commit_smem()
        if self.kind == "queries":
            plgpu.copy_smem_to_gmem(smem["scales"], scales_ref.at[batch, head, rows])
        if self.kind == "values":
            out = out_ref.at[batch, head, slice(None), rows]
        else:
            out = out_ref.at[batch, rows, head]
        plgpu.copy_smem_to_gmem(smem["out"], out)
        plgpu.wait_smem_to_gmem(0)


def _largest(x):
    """Of each row, of what is finite."""
    return jnp.where(jnp.abs(x) < jnp.inf, jnp.abs(x), 0.0).max(axis=1)
