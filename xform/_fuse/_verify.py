"""Whether the compiled program is what was promised: one loop, and nothing larger than a block."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from xform._compat import no_compilation_cache, weakref_lru_cache
from xform._fuse._error import FusionError
from xform._hlo import Computation, Instruction, Module, parse
from xform._hlo._text import Leaf
from xform.lowering import row_blocks
from xform.lowering._region import Region, type_of

# What names other values' memory.
_VIEWS = frozenset(("parameter", "tuple", "get-tuple-element", "bitcast", "while", "call"))
# Bytes of an element of the widest dtype.
_WIDEST = 8


@weakref_lru_cache
def verify(region: Region) -> None:
    """Compiles a region by itself for this host, once, and reads the program.

    Raises:
      FusionError: XLA made several loops, or a value that is larger than a block.
    """
    blocks = row_blocks.Blocks(region, {})
    if 0 in region.sizes or blocks.count <= 1:  # a block is all there is
        return
    module = _compiled(region)
    entry = module.computations[module.entry]
    loops = [i for i in entry.instructions.values() if i.opcode == "while"]
    limit = _WIDEST * blocks.elements
    ends = [type_of(v).size * type_of(v).dtype.itemsize for v in region.finish.outvars]
    large = list(_large(module, entry, max([limit, *ends])))
    large += [found for loop in loops for found in _large(module, _body(module, loop), limit)]
    if len(loops) <= 1 and not large:  # of a few blocks, XLA writes them one after another
        return
    told = [f"`{i.opcode}` of {leaf.text} at {module.line(i)}" for i, leaf in large]
    told += [f"{len(loops)} loops"] if len(loops) > 1 else []
    raise FusionError(
        f"`fuse` promises one loop over blocks of at most {limit:,} bytes a value, and XLA "
        f"compiled it to something else: {'; '.join(told)}. Nearest legal split: leave what is at "
        "these lines outside."
    )


def _compiled(region: Region) -> Module:
    here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    struct = lambda v: jax.ShapeDtypeStruct(region.shape(v), v.aval.dtype, sharding=here)
    run = jax.jit(lambda *args: row_blocks.run(region, *args))
    with use_abstract_mesh(AbstractMesh((), ())), no_compilation_cache():
        text = run.lower(*map(struct, region.body.invars)).compile().as_text()
    return parse(text or "")


def _body(module: Module, loop: Instruction) -> Computation:
    return module.computations[loop.attrs["body"].lstrip("%")]


def _large(module: Module, where: Computation, limit: int) -> Iterator[tuple[Instruction, Leaf]]:
    """What a computation makes in memory of its own that takes more bytes."""
    for instruction in where.instructions.values():
        if instruction.opcode == "call":
            for name in instruction.calls:
                yield from _large(module, module.computations[name], limit)
        elif instruction.opcode in _VIEWS or _in_place(module, instruction):
            continue
        elif not _is_first(module, where, instruction):
            yield from ((instruction, leaf) for leaf in instruction.leaves if leaf.bytes > limit)


def _is_first(module: Module, where: Computation, instruction: Instruction) -> bool:
    """Whether it is what a result is before the loop begins: zeros."""
    match instruction.opcode:
        case "fusion":
            inside = module.computations[instruction.calls[0]]
            return _is_first(module, inside, inside.root)
        case "copy":
            return _is_first(module, where, where.instructions[instruction.operands[0]])
        case "broadcast":
            return not where.instructions[instruction.operands[0]].leaves[0].dims
    return instruction.opcode == "constant"


def _in_place(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction only writes into one of its operands."""
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.calls[0]]
        made = inside.root.operands if inside.root.opcode == "tuple" else (inside.root.name,)
        return all(_writes(inside, name) for name in made)
    return instruction.opcode == "dynamic-update-slice"


def _writes(where: Computation, name: str) -> bool:
    instruction = where.instructions[name]
    if instruction.opcode == "bitcast":
        return _writes(where, instruction.operands[0])
    return instruction.opcode == "dynamic-update-slice"
