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
    weakref_lru_cache,
    wrap_init,
)
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import UNKNOWN, source_line

# What only calls its body, and is taken apart. A `custom_jvp` or `custom_vjp` does more, in its
# hijax form too, of which `called` finds no body; it finds that of a remat.
_CALLS = frozenset(("jit", "remat2", "core_call", "closed_call", "eval_jaxpr", "call_hi_primitive"))

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
    return bool(eqn.effects) and any(
        type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects
    )


def flatten(jaxpr: Jaxpr) -> tuple[Jaxpr, list]:
    """Returns a program without calls and constants, and the values of its leading inputs.

    What it computes twice it then computes once, what nothing needs not at all.
    """
    flat = _Flat()
    env = flat.constants(jaxpr)
    flat.add(jaxpr, env, ())
    outputs = [_read(env, v) for v in jaxpr.outvars]
    eqns = live(flat.eqns, outputs)
    consts = flat.consts.values()
    return build([*(v for v, _ in consts), *jaxpr.invars], outputs, eqns), [x for _, x in consts]


@weakref_lru_cache
def without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a program with what `call` stands for in its place."""
    if not any(eqn.primitive is _call_p for eqn in jaxpr.eqns):
        return jaxpr
    program, consts = flatten(jaxpr)
    return program.with_consts(consts) if consts else program


class _Flat:
    """The equations of a program, with those of what it calls in their place."""

    def __init__(self):
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[int, tuple[Var, object]] = {}
        self.made: dict[object, Sequence[Var]] = {}

    def constants(self, jaxpr: Jaxpr) -> dict[Var, Atom]:
        """The variables that hold the constants of a program: one for each value."""
        pairs = zip(jaxpr.constvars, jaxpr.consts, strict=True)
        return {v: self.consts.setdefault(id(x), (v, x))[0] for v, x in pairs}

    def add(self, jaxpr: Jaxpr, env: dict[Var, Atom], scope: Sequence, caller: Any = None) -> None:
        """Adds a program's equations; those that have no line are of the line that calls them.

        Args:
          jaxpr: the program.
          env: what stands for its variables, for those that something else does.
          scope: the name stacks of what calls it, outermost first. What is called gets variables
            of its own, since it may be called twice.
          caller: the traceback of what calls it.
        """
        for eqn in jaxpr.eqns:
            source = eqn.source_info
            traceback = source.traceback
            if caller and source_line(eqn) == UNKNOWN:
                traceback = caller
            operands = [_read(env, v) for v in eqn.invars]
            body = called(eqn) if eqn.primitive.name in _CALLS and _placed_freely(eqn) else None
            if body is None:
                if scope:
                    stack = _within(scope, source.name_stack)
                    source = source.replace(name_stack=stack, traceback=traceback)
                outs = [Var(v.aval) for v in eqn.outvars] if scope else eqn.outvars
                outs = self._append(eqn, operands, outs, source)
            else:
                inner = {**self.constants(body), **dict(zip(body.invars, operands, strict=True))}
                self.add(body, inner, (*scope, source.name_stack), traceback)
                outs = [_read(inner, v) for v in body.outvars]
            if outs is not eqn.outvars:
                env.update(zip(eqn.outvars, outs, strict=True))

    def _append(
        self, eqn: JaxprEqn, operands: list[Atom], outs: Sequence[Var], source: Any
    ) -> Sequence[Var]:
        """Adds an equation, unless it is there already; returns what holds its results."""
        if not has_effects(eqn):
            key = eqn.primitive, tuple(map(identity, operands)), tuple(eqn.params.items())
            try:
                found = self.made.setdefault(key, outs)
            except TypeError:  # a parameter that can't be compared
                found = outs
            if found is not outs:
                return found
        new: list = list(outs)
        self.eqns.append(eqn.replace(invars=operands, outvars=new, source_info=source))
        return outs


def _read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def identity(atom: Atom) -> object:
    """Equal for what is known to be the same value."""
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


def applied(jaxpr: Jaxpr, inputs: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """Returns a program's equations and results, read from these inputs; all else is new."""
    new: dict[Var, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    eqns = []
    for eqn in jaxpr.eqns:
        new.update((v, Var(v.aval)) for v in eqn.outvars)
        eqns.append(substitute(eqn, new))
    return eqns, [_read(new, v) for v in jaxpr.outvars]


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
        if not wanted.isdisjoint(eqn.outvars) or has_effects(eqn):
            wanted.update([v for v in eqn.invars if isinstance(v, Var)])
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
