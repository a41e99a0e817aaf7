"""A compiled program held to what its rules declared.

`audit` compiles a function for a mesh, which need not be present, and reads what the devices say to
each other: each collective with its axes, bytes, line and turns, the rule that declared it, and
whether a matrix product runs meanwhile. It raises where the program says more than was declared, or
hides less than was promised.
"""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from xform._hlo import (
    UNKNOWN,
    Collective,
    Dump,
    Program,
    Whole,
    compile_and_dump,
    held_whole,
    lower_for,
    mesh_of,
    read,
    readers,
    remade,
)
from xform._program import program
from xform._tables import Table, as_html, as_text, short, si
from xform.sharding._declare import Declaration, covering, declared, separate
from xform.sharding._divergence import diverging

# A value is large from this size on: an embedding, a matrix, an activation; not a norm's scale.
LARGE = 2**24


class AuditError(ValueError):
    """A program that says more than was declared, or hides less than was promised.

    Attributes:
        report: what was found, with its `offenders`.
    """

    def __init__(self, report: "Audit"):
        super().__init__(report.complaint())
        self.report = report


@dataclass(frozen=True)
class Message:
    """One collective of a compiled program.

    Attributes:
        op: such as "all-gather".
        axes: the mesh axes along which it runs.
        rules: the rules that declared it; several, where XLA joined their collectives to one.
        undeclared: JAX's names of the parts of it that no rule declared.
        arrays: the types of what it makes, on one device.
        sent: bytes that one device sends, in one turn.
        trips: how many turns it has in one run of the program; `looped`, whether it is in a loop.
        looped: see there.
        covered: whether a matrix product runs between its start and its end.
        promises: all declarations that it stands in.
        inserted: whether the partitioner put it in, and not the user.
        line: the user's line.
    """

    op: str
    axes: tuple[str, ...]
    rules: tuple[str, ...]
    undeclared: tuple[str, ...]
    arrays: tuple[str, ...]
    sent: int
    trips: int
    looped: bool
    covered: bool
    promises: tuple[Declaration, ...]
    inserted: bool
    line: str

    @property
    def what(self) -> str:
        """It in words: `all-gather of bf16[4096,1024] over dp`."""
        arrays = ", ".join(self.arrays[:3]) + (", …" if len(self.arrays) > 3 else "")
        return f"{self.op} of {arrays} over {', '.join(self.axes) or 'no axis'}"


class Offender(NamedTuple):
    """A broken contract.

    Attributes:
        kind: a key of `KINDS`.
        text: what it is, with its path or name, axes and numbers.
        line: the user's line.
    """

    kind: str
    text: str
    line: str


# What each kind of offender is called, and what to do about it.
KINDS = {
    "undeclared": (
        "communicates where no rule declared it",
        "put the operation into `with declare(rule, axes)`, or remove what makes XLA move the data",
    ),
    "exposed": (
        "is promised to be hidden, and no matrix product runs meanwhile",
        "start it earlier, or take `hidden` from its declaration",
    ),
    "repeated": (
        "is promised to run once, and stands in a loop",
        "sum in the loop and communicate after it, or take `once` from its declaration",
    ),
    "whole": (
        "is held whole on every device",
        "split it over an axis, or name it in `replicated`",
    ),
    "remade": (
        "is gathered on every device, only to be split in another way",
        "go from one split to the other in steps that move one axis each",
    ),
    "diverging": (
        "waits for devices that may have taken another branch",
        "move the collective out of the branch or the loop, or make the predicate equal along the "
        "axis, by `jax.lax.pmax` for example",
    ),
}


