"""`lint`: patterns that lose digits, or that a compiler's rewrite breaks, each with its cure.

A rule reads one node and what made its operands, and returns what is wrong there. The rules stand
in a table, by the primitive that they look at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from xform._lowered import as_written
from xform._program import Node, Value, program
from xform.jaxpr._trace import trace
from xform.numerics._patterns import (
    CONTRACTS,
    ROUNDS,
    ancestors,
    behind_choices,
    behind_factors,
    behind_picks,
    bounds,
    carries,
    made_by,
    narrow,
    nodes,
    path,
    root,
    squared,
    varies,
)

# Of fewer terms, a sum in 16 bits is as good as its terms.
_MANY = 32


@dataclass(frozen=True)
class Finding:
    """One place where digits are lost.

    Attributes:
      rule: its name, `"split rounding"`.
      line: the user's line.
      problem: what goes wrong there.
      cure: the one call that mends it.
      sure: whether it goes wrong for ordinary numbers; if not, for some devices or some numbers.
    """

    rule: str
    line: str
    problem: str
    cure: str
    sure: bool = True

    def __str__(self):
        return f"{self.line}: {self.rule}: {self.problem}.\n    cure: {self.cure}"


@dataclass(frozen=True)
class Lint:
    """What `lint` found; false if that is nothing.

    Attributes:
      findings: in program order, one for each rule and line.
    """

    findings: tuple[Finding, ...]

    def __bool__(self):
        return bool(self.findings)

    def __str__(self):
        return "\n".join(map(str, self.findings)) or "no hazard found"


def lint(f: Callable) -> Callable[..., Lint]:
    """Returns a function that looks for what loses digits in `f`, and runs nothing.

    Looked for are: a rounded value that feeds `exp(x - max x)` by two routes ("split rounding"),
    the error of a rounded sum ("lost remainder"), E[x²] - E[x]² ("cancelled variance"), sums in 16
    bits ("narrow sum"), log of a softmax ("log of softmax"), integers too large for half precision
    ("integer overflow"), and a mask after the operation that it guards ("masked too late").

    Args:
      f: a function of pytrees of arrays.

    Returns:
      A function of the arguments of `f`, which may be `jax.ShapeDtypeStruct`s, that returns `Lint`.

    >>> import jax, jax.numpy as jnp
    >>> weights = lambda x, scale: jax.nn.softmax((x * scale).astype("float32"))
    >>> report = lint(weights)(jnp.ones((4, 8), "bfloat16"), jnp.bfloat16(0.1))
    >>> [finding.rule for finding in report.findings]
    ['split rounding']
    """

    @functools.wraps(f)
    def look(*args, **kwargs) -> Lint:
        region = program(trace(f, *args, **kwargs), lower=as_written)
        found: dict[tuple[str, str], Finding] = {}
        for node in nodes(region):
            for rule in _RULES.get(node.name, ()):
                for finding in rule(node):
                    found.setdefault((finding.rule, finding.line), finding)
        return Lint(tuple(found.values()))

    return look


# ---- rounded values that are read by two routes --------------------------------------------------


def _split_rounding(node: Node) -> Iterator[Finding]:
    """`exp(x - max x)`, where each x may be rounded in its own way."""
    difference = made_by(node.ins[0], "sub")
    if difference is None:
        return
    x, top = difference.ins
    source = root(x)
    maxima = [m for v in behind_choices(top) if (m := made_by(v, "reduce_max", "pmax", "cummax"))]
    maxima = [made_by(m.ins[0], "reduce_max") or m for m in maxima]
    if not any(root(m.ins[0]) is source for m in maxima):
        return
    made = [(v, v.node.name) for v in behind_choices(source) if v.node is not None]
    rounds = [v for v, name in made if name in ROUNDS]
    cast = [v for v in (*path(x), *path(maxima[0].ins[0])) if _narrows(v)]
    contracted = [v for v, name in made if name in CONTRACTS]
    if found := [*filter(narrow, rounds), *cast]:
        yield Finding(
            "split rounding", node.line,
            f"{_name(found[0])} is rounded to {found[0].aval.dtype} for the maximum, and may keep "
            "its digits on the way to the exponential: `x - max(x)` is then no longer at most 0, "
            "and the result off by tens of per cent, or NaN",
            _single(found[0]),
        )  # fmt: skip
    elif contracted:
        yield Finding(
            "split rounding", node.line,
            f"{_name(contracted[0])} may be contracted with the subtraction into one rounding, and "
            "then differs from what the maximum was taken of: wrong where it is beyond a million "
            "or so",
            _single(contracted[0]), sure=False,
        )  # fmt: skip


def _lost_remainder(node: Node) -> Iterator[Finding]:
    """`(x + y) - x`, of a rounded sum."""
    total, x = node.ins
    added = made_by(total, "add", "sub")
    if added is None or root(x) not in [root(v) for v in added.ins]:
        return
    if narrow(added.outs[0]):
        yield Finding(
            "lost remainder", node.line,
            f"the rounding error of a sum in {added.outs[0].aval.dtype}, which may be computed of "
            "the unrounded sum: it is then always 0",
            _single(added.outs[0]),
        )  # fmt: skip


def _narrows(value: Value) -> bool:
    """Whether a value is the cast of a wider float to a narrow one."""
    node = value.node
    if node is None or node.name != "convert_element_type" or not narrow(value):
        return False
    return _is_float(node.ins[0]) and not narrow(node.ins[0])


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.floating)


def _name(value: Value) -> str:
    node = value.node
    return "an argument" if node is None else f"the result of `{node.name}` (at {node.line})"


def _single(value: Value) -> str:
    return f"`xf.numerics.single(…)` around {_name(value)}"


# ---- cancellation --------------------------------------------------------------------------------


def _cancelled_variance(node: Node) -> Iterator[Finding]:
    for mean_of_squares, square_of_mean in _differences(node):
        yield from _variance_of(node, mean_of_squares, square_of_mean)


def _differences(node: Node) -> Iterator[tuple[Value, Value]]:
    """What is subtracted from what: by `x - y`, by `x + -y` or by `-y + x`."""
    if node.name == "sub":
        yield node.ins[0], node.ins[1]
        return
    for x, y in (node.ins, node.ins[::-1]):
        if negated := made_by(y, "neg"):
            yield x, negated.ins[0]


def _variance_of(node: Node, mean_of_squares: Value, square_of_mean: Value) -> Iterator[Finding]:
    mean = squared(behind_factors(square_of_mean))
    if mean is None:
        return
    of_squares, of_x = (made_by(behind_factors(v), "reduce_sum") for v in (mean_of_squares, mean))
    if of_squares is None or of_x is None:
        return
    x = squared(of_squares.ins[0])
    if x is not None and root(x) is root(of_x.ins[0]):
        yield Finding(
            "cancelled variance", node.line,
            "E[x²] - E[x]² loses all digits where the mean is large beside the deviation, and may "
            "be negative",
            "`jnp.var(x)`, which subtracts the mean first",
        )  # fmt: skip


def _log_of_softmax(node: Node) -> Iterator[Finding]:
    quotient = made_by(behind_picks(node.ins[0]), "div")
    if quotient is None:
        return
    above, below = map(root, quotient.ins)
    total = made_by(behind_factors(below), "reduce_sum")
    if total is None or above.node is None or above.node.name not in ("exp", "exp2"):
        return
    if root(total.ins[0]) is above:
        yield Finding(
            "log of softmax", node.line,
            "a probability too small for its dtype is 0, and its logarithm -inf",
            "`jax.nn.log_softmax(x)`",
        )  # fmt: skip


# ---- narrow sums ---------------------------------------------------------------------------------


def _narrow_sum(node: Node) -> Iterator[Finding]:
    value = node.ins[0]
    if not narrow(value) or _terms(node) < _MANY:
        return
    yield _narrow(node, value, f"a sum of {_terms(node):,} terms in {value.aval.dtype}")


def _terms(node: Node) -> int:
    (x, *_), params = node.ins, node.eqn.params
    if "axes" in params:
        return x.size // max(1, node.outs[0].size)
    if "axis" in params:
        return x.aval.shape[params["axis"]]
    if "window_dimensions" in params:
        return int(jnp.prod(jnp.array(params["window_dimensions"])))
    return _MANY


def _narrow_scatter(node: Node) -> Iterator[Finding]:
    table, _, updates = node.ins
    if narrow(table) and updates.size >= _MANY:
        words = f"up to {updates.size:,} updates may add up in one entry in {table.aval.dtype}"
        yield _narrow(node, table, words, sure=False)


def _narrow_carry(node: Node) -> Iterator[Finding]:
    """A loop that adds to what it carries; how often a `while` does is not known."""
    turns = node.eqn.params.get("length")
    if turns is not None and turns < _MANY:
        return
    times = "any number of turns" if turns is None else f"{turns:,} turns"
    for before, after in carries(node):
        added = made_by(after, "add", "add_any")
        if narrow(before) and added is not None and before in map(root, added.ins):
            words = f"{times} add to a carried {before.aval.dtype}"
            yield _narrow(added, before, words, sure=turns is not None)


def _narrow(node: Node, value: Value, words: str, *, sure: bool = True) -> Finding:
    bits = jnp.finfo(value.aval.dtype).nmant + 1
    return Finding(
        "narrow sum", node.line,
        f"{words}: terms smaller than {2.0**-bits:g} of the sum are lost",
        "`x.astype(jnp.float32)` before it, and cast the result back", sure,
    )  # fmt: skip


def _narrow_collective(node: Node) -> Iterator[Finding]:
    for value in node.ins:
        if narrow(value):
            yield Finding(
                "narrow sum", node.line,
                f"`{node.name}` adds up {value.aval.dtype}, rounded once for each device and in an "
                "order that depends on their number",
                f"`{node.name}(x.astype(jnp.float32), …)`, and cast the result back; of a whole "
                "program, `xf.precision` with `reduce=float32`",
            )  # fmt: skip


# ---- range, and masks ----------------------------------------------------------------------------


def _integer_overflow(node: Node) -> Iterator[Finding]:
    dtype = node.outs[0].aval.dtype
    integers = (v for v in path(node.ins[0]) if jnp.issubdtype(v.aval.dtype, jnp.integer))
    x = next(integers, None)
    if dtype != jnp.float16 or x is None:
        return
    top = float(jnp.finfo(dtype).max)
    low, high = bounds(x)
    if max(-low, high) > top:
        yield Finding(
            "integer overflow", node.line,
            f"{x.aval.dtype} becomes float16, whose largest number is {top:g}: more is inf",
            "`x.astype(jnp.float32)` (or bfloat16, which has the range but not the digits)",
        )  # fmt: skip


_GUARDED = {
    "sqrt": 0, "rsqrt": 0, "log": 0, "log1p": 0, "div": 1, "pow": 0, "acos": 0, "asin": 0,
    "acosh": 0, "atanh": 0, "exp": 0, "expm1": 0, "exp2": 0, "sinh": 0, "cosh": 0, "cbrt": 0,
}  # fmt: skip
_GUARDS = frozenset({"select_n", "max", "min", "clamp"})


def _masked_too_late(node: Node) -> Iterator[Finding]:
    test = ancestors(node.ins[0])
    for case in node.ins[1:]:
        guarded = made_by(case, *_GUARDED)
        if guarded is None:
            continue
        x = root(guarded.ins[_GUARDED[guarded.name]])
        if not varies(x) or (x.node is not None and x.node.name in _GUARDS):
            continue
        if x in test:
            name = guarded.name
            yield Finding(
                "masked too late", node.line,
                f"`where` hides what `{name}` makes of some elements, but its derivative there is "
                "infinite, and 0 × inf is NaN",
                f"mask before the `{name}`: `where(ok, {name}(where(ok, x, 1)), …)`",
            )  # fmt: skip


_RULES: dict[str, tuple[Callable[[Node], Iterator[Finding]], ...]] = {
    "exp": (_split_rounding,),
    "exp2": (_split_rounding,),
    "sub": (_cancelled_variance, _lost_remainder),
    "add": (_cancelled_variance,),
    "log": (_log_of_softmax,),
    "reduce_sum": (_narrow_sum,),
    "reduce_prod": (_narrow_sum,),
    "cumsum": (_narrow_sum,),
    "reduce_window_sum": (_narrow_sum,),
    "scatter-add": (_narrow_scatter,),
    "scan": (_narrow_carry,),
    "while": (_narrow_carry,),
    "psum": (_narrow_collective,),
    "psum_invariant": (_narrow_collective,),
    "reduce_scatter": (_narrow_collective,),
    "convert_element_type": (_integer_overflow,),
    "select_n": (_masked_too_late,),
}
