"""The forward kernel for Hopper (sm_90a): FlashAttention-3's schedule with the user's code inside.

Source: Shah et al., "FlashAttention-3", arXiv:2407.08608, sections 3.1 and 3.2, with the block
sparsity of FlexAttention (arXiv:2412.05496) and mods split as in `_program`. One block of the grid
owns `warpgroups * q` queries of one head and walks the live key tiles, partial ones first. One
warpgroup loads; each of the others owns `q` queries and overlaps, within itself, the product `S =
Q K'` of the next tile and `O += P V` of this one with the softmax of the next:

    S0 = Q K0'; P0 = softmax(S0)
    for j = 1 .. n-1:   issue S = Q Kj';  issue O += P(j-1) V(j-1);  await S;  P = softmax(S)
                        await O;  rescale O
    O += P V(n-1)

and, in turns, with the others: one issues its products while another computes its softmax.

Shapes: q `[B,T,H,D]`, k `[B,S,K,D]`, v `[B,S,K,V]`; a tile is `q x kv` pairs. D and V are
multiples of 16 and at most 256.

Not optimal: blocks are not persistent, so that the tail of one is not hidden by the next; `O` is
rescaled at every step, also where no maximum has grown; two blocks of one cluster load the same
keys twice.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._ops import evaluate
from xform.lowering.mosaic_gpu._program import BAND, COL, ROW, SCALAR, TileProgram
from xform.lowering.mosaic_gpu._tuning import Tiles
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

_LOG2E = math.log2(math.e)
# Registers a thread, by the number of computing warpgroups: 65,536 of a multiprocessor in all.
_COMPUTE_REGISTERS = {1: 240, 2: 240, 3: 160}
_LOAD_REGISTERS = {1: 24, 2: 24, 3: 24}


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


def forward(
    q, k, v, steps, operands: Sequence[Sequence[jax.Array]], *,
    programs: Programs, q_len: int, kv_len: int, mods_batch: int, tiles: Tiles, dtype,
    interpret=None,
):  # fmt: skip
    """Runs the kernel.

    Args:
      q, k, v: as above, bfloat16 or float16.
      steps: `(order [U,W,R], count [U,W,R,2], cols [U,W,R,C])`, int32: the rows of tiles, the
        most work first; how many tiles of a row are partial, and live; their columns, partial ones
        first. U is 1 or the batch of the mods, W is 1 or H. None where all tiles are full.
      operands: those of each of `programs.all`.
      programs: the user's code.
      q_len, kv_len: the true lengths; q, k and v may be padded beyond them.
      mods_batch: the batch that mods know, where vmapped dimensions are folded into B.
      tiles: sizes.
      dtype: of the output.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      out `[B,T,H,V]`, and of each row the maximum and the sum of the exponentials relative to it,
      `[B,H,R * rows]`, float32.
    """
    sizes = Sizes(
        q.shape[0], q_len, kv_len, q.shape[2], k.shape[2], q.shape[3], v.shape[3], mods_batch,
    )  # fmt: skip
    kernel = _Kernel(sizes, programs, tiles, q.dtype, jnp.dtype(dtype), steps is not None,
                     Twin() if interpret else Hardware())  # fmt: skip
    statistic = jax.ShapeDtypeStruct(
        (sizes.batch, sizes.heads, sizes.rows(tiles) * tiles.rows), jnp.float32
    )
    flat = [x for group in operands for x in group]
    call = plgpu.kernel(
        kernel.entry,
        out_type=(
            jax.ShapeDtypeStruct((*q.shape[:3], sizes.v_size), dtype), statistic, statistic,
        ),
        # Heads vary fastest: those that share keys run side by side.
        grid=(sizes.heads, sizes.rows(tiles), sizes.batch),
        grid_names=("head", "row", "batch"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="flex_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # No shared memory is both read and written by ordinary accesses of one warpgroup.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({"interpret": interpret} if interpret else {}),
    )  # fmt: skip
    return call(q, k, v, *(steps or ()), *flat)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The body of the kernel; a method is what one warpgroup does."""

    sizes: Sizes
    programs: Programs
    tiles: Tiles
    narrow: jnp.dtype
    out: jnp.dtype
    sparse: bool
    mma: Hardware | Twin

    # -- memory ------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int]:
        return self.tiles.q, self.tiles.kv

    @functools.cached_property
    def vectors(self) -> list[int]:
        """Which operands travel with the keys, through shared memory: columns and bands."""
        return [n for n, operand in enumerate(self._operands) if operand.pair in (COL, BAND)]

    @property
    def _operands(self) -> list:
        return [operand for program in self.programs.all for operand in program.operands]

    def width(self, pair: str) -> int:
        """How many numbers of a vector belong to one tile."""
        return self.tiles.kv if pair == COL else self.tiles.kv + self.tiles.rows

    def entry(self, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        s, t, n = self.sizes, self.tiles, self.tiles.stages
        groups = t.warpgroups
        # The output leaves in columns of up to 128 bytes, two of them at a time if there is room.
        chunk = swizzle_of(s.v_size, self.out) // self.out.itemsize
        buffers = min(2 if s.v_size <= 128 else 1, s.v_size // chunk)
        ring = functools.partial(plgpu.Barrier, num_barriers=n)
        rows = plgpu.SMEM((groups, t.q), jnp.float32)
        scratch = {
            "q": _tiled((groups, t.q, s.qk_size), self.narrow),
            "k": _tiled((n, t.kv, s.qk_size), self.narrow),
            "v": _tiled((n, t.kv, s.v_size), self.narrow),
            "out": _tiled((groups, buffers, t.q, chunk), self.out),
            "top": rows,
            "total": rows,
            "vectors": [
                plgpu.SMEM((n, self.width(self._operands[i].pair)), self._operands[i].stored)
                for i in self.vectors
            ],
            "acc": self.mma.accumulators(groups, t.q, s.v_size),
            "scores": self.mma.accumulators(groups, t.q, t.kv),
            "q_full": plgpu.Barrier(num_barriers=groups),
            "k_full": ring(num_arrivals=1 + len(self.vectors)),
            "v_full": ring(),
            "k_free": ring(num_arrivals=groups),
            "v_free": ring(num_arrivals=groups),
            "turn": plgpu.Barrier(num_barriers=groups),
        }
        plgpu.run_scoped(
            lambda scratch: self._body(refs, scratch), scratch, collective_axes="warpgroup"
        )

    def _body(self, refs, smem: dict):
        q_ref, k_ref, v_ref, *rest, out_ref, top_ref, total_ref = refs
        steps, operands = (rest[:3], rest[3:]) if self.sparse else (None, rest)
        walk = self._walk(steps)
        warpgroup, count = lax.axis_index("warpgroup"), self.tiles.warpgroups

        @plgpu.when(warpgroup < count)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[count], action="increase")
            self._compute(walk, warpgroup, q_ref, operands, (out_ref, top_ref, total_ref), smem)

        @plgpu.when(warpgroup == count)
        def _():
            plgpu.set_max_registers(_LOAD_REGISTERS[count], action="decrease")
            self._load(walk, k_ref, v_ref, operands, smem)

    def _walk(self, steps) -> _Walk:
        """Where this block is, and which key tiles it visits."""
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        b = lax.rem(batch, _int(self.sizes.mods_batch))
        if steps is None:
            count = _int(self.sizes.cols(self.tiles))
            return _Walk(batch, b, head, row, _int(0), count, lambda i: i)
        order_ref, count_ref, cols_ref = steps
        unit = _lead(order_ref, b, head)
        row = order_ref[*unit, row]
        return _Walk(
            batch, b, head, row, count_ref[*unit, row, 0], count_ref[*unit, row, 1],
            lambda i: cols_ref[*unit, row, i],
        )  # fmt: skip

    # -- the warpgroup that loads ------------------------------------------------------------------

    def _load(self, walk: _Walk, k_ref, v_ref, operands, smem: dict):
        t, s = self.tiles, self.sizes
        stages = _int(t.stages)
        kv_head = lax.div(walk.head, _int(s.heads // s.kv_heads))

        @plgpu.loop(0, walk.count)
        def _(i):
            slot = lax.rem(i, stages)
            col = walk.col(i)
            source = (walk.batch, plgpu.ds(col * t.kv, t.kv), kv_head)
            again = i >= stages
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["k_free"].at[slot]))
            plgpu.copy_gmem_to_smem(k_ref.at[source], smem["k"].at[slot], smem["k_full"].at[slot])
            for n, buffer in zip(self.vectors, smem["vectors"], strict=True):
                pair = self._operands[n].pair
                # A band starts at -(S - 1), rounded up to whole tiles (see `TileProgram.arrays`).
                start = col * t.kv if pair == COL else self._band_start(walk, col)
                b, h = _lead(operands[n], walk.b, walk.head)
                vector = operands[n].at[b, h, plgpu.ds(start, self.width(pair))]
                plgpu.copy_gmem_to_smem(vector, buffer.at[slot], smem["k_full"].at[slot])
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["v_free"].at[slot]))
            plgpu.copy_gmem_to_smem(v_ref.at[source], smem["v"].at[slot], smem["v_full"].at[slot])

        # Every phase that ends must be seen, also the last ones.
        @plgpu.loop(jnp.maximum(walk.count - stages, 0), walk.count)
        def _(i):
            plgpu.barrier_wait(smem["k_free"].at[lax.rem(i, stages)])
            plgpu.barrier_wait(smem["v_free"].at[lax.rem(i, stages)])

    def _band_start(self, walk: _Walk, col):
        last = self.sizes.cols(self.tiles) - 1
        return walk.row * self.tiles.rows + (last - col) * self.tiles.kv

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, walk: _Walk, warpgroup, q_ref, operands, results, smem: dict):
        t, s, mma = self.tiles, self.sizes, self.mma
        stages = _int(t.stages)
        q0 = walk.row * t.rows + warpgroup * t.q
        # A value that the compiler can't see through: it keeps the descriptors of the products
        # from being hoisted out of the loop, all of them into registers.
        hidden = lambda: lax.optimization_barrier(warpgroup)
        q_tile = smem["q"].at[warpgroup]
        source = q_ref.at[walk.batch, plgpu.ds(q0, t.q), walk.head]
        plgpu.copy_gmem_to_smem(source, q_tile, smem["q_full"].at[warpgroup])
        loaded = [
            self._held(ref, operand, walk, q0)
            for ref, operand in zip(operands, self._operands, strict=True)
        ]
        take, give = self._turns(warpgroup, smem)
        plgpu.barrier_wait(smem["q_full"].at[warpgroup])

        def softmax(i, k0, slot, s_acc, in_flight, top, total):
            """Weights of step `i`, the new maximum and sum, and what scales the old ones."""
            s_tile = mma.read(s_acc, in_flight, smem["k"].at[slot])
            values = [
                self._vector(smem, n, slot, warpgroup) if n in self.vectors else x
                for n, x in enumerate(loaded)
            ]
            plgpu.barrier_arrive(smem["k_free"].at[slot])
            place = _Place(walk.b, walk.head, q0, k0)
            s_tile, factor = self._scores(s_tile, place, i < walk.partial, values)
            new = jnp.maximum(top, s_tile.max(axis=1) * factor)
            # A row that has seen no key yet has no maximum; its weights are 0 relative to any.
            base = jnp.where(new == -jnp.inf, 0.0, new)
            keep = jnp.exp2(top - base)
            p = jnp.exp2(s_tile * factor - _over_rows(base, self.shape))
            total = total * keep + p.sum(axis=1)
            if self.programs.dropout is not None:
                p = p * self._run(self.programs.dropout, place, values)
            return p.astype(self.narrow), new, total, keep

        def first(s_acc):
            k0 = walk.col(_int(0)) * t.kv
            plgpu.barrier_wait(smem["k_full"].at[0])
            take()
            mma.qk(s_acc, q_tile, smem["k"].at[0])
            give()
            return softmax(_int(0), k0, _int(0), s_acc, 0, rows(-jnp.inf), rows(0.0))[:3]

        def step(acc, i, carry):
            p, top, total = carry
            slot, following = lax.rem(i - 1, stages), lax.rem(i, stages)

            def products(s_acc):
                k0 = walk.col(i) * t.kv  # read early: it comes from far away
                plgpu.barrier_wait(smem["k_full"].at[following])
                take()
                mma.qk(s_acc, smem["q"].at[hidden()], smem["k"].at[following])
                plgpu.barrier_wait(smem["v_full"].at[slot])
                mma.pv(acc, p, smem["v"].at[slot])
                give()
                return softmax(i, k0, following, s_acc, 1, top, total)

            p, top, total, keep = mma.scoped(products, smem["scores"], warpgroup, self.shape)
            mma.wait(smem["v"].at[slot])
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            acc[...] = acc[...] * _over_rows(keep, (t.q, s.v_size))
            return p, top, total

        def walk_tiles(acc):
            mma.clear(acc)
            carry = mma.scoped(first, smem["scores"], warpgroup, self.shape)
            p, top, total = lax.fori_loop(1, walk.count, functools.partial(step, acc), carry)
            slot = lax.rem(walk.count - 1, stages)
            plgpu.barrier_wait(smem["v_full"].at[slot])
            take()
            mma.pv(acc, p, smem["v"].at[slot])
            give()
            mma.wait(smem["v"].at[slot])
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return acc[...], top, total

        rows = lambda x: plgpu.layout_cast(jnp.full((t.q,), x, jnp.float32), _row_layout())
        acc, top, total = mma.scoped(walk_tiles, smem["acc"], warpgroup, (t.q, s.v_size))
        self._last_turn(warpgroup, smem)
        self._finish(walk, warpgroup, q0, acc, top, total, results, smem)

    def _turns(self, warpgroup, smem: dict) -> tuple[Callable, Callable]:
        """`take` waits for the tensor cores, `give` hands them to the next warpgroup."""
        if not self.tiles.in_turns:
            return (lambda: None), (lambda: None)
        turn = smem["turn"]
        last = self.tiles.warpgroups - 1
        plgpu.when(warpgroup == last)(lambda: plgpu.barrier_arrive(turn.at[0]))
        following = jnp.where(warpgroup == last, 0, warpgroup + 1)
        return (
            lambda: plgpu.barrier_wait(turn.at[warpgroup]),
            lambda: plgpu.barrier_arrive(turn.at[following]),
        )

    def _last_turn(self, warpgroup, smem: dict):
        """Takes the turn that the last one gave, which nobody needs."""
        if self.tiles.in_turns:
            plgpu.when(warpgroup == 0)(lambda: plgpu.barrier_wait(smem["turn"].at[0]))

    def _finish(self, walk, warpgroup, q0, acc, top, total, results, smem: dict):
        """Divides by the sums, and writes a warpgroup's rows."""
        out_ref, top_ref, total_ref = results
        t, size = self.tiles, self.sizes.v_size
        rows = plgpu.ds(q0, t.q)
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
        acc = acc * _over_rows(inverse, (t.q, size))
        for value, ref, buffer in (
            (top * (1 / _LOG2E), top_ref, smem["top"].at[warpgroup]),
            (total, total_ref, smem["total"].at[warpgroup]),
        ):
            buffer[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, ref.at[walk.batch, walk.head, rows])
        buffers = smem["out"]
        chunk = buffers.shape[-1]
        for n in range(size // chunk):
            buffer = buffers.at[warpgroup, n % buffers.shape[1]]
            if n >= buffers.shape[1]:
                plgpu.wait_smem_to_gmem(buffers.shape[1] - 1, wait_read_only=True)
            buffer[...] = acc[:, n * chunk : (n + 1) * chunk].astype(self.out)
            plgpu.commit_smem()
            cols = plgpu.ds(n * chunk, chunk)
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[walk.batch, rows, walk.head, cols])
        plgpu.wait_smem_to_gmem(0)

    # -- the user's code ---------------------------------------------------------------------------

    def _held(self, ref, operand, walk: _Walk, q0):
        """A scalar, or a vector over this warpgroup's rows; None for what comes with the keys."""
        b, h = _lead(ref, walk.b, walk.head)
        if operand.pair == SCALAR:
            return _as(ref[b, h], operand.dtype)
        if operand.pair == ROW:
            part = ref.at[b, h, plgpu.ds(q0, self.tiles.q)]
            return plgpu.load(part, layout=_row_layout(), optimized=False)
        return None

    def _vector(self, smem: dict, n: int, slot, warpgroup):
        """A column vector, or a tile made of a band, of operand `n`."""
        buffer = smem["vectors"][self.vectors.index(n)].at[slot]
        if self._operands[n].pair == COL:
            return self.mma.column(buffer)
        start = warpgroup * self.tiles.q + self.tiles.kv - 1
        return self.mma.band(buffer, self.shape, start, self._operands[n].stored)

    def _scores(self, s_tile, place: _Place, partial, values):
        """Modified scores, minus infinity where hidden, and what makes them exponents of 2."""
        scale, programs = self.programs.scale, self.programs
        if programs.score is None and scale > 0:
            factor = scale * _LOG2E
        else:
            s_tile, factor = s_tile * scale, _LOG2E
        if programs.score is not None:
            s_tile = self._run(programs.score, place, values, s_tile)
        if programs.mask is None and self.sizes.kv_len % self.tiles.kv == 0:
            return s_tile, factor

        def hide(s_tile):
            visible = None
            if self.sizes.kv_len % self.tiles.kv:
                visible = self._index(place.k0, 1, jnp.int32) < self.sizes.kv_len
            if programs.mask is not None:
                seen = self._run(programs.mask, place, values)
                visible = seen if visible is None else visible & seen
            return jnp.where(visible, s_tile, -jnp.inf)

        return lax.cond(partial, hide, lambda s_tile: s_tile, s_tile), factor

    def _index(self, start, dim: int, dtype):
        return self.mma.index(start, self.shape, dim, dtype)

    def _run(self, program: TileProgram, place: _Place, values, *score):
        """One program on one tile."""
        before = 0
        for other in self.programs.all[: self.programs.all.index(program)]:
            before += len(other.operands)
        operands = [
            self._spread(values[before + n], operand) for n, operand in enumerate(program.operands)
        ]
        indices = [
            self._true_index(start, dim, dtype) if dtype in program.indices[dim] else None
            for dtype in (jnp.int32, jnp.float32)
            for dim, start in enumerate((place.q0, place.k0))
        ]
        args = [*score, place.b, place.h, *indices, *operands]
        (out,) = evaluate(program.jaxpr, args, self._join)
        return jnp.full(self.shape, out, jnp.asarray(out).dtype) if jnp.ndim(out) == 0 else out

    def _true_index(self, start, dim: int, dtype):
        """The indices of a tile, those of the padding clipped to the last one."""
        index = self._index(start, dim, dtype)
        length = (self.sizes.q_len, self.sizes.kv_len)[dim]
        padded = length % (self.tiles.rows, self.tiles.kv)[dim]
        return jnp.minimum(index, jnp.asarray(length - 1, dtype)) if padded else index

    def _spread(self, x, operand):
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


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Where a block is and what it visits.

    Attributes:
      batch, b: its batch entry, and what the mods know it as.
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
class _Place:
    """Where a tile is: batch, head, first query, first key."""

    b: jax.Array
    h: jax.Array
    q0: jax.Array
    k0: jax.Array


def _int(x: int):
    return jnp.int32(x)


def _row_layout():
    return plgpu.Layout.WGMMA.reduce(1)


def _over_rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def _as(x, dtype):
    """A stored 32-bit value in the dtype of the program."""
    return x != 0 if dtype == jnp.bool_ else x.astype(dtype)


def _lead(ref, b, head):
    """The batch and head to read of an array that may have one of each."""
    return (b if ref.shape[0] > 1 else 0), (head if ref.shape[1] > 1 else 0)


def _tiled(shape: tuple[int, ...], dtype):
    """Shared memory in the layout that products and bulk copies want: rows of up to 128 bytes."""
    swizzle = swizzle_of(shape[-1], dtype)
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
    )


def swizzle_of(size: int, dtype) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    width = size * jnp.dtype(dtype).itemsize
    return next(n for n in (128, 64, 32) if width % n == 0)
