"""What Pallas can't say, or not well, in Mosaic's own terms: three tiles, turns, and cleaning.

The tiles are in the layout of a product's result: a thread holds pairs of neighbouring columns, 8
columns and 8 rows apart. What it holds is one place of its own plus constants, and saying so is
what matters: an iota costs a conversion or an addition of its own for every element.
"""

import math
from collections.abc import Iterator

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from xform.lowering.mosaic_gpu import _plgpu as plgpu

_LAYOUT = plgpu.FragmentedLayout


def index_tile(start, shape: tuple[int, int], dim: int, *, floating: bool):
    """The tile whose element (r, c) is `start + r` or `start + c`.

    Args:
      start: int32.
      shape: rows and columns.
      dim: 0 for rows, 1 for columns.
      floating: whether it is float32, exact below 2**24, or int32.
    """
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    own = arith.index_cast(i32, next(iter(_LAYOUT.thread_idxs(shape)))[dim])
    base = arith.addi(own, start)
    base = arith.sitofp(f32, base) if floating else base
    element = f32 if floating else i32
    constant = lambda n: arith.constant(element, float(n) if floating else n)
    add = arith.addf if floating else arith.addi
    made = {}

    def at(*place):
        if place[dim] not in made:
            made[place[dim]] = add(base, constant(place[dim]))
        return made[place[dim]]

    return _tile(shape, element, at, None if floating else True)


def band_tile(ref, start, shape: tuple[int, int], sign: int, signed: bool | None):
    """The tile whose element (r, c) is `ref[start + sign * (r - c)]`.

    Eight rows and four pairs of columns of a warp read 14 neighbouring words: no bank twice.

    Args:
      ref: a vector in shared memory, 32 bits an element.
      start: int32.
      shape: rows and columns.
      sign: 1 or -1.
      signed: whether integers are signed; None for floats.
    """
    index = ir.IndexType.get()
    row, col = next(iter(_LAYOUT.thread_idxs(shape)))
    there, back = (row, col) if sign == 1 else (col, row)
    base = arith.subi(arith.addi(arith.index_cast(index, start), there), back)
    made = {}

    def at(r, c):
        if r - c not in made:
            offset = arith.constant(index, sign * (r - c))
            made[r - c] = memref.load(ref, [arith.addi(base, offset)])
        return made[r - c]

    return _tile(shape, ir.MemRefType(ref.type).element_type, at, signed)


def lookup_tile(ref, dims: tuple[int, ...], indices, signed: bool | None):
    """The tile whose element (r, c) is `ref[..., indices[n][r, c], ...]`, widened to 32 bits.

    Args:
      ref: an array in global memory.
      dims: the dimension of each index; the others are read at 0.
      indices: tiles of int32, of one layout, none negative.
      signed: whether the results are signed integers; None for floats.
    """
    place_type = ir.IndexType.get()
    zero = arith.constant(place_type, 0)

    def at(place) -> ir.Value:
        found = [zero] * ir.MemRefType(ref.type).rank
        for dim, tile in zip(dims, indices, strict=True):
            vectors, n = tile.registers[place[:-1]], place[-1]
            index = vector.extract(vectors, dynamic_position=[], static_position=[n])
            found[dim] = arith.index_cast(place_type, index)
        return _widened(memref.load(ref, found), signed)

    registers = np.empty(indices[0].registers.shape, dtype=object)
    for place in np.ndindex(registers.shape):
        values = [at((*place, n)) for n in range(_LAYOUT.vector_length)]
        pair = ir.VectorType.get((_LAYOUT.vector_length,), values[0].type)
        registers[place] = vector.from_elements(pair, values)
    return plgpu.FragmentedArray(_registers=registers, _layout=_LAYOUT, _is_signed=signed)


def _widened(x: ir.Value, signed: bool | None) -> ir.Value:
    """An element as float32 or as a 32-bit integer; a bit is 0 or 1."""
    if signed is None:
        f32 = ir.F32Type.get()
        return x if x.type == f32 else arith.extf(f32, x)
    i32 = ir.IntegerType.get_signless(32)
    if x.type == i32:
        return x
    return arith.extsi(i32, x) if signed and x.type.width > 1 else arith.extui(i32, x)


def _tile(shape: tuple[int, int], element, at, signed: bool | None):
    """The tile of what `at` returns for the constant part (r, c) of each place of a thread."""
    registers = np.empty(_LAYOUT.registers_shape(shape), dtype=object)
    pair = ir.VectorType.get((_LAYOUT.vector_length,), element)
    for place, row, col in _places(registers.shape, shape):
        values = [at(row, col + n) for n in range(_LAYOUT.vector_length)]
        registers[place] = vector.from_elements(pair, values)
    return plgpu.FragmentedArray(_registers=registers, _layout=_LAYOUT, _is_signed=signed)


