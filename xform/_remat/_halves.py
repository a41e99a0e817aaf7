"""A cut as two programs: one that saves, and one that computes the rest again, late.

Each equation that runs again does so right before the first that needs it. XLA would compute it
once, in the forward pass, and keep it: a barrier ties what was saved to the cotangents, which come
later. It may also run it too early, so further work is tied to the cotangent that it meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Var
from xform._program import is_on_host
from xform._remat._cut import Cut, Settings
from xform._remat._jaxprs import Atom, build, equations, live, substitute
from xform._remat._joint import Joint
from xform._remat._kinds import kind_of

_SPACE = jax.memory.Space

AGAIN = "rematted_computation"
"""The name scope of what runs again, which JAX's own remat uses too."""


@dataclass(frozen=True, eq=False)
class Halves:
    """The two programs.

    Attributes:
      joint: what they are halves of.
      cut: what is saved.
      barrier: whether the second is held back by barriers.
      settings: of the cut, None where it was no choice.
    """

    joint: Joint
    cut: Cut
    barrier: bool = True
    settings: Settings | None = None
    _backward: dict[tuple[bool, ...], tuple[Jaxpr, tuple[bool, ...]]] = field(
        default_factory=dict, init=False
    )
    _hosting: dict[frozenset[Var], Halves] = field(default_factory=dict, init=False)

    @cached_property
    def saved(self) -> list[Var]:
        """What the second program gets of the first: all but constants."""
        return [v for v in self.cut.saved if v not in self.joint.consts]

    def hosting(self, inputs: Iterable[Var]) -> Halves:
        """The same, where the host keeps these of the inputs: another region brought them there."""
        kept = frozenset(inputs).intersection(self.saved)
        if not kept:
            return self
        if kept not in self._hosting:
            hosted = {**self.cut.hosted, **dict.fromkeys(kept, ())}
            self._hosting[kept] = replace(self, cut=replace(self.cut, hosted=hosted))
        return self._hosting[kept]

    def held(self, v: Var):
        """The type of a saved value while it waits."""
        return v.aval.update(memory_space=_SPACE.Host) if v in self.cut.hosted else v.aval

    @property
    def count(self) -> int:
        """How many operands of the second program are saved values."""
        return len(self.saved)

    @property
    def results(self) -> Sequence:
        """The types of the tangents of varying results."""
        return self.joint.linear.out_avals

    @cached_property
    def effects(self) -> frozenset:
        """Those of the second program."""
        return frozenset().union(self.joint.linear.effects, *(e.effects for e in self.cut.again))

    @cached_property
    def forward(self) -> Jaxpr:
        """From the inputs to the results and what is saved but for inputs, in order of `saved`."""
        inputs = set(self.joint.inputs)
        made = [v for v in self.saved if v not in inputs]
        outputs = [*self.joint.outputs, *made]
        eqns = live(self.joint.eqns, outputs)
        eqns, new = _rounded(eqns, made)
        for i, v in enumerate(made, len(self.joint.outputs)):
            if v in self.cut.hosted:
                outputs[i] = at = Var(self.held(v))
                eqns += _moved(new.get(v, v), at, _SPACE.Host)
        outputs = [new.get(v, v) if isinstance(v, Var) else v for v in outputs]
        return self._closed(self.joint.inputs, outputs, eqns)

    @cached_property
    def tangents(self) -> Jaxpr:
        """From `saved` and tangents to tangents."""
        linear, n = self.joint.linear, len(self.joint.needed)
        again = _Again(self)
        again.prepare(self.joint.needed)
        inputs = [Var(self.held(v)) if v in self.cut.hosted else v for v in self.saved]
        back = [e for v, w in zip(self.saved, inputs, strict=True) for e in self._fetched(w, v)]
        eqns = [*back, *again.eqns, *linear.eqns]
        return self._closed([*inputs, *linear.invars[n:]], linear.outvars, eqns)

    def backward(self, zeros: tuple[bool, ...]) -> tuple[Jaxpr, tuple[bool, ...]]:
        """From `saved` and cotangents to cotangents; see `Joint.transposed`."""
        if zeros not in self._backward:
            program, gone = self.joint.transposed(zeros)
            self._backward[zeros] = self._late(program), gone
        return self._backward[zeros]

    def sketch(self, zeros: tuple[bool, ...]) -> Jaxpr:
        """What `backward` computes; for a row, which repeats nothing, in calls of its layers."""
        if self.settings is not None:
            return self.backward(zeros)[0]
        return self._late(self.joint.turned(zeros)[0])

    def _late(self, program: Jaxpr) -> Jaxpr:
        """A linear part backwards, from what is saved, each value again before its first use."""
        constants = dict(zip(program.constvars, program.consts, strict=True))
        n = len(self.joint.needed)
        cotangents = program.invars[n:]
        again = _Again(self, constants)
        again.same.update(zip(program.invars[:n], self.joint.needed, strict=True))
        waiting = [Var(self.held(v)) if v in self.cut.hosted else v for v in self.saved]
        inputs = [*waiting, *cotangents]
        outer = [Var(v.aval) for v in inputs] if self.barrier else inputs
        if self.barrier:
            again.eqns += _barrier(inputs, outer)
        for v, w in zip(self.saved, waiting, strict=True):
            again.eqns += self._fetched(w, v)
        again.late.update(cotangents)
        for eqn in program.eqns:
            again.run(eqn)
        outs = [again.read(v) for v in program.outvars]
        again.prepare(v for v in outs if isinstance(v, Var))
        if self.cut.hosted and self.settings is not None and self.settings.hands_on:
            outs = _together(again.eqns, outs)
        eqns = live(again.eqns, outs)
        return self._closed(outer, outs, eqns, constants)

    def _fetched(self, host: Var, v: Var) -> list[JaxprEqn]:
        """What brings a value back to the device that the host may have kept."""
        return _moved(host, v, _SPACE.Device) if v in self.cut.hosted else []

    def _closed(
        self, inputs: Sequence[Var], outputs: Sequence[Atom], eqns: Sequence[JaxprEqn], more=None
    ) -> Jaxpr:
        known = {**self.joint.consts, **(more or {})}
        program = build([*known, *inputs], outputs, eqns)
        return program.with_consts(list(known.values())) if known else program


