"""The operations of the tensor cores in two forms: for the hardware, and for the interpreter.

The interpreter neither knows every form that the hardware takes (accumulators that are assigned to,
operands in registers) nor sees what a product reads, so that it would miss the race of a buffer
that is handed back too early. The twin says the same with plain loads: it reads an operand when the
product is issued and once more when its result is awaited, and commits, since a product reads by
the asynchronous proxy. The schedule around it is one source for both.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._fragments import (
    add_by_thread,
    await_count,
    band_tile,
    clean_by_thread,
    copied,
    count_up,
    in_eight,
    index_tile,
    load_by_thread,
    lookup_tile,
    store_by_thread,
    weights_in_eight,
)
from xform.lowering.mosaic_gpu._lookup import Lookup
from xform.lowering.mosaic_gpu._tensor_cores import finished, started


class Hardware:
    """WGMMA with accumulators in registers."""

    def accumulators(self, count: int, rows: int, cols: int):
        """Shared memory for accumulators: none."""
        del count, rows, cols
        return ()

    def scoped(self, body, buffers, warpgroup, shape):
        """Runs `body` with an accumulator that is 0."""
        del buffers, warpgroup
        return plgpu.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def qk(self, acc, q, k):
        """Adds `q k'`."""
        plgpu.wgmma(acc, q, k.T)

    def pv(self, acc, p, v):
        """Adds `p v`."""
        plgpu.wgmma(acc, p, v)

    def tv(self, acc, p, v):
        """Adds `p' v`."""
        plgpu.wgmma(acc, p.T, v)

    def in_eight(self, x):
        """A tile in e4m3, every 16 columns in the order of `in_order`."""
        return _narrowed(in_eight, x)

    def weights_in_eight(self, p):
        """The same of weights up to 1.75, 256 times as large."""
        return _narrowed(weights_in_eight, p)

    def started(self, x, y):
        """Starts `x y'` of 8 bits, into registers of its own."""
        tiles = lambda ref: plgpu.RefType(plgpu.tiles_of(ref.shape[1], 1))
        in_registers = isinstance(x, jax.Array)
        shape = x.shape[0], y.shape[0]
        swizzle = plgpu.swizzle_of(y.shape[1], 1)

        first = plgpu.Layout.WGMMA_8BIT if in_registers else tiles(x)

        @_inline(shape, jnp.float32, first, tiles(y), layout=plgpu.ACCUMULATORS)
        def start(ctx, x, y):
            del ctx
            return started(x, y, swizzle)

        return start(x, y)

    def finished(self, tile, in_flight: int, *operands):
        """The result of such a product, once at most `in_flight` later ones still run."""
        del operands

        @_inline(tile.shape, jnp.float32, plgpu.ACCUMULATORS)
        def finish(ctx, tile):
            del ctx
            return finished(tile, in_flight)

        return finish(tile)

    def copied(self, p):
        """Weights in e4m3 in registers that no product in flight reads, from here on."""
        layout = plgpu.Layout.WGMMA_8BIT

        @_inline(p.shape, p.dtype, layout, layout=layout)
        def same(ctx, p):
            del ctx
            return copied(p)

        return same(p)

    def add_to(self, ref, buffer):
        """Adds a tile of shared memory to global memory, which no other block touches."""
        plgpu.copy_smem_to_gmem(buffer, ref, reduction_op="add")

    def vector(self, ref, dim: int):
        """A vector over rows with `dim=1`, over columns with `dim=0`, from global memory."""
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(dim), optimized=False)

    def read(self, acc, in_flight: int, k):
        """The result of a product, once at most `in_flight` later ones still run."""
        del k
        return plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)

    def wait(self, *operands, in_flight: int = 0):
        """Waits for all but the last products; `operands` are what the last of the others reads."""
        del operands
        plgpu.wgmma_wait(in_flight)

    def shares(self, blocks: int) -> tuple[int, ...]:
        """Leading dimensions of an array that blocks add to: none."""
        del blocks
        return ()

    def parcel(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape of a tile of an accumulator in the order in which threads hold it."""
        return rows * cols // 256, 256

    def pack(self, buffer, tile):
        """Stores such a tile in shared memory: of each thread 16 bytes at a time, no bank twice."""

        @_effect(plgpu.RefType(), plgpu.Layout.WGMMA)
        def store(ctx, ref, tile):
            del ctx
            store_by_thread(ref, tile)

        store(buffer, tile)

    def unpacked(self, parcels, rows: int, cols: int):
        """Arrays `[...,*parcel]` as `[...,rows,cols]`."""
        lead = parcels.shape[:-2]
        # See `store_by_thread`: 16 columns, lower or upper rows, warps, rows, and four threads.
        x = parcels.reshape(*lead, cols // 16, 2, rows // 16, 8, 4, 2, 2)
        n = len(lead)
        order = (*range(n), n + 2, n + 1, n + 3, n, n + 5, n + 4, n + 6)
        return x.transpose(order).reshape(*lead, rows, cols)

    def packed(self, buffer, shape):
        """What was stored so, by the same threads."""

        @_inline(shape, jnp.float32, plgpu.RefType())
        def load(ctx, ref):
            del ctx
            return load_by_thread(ref, shape)

        return load(buffer)

    def add_share(self, ref, block, place, tile):
        """Adds a tile of shared memory at `place`, in whatever order blocks come."""
        del block
        plgpu.copy_smem_to_gmem(tile, ref.at[*place], reduction_op="add")

    def add_values(self, ref, block, place, tile):
        """The same for a tile in registers, which takes no way through shared memory."""
        del block

        @_effect(plgpu.RefType(), plgpu.Layout.WGMMA)
        def add(ctx, ref, tile):
            del ctx
            add_by_thread(ref, tile)

        add(ref.at[*place], tile)

    def await_turn(self, ticket, turn):
        """Waits until a counter in memory has reached `turn`."""

        @_effect(plgpu.RefType(), plgpu.Layout.WG_SPLAT)
        def wait(ctx, ref, turn):
            del ctx
            await_count(ref, turn.registers.item())

        wait(ticket, turn)

    def pass_turn(self, ticket):
        """Adds one to a counter, once everything that this warpgroup has added is in memory."""

        @_effect(plgpu.RefType())
        def add(ctx, ref):
            del ctx
            count_up(ref)

        add(ticket)

    def hand_back(self, barrier):
        """Arrives where a copy waits that will write over what ordinary loads have read.

        A barrier alone does not keep such a load ahead of the copy, which writes by the
        asynchronous proxy (PTX ISA, "Async proxy"): it has read the next tile, now and then.
        """

        @_effect()
        def fence(ctx):
            del ctx
            plgpu.fence_shared()

        fence()
        plgpu.barrier_arrive(barrier)

    def clean(self, buffer, swizzle: int | None = None):
        """Puts 0 where a tile of shared memory, `tiled` like this, is not finite."""
        tiles = plgpu.tiles_of(buffer.shape[-1], buffer.dtype.itemsize, swizzle)

        @_effect(plgpu.RefType(tiles))
        def clean(ctx, ref):
            del ctx
            clean_by_thread(ref)

        clean(buffer)
        plgpu.commit_smem()

    def tile(self, buffer):
        """A tile of shared memory as values."""
        return plgpu.load(buffer, layout=plgpu.Layout.WGMMA)

    def turned(self, buffer):
        """A tile of shared memory, columns as rows."""
        return plgpu.load(buffer.T, layout=plgpu.Layout.WGMMA)

    def column(self, buffer):
        """A vector over columns, from shared memory."""
        return plgpu.load(buffer, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)

    def band(self, buffer, shape, start, sign: int, dtype):
        """The tile `[r, c] = buffer[start + sign * (r - c)]` of a vector in shared memory."""
        signed = None if jnp.issubdtype(dtype, jnp.floating) else dtype == jnp.int32

        @_inline(shape, dtype, plgpu.RefType(), plgpu.Layout.WG_SPLAT)
        def tile(ctx, ref, start):
            del ctx
            return band_tile(ref, start.registers.item(), shape, sign, signed)

        return tile(buffer, start)  # the context is Mosaic's to give

    def lookup(self, ref, lookup: Lookup, indices: list, shape, dtype):
        """The tile of what is looked up in global memory; an index is a scalar or a tile."""
        signed = None if jnp.issubdtype(dtype, jnp.floating) else dtype == jnp.int32
        whole = lambda x: plgpu.layout_cast(jnp.broadcast_to(x, shape), plgpu.Layout.WGMMA)
        tiles = [jnp.maximum(whole(x), 0) for x in indices]

        @_inline(shape, dtype, plgpu.RefType(), *[plgpu.Layout.WGMMA] * len(tiles))
        def tile(ctx, ref, *indices):
            del ctx
            return lookup_tile(ref, lookup.dims, indices, signed)

        return filled(tile(ref, *tiles), lookup, indices)

    def index(self, start, shape, dim: int, dtype):
        """The tile `start + r`, or `start + c` with `dim=1`, int32 or float32."""
        floating = jnp.issubdtype(dtype, jnp.floating)

        @_inline(shape, dtype, plgpu.Layout.WG_SPLAT)
        def tile(ctx, start):
            del ctx
            return index_tile(start.registers.item(), shape, dim, floating=floating)

        return tile(start)


def _effect(*arguments) -> Callable[[Callable], Callable]:
    """Marks a function of Mosaic's context and these arguments that returns nothing."""
    return plgpu.inline_mgpu(arg_types=arguments)


def _inline(shape, dtype, *arguments, layout=plgpu.Layout.WGMMA) -> Callable[[Callable], Callable]:
    """Marks a function of Mosaic's context and these arguments that makes a tile."""
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def _narrowed(how: Callable, x):
    """A tile of 8 bits, as the first operand of a product has it."""
    layout = plgpu.Layout.WGMMA_8BIT

    @_inline(x.shape, jnp.float8_e4m3fn, plgpu.Layout.WGMMA, layout=layout)
    def narrowed(ctx, x):
        del ctx
        return how(x)

    return narrowed(x)


class Twin:
    """Plain loads and stores, which the race detector sees."""

    def accumulators(self, count: int, rows: int, cols: int):
        return plgpu.SMEM((count, rows, cols), jnp.float32)

    def scoped(self, body, buffers, warpgroup, shape):
        del shape
        acc = buffers.at[warpgroup]
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        return body(acc)

    def qk(self, acc, q, k):
        acc[...] = acc[...] + _product(q[...], k[...], 1, 1)

    def pv(self, acc, p, v):
        acc[...] = acc[...] + _product(p[...], v[...], 1, 0)

    def tv(self, acc, p, v):
        acc[...] = acc[...] + _product(p[...], v[...], 0, 0)

    def started(self, x, y):
        return _product(x if isinstance(x, jax.Array) else x[...], y[...], 1, 1)

    def finished(self, tile, in_flight: int, *operands):
        del in_flight
        return tile + sum(map(_read_again, operands))

    def in_eight(self, x):
        return in_order(jnp.clip(x, -448.0, 448.0)).astype(jnp.float8_e4m3fn)

    def weights_in_eight(self, p):
        return self.in_eight(p * 256.0)

    def copied(self, p):
        return p

    def add_to(self, ref, buffer):
        ref[...] = ref[...] + buffer[...]

    def vector(self, ref, dim: int):
        del dim
        return ref[...]

    def read(self, acc, in_flight: int, k):
        del in_flight
        return acc[...] + _read_again(k)

    def wait(self, *operands, in_flight: int = 0):
        del in_flight
        for operand in operands:
            _read_again(operand)

    def shares(self, blocks: int) -> tuple[int, ...]:
        """The interpreter can't add: each block has an array of its own."""
        return (blocks,)

    def parcel(self, rows: int, cols: int) -> tuple[int, int]:
        return rows, cols

    def pack(self, buffer, tile):
        buffer[...] = tile

    def packed(self, buffer, shape):
        del shape
        return buffer[...]

    def unpacked(self, parcels, rows: int, cols: int):
        del rows, cols
        return parcels

    def add_share(self, ref, block, place, tile):
        plgpu.copy_smem_to_gmem(tile, ref.at[block, *place])

    def add_values(self, ref, block, place, tile):
        ref.at[block, *place][...] = tile

    def await_turn(self, ticket, turn):
        del ticket, turn

    def pass_turn(self, ticket):
        del ticket

    def hand_back(self, barrier):
        plgpu.commit_smem()
        plgpu.barrier_arrive(barrier)

    def clean(self, buffer, swizzle: int | None = None):
        del swizzle
        x = buffer[...]
        buffer[...] = jnp.where(jnp.isfinite(x.astype(jnp.float32)), x, jnp.zeros_like(x))
        plgpu.commit_smem()

    def tile(self, buffer):
        return buffer[...]

    def turned(self, buffer):
        return buffer[...].T

    def column(self, buffer):
        return buffer[...]

    def band(self, buffer, shape, start, sign: int, dtype):
        del dtype
        r, c = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (0, 1))
        return self.column(buffer)[start + sign * (r - c)]

    def lookup(self, ref, lookup: Lookup, indices: list, shape, dtype):
        at: list = [0] * len(ref.shape)
        for dim, index in zip(lookup.dims, indices, strict=True):
            at[dim] = jnp.maximum(jnp.broadcast_to(index, shape), 0)
        return filled(ref[...][tuple(at)].astype(dtype), lookup, indices)

    def index(self, start, shape, dim: int, dtype):
        return (lax.broadcasted_iota(jnp.int32, shape, dim) + start).astype(dtype)


def _product(x, y, *dims: int):
    first, second = dims
    contracted = ((first,), (second,)), ((), ())
    return lax.dot_general(x, y, contracted, preferred_element_type=jnp.float32)


def filled(tile, lookup: Lookup, indices: list):
    """What is looked up, and where an index is negative what is read out of range."""
    if lookup.fill is None:
        return tile
    for index in indices:
        outside = jnp.broadcast_to(index < 0, tile.shape)
        tile = jnp.where(outside, jnp.asarray(lookup.fill, tile.dtype), tile)
    return tile


def in_order(x):
    """Every 16 of the last dimension, in the order in which threads hold a product's result."""
    pairs = x.reshape(*x.shape[:-1], -1, 2, 4, 2)
    return pairs.swapaxes(-3, -2).reshape(x.shape)


def _read_again(ref):
    """0, from a read of `ref`, which the hardware may do up to here."""
    x = ref[...].astype(jnp.float32).sum()
    plgpu.commit_smem()
    return jnp.where(x == x, 0.0, 0.0)
