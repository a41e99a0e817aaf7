"""The decoding kernel for Hopper (sm_90a): few queries, many keys, as fast as they are read.

Source: flash-decoding (Dao, Haziza, Massa and Sizov, 2023), with the user's code inside, as in
`_forward`. One block of the grid owns up to 64 rows, the queries of all heads that share their keys
(`_packed`), and one *split* of the live tiles of keys. One warpgroup loads. The others take turns:
each has every other tile to itself, and a maximum, a sum and an output of its own, so that one
computes while the other waits. What each leaves is one *part* of the row; `_merge` adds them up,
always in the same order.

    each warpgroup, of each of its tiles j:   S = Q Kj';  P = softmax(S);  O = O rescaled + P Vj

Keys lie in an array `[B,S,K,D]`, or in pages: pools `[P,N,K,D]` and a table `[B,M]` of which page
has which positions. A page number that is none is a hole; nothing of it is seen.

What a mask hides has no influence, infinities and NaN included: values of a partial tile are
cleaned in shared memory, and who sees one that is not finite is found by a product of its own.

Not optimal: of the 64 rows of a product most are empty if few heads share their keys, which costs
time only where a mod is dear; a block has no next one to load for while it writes its parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import (
    LOG2E,
    Call,
    Kept,
    Place,
    int32,
    launch,
    lead,
    over_rows,
    row_layout,
    swizzle_of,
    tiled,
)
from xform.lowering.mosaic_gpu._split_keys import CHUNK, ROWS, Plan

# Registers a thread of those that compute, and of those that load, where there are three
# warpgroups; with two there are enough.
_REGISTERS = {2: (232, 40)}


def decode(call: Call, plan: Plan, q, k, v, ends, table, steps, operands, *, interpret=None):
    """Runs the kernel.

    Args:
      call: what is static; its heads are key/value heads, its queries rows.
      plan: how the work is cut.
      q: `[B,K,rows,D]`, a multiple of 8 rows.
      k, v: as above.
      ends: how many keys there are, int32 `[B]`, or None if all; beyond S, all is NaN.
      table: int32 `[B,M]`, or None.
      steps: `(count [U,W,R], tiles [U,W,R,C])`, int32: the live tiles of keys of a row of tiles,
        each twice its number, plus 1 if it is partial. Empty where all are full up to the end.
      operands: those of `call.operands`.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      Of each part the output `[B,K,parts,rows,V]`, not divided by the sum, and the maximum and the
      sum of each row, `[B,K,parts,64 n]`, all float32.
    """
    s = call.sizes
    parts = plan.splits * plan.warpgroups
    blocks = s.rows(call.tiles)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    statistic = struct((s.batch, s.heads, parts, blocks * ROWS))
    acc = struct((s.batch, s.heads, parts, q.shape[2], s.v_size))
    # All heads of some keys at a time: their keys lie side by side in memory.
    names = {"batch": s.batch, "split": plan.splits, "head": s.heads, "row": blocks}
    grid = {"grid": tuple(names.values()), "grid_names": tuple(names)}
    given = [x for x in (ends, table) if x is not None]
    page = None if table is None else k.shape[1]
    body = _Decode(call, plan, ends is not None, page, len(k)).entry
    name = "flex_attention_decode"
    run = launch(body, name, plan.warpgroups, (acc, statistic, statistic), grid, interpret)
    return run(q, k, v, *given, *steps, *operands)


@dataclasses.dataclass(frozen=True)
class _Share:
    """What a block does.

    Attributes:
      batch, b: its batch entry, and which of the operands' that is.
      head, row: its key/value head, and its row of tiles.
      split: which of the splits it is.
      start, count: the first of its tiles, and how many there are.
      end: keys from it on do not exist.
      lost: NaN if there should be more keys than there is room for, else 0.
    """

    batch: jax.Array
    b: jax.Array
    head: jax.Array
    row: jax.Array
    split: jax.Array
    start: jax.Array
    count: jax.Array
    end: jax.Array
    lost: jax.Array


@dataclasses.dataclass(frozen=True)
class _Decode:
    """The body of the kernel.

    Attributes:
      call, plan: as of `decode`.
      has_end: whether texts end before the cache does.
      page: keys of a page, None without pages.
      pages: how many pages there are.
    """

    call: Call
    plan: Plan
    has_end: bool
    page: int | None
    pages: int

    @property
    def copies(self) -> int:
        """Bulk copies that bring the keys of one tile."""
        return 1 if self.page is None else max(1, self.call.tiles.kv // self.page)

    @property
    def _width(self) -> int:
        """Columns of values that are cleaned at a time, those of one row of shared memory."""
        return swizzle_of(self.call.sizes.v_size, self.call.narrow) // self.call.narrow.itemsize

    def entry(self, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        call, s, t = self.call, self.call.sizes, self.call.tiles
        ring = functools.partial(plgpu.Barrier, num_barriers=t.stages)
        rows = plgpu.SMEM((self.plan.warpgroups, ROWS), jnp.float32)
        scratch = {
            "q": tiled((ROWS, s.qk_size), call.narrow),
            "k": tiled((t.stages, t.kv, s.qk_size), call.narrow),
            "v": tiled((t.stages, t.kv, s.v_size), call.narrow),
            "out": tiled((self.plan.warpgroups, ROWS, CHUNK), jnp.float32),
            "statistics": [rows] * 2,
            "vectors": call.vector_buffers(t.stages),
            "acc": call.mma.accumulators(self.plan.warpgroups, ROWS, s.v_size),
            "bad": call.mma.accumulators(self.plan.warpgroups, ROWS, self._width),
            "scores": call.mma.accumulators(self.plan.warpgroups, ROWS, t.kv),
            "q_full": plgpu.Barrier(),
            "k_full": ring(num_arrivals=self.copies + call.copies),
            "v_full": ring(num_arrivals=self.copies),
            "k_free": ring(),
            "v_free": ring(),
        }
        plgpu.run_scoped(
            lambda scratch: self._body(refs, scratch), scratch, collective_axes="warpgroup"
        )

    def _body(self, refs, smem: dict):
        q_ref, k_ref, v_ref, *rest = refs
        rest, results = list(rest[:-3]), rest[-3:]
        ends = rest.pop(0) if self.has_end else None
        table = rest.pop(0) if self.page is not None else None
        steps = [rest.pop(0) for _ in range(2 if self.call.sparse else 0)]
        share = self._share(ends, steps)
        warpgroup = lax.axis_index("warpgroup")

        compute, load = _REGISTERS.get(self.plan.warpgroups, (None, None))

        @plgpu.when(warpgroup < self.plan.warpgroups)
        def _():
            if compute:
                plgpu.set_max_registers(compute, action="increase")
            self._compute(share, warpgroup, table, steps, rest, results, smem)

        @plgpu.when(warpgroup == self.plan.warpgroups)
        def _():
            if load:
                plgpu.set_max_registers(load, action="decrease")
            self._load(share, q_ref, k_ref, v_ref, table, steps, rest, smem)

    def _share(self, ends, steps) -> _Share:
        """The part of the live tiles that is this block's: as many as others have, or one more."""
        s, t = self.call.sizes, self.call.tiles
        batch, split, head, row = map(lax.axis_index, ("batch", "split", "head", "row"))
        b = lax.rem(batch, int32(s.mods_batch))
        end, lost = int32(s.kv_len), jnp.float32(0)
        if ends is not None:
            lost = jnp.where(ends[b] > end, jnp.float32(jnp.nan), lost)
            end = jnp.clip(ends[b], 0, end)
        if self.call.sparse:
            count_ref, _ = steps
            count = count_ref[*lead(count_ref, b, head), row]
        else:
            count = lax.div(end + (t.kv - 1), int32(t.kv))
        cut = lambda n: lax.div(count * n, int32(self.plan.splits))
        start = cut(split)
        return _Share(batch, b, head, row, split, start, cut(split + 1) - start, end, lost)

    def _tile(self, share: _Share, steps, i) -> tuple:
        """The first key of the block's tile `i`, and whether a mask may hide some of it."""
        t = self.call.tiles
        if not self.call.sparse:
            k0 = (share.start + i) * t.kv
            return k0, k0 + t.kv > share.end
        _, tiles_ref = steps
        entry = tiles_ref[*lead(tiles_ref, share.b, share.head), share.row, share.start + i]
        k0 = lax.shift_right_logical(entry, int32(1)) * t.kv
        return k0, (lax.bitwise_and(entry, int32(1)) == 1) | (k0 + t.kv > share.end)

    def _pages(self, share: _Share, table, k0) -> list:
        """The numbers of the pages that a tile's keys lie in, nothing without pages."""
        if self.page is None:
            return []
        first, last = lax.div(k0, int32(self.page)), table.shape[1] - 1
        # A tile at the end may reach beyond the table; nothing is seen there.
        return [table[share.b, jnp.minimum(first + n, last)] for n in range(self.copies)]

    # -- the warpgroup that loads ------------------------------------------------------------------

    def _load(self, share: _Share, q_ref, k_ref, v_ref, table, steps, operands, smem: dict):
        source = q_ref.at[share.batch, share.head, plgpu.ds(share.row * ROWS, ROWS)]
        plgpu.copy_gmem_to_smem(source, smem["q"], smem["q_full"])

        def numbers(i):
            """Where tile `i` lies; read one tile ahead, since it comes from far away."""
            k0, _ = self._tile(share, steps, jnp.minimum(i, share.count - 1))
            return k0, *self._pages(share, table, k0)

        def step(i, place):
            k0, *pages = place
            following = numbers(i + 1)
            slot, again = self._slot(i), i >= self.call.tiles.stages
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["k_free"].at[slot]))
            self._copy(share, k_ref, k0, pages, smem["k"].at[slot], smem["k_full"].at[slot])
            place = Place(share.row * ROWS, k0)
            self.call.copy_vectors(
                share.b, share.head, place, operands, smem["vectors"], slot,
                smem["k_full"].at[slot],
            )  # fmt: skip
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["v_free"].at[slot]))
            self._copy(share, v_ref, k0, pages, smem["v"].at[slot], smem["v_full"].at[slot])
            return following

        @plgpu.when(share.count > 0)
        def _():
            lax.fori_loop(0, share.count, step, numbers(int32(0)))

        # Every phase that ends must be seen, also the last ones.
        @plgpu.loop(jnp.maximum(share.count - self.call.tiles.stages, 0), share.count)
        def _(i):
            plgpu.barrier_wait(smem["k_free"].at[self._slot(i)])
            plgpu.barrier_wait(smem["v_free"].at[self._slot(i)])

    def _slot(self, i):
        """Where tile `i` lies in shared memory: each warpgroup has a ring of its own."""
        warpgroups, stages = int32(self.plan.warpgroups), int32(self.plan.stages)
        return lax.rem(i, warpgroups) * stages + lax.rem(lax.div(i, warpgroups), stages)

    def _copy(self, share: _Share, ref, k0, pages, buffer, barrier):
        """Starts the copies of one tile of keys or values."""
        kv = self.call.tiles.kv
        if self.page is None:
            source = ref.at[share.batch, plgpu.ds(k0, kv), share.head]
            plgpu.copy_gmem_to_smem(source, buffer, barrier)
            return
        size = min(kv, self.page)
        within = lax.rem(k0, int32(self.page)) if self.page > kv else 0
        for n, number in enumerate(pages):
            number = jnp.clip(number, 0, self.pages - 1)
            source = ref.at[number, plgpu.ds(within, size), share.head]
            target = buffer if size == kv else buffer.at[plgpu.ds(n * size, size)]
            plgpu.copy_gmem_to_smem(source, target, barrier)

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, share: _Share, warpgroup, table, steps, operands, results, smem: dict):
        call, s, mma = self.call, self.call.sizes, self.call.mma
        q0 = share.row * ROWS
        held = call.held(operands, share.b, share.head, q0)
        own = lax.div(
            share.count - warpgroup + (self.plan.warpgroups - 1), int32(self.plan.warpgroups)
        )
        out_shape = (ROWS, s.v_size)
        plgpu.barrier_wait(smem["q_full"])

        def step(acc, j, carry):
            top, total = carry
            i = warpgroup + j * self.plan.warpgroups
            slot = self._slot(i)
            k0, partial = self._tile(share, steps, i)
            kept = self._kept(share, self._pages(share, table, k0))
            partial = partial | self._has_hole(kept)
            place = Place(q0, k0, kept)
            k_tile, v_tile = smem["k"].at[slot], smem["v"].at[slot]
            plgpu.barrier_wait(smem["k_full"].at[slot])

            def product(s_acc):
                mma.qk(s_acc, smem["q"], k_tile)
                return mma.read(s_acc, 0, k_tile)

            s_tile = mma.scoped(product, smem["scores"], warpgroup, call.shape)
            values = call.values(held, smem["vectors"], slot, 0)
            call.free_keys(smem["k_free"].at[slot])
            s_tile, factor = call.scores(s_tile, place, partial, values)
            new = jnp.maximum(top, s_tile.max(axis=1))
            # The difference first: of large scores, products would lose what it has.
            base = jnp.where(new == -jnp.inf, 0.0, new)
            keep = jnp.exp2((top - base) * factor)
            p = jnp.exp2((s_tile - over_rows(base, call.shape)) * factor)
            total = total * keep + p.sum(axis=1)
            plgpu.barrier_wait(smem["v_full"].at[slot])
            rescaled = acc[...] * over_rows(keep, out_shape)

            def clean(rescaled):
                seen = call.visible(place, values)
                return self._clean(v_tile, seen, rescaled, smem["bad"], warpgroup)

            acc[...] = lax.cond(partial, clean, lambda rescaled: rescaled, rescaled)
            mma.pv(acc, p.astype(call.narrow), v_tile)
            mma.wait(v_tile)
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return new, total

        def walk_tiles(acc):
            rows = lambda x: plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), row_layout())
            carry = (rows(-jnp.inf), rows(0.0))
            top, total = lax.fori_loop(0, own, functools.partial(step, acc), carry)
            return acc[...], top, total

        acc, top, total = mma.scoped(walk_tiles, smem["acc"], warpgroup, out_shape)
        self._finish(share, warpgroup, acc, top, total, results, smem)

    def _kept(self, share: _Share, pages: list) -> Kept:
        """Which keys of a tile there are."""
        if self.page is None:
            return Kept(share.end)
        bit = lambda i, n: jnp.where((n >= 0) & (n < self.pages), int32(1 << i), int32(0))
        there = [bit(i, n) for i, n in enumerate(pages)]
        size = int(math.log2(min(self.page, self.call.tiles.kv)))
        return Kept(share.end, functools.reduce(lax.bitwise_or, there), size)

    def _has_hole(self, kept: Kept):
        return False if kept.pages is None else kept.pages != (1 << self.copies) - 1

    def _clean(self, v_tile, seen, acc, buffers, warpgroup):
        """Makes the values of a tile finite, and NaN what sees one that was not.

        Some columns at a time: registers hold no more of them beside the output.
        """
        call, mma, width = self.call, self.call.mma, self._width
        weights = jnp.where(seen, 1.0, 0.0).astype(call.narrow)
        parts = []
        for n in range(0, call.sizes.v_size, width):
            pieces = [
                (m, v_tile.at[plgpu.ds(m, ROWS), plgpu.ds(n, width)])
                for m in range(0, call.tiles.kv, ROWS)
            ]

            def product(bad, pieces=pieces):
                for m, piece in pieces:
                    x = mma.tile(piece)
                    fine = jnp.abs(x.astype(jnp.float32)) < jnp.inf
                    piece[...] = jnp.where(fine, 0.0, 1.0).astype(call.narrow)
                    plgpu.commit_smem()
                    mma.pv(bad, weights[:, m : m + ROWS], piece)
                    mma.wait(piece)
                    plgpu.commit_smem()  # all of the warpgroup have read it
                    piece[...] = jnp.where(fine, x, jnp.zeros_like(x))
                return bad[...]

            bad = mma.scoped(product, buffers, warpgroup, (ROWS, width))
            parts.append(jnp.where(bad > 0, jnp.nan, acc[:, n : n + width]))
        plgpu.commit_smem()
        return jnp.concatenate(parts, 1)

    def _finish(self, share: _Share, warpgroup, acc, top, total, results, smem: dict):
        """Writes a warpgroup's part."""
        acc_ref, *statistics = results
        part = share.split * self.plan.warpgroups + warpgroup
        at = (share.batch, share.head, part, plgpu.ds(share.row * ROWS, ROWS))
        # What sees an infinite value is NaN, however the weights fall.
        acc = jnp.where(jnp.abs(acc) < jnp.inf, acc, jnp.nan)
        values = (top * (self.call.factor / LOG2E), total + share.lost)
        for value, ref, buffer in zip(values, statistics, smem["statistics"], strict=True):
            buffer.at[warpgroup][...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[warpgroup], ref.at[at])
        buffer = smem["out"].at[warpgroup]
        for n in range(0, self.call.sizes.v_size, CHUNK):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = acc[:, n : n + CHUNK]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, acc_ref.at[*at, plgpu.ds(n, CHUNK)])
        plgpu.wait_smem_to_gmem(0)
