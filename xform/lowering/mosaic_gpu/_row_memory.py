"""Loads and stores of a kernel over rows, for the hardware and for the interpreter.

A thread has `vector` neighbouring elements of every 128 times as many. Where a row, or the last
tile, has fewer than the threads do, a load takes the last ones that there are once more, and a
store leaves them out. The twin says the same with slices that the interpreter knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf, vector

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._row_geometry import Geometry, Place


@dataclasses.dataclass(frozen=True)
class Spot:
    """What of an array a tile is.

    Attributes:
      place: where the array lies.
      start: where in a row it begins, in elements.
      length: elements of a row that belong to it.
    """

    place: Place
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Vectors of neighbouring elements."""

    geometry: Geometry

    def layout(self, size: int):
        """Of a tile of so many elements."""
        return plgpu.Layout.WG_STRIDED((size,), vec_size=self.geometry.vector)

    def load(self, ref, spot: Spot, first, begin):
        """A tile: of rows from `first` on, elements from `begin` on."""
        size = self.geometry.held(spot.length)
        result = plgpu.ShapeDtypeStruct((size,), ref.dtype, layout=self.layout(size))
        splat = plgpu.Layout.WG_SPLAT

        @_inline(plgpu.RefType(), splat, splat, result=result)
        def load(ctx, ref, first, begin):
            del ctx
            return _load(self.geometry, spot, size, signed, ref, _number(first), _number(begin))

        signed = None if jnp.issubdtype(ref.dtype, jnp.floating) else ref.dtype == jnp.int32
        return load(ref, first, begin)

    def store(self, ref, spot: Spot, first, begin, x):
        """Writes a tile there."""
        splat = plgpu.Layout.WG_SPLAT

        @_inline(plgpu.RefType(), splat, splat, self.layout(x.shape[0]))
        def store(ctx, ref, first, begin, x):
            del ctx
            _store(self.geometry, spot, ref, _number(first), _number(begin), x)

        store(ref, first, begin, plgpu.layout_cast(x, self.layout(x.shape[0])))

    def tile(self, x, size: int):
        """A tile of one number."""
        return plgpu.layout_cast(jnp.broadcast_to(x, (size,)), self.layout(size))

    def iota(self, size: int):
        """The number of each element of a tile."""
        return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=self.layout(size))


def _inline(*arguments, result=None) -> Callable[[Callable], Callable]:
    """Marks a function of Mosaic's context, which is Mosaic's to give, and these arguments."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def _number(scalar) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), scalar.registers.item())


def _constant(n: int) -> ir.Value:
    return arith.constant(ir.IndexType.get(), int(n))


def _layout(geometry: Geometry, size: int):
    return plgpu.StridedLayout((size,), geometry.vector)


def _load(geometry: Geometry, spot: Spot, size: int, signed, ref, first, begin):
    layout = _layout(geometry, size)
    element = ir.MemRefType(ref.type).element_type
    kind = ir.VectorType.get((geometry.vector,), element)
    registers = np.empty(layout.registers_shape((size,)), dtype=object)
    for i, at in enumerate(layout.linear_thread_idxs()):
        row, col, _ = _where(geometry, spot, first, begin, at)
        offset = _offset(geometry, spot, row, col)
        if spot.place.inner is None:
            registers[i] = vector.broadcast(kind, memref.load(ref, [offset]))
        else:
            registers[i] = vector.load(kind, ref, [offset])
    return plgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _store(geometry: Geometry, spot: Spot, ref, first, begin, x):
    for i, at in enumerate(x.layout.linear_thread_idxs()):
        row, col, inside = _where(geometry, spot, first, begin, at)
        offset = _offset(geometry, spot, row, col)
        if inside is None:
            _write(spot, ref, offset, x.registers[i])
            continue
        branch = scf.IfOp(inside)
        with ir.InsertionPoint(branch.then_block):
            _write(spot, ref, offset, x.registers[i])
            scf.yield_([])


def _write(spot: Spot, ref, offset, x):
    """Writes a vector; or the number that its elements are, where a row has one."""
    if spot.place.inner is None:
        memref.store(vector.extract(x, dynamic_position=[], static_position=[0]), ref, [offset])
    else:
        vector.store(x, ref, [offset])


def _where(geometry: Geometry, spot: Spot, first, begin, at):
    """Row and element of a thread's vector, no further than there are; whether it is there."""
    below = lambda a, b: arith.cmpi(arith.CmpIPredicate.ult, a, b)
    if geometry.together == 1:
        col = arith.addi(begin, at)
        if geometry.is_full(spot.length):
            return first, col, None
        last = _constant(spot.length - geometry.vector)
        return first, arith.minui(col, last), below(col, _constant(spot.length))
    length = _constant(spot.length)
    row, col = arith.addi(first, arith.divui(at, length)), arith.remui(at, length)
    if geometry.rows % geometry.together == 0 and _is_full(geometry, spot):
        return row, col, None
    rows = _constant(geometry.rows)
    there = below(row, rows)
    if not _is_full(geometry, spot):
        there = arith.andi(there, below(at, _constant(geometry.together * spot.length)))
    return arith.minui(row, _constant(geometry.rows - 1)), col, there


