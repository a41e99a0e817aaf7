"""The backward kernel for narrow heads: dQ has a warpgroup of its own.

Where D + V is at most 128, dK, dV and the scores leave registers for more warpgroups. Five are
launched with 96 a thread, and share those: 176 for each of two with scores, 72 for one that makes
dQ, 24 each for one that sends dQ away and for one that loads.

With the three of `_backward` a step at heads of 64 takes four fifths of what it takes at 128, for
half of the products: those with scores exchange dS', and wait for each other and for dQ in every
step. Here they hand dS' over, two slots of it, and go on; they may be a step apart, so that one's
exponentials run beside the other's products.

It is for any order of addition. In turns it was slower than `_backward` is: of what one more
warpgroup does, a step has to wait for the turn, the sum in memory and the word that it is there.
"""

from __future__ import annotations

import functools
from typing import ClassVar

from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._backward import Backward
from xform.lowering.mosaic_gpu._call import Walk, int32, swizzle_of

WIDTH = 128
"""Columns of dK and dV that the registers suffice for."""


class Narrow(Backward):
    """The body of the kernel."""

    registers: ClassVar[tuple[int, ...]] = (176, 176, 72, 24, 24)
    slots: ClassVar[int] = 2
    handed: ClassVar[str] = "ds_free"

    @property
    def columns(self) -> int:
        return swizzle_of(self.call.sizes.qk_size, self.call.narrow) // self.call.narrow.itemsize

    def scratch(self) -> dict:
        slots = functools.partial(plgpu.Barrier, num_barriers=self.slots)
        return {
            **super().scratch(),
            "ds_free": slots(),
            "dq_full": slots(),
            "walked": plgpu.Barrier(num_arrivals=self.call.tiles.warpgroups + 1),
        }

    def _others(self, walk: Walk, warpgroup, load_keys, load, turn, send, smem: dict):
        """The warpgroups that hold no scores: one makes dQ, one sends it away, and one loads."""
        count = self.call.tiles.warpgroups

        @plgpu.when(warpgroup == count)
        def _():
            plgpu.set_max_registers(self.registers[2], action="decrease")
            self._make_queries(walk, smem)

        @plgpu.when(warpgroup == count + 1)
        def _():
            plgpu.set_max_registers(self.registers[3], action="decrease")
            self._send_all(walk, turn, send)

        @plgpu.when(warpgroup == count + 2)
        def _():
            plgpu.set_max_registers(self.registers[4], action="decrease")
            load_keys()
            self._load_all(walk, load, smem)

    def _load_all(self, walk: Walk, load, smem: dict):
        """Loads the tiles of a walk, each as soon as its slot is free."""
        stages = int32(self.call.tiles.stages)
        self._load_first(walk, load)

        def step(i, own):
            following = self._entry(walk, i + 1)
            load(own, lax.rem(i, stages), again=True)
            return following

        lax.fori_loop(stages, walk.count, step, self._entry(walk, stages))
        self._await_last(walk, ("q_free", "do_free"), self.call.tiles.stages, smem)

    def _send_all(self, walk: Walk, turn, send):
        """Sends away what each step has made of dQ."""

        def step(i, carry):
            then = self._entry(walk, i + 1), turn(i + 1)
            send(i, *carry)
            return then

        lax.fori_loop(0, walk.count, step, (self._entry(walk, int32(0)), turn(int32(0))))
        plgpu.wait_smem_to_gmem(0)

    def _make_queries(self, walk: Walk, smem: dict):
        """Makes dQ of each step."""
        mma, slots, pieces = self.call.mma, int32(self.slots), len(self.pieces)
        plgpu.barrier_wait(smem["kv_full"])

        @plgpu.loop(0, walk.count)
        def _(i):
            slot = lax.rem(i, slots)
            plgpu.barrier_wait(smem["ds_full"].at[slot])
            plgpu.when(i >= slots)(lambda: plgpu.barrier_wait(smem["dq_free"].at[slot]))

            @plgpu.loop(0, pieces)
            def _(n):
                tile = self._product(slot, n, smem)
                free = lambda: plgpu.barrier_arrive(smem["ds_free"].at[slot])
                plgpu.when(n == pieces - 1)(free)
                mma.pack(smem["dq"].at[slot, n], tile)

            plgpu.commit_smem()
            plgpu.barrier_arrive(smem["dq_full"].at[slot])

        self._await_last(walk, ("dq_free",), self.slots, smem)
        plgpu.barrier_arrive(smem["walked"])
        plgpu.barrier_wait(smem["walked"])

    def _product(self, slot, n, smem: dict):
        """Some columns of dQ, from dS' of all keys of the block."""
        t, mma = self.call.tiles, self.call.mma
        # What the compiler can't see through: see `_weights`.
        slot, n = lax.optimization_barrier((slot, n))

        def product(acc):
            for part in range(t.warpgroups):
                part = lax.optimization_barrier(int32(part))
                mma.tv(acc, smem["ds"].at[slot, part], smem["k"].at[n, part])
            return mma.read(acc, 0, smem["ds"].at[slot])

        return mma.scoped(product, smem["accumulators"]["dq"], 0, (t.q, self.columns))

    def _products(self, i, ds, warpgroup, slot, dk_acc, smem: dict):
        """Hands dS' over, and adds a tile to dK, which may still run."""
        mma, ds_slot = self.call.mma, lax.rem(i, int32(self.slots))
        plgpu.when(i >= self.slots)(lambda: plgpu.barrier_wait(smem["ds_free"].at[ds_slot]))
        smem["ds"].at[ds_slot, lax.optimization_barrier(warpgroup)][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem["ds_full"].at[ds_slot])
        mma.pv(dk_acc, ds, smem["q"].at[slot])
        mma.wait(smem["do"].at[slot], in_flight=1)  # dV is done
        plgpu.barrier_arrive(smem["do_free"].at[slot])
