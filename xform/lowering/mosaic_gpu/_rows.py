"""A region of `fuse` as one kernel: a warpgroup walks rows, its lanes along each.

A row that fits stays in registers from its loads to its stores, with one reduction across the four
warps for each sum or maximum. A longer one is walked in parts, once for each sum or maximum that
others wait for, and once more for its results: each time it is made again of its operands, by the
same operations. What is summed over rows stays in registers of as many blocks as the device holds,
each of which leaves its part: one reduction finishes them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import JaxprEqn, Var
from xform.lowering._contract import wide_of
from xform.lowering._region import Region, type_of
from xform.lowering._row_end import WHOLE, Split, finished
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._row_geometry import Geometry, Place, geometry_of, misfits
from xform.lowering.mosaic_gpu._row_memory import Hardware, Spot, Twin
from xform.lowering.mosaic_gpu._row_passes import passes, without
from xform.lowering.mosaic_gpu._row_values import (
    COMBINE,
    Tile,
    neutral,
    partial_of,
    reduced,
    unknown,
)
from xform.lowering.row_blocks import Blocks, of_nothing

# Blocks that keep sums: four of each of an H200's multiprocessors.
_BLOCKS = 4 * 132


def run(region: Region, *args, split: Split = WHOLE, interpret=None) -> list:
    """Returns the results of a region.

    Raises:
      NotImplementedError: the kernel can't take it; with all reasons.
    """
    if wrong := [*unknown(region), *misfits(region)]:
        raise NotImplementedError(
            f"`fuse` has no GPU kernel for {'; '.join(wrong)}. Leave it outside of `fuse` there."
        )
    if split.axes and any(e.primitive.name == "iota" for e in region.body.eqns):
        raise NotImplementedError(
            "`fuse` has no GPU kernel for positions along rows that are split"
        )
    if 0 in region.sizes:
        return finished(region, *of_nothing(Blocks(region, {}), args), args, split)
    kernel = _Kernel(region, interpret)
    made, parts = kernel(args)
    results = [x.reshape(region.shape(v)) for x, v in zip(made, region.results, strict=True)]
    # Of one array, so that XLA makes one reduction of them.
    cuts = zip(kernel.sum_starts, kernel.sum_shapes, strict=True)
    sums = [parts[:, a : a + math.prod(s)].sum(0).reshape(s) for a, s in cuts]
    return finished(region, results, sums, args, split)


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One kernel.

    Attributes:
      region: what it computes.
      interpret: parameters of the interpreter, for tests without a GPU.
    """

    region: Region
    interpret: Any = None

    @cached_property
    def laid_out(self) -> tuple[Geometry, dict[Var, Place]]:
        return geometry_of(self.region)

    @property
    def geometry(self) -> Geometry:
        return self.laid_out[0]

    @property
    def memory(self) -> Hardware | Twin:
        return Twin(self.geometry) if self.interpret else Hardware(self.geometry)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        tiles = self.geometry.tiles
        return min(tiles, _BLOCKS) if self.region.sums else tiles

    @cached_property
    def sum_shapes(self) -> list[tuple[int, ...]]:
        """Of the sums over rows."""
        sizes = self.region.sizes
        each = (self.region.kept(i) for i in range(len(self.region.sums)))
        return [tuple(1 if k is None else sizes[k] for k in lines) for lines in each]

    @cached_property
    def sum_starts(self) -> list[int]:
        """Where each of the sums begins in what a block leaves of them."""
        sizes = map(math.prod, self.sum_shapes)
        return [0, *itertools.accumulate(sizes)][: len(self.sum_shapes)]

    @property
    def sum_size(self) -> int:
        """How many numbers a block leaves of sums."""
        return sum(map(math.prod, self.sum_shapes))

    def __call__(self, args: Sequence) -> tuple[list, Any]:
        """The results of rows, flat, and of the sums what each block leaves, `[blocks, ...]`."""
        shapes = [(math.prod(self.region.shape(v)), v.aval.dtype) for v in self.region.results]
        if self.region.sums:
            shapes.append((self.blocks * self.sum_size, jnp.dtype(jnp.float32)))
        run = plgpu.kernel(
            self._body,
            out_type=tuple(jax.ShapeDtypeStruct((n,), dtype) for n, dtype in shapes),
            grid=(self.blocks,), grid_names=("block",), kernel_name="fused",
            compiler_params=plgpu.CompilerParams(
                # Nothing is in shared memory but what reductions leave there between barriers.
                unsafe_no_auto_barriers=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
            ),
            **({"interpret": self.interpret} if self.interpret else {}),
        )  # fmt: skip
        made = list(run(*(x.reshape(-1) for x in args)))
        return made, made.pop().reshape(self.blocks, -1) if self.region.sums else None

    def _body(self, *refs):
        """What a block does."""
        n, m = len(self.region.body.invars), len(self.region.results)
        ins, outs, sums = refs[:n], refs[n : n + m], refs[n + m :]
        block = lax.axis_index("block")
        if not self.region.sums:
            self._row(ins, outs, block)
            return
        turns = lax.div(jnp.int32(self.geometry.tiles - 1) - block, jnp.int32(self.blocks)) + 1
        step = lambda i, so_far: [
            lax.add(a, b)
            for a, b in zip(so_far, self._row(ins, outs, block + i * self.blocks), strict=True)
        ]
        totals = lax.fori_loop(jnp.int32(0), turns, step, self._nothing())
        for start, shape, total in zip(self.sum_starts, self.sum_shapes, totals, strict=True):
            self._leave(sums[0], start, math.prod(shape), block, total)

    def _nothing(self) -> list:
        """Sums of no rows."""
        sizes = [math.prod(shape) for shape in self.sum_shapes]
        dtypes = [wide_of(v.aval.dtype) for v in self.region.summed]
        return [
            jnp.zeros((), t)
            if n == 1
            else self.memory.tile(jnp.zeros((), t), self.geometry.held(n))
            for n, t in zip(sizes, dtypes, strict=True)
        ]

    def _leave(self, ref, start: int, size: int, block, total) -> None:
        """Writes a block's part of a sum."""
        if size == 1:
            ref[block * self.sum_size + start] = total
            return
        blocks = dataclasses.replace(self.geometry, sizes=(self.blocks,))
        spot = Spot(Place((self.sum_size,), size), start, size)
        memory = dataclasses.replace(self.memory, geometry=blocks)
        memory.store(ref, spot, block, jnp.int32(0), total)

    def _tile(self, ins: Sequence, number, begin, numbers: Mapping[Var, Any]) -> Tile:
        """A tile, or a part of a row, with what is known of it."""
        first = number * self.geometry.together
        tile = Tile(self.region, self.geometry, self.memory, first, begin)
        for v, ref in zip(self.region.body.invars, ins, strict=True):
            tile.operand(v, ref, self.laid_out[1][v])
        tile.known.update(numbers)
        return tile

    def _row(self, ins: Sequence, outs: Sequence, number) -> list:
        """Writes what a tile results in, and returns its part of the sums."""
        if self.geometry.chunks == 1:
            tile = self._tile(ins, number, jnp.int32(0), {})
            for eqn in self.region.body.eqns:
                tile.run(eqn)
            self._write(tile, outs)
            return [self._part_of_sum(tile, i) for i in range(len(self.region.sums))]
        numbers = self._numbers(ins, number)
        eqns = without(self.region.body.eqns, numbers, self.region.results)

        @plgpu.loop(0, self.geometry.chunks)
        def _(i):
            tile = self._tile(ins, number, i * self.geometry.chunk, numbers)
            for eqn in eqns:
                tile.run(eqn)
            self._write(tile, outs)

        tile = self._tile(ins, number, jnp.int32(0), numbers)
        for eqn in without(self.region.body.eqns, numbers, self.region.summed):
            tile.run(eqn)
        return [self._part_of_sum(tile, i) for i in range(len(self.region.sums))]

    def _write(self, tile: Tile, outs: Sequence) -> None:
        for v, ref in zip(self.region.results, outs, strict=True):
            place, start = self.laid_out[1][v], 0
            value = tile.row(v, tile.read(v))
            if not isinstance(value, tuple):
                tile.write_number(ref, place, value)
                continue
            for part in value:
                spot = Spot(place, start, part.length)
                self.memory.store(ref, spot, tile.first, tile.begin, tile.tile(part))
                start += part.length

    def _part_of_sum(self, tile: Tile, i: int):
        """The part of a sum over rows that is of a tile, which is one row."""
        v = self.region.summed[i]
        value = tile.row(v, tile.read(v))
        if not isinstance(value, tuple):
            return value.astype(wide_of(value.dtype))
        if self.sum_shapes[i] and math.prod(self.sum_shapes[i]) > 1:
            first, *others = value
            if others:
                raise NotImplementedError("`fuse` has no GPU kernel for a sum of joined rows.")
            return tile.tile(first).astype(wide_of(v.aval.dtype))
        return sum(reduced("reduce_sum", partial_of("reduce_sum", tile, part)) for part in value)

    def _numbers(self, ins: Sequence, number) -> dict[Var, Any]:
        """The sums and maxima along a row of several parts, one pass for each that others need."""
        numbers: dict[Var, Any] = {}
        for eqns in passes(self.region):
            wanted = [eqn.invars[0] for eqn in eqns]
            before = without(self.region.body.eqns, numbers, wanted)

            def step(i, so_far, eqns=eqns, before=before):
                tile = self._tile(ins, number, i * self.geometry.chunk, numbers)
                for eqn in before:
                    tile.run(eqn)
                return [
                    COMBINE[eqn.primitive.name](old, self._partial(tile, eqn))
                    for old, eqn in zip(so_far, eqns, strict=True)
                ]

            found = lax.fori_loop(
                jnp.int32(0),
                jnp.int32(self.geometry.chunks),
                step,
                [self._neutral(e) for e in eqns],
            )
            for eqn, x in zip(eqns, found, strict=True):
                (out,) = eqn.outvars
                numbers[out] = reduced(eqn.primitive.name, x).astype(type_of(out).dtype)
        return numbers

    def _partial(self, tile: Tile, eqn: JaxprEqn):
        """What a part of a row brings to a sum or maximum of the row."""
        (part,) = tile.row(eqn.invars[0], tile.read(eqn.invars[0]))
        return partial_of(eqn.primitive.name, tile, part)

    def _neutral(self, eqn: JaxprEqn):
        """What a sum or maximum begins with."""
        name, dtype = eqn.primitive.name, type_of(eqn.invars[0]).dtype
        dtype = (
            wide_of(dtype)
            if name == "reduce_sum" and jnp.issubdtype(dtype, jnp.floating)
            else dtype
        )
        return self.memory.tile(neutral(name, dtype), self.geometry.held(self.geometry.length))
