"""What a plan keeps and repeats, by line, and how much is held when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from xform._amount import number
from xform._buffers import Plan as Buffers
from xform._compat import Jaxpr, JaxprEqn, Var
from xform._memory import Memory
from xform._program import is_on_host, merge, program, prune
from xform._remat._budget import Candidate, Outer
from xform._remat._halves import Halves
from xform._remat._kinds import kind_of, nbytes
from xform.jaxpr import source_line, walk
from xform.jaxpr._walk import UNKNOWN

_BODIES = ("scan", "cond", "shard_map")
_TOP = "the program"


@dataclass(frozen=True)
class Value:
    """One value that is kept, or that is computed again.

    Attributes:
      bytes: of all its copies, on one device.
      type: its dtype and shape.
      what: the primitive that makes it, or the argument that it is.
      line: the user's line that makes it.
      times: in how many iterations or layers: a loop stacks so many.
      kind: of the work that makes it, None where that is elementwise.
      on_host: whether the host keeps it.
    """

    bytes: int
    type: str
    what: str
    line: str
    times: int = 1
    kind: str | None = None
    on_host: bool = False

    def __str__(self) -> str:
        copies = f"{self.times} × " if self.times > 1 else ""
        host = ", on the host" if self.on_host else ""
        return f"{number(self.bytes)}B  {copies}{self.type}  {self.what} at {self.line}{host}"


@dataclass(frozen=True)
class Report:
    """What `remat.report` returns.

    Attributes:
      saved: what the forward pass keeps for the backward, the largest first, arguments left out.
      recomputed: what runs again, in the same order.
      arguments: what the backward pass reads of these.
      memory: the peak of value and gradients, by `xform.memory`.
      peak: bytes beside arguments and results.
      curve: at each operation of value and gradients the bytes held beside these, and its line.
    """

    saved: tuple[Value, ...]
    recomputed: tuple[Value, ...]
    arguments: tuple[Value, ...]
    memory: Memory
    peak: int
    curve: tuple[tuple[int, str], ...]

    @property
    def saved_bytes(self) -> int:
        """What is kept beside arguments, on the device."""
        return sum(v.bytes for v in self.saved if not v.on_host)

    def __str__(self) -> str:
        again = [v for v in self.recomputed if v.kind is not None]
        free = len(self.recomputed) - len(again)
        lines = [
            f"peak {number(self.peak)}B beside arguments and results; saved "
            f"{number(self.saved_bytes)}B",
            *(f"  saved  {v}" for v in self.saved),
            *(f"  again  {v}" for v in again),
        ]
        if not self.saved:
            lines.append("  nothing is saved: the backward pass starts from the arguments")
        if free:
            lines.append(f"  again  {free} elementwise values")
        return "\n".join([*lines, *self._drawn()])

    def _drawn(self, width: int = 64, height: int = 6) -> Iterator[str]:
        """The curve in characters."""
        if not self.curve:
            return
        most = max(held for held, _ in self.curve) or 1
        n = len(self.curve)
        starts = [i * n // width for i in range(width + 1)]
        parts = [self.curve[a : max(b, a + 1)] for a, b in itertools.pairwise(starts)]
        tops = [max((held for held, _ in part), default=0) for part in parts]
        for row in range(height, 0, -1):
            label = f"{number(most)}B" if row == height else ""
            yield f"{label:>12} │" + "".join(
                "█" if t * height >= row * most - most / 2 else " " for t in tops
            )
        yield f"{'':>12} └" + "─" * width + " time"


def report_of(jaxpr: Jaxpr, plan: Outer, paths: Sequence[str], chosen: Sequence[bool]) -> Report:
    """The report of a program of whose inputs the chosen that are floats are differentiated."""
    types = (getattr(t, "dtype", None) for t in jaxpr.in_avals)
    is_float = (t is not None and jnp.issubdtype(t, jnp.inexact) for t in types)
    active = tuple(a and b for a, b in zip(chosen, is_float, strict=True))
    candidate = plan.plans(jaxpr, active).within(plan.budget)
    saved: dict[tuple, Value] = {}
    again: dict[tuple, Value] = {}
    inputs = dict(zip(candidate.halves.joint.inputs, paths, strict=True))
    for halves, times, within in _nested(candidate.halves, within=_TOP):
        _tell(halves, times, within, saved, again)
    read = [v for v in candidate.halves.saved if v in inputs]
    arguments = [
        Value(nbytes(v), v.aval.str_short(short_dtypes=True), inputs[v], "argument") for v in read
    ]
    largest = lambda values: tuple(sorted(values, key=lambda v: -v.bytes))
    return Report(
        largest(v for v in saved.values() if v.bytes), largest(again.values()),
        largest(arguments), candidate.memory, candidate.peak, _curve(candidate),
    )  # fmt: skip


def _nested(halves: Halves, times: int = 1, within: str = "") -> Iterator[tuple[Halves, int, str]]:
    """A region and those inside of it: how often each runs, and in a loop or branch at which line.

    What a region saves that stands in no loop or branch, the one around it saves: "" for that.
    """
    yield halves, times, within
    for site in walk(halves.joint.linear):
        inner = site.eqn.params.get("linear")
        if isinstance(inner, Halves):
            n = math.prod(parent.params.get("length", 1) for parent, _ in site.parents)
            line = source_line(site.parents[-1][0]) if site.parents else ""
            yield from _nested(inner, times * n, line)


def _tell(halves: Halves, times: int, within: str, saved: dict, again: dict) -> None:
    """Adds what one region saves, if no other tells of it, and what it runs again."""
    maker = halves.joint.maker()
    for v in halves.saved if within else ():
        eqn = _maker(v, maker)
        if v in halves.cut.stays or (eqn is not None and eqn.primitive.name in _BODIES):
            continue  # in the memory of what is outside, or told of the region inside
        if eqn is None and within != _TOP:
            _add(saved, v, "carry", within, times, None)
        elif eqn is not None:
            at = (eqn.primitive.name, source_line(eqn), times, kind_of(eqn))
            _add(saved, v, *at, on_host=v in halves.cut.hosted or is_on_host(v.aval))
    for eqn in halves.cut.again:
        for v in eqn.outvars:
            _add(again, v, eqn.primitive.name, source_line(eqn), times, kind_of(eqn))


def _maker(v: Var, maker: Mapping[Var, JaxprEqn]) -> JaxprEqn | None:
    """The user's equation that makes a value; those that round it or move it have no line."""
    eqn = maker.get(v)
    while eqn is not None and eqn.primitive.name in ("device_put", "reduce_precision"):
        (before,) = eqn.invars
        if source_line(eqn) != UNKNOWN or not isinstance(before, Var) or before not in maker:
            break
        eqn = maker[before]
    return eqn


def _add(
    found: dict,
    v: Var,
    what: str,
    line: str,
    times: int,
    kind: str | None,
    *,
    on_host: bool = False,
) -> None:
    type_ = v.aval.str_short(short_dtypes=True).replace("<host>", "")
    key = what, line, type_, on_host
    if (known := found.get(key)) is not None:
        times += known.times
    found[key] = Value(nbytes(v) * times, type_, what, line, times, kind, on_host)


def _curve(candidate: Candidate) -> tuple[tuple[int, str], ...]:
    region = prune(merge(program(candidate.program())))
    held = Buffers(region, {}).held()
    return tuple((bytes_, node.line) for bytes_, node in zip(held, region.nodes, strict=True))
