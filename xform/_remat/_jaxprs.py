"""Jaxprs taken apart and put together: equations are moved as they are, and keep their lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.interpreters import partial_eval

from xform._compat import (
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    new_jaxpr_eqn,
    wrap_init,
)
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import UNKNOWN, source_line

# What only calls its body, and is taken apart. A `custom_jvp` or `custom_vjp` does more.
_CALLS = frozenset(("jit", "remat2", "core_call", "closed_call", "eval_jaxpr"))

_call_p = Primitive("closed_call")
_call_p.multiple_results = True

type Atom = Var | Literal


def build(inputs: Sequence[Var], outputs: Sequence[Atom], eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Returns the program of some equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr((), list(inputs), list(outputs), list(eqns), effects, _NAMELESS)


def call(jaxpr: Jaxpr, inputs: Sequence[Atom], outputs: Sequence) -> JaxprEqn:
    """Returns an equation that stands for a program until `flatten` takes it apart."""
    params = dict(call_jaxpr=jaxpr)
    return new_jaxpr_eqn(list(inputs), list(outputs), _call_p, params, jaxpr.effects)


_NAMELESS = DebugInfo("remat", "xform.remat", None, None)


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than make its results; to name a mesh axis is no more."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def flatten(jaxpr: Jaxpr) -> tuple[Jaxpr, list]:
    """Returns a program without calls and constants, and the values of its leading inputs.

    What it computes twice it then computes once, what nothing needs not at all.
    """
    flat = _Flat()
    for var, value in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        flat.constant(var, value)
    flat.add(jaxpr, ())
    outputs = [flat.read(v) for v in jaxpr.outvars]
    eqns = live(flat.eqns, outputs)
    return build([*flat.consts, *jaxpr.invars], outputs, eqns), list(flat.consts.values())


class _Flat:
    """The equations of a program, with those of what it calls in their place."""

    def __init__(self):
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[Var, object] = {}
        self.same: dict[Var, Atom] = {}
        self.made: dict[object, JaxprEqn] = {}

    def read(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self.same.get(atom, atom)

    def constant(self, var: Var, value: object) -> None:
        twin = next((v for v, known in self.consts.items() if known is value), var)
        self.consts[twin] = value
        if twin is not var:
            self.same[var] = twin

    def add(self, jaxpr: Jaxpr, scope: Sequence, caller: Any = None) -> None:
        """Adds a program's equations; those that have no line are of the line that calls them."""
        for eqn in jaxpr.eqns:
            own = eqn.source_info.traceback
            traceback = caller if caller and source_line(eqn) == UNKNOWN else own
            operands = [self.read(v) for v in eqn.invars]
            body = called(eqn) if eqn.primitive.name in _CALLS and _placed_freely(eqn) else None
            stack = eqn.source_info.name_stack
            if body is None:
                source = eqn.source_info.replace(
                    name_stack=_within(scope, stack), traceback=traceback
                )
                self._append(eqn.replace(invars=operands, source_info=source))
                continue
            # The body may be called twice: its variables are new each time.
            body = renamed(body)
            self.same.update(zip(body.invars, operands, strict=True))
            for var, value in zip(body.constvars, body.consts, strict=True):
                self.constant(var, value)
            self.add(body, (*scope, stack), traceback)
            outs = [self.read(v) for v in body.outvars]
            self.same.update(zip(eqn.outvars, outs, strict=True))

    def _append(self, eqn: JaxprEqn) -> None:
        """Adds an equation, unless it is there already."""
        if not has_effects(eqn):
            operands = tuple(_identity(v) for v in eqn.invars)
            try:
                key = eqn.primitive, operands, tuple(eqn.params.items())
                twin = self.made.setdefault(key, eqn)
            except TypeError:  # a parameter that can't be compared
                twin = eqn
            if twin is not eqn:
                self.same.update(zip(eqn.outvars, twin.outvars, strict=True))
                return
        self.eqns.append(eqn)


def _identity(atom: Atom) -> object:
    if not isinstance(atom, Literal):
        return atom
    return atom.aval, np.asarray(atom.val).tobytes()


def _within(scope: Sequence, stack):
    for outer in reversed(scope):
        stack = outer + stack
    return stack


def _placed_freely(eqn: JaxprEqn) -> bool:
    """Whether a jit says nothing of where its arrays lie."""
    said = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    return all(type(s).__name__ == "UnspecifiedValue" for s in said)


def renamed(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the same program with variables of its own."""
    new: dict[Var, Var] = {v: Var(v.aval) for v in [*jaxpr.constvars, *jaxpr.invars]}
    eqns = []
    for eqn in jaxpr.eqns:
        new.update((v, Var(v.aval)) for v in eqn.outvars)
        eqns.append(substitute(eqn, new))
    binders = [new[v] for v in [*jaxpr.constvars, *jaxpr.invars]]
    outputs: list = [new[v] if isinstance(v, Var) else v for v in jaxpr.outvars]
    return Jaxpr(
        binders[: len(jaxpr.consts)], binders[len(jaxpr.consts) :], outputs, eqns,
        jaxpr.effects, jaxpr.debug_info.with_unknown_names(), consts=jaxpr.consts,
    )  # fmt: skip


def substitute(eqn: JaxprEqn, new: Mapping[Var, Atom]) -> JaxprEqn:
    """Returns an equation with other variables."""
    invars = [new.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
    outvars: list = [new.get(v, v) for v in eqn.outvars]
    return eqn.replace(invars=invars, outvars=outvars)


def live(eqns: Sequence[JaxprEqn], needed: Iterable[Atom]) -> list[JaxprEqn]:
    """Returns the equations that the needed values, or effects, depend on, in their order."""
    wanted = {v for v in needed if isinstance(v, Var)}
    kept = []
    for eqn in reversed(eqns):
        if has_effects(eqn) or not wanted.isdisjoint(eqn.outvars):
            wanted.update(v for v in eqn.invars if isinstance(v, Var))
            kept.append(eqn)
    return kept[::-1]


def retrace(f: Callable[..., Sequence], avals: Sequence) -> Jaxpr:
    """Returns the program of a function of arrays of these types, its constants with it."""
    fun = wrap_init(lambda *args: f(*args), debug_info=_NAMELESS)
    out, _, consts = partial_eval.trace_to_jaxpr_dynamic(fun, avals)
    return out if not consts else out.with_consts(consts)


def equations(f: Callable[..., Sequence], old: Sequence[Var], new: Sequence[Var]) -> list[JaxprEqn]:
    """Returns the equations `new = f(*old)`."""
    program = retrace(f, [v.aval for v in old])
    names: dict = dict(zip(program.invars, old, strict=True))
    names.update(zip(program.outvars, new, strict=True))
    return [substitute(eqn, names) for eqn in program.eqns]
