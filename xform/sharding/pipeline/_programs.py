"""The passes of a model as programs: each traced once, and compiled for every rank that runs it.

Values live between programs as arrays with a leading dim for the devices over which they differ, so
that a type says the same inside a program and outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from xform._compat import varying_axes
from xform.sharding.pipeline._model import AXIS, Model, full_specs, model_of, reduced
from xform.sharding.pipeline._schedule import Schedule
from xform.sharding.pipeline._ticks import is_split


class Programs:
    """The programs of a model, by the names of `_PASSES`.

    Attributes:
      model: the model, without operands.
      types: of all that lives between programs.
      sums_tree: the tree of gradients and loss.
    """

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
