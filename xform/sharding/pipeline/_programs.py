"""The passes of a model as programs: each traced once, and compiled for every rank that runs it.

Values live between programs as arrays with a leading dim for the devices over which they differ, so
that a type says the same inside a program and outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xform._compat import varying_axes
from xform.sharding.pipeline._model import (
    AXIS,
    Model,
    Where,
    check_shards,
    entered,
    full_specs,
    model_of,
    of_floats,
)
from xform.sharding.pipeline._schedule import Schedule
from xform.sharding.pipeline._ticks import is_split


class Programs:
    """The programs of a model, by the names of `_PASSES`.

    Attributes:
      model: the model, without operands.
      types: of all that lives between programs.
      sums_tree: the tree of gradients and loss.
      ready_tree: that of weights and shared as passes read them.
    """

    def __init__(
        self, functions: tuple, mesh, specs: Sequence, enter: Callable | None, part: Sequence,
        schedule: Schedule,
    ):  # fmt: skip
        self.mesh, self.specs, self.enter = mesh, specs, enter
        self.model: Any = None
        self.types: dict[str, list] = {}
        self.sums_tree: Any = None
        self.ready_tree: Any = None
        self._jitted: dict[str, Any] = {}
        self._compiled: dict[tuple[str, Mesh], Any] = {}
        self._last = schedule.stages - 1
        self._look(functions, part, schedule)

    def _look(self, functions: tuple, part: Sequence, schedule: Schedule) -> None:
        """Finds the model, and the types of all that lives between programs."""

        def look(weights, shared, batch):
            check_shards(schedule, weights, shared, batch)
            ready = entered(self.enter, weights, shared)[:2]
            model = model_of(functions, *ready, batch, schedule=schedule, split=is_split(schedule))
            sums = model.sums()
            early, late = model.keeps
            types = {"x": model.x, "early": early, "late": late, "cross": model.crosses}
            of = lambda tree: [jax.typeof(v) for v in jax.tree.leaves(tree)]
            self.types = types | {"sums": of(sums), "ready": of(ready)}
            self.sums_tree, self.ready_tree = map(jax.tree.structure, (sums, ready))
            self.model = replace(model, weights=None, shared=None, batch=None)
            return ()

        mapped = jax.shard_map(look, mesh=self.mesh, in_specs=tuple(self.specs), out_specs=())
        jax.make_jaxpr(mapped)(*part)

    def __getitem__(self, name: str) -> Any:
        """A pass as a program: of what is ready, batch, microbatch, stage and values to values."""
        if name not in self._jitted:
            self._jitted[name] = self._jit(*_PASSES[name])
        return self._jitted[name]

    def compiled(self, mesh: Mesh, ready: Any, batch: Any, own: Sequence[int]) -> dict[str, Any]:
        """The passes that a rank with these stages runs, compiled for its devices."""
        number = np.int32(0)
        for name in self._of(own):
            if (name, mesh) not in self._compiled:
                values = [self._shapes(what, mesh) for what in _PASSES[name][1]]
                lowered = self[name].lower(ready, batch, number, Where(number, number), *values)
                self._compiled[name, mesh] = lowered.compile()
        return {name: self._compiled[name, mesh] for name in self._of(own)}

    def _of(self, own: Sequence[int]) -> list[str]:
        """The names of the passes of these stages."""
        names = ["zero", "forward", "backward"]
        names += ["begin", "begin_gradient"] if 0 in own else []
        names += ["end"] if self._last in own else []
        return names + ["weights"] * self.model.split

    def _shapes(self, name: str, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
        """Values between programs on a mesh: types with the leading dim, and where they are."""

        def of(t, spec: P):
            count = math.prod(mesh.shape[axis] for axis in varying_axes(t))
            at = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct((count, *t.shape), t.dtype, sharding=at)

        return [of(*pair) for pair in zip(self.types[name], self.specs_of(name), strict=True)]

    def ready(self, weights, shared) -> Any:
        """What passes read of a rank's arrays: these, or what `enter` makes of them."""
        if self.enter is None:
            return weights, shared
        if "ready" not in self._jitted:

            def local(weights, shared):
                return _stacked(entered(self.enter, weights, shared)[:2])

            outs, specs = self.specs_of("ready"), tuple(self.specs[:2])
            mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=outs)
            self._jitted["ready"] = jax.jit(mapped)
        return self._jitted["ready"](weights, shared)

    def _ready(self, given) -> tuple[Any, Any]:
        """The same inside of a program."""
        if self.enter is None:
            return given
        return jax.tree.unflatten(self.ready_tree, [v[0] for v in given])

    def _jit(self, of: Callable, reads: Sequence[str], gives: Sequence[str]) -> Any:
        def local(ready, batch, m, where, *values):
            model = self.model.on(*self._ready(ready), batch)
            read = [[v[0] for v in value] for value in values]
            given = {
                name: jax.tree.unflatten(self.sums_tree, value) if name == "sums" else value
                for name, value in zip(reads, read, strict=True)
            }
            return [_stacked(value) for value in of(model, where, m, **given)]

        ready = self.specs_of("ready") if self.enter else tuple(self.specs[:2])
        mapped = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(ready, self.specs[2], P(), P(), *map(self.specs_of, reads)),
            out_specs=[self.specs_of(name) for name in gives],
        )
        donated = [4 + i for i, name in enumerate(reads) if name == "sums"]
        # Operands say on which devices it runs, those too that it does not read.
        return jax.jit(mapped, donate_argnums=donated, keep_unused=True)

    def specs_of(self, name: str) -> list[P]:
        """Specs of values with a leading dim for the devices over which they differ."""
        order = self.mesh.axis_names
        return [P(tuple(sorted(varying_axes(t), key=order.index))) for t in self.types[name]]

    def reduce(self, given: Sequence, sums) -> Any:
        """Sums gradients over devices: the loss, those of weights, and of shared."""
        if "reduce" not in self._jitted:

            def local(weights, shared, sums):
                back = entered(self.enter, weights, shared)[2]
                sums = jax.tree.unflatten(self.sums_tree, [v[0] for v in sums])
                return lax.psum(sums["loss"], AXIS), *back(sums["weights"], sums["shared"])

            specs = [full_specs(s, of_floats(t)) for s, t in zip(self.specs, given, strict=False)]
            mapped = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=(*self.specs[:2], self.specs_of("sums")),
                out_specs=(P(), *specs),
            )
            self._jitted["reduce"] = jax.jit(mapped)
        return self._jitted["reduce"](*given, sums)


def _stacked(tree) -> list:
    """Its leaves, each with a leading dim."""
    return [v[None] for v in jax.tree.leaves(tree)]


def _begin(model: Model, where, m) -> list:
    del where
    return [model.begin(m)]


def _forward(model: Model, where, m, x: Sequence) -> list:
    y, (early, late) = model.forward(where, m, x)
    return [y, early, late]


def _end(model: Model, where, m, x: Sequence, sums) -> list:
    del where
    return [*model.end(m, x, sums)]


def _backward(model: Model, where, m, early, late, x: Sequence, sums) -> list:
    return [*model.backward(where, m, (early, late), x, sums)]


def _begin_gradient(model: Model, where, m, x: Sequence, sums) -> list:
    del where
    return [model.begin_gradient(m, x, sums)]


def _weight_gradient(model: Model, where, m, late, cross, sums) -> list:
    return [model.weight_gradient(where, m, late, cross, sums)]


def _zero(model: Model, where, m) -> list:
    del where, m
    return [model.sums()]


# What each program reads beside what is ready, batch, microbatch and stage, and what it gives.
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
