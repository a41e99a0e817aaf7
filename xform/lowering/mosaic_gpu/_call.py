"""What the kernels know of one call: its sizes, the user's programs, and how a tile meets them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._ops import evaluate
from xform.lowering.mosaic_gpu._program import (
    BAND,
    COL,
    ROW,
    SCALAR,
    TILE,
    Operand,
    TileProgram,
)
from xform.lowering.mosaic_gpu._tuning import Tiles
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

LOG2E = math.log2(math.e)
# Elements that one bulk copy moves along a dimension.
_LONGEST_COPY = 256


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the user wrote, split: each None where there is nothing to do.

    Attributes:
      score: of the scaled product.
      mask: of a partial tile.
      dropout: the factor on each weight.
      scale: on the product `q . k`.
    """

    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None
    scale: float

    @property
    def all(self) -> list[TileProgram]:
        return [p for p in (self.score, self.mask, self.dropout) if p is not None]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All static numbers of a call; the lengths are the true ones, without padding."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    qk_size: int
    v_size: int
    mods_batch: int

    def rows(self, tiles: Tiles) -> int:
        return -(-self.q_len // tiles.rows)

    def cols(self, tiles: Tiles) -> int:
        return -(-self.kv_len // tiles.kv)


@dataclasses.dataclass(frozen=True)
class Walk:
    """Where a block is and what it visits.

    Attributes:
      batch, b: its batch entry, and which of the operands' that is.
      head, row: its head and row of tiles.
      partial, count: how many of the key tiles that it visits are masked, and how many there are.
      col: `col(i)` is the column of the i-th.
    """

    batch: jax.Array
    b: jax.Array
    head: jax.Array
    row: jax.Array
    partial: jax.Array
    count: jax.Array
    col: Callable


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile is: its first query and its first key."""

    q0: jax.Array
    k0: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel.

    Attributes:
      sizes, programs, tiles: the static numbers, the user's code, how the work is cut.
      narrow: the dtype of q, k and v.
      out: of the output.
      sparse: whether there are lists of live tiles.
      mma: how products are made.
    """

    sizes: Sizes
    programs: Programs
    tiles: Tiles
    narrow: jnp.dtype
    out: jnp.dtype
    sparse: bool
    mma: Hardware | Twin

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiles.q, self.tiles.kv

    @functools.cached_property
    def operands(self) -> list[Operand]:
        return [operand for program in self.programs.all for operand in program.operands]

    @functools.cached_property
    def vectors(self) -> list[int]:
        """Which operands travel with the keys, through shared memory: columns and bands."""
        return [n for n, operand in enumerate(self.operands) if operand.pair in (COL, BAND)]

    def width(self, pair: str) -> int:
        """How many numbers of a vector belong to one tile."""
        return self.tiles.kv if pair == COL else self.tiles.kv + self.tiles.rows

    def vector_buffers(self, stages: int) -> list:
        """Shared memory for the vectors."""
        of = [self.operands[n] for n in self.vectors]
        return [plgpu.SMEM((stages, self.width(x.pair)), x.stored) for x in of]

    # -- where ------------------------------------------------------------------------------------

    def walk(self, batch, head, row, steps) -> Walk:
        """What the block of a batch entry, a head and a row visits; rows come in their order."""
        b = lax.rem(batch, int32(self.sizes.mods_batch))
        if not self.sparse:
            count = int32(self.sizes.cols(self.tiles))
            return Walk(batch, b, head, row, int32(0), count, lambda i: i)
        order_ref, count_ref, cols_ref = steps
        unit = lead(order_ref, b, head)
        row = order_ref[*unit, row]
        return Walk(
            batch, b, head, row, count_ref[*unit, row, 0], count_ref[*unit, row, 1],
            lambda i: cols_ref[*unit, row, i],
        )  # fmt: skip

    def pieces(self, pair: str) -> list[tuple[int, int]]:
        """Start and length of the copies that a vector of one tile takes."""
        width = self.width(pair)
        return [(n, min(_LONGEST_COPY, width - n)) for n in range(0, width, _LONGEST_COPY)]

    @property
    def copies(self) -> int:
        """How many copies the vectors of one tile take."""
        return sum(len(self.pieces(self.operands[n].pair)) for n in self.vectors)

    def copy_vectors(self, walk: Walk, col, refs, buffers, slot, barrier) -> None:
        """Starts the copies of what belongs to one tile; each arrives at `barrier`."""
        for n, buffer in zip(self.vectors, buffers, strict=True):
            pair = self.operands[n].pair
            # A band starts at -(S - 1), S rounded up to whole tiles (see `TileProgram.arrays`).
            last = self.sizes.cols(self.tiles) - 1
            band = walk.row * self.tiles.rows + (last - col) * self.tiles.kv
            start = col * self.tiles.kv if pair == COL else band
            b, h = lead(refs[n], walk.b, walk.head)
            for first, length in self.pieces(pair):
                source = refs[n].at[b, h, plgpu.ds(start + first, length)]
                target = buffer.at[slot, plgpu.ds(first, length)]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    # -- the user's code ---------------------------------------------------------------------------

    def held(self, refs, walk: Walk, q0) -> list:
        """Of each operand what stays: its scalar, its vector over rows from `q0` on, or its array.

        None for a vector that travels with the keys.
        """
        return [
            self._held(ref, operand, walk, q0)
            for ref, operand in zip(refs, self.operands, strict=True)
        ]

    def values(self, held: list, buffers, slot, q_start) -> list:
        """All operands for one tile, whose rows start at `q_start` of the block's."""
        values = list(held)
        for n, buffer in zip(self.vectors, buffers, strict=True):
            values[n] = self._vector(buffer.at[slot], self.operands[n], q_start)
        return values

    def _held(self, ref, operand: Operand, walk: Walk, q0):
        if operand.pair == TILE:
            return ref
        b, h = lead(ref, walk.b, walk.head)
        if operand.pair == SCALAR:
            return _as(ref[b, h], operand.dtype)
        if operand.pair == ROW:
            part = ref.at[b, h, plgpu.ds(q0, self.tiles.q)]
            return plgpu.load(part, layout=row_layout(), optimized=False)
        return None

    def _vector(self, buffer, operand: Operand, q_start):
        """A column vector, or a tile made of a band."""
        if operand.pair == COL:
            return self.mma.column(buffer)
        return self.mma.band(buffer, self.shape, q_start + self.tiles.kv - 1, operand.stored)

    def scores(self, s_tile, place: Place, partial, values):
        """Modified scores, minus infinity where hidden, and what makes them exponents of 2.

        Args:
          s_tile: the product of queries and keys.
          place: where it is.
          partial: whether the mask is needed.
          values: the operands.
        """
        scale, programs = self.programs.scale, self.programs
        if programs.score is None and scale > 0:
            factor = scale * LOG2E
        else:
            s_tile, factor = s_tile * scale, LOG2E
        if programs.score is not None:
            s_tile = self.run(programs.score, place, values, s_tile)
        if not self.masked:
            return s_tile, factor
        hide = lambda s_tile: jnp.where(self.visible(place, values), s_tile, -jnp.inf)
        return lax.cond(partial, hide, lambda s_tile: s_tile, s_tile), factor

    @property
    def masked(self) -> bool:
        """Whether any tile is partial: by the mask, or since it sticks out."""
        return self.programs.mask is not None or self.sizes.kv_len % self.tiles.kv != 0

    def visible(self, place: Place, values) -> jax.Array:
        """The mask over a tile that is partial."""
        if self.programs.mask is None:
            return self._inside(place)
        seen = self.run(self.programs.mask, place, values)
        return seen & self._inside(place) if self.sizes.kv_len % self.tiles.kv else seen

    def _inside(self, place: Place) -> jax.Array:
        """Which pairs of a tile are of a key that there is."""
        return self.mma.index(place.k0, self.shape, 1, jnp.int32) < self.sizes.kv_len

    def run(self, program: TileProgram, place: Place, values, *score):
        """One program on one tile."""
        earlier = self.programs.all[: self.programs.all.index(program)]
        first = sum(len(other.operands) for other in earlier)
        operands = self._taken(program, values[first : first + len(program.operands)])
        indices = [
            self._true_index(start, dim, dtype) if dtype in program.indices[dim] else None
            for dtype in (jnp.int32, jnp.float32)
            for dim, start in enumerate((place.q0, place.k0))
        ]
        (out,) = evaluate(program.jaxpr, [*score, *indices, *operands], self._join)
        return jnp.full(self.shape, out, jnp.asarray(out).dtype) if jnp.ndim(out) == 0 else out

    def _taken(self, program: TileProgram, values) -> list:
        """What a program takes of its operands' values on one tile."""
        taken, left = [], list(zip(values, program.operands, strict=True))
        while left:
            x, operand = left.pop(0)
            if operand.lookup is not None:
                count = len(operand.lookup.classes)
                at, left = [self._spread(*pair) for pair in left[:count]], left[count:]
                x = self.mma.lookup(x, operand.lookup, at, self.shape, operand.stored)
            taken.append(self._spread(x, operand))
        return taken

    def _true_index(self, start, dim: int, dtype):
        """The indices of a tile, those of the padding clipped to the last one."""
        index = self.mma.index(start, self.shape, dim, dtype)
        length = (self.sizes.q_len, self.sizes.kv_len)[dim]
        padded = length % (self.tiles.rows, self.tiles.kv)[dim]
        return jnp.minimum(index, jnp.asarray(length - 1, dtype)) if padded else index

    def _spread(self, x, operand: Operand):
        """A loaded operand as a scalar or a tile, in the dtype that the program wants."""
        if operand.pair == SCALAR:
            return x
        if operand.pair in (ROW, COL):
            x = lax.broadcast_in_dim(x, self.shape, [0 if operand.pair == ROW else 1])
        return _as(x, operand.dtype)

    def _join(self, values: list) -> list:
        """Values of one shape: scalars are spread where there is a tile."""
        if all(jnp.ndim(x) == 0 for x in values):
            return [jnp.asarray(x) for x in values]
        return [
            jnp.full(self.shape, x, jnp.asarray(x).dtype) if jnp.ndim(x) == 0 else x for x in values
        ]


def int32(x: int):
    return jnp.int32(x)


def row_layout():
    return plgpu.Layout.WGMMA.reduce(1)


def over_rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def _as(x, dtype):
    """A stored 32-bit value in the dtype of the program."""
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def lead(ref, b, head):
    """The batch and head to read of an array that may have one of each."""
    return (b if ref.shape[0] > 1 else 0), (head if ref.shape[1] > 1 else 0)


def tiled(shape: tuple[int, ...], dtype):
    """Shared memory in the layout that products and bulk copies want: rows of up to 128 bytes."""
    swizzle = swizzle_of(shape[-1], dtype)
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=plgpu.layout(tile, swizzle))


def swizzle_of(size: int, dtype) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    width = size * jnp.dtype(dtype).itemsize
    return next(n for n in (128, 64, 32) if width % n == 0)
