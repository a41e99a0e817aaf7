"""What a step takes: the passes, in the order of the schedule, and what comes before and behind.

The simulator of `xform.sharding.pipeline` gives the passes their times. Where microbatches are many
it runs some, and as many more as there are ranks; each further round is as long as the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from xform.sharding.pipeline import Schedule, Times, build, simulate, verify
from xform.sharding.pipeline._times import Real
from xform.sharding.plan._compute import Passes, Spent, passes
from xform.sharding.plan._layout import Layout, layers_of_stages
from xform.sharding.plan._machine import Machine
from xform.sharding.plan._messages import collective
from xform.sharding.plan._model import Model
from xform.sharding.plan._precision import PRECISIONS

# Bytes of a parameter that the optimiser reads and writes, beside its state, both ways: a gradient
# read twice (its norm first), and a parameter written in 16 bits.
UPDATE = 2 * 4 + 2


@dataclass(frozen=True)
class Step:
    """Seconds of a step of the mean rank, by what they go to; they add up to `seconds`.

    Attributes:
      compute: products, attention, loops, the optimiser.
      exposed: messages that nothing hides, by axis.
      bubble: waiting for other ranks.
      overhead: gaps between kernels.
    """

    compute: Real
    exposed: dict[str, Real]
    bubble: Real
    overhead: Real

    @property
    def communication(self) -> Real:
        """All messages that nothing hides."""
        return sum(self.exposed.values())

    @property
    def seconds(self) -> Real:
        """The whole step."""
        return self.compute + self.communication + self.bubble + self.overhead

    @property
    def parts(self) -> dict[str, Real]:
        """The four kinds, in seconds."""
        return {
            "compute": self.compute,
            "communication": self.communication,
            "bubble": self.bubble,
            "overhead": self.overhead,
        }


@dataclass(frozen=True)
class Pipelined:
    """What the simulator says of all microbatches.

    Attributes:
      end: seconds.
      bubble: the share of the ranks' time in which they wait.
      in_flight: for each rank, microbatches begun and not ended, counted by stage.
    """

    end: Real
    bubble: Real
    in_flight: tuple[int, ...]


def schedule_of(layout: Layout, microbatches: int | None = None) -> Schedule:
    """Returns the pipeline's table."""
    count = layout.microbatches if microbatches is None else microbatches
    return _schedule(layout.schedule, layout.pp, count, layout.chunks)


@lru_cache(64)
def _schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    options = {"chunks": chunks} if name == "interleaved" else {}
    return build(name, ranks, microbatches, **options)


