"""What a value of a mod depends on: the head, the query, the key, their difference, or both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from xform.jaxpr import eqn_rule, interpret

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
    return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def flatten(jaxpr: Jaxpr) -> Jaxpr:
    """The same program without calls; of a `cond`, both branches and a choice between them."""

    def choose(eqn: JaxprEqn, which, *args):
        results = [jaxpr_as_fun(branch)(*args) for branch in eqn.params["branches"]]
        which = jnp.clip(which.astype(jnp.int32), 0, len(results) - 1)
        pick = lambda *xs: functools.reduce(
            lambda out, ix: jnp.where(which == ix[0], ix[1], out), enumerate(xs[1:], 1), xs[0]
        )
        return [pick(*xs) for xs in zip(*results, strict=True)]

    run = interpret(jaxpr, {"cond": eqn_rule(choose)}, default=_bind)
    structs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]
    flat = jax.make_jaxpr(run)(*structs)
    # Branches and derivatives by name may hold calls of their own.
    again = jax.make_jaxpr(interpret(flat, {}, default=_bind))(*structs)
    return again.jaxpr if hasattr(again, "jaxpr") else again
