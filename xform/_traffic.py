"""The bytes of a program, counted as fast as Python can go through its equations.

`xform._cost` asks each value where it goes. The totals need less: of a run of equations, the sum
over the types of all that is read and written, and two sets, of what comes from outside and of what
outlives the run. A call is a part of the run that it stands in; what it does by itself is counted
once for all calls of one body, and of its operands and results it says how they are used.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

from xform._amount import Amount, ratio
from xform._compat import Jaxpr, JaxprEqn, Literal
from xform._cost_rules import BY_TYPE, RULES, Work, sent
from xform._program import STRUCTURES, VIEWS, called_body, measured

_INS, _OUTS, _TYPE = map(attrgetter, ("invars", "outvars", "aval"))


@dataclass
class Moved:
    """Bytes: of every equation by itself, of perfect fusion, and sent over each mesh axis."""

    bytes: int = 0
    fused: int = 0
    network: dict[str, Amount] = field(default_factory=dict)

    def add(self, other: Moved, times: int = 1) -> None:
        self.bytes += other.bytes * times
        self.fused += other.fused * times
        for axis, sends in other.network.items():
            self.network[axis] = self.network.get(axis, 0) + sends * times


class Unclear(Exception):
    """Only the graph of values can tell."""


def traffic(jaxpr: Jaxpr) -> Moved | None:
    """Returns what a program moves on all devices; None where only the graph of values can tell."""
    try:
        found = _Traffic().region(jaxpr, {})
    except Unclear:
        return None
    found.network = {axis: ratio(sends, 1) for axis, sends in found.network.items()}
    return found


@dataclass
class _Run:
    """A run of equations, while it is gone through; values are variables, or stand for some.

    Attributes:
      moved: what is certain of it.
      same: of a call's result that is one of its operands, that operand.
      roots: of a view, the value that it views.
      known: single numbers that the program tells.
      outside: what comes from outside of the run, in bytes.
      loaded: what of that a call has read already, inside.
      read: what equations read.
      parts: of each equation that reads a part of its operands, these, and the bytes of the part.
      made: what equations write if it outlives the run, in bytes; None where that is all of it.
      escaped: what something else than a plain equation reads.
    """

    moved: Moved = field(default_factory=Moved)
    same: dict[Any, Any] = field(default_factory=dict)
    roots: dict[Any, Any] = field(default_factory=dict)
    known: set[Any] = field(default_factory=set)
    outside: dict[Any, int] = field(default_factory=dict)
    loaded: set[Any] = field(default_factory=set)
    read: set[Any] = field(default_factory=set)
    parts: list[tuple[set[Any], int]] = field(default_factory=list)
    made: dict[Any, int | None] = field(default_factory=dict)
    escaped: set[Any] = field(default_factory=set)

    def value(self, atom: Any) -> Any:
        """What an operand is; a number that is written there stands for itself."""
        if type(atom) is not Literal:
            return self.same.get(atom, atom)
        number = object()
        self.outside[number] = _bytes(atom)
        if _size(atom) == 1:
            self.known.add(number)
        return number

    def root(self, value: Any) -> Any:
        return self.roots.get(value, value)

    def escape(self, values: Iterable[Any]) -> None:
        values = list(values)
        self.escaped.update(values)
        self.escaped.update(map(self.root, values))

    def settled(self) -> Moved:
        """What it moves, as far as nothing outside of it decides that."""
        loads = (self.read & self.outside.keys()) - self.loaded
        fused = sum(map(self.outside.__getitem__, loads))
        fused += sum(n for roots, n in self.parts if not self.outside.keys().isdisjoint(roots))
        for v in self.escaped & self.made.keys():
            fused += _bytes(v) if (written := self.made[v]) is None else written
        return Moved(self.moved.bytes, self.moved.fused + fused, self.moved.network)


def _size(var: Any) -> int:
    return measured(var.aval)[1]


def _bytes(var: Any) -> int:
    return measured(var.aval)[2]


class _Traffic:
    """What the bodies of one program move."""

    def __init__(self):
        self.regions: dict[Any, Moved] = {}
        self.bodies: dict[Any, _Run] = {}

    def region(self, jaxpr: Jaxpr, axes: Mapping[str, int]) -> Moved:
        """One run on one device, in sight of mesh axes of these sizes."""
        key = jaxpr, *axes.items()
        if key not in self.regions:
            run = self._run(jaxpr, axes)
            run.outside.update({v: _bytes(v) for v in jaxpr.invars})
            run.escape(map(run.value, jaxpr.outvars))
            self.regions[key] = run.settled()
        return self.regions[key]

    def _run(
        self, jaxpr: Jaxpr, axes: Mapping[str, int], given: Sequence[tuple[int, bool]] = ()
    ) -> _Run:
        """Goes through a body; `given` says which operands are one, and which a known number."""
        run = _Run()
        for v, (first, told) in zip(jaxpr.invars, given, strict=False):
            if (same := jaxpr.invars[first]) is not v:
                run.same[v] = same
            if told:
                run.known.add(v)
        run.known.update(v for v in jaxpr.constvars if _size(v) == 1)
        run.outside.update({v: _bytes(v) for v in jaxpr.constvars})
        plain: list[JaxprEqn] = []
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            rule = RULES.get(name)
            if rule in BY_TYPE:
                plain.append(eqn)
            elif (body := called_body(eqn)) is not None:
                self._call(eqn, body, axes, run)
            elif name in STRUCTURES:
                self._structure(eqn, axes, run)
            elif rule is None:
                raise Unclear
            else:
                work = rule(eqn)
                if work.read is None and work.written is None:
                    plain.append(eqn)
                else:
                    _part(eqn, work, run)
            if axes and rule is not None and (network := sent(eqn, axes)) is not None:
                run.moved.add(Moved(network=network[0]))
        _count(plain, run)
        return run

    def _structure(self, eqn: JaxprEqn, axes: Mapping[str, int], run: _Run) -> None:
        name, params, times = eqn.primitive.name, eqn.params, 1
        if name == "scan":
            times = params["length"]
        elif name == "shard_map":
            axes = dict(params["mesh"].shape)
            times = math.prod(axes[axis] for axis in params["newly_manual_axes"])
        else:
            raise Unclear
        run.moved.add(self.region(params["jaxpr"], axes), times)
        run.escape(map(run.value, eqn.invars))
        run.outside.update({v: _bytes(v) for v in eqn.outvars})

    def _call(self, eqn: JaxprEqn, body: Jaxpr, axes: Mapping[str, int], run: _Run) -> None:
        """Adds a call to the run that it stands in."""
        values = list(map(run.value, eqn.invars))
        same = tuple((values.index(v), v in run.known) for v in values)
        key = body, same, *axes.items()
        if key not in self.bodies:
            self.bodies[key] = self._run(body, axes, same)
        inside = self.bodies[key]
        run.moved.add(inside.settled())
        given = dict(zip(body.invars, values, strict=True))
        run.read.update(run.root(x) for v, x in given.items() if v in inside.read)
        run.escape(x for v, x in given.items() if v in inside.escaped)
        for roots, part in inside.parts:
            if inside.outside.keys().isdisjoint(roots):
                run.parts.append(({run.root(given[v]) for v in roots if v in given}, part))
        outer: dict[Any, Any] = {}  # what is made inside, as the run outside knows it
        for out, atom in zip(eqn.outvars, body.outvars, strict=True):
            v = inside.value(atom)
            if (x := given.get(v, outer.get(v))) is not None:
                run.same[out] = x
                continue
            outer[v] = out
            if v in inside.known:
                run.known.add(out)
            if (root := inside.root(v)) in given:
                run.roots[out] = run.root(given[root])
                continue
            x = outer.setdefault(root, object())
            if x is not out:
                run.roots[out] = x
            if root in inside.outside:
                run.outside[x] = inside.outside[root]
            if root in inside.read or root in inside.loaded:
                run.loaded.add(x)
            if root in inside.made and root not in inside.escaped:
                written = inside.made[root]
                run.made[x] = _bytes(root) if written is None else written


def _part(eqn: JaxprEqn, work: Work, run: _Run) -> None:
    """An equation that says itself how much it reads or writes."""
    values = [run.value(atom) for atom in eqn.invars]
    if eqn.primitive.name in VIEWS:
        run.roots.update(zip(eqn.outvars, map(run.root, values), strict=False))
    if work.read is None:
        raise Unclear
    run.moved.bytes += work.read
    if work.read:
        run.parts.append(({run.root(v) for v in values if v not in run.known}, work.read))
    if work.written is None:
        run.moved.bytes += sum(map(_bytes, eqn.outvars))
        run.made.update(dict.fromkeys(eqn.outvars))
    elif work.written:
        run.moved.bytes += work.written
        (out,) = eqn.outvars
        run.made[out] = work.written


def _count(plain: Sequence[JaxprEqn], run: _Run) -> None:
    """Adds equations that read their operands and write their results, each once."""
    outs = list(chain.from_iterable(map(_OUTS, plain)))
    ins = [v for v in chain.from_iterable(map(_INS, plain)) if type(v) is not Literal]
    if run.same:
        ins = list(map(run.same.get, ins, ins))
    if run.known:
        ins = [v for v in ins if v not in run.known]
    for kind, n in Counter(map(_TYPE, chain(ins, outs))).items():
        run.moved.bytes += n * measured(kind)[2]
    for eqn in plain:
        if len(eqn.invars) > 1 and (len(eqn.invars) > 2 or run.same or operator.is_(*eqn.invars)):
            run.moved.bytes -= _twice(eqn, run)
    run.read.update(map(run.roots.get, ins, ins) if run.roots else ins)
    run.made.update(dict.fromkeys(outs))


def _twice(eqn: JaxprEqn, run: _Run) -> int:
    """The bytes of operands that are those before them: `x * x` reads x once."""
    values = [run.same.get(v, v) for v in eqn.invars if type(v) is not Literal]
    values = [v for v in values if v not in run.known]
    return sum(_bytes(v) for v, before in zip(values[1:], values, strict=False) if v is before)
