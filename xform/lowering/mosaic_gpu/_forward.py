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
multiples of 16 and at most 256. In 8 bits: see `_forward_eight`.

A block may own several rows of tiles, one after the other (`Tiles.persistent`): keys of the next
are then loaded while the last one is finished, and its warpgroups need not wait for one another.

Not optimal: `O` is rescaled at every step, also where no maximum has grown; neighbouring blocks of
one head load the same keys, each for itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import (
    LOG2E,
    Call,
    Place,
    Share,
    Walk,
    int32,
    launch,
    over_rows,
    row_layout,
    swizzle_of,
    tiled,
)

# Registers a thread, by the number of computing warpgroups: 65,536 of a multiprocessor in all.
_COMPUTE_REGISTERS = {2: 240, 3: 160}
_LOAD_REGISTERS = 24


def forward(call: Call, q, k, v, *scales, steps, operands, body: type[Forward], interpret=None):
    """Runs the kernel.

    Args:
      call: what is static.
      q, k, v: as above, bfloat16 or float16; with `scales`, all of `InEight`.
      steps: `(order [U,W,R], count [U,W,R,2], cols [U,W,R,C])`, int32: the rows of tiles, the
        most work first; in that order, how many tiles of each are partial, and live; their
        columns, partial ones first. U is 1 or the batch of the mods, W is 1 or H. Empty where all
        tiles are full.
      operands: those of `call.operands`.
      body: of the kernel.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      out `[B,T,H,V]`; of each row the maximum (in 8 bits another number, where the exponents of
      values have a say), the sum of the exponentials relative to it, and the sum of the output,
      which is finite if the row is, `[B,H,R * rows]`, float32.
    """
    s, tiles = call.sizes, call.tiles
    statistic = jax.ShapeDtypeStruct((s.batch, s.heads, s.rows(tiles) * tiles.rows), jnp.float32)
    out = (jax.ShapeDtypeStruct((*q.shape[:3], s.v_size), call.out), *[statistic] * 3)
    rows, share = s.rows(tiles), None
    grid = call.grid(s.heads, rows, together=call.cached(s.kv_heads, s.kv_len))
    if tiles.persistent:
        # The longest rows of all come first: what is dealt out so is about the same for all blocks.
        share = Share((("row", rows), ("batch", s.batch), ("head", s.heads)))
        grid = share.grid
    run = launch(body(call, share).entry, "flex_attention", tiles.warpgroups, out, grid, interpret)
    return run(q, k, v, *scales, *steps, *operands)


