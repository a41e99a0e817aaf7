"""A product of numbers of 8 bits, which is scaled and rounded where it is made.

The tensor cores of Hopper take numbers of 8 bits along last dimensions alone, and add up products
with fewer digits than float32 has. The product that XLA calls is handed back in float32, and what
scales and rounds it is another kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import tiled
from xform.lowering.mosaic_gpu._product import ROWS, WARPGROUPS, Cut, Product, Spot
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

_CHUNK = 64  # columns of a tile that are written at once


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A tile is multiplied by a scale, rounded and written."""

    dtype: jnp.dtype
    cut: Cut
    name = "scaled_product"

    def buffers(self) -> dict:
        return {"out": tiled((WARPGROUPS, 2, ROWS, _CHUNK), self.dtype)}

    def __call__(self, acc, spot: Spot, refs, smem: dict) -> None:
        scale_ref, out_ref = refs
        scale = scale_ref[0]
        for start in range(0, self.cut.cols, _CHUNK):
            buffer = smem["out"].at[spot.warpgroup, (start // _CHUNK) % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            buffer[...] = (acc[:, start : start + _CHUNK] * scale).astype(self.dtype)
            plgpu.commit_smem()
            part = plgpu.ds(spot.row, ROWS), plgpu.ds(spot.col + start, _CHUNK)
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[part])


def misfits(x: Sequence[int], y: Sequence[int]) -> list[str]:
    """Returns why the kernel can't take operands of these shapes; nothing if it can."""
    (rows, size), (cols, _) = x, y
    needed = (("rows", rows, 8), ("columns", cols, 8), ("numbers to sum over", size, 128))
    return [f"{n} {what}; needed is a multiple of {m}" for what, n, m in needed if n % m or not n]


def scaled_product(x, y, scale, dtype, *, interpret=None) -> jax.Array:
    """`x y' scale`, rounded once.

    Args:
      x, y: `[M,K]` and `[N,K]`, of 8 bits.
      scale: float32, a number.
      dtype: of the result, 16 bits.
      interpret: parameters of the interpreter, for tests without a GPU.
    """
    cut = Cut(cluster=1, blocks=1) if interpret else Cut()
    (rows, size), cols = x.shape, len(y)
    product = Product(
        rows, cols, size, 0, (x.dtype, y.dtype), cut, Twin() if interpret else Hardware(),
        _Scaled(jnp.dtype(dtype), cut), 0,
    )  # fmt: skip
    out = [jax.ShapeDtypeStruct((rows, cols), dtype)]
    first = jnp.zeros(1, jnp.int32)
    return product(out, x, y, first, jnp.reshape(scale, 1), interpret=interpret)[0]