def _is_full(geometry: Geometry, spot: Spot) -> bool:
    """Whether a tile has an element for each place that threads have."""
    return geometry.together * spot.length == geometry.held(spot.length)


def _offset(geometry: Geometry, spot: Spot, row, col):
    """Where in memory an element lies."""
    total = None if spot.place.inner is None else arith.addi(col, _constant(spot.start))
    for i, stride in enumerate(spot.place.strides):
        if stride == 0:
            continue
        index = row
        if (after := math.prod(geometry.sizes[i + 1 :])) > 1:
            index = arith.divui(index, _constant(after))
        if i > 0:
            index = arith.remui(index, _constant(geometry.sizes[i]))
        term = arith.muli(index, _constant(stride))
        total = term if total is None else arith.addi(total, term)
    return _constant(0) if total is None else total


@dataclasses.dataclass(frozen=True)
class Twin:
    """The same by whole arrays, for operands, and by slices of them, for results."""

    geometry: Geometry

    def load(self, ref, spot: Spot, first, begin):
        """As `Hardware.load`."""
        at = jnp.arange(self.geometry.held(spot.length), dtype=jnp.int32)
        if self.geometry.together == 1:
            row, col = first, jnp.minimum(begin + at, spot.length - 1)
        else:
            row, col = (
                jnp.minimum(first + at // spot.length, self.geometry.rows - 1),
                at % spot.length,
            )
        start = jnp.broadcast_to(self._start(spot, row), at.shape)
        return ref[...][start if spot.place.inner is None else start + spot.start + col]

    def store(self, ref, spot: Spot, first, begin, x):
        """As `Hardware.store`; the last run of elements side by side is a shorter one."""
        geometry = self.geometry
        if geometry.flat and any(spot.place.strides):
            start, total = first * geometry.length, geometry.rows * geometry.length
            self._write(ref, start, x, start, total, geometry.together * geometry.length)
        elif geometry.together == 1:
            start = self._start(spot, first) + spot.start + begin
            self._write(ref, start, x, begin, spot.length, min(spot.length, geometry.chunk))
        else:
            count = 1 if spot.place.inner is None else spot.length

            @plgpu.loop(0, jnp.minimum(geometry.together, geometry.rows - first))
            def _(r):
                start = self._start(spot, first + r) + spot.start
                ref[plgpu.ds(start, count)] = lax.dynamic_slice(x, (r * spot.length,), (count,))

    def _write(self, ref, start, x, first, total: int, count: int) -> None:
        """Writes `count` elements of `total`, from the `first` on, or as many as are left."""
        count = min(total, count)
        fits = first + count <= total
        plgpu.when(fits)(lambda: ref.__setitem__(plgpu.ds(start, count), x[:count]))
        if rest := total % count:
            write = lambda: ref.__setitem__(plgpu.ds(start, rest), x[:rest])
            plgpu.when(jnp.logical_not(fits) & (first < total))(write)

    def tile(self, x, size: int):
        """As `Hardware.tile`."""
        return jnp.broadcast_to(x, (size,))

    def iota(self, size: int):
        """As `Hardware.iota`."""
        return jnp.arange(size, dtype=jnp.int32)

    def _start(self, spot: Spot, row):
        total = jnp.int32(0)
        for i, stride in enumerate(spot.place.strides):
            after = math.prod(self.geometry.sizes[i + 1 :])
            total += row // after % self.geometry.sizes[i] * stride
        return total