@dataclasses.dataclass(frozen=True)
class Forward:
    """The body of the kernel; a method is what one warpgroup does.

    Attributes:
      call: what is static.
      share: which rows of tiles a block owns; None for the one of its place in the grid.
      scales: how many arrays of scales there are.
    """

    call: Call
    share: Share | None
    scales: ClassVar[int] = 0

    @property
    def in_scores(self) -> float:
        """What makes the number that a row is taken relative to a score."""
        return self.call.factor / LOG2E

    def values_tile(self) -> tuple[int, int]:
        """The shape of a tile of values."""
        return self.call.tiles.kv, self.call.sizes.v_size

    def values_at(self, batch, keys, kv_head) -> tuple:
        """Where it is in memory."""
        return batch, keys, kv_head

    def entry(self, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        call, s, t = self.call, self.call.sizes, self.call.tiles
        n, groups = t.stages, t.warpgroups
        # The output leaves in columns of up to 128 bytes, two of them at a time if there is room.
        chunk = swizzle_of(s.v_size, call.out) // call.out.itemsize
        buffers = min(2 if s.v_size <= 128 else 1, s.v_size // chunk)
        ring = functools.partial(plgpu.Barrier, num_barriers=n)
        rows = plgpu.SMEM((groups, t.q), jnp.float32)
        scratch = {
            "q": tiled((groups, t.q, s.qk_size), call.narrow),
            "k": tiled((n, t.kv, s.qk_size), call.narrow),
            "v": tiled((n, *self.values_tile()), call.narrow),
            "out": tiled((groups, buffers, t.q, chunk), call.out),
            "statistics": [rows] * 3,
            "vectors": call.vector_buffers(n),
            "acc": call.mma.accumulators(groups, t.q, s.v_size),
            "scores": call.mma.accumulators(groups, t.q, t.kv),
            "q_full": plgpu.Barrier(num_barriers=groups),
            "k_full": ring(num_arrivals=1 + call.copies),
            "v_full": ring(),
            "k_free": ring(num_arrivals=groups),
            "v_free": ring(num_arrivals=groups),
            "turn": plgpu.Barrier(num_barriers=groups),
        }
        plgpu.run_scoped(
            lambda scratch: self._body(refs, scratch), scratch, collective_axes="warpgroup"
        )

    def _body(self, refs, smem: dict):
        q_ref, k_ref, v_ref, *rest = refs
        scales, rest = rest[: self.scales], rest[self.scales :]
        n = 3 if self.call.sparse else 0
        steps, operands, results = rest[:n], rest[n:-4], rest[-4:]
        warpgroup, count = lax.axis_index("warpgroup"), self.call.tiles.warpgroups

        def for_each_row(work: Callable):
            """Folds `work(walk, steps before)`, which returns those after it, over all rows."""

            def at(place, done):
                batch, head, row = place
                return work(self.call.walk(batch, head, row, steps), done)

            if self.share:
                return self.share.fold(at, int32(0))
            return at([lax.axis_index(name) for name in ("batch", "head", "row")], int32(0))

        @plgpu.when(warpgroup < count)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[count], action="increase")
            self._first_turn(warpgroup, smem)
            for_each_row(
                lambda walk, done: self._compute(
                    walk, done, warpgroup, q_ref, scales, operands, results, smem
                )
            )
            self._last_turn(warpgroup, smem)
            plgpu.wait_smem_to_gmem(0)

        @plgpu.when(warpgroup == count)
        def _():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            done = for_each_row(
                lambda walk, done: self._load(walk, done, k_ref, v_ref, operands, smem)
            )
            self._await_end(done, smem)

    # -- the warpgroup that loads ------------------------------------------------------------------

    def _load(self, walk: Walk, done, k_ref, v_ref, operands, smem: dict):
        """Loads what a row of tiles visits, after `done` tiles of earlier rows."""
        t, s = self.call.tiles, self.call.sizes
        stages = int32(t.stages)
        kv_head = lax.div(walk.head, int32(s.heads // s.kv_heads))

        @plgpu.loop(0, walk.count)
        def _(i):
            slot = lax.rem(done + i, stages)
            col = walk.col(i)
            keys = plgpu.ds(col * t.kv, t.kv)
            k_tile = k_ref.at[walk.batch, keys, kv_head]
            v_tile = v_ref.at[self.values_at(walk.batch, keys, kv_head)]
            again = done + i >= stages
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["k_free"].at[slot]))
            plgpu.copy_gmem_to_smem(k_tile, smem["k"].at[slot], smem["k_full"].at[slot])
            place = Place(walk.row * t.rows, col * t.kv)
            self.call.copy_vectors(
                walk.b, walk.head, place, operands, smem["vectors"], slot, smem["k_full"].at[slot]
            )
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["v_free"].at[slot]))
            plgpu.copy_gmem_to_smem(v_tile, smem["v"].at[slot], smem["v_full"].at[slot])

        return done + walk.count

    def _await_end(self, done, smem: dict):
        """Every phase that ends must be seen, also the last ones."""
        stages = int32(self.call.tiles.stages)

        @plgpu.loop(jnp.maximum(done - stages, 0), done)
        def _(i):
            plgpu.barrier_wait(smem["k_free"].at[lax.rem(i, stages)])
            plgpu.barrier_wait(smem["v_free"].at[lax.rem(i, stages)])

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, walk: Walk, done, warpgroup, q_ref, scales, operands, results, smem: dict):
        """Computes a warpgroup's part of a row of tiles, after `done` tiles of earlier rows."""
        del scales
        call, t, s = self.call, self.call.tiles, self.call.sizes
        mma, stages = call.mma, int32(t.stages)
        q0 = walk.row * t.rows + warpgroup * t.q
        # A value that the compiler can't see through: it keeps the descriptors of the products
        # from being hoisted out of the loop, all of them into registers.
        hidden = lambda: lax.optimization_barrier(warpgroup)
        q_tile = smem["q"].at[warpgroup]
        source = q_ref.at[walk.batch, plgpu.ds(q0, t.q), walk.head]
        plgpu.copy_gmem_to_smem(source, q_tile, smem["q_full"].at[warpgroup])
        held = call.held(operands, walk.b, walk.head, q0)
        take, give = self._turns(warpgroup, smem)
        plgpu.barrier_wait(smem["q_full"].at[warpgroup])

        def softmax(i, k0, slot, s_acc, in_flight, top, total):
            """Weights of step `i`, the new maximum and sum, and what scales the old ones."""
            s_tile = mma.read(s_acc, in_flight, smem["k"].at[slot])
            values = call.values(held, smem["vectors"], slot, warpgroup * t.q)
            call.free_keys(smem["k_free"].at[slot])
            place = Place(q0, k0)
            s_tile, factor = call.scores(s_tile, place, i < walk.partial, values)
            # Not scaled: the backward pass gets the same exponents only from the same maximum.
            new = jnp.maximum(top, s_tile.max(axis=1))
            # A row that has seen no key yet has no maximum; its weights are 0 relative to any.
            base = jnp.where(new == -jnp.inf, 0.0, new * factor)
            keep = jnp.exp2(top * factor - base)
            p = jnp.exp2(s_tile * factor - over_rows(base, call.shape))
            total = total * keep + p.sum(axis=1)
            if call.programs.dropout is not None:
                p = p * call.run(call.programs.dropout, place, values)
            return p.astype(call.narrow), new, total, keep

        def first(s_acc):
            k0 = walk.col(int32(0)) * t.kv
            slot = lax.rem(done, stages)
            plgpu.barrier_wait(smem["k_full"].at[slot])
            take()
            mma.qk(s_acc, q_tile, smem["k"].at[slot])
            give()
            return softmax(int32(0), k0, slot, s_acc, 0, rows(-jnp.inf), rows(0.0))[:3]

        def step(acc, i, carry):
            p, top, total = carry
            slot, following = lax.rem(done + i - 1, stages), lax.rem(done + i, stages)

            def products(s_acc):
                k0 = walk.col(i) * t.kv  # read early: it comes from far away
                plgpu.barrier_wait(smem["k_full"].at[following])
                take()
                mma.qk(s_acc, smem["q"].at[hidden()], smem["k"].at[following])
                plgpu.barrier_wait(smem["v_full"].at[slot])
                mma.pv(acc, p, smem["v"].at[slot])
                give()
                return softmax(i, k0, following, s_acc, 1, top, total)

            p, top, total, keep = mma.scoped(products, smem["scores"], warpgroup, call.shape)
            mma.wait(smem["v"].at[slot])
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            acc[...] = acc[...] * over_rows(keep, (t.q, s.v_size))
            return p, top, total

        def walk_tiles(acc):
            carry = mma.scoped(first, smem["scores"], warpgroup, call.shape)
            p, top, total = lax.fori_loop(1, walk.count, functools.partial(step, acc), carry)
            slot = lax.rem(done + walk.count - 1, stages)
            plgpu.barrier_wait(smem["v_full"].at[slot])
            take()
            mma.pv(acc, p, smem["v"].at[slot])
            give()
            mma.wait(smem["v"].at[slot])
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return acc[...], top, total

        rows = lambda x: plgpu.layout_cast(jnp.full((t.q,), x, jnp.float32), row_layout())
        acc, top, total = mma.scoped(walk_tiles, smem["acc"], warpgroup, (t.q, s.v_size))
        self._finish(walk, warpgroup, q0, acc, top, total, results, smem)
        return done + walk.count

    def _turns(self, warpgroup, smem: dict) -> tuple[Callable, Callable]:
        """`take` waits for the tensor cores, `give` hands them to the next warpgroup."""
        if not self.call.tiles.in_turns:
            return (lambda: None), (lambda: None)
        turn = smem["turn"]
        following = jnp.where(warpgroup == self.call.tiles.warpgroups - 1, 0, warpgroup + 1)
        return (
            lambda: plgpu.barrier_wait(turn.at[warpgroup]),
            lambda: plgpu.barrier_arrive(turn.at[following]),
        )

    def _first_turn(self, warpgroup, smem: dict):
        """Gives the first warpgroup its first turn."""
        if self.call.tiles.in_turns:
            last = self.call.tiles.warpgroups - 1
            plgpu.when(warpgroup == last)(lambda: plgpu.barrier_arrive(smem["turn"].at[0]))

    def _last_turn(self, warpgroup, smem: dict):
        """Takes the turn that the last one gave, which nobody needs."""
        if self.call.tiles.in_turns:
            plgpu.when(warpgroup == 0)(lambda: plgpu.barrier_wait(smem["turn"].at[0]))

    def _lost(self, top):
        """What the largest weight of each row loses where it is rounded to 1 for its product.

        It is 1 but for the rounding of the scaled maximum, which of scores near 4,000 is 2e-4. If
        it counted as it is, a row with one weight would be off its value by that; and so would be
        what the backward pass subtracts from a product of that value.
        """
        base = jnp.where(top == -jnp.inf, 0.0, top * self.call.factor)
        largest = jnp.exp2(top * self.call.factor - base)
        near = jnp.abs(largest - 1.0) < float(jnp.finfo(self.call.narrow).eps) / 4
        return jnp.where(near, largest - 1.0, 0.0)

    def _finish(self, walk, warpgroup, q0, acc, top, total, results, smem: dict):
        """Divides by the sums, and writes a warpgroup's rows."""
        out_ref, *statistics = results
        t, size = self.call.tiles, self.call.sizes.v_size
        rows = plgpu.ds(q0, t.q)
        weights = total - self._lost(top)
        inverse = jnp.where(weights == 0.0, 0.0, 1.0 / weights)
        acc = acc * over_rows(inverse, (t.q, size))
        # What sees an infinite value is NaN, however the weights fall.
        acc = jnp.where(jnp.abs(acc) < jnp.inf, acc, jnp.nan)
        values = (top * self.in_scores, total, acc.sum(axis=1))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the row before
        for value, ref, buffer in zip(values, statistics, smem["statistics"], strict=True):
            buffer.at[warpgroup][...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[warpgroup], ref.at[walk.batch, walk.head, rows])
        buffers = smem["out"]
        chunk = buffers.shape[-1]
        for n in range(size // chunk):
            buffer = buffers.at[warpgroup, n % buffers.shape[1]]
            if n >= buffers.shape[1]:
                plgpu.wait_smem_to_gmem(buffers.shape[1] - 1, wait_read_only=True)
            buffer[...] = acc[:, n * chunk : (n + 1) * chunk].astype(self.call.out)
            plgpu.commit_smem()
            cols = plgpu.ds(n * chunk, chunk)
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[walk.batch, rows, walk.head, cols])
