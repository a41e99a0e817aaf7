"""The forward kernel for Hopper (sm_90a): FlashAttention-3's schedule with the user's code inside.

Source: Shah et al., "FlashAttention-3", arXiv:2407.08608, sections 3.1 and 3.2, with the block
sparsity of FlexAttention (arXiv:2412.05496) and mods split as in `_program`. One block of the grid
owns `warpgroups * q` queries of one head and walks the live key tiles, partial ones first. One
warpgroup loads; each of the others owns `q` queries and overlaps, within itself, the product `S =
Q K'` of the next tile and `O += P V` of this one with the softmax of the next:

    S0 = Q K0'; P0 = softmax(S0)
    for j = 1 .. n-1:   issue S = Q Kj';  issue O += P(j-1) V(j-1);  await S;  P = softmax(S)
                        await Vj;  await O;  rescale O
    O += P V(n-1)

and, in turns, with the others: one issues its products while another computes its softmax. That Vj
is awaited before it is wanted keeps the softmax where it is: it is a loop, and across a loop the
assembler moves nothing, while across the wait for O it moves all it can, and the two no longer
overlap.

Shapes: q `[B,T,H,D]`, k `[B,S,K,D]`, v `[B,S,K,V]`; a tile is `q x kv` pairs. D and V are
multiples of 16 and at most 256. In 8 bits: see `_operands`.

Not optimal: blocks are not persistent, so that the tail of one is not hidden by the next; `O` is
rescaled at every step, also where no maximum has grown; neighbouring blocks of one head load the
same keys, each for itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

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
    over_rows,
    row_layout,
    swizzle_of,
    tiled,
)
from xform.lowering.mosaic_gpu._operands import Eight, Sixteen

# Registers a thread, by the number of computing warpgroups: 65,536 of a multiprocessor in all.
_COMPUTE_REGISTERS = {2: 240, 3: 160}
_LOAD_REGISTERS = 24


def forward(call: Call, q, k, v, *scales, steps, operands, interpret=None):
    """Runs the kernel.

    Args:
      call: what is static.
      q, k, v: as above, bfloat16 or float16.
      scales: none; or all of `InEight`.
      steps: `(order [U,W,R], count [U,W,R,2], cols [U,W,R,C])`, int32: the rows of tiles, the
        most work first; how many tiles of a row are partial, and live; their columns, partial ones
        first. U is 1 or the batch of the mods, W is 1 or H. Empty where all tiles are full.
      operands: those of `call.operands`.
      interpret: parameters of the interpreter, for tests without a GPU.

    Returns:
      out `[B,T,H,V]`; of each row the maximum (in 8 bits another number, where the exponents of
      values have a say), the sum of the exponentials relative to it, and the sum of the output,
      which is finite if the row is, `[B,H,R * rows]`, float32.
    """
    s, tiles = call.sizes, call.tiles
    statistic = jax.ShapeDtypeStruct((s.batch, s.heads, s.rows(tiles) * tiles.rows), jnp.float32)
    out = (jax.ShapeDtypeStruct((*q.shape[:3], s.v_size), call.out), *[statistic] * 3)
    grid = call.grid(s.heads, s.rows(tiles), together=call.cached(s.kv_heads, s.kv_len))
    body = _Forward(call).entry
    run = launch(body, "flex_attention", tiles.warpgroups, out, grid, interpret)
    return run(q, k, v, *scales, *steps, *operands)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """The body of the kernel; a method is what one warpgroup does."""

    call: Call

    @property
    def form(self) -> Sixteen | Eight:
        return Eight(self.call) if self.call.eight else Sixteen(self.call)

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
            "v": tiled((n, *self.form.values_tile(t.kv)), call.narrow),
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
        m, n = (3 if self.call.eight else 0), (3 if self.call.sparse else 0)
        scales, steps, operands, results = rest[:m], rest[m : m + n], rest[m + n : -4], rest[-4:]
        batch, head, row = (lax.axis_index(name) for name in ("batch", "head", "row"))
        walk = self.call.walk(batch, head, row, steps)
        warpgroup, count = lax.axis_index("warpgroup"), self.call.tiles.warpgroups

        @plgpu.when(warpgroup < count)
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS[count], action="increase")
            self._compute(walk, warpgroup, q_ref, scales, operands, results, smem)

        @plgpu.when(warpgroup == count)
        def _():
            plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            self._load(walk, k_ref, v_ref, operands, smem)

    # -- the warpgroup that loads ------------------------------------------------------------------

    def _load(self, walk: Walk, k_ref, v_ref, operands, smem: dict):
        t, s = self.call.tiles, self.call.sizes
        stages = int32(t.stages)
        kv_head = lax.div(walk.head, int32(s.heads // s.kv_heads))

        @plgpu.loop(0, walk.count)
        def _(i):
            slot = lax.rem(i, stages)
            col = walk.col(i)
            keys = plgpu.ds(col * t.kv, t.kv)
            k_tile = k_ref.at[walk.batch, keys, kv_head]
            v_tile = v_ref.at[self.form.values_at(walk.batch, kv_head, keys)]
            again = i >= stages
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["k_free"].at[slot]))
            plgpu.copy_gmem_to_smem(k_tile, smem["k"].at[slot], smem["k_full"].at[slot])
            place = Place(walk.row * t.rows, col * t.kv)
            self.call.copy_vectors(
                walk.b, walk.head, place, operands, smem["vectors"], slot, smem["k_full"].at[slot]
            )
            plgpu.when(again)(lambda: plgpu.barrier_wait(smem["v_free"].at[slot]))
            plgpu.copy_gmem_to_smem(v_tile, smem["v"].at[slot], smem["v_full"].at[slot])

        # Every phase that ends must be seen, also the last ones.
        @plgpu.loop(jnp.maximum(walk.count - stages, 0), walk.count)
        def _(i):
            plgpu.barrier_wait(smem["k_free"].at[lax.rem(i, stages)])
            plgpu.barrier_wait(smem["v_free"].at[lax.rem(i, stages)])

    # -- the warpgroups that compute ---------------------------------------------------------------

    def _compute(self, walk: Walk, warpgroup, q_ref, scales, operands, results, smem: dict):
        call, t, form = self.call, self.call.tiles, self.form
        mma, stages = call.mma, int32(t.stages)
        q0 = walk.row * t.rows + warpgroup * t.q
        # A value that the compiler can't see through: it keeps the descriptors of the products
        # from being hoisted out of the loop, all of them into registers.
        hidden = lambda: lax.optimization_barrier(warpgroup)
        source = q_ref.at[walk.batch, plgpu.ds(q0, t.q), walk.head]
        plgpu.copy_gmem_to_smem(source, smem["q"].at[warpgroup], smem["q_full"].at[warpgroup])
        held = call.held(operands, walk.b, walk.head, q0)
        rows = form.of_rows(scales, walk, q0)
        take, give = self._turns(warpgroup, smem)
        scope = lambda body, name, cols: mma.scoped(body, smem[name], warpgroup, (t.q, cols))
        plgpu.barrier_wait(smem["q_full"].at[warpgroup])

        def weigh(i, started: Callable, top, total):
            """Of step `i`: weights, the new maximum and sum, what scales old sums; `started()`."""
            # Read early: they come from far away.
            place, scale = Place(q0, walk.col(i) * t.kv), form.of_tile(rows, walk, i)
            slot = lax.rem(i, stages)
            k_tile = smem["k"].at[slot]

            def softmax(s_tile):
                others, in_flight = started()
                give()
                s_tile = form.read(s_tile, in_flight, k_tile)
                values = call.values(held, smem["vectors"], slot, warpgroup * t.q)
                plgpu.barrier_arrive(smem["k_free"].at[slot])
                units = None if scale is None else scale.scores
                s_tile, factor = call.scores(s_tile, place, i < walk.partial, values, units)
                p, *rest = form.softmax(s_tile, factor, scale, top, total)
                if call.programs.dropout is not None:
                    p = p * call.run(call.programs.dropout, place, values)
                return form.narrowed(p), *rest, others

            plgpu.barrier_wait(smem["k_full"].at[slot])
            take()
            q_tile = smem["q"].at[hidden()]
            weights = form.scores(q_tile, k_tile, softmax, lambda f: scope(f, "scores", t.kv))
            # Not later: across a wait in a loop the assembler moves nothing, so that the softmax
            # stays beside the products that were started.
            plgpu.barrier_wait(smem["v_full"].at[slot])
            return weights

        def step(sums, i, carry):
            added, p, top, total = carry
            slot = lax.rem(i - 1, stages)
            v_tile = smem["v"].at[slot]
            start = lambda: (sums.start(p, v_tile), 1)
            p_next, top, total, keep, new = weigh(i, start, top, total)
            new = sums.wait(new, v_tile)
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return sums.add(added, new, keep), form.settled(p_next), top, total

        def walk_tiles(sums):
            start = (row_of(-jnp.inf), row_of(0.0))
            p, top, total, _, _ = weigh(int32(0), lambda: (None, 0), *start)
            carry = (sums.none, p, top, total)
            step_of = functools.partial(step, sums)
            added, p, top, total = lax.fori_loop(1, walk.count, step_of, carry)
            slot = lax.rem(walk.count - 1, stages)
            v_tile = smem["v"].at[slot]
            take()
            new = sums.start(p, v_tile)
            give()
            new = sums.wait(new, v_tile)
            plgpu.barrier_arrive(smem["v_free"].at[slot])
            return sums.all(added, new), top, total

        row_of = lambda x: plgpu.layout_cast(jnp.full((t.q,), x, jnp.float32), row_layout())
        scope_of_sums = lambda body: scope(body, "acc", call.sizes.v_size)
        acc, top, total = form.summed(scope_of_sums, walk_tiles)
        self._last_turn(warpgroup, smem)
        self._finish(walk, warpgroup, q0, acc, top, total, results, smem)

    def _turns(self, warpgroup, smem: dict) -> tuple[Callable, Callable]:
        """`take` waits for the tensor cores, `give` hands them to the next warpgroup."""
        if not self.call.tiles.in_turns:
            return (lambda: None), (lambda: None)
        turn = smem["turn"]
        last = self.call.tiles.warpgroups - 1
        plgpu.when(warpgroup == last)(lambda: plgpu.barrier_arrive(turn.at[0]))
        following = jnp.where(warpgroup == last, 0, warpgroup + 1)
        return (
            lambda: plgpu.barrier_wait(turn.at[warpgroup]),
            lambda: plgpu.barrier_arrive(turn.at[following]),
        )

    def _last_turn(self, warpgroup, smem: dict):
        """Takes the turn that the last one gave, which nobody needs."""
        if self.call.tiles.in_turns:
            plgpu.when(warpgroup == 0)(lambda: plgpu.barrier_wait(smem["turn"].at[0]))

    def _finish(self, walk, warpgroup, q0, acc, top, total, results, smem: dict):
        """Divides by the sums, and writes a warpgroup's rows."""
        out_ref, *statistics = results
        t, size = self.call.tiles, self.call.sizes.v_size
        rows = plgpu.ds(q0, t.q)
        inverse = jnp.where(total == 0.0, 0.0, 1.0 / total)
        acc = acc * over_rows(inverse, (t.q, size))
        # What sees an infinite value is NaN, however the weights fall.
        acc = jnp.where(jnp.abs(acc) < jnp.inf, acc, jnp.nan)
        values = (top * self.form.in_scores, total, acc.sum(axis=1))
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
        plgpu.wait_smem_to_gmem(0)
