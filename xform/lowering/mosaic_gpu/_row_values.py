"""The program of a row, on tiles of rows: what a value is in registers, and what operations do.

A value of a row is a number of it, or its elements in one or several parts side by side: a cut or a
join of rows moves no element from thread to thread, it only tells parts apart. An operand is loaded
when, and as far as, something reads it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._contract import wide_of
from xform.lowering._region import Region, type_of
from xform.lowering.mosaic_gpu._ops import OPS
from xform.lowering.mosaic_gpu._row_geometry import Geometry, Place, reduces
from xform.lowering.mosaic_gpu._row_memory import Hardware, Spot, Twin

type Memory = Hardware | Twin


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements of a row that lie side by side.

    Attributes:
      length: how many there are.
      tile: them, of all rows of a tile; a number where all are the same; or where to load them.
      again: computes some of them anew, given the first and their number, where other threads
        need them.
    """

    length: int
    tile: Any
    again: Callable[[int, int], Part] | None = None


@dataclasses.dataclass(frozen=True)
class Loadable:
    """Elements of an operand.

    Attributes:
      ref: the operand.
      place: where it lies.
      start: the first of these elements of a row.
      truth: whether they stand for what is true, as any number but 0.
    """

    ref: Any
    place: Place
    start: int = 0
    truth: bool = False

    def meant(self, x):
        """What is loaded as what it stands for."""
        return x != jnp.zeros((), x.dtype) if self.truth else x


type Value = tuple[Part, ...] | Any
"""Parts of a row; or a number of it, a scalar where a tile is one row."""


