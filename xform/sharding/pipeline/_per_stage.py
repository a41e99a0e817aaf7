"""A schedule run by a program for each pass, on a mesh for each rank.

One process sends the actions off, in the order in which the simulator sees them begin; devices run
them as their inputs come, so that no rank waits for another's slower action. Results travel from
device to device. Values live between programs as arrays with a leading dim for the devices over
which they differ, so that a type says the same inside a program and outside.

What it costs more than `one_program` is time to send off, some tens of microseconds an action, and
a compilation for each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xform._compat import varying_axes
from xform.sharding.mesh import settle
from xform.sharding.pipeline._model import (
    AXIS,
    Model,
    check_sizes,
    full_specs,
    model_of,
    of_floats,
    reduced,
)
from xform.sharding.pipeline._schedule import Action, Schedule
from xform.sharding.pipeline._simulate import simulate
from xform.sharding.pipeline._ticks import is_split
from xform.sharding.pipeline._times import UNIT, Times


def per_stage(
    stage: Callable,
    first: Callable,
    last: Callable,
    *,
    mesh: Mesh,
    weights: Any = P(AXIS),
    shared: Any = P(),
    batch: Any = P(),
    times: Times = UNIT,
) -> PerStage:
    """Returns a function that runs schedules with a program for each pass of a stage.

    It takes and returns what `one_program` does, and a stage may be on any rank. It can't be called
    under `jit`, since it is many programs.

    Args:
      stage, first, last: the model, as for `one_program`.
      mesh: the mesh; its slices along `pp` run the stages.
      weights, shared, batch: specs, as for `one_program`.
      times: what actions take, by which the order of sending them off is found.

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
    return PerStage((stage, first, last), mesh, (weights, shared, batch), times)


class PerStage:
    """Runs schedules; `per_stage` makes it."""

    def __init__(self, functions: tuple, mesh: Mesh, specs: tuple, times: Times):
        if AXIS not in mesh.shape:
            raise ValueError(f"`per_stage` needs a mesh axis `{AXIS}`; found {mesh.axis_names}.")
        self.functions, self.mesh, self.specs, self.times = functions, mesh, specs, times
        along = mesh.axis_names.index(AXIS)
        slices = np.split(mesh.devices, mesh.shape[AXIS], axis=along)
        self.meshes = [Mesh(part, mesh.axis_names, axis_types=mesh.axis_types) for part in slices]
        self._programs: dict[Any, _Programs] = {}

    def __call__(self, schedule: Schedule, weights, shared, batch) -> tuple[Any, tuple[Any, Any]]:
        """Returns the loss, and its gradients for weights and shared, in float32 at least.

        Args and errors are those of `one_program`'s result, but that a stage may be on any rank.
        """
        timeline = simulate(schedule, self.times)  # which verifies it
        schedule, trees = timeline.schedule, (weights, shared, batch)
        if len({len(own) for own in schedule.stages_of}) > 1:
            raise ValueError("weights are split evenly: every rank needs as many stages.")
        check_sizes(schedule, self.mesh, weights, batch)
        parts = [[self._part(tree, mesh) for tree in trees] for mesh in self.meshes]
        run = _Run(schedule, self._made(schedule, parts[0]), self.meshes, parts)
        for action in timeline.begun:
            run.do(action)
        return self._gathered(run.finish(), trees)

    def _made(self, schedule: Schedule, part: Sequence) -> _Programs:
        """The programs for such operands, traced once for all ranks."""
        leaves, tree = jax.tree.flatten(part)
        key = is_split(schedule), tree, tuple((x.shape, x.dtype) for x in leaves)
        if key not in self._programs:
            mesh = self.meshes[0].abstract_mesh
            self._programs[key] = _Programs(self.functions, mesh, self.specs, part, schedule)
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