def _places(registers: tuple[int, ...], shape: tuple[int, int], layout=_LAYOUT) -> Iterator[tuple]:
    """Every register of a thread, and the row and column of its first element in thread 0."""
    strides = layout.tiling.tile_strides((shape[1], 1))
    for place in np.ndindex(registers):
        linear = sum(i * s for i, s in zip(place, strides, strict=False))
        yield place, linear // shape[1], linear % shape[1]


def store_by_thread(ref, tile) -> None:
    """Stores a tile of 64 rows as the threads hold it, 16 bytes of each at a time.

    Args:
      ref: float32 `[n, 256]` in shared memory: of 16 columns after another, first of all threads'
        upper rows, then of those 8 below, two columns and the two 8 to the right. So four threads
        have 16 columns of a row side by side, for whoever reads rows.
      tile: float32, in the layout of a product's result.
    """
    for fours, place in _fours(tile.registers, tile.shape):
        first, second = (tile.registers[n] for n in fours)
        values = [_element(x, i) for x in (first, second) for i in (0, 1)]
        four = ir.VectorType.get((4,), ir.F32Type.get())
        vector.store(vector.from_elements(four, values), ref, place)


def load_by_thread(ref, shape: tuple[int, int]):
    """The tile that was stored so."""
    f32 = ir.F32Type.get()
    registers = np.empty(_LAYOUT.registers_shape(shape), dtype=object)
    for fours, place in _fours(registers, shape):
        four = vector.load(ir.VectorType.get((4,), f32), ref, place)
        for n, i in zip(fours, (0, 2), strict=True):
            pair = [_element(four, i), _element(four, i + 1)]
            registers[n] = vector.from_elements(ir.VectorType.get((2,), f32), pair)
    return plgpu.FragmentedArray(_registers=registers, _layout=_LAYOUT, _is_signed=None)


def add_by_thread(ref, tile) -> None:
    """Adds a tile of 64 rows to global memory, laid out as by `store_by_thread`."""
    add = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    i64 = ir.IntegerType.get_signless(64)
    pointer = _address(ref)
    first = arith.muli(arith.extui(i64, _thread()), arith.constant(i64, 16))
    first = arith.addi(llvm.ptrtoint(i64, pointer), first)
    for n, (fours, _) in enumerate(_fours(tile.registers, tile.shape)):
        address = arith.addi(first, arith.constant(i64, 2048 * n))
        values = [_element(tile.registers[x], i) for x in fours for i in (0, 1)]
        _assembly([address, *values], add, "l,f,f,f,f,~{memory}")


