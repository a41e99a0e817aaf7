"""A region of `fuse` in plain XLA: one loop over blocks of rows, on any device but GPUs.

No value of more than a block exists but operands and results. The last block of a line starts early
enough to be a whole one, so that lengths are arbitrary: rows that it has in common with the one
before get the same results twice, and are left out of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import Literal, Var
from xform.lowering._block_ops import Block
from xform.lowering._contract import wide_of
from xform.lowering._once import kept
from xform.lowering._region import Lines, Region, type_of
from xform.lowering._row_end import WHOLE, Split, all_rows, finished

ELEMENTS = 1 << 15
"""Of the widest value of a block: some values of so many stay in a core's own cache."""


def run(region: Region, *args, split: Split = WHOLE) -> list:
    """Returns the results of a region, of the rows that a device has."""
    blocks = Blocks(region, split.first(region))
    rows, sums = (of_nothing if 0 in region.sizes else _in_blocks)(blocks, args)
    return finished(region, rows, sums, args, split)


def of_nothing(blocks: Blocks, args: Sequence) -> tuple[list, list]:
    """What no rows result in, or rows with nothing in them, and the sums."""
    region = blocks.region
    made = all_rows(region, WHOLE).run(region.body, args)
    n = len(region.results)
    return made[:n], [Total(blocks, i).of(x) for i, x in enumerate(made[n:])]


def _in_blocks(blocks: Blocks, args: Sequence) -> tuple[list, list]:
    """What rows result in, and the sums."""
    region, once = blocks.region, kept(blocks.region)
    totals = [Total(blocks, i) for i in range(len(region.sums))]
    n = len(region.results)

    def step(i, outs):
        turn = blocks.turn(i)
        block = blocks.at(turn)
        cuts = [_cut(blocks, turn, v, x) for v, x in zip(region.body.invars, args, strict=True)]
        made = block.run(region.body, cuts, once)
        written = [
            _write(blocks, turn, v, whole, x)
            for v, whole, x in zip(region.results, outs[:n], made[:n], strict=True)
        ]
        added = [
            total.add(so_far, turn, x)
            for total, so_far, x in zip(totals, outs[n:], made[n:], strict=True)
        ]
        return [*written, *added]

    first = [jnp.zeros(region.shape(v), v.aval.dtype) for v in region.results]
    first += [total.zeros() for total in totals]
    made = lax.fori_loop(jnp.int32(0), jnp.int32(blocks.count), step, first)
    return made[:n], made[n:]


def _cut(blocks: Blocks, turn: Turn, v: Var, x):
    """A block of an operand."""
    lines = blocks.region.lines_of(v)
    shape = tuple(1 if k is None else blocks.size.get(k, blocks.region.sizes[k]) for k in lines)
    if shape == x.shape:
        return x
    return lax.dynamic_slice(x, blocks.starts(turn, lines), shape, allow_negative_indices=False)


def _write(blocks: Blocks, turn: Turn, v: Var | Literal, whole, x):
    """A result with a block of it in its place."""
    x = jnp.broadcast_to(x, whole.shape) if isinstance(v, Literal) else x
    starts = blocks.starts(turn, blocks.region.lines_of(v))
    return lax.dynamic_update_slice(whole, x, starts, allow_negative_indices=False)


type Turn = Mapping[int, Any]
"""Along each line of rows, which block it is."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """How the rows of a region are cut.

    Attributes:
      region: of which one.
      first: of the lines of which a device has a part, the first.
    """

    region: Region
    first: Mapping[int, Any]

    @cached_property
    def size(self) -> dict[int, int]:
        """Of each line of rows, how many of it a block has; the innermost are whole first."""
        left = max(1, ELEMENTS // self.region.width)
        found = {}
        for line in reversed(self.region.rows):
            n = self.region.sizes[line]
            turns = -(-n // max(1, min(n, left)))
            found[line] = -(-n // max(1, turns))  # evenly
            left = max(1, left // max(1, found[line]))
        return found

    @cached_property
    def turns(self) -> dict[int, int]:
        """Of each line of rows, how many blocks there are along it."""
        return {k: -(-self.region.sizes[k] // b) for k, b in self.size.items()}

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return math.prod(self.turns.values())

    @property
    def elements(self) -> int:
        """Of the widest value of a block."""
        return math.prod(self.size.values()) * self.region.width

    def turn(self, i) -> Turn:
        """Which block along each line the i-th is."""
        found = {}
        for line, n in self.turns.items():
            i, found[line] = lax.div(i, jnp.int32(n)), lax.rem(i, jnp.int32(n))
        return found

    def start(self, turn: Turn, line: int):
        """Where a block begins along a line: so early that it is whole."""
        return jnp.minimum(turn[line] * self.size[line], self.region.sizes[line] - self.size[line])

    def starts(self, turn: Turn, lines: Lines) -> list:
        """Where a block of a value begins."""
        return [self.start(turn, k) if k is not None and k in turn else jnp.int32(0) for k in lines]

    def at(self, turn: Turn) -> Block:
        """The block there."""
        start = {k: self.start(turn, k) + self.first.get(k, 0) for k in turn}
        return Block(self.region, self.size, start)


@dataclass(frozen=True, eq=False)
class Total:
    """The i-th sum over rows, block after block, in more bits than the values have."""

    blocks: Blocks
    i: int

    @property
    def value(self) -> Var:
        """What is summed."""
        return self.blocks.region.summed[self.i]

    def of(self, x):
        """The sum of what a block has."""
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        return x.sum(
            self.blocks.region.sums[self.i].axes, dtype=wide_of(x.dtype) if floats else x.dtype
        )

    def zeros(self) -> jax.Array:
        value = jax.ShapeDtypeStruct(
            self.blocks.region.shape(self.value), type_of(self.value).dtype
        )
        return jnp.zeros_like(jax.eval_shape(self.of, value))

    def add(self, so_far, turn: Turn, x):
        """The sum with that of a block."""
        part = self.of(jnp.where(self._new(turn, x.shape), x, jnp.zeros((), x.dtype)))
        starts = self.blocks.starts(turn, self.blocks.region.kept(self.i))
        here = lax.dynamic_slice(so_far, starts, part.shape, allow_negative_indices=False)
        return lax.dynamic_update_slice(so_far, here + part, starts, allow_negative_indices=False)

    def _new(self, turn: Turn, shape: tuple[int, ...]):
        """Where a block's elements were in none before."""
        new = jnp.full([1] * len(shape), True)
        lines = self.blocks.region.lines_of(self.value)
        for line, i in turn.items():
            if line not in lines:  # blocks along this line are the same
                new &= i == 0
            elif self.blocks.region.sizes[line] % self.blocks.size[line]:
                d = lines.index(line)
                here = lax.broadcasted_iota(
                    jnp.int32, [n if k == d else 1 for k, n in enumerate(shape)], d
                )
                new &= here + self.blocks.start(turn, line) >= i * self.blocks.size[line]
        return new
