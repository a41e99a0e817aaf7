"""The backward kernel for wide heads: dK and dV are in the registers of two warpgroups.

The block of `_backward` can't be had where D + V is above 256: dK and dV of 64 keys take
64 (D + V) / 128 registers of each thread, 256 of 255 for heads of 256, before any score. Here a
block owns 64 keys, and each of three warpgroups has its part of a step:

    scores    S' = K Q'   P' = exp2(S' - base) norm   dV += P' dO   dS' = P' (dP' + delta) slope
    keys      dP' = V dO'                             dK += dS' Q                 loads
    queries                                           dQ += dS K

Registers of a thread at heads of 256: the first holds dV (128), S' (32) and dP' (32), and P' as an
operand (16); the second dK (128) and dP' (32); the third 64 columns of dQ at a time (32). Given
216, 216 and 72 of the 504 that three warpgroups have. Bytes of shared memory: K and V 64 Ki, two
tiles of Q and of dO 128 Ki, dP' in float32 16 Ki, dS' 8 Ki, of 227 Ki. So dQ has no buffer: threads
add it to memory from their registers, 16 bytes at a time, in turns or in any order.

The warpgroups meet at dP', which the second hands to the first, and at dS', which all but the first
read. None waits for another within a step but for these, and the third, which alone waits for its
turn, is in nobody's way while it is less than a step behind.

Not optimal: with a mask, whose branch comes in the middle of a step, the compiler puts some 230
bytes of a thread's registers into memory.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._backward import Backward
from xform.lowering.mosaic_gpu._call import Place, Walk, int32, row_layout, swizzle_of, tiled


class Wide(Backward):
    """The body of the kernel."""

    registers: ClassVar[tuple[int, ...]] = (216, 216, 72)

    @property
    def columns(self) -> int:
        return swizzle_of(self.call.sizes.qk_size, self.call.narrow) // self.call.narrow.itemsize

    def scratch(self) -> dict:
        call, s, t, narrow = self.call, self.call.sizes, self.call.tiles, self.call.narrow
        n, count = t.stages, len(self.pieces)
        ring = functools.partial(plgpu.Barrier, num_barriers=n)
        one = functools.partial(call.mma.accumulators, 1)
        of_queries = plgpu.SMEM((n, t.q), jnp.float32)
        return {
            # Of K the columns that dQ is made of at a time are a tile of their own.
            "k": tiled((count, t.kv, self.columns), narrow),
            "v": tiled((t.kv, s.v_size), narrow),
            "q": tiled((n, t.q, s.qk_size), narrow),
            "do": tiled((n, t.q, s.v_size), narrow),
            "base": of_queries,
            "norm": of_queries,
            "delta": of_queries,
            "vectors": call.vector_buffers(n),
            "ds": tiled((1, t.kv, t.q), narrow, swizzle_of(self.columns, narrow)),
            "dp": plgpu.SMEM(call.mma.parcel(t.kv, t.q), jnp.float32),
            "column": plgpu.SMEM((t.kv,), jnp.float32),
            "kv_full": plgpu.Barrier(num_arrivals=count + 1),
            "q_full": ring(num_arrivals=3 + call.copies),
            "do_full": ring(num_arrivals=2),
            "q_free": ring(),
            "do_free": ring(),
            "ds_full": plgpu.Barrier(),
            "ds_free": plgpu.Barrier(num_arrivals=2),
            "dp_full": plgpu.Barrier(),
            "dp_free": plgpu.Barrier(),
            "walked": plgpu.Barrier(num_arrivals=3),
            "accumulators": {
                "s": one(t.kv, t.q), "dp": one(t.kv, t.q), "dq": one(t.q, self.columns),
                "dk": one(t.kv, s.qk_size), "dv": one(t.kv, s.v_size),
            },
        }  # fmt: skip

    def _body(self, refs, smem: dict):
        call = self.call
        n, m = (4 if call.sparse else 0), len(call.operands)
        (q_ref, k_ref, v_ref, do_ref, *row_refs), refs = refs[:7], refs[7:]
        steps, operands, (dq_ref, tickets_ref, *results) = refs[:n], refs[n : n + m], refs[n + m :]
        dk_ref, dv_ref, *columns = results
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        walk = call.walk(batch, head, row, steps[:3])
        warpgroup = lax.axis_index("warpgroup")

        @plgpu.when(warpgroup == 0)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            self._make_scores(walk, operands, dv_ref, columns, smem)

        @plgpu.when(warpgroup == 1)
        def _():
            plgpu.set_max_registers(self.registers[1], action="increase")
            fill = functools.partial(
                self._fill, walk, (q_ref, *row_refs[:2]), (do_ref, row_refs[2]), operands, smem
            )
            self._load_keys(walk, k_ref, v_ref, smem)
            self._make_keys(walk, fill, dk_ref, smem)

        @plgpu.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(self.registers[2], action="decrease")
            turn = functools.partial(self._turn, walk, row, steps)
            self._make_queries(walk, turn, dq_ref, tickets_ref, smem)

    def _keys(self, walk: Walk) -> tuple:
        """Where the block's keys are."""
        return walk.batch, plgpu.ds(walk.row * self.call.tiles.cols, self.call.tiles.kv), walk.head

    def _finish_walk(self, smem: dict):
        """Waits until nobody reads the buffers of K and V any more."""
        plgpu.barrier_arrive(smem["walked"])
        plgpu.barrier_wait(smem["walked"])

    # -- dV, and dS' from dP' ----------------------------------------------------------------------

    def _make_scores(self, walk: Walk, operands, dv_ref, columns, smem: dict):
        call, t, s, mma = self.call, self.call.tiles, self.call.sizes, self.call.mma
        k0 = walk.row * t.cols
        held = call.held(operands, walk.b, walk.head, k0) if self.group == 1 else None
        plgpu.barrier_wait(smem["kv_full"])
        if call.programs.mask is not None:
            for n, _ in self.pieces:
                mma.clean(smem["k"].at[n])

        def accumulate(dv_acc):
            def step(i, carry):
                entry, sums = carry
                following = self._entry(walk, i + 1)
                head, q0, partial = self._at(walk, entry)
                own = held or call.held(operands, walk.b, head, k0)
                ds, new = self._weights_of(i, partial, Place(q0, k0), own, dv_acc, smem)
                plgpu.when(i > 0)(lambda: plgpu.barrier_wait(smem["ds_free"]))
                smem["ds"].at[0][...] = ds
                plgpu.commit_smem()
                plgpu.barrier_arrive(smem["ds_full"])
                return following, tuple(x + y for x, y in zip(sums, new, strict=True))

            zeros = tuple(
                plgpu.layout_cast(jnp.zeros((t.kv,), jnp.float32), row_layout())
                for _ in range(self.sums)
            )
            first = self._entry(walk, int32(0))
            _, sums = lax.fori_loop(0, walk.count, step, (first, zeros))

            @plgpu.when(walk.count > 0)
            def _():
                self._free_cotangents(walk.count - 1, smem)
                plgpu.barrier_wait(smem["ds_free"])

            return dv_acc[...], sums

        buffer = smem["accumulators"]["dv"]
        dv, sums = mma.scoped(accumulate, buffer, 0, (t.kv, s.v_size))
        self._finish_walk(smem)
        smem["v"][...] = dv.astype(call.narrow)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem["v"], dv_ref.at[*self._keys(walk)])
        self._write_sums(walk, self._keys(walk)[1], sums, columns, smem["column"])

    def _weights_of(self, i, partial, place: Place, held, dv_acc, smem: dict):
        """Makes dS' of a tile, and what it adds to the sums; issues dV, which may still run."""
        call, mma = self.call, self.call.mma
        slot = lax.rem(i, int32(call.tiles.stages))
        q_tile = smem["q"].at[slot]

        def scores(s_acc):
            plgpu.barrier_wait(smem["q_full"].at[slot])
            plgpu.barrier_wait(smem["do_full"].at[slot])
            self._clean_partial(partial, slot, smem)
            for n, cols in self.pieces:
                mma.qk(s_acc, smem["k"].at[n], q_tile.at[:, cols])
            s_tile = mma.read(s_acc, 0, q_tile)
            plgpu.when(i > 0)(lambda: self._free_cotangents(i - 1, smem))
            return s_tile

        def read():
            dp = mma.packed(smem["dp"], call.shape)
            plgpu.barrier_arrive(smem["dp_free"])
            return dp

        s_tile = mma.scoped(scores, smem["accumulators"]["s"], 0, call.shape)
        values = call.values(held, smem["vectors"], slot, 0)
        # Whoever made dP' has put zeros into dO where they had to be.
        ready = lambda: plgpu.barrier_wait(smem["dp_full"])
        return self._weigh(s_tile, read, slot, partial, place, values, dv_acc, smem, ready=ready)

    def _free_cotangents(self, i, smem: dict):
        """Gives the cotangents of a step back, once dV is done."""
        slot = lax.rem(i, int32(self.call.tiles.stages))
        self.call.mma.wait(smem["do"].at[slot])
        plgpu.barrier_arrive(smem["do_free"].at[slot])

    def _clean_partial(self, partial, slot, smem: dict):
        """Puts 0 where queries and `delta` are not finite, if something of a tile is hidden."""

        def clean():
            self.call.mma.clean(smem["q"].at[slot])
            self._clean_rows(slot, smem)

        if self.call.programs.mask is not None:
            plgpu.when(partial)(clean)

    # -- dP' and dK, and all loads -----------------------------------------------------------------

    def _load_keys(self, walk: Walk, k_ref, v_ref, smem: dict):
        full = smem["kv_full"]
        for n, cols in self.pieces:
            plgpu.copy_gmem_to_smem(k_ref.at[*self._keys(walk), cols], smem["k"].at[n], full)
        plgpu.copy_gmem_to_smem(v_ref.at[*self._keys(walk)], smem["v"], full)

    def _fill(self, walk: Walk, queries, cotangents, operands, smem: dict, i, *, again: bool):
        """Loads the `i`-th tile of the walk, if there is one, as soon as its slot is free."""

        @plgpu.when(i < walk.count)
        def _():
            slot = lax.rem(i, int32(self.call.tiles.stages))
            load = functools.partial(self._load, walk, queries, cotangents, operands, smem)
            load(self._entry(walk, i), slot, again=again)

    def _make_keys(self, walk: Walk, fill, dk_ref, smem: dict):
        t, s, mma = self.call.tiles, self.call.sizes, self.call.mma
        stages = int32(t.stages)
        fill(int32(0), again=False)
        fill(int32(1), again=False)
        plgpu.barrier_wait(smem["kv_full"])
        if self.call.programs.mask is not None:
            mma.clean(smem["v"])

        def accumulate(dk_acc):
            def free(i, in_flight):
                slot = lax.rem(i, stages)
                mma.wait(smem["q"].at[slot], in_flight=in_flight)
                plgpu.barrier_arrive(smem["q_free"].at[slot])
                plgpu.barrier_arrive(smem["ds_free"])

            def step(i, entry):
                following = self._entry(walk, i + 1)
                _, _, partial = self._at(walk, entry)
                slot = lax.rem(i, stages)
                do_tile = smem["do"].at[slot]

                def product(dp_acc):
                    plgpu.barrier_wait(smem["do_full"].at[slot])
                    if self.call.programs.mask is not None:
                        plgpu.when(partial)(lambda: mma.clean(do_tile))
                    mma.qk(dp_acc, smem["v"], do_tile)

                    @plgpu.when(i > 0)
                    def _():
                        free(i - 1, 1)  # dK of the last step is done; dP' still runs
                        fill(i + 1, again=True)

                    return mma.read(dp_acc, 0, do_tile)

                dp = mma.scoped(product, smem["accumulators"]["dp"], 0, self.call.shape)
                plgpu.when(i > 0)(lambda: plgpu.barrier_wait(smem["dp_free"]))
                mma.pack(smem["dp"], dp)
                plgpu.commit_smem()
                plgpu.barrier_arrive(smem["dp_full"])
                plgpu.barrier_wait(smem["q_full"].at[slot])
                plgpu.barrier_wait(smem["ds_full"])
                mma.pv(dk_acc, smem["ds"].at[0], smem["q"].at[slot])
                return following

            lax.fori_loop(0, walk.count, step, self._entry(walk, int32(0)))

            @plgpu.when(walk.count > 0)
            def _():
                free(walk.count - 1, 0)
                plgpu.barrier_wait(smem["dp_free"])

            # Every phase that ends must be seen, also the last ones.
            @plgpu.loop(jnp.maximum(walk.count - stages, 0), walk.count)
            def _(i):
                plgpu.barrier_wait(smem["q_free"].at[lax.rem(i, stages)])
                plgpu.barrier_wait(smem["do_free"].at[lax.rem(i, stages)])

            return dk_acc[...]

        buffer = smem["accumulators"]["dk"]
        dk = mma.scoped(accumulate, buffer, 0, (t.kv, s.qk_size)) * self.call.programs.scale
        self._finish_walk(smem)
        for n, cols in self.pieces:
            part = dk[:, n * self.columns : (n + 1) * self.columns]
            smem["k"].at[n][...] = part.astype(self.call.narrow)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["k"].at[n], dk_ref.at[*self._keys(walk), cols])
        plgpu.wait_smem_to_gmem(0)

    # -- dQ ----------------------------------------------------------------------------------------

    def _make_queries(self, walk: Walk, turn, dq_ref, tickets_ref, smem: dict):
        """Adds to dQ what each step makes of it."""
        t, mma = self.call.tiles, self.call.mma
        entry, shape = functools.partial(self._entry, walk), (t.q, self.columns)
        plgpu.barrier_wait(smem["kv_full"])

        def step(i, carry):
            own, due = carry
            then = entry(i + 1), turn(i + 1)
            head, q0 = self._at(walk, own)[:2]
            place = walk.batch, head, lax.div(q0, int32(t.q))
            plgpu.barrier_wait(smem["ds_full"])
            if self.in_turns:
                mma.await_turn(tickets_ref.at[*place], due)

            @plgpu.loop(0, len(self.pieces))
            def _(n):
                # What the compiler can't see through: see `_weights`.
                at, col = lax.optimization_barrier((int32(0), n))

                def product(acc):
                    mma.tv(acc, smem["ds"].at[at], smem["k"].at[col])
                    return mma.read(acc, 0, smem["ds"].at[at])

                tile = mma.scoped(product, smem["accumulators"]["dq"], 0, shape)
                mma.add_values(dq_ref, walk.row, (*place, n), tile)

            plgpu.barrier_arrive(smem["ds_free"])
            if self.in_turns:
                mma.pass_turn(tickets_ref.at[*place])
            return then

        lax.fori_loop(0, walk.count, step, (entry(int32(0)), turn(int32(0))))
        plgpu.barrier_arrive(smem["walked"])
        plgpu.barrier_wait(smem["walked"])