def _fours(registers, shape: tuple[int, int]):
    """Of each 16 bytes of a thread: the two registers that they come from, and their place."""
    at = {(r, c): place for place, r, c in _places(registers.shape, shape)}
    index = ir.IndexType.get()
    constant = lambda n: arith.constant(index, n)
    thread = arith.index_cast(index, _thread())
    row = arith.divui(thread, constant(64))
    col = arith.muli(arith.remui(thread, constant(64)), constant(4))
    for n in range(shape[1] // 8):
        r, c = 8 * (n % 2), 16 * (n // 2)
        yield (at[r, c], at[r, c + 8]), [arith.addi(row, constant(2 * n)), col]


def in_eight(tile):
    """A float32 tile in e4m3, as the first operand of a product in 8 bits has it.

    The registers of a thread stay where they are, so that of every 16 columns the order is another.
    """
    convert = """
    {
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
    return _four_in_one(tile, convert)


def weights_in_eight(tile):
    """The same, 256 times as large, of numbers from 0 to 1.75.

    The instruction that makes e4m3 seems as slow as an exponential. But where no number is
    negative, and none is 2 or more, the upper half of a float16 is the e4m3 number of the same
    bits, which is 256 times as large, also below the least normal one: what is left is to round,
    and to pick.
    """
    convert = """
    {
    .reg .b32 low, high;
    cvt.rn.f16x2.f32 low, $2, $1;
    cvt.rn.f16x2.f32 high, $4, $3;
    mad.lo.s32 low, low, 2, 0x00800080;
    mad.lo.s32 high, high, 2, 0x00800080;
    prmt.b32 $0, low, high, 0x7531;
    }"""
    return _four_in_one(tile, convert)


def _four_in_one(tile, convert: str):
    """What an instruction makes of four numbers of a row, as one register."""
    i32 = ir.IntegerType.get_signless(32)
    e4m3 = ir.VectorType.get((4,), ir.Float8E4M3FNType.get())
    layout = plgpu.EightBits
    at = {(r, c): place for place, r, c in _places(tile.registers.shape, tile.shape)}
    registers = np.empty(layout.registers_shape(tile.shape), dtype=object)
    for place, row, col in _places(registers.shape, tile.shape, layout):
        pairs = (tile.registers[at[row, col + n]] for n in (0, 8))
        four = [_element(pair, n) for pair in pairs for n in (0, 1)]
        packed = llvm.inline_asm(i32, four, convert, "=r,f,f,f,f")
        word = vector.broadcast(ir.VectorType.get((1,), i32), packed)
        registers[place] = vector.bitcast(e4m3, word)
    return plgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def copied(tile):
    """A tile of 8 bits in other registers, from here on."""
    i32 = ir.IntegerType.get_signless(32)
    one, e4m3 = ir.VectorType.get((1,), i32), tile.registers.flat[0].type

    def copy(register):
        word = _element(vector.bitcast(one, register), 0)
        word = llvm.inline_asm(i32, [word], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return vector.bitcast(e4m3, vector.broadcast(one, word))

    registers = np.empty_like(tile.registers)
    for place in np.ndindex(registers.shape):
        registers[place] = copy(tile.registers[place])
    return plgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)


# Of two numbers of 16 bits in a word: all bits of an exponent, and the lowest of each.
_EXPONENTS = {"bf16": (0x7F807F80, 0x00800080), "f16": (0x7C007C00, 0x04000400)}
# Bytes that the threads of a warpgroup read at once.
_ROUND = 128 * 16


def clean_by_thread(ref) -> None:
    """Puts 0 where a tile of shared memory, 16 bits a number, has an infinity or NaN.

    In whatever order the numbers lie, 16 bytes of each thread at a time. An exponent of ones
    carries into the sign's place when one is added to it: two instructions for two numbers, and a
    loop that seldom runs, out of the way of those around it.
    """
    kind = ir.MemRefType(ref.type)
    exponents, ones = _EXPONENTS[str(kind.element_type)]
    rounds, rest = divmod(2 * math.prod(kind.shape), _ROUND)
    assert rest == 0, f"{kind} is no multiple of {_ROUND} bytes"
    i32 = ir.IntegerType.get_signless(32)
    start = llvm.ptrtoint(i32, plgpu.memref_ptr(ref))
    start = arith.addi(start, arith.muli(_thread(), arith.constant(i32, 16)))
    words = [f"w{n}" for n in range(4)]
    tested = "".join(
        f"and.b32 t, {w}, {exponents:#x}; add.s32 t, t, {ones:#x}; or.b32 bad, bad, t;\n"
        for w in words
    )
    mended = "".join(
        f"and.b32 t, {w}, {exponents:#x}; add.s32 t, t, {ones:#x}; and.b32 t, t, 0x80008000;\n"
        f"shr.u32 t, t, 15; mul.lo.u32 t, t, 0xffff; not.b32 t, t; and.b32 {w}, {w}, t;\n"
        for w in words
    )
    four = "{" + ", ".join(words) + "}"
    text = f"""
    {{
    .reg .pred some, more;
    .reg .b32 w<4>, t, bad, at, left;
    mov.b32 at, $0;
    mov.b32 left, {rounds};
    next_${{:uid}}:
    .pragma "nounroll";
    ld.shared.v4.b32 {four}, [at];
    mov.b32 bad, 0;
    {tested}
    and.b32 bad, bad, 0x80008000;
    setp.ne.u32 some, bad, 0;
    @!some bra clean_${{:uid}};
    {mended}
    st.shared.v4.b32 [at], {four};
    clean_${{:uid}}:
    add.s32 at, at, {_ROUND};
    sub.s32 left, left, 1;
    setp.gt.s32 more, left, 0;
    @more bra next_${{:uid}};
    }}"""
    _assembly([start], text, "r,~{memory}")


def _thread():
    """The number of a thread in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(plgpu.thread_idx(), arith.constant(i32, 128))


def _element(x, n: int):
    return vector.extract(x, dynamic_position=[], static_position=[n])


def await_count(ref, count):
    """Waits until the int32 `ref` in global memory, which others count up, is `count` or more.

    What they have added before is then there, for threads and for the copy engine.
    """
    wait = """
    {
    .reg .pred below;
    .reg .s32 seen;
    again_${:uid}:
    ld.acquire.gpu.global.s32 seen, [$0];
    setp.lt.s32 below, seen, $1;
    @below bra again_${:uid};
    fence.proxy.async;
    }"""
    _assembly([_address(ref), count], wait, "l,r,~{memory}")


def count_up(ref):
    """Adds one to the int32 `ref` in global memory, after all that the warpgroup has added."""
    add = """
    {
    .reg .pred chosen;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 chosen, thread, 0;
    fence.proxy.async;
    @chosen red.release.gpu.global.add.s32 [$0], 1;
    }"""
    plgpu.warpgroup_barrier()
    _assembly([_address(ref)], add, "l,~{memory}")


def _assembly(operands, text: str, constraints: str):
    llvm.inline_asm(None, operands, text, constraints, has_side_effects=True)


def _address(ref):
    """The address of a `ref` of one element."""
    return plgpu.memref_ptr(ref)
