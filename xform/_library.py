"""What XLA hands to a CPU's library, and what the library needs to find in memory.

XLA gives YNNPACK each product, sum and extremum, together with all that only these
read or make: element by element, spread out, reshaped. What is inside takes no memory that XLA
assigns. What such a kernel reads must lie in memory, in full and in the order of dimensions that it
wants, whatever else is computed from the same values: a mean that is spread out, a transposed copy
of what the forward pass leaves for the backward, a zero in each of a million places.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from jax.core import ShapedArray

from xform._cost_rules import aval
from xform._expand import Made
from xform._layouts import lay_out, reordered
from xform._program import VIEWS, Node, Region, Value, folded

LIBRARY = "library"
# What the library computes by element, in these types, where it is enough to be worth the call.
BY_ELEMENT = frozenset(
    {
        "abs", "add", "add_any", "ceil", "convert_element_type", "cos", "div", "erf", "exp",
        "expm1", "floor", "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg",
        "pow", "rsqrt", "sign", "sin", "sqrt", "square", "sub", "tan", "tanh",
    }
)  # fmt: skip
# What else meets smaller arrays.
_BESIDE = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "select_n", "clamp"})
_AS_IT_IS = VIEWS - {"optimization_barrier", "bitcast_convert_type"}
_SUMS = ("reduce_sum", "reduce_max", "reduce_min")
_TYPES = ("float32", "float64", "bfloat16")
_ENOUGH = 4096
_MOST = 100  # instructions of one kernel


def hand_over(region: Region) -> Region:
    """Puts one node in the place of what the library runs at once, at every depth."""
    for inner in region.bodies():
        hand_over(inner)
    lay_out(region)
    _widen(region)
    _spread(region)
    region.nodes[:] = _grouped(region)
    return region


# ---- what it reads -------------------------------------------------------------------------------


def _widen(region: Region) -> None:
    """Puts products of 16 bits that the library does not take into float32, operands before them.

    One that is turned is turned as it is narrowed, and copied into the order of its dimensions.
    """
    wide: dict[Value, Value] = {}
    nodes: list[Node] = []
    for node in region.nodes:
        if node.name not in _TAKEN or not _is_narrow(node.outs[0]) or _takes(node):
            nodes.append(node)
            continue
        for i, v in enumerate(node.ins):
            if v not in wide:
                nodes.append(_converted(node, v, np.float32))
                wide[v] = nodes[-1].outs[0]
            node.ins[i] = wide[v]
        (out,) = node.outs
        turned = isinstance(node, Made)
        node.outs = [Value(ShapedArray(out.aval.shape, np.dtype(np.float32)), node)]
        nodes.append(node)
        if turned:
            narrow = Value(out.aval)
            nodes.append(Made("turned copy", node, node.outs, [narrow]))
            nodes.append(Made("copy", node, [narrow], [out]))
        else:
            nodes.append(Made("convert_element_type", node, node.outs, [out]))
        for made in nodes[-2:]:
            made.outs[0].node = made
    region.nodes[:] = nodes


def _converted(at: Node, v: Value, dtype: Any) -> Node:
    out = Value(ShapedArray(v.aval.shape, np.dtype(dtype)))
    out.node = Made("convert_element_type", at, [v], [out])
    return out.node


def _is_narrow(v: Value) -> bool:
    return getattr(v.aval, "dtype", None) in ("float16", "bfloat16")


def _takes(node: Node) -> bool:
    """Whether the library takes a product as it is."""
    return _has_types(node) and _TAKEN[node.name](node)


def _spread(region: Region) -> None:
    """Makes arrays of what is spread out to meet larger arrays: one for all that read the same."""
    spread: dict[Any, Value] = {}
    nodes = []
    for node in region.nodes:
        if node.name == "broadcast_in_dim":
            spread.setdefault(_spread_key(node, 0), node.outs[0])
        if node.name == "logistic":  # 1 / (1 + exp(-x))
            one = ShapedArray((), node.outs[0].aval.dtype)
            node.ins.append(Value(one, known=np.ones((), one.dtype)))
        for i in _small(node):
            v = node.ins[i]
            key = _spread_key(node, i)
            if key not in spread:
                spread[key] = out = Value(ShapedArray(node.outs[0].aval.shape, v.aval.dtype))
                out.node = Made("broadcast_in_dim", node, [v], [out])
                nodes.append(out.node)
            node.ins[i] = spread[key]
        nodes.append(node)
    region.nodes[:] = nodes


def _small(node: Node) -> list[int]:
    """The operands that are spread out to meet the others."""
    if node.name not in BY_ELEMENT | _BESIDE:
        return []
    return [i for i, v in enumerate(node.ins) if v.size < node.outs[0].size]


def _spread_key(node: Node, i: int) -> tuple:
    """Of what, and in which places of the result's dimensions of more than one element."""
    v, shape = node.ins[i], node.outs[0].aval.shape
    wide = [d for d, n in enumerate(shape) if n > 1]
    if (number := folded(v)) is not None:  # beyond its dtype, maybe: a name is enough here
        what, at = str(number), ()
    else:
        size = aval(node.eqn.invars[i]).shape
        dims = node.eqn.params.get("broadcast_dimensions", range(len(size)))
        what, at = v, tuple(wide.index(d) for d, n in zip(dims, size, strict=True) if n > 1)
    return v.aval.dtype, what, at, tuple(shape[d] for d in wide)


