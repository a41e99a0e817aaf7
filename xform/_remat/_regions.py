"""Where a program is divided into regions that are planned each on its own.

* The body of a loop and each branch of a cond: cut once, however often it runs.
* Layers in a row: where few bytes pass from what is above to what is below, a *neck*. Equal regions
  share one plan.
* Runs of loops and layers may be regions again (`levels`): their insides are then computed twice
  more, for residuals of the square root of their length.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
from jax import lax

from xform._compat import (
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    inside_shard_map,
    new_jaxpr_eqn,
    weakref_lru_cache,
)
from xform._remat._cut import Settings
from xform._remat._jaxprs import Atom, build, flatten, identity, retrace, substitute
from xform._remat._kinds import kind_of, nbytes
from xform._remat._plans import Inner
from xform._remat._primitive import Plan, evaluate, region, region_p
from xform._remat._row import before_readers, picks
from xform.jaxpr import intern
from xform.jaxpr._walk import at_line

# A row of fewer layers is planned as a whole.
ROW = 4
# What so many regions of a row read lies there for all of them.
_COMMON = 3


@dataclass(frozen=True)
class Choice:
    """What is tried on all regions of a program.

    Attributes:
      price: of bytes, as in `Cut`.
      early: how many of a row of layers, the first, have the price `early_price`.
      levels: how often regions are put together: 1 for never.
    """

    price: float
    early: int = 0
    early_price: float = 0.0
    levels: int = 1


@dataclass(frozen=True)
class Divide:
    """Divides programs, given what regions may do and the choice."""

    base: Settings
    choice: Choice

    def whole(self, jaxpr: Jaxpr, free: Sequence[bool]) -> tuple[Jaxpr, bool]:
        """A program with its inner programs divided, and whether it is a row of layers."""
        jaxpr = self.inner(jaxpr, free, self.choice.levels)
        known = {v for v, f in zip(jaxpr.invars, free, strict=True) if f}
        found = layers(jaxpr, tuple(free))
        if len(found) < ROW:
            return jaxpr, False
        return self._row(jaxpr, found, known), True

    def inner(self, jaxpr: Jaxpr, free: Sequence[bool], levels: int = 1) -> Jaxpr:
        """A program with the bodies of its loops, branches and meshes as regions."""
        known = {v for v, f in zip(jaxpr.invars, free, strict=True) if f}
        if not any(eqn.primitive.name in _BODIES for eqn in jaxpr.eqns):
            return jaxpr
        eqns = []
        for eqn in jaxpr.eqns:
            if (rule := _BODIES.get(eqn.primitive.name)) and not any(map(is_reference, eqn.invars)):
                eqns += rule(self, eqn, known, levels)
            else:
                eqns.append(eqn)
        return build(jaxpr.invars, jaxpr.outvars, eqns)

    def settings(self, free: Sequence[bool]) -> Settings:
        return replace(self.base, free=tuple(free), outputs_stay=False, loops=True)

    def body(self, jaxpr: Jaxpr, free: Sequence[bool], *, barrier: bool) -> Jaxpr:
        """A body as one region."""
        flat, consts = flatten(jaxpr)
        free = [*[True] * len(consts), *free]
        flat = self.inner(flat, free)
        plan = Inner(self.choice.price, self.settings(free), barrier)
        return enclosed(flat, plan).with_consts(consts) if consts else enclosed(flat, plan)

    # ---- rows of layers --------------------------------------------------------------------------

    def _row(self, jaxpr: Jaxpr, found: Sequence[Layer], known: set[Var]) -> Jaxpr:
        reads = Counter(v for layer in found for v in layer.own.invars)
        picked = picks(jaxpr.eqns, known)
        common = known | {v for v, n in reads.items() if n >= _COMMON}
        common |= {v for eqn in picked for v in eqn.outvars}
        eqns = []
        for i, layer in enumerate(found):
            choice = self.choice
            price = choice.early_price if i < choice.early else choice.price
            eqns.append(layer.region(self._layer_plan(layer, price, common)))
        for _ in range(self.choice.levels - 1):
            eqns = self._together(eqns, jaxpr.outvars, common)
        eqns = before_readers(picked, eqns)
        return build(jaxpr.invars, jaxpr.outvars, eqns)

    def _together(
        self, eqns: Sequence[JaxprEqn], outputs: Sequence[Atom], common: set[Var]
    ) -> list[JaxprEqn]:
        """Some regions at a time as one, which saves nothing but what it reads."""
        size = max(2, round(len(eqns) ** (1 / self.choice.levels)))
        parts = [slice(start, start + size) for start in range(0, len(eqns), size)]
        found = alike(pieces(build([], outputs, eqns), parts))
        return [layer.region(self._layer_plan(layer, 0.0, common)) for layer in found]

    def _layer_plan(self, layer: Layer, price: float, common: set[Var]) -> Inner:
        free = [isinstance(v, Literal) or v in common for v in layer.inputs]
        return Inner(price, replace(self.settings(free), outputs_stay=True, hands_on=True))

    # ---- loops, branches, meshes -----------------------------------------------------------------

    def _scan(self, eqn: JaxprEqn, known: set[Var], levels: int) -> Iterator[JaxprEqn]:
        del known
        consts, carry = scanned(eqn)
        length, xs = eqn.params["length"], len(eqn.invars) - consts - carry
        free = [*[True] * consts, *[False] * carry, *[True] * xs]
        body = self.body(eqn.params["jaxpr"], free, barrier=length == 1)
        if levels == 1 or length < 2 * levels:
            yield eqn.replace(params={**eqn.params, "jaxpr": body})
            return

        def run(*args):
            return self._nested(eqn, body, args[:consts], args[consts : consts + carry],
                                args[consts + carry :], length, levels)  # fmt: skip

        with at_line(eqn):
            program, values = flatten(retrace(run, [v.aval for v in eqn.invars]))
        assert not values
        names: dict = dict(zip(program.invars, eqn.invars, strict=True))
        names.update(zip(program.outvars, eqn.outvars, strict=True))
        yield from (substitute(e, names) for e in program.eqns)

    def _nested(self, eqn, body: Jaxpr, consts, carry, xs, length: int, levels: int) -> list:
        """A scan as a scan over runs of itself, each a region."""
        n, reverse = len(carry), eqn.params["reverse"]

        def plain(carry, xs, length):
            step = lambda c, x: _split(evaluate(body, *consts, *c, *x), n)
            unroll = eqn.params["unroll"]
            return lax.scan(step, carry, xs, length, reverse=reverse, unroll=unroll)

        if levels == 1 or length < 2 * levels:
            return _joined(plain(list(carry), list(xs), length))
        size = _divisor(length, length ** ((levels - 1) / levels))
        count, rest = divmod(length, size)
        cut = rest if reverse else length - rest
        main = [x[cut:] if reverse else x[:cut] for x in xs] if rest else list(xs)
        main = [x.reshape(count, size, *x.shape[1:]) for x in main]
        small = lambda *args: self._nested(
            eqn, body, args[: len(consts)], args[len(consts) : len(consts) + n],
            args[len(consts) + n :], size, levels - 1,
        )  # fmt: skip
        free = [*[True] * len(consts), *[False] * n, *[True] * len(xs)]

        def outer(c, x):
            args = [*consts, *c, *x]
            program, values = flatten(retrace(small, [jax.typeof(a) for a in args]))
            settings = self.settings([*[True] * len(values), *free])
            return _split(region(program, Inner(0.0, settings, False), [*values, *args]), n)

        carry, ys = lax.scan(outer, list(carry), main, count, reverse=reverse)
        ys = [y.reshape(count * size, *y.shape[2:]) for y in ys]
        if rest:
            part = [x[:cut] if reverse else x[cut:] for x in xs]
            carry, more = plain(carry, part, rest)
            pairs = [(b, a) if reverse else (a, b) for a, b in zip(ys, more, strict=True)]
            ys = [lax.concatenate(pair, 0) for pair in pairs]
        return [*carry, *ys]

    def _cond(self, eqn: JaxprEqn, known: set[Var], levels: int) -> Iterator[JaxprEqn]:
        del known, levels
        free = [False] * (len(eqn.invars) - 1)
        branches = eqn.params["branches"]
        bodies = type(branches)(self.body(b, free, barrier=False) for b in branches)
        yield eqn.replace(params={**eqn.params, "branches": bodies})

    def _shard_map(self, eqn: JaxprEqn, known: set[Var], levels: int) -> Iterator[JaxprEqn]:
        del levels
        flat, consts = flatten(eqn.params["jaxpr"])
        assert not consts
        free = [isinstance(v, Literal) or v in known for v in eqn.invars]
        with inside_shard_map(eqn):
            flat, is_row = self.whole(flat, free)
            settings = None if is_row else replace(self.settings(free), loops=False)
            body = enclosed(flat, Inner(self.choice.price, settings, free=tuple(free)))
        yield eqn.replace(params={**eqn.params, "jaxpr": body})


_BODIES = {"scan": Divide._scan, "cond": Divide._cond, "shard_map": Divide._shard_map}


def is_reference(v: Atom) -> bool:
    """Whether a value is a mutable array, which can't be read again."""
    return hasattr(v.aval, "inner_aval")


def scanned(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of consts and of carried values of a scan, known by the ranks in its body."""
    body = eqn.params["jaxpr"]
    rank = lambda v: len(getattr(v.aval, "shape", ()))
    whole = sum(rank(a) == rank(b) for a, b in zip(eqn.invars, body.invars, strict=True))
    carry = sum(rank(a) == rank(b) for a, b in zip(eqn.outvars, body.outvars, strict=True))
    return whole - carry, carry


def _split(values: Sequence, n: int) -> tuple[list, list]:
    return list(values[:n]), list(values[n:])


def _joined(pair: tuple) -> list:
    return [*pair[0], *pair[1]]


def _divisor(n: int, near: float) -> int:
    """The divisor of n nearest to a number, or that number where none is within a factor of 2."""
    distance = lambda d: abs(math.log(d / near))
    best = min((d for d in range(1, n + 1) if n % d == 0), key=distance)
    return best if distance(best) < math.log(2) else max(1, round(near))


# ---- regions as equations ------------------------------------------------------------------------


def enclosed(jaxpr: Jaxpr, plan: Plan) -> Jaxpr:
    """A program whose one equation is a region: what it merely hands on goes around it."""
    inputs = [Var(v.aval) for v in jaxpr.invars]
    outer: dict = dict(zip(jaxpr.invars, inputs, strict=True))
    made = [
        v for v in dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, Var)) if v not in outer
    ]
    if not made:
        return build(inputs, [outer.get(v, v) for v in jaxpr.outvars], [])
    eqn = as_region(
        build(jaxpr.invars, made, jaxpr.eqns), plan, inputs, [Var(v.aval) for v in made]
    )
    outer |= dict(zip(made, eqn.outvars, strict=True))
    outs = [outer.get(v, v) if isinstance(v, Var) else v for v in jaxpr.outvars]
    return build(inputs, outs, [eqn])


def as_region(
    jaxpr: Jaxpr,
    plan: Plan,
    inputs: Sequence[Atom] = (),
    outputs: Sequence[Var] = (),
    *,
    program: Jaxpr | None = None,
) -> JaxprEqn:
    """A program as an equation: between its own variables, if not between others.

    Equal ones become one, which is planned once, if no other `program` is to stand for it.
    """
    inputs, outs = inputs or jaxpr.invars, outputs or jaxpr.outvars
    source = jaxpr.eqns[0].source_info if jaxpr.eqns else None
    params = dict(call_jaxpr=program or intern(jaxpr), plan=plan)
    return new_jaxpr_eqn(list(inputs), list(outs), region_p, params, jaxpr.effects, source)


def pieces(jaxpr: Jaxpr, parts: Sequence[slice]) -> list[Jaxpr]:
    """Equations in a row, each part as a program of what it reads from the others."""
    read_by: dict[Var, int] = {}
    for i, part in enumerate(parts):
        for eqn in jaxpr.eqns[part]:
            read_by.update((v, i) for v in eqn.invars if isinstance(v, Var))
    read_by.update((v, len(parts)) for v in jaxpr.outvars if isinstance(v, Var))
    found = []
    for i, part in enumerate(parts):
        eqns = jaxpr.eqns[part]
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)
        reads = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
        outputs = [v for v in made if read_by.get(v, i) > i]
        found.append(build([v for v in reads if v not in made], outputs, eqns))
    return found


# ---- necks ---------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One of a row: between the row's own variables, and as the program of all that equal it.

    Attributes:
      own: its equations, as they stand in the row.
      program: that of all layers which differ from it in names, lines and numbers alone.
      inputs: what this one gives to the program: what it reads, and its numbers.
    """

    own: Jaxpr
    program: Jaxpr
    inputs: Sequence[Atom]

    def region(self, plan: Plan) -> JaxprEqn:
        return as_region(self.own, plan, self.inputs, program=self.program)


@weakref_lru_cache
def layers(jaxpr: Jaxpr, free: tuple[bool, ...]) -> list[Layer]:
    """The layers of a program; what they read of its free inputs is picked out before."""
    there = [v for v, is_free in zip(jaxpr.invars, free, strict=True) if is_free]
    apart = {id(eqn) for eqn in picks(jaxpr.eqns, there)}
    rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in apart]
    between = build(jaxpr.invars, jaxpr.outvars, rest)
    return alike(pieces(between, row(between)))


