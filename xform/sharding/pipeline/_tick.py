"""What one program does in a tick: three slots, each behind a branch, and messages between them.

Everything varies over the pipeline's axis, so that ranks may take different branches; collectives
over other axes may stand inside them, since all members of such a group take the same one. A
branch gets the slot of a buffer and gives the new one back, so that an idle one costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import varying_axes
from xform.sharding.pipeline._split import Split
from xform.sharding.pipeline._table import COLUMNS, Room


@dataclass(frozen=True)
class Model:
    """What the user wrote, and what is known of it inside the mesh.

    Attributes:
      first, last: the functions at the ends.
      passes: the passes of a stage.
      x: types of the leaves of what travels.
      x_tree: their tree.
      weights: this rank's, a leading dim for its chunks.
      shared: what the ends read.
      batch: all microbatches, a leading dim for them.
      split: whether backward passes are made in parts.
    """

    first: Callable
    last: Callable
    passes: Split
    x: Sequence
    x_tree: Any
    weights: Any
    shared: Any
    batch: Any
    split: bool

    def chunk(self, index) -> Any:
        """The weights of one stage of this rank."""
        return jax.tree.map(lambda w: _at(w, index), self.weights)

    def microbatch(self, index) -> Any:
        """One microbatch."""
        return jax.tree.map(lambda b: _at(b, index), self.batch)


def start(model: Model, room: Room) -> dict[str, Any]:
    """The state before the first tick: empty buffers, gradients of zero."""
    buffer = lambda count, types: [zeros(t, count) for t in types]
    early, late = _early_late(model)
    crossing = model.passes.crossing if model.split else []
    return {
        "x": buffer(room.x, model.x),
        "g": buffer(room.g, model.x),
        "early": buffer(room.early, early),
        "late": buffer(room.late, late),
        "cross": buffer(room.cross, [c.type for c in crossing]),
        "weights": jax.tree.map(_accumulator, model.weights),
        "shared": jax.tree.map(_accumulator, model.shared),
    }


def tick(model: Model, state: dict[str, Any], numbers, send: Callable) -> dict[str, Any]:
    """The state after a tick.

    Args:
      model: the model.
      state: buffers, gradients and the loss.
      numbers: this rank's row of the table.
      send: of arrays and the name of what they are, what arrives each way.
    """
    now: dict[str, Any] = dict(zip(COLUMNS, numbers, strict=True))
    state = dict(state)
    y = _forward(model, state, now)
    arrived = {"x": send(y, "x")}  # beneath the backward pass
    dx = _backward(model, state, now)
    arrived["g"] = send(dx, "g")  # beneath the weight gradient
    if model.split:
        _weight_gradient(model, state, now)
    for what, ways in arrived.items():
        for way, values in ways.items():
            _put(state, what, now[f"{what}_{way}_to"], values, now[f"{what}_{way}"])
    return state


def _forward(model: Model, state: dict[str, Any], now: dict[str, Any]) -> list:
    """Slot F."""
    given = model.microbatch(now["f_batch"])
    waiting = _get(state, "x", now["f_x"])

    def begin(_):
        return _as(jax.tree.leaves(model.first(model.shared, given)), model.x)

    x = lax.cond(_both(now["f"], now["f_first"]), begin, lambda x: x, waiting)
    kept = _get(state, "early", now["f_early"]), _get(state, "late", now["f_late"])

    def work(x, kept):
        x = jax.tree.unflatten(model.x_tree, x)
        y, keep = model.passes.forward(model.chunk(now["f_chunk"]), x, given)
        return jax.tree.leaves(y), _sorted(model, keep)

    idle = lambda x, kept: ([zeros(t) for t in model.x], kept)
    y, (early, late) = lax.cond(now["f"] > 0, work, idle, x, kept)
    _put(state, "early", now["f_early"], early)
    _put(state, "late", now["f_late"], late)
    # The last stage's output waits where others await their cotangent, for the loss.
    _put(state, "g", now["f_g"], y, now["f"] * now["f_last"])
    return y


def _backward(model: Model, state: dict[str, Any], now: dict[str, Any]) -> list:
    """Slot B or I, with the loss before it on the last stage, and the model's begin after it."""
    given = model.microbatch(now["i_batch"])

    def end(y, shared, loss):
        of = lambda shared, y: model.last(shared, jax.tree.unflatten(model.x_tree, y), given)
        value, (d_shared, g) = _value_and_grad(of, model.shared, y)
        return _as(g, model.x), _add(shared, d_shared), loss + value

    waiting = _get(state, "g", now["i_g"])
    ends = waiting, state["shared"], state["loss"]
    at_end = _both(now["i"], now["i_last"])
    g, state["shared"], state["loss"] = lax.cond(at_end, end, lambda *same: same, *ends)

    kept = _get(state, "early", now["i_early"]), _get(state, "late", now["i_late"])
    crossing = _get(state, "cross", now["i_cross"])

    def work(g, crossing, gradients):
        weights, g = model.chunk(now["i_chunk"]), jax.tree.unflatten(model.x_tree, g)
        keep = _unsorted(model, *kept)
        if model.split:
            dx, crossing, dw = model.passes.input_gradient(weights, keep, g, given)
        else:
            dx, dw = model.passes.backward(weights, keep, g, given)
        return jax.tree.leaves(dx), crossing, _add_at(gradients, now["i_chunk"], dw)

    idle = lambda g, crossing, gradients: ([zeros(t) for t in model.x], crossing, gradients)
    dx, crossing, state["weights"] = lax.cond(
        now["i"] > 0, work, idle, g, crossing, state["weights"]
    )
    _put(state, "cross", now["i_cross"], crossing)

    def begin(shared):
        first = lambda shared: _as(jax.tree.leaves(model.first(shared, given)), model.x)
        _, pullback = _vjp_of_floats(first, model.shared)
        return _add(shared, pullback(dx))

    at_begin = _both(now["i"], now["i_first"])
    state["shared"] = lax.cond(at_begin, begin, lambda shared: shared, state["shared"])
    return dx


