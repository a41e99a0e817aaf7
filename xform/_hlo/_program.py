"""A compiled program as a list of what it runs: kernels, collectives, loops, calls to the host."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import NamedSharding
from jax.stages import Compiled

from xform._hlo._dump import Buffer, Dump
from xform._hlo._groups import COLLECTIVES, Groups, axes_of, groups_of, wire_bytes
from xform._hlo._text import UNKNOWN, Computation, Instruction, Module, parse, words
from xform._hlo._twice import Numbering, Twice
from xform._hlo._work import Work, factor_of, result_of, traffic, work

_FREE = words(
    "parameter constant tuple get-tuple-element bitcast after-all optimization-barrier domain"
    " add-dependency"
)
# How many neighbours are asked for the line of something that has none.
_NEAR = 16
_HOST_CALL = re.compile(r"python.*callback|callback.*python")


@dataclass(frozen=True)
class Kernel:
    """What the device runs as one piece: a fusion, a library call, a copy, a collective.

    Attributes:
        name: of the instruction, as a profiler shows it.
        kind: "matmul", "fusion", "copy", "library" (a call that can't be counted), "collective" or
            "host".
        label: the kind of fusion, or the target of a call, or the operation.
        line: the user's line that it is mainly for, `"file:line (function)"`.
        lines: the work of one execution by line.
        op_name: JAX's name of it.
        read, written: bytes of one execution.
        factor: dtype of what it multiplies as matrices, as XLA names it; "" where it does not.
        trips: how often it runs, as far as the program tells.
        loops: lines of the enclosing loops whose trip count is not known; `trips` is for one
            iteration of these.
        path: the conditionals that it is in, and the number of the branch.
        launches: how many things the host starts for one execution.
        graph: how many of them within a command buffer; None where the backend does not tell.
    """

    name: str
    kind: str
    label: str
    line: str
    lines: Mapping[str, Work]
    op_name: str
    read: int
    written: int
    factor: str
    trips: int
    loops: tuple[str, ...] = ()
    path: tuple[tuple[str, int], ...] = ()
    launches: int = 1
    graph: int | None = None

    @property
    def work(self) -> Work:
        """Operations of one execution."""
        return sum(self.lines.values(), Work())

    @property
    def bytes(self) -> int:
        """Bytes read and written by one execution."""
        return self.read + self.written


@dataclass(frozen=True)
class Collective:
    """Communication between devices.

    Attributes:
        kernel: it, as a kernel: its line, bytes per device, trips.
        op: such as "all-gather".
        axes: the mesh axes along which it communicates; None where the mesh is not known.
        groups: the groups of devices; of a permutation, its pairs (source, target).
        sent: bytes that one device sends in one execution, in the best algorithm.
        overlaps: whether it runs beside what stands between its start and its end.
        window: the kernels that stand there, by name.
        channel: its number, which all devices that take part agree on.
        op_name: JAX's name of it; "" where XLA lost it.
        inserted: whether the partitioner put it in, and not the user.
        arrays: what it moves, as XLA prints it: `("bf16[4096,1024]",)`.
    """

    kernel: Kernel
    op: str
    axes: tuple[str, ...] | None
    groups: Groups
    sent: int
    overlaps: bool
    window: tuple[str, ...] = ()
    channel: int | None = None
    op_name: str = ""
    inserted: bool = False
    arrays: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A loop: the line that made it, the number of its iterations where known, and its runs."""

    name: str
    line: str
    trips: int | None
    runs: int


@dataclass(frozen=True)
class HostCall:
    """A point at which the program waits for the host, or the host for it."""

    name: str
    target: str
    line: str
    trips: int


@dataclass(frozen=True)
class Program:
    """What a compiled program runs, on each of its devices.

    Attributes:
        name: such as "jit_step".
        device: the kind of device, as JAX names it.
        platform: "cpu", "gpu" or "tpu".
        mesh: size of each mesh axis; None where there is none.
        kernels: in the order in which they run, collectives among them.
        collectives, loops, host, twice: what these are.
        buffers: the buffer assignment, where XLA was asked for it.
        module: the program itself.
    """

    name: str
    device: str
    platform: str
    mesh: Mapping[str, int] | None
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]
    host: tuple[HostCall, ...]
    twice: tuple[Twice, ...]
    buffers: tuple[Buffer, ...] | None
    module: Module

    def total(self, value: Callable[[Kernel], int]) -> int:
        """Sums a value over all that runs; of a conditional, over its dearest branch."""
        return total(self.kernels, value)


