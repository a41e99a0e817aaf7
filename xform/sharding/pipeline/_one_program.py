"""A schedule run by one program: a scan over ticks inside `jax.shard_map`.

The table is an operand, so that one compiled program runs every schedule that fits its room. Its
size and its memory do not depend on the number of microbatches. Ranks advance in lockstep; what
that costs, `simulate(schedule, times, lockstep=True)` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xform.sharding.pipeline._greedy import in_turn
from xform.sharding.pipeline._model import (
    AXIS,
    check_shards,
    check_sizes,
    entered,
    full_specs,
    model_of,
    of_floats,
)
from xform.sharding.pipeline._permute import in_groups
from xform.sharding.pipeline._schedule import Schedule
from xform.sharding.pipeline._table import Room, Table, fits, table
from xform.sharding.pipeline._tick import start, tick
from xform.sharding.pipeline._times import UNIT, Times


def one_program(
    stage: Callable | Sequence[Callable],
    first: Callable,
    last: Callable,
    *,
    mesh: Mesh,
    weights: Any = P(AXIS),
    shared: Any = P(),
    batch: Any = P(),
    enter: Callable | None = None,
    room: Room | None = None,
    times: Times = UNIT,
) -> OneProgram:
    """Returns a function that runs schedules, each as one program over the mesh's axis `pp`.

    The model is `last(shared, stage(w, ... stage(w, first(shared, b), b) ..., b), b)`, summed over
    the microbatches b. Inside, every function sees the shards of its device, as in `shard_map`, and
    may use collectives over any axis but `pp`; each microbatch reaches all stages.

    Args:
      stage: `stage(weights, x, batch) -> y` of one stage and one microbatch; y has the type of x.
        One function, or one for each stage, as `xform.stages` makes them; fewer compile faster.
        What it need not keep for the backward pass it says by `jax.checkpoint`.
      first: `first(shared, batch) -> x`, what the first stage is given: an embedding, say.
      last: `last(shared, y, batch) -> loss`, a number: the share of one microbatch in the loss,
        the same on all devices of a stage, so reduced over the axes that split the batch.
      mesh: the mesh, of which `pp` has as many devices as schedules have ranks.
      weights, shared, batch: trees of specs, or one for all leaves. The first dim of weights counts
        the stages, in the order of `by_rank`, and is split over `pp`; that of the batch counts the
        microbatches.
      enter: `enter(weights, shared) -> (weights, shared)`, what passes read in their place: it runs
        once, before all passes, and its derivative once, after them. Here weights that rest split
        over another axis are gathered (`data.gather`), and those cast that differ in use alone
        (`data.per_device`), so that gradients are summed over devices once.
      room: what buffers hold, so that one compiled program serves all schedules that fit it; for
        each schedule its own where None.
      times: what actions take, by which ticks are filled.

    >>> import jax.numpy as jnp
    >>> from xform.sharding import make_mesh
    >>> from xform.sharding.pipeline import one_f_one_b
    >>> mesh = make_mesh(pp=1, devices=jax.devices()[:1])
    >>> stage, first = lambda w, x, b: jnp.tanh(w * x), lambda e, b: e * b
    >>> run = one_program(stage, first, lambda e, y, b: jnp.sum(y), mesh=mesh)
    >>> place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    >>> weights, shared, batch = place(np.ones(1), "pp"), place(1.0), place(np.ones((3, 2)))
    >>> loss, (dw, de) = run(one_f_one_b(1, 3), weights, shared, batch)
    >>> round(float(loss), 3), dw.shape, round(float(de), 3)
    (4.57, (1,), 2.52)
    """
    specs = weights, shared, batch
    return OneProgram((stage, first, last), mesh, specs, enter, room, times)


_MEASURED = 16  # ticks


class OneProgram:
    """Runs schedules; `one_program` makes it.

    Attributes:
      traced: how many programs it has traced, and had compiled, so far.
    """

    def __init__(
        self, functions: tuple, mesh: Mesh, specs: tuple, enter: Callable | None,
        room: Room | None, times: Times,
    ):  # fmt: skip
        if AXIS not in mesh.shape:
            raise ValueError(f"`one_program` needs a mesh axis `{AXIS}`; found {mesh.axis_names}.")
        self.functions, self.mesh, self.specs, self.enter = functions, mesh, specs, enter
        self.room, self.times = room, times
        self.traced = 0
        self._programs: dict[Any, Any] = {}

    def __call__(self, schedule: Schedule, weights, shared, batch) -> tuple[Any, tuple[Any, Any]]:
        """Returns the loss, and its gradients for weights and shared, in float32 at least.

        Args:
          schedule: which rank does what when.
          weights: of the stages, stacked in the order of `by_rank`.
          shared: what `first` and `last` read; one tree, so that what both read may be one leaf.
          batch: the microbatches.

        Raises:
          ScheduleError: the schedule can't run.
          ValueError: sizes do not fit the schedule; it does not fit the room; a function uses a
            collective over `pp`; the loss, or what travels, varies over an axis that it must not.
          TypeError: what travels has other types than floats, or changes its type.
        """
        program, args = self._ready(schedule, weights, shared, batch)
        return program(*args)

    def lower(self, schedule: Schedule, weights, shared, batch) -> jax.stages.Lowered:
        """Returns the program of a call, to be compiled and looked at."""
        program, args = self._ready(schedule, weights, shared, batch)
        return program.lower(*args)

    def measure(self, schedule: Schedule, weights, shared, batch) -> Times:
        """Returns what every stage's passes take in a tick, and an idle tick: means, in seconds.

        A table that fills one slot of one rank, over and over, tells what it takes. It is compiled
        twice, with backward passes whole and in parts, and needs GPipe's memory.

        Args:
          schedule: of which the owners of stages and the number of microbatches count.
          weights, shared, batch: as for a call.
        """
        trees, taken = (weights, shared, batch), {}
        for split in (False, True):
            made = table(in_turn(schedule, split=split), split=split)
            count = made.room.ticks + _MEASURED
            program = self._compiled(replace(made.room, ticks=count), made, trees)
            run = partial(_seconds, lambda numbers, p=program: p(self._placed(numbers), *trees))
            idle = run(np.zeros_like(made.padded(count)))
            base = run(made.padded(count))
            for slot, kind in zip("fiw", "FIW" if split else "FB", strict=False):
                for stage in range(schedule.stages):
                    rows = np.repeat(made.alone(slot, stage), _MEASURED, 0)
                    seconds = run(np.concatenate([made.numbers, rows])) - base
                    taken[kind, stage] = max(seconds, 0.0) / _MEASURED
            taken["idle", 0] = idle / count
        of = lambda kind: [taken[kind, stage] for stage in range(schedule.stages)]
        return Times(of("F"), of("B"), of("I"), of("W"), taken["idle", 0])

    def _ready(self, schedule: Schedule, *trees) -> tuple[Any, tuple]:
        """The program for a call, made if there is none yet, and its operands."""
        split = None if self.room is None else self.room.cross > 0
        made = table(schedule, self.times, split=split)
        check_sizes(made.schedule, self.mesh, trees[0], trees[2])
        room = self.room or replace(made.room, ticks=_rounded(made.room.ticks))
        if short := fits(room, made.room):
            raise ValueError(f"the schedule does not fit the `room` given: {'; '.join(short)}.")
        return self._compiled(room, made, trees), (self._placed(made.padded(room.ticks)), *trees)

    def _placed(self, numbers: np.ndarray):
        return jax.device_put(numbers, NamedSharding(self.mesh, P(None, AXIS)))

    def _compiled(self, room: Room, made: Table, trees: tuple) -> Any:
        """The program for such a room, table and operands, made if there is none yet."""
        floats = [of_floats(tree) for tree in trees[:2]]
        chunks = len(made.schedule.stages_of[0])
        key = room, made.x_ways, chunks, jax.tree.structure((trees, floats))
        if key not in self._programs:
            self._programs[key] = jax.jit(self._program(room, made, floats))
        return self._programs[key]

    def _program(self, room: Room, made: Table, floats: list) -> Callable:
        ring = len(made.schedule.stages_of[0]) > 1
        ways = {"x": made.x_ways, "g": made.g_ways}

        def send(values: list, what: str) -> dict[str, list]:
            return {way: _moved(values, way, made.schedule.ranks, ring) for way in ways[what]}

        def local(numbers, weights, shared, batch):
            self.traced += 1
            check_shards(made.schedule, weights, shared, batch)
            weights, shared, back = entered(self.enter, weights, shared)
            options = {"schedule": made.schedule, "split": room.cross > 0}
            model = model_of(self.functions, weights, shared, batch, **options)
            one_tick = lambda state, row: tick(model, state, row, send)
            if model.permutes:
                one_tick = in_groups(one_tick, but=AXIS)
            turn = lambda state, row: (one_tick(state, row[0]), None)
            (_, sums), _ = lax.scan(turn, start(model, room), numbers)
            return lax.psum(sums["loss"], AXIS), back(sums["weights"], sums["shared"])

        specs = [full_specs(spec, tree) for spec, tree in zip(self.specs, floats, strict=False)]
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(P(None, AXIS), *self.specs),
            out_specs=(P(), tuple(specs)),
        )


def by_rank(stages, schedule: Schedule):
    """Returns a tree of stacked stages in the order in which ranks own them.

    Args:
      stages: a tree of arrays whose first dim counts the stages, from the input on.
      schedule: whose ranks own them.

    >>> from xform.sharding.pipeline import zb_v
    >>> by_rank(np.arange(4), zb_v(2, 4))
    array([0, 3, 1, 2])
    """
    order = np.array([stage for own in schedule.stages_of for stage in own])
    return jax.tree.map(lambda x: x[order], stages)


def by_stage(ranks, schedule: Schedule):
    """Returns what `by_rank` was given.

    >>> from xform.sharding.pipeline import zb_v
    >>> by_stage(by_rank(np.arange(4), zb_v(2, 4)), zb_v(2, 4))
    array([0, 1, 2, 3])
    """
    order = np.argsort([stage for own in schedule.stages_of for stage in own])
    return jax.tree.map(lambda x: x[order], ranks)


def _seconds(run: Callable, numbers: np.ndarray) -> float:
    """What a run takes, the median of three, after one that compiles."""

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(numbers))
        return time.perf_counter() - start

    once()
    return median(once() for _ in range(3))


def _moved(values: list, way: str, ranks: int, ring: bool) -> list:
    """What arrives from the neighbour on one side; from the last to the first only in a ring."""
    if way == "here":
        return values
    hop = 1 if way == "up" else -1
    pairs = [(rank, (rank + hop) % ranks) for rank in range(ranks)]
    pairs = pairs if ring else [(a, b) for a, b in pairs if b - a == hop]
    return [lax.ppermute(value, AXIS, pairs) for value in values]


def _rounded(count: int) -> int:
    """The next number of three binary digits and zeros: few programs serve many lengths."""
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit
