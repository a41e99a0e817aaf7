"""The gradient of what pairs of a query and a key read, summed over the batch: a bias of pairs.

    for each entry of the batch, and head:   S' = K Q'   dP' = V dO'
                                             P' = exp2(S' - base) norm
                                             sum += P' (dP' + delta) slope

The kernels that make dQ, dK and dV meet a pair once for each entry, in blocks that differ, and
would have to write a derivative of the size of all pairs for each. Here a block owns a tile of
pairs and walks along the batch, so that the sum stays in its registers: it makes two products
again, and writes no more than the array has. What a tile reads of such an array is loaded once.

Blocks come too few where T and S are short, so several have a part of the batch each, and XLA adds
their sums. All orders are fixed: a second run gives the same bits.

Nothing is summed over queries or keys, so that what is not finite stays at its pair.

Not optimal: with heads of 64, loads of 48 KiB for 2 MFLOP are near what the cache can give.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import (
    MULTIPROCESSORS,
    Call,
    Place,
    int32,
    launch,
    lead,
    tiled,
)
from xform.lowering.mosaic_gpu._derivative import modified, seen, weights

# Blocks that share the batch of a tile, at most.
_MOST_PARTS = 8


def backward_pairs(
    body: Pairs, q, k, v, d_out, statistics, kinds, operands, *, interpret=None
) -> list[jax.Array]:
    """Runs the kernel.

    Args:
      body: of the kernel.
      q, k, v, d_out, statistics, operands, interpret: as of `backward`.
      kinds: `[U,W,R,C]`, int32: 0 for a tile without a visible pair, 1 where the mask is needed.
        Empty where all tiles are full.

    Returns:
      `sums` arrays `[B or 1, H or 1, S, T]`, float32, the lengths rounded up to whole tiles.
    """
    call = body.call
    s, tiles = call.sizes, call.tiles
    rows, cols = s.rows(tiles), s.cols(tiles)
    units = math.prod(body.units)
    out = jax.ShapeDtypeStruct(
        (body.parts * units, cols * tiles.cols, rows * tiles.rows), jnp.float32
    )
    grid = {"grid": (body.parts * units, rows, cols), "grid_names": ("unit", "row", "col")}
    name = "flex_attention_backward_pairs"
    run = launch(body.entry, name, tiles.warpgroups, (out,) * body.sums, grid, interpret)
    sums = run(q, k, v, d_out, *statistics, *kinds, *operands)
    split = lambda x: x.reshape(body.parts, *body.units, *x.shape[1:])
    return [split(x).sum(0) for x in sums]


@dataclasses.dataclass(frozen=True)
class Block:
    """What a block owns, and what it walks along.

    Attributes:
      unit: which of the results its sums belong to.
      b, head: those of its first entry.
      row, col: its tile of pairs.
      first, count: of the entries that the unit sums over.
    """

    unit: jax.Array
    b: jax.Array
    head: jax.Array
    row: jax.Array
    col: jax.Array
    first: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The body of the kernel.

    Attributes:
      call: what is static; its score program returns the score, its derivative by the score, and
        those by `sums` numbers that belong to a pair.
      heads: those of "bh" that the numbers differ along.
      sums: how many derivatives are summed.
      registers: of a thread of each warpgroup.
      lists: how many arrays say which tiles are live, where not all are.
    """

    call: Call
    heads: str
    sums: int
    registers: ClassVar[tuple[int, ...]] = (240, 240, 24)
    lists: ClassVar[int] = 1

    @property
    def owned(self) -> int:
        """How many blocks there are for each unit: one for each tile."""
        return self.call.sizes.rows(self.call.tiles) * self.call.sizes.cols(self.call.tiles)

    @property
    def units(self) -> tuple[int, int]:
        """How many batch entries and heads have sums of their own."""
        s = self.call.sizes
        return (s.mods_batch if "b" in self.heads else 1), (s.heads if "h" in self.heads else 1)

    @property
    def steps(self) -> int:
        """How many entries each unit sums over."""
        return self.call.sizes.batch * self.call.sizes.heads // math.prod(self.units)

    @functools.cached_property
    def parts(self) -> int:
        """How many blocks share them: the fewest that leave next to no multiprocessor idle."""
        blocks = math.prod(self.units) * self.owned
        most = min(_MOST_PARTS, self.steps)
        time = lambda n: -(-blocks * n // MULTIPROCESSORS) * -(-self.steps // n)
        best = min(map(time, range(1, most + 1)))
        return next(n for n in range(1, most + 1) if time(n) <= 1.03 * best)

    def entry(self, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        plgpu.run_scoped(
            lambda scratch: self._body(refs, scratch), self.scratch(), collective_axes="warpgroup"
        )

    def scratch(self) -> dict:
        """Shared memory."""
        call, s, t, narrow = self.call, self.call.sizes, self.call.tiles, self.call.narrow
        n, groups = t.stages, t.warpgroups
        accumulators = functools.partial(call.mma.accumulators, groups, t.kv, t.q)
        of_queries = plgpu.SMEM((n, t.q), jnp.float32)
        return {
            "k": tiled((n, groups, t.kv, s.qk_size), narrow),
            "v": tiled((n, groups, t.kv, s.v_size), narrow),
            "q": tiled((n, t.q, s.qk_size), narrow),
            "do": tiled((n, t.q, s.v_size), narrow),
            "base": of_queries,
            "norm": of_queries,
            "delta": of_queries,
            "vectors": call.vector_buffers(n),
            "full": plgpu.Barrier(num_barriers=n, num_arrivals=5 + 2 * groups + call.copies),
            "free": plgpu.Barrier(num_barriers=n, num_arrivals=groups),
            "accumulators": {"s": accumulators(), "dp": accumulators()},
        }

    def _body(self, refs, smem: dict):
        n, m = (self.lists if self.call.sparse else 0), len(self.call.operands)
        arrays, refs = refs[:7], refs[7:]
        lists, operands, results = refs[:n], refs[n : n + m], refs[n + m :]
        block = self._live(self._block(), lists)
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.when(warpgroup < self.call.tiles.warpgroups)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            self._compute(block, warpgroup, lists, operands, results, smem)

        @plgpu.when(warpgroup == self.call.tiles.warpgroups)
        def _():
            plgpu.set_max_registers(self.registers[-1], action="decrease")
            self._load_all(block, lists, arrays, operands, smem)

    # -- where -------------------------------------------------------------------------------------

    def _block(self) -> Block:
        unit, row, col = self._place()
        steps = -(-self.steps // self.parts)
        first = lax.div(unit, int32(math.prod(self.units))) * steps
        count = jnp.clip(self.steps - first, 0, steps)
        start = Block(unit, int32(0), int32(0), row, col, first, count)
        _, b, head = self._at(start, int32(0))
        return dataclasses.replace(start, b=b, head=head)

    def _place(self) -> tuple:
        """Of this block."""
        unit, row, col = (lax.axis_index(name) for name in ("unit", "row", "col"))
        return unit, row, col

    def _live(self, block: Block, lists) -> Block:
        """Without entries, if none has a visible pair."""
        if not lists or not self._mask_stays(lists[0]):
            return block
        empty = self._kind(lists, block.b, block.head, block.row, block.col) == 0
        return dataclasses.replace(block, count=jnp.where(empty, 0, block.count))

    def _at(self, block: Block, i) -> tuple:
        """Of the `i`-th entry of a block: its batch entry, which of the operands', and its head."""
        s, (batches, heads) = self.call.sizes, self.units
        unit = lax.rem(block.unit, int32(batches * heads))
        n = block.first + i
        inner = int32(s.heads // heads)
        head = lax.rem(unit, int32(heads)) if heads > 1 else lax.rem(n, inner)
        batch = lax.div(n, inner) * batches + lax.div(unit, int32(heads))
        return batch, lax.rem(batch, int32(s.mods_batch)), head

    def _mask_stays(self, ref) -> bool:
        """Whether a block's tile is masked the same way in all its entries."""
        b, h = ref.shape[:2]
        return (b == 1 or "b" in self.heads) and (h == 1 or "h" in self.heads)

    def _kind(self, kinds, b, head, row, col):
        (ref,) = kinds
        return ref[*lead(ref, b, head), row, col]

    # -- the warpgroup that loads ------------------------------------------------------------------

    def _load_all(self, block: Block, lists, arrays, operands, smem: dict):
        del lists
        stages = int32(self.call.tiles.stages)

        @plgpu.loop(0, block.count)
        def _(i):
            slot = lax.rem(i, stages)
            plgpu.when(i >= stages)(lambda: plgpu.barrier_wait(smem["free"].at[slot]))
            self._load(self._at(block, i), block.row, block.col, slot, arrays, operands, smem)

        self._await_last(block.count, smem)

    def _await_last(self, count, smem: dict):
        """Every phase that ends must be seen, also the last ones."""
        stages = int32(self.call.tiles.stages)

        @plgpu.loop(jnp.maximum(count - stages, 0), count)
        def _(i):
            plgpu.barrier_wait(smem["free"].at[lax.rem(i, stages)])

    def _load(self, entry: tuple, row, col, slot, arrays, operands, smem: dict):
        """Fills a slot with the queries and keys of a tile of an entry, see `_at`."""
        call, t, s = self.call, self.call.tiles, self.call.sizes
        q_ref, k_ref, v_ref, do_ref, *row_refs = arrays
        batch, b, head = entry
        full, copy = smem["full"].at[slot], plgpu.copy_gmem_to_smem
        q0, k0 = row * t.rows, col * t.cols
        rows = plgpu.ds(q0, t.q)
        for name, ref in (("q", q_ref), ("do", do_ref)):
            copy(ref.at[batch, rows, head], smem[name].at[slot], full)
        kv_head = lax.div(head, int32(s.heads // s.kv_heads))
        for part in range(t.warpgroups):
            keys = batch, plgpu.ds(k0 + part * t.kv, t.kv), kv_head
            for name, ref in (("k", k_ref), ("v", v_ref)):
                copy(ref.at[*keys], smem[name].at[slot, part], full)
        for name, ref in zip(("base", "norm", "delta"), row_refs, strict=True):
            copy(ref.at[batch, head, rows], smem[name].at[slot], full)
        call.copy_vectors(b, head, Place(q0, k0), operands, smem["vectors"], slot, full)

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, block: Block, warpgroup, lists, operands, results, smem: dict):
        call, t = self.call, self.call.tiles
        offset = warpgroup * t.kv
        place = Place(block.row * t.rows, block.col * t.cols + offset)
        held = call.held(operands, block.b, block.head, place.k0)
        held = call.at_rest(operands, held, block.b, block.head, place)
        held = call.found(held, self.heads)

        def step(i, sums):
            slot = lax.rem(i, int32(t.stages))
            _, b, head = self._at(block, i)
            partial = self._kind(lists, b, head, block.row, block.col) != 2 if lists else None
            own = self._own(operands, held, b, head, place.k0)
            new = self._derivatives(slot, partial, place, (own, offset), warpgroup, smem)
            call.mma.hand_back(smem["free"].at[slot])
            return tuple(x + y for x, y in zip(sums, new, strict=True))

        sums = lax.fori_loop(0, block.count, step, self._zeros())
        for tile, ref in zip(sums, results, strict=True):
            ref[block.unit, plgpu.ds(place.k0, t.kv), plgpu.ds(place.q0, t.q)] = tile

    def _zeros(self) -> tuple:
        zero = jnp.zeros(self.call.shape, jnp.float32)
        return tuple(plgpu.layout_cast(zero, plgpu.Layout.WGMMA) for _ in range(self.sums))

    def _own(self, operands, held: list, b, head, k0) -> list:
        """The operands of an entry: those of the first, but for what differs."""
        if all(operand.stays(self.heads) for operand in self.call.operands):
            return held
        new = self.call.held(operands, b, head, k0)
        pairs = zip(self.call.operands, held, new, strict=True)
        return [first if x.stays(self.heads) else own for x, first, own in pairs]

    def _derivatives(self, slot, partial, place: Place, own, warpgroup, smem: dict) -> list:
        """The cotangents of what the pairs of a tile read, of one entry."""
        call, mma = self.call, self.call.mma
        buffers = smem["accumulators"]
        # What the compiler can't see through: see `Backward._weights`.
        w = lax.optimization_barrier(warpgroup)
        q_tile, do_tile = smem["q"].at[slot], smem["do"].at[slot]
        k_tile, v_tile = smem["k"].at[slot, w], smem["v"].at[slot, w]
        per_query = lambda name: lax.broadcast_in_dim(
            mma.column(smem[name].at[slot]), call.shape, [1]
        )

        def scores(s_acc):
            def cotangents(dp_acc):
                plgpu.barrier_wait(smem["full"].at[slot])
                mma.qk(s_acc, k_tile, q_tile)
                mma.qk(dp_acc, v_tile, do_tile)
                s_tile = mma.read(s_acc, 1, q_tile)
                values = call.values(own[0], smem["vectors"], slot, own[1])
                t_tile, _, *slopes = modified(call, s_tile, place, values)
                p, slopes = weights(call, t_tile, slopes, partial, place, values, per_query)
                kept = None
                if call.programs.dropout is not None:
                    kept = call.run(call.programs.dropout, place, values)
                dp = mma.read(dp_acc, 0, do_tile)
                dp = dp if kept is None else dp * kept
                ds = seen(call, partial, p, p * (dp + per_query("delta")))
                return [ds * x for x in slopes]

            return mma.scoped(cotangents, buffers["dp"], warpgroup, call.shape)

        return mma.scoped(scores, buffers["s"], warpgroup, call.shape)
