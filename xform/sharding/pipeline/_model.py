"""The user's three functions inside the mesh: their passes, their types, and what they must not do.

Both executors run these passes, so that both give the same numbers. Inside, everything varies over
the pipeline's axis. Weights are made to vary over the axes that split the batch too, so that their
gradients stay apart on every device until the end, where they are summed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xform._compat import varying_axes
from xform.jaxpr._walk import walk
from xform.sharding.pipeline._kinds import Kinds
from xform.sharding.pipeline._permute import permutes
from xform.sharding.pipeline._schedule import Schedule
from xform.sharding.pipeline._split import Split, check_floats

AXIS = "pp"
# What names an axis in its type alone.
_LOCAL = {"pvary", "pcast", "preduced"}


class Where(NamedTuple):
    """Which stage, and which of its rank's chunks that is; numbers that may be traced."""

    stage: Any
    chunk: Any


@dataclass(frozen=True)
class Model:
    """A model and what it is applied to on one device. What travels is a list of leaves here.

    Attributes:
      first, last: the functions at the ends.
      passes: those of the stages.
      x_tree, x: tree and types of what travels.
      loss: the type of the loss.
      data: the axes over which weights are made to vary.
      permutes: whether a function permutes along its own axes.
      weights: of this rank's stages, a leading dim for them.
      shared: what the ends read.
      batch: all microbatches, a leading dim for them.
    """

    first: Callable
    last: Callable
    passes: Kinds
    x_tree: Any
    x: Sequence
    loss: Any
    data: frozenset[str]
    permutes: bool
    weights: Any = None
    shared: Any = None
    batch: Any = None

    def on(self, weights, shared, batch) -> Model:
        """The model on these operands."""
        weights, shared = _floats_vary(weights, self.data), _floats_vary(shared, self.data)
        shared, batch = vary(shared, frozenset({AXIS})), vary(batch, frozenset({AXIS}))
        return replace(self, weights=weights, shared=shared, batch=batch)

    def sums(self) -> dict[str, Any]:
        """Zeros to which gradients and losses are added, in float32 at least."""
        return {
            "weights": jax.tree.map(_accumulator, self.weights),
            "shared": jax.tree.map(_accumulator, self.shared),
            "loss": _accumulator(self.loss),
        }

    @property
    def keeps(self) -> tuple[list, list]:
        """Types of what a stage keeps: until I alone, and longer."""
        return self.passes.early, self.passes.late

    @property
    def crosses(self) -> list:
        """Types of what crosses from I to W."""
        return self.passes.cross

    @property
    def split(self) -> bool:
        """Whether backward passes are made in parts."""
        return self.passes.split

    def begin(self, m) -> list:
        """What the first stage is given."""
        return self._begin(self.shared, m)

    def forward(self, where: Where, m, x: Sequence) -> tuple[list, tuple[list, list]]:
        """Pass F: what the stage gives and keeps."""
        weights, given = self._chunk(where.chunk), self._microbatch(m)
        y, *kept = self.passes.forward(where.stage, weights, self._tree(x), given)
        return y, (kept[0], kept[1])

    def end(self, m, y: Sequence, sums: dict[str, Any]) -> tuple[list, dict[str, Any]]:
        """The gradient of the loss for what the last stage gave."""
        given = self._microbatch(m)
        of = lambda shared, y: self.last(shared, self._tree(y), given)
        loss, pullback = _vjp_of_floats(of, self.shared, list(y))
        shared, g = pullback(jnp.ones_like(loss))
        loss = sums["loss"] + vary(loss, frozenset({AXIS})).astype(sums["loss"].dtype)
        return _as(g, self.x), sums | {"shared": _add(sums["shared"], shared), "loss": loss}

    def backward(self, where: Where, m, kept, g: Sequence, sums) -> tuple[list, list, dict]:
        """Pass B or I: the gradient of the stage's input, and what crosses to W."""
        weights, given = self._chunk(where.chunk), self._microbatch(m)
        add = lambda sums, d: self._added(sums, where.chunk, d)
        return self.passes.backward(where.stage, weights, kept, self._tree(g), given, sums, add)

    def weight_gradient(self, where: Where, m, late: Sequence, crossing: Sequence, sums) -> dict:
        """Pass W."""
        weights, given = self._chunk(where.chunk), self._microbatch(m)
        add = lambda sums, d: self._added(sums, where.chunk, d)
        return self.passes.weight_gradient(where.stage, weights, late, crossing, given, sums, add)

    def begin_gradient(self, m, dx: Sequence, sums: dict[str, Any]) -> dict[str, Any]:
        """The gradient of what the first stage was given, for what the ends share."""
        _, pullback = _vjp_of_floats(lambda shared: self._begin(shared, m), self.shared)
        return sums | {"shared": _add(sums["shared"], *pullback(list(dx)))}

    def _begin(self, shared, m) -> list:
        return _as(jax.tree.leaves(self.first(shared, self._microbatch(m))), self.x)

    def _added(self, sums: dict[str, Any], chunk, gradients) -> dict[str, Any]:
        of = lambda a, b: a if b is None else a.at[chunk].add(b.astype(a.dtype))
        weights = jax.tree.map(of, sums["weights"], gradients, is_leaf=_is_none)
        return sums | {"weights": weights}

    def _chunk(self, index) -> Any:
        return jax.tree.map(lambda w: at(w, index), self.weights)

    def _microbatch(self, index) -> Any:
        return jax.tree.map(lambda b: at(b, index), self.batch)

    def _tree(self, leaves: Sequence) -> Any:
        return jax.tree.unflatten(self.x_tree, leaves)


