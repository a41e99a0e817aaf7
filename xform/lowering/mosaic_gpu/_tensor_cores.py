"""A product of 8 bits whose accumulators are new: the tensor cores write them, and read nothing.

Pallas only adds products to accumulators. New ones are zeros there, and writing 64 registers of a
thread stands between a tile of keys and its product; the instruction has a bit for it.

The registers of a product that runs belong to the tensor cores until `finished`.
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, vector

from xform.lowering.mosaic_gpu import _plgpu as plgpu

# Rows of a product, and numbers that one instruction sums over, 32 bytes.
_ROWS, _STEP = 64, 32
_NUMBERS = plgpu.EightBits
_RESULT = plgpu.Accumulators


def started(x, y, swizzle: int):
    """Starts `x y'`, a tile `[64,n]` that is there when `finished`.

    Args:
      x: `[64,k]` in registers, in the layout of a first operand, or in tiles of shared memory.
      y: `[n,k]` in tiles of shared memory, with rows of `swizzle` bytes.
    """
    turned = plgpu.memref_transpose(y, (1, 0, 3, 2))
    (size, cols), _ = plgpu.mma_utils.tiled_memref_shape(turned)
    y_at = _addresses(turned, swizzle, (swizzle, cols), keys_first=True)
    if isinstance(x, plgpu.FragmentedArray):
        x = plgpu.optimization_barrier(x)
        x_at = lambda n: [_word(r) for r in x[:, n : n + _STEP].registers.flat]
    else:
        address = _addresses(x, swizzle, (_ROWS, swizzle), keys_first=False)
        x_at = lambda n: [address(n)]
    nvvm.wgmma_fence_aligned()
    registers = []
    for n in range(0, size, _STEP):
        registers = _product(registers, x_at(n), y_at(n), cols)
    _assembly("wgmma.commit_group.sync.aligned;")
    result = np.empty(_RESULT.registers_shape((_ROWS, cols)), dtype=object)
    result.flat = registers
    return plgpu.FragmentedArray(_registers=result, _layout=_RESULT, _is_signed=None)


def finished(tile, in_flight: int):
    """The tile of a product, once at most `in_flight` later ones still run."""
    _assembly(f"wgmma.wait_group.sync.aligned {in_flight};")
    return plgpu.optimization_barrier(tile).to_layout(plgpu.FragmentedLayout)


def _addresses(ref, swizzle: int, group: tuple[int, int], *, keys_first: bool):
    """`address(n)`: what tells the tensor cores where numbers from `n` on are, of those summed."""
    large = (swizzle, swizzle) if keys_first else group
    (base, inner), (_, outer), _ = plgpu.mma_utils.create_descriptor(
        ref, swizzle=swizzle, large_tile=large, group_size=group, logical_k_major=keys_first
    )
    i64 = ir.IntegerType.get_signless(64)

    def address(n: int):
        offset = n // swizzle * outer + n % swizzle // _STEP * inner[1][0]
        more = llvm.ConstantOp(i64, ir.IntegerAttr.get(i64, offset >> 4)).result
        return llvm.add(base, more, overflow_flags=llvm.IntegerOverflowFlags.none)

    return address


def _product(registers: list, x: list, y, cols: int) -> list:
    """One instruction, adding to `registers`, or making them where there are none."""
    count, names = cols // 2, itertools.count()
    take = lambda n: [f"${next(names)}" for _ in range(n)]
    out = take(count)
    take(len(registers))
    a, (b,) = take(len(x)), take(1)
    a = f"{{{','.join(a)}}}" if len(a) > 1 else a[0]
    text = (
        f"{{ .reg .pred more; setp.ne.b32 more, {int(bool(registers))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{cols}k{_STEP}.f32.e4m3.e4m3 "
        f"{{{','.join(out)}}}, {a}, {b}, more, 1, 1; }}"
    )
    f32 = ir.F32Type.get()
    one = ir.VectorType.get((1,), f32)
    constraints = ["=f"] * count + [str(n) for n in range(len(registers))]
    constraints += ["r" if len(x) > 1 else "l"] * len(x) + ["l"]
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([one] * count), [*registers, *x, y], text,
        ",".join(constraints), asm_dialect=0, has_side_effects=True,
    )  # fmt: skip
    return [llvm.extractvalue(one, struct, [n]) for n in range(count)]


def _word(register):
    """Four numbers of 8 bits as one register."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return vector.extract(vector.bitcast(word, register), dynamic_position=[], static_position=[0])


def _assembly(text: str):
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "", has_side_effects=True)