class _Again:
    """Equations of a backward pass, each after what it needs of the forward pass again."""

    def __init__(self, halves: Halves, constants: Iterable[Var] = ()):
        self.halves = halves
        self.eqns: list[JaxprEqn] = []
        self.index = {v: eqn for eqn in halves.cut.again for v in eqn.outvars}
        self.order = {id(eqn): i for i, eqn in enumerate(halves.cut.again)}
        self.done: set[Var] = {*halves.cut.saved, *halves.joint.consts, *constants}
        self.same: dict[Var, Atom] = {}
        self.late: set[Var] = set()
        self.heavy = False

    def read(self, atom: Atom) -> Atom:
        while isinstance(atom, Var) and atom in self.same:
            atom = self.same[atom]
        return atom

    def run(self, eqn: JaxprEqn) -> None:
        """Appends an equation of the backward pass, and what it needs before it."""
        operands = self._reads(eqn)
        needed = self._missing(operands)
        if needed:
            late = next((v for v in operands if v in self.late), None)
            self._append(needed, late)
        eqn = substitute(eqn, {v: self.read(v) for v in eqn.invars if isinstance(v, Var)})
        self.late.update(eqn.outvars)
        self.eqns.append(eqn)

    def prepare(self, values: Iterable[Var]) -> None:
        """Appends what these values need."""
        self._append(self._missing(self.read(v) for v in values), None)

    def _reads(self, eqn: JaxprEqn) -> list[Var]:
        return [v for v in map(self.read, eqn.invars) if isinstance(v, Var)]

    def _missing(self, values: Iterable[Atom]) -> list[JaxprEqn]:
        """The equations to run again before these values are there, in program order."""
        todo = [v for v in values if isinstance(v, Var) and v in self.index and v not in self.done]
        found: dict[int, JaxprEqn] = {}
        while todo:
            eqn = self.index[todo.pop()]
            if id(eqn) in found:
                continue
            found[id(eqn)] = eqn
            todo += [v for v in self._reads(eqn) if v in self.index and v not in self.done]
        return sorted(found.values(), key=lambda eqn: self.order[id(eqn)])

    def _append(self, eqns: Sequence[JaxprEqn], late: Var | None) -> None:
        made = {v for eqn in eqns for v in eqn.outvars}
        if late is not None and any(map(kind_of, eqns)):
            if self.heavy:
                self._tie(eqns, made, late)
            self.heavy = True
        for eqn in eqns:
            new = {v: self.read(v) for v in eqn.invars if isinstance(v, Var)}
            source = eqn.source_info
            stack = source.name_stack.extend(AGAIN)
            eqn = eqn.replace(source_info=source.replace(name_stack=stack))
            self.eqns.append(substitute(eqn, new))
        self.done |= made

    def _tie(self, eqns: Sequence[JaxprEqn], made: set[Var], late: Var) -> None:
        """Makes equations wait for a cotangent."""
        reads = dict.fromkeys(v for eqn in eqns for v in self._reads(eqn))
        sources = [v for v in reads if v not in made]
        sources = [v for v in sources if v not in self.halves.joint.consts]
        before = [*sources, late]
        after = [Var(v.aval) for v in before]
        self.eqns += _barrier(after, before)
        self.same.update(zip(before, after, strict=True))
        self.late.add(after[-1])