@lru_cache(64)
def _in_flight(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    return verify(_schedule(name, ranks, microbatches, chunks)).in_flight


def in_flight(layout: Layout) -> tuple[int, ...]:
    """Returns how many microbatches each rank holds at most, counted by stage."""
    count = layout.microbatches
    if layout.schedule != "gpipe":  # where more microbatches than warm up change nothing
        count = _some(layout)
    return _in_flight(layout.schedule, layout.pp, count, layout.chunks)


def _some(layout: Layout) -> int:
    """The fewest microbatches that differ from all by whole rounds, and reach the steady state."""
    ranks, enough = layout.pp, 2 * layout.pp
    if layout.lockstep:  # ticks settle later, if at all
        return layout.microbatches
    return min(layout.microbatches, enough + layout.microbatches % ranks)


def pipelined(layout: Layout, times: Times) -> Pipelined:
    """Returns what all microbatches of a step take."""
    return _pipelined(_pipeline_of(layout), times)


def _pipeline_of(layout: Layout) -> Layout:
    """All that the simulator has to know."""
    names = ("pp", "microbatches", "schedule", "chunks", "lockstep")
    return Layout(**{name: getattr(layout, name) for name in names})


@lru_cache(64)
def _pipelined(layout: Layout, times: Times) -> Pipelined:
    count, some = layout.microbatches, _some(layout)
    one = simulate(schedule_of(layout, some), times, lockstep=layout.lockstep)
    if some == count:
        return Pipelined(one.end, one.bubble, in_flight(layout))
    longer = schedule_of(layout, some + layout.pp)
    more = simulate(longer, times, lockstep=layout.lockstep)
    rounds = (count - some) / layout.pp
    end = one.end + rounds * (more.end - one.end)
    # Work is the same for all microbatches.
    busy = sum(one.busy) * count / some / layout.pp
    return Pipelined(end, 1 - busy / end, in_flight(layout))


@dataclass(frozen=True)
class Work:
    """What each stage's passes go to.

    Attributes:
      forward, backward: of each stage.
      weights: the share of a backward pass that only makes gradients of weights.
      send: a message to the next rank, which runs beside the passes.
    """

    forward: tuple[Spent, ...]
    backward: tuple[Spent, ...]
    weights: Real
    send: Real

    @property
    def times(self) -> Times:
        """For the simulator."""
        total = lambda spent, share=1.0: [s.total * share for s in spent]
        w = self.weights
        return Times(
            F=total(self.forward), B=total(self.backward), I=total(self.backward, 1 - w),
            W=total(self.backward, w), send=self.send,
        )  # fmt: skip

    def of_rank(self, microbatches: int, ranks: int) -> Spent:
        """What the mean rank does in a step, but for waiting."""
        spent = Spent()
        for stage in (*self.forward, *self.backward):
            spent = spent.plus(stage, microbatches / ranks)
        return spent


def work_of(model: Model, layout: Layout, each: Passes) -> Work:
    """Returns the passes of each stage: of its layers, and of the ends."""
    counts, last = layers_of_stages(model.layers, layout.stages), layout.stages - 1
    beside = "pp" in layout.overlap

    def stage(i: int, layer: Spent, first: Spent, loss: Spent, sends: bool) -> Spent:
        spent = Spent().plus(layer, counts[i])
        spent = spent.plus(first, i == 0).plus(loss, i == last)
        waits = Spent(exposed=(("pp", each.send),))
        return spent if beside or not sends else spent.plus(waits)

    stages = range(layout.stages)
    forward = [stage(i, each.forward, each.first, each.last, i < last) for i in stages]
    backward = [
        stage(i, each.backward, each.first_backward, each.last_backward, i > 0) for i in stages
    ]
    send = each.send if beside else 0.0
    return Work(tuple(forward), tuple(backward), each.weights, send)


def parameters_of_rank(model: Model, layout: Layout, rank: int) -> int:
    """Returns how many parameters a device of a pipeline's rank has, whole over `dp`."""
    owned, ends = stages_of(layout)[rank], model.of_ends
    numbers = layers_of_rank(model, layout)[rank] * model.of_layer
    last = layout.stages - 1
    numbers += (0 in owned) * ends[0] + (last in owned) * ends[1]
    if model.tied and last in owned and 0 not in owned:
        numbers += ends[0]
    return -(-numbers // layout.tp)


def layers_of_rank(model: Model, layout: Layout) -> tuple[int, ...]:
    """Returns how many layers each rank of the pipeline has."""
    counts = layers_of_stages(model.layers, layout.stages)
    return tuple(sum(counts[s] for s in owned) for owned in stages_of(layout))


def stages_of(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Returns the stages of each rank: in turns, or, where there are two in a V, forth and back."""
    return _stages_of(layout.pp, layout.virtual, layout.schedule in ("zb-v", "dualpipe-v"))


@lru_cache(256)
def _stages_of(ranks: int, virtual: int, back: bool) -> tuple[tuple[int, ...], ...]:
    if back:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, ranks * virtual, ranks)) for rank in range(ranks))


def step(model: Model, on: Machine, layout: Layout, tokens: int) -> tuple[Step, Pipelined]:
    """Returns what a step takes, and what the simulator says of its pipeline."""
    each = passes(model, on, layout, tokens)
    work = work_of(model, layout, each)
    found = pipelined(layout, work.times)
    spent = work.of_rank(layout.microbatches, layout.pp)
    messages, update = ends_of_step(model, on, layout, each)
    exposed = dict(spent.exposed)
    exposed["dp"] = exposed.get("dp", 0.0) + messages
    exposed = {axis: s for axis, s in exposed.items() if s}
    bubble = max(0.0, found.end * found.bubble)
    return Step(spent.compute + update, exposed, bubble, spent.overhead), found


def ends_of_step(model: Model, on: Machine, layout: Layout, each: Passes) -> tuple[Real, Real]:
    """Returns what comes once in a step: messages over `dp` that nothing hides, and the update."""
    sums, gathers = _data(model, on, layout)
    per_layer = model.layers / layout.pp
    behind = _window(layout, each.backward.total, per_layer)
    before = _window(layout, each.forward.total, per_layer)
    if "dp" in layout.overlap:
        sums, gathers = max(0.0, sums - behind), max(0.0, gathers - before)
    return sums + gathers, _update(model, on, layout)


def _window(layout: Layout, one: Real, layers: Real) -> Real:
    """The work beside which a rank's gradients are summed, or its parameters gathered.

    A layer's gradients can go once its last microbatch is done, so all but the last one's go beside
    backward passes. With virtual stages, those of all stages but one go beside the last round.
    """
    if layout.virtual > 1:
        rounds = min(layout.pp, layout.microbatches)
        return one * layers * rounds * (layout.virtual - 1) / layout.virtual
    return one * max(0.0, layers - 1)


def _data(model: Model, on: Machine, layout: Layout) -> tuple[Real, Real]:
    """Seconds of the sums of gradients, and of the gathers of parameters, once in a step."""
    largest = max(parameters_of_rank(model, layout, rank) for rank in range(layout.pp))
    state, group = PRECISIONS[layout.precision], layout.group("data")
    if layout.zero == 3:  # of layers, each pass sends its own; here are the ends
        largest = max(model.of_ends) // layout.tp
    per = lambda kind, each: collective(kind, each * largest, group, on)
    if layout.zero == 0:
        return per("all-reduce", state.sent), 0.0
    return per("reduce-scatter", state.sent), per("all-gather", state.gathered)


def _update(model: Model, on: Machine, layout: Layout) -> Real:
    """The optimiser's pass over a device's part of its state."""
    largest = max(parameters_of_rank(model, layout, rank) for rank in range(layout.pp))
    state = PRECISIONS[layout.precision]
    parts = layout.group("data").size if layout.zero else 1
    moved = 2 * (state.optimizer + (state.parameter if state.cast else 0)) + UPDATE
    return largest / parts * moved / (on.device.bandwidth * on.rates.stream)