def model_of(functions: tuple, weights, shared, batch, *, schedule: Schedule, split: bool) -> Model:
    """Returns what is known of a model inside the mesh.

    Raises:
      ValueError: a function reaches over the pipeline's
        axis; the loss is not the same on the devices of a stage.
      TypeError: what travels has no gradient or changes its type; the loss is no number.
    """
    stage, first, last = functions
    along = frozenset({AXIS})
    data = along.union(*map(varying_axes, jax.tree.leaves(batch)))
    weights, shared = _floats_vary(weights, data), vary(_floats_vary(shared, data), along)
    given = jax.tree.map(lambda b: b[0], vary(batch, along))
    begin = lambda shared, given: vary(first(shared, given), along)
    begins, shapes = jax.make_jaxpr(begin, return_shape=True)(shared, given)
    _check_collectives("first", begins)
    x, x_tree = begins.out_avals, jax.tree.structure(shapes)
    check_floats("first", x)
    whole, one = jax.tree.unflatten(x_tree, x), jax.tree.map(lambda w: w[0], weights)
    kinds, of_stage = _kinds(stage, schedule)
    each = [Split(function, one, whole, given) for function in kinds]
    programs = [program for passes in each for program in passes.programs]
    for passes in each:
        _check_types(x_tree, x, passes)
    for program in programs:
        _check_collectives("stage", program)
    ends = jax.make_jaxpr(last)(shared, whole, given)
    _check_collectives("last", ends)
    loss, moves = _check_loss(ends.out_avals), permutes([begins, *programs, ends])
    passes = Kinds(each, of_stage, split=split)
    model = Model(first, last, passes, x_tree, x, loss, data, moves)
    return model.on(weights, shared, batch)


def _kinds(stage, schedule: Schedule) -> tuple[list[Callable], list[int]]:
    """The functions that are not the same, and which of them each stage is."""
    if callable(stage):
        return [stage], [0] * schedule.stages
    if len(stage) != schedule.stages:
        raise ValueError(
            f"`stage` is a list of {len(stage)} functions, and the schedule has {schedule.stages} "
            "stages: one for each is needed, or one for all."
        )
    different = list(dict.fromkeys(stage))
    return different, [different.index(function) for function in stage]