class _Programs:
    """The programs of a model, each traced once and compiled for every rank that runs it."""

    def __init__(self, functions: tuple, mesh, specs: Sequence, part: Sequence, schedule):
        self.mesh, self.specs = mesh, specs
        self.model: Any = None
        self.types: dict[str, list] = {}
        self.sums_tree: Any = None
        self._jitted: dict[str, Any] = {}
        self._look(functions, part, schedule)

    def _look(self, functions: tuple, part: Sequence, schedule: Schedule) -> None:
        """Finds the model, and the types of all that lives between programs."""

        def look(weights, shared, batch):
            options = {"split": is_split(schedule), "schedule": schedule}
            model = model_of(functions, weights, shared, batch, **options)
            sums = model.sums()
            early, late = model.keeps
            types = {"x": model.x, "early": early, "late": late, "cross": model.crosses}
            self.types = types | {"sums": [jax.typeof(v) for v in jax.tree.leaves(sums)]}
            self.sums_tree = jax.tree.structure(sums)
            self.model = replace(model, weights=None, shared=None, batch=None)
            return ()

        mapped = jax.shard_map(look, mesh=self.mesh, in_specs=tuple(self.specs), out_specs=())
        jax.make_jaxpr(mapped)(*part)

    def __getitem__(self, name: str) -> Callable:
        """A pass as a program: of a rank's arrays, microbatch, chunk and values to values."""
        if name not in self._jitted:
            self._jitted[name] = self._jit(*_PASSES[name])
        return self._jitted[name]

    def _jit(self, of: Callable, reads: Sequence[str], gives: Sequence[str]) -> Any:
        def local(weights, shared, batch, m, chunk, *values):
            model = self.model.on(weights, shared, batch)
            read = [[v[0] for v in value] for value in values]
            given = {
                name: jax.tree.unflatten(self.sums_tree, value) if name == "sums" else value
                for name, value in zip(reads, read, strict=True)
            }
            out = of(model, chunk, m, **given)
            return [[v[None] for v in jax.tree.leaves(value)] for value in out]

        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(*self.specs, P(), P(), *map(self.specs_of, reads)),
            out_specs=[self.specs_of(name) for name in gives],
        )
        donated = [5 + i for i, name in enumerate(reads) if name == "sums"]
        # Operands say on which devices it runs, those too that it does not read.
        return jax.jit(mapped, donate_argnums=donated, keep_unused=True)

    def specs_of(self, name: str) -> list[P]:
        """Specs of values with a leading dim for the devices over which they differ."""
        order = self.mesh.axis_names
        return [P(tuple(sorted(varying_axes(t), key=order.index))) for t in self.types[name]]

    def reduce(self) -> Any:
        """The program that sums gradients over devices: loss, those of weights, and of shared."""
        if "reduce" not in self._jitted:

            def local(weights, shared, batch, sums):
                del batch
                sums = jax.tree.unflatten(self.sums_tree, [v[0] for v in sums])
                grads = reduced(sums["weights"], weights), reduced(sums["shared"], shared)
                return lax.psum(sums["loss"], AXIS), *grads

            like = jax.tree.unflatten(self.sums_tree, self.types["sums"])
            pairs = zip(self.specs, (like["weights"], like["shared"]), strict=False)
            specs = [full_specs(spec, tree) for spec, tree in pairs]
            mapped = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(*self.specs, self.specs_of("sums")),
                out_specs=(
                    P(),
                    *(full_specs(s, t) for s, t in zip(specs, self._likes(), strict=True)),
                ),
            )
            self._jitted["reduce"] = jax.jit(mapped)
        return self._jitted["reduce"]

    def _likes(self) -> list:
        """Trees of the leaves that have gradients."""
        sums = jax.tree.unflatten(self.sums_tree, self.types["sums"])
        return [sums["weights"], sums["shared"]]


def _begin(model: Model, chunk, m) -> list:
    del chunk
    return [model.begin(m)]


def _forward(model: Model, chunk, m, x: Sequence) -> list:
    y, (early, late) = model.forward(chunk, m, x)
    return [y, early, late]


