"""A program in the operations that kernels are made of.

Calls give way to their bodies, functions with a derivative of their own among them: a program that
is lowered is differentiated no more. Random bits are spelled out as what `jax.random` makes them
of, a hash of each element's position, so that a block of rows can make its own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, use_abstract_mesh

from xform._compat import Jaxpr, JaxprEqn, weakref_lru_cache
from xform._fuse._error import refusal
from xform._remat._jaxprs import flatten, retrace
from xform.jaxpr._interpret import called, evaluate
from xform.jaxpr._walk import at_line
from xform.lowering._dropout import threefry
from xform.lowering._region import type_of

_WORD = 32
_PLACED = frozenset(("sharding", "out_sharding"))
"""Parameters that say where a result lies."""


@weakref_lru_cache
def core(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the program of one without constants, whose keys are given as their data."""
    if moves := [eqn for eqn in jaxpr.eqns if _moves(eqn)]:
        raise refusal(jaxpr, [(eqn, "it moves an array between devices") for eqn in moves])
    types = [ShapedArray(type_of(x).shape, type_of(x).dtype) for x in jaxpr.invars]
    with use_abstract_mesh(AbstractMesh((), ())):
        program = retrace(lambda *args: evaluate(jaxpr, (), args, _apply), types)
    flat, consts = flatten(program)
    return flat.with_consts(consts) if consts else flat


def _apply(eqn: JaxprEqn, *args) -> list:
    if (rule := _RULES.get(eqn.primitive.name)) is not None:
        with at_line(eqn):
            return [rule(eqn, *args)]
    with at_line(eqn):
        if (body := called(eqn)) is not None:
            return evaluate(body, body.consts, args, _apply)
        outs = eqn.primitive.bind(*args, **eqn.params | dict.fromkeys(_PLACED & eqn.params.keys()))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _as_it_is(eqn: JaxprEqn, x):
    """Keys are their data; on one device, all values have one type."""
    del eqn
    return x


def _moves(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than say on which mesh an array is."""
    if eqn.primitive.name != "reshard":
        return False
    (old,), (new,) = eqn.invars, eqn.outvars
    return tuple(type_of(old).sharding.spec) != tuple(type_of(new).sharding.spec)


def _random_bits(eqn: JaxprEqn, key):
    """The bits of `jax.random.bits`, as its threefry generator counts: by position in the array."""
    shape, width = eqn.params["shape"], eqn.params["bit_width"]
    leading = key.shape[:-1]
    if not jax.config.jax_threefry_partitionable or width > _WORD or math.prod(shape) >> _WORD:
        raise NotImplementedError(
            f"`fuse` makes random bits of at most {_WORD} bits, fewer than 2**{_WORD} of them, and "
            f"under `jax_threefry_partitionable`; found {math.prod(shape)} of {width} bits. Make "
            "them outside, and pass them on."
        )
    whole = (*leading, *shape)
    words = [
        lax.broadcast_in_dim(
            lax.index_in_dim(key, i, -1, keepdims=False), whole, range(len(leading))
        )
        for i in range(2)
    ]
    place = jnp.zeros(whole, jnp.uint32)
    for d, stride in enumerate(_strides(shape), len(leading)):
        place = place + lax.broadcasted_iota(jnp.uint32, whole, d) * jnp.uint32(stride)
    high, low = threefry(words, (jnp.zeros(whole, jnp.uint32), place))
    return (high ^ low).astype(jnp.dtype(f"uint{width}"))


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


_RULES = {
    **dict.fromkeys(("random_wrap", "random_unwrap", "pcast", "pvary", "reshard"), _as_it_is),
    "random_bits": _random_bits,
}
