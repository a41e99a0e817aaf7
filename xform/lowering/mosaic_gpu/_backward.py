"""The backward kernel for Hopper (sm_90a): one pass, with the derivative of the user's code inside.

Five products a tile instead of the seven of two passes: a block of the grid owns `warpgroups * kv`
keys of one key/value head, walks along the queries that see them, keeps dK and dV in registers, and
adds its share of dQ to memory by the copy engine (as FlashAttention-3 does, arXiv:2407.08608, and
cuDNN). Tiles are transposed, keys first: P' and dS' then come out of the exponentials in the layout
of a product's left operand, and dV and dK need no way through shared memory.

    for each tile of queries:  S' = K Q'    dP' = V dO'
                               P' = exp2(S' - base) norm   dS' = P' (dP' + delta) slope
                               dV += P' dO   dK += dS' Q   dQ += dS K

dQ sums over all keys of the block: the warpgroups exchange dS' through shared memory, and each
makes one half of the columns. The warpgroup that loads also sends dQ away, so that those that
compute never wait for memory.

Two orders of addition. Free: whoever comes first. In turns: the blocks of one head add to a tile of
queries in the order in which they were launched, so that a second run gives the same bits. A block
waits only for blocks of a lower index in the grid, which GPUs start first (CUDA documents no order,
and none is known to differ), hence somebody always can go on. They rarely wait: the heads come side
by side, so that few blocks of one run at a time, and all walk from the last query back, where a
causal mask lets them begin together, each a tile behind the one before. In the free order each
walks on from its first tile. In either order the longest walks come first, and the last blocks end
at about the same time.

Shapes: q, dO `[B,T,H,*]`, k, v `[B,S,K,*]`. D is a multiple of 32, V of 16, and `D + V` at most
256: one warpgroup holds dK and dV in registers (see `_backward_wide`; and `_backward_narrow`, where
they leave registers for more warpgroups).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import (
    Call,
    Place,
    Walk,
    int32,
    launch,
    lead,
    row_layout,
    swizzle_of,
    tiled,
)
from xform.lowering.mosaic_gpu._derivative import modified, seen, weights
from xform.lowering.mosaic_gpu._kernel import in_place, zeros


def backward(
    body: Backward, q, k, v, d_out, statistics, steps, operands, *,
    interpret=None,
):  # fmt: skip
    """Runs the kernel.

    Args:
      body: of the kernel.
      q, k, v: as above, bfloat16 or float16.
      d_out: the cotangent of `sum_j p_ij v_j`, `[B,T,H,V]`, of the same dtype.
      statistics: three of each row, `[B,H,T]`, T rounded up to whole tiles. `base`, what exponents
        of 2 are relative to; `norm`, the inverse of the sum of the exponentials, 0 for a row that
        there is not; `delta`, the cotangent of `sum_j p_ij`.
      steps: `(order [U,W,C], count [U,W,C,2], entries [U,W,C,N], turns [U,W,C,N])`, int32: see
        `forward`, for the tiles of queries, of all heads of a group, that each block of keys walks
        along; and when it is a block's turn to add to each. Empty where all tiles are full.
      operands: those of `call.operands`.
      interpret: parameters of the interpreter.

    Returns:
      dQ without the scale, `[B,T,H,D]`, float32; dK, dV; `sums` arrays `[B,K,S]`, float32, S
      rounded up to whole blocks.
    """
    call, sums = body.call, body.sums
    s, tiles = call.sizes, call.tiles
    blocks = s.cols(tiles)
    column = jax.ShapeDtypeStruct((s.batch, s.kv_heads, blocks * tiles.cols), jnp.float32)
    shares = call.mma.shares(blocks)
    parts = (s.batch, s.heads, s.rows(tiles), s.qk_size // body.columns)
    parcel = call.mma.parcel(tiles.q, body.columns)
    dq = zeros((*shares, *parts, *parcel), jnp.float32, like=statistics[-1])
    tickets = jnp.zeros(parts[:3], jnp.int32)
    together = body.in_turns or call.cached(s.heads, s.q_len)
    grid = call.grid(s.kv_heads, blocks, together=together)
    out = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)), *[column] * sums)
    run = launch(body.entry, "flex_attention_backward", body.computing, out, grid, interpret)
    arrays = (q, k, v, d_out, *statistics, *steps, *operands)
    (dk, dv, *columns), (dq, _) = in_place(functools.partial(run, *arrays), dq, tickets)
    total = dq.sum(0) if shares else dq
    total = call.mma.unpacked(total, tiles.q, body.columns)  # [B,H,R,n,q,D/n]
    total = total.transpose(0, 2, 4, 1, 3, 5).reshape(s.batch, -1, *q.shape[2:])
    return total[:, : q.shape[1]], dk, dv, columns


@dataclasses.dataclass(frozen=True)
class Backward:
    """The body of the kernel; a method is what one warpgroup does.

    Attributes:
      call: what is static; its score program returns the score, its derivative by the score, and
        those by `sums` numbers that belong to a key or to none.
      sums: how many derivatives are summed over the queries.
      in_turns: whether blocks add to dQ in turns.
      registers: of a thread, by warpgroup: first those with scores, last the one that loads. Not
        more in all than a block is launched with, or the hardware makes one wait for ever.
      slots: how many tiles of dQ are on their way at a time.
      handed: the barrier of those slots that a warpgroup with scores hands its work to.
    """

    call: Call
    sums: int
    in_turns: bool
    registers: ClassVar[tuple[int, ...]] = (240, 240, 24)
    slots: ClassVar[int] = 1
    handed: ClassVar[str] = "dq_free"

    @property
    def computing(self) -> int:
        """How many warpgroups there are beside the one that loads."""
        return len(self.registers) - 1

    @property
    def columns(self) -> int:
        """Columns of dQ that one warpgroup makes at a time."""
        return self.call.sizes.qk_size // self.call.tiles.warpgroups

    @property
    def pieces(self) -> list:
        """The columns that dQ is made of at a time."""
        count = self.call.sizes.qk_size // self.columns
        return [(n, plgpu.ds(n * self.columns, self.columns)) for n in range(count)]

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.call.sizes.heads // self.call.sizes.kv_heads

    def entry(self, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        plgpu.run_scoped(
            lambda scratch: self._body(refs, scratch), self.scratch(), collective_axes="warpgroup"
        )

    def scratch(self) -> dict:
        """Shared memory."""
        call, s, t, narrow = self.call, self.call.sizes, self.call.tiles, self.call.narrow
        n, groups, pieces = t.stages, t.warpgroups, len(self.pieces)
        ring = functools.partial(plgpu.Barrier, num_barriers=n)
        slots = functools.partial(plgpu.Barrier, num_barriers=self.slots)
        accumulators = functools.partial(call.mma.accumulators, groups)
        of_queries = plgpu.SMEM((n, t.q), jnp.float32)
        parcel = call.mma.parcel(t.q, self.columns)
        return {
            # Of K the columns that dQ is made of at a time are a tile of their own.
            "k": tiled((pieces, groups, t.kv, self.columns), narrow),
            "v": tiled((groups, t.kv, s.v_size), narrow),
            "q": tiled((n, t.q, s.qk_size), narrow, swizzle_of(self.columns, narrow)),
            "do": tiled((n, t.q, s.v_size), narrow),
            "base": of_queries,
            "norm": of_queries,
            "delta": of_queries,
            "vectors": call.vector_buffers(n),
            # Two slots: whoever writes one knows that all have read it, two steps ago.
            "ds": tiled((2, groups, t.kv, t.q), narrow, swizzle_of(self.columns, narrow)),
            "dq": plgpu.SMEM((self.slots, pieces, *parcel), jnp.float32),
            "column": plgpu.SMEM((groups, t.kv), jnp.float32),
            "kv_full": plgpu.Barrier(num_arrivals=(pieces + 1) * groups),
            "q_full": ring(num_arrivals=3 + call.copies),
            "do_full": ring(num_arrivals=2),
            "q_free": ring(num_arrivals=groups),
            "do_free": ring(num_arrivals=groups),
            "ds_full": plgpu.Barrier(num_barriers=2, num_arrivals=groups),
            "dq_full": slots(num_arrivals=groups),
            "dq_free": slots(),
            "clean": plgpu.Barrier(num_arrivals=groups),
            "walked": plgpu.Barrier(num_arrivals=groups),
            "accumulators": {
                "s": accumulators(t.kv, t.q), "dp": accumulators(t.kv, t.q),
                "dq": accumulators(t.q, self.columns),
                "dk": accumulators(t.kv, s.qk_size), "dv": accumulators(t.kv, s.v_size),
            },
        }  # fmt: skip

    def _body(self, refs, smem: dict):
        call = self.call
        n, m = (4 if call.sparse else 0), len(call.operands)
        (q_ref, k_ref, v_ref, do_ref, *row_refs), refs = refs[:7], refs[7:]
        steps, operands, (dq_ref, tickets_ref, *results) = refs[:n], refs[n : n + m], refs[n + m :]
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        walk = call.walk(batch, head, row, steps[:3])
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.when(warpgroup < call.tiles.warpgroups)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            self._compute(walk, warpgroup, operands, results, smem)

        load_keys = functools.partial(self._load_keys, walk, k_ref, v_ref, smem)
        load = functools.partial(
            self._load, walk, (q_ref, *row_refs[:2]), (do_ref, row_refs[2]), operands, smem
        )
        turn = functools.partial(self._turn, walk, row, steps)
        send = functools.partial(self._send, walk, dq_ref, tickets_ref, smem)
        self._others(walk, warpgroup, load_keys, load, turn, send, smem)

    def _others(self, walk: Walk, warpgroup, load_keys, load, turn, send, smem: dict):
        """The warpgroups that hold no scores: one, which loads and sends dQ away."""

        @plgpu.when(warpgroup == self.computing)
        def _():
            plgpu.set_max_registers(self.registers[-1], action="decrease")
            load_keys()
            self._serve(walk, load, turn, send, smem)

    def _entry(self, walk: Walk, i):
        """The `i`-th entry of a walk, the last one beyond: read early, it comes from far away."""
        return walk.col(jnp.clip(i, 0, jnp.maximum(walk.count - 1, 0)))

    def _at(self, walk: Walk, entry):
        """The query head and the first query of a tile of a walk; whether the tile is partial."""
        head, partial, group = walk.head, False, int32(self.group)
        if self.call.sparse:
            partial, entry = lax.rem(entry, int32(2)) == 1, lax.div(entry, int32(2))
        if self.group > 1:
            head = head * group + lax.rem(entry, group)
            entry = lax.div(entry, group)
        return head, entry * self.call.tiles.q, partial

    # -- the warpgroup that loads, and sends dQ away -----------------------------------------------

    def _load_keys(self, walk: Walk, k_ref, v_ref, smem: dict):
        t, full = self.call.tiles, smem["kv_full"]
        for part in range(t.warpgroups):
            keys = walk.batch, plgpu.ds(walk.row * t.cols + part * t.kv, t.kv), walk.head
            for n, cols in self.pieces:
                plgpu.copy_gmem_to_smem(k_ref.at[*keys, cols], smem["k"].at[n, part], full)
            plgpu.copy_gmem_to_smem(v_ref.at[*keys], smem["v"].at[part], full)

    def _serve(self, walk: Walk, load, turn, send, smem: dict):
        """Sends away what each step has made of dQ, and loads the next tile into its slot."""
        stages, entry = int32(self.call.tiles.stages), functools.partial(self._entry, walk)
        self._load_first(walk, load)

        def step(i, carry):
            own, following, due = carry
            then = entry(i + 1), entry(i + 1 + stages), turn(i + 1)
            send(i, own, due)
            load_it = functools.partial(load, following, lax.rem(i, stages), again=True)
            plgpu.when(i + stages < walk.count)(load_it)
            return then

        lax.fori_loop(0, walk.count, step, (entry(0), entry(stages), turn(int32(0))))
        plgpu.wait_smem_to_gmem(0)
        self._await_last(walk, ("q_free", "do_free"), self.call.tiles.stages, smem)

    def _load_first(self, walk: Walk, load):
        """Fills all slots."""
        first = lambda i: load(self._entry(walk, i), i, again=False)
        plgpu.loop(0, jnp.minimum(walk.count, self.call.tiles.stages))(first)

    def _await_last(self, walk: Walk, names: tuple[str, ...], slots: int, smem: dict):
        """Waits at the ends of a walk: every phase that ends must be seen, also the last ones."""

        @plgpu.loop(jnp.maximum(walk.count - slots, 0), walk.count)
        def _(i):
            for name in names:
                plgpu.barrier_wait(smem[name].at[lax.rem(i, int32(slots))])

    def _send(self, walk: Walk, dq_ref, tickets_ref, smem: dict, i, entry, due):
        """Adds what step `i` has made of dQ, if in turns then in the block's turn."""
        mma, slot = self.call.mma, lax.rem(i, int32(self.slots))
        head, q0, _ = self._at(walk, entry)
        place = walk.batch, head, lax.div(q0, int32(self.call.tiles.q))
        ticket = tickets_ref.at[*place]
        if self.in_turns:
            mma.await_turn(ticket, due)
        plgpu.barrier_wait(smem["dq_full"].at[slot])
        for n, _ in self.pieces:
            mma.add_share(dq_ref, walk.row, (*place, n), smem["dq"].at[slot, n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(smem["dq_free"].at[slot])
        if self.in_turns:
            plgpu.wait_smem_to_gmem(0)
            mma.pass_turn(ticket)

    def _load(self, walk: Walk, queries, cotangents, operands, smem: dict, entry, slot, *, again):
        """Fills a slot with a tile: queries first, they are needed first."""
        call = self.call
        head, q0, _ = self._at(walk, entry)
        rows = plgpu.ds(q0, call.tiles.q)
        names = ("q", "base", "norm"), ("do", "delta")
        for (name, *per_row), (ref, *row_refs) in zip(names, (queries, cotangents), strict=True):
            full = smem[f"{name}_full"].at[slot]
            free = smem[f"{name}_free"].at[slot]
            if again:
                plgpu.barrier_wait(free)
            plgpu.copy_gmem_to_smem(ref.at[walk.batch, rows, head], smem[name].at[slot], full)
            for buffer, row_ref in zip(per_row, row_refs, strict=True):
                source = row_ref.at[walk.batch, head, rows]
                plgpu.copy_gmem_to_smem(source, smem[buffer].at[slot], full)
            if name == "q":
                place = Place(q0, walk.row * call.tiles.cols)
                call.copy_vectors(walk.b, head, place, operands, smem["vectors"], slot, full)

    def _turn(self, walk: Walk, launched, steps, i):
        """How many blocks add to tile `i` of the walk before this one."""
        if not self.call.sparse:
            return launched
        turns_ref = steps[3]
        i = jnp.clip(i, 0, jnp.maximum(walk.count - 1, 0))
        return turns_ref[*lead(turns_ref, walk.b, walk.head), launched, i]

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, walk: Walk, warpgroup, operands, results, smem: dict):
        call, t, s, mma = self.call, self.call.tiles, self.call.sizes, self.call.mma
        buffers = smem["accumulators"]
        k0 = walk.row * t.cols + warpgroup * t.kv
        held = call.held(operands, walk.b, walk.head, k0) if self.group == 1 else None
        plgpu.barrier_wait(smem["kv_full"])
        if call.programs.mask is not None:
            for n, _ in self.pieces:
                mma.clean(smem["k"].at[n, warpgroup])
            mma.clean(smem["v"].at[warpgroup])

        def accumulate(dk_acc):
            def walk_tiles(dv_acc):
                def step(i, carry):
                    slot = lax.rem(i, int32(t.stages))
                    entry, sums = carry
                    following = self._entry(walk, i + 1)
                    head, q0, partial = self._at(walk, entry)
                    own = held or call.held(operands, walk.b, head, k0)
                    place = Place(q0, k0)
                    ds, new = self._weights(i, partial, place, own, warpgroup, dv_acc, smem)
                    self._products(i, ds, warpgroup, slot, dk_acc, smem)
                    return following, tuple(x + y for x, y in zip(sums, new, strict=True))

                zeros = tuple(
                    plgpu.layout_cast(jnp.zeros((t.kv,), jnp.float32), row_layout())
                    for _ in range(self.sums)
                )
                first = self._entry(walk, int32(0))
                _, sums = lax.fori_loop(0, walk.count, step, (first, zeros))
                last = lax.rem(walk.count + t.stages - 1, int32(t.stages))
                plgpu.when(walk.count > 0)(functools.partial(self._free_queries, last, 0, smem))
                return dk_acc[...], dv_acc[...], sums

            return mma.scoped(walk_tiles, buffers["dv"], warpgroup, (t.kv, s.v_size))

        dk, dv, sums = mma.scoped(accumulate, buffers["dk"], warpgroup, (t.kv, s.qk_size))
        self._await_last(walk, (self.handed,), self.slots, smem)
        self._finish(walk, warpgroup, k0, dk, dv, sums, results, smem)

    def _weights(self, i, partial, place: Place, held, warpgroup, dv_acc, smem: dict):
        """Makes dS' of a tile, and what it adds to the sums; issues dV, which may still run."""
        call, mma, shape = self.call, self.call.mma, self.call.shape
        buffers = smem["accumulators"]
        # A value that the compiler can't see through: it keeps the descriptors of the products
        # from being hoisted out of the loop, all of them into registers.
        w = lax.optimization_barrier(warpgroup)
        stages = int32(call.tiles.stages)
        slot, last = lax.rem(i, stages), lax.rem(i + stages - 1, stages)
        q_tile, do_tile = smem["q"].at[slot], smem["do"].at[slot]

        def scores(s_acc):
            def derivatives(dp_acc):
                plgpu.barrier_wait(smem["q_full"].at[slot])
                plgpu.barrier_wait(smem["do_full"].at[slot])
                self._clean_shared(partial, warpgroup, slot, smem)
                for n, cols in self.pieces:
                    mma.qk(s_acc, smem["k"].at[n, w], q_tile.at[:, cols])
                mma.qk(dp_acc, smem["v"].at[w], do_tile)
                of = lambda: call.values(held, smem["vectors"], slot, warpgroup * call.tiles.kv)
                # What is looked up is loaded while the products run; all else costs registers.
                early = call.found(of()) if call.looks_up else None
                s_tile = mma.read(s_acc, 1, q_tile)  # dP' still runs; dK of the last step is done
                free = functools.partial(self._free_queries, last, 1, smem)
                plgpu.when(i > 0)(free)
                read = lambda: mma.read(dp_acc, 1, smem["v"].at[w])  # dV still runs
                values = of() if early is None else early
                return self._weigh(s_tile, read, slot, partial, place, values, dv_acc, smem)

            return mma.scoped(derivatives, buffers["dp"], warpgroup, shape)

        return mma.scoped(scores, buffers["s"], warpgroup, shape)

    def _weigh(
        self, s_tile, read, slot, partial, place: Place, values, dv_acc, smem: dict, *, ready=None
    ):
        """Makes dS' of a tile, and what it adds to the sums; issues dV.

        Args:
          s_tile: S'.
          read: returns dP'.
          slot: where the queries are.
          partial, place, values: of the tile, as of `weights`.
          dv_acc: the accumulator of dV.
          smem: shared memory.
          ready: waits until dO may be read.
        """
        call, mma = self.call, self.call.mma
        per_query = lambda name: lax.broadcast_in_dim(
            mma.column(smem[name].at[slot]), call.shape, [1]
        )
        t_tile, *slopes = modified(call, s_tile, place, values)
        p, (slope, *numbers) = weights(call, t_tile, slopes, partial, place, values, per_query)
        kept = None
        if call.programs.dropout is not None:
            kept = call.run(call.programs.dropout, place, values)
        if ready is not None:
            ready()
        mma.pv(dv_acc, (p if kept is None else p * kept).astype(call.narrow), smem["do"].at[slot])
        if slope is not None and not numbers:
            p = p * slope
        dp = read()
        dp = dp if kept is None else dp * kept
        ds = p * (dp + per_query("delta"))
        ds = seen(call, partial, p, ds)
        sums = [(ds * x).sum(axis=1) for x in numbers]
        ds = ds if slope is None or not numbers else ds * slope
        return ds.astype(call.narrow), sums

    def _clean_shared(self, partial, warpgroup, slot, smem: dict):
        """Puts 0 where the queries of a tile are not finite, if something of it is hidden.

        `0 * NaN` is NaN, so a product would not keep hidden what is hidden. Who sees such a number
        learns of it by the statistics of a row.
        """

        def clean():
            @plgpu.when(warpgroup == 0)
            def _():
                swizzle = swizzle_of(self.columns, self.call.narrow)
                self.call.mma.clean(smem["q"].at[slot], swizzle)

            @plgpu.when(warpgroup == 1)
            def _():
                self.call.mma.clean(smem["do"].at[slot])
                self._clean_rows(slot, smem)

            plgpu.barrier_arrive(smem["clean"])
            plgpu.barrier_wait(smem["clean"])

        if self.call.programs.mask is not None:
            plgpu.when(partial)(clean)

    def _clean_rows(self, slot, smem: dict):
        """The same for `delta`; a row that loses it has no weights, and tells by them."""
        delta, norm = (self.call.mma.column(smem[name].at[slot]) for name in ("delta", "norm"))
        finite = jnp.abs(delta) < jnp.inf
        smem["delta"].at[slot][...] = jnp.where(finite, delta, 0.0)
        smem["norm"].at[slot][...] = jnp.where(finite, norm, jnp.nan)
        plgpu.commit_smem()

    def _products(self, i, ds, warpgroup, slot, dk_acc, smem: dict):
        """Adds a tile to dK and dQ."""
        t, mma = self.call.tiles, self.call.mma
        ds_slot, q_tile = lax.rem(i, int32(2)), smem["q"].at[slot]
        smem["ds"].at[ds_slot, warpgroup][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["ds_full"].at[ds_slot])
        plgpu.barrier_wait(smem["ds_full"].at[ds_slot])

        def queries(dq_acc):
            w = lax.optimization_barrier(warpgroup)
            for part in range(t.warpgroups):
                mma.tv(dq_acc, smem["ds"].at[ds_slot, part], smem["k"].at[w, part])
            mma.pv(dk_acc, ds, q_tile)
            mma.wait(smem["do"].at[slot], in_flight=3)  # dV is done
            plgpu.barrier_arrive(smem["do_free"].at[slot])
            return mma.read(dq_acc, 1, smem["ds"].at[ds_slot])  # dK still runs

        dq = mma.scoped(queries, smem["accumulators"]["dq"], warpgroup, (t.q, self.columns))
        plgpu.when(i > 0)(lambda: plgpu.barrier_wait(smem["dq_free"].at[0]))
        mma.pack(smem["dq"].at[0, lax.optimization_barrier(warpgroup)], dq)
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["dq_full"].at[0])

    def _free_queries(self, slot, in_flight: int, smem: dict):
        """Gives the queries of a slot back, when dK is done."""
        self.call.mma.wait(smem["q"].at[slot], in_flight=in_flight)
        plgpu.barrier_arrive(smem["q_free"].at[slot])

    def _finish(self, walk: Walk, warpgroup, k0, dk, dv, sums, results, smem: dict):
        """Writes a warpgroup's keys, by way of the buffers of K and V once nobody reads them."""
        call, t = self.call, self.call.tiles
        dk_ref, dv_ref, *columns = results
        keys = plgpu.ds(k0, t.kv)
        plgpu.barrier_arrive(smem["walked"])
        plgpu.barrier_wait(smem["walked"])
        dk = dk * call.programs.scale
        buffer = smem["v"].at[warpgroup]
        buffer[...] = dv.astype(call.narrow)
        for n, _ in self.pieces:
            part = dk[:, n * self.columns : (n + 1) * self.columns]
            smem["k"].at[n, warpgroup][...] = part.astype(call.narrow)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, dv_ref.at[walk.batch, keys, walk.head])
        for n, cols in self.pieces:
            place = dk_ref.at[walk.batch, keys, walk.head, cols]
            plgpu.copy_smem_to_gmem(smem["k"].at[n, warpgroup], place)
        self._write_sums(walk, keys, sums, columns, smem["column"].at[warpgroup])

    def _write_sums(self, walk: Walk, keys, sums, columns, buffer):
        """Writes the sums over queries, and waits for all that is under way."""
        for column, ref in zip(sums, columns, strict=True):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = column
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, ref.at[walk.batch, walk.head, keys])
        plgpu.wait_smem_to_gmem(0)