def alike(found: Sequence[Jaxpr]) -> list[Layer]:
    """Pieces of a program as layers; the numbers in which some differ become operands."""
    programs = list(map(intern, found))
    same: dict[Jaxpr, set[Jaxpr]] = {}
    for program in dict.fromkeys(programs):
        same.setdefault(intern(_opened(program)), set()).add(program)
    apart: dict[Jaxpr, list[int]] = {}
    for group in same.values():
        rows = zip(*(_numbers(program) for program in group), strict=True)
        differ = [i for i, row in enumerate(rows) if len(set(map(identity, row))) > 1]
        apart.update((program, differ) for program in group)
    layers = []
    for own, program in zip(found, programs, strict=True):
        which = apart[program]
        numbers = _numbers(own)
        general = intern(_opened(own, which)) if which else program
        layers.append(Layer(own, general, [*own.invars, *(numbers[i] for i in which)]))
    return layers


def _numbers(jaxpr: Jaxpr) -> list[Literal]:
    """The numbers that its equations read, in their order."""
    return [v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Literal)]


def _opened(jaxpr: Jaxpr, which: Collection[int] | None = None) -> Jaxpr:
    """A program with these of its numbers, or all, as operands after the others."""
    count = itertools.count()
    more: list[Var] = []

    def read(v: Atom) -> Atom:
        if not isinstance(v, Literal) or (which is not None and next(count) not in which):
            return v
        more.append(Var(v.aval))
        return more[-1]

    eqns = [eqn.replace(invars=list(map(read, eqn.invars))) for eqn in jaxpr.eqns]
    return build([*jaxpr.invars, *more], jaxpr.outvars, eqns)


