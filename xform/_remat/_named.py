"""What users name: values, and scopes, which are regions with a budget of their own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext

import jax.numpy as jnp

from xform._compat import Jaxpr, JaxprEqn, Var, inside_shard_map
from xform._remat._jaxprs import build, flatten
from xform._remat._joint import linearize
from xform._remat._primitive import Plan
from xform._remat._regions import as_region, pieces
from xform.jaxpr import sub_jaxprs, walk
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import Site, given_name


def names_in(jaxpr: Jaxpr) -> set[str]:
    """The names of values (`checkpoint_name`), those in forward rules of a `custom_vjp` too."""
    found = set()
    for site in walk(jaxpr):
        inside = walk(_rule(site)) if _has_rule(site.eqn) else ()
        found.update(given_name(eqn) for eqn in (site.eqn, *(s.eqn for s in inside)))
    return found - {None}


def _has_rule(eqn: JaxprEqn) -> bool:
    hijax = eqn.primitive.name == "call_hi_primitive" and called(eqn) is None
    return hijax or eqn.primitive.name == "custom_vjp_call"


def _rule(site: Site) -> Jaxpr:
    """What runs in place of an equation that is differentiated."""
    operands = list(dict.fromkeys(v for v in site.eqn.invars if isinstance(v, Var)))
    active = [jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact) for v in operands]
    with ExitStack() as within:
        for parent, _ in site.parents:
            if parent.primitive.name == "shard_map":
                within.enter_context(inside_shard_map(parent))
        joint = linearize(build(operands, site.eqn.outvars, [site.eqn]), active)
    return build(joint.inputs, joint.outputs, joint.eqns)


def scopes_of(eqn: JaxprEqn) -> list[str]:
    """The names of the scopes in which the user's code made an equation, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return [part.name for part in stack if type(part).__name__ == "Scope"]


def name_regions(jaxpr: Jaxpr, plans: Mapping[str, Plan]) -> Jaxpr:
    """Returns a program in which each run of equations under a name is a region.

    Args:
      jaxpr: a flat program.
      plans: of each name, what its regions do.

    Raises:
      ValueError: a name stands nowhere in the program.
    """
    found = {scope for site in walk(jaxpr) for scope in scopes_of(site.eqn)}
    if missing := [name for name in plans if name not in found]:
        raise ValueError(
            f"`budget` names {', '.join(map(repr, missing))}; the program has the scopes "
            f"{', '.join(map(repr, sorted(found))) or 'none'}: mark what is meant with "
            "`with jax.named_scope(name):`."
        )
    return _named(jaxpr, plans)


def _named(jaxpr: Jaxpr, plans: Mapping) -> Jaxpr:
    name_of = lambda eqn: next((s for s in scopes_of(eqn) if s in plans), None)
    parts: list[slice] = []
    names: list[str | None] = []
    for name, run in itertools.groupby(range(len(jaxpr.eqns)), lambda i: name_of(jaxpr.eqns[i])):
        indices = list(run)
        parts.append(slice(indices[0], indices[-1] + 1))
        names.append(name)
    eqns: list[JaxprEqn] = []
    for name, piece in zip(names, pieces(jaxpr, parts), strict=True):
        if name is None:
            eqns += [_inside(eqn, plans) for eqn in piece.eqns]
        else:
            eqns.append(as_region(piece, plans[name], program=piece))  # each has lines of its own
    return build(jaxpr.invars, jaxpr.outvars, eqns)


def _inside(eqn: JaxprEqn, plans: Mapping) -> JaxprEqn:
    """The same for the bodies of an equation that has no name of its own."""
    if eqn.primitive.name not in ("scan", "cond", "shard_map"):
        return eqn
    new = dict(eqn.params)
    for label, body in sub_jaxprs(eqn):
        flat, consts = flatten(body)
        with inside_shard_map(eqn) if eqn.primitive.name == "shard_map" else nullcontext():
            inner = _named(flat, plans)
        inner = inner.with_consts(consts) if consts else inner
        if label in new:
            new[label] = inner
        else:  # branches[i]
            key, _, i = label.rstrip("]").partition("[")
            items = list(new[key])
            items[int(i)] = inner
            new[key] = type(new[key])(items)
    return eqn.replace(params=new)
