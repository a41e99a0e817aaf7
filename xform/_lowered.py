"""Primitives whose lowering is a program like any other: `cost` and `memory` read that program.

Of a derivative of linear cross entropy, what reads nothing but the forward pass's own operands (the
logits, above all) was there before: it is marked by a name scope, `AGAIN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from xform._compat import (
    Jaxpr,
    JaxprEqn,
    Var,
    dense_ragged_dot,
    new_jaxpr_eqn,
    weakref_lru_cache,
)
from xform._unrolled import unrolled
from xform.jaxpr import carried
from xform.lowering._tile_fn import primal
from xform.primitives import cross_entropy, tile_sum
from xform.primitives._choose import Device

AGAIN = "computed again"

_LOWERINGS = {"linear_cross_entropy": cross_entropy._impl, "loss_sum": tile_sum._loss_impl}


type Lowering = Callable[[JaxprEqn], Jaxpr | None]


def as_written(eqn: JaxprEqn) -> None:
    """The lowering that lowers nothing."""
    del eqn


def compiled(eqn: JaxprEqn) -> Jaxpr | None:
    """`lowered`, and what else is another program for a compiler than for who reads it."""
    return _COMPILED.get(eqn.primitive.name, lowered)(eqn)


def dense(eqn: JaxprEqn) -> Jaxpr | None:
    """`compiled`, and what a ragged product is made of but on a TPU: one of all groups, masked."""
    if eqn.primitive.name != "ragged_dot_general" or eqn.params.get("group_offset") is not None:
        return compiled(eqn)
    avals: list[Any] = [v.aval for v in eqn.invars]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    return jax.make_jaxpr(partial(dense_ragged_dot, **eqn.params))(*avals)


def lowered(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that the primitive of an equation is lowered to, if it is one of these."""
    if (impl := _LOWERINGS.get(eqn.primitive.name)) is None:
        return None
    avals: list[Any] = [v.aval for v in eqn.invars]
    types = tuple((aval.shape, aval.dtype) for aval in avals)
    return _program(impl, tuple(eqn.params.items()), types, jax.default_backend() == "cpu")


@weakref_lru_cache
def _program(impl: Callable, params: tuple, avals: tuple, cpu: bool) -> Jaxpr:
    """The program of a lowering: plans that are compared with each other ask for it often."""
    # Counted in the form for any device, whatever was asked for: kernels make the same products.
    device = Device("cpu" if cpu else "any", counted=True)
    run = partial(impl, device=device, auto=False, **dict(params))
    program = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*aval) for aval in avals))
    if (fn := dict(params).get("fn")) is None:
        return program
    known = primal(fn)
    fresh = [*(not own for own in known), *[False] * (len(avals) - len(known))]
    return _mark_again(program, fresh)[0]


def on_platform(eqn: JaxprEqn, *, platform: str, lower: Lowering) -> Jaxpr | None:
    """`lower`, but that of the branches for each platform only one is left."""
    platforms = eqn.params.get("branches_platforms")
    if eqn.primitive.name != "cond" or platforms is None:
        return lower(eqn)
    meant = (i for i, names in enumerate(platforms) if names is None or platform in names)
    if (i := next(meant, None)) is None:
        return None
    branch: Jaxpr = eqn.params["branches"][i]
    return branch.replace(invars=[Var(eqn.invars[0].aval), *branch.invars])


def behind_barrier(eqn: JaxprEqn) -> Jaxpr:
    """The body of a remat; where it runs again, it waits until all that it reads is there.

    The barrier is JAX's own, of its lowering: it keeps a compiler from taking the second run for
    the first, and from running it before the backward pass has come there.
    """
    body, guarded = eqn.params["jaxpr"], eqn.params["prevent_cse"]
    if isinstance(guarded, bool):
        guarded = (guarded,) * len(body.invars)
    if not eqn.params["differentiated"] or not any(guarded):
        return body
    waits = [Var(v.aval) if held else v for v, held in zip(body.invars, guarded, strict=True)]
    pairs = [(w, v) for w, v in zip(waits, body.invars, strict=True) if w is not v]
    before, after = map(list, zip(*pairs, strict=True))
    barrier = new_jaxpr_eqn(
        before, after, jax.lax.optimization_barrier_p, {}, frozenset(), eqn.source_info
    )
    return body.replace(invars=waits, eqns=[barrier, *body.eqns])


_COMPILED: dict[str, Lowering] = {"remat2": behind_barrier, "scan": unrolled}


def _mark_again(jaxpr: Jaxpr, fresh: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Marks what reads nothing fresh, at every depth; returns which results are fresh besides."""
    moving = {v for v, f in zip(jaxpr.invars, fresh, strict=True) if f}
    eqns = []
    for eqn in jaxpr.eqns:
        reads = [isinstance(v, Var) and v in moving for v in eqn.invars]
        outs = [any(reads)] * len(eqn.outvars)
        body = eqn.params.get("jaxpr")
        if not any(reads):
            source = eqn.source_info
            stack = source.name_stack.extend(AGAIN)
            eqn = eqn.replace(source_info=source.replace(name_stack=stack))
        elif body is not None:
            body, outs = _mark_loop(eqn, body, reads)
            eqn = eqn.replace(params={**eqn.params, "jaxpr": body})
        moving.update(v for v, f in zip(eqn.outvars, outs, strict=True) if f)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns), [v in moving for v in jaxpr.outvars]


def _mark_loop(eqn: JaxprEqn, body: Jaxpr, fresh: list[bool]) -> tuple[Jaxpr, list[bool]]:
    """`_mark_again` of the body of a call or a scan; its carry is fresh once a turn makes it so."""
    while True:
        marked, outs = _mark_again(body, fresh)
        if eqn.primitive.name != "scan":
            return marked, outs
        start, carry = carried(eqn)
        before = fresh[start : start + carry]
        after = [a or b for a, b in zip(before, outs[:carry], strict=True)]
        if after == before:
            return marked, [*after, *outs[carry:]]
        fresh = [*fresh[:start], *after, *fresh[start + carry :]]
