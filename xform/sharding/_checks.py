"""What a program's communication is held to: its declarations, their promises, and the mesh."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from xform._hlo import (
    COLLECTIVES,
    Collective,
    Computation,
    Dump,
    Instruction,
    Kernel,
    Module,
    Moves,
    Program,
    Whole,
    axes_of,
    groups_of,
    held_whole,
    readers,
    remade,
)
from xform._program import Region
from xform._show import short, si
from xform.sharding._declare import Declaration, covering, declared, separate
from xform.sharding._divergence import diverging
from xform.sharding._findings import Message, Offender


class Written(NamedTuple):
    """A collective as the partitioner leaves it, before XLA joins, splits and moves any.

    Attributes:
        body, instruction: where it stands.
        axes: the mesh axes over which it runs.
        line: the user's line.
    """

    body: Computation
    instruction: Instruction
    axes: tuple[str, ...]
    line: str

    def is_named(self, name: str) -> bool:
        """Whether it goes by a name in the compiled program, where what encloses it is added."""
        own = self.instruction.op_name
        return bool(own) and f"/{name}".endswith(f"/{own}")


class Partitioned:
    """What the partitioner was given and made, with the user's names of arguments and results."""

    def __init__(
        self,
        dump: Dump,
        mesh: Mapping[str, int],
        arguments: Sequence[str],
        results: Sequence[str],
    ):
        self.whole, self.split = dump.whole, dump.split
        self.given, self.returned = arguments, results
        self.moves = Moves(dump.split) if dump.split else None
        self.written = list(_written(dump.split, mesh)) if dump.split else []

    def argument(self, op_name: str) -> str | None:
        """The path of an argument, from the name that it has in the program."""
        found = re.fullmatch(r"flat\[(\d+)\]", op_name)
        return self.given[int(found[1])] if found else None

    def paths(self, c: Collective) -> tuple[str, ...]:
        """The arguments that a collective moves, or else the results that it makes."""
        if self.moves is None:
            return ()
        names = separate(c.op_name)
        same = [
            w for w in self.written if w.instruction.base == c.op and any(map(w.is_named, names))
        ]
        # Joined ones may have other shapes than what was joined.
        alike = [w for w in same if (w.instruction.leaves[0].text,) == c.arrays] or same
        moved = [p for w in alike for p in self.moves.arguments(w.body, w.instruction)]
        given = [path for p in moved if (path := self.argument(p.op_name)) is not None]
        if given:
            return tuple(dict.fromkeys(f"argument {path!r}" for path in given))
        made = [i for w in alike for i in self.moves.results(w.body, w.instruction)]
        results = dict.fromkeys(self.returned[i] for i in made)
        return tuple(f"result {path!r}" if path else "the result" for path in results)

    def parts(self, c: Collective) -> list[tuple[str, tuple[str, ...]]]:
        """The names that XLA joined to a collective, each with its axes.

        Where XLA lost the name, it is one of all that it could be made of.
        """
        if c.op_name or not self.written:
            return [(name, c.axes or ()) for name in separate(c.op_name)]
        could = [
            (w.instruction.op_name, w.axes)
            for w in self.written
            if w.instruction.base == c.op and w.axes and set(w.axes) <= set(c.axes or ())
        ]
        return list(dict.fromkeys(could)) or [("", c.axes or ())]

    def said(self, name: str, c: Collective) -> list[str]:
        """The names under which a collective may be declared."""
        if c.inserted and self.whole is not None:
            return [name, *readers(self.whole, name, c.kernel.line)]
        return [name]


def _written(split: Module, mesh: Mapping[str, int]) -> Iterator[Written]:
    for body in split.computations.values():
        for instruction in body.instructions.values():
            if instruction.base in COLLECTIVES and not instruction.opcode.endswith("-done"):
                axes = axes_of(groups_of(instruction, split.partitions), mesh)
                yield Written(body, instruction, axes or (), split.line(instruction))


def message(c: Collective, report: Program, partitioned: Partitioned) -> Message:
    """A collective of the compiled program, with who declared it."""
    kernels = {k.name: k for k in report.kernels}
    rules: list[str] = []
    promises: list[Declaration] = []
    undeclared: list[str] = []
    for name, axes in partitioned.parts(c):
        by = next((one for one in partitioned.said(name, c) if covering(one, axes)), None)
        found = covering(by, axes) if by else None
        if by and found:
            rules.append(found.rule)
            promises += declared(by)
        else:
            undeclared.append(name)
    return Message(
        op=c.op,
        axes=c.axes or (),
        rules=tuple(dict.fromkeys(rules)),
        undeclared=tuple(dict.fromkeys(undeclared)),
        arrays=c.arrays,
        sent=c.sent,
        trips=c.kernel.trips,
        looped=c.kernel.trips > 1 or bool(c.kernel.loops),
        covered=c.overlaps and any(_multiplies(kernels[name]) for name in c.window),
        promises=tuple(dict.fromkeys(promises)),
        inserted=c.inserted,
        line=c.kernel.line,
        paths=partitioned.paths(c),
    )


