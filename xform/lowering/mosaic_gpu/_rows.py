"""A region of `fuse` as one kernel: a warpgroup walks rows, its lanes along each.

A row that fits stays in registers from its loads to its stores, with one reduction across the four
warps for each sum or maximum. A longer one is walked in parts, once for each sum or maximum that
others wait for, and once more for its results: each time it is made again of its operands, by the
same operations. What is summed over rows stays in registers of as many blocks as the device holds,
each of which loads its next row while it works on one, and leaves its part: one reduction finishes
them. Sums of long rows, and of joined ones, are each block's own in memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import JaxprEqn, Var
from xform.lowering._contract import wide_of
from xform.lowering._region import Region, type_of
from xform.lowering._row_end import WHOLE, Split, finished
from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._kernel import in_place, kernel
from xform.lowering.mosaic_gpu._row_geometry import CUTS, Geometry, Place, geometry_of, misfits
from xform.lowering.mosaic_gpu._row_memory import Hardware, Spot, Twin
from xform.lowering.mosaic_gpu._row_passes import joined, passes, takes_own_functions, without
from xform.lowering.mosaic_gpu._row_values import (
    COMBINE,
    Tile,
    neutral,
    partial_of,
    reduced,
    stored,
    unknown,
)
from xform.lowering.row_blocks import Blocks, of_nothing

# Blocks that keep sums: four of each of an H200's multiprocessors.
_BLOCKS = 4 * 132


def run(
    region: Region, *args, split: Split = WHOLE, donated: Sequence[bool] = (), interpret=None
) -> list:
    """Returns the results of a region.

    Args:
      region: what it computes.
      args: its operands.
      split: how a mesh splits its rows.
      donated: which operands a kernel may write over, where each thread writes what it read.
      interpret: parameters of the interpreter, for tests without a GPU.

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
    kernel = _Kernel(region, tuple(donated), interpret)
    made, parts = kernel(args)
    sums = [kernel.total(i, parts) for i in range(len(region.sums))]
    return finished(region, made, sums, args, split)


def _as_it_lies(x, place: Place):
    """An operand in the order and dtype that kernels read, which takes a copy of another."""
    x = x.astype(_in_memory(x.dtype))
    return x if place.order is None else x.transpose(place.order)


def _in_memory(dtype):
    """The dtype of an operand or result in memory: kernels have no bytes of truth values."""
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def _as_it_was(x, shape: Sequence[int], place: Place):
    """A result in the order of its dims."""
    if place.order is None:
        return x.reshape(shape)
    back = [place.order.index(d) for d in range(len(shape))]
    return x.reshape([shape[d] for d in place.order]).transpose(back)