class Tile:
    """Some rows, or a part of one, of one region.

    Attributes:
      first: the first row.
      begin: the first element of each.
    """

    def __init__(self, region: Region, geometry: Geometry, memory: Memory, first, begin):
        self.region, self.geometry, self.memory = region, geometry, memory
        self.first, self.begin = first, begin
        self.known: dict[Var, Value] = {}

    # ---- values ----------------------------------------------------------------------------------

    def operand(self, v: Var, ref, place: Place) -> None:
        """Tells where an operand lies."""
        source = Loadable(ref, place, truth=type_of(v).dtype == jnp.bool_)
        self.known[v] = (Part(place.inner, source),) if place.inner is not None else source

    def loaded(self, v: Var, x) -> None:
        """Tells of an operand's elements that are in registers already."""
        (row,) = self.known[v]
        self.known[v] = (Part(row.length, x, lambda start, n: self.cut((row,), start, n)[0]),)

    def read(self, atom) -> Value:
        """A value; a literal is a number."""
        if isinstance(atom, Literal):
            return jnp.asarray(atom.val, type_of(atom).dtype)
        value = self.known[atom]
        if isinstance(value, Loadable):
            value = self.known[atom] = self._number(value)
        return value

    def _number(self, source: Loadable):
        """A number of each row, or one of all."""
        if self.geometry.together == 1 or not any(source.place.strides):
            return source.meant(source.ref[self._offset(source.place) + source.start])
        spot = Spot(source.place, source.start, self.geometry.length)
        return source.meant(self.memory.load(source.ref, spot, self.first, self.begin))

    def write_number(self, ref, place: Place, value) -> None:
        """Writes a number of each row."""
        value = stored(value)
        if self.geometry.together == 1 or not any(place.strides):
            ref[self._offset(place)] = value
        else:
            self.memory.store(
                ref, Spot(place, 0, self.geometry.length), self.first, self.begin, value
            )

    def _offset(self, place: Place):
        """Where in memory the number of a row is."""
        return sum((self.index(i) * n for i, n in enumerate(place.strides) if n), jnp.int32(0))

    def index(self, i: int):
        """Where along a line of rows the row is."""
        sizes = self.geometry.sizes
        after = math.prod(sizes[i + 1 :])
        return lax.rem(lax.div(self.first, jnp.int32(after)), jnp.int32(sizes[i]))

    def first_of(self, row: tuple[Part, ...]):
        """The first element of a row, which is loaded."""
        source = row[0].tile
        return self._number(source) if isinstance(source, Loadable) else source

    def row(self, v, value: Value) -> Value:
        """A value of the program with its parts, where it has elements in a row."""
        width = 1 if isinstance(v, Literal) else self.geometry.width(self.region, v)
        return value if isinstance(value, tuple) or width == 1 else (Part(width, value),)

    def tile(self, part: Part):
        """The elements of a part, in registers."""
        if isinstance(part.tile, Loadable):
            spot = Spot(part.tile.place, part.tile.start, part.length)
            return part.tile.meant(self.memory.load(part.tile.ref, spot, self.first, self.begin))
        if jnp.ndim(part.tile) == 0:
            return jnp.broadcast_to(part.tile, (self.geometry.held(part.length),))
        return part.tile

    def inside(self, part: Part):
        """Which elements of a part's tile are of the row; None if all are."""
        held = self.geometry.held(part.length)
        if self.geometry.is_full(part.length):
            return None
        return self.begin + self.memory.iota(held) < part.length

    # ---- operations ------------------------------------------------------------------------------

    def run(self, eqn: JaxprEqn) -> None:
        """Computes the results of an equation."""
        args = [self.read(x) for x in eqn.invars]
        rule = _RULES.get(eqn.primitive.name, _elementwise)
        outs = rule(self, eqn, *args)
        several = eqn.primitive.multiple_results
        self.known.update(zip(eqn.outvars, outs if several else [outs], strict=True))

    def over_parts(self, f: Callable, args: Sequence[Value]) -> Value:
        """An elementwise function of values, part by part where any has parts."""
        rows = [x for x in args if isinstance(x, tuple)]
        if not rows:
            return f(*args)
        lengths = max(([p.length for p in x] for x in rows), key=len)
        split = [self._split(x, lengths) if isinstance(x, tuple) else x for x in args]
        found = []
        for i, n in enumerate(lengths):
            tiles = [self.tile(x[i]) if isinstance(x, tuple) else x for x in split]
            held = self.geometry.held(n)
            tiles = [jnp.broadcast_to(x, (held,)) if jnp.ndim(x) == 0 else x for x in tiles]
            if any(x.shape != (held,) for x in tiles):
                raise NotImplementedError(
                    "`fuse` by its GPU kernel: numbers of short rows meet parts of these rows."
                )
            parts = [x[i] if isinstance(x, tuple) else x for x in split]
            found.append(Part(n, f(*tiles), partial(self._again, f, parts)))
        return tuple(found)

    def _again(self, f: Callable, args: Sequence, start: int, length: int) -> Part:
        """Some elements of what a function makes of parts of rows and of numbers."""
        cut = [self.cut((x,), start, length) if isinstance(x, Part) else x for x in args]
        (found,) = self.over_parts(f, cut)
        return found

    def _split(self, row: tuple[Part, ...], lengths: list[int]) -> tuple[Part, ...]:
        """A row in parts of these lengths."""
        if [p.length for p in row] == lengths:
            return row
        found, start = [], 0
        for n in lengths:
            found += self.cut(row, start, n)
            start += int(n)
        return tuple(found)

    def cut(self, row: tuple[Part, ...], start: int, length: int) -> tuple[Part, ...]:
        """Elements of a row, of one of its parts; of an operand, any."""
        for part in row:
            if start == 0 and part.length == length:
                return (part,)
            if start < part.length:
                if start + length > part.length:
                    break
                if isinstance(part.tile, Loadable):
                    moved = dataclasses.replace(part.tile, start=part.tile.start + start)
                    return (Part(length, moved),)
                if jnp.ndim(part.tile) == 0:
                    return (Part(length, part.tile),)
                if part.again is not None:
                    return (part.again(start, length),)
                break
            start -= part.length
        raise NotImplementedError(
            f"`fuse` has no GPU kernel for {length} elements across parts of a joined row. Cut "
            "what is joined, or leave the cut outside of `fuse` there."
        )


def stored(x):
    """A value in a dtype that memory has: what is true is 1."""
    one, zero = jnp.ones((), jnp.int32), jnp.zeros((), jnp.int32)
    return jnp.where(x, one, zero) if x.dtype == jnp.bool_ else x


def _elementwise(tile: Tile, eqn: JaxprEqn, *args) -> Value:
    f = lambda *xs: OPS[eqn.primitive.name](*xs, **eqn.params)
    return tile.over_parts(f, args)


def _as_it_is(tile: Tile, eqn: JaxprEqn, x) -> Value:
    """A value in another shape: of the same elements, or one number for all of them."""
    if not isinstance(x, tuple):
        return x
    (out,) = eqn.outvars
    width, total = tile.geometry.width(tile.region, out), sum(p.length for p in x)
    if total == 1:
        return tile.first_of(x)
    if width != total:
        raise NotImplementedError(
            f"`fuse` by its GPU kernel: {out.aval.str_short()} repeats a part of a row."
        )
    return x


def _reduction(name: str) -> Callable:
    """A sum or maximum of all elements of a row."""

    def reduce(tile: Tile, eqn: JaxprEqn, x) -> Value:
        x = tile.row(eqn.invars[0], x)
        if not isinstance(x, tuple) or not reduces(tile.region, eqn):
            return x
        dtype = type_of(eqn.outvars[0]).dtype
        parts = [reduced(name, partial_of(name, tile, part)) for part in x]
        found = parts[0]
        for other in parts[1:]:
            found = COMBINE[name](found, other)
        return found.astype(dtype)

    return reduce


