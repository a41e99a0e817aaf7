"""A `scan` with `unroll=`, as a compiler gets it: turns of several iterations, and a rest.

JAX gives XLA a loop over runs of so many iterations, one after the other, and then the iterations
that are left over, whose results it puts behind those of the loop; where no run is left it gives it
no loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray

from xform._compat import Jaxpr, JaxprEqn, Primitive, weakref_lru_cache
from xform.jaxpr._walk import Carried, at_line, carried

# One iteration: a call, since what its body names (axes of a mesh) may not be in sight here.
_turn_p = Primitive("scan_turn")
_turn_p.multiple_results = True
_turn_p.def_abstract_eval(lambda *_, call_jaxpr: list(map(_plain, call_jaxpr.out_avals)))


def unrolled(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that a `scan` is lowered to; None where each turn is one iteration."""
    length, unroll, reverse = (eqn.params[name] for name in ("length", "unroll", "reverse"))
    if unroll == 1 or not length or not all(type(v.aval) is ShapedArray for v in eqn.invars):
        return None
    with at_line(eqn):
        return _program(eqn.params["jaxpr"], carried(eqn), length, unroll or length, reverse)


@weakref_lru_cache
def _program(body: Jaxpr, n: Carried, length: int, unroll: int, reverse: bool) -> Jaxpr:
    trips, rest = divmod(length, unroll)
    if trips == 1 and not rest:
        trips, rest = 0, length
    cut = rest if reverse else length - rest
    first = n.consts + n.carry

    def run(*args):
        consts, carry, xs = args[: n.consts], list(args[n.consts : first]), args[first:]

        def turns(carry, xs, count: int):
            stacks = []
            for i in reversed(range(count)) if reverse else range(count):
                x = [jax.lax.index_in_dim(x, i, keepdims=False) for x in xs]
                outs = _turn_p.bind(*consts, *carry, *x, call_jaxpr=body)
                carry, ys = outs[: n.carry], outs[n.carry :]
                stacks.append(ys)
            rows = zip(*(stacks[::-1] if reverse else stacks), strict=True)
            return carry, [jnp.stack(row) for row in rows]

        before, after = [x[:cut] for x in xs], [x[cut:] for x in xs]
        main, last = (after, before) if reverse else (before, after)
        parts = []
        if trips:
            main = [x.reshape(trips, unroll, *x.shape[1:]) for x in main]
            step = lambda carry, xs: turns(carry, xs, unroll)
            carry, ys = jax.lax.scan(step, carry, main, trips, reverse=reverse)
            parts.append([y.reshape(trips * unroll, *y.shape[2:]) for y in ys])
        if rest:
            carry, ys = turns(carry, last, rest)
            parts.append(ys)
        rows = zip(*(parts[::-1] if reverse else parts), strict=True)
        return [*carry, *(jnp.concatenate(row) for row in rows)]

    avals = list(map(_plain, body.in_avals))
    stacked = [a.update(shape=(length, *a.shape)) for a in avals[first:]]
    return jax.make_jaxpr(run)(*avals[:first], *stacked)


def _plain(aval: AbstractValue) -> ShapedArray:
    """A type without the mesh that it is split over."""
    assert isinstance(aval, ShapedArray)
    return ShapedArray(aval.shape, aval.dtype, memory_space=aval.memory_space)
