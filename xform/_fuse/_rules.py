"""What a kernel over rows can hold: a rule for each primitive, that says how its dims relate.

A rule is `rule(relations, eqn)`. It says which dims of operands and results are walked along
together, which must be whole, and what is summed; see `Relations`. A primitive without a rule is
refused. Each of them means the same on a block of rows as on all rows, but for the sizes that its
parameters name (`xform.lowering._block_ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from xform._compat import JaxprEqn
from xform._fuse._relations import Relations
from xform.lowering._region import type_of

type FuseRule = Callable[[Relations, JaxprEqn], None]

RULES: dict[str, FuseRule] = {}
"""The table, by the primitive's name."""


def fuse_rule(*names: str) -> Callable[[FuseRule], FuseRule]:
    """Registers the rule of the primitives of these names, as a decorator.

    A primitive of one's own that works element by element:

    >>> from xform import fuse_rule
    >>> @fuse_rule("my_primitive")
    ... def rule(relations, eqn):
    ...     (x,), (y,) = eqn.invars, eqn.outvars
    ...     relations.each([(i, i) for i in range(y.aval.ndim)], x, y)
    """

    def register(rule: FuseRule) -> FuseRule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@fuse_rule(
    *("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "pow"),
    *("integer_pow", "square", "one_minus_square", "sqrt", "rsqrt", "cbrt"),
    *("exp", "exp2", "expm1", "log", "log1p", "sin", "cos", "tan", "tanh", "logistic"),
    *("erf", "erfc", "floor", "ceil", "round", "is_finite", "atan2"),
    *("sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "select_n", "clamp"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"),
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "name"),
    *("bitcast_convert_type", "stop_gradient", "pcast", "pvary"),
)
def elementwise(relations: Relations, eqn: JaxprEqn) -> None:
    """Scalars go with anything; all else has one shape."""
    for out in eqn.outvars:
        for x in eqn.invars:
            relations.each(((i, i) for i in range(len(type_of(x).shape))), x, out)


@fuse_rule("optimization_barrier")
def _one_by_one(relations: Relations, eqn: JaxprEqn) -> None:
    for x, out in zip(eqn.invars, eqn.outvars, strict=True):
        relations.each(((i, i) for i in range(len(type_of(x).shape))), x, out)


@fuse_rule("broadcast_in_dim")
def _broadcast(relations: Relations, eqn: JaxprEqn) -> None:
    relations.each(enumerate(_dims(eqn, "broadcast_dimensions")), eqn.invars[0], eqn.outvars[0])


@fuse_rule("iota")
def _made_of_nothing(relations: Relations, eqn: JaxprEqn) -> None:
    del relations, eqn


@fuse_rule("squeeze")
def _squeeze(relations: Relations, eqn: JaxprEqn) -> None:
    _without(relations, eqn, _dims(eqn, "dimensions"))


@fuse_rule("transpose")
def _transpose(relations: Relations, eqn: JaxprEqn) -> None:
    pairs = ((i, j) for j, i in enumerate(_dims(eqn, "permutation")))
    relations.each(pairs, eqn.invars[0], eqn.outvars[0])


@fuse_rule("reduce_sum")
def _sum(relations: Relations, eqn: JaxprEqn) -> None:
    _without(relations, eqn, _dims(eqn, "axes"))
    relations.summed(eqn, _dims(eqn, "axes"))


@fuse_rule("reduce_max", "reduce_min", "reduce_and", "reduce_or")
def _reduction(relations: Relations, eqn: JaxprEqn) -> None:
    _without(relations, eqn, _dims(eqn, "axes"))
    relations.in_one_piece(eqn.invars[0], _dims(eqn, "axes"))


def _dims(eqn: JaxprEqn, name: str) -> tuple[int, ...]:
    """Dims that a parameter lists; batching leaves numpy's numbers there."""
    return tuple(map(int, eqn.params[name]))


def _without(relations: Relations, eqn: JaxprEqn, gone: tuple[int, ...]) -> None:
    """The result has the operand's other dims, in their order."""
    kept = (i for i in range(len(type_of(eqn.invars[0]).shape)) if i not in gone)
    relations.each(((i, j) for j, i in enumerate(kept)), eqn.invars[0], eqn.outvars[0])


@fuse_rule("slice")
def _slice(relations: Relations, eqn: JaxprEqn) -> None:
    (x,), (out,) = eqn.invars, eqn.outvars
    _cut(
        relations,
        x,
        out,
        [n == m for n, m in zip(type_of(x).shape, type_of(out).shape, strict=True)],
    )


@fuse_rule("pad")
def _pad(relations: Relations, eqn: JaxprEqn) -> None:
    untouched = [config == (0, 0, 0) for config in eqn.params["padding_config"]]
    _cut(relations, eqn.invars[0], eqn.outvars[0], untouched)


@fuse_rule("concatenate", "split")
def _parts(relations: Relations, eqn: JaxprEqn) -> None:
    cut = eqn.params["dimension"] if "dimension" in eqn.params else eqn.params["axis"]
    for x in eqn.invars:
        for out in eqn.outvars:
            _cut(relations, x, out, [i != cut for i in range(len(type_of(out).shape))])


def _cut(relations: Relations, x, out, untouched: list[bool]) -> None:
    """Dims that are not cut or joined stay what they are; the others must be whole."""
    relations.each(((i, i) for i, same in enumerate(untouched) if same), x, out)
    changed = [i for i, same in enumerate(untouched) if not same]
    relations.cut(x, changed)
    relations.cut(out, changed)


@fuse_rule("reshape")
def _reshape(relations: Relations, eqn: JaxprEqn) -> None:
    """Dims that stay are the same; what is split or merged must be whole."""
    (x,), (out,) = eqn.invars, eqn.outvars
    for old, new in _groups(type_of(x).shape, type_of(out).shape):
        if len(old) == len(new) == 1:
            relations.same(x, old[0], out, new[0])
        else:
            relations.cut(x, old)
            relations.cut(out, new)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The dims of two shapes of one size, in the smallest runs of one size each.

    >>> _groups((2, 3, 4), (6, 1, 4))
    [([0, 1], [0]), ([2], [2])]
    """
    ends = lambda shape: _products([(i, n) for i, n in enumerate(shape) if n != 1])
    left, right = ends(old), ends(new)
    meet = [0, *sorted({n for n, _ in left} & {n for n, _ in right})]
    within = lambda found, a, b: [i for n, i in found if a < n <= b]
    return [(within(left, a, b), within(right, a, b)) for a, b in pairwise(meet)]


def _products(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of each dim the product of sizes up to it."""
    found, product = [], 1
    for i, n in dims:
        product *= n
        found.append((product, i))
    return found
