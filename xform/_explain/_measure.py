"""One run of a program, its wall time split into what the device did.

The profiler gives an interval for each kernel. Time in which some kernel that computes was running
is *compute*; of the rest, time with one that is bound by memory is *memory*; of the rest, time with
a collective is *communication*, so that what computation hides does not count; what is left is
*idle*: launches, the host, waiting. The four add up to the wall time.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from xform._hlo import Kernel, Program

CLASSES = ("compute", "memory", "communication")
_MARK = "xform.explain"
# In the names of kernels whose time goes into products.
_COMPUTE = (
    *("gemm", "dot", "conv", "wgmma", "nvjet", "cutlass", "cublas"),
    *("attention", "sdpa", "flash", "product", "cross_entropy"),
)


class NothingSeen(RuntimeError):
    """A program ran, and its profile is empty."""


class Event(NamedTuple):
    """A kernel that ran: on which device, which of `CLASSES`, from when to when (ns)."""

    device: str
    kernel: str
    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Run:
    """A measured run, in nanoseconds; of several devices, their mean.

    Attributes:
        wall: from the call to the arrival of all results.
        compute, memory, communication, idle: its parts, which add up to it.
        kernels: time in each kernel, by name, over all devices; of a program with command buffers,
            in a run without them.
        counts: how often each ran there, over all devices.
        events: all intervals, from the beginning of the run.
    """

    wall: float
    compute: float
    memory: float
    communication: float
    idle: float
    kernels: Mapping[str, int]
    counts: Mapping[str, int]
    events: tuple[Event, ...]


def measure(
    call: Callable[[Any], Any],
    prepare: Callable[[], Any],
    program: Program,
    class_of: Callable[[Kernel], str],
    runs: int = 3,
) -> Run:
    """Runs a program under the profiler and returns its fastest run.

    Args:
      call: Runs the program once, on what `prepare` returned, which does not count.
      prepare: Makes the arguments of a run, which may use them up.
      program: What it runs.
      class_of: The class of a kernel: one of `CLASSES`; any other is idle time.
      runs: How many runs to choose from, after one that does not count.

    Raises:
      NothingSeen: The profiler told of no kernel.
    """
    jax.block_until_ready(call(prepare()))
    with tempfile.TemporaryDirectory(prefix="xform-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                prepared = jax.block_until_ready(prepare())
                with jax.profiler.TraceAnnotation(_MARK):
                    jax.block_until_ready(call(prepared))
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = _planes(path)
    kinds = {kernel.name: class_of(kernel) for kernel in program.kernels}
    marks = [(end - start, start, end) for _, name, _, start, end in planes if name == _MARK]
    events = list(_events(planes, kinds, _owners(program)))
    _, start, end = min(marks)
    run = _split(events, start, end)
    if kinds and not run.events:
        raise NothingSeen(
            "JAX's profiler saw no kernel run, so that no time can be split. On GPUs it needs "
            "CUPTI, and the right to use it; `run=False` asks for what is known without a run."
        )
    return run


def _events(
    planes: Iterable[tuple[str, str, str, int, int]],
    kinds: Mapping[str, str],
    owners: Mapping[str, str],
) -> Iterable[Event]:
    """The kernels of a profile, each under its instruction's name, if it is of the program.

    Within a CUDA graph an event has the graph's instruction, and its own only as a symbol.
    """
    symbols = {_symbol(name): name for name in kinds}
    for device, name, op, start, end in planes:
        if device.startswith("/device:"):
            kernel = op if op in kinds else owners.get(op, symbols.get(name, name))
            kind = kinds.get(kernel, "")
            kind = kind if kind in CLASSES else _class_of_name(name)
            yield Event(device, kernel, kind, start, end)
        elif op in kinds:
            yield Event(device, op, kinds[op], start, end)


def _symbol(instruction: str) -> str:
    """The name that XLA gives the kernel of an instruction."""
    return re.sub(r"[^A-Za-z0-9_]", "_", instruction)


def _owners(program: Program) -> dict[str, str]:
    """The kernel of each instruction within one: what runs is named after that, in GPU profiles."""
    named = {kernel.name for kernel in program.kernels}
    computations = program.module.computations
    every = (i for c in computations.values() for i in c.instructions.values())
    return {
        inner: kernel.name
        for kernel in every
        if kernel.name in named
        for body in kernel.calls
        for inner in computations[body].instructions
    }


def _planes(path: Path) -> list[tuple[str, str, str, int, int]]:
    """Every event of a profile: device or host, name, instruction, start and end."""
    with warnings.catch_warnings():  # of its own types, which name no module
        warnings.simplefilter("ignore", DeprecationWarning)
        data = jax.profiler.ProfileData.from_file(str(path))
        found = []
        for plane in data.planes:
            on_device = plane.name.startswith("/device:")
            for line in plane.lines:
                for event in line.events:
                    stats = dict(event.stats)
                    if on_device and "hlo_op" not in stats and not line.name.startswith("Stream"):
                        continue  # a summary of the profiler's own
                    device = plane.name if on_device else str(stats.get("device_ordinal", ""))
                    start = round(event.start_ns)
                    end = start + round(event.duration_ns)
                    found.append((device, event.name, str(stats.get("hlo_op", "")), start, end))
    return found


def _class_of_name(name: str) -> str:
    """What a kernel does of which no more is known: one of a library, or a user's own."""
    name = name.lower()
    if "nccl" in name:
        return "communication"
    return "compute" if any(word in name for word in _COMPUTE) else "memory"


def _split(events: Iterable[Event], start: int, end: int) -> Run:
    inside = [
        Event(e.device, e.kernel, e.kind, max(e.start, start) - start, min(e.end, end) - start)
        for e in events
        if e.start < end and e.end > start
    ]
    # Devices of one host processor share its cores: together they are one machine.
    machines: dict[str, list[Event]] = {}
    for event in inside:
        on_device = event.device.startswith("/device:")
        machines.setdefault(event.device if on_device else "host", []).append(event)
    splits = [_exclusive(found, end - start) for found in machines.values()] or [
        _exclusive([], end - start)
    ]
    mean = {key: sum(split[key] for split in splits) / len(splits) for key in splits[0]}
    kernels: dict[str, int] = {}
    counts: dict[str, int] = {}
    for event in inside:
        kernels[event.kernel] = kernels.get(event.kernel, 0) + event.end - event.start
        counts[event.kernel] = counts.get(event.kernel, 0) + 1
    return Run(float(end - start), **mean, kernels=kernels, counts=counts, events=tuple(inside))


def _exclusive(events: Iterable[Event], wall: int) -> dict[str, int]:
    """Splits a wall time by the first of `CLASSES` that runs at each instant."""
    changes = [(0, None, 0), (wall, None, 0)]
    for event in events:
        if event.kind in CLASSES:
            changes += [(event.start, event.kind, 1), (event.end, event.kind, -1)]
    changes.sort(key=lambda change: change[0])
    running: dict[str, int] = dict.fromkeys(CLASSES, 0)
    parts: dict[str, int] = dict.fromkeys((*CLASSES, "idle"), 0)
    before = 0
    for at, kind, step in changes:
        current = next((name for name in CLASSES if running[name]), "idle")
        parts[current] += at - before
        before = at
        if kind:
            running[kind] += step
    return parts
