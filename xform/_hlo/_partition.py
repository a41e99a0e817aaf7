"""What the partitioner did: values that every device holds whole, and values gathered to be cut.

It sees the whole program, with the sharding that each value was given or that it chose, and leaves
the program of one device. Where it finds no way from one sharding to another, it gathers the value
on every device and cuts from it what each one keeps: a full rematerialisation.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from xform._hlo._text import UNKNOWN, Computation, Instruction, Module, words

# What gives a value another shape, type or name.
_ALIAS = words("copy bitcast reshape transpose convert get-tuple-element")
# What a device makes from nothing, as part of what reads it.
_FILL = words("broadcast iota constant rng-bit-generator partition-id")
# What only hands on values that are looked at where they are made.
_HANDS_ON = words("tuple call while conditional async-start async-done after-all opt-barrier")
_FROM_DEVICES = "SPMDShardToFullShape"


@dataclass(frozen=True)
class Whole:
    """A value that every device holds whole.

    Attributes:
        argument: its number, for an argument of the program.
        op_name: JAX's name of what makes it.
        line: the user's line.
        array: its type, as XLA prints it.
        bytes: its size.
    """

    argument: int | None
    op_name: str
    line: str
    array: str
    bytes: int


@dataclass(frozen=True)
class Remade:
    """A value that was gathered whole to be cut in another way.

    Attributes:
        op_name, line, array, bytes: of the value, as in `Whole`.
        before, after: its sharding, and that of what reads it, as XLA prints them.
    """

    op_name: str
    line: str
    array: str
    bytes: int
    before: str
    after: str


def sharding_of(instruction: Instruction, part: int | None = None) -> str:
    """Returns the sharding of a value as XLA prints it; none at all means that it is replicated."""
    text = instruction.attrs.get("sharding", "{replicated}").removeprefix("{").removesuffix("}")
    if not text.startswith("{"):  # one array, or one for all of a tuple
        return text
    parts = re.findall(r"\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return parts[part or 0] if parts else text


def is_replicated(sharding: str) -> bool:
    """Whether every device holds the whole."""
    return sharding.endswith("replicated") or not _split(sharding)


def _split(sharding: str) -> bool:
    """Whether any dimension is split, or the value is one device's own."""
    if any(word in sharding for word in ("manual", "maximal", "unreduced")):
        return True
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if tiles:
        sizes = list(map(int, tiles[1].split(",")))
        kept = sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes
        return any(size > 1 for size in kept)
    dims = re.search(r"\], \[(.*)\]", sharding)
    return bool(dims and "'" in dims[1])


def held_whole(whole: Module, least: int) -> Iterator[Whole]:
    """Yields the values of at least so many bytes that every device holds whole.

    Only where they begin: not what is computed from one that was yielded, nor what `shard_map`
    returns, whose type says so.
    """
    for computation in whole.computations.values():
        entry = computation.name == whole.entry
        values = computation.instructions.values()
        manual = any("manual" in i.attrs.get("sharding", "") for i in values) and not entry
        known: set[str] = set()
        filled: set[str] = set()
        for instruction in values:
            sources = instruction.operands
            if manual and "sharding" not in instruction.attrs:
                continue
            if instruction.opcode in _FILL or (
                instruction.opcode in _ALIAS and sources and filled.issuperset(sources)
            ):
                filled.add(instruction.name)
                continue
            if len(instruction.leaves) != 1 or instruction.bytes < least:
                continue
            if not is_replicated(sharding_of(instruction)):
                continue
            parameter = instruction.opcode == "parameter"
            follows = any(name in known for name in sources) or _carried(computation, instruction)
            if follows or (parameter and not entry) or _made_by_devices(instruction):
                known.add(instruction.name)
                continue
            known.add(instruction.name)
            yield Whole(
                argument=int(instruction.literal) if parameter else None,
                op_name=instruction.op_name,
                line=whole.line(instruction),
                array=instruction.leaves[0].text,
                bytes=instruction.bytes,
            )


def _made_by_devices(instruction: Instruction) -> bool:
    return instruction.opcode in _HANDS_ON or _FROM_DEVICES in instruction.text


def _carried(computation: Computation, instruction: Instruction) -> bool:
    """Whether an operand is part of what a loop carries, as large and held whole."""
    for name, part in re.findall(r"%([\w.\-]+)#(\d+)", instruction.literal):
        source = computation.instructions[name]
        leaf = source.leaves[int(part)]
        if leaf.bytes >= instruction.bytes and is_replicated(sharding_of(source, int(part))):
            return True
    return False


