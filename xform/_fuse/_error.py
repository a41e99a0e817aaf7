"""The error of `fuse`, and the split that it proposes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xform._compat import Jaxpr, JaxprEqn, Var
from xform.jaxpr import source_line


class FusionError(ValueError):
    """A function can't become one kernel; the message says what stands in the way, and where."""


def refusal(jaxpr: Jaxpr, offences: Sequence[tuple[JaxprEqn, str]]) -> FusionError:
    """The error for all offending equations of a program at once."""
    told = [
        f"  `{eqn.primitive.name}` at {source_line(eqn)}: {why}.\n{_split(jaxpr, eqn)}"
        for eqn, why in offences
    ]
    return FusionError("`fuse` can't make this one kernel:\n" + "\n".join(told))


def _split(jaxpr: Jaxpr, eqn: JaxprEqn) -> str:
    """Which equations could be fused before an offending one, and which after it."""
    before = _leading_to(jaxpr, eqn)
    after = _reading(jaxpr, eqn)
    parts = []
    if before:
        parts.append(f"fuse what leads to it (up to {_named(before[-1])})")
    parts.append(f"leave `{eqn.primitive.name}` outside")
    if after:
        parts.append(f"fuse what reads it (from {_named(after[0])} on)")
    return "    Nearest legal split: " + ", ".join(parts) + "."


def _named(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive.name}` at {source_line(eqn)}"


def _leading_to(jaxpr: Jaxpr, eqn: JaxprEqn) -> list[JaxprEqn]:
    wanted = _variables(eqn.invars)
    found = []
    for other in reversed(jaxpr.eqns[: jaxpr.eqns.index(eqn)]):
        if not wanted.isdisjoint(other.outvars):
            wanted |= _variables(other.invars)
            found.append(other)
    return found[::-1]


def _reading(jaxpr: Jaxpr, eqn: JaxprEqn) -> list[JaxprEqn]:
    made = set(eqn.outvars)
    found = []
    for other in jaxpr.eqns[jaxpr.eqns.index(eqn) + 1 :]:
        if not made.isdisjoint(_variables(other.invars)):
            made.update(other.outvars)
            found.append(other)
    return found


def _variables(atoms: Iterable) -> set[Var]:
    return {v for v in atoms if isinstance(v, Var)}
