"""The gradients of what belongs to a query, or to the distance of a query and a key.

The kernel that makes dK and dV owns keys, and meets a query, or a distance, in many blocks. This
one is that of `_backward_pairs`, which keeps the sum of a tile of pairs in registers, along another
walk: a block owns a line of tiles, and visits all of it in all entries of the batch.

    by query:      a row of tiles. Element [k, q] of the sum belongs to query q, whatever k.
    by distance:   a diagonal. Element [k, q] belongs to the distance of its place.

So it writes one tile for each line, and XLA adds up its columns or diagonals, in a fixed order.
Nothing is summed across blocks but what shares the batch has made.

A table of relative positions (arXiv:1803.02155; in buckets, arXiv:1910.10683) and a bias, a scale
or a threshold of each query are such arrays.

Not optimal: a diagonal of tiles that are twice as many keys as queries has empty corners at its
ends, and lines at the edge of a mask are short.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._backward_pairs import Block, Pairs
from xform.lowering.mosaic_gpu._call import Place, int32, launch, lead
from xform.lowering.mosaic_gpu._classes import ROW
from xform.lowering.mosaic_gpu._lines import Grid


def backward_lines(
    body: Lines, q, k, v, d_out, statistics, lists, operands, *, interpret=None
) -> list[jax.Array]:
    """Runs the kernel.

    Args:
      body: of the kernel.
      q, k, v, d_out, statistics, operands, interpret: as of `backward`.
      lists: of `Grid.lists`, for each unit of the mask `[U,W,...]`. Empty where all tiles are full.

    Returns:
      `sums` arrays `[B or 1, H or 1, T]`, or `[..., S + T - 1]`, float32; see `Grid.added`.
    """
    call, grid = body.call, body.grid
    t = call.tiles
    units = math.prod(body.units)
    out = jax.ShapeDtypeStruct((body.parts * units, grid.lines, t.cols, t.rows), jnp.float32)
    # One number of a block: the others of a launch end at 65,535.
    blocks = {"grid": (body.parts * units * grid.lines,), "grid_names": ("block",)}
    name = "flex_attention_backward_lines"
    run = launch(body.entry, name, t.warpgroups, (out,) * body.sums, blocks, interpret)
    sums = run(q, k, v, d_out, *statistics, *lists, *operands)
    split = lambda x: x.reshape(body.parts, *body.units, *x.shape[1:]).sum(0)
    return [grid.added(split(x), call.sizes.q_len, call.sizes.kv_len) for x in sums]


@dataclasses.dataclass(frozen=True)
class Lines(Pairs):
    """The body of the kernel.

    Attributes:
      along: ROW or BAND: what the numbers belong to.
    """

    along: str = ROW
    lists: ClassVar[int] = 2

    @property
    def grid(self) -> Grid:
        s = self.call.sizes
        return Grid.of(self.along, (s.q_len, s.kv_len), self.call.tiles)

    @property
    def owned(self) -> int:
        return self.grid.lines

    def _place(self) -> tuple:
        block, lines = lax.axis_index("block"), int32(self.grid.lines)
        return lax.div(block, lines), lax.rem(block, lines), int32(0)

    def _live(self, block: Block, lists) -> Block:
        del lists  # a line has its own
        return block

    def _tiles(self, lists, line, b, head):
        """How many tiles of a line are live, and the column and kind of each."""
        grid = self.grid
        if lists:
            counts, tiles = lists
            unit = *lead(counts, b, head), line
            code = lambda n: tiles[*unit, n]
            two = int32(2)
            return counts[unit], lambda n: (lax.div(code(n), two), lax.rem(code(n), two) == 1)
        if self.along == ROW:
            return int32(grid.cols), lambda n: (n, None)
        above = -(line + int32(grid.first))  # rows that column 0 is above the first
        first = jnp.maximum(lax.div(above + (grid.steep - 1), int32(grid.steep)), 0)
        end = jnp.minimum(lax.div(above + (grid.rows - 1), int32(grid.steep)) + 1, grid.cols)
        return end - first, lambda n: (first + n, None)

    def _fold(self, block: Block, lists, work, carry):
        """Folds `work(number, entry, row, col, partial, carry)` over what a block visits."""

        def of_entry(i, state):
            done, carry = state
            entry = self._at(block, i)
            _, b, head = entry
            count, tile = self._tiles(lists, block.row, b, head)

            def step(n, carry):
                col, partial = tile(n)
                return work(done + n, entry, self.grid.row(block.row, col), col, partial, carry)

            return done + count, lax.fori_loop(0, count, step, carry)

        return lax.fori_loop(0, block.count, of_entry, (int32(0), carry))

    def _load_all(self, block: Block, lists, arrays, operands, smem: dict):
        stages = int32(self.call.tiles.stages)

        def work(i, entry, row, col, partial, carry):
            del partial
            slot = lax.rem(i, stages)
            plgpu.when(i >= stages)(lambda: plgpu.barrier_wait(smem["free"].at[slot]))
            self._load(entry, row, col, slot, arrays, operands, smem)
            return carry

        done, _ = self._fold(block, lists, work, int32(0))
        self._await_last(done, smem)

    def _compute(self, block: Block, warpgroup, lists, operands, results, smem: dict):
        call, t = self.call, self.call.tiles
        offset = warpgroup * t.kv

        def work(i, entry, row, col, partial, sums):
            slot = lax.rem(i, int32(t.stages))
            place = Place(row * t.rows, col * t.cols + offset)
            _, b, head = entry
            held = call.held(operands, b, head, place.k0)
            new = self._derivatives(slot, partial, place, (held, offset), warpgroup, smem)
            call.mma.hand_back(smem["free"].at[slot])
            return tuple(x + y for x, y in zip(sums, new, strict=True))

        _, sums = self._fold(block, lists, work, self._zeros())
        for tile, ref in zip(sums, results, strict=True):
            ref[block.unit, block.row, plgpu.ds(offset, t.kv), :] = tile
