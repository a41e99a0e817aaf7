"""From a program to rows that have nothing to do with each other, or to the reason why not.

Every line (dims that are walked along together) is one of *rows* or lies *within* a row. Within are
those that some operation reads across: that is reduced by a maximum, cut, joined, or summed into
something that the program goes on with. What is left are rows. A sum over rows is legal where
nothing but the end of the program depends on it: blocks of rows have sums of their own, and one
reduction finishes them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import jax.numpy as jnp

from xform._compat import Jaxpr, JaxprEqn, Literal, Var, weakref_lru_cache
from xform._fuse._core import core
from xform._fuse._error import FusionError, refusal
from xform._fuse._relations import Dim, Relations
from xform._fuse._rules import RULES
from xform._remat._jaxprs import build, has_effects, live
from xform._remat._kinds import nbytes
from xform.lowering._region import Lines, Region, Sum, type_of

_UNKNOWN = (
    "it is neither elementwise nor a cast, a broadcast, a slice within a row, or a sum or maximum "
    "along a row, nor has it a rule (`xform.fuse_rule`)"
)


@weakref_lru_cache
def region_of(jaxpr: Jaxpr) -> Region:
    """Returns the region that a program is.

    Raises:
      FusionError: it is none; with every operation that stands in the way.
    """
    program = core(jaxpr)
    if program.consts:  # made by the rules of `core`, which make none but scalars
        raise AssertionError("a core program has no constant arrays")
    found = _Lines(program)
    found.refuse_what_is_larger()
    return found.region()


class _Lines:
    """The lines of a program, and which of them are rows."""

    def __init__(self, program: Jaxpr):
        self.program = program
        self.relations = _relations(program)
        self.index: dict = {}
        self.sizes: list[int] = []
        made = [v for eqn in program.eqns for v in eqn.outvars]
        self.lines = {v: self._number(v) for v in [*program.invars, *made]}
        self.within = self._of(self.relations.whole) | self._met_twice()
        self._place_sums()

    def _number(self, v: Var) -> Lines:
        found: list[int | None] = []
        for i, n in enumerate(type_of(v).shape):
            if n == 1:
                found.append(None)
                continue
            root = self.relations.root((v, i))
            if root not in self.index:
                self.index[root] = len(self.sizes)
                self.sizes.append(n)
            found.append(self.index[root])
        return tuple(found)

    def _of(self, dims: Iterable[Dim]) -> set[int]:
        lines = (self.lines[v][i] for v, i in dims)
        return {line for line in lines if line is not None}

    def _met_twice(self) -> set[int]:
        """Lines that one value has twice, as `x[:, None] - x[None]`: all of it meets all of it."""
        counts = (Counter(lines) for lines in self.lines.values())
        return {k for found in counts for k, n in found.items() if n > 1 and k is not None}

    def _lines_of(self, atom: Var | Literal) -> Lines:
        return () if isinstance(atom, Literal) else self.lines[atom]

    def of(self, atom: Var | Literal) -> set[int]:
        """The lines of an atom that may be rows."""
        return {line for line in self._lines_of(atom) if line is not None} - self.within

    # ---- sums ------------------------------------------------------------------------------------

    def _place_sums(self) -> None:
        """Decides which sums are along a row, and which over rows, that the program ends with."""
        before = -1
        while before < len(self.within):  # each line that lies within a row may bring others there
            before = len(self.within)
            left = [pair for pair in self.relations.sums if self._over(*pair)]
            inside = [pair for pair in left if not self._ends(*pair, left)]
            for eqn, axes in inside:
                self.within |= self._over(eqn, axes)
            for eqn, axes in left if not inside else ():
                self._keep_a_row(eqn, self._over(eqn, axes))

    def _keep_a_row(self, eqn: JaxprEqn, over: set[int]) -> None:
        """Takes what a sum is over and lies side by side in memory for a row, if any is left."""
        others = self.of(eqn.invars[0]) - over
        for line in reversed(self._lines_of(eqn.invars[0])):
            if line is None:
                continue
            if line in self.within or line not in over or not others:
                break
            self.within.add(line)

    def _ends(self, eqn: JaxprEqn, axes: tuple[int, ...], sums: list) -> bool:
        """Whether what depends on a sum is the end of the program, and no row of it.

        Args:
          eqn: the sum.
          axes: which dims it is over.
          sums: those that may be the end's, of which it may depend too.
        """
        over = self._over(eqn, axes)
        others = [other for other, _ in sums]
        ending = [*others, *self.after(others)]
        fixed = {*(v for e in ending for v in e.outvars), *self.program.invars}
        after = self.after([eqn])
        reads = (v for e in after for v in e.invars)
        aside = all(isinstance(v, Literal) or v in fixed for v in reads)
        return aside and not any(over & self.of(v) for e in after for v in [*e.invars, *e.outvars])

    def after(self, eqns: Iterable[JaxprEqn]) -> list[JaxprEqn]:
        """The equations that depend on these, in their order."""
        made = {v for eqn in eqns for v in eqn.outvars}
        found = []
        for eqn in self.program.eqns:
            if not made.isdisjoint(v for v in eqn.invars if isinstance(v, Var)):
                made.update(eqn.outvars)
                found.append(eqn)
        return found

    # ---- refusals --------------------------------------------------------------------------------

    def refuse_what_is_larger(self) -> None:
        """Refuses values that are larger than all operands and results, and unrelated rows."""
        ends = _ends(self.program)
        cut = self._of(self.relations.parts)  # a part of a row is not larger than the row
        of = lambda v: Counter(k for k in self.lines[v] if k is not None and k not in cut)
        spans = [of(v) for v in ends]
        made = [(eqn, v) for eqn in self.program.eqns for v in eqn.outvars]
        large = [(e, v) for e, v in made if not any(of(v) <= span for span in spans)]
        if large:
            eqn, v = max(large, key=lambda pair: nbytes(pair[1]))
            raise refusal(self.program, [(eqn, _too_large(v))])
        if not any(Counter(self.rows) <= span for span in spans):
            shapes = ", ".join(sorted({v.aval.str_short() for v in ends}))
            raise FusionError(
                f"`fuse` can't make this one kernel: nothing has the rows of all of {shapes}, so "
                "these are programs that have nothing to do with each other. Nearest legal split: "
                "fuse each of them by itself."
            )

    # ---- the region ------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The lines that are rows, in the order of the dims of what has them all."""
        free = set(range(len(self.sizes))) - self.within
        ends = _ends(self.program)
        order = [
            line for v in sorted(ends, key=lambda v: -len(self.of(v))) for line in self.lines[v]
        ]
        return tuple(line for line in dict.fromkeys(order) if line in free)

    def region(self) -> Region:
        """The program, divided into its rows and its end."""
        program = self.program
        over = [(eqn, axes) for eqn, axes in self.relations.sums if self._over(eqn, axes)]
        later = {id(eqn) for eqn in self.after(eqn for eqn, _ in over)}
        over = [(eqn, axes) for eqn, axes in over if id(eqn) not in later]
        sums = [eqn for eqn, _ in over]
        late = {id(eqn) for eqn in [*sums, *self.after(sums)]}
        ends = {v for eqn in program.eqns if id(eqn) in late for v in eqn.outvars}
        finished = [v for v in program.outvars if v in ends]
        rest = [v for v in program.outvars if v not in ends]
        outputs = [*rest, *(eqn.invars[0] for eqn in sums)]
        body = build(
            program.invars, outputs, live([e for e in program.eqns if id(e) not in late], outputs)
        )
        totals = [eqn.outvars[0] for eqn in sums]
        tail = [e for e in program.eqns if id(e) in late and not any(e is s for s in sums)]
        finish = build([*totals, *program.invars], finished, live(tail, finished))
        count = {True: iter(range(len(finished))), False: iter(range(len(rest)))}
        order = tuple((v in ends, next(count[v in ends])) for v in program.outvars)
        return Region(
            body, self.lines, tuple(self.sizes), self.rows, tuple(Sum(axes) for _, axes in over),
            finish, order,
        )  # fmt: skip

    def _over(self, eqn: JaxprEqn, axes: tuple[int, ...]) -> set[int]:
        """The lines that a sum is over and that may be rows."""
        lines = self._lines_of(eqn.invars[0])
        return {k for i in axes if (k := lines[i]) is not None} - self.within