def remade(whole: Module, split: Module) -> Iterator[Remade]:
    """Yields what the partitioner gathered on every device only to cut it again."""
    made = _by_name(whole)
    for computation in split.computations.values():
        for gather in computation.instructions.values():
            if gather.opcode != "all-gather" or not gather.inserted:
                continue
            value = made.get((gather.op_name, split.line(gather), gather.leaves[0].dtype), [])
            # Of a value whose shards are uneven, each device gathers the padding too.
            fits = [
                (body, i) for body, i in value if i.leaves[0].size <= gather.leaves[0].size
                and not is_replicated(sharding_of(i))
            ]  # fmt: skip
            if not fits or not _is_cut(computation, gather):
                continue
            body, source = max(fits, key=lambda x: x[1].leaves[0].size)
            if _padded(gather, source):
                yield Remade(
                    op_name=source.op_name,
                    line=whole.line(source),
                    array=source.leaves[0].text,
                    bytes=source.bytes,
                    before=sharding_of(source),
                    after=_wanted(body, source),
                )


def _padded(gather: Instruction, source: Instruction) -> bool:
    """Whether a gather makes all of a value, and at most its padding beside."""
    dims = zip(gather.leaves[0].dims, source.leaves[0].dims, strict=False)
    same_rank = len(gather.leaves[0].dims) == len(source.leaves[0].dims)
    return same_rank and all(a >= b for a, b in dims)


def _by_name(module: Module) -> dict[tuple[str, str, str], list[tuple[Computation, Instruction]]]:
    """The arrays of a module by the name, line and type that the partitioner keeps of each."""
    found: dict[tuple[str, str, str], list[tuple[Computation, Instruction]]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if len(instruction.leaves) == 1:
                key = (
                    instruction.op_name,
                    module.line(instruction),
                    instruction.leaves[0].dtype,
                )
                found.setdefault(key, []).append((computation, instruction))
    return found


def _is_cut(computation: Computation, gather: Instruction) -> bool:
    """Whether each device keeps only a part of what was gathered, chosen by its number."""
    for user in computation.users[gather.name]:
        if user.opcode == "dynamic-slice" and user.operands[0] == gather.name:
            starts = [computation.instructions[name] for name in user.operands[1:]]
            if any(_from_device(computation, start) for start in starts):
                return True
        moves = user.opcode in _ALIAS or user.opcode in ("pad", "slice")
        if moves and _is_cut(computation, user):
            return True
    return False


def _from_device(computation: Computation, start: Instruction) -> bool:
    """Whether a number is computed from the number of the device."""
    seen, todo = set(), [start]
    while todo:
        one = todo.pop()
        if one.opcode == "partition-id":
            return True
        if one.name not in seen and one.opcode != "parameter" and not one.leaves[0].dims[1:]:
            seen.add(one.name)
            todo += [computation.instructions[name] for name in one.operands]
    return False


def _wanted(body: Computation, source: Instruction) -> str:
    """The sharding of what reads a value in another one than its own."""
    own = sharding_of(source)
    for user in body.users[source.name]:
        if sharding_of(user) != own:
            return sharding_of(user)
        if user.opcode == "copy":
            return _wanted(body, user)
    return "another sharding"


def readers(whole: Module, op_name: str, line: str) -> list[str]:
    """Returns the names of what reads a value in another sharding than its own.

    A collective that the partitioner puts in goes by the name of the value that it moves, where the
    user knows it by that of the operation that wants the value moved.
    """
    names = []
    for computation in whole.computations.values():
        for instruction in computation.instructions.values():
            own = instruction.op_name  # of a body, without what encloses it
            same = own and (op_name == own or op_name.endswith(f"/{own}"))
            if same and whole.line(instruction) in (line, UNKNOWN):
                names += _readers(computation, instruction)
    return list(dict.fromkeys(names))


def _readers(computation: Computation, source: Instruction) -> list[str]:
    names = []
    for user in computation.users[source.name]:
        if user.opcode == "copy" and user.op_name == source.op_name:
            names += _readers(computation, user)
        elif sharding_of(user) != sharding_of(source):
            names.append(user.op_name)
    return names