COMBINE: Mapping[str, Callable] = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min,
}  # fmt: skip


def partial_of(name: str, tile: Tile, part: Part):
    """The elements of a part as a reduction wants them: in more bits, beyond the row neutral."""
    x = tile.tile(part)
    if name == "reduce_sum" and jnp.issubdtype(x.dtype, jnp.floating):
        x = x.astype(wide_of(x.dtype))
    inside = tile.inside(part)
    return x if inside is None else jnp.where(inside, x, neutral(name, x.dtype))


def neutral(name: str, dtype):
    """What a reduction leaves as it is."""
    if name == "reduce_sum":
        return jnp.zeros((), dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    lowest = -jnp.inf if floating else jnp.iinfo(dtype).min
    highest = jnp.inf if floating else jnp.iinfo(dtype).max
    return jnp.asarray(lowest if name == "reduce_max" else highest, dtype)


def reduced(name: str, x):
    """The sum or maximum of a tile, across the warps."""
    return {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}[name](x)


def _iota(tile: Tile, eqn: JaxprEqn) -> Value:
    """Positions along a line: of the row, or of elements in it."""
    (out,), geometry = eqn.outvars, tile.geometry
    line, dtype = tile.region.lines_of(out)[eqn.params["dimension"]], type_of(out).dtype
    if line is None:
        return jnp.zeros((), dtype)
    n = tile.region.sizes[line]
    place = lambda x, after: lax.rem(
        lax.div(x, jnp.full_like(x, after)), jnp.full_like(x, n)
    ).astype(dtype)
    if line not in geometry.rows_of:
        own = [k for k in geometry.inner if k in tile.region.lines_of(out)]
        after = math.prod(tile.region.sizes[k] for k in own[own.index(line) + 1 :])
        return (_elements(tile, geometry.width(tile.region, out), lambda x: place(x, after)),)
    if geometry.together == 1:
        return place(tile.first, geometry.rows_of[line])
    held = geometry.held(geometry.length)
    each = lax.div(tile.memory.iota(held), jnp.full((held,), geometry.length, jnp.int32))
    return (Part(geometry.length, place(tile.first + each, geometry.rows_of[line])),)


def _elements(tile: Tile, length: int, f: Callable, start: int = 0) -> Part:
    """What a function makes of the numbers of a row's elements, from one on."""
    held = tile.geometry.held(length)
    at = tile.memory.iota(held)
    if tile.geometry.together > 1:
        at = lax.rem(at, jnp.full((held,), length, jnp.int32))
    again = lambda first, n: _elements(tile, n, f, start + first)
    return Part(length, f(tile.begin + start + at), again)


def _slice(tile: Tile, eqn: JaxprEqn, x) -> Value:
    (operand,), (out,) = eqn.invars, eqn.outvars
    cut = [
        d
        for d, (n, m) in enumerate(zip(type_of(operand).shape, type_of(out).shape, strict=True))
        if n != m
    ]
    if not cut or not isinstance(x, tuple):
        return x
    return tile.cut(x, int(eqn.params["start_indices"][cut[0]]), type_of(out).shape[cut[0]])


def _split(tile: Tile, eqn: JaxprEqn, x) -> list[Value]:
    found, start = [], 0
    for n in eqn.params["sizes"]:
        found.append(tile.cut(x, start, int(n)))
        start += int(n)
    return found


def _concatenate(tile: Tile, eqn: JaxprEqn, *args) -> Value:
    del tile, eqn
    return tuple(part for x in args for part in x)


def _pad(tile: Tile, eqn: JaxprEqn, x, filling) -> Value:
    del tile
    before, after = next((a, b) for a, b, _ in eqn.params["padding_config"] if a or b)
    ends = [(Part(n, filling),) if n else () for n in (before, after)]
    return (*ends[0], *x, *ends[1])


_RULES: dict[str, Callable] = {
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "transpose", "name"), _as_it_is),
    **{name: _reduction(name) for name in COMBINE},
    "iota": _iota,
    "slice": _slice,
    "split": _split,
    "concatenate": _concatenate,
    "pad": _pad,
}
"""Of the operations that are more than elementwise."""


def unknown(region: Region) -> list[str]:
    """The operations of a region that kernels have no form of."""
    names = {eqn.primitive.name for eqn in region.body.eqns} - set(OPS) - set(_RULES)
    return [f"`{name}`" for name in sorted(names)]
