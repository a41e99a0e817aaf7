"""What the decoding kernel leaves of each row, merged: one small kernel, always in one order.

Parts have outputs that are not divided by their sums, and the maximum that both are relative to.
XLA would make five kernels of it, each of which costs a decoding step as much as this one.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import int32
from xform.lowering.mosaic_gpu._kernel import kernel

# Threads of a warpgroup, which share a vector, and parts that are on their way at a time.
_THREADS, _AHEAD = 128, 8


def merge(acc, top, total, rows: int, dtype, *, interpret=None):
    """Returns output, maximum and sum of each row over all parts.

    Args:
      acc: outputs, `[B,K,parts,rows or more,V]`, float32.
      top, total: of each row the maximum, and the sum relative to it, `[B,K,parts,rows or more]`.
      rows: how many there are.
      dtype: of the output.
      interpret: parameters of the interpreter, or None.

    Returns:
      `[B,K,rows,V]`, `[B,K,rows]` and `[B,K,rows]`.
    """
    batch, heads, parts, _, size = acc.shape
    together = _THREADS // math.gcd(size, _THREADS)  # rows of whole vectors
    blocks = -(-rows // together)
    shape = (batch, heads, blocks * together)
    struct = jax.ShapeDtypeStruct
    out = struct((batch, heads, shape[2] * size), dtype)
    run = kernel(
        _Merge(parts, together, size).entry,
        out_type=(out, struct(shape, jnp.float32), struct(shape, jnp.float32)),
        grid=(batch, heads, blocks),
        grid_names=("batch", "head", "block"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="flex_attention_merge",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    out, top, total = run(acc.reshape(*acc.shape[:3], -1), top, total)
    out = out.reshape(*shape, size)
    return out[:, :, :rows], top[:, :, :rows], total[:, :, :rows]


@dataclasses.dataclass(frozen=True)
class _Merge:
    """The body of the kernel: some rows, whose columns are one vector.

    Attributes:
      parts: how many there are.
      rows: of a block.
      size: of a row.
    """

    parts: int
    rows: int
    size: int

    def entry(self, acc_ref, top_ref, total_ref, out_ref, best_ref, whole_ref):
        batch, head, block = map(lax.axis_index, ("batch", "head", "block"))
        count, first = self.rows * self.size, block * self.rows
        columns = plgpu.ds(block * count, count)

        def part(n) -> tuple:
            row = lambda ref: [ref[batch, head, n, first + r] for r in range(self.rows)]
            acc = plgpu.load(acc_ref.at[batch, head, n, columns], layout=self._layout)
            return row(top_ref), row(total_ref), acc

        def some(start, number: int) -> list[tuple]:
            """Parts from `start` on, all on their way before the first is used."""
            return [part(start + n) for n in range(number)]

        groups = (self.parts - 1) // _AHEAD
        begin = self.parts - groups * _AHEAD
        carry = functools.reduce(self._joined, some(int32(0), begin))
        step = lambda i, carry: functools.reduce(
            self._joined, some(begin + i * _AHEAD, _AHEAD), carry
        )
        best, whole, acc = lax.fori_loop(0, groups, step, carry)
        inverse = [jnp.where(x == 0.0, 0.0, 1.0 / x) for x in whole]
        out_ref[batch, head, columns] = (acc * self._spread(inverse)).astype(out_ref.dtype)
        for r in range(self.rows):
            best_ref[batch, head, first + r] = best[r]
            whole_ref[batch, head, first + r] = whole[r]

    @property
    def _layout(self):
        """Of a vector, every 128th number to one thread."""
        return plgpu.Layout.WG_STRIDED((self.rows * self.size,), vec_size=1)

    def _joined(self, a, b):
        """Two parts as one: of each row the maximum and the sum, and the outputs of all."""
        best = list(map(jnp.maximum, a[0], b[0]))
        base = [jnp.where(x == -jnp.inf, 0.0, x) for x in best]
        x, y = ([jnp.exp(top - m) for top, m in zip(part[0], base, strict=True)] for part in (a, b))
        total = [s * u + t * v for s, t, u, v in zip(a[1], b[1], x, y, strict=True)]
        return best, total, a[2] * self._spread(x) + b[2] * self._spread(y)

    def _spread(self, numbers: list):
        """The number of each row, at all columns of it."""
        shape = (self.rows * self.size,)
        out = jnp.full(shape, numbers[0])
        for n, x in enumerate(numbers[1:], 1):
            index = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 0), self._layout)
            out = jnp.where(index < n * self.size, out, jnp.full(shape, x))
        return out
