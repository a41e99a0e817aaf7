"""Which values of a block must be made once, and kept, for every reader to see the same bits.

A compiler that puts two readers of a value into two loops computes it twice, and may round it in
two ways. The values that lie in one loop by necessity form a cone: from what is kept (a result, a
sum or maximum's operand, …) back to what else is kept. A value that two cones need is kept, too,
unless it is exact.
"""

from __future__ import annotations

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._block_ops import EXACT
from xform.lowering._region import Region, type_of

_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"))


def kept(region: Region) -> frozenset[Var]:
    """Returns the values of a region's body that are made once."""
    body = region.body
    exact = _exact(region)
    ends: dict[Var, set] = {}
    for i, v in enumerate(body.outvars):
        if not isinstance(v, Literal):
            ends.setdefault(v, set()).add(i)
    found: set[Var] = set()
    for eqn in reversed(body.eqns):
        inside: set = set()
        for v in eqn.outvars:
            mine = ends.get(v, set())
            if len(mine) > 1 and v not in exact:
                found.add(v)
                mine = {v}
            inside |= mine
        for v in _read(eqn):
            ends.setdefault(v, set()).update({eqn.outvars[0]} if _starts(eqn) else inside)
    return frozenset(found)


def _starts(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop of its own."""
    return eqn.primitive.name in _REDUCTIONS


def _exact(region: Region) -> set[Var]:
    """The values that only exact operations have made."""
    exact = {*region.body.invars}
    for eqn in region.body.eqns:
        if _is_exact(eqn) and all(v in exact for v in _read(eqn)):
            exact.update(eqn.outvars)
    return exact


def _is_exact(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "convert_element_type":
        old, new = type_of(eqn.invars[0]).dtype, type_of(eqn.outvars[0]).dtype
        return new.itemsize >= old.itemsize
    return eqn.primitive.name in EXACT


def _read(eqn: JaxprEqn) -> list[Var]:
    return list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