def total(kernels: Iterable[Kernel], value: Callable[[Kernel], int], depth: int = 0) -> int:
    """Sums a value over all runs of kernels; of a conditional, over its dearest branch."""
    here, branches = 0, {}
    for kernel in kernels:
        if len(kernel.path) == depth:
            here += kernel.trips * value(kernel)
        else:
            name, branch = kernel.path[depth]
            branches.setdefault(name, {}).setdefault(branch, []).append(kernel)
    return here + sum(
        max(total(inside, value, depth + 1) for inside in branch.values())
        for branch in branches.values()
    )


def read(
    compiled: Compiled, *, mesh: Mapping[str, int] | None = None, dump: Dump | None = None
) -> Program:
    """Reads a compiled program.

    One that JAX took from its persistent cache has the source lines of when it was compiled, which
    may since have moved; `compile_and_dump` goes past the cache.

    Args:
      compiled: As `jax.jit(f).lower(...).compile()` returns it.
      mesh: Size of each axis of the mesh that it runs on, outermost first; by default that of its
        arguments or results.
      dump: What XLA wrote beside it, for buffers and exact launches.
    """
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    module = parse(compiled.as_text() or "")
    if mesh is None:
        meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
        mesh = next((dict(m.shape) for m in meshes if m.size == module.partitions > 1), None)
    device = next((d for s in shardings for d in s.device_set), jax.devices()[0])
    walk = _Walk(module, mesh, dump)
    walk.visit(module.computations[module.entry], 1, (), ())
    return Program(
        name=module.name,
        device=device.device_kind,
        platform=device.platform,
        mesh=walk.mesh,
        kernels=tuple(walk.kernels),
        collectives=tuple(walk.collectives),
        loops=tuple(walk.loops),
        host=tuple(walk.host),
        twice=tuple(sorted(walk.twice, key=lambda t: -t.extra.total * t.trips)),
        buffers=dump.buffers if dump else None,
        module=module,
    )