def by_element(kernel: Made) -> list[Value]:
    """The operands of which a kernel of the library reads each element where it puts a result."""
    moved: set[Value] = set()
    for node in reversed(kernel.members):
        here = moved.isdisjoint(node.outs) and node.name in BY_ELEMENT | _BESIDE
        moved.update(v for v in node.ins if not here or v.size != node.outs[0].size)
    return [v for v in kernel.ins if v not in moved]


# ---- what it runs at once ------------------------------------------------------------------------


@dataclass(eq=False)
class _Group:
    """Nodes that the library runs at once, of which others read what the root makes."""

    root: Node
    members: dict[Node, None]


def _grouped(region: Region) -> list[Node]:
    """The nodes, with each group of the library as one node where its result is made."""
    readers: dict[Value, list[Node | None]] = {}
    for node in region.nodes:
        for v in dict.fromkeys(node.ins):
            readers.setdefault(v, []).append(node)
    for v in region.outputs:
        readers.setdefault(v, []).append(None)
    groups: dict[Node, _Group] = {}
    same = _uniform(region)
    for node in reversed(region.nodes):
        if node not in groups and _starts(node) and node.ins[0] not in same:
            group = _grow(node, readers, groups)
            groups.update(dict.fromkeys(group.members, group))
    members: dict[_Group, list[Node]] = {}
    for node in region.nodes:
        if node in groups:
            members.setdefault(groups[node], []).append(node)
    nodes = (_kernel(node, groups, members) for node in region.nodes)
    return [node for node in nodes if node is not None]


def _kernel(
    node: Node, groups: Mapping[Node, _Group], members: Mapping[_Group, Sequence[Node]]
) -> Node | None:
    """The node itself, or the group of which it is the root; None for what else is in groups."""
    if (group := groups.get(node)) is None:
        return node
    if node is not group.root:
        return None
    inside = {v for member in members[group] for v in member.outs}
    ins = dict.fromkeys(v for member in members[group] for v in member.ins if v not in inside)
    return Made(LIBRARY, node, list(ins), node.outs, members[group])


def _grow(
    start: Node, readers: Mapping[Value, Sequence[Node | None]], groups: Mapping[Node, _Group]
) -> _Group:
    """Adds what only the group reads, and the one reader of its result, until it is too large."""
    group = _Group(start, {start: None})
    reads = deque(start.ins)

    def take(node: Node) -> bool:
        other = groups[node].members if node in groups else {}
        size, found = _instructions(group.members), other or {node: None}
        # A kernel that is not full takes one node more, or another kernel if both have room.
        if size >= _MOST or (other and size + _instructions(other) > _MOST):
            return False
        group.members.update(found)
        reads.extend(v for member in found for v in member.ins)
        return True

    alike = start.ins[0].size if start.ins[0].size < _ENOUGH else None

    def fits(node: Node | None) -> TypeGuard[Node]:
        if node is None or node in group.members:
            return False
        if alike is not None:
            return node.outs[0].size == alike and node.name not in _SUMS and _joins(node, 0)
        return node in groups or _joins(node, _ENOUGH)

    while True:
        while reads:
            v = reads.popleft()
            if fits(v.node) and all(reader in group.members for reader in readers[v]):
                take(v.node)
        after = readers.get(group.root.outs[0], ())
        node = after[0] if len(after) == 1 else None
        if not fits(node) or not take(node):
            return group
        group.root = groups[node].root if node in groups else node