def _end(model: Model, chunk, m, x: Sequence, sums) -> list:
    del chunk
    return [*model.end(m, x, sums)]


def _backward(model: Model, chunk, m, early, late, x: Sequence, sums) -> list:
    return [*model.backward(chunk, m, (early, late), x, sums)]


def _begin_gradient(model: Model, chunk, m, x: Sequence, sums) -> list:
    del chunk
    return [model.begin_gradient(m, x, sums)]


def _weight_gradient(model: Model, chunk, m, late, cross, sums) -> list:
    return [model.weight_gradient(chunk, m, late, cross, sums)]


def _zero(model: Model, chunk, m) -> list:
    del chunk, m
    return [model.sums()]


# What each program reads beside the rank's arrays, microbatch and chunk, and what it gives.
_PASSES: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "zero": (_zero, (), ("sums",)),
    "begin": (_begin, (), ("x",)),
    "forward": (_forward, ("x",), ("x", "early", "late")),
    "end": (_end, ("x", "sums"), ("x", "sums")),
    "backward": (
        _backward, ("early", "late", "x", "sums"), ("x", "cross", "sums"),
    ),
    "begin_gradient": (_begin_gradient, ("x", "sums"), ("sums",)),
    "weights": (_weight_gradient, ("late", "cross", "sums"), ("sums",)),
}  # fmt: skip


class _Run:
    """One run of a schedule: what is on the way, and what every rank holds."""

    def __init__(self, schedule: Schedule, programs: _Programs, meshes: Sequence[Mesh], parts):
        self.schedule, self.programs, self.meshes, self.parts = schedule, programs, meshes, parts
        self.held: dict[tuple[str, int, int], Any] = {}
        self.sums = [self._call("zero", rank, 0, 0)[0] for rank in range(schedule.ranks)]

    def do(self, action: Action) -> None:
        """Sends an action off, and its result on."""
        kind, stage, m = action.kind, action.stage, action.microbatch
        rank = self.schedule.rank_of[stage]
        chunk, last = self.schedule.stages_of[rank].index(stage), self.schedule.stages - 1
        at = stage, m
        if kind == "F":
            x = self.held.pop(("x", *at)) if stage else self._call("begin", rank, chunk, m)[0]
            y, *self.held["kept", stage, m] = self._call("forward", rank, chunk, m, x)
            self._send("g" if stage == last else "x", y, min(stage + 1, last), m)
        if kind in "BI":
            g, kept = self.held.pop(("g", *at)), self.held.pop(("kept", *at))
            if stage == last:
                g, self.sums[rank] = self._call("end", rank, chunk, m, g, self.sums[rank])
            dx, cross, self.sums[rank] = self._call(
                "backward", rank, chunk, m, *kept, g, self.sums[rank]
            )
            self.held["late", stage, m] = kept[1], cross
            if stage:
                self._send("g", dx, stage - 1, m)
            else:
                self.sums[rank] = self._call("begin_gradient", rank, chunk, m, dx, self.sums[rank])[
                    0
                ]
        if kind in "BW":
            late, cross = self.held.pop(("late", *at))
            if self.programs.model.split:
                self.sums[rank] = self._call(
                    "weights", rank, chunk, m, late, cross, self.sums[rank]
                )[0]

    def finish(self) -> list[tuple]:
        """For each rank the loss, the gradients of its weights, and those of shared."""
        first, last = self.schedule.rank_of[0], self.schedule.rank_of[-1]
        results = [
            self.programs.reduce()(*part, sums)
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
        return settle(self.programs[name](*self.parts[rank], np.int32(m), np.int32(chunk), *values))

    def _send(self, what: str, values: list, stage: int, m: int) -> None:
        mesh = self.meshes[self.schedule.rank_of[stage]]
        self.held[what, stage, m] = self._moved(values, mesh)

    def _moved(self, tree, mesh: Mesh) -> Any:
        """The arrays, laid out in the same way on another rank."""
        of = lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec))
        return jax.tree.map(of, tree)
