"""What to save: a minimum cut between what the forward pass makes and what the backward pass needs.

Each value is at hand in the backward pass or not; each equation runs there again or not. Saving a
value costs its bytes, running an equation again the bytes that its time is worth (`price`, bytes a
floating-point operation). What lies on the sink's side of a cut is at hand:

    source ──price · flops──▶ equation ──bytes──▶ value ──▶ sink, if the backward pass needs it
                                 ▲                  │
                                 └────── ∞ ─────────┘  an equation runs where its operands are

Elementwise work is free but for ties: of the cuts of as many bytes, the one with the least work
wins, and of these the one that saves what XLA keeps in memory anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xform._compat import JaxprEqn, Var
from xform._remat._flow import SINK, SOURCE, Network
from xform._remat._joint import Joint
from xform._remat._kinds import kind_of, kinds_inside, nbytes, size_of
from xform.jaxpr._walk import given_name

_NEVER = 1 << 120
# One byte outweighs all that decides ties.
_BYTE = 1 << 60
# So many kinds of work are chosen among one by one, where their price decides nothing.
_FEW = 5


@dataclass(frozen=True)
class Settings:
    """What a cut may do.

    Attributes:
      again: the kinds of work that may run a second time, for a price.
      free: which inputs are there in the backward pass anyway.
      outputs_stay: whether the results are, too.
      loops: whether a loop is such work.
      offload: names (of `checkpoint_name`) of values that are saved in the host's memory.
      hands_on: whether another region saves the results: it finds there those of such names.
    """

    again: frozenset[str]
    free: tuple[bool, ...]
    outputs_stay: bool = True
    loops: bool = True
    offload: frozenset[str] = frozenset()
    hands_on: bool = False


@dataclass(frozen=True, eq=False)
class Cut:
    """One choice.

    Attributes:
      saved: the values that are saved, in program order; inputs among them.
      again: the equations that run a second time, in program order.
      bytes: of what is saved and not there anyway.
      flops: of the work that runs a second time.
      hosted: of what is saved, what the host keeps, and what holds it under its names.
      stays: of what is saved, what is there anyway.
      below: the price below which it is chosen.
    """

    saved: tuple[Var, ...]
    again: tuple[JaxprEqn, ...]
    bytes: int
    flops: int
    hosted: Mapping[Var, tuple[Var, ...]] = field(default_factory=dict)
    stays: frozenset[Var] = frozenset()
    below: float = math.inf


class Graph:
    """A joint graph with what everything costs."""

    def __init__(self, joint: Joint, settings: Settings):
        self.joint, self.settings = joint, settings
        self.maker = joint.maker()
        self.hosted = self._to_host()
        self.work = joint.work
        self.kind = {i: self._kind(eqn) for i, eqn in enumerate(joint.eqns)}
        self.priced = [i for i, kind in self.kind.items() if kind in settings.again]
        self.save = self._to_save()
        self._cuts: dict[float, Cut] = {}

    def _kind(self, eqn: JaxprEqn) -> str | None:
        """The kind of work of an equation, or "never" where no price will do."""
        if any(v in self.hosted for v in eqn.outvars):
            return "never"
        if eqn.primitive.name in ("scan", "while", "cond") and not self.settings.loops:
            return "never"
        # What runs again as a whole runs all its work again.
        inside = kinds_inside(eqn)
        forbidden = sorted(inside - self.settings.again)
        return forbidden[0] if forbidden else kind_of(eqn)

    def _to_host(self) -> dict[Var, tuple[Var, ...]]:
        """The values that go to the host, and those that hold them under their names.

        That is what is named, as it was before it got its first name; but for inputs, which others
        save: there it is what holds the name.
        """
        pairs = zip(self.joint.inputs, self.settings.free, strict=True)
        passing = {v for v, free in pairs if not free}
        there = {*self.joint.inputs, *self.joint.consts} - passing
        origin: dict[Var, Var] = {}
        names: dict[Var, list[Var]] = {}
        offloaded: set[Var] = set()
        for eqn in self.joint.eqns:
            if (name := given_name(eqn)) is None:
                continue
            (before,), (named,) = eqn.invars, eqn.outvars
            if not isinstance(before, Var) or before in there:
                there.add(named)
                continue
            if before in passing:
                origin.setdefault(before, named)
            v = origin[named] = origin.get(before, before)
            names.setdefault(v, []).append(named)
            if name in self.settings.offload:
                offloaded.add(v)
        return {v: tuple(held) for v, held in names.items() if v in offloaded}

    def _to_save(self) -> dict[Var, tuple[int, int]]:
        """Of each value the bytes that saving it takes, and what decides ties."""
        in_memory = {v for v in self.joint.outputs if isinstance(v, Var)}
        for i, eqn in enumerate(self.joint.eqns):
            if self.kind[i] is not None:
                in_memory.update([*eqn.outvars, *(v for v in eqn.invars if isinstance(v, Var))])
        cost = {}
        for eqn in self.joint.eqns:
            for v in eqn.outvars:
                taken = 0 if v in self.hosted else nbytes(v)
                cost[v] = taken, 0 if v in in_memory else 2 * size_of(v)
        if self.settings.outputs_stay:
            results = (v for v in self.joint.outputs if isinstance(v, Var))
            cost.update((v, (0, 0)) for v in results if v not in self.hosted)
        for v, free in zip(self.joint.inputs, self.settings.free, strict=True):
            cost[v] = 0 if free else nbytes(v), 0
        cost.update((v, (0, 0)) for v in self.joint.consts)
        return cost

    def cut(self, price: float, only: Collection[int] | None = None) -> Cut:
        """Returns the cheapest choice at a price; of priced work, `only` these may run again."""
        if only is not None:
            return self._cheapest(price, only)
        if price not in self._cuts:
            self._cuts[price] = self._cheapest(price, only)
        return self._cuts[price]

    def _cheapest(self, price: float, only: Collection[int] | None) -> Cut:
        network = Network()
        value = {v: network.node() for v in self.save}
        for v in [*self.joint.inputs, *self.joint.consts]:
            network.edge(SOURCE, value[v], self._saving(v))
        for i, eqn in enumerate(self.joint.eqns):
            node = network.node()
            network.edge(SOURCE, node, self._running(i, price, only))
            for v in eqn.outvars:
                network.edge(node, value[v], self._saving(v))
            for v in dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)):
                network.edge(value[v], node, _NEVER)
        for v in self.joint.needed:
            network.edge(value[v], SINK, _NEVER)
        _, there = network.cut()
        first = SINK + 1 + len(value)
        again = {i for i in range(len(self.joint.eqns)) if first + i in there}
        return self._found(again)

    def _handed_on(self) -> list[Var]:
        """What the host keeps of the results."""
        if not self.settings.hands_on:
            return []
        results = {v for v in self.joint.outputs if isinstance(v, Var)}
        return [v for v, names in self.hosted.items() if not results.isdisjoint(names)]

    def _saving(self, v: Var) -> int:
        amount, ties = self.save[v]
        return amount * _BYTE + ties

    def _running(self, i: int, price: float, only: Collection[int] | None) -> int:
        kind = self.kind[i]
        if kind is None:
            return self.work[i]
        if kind not in self.settings.again or math.isinf(price):
            return _NEVER
        if only is not None and i not in only:
            return _NEVER
        return int(price * self.work[i] * _BYTE) + self.work[i]

    def _found(self, again: set[int]) -> Cut:
        """The cut in which these equations may run again, as far as they are needed."""
        eqns = self.joint.eqns
        index = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        saved: dict[Var, None] = {}
        runs: set[int] = set()
        todo = [*self.joint.needed, *self._handed_on()]
        seen = set(todo)
        while todo:
            v = todo.pop()
            if (i := index.get(v)) is None or i not in again:
                saved[v] = None
                continue
            runs.add(i)
            operands = {u for u in eqns[i].invars if isinstance(u, Var)} - seen
            seen |= operands
            todo += operands
        order = {v: i for i, v in enumerate(self.save)}
        return Cut(
            tuple(sorted(saved, key=order.__getitem__)),
            tuple(eqns[i] for i in sorted(runs)),
            sum(self.save[v][0] for v in saved),
            sum(self.work[i] for i in runs if self.kind[i] is not None),
            {v: self.hosted[v] for v in saved if v in self.hosted},
            frozenset(v for v in saved if not self.save[v][0] and v not in self.hosted),
        )


def frontier(graph: Graph) -> list[Cut]:
    """Returns the choices worth making, from the fastest to the smallest.

    Those that are best at some price; and between two of these, which differ by much, others that
    no price finds: the best of all there are where little work has a price, as in a knapsack.
    """
    fast = graph.cut(math.inf)
    if not graph.priced:
        return [fast]
    hull = _hull(graph, fast, graph.cut(0.0))
    if len(graph.priced) <= _FEW:
        more = _some_of(graph, set(), graph.priced)
    else:
        more = [cut for pair in itertools.pairwise(hull) for cut in _between(graph, *pair)]
    found = [hull[0]]
    for before, after in itertools.pairwise(hull):
        slope = (before.bytes - after.bytes) / (after.flops - before.flops)
        inside = [cut for cut in more if after.bytes < cut.bytes < before.bytes]
        steps = _undominated([before, *inside, after])[1:]
        for i, cut in enumerate(steps):
            below = slope * (1 + 1e-6 * (len(steps) - 1 - i))
            found.append(replace(cut, below=below))
    return found


def _hull(graph: Graph, fast: Cut, small: Cut) -> list[Cut]:
    """The cuts that are best at some price, from one that is to another."""
    if small.bytes >= fast.bytes:
        return [fast]
    price = (fast.bytes - small.bytes) / (small.flops - fast.flops)
    middle = graph.cut(price)
    if not (small.bytes < middle.bytes < fast.bytes and fast.flops < middle.flops < small.flops):
        return [fast, small]
    worth = lambda cut: cut.bytes + price * cut.flops
    if worth(middle) > worth(fast) * (1 - 1e-9):
        return [fast, small]
    return [*_hull(graph, fast, middle), *_hull(graph, middle, small)[1:]]


def _between(graph: Graph, fast: Cut, small: Cut) -> list[Cut]:
    """Cuts that run again some of the work by which two neighbours differ."""
    index = {id(eqn): i for i, eqn in enumerate(graph.joint.eqns)}
    of = lambda cut: {index[id(eqn)] for eqn in cut.again}.intersection(graph.priced)
    differ = sorted(of(small) - of(fast))
    return _some_of(graph, of(fast), differ) if len(differ) <= _FEW else []


def _some_of(graph: Graph, always: set[int], some: Sequence[int]) -> list[Cut]:
    """The smallest cuts in which of priced work some runs again, for each choice of it."""
    sizes = range(1, len(some))
    choices = itertools.chain.from_iterable(itertools.combinations(some, n) for n in sizes)
    return [graph.cut(0.0, always | set(choice)) for choice in choices]


def _undominated(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts that none is both smaller and faster than, from the fastest to the smallest."""
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda c: (c.flops, c.bytes)):
        if not kept or cut.bytes < kept[-1].bytes:
            kept.append(cut)
    return kept


def chosen(cuts: Sequence[Cut], price: float) -> Cut:
    """The cut of a frontier for a price."""
    return [cut for cut in cuts if cut.below > price or math.isinf(cut.below)][-1]
