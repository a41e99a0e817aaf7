"""`search`: the layouts that fit, best first.

All splits of the devices over `dp`, `pp`, `cp` and `tp` are enumerated with some choices for what
they leave open. What can't run or does not fit goes; the rest is put in the order of an estimate,
and the best of it is simulated, which decides the order that is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from xform._show import Table, as_text, page, si
from xform.sharding.pipeline._times import Real
from xform.sharding.plan._compute import passes
from xform.sharding.plan._faults import FAULTS, Faults
from xform.sharding.plan._layout import PLAIN, Layout, reasons_against
from xform.sharding.plan._machine import Machine
from xform.sharding.plan._memory import memory
from xform.sharding.plan._model import Model
from xform.sharding.plan._plan import Plan, predict
from xform.sharding.plan._time import ends_of_step, work_of

PIPELINES = 64  # ranks of a pipeline, at most


@dataclass(frozen=True, repr=False)
class Plans:
    """What `search` returns: plans, the fastest first. It prints as a table, and can `plot`.

    Attributes:
      plans: those that were simulated.
      tried: how many layouts there were.
      fitting: how many of them can run.
    """

    plans: tuple[Plan, ...]
    tried: int
    fitting: int

    @property
    def best(self) -> Plan:
        """The fastest."""
        return self.plans[0]

    def records(self) -> list[dict[str, Any]]:
        """A flat dict of each plan."""
        return [plan.record() for plan in self.plans]

    def plot(self, ax: Any = None) -> Any:
        """Draws where the time of each goes by matplotlib, and returns the axes."""
        from xform.sharding.plan._plot import bars

        return bars(self.plans, ax)

    def __repr__(self) -> str:
        return "\n".join([self._title(), as_text(table(self.plans), margin="")])

    def _repr_html_(self) -> str:
        return page(self._title(), [table(self.plans)], [])

    def _title(self) -> str:
        one = self.best
        on = f"{one.machine.count:,} × {one.machine.device.name}"
        return (
            f"{one.model.name or 'model'} on {on}, {si(one.tokens)}tokens a step: "
            f"{self.fitting:,} of {self.tried:,} layouts can run; the best of them"
        )


def table(plans: Sequence[Plan]) -> Table:
    """Returns plans as rows, one for each."""
    head = (
        *("dp", "pp", "cp", "tp", "micro", "step s", "compute", "comm.", "bubble", "over."),
        *("MFU", "goodput", "GiB", "how"),
    )

    def row(plan: Plan) -> tuple[str, ...]:
        lay, share = plan.layout, {k: v / plan.seconds for k, v in plan.step.parts.items()}
        chunks = f" × {lay.virtual}" if lay.virtual > 1 else ""
        pipeline = f"{lay.schedule}{chunks}, " if lay.pp > 1 else ""
        return (
            *(f"{n:,}" for n in (lay.dp, lay.pp, lay.cp, lay.tp, lay.microbatches)),
            f"{plan.seconds:.3f}",
            *(f"{x:.1%}" for x in share.values()),
            f"{plan.mfu:.1%}",
            f"{plan.goodput:.1%}",
            f"{plan.memory.total / 2**30:.1f}",
            f"{pipeline}zero {lay.zero}, recompute {lay.recompute}",
        )

    return Table("", head, [row(plan) for plan in plans])


def search(
    model: Model,
    machine: Machine,
    tokens: int,
    *,
    base: Layout = PLAIN,
    faults: Faults = FAULTS,
    show: int = 8,
    simulated: int = 12,
) -> Plans:
    """Returns the layouts that can run and fit, best first.

    Args:
      model: what is trained.
      machine: on what.
      tokens: of a batch, over all devices.
      base: what is not searched: `attention`, `loss`, `precision`, `sequence`, `overlap`.
      faults: how often devices fail.
      show: how many to return, at most; of those that differ in `zero` alone, the best.
      simulated: how many splits to simulate.

    Raises:
      ValueError: nothing can run, or nothing fits; says which reasons came most often.

    >>> from xform.sharding.plan import machine as machine_of
    >>> model = Model(16, 2048, 16, 8, 128, 8192, 32_768, 8192)
    >>> search(model, machine_of("H200", 8), tokens=2**19).best.fits
    True
    """
    every = list(layouts(model, machine, tokens, base))
    reasons = {lay: reasons_against(model, machine, lay, tokens) for lay in every}
    needs = {
        lay: memory(model, lay, tokens, held_of(lay)).total
        for lay, wrong in reasons.items()
        if not wrong
    }
    fitting = [lay for lay, least in needs.items() if least <= machine.memory]
    if not fitting:
        raise ValueError(_nothing(machine, tokens, reasons.values(), needs.values()))
    about = {layout: estimate(model, machine, layout, tokens) for layout in fitting}
    split = lambda layout: replace(layout, zero=0)
    near = dict.fromkeys(map(split, sorted(fitting, key=about.__getitem__)))
    near = set(list(near)[:simulated])
    plans: dict[Layout, Plan] = {}
    for layout in fitting:
        if split(layout) not in near:
            continue
        plan = predict(model, machine, layout, tokens, faults=faults, must_fit=False)
        known = plans.setdefault(split(layout), plan)
        if _order(plan) < _order(known):
            plans[split(layout)] = plan
    best = sorted((p for p in plans.values() if p.fits), key=_order)
    return Plans(tuple(best[:show]), len(every), len(fitting))


def _nothing(
    machine: Machine, tokens: int, reasons: Collection[list[str]], needs: Collection[Real]
) -> str:
    """What an error says of layouts none of which can run."""
    count = Counter(reason for wrong in reasons for reason in wrong)
    found = "; ".join(reason for reason, _ in count.most_common(5)) or "nothing divides"
    if needs:
        least, has = min(needs) / 2**30, machine.memory / 2**30
        found = f"{len(needs)} can run, and the least needs {least:.1f} GiB of {has:.1f}"
    on = f"{machine.count} × {machine.device.name}"
    return f"`search` found no layout of {len(reasons)} for {on} and {tokens} tokens: {found}."


def _order(plan: Plan) -> tuple[bool, Real, Real]:
    """What fits first, then the faster; of two as fast, what needs less."""
    return not plan.fits, round(plan.seconds, 9), plan.memory.total


def layouts(model: Model, machine: Machine, tokens: int, base: Layout) -> Iterator[Layout]:
    """Yields layouts of all devices, some of which can't run."""
    n, rows = machine.count, tokens // model.length
    for tp, cp, pp in product(_powers(min(n, machine.fabric.node)), _powers(64), _ranks(n)):
        dp, left = divmod(n, tp * cp * pp)
        if left or not dp or rows % dp or (cp > 1 and model.length // cp < 1024):
            continue
        for of_pass in (1, 2, 4, 8):
            microbatches, left = divmod(rows // dp, of_pass)
            if left or not microbatches:
                continue
            sizes = dict(dp=dp, tp=tp, cp=cp, pp=pp, microbatches=microbatches)
            for chunks, zero, recompute in product(
                _chunks(model, pp, microbatches), (1, 2, 3), ("none", "full")
            ):
                if (zero > 1 and dp * cp == 1) or (zero == 2 and microbatches == 1):
                    continue
                schedule = "interleaved" if chunks > 1 else "1f1b"
                more = dict(schedule=schedule, chunks=chunks, zero=zero, recompute=recompute)
                yield replace(base, **sizes, **more)  # pyright: ignore[reportArgumentType]


def estimate(model: Model, machine: Machine, layout: Layout, tokens: int) -> Real:
    """Returns about the seconds of a step: the busiest rank's work, and the way there and back.

    It only decides what is simulated.
    """
    each = passes(model, machine, layout, tokens)
    work = work_of(model, layout, each)
    stages = [f.total + b.total for f, b in zip(work.forward, work.backward, strict=True)]
    ranks = [sum(stages[r :: layout.pp]) for r in range(layout.pp)]
    through = sum(stages) / layout.virtual * (layout.pp - 1) / layout.pp
    pipeline = layout.microbatches * max(ranks) + through + 2 * (layout.stages - 1) * work.send
    return pipeline + sum(ends_of_step(model, machine, layout, each))


def held_of(layout: Layout) -> tuple[int, ...]:
    """Returns what `in_flight` of 1F1B and of its interleaved form is, without building them."""
    ranks, m = layout.pp, layout.microbatches
    if layout.virtual == 1:
        return tuple(min(m, ranks - r) for r in range(ranks))
    most = -(-m // ranks) * ranks * layout.virtual
    ahead = lambda r: 2 * (ranks - r - 1) + (layout.virtual - 1) * ranks + 1
    return tuple(min(m * layout.virtual, most, ahead(r)) for r in range(ranks))


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def _ranks(n: int) -> list[int]:
    return [d for d in range(1, min(n, PIPELINES) + 1) if n % d == 0]


def _chunks(model: Model, pp: int, microbatches: int) -> list[int]:
    """Stages of a rank: one, a few, or as many as there are layers for."""
    if pp == 1:
        return [1]
    most = -(-model.layers // pp)
    most = most if most * pp <= model.layers + 2 else model.layers // pp
    return sorted({1, *(c for c in (2, 4, most) if 1 < c <= most and microbatches >= pp)})
