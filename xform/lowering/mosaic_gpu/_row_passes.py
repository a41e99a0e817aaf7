"""What is known of a region's program before it runs.

What of a row is computed when: passes over a long one. What is joined of several parts. And whether
the GPU's own functions are good enough for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._region import Region, type_of
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


def takes_own_functions(region: Region) -> bool:
    """Whether what the GPU's own exponentials and roots are off by is lost in what follows them.

    `ex2.approx` of a product has the error of an argument that was rounded once more, `|x| / 2**24`
    of the result. That is lost where a result of 16 bits follows, or a sum along a row or over
    rows. Its logarithm is not as good near 1, nor its sine near 0; a kernel has all or none.
    """
    names = {eqn.primitive.name for eqn in region.body.eqns}
    if names.isdisjoint(_BY_EXPONENTIAL) or not names.isdisjoint(_LOSE_DIGITS):
        return False
    seen = {v for v in region.results if _is_wide(v)}
    for eqn in reversed(region.body.eqns):
        if seen.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name in _BY_EXPONENTIAL:
            return False
        if eqn.primitive.name != "reduce_sum" or not reduces(region, eqn):
            seen.update(v for v in eqn.invars if _is_wide(v))
    return True


def _is_wide(v: Var | Literal) -> bool:
    return isinstance(v, Var) and type_of(v).dtype == jnp.float32


_BY_EXPONENTIAL = frozenset(
    ("cosh", "exp", "exp2", "expm1", "logistic", "rsqrt", "sinh", "sqrt", "tanh")
)
_LOSE_DIGITS = frozenset(
    ("acosh", "asinh", "atanh", "cbrt", "cos", "log", "log1p", "pow", "sin", "tan")
)
"""Operations that take a logarithm or a sine."""