def _relations(program: Jaxpr) -> Relations:
    """What the rules of all equations say.

    Raises:
      FusionError: some equations can't be in a kernel.
    """
    relations = Relations()
    for eqn in program.eqns:
        if has_effects(eqn):
            relations.refuse(eqn, "it has an effect, which a kernel can't have")
        elif any(jnp.issubdtype(type_of(v).dtype, jnp.complexfloating) for v in eqn.outvars):
            relations.refuse(eqn, "kernels have no complex numbers")
        elif (rule := RULES.get(eqn.primitive.name)) is None:
            relations.refuse(eqn, _UNKNOWN)
        else:
            rule(relations, eqn)
    if relations.offences:
        raise refusal(program, [*_largest(program), *relations.offences])
    return relations


def _largest(program: Jaxpr) -> list[tuple[JaxprEqn, str]]:
    """The largest value of a program, if it is larger than all that goes in or out."""
    most = max((type_of(v).size for v in _ends(program)), default=1)
    made = [(eqn, v) for eqn in program.eqns for v in eqn.outvars if type_of(v).size > most]
    return [(e, _too_large(v)) for e, v in sorted(made, key=lambda pair: -nbytes(pair[1]))[:1]]


def _too_large(v: Var) -> str:
    return (
        f"its result, {v.aval.str_short()} of {nbytes(v):,} bytes, is larger than every operand "
        "and result of the function: each row would be read many times over, as in a matrix product"
    )


def _ends(program: Jaxpr) -> list[Var]:
    """What goes in and out."""
    return [v for v in [*program.invars, *program.outvars] if isinstance(v, Var)]
