"""All names of Pallas and its Mosaic GPU backend that xform uses: an API that changes often.

Imported by the lowering alone, when a kernel is built: it is slow to import.
"""

from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils as mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

kernel, SMEM, Barrier, Layout = plgpu.kernel, plgpu.SMEM, plgpu.Barrier, plgpu.Layout
ClusterBarrier = plgpu.ClusterBarrier
ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
CompilerParams, LoweringSemantics, InterpretGPUParams = (
    plgpu.CompilerParams, plgpu.LoweringSemantics, plgpu.InterpretGPUParams,
)  # fmt: skip
barrier_arrive, barrier_wait, commit_smem = (
    plgpu.barrier_arrive, plgpu.barrier_wait, plgpu.commit_smem,
)  # fmt: skip
copy_gmem_to_smem, copy_smem_to_gmem, wait_smem_to_gmem = (
    plgpu.copy_gmem_to_smem, plgpu.copy_smem_to_gmem, plgpu.wait_smem_to_gmem,
)  # fmt: skip
wgmma, wgmma_wait, wgmma_accumulator_load = (
    plgpu.wgmma, plgpu.wgmma_wait, plgpu.wgmma_accumulator_load,
)  # fmt: skip
load, layout_cast, broadcasted_iota, set_max_registers = (
    plgpu.load, plgpu.layout_cast, plgpu.broadcasted_iota, plgpu.set_max_registers,
)  # fmt: skip
inline_mgpu, RefType, ShapeDtypeStruct = plgpu.inline_mgpu, plgpu.RefType, plgpu.ShapeDtypeStruct
ds, when, loop, run_scoped = pl.ds, pl.when, pl.loop, pl.run_scoped
FragmentedArray, FragmentedLayout = mgpu.FragmentedArray, mgpu.WGMMA_LAYOUT
EightBits, Accumulators = mgpu.WGMMA_LAYOUT_8BIT, mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT
optimization_barrier = mgpu.fragmented_array.optimization_barrier
memref_transpose = mgpu.memref_transpose
StridedLayout = mgpu.WGStridedFragLayout
memref_ptr, thread_idx = mgpu.utils.memref_ptr, mgpu.utils.thread_idx
warpgroup_barrier = mgpu.utils.warpgroup_barrier


def fence_shared():
    """Orders a thread's ordinary accesses to shared memory before later ones of the other proxy."""
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


ACCUMULATORS = plgpu.Layout._WGMMA_ACC_32BIT


def swizzle_of(size: int, itemsize: int) -> int:
    """The widest swizzle, in bytes, that divides a row."""
    return next(n for n in (128, 64, 32) if size * itemsize % n == 0)


def tiles_of(size: int, itemsize: int, swizzle: int | None = None) -> tuple:
    """The layout that products and bulk copies want, of rows with `size` numbers."""
    swizzle = swizzle or swizzle_of(size, itemsize)
    return layout((8, swizzle // itemsize), swizzle)


def layout(tile: tuple[int, int], swizzle: int) -> tuple:
    """The transforms of shared memory in tiles, with rows of `swizzle` bytes spread over banks."""
    # pyright takes a base class's method for abstract here.
    return (
        plgpu.TilingTransform(tile),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