def row(jaxpr: Jaxpr) -> list[slice]:
    """Divides a program at its necks: between two products, where least bytes pass.

    Of the places between neighbouring products the narrowest is a neck if those before and after
    are not narrower.
    """
    passing = _passing(jaxpr)
    heavy = [i for i, eqn in enumerate(jaxpr.eqns) if kind_of(eqn) in ("products", "kernels")]
    # Between two products: the narrowest place, the last of several.
    places = [
        min(range(a + 1, b + 1), key=lambda i: (passing[i], -i))
        for a, b in itertools.pairwise(heavy)
    ]
    width = [passing[i] for i in places]
    necks = [
        place
        for k, place in enumerate(places)
        if width[k] <= min([*width[max(0, k - 1) : k], *width[k + 1 : k + 2]], default=width[k])
    ]
    edges = [0, *dict.fromkeys(necks), len(jaxpr.eqns)]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _passing(jaxpr: Jaxpr) -> list[int]:
    """Before each equation, the bytes made before it and read from it on."""
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((v, i) for v in eqn.invars if isinstance(v, Var))
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, Var))
    change = [0] * (len(jaxpr.eqns) + 2)
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            if v in last:
                change[i + 1] += nbytes(v)
                change[last[v] + 1] -= nbytes(v)
    return list(itertools.accumulate(change))
