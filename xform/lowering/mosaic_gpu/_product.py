"""A matrix product for Hopper (sm_90a) whose tiles end in registers, as the caller says.

A tile is 128 rows by 256 columns, 64 rows for each of two warpgroups, which a third one feeds
through a ring of `stages` steps of 128 bytes, 64 numbers of 16 bits or 128 of 8. The two blocks of
a cluster have the same columns: each loads half of them, for both. Blocks stay, and walk tiles so
that those which run at one time share rows and columns, `together` groups of rows side by side down
each column: what one loads is in the cache for the others.

Shapes: x `[M,K]`, y `[K,N]` or `[N,K]`; on a device the last dimension of both is a multiple of 128
bytes and the one before of 8, as bulk copies of tiles need (the interpreter is content with 16
bytes). Numbers of 8 bits are multiplied along last dimensions alone. What sticks out of the arrays
reads as 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu
from xform.lowering.mosaic_gpu._call import int32, launch, tiled
from xform.lowering.mosaic_gpu._twins import Hardware, Twin

WARPGROUPS, ROWS = 2, 64
_STEP = 128  # bytes: the widest swizzle


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the work is cut.

    Attributes:
      cols: columns of a tile.
      stages: steps in shared memory.
      cluster: blocks that share their columns, 1 or 2.
      blocks: all of them, as many as an H200 has multiprocessors.
      together: how many groups of rows, one of a cluster each, are walked side by side.
    """

    cols: int = 256
    stages: int = 4
    cluster: int = 2
    blocks: int = 132
    together: int = 8

    @property
    def rows(self) -> int:
        """Rows of one cluster."""
        return WARPGROUPS * ROWS * self.cluster


@dataclasses.dataclass(frozen=True)
class Spot:
    """Where a warpgroup's tile is.

    Attributes:
      row, col: the first of its rows and of its columns, counted from the first that is visited.
      tile: how many tiles of columns come before it.
      first: the first column that is visited.
      warpgroup: whose it is.
    """

    row: jax.Array
    col: jax.Array
    tile: jax.Array
    first: jax.Array
    warpgroup: jax.Array


@runtime_checkable
class End(Protocol):
    """What becomes of a tile.

    `buffers` are its own in shared memory; it is called with products `[64, cut.cols]`, where they
    are, the arrays in global memory after x, y and `first`, and its buffers.
    """

    @property
    def name(self) -> str: ...
    def buffers(self) -> dict: ...
    def __call__(self, acc, spot: Spot, refs, smem: dict) -> None: ...


