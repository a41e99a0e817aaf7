"""How a kernel over rows meets memory: where rows lie, and which of them a warpgroup has at a time.

A *row* is what lies side by side: the dims within a row, which come last in memory. A tile is one
row, or a part of a long one. Where nothing is summed, short rows go together in one tile, and
arrays of one shape are taken apart into rows of as many elements as a thread loads at a time.

Whatever the order of a value's dims, the elements of its row are in the order of the region's
lines: a transposition moves nothing in registers. An operand that lies in another order is copied
beforehand, a result afterwards. Rows whose sums are kept apart come one behind the other, a *group*
of them for each sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._region import Region

THREADS = 128
# Elements of a row that one thread holds: a few values of so many fit into its registers.
_HELD = 64
# Elements that one thread has of a tile of short rows: two loads of 16 bytes in 16 bits.
_SHORT = 16
_DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "bool")
_SUMMED = ("float32", "bfloat16", "float16")
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min")
CUTS = ("slice", "split", "concatenate", "pad")
"""Operations that take rows apart, or put them together."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operand or a result lies, in elements.

    Attributes:
      strides: between entries of each line of rows, 0 along those that it lacks.
      inner: of a row of it, side by side; None where a row has one number.
      order: its dims as they lie; None where they lie as they are.
    """

    strides: tuple[int, ...]
    inner: int | None
    order: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The rows of one call.

    Attributes:
      sizes: of the lines of rows, the outermost first.
      length: elements of the longest row.
      vector: elements that one thread loads at a time.
      together: rows of a tile.
      chunk: elements of a row in a tile.
      rows_of: each line of rows, and what the number of a row, or of an element where rows are
        flat, is divided by for the position along it.
      inner: the lines of a row, the outermost first.
      grouped: how many of the lines of rows, the first ones, are numbers of groups.
      flat: whether rows are parts of arrays of one shape, and have no line of their own.
    """

    sizes: tuple[int, ...]
    length: int
    vector: int
    together: int
    chunk: int
    rows_of: Mapping[int, int]
    inner: tuple[int, ...] = ()
    grouped: int = 0
    flat: bool = False

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def groups(self) -> int:
        return math.prod(self.sizes[: self.grouped])

    @property
    def group_lines(self) -> list[int]:
        """The lines that number the groups."""
        return list(self.rows_of)[: self.grouped]

    @property
    def tiles(self) -> int:
        """How many tiles there are, long rows counted once."""
        return -(-self.rows // self.together)

    @property
    def chunks(self) -> int:
        """How many parts the longest row has."""
        return -(-self.length // self.chunk)

    def width(self, region: Region, v: Var | Literal) -> int:
        """Elements of a row of a value; 1 where it is a number of it."""
        lines = [k for k in region.lines_of(v) if k is not None]
        if self.flat and any(k in self.rows_of for k in lines):
            return self.length
        return math.prod(region.sizes[k] for k in lines if k not in self.rows_of)

    def held(self, length: int) -> int:
        """Elements of a tile of rows of so many, as all threads hold it."""
        unit = THREADS * self.vector
        return -(-self.together * min(length, self.chunk) // unit) * unit

    def is_full(self, length: int) -> bool:
        """Whether all threads have elements of a row of so many, in each of its parts."""
        longest = self.chunks == 1 or length == self.length
        return longest and length % self.held(length) == 0


def misfits(region: Region) -> list[str]:
    """Returns why the kernel can't take a region; nothing if it can."""
    inner = _inner(region)
    ends = [*region.body.invars, *region.results]
    told = lambda v: v.aval.str_short()
    dtypes = {str(v.aval.dtype) for v in ends} - set(_DTYPES)
    wrong = [f"arrays of {dtype}; it takes {', '.join(_DTYPES)}" for dtype in sorted(dtypes)]
    for v in region.values:
        own = _own(inner, region, v)
        if len(own) > len(set(own)):
            wrong.append(f"{told(v)}, in which all of a row meets all of it")
    for eqn in region.body.eqns:
        if why := _misfit(inner, region, eqn):
            wrong.append(f"`{eqn.primitive.name}` to {told(eqn.outvars[0])}, {why}")
    for i, v in enumerate(region.summed):
        own, kept = _own(inner, region, v), region.kept(i)
        if not all(k in kept for k in own) and any(k in kept for k in own):
            wrong.append(f"a sum over rows and over a part of each row of {told(v)}")
    other = {str(v.aval.dtype) for v in region.summed if v.aval.dtype not in _SUMMED}
    wrong += [f"a sum over rows of {dtype}" for dtype in sorted(other)]
    wrong += [f"{told(v)}, of 2**31 elements or more" for v in ends if v.aval.size >= 1 << 31]
    return list(dict.fromkeys(wrong))


def _misfit(inner: Sequence[int], region: Region, eqn: JaxprEqn) -> str | None:
    """Why an operation finds elements of a row elsewhere than its results are."""
    name, (out, *_) = eqn.primitive.name, eqn.outvars
    if name in CUTS:
        if not _cuts_rows(inner, region, eqn):
            return "not of short whole rows"
        return "which leaves elements out on the way" if _steps(eqn) else None
    if not eqn.invars:
        return None
    before, after = (_own(inner, region, v) for v in (eqn.invars[0], out))
    if reduces(region, eqn) and before and after:
        return "along a part of a row"
    if name == "broadcast_in_dim" and before and sorted(before) != sorted(after):
        return "which repeats a part of a row"
    if name == "reshape" and before != after:
        orders = ([inner.index(k) for k in lines] for lines in (before, after))
        if any(order != sorted(order) for order in orders):
            return "of dims in another order"
    return None


def _steps(eqn: JaxprEqn) -> bool:
    """Whether a cut or join has elements between its elements."""
    if eqn.primitive.name == "slice":
        return any(n > 1 for n in eqn.params["strides"] or ())
    padding = eqn.params.get("padding_config", ())
    return any(between or before < 0 or after < 0 for before, after, between in padding)


def geometry_of(region: Region) -> tuple[Geometry, dict[Var, Place]]:
    """Returns how a region is laid out, and where its operands and results lie."""
    ends = [v for v in [*region.body.invars, *region.results] if isinstance(v, Var)]
    sums = bool(region.sums) or any(reduces(region, e) for e in region.body.eqns)
    if not sums and not _within(region) and all(_is_all(region, v) for v in ends):
        return _flat(region, ends)
    inner = _inner(region)
    rows, grouped = _grouped(inner, region)
    lengths = {_length(inner, region, v) for v in region.values if _has(inner, region, v)} or {1}
    starts = {n for eqn in region.body.eqns for n in _starts(inner, region, eqn)}
    length = max(lengths)
    sizes = tuple(region.sizes[k] for k in rows)
    geometry = Geometry(
        sizes,
        length,
        vector=math.gcd(8, *lengths, *starts),
        together=1 if sums else max(1, THREADS * _SHORT // length),
        chunk=length if length <= THREADS * _HELD else THREADS * _HELD // 2,
        rows_of={k: math.prod(sizes[i + 1 :]) for i, k in enumerate(rows)},
        inner=tuple(inner),
        grouped=grouped,
    )
    return geometry, {v: _place(inner, rows, region, v) for v in ends}


def _grouped(inner: Sequence[int], region: Region) -> tuple[list[int], int]:
    """The lines of rows, those first along which sums over rows are kept; and how many they are."""
    rows = [k for k in region.rows if k not in inner]
    kept = {k for i in range(len(region.sums)) for k in region.kept(i)}
    first = [k for k in rows if k in kept]
    return [*first, *(k for k in rows if k not in kept)], len(first)


def reduces(region: Region, eqn: JaxprEqn) -> bool:
    """Whether an equation is a sum or maximum along a row, of more than one element."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    lines = region.lines_of(eqn.invars[0])
    return any(lines[d] is not None for d in eqn.params["axes"])


def _flat(region: Region, ends: Sequence[Var]) -> tuple[Geometry, dict[Var, Place]]:
    """Of arrays of one shape, and numbers: rows of as many elements as a thread loads."""
    sizes = [region.sizes[k] for k in region.rows]
    total = math.prod(sizes)
    vector = math.gcd(8, total)
    rows_of = {k: math.prod(sizes[i + 1 :]) for i, k in enumerate(region.rows)}
    geometry = Geometry(
        (total // vector,), vector, vector, THREADS * _SHORT // vector, vector, rows_of, flat=True
    )
    row = Place((vector,), vector)
    place = lambda v: row if _has(region.rows, region, v) else Place((0,), _shared(region, v))
    return geometry, {v: place(v) for v in ends}


def _shared(region: Region, v: Var) -> int | None:
    """The elements of an operand that all rows share, None if it is a number."""
    size = math.prod(region.shape(v))
    return size if size > 1 else None


def _is_all(region: Region, v: Var) -> bool:
    """Whether a value has all rows in their order, or none."""
    lines = tuple(k for k in region.lines[v] if k is not None)
    return lines == region.rows or not any(k in region.rows for k in lines)


def _within(region: Region) -> list[int]:
    """The lines within a row of values that have rows; all of them where there are no rows."""
    found: dict[int, None] = {}
    for v in region.values:
        lines = [k for k in region.lines[v] if k is not None]
        if not region.rows or any(k in region.rows for k in lines):
            found |= dict.fromkeys(k for k in lines if k not in region.rows)
    return list(found)


def _inner(region: Region) -> list[int]:
    """The lines of a row: those within, else the last of rows."""
    return _within(region) or list(region.rows[-1:])


def _own(inner: Sequence[int], region: Region, v: Var | Literal) -> list[int]:
    """The lines of a value that are of a row."""
    return [k for k in region.lines_of(v) if k is not None and k in inner]


def _has(inner: Sequence[int], region: Region, v: Var | Literal) -> bool:
    return any(k in inner for k in region.lines_of(v))


def _length(inner: Sequence[int], region: Region, v: Var | Literal) -> int:
    """The elements of a row of a value."""
    return math.prod(region.sizes[k] for k in _own(inner, region, v))


def _cuts_rows(inner: Sequence[int], region: Region, eqn: JaxprEqn) -> bool:
    """Whether each value has one line of a row at most, which registers hold."""
    values = [v for v in [*eqn.invars, *eqn.outvars] if isinstance(v, Var)]
    lines = [_own(inner, region, v) for v in values]
    short = all(region.sizes[k] <= THREADS * _HELD for found in lines for k in found)
    return short and all(len(found) <= 1 for found in lines)


def _starts(inner: Sequence[int], region: Region, eqn: JaxprEqn) -> Iterator[int]:
    """Where in a row a slice begins."""
    if eqn.primitive.name == "slice":
        lines = region.lines_of(eqn.invars[0])
        yield from (
            n for n, k in zip(eqn.params["start_indices"], lines, strict=True) if k in inner
        )
    if eqn.primitive.name == "pad":
        lines = region.lines_of(eqn.invars[0])
        yield from (
            c[0] for c, k in zip(eqn.params["padding_config"], lines, strict=True) if k in inner
        )


def _place(inner: Sequence[int], rows: Sequence[int], region: Region, v: Var) -> Place:
    lines, shape = region.lines_of(v), region.shape(v)
    where = [inner.index(k) if k in inner else -1 for k in lines]
    order = sorted(range(len(lines)), key=where.__getitem__)  # rows first, as they are
    lines, shape = [lines[d] for d in order], [shape[d] for d in order]
    stride = {k: math.prod(shape[i + 1 :]) for i, k in enumerate(lines) if k is not None}
    own = [k for k in lines if k is not None and k not in rows]
    length = math.prod(region.sizes[k] for k in own) if own else None
    moved = tuple(order) if order != sorted(order) else None
    return Place(tuple(stride.get(k, 0) for k in rows), length, moved)
