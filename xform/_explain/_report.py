"""What a compiled program runs, by source line."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from xform._explain._bound import Device, bound, known_device
from xform._explain._measure import NothingSeen, Run, measure
from xform._hlo import (
    Collective,
    Kernel,
    Program,
    Twice,
    Work,
    compile_and_dump,
    lower_for,
    mesh_of,
    read,
    total,
)
from xform._show import Table, as_text, page, short, si
from xform.jaxpr._trace import jitted_call

# Host time to start one kernel: alone, and as a node of a CUDA graph. Typical values, which a
# machine may miss by half: published are 2 to 7 µs a launch, 0.6 µs a node. On a CPU, a call.
LAUNCH_SECONDS = {"gpu": (4e-6, 0.6e-6), "cpu": (0.5e-6, 0.5e-6)}

_NO_COMMAND_BUFFERS = {"xla_gpu_enable_command_buffer": ""}


_PAGE = """<!doctype html><meta charset="utf-8"><title>xform.explain</title>
<style>body {{font: 14px sans-serif}}</style>
{}
"""


@dataclass(frozen=True)
class Line:
    """What one line of the source costs, in one run of the program on one device.

    Attributes:
        line: `"file:line (function)"`.
        kernels: how many kernels are mainly for it; `runs`, how often they run in all.
        runs: executions of these kernels.
        work: operations of the line, in whatever kernel.
        read, written: bytes of its kernels.
        least: seconds that its kernels take at best, and `bound`, what bounds most of these:
            "compute", "memory" or "communication"; None for a device that is not known.
        bound: see there.
        seconds: measured time in its kernels, summed over devices; None without a run.
        per_iteration: whether a loop with an unknown trip count runs it: counts are then for one
            iteration.
    """

    line: str
    kernels: int
    runs: int
    work: Work
    read: int
    written: int
    least: float | None
    bound: str | None
    seconds: float | None
    per_iteration: bool


@dataclass(frozen=True)
class Report:
    """What `explain` returns; `print` shows it, a notebook draws it.

    Counts are for one device and one run. Of a conditional, the dearest branch counts.

    Attributes:
        program: kernels, collectives, loops, host calls and buffers, each a record.
        memory: bytes of arguments, results, temporaries and of results that reuse arguments.
        run: a measured run; None where none was made.
        device: what the device can do at best; None where that is not known.
    """

    program: Program
    memory: Mapping[str, int]
    run: Run | None
    device: Device | None = None

    @cached_property
    def _sent(self) -> dict[str, int]:
        return {c.kernel.name: c.sent for c in self.program.collectives}

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """What each source line costs, the dearest first."""
        main: dict[str, list[Kernel]] = {}
        touched: dict[str, list[Kernel]] = {}
        for kernel in self.program.kernels:
            main.setdefault(kernel.line, []).append(kernel)
            for line in kernel.lines:
                touched.setdefault(line, []).append(kernel)
        found = [
            self._line(line, main.get(line, []), touched.get(line, []))
            for line in dict.fromkeys((*main, *touched))
        ]
        return tuple(sorted(found, key=lambda x: (-x.work.matrix, -x.read - x.written)))

    def _line(self, line: str, kernels: list[Kernel], touched: list[Kernel]) -> Line:
        of = lambda name: total(touched, lambda k: getattr(k.lines[line], name))
        bounds: dict[str, float] = {}
        for k in kernels if self.device else ():
            name, least = bound(k, self.device, self._sent.get(k.name, 0))
            bounds[name] = bounds.get(name, 0.0) + least * k.trips
        seconds = None
        if self.run:
            seconds = sum(self.run.kernels.get(k.name, 0) for k in kernels) / 1e9
        return Line(
            line=line,
            kernels=len(kernels),
            runs=total(kernels, lambda k: 1),
            work=Work(of("matrix"), of("other"), of("transcendental")),
            read=total(kernels, lambda k: k.read),
            written=total(kernels, lambda k: k.written),
            least=sum(bounds.values(), 0.0) if self.device else None,
            bound=max(bounds, key=bounds.__getitem__, default=None) if self.device else None,
            seconds=seconds,
            per_iteration=any(k.loops for k in (*kernels, *touched)),
        )

    @property
    def work(self) -> Work:
        """All operations of one run on one device."""
        return sum((line.work for line in self.lines), Work())

    @property
    def launches(self) -> int:
        """How many things the host starts in one run: kernels × trips."""
        return self.program.total(lambda k: k.launches)

    @property
    def graph_launches(self) -> int | None:
        """How many of `launches` are nodes of command buffers; None where nobody can tell."""
        if any(k.graph is None for k in self.program.kernels):
            return None
        return self.program.total(lambda k: k.graph or 0)

    @property
    def launch_seconds(self) -> float | None:
        """Host time of all launches, at `LAUNCH_SECONDS` each; None for other platforms."""
        if self.program.platform not in LAUNCH_SECONDS:
            return None
        alone, node = LAUNCH_SECONDS[self.program.platform]
        nodes = self.graph_launches or 0
        return alone * (self.launches - nodes) + node * nodes

    @property
    def twice(self) -> tuple[Twice, ...]:
        """Values that several kernels compute, the dearest first."""
        return self.program.twice

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Communication, in the order in which it starts."""
        return self.program.collectives

    def covering(self, collective: Collective) -> Work:
        """The operations of the kernels that run between a collective's start and its end."""
        named = {kernel.name: kernel for kernel in self.program.kernels}
        inside = (named[name] for name in collective.window)
        own = max(collective.kernel.trips, 1)
        return sum((k.work * (k.trips // own) for k in inside), Work())

    # ---- words and pictures ----

    def tables(self) -> list[Table]:
        """The report as tables of text."""
        found = [self._table_of_lines(), self._table_of_collectives(), self._table_of_twice()]
        return [table for table in found if table.rows]

    def notes(self) -> list[str]:
        """The report's single facts, a sentence each."""
        return [*self._notes_on_launches(), *self._notes_on_control(), *self._notes_on_run()]

    def __str__(self) -> str:
        parts = [self._title(), *map(as_text, self.tables()), "\n".join(self.notes())]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return page(self._title(), self.tables(), self.notes())

    def save(self, file: str | Path) -> None:
        """Writes the report: as a page if the name ends in `.html`, else as text."""
        as_page = Path(file).suffix == ".html"
        Path(file).write_text(_PAGE.format(self._repr_html_()) if as_page else f"{self}\n")

    def roofline(self, ax: Any = None) -> Any:
        """Draws each line's operations per byte and per second under the device's limits.

        Returns:
          The matplotlib axes.
        """
        from xform._explain._plot import roofline

        return roofline(self, ax)

    def timeline(self, ax: Any = None) -> Any:
        """Draws the measured run: a row for each device, its kernels coloured by class.

        Returns:
          The matplotlib axes.

        Raises:
          ValueError: There is no run.
        """
        from xform._explain._plot import timeline

        return timeline(self, ax)

    def _title(self) -> str:
        mesh = self.program.mesh
        on = " × ".join(f"{axis}={size}" for axis, size in mesh.items()) if mesh else "one device"
        parts = ", ".join(f"{si(size)}B of {name}" for name, size in self.memory.items() if size)
        kernels = len(self.program.kernels)
        return f"{self.program.name} on {self.program.device}, {on}: {kernels} kernels; {parts}"

    def _table_of_lines(self) -> Table:
        rows = []
        for x in self.lines:
            measured = [f"{si(x.least)}s", x.bound or ""] if x.least is not None else []
            measured += [f"{si(x.seconds)}s"] if x.seconds is not None else []
            counts = (x.work.matrix, x.work.other, x.work.transcendental, x.read, x.written)
            line = short(x.line) + (", for each iteration" if x.per_iteration else "")
            rows.append([str(x.kernels), str(x.runs), *map(si, counts), *measured, line])
        seconds = ["at best", "bound by"] if self.device else []
        seconds += ["measured"] if self.run else []
        head = ["kernels", "runs", "matrix", "other", "transc.", "read B", "written B", *seconds]
        return Table("By source line", [*head, "line"], rows)

    def _table_of_collectives(self) -> Table:
        rows = []
        for c in self.collectives:
            axes = ",".join(c.axes) if c.axes is not None else "?"
            covered = "none: it waits"
            if c.overlaps:
                cover = self.covering(c)
                kernels = f"{len(c.window)} kernels, {si(cover.total)} operations"
                covered = kernels if c.window else "nothing"
            row = [c.op, axes, str(c.kernel.trips), si(c.sent), covered, short(c.kernel.line)]
            rows.append(row)
        return Table("Collectives", ["op", "axes", "runs", "sent B", "covered by", "line"], rows)

    def _table_of_twice(self) -> Table:
        rows = [
            [
                str(len(t.kernels)),
                str(t.trips),
                si(t.extra.total * t.trips),
                ", ".join(t.ops) + (" (checkpoint asked for it)" if t.recompute else ""),
                short(t.line),
            ]
            for t in self.twice
        ]
        return Table(
            "Computed more than once", ["kernels", "runs", "extra ops", "what", "line"], rows
        )

    def _notes_on_launches(self) -> list[str]:
        notes = []
        if self.launch_seconds is not None:
            note = f"{self.launches} launches take about {si(self.launch_seconds)}s of the host"
            if self.graph_launches is not None and self.launches:
                note += f"; {self.graph_launches / self.launches:.0%} are in command buffers"
            notes.append(note + ".")
        opaque = sorted({k.label for k in self.program.kernels if k.kind == "library"})
        if opaque:
            notes.append(f"Operations inside of {', '.join(opaque)} are not counted.")
        return notes

    def _notes_on_control(self) -> list[str]:
        notes = []
        for loop in self.program.loops:
            if loop.trips is None:
                waits = self.program.platform == "gpu"
                asks = "; the host reads its condition each time" if waits else ""
                notes.append(
                    f"The loop at {short(loop.line)} runs until its condition ends it, which "
                    f"counts as once{asks}."
                )
        for call in self.program.host:
            notes.append(f"{call.trips} calls to the host at {short(call.line)}: {call.target}.")
        return notes

    def _notes_on_run(self) -> list[str]:
        if not self.run:
            return []
        run = self.run
        parts = ("compute", "memory", "communication", "idle")
        split = " + ".join(
            f"{name} {si(getattr(run, name) / 1e9)}s ({getattr(run, name) / run.wall:.0%})"
            for name in parts
        )
        return [f"Measured: {si(run.wall / 1e9)}s = {split}."]


# ---- making one ----------------------------------------------------------------------------------


def explain(
    f: Callable, *, target: str | None = None, run: bool | None = None, runs: int = 3
) -> Callable[..., Report]:
    """Returns a function of `f`'s arguments that tells what the compiled `f` runs, line by line.

    The report has kernels and fusions by source line with their operations and bytes; what is
    computed more than once; kernels × trips × launch cost, and the share of launches in command
    buffers; collectives by mesh axis, and the kernels that run meanwhile; and, of a measured run,
    the time of compute, memory, communication and idleness, which add up to the wall time.

    Args:
      f: The function, jitted or not.
      target: A device to compile for that need not be present, such as "H200"; by default the one
        that JAX would run on. The mesh of the arguments, or of the program, is kept.
      run: Whether to run the program, `runs` + 1 times; by default where all arguments are arrays
        and there is no target. What is in command buffers is compiled once more without them, and
        run so, since a profiler does not see into them.
      runs: The fastest of so many runs is reported.

    Raises:
      ValueError: A run is asked for that can't be made.
      RuntimeError: The compiler of the target is not installed; or a run is asked for, and the
        profiler can't see it: that is a warning where the run is not asked for.

    >>> import jax, jax.numpy as jnp
    >>> report = explain(lambda x: jnp.tanh(x @ x))(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    >>> report.work
    Work(matrix=524288, other=0, transcendental=4096)
    """

    def explained(*args, **kwargs) -> Report:
        jitted, args, kwargs = jitted_call(f, args, kwargs)
        runnable = target is None and all(map(_is_value, jax.tree.leaves((args, kwargs))))
        if run and not runnable:
            reason = f"there is a target, {target!r}" if target else "an argument is no array"
            raise ValueError(f"`run=True` needs arrays on devices that are present; {reason}")
        mesh = None
        if target is None:
            traced = jitted.trace(*args, **kwargs)
            lowered = traced.lower()
            mesh = mesh_of(traced, (args, kwargs))
        else:
            lowered = lower_for(target, jitted, *args, **kwargs)
        compiled, dump = compile_and_dump(lowered)
        program = read(compiled, mesh=dict(mesh.shape) if mesh else None, dump=dump)
        device, measured = known_device(program), None
        if runnable and run is not False:
            call = _caller(jitted, _one_by_one(lowered, compiled, program), args, kwargs)
            prepare = lambda: _fresh(lowered, args, kwargs)
            class_of = lambda kernel: bound(kernel, device)[0]
            try:
                measured = measure(call, prepare, program, class_of, runs)
            except NothingSeen as problem:
                if run:
                    raise
                warnings.warn(str(problem), stacklevel=2)
        return Report(program, _memory(compiled), measured, device)

    return explained


def _is_value(x: Any) -> bool:
    return not isinstance(x, jax.ShapeDtypeStruct)


def _caller(jitted: Any, compiled: Compiled, args: tuple, kwargs: dict) -> Callable[[Any], Any]:
    """Calls the program that was read; with static arguments, through `jit`, its like."""
    same = jax.tree.structure((args, kwargs)) == compiled.in_tree
    return lambda given: (compiled if same else jitted)(*given[0], **given[1])


def _one_by_one(lowered: Lowered, compiled: Compiled, program: Program) -> Compiled:
    """The program with kernels that the host starts, each an event of the profiler's.

    A command buffer is one event, whatever is in it.
    """
    if not any(kernel.graph for kernel in program.kernels):
        return compiled
    return lowered.compile(compiler_options=_NO_COMMAND_BUFFERS)


def _fresh(lowered: Lowered, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments, with copies of those that a run uses up."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    infos = jax.tree.leaves(lowered.args_info)
    if len(leaves) != len(infos):  # some are static: jit itself knows which
        return args, kwargs
    copies = [
        x.copy() if info.donated and isinstance(x, jax.Array) else x
        for x, info in zip(leaves, infos, strict=True)
    ]
    return jax.tree.unflatten(tree, copies)


def _memory(compiled: Compiled) -> dict[str, int]:
    stats: Any = compiled.memory_analysis()
    return {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "results in place of arguments": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }
