"""How `lint` reads a program: what a value is, seen through what only changes its form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from xform._program import Node, Region, Value
from xform.jaxpr import carried
from xform.numerics._run import own_inputs

# The same numbers in another shape, dtype or type.
SAME = frozenset(
    {
        "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "stop_gradient",
        "convert_element_type", "pvary", "pcast", "copy", "name", "sharding_constraint", "reshard",
    }
)  # fmt: skip
# Of several numbers one: nothing is rounded.
CHOICE = frozenset({"max", "min", "select_n", "abs", "neg", "clamp"})
ROUNDS = frozenset(
    {"mul", "div", "add", "sub", "dot_general", "conv_general_dilated", "tanh", "integer_pow",
     "square", "exp", "log", "sqrt", "rsqrt", "logistic", "add_any", "erf", "pow"}
)  # fmt: skip
CONTRACTS = frozenset({"mul"})  # with a sum after it, into one rounding


def narrow(value: Value) -> bool:
    """Whether a value has fewer digits than float32."""
    dtype = getattr(value.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def path(value: Value) -> Iterator[Value]:
    """The value, and those that it is the same numbers as, back to where they were made."""
    seen = set()
    while value not in seen:
        seen.add(value)
        yield value
        if value.node is not None and value.node.name in SAME:
            value = value.node.ins[0]
        elif value.node is None and value.same_as is not None:
            value = value.same_as


def root(value: Value) -> Value:
    """Where the numbers of a value were made."""
    *_, last = path(value)
    return last


def made_by(value: Value, *names: str) -> Node | None:
    """The node that made the numbers of a value, if it is one of these."""
    node = root(value).node
    return node if node is not None and node.name in names else None


def literal(value: Value) -> float | None:
    """The number that a value is, if the program says it."""
    known = root(value).known
    if (
        known is None
        or np.size(known) != 1
        or not np.issubdtype(np.asarray(known).dtype, np.number)
    ):
        return None
    return float(np.asarray(known).reshape(()))


def behind_choices(value: Value, steps: int = 6) -> Iterator[Value]:
    """The values, seen through forms and choices, of which a value is one."""
    value = root(value)
    yield value
    node = value.node
    if node is not None and node.name in CHOICE and steps:
        for v in node.ins[1:] if node.name == "select_n" else node.ins:
            yield from behind_choices(v, steps - 1)


def behind_factors(value: Value) -> Value:
    """A value without the numbers that it is multiplied with or divided by."""
    while True:
        value = root(value)
        node = value.node
        if node is None or node.name not in ("mul", "div", "psum", "psum_invariant"):
            return value
        if node.name in ("mul", "div"):
            left = [v for v in node.ins if literal(v) is None]
            if len(left) != 1 or (node.name == "div" and left[0] is not node.ins[0]):
                return value
            value = left[0]
        else:
            value = node.ins[node.outs.index(value)]


_PICKS = frozenset({"gather", "slice", "dynamic_slice", "rev", "split"})
_FLOORS = frozenset({"add", "max", "min"})
_FLOOR = 0.01  # a larger number, added, is a part of what is meant


def behind_picks(value: Value) -> Value:
    """A value before some of its elements were picked, or kept off 0 by a small number."""
    while True:
        value = root(value)
        node = value.node
        if node is None:
            return value
        if node.name in _PICKS:
            value = node.ins[0]
        elif node.name == "clamp":
            value = node.ins[1]
        elif node.name in _FLOORS and (left := _kept_off(node)) is not None:
            value = left
        else:
            return value


def _kept_off(node: Node) -> Value | None:
    """What a small number keeps off 0; a maximum or minimum may be of any number."""
    numbers = {v: literal(v) for v in node.ins}
    left = [v for v, number in numbers.items() if number is None]
    known = [number for number in numbers.values() if number is not None]
    if len(left) != 1 or (node.name == "add" and abs(known[0]) > _FLOOR):
        return None
    return left[0]


def squared(value: Value) -> Value | None:
    """x, of a value x²."""
    node = root(value).node
    if node is None:
        return None
    if node.name == "square" or (node.name == "integer_pow" and node.eqn.params["y"] == 2):
        return node.ins[0]
    if node.name == "mul" and root(node.ins[0]) is root(node.ins[1]):
        return node.ins[0]
    return None


def carries(node: Node) -> Iterator[tuple[Value, Value]]:
    """What each carried value of a loop is inside of a turn, and what it becomes."""
    n, body = carried(node.eqn), node.regions["body"]
    inside = own_inputs(node, "body")
    first = node.eqn.params["body_nconsts"] if node.name == "while" else n.consts
    yield from zip(inside[first : first + n.carry], body.outputs[: n.carry], strict=True)


def ancestors(value: Value, steps: int = 4) -> set[Value]:
    """What a value was computed from, a few operations back."""
    value = root(value)
    found = {value}
    if value.node is not None and steps and not value.node.regions:
        for v in value.node.ins:
            if literal(v) is None:
                found |= ancestors(v, steps - 1)
    return found


def varies(value: Value) -> bool:
    """Whether a value depends on anything but the program's own constants."""
    value = root(value)
    if value.node is None:
        return value.known is None
    return bool(value.node.regions) or any(map(varies, value.node.ins))


def bounds(value: Value) -> tuple[float, float]:
    """The least and the greatest number that an integer can be, as far as the program says it."""
    known = literal(value)
    if known is not None:
        return known, known
    dtype, node = value.aval.dtype, value.node
    info = None if dtype == jnp.bool_ else np.iinfo(dtype)
    low, high = (0.0, 1.0) if info is None else (float(info.min), float(info.max))
    if node is None and value.same_as is not None:
        return bounds(value.same_as)
    rule = None if node is None else _BOUNDS.get(node.name)
    if node is None or rule is None:
        return low, high
    found = rule(node)
    return max(low, float(found[0])), min(high, float(found[1]))


def _bounds_of_form(node: Node) -> tuple[float, float]:
    integer = node.ins[0].aval.dtype == jnp.bool_ or jnp.issubdtype(
        node.ins[0].aval.dtype, jnp.integer
    )
    return bounds(node.ins[0]) if integer else (-np.inf, np.inf)


def _bounds_of_each(node: Node, start: int, low: Callable, high: Callable) -> tuple[float, float]:
    lows, highs = zip(*map(bounds, node.ins[start:]), strict=True)
    return low(lows), high(highs)


def _bounds_of_product(x: tuple[float, float], y: tuple[float, float]) -> tuple[float, float]:
    ends = [a * b for a in x for b in y]
    return min(ends), max(ends)


_BOUNDS: dict[str, Callable[[Node], tuple[float, float]]] = {
    "iota": lambda n: (0, max(0, n.outs[0].aval.shape[n.eqn.params["dimension"]] - 1)),
    "clamp": lambda n: (bounds(n.ins[0])[0], bounds(n.ins[2])[1]),
    "min": lambda n: _bounds_of_each(n, 0, min, min),
    "max": lambda n: _bounds_of_each(n, 0, max, max),
    "add": lambda n: _bounds_of_each(n, 0, sum, sum),
    "mul": lambda n: _bounds_of_product(*map(bounds, n.ins)),
    "select_n": lambda n: _bounds_of_each(n, 1, min, max),
    "rem": lambda n: (-bounds(n.ins[1])[1], bounds(n.ins[1])[1]),
    **dict.fromkeys(SAME, _bounds_of_form),
}


def nodes(region: Region) -> Iterator[Node]:
    """Every node at every depth, but for the inside of kernels."""
    for node in region.nodes:
        yield node
        if node.name in ("scan", "while", "cond", "shard_map"):
            for body in node.regions.values():
                yield from nodes(body)