def _barrier(new: Sequence[Var], old: Sequence[Var]) -> list[JaxprEqn]:
    return equations(lambda *xs: lax.optimization_barrier(list(xs)), old, new)


def _together(eqns: list[JaxprEqn], outs: Sequence[Atom]) -> list[Atom]:
    """Results of which none is there before all are.

    XLA puts off what is not urgent, to have work while a value comes from the host, and with the
    gradients of all parameters it keeps all that they are made of.
    """
    made = list(dict.fromkeys(v for v in outs if isinstance(v, Var)))
    done = {v: Var(v.aval) for v in made}
    eqns += _barrier(list(done.values()), made)
    return [done.get(v, v) if isinstance(v, Var) else v for v in outs]


def _is_narrow(aval) -> bool:
    narrow = jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize == 2
    return narrow and not is_on_host(aval)  # that was rounded on its way


def _moved(old: Var, new: Var, to) -> list[JaxprEqn]:
    """Moves a value; where it was, its cotangent goes, which JAX leaves where it is if not told."""
    source = _SPACE.Host if to is _SPACE.Device else _SPACE.Device
    return equations(lambda x: [jax.device_put(x, to, src=source)], [old], [new])


def _rounded(
    eqns: Sequence[JaxprEqn], saved: Sequence[Var]
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """Rounds what is saved in 16 bits where it is made, for both passes to see the same value.

    XLA may leave out a rounding between two operations of a kernel, and then saves another value
    than it goes on with.
    """
    narrow = {v for v in saved if _is_narrow(v.aval)}
    out: list[JaxprEqn] = []
    new: dict[Var, Var] = {}
    for eqn in eqns:
        out.append(
            substitute(eqn, {v: w for v, w in new.items() if v in eqn.invars}) if new else eqn
        )
        for v in eqn.outvars:
            if v in narrow:
                round_ = lambda x: [
                    lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(x.dtype).nmant)
                ]
                new[v] = w = Var(v.aval)
                out += equations(round_, [v], [w])
    return out, new
