"""What a region does when it is differentiated, where its plan sets a price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xform._compat import Jaxpr, JaxprEqn, Var, weakref_lru_cache
from xform._remat._cut import Cut, Graph, Settings, chosen, frontier
from xform._remat._halves import Halves
from xform._remat._joint import Joint, linearize
from xform._remat._row import is_row, linearize_row, picks


@dataclass(frozen=True)
class Inner:
    """A region inside of another, whose plan sets the price of its bytes.

    Attributes:
      price: in bytes a floating-point operation.
      settings: of its cut; None to save what its own regions ask for, and nothing else.
      barrier: whether XLA could undo it: not between two loops.
      free: without settings, which inputs are there in the backward pass anyway; None for all.
    """

    price: float
    settings: Settings | None
    barrier: bool = True
    free: tuple[bool, ...] | None = None

    def halves(self, jaxpr: Jaxpr, active: tuple[bool, ...]) -> Halves:
        joint = joint_of(jaxpr, active)
        if self.settings is None:
            free = self.free or (True,) * len(joint.inputs)
            return Halves(joint, _asked(joint, free), self.barrier)
        return Halves(joint, self._cut(joint), self.barrier, self.settings)

    def _cut(self, joint: Joint) -> Cut:
        """The cut for the price; the two ends of a frontier need no other."""
        assert self.settings is not None
        if self.price in (0.0, math.inf):
            return graph_of(joint, self.settings).cut(self.price)
        return chosen(frontier_of(joint, self.settings), self.price)

    def grown(self, before: int) -> Inner:
        if self.settings is None:
            return replace(self, free=self.free and (True,) * before + self.free)
        free = (True,) * before + self.settings.free
        return replace(self, settings=replace(self.settings, free=free))


@weakref_lru_cache
def joint_of(jaxpr: Jaxpr, active: tuple[bool, ...]) -> Joint:
    return linearize_row(jaxpr, active) if is_row(jaxpr) else linearize(jaxpr, active)


def _asked(joint: Joint, free: Sequence[bool]) -> Cut:
    """Saves what the regions of a row ask for; what is part of an argument is picked out again."""
    there = [v for v, is_free in zip(joint.inputs, free, strict=True) if is_free]
    picked = {v: eqn for eqn in picks(joint.eqns, there) for v in eqn.outvars}
    saved: dict[Var, None] = {}
    again: dict[int, JaxprEqn] = {}
    todo = list(reversed(joint.needed))
    while todo:
        v = todo.pop()
        if (eqn := picked.get(v)) is None:
            saved[v] = None
        elif id(eqn) not in again:
            again[id(eqn)] = eqn
            todo += [u for u in eqn.invars if isinstance(u, Var)]
    return Cut(tuple(saved), tuple(e for e in joint.eqns if id(e) in again), 0, 0)


@weakref_lru_cache
def graph_of(joint: Joint, settings: Settings) -> Graph:
    return Graph(joint, settings)


@weakref_lru_cache
def frontier_of(joint: Joint, settings: Settings) -> list[Cut]:
    return frontier(graph_of(joint, settings))
