"""What a plan keeps and repeats, by line, and how much is held when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from xform._amount import number
from xform._buffers import Plan as Buffers
from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform._memory import Memory
from xform._program import is_on_host, merge, program, prune
from xform._remat._budget import Candidate, Outer
from xform._remat._halves import Halves
from xform._remat._kinds import kind_of, nbytes
from xform._remat._primitive import Batched
from xform.jaxpr import carried, source_line, sub_jaxprs, walk

# What leaves residuals of its bodies.
_BODIES = ("scan", "cond", "shard_map", "jit")


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
      saved: what the forward pass keeps for the backward, the largest first, arguments and results
        left out. What a region that runs again keeps meanwhile is not among it.
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
    halves = candidate.halves
    saved: dict[tuple, Value] = {}
    again: dict[tuple, Value] = {}
    inputs = dict(zip(halves.joint.inputs, paths, strict=True))
    maker = halves.joint.maker()
    for v in halves.saved:
        if v not in inputs and v not in halves.cut.stays:  # that is in the memory of a result
            made = _made(v, maker)
            on_host = v in halves.cut.hosted or is_on_host(v.aval)
            _add(saved, made.value, made.what, made.line, made.times, made.kind, on_host=on_host)
    for region, times in _regions(halves):
        for eqn in region.cut.again:
            for v in eqn.outvars:
                _add(again, v, eqn.primitive.name, source_line(eqn), times, kind_of(eqn))
    read = [v for v in halves.saved if v in inputs]
    arguments = [
        Value(nbytes(v), v.aval.str_short(short_dtypes=True), inputs[v], "argument") for v in read
    ]
    largest = lambda values: tuple(sorted(values, key=lambda v: -v.bytes))
    return Report(
        largest(v for v in saved.values() if v.bytes), largest(again.values()),
        largest(arguments), candidate.memory, candidate.peak, _curve(candidate),
    )  # fmt: skip


def _regions(halves: Halves) -> Iterator[tuple[Halves, int]]:
    """A region and those inside of it at any depth: how often each runs."""
    yield halves, 1
    for site in walk(halves.joint.linear):  # it looks into the regions that it finds
        inner = site.eqn.params.get("linear")
        if isinstance(inner, Batched):
            inner = inner.within
        if isinstance(inner, Halves):
            yield inner, math.prod(parent.params.get("length", 1) for parent, _ in site.parents)


class _Made(NamedTuple):
    """What makes a value: the user's equation, or a loop that carries it.

    Attributes:
      value: as it is made in the innermost body.
      what, line, kind: as in `Value`.
      times: how often that is stacked.
    """

    value: Var
    what: str
    line: str
    kind: str | None
    times: int = 1


def _made(v: Var, maker: Mapping[Var, JaxprEqn]) -> _Made:
    """Where a value comes from: in the body of the loop or branch whose result it is, if in one."""
    v, eqn = _unmoved(v, maker)
    outer = _Made(v, eqn.primitive.name, source_line(eqn), kind_of(eqn))
    if eqn.primitive.name not in _BODIES:
        return outer
    i = eqn.outvars.index(v)
    stacked = eqn.primitive.name == "scan" and i >= carried(eqn).carry
    for _, body in sub_jaxprs(eqn):
        inner = body.outvars[i]
        inside = {w: e for e in body.eqns for w in e.outvars}
        if isinstance(inner, Var) and inner in inside and not _is_filled(inside[inner]):
            found = _made(inner, inside)
            times = found.times * (eqn.params["length"] if stacked else 1)
            return found._replace(times=times)
        if stacked and isinstance(inner, Var) and inner in body.invars:
            return _Made(inner, "carry", outer.line, None, eqn.params["length"])
    return outer


def _is_filled(eqn: JaxprEqn) -> bool:
    """Whether it makes zeros, as a branch does of what another one leaves for the backward pass."""
    return eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Literal)


def _unmoved(v: Var, maker: Mapping[Var, JaxprEqn]) -> tuple[Var, JaxprEqn]:
    """A value as it was before it was rounded to be saved, or moved, and what makes that."""
    eqn = maker[v]
    while eqn.primitive.name in ("device_put", "reduce_precision"):
        (before,) = eqn.invars
        if not isinstance(before, Var) or before not in maker:
            break
        v, eqn = before, maker[before]
    return v, eqn


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