def _instructions(nodes: Iterable[Node]) -> int:
    """How many XLA counts in a group: the operands and the start of the sums as well."""
    read = {v for node in nodes for v in node.ins}
    made = {v for node in nodes for v in node.outs}
    return sum(map(_steps, nodes)) + len(read - made) + 1


def _steps(node: Node) -> int:
    """How many instructions an operation is: a power is some products."""
    if node.name == "logistic":
        return 4
    if node.name != "integer_pow":
        return 1
    power = abs(node.eqn.params["y"])
    return max(1, power.bit_length() + power.bit_count() - 2)


def _uniform(region: Region) -> set[Value]:
    """What holds one number everywhere: its sum is a product."""
    same: set[Value] = set()
    for node in region.nodes:
        spreads = node.name == "broadcast_in_dim" or node.name in BY_ELEMENT
        if spreads and all(v.size == 1 or v in same for v in node.ins):
            same.update(node.outs)
    return same


def _starts(node: Node) -> bool:
    """Whether the library takes a node, and with it what is around it."""
    return node.name in _SUMS and _has_types(node)


def _joins(node: Node, least: int) -> bool:
    """Whether the library takes a node together with a sum."""
    if node.name in _TAKEN:
        return _takes(node)
    if node.name in _WINDOWS:
        return _takes_window(node) and _has_types(node)
    if node.name in _SUMS:
        return _is_enough(node, least) and _has_types(node)
    return _is_by_element(node) and (node.name not in BY_ELEMENT or _is_enough(node, least))


def _is_by_element(node: Node) -> bool:
    known = node.name in BY_ELEMENT or node.name in _AS_IT_IS or node.name == "broadcast_in_dim"
    return known and _has_types(node)


def _is_enough(node: Node, least: int) -> bool:
    return max(v.size for v in (*node.ins, *node.outs)) >= least


def _has_types(node: Node) -> bool:
    values: Iterable[Value] = (*node.ins, *node.outs)
    return all(getattr(v.aval, "dtype", None) in _TYPES for v in values)


def _takes_product(node: Node) -> bool:
    """Whether it is a product of matrices that are not tiny, the first as it is multiplied."""
    first = int(isinstance(node, Made))  # where operands have changed places, it is the second
    contract, batch = (dims[first] for dims in node.eqn.params["dimension_numbers"])
    x, y = (aval(node.eqn.invars[i]).shape for i in (first, 1 - first))
    k = math.prod(x[d] for d in contract)
    same = math.prod(x[d] for d in batch)
    m, n = (math.prod(shape) // max(1, k * same) for shape in (x, y))
    in_order = sorted(contract) == list(range(len(x) - len(contract), len(x)))
    return (in_order or first in reordered(node)) and max(m, k, n) >= 8


def _takes_convolution(node: Node) -> bool:
    """Whether it is a plain one of images, with more than a few features."""
    params, numbers = node.eqn.params, node.eqn.params["dimension_numbers"]
    image, out = aval(node.eqn.invars[0]).shape, node.outs[0].aval.shape
    features = image[numbers.lhs_spec[1]], out[numbers.out_spec[1]]
    plain = params["batch_group_count"] == 1 and set(params["lhs_dilation"]) == {1}
    return plain and len(image) == 4 and max(features) > 16


def _takes_window(node: Node) -> bool:
    """Whether each element is in one window."""
    params = node.eqn.params
    return params["window_dimensions"] == params["window_strides"]


_TAKEN = {"dot_general": _takes_product, "conv_general_dilated": _takes_convolution}
_WINDOWS = ("reduce_window_max", "reduce_window_min", "reduce_window_sum")
