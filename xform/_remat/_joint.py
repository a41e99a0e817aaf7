"""A program and its derivative as one graph: what can be saved, and what the backward pass needs.

JAX's linearisation gives a program that makes residuals, and a linear one that reads them. What the
linear one computes from residuals alone (a mask, `1 - t²`) belongs with the first: so the residuals
that it *needs* are those that meet a tangent, and any values of the first part from which they
follow can be saved in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jax.interpreters import ad

from xform._compat import Jaxpr, JaxprEqn, Var, linearize_jaxpr
from xform._remat._jaxprs import Atom, build, flatten, retrace, substitute, without_calls
from xform._remat._kinds import flops


def transpose(linear: Jaxpr, n: int, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
    """A linear program backwards, but for its first n inputs; see `Joint.transposed`."""
    given = [v.aval.to_ct_aval() for v, z in zip(linear.outvars, zeros, strict=True) if not z]
    tangents = [v.aval.to_ct_aval() for v in linear.invars[n:]]
    gone: list[bool] = []

    def backward(*args):
        cotangents = iter(args[n:])
        cts = [
            ad.Zero(v.aval.to_ct_aval()) if z else next(cotangents)
            for v, z in zip(linear.outvars, zeros, strict=True)
        ]
        primals = [*args[:n], *(ad.UndefinedPrimal(t) for t in tangents)]
        found = ad.backward_pass(linear, True, (), primals, cts)[n:]
        gone[:] = [isinstance(ct, ad.Zero) for ct in found]
        return [ct for ct in found if not isinstance(ct, ad.Zero)]

    program = retrace(backward, [*(v.aval for v in linear.invars[:n]), *given])
    return program, tuple(gone)


@dataclass(frozen=True, eq=False)
class Joint:
    """A program, linearised.

    Attributes:
      inputs: of the program.
      consts: constant arrays, which are always at hand.
      eqns: what it computes from these, and what the linear part needs besides.
      outputs: its results.
      needed: the values that meet a tangent.
      linear: from `needed` and the tangents of `active` inputs to those of `varying` outputs.
      active: which inputs have tangents.
      varying: which outputs have tangents.
      transpose: turns `linear` round; its result may call other programs.
    """

    inputs: Sequence[Var]
    consts: dict[Var, object]
    eqns: Sequence[JaxprEqn]
    outputs: Sequence[Atom]
    needed: Sequence[Var]
    linear: Jaxpr
    active: tuple[bool, ...]
    varying: tuple[bool, ...]
    transpose: Callable[..., tuple[Jaxpr, tuple[bool, ...]]] = transpose
    _turned: dict[tuple[bool, ...], tuple[Jaxpr, tuple[bool, ...]]] = field(default_factory=dict)

    @cached_property
    def work(self) -> list[int]:
        """What each equation computes and moves."""
        return [flops(eqn) for eqn in self.eqns]

    def maker(self) -> dict[Var, JaxprEqn]:
        """What makes each value."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    def transposed(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
        """The linear part backwards, where some cotangents of `varying` outputs are zero.

        Returns:
          A program from `needed` and the other cotangents to cotangents of `active` inputs, and
          which of these are zero, and no results of it.
        """
        program, gone = self.turned(zeros)
        return without_calls(program), gone

    def turned(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
        """The same; that of a row calls what its layers do."""
        if zeros not in self._turned:
            self._turned[zeros] = self.transpose(self.linear, len(self.needed), zeros)
        return self._turned[zeros]


def linearize(jaxpr: Jaxpr, active: Sequence[bool]) -> Joint:
    """Returns the joint graph of a program without constants, for these inputs' tangents."""
    primal, _, varying, forwarded, tangent = linearize_jaxpr(jaxpr, tuple(active), is_vjp=False)
    primal, consts = flatten(primal)
    known = dict(zip(primal.invars, consts, strict=False))
    inputs = primal.invars[len(consts) :]
    n = len(jaxpr.outvars)
    made = iter(primal.outvars[n:])
    residuals = [next(made) if i is None else inputs[i] for i in forwarded]
    residuals += made  # those that have a structure
    tangent, more = flatten(tangent)
    known.update(zip(tangent.invars, more, strict=False))
    binders = tangent.invars[len(more) :]
    t = sum(active)
    first = len(forwarded)
    tangents = binders[first : first + t]
    held = dict(zip([*binders[:first], *binders[first + t :]], residuals, strict=True))
    eqns = [substitute(eqn, held) for eqn in tangent.eqns]
    outs = [held.get(v, v) if isinstance(v, Var) else v for v in tangent.outvars]
    fixed, linear = _divide(eqns, tangents)
    reads = [v for eqn in linear for v in eqn.invars if isinstance(v, Var)]
    own = {*tangents, *(v for eqn in linear for v in eqn.outvars)}
    needed = dict.fromkeys([*reads, *(v for v in outs if isinstance(v, Var))])
    needed = [v for v in needed if v not in own]
    whole = build(primal.invars, [*primal.outvars[:n], *needed], [*primal.eqns, *fixed])
    whole, _ = flatten(whole)  # what both parts compute is computed once
    merged = dict(zip(needed, whole.outvars[n:], strict=True))
    linear = [substitute(eqn, merged) for eqn in linear]
    outs = [merged.get(v, v) if isinstance(v, Var) else v for v in outs]
    needed = list(dict.fromkeys(v for v in merged.values() if isinstance(v, Var)))
    return Joint(
        inputs, known, whole.eqns, whole.outvars[:n], needed,
        build([*needed, *tangents], outs, linear), tuple(active), tuple(varying),
    )  # fmt: skip


def _divide(
    eqns: Sequence[JaxprEqn], tangents: Sequence[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations that depend on no tangent, and those that do."""
    moving = set(tangents)
    fixed: list[JaxprEqn] = []
    linear: list[JaxprEqn] = []
    for eqn in eqns:
        depends = any(v in moving for v in eqn.invars if isinstance(v, Var))
        (linear if depends else fixed).append(eqn)
        moving.update(eqn.outvars if depends else ())
    return fixed, linear
