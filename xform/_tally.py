"""The FLOPs of a program, counted as fast as Python can go through its equations.

Most programs leave nothing open: no loop without a count, no branch, no mask. Then their FLOPs need
no graph of values, and of equations of one primitive on the same types one alone is asked what it
does (JAX has one object for all equal types, so that a look at three objects tells).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from xform._amount import Amount, ratio
from xform._compat import Jaxpr, JaxprEqn
from xform._cost_rules import BY_TYPE, RULES, STILL, aval, sent
from xform._costs import Cost
from xform._program import STRUCTURES, called_body


def tally(jaxpr: Jaxpr) -> Cost | None:
    """Returns the FLOPs and elementary functions of a program on all devices, without its bytes.

    None if it has a primitive without a rule, or if something in it asks for the graph of values: a
    while, a branch, a kernel, an attention.
    """
    try:
        found = _Tally().body(jaxpr, {})
    except _Open:
        return None
    return Cost(
        {kind: ratio(n, 1) for kind, n in found.matrix.items()},
        ratio(found.other, 1), ratio(found.transcendentals, 1),
    )  # fmt: skip


class _Open(Exception):
    """Only the graph of values can tell."""


class _Sum:
    """A running sum of work."""

    __slots__ = ("matrix", "other", "transcendentals")

    def __init__(self):
        self.matrix: dict[str, Amount] = {}
        self.other: Amount = 0
        self.transcendentals: Amount = 0

    def run(self, eqn: JaxprEqn, axes: Mapping[str, int], times: int) -> None:
        """Adds what so many equations like this one do."""
        work = RULES[eqn.primitive.name](eqn)
        if work.matrix:
            kind = work.kind or aval(eqn.invars[0]).dtype.name
            self.matrix[kind] = self.matrix.get(kind, 0) + work.matrix * times
        self.other += work.other * times
        self.transcendentals += work.transcendentals * times
        if axes and (network := sent(eqn, axes)) is not None:
            self.other += network[1] * times

    def add(self, body: _Sum, times: int) -> None:
        """Adds a body that runs so often."""
        for kind, n in body.matrix.items():
            self.matrix[kind] = self.matrix.get(kind, 0) + n * times
        self.other += body.other * times
        self.transcendentals += body.transcendentals * times


class _Tally:
    """What the bodies of one program do, each counted once however often it is called."""

    def __init__(self):
        self.still = {name for name, rule in RULES.items() if rule in STILL}
        asks = {name: BY_TYPE[rule] for name, rule in RULES.items() if rule in BY_TYPE}
        self.by_type = {name for name, params in asks.items() if not params}
        self.by_params = {name: params for name, params in asks.items() if params}
        self.bodies: dict[Any, _Sum] = {}

    def body(self, jaxpr: Jaxpr, axes: Mapping[str, int]) -> _Sum:
        """One run on one device, in sight of mesh axes of these sizes."""
        key = jaxpr, *axes.items()
        if (total := self.bodies.get(key)) is not None:
            return total
        total = self.bodies[key] = _Sum()
        still, by_type, by_params = self.still, self.by_type, self.by_params
        alike: dict[Any, list[JaxprEqn]] = defaultdict(list)
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in still:
                continue
            if name in by_type:
                alike[name, eqn.invars[0].aval, eqn.outvars[0].aval].append(eqn)
            elif (asked := by_params.get(name)) is not None:
                params = [eqn.params.get(p) for p in asked]
                alike[name, eqn.invars[0].aval, eqn.outvars[0].aval, *params].append(eqn)
            else:
                self._one(eqn, axes, total)
        for eqns in alike.values():
            total.run(eqns[0], axes, len(eqns))
        return total

    def _one(self, eqn: JaxprEqn, axes: Mapping[str, int], total: _Sum) -> None:
        """Adds what an equation does by itself or through its body."""
        name, params, times = eqn.primitive.name, eqn.params, 1
        if (body := called_body(eqn)) is None:
            if name == "scan":
                body, times = params["jaxpr"], params["length"]
            elif name == "shard_map":
                body, axes = params["jaxpr"], dict(params["mesh"].shape)
                times = math.prod(axes[axis] for axis in params["newly_manual_axes"])
            elif name in STRUCTURES or name not in RULES:
                raise _Open
            else:
                total.run(eqn, axes, 1)
                return
        total.add(self.body(body, axes), times)
