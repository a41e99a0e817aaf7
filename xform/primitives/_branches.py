"""Branches between which each pair chooses, as a choice between their results.

`lax.cond(q > k, lambda: s + table[q - k], lambda: s)` at many pairs runs both branches at each of
them, since some want the one and some the other. As a choice between two results it is the same
program, and `table[q - k]` a read like any other. As a `cond` it would hand the whole table to each
pair, and take from each a derivative of the whole table.

What no index and no score decides stays a branch, of which one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from xform._compat import Jaxpr, JaxprEqn
from xform.jaxpr import Rules, carried, eqn_rule, interpret, trace, walk
from xform.jaxpr._walk import at_line


class _Value(NamedTuple):
    """A value, and whether it depends on the pair."""

    x: Any
    moves: bool = False


def choose_results(program: Jaxpr, fixed: int, bind: Callable, keep: Rules) -> Jaxpr:
    """Returns the same program, without branches between which a pair decides.

    Args:
      program: its first `fixed` arguments are the same for all pairs.
      bind: `bind(eqn, *args)` runs an equation as it is.
      keep: has a key for each call that is to stay one.
    """
    if not _has_branches(program):
        return program
    run = _Chooser(bind, keep).run

    def chosen(*args):
        return _unpack(run(program, [_Value(x, n >= fixed) for n, x in enumerate(args)]))

    return trace(chosen, *program.in_avals)


def _has_branches(program: Jaxpr) -> bool:
    return any(site.eqn.primitive is lax.cond_p for site in walk(program))


def _unpack(values: Sequence[_Value]) -> list:
    return [v.x for v in values]


def _of_line(rule: Callable) -> Callable:
    """`rule`, whose equations are of the user's line, where they know no other."""

    def run(eqn: JaxprEqn, *args: _Value):
        with at_line(eqn):
            return rule(eqn, *args)

    return run


class _Chooser:
    """Runs a program of `_Value`s; bodies of loops, and branches that stay, are traced again."""

    def __init__(self, bind: Callable, keep: Rules):
        self.bind = bind
        own = {"cond": self._cond, "scan": self._scan, "while": self._while, "jit": self._call}
        self.rules: dict[Any, Any] = {name: eqn_rule(_of_line(rule)) for name, rule in own.items()}
        self.rules |= {key: eqn_rule(self._as_it_is) for key in keep}

    def run(self, program: Jaxpr, args: Sequence[_Value]) -> list[_Value]:
        return interpret(program, self.rules, default=self._as_it_is, lift=_Value)(*args)

    def _as_it_is(self, eqn: JaxprEqn, *args: _Value):
        out, moves = self.bind(eqn, *_unpack(args)), any(a.moves for a in args)
        several = eqn.primitive.multiple_results
        return [_Value(x, moves) for x in out] if several else _Value(out, moves)

    def _call(self, eqn: JaxprEqn, *args: _Value):
        return self.run(eqn.params["jaxpr"], args)

    def _cond(self, eqn: JaxprEqn, index: _Value, *operands: _Value):
        branches = eqn.params["branches"]
        if index.moves:
            results = [self.run(branch, operands) for branch in branches]
            return [self._choice(index.x, cases) for cases in zip(*results, strict=True)]
        if not any(map(_has_branches, branches)):
            return self._as_it_is(eqn, index, *operands)
        bodies = [self._traced(branch, operands) for branch in branches]
        return self._moving(lax.switch(index.x, bodies, *_unpack(operands)), operands)

    def _choice(self, index, cases: Sequence[_Value]) -> _Value:
        out = cases[0].x
        for n, case in enumerate(cases[1:], 1):
            out = lax.select_n(lax.ge(index, lax.full_like(index, n)), out, case.x)
        return _Value(out, True)

    def _scan(self, eqn: JaxprEqn, *args: _Value):
        p, (n, m) = eqn.params, carried(eqn)
        if not _has_branches(p["jaxpr"]):
            return self._as_it_is(eqn, *args)
        moves = [a.moves for a in args]
        consts, carry, rest = (_unpack(x) for x in (args[:n], args[n : n + m], args[n + m :]))

        def step(carry, rest):
            given = map(_Value, (*consts, *carry, *rest), moves)
            results = self.run(p["jaxpr"], list(given))
            out.append([x.moves for x in results[:m]])
            return _unpack(results[:m]), _unpack(results[m:])

        def scan(carry, rest):
            return lax.scan(
                step, carry, rest, length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
            )

        out: list[list[bool]] = []
        while True:  # until no more of the carry is found to depend on the pair
            jax.eval_shape(scan, carry, rest)
            if not any(new and not old for new, old in zip(out[-1], moves[n : n + m], strict=True)):
                break
            moves[n : n + m] = [x or y for x, y in zip(out[-1], moves[n : n + m], strict=True)]
        carry, rest = scan(carry, rest)
        return self._moving([*carry, *rest], args)

    def _while(self, eqn: JaxprEqn, *args: _Value):
        p, (n, _) = eqn.params, carried(eqn)
        test, body, c = p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"]
        if not (_has_branches(test) or _has_branches(body)):
            return self._as_it_is(eqn, *args)
        args = tuple(_Value(a.x, True) for a in args)
        test, body = self._traced(test, args), self._traced(body, args)
        consts, carry = _unpack(args[:n]), _unpack(args[n:])
        again = lambda carry: test(*consts[:c], *carry)[0]
        return self._moving(
            lax.while_loop(again, lambda carry: body(*consts[c:], *carry), carry), args
        )

    def _traced(self, program: Jaxpr, like: Sequence[_Value]) -> Callable:
        """A program as a function of arrays, which depend on the pair as those of `like` do."""
        moves = [a.moves for a in like][: len(program.invars)]
        return lambda *args: _unpack(self.run(program, list(map(_Value, args, moves))))

    def _moving(self, results: Sequence, args: Sequence[_Value]) -> list[_Value]:
        return [_Value(x, any(a.moves for a in args)) for x in results]
