"""What a value of a mod depends on: the head, the query, the key, their difference, or both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from xform.jaxpr import carried, eqn_rule, interpret

# Steps of a loop that are written out.
_UNROLLED = 64

SCALAR, ROW, COL, BAND, TILE = "", "q", "k", "q-k", "qk"
"""What a value may depend on beside the head: nothing, the query, the key, their difference, both.
"""


@dataclasses.dataclass(frozen=True)
class Class:
    """What a value depends on.

    Attributes:
      heads: those of "bh".
      pair: one of `SCALAR`, `ROW`, `COL`, `BAND`, `TILE`.
      affine: whether the value is an index of `pair` plus something that no index changes.
    """

    heads: str = ""
    pair: str = SCALAR
    affine: bool = False

    def join(self, other: Class) -> Class:
        heads = "".join(x for x in "bh" if x in self.heads + other.heads)
        pairs = {self.pair, other.pair} - {SCALAR}
        return Class(heads, pairs.pop() if len(pairs) == 1 else TILE if pairs else SCALAR)


INDICES = (Class("b"), Class("h"), Class("", ROW, True), Class("", COL, True))
"""Of the four indices that a mod takes."""


def classify(jaxpr: Jaxpr, classes: Sequence[Class]) -> dict[Var, Class]:
    """The class of every variable of a flat program, given those of its arguments."""
    known = dict(zip(jaxpr.invars, classes, strict=True))
    of = lambda v: known[v] if isinstance(v, Var) else Class()
    for eqn in jaxpr.eqns:
        operands = [of(v) for v in eqn.invars]
        joint = functools.reduce(Class.join, operands, Class())
        name = eqn.primitive.name
        pairs = {x.pair for x in operands if x.affine}
        if name == "sub" and all(x.affine for x in operands) and pairs == {ROW, COL}:
            joint = Class(joint.heads, BAND)
        elif name in ("add", "sub") and len(pairs) == 1 and operands[0].affine:
            joint = dataclasses.replace(joint, affine=operands[1].pair == SCALAR)
        elif name == "add" and len(pairs) == 1 and operands[1].affine:
            joint = dataclasses.replace(joint, affine=operands[0].pair == SCALAR)
        known.update(dict.fromkeys(eqn.outvars, joint))
    return known


def aval_of(v: Var | Literal) -> ShapedArray:
    """The type of a variable, which here is always an array's."""
    assert isinstance(v.aval, ShapedArray)
    return v.aval


def _bind(eqn: JaxprEqn, *args):
    """An equation as it is; one of constants alone becomes a constant, but for random keys."""
    bind = functools.partial(eqn.primitive.bind, **eqn.primitive.get_bind_params(eqn.params))
    outs = [aval_of(v) for v in eqn.outvars]
    is_number = lambda x: not x.ndim and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    if any(isinstance(x, Tracer) for x in args) or not all(map(is_number, outs)):
        return bind(*args)
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, bind(*args))


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """The same program without calls and short loops; of a `cond`, both branches and a choice."""

    def choose(eqn: JaxprEqn, which, *args):
        results = [jaxpr_as_fun(branch)(*args) for branch in eqn.params["branches"]]
        which = jnp.clip(which.astype(jnp.int32), 0, len(results) - 1)
        pick = lambda *xs: functools.reduce(
            lambda out, ix: jnp.where(which == ix[0], ix[1], out), enumerate(xs[1:], 1), xs[0]
        )
        return [pick(*xs) for xs in zip(*results, strict=True)]

    def unroll(eqn: JaxprEqn, *args):
        if eqn.params["length"] > _UNROLLED:
            return _bind(eqn, *args)
        inner, ys = eqn.params["jaxpr"], []
        consts, carries = carried(eqn)
        body = jaxpr_as_fun(inner)
        fixed, carry, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]
        steps = range(eqn.params["length"])
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            outs = body(*fixed, *carry, *(lax.index_in_dim(x, i, keepdims=False) for x in xs))
            carry, y = outs[:carries], outs[carries:]
            ys.append(y)
        ys = reversed(ys) if eqn.params["reverse"] else ys
        return [*carry, *(jnp.stack(y) for y in zip(*ys, strict=True))]

    rules = {"cond": eqn_rule(choose), "scan": eqn_rule(unroll)}
    run = interpret(jaxpr, rules, default=_bind)
    structs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]
    flat = jax.make_jaxpr(run)(*structs)
    # Branches and derivatives by name may hold calls of their own.
    again = jax.make_jaxpr(interpret(flat, rules, default=_bind))(*structs)
    return again.jaxpr if hasattr(again, "jaxpr") else again