@dataclasses.dataclass(frozen=True)
class Product:
    """One call.

    Attributes:
      rows, cols, size: M, N and K, as many as are visited.
      free: the dimension of y that is not summed over.
      dtypes: of x and y; of one size.
      cut: how the work is cut.
      mma: how products are made.
      end: what becomes of a tile.
      slides: the dimension of y of which `first` is the first index.
    """

    rows: int
    cols: int
    size: int
    free: int
    dtypes: tuple[jnp.dtype, jnp.dtype]
    cut: Cut
    mma: Hardware | Twin
    end: End
    slides: int

    @property
    def row_tiles(self) -> int:
        """Tiles along rows, of a cluster each."""
        return -(-self.rows // self.cut.rows)

    @property
    def col_tiles(self) -> int:
        return -(-self.cols // self.cut.cols)

    @property
    def step(self) -> int:
        """Numbers of a step."""
        return _STEP // self.dtypes[0].itemsize

    @property
    def steps(self) -> int:
        return -(-self.size // self.step)

    def __call__(self, out: list, x, y, first, *arrays, interpret=None) -> list:
        """Runs the kernel; `first` is int32 `[1]`, and `arrays` are for `end`."""
        cut = self.cut
        grid = {
            "grid": (cut.blocks // cut.cluster,), "grid_names": ("group",),
            "cluster": (cut.cluster,), "cluster_names": ("cluster",),
        }  # fmt: skip
        run = launch(self._entry, self.end.name, WARPGROUPS, tuple(out), grid, interpret)
        return list(run(x, y, first, *arrays) or ())

    def _entry(self, x_ref, y_ref, first_ref, *refs):
        """Allocates shared memory and sends each warpgroup to its work."""
        cut = self.cut
        ring = functools.partial(plgpu.Barrier, num_barriers=cut.stages)
        free = ring(num_arrivals=WARPGROUPS)
        if cut.cluster > 1:
            free = plgpu.ClusterBarrier(
                collective_axes=("cluster",), num_barriers=cut.stages, num_arrivals=WARPGROUPS
            )
        y_shape = (self.step, cut.cols) if self.free else (cut.cols, self.step)
        scratch = {
            "x": tiled((cut.stages, WARPGROUPS, ROWS, self.step), self.dtypes[0]),
            "y": tiled((cut.stages, *y_shape), self.dtypes[1]),
            "acc": self.mma.accumulators(WARPGROUPS, ROWS, cut.cols),
            "full": ring(num_arrivals=WARPGROUPS + 1),
            "free": free,
            **self.end.buffers(),
        }

        def body(smem):
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.when(warpgroup < WARPGROUPS)
            def _():
                plgpu.set_max_registers(240, action="increase")
                self._compute(warpgroup, first_ref[0], refs, smem)

            @plgpu.when(warpgroup == WARPGROUPS)
            def _():
                plgpu.set_max_registers(24, action="decrease")
                self._load(x_ref, y_ref, first_ref[0], smem)

        plgpu.run_scoped(body, scratch, collective_axes="warpgroup")

    def _each_tile(self, body: Callable):
        """`body(n, row, tile)`: the n-th of this cluster, its row of tiles and its column."""
        clusters = self.cut.blocks // self.cut.cluster
        group, together = lax.axis_index("group"), self.cut.together

        @plgpu.loop(0, self._count())
        def _(n):
            tile = group + n * clusters
            block = lax.div(tile, int32(together * self.col_tiles))
            rest = tile - block * (together * self.col_tiles)
            rows = jnp.minimum(together, self.row_tiles - block * together)
            body(n, block * together + lax.rem(rest, rows), lax.div(rest, rows))

    def _count(self):
        """How many tiles this cluster visits."""
        clusters = self.cut.blocks // self.cut.cluster
        tiles = self.row_tiles * self.col_tiles
        return lax.div(tiles - lax.axis_index("group") + (clusters - 1), int32(clusters))

    def _row(self, row, warpgroup):
        """The first row of a warpgroup in a row of tiles."""
        block = row * self.cut.cluster + lax.axis_index("cluster")
        return (block * WARPGROUPS + warpgroup) * ROWS

    def _slot(self, at):
        return lax.rem(at, int32(self.cut.stages))

    def _load(self, x_ref, y_ref, first, smem: dict):
        cut, size = self.cut, self.step
        shared = "cluster" if cut.cluster > 1 else None

        def load(n, row, tile):
            @plgpu.loop(0, self.steps)
            def _(k):
                at = n * self.steps + k
                slot, full = self._slot(at), smem["full"].at[self._slot(at)]
                starts = {self.free: tile * cut.cols, 1 - self.free: k * size}
                starts[self.slides] += first
                lengths = {self.free: cut.cols, 1 - self.free: size}
                plgpu.when(at >= cut.stages)(lambda: plgpu.barrier_wait(smem["free"].at[slot]))
                for warpgroup in range(WARPGROUPS):
                    rows = plgpu.ds(self._row(row, warpgroup), ROWS)
                    source = x_ref.at[rows, plgpu.ds(k * size, size)]
                    plgpu.copy_gmem_to_smem(source, smem["x"].at[slot, warpgroup], full)
                part = tuple(plgpu.ds(starts[d], lengths[d]) for d in (0, 1))
                plgpu.copy_gmem_to_smem(
                    y_ref.at[part], smem["y"].at[slot], full, collective_axes=shared
                )

        self._each_tile(load)
        # Every phase that ends must be seen, also the last ones.
        total = self._count() * self.steps

        @plgpu.loop(jnp.maximum(total - cut.stages, 0), total)
        def _(at):
            plgpu.barrier_wait(smem["free"].at[self._slot(at)])

    def _compute(self, warpgroup, first, refs, smem: dict):
        mma, steps = self.mma, self.steps
        operands = lambda slot: (smem["x"].at[slot, warpgroup], smem["y"].at[slot])

        def compute(n, row, tile):
            def add(acc, k):
                slot = self._slot(n * steps + k)
                plgpu.barrier_wait(smem["full"].at[slot])
                product_of = mma.pv if self.free else mma.qk
                product_of(acc, *operands(slot))

            def done(k, in_flight: int):
                slot = self._slot(n * steps + k)
                mma.wait(*operands(slot), in_flight=in_flight)
                plgpu.barrier_arrive(smem["free"].at[slot])

            def product(acc):
                add(acc, 0)

                def step(k, carry):
                    add(acc, k)
                    done(k - 1, 1)
                    return carry

                lax.fori_loop(1, steps, step, None)
                done(steps - 1, 0)
                return acc[...]

            acc = mma.scoped(product, smem["acc"], warpgroup, (ROWS, self.cut.cols))
            spot = Spot(self._row(row, warpgroup), tile * self.cut.cols, tile, first, warpgroup)
            self.end(acc, spot, refs, smem)

        self._each_tile(compute)
        plgpu.wait_smem_to_gmem(0)
