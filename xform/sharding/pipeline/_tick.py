"""What one program does in a tick: three slots, each of which a rank fills or not, and messages.

Ranks may differ in what they fill, since flags vary over the pipeline's axis; collectives over
other axes may stand inside, since all members of such a group do the same.

A slot is a loop of one turn or none, and its buffers and sums are what the loop carries: XLA lets a
loop change these where they lie. What passes through a `lax.cond` it copies, and what a stage keeps
of a microbatch may be gigabytes. So a slot that is not filled moves nothing.
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
    """Slot F: what it gives; it changes the buffers."""
    m = now["f_batch"]

    def work(y, own):
        del y
        waiting = _get(buffers, "x", now["f_x"])
        x = lax.cond(now["f_first"] > 0, lambda _: model.begin(m), lambda x: x, waiting)
        y, (early, late) = model.forward(_where(now, "f"), m, x)
        own = dict(own)
        _put(own, "early", now["f_early"], early)
        _put(own, "late", now["f_late"], late)
        return y, own

    own = {name: buffers[name] for name in ("early", "late")}
    y, own = _if(now["f"], work, [zeros(t) for t in model.x], own)
    buffers.update(own)
    # The last stage's output waits where others await their cotangent, for the loss.
    _put(buffers, "g", now["f_g"], y, now["f"] * now["f_last"])
    return y


def _backward(
    model: Model, buffers: dict[str, list], now: dict[str, Any], sums: dict[str, Any]
) -> tuple[list, dict[str, Any]]:
    """Slot B or I, with the loss before it on the last stage, and the model's begin after it."""
    m = now["i_batch"]

    def work(dx, own, sums):
        del dx
        g = _get(buffers, "g", now["i_g"])
        g, sums = _if(now["i_last"], lambda y, sums: model.end(m, y, sums), g, sums)
        kept = _get(buffers, "early", now["i_early"]), _get(buffers, "late", now["i_late"])
        dx, crossing, sums = model.backward(_where(now, "i"), m, kept, g, sums)
        own = dict(own)
        _put(own, "cross", now["i_cross"], crossing)
        (sums,) = _if(now["i_first"], lambda sums: (model.begin_gradient(m, dx, sums),), sums)
        return dx, own, sums

    own = {"cross": buffers["cross"]}
    dx, own, sums = _if(now["i"], work, [zeros(t) for t in model.x], own, sums)
    buffers.update(own)
    return dx, sums


def _weight_gradient(
    model: Model, buffers: dict[str, list], now: dict[str, Any], sums: dict[str, Any]
) -> dict[str, Any]:
    """Slot W."""

    def work(sums):
        late, crossing = (_get(buffers, name, now[f"w_{name}"]) for name in ("late", "cross"))
        where = _where(now, "w")
        return (model.weight_gradient(where, now["w_batch"], late, crossing, sums),)

    return _if(now["w"], work, sums)[0]


def _if(flag, work: Callable, *given) -> tuple:
    """What `work` makes of what is given, or the same where the flag says no."""
    return lax.fori_loop(0, flag, lambda _, given: work(*given), given)


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
