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
from xform.lowering.mosaic_gpu._kernel import kernel
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
# Bytes of an H200's second-level cache, less what else passes through it.
_CACHE = 40 * 2**20
# Of an H200 and an H100. Where there are fewer, some blocks wait for others to end.
MULTIPROCESSORS = 132
# Scales of scores that are larger can wait, times those of 8 bits too: no product of them is 0.
_LEAST = 2.0**-8
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
      rate: of dropout.
    """

    score: TileProgram | None
    mask: TileProgram | None
    dropout: TileProgram | None
    scale: float
    rate: float = 0.0

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
        return -(-self.kv_len // tiles.cols)


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
class Share:
    """The places of a grid, dealt out to as many blocks as run at a time.

    They go forth and back, as cards between two players: where later places have less work, blocks
    have about the same.

    Attributes:
      sizes: how many batch entries, heads and rows there are, the last one varying fastest.
    """

    sizes: tuple[tuple[str, int], ...]

    @property
    def places(self) -> int:
        return math.prod(size for _, size in self.sizes)

    @property
    def blocks(self) -> int:
        return min(MULTIPROCESSORS, self.places)

    @property
    def grid(self) -> dict:
        """The arguments of `plgpu.kernel` that say how many blocks there are."""
        return {"grid": (self.blocks,), "grid_names": ("block",)}

    def fold(self, work: Callable, carry):
        """Folds `work((batch, head, row), carry)` over the places of this block."""
        block, blocks = lax.axis_index("block"), int32(self.blocks)
        rounds, rest = divmod(self.places, self.blocks)

        def place_of(n):
            back = lax.rem(n, int32(2)) == 1
            return jnp.where(back, blocks - 1 - block, block)

        def one(n, carry):
            index, place = n * blocks + place_of(n), {}
            for name, size in reversed(self.sizes):
                place[name], index = lax.rem(index, int32(size)), lax.div(index, int32(size))
            return work([place[name] for name in ("batch", "head", "row")], carry)

        one_more = (place_of(int32(rounds)) < rest).astype(jnp.int32)
        return lax.fori_loop(int32(0), rounds + one_more, one, carry)


@dataclasses.dataclass(frozen=True)
class Kept:
    """Which keys there are of a tile that reaches beyond a text, or lies in pages.

    Attributes:
      end: keys from it on are not there.
      pages: which of its pages are, one bit each; None without pages.
      size: of the keys of a page, the logarithm by 2.
    """

    end: jax.Array
    pages: jax.Array | None = None
    size: int = 0

    def visible(self, k0, column) -> list:
        """Conditions on a tile, whose columns are `column`."""
        seen = [column + k0 < self.end]
        if self.pages is not None:
            page = lax.shift_right_logical(column, jnp.full_like(column, self.size))
            bit = lax.shift_right_logical(jnp.full_like(column, self.pages), page)
            seen.append(lax.bitwise_and(bit, jnp.full_like(column, 1)) == 1)
        return seen


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tile is: its first query and its first key, and which keys there are if not all."""

    q0: jax.Array
    k0: jax.Array
    kept: Kept | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """In place of an array that a tile looks something up in: what it has found."""

    tile: jax.Array


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
        return self.tiles.shape

    @property
    def eight(self) -> bool:
        """Whether q, k and v are numbers of 8 bits, with scales."""
        return self.narrow.itemsize == 1

    @property
    def in_eight(self) -> Call:
        """The same call of arrays in 8 bits."""
        return dataclasses.replace(self, narrow=jnp.dtype(jnp.float8_e4m3fn))

    @property
    def moving(self) -> str:
        """The kind of operand that belongs to what a block walks along."""
        return ROW if self.tiles.by_keys else COL

    def dim(self, pair: str) -> int:
        """Which dimension of a tile the rows are, or the columns."""
        return int(pair == self.moving)

    @functools.cached_property
    def operands(self) -> list[Operand]:
        return [operand for program in self.programs.all for operand in program.operands]

    @functools.cached_property
    def vectors(self) -> list[int]:
        """Which operands travel through shared memory: vectors of what moves, and bands."""
        return [n for n, x in enumerate(self.operands) if x.pair in (self.moving, BAND)]

    @property
    def looks_up(self) -> bool:
        """Whether pairs read anything where their query's and their key's indices meet."""
        return any(operand.lookup is not None for operand in self.operands)

    def width(self, pair: str) -> int:
        """How many numbers of a vector belong to one tile of a block."""
        return self.tiles.rows + self.tiles.cols if pair == BAND else self.shape[1]

    def vector_buffers(self, stages: int) -> list:
        """Shared memory for the vectors."""
        of = [self.operands[n] for n in self.vectors]
        return [plgpu.SMEM((stages, self.width(x.pair)), x.stored) for x in of]

    @property
    def visits(self) -> int:
        """How many tiles a block walks along where none is empty."""
        sizes = self.sizes
        if not self.tiles.by_keys:
            return sizes.cols(self.tiles)
        return sizes.heads // sizes.kv_heads * sizes.rows(self.tiles)

    def grid(self, heads: int, blocks: int, *, together: bool) -> dict:
        """The grid of a kernel, whose last dimension varies fastest.

        Args:
          heads, blocks: how many there are.
          together: whether the blocks of all heads come in turns, else head after head.
        """
        sizes = {"batch": self.sizes.batch, "head": heads, "row": blocks}
        names = ("batch", "row", "head") if together else ("batch", "head", "row")
        return {"grid": tuple(sizes[name] for name in names), "grid_names": names}

    def cached(self, heads: int, length: int) -> bool:
        """Whether what all blocks of so many heads walk along stays in the second-level cache."""
        row = (self.sizes.qk_size + self.sizes.v_size) * self.narrow.itemsize
        return heads * length * row <= _CACHE

    # -- where ------------------------------------------------------------------------------------

    def walk(self, batch, head, row, steps) -> Walk:
        """What a block of a batch entry and a head visits; `row` is its place in the order."""
        b = lax.rem(batch, int32(self.sizes.mods_batch))
        if not self.sparse:
            count = int32(self.visits)
            return Walk(batch, b, head, row, int32(0), count, lambda i: i)
        order_ref, count_ref, cols_ref = steps
        unit = lead(order_ref, b, head)
        return Walk(
            batch, b, head, order_ref[*unit, row],
            count_ref[*unit, row, 0], count_ref[*unit, row, 1], lambda i: cols_ref[*unit, row, i],
        )  # fmt: skip

    def pieces(self, pair: str) -> list[tuple[int, int]]:
        """Start and length of the copies that a vector of one tile takes."""
        width = self.width(pair)
        return [(n, min(_LONGEST_COPY, width - n)) for n in range(0, width, _LONGEST_COPY)]

    @property
    def copies(self) -> int:
        """How many copies the vectors of one tile take."""
        return sum(len(self.pieces(self.operands[n].pair)) for n in self.vectors)

    def copy_vectors(self, b, head, place: Place, refs, buffers, slot, barrier) -> None:
        """Starts the copies of what belongs to a block's tile; each arrives at `barrier`."""
        for n, buffer in zip(self.vectors, buffers, strict=True):
            pair = self.operands[n].pair
            # A band starts at -(S - 1), S rounded up to whole tiles (see `TileProgram.arrays`).
            last = (self.sizes.cols(self.tiles) - 1) * self.tiles.cols
            band = place.q0 - place.k0 + last
            start = {ROW: place.q0, COL: place.k0, BAND: band}[pair]
            unit = lead(refs[n], b, head)
            for first, length in self.pieces(pair):
                source = refs[n].at[*unit, plgpu.ds(start + first, length)]
                target = buffer.at[slot, plgpu.ds(first, length)]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    # -- the user's code ---------------------------------------------------------------------------

    def held(self, refs, b, head, start) -> list:
        """Of each operand what stays: its scalar, its vector of what is owned, or its array.

        The vector begins at `start`. None for a vector of what moves.
        """
        return [
            self._held(ref, operand, b, head, start)
            for ref, operand in zip(refs, self.operands, strict=True)
        ]

    def at_rest(self, refs, held: list, b, head, place: Place) -> list:
        """`held`, with the vectors of what moves: of one tile, from global memory."""
        values = list(held)
        start = place.q0 if self.moving == ROW else place.k0
        for n in self.vectors:
            if self.operands[n].pair == self.moving:
                unit = lead(refs[n], b, head)
                part = refs[n].at[*unit, plgpu.ds(start, self.shape[1])]
                values[n] = self.mma.vector(part, 0)
        return values

    def found(self, values: list, heads: str = "bh") -> list:
        """Values, with what is looked up in the place of the arrays that it is looked up in.

        Of those whose indices differ along no other heads than these.
        """
        found = list(values)
        for n, operand in enumerate(self.operands):
            if operand.lookup is not None:
                at = slice(n + 1, n + 1 + len(operand.lookup.classes))
                indices = list(zip(values[at], self.operands[at], strict=True))
                if all(index.stays(heads) for _, index in indices):
                    found[n] = Found(self._look_up(values[n], operand, indices))
        return found

    def free_keys(self, barrier) -> None:
        """Gives a tile back of which products and `values` have read."""
        (self.mma.hand_back if self.vectors else plgpu.barrier_arrive)(barrier)

    def values(self, held: list, buffers, slot, offset) -> list:
        """All operands for one tile, which starts at `offset` of what the block owns."""
        values = list(held)
        for n, buffer in zip(self.vectors, buffers, strict=True):
            values[n] = self._vector(buffer.at[slot], self.operands[n], offset)
        return values

    def _held(self, ref, operand: Operand, b, head, start):
        if operand.pair == TILE:
            return ref
        unit = lead(ref, b, head)
        if operand.pair == SCALAR:
            return _as(ref[*unit], operand.dtype)
        if operand.pair in (self.moving, BAND):
            return None
        part = ref.at[*unit, plgpu.ds(start, self.shape[0])]
        return plgpu.load(part, layout=row_layout(), optimized=False)

    def _vector(self, buffer, operand: Operand, offset):
        """A vector of what moves, or a tile made of a band: of `q_idx - kv_idx`."""
        if operand.pair == self.moving:
            return self.mma.column(buffer)
        last = self.tiles.cols - 1
        start, sign = (last - offset, -1) if self.tiles.by_keys else (last + offset, 1)
        return self.mma.band(buffer, self.shape, start, sign, operand.stored)

    @property
    def factor(self) -> float:
        """What makes the numbers of `scores` exponents of 2: without a mod, the scale waits."""
        least = _LEAST if self.eight else 0
        plain = self.programs.score is None and self.programs.scale > least
        return self.programs.scale * LOG2E if plain else LOG2E

    def scores(self, s_tile, place: Place, partial, values, units=None):
        """Modified scores, minus infinity where hidden, and what makes them exponents of 2.

        That is a number, or with `units` one for each row.

        Args:
          s_tile: the product of queries and keys.
          place: where it is.
          partial: whether the mask is needed.
          values: the operands.
          units: what makes the product one of true numbers, of each row; None for 1.
        """
        programs, factor = self.programs, self.factor
        if units is not None and factor != LOG2E:
            factor = units * factor
        elif units is not None:
            s_tile = s_tile * over_rows(units * programs.scale, self.shape)
        elif factor == LOG2E:
            s_tile = s_tile * programs.scale
        if programs.score is not None:
            s_tile = self.run(programs.score, place, values, s_tile)
        if not self.masked and place.kept is None:
            return s_tile, factor
        hide = lambda s_tile: jnp.where(self.visible(place, values), s_tile, -jnp.inf)
        return lax.cond(partial, hide, lambda s_tile: s_tile, s_tile), factor

    @property
    def masked(self) -> bool:
        """Whether any tile is partial: by the mask, or since it sticks out."""
        return self.programs.mask is not None or bool(self._edges)

    @property
    def _edges(self) -> list[tuple[str, int]]:
        """The sides whose last tile sticks out, and their lengths. Nobody reads such rows of S."""
        s, t = self.sizes, self.tiles
        sides = [(COL, s.kv_len, t.cols)] + [(ROW, s.q_len, t.rows)] * t.by_keys
        return [(pair, length) for pair, length, tile in sides if length % tile]

    def visible(self, place: Place, values) -> jax.Array:
        """The mask over a tile that is partial."""
        seen = [
            self.mma.index(start, self.shape, self.dim(pair), jnp.int32) < length
            for pair, length in self._edges
            for start in [place.q0 if pair == ROW else place.k0]
        ]
        if place.kept is not None:
            column = self.mma.index(int32(0), self.shape, self.dim(COL), jnp.int32)
            seen += place.kept.visible(place.k0, column)
        if self.programs.mask is not None:
            seen.insert(0, self.run(self.programs.mask, place, values))
        return functools.reduce(jnp.logical_and, seen)

    def run(self, program: TileProgram, place: Place, values, *score):
        """One program on one tile."""
        return self.run_all(program, place, values, *score)[0]

    def run_all(self, program: TileProgram, place: Place, values, *score) -> list:
        """All results of one program on one tile."""
        earlier = self.programs.all[: self.programs.all.index(program)]
        first = sum(len(other.operands) for other in earlier)
        operands = self._taken(program, values[first : first + len(program.operands)])
        indices = [
            self._true_index(start, pair, dtype) if dtype in used else None
            for dtype in (jnp.int32, jnp.float32)
            for pair, start, used in (
                (ROW, place.q0, program.indices[0]),
                (COL, place.k0, program.indices[1]),
            )
        ]
        outs = evaluate(program.jaxpr, [*score, *indices, *operands], self._join)
        tile = lambda x: jnp.full(self.shape, x, jnp.asarray(x).dtype) if jnp.ndim(x) == 0 else x
        return list(map(tile, outs))

    def _taken(self, program: TileProgram, values) -> list:
        """What a program takes of its operands' values on one tile."""
        taken, left = [], list(zip(values, program.operands, strict=True))
        while left:
            x, operand = left.pop(0)
            if operand.lookup is not None:
                count = len(operand.lookup.classes)
                x, left = self._look_up(x, operand, left[:count]), left[count:]
            taken.append(self._spread(x, operand))
        return taken

    def _look_up(self, x, operand: Operand, indices: list):
        """What is found in an array, at the indices that are its next operands."""
        if isinstance(x, Found):
            return x.tile
        assert operand.lookup is not None
        at = [self._spread(*index) for index in indices]
        return self.mma.lookup(x, operand.lookup, at, self.shape, operand.stored)

    def _true_index(self, start, pair: str, dtype):
        """The indices of a tile, those of the padding clipped to the last one."""
        index = self.mma.index(start, self.shape, self.dim(pair), dtype)
        sizes, tiles = self.sizes, self.tiles
        length, tile = (sizes.q_len, tiles.rows) if pair == ROW else (sizes.kv_len, tiles.cols)
        return jnp.minimum(index, jnp.asarray(length - 1, dtype)) if length % tile else index

    def _spread(self, x, operand: Operand):
        """A loaded operand as a scalar or a tile, in the dtype that the program wants."""
        if operand.pair == SCALAR:
            return x
        if operand.pair in (ROW, COL):
            x = lax.broadcast_in_dim(x, self.shape, [self.dim(operand.pair)])
        return _as(x, operand.dtype)

    def _join(self, values: list) -> list:
        """Values of one shape: scalars are spread where there is a tile."""
        if all(jnp.ndim(x) == 0 for x in values):
            return [jnp.asarray(x) for x in values]
        return [
            jnp.full(self.shape, x, jnp.asarray(x).dtype) if jnp.ndim(x) == 0 else x for x in values
        ]


def launch(body: Callable, name: str, warpgroups: int, out_type: tuple, grid: dict, interpret):
    """A kernel in which some warpgroups compute, and one more loads.

    Args:
      body: of the kernel.
      name: of the kernel.
      warpgroups: how many compute.
      out_type: shapes and dtypes of the results.
      grid: the arguments of `plgpu.kernel` that say how many blocks there are.
      interpret: parameters of the interpreter, or None.
    """
    return kernel(
        body,
        out_type=out_type,
        **grid,
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No thread reads shared memory that another has written by an ordinary access, but
            # behind a barrier of ours.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({"interpret": interpret} if interpret else {}),
    )


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


def tiled(shape: tuple[int, ...], dtype, swizzle: int | None = None):
    """Shared memory in the layout that products and bulk copies want: rows of up to 128 bytes."""
    transforms = plgpu.tiles_of(shape[-1], jnp.dtype(dtype).itemsize, swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzle_of(size: int, dtype) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    return plgpu.swizzle_of(size, jnp.dtype(dtype).itemsize)