class _Walk:
    """Follows the program in the order in which it runs."""

    def __init__(self, module: Module, mesh: Mapping[str, int] | None, dump: Dump | None):
        self.module = module
        self.mesh = mesh
        self.launches: dict[str, list[bool]] | None = None
        if dump and dump.launches is not None:
            self.launches = {}
            for launch in dump.launches:
                self.launches.setdefault(launch.instruction, []).append(launch.graph)
        self.numbering = Numbering(module)
        self.kernels: list[Kernel] = []
        self.collectives: list[Collective] = []
        self.loops: list[Loop] = []
        self.host: list[HostCall] = []
        self.twice: list[Twice] = []

    def visit(self, computation: Computation, trips: int, loops: tuple, path: tuple) -> None:
        """Reads a computation that runs `trips` times."""
        if not trips:
            return
        self.twice += self.numbering.twice(computation, trips)
        started: dict[str, tuple[int, int]] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode.endswith("-done"):
                self._close(started.pop(instruction.operands[0], None))
            elif instruction.opcode not in _FREE and not instruction.opcode.endswith("-update"):
                before = len(self.collectives)
                self._one(computation, instruction, trips, loops, path)
                if len(self.collectives) > before and instruction.opcode.endswith("-start"):
                    started[instruction.name] = (before, len(self.kernels))

    def _close(self, opened: tuple[int, int] | None) -> None:
        """Gives a collective the kernels that ran since it began."""
        if opened:
            at, first = opened
            between = (k.name for k in self.kernels[first:] if k.kind not in ("collective", "host"))
            window = tuple(between)
            self.collectives[at] = replace(self.collectives[at], window=window)

    def _one(self, within: Computation, instruction: Instruction, trips, loops, path) -> None:
        bodies = [self.module.computations[name] for name in instruction.calls]
        match instruction.base:
            case "while":
                self._loop(instruction, trips, loops, path)
            case "conditional":
                for branch, body in enumerate(bodies):
                    self.visit(body, trips, loops, (*path, (instruction.name, branch)))
            case "call" | "async" if 'small_call="true"' not in instruction.text:
                self.visit(bodies[0], trips, loops, path)
            case _:
                self._kernel(within, instruction, trips, loops, path)

    def _loop(self, instruction: Instruction, trips: int, loops: tuple, path: tuple) -> None:
        line = self.module.line(instruction)
        count = _trip_count(instruction)
        self.loops.append(Loop(instruction.name, line, count, trips))
        names = (instruction.attrs[key].strip("%") for key in ("condition", "body"))
        condition, body = (self.module.computations[name] for name in names)
        if count is None:
            loops = (*loops, line)
            self.visit(condition, trips, loops, path)
            self.visit(body, trips, loops, path)
        else:  # the condition is never asked
            self.visit(body, trips * count, loops, path)

    def _kernel(self, within: Computation, instruction: Instruction, trips, loops, path) -> None:
        lines, opaque = _work_by_line(self.module, within, instruction)
        target = instruction.attrs.get("custom_call_target", "").strip('"')
        if instruction.base == "custom-call" and not opaque and not lines:
            return  # it only marks something
        read, written = traffic(self.module, within, instruction)
        if instruction.base == "call":  # a small loop that runs as one kernel
            inside = self.module.computations[instruction.calls[0]]
            loops = (*loops, *self._loops_inside(inside, trips))
        talk = self._collective_of(instruction)
        host = _host_target(instruction, target)
        work_of = lambda line: (lines[line].matrix, lines[line].total)
        own = self.module.line(talk or instruction)
        own = own if own != UNKNOWN else self._line_nearby(within, instruction)
        busiest = max(lines, key=work_of, default=own)
        matrix = sum(work.matrix for work in lines.values())
        kernel = Kernel(
            name=instruction.name,
            kind=_kind(instruction, host, talk, opaque, matrix),
            label=_label(instruction, target),
            line=busiest if matrix else own,
            lines=lines,
            op_name=instruction.op_name,
            read=read,
            written=written,
            factor=factor_of(self.module, within, instruction) if matrix else "",
            trips=trips,
            loops=loops,
            path=path,
            launches=1 if self.launches is None else len(self.launches.get(instruction.name, ())),
            graph=None if self.launches is None else sum(self.launches.get(instruction.name, ())),
        )
        self.kernels.append(kernel)
        if host:
            self.host.append(HostCall(kernel.name, host, kernel.line, trips))
        if talk:
            self.collectives.append(self._collective(within, talk, instruction, kernel))

    def _loops_inside(self, computation: Computation, trips: int) -> list[str]:
        """Notes the loops within one kernel; returns the lines of those without a trip count."""
        unknown = []
        for instruction in computation.instructions.values():
            inner = trips
            if instruction.base == "while":
                count, line = _trip_count(instruction), self.module.line(instruction)
                self.loops.append(Loop(instruction.name, line, count, trips))
                unknown += [line] if count is None else []
                inner *= 1 if count is None else count
            for name in instruction.calls:
                unknown += self._loops_inside(self.module.computations[name], inner)
        return unknown

    def _line_nearby(self, within: Computation, instruction: Instruction) -> str:
        """The line that something without one is made for: of what reads it, or what it reads."""
        readers = lambda one: within.users[one.name]
        sources = lambda one: [within.instructions[name] for name in one.operands]
        for follow in (readers, sources):
            near = [instruction]
            for at in range(_NEAR):
                if at == len(near):
                    break
                line = self._line_within(near[at])
                if line != UNKNOWN:
                    return line
                near += follow(near[at])
        return UNKNOWN

    def _line_within(self, instruction: Instruction) -> str:
        """The line of an instruction, or of the first inside that has one."""
        line = self.module.line(instruction)
        if line == UNKNOWN and instruction.base == "fusion" and instruction.calls:
            body = self.module.computations[instruction.calls[0]].instructions.values()
            inner = (self.module.line(i) for i in body if i.opcode not in ("parameter", "constant"))
            line = next((found for found in inner if found != UNKNOWN), UNKNOWN)
        return line

    def _collective_of(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, or wraps."""
        if instruction.base in COLLECTIVES:
            return None if "is_host_transfer=true" in instruction.text else instruction
        if instruction.base == "fusion":
            body = self.module.computations[instruction.calls[0]].instructions.values()
            return next((inner for inner in body if inner.base in COLLECTIVES), None)
        return None

    def _collective(
        self, within: Computation, talk: Instruction, outer: Instruction, kernel: Kernel
    ) -> Collective:
        groups = groups_of(talk, self.module.partitions)
        if self.mesh is None:
            self.mesh = _mesh_in_text(talk)
        synchronous = talk.config.get("collective_backend_config", {}).get("is_sync", False)
        channel = talk.attrs.get("channel_id")
        return Collective(
            kernel=kernel,
            op=talk.base,
            axes=axes_of(groups, self.mesh) if self.mesh else None,
            groups=groups,
            sent=wire_bytes(talk.base, len(groups[0]), kernel.read, kernel.written),
            overlaps=outer.opcode.endswith("-start") and not synchronous,
            channel=int(channel) if channel else None,
            op_name=talk.op_name or outer.op_name,
            inserted=talk.inserted,
            arrays=tuple(leaf.text for leaf in result_of(within, talk).leaves),
        )


def _trip_count(loop: Instruction) -> int | None:
    known = loop.config.get("known_trip_count", {}).get("n")
    return None if known is None else int(known)


def _mesh_in_text(talk: Instruction) -> dict[str, int] | None:
    match = re.match(r"mesh\[(.*?)\]", talk.attrs.get("replica_groups", ""))
    if not match:
        return None
    return {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}


def _host_target(instruction: Instruction, target: str) -> str:
    """What of the host an instruction waits for, "" for nothing."""
    if _HOST_CALL.search(target):
        return target
    if instruction.base in ("infeed", "outfeed"):
        return instruction.base
    return "host transfer" if "is_host_transfer=true" in instruction.text else ""


def _kind(instruction: Instruction, host: str, talk, opaque: bool, matrix: int) -> str:
    if host:
        return "host"
    if talk:
        return "collective"
    if matrix:
        return "matmul"
    if opaque:
        return "library"
    return "copy" if instruction.base == "copy" else "fusion"


def _label(instruction: Instruction, target: str) -> str:
    return target or instruction.attrs.get("kind", instruction.base)


def _work_by_line(
    module: Module, within: Computation, instruction: Instruction
) -> tuple[dict[str, Work], bool]:
    """Returns the operations of one execution by line, and whether some can't be counted."""
    lines: dict[str, Work] = {}
    opaque = False

    def add(within: Computation, instruction: Instruction, times: int, outer: str) -> None:
        nonlocal opaque
        own = module.line(instruction)
        line = own if own != UNKNOWN else outer
        found = work(module, within, instruction)
        opaque |= found is None
        if found and found.total:
            lines[line] = lines.get(line, Work()) + found * times
        if instruction.base in ("fusion", "call", "while", "conditional", "async"):
            count = _trip_count(instruction) if instruction.base == "while" else 1
            inner_times = times * (1 if count is None else count)
            for name in instruction.calls:
                body = module.computations[name]
                for inner in body.instructions.values():
                    add(body, inner, inner_times, line)

    add(within, instruction, 1, UNKNOWN)
    return lines, opaque


def collectives_by_axis(collectives: Sequence[Collective]) -> dict[tuple[str, tuple], int]:
    """Returns the bytes that a device sends, by operation and axes, trips counted."""
    sent: dict[tuple[str, tuple], int] = {}
    for c in collectives:
        key = (c.op, c.axes or ())
        sent[key] = sent.get(key, 0) + c.sent * c.kernel.trips
    return sent