@dataclass(frozen=True)
class Audit:
    """What `audit` returns; `print` shows it, a notebook draws it.

    Attributes:
        name: of the program.
        device: the kind of device that it was compiled for.
        mesh: size of each axis.
        messages: its collectives, in the order in which they start.
        offenders: contracts that it breaks.
        memory: bytes on each device: of arguments, results and temporaries.
        program: all that was read of it.
    """

    name: str
    device: str
    mesh: Mapping[str, int]
    messages: tuple[Message, ...]
    offenders: tuple[Offender, ...]
    memory: Mapping[str, int]
    program: Program

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns numbers to keep in a file and compare: of each rule, operation and axes.

        `"gather all-gather dp": {"collectives": 2, "in loops": 1, "covered": 1, "turns": 16,
        "sent": …}`; bytes are those of one device in one run.
        """
        found: dict[str, dict[str, int]] = {}
        for m in self.messages:
            rule = "+".join(m.rules) if not m.undeclared else "undeclared"
            row = found.setdefault(
                f"{rule} {m.op} {','.join(m.axes)}",
                dict.fromkeys(("collectives", "in loops", "covered", "turns", "sent"), 0),
            )
            new = (1, m.looped, m.covered, m.trips, m.sent * m.trips)
            for key, value in zip(row, new, strict=True):
                row[key] += value
        return dict(sorted(found.items()))

    def check(self) -> None:
        """Raises `AuditError` if there are offenders."""
        if self.offenders:
            raise AuditError(self)

    def complaint(self) -> str:
        """The offenders in words, by kind."""
        parts = [f"`audit` of {self.name} on {_sizes(self.mesh)} of {self.device} found:"]
        for kind, (what, cure) in KINDS.items():
            these = [x for x in self.offenders if x.kind == kind]
            if these:
                many = f"{len(these)} × " if len(these) > 1 else ""
                parts.append(f"{many}{what}; {cure}:")
                parts += [f"  - {x.text}{_at(x.line)}" for x in these]
        return "\n".join(parts)

    def tables(self) -> list[Table]:
        """The report as tables of text."""
        rows = [
            [
                m.op,
                ",".join(m.axes),
                "+".join(m.rules) if not m.undeclared else "UNDECLARED",
                f"{m.trips}" + (" in a loop" if m.looped else ""),
                f"{si(m.sent)}B",
                "yes" if m.covered else "no",
                ", ".join(m.arrays[:2]) + (", …" if len(m.arrays) > 2 else ""),
                short(m.line),
            ]
            for m in self.messages
        ]
        head = ["op", "axes", "rule", "turns", "sent", "product meanwhile", "makes", "line"]
        return [Table("Collectives", head, rows)] if rows else []

    def __str__(self) -> str:
        parts = [self._title(), *map(as_text, self.tables())]
        return "\n\n".join(parts + ([self.complaint()] if self.offenders else []))

    def _repr_html_(self) -> str:
        rest = f"<pre>{html.escape(self.complaint())}</pre>" if self.offenders else ""
        title = f"<h4>{html.escape(self._title())}</h4>"
        return title + "".join(map(as_html, self.tables())) + rest

    def _title(self) -> str:
        held = ", ".join(f"{si(size)}B of {name}" for name, size in self.memory.items() if size)
        sent = sum(m.sent * m.trips for m in self.messages)
        return (
            f"{self.name} on {self.device}, {_sizes(self.mesh)}: each device sends {si(sent)}B in "
            f"{sum(m.trips for m in self.messages)} collectives, and holds {held}"
        )


def audit(
    f: Callable,
    args: tuple,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
    *,
    target: str | None = "H200",
    specs: Any = None,
    replicated: Sequence[str] = (),
    large: int = LARGE,
    strict: bool = True,
) -> Audit:
    """Compiles a function for a mesh, and holds its communication to what its rules declared.

    It raises for
      * collectives that no `declare` covers, whoever put them there: the user, a derivative (the
        sum that belongs to an implicit `pcast`), or the partitioner;
      * collectives that break a promise of their declaration: `hidden` (on GPUs) or `once`;
      * large values that every device holds whole: arguments, and what the partitioner leaves
        unsplit outside of `shard_map`. Not what is equal to, computed from, or of the shape of an
        argument that `replicated` names;
      * values that the partitioner gathers on every device only to split them in another way;
      * collectives in a `cond` or `while` that devices along the same axis may leave each other in.

    What Pallas kernels send to other devices is not seen.

    Args:
      f: The function, jitted or not.
      args: A tuple of its arguments, of which only shapes, dtypes and shardings count.
      mesh: Where it runs: a mesh, or the sizes of its axes, outermost first, which are then
        explicit. Its devices need not be present: up to 16,384 are compiled for in seconds. It is
        the mesh in context while `f` is traced, so that `f` need not name one. By default the one
        of the arguments, or of the program.
      target: The device to compile for, present or not; None for those of the mesh itself.
      specs: A tree of `PartitionSpec`s for `args`, or for parts of them; by default their own
        shardings. An argument without any is held whole.
      replicated: Patterns, as of `fnmatch`, of the arguments that may be held whole, which are
        named by place and path, `"0/layers/norm"`, and of JAX's names of operations.
      large: A value is large from so many bytes on.
      strict: Whether to raise; without, the report lists the offenders.

    Raises:
      AuditError: A ValueError that lists all offenders with path or type, axes, bytes and line.
      ValueError: The mesh and the arguments don't fit together.
      RuntimeError: The compiler of the target is not installed.

    >>> from xform.sharding import audit, declare
    >>> @declare("total", "dp")
    ... def total(x):
    ...     return jax.lax.psum(x.sum(), "dp")
    >>> f = lambda x: jax.shard_map(total, in_specs=jax.P("dp"), out_specs=jax.P())(x)
    >>> x = jax.ShapeDtypeStruct((4096, 64), "float32")
    >>> report = audit(f, (x,), {"dp": 1024}, specs=jax.P("dp"))
    >>> report.counts()["total all-reduce dp"]["turns"]
    1
    """
    if not isinstance(args, tuple):
        raise ValueError(f"`audit` takes a tuple of arguments, `args=(x,)`; found {type(args)}")
    mesh = _mesh(mesh)
    placed = _placed(args, mesh, specs)
    flat, tree = jax.tree.flatten_with_path(placed)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    leaves = [leaf for _, leaf in flat]

    def called(*flat):
        return _under(mesh, f)(*jax.tree.unflatten(tree, flat))

    called.__name__ = getattr(f, "__name__", "f")
    jitted = jax.jit(called)
    traced = jitted.trace(*leaves)
    found = mesh or mesh_of(traced, leaves)
    sizes = dict(found.shape) if found is not None else {}
    lowered = lower_for(target, jitted, *leaves) if target else traced.lower()
    compiled, dump = compile_and_dump(lowered, partitioning=True)
    report = read(compiled, mesh=sizes or None, dump=dump)
    messages = tuple(_message(c, report, dump) for c in report.collectives)
    allowed = _Allowed(replicated, paths, leaves)
    offenders = (
        *_broken(messages, report),
        *_whole(dump, allowed, large),
        *_remade(dump),
        *_divergent(traced, sizes),
    )
    audited = Audit(
        name=called.__name__,
        device=report.device,
        mesh=sizes,
        messages=messages,
        offenders=tuple(dict.fromkeys(offenders)),
        memory=_memory(compiled),
        program=report,
    )
    if strict:
        audited.check()
    return audited


# ---- the mesh and the arguments on it ------------------------------------------------------------


def _mesh(mesh: Any) -> Mesh | AbstractMesh | None:
    if isinstance(mesh, Mapping):
        types = (AxisType.Explicit,) * len(mesh)
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=types)
    return mesh


def _under(mesh: Mesh | AbstractMesh | None, f: Callable) -> Callable:
    """The function, traced with the mesh in context."""
    if mesh is None:
        return f

    def under(*args):
        with jax.sharding.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
            return f(*args)

    return under


def _placed(args: tuple, mesh: Mesh | AbstractMesh | None, specs: Any) -> tuple:
    """The types of the arguments, placed on the mesh."""
    given = specs if specs is not None else None
    is_spec = lambda x: isinstance(x, jax.P) or x is None
    if given is not None and mesh is None:
        raise ValueError("`audit(..., specs=)` needs `mesh=`, whose axes the specs name")
    if isinstance(given, jax.P):
        given = jax.tree.map(lambda _: given, args)
    elif given is None:
        given = jax.tree.map(lambda _: None, args)
    given = jax.tree.broadcast(given, args, is_leaf=is_spec)
    leaves, tree = jax.tree.flatten(args)
    wanted = jax.tree.leaves(given, is_leaf=is_spec)
    return tree.unflatten([_place(x, mesh, s) for x, s in zip(leaves, wanted, strict=True)])


def _place(x: Any, mesh: Any, spec: jax.P | None) -> Any:
    own: Any = getattr(x, "sharding", None)
    own = own if isinstance(own, NamedSharding) else None
    if own is not None and mesh is not None and dict(own.mesh.shape) != dict(mesh.shape):
        raise ValueError(
            f"`audit` got the mesh {_sizes(mesh.shape)} and an argument {jax.typeof(x)} on "
            f"{_sizes(own.mesh.shape)}: pass types without a sharding and `specs=`, or leave the "
            "mesh out"
        )
    if spec is None:
        spec = own.spec if own is not None else None
    on = mesh if mesh is not None else own.mesh if own is not None else None
    sharding = NamedSharding(on, spec) if on is not None and spec is not None else None
    kind = x if hasattr(x, "dtype") else jax.typeof(x)
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, sharding=sharding, weak_type=getattr(kind, "weak_type", False)
    )


# ---- what was found ------------------------------------------------------------------------------


def _message(c: Collective, report: Program, dump: Dump) -> Message:
    axes = c.axes or ()
    named = {k.name: k for k in report.kernels}
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
        covered=c.overlaps and any(named[name].kind == "matmul" for name in c.window),
        promises=tuple(dict.fromkeys(promises)),
        inserted=c.inserted,
        line=c.kernel.line,
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


def _broken(messages: Sequence[Message], report: Program) -> Iterator[Offender]:
    """Collectives that no rule declared, and promises that are not kept."""
    for m in messages:
        numbers = f"{m.what}, {si(m.sent)}B sent in each of {m.trips} turns"
        if m.undeclared:
            by = "by the partitioner " if m.inserted else ""
            near = [d for name in m.undeclared for d in declared(name)]
            other = "; ".join(f"{d.rule!r} declares {', '.join(d.axes) or 'no axis'}" for d in near)
            names = " and ".join(_last(name) for name in m.undeclared)
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


class _Allowed:
    """The values that the user says may be whole."""

    def __init__(self, patterns: Sequence[str], paths: Sequence[str], leaves: Sequence[Any]):
        self.patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
        self.paths = paths
        named = [x for path, x in zip(paths, leaves, strict=True) if self.fits(path)]
        self.shapes = {tuple(x.shape) for x in named}

    def fits(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __contains__(self, value: Whole) -> bool:
        if value.argument is not None:
            return self.fits(self.path(value))
        dims = value.array.partition("[")[2].removesuffix("]")
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
        return shape in self.shapes or self.fits(value.op_name)

    def path(self, value: Whole) -> str:
        """The path of an argument, from the name that it has in the program."""
        digits = value.op_name.partition("[")[2].removesuffix("]")
        index = int(digits) if digits.isdigit() else value.argument
        return self.paths[index] if index is not None and index < len(self.paths) else ""


def _whole(dump: Dump, allowed: _Allowed, large: int) -> Iterator[Offender]:
    for value in held_whole(dump.whole, large) if dump.whole else ():
        if value not in allowed:
            argument = value.argument is not None
            name = f"argument {allowed.path(value)!r}" if argument else _last(value.op_name)
            yield Offender("whole", f"{name}, {value.array}, {si(value.bytes)}B", value.line)


def _remade(dump: Dump) -> Iterator[Offender]:
    if dump.whole is None or dump.split is None:
        return
    for value in remade(dump.whole, dump.split):
        yield Offender(
            "remade",
            f"{_last(value.op_name)}, {value.array}, {si(value.bytes)}B, from {value.before} to "
            f"{value.after}",
            value.line,
        )


def _divergent(traced: Any, sizes: Mapping[str, int]) -> Iterator[Offender]:
    for d in diverging(program(traced.jaxpr)):
        axes = [axis for axis in d.axes if sizes.get(axis, 2) > 1]
        if axes:
            along = ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes)
            text = (
                f"{d.op} of {d.array} over {along} in the {d.control} at {short(d.control_line)}, "
                f"whose predicate differs along {', '.join(axes)}"
            )
            yield Offender("diverging", text, d.line)


def _memory(compiled: Any) -> dict[str, int]:
    stats = compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }


def _at(line: str) -> str:
    return "" if line == UNKNOWN else f", at {short(line)}"


def _sizes(mesh: Mapping[str, int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in mesh.items()) or "one device"
