"""What of a row is computed when: passes over a long one, and what is joined of several parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._region import Region
from xform.lowering.mosaic_gpu._row_geometry import reduces


def passes(region: Region) -> list[list[JaxprEqn]]:
    """The sums and maxima along a row; the n-th list waits for the lists before it."""
    depth: dict[Var, int] = {}
    found: dict[int, list[JaxprEqn]] = {}
    for eqn in region.body.eqns:
        below = max((depth.get(v, 0) for v in eqn.invars if isinstance(v, Var)), default=0)
        if reduces(region, eqn):
            found.setdefault(below, []).append(eqn)
            below += 1
        depth.update(dict.fromkeys(eqn.outvars, below))
    return [found[n] for n in sorted(found)]


def without(
    eqns: Sequence[JaxprEqn], known: Collection[Var], wanted: Iterable[Var | Literal]
) -> list[JaxprEqn]:
    """The equations that lead to what is wanted, from what is known."""
    needed = {v for v in wanted if isinstance(v, Var) and v not in known}
    found = []
    for eqn in reversed(eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if isinstance(v, Var) and v not in known)
            found.append(eqn)
    return found[::-1]


def joined(region: Region) -> set[Var]:
    """The values whose rows are several parts side by side, each of which begins at a thread."""
    found: set[Var] = set()
    for eqn in region.body.eqns:
        whole = found.isdisjoint(v for v in eqn.invars if isinstance(v, Var))
        if eqn.primitive.name in _JOINS or not (whole or eqn.primitive.name in _CUTS):
            found.update(eqn.outvars)
    return found


_JOINS = frozenset(("concatenate", "pad"))
_CUTS = frozenset(("slice", "split"))