@dataclasses.dataclass(frozen=True)
class _Totals:
    """Sums of long or joined rows, which a block has in memory.

    Attributes:
      ref: the parts of all blocks.
      block: which one this is.
      first: whether it has added nothing yet.
    """

    ref: Any
    block: Any
    first: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """One kernel.

    Attributes:
      region: what it computes.
      donated: which operands it may write over.
      interpret: parameters of the interpreter, for tests without a GPU.
    """

    region: Region
    donated: tuple[bool, ...] = ()
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

    @cached_property
    def over(self) -> dict[int, int]:
        """The results that are written over an operand, and over which.

        A thread writes over what it alone has read: elements of whole rows, which are loaded before
        anything is written, and once. A cut is loaded again, and so is a part of a long row.
        """
        found: dict[int, int] = {}
        cuts = any(eqn.primitive.name in CUTS for eqn in self.region.body.eqns)
        if cuts or self.geometry.chunks > 1:
            return found
        given = [i for i, may in enumerate(self.donated) if may]
        for j, result in enumerate(self.region.results):
            like = (i for i in given if self._is_alike(self.region.body.invars[i], result))
            if (i := next(like, None)) is not None:
                given.remove(i)
                found[j] = i
        return found

    def _is_alike(self, operand: Var, result: Var) -> bool:
        """Whether the elements of a result lie where those of an operand do, in rows of its own."""
        lines = self.region.lines_of
        if type_of(operand).dtype != type_of(result).dtype or lines(operand) != lines(result):
            return False
        place = self.laid_out[1][operand]
        return place.inner is not None and place.order is None and all(place.strides)

    @property
    def turns(self) -> int:
        """How many blocks share the rows of a group."""
        geometry = self.geometry
        each = geometry.tiles // geometry.groups
        return min(each, -(-_BLOCKS // geometry.groups)) if self.region.sums else each

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self.geometry.groups * self.turns

    @cached_property
    def sum_lines(self) -> list[list[int]]:
        """Of the sums over rows, the lines of a row that each keeps, as they lie in registers."""
        kept = (self.region.kept(i) for i in range(len(self.region.sums)))
        return [[k for k in self.geometry.inner if k in lines] for lines in kept]

    @cached_property
    def sum_sizes(self) -> list[int]:
        """How many numbers of a row are each of the sums."""
        return [math.prod(self.region.sizes[k] for k in lines) for lines in self.sum_lines]

    @cached_property
    def sum_starts(self) -> list[int]:
        """Where each of the sums begins in what a block leaves of them; at the end, their size."""
        unit = self.geometry.vector  # where a thread may store several at a time
        return list(itertools.accumulate((-(-n // unit) * unit for n in self.sum_sizes), initial=0))

    @property
    def sum_size(self) -> int:
        """How many numbers a block leaves, and what is between them."""
        return self.sum_starts[-1]

    def total(self, i: int, parts):
        """The i-th sum, of what all blocks have left: `[groups, turns, numbers]`."""
        geometry, region = self.geometry, self.region
        start, kept = self.sum_starts[i], region.kept(i)
        own = parts[..., start : start + self.sum_sizes[i]]
        lines = [*geometry.group_lines, None, *self.sum_lines[i]]
        own = own.reshape([self.turns if k is None else region.sizes[k] for k in lines])
        own = own.sum([d for d, k in enumerate(lines) if k is None or k not in kept])
        left = [k for k in lines if k is not None and k in kept]
        own = own.transpose([left.index(k) for k in kept if k is not None])
        return own.reshape([1 if k is None else region.sizes[k] for k in kept])

    @cached_property
    def order_of_operands(self) -> list[int]:
        """The operands as the kernel has them: those that are written over come last."""
        over = list(self.over.values())
        return [*(i for i, _ in enumerate(self.region.body.invars) if i not in over), *over]

    def __call__(self, args: Sequence) -> tuple[list, Any]:
        """The results of rows; and what blocks leave of sums, `[groups, turns, numbers]`."""
        places = self.laid_out[1]
        ends = zip(self.region.body.invars, args, strict=True)
        given = [_as_it_lies(x, places[v]).reshape(-1) for v, x in ends]
        sizes = [
            (math.prod(self.region.shape(v)), _in_memory(v.aval.dtype))
            for j, v in enumerate(self.region.results)
            if j not in self.over
        ]
        if self.region.sums:
            sizes.append((self.blocks * self.sum_size, jnp.dtype(jnp.float32)))
        run = kernel(
            self._body,
            out_type=tuple(jax.ShapeDtypeStruct((n,), dtype) for n, dtype in sizes),
            grid=(self.blocks,), grid_names=("block",), kernel_name="fused",
            compiler_params=plgpu.CompilerParams(
                # Nothing is in shared memory but what reductions leave there between barriers.
                unsafe_no_auto_barriers=True,
                approx_math=takes_own_functions(self.region),
                lowering_semantics=plgpu.LoweringSemantics.Lane,
            ),
            **({"interpret": self.interpret} if self.interpret else {}),
        )  # fmt: skip
        ins = [given[i] for i in self.order_of_operands]
        kept = len(ins) - len(self.over)
        new, written = in_place(partial(run, *ins[:kept]), *ins[kept:])
        new, written = list(new), dict(zip(self.over, written, strict=True))
        parts = new.pop() if self.region.sums else None
        left = iter(new)
        made = [
            written[j] if j in written else next(left) for j, _ in enumerate(self.region.results)
        ]
        if parts is not None:
            parts = parts.reshape(self.geometry.groups, self.turns, -1)
        results = [
            _as_it_was(x, self.region.shape(v), places[v]).astype(v.aval.dtype)
            for x, v in zip(made, self.region.results, strict=True)
        ]
        return results, parts

    def _body(self, *refs):
        """What a block does."""
        order = self.order_of_operands
        ins = dict(sorted(zip(order, refs[: len(order)], strict=True)))
        new = iter(refs[len(order) :])
        outs = [
            ins[self.over[j]] if j in self.over else next(new)
            for j, _ in enumerate(self.region.results)
        ]
        ins, sums = list(ins.values()), list(new)
        block = lax.axis_index("block")
        if not self.region.sums:
            self._row(ins, outs, block, None, [])
            return
        each, turns = self.geometry.tiles // self.geometry.groups, jnp.int32(self.turns)
        group, first = lax.div(block, turns), lax.rem(block, turns)
        count = lax.div(jnp.int32(each - 1) - first, turns) + 1
        number = lambda i: group * each + first + i * turns

        def step(i, carry):
            so_far, loaded = carry
            totals = _Totals(sums[0], block, i == 0)
            # Before what this row waits for: a thread is never without a load on its way.
            following = self._ahead(ins, number(jnp.minimum(i + 1, count - 1)))
            return self._row(ins, outs, number(i), totals, so_far, loaded), following

        start = self._nothing(), self._ahead(ins, number(jnp.int32(0)))
        totals, _ = lax.fori_loop(jnp.int32(0), count, step, start)
        for i, total in zip(self._in_registers, totals, strict=True):
            self._leave(sums[0], i, block, total)

    @cached_property
    def _loaded_ahead(self) -> list[Var]:
        """The operands of which a block loads its next row while it works on one."""
        if self.geometry.chunks > 1:
            return []
        cut = {v for e in self.region.body.eqns if e.primitive.name in CUTS for v in e.invars}
        places = self.laid_out[1]
        rows = (v for v in self.region.body.invars if places[v].inner and any(places[v].strides))
        return [v for v in rows if v not in cut]

    def _ahead(self, ins: Sequence, number) -> list:
        """The elements of a row of these operands."""
        tile = self._tile(ins, number, jnp.int32(0), {})
        return [tile.tile(tile.known[v][0]) for v in self._loaded_ahead]

    def _nothing(self) -> list:
        """Sums of no rows."""
        sums = [(self.sum_sizes[i], self.region.summed[i].aval.dtype) for i in self._in_registers]
        return [
            jnp.zeros((), wide_of(t))
            if n == 1
            else self.memory.tile(jnp.zeros((), wide_of(t)), self.geometry.held(n))
            for n, t in sums
        ]

    @cached_property
    def _in_registers(self) -> list[int]:
        """The sums that a block holds until it ends; of long and of joined rows, numbers alone."""
        sums = zip(self.sum_sizes, self.region.summed, strict=True)
        long, joins = self.geometry.chunks > 1, joined(self.region)
        return [i for i, (n, v) in enumerate(sums) if n == 1 or not (long or v in joins)]

    def _spot(self, i: int, start: int, length: int) -> Spot:
        """Where some of a block's part of a sum are."""
        place = Place((self.sum_size,), self.sum_sizes[i])
        return Spot(place, self.sum_starts[i] + start, length)

    @cached_property
    def _parts(self) -> Hardware | Twin:
        """How blocks write their parts of sums."""
        blocks = dataclasses.replace(self.geometry, sizes=(self.blocks,))
        return dataclasses.replace(self.memory, geometry=blocks)

    def _leave(self, ref, i: int, block, total) -> None:
        """Writes a block's part of a sum."""
        if self.sum_sizes[i] == 1:
            ref[block * self.sum_size + self.sum_starts[i]] = total
            return
        spot = self._spot(i, 0, self.sum_sizes[i])
        self._parts.store(ref, spot, block, jnp.int32(0), total)

    def _tile(self, ins: Sequence, number, begin, numbers: Mapping[Var, Any]) -> Tile:
        """A tile, or a part of a row, with what is known of it."""
        first = number * self.geometry.together
        tile = Tile(self.region, self.geometry, self.memory, first, begin)
        for v, ref in zip(self.region.body.invars, ins, strict=True):
            tile.operand(v, ref, self.laid_out[1][v])
        tile.known.update(numbers)
        return tile

    def _row(
        self,
        ins: Sequence,
        outs: Sequence,
        number,
        totals: _Totals | None,
        so_far: Sequence,
        loaded: Sequence = (),
    ) -> list:
        """Writes what a tile results in; returns the sums in registers, with its part of them."""
        if self.geometry.chunks > 1:
            return self._long_row(ins, outs, number, totals, so_far)
        tile = self._tile(ins, number, jnp.int32(0), {})
        for v, x in zip(self._loaded_ahead, loaded, strict=False):
            tile.loaded(v, x)
        for v in (self.region.body.invars[i] for i in self.over.values()):
            tile.loaded(v, tile.tile(tile.known[v][0]))
        for eqn in self.region.body.eqns:
            tile.run(eqn)
        self._write(tile, outs)
        self._add(totals, tile)
        parts = [self._part_of_sum(tile, i) for i in self._in_registers]
        return [lax.add(x, part) for x, part in zip(so_far, parts, strict=True)]

    def _long_row(
        self, ins: Sequence, outs: Sequence, number, totals: _Totals | None, so_far: Sequence
    ) -> list:
        """The same of a row in several parts."""
        numbers = self._numbers(ins, number)
        eqns = without(self.region.body.eqns, numbers, self.region.body.outvars)
        # Sums of all elements of a row wait for its last part, as sums along a row do.
        spread = [i for i in self._in_registers if self._is_spread(i)]

        def step(c, found):
            tile = self._tile(ins, number, c * self.geometry.chunk, numbers)
            for eqn in eqns:
                tile.run(eqn)
            self._write(tile, outs)
            self._add(totals, tile)
            return [lax.add(x, self._elements(tile, i)) for i, x in zip(spread, found, strict=True)]

        zero = lambda i: self._start(self.region.summed[i], "reduce_sum")
        chunks = jnp.int32(self.geometry.chunks)
        found = lax.fori_loop(jnp.int32(0), chunks, step, [zero(i) for i in spread])
        tile = self._tile(ins, number, jnp.int32(0), numbers)
        alone = [self.region.summed[i] for i in self._in_registers if i not in spread]
        for eqn in without(self.region.body.eqns, numbers, alone):
            tile.run(eqn)
        ends = {i: reduced("reduce_sum", x) for i, x in zip(spread, found, strict=True)}
        parts = [
            self._counted(i, tile, ends[i]) if i in ends else self._part_of_sum(tile, i)
            for i in self._in_registers
        ]
        return [lax.add(x, part) for x, part in zip(so_far, parts, strict=True)]

    def _is_spread(self, i: int) -> bool:
        """Whether what is summed has elements in a row."""
        return self.geometry.width(self.region, self.region.summed[i]) > 1

    def _elements(self, tile: Tile, i: int):
        """What a part of a row brings to a sum of all its elements."""
        v = self.region.summed[i]
        (part,) = tile.row(v, tile.read(v))
        return partial_of("reduce_sum", tile, part)

    def _add(self, totals: _Totals | None, tile: Tile) -> None:
        """Adds a tile to what its block has of the sums that are in memory."""
        for i, v in enumerate(self.region.summed):
            if totals is None or i in self._in_registers:
                continue
            start = 0
            for part in tile.row(v, tile.read(v)):
                spot = self._spot(i, start, part.length)
                more = self._counted(i, tile, tile.tile(part).astype(jnp.float32))
                before = self._parts.load(totals.ref, spot, totals.block, tile.begin)
                # What nothing has written is no number yet.
                total = jnp.where(totals.first, more, before + more)
                self._parts.store(totals.ref, spot, totals.block, tile.begin, total)
                start += part.length

    def _counted(self, i: int, tile: Tile, x):
        """A part of a sum, in the first of rows that have the same."""
        for n in self._again(self.region.summed[i]):
            x = jnp.where(tile.index(n) == 0, x, jnp.zeros((), x.dtype))
        return x

    def _write(self, tile: Tile, outs: Sequence) -> None:
        for v, ref in zip(self.region.results, outs, strict=True):
            place, value = self.laid_out[1][v], tile.row(v, tile.read(v))
            write = partial(self._write_one, tile, ref, place, value)
            again = self._again(v) if self.geometry.together == 1 else []
            if again:
                plgpu.when(sum(tile.index(n) for n in again) == 0)(write)
            else:
                write()

    def _write_one(self, tile: Tile, ref, place: Place, value) -> None:
        if not isinstance(value, tuple):
            tile.write_number(ref, place, value)
            return
        start = 0
        for part in value:
            spot = Spot(place, start, part.length)
            self.memory.store(ref, spot, tile.first, tile.begin, stored(tile.tile(part)))
            start += part.length

    def _again(self, v) -> list[int]:
        """The lines of rows, by their number, that a value lacks: along these all rows have it."""
        if self.geometry.flat:
            return []
        lines = self.region.lines_of(v)
        return [n for n, k in enumerate(self.geometry.rows_of) if k not in lines]

    def _part_of_sum(self, tile: Tile, i: int):
        """The part of a sum over rows that is of a tile, which is one row."""
        v = self.region.summed[i]
        wide = wide_of(v.aval.dtype)
        value = tile.row(v, tile.read(v))
        if not isinstance(value, tuple):
            return self._counted(i, tile, value.astype(wide))
        if self.sum_sizes[i] > 1:
            (whole,) = value
            return self._counted(i, tile, tile.tile(whole).astype(wide))
        found = sum(reduced("reduce_sum", partial_of("reduce_sum", tile, part)) for part in value)
        return self._counted(i, tile, found)

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

            chunks = jnp.int32(self.geometry.chunks)
            start = [self._start(e.invars[0], e.primitive.name) for e in eqns]
            found = lax.fori_loop(jnp.int32(0), chunks, step, start)
            for eqn, x in zip(eqns, found, strict=True):
                (out,) = eqn.outvars
                numbers[out] = reduced(eqn.primitive.name, x).astype(type_of(out).dtype)
        return numbers

    def _partial(self, tile: Tile, eqn: JaxprEqn):
        """What a part of a row brings to a sum or maximum of the row."""
        (part,) = tile.row(eqn.invars[0], tile.read(eqn.invars[0]))
        return partial_of(eqn.primitive.name, tile, part)

    def _start(self, v, name: str):
        """What a sum or maximum of a value begins with."""
        dtype = type_of(v).dtype
        if name == "reduce_sum" and jnp.issubdtype(dtype, jnp.floating):
            dtype = wide_of(dtype)
        held = self.geometry.held(self.geometry.width(self.region, v))
        return self.memory.tile(neutral(name, dtype), held)