def entered(enter: Callable | None, weights, shared) -> tuple[Any, Any, Callable]:
    """What all passes read, and what takes sums of its gradients back to what was given."""
    if enter is None:
        return weights, shared, lambda dw, ds: (reduced(dw, weights), reduced(ds, shared))
    leaves, tree = jax.tree.flatten((weights, shared))

    def of(floats):
        mixed = [x if d is None else d for x, d in zip(leaves, floats, strict=True)]
        ready = enter(*jax.tree.unflatten(tree, mixed))
        return of_floats(ready), ready

    floats = [x if _is_float(x) else None for x in leaves]
    like, pull, ready = jax.vjp(of, floats, has_aux=True)

    def back(*sums) -> tuple:
        cast = lambda x, d: vary(d, varying_axes(x)).astype(x.dtype)
        (grads,) = pull(jax.tree.map(cast, like, reduced(sums, ready)))
        wide = lambda d: d.astype(jnp.promote_types(d.dtype, jnp.float32))
        return jax.tree.unflatten(tree, jax.tree.map(wide, grads))

    return *ready, back


def vary(tree, axes: frozenset[str]):
    """The tree, its leaves varying over these axes too."""

    def of(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(of, tree)


def zeros(of, count: int | None = None):
    """Zeros of a type, or a buffer of so many, one at least."""
    shape = of.shape if count is None else (max(1, count), *of.shape)
    return vary(jnp.zeros(shape, of.dtype), varying_axes(of))


def at(x, index):
    """An entry along the first dim."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def reduced(gradients, like):
    """Gradients summed over the axes along which they differ and their arrays do not."""

    def of(gradient, like):
        axes = tuple(sorted(varying_axes(gradient) - varying_axes(like)))
        return lax.psum(gradient, axes) if axes else gradient

    return jax.tree.map(of, gradients, of_floats(like))


def of_floats(tree) -> Any:
    """The tree with None for what has no gradient."""
    return jax.tree.map(lambda x: x if _is_float(x) else None, tree)


def full_specs(specs, tree) -> Any:
    """A spec for each leaf, from a tree of specs or one for many."""
    of = lambda spec, part: jax.tree.map(lambda _: spec, part)
    return jax.tree.map(of, specs, tree, is_leaf=lambda x: isinstance(x, P))


def check_sizes(schedule: Schedule, mesh: Mesh, weights, batch) -> None:
    """Raises unless mesh and arrays are as large as a schedule says."""
    wrong = []
    if schedule.ranks != mesh.shape[AXIS]:
        wrong.append(f"the mesh has {AXIS}={mesh.shape[AXIS]}, the schedule {schedule.ranks} ranks")
    for name, tree, count, of in (
        ("weights", weights, schedule.stages, "stages"),
        ("batch", batch, schedule.microbatches, "microbatches"),
    ):
        found = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
        if found - {(count,)}:
            first = ", ".join(str(shape[0]) if shape else "none" for shape in sorted(found))
            wrong.append(f"the first dims of `{name}` are {first}, the schedule has {count} {of}")
    if wrong:
        raise ValueError(f"sizes do not fit: {'; '.join(wrong)}.")


def check_shards(schedule: Schedule, weights, shared, batch) -> None:
    """A rank must see its own stages, all microbatches, and all of what is shared."""
    chunks, wrong = schedule.stages // schedule.ranks, []
    for name, tree, count, over, spec in (
        ("weights", weights, chunks, True, f'P("{AXIS}", …)'),
        ("shared", shared, None, False, "P(…)"),
        ("batch", batch, schedule.microbatches, False, "P(None, …)"),
    ):
        leaves = jax.tree.leaves(tree)
        split = [(AXIS in varying_axes(x)) == over for x in leaves]
        if not all(split) or any(x.shape[:1] != (count,) for x in leaves if count is not None):
            why = (
                "only the first dim is split over it" if over else f"nothing is split over `{AXIS}`"
            )
            wrong.append(f"`{name}={spec}`, where {why}")
    if wrong:
        raise ValueError(f"specs must be {'; '.join(wrong)}.")


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_none(x) -> bool:
    return x is None


def _floats_vary(tree, axes: frozenset[str]):
    return jax.tree.map(lambda x: vary(x, axes) if _is_float(x) else x, tree)


def _accumulator(w):
    if not _is_float(w):
        return None
    return vary(jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), varying_axes(w))


def _as(values: Sequence, types: Sequence) -> list:
    """The values, cast to vary as the types do."""
    return [vary(v, varying_axes(t)) for v, t in zip(values, types, strict=True)]


def _add(total, more):
    """The sum of two trees, the second of which may lack leaves."""
    of = lambda a, b: a if b is None else a + b.astype(a.dtype)
    return jax.tree.map(of, total, more, is_leaf=_is_none)


def _vjp_of_floats(f: Callable, first, *rest):
    """`jax.vjp`, where the gradient for the first argument has None for what is no float."""
    leaves, tree = jax.tree.flatten(first)
    floats = [x if _is_float(x) else None for x in leaves]

    def of(floats, *rest):
        mixed = [x if d is None else d for x, d in zip(leaves, floats, strict=True)]
        return f(jax.tree.unflatten(tree, mixed), *rest)

    value, pullback = jax.vjp(of, floats, *rest)

    def pull(g) -> tuple:
        d, *others = pullback(g)
        return (jax.tree.unflatten(tree, d), *others)

    return value, pull


def _check_types(x_tree, x, passes: Split) -> None:
    """The next stage must be able to take what a stage gives."""
    show = lambda tree, types: f"{jax.tree.unflatten(tree, [t.str_short() for t in types])}"
    found = [(t.shape, t.dtype, varying_axes(t)) for t in passes.y_types]
    if passes.y_tree != x_tree or found != [(t.shape, t.dtype, varying_axes(t)) for t in x]:
        raise TypeError(
            f"`stage` is given {show(x_tree, x)} and returns "
            f"{show(passes.y_tree, passes.y_types)}, which the next stage can't take. Where a mesh "
            "axis is there too many (V:), end the stage with its `psum`, or have `first` return "
            "what differs along it: casting it between stages would count gradients once for each "
            "device of that axis."
        )


def _check_collectives(name: str, program) -> None:
    """Nothing over the pipeline: ranks are in different branches, so that it would hang."""
    found = []
    for site in walk(program):
        params = site.eqn.params
        axes = params.get("axes", params.get("axis_name", ()))
        axes = axes if isinstance(axes, tuple | list | frozenset | set) else (axes,)
        if AXIS in axes and site.eqn.primitive.name not in _LOCAL:
            found.append(f"`{site.eqn.primitive.name}` at {site.line}")
    if found:
        raise ValueError(
            f"`{name}` reaches over `{AXIS}`: {', '.join(found)}. Ranks run different actions at a "
            "time, so that a collective would wait for ever; and the index of a rank is not that "
            "of a stage. What stages share travels in x or comes with the batch, what differs "
            "between them with the weights."
        )


def _check_loss(types: Sequence[Any]) -> Any:
    """The type of the sum of losses."""
    if [t.shape for t in types] != [()] or not _is_float(types[0]):
        raise TypeError(
            f"`last` must return a number, the loss of a microbatch; found "
            f"{', '.join(t.str_short() for t in types)}."
        )
    if more := sorted(varying_axes(types[0]) - {AXIS}):
        raise ValueError(
            f"the loss that `last` returns differs along {', '.join(more)}: reduce it there, "
            f"say by `jax.lax.psum(loss, {tuple(more)})` of shares that add up."
        )
    return types[0]