def _weight_gradient(model: Model, state: dict[str, Any], now: dict[str, Any]) -> None:
    """Slot W."""
    late, crossing = _get(state, "late", now["w_late"]), _get(state, "cross", now["w_cross"])

    def work(gradients):
        weights, given = model.chunk(now["w_chunk"]), model.microbatch(now["w_batch"])
        dw = model.passes.weight_gradient(weights, late, crossing, given)
        return _add_at(gradients, now["w_chunk"], dw)

    idle = lambda gradients: gradients
    state["weights"] = lax.cond(now["w"] > 0, work, idle, state["weights"])


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


def is_float(x) -> bool:
    """Whether it has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _accumulator(w):
    """A zero to add gradients to, in float32 at least; None where there are none."""
    if not is_float(w):
        return None
    return vary(jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)), varying_axes(w))


def _early_late(model: Model) -> tuple[list, list]:
    """Types of what a stage keeps: until I alone, and longer."""
    if not model.split:
        return [], list(model.passes.keeps)
    pairs = list(zip(model.passes.keeps, model.passes.late, strict=True))
    return [t for t, late in pairs if not late], [t for t, late in pairs if late]


def _sorted(model: Model, keep: Sequence) -> tuple[list, list]:
    if not model.split:
        return [], list(keep)
    pairs = list(zip(keep, model.passes.late, strict=True))
    return [k for k, late in pairs if not late], [k for k, late in pairs if late]


def _unsorted(model: Model, early: Sequence, late: Sequence) -> list:
    if not model.split:
        return list(late)
    those, others = iter(late), iter(early)
    return [next(those if is_late else others) for is_late in model.passes.late]


def _value_and_grad(f: Callable, shared, y):
    value, pullback = _vjp_of_floats(f, shared, y)
    return value, pullback(jnp.ones_like(value))


def _vjp_of_floats(f: Callable, shared, *rest):
    """`jax.vjp`, for the floats of the first argument; its gradient has None elsewhere."""
    leaves, tree = jax.tree.flatten(shared)
    floats = [x if is_float(x) else None for x in leaves]

    def of(floats, *rest):
        return f(
            jax.tree.unflatten(
                tree, [x if d is None else d for x, d in zip(leaves, floats, strict=True)]
            ),
            *rest,
        )

    value, pullback = jax.vjp(of, floats, *rest)

    def pull(g):
        d, *others = pullback(g)
        d = jax.tree.unflatten(tree, d)
        return (d, *others) if others else d

    return value, pull


def _add(total, more):
    """The sum of two trees, the second of which may lack leaves."""
    of = lambda a, b: a if b is None else a + b.astype(a.dtype)
    return jax.tree.map(of, total, more, is_leaf=lambda x: x is None)


def _add_at(total, index, more):
    of = lambda a, b: a if b is None else a.at[index].add(b.astype(a.dtype))
    return jax.tree.map(of, total, more, is_leaf=lambda x: x is None)


def _as(values: Sequence, types: Sequence) -> list:
    """The values, cast to vary as the types do."""
    return [vary(v, varying_axes(t)) for v, t in zip(values, types, strict=True)]


def _both(a, b):
    return (a * b) > 0


def _at(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _get(state: dict[str, Any], name: str, slot) -> list:
    return [_at(buffer, slot) for buffer in state[name]]


def _put(state: dict[str, Any], name: str, slot, values: Sequence, where=None) -> None:
    """Writes values to a slot; where a flag says no, what is there stays."""

    def put(buffer, value):
        if where is not None:
            value = jnp.where(where > 0, value, _at(buffer, slot))
        return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)

    state[name] = [put(b, v) for b, v in zip(state[name], values, strict=True)]
