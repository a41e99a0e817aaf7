"""A budget: of all plans worth trying the fastest whose peak is within it.

The plans are the same for every budget, and so are their peaks, which `xform.memory` finds for the
whole program as it will run. Taking the first, from the fastest on, that fits makes a smaller
budget never need more: if it takes another plan, then because the first needs more than it allows.
That is done on a few plans; between the one that fits and the one before it others are looked for
by bisection. To measure a plan is what takes time: of 32 layers about ten are.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from xform._amount import number
from xform._compat import Jaxpr, Var, weakref_lru_cache
from xform._expand import is_gpu
from xform._memory import Memory, memory_of, orders_breadth_first, temporaries_of
from xform._remat._cut import Cut, Settings
from xform._remat._halves import Halves
from xform._remat._jaxprs import applied, build
from xform._remat._kinds import kind_of, nbytes
from xform._remat._margin import margin
from xform._remat._plans import Inner, frontier_of
from xform._remat._regions import ROW, Choice, Divide, Layer, layers
from xform.jaxpr import source_line, walk

type Budget = int | float | str | np.integer | np.floating

# Of partial sums, when a product has too few rows and columns for all of a GPU: XLA splits it until
# each multiprocessor has a part, and such products often run side by side.
_SCRATCH = 2 << 20
# How many prices are tried before those between them.
_PRICES = 5
# Steps between two plans for a row of layers.
_STEPS = 4


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: plans are many small objects, which it would visit in vain.

    It takes two fifths of the time of a search, and what a search leaves behind is small.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class BudgetError(ValueError):
    """No plan needs as little as the budget.

    Attributes:
      least: the bytes that the smallest plan needs.
    """

    def __init__(self, message: str, least: int = 0):
        super().__init__(message)
        self.least = least


@dataclass(frozen=True)
class Outer:
    """The plan of what the user calls `remat` on.

    Attributes:
      budget: see `remat`.
      settings: what may run again, and what the host keeps.
      named: whether it is a region by name, whose budget is for what it saves.
      device: what it will run on; None for what JAX does.
    """

    budget: Budget
    settings: Settings
    named: bool = False
    device: str | None = None

    def plans(self, jaxpr: Jaxpr, active: tuple[bool, ...]) -> Search:
        return search(jaxpr, active, self.settings, target(self.device))

    @_uncollected()
    def halves(self, jaxpr: Jaxpr, active: tuple[bool, ...]) -> Halves:
        plans = self.plans(jaxpr, active)
        if not isinstance(self.budget, str) and not plans.reversible:
            return plans.fastest.halves
        return (plans.saving if self.named else plans.within)(self.budget).halves

    def grown(self, before: int) -> Outer:
        del before
        return self


class Target(NamedTuple):
    """What plans are for.

    Attributes:
      scratch: the bytes that products take besides operands and results.
      orders: the devices, as `memory` takes them, of which the one counts that needs most.
    """

    scratch: int
    orders: tuple[str, ...] = ("accelerator",)


@dataclass(frozen=True, eq=False)
class Candidate:
    """One plan for a whole program.

    Attributes:
      choice: what was tried.
      divided: the program with its regions; equal ones of other plans are known by these.
      halves: the two programs.
      target: what it is for.
    """

    choice: Choice
    divided: Jaxpr
    halves: Halves
    target: Target

    def program(self) -> Jaxpr:
        """Results and gradients in one, as it runs; made anew, since it is large."""
        joint, first = self.halves.joint, self.halves.forward
        second = self.halves.sketch((False,) * sum(joint.varying))
        n, inputs = len(joint.outputs), set(joint.inputs)
        made = iter(first.outvars[n:])
        saved = [v if v in inputs else next(made) for v in self.halves.saved]
        cotangents = [Var(v.aval) for v in second.invars[len(saved) :]]
        after, outs = applied(second, [*saved, *cotangents])
        consts = dict(zip(first.constvars, first.consts, strict=True))
        consts |= dict(zip(second.constvars, second.consts, strict=True))
        whole = build(
            [*consts, *first.invars, *cotangents], [*first.outvars[:n], *outs],
            [*first.eqns, *after],
        )  # fmt: skip
        return whole.with_consts(list(consts.values()))

    @cached_property
    def memory(self) -> Memory:
        """What it needs where a compiler orders for memory, as accelerators' do."""
        return memory_of(self.program(), device=self.target.orders[0], at_once=True)

    @cached_property
    def saved(self) -> list[Var]:
        """What the forward pass makes for the backward and the device keeps, results left out."""
        results = {v for v in self.halves.joint.outputs if isinstance(v, Var)}
        return [v for v in self._kept if v not in results]

    @property
    def saved_bytes(self) -> int:
        """Of that, on one device."""
        return sum(map(nbytes, self.saved))

    @property
    def _kept(self) -> list[Var]:
        apart = {*self.halves.joint.inputs, *self.halves.cut.hosted}
        return [v for v in self.halves.saved if v not in apart]

    @cached_property
    def peak(self) -> int:
        """Bytes beyond arguments and results, in the order that needs most."""
        whole = self.program()
        # A CPU starts sums as soon as it can, and a GPU clears those of all layers in one kernel.
        needs = [temporaries_of(whole, device=o, at_once=True) for o in self.target.orders]
        most = max(self.at_least, *itertools.chain.from_iterable(needs))
        on_cpu = "cpu" in self.target.orders
        unknown = margin(whole, max(0, most - self.saved_bytes), on_cpu=on_cpu)
        return most + unknown + self.target.scratch

    @cached_property
    def at_least(self) -> int:
        """Less than the peak: what is saved, but for what finds room where the results will be.

        There is room for one value in each.
        """
        joint = self.halves.joint
        gradients = (v for v, moves in zip(joint.inputs, joint.active, strict=True) if moves)
        homes = sorted(map(nbytes, [*joint.outputs, *gradients]))
        found = taken = 0
        for size in sorted(map(nbytes, self._kept), reverse=True):
            if taken < len(homes) - bisect.bisect_left(homes, size):
                taken += 1
            else:
                found += size
        return found

    def fits(self, budget: int) -> bool:
        """Whether it needs no more; what it saves may say so before all else is known."""
        return self.at_least <= budget and self.peak <= budget


