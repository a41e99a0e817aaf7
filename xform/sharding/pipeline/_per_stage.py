"""A schedule run by a program for each pass, on a mesh for each rank.

One process sends the actions off, each rank's by a thread of its own, in the order of its row;
devices run them as their inputs come, so that no rank waits for another's slower action. One thread
for all would: a program with a branch, or with a loop whose turns are counted on the way, holds up
who sends it off until its device comes there. Results travel from device to device. Values live
between programs as arrays with a leading dim for the devices over which they differ, so that a type
says the same inside a program and outside.

What it costs more than `one_program` is time to send off, at every action, and a compilation for
each rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xform._compat import settings
from xform.sharding.mesh import settle
from xform.sharding.pipeline._greedy import in_turn
from xform.sharding.pipeline._mailbox import Closed, Mailbox
from xform.sharding.pipeline._model import AXIS, Where, check_sizes, full_specs, of_floats
from xform.sharding.pipeline._programs import Programs
from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._ticks import is_split
from xform.sharding.pipeline._times import Times
from xform.sharding.pipeline._verify import verify


def per_stage(
    stage: Callable | Sequence[Callable],
    first: Callable,
    last: Callable,
    *,
    mesh: Mesh,
    weights: Any = P(AXIS),
    shared: Any = P(),
    batch: Any = P(),
    enter: Callable | None = None,
) -> PerStage:
    """Returns a function that runs schedules with a program for each pass of a stage.

    It takes and returns what `one_program` does, and a stage may be on any rank. It can't be called
    under `jit`, since it is many programs.

    Args:
      stage, first, last: the model, as for `one_program`.
      mesh: the mesh; its slices along `pp` run the stages.
      weights, shared, batch: specs, as for `one_program`.
      enter: what makes weights and shared ready, as for `one_program`.

    Raises:
      ValueError: the mesh has no axis `pp`.
      NotImplementedError: the mesh has devices of other processes.

    >>> from xform.sharding import make_mesh
    >>> from xform.sharding.pipeline import one_f_one_b
    >>> mesh = make_mesh(pp=1, devices=jax.devices()[:1])
    >>> stage, first = lambda w, x, b: jnp.tanh(w * x), lambda e, b: e * b
    >>> run = per_stage(stage, first, lambda e, y, b: jnp.sum(y), mesh=mesh)
    >>> place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    >>> weights, shared, batch = place(np.ones(1), "pp"), place(1.0), place(np.ones((3, 2)))
    >>> loss, (dw, de) = run(one_f_one_b(1, 3), weights, shared, batch)
    >>> round(float(loss), 3), dw.shape, round(float(de), 3)
    (4.57, (1,), 2.52)
    """
    return PerStage((stage, first, last), mesh, (weights, shared, batch), enter)


class PerStage:
    """Runs schedules; `per_stage` makes it."""

    def __init__(self, functions: tuple, mesh: Mesh, specs: tuple, enter: Callable | None):
        if AXIS not in mesh.shape:
            raise ValueError(f"`per_stage` needs a mesh axis `{AXIS}`; found {mesh.axis_names}.")
        if {device.process_index for device in mesh.devices.flat} != {jax.process_index()}:
            raise NotImplementedError(
                "`per_stage` moves results between devices of one process, and the mesh has those "
                "of others: `one_program` runs on them."
            )
        self.functions, self.mesh, self.specs, self.enter = functions, mesh, specs, enter
        along = mesh.axis_names.index(AXIS)
        slices = np.split(mesh.devices, mesh.shape[AXIS], axis=along)
        self.meshes = [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in slices]
        self._programs: dict[Any, Programs] = {}

    def __call__(self, schedule: Schedule, weights, shared, batch) -> tuple[Any, tuple[Any, Any]]:
        """Returns the loss, and its gradients for weights and shared, in float32 at least.

        Args and errors are those of `one_program`'s result, but that a stage may be on any rank.
        """
        trees = weights, shared, batch
        run = self._start(schedule, trees)
        run.all()
        return self._gathered(run.finish(), trees)

    def measure(self, schedule: Schedule, weights, shared, batch) -> Times:
        """Returns what every stage's passes take, and a message: means, in seconds.

        All microbatches of one stage and kind are sent off together, first the forward passes, as
        GPipe does it, and needs memory for it. What it takes to send them off counts where it takes
        longer than the pass itself, as it does in a run.

        Args:
          schedule: of which the owners of stages and the number of microbatches count.
          weights, shared, batch: as for a call.
        """
        trees, taken = (weights, shared, batch), {}
        for split in (False, True):
            alone = in_turn(schedule, split=split)
            self._start(alone, trees).timed(split=split)  # which compiles
            taken |= self._start(alone, trees).timed(split=split)
        of = lambda kind: [taken[kind, stage] for stage in range(schedule.stages)]
        return Times(of("F"), of("B"), of("I"), of("W"), taken.get(("send", 0), 0.0))

    def _start(self, schedule: Schedule, trees: Sequence) -> _Run:
        """A run of which nothing is sent off yet."""
        verify(schedule)
        schedule = schedule.without_messages()
        if len({len(own) for own in schedule.stages_of}) > 1:
            raise ValueError("weights are split evenly: every rank needs as many stages.")
        check_sizes(schedule, self.mesh, trees[0], trees[2])
        parts = [[self._part(tree, mesh) for tree in trees] for mesh in self.meshes]
        return _Run(schedule, self._made(schedule, parts[0]), self.meshes, parts)

    def _made(self, schedule: Schedule, part: Sequence) -> Programs:
        """The programs for such operands, traced once for all ranks."""
        leaves, tree = jax.tree.flatten(part)
        key = is_split(schedule), tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._programs:
            mesh = self.meshes[0].abstract_mesh
            self._programs[key] = Programs(
                self.functions, mesh, self.specs, self.enter, part, schedule
            )
        return self._programs[key]

    def _part(self, tree, mesh: Mesh) -> Any:
        """A rank's part of the arrays, which is on its devices already."""

        def of(x):
            place = getattr(x, "sharding", None)
            if not isinstance(place, NamedSharding) or place.mesh != self.mesh:
                raise ValueError(
                    f"`per_stage` needs arrays on its mesh; found {jax.typeof(x).str_short()} "
                    "elsewhere: `jax.device_put(x, xform.sharding.shardings(mesh, spec))` moves it."
                )
            spec = place.spec
            mine = {shard.device: shard.data for shard in x.addressable_shards}
            over_ranks = len(spec) > 0 and spec[0] == AXIS
            shape = (x.shape[0] // self.mesh.shape[AXIS], *x.shape[1:]) if over_ranks else x.shape
            shards = [mine[device] for device in mesh.devices.flat]
            return jax.make_array_from_single_device_arrays(
                shape, NamedSharding(mesh, spec), shards
            )

        return jax.tree.map(of, tree)

    def _gathered(self, results: Sequence, trees: Sequence) -> tuple[Any, tuple[Any, Any]]:
        """The results of all ranks as arrays of the whole mesh, without a copy."""

        def join(shape, spec, parts):
            shards = [shard.data for part in parts for shard in part.addressable_shards]
            place = NamedSharding(self.mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, place, shards)

        losses, weights, shared = zip(*results, strict=True)
        likes = [of_floats(tree) for tree in trees[:2]]
        specs = [full_specs(*pair) for pair in zip(self.specs, likes, strict=False)]
        whole = lambda like, spec, *parts: join(like.shape, spec, parts)
        d_weights = jax.tree.map(whole, likes[0], specs[0], *weights)
        d_shared = jax.tree.map(whole, likes[1], specs[1], *shared)
        return join((), P(), losses), (d_weights, d_shared)


class _Run:
    """One run of a schedule: what is on the way, and what every rank holds."""

    def __init__(self, schedule: Schedule, programs: Programs, meshes: Sequence[Mesh], parts):
        self.schedule, self.programs, self.meshes, self.parts = schedule, programs, meshes, parts
        self.ready = [(settle(programs.ready(*part[:2])), part[2]) for part in parts]
        self.held = Mailbox()
        # By this thread, before anything runs: what can't be compiled, or traced, fails here.
        self.passes = [
            programs.compiled(mesh, *ready, own)
            for mesh, ready, own in zip(meshes, self.ready, schedule.stages_of, strict=True)
        ]
        self.sums = [self._call("zero", rank, 0, 0)[0] for rank in range(schedule.ranks)]

    def all(self) -> None:
        """Sends all actions off."""
        same = settings()

        def row(cells: Sequence) -> None:
            try:
                with same():
                    for action in (action for cell in cells for action in cell):
                        self.do(action)
                    jax.effects_barrier()  # each thread has its own: that all is printed, say
            except BaseException:
                self.held.close()  # nobody waits for what does not come
                raise

        with ThreadPoolExecutor(self.schedule.ranks) as threads:
            try:
                sent = [threads.submit(row, cells) for cells in self.schedule.rows]
                errors = [one.exception() for one in sent]
            finally:
                self.held.close()
        for error in errors:
            if error and not isinstance(error, Closed):
                raise error

    def timed(self, *, split: bool) -> dict[tuple[str, int], float]:
        """Runs everything, and returns the seconds of each kind of each stage, and of a message."""
        down = range(self.schedule.stages)
        kinds = [("F", down), ("I" if split else "B", down[::-1]), *[("W", down)] * split]
        taken: dict[tuple[str, int], float] = {}
        for kind, stage in ((kind, stage) for kind, stages in kinds for stage in stages):
            start = time.perf_counter()
            for m in range(self.schedule.microbatches):
                self.do(Action(kind, stage, m))
            taken[kind, stage] = self._each(start)
            if stage == 0 < down[-1] and kind == "F":
                mesh = self.meshes[self.schedule.rank_of[0]]
                held = self.held.values
                waiting = [held["x", 1, m] for m in range(self.schedule.microbatches)]
                start = time.perf_counter()
                self.held.put("back", [self._moved(x, mesh) for x in waiting])
                taken["send", 0] = self._each(start)
                self.held.take("back")
        return taken

    def _each(self, start: float) -> float:
        """The seconds of a microbatch since the start."""
        jax.block_until_ready((list(self.held.values.values()), self.sums))
        return (time.perf_counter() - start) / self.schedule.microbatches

    def do(self, action: Action) -> None:
        """Sends an action off, and its result on."""
        kind, stage, m = action.kind, action.stage, action.microbatch
        rank = self.schedule.rank_of[stage]
        chunk, last = self.schedule.stages_of[rank].index(stage), self.schedule.stages - 1
        at = stage, m
        if kind == "F":
            x = self.held.take(("x", *at)) if stage else self._call("begin", rank, chunk, m)[0]
            y, *kept = self._call("forward", rank, chunk, m, x)
            self.held.put(("kept", *at), kept)
            self._send("g" if stage == last else "x", y, min(stage + 1, last), m)
        if kind in "BI":
            g, kept = self.held.take(("g", *at)), self.held.take(("kept", *at))
            if stage == last:
                (g,) = self._add("end", rank, chunk, m, g)
            dx, cross = self._add("backward", rank, chunk, m, *kept, g)
            self.held.put(("late", *at), (kept[1], cross))
            if stage:
                self._send("g", dx, stage - 1, m)
            else:
                self._add("begin_gradient", rank, chunk, m, dx)
        if kind in "BW":
            late = self.held.take(("late", *at))
            if self.programs.model.split:
                self._add("weights", rank, chunk, m, *late)

    def _add(self, name: str, rank: int, chunk: int, m: int, *values) -> list:
        """Runs a program that also adds to the rank's sums."""
        *out, self.sums[rank] = self._call(name, rank, chunk, m, *values, self.sums[rank])
        return out

    def finish(self) -> list[tuple]:
        """For each rank the loss, the gradients of its weights, and those of shared."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[-1]
        results = [
            self.programs.reduce(part[:2], sums)
            for part, sums in zip(self.parts, self.sums, strict=True)
        ]
        loss, shared = results[last][0], results[first][2]
        if first != last:
            there = self._moved(results[last][2], self.meshes[first])
            shared = jax.tree.map(jnp.add, shared, there)
        ends = [(self._moved(loss, mesh), self._moved(shared, mesh)) for mesh in self.meshes]
        return [
            (loss, weights, shared)
            for (_, weights, _), (loss, shared) in zip(results, ends, strict=True)
        ]

    def _call(self, name: str, rank: int, chunk: int, m: int, *values) -> list:
        where = Where(np.int32(self.schedule.stages_of[rank][chunk]), np.int32(chunk))
        return settle(self.passes[rank][name](*self.ready[rank], np.int32(m), where, *values))

    def _send(self, what: str, values: list, stage: int, m: int) -> None:
        there = self.meshes[self.schedule.rank_of[stage]]
        self.held.put((what, stage, m), self._moved(values, there))

    def _moved(self, tree, mesh: Mesh) -> Any:
        """The arrays, laid out in the same way on another rank."""
        of = lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec))
        return jax.tree.map(of, tree)