# Kernels of our own, whose inside a compiled program doesn't tell: attention's two passes. The
# careful twin of the forward kernel, which nearly always returns at once, hides nothing.
_FUSED = ("flex_attention", "flex_attention_backward")


def _multiplies(kernel: Kernel) -> bool:
    """Whether it is made of matrix products."""
    if kernel.kind == "library":
        return not set(_FUSED).isdisjoint(kernel.op_name.split("/")[-2:])
    return kernel.kind == "matmul"


def swallowed(messages: Sequence[Message], partitioned: Partitioned) -> Iterator[Offender]:
    """Undeclared collectives that XLA joined to others, of which they may not keep their names."""
    named = [name for m in messages for name in m.undeclared]
    for w in partitioned.written:
        own = w.instruction.op_name
        if w.instruction.inserted or not w.axes or covering(own, w.axes):
            continue
        if not any(map(w.is_named, named)):
            array = w.instruction.leaves[0].text
            text = f"{w.instruction.base} of {array} over {', '.join(w.axes)}, joined to another"
            yield Offender("undeclared", f"{text}, put in for {_last(own)}", w.line)


def broken(messages: Sequence[Message], report: Program) -> Iterator[Offender]:
    """Collectives that no rule declared, and promises that are not kept."""
    for m in messages:
        numbers = f"{m.what}, {si(m.sent)}B sent in each of {m.trips} turns"
        if m.undeclared:
            by = "by the partitioner " if m.inserted else ""
            near = [d for name in m.undeclared for d in declared(name)]
            other = "; ".join(f"{d.rule!r} declares {', '.join(d.axes) or 'no axis'}" for d in near)
            names = " and ".join(map(_last, m.undeclared))
            text = f"{numbers}, put in {by}for {names}" + (f" ({other})" if other else "")
            yield Offender("undeclared", text, m.line)
        for promise in m.promises:
            if m.op in promise.hidden and not m.covered and report.platform == "gpu":
                yield Offender("exposed", f"{numbers}, of {promise.rule!r}", m.line)
            if promise.once and m.looped:
                yield Offender("repeated", f"{numbers}, of {promise.rule!r}", m.line)


def _last(name: str) -> str:
    """The end of an operation's name, which says most."""
    parts = [part for part in name.split("/") if part]
    return f"`{'/'.join(parts[-2:])}`" if parts else "an operation without a name"


class Allowed:
    """The values that the user says may be whole."""

    def __init__(self, patterns: str | Sequence[str], names: Partitioned, leaves: Sequence[Any]):
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        given = zip(names.given, leaves, strict=True)
        self.shapes = {tuple(x.shape) for path, x in given if self.fits(path)}
        self.names = names

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __contains__(self, value: Whole) -> bool:
        if value.argument is not None:
            return self.fits(self.names.argument(value.op_name) or "")
        dims = value.array.partition("[")[2].removesuffix("]")
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
        return shape in self.shapes or self.fits(value.op_name)


def replicated(dump: Dump, allowed: Allowed, large: int) -> Iterator[Offender]:
    """Large values that every device holds whole."""
    for value in held_whole(dump.whole, large) if dump.whole else ():
        if value not in allowed:
            path = allowed.names.argument(value.op_name)
            name = f"argument {path!r}" if path is not None else _last(value.op_name)
            yield Offender("whole", f"{name}, {value.array}, {si(value.bytes)}B", value.line)


def rematerialised(dump: Dump) -> Iterator[Offender]:
    """Values that are gathered whole, only to be split in another way."""
    if dump.whole is None or dump.split is None:
        return
    for value in remade(dump.whole, dump.split):
        yield Offender(
            "remade",
            f"{_last(value.op_name)}, {value.array}, {si(value.bytes)}B, from {value.before} to "
            f"{value.after}",
            value.line,
        )


def divergent(program: Region, sizes: Mapping[str, int]) -> Iterator[Offender]:
    """Collectives in control flow that differs along their axis."""
    for d in diverging(program):
        axes = [axis for axis in d.axes if sizes.get(axis, 2) > 1]
        if axes:
            along = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
            text = (
                f"{d.op} of {d.array} over {along} in the {d.control} at {short(d.control_line)}, "
                f"whose predicate differs along {', '.join(axes)}"
            )
            yield Offender("diverging", text, d.line)