@dataclass(eq=False)
class Search:
    """The plans of one program, for the tangents of its active inputs."""

    jaxpr: Jaxpr
    active: tuple[bool, ...]
    settings: Settings
    target: Target
    _tried: dict[Choice, Candidate] = field(default_factory=dict)

    def candidate(self, choice: Choice) -> Candidate:
        if choice not in self._tried:
            free = [True] * len(self.jaxpr.invars)
            divided, is_row = Divide(self.settings, choice).whole(self.jaxpr, free)
            settings = None if is_row else Settings(
                self.settings.again, tuple(free), loops=False, offload=self.settings.offload
            )  # fmt: skip
            plan = Inner(choice.price, settings)
            halves = plan.halves(divided, self.active)
            target = self.target._replace(scratch=self.target.scratch * self._multiplies)
            self._tried[choice] = Candidate(choice, divided, halves, target)
        return self._tried[choice]

    @cached_property
    def _multiplies(self) -> bool:
        return any(kind_of(site.eqn) in ("products", "kernels") for site in walk(self.jaxpr))

    @cached_property
    def fastest(self) -> Candidate:
        return self.candidate(Choice(math.inf))

    @cached_property
    def reversible(self) -> bool:
        """Whether there is a backward pass to plan for: a `while` has none."""
        halves = self.fastest.halves
        try:
            halves.sketch((False,) * sum(halves.joint.varying))
        except (NotImplementedError, TypeError, ValueError):
            return False  # who differentiates backwards is told so by JAX then
        return True

    @cached_property
    def choices(self) -> list[Choice]:
        """What is tried first, from the fastest on: a few prices, and regions put together.

        Not where the host keeps some values: what is computed again would bring them there again.
        """
        n = len(self._prices)
        some = sorted({round(i * (n - 1) / (_PRICES - 1)) for i in range(_PRICES)})
        nested = self.divided and not self.settings.offload
        together = [(math.inf, 2), (0.0, 2), (0.0, 3)] if nested else []
        few = (Choice(self._prices[i]) for i in some)
        return [*few, *(Choice(price, levels=n) for price, n in together)]

    @cached_property
    def divided(self) -> int:
        """How many layers stand in a row; 1 for none that do, 0 where there is no loop either."""
        loops = any(s.eqn.primitive.name == "scan" for s in walk(self.jaxpr))
        return max(len(self._layers), int(loops))

    @property
    def candidates(self) -> list[Candidate]:
        """All plans, from the fastest on."""
        return [self.candidate(choice) for choice in self.choices]

    @property
    def _layers(self) -> list[Layer]:
        return layers(self.jaxpr, (True,) * len(self.jaxpr.invars))

    def _between(self, fast: Choice, small: Choice) -> list[Choice]:
        """The prices between two."""
        if fast.levels != small.levels:
            return []
        return [Choice(price) for price in self._prices if fast.price > price > small.price]

    def _mixed(self, fast: Choice, small: Choice) -> list[Choice]:
        """Between two plans for a row of layers: those where the first layers follow the second."""
        n = len(self._layers)
        if n < ROW or fast.levels != small.levels:
            return []
        steps = dict.fromkeys(n * i // _STEPS for i in range(1, _STEPS))
        return [replace(fast, early=k, early_price=small.price) for k in steps if k]

    @cached_property
    def _prices(self) -> list[float]:
        """One price between any two at which a region changes its mind."""
        known = {math.inf}
        for cuts in self._frontiers():
            known.update(cut.below for cut in cuts)
        edges = sorted(known, reverse=True)[1:]
        between = [math.sqrt(a * b) for a, b in itertools.pairwise(edges)]
        return [math.inf, *between, 0.0] if edges else [math.inf]

    def _frontiers(self) -> list[list[Cut]]:
        """Those of all regions of the program."""
        found = []
        todo = [self.fastest.halves]
        seen = set()
        while todo:
            halves = todo.pop()
            for site in walk(halves.joint.linear):
                inner = site.eqn.params.get("linear")  # what `fuse` and `vmap` leave has no cut
                if isinstance(inner, Halves) and inner not in seen:
                    seen.add(inner)
                    todo.append(inner)
            if halves.settings is not None:
                found.append(frontier_of(halves.joint, halves.settings))
        return found

    @cached_property
    def least(self) -> Candidate:
        """The plan that needs least; what saves more than that is not measured."""
        first, *others = sorted(self.candidates, key=lambda c: c.at_least)
        best = first
        for candidate in others:
            if candidate.at_least < best.peak > candidate.peak:
                best = candidate
        return best

    def saving(self, budget: Budget) -> Candidate:
        """The fastest plan that saves so much."""
        if isinstance(budget, str):
            return self.within(budget)
        plans = [self.candidate(Choice(price)) for price in self._prices]
        least = min(plans, key=lambda c: c.saved_bytes)
        if isinstance(budget, float):
            more = budget * (self.fastest.saved_bytes - least.saved_bytes)
            budget = int(least.saved_bytes + more)
        assert isinstance(budget, int)
        if fits := next((c for c in plans if c.saved_bytes <= budget), None):
            return fits
        raise BudgetError(_saves_more(budget, least), least.saved_bytes)

    @_uncollected()
    def within(self, budget: Budget) -> Candidate:
        """The fastest plan within a budget."""
        if isinstance(budget, str):
            return {"all": self.fastest, "none": self.candidate(Choice(0.0))}[budget]
        if isinstance(budget, float):
            least = self.least.peak
            more = budget and budget * max(0, self.fastest.peak - least)
            budget = int(least + more)
        assert isinstance(budget, int)
        before = None
        for choice in self.choices:
            if self.candidate(choice).fits(budget):
                return self.candidate(self._faster(budget, before, choice) if before else choice)
            before = choice
        raise BudgetError(self._too_small(budget), self.least.peak)

    def _faster(self, budget: int, fast: Choice, fits: Choice) -> Choice:
        """Of the plans from one that doesn't fit to one that does a fast one that fits."""
        for finer in (self._between, self._mixed):
            some = [fast, *finer(fast, fits), fits]
            low, high = 0, len(some) - 1
            while high - low > 1:
                middle = (low + high) // 2
                found, known = self.candidate(some[middle]), self.candidate(some[high])
                # One that needs less than a slower plan would break the order of budgets.
                good = found.fits(budget) and found.peak >= known.peak
                low, high = (low, middle) if good else (middle, high)
            fast, fits = some[low], some[high]
        return fits

    def _too_small(self, budget: int) -> str:
        best = self.least
        top = [b for b in best.memory.at_peak if b.line != "argument"][:5]
        lines = "".join(f"\n  {b}" for b in top)
        return (
            f"`budget={budget:,}`: the least that a plan needs beside arguments and results is "
            f"{best.peak:,} bytes, at {best.memory.peak_line}:{lines}\n"
            f"Raise the budget to that, let more kinds of work run again (`again=`), or split the "
            "program into more layers."
        )


def _saves_more(budget: int, least: Candidate) -> str:
    maker = least.halves.joint.maker()
    top = sorted(least.saved, key=lambda v: -nbytes(v))[:5]
    lines = "".join(
        f"\n  {number(nbytes(v))}B  {v.aval.str_short(short_dtypes=True)}  "
        f"{maker[v].primitive.name} at {source_line(maker[v])}"
        for v in top
    )
    return (
        f"`budget={budget:,}` for a named region: the least that it saves beside its results is "
        f"{least.saved_bytes:,} bytes:{lines}\nRaise the budget to that, or let more kinds of work "
        "run again (`again=`)."
    )


@weakref_lru_cache
def search(jaxpr: Jaxpr, active: tuple[bool, ...], settings: Settings, target: Target) -> Search:
    """The plans of a program, found once."""
    return Search(jaxpr, active, settings, target)


def target(device: str | None) -> Target:
    """What plans are for where a program is compiled for a device, by default JAX's own.

    Raises:
      ValueError: there is no such device.
    """
    name = device or jax.default_backend()
    if orders_breadth_first(name):
        return Target(0, ("accelerator", "cpu"))
    # By the model that `memory` has of it: of a GPU, with its own kernels of rows and of products.
    order = name if is_gpu(name) else "accelerator"
    return Target(0 if name.lower() == "tpu" else _SCRATCH, (order,))
