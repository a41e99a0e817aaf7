"""What one program does in a tick: three slots, each behind a branch, and messages between them.

Ranks may take different branches, since their predicates vary over the pipeline's axis; collectives
over other axes may stand inside them, since all members of such a group take the same one. A
branch gets the slot of a buffer and gives the new one back, so that an idle one costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xform.sharding.pipeline._model import Model, Where, at, zeros
from xform.sharding.pipeline._table import COLUMNS, Room

type State = tuple[dict[str, list], dict[str, Any]]


def start(model: Model, room: Room) -> State:
    """Empty buffers, and sums of zero."""
    early, late = model.keeps
    types = {"x": model.x, "g": model.x, "early": early, "late": late, "cross": model.crosses}
    buffers = {
        name: [zeros(t, getattr(room, name)) for t in of_buffer]
        for name, of_buffer in types.items()
    }
    return buffers, model.sums()


def tick(model: Model, state: State, numbers, send: Callable) -> State:
    """The state after a tick.

    Args:
      model: the model.
      state: buffers, and sums of gradients and losses.
      numbers: this rank's row of the table.
      send: of arrays and the name of what they are, what arrives each way.
    """
    now: dict[str, Any] = dict(zip(COLUMNS, numbers, strict=True))
    buffers, sums = dict(state[0]), state[1]
    y = _forward(model, buffers, now)
    arrived = {"x": send(y, "x")}  # beneath the backward pass
    dx, sums = _backward(model, buffers, now, sums)
    arrived["g"] = send(dx, "g")  # beneath the weight gradient
    if model.split:
        sums = _weight_gradient(model, buffers, now, sums)
    for what, ways in arrived.items():
        for way, values in ways.items():
            _put(buffers, what, now[f"{what}_{way}_to"], values, now[f"{what}_{way}"])
    return buffers, sums


def _forward(model: Model, buffers: dict[str, list], now: dict[str, Any]) -> list:
    """Slot F."""
    m = now["f_batch"]
    waiting = _get(buffers, "x", now["f_x"])
    begins = now["f"] * now["f_first"] > 0
    x = lax.cond(begins, lambda _: model.begin(m), lambda x: x, waiting)
    kept = _get(buffers, "early", now["f_early"]), _get(buffers, "late", now["f_late"])
    y, (early, late) = lax.cond(
        now["f"] > 0,
        lambda x, _: model.forward(_where(now, "f"), m, x),
        lambda _, kept: ([zeros(t) for t in model.x], kept),
        x,
        kept,
    )
    _put(buffers, "early", now["f_early"], early)
    _put(buffers, "late", now["f_late"], late)
    # The last stage's output waits where others await their cotangent, for the loss.
    _put(buffers, "g", now["f_g"], y, now["f"] * now["f_last"])
    return y


def _backward(
    model: Model, buffers: dict[str, list], now: dict[str, Any], sums: dict[str, Any]
) -> tuple[list, dict[str, Any]]:
    """Slot B or I, with the loss before it on the last stage, and the model's begin after it."""
    m = now["i_batch"]
    waiting = _get(buffers, "g", now["i_g"])
    # A branch is given no sum that it does not add to: what passes through one may be copied.
    g, sums = _when(
        now["i"] * now["i_last"],
        lambda y, sums: model.end(m, y, sums),
        lambda y, sums: (y, sums),
        waiting, sums, ("shared", "loss"),
    )  # fmt: skip
    kept = _get(buffers, "early", now["i_early"]), _get(buffers, "late", now["i_late"])
    crossing = _get(buffers, "cross", now["i_cross"])

    def work(given, sums):
        dx, crossing, sums = model.backward(_where(now, "i"), m, kept, given[0], sums)
        return (dx, crossing), sums

    idle = lambda given, sums: (([zeros(t) for t in model.x], given[1]), sums)
    (dx, crossing), sums = _when(now["i"], work, idle, (g, crossing), sums, ("weights",))
    _put(buffers, "cross", now["i_cross"], crossing)
    _, sums = _when(
        now["i"] * now["i_first"],
        lambda _, sums: ((), model.begin_gradient(m, dx, sums)),
        lambda _, sums: ((), sums),
        (), sums, ("shared",),
    )  # fmt: skip
    return dx, sums


def _weight_gradient(
    model: Model, buffers: dict[str, list], now: dict[str, Any], sums: dict[str, Any]
) -> dict[str, Any]:
    """Slot W."""
    late, crossing = _get(buffers, "late", now["w_late"]), _get(buffers, "cross", now["w_cross"])

    def work(_, sums):
        m = now["w_batch"]
        return (), model.weight_gradient(_where(now, "w"), m, late, crossing, sums)

    return _when(now["w"], work, lambda _, sums: ((), sums), (), sums, ("weights",))[1]


def _when(flag, work: Callable, idle: Callable, given, sums: dict[str, Any], names: Sequence[str]):
    """`lax.cond` of branches that also take some of the sums and give them back."""
    some = {name: sums[name] for name in names}
    out, some = lax.cond(flag > 0, work, idle, given, some)
    return out, sums | some


def _where(now: dict[str, Any], slot: str) -> Where:
    return Where(now[f"{slot}_stage"], now[f"{slot}_chunk"])


def _get(buffers: dict[str, list], name: str, slot) -> list:
    return [at(buffer, slot) for buffer in buffers[name]]


def _put(buffers: dict[str, list], name: str, slot, values: Sequence, where=None) -> None:
    """Writes values to a slot; where a flag says no, what is there stays."""

    def put(buffer, value):
        if where is not None:
            value = jnp.where(where > 0, value, at(buffer, slot))
        return lax.dynamic_update_index_in_dim(buffer, value, slot, 0)

    buffers[name] = [put(b, v) for b, v in zip(buffers[name], values, strict=True)]
