"""What a program's communication is held to: its declarations, their promises, and the mesh."""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from xform._hlo import (
    Collective,
    Dump,
    Moves,
    Program,
    Whole,
    held_whole,
    readers,
    remade,
)
from xform._program import Region
from xform._tables import short, si
from xform.sharding._declare import Declaration, covering, declared, separate
from xform.sharding._divergence import diverging
from xform.sharding._findings import Message, Offender


class Named:
    """The user's names of what a program is given and returns."""

    def __init__(self, dump: Dump, arguments: Sequence[str], results: Sequence[str]):
        self.given, self.returned, self.split = arguments, results, dump.split
        self.moves = Moves(dump.split) if dump.split else None

    def argument(self, op_name: str) -> str | None:
        """The path of an argument, from the name that it has in the program."""
        found = re.fullmatch(r"flat\[(\d+)\]", op_name)
        return self.given[int(found[1])] if found else None

    def of(self, c: Collective) -> tuple[str, ...]:
        """The arguments that a collective moves, or else the results that it makes."""
        if self.split is None or self.moves is None:
            return ()
        names = separate(c.op_name)
        same = [
            (body, one)
            for body in self.split.computations.values()
            for one in body.instructions.values()
            if one.base == c.op and any(f"/{name}".endswith(f"/{one.op_name}") for name in names)
        ]
        # Joined ones may have other shapes than what was joined.
        alike = [found for found in same if (found[1].leaves[0].text,) == c.arrays] or same
        moved = [p.op_name for found in alike for p in self.moves.arguments(*found)]
        given = [f"argument {path!r}" for path in map(self.argument, moved) if path is not None]
        if given:
            return tuple(dict.fromkeys(given))
        made = [i for found in alike for i in self.moves.results(*found)]
        results = (self.returned[i] for i in made)
        return tuple(
            dict.fromkeys(f"result {path!r}" if path else "the result" for path in results)
        )


def message(c: Collective, report: Program, dump: Dump, named: Named) -> Message:
    """A collective of the compiled program, with who declared it."""
    axes = c.axes or ()
    kernels = {k.name: k for k in report.kernels}
    rules: list[str] = []
    promises: list[Declaration] = []
    undeclared: list[str] = []
    for name in _names(c, dump):
        candidates = [name]
        if c.inserted and dump.whole is not None:
            candidates += readers(dump.whole, name, c.kernel.line)
        by = next((one for one in candidates if covering(one, axes)), None)
        found = covering(by, axes) if by else None
        if by and found:
            rules.append(found.rule)
            promises += declared(by)
        else:
            undeclared.append(name)
    if not axes and not undeclared and c.axes is None:
        undeclared.append(c.op_name)
    return Message(
        op=c.op,
        axes=axes,
        rules=tuple(dict.fromkeys(rules)),
        undeclared=tuple(dict.fromkeys(undeclared)),
        arrays=c.arrays,
        sent=c.sent,
        trips=c.kernel.trips,
        looped=c.kernel.trips > 1 or bool(c.kernel.loops),
        covered=c.overlaps and any(kernels[name].kind == "matmul" for name in c.window),
        promises=tuple(dict.fromkeys(promises)),
        inserted=c.inserted,
        line=c.kernel.line,
        paths=named.of(c),
    )


def _names(c: Collective, dump: Dump) -> list[str]:
    """JAX's names of what a collective does, of which XLA may have joined several, or lost all."""
    if c.op_name or dump.split is None:
        return separate(c.op_name)
    same = [
        instruction.op_name
        for computation in dump.split.computations.values()
        for instruction in computation.instructions.values()
        if instruction.base == c.op and tuple(x.text for x in instruction.leaves) == c.arrays
    ]
    return list(dict.fromkeys(same)) or [""]


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

    def __init__(self, patterns: str | Sequence[str], named: Named, leaves: Sequence[Any]):
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        given = zip(named.given, leaves, strict=True)
        self.shapes = {tuple(x.shape) for path, x in given if self.fits(path)}
        self.named = named

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __contains__(self, value: Whole) -> bool:
        if value.argument is not None:
            return self.fits(self.named.argument(value.op_name) or "")
        dims = value.array.partition("[")[2].removesuffix("]")
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
        return shape in self.shapes or self.fits(value.op_name)


def replicated(dump: Dump, allowed: Allowed, large: int) -> Iterator[Offender]:
    """Large values that every device holds whole."""
    for value in held_whole(dump.whole, large) if dump.whole else ():
        if value not in allowed:
            path = allowed.named.argument(value.op_name)
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
