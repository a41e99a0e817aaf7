"""Values of a program in a policy's dtypes, and what is known of them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import sub_jaxprs

# What is known of a value of the program. FIXED: written in another dtype than float32, and left
# so. LEAF: made of arguments and constants alone, still float32. NARROW: made of products, in
# `compute`. WIDE: made of sums and exponentials of such, in `accumulate`.
FIXED, LEAF, NARROW, WIDE = "fixed", "leaf", "narrow", "wide"


class Held(NamedTuple):
    """A value, and what is known of it."""

    array: Any
    kind: str


def governed(aval: Any) -> bool:
    """Whether a value is written in float32, and so is the policy's."""
    return getattr(aval, "dtype", None) == jnp.float32


def lift(x: Any) -> Held:
    """A literal or a constant."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return Held(x, LEAF if dtype == jnp.float32 else FIXED)


def join(kinds: Any) -> str:
    """The kind of what is made of several."""
    order = (FIXED, LEAF, NARROW, WIDE)
    return max(kinds, key=order.index, default=FIXED)


def shared_in(jaxpr: Jaxpr) -> set[Var]:
    """The variables with more than one reader; a program inside of an equation may read twice."""
    count: Counter[Var] = Counter(v for v in jaxpr.outvars if isinstance(v, Var))
    for eqn in jaxpr.eqns:
        times = 2 if sub_jaxprs(eqn) else 1
        for v in eqn.invars:
            if not isinstance(v, Literal):
                count[v] += times
    return {v for v, n in count.items() if n > 1}


# ---- the states of delayed scales ----------------------------------------------------------------


def slots(jaxpr: Jaxpr) -> list[tuple[int, ...]]:
    """For each product with a state the lengths of the scans around it, in program order."""
    return [lead for eqn in jaxpr.eqns for lead in slots_of(eqn)]


def slots_of(eqn: JaxprEqn) -> list[tuple[int, ...]]:
    """A product in a while, or in a custom derivative, has none: its scale is of today."""
    name = eqn.primitive.name
    if name == "dot_general":
        return [()] if all(governed(v.aval) for v in eqn.invars) else []
    if name == "scan":
        return [(eqn.params["length"], *lead) for lead in slots(eqn.params["jaxpr"])]
    if name == "cond":
        return [lead for body in eqn.params["branches"] for lead in slots(body)]
    if name == "shard_map":
        return slots(eqn.params["jaxpr"])
    body = None if name.startswith("custom_") else called(eqn)
    return [] if body is None else slots(body)
