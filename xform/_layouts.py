"""In which order of dimensions arrays lie, and which a product needs in another.

A CPU's convolution reads an image with its features last and makes one, whatever order its
dimensions are named in. What is computed of it element by element, or over windows, lies as it
does, and a transpose that only names the dimensions in that order moves nothing. All else lies in
the order of its dimensions: products of matrices, what loops and branches read, results. (XLA's
layout assignment.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from xform._cost_rules import aval
from xform._expand import Made
from xform._program import VIEWS, Node, Region, Value

type Order = tuple[int, ...]
"""Dimensions from the outermost in memory to the innermost, counted among those of more than one
element: of the others compilers make what they like."""

_PRODUCTS = ("dot_general", "conv_general_dilated")


def lay_out(region: Region) -> Region:
    """Makes copies of what a CPU reads in another order than it lies in; not in bodies."""
    lies: dict[Value, Order] = {}
    copies: dict[tuple[Value, Order], Value] = {}
    nodes: list[Node] = []
    follow = _Follow(region)

    def copied(at: Node, v: Value, order: Order) -> Value:
        if (v, order) not in copies:
            copies[v, order] = out = Value(v.aval)
            out.node = Made("copy", at, [v], [out])
            nodes.append(out.node)
        return copies[v, order]

    for node in region.nodes:
        if node.name == "transpose":
            nodes.append(follow.turn(node, lies))
            continue
        for i, order in _wanted(node, lies).items():
            node.ins[i] = copied(node, node.ins[i], order)
        nodes.append(node)
        lies.update(_laid(node, lies))
    for i, v in enumerate(region.outputs):
        if v in lies and v.node is not None:
            region.outputs[i] = copied(v.node, v, _plain(v))
    region.nodes[:] = nodes
    return region


def _plain(v: Value) -> Order:
    return tuple(range(sum(n > 1 for n in v.aval.shape)))


def _ranks(shape: Sequence[int], dims: Iterable[int]) -> Order:
    """Dimensions of a shape as an order."""
    wide = [d for d, n in enumerate(shape) if n > 1]
    return tuple(wide.index(d) for d in dims if shape[d] > 1)


class _Follow:
    """Which transposes of a region move nothing."""

    def __init__(self, region: Region):
        self.alone = {v for node in region.nodes if node.name != "dot_general" for v in node.ins}
        self.alone.update(region.outputs)
        self.readers: dict[Value, list[Node]] = {}
        convolves = any(node.name == "conv_general_dilated" for node in region.nodes)
        for node in region.nodes if convolves else ():
            for v in node.ins:
                self.readers.setdefault(v, []).append(node)

    def turn(self, node: Node, lies: dict[Value, Order]) -> Node:
        """A transpose, or in its place a copy, or a view where it only names dimensions anew."""
        (v,), (out,) = node.ins, node.outs
        before = aval(node.eqn.invars[0]).shape
        turned = _ranks(before, node.eqn.params["permutation"])
        order = tuple(turned.index(d) for d in lies.get(v, _plain(v)))
        if (v in lies and order == _plain(out)) or self._convolves(out, order):
            if order != _plain(out):
                lies[out] = order
            out.node = Made("layout_constraint", node, node.ins, node.outs)
            return out.node
        folded = out not in self.alone or (v.node is not None and v.node.name == "dot_general")
        if turned != _plain(out) and not (folded and len(turned) == 2):
            out.node = Made("copy", node, node.ins, node.outs)
            return out.node
        return node

    def _convolves(self, v: Value, order: Order) -> bool:
        """Whether a convolution reads, in that order, what is made of a value as it lies."""
        left, seen = [(v, order)], {v}
        while left:
            v, order = left.pop()
            for node in self.readers.get(v, ()):
                if node.name == "conv_general_dilated":
                    if any(x is v and _image(node)[i] == order for i, x in enumerate(node.ins[:2])):
                        return True
                    continue
                for out, at in _laid(node, {v: order}).items():
                    if out not in seen:
                        seen.add(out)
                        left.append((out, at))
        return False


def _wanted(node: Node, lies: Mapping[Value, Order]) -> dict[int, Order]:
    """The operands that a node reads in another order than they lie in, and that order."""
    if node.name == "conv_general_dilated":
        return {
            i: order
            for i, order in enumerate(_image(node))
            if order != lies.get(node.ins[i], _plain(node.ins[i]))
        }
    found: dict[int, Order] = {}
    if node.regions or node.name == "dot_general" or _regroups(node):
        found = {i: _plain(v) for i, v in enumerate(node.ins) if v in lies}
    for i, dims in reordered(node).items():
        found[i] = _ranks(aval(node.eqn.invars[i]).shape, dims)
    return found


def _regroups(node: Node) -> bool:
    """Whether a view puts the elements of an array into other dimensions."""
    if node.name not in VIEWS or len(node.outs) != 1:
        return False
    before, after = ([n for n in v.aval.shape if n > 1] for v in (node.ins[0], node.outs[0]))
    return before != after


# What does not lie as its operands do.
_ANEW = (*_PRODUCTS, "transpose", "copy", "gather", "dynamic_slice", "sort")


def _laid(node: Node, lies: Mapping[Value, Order]) -> dict[Value, Order]:
    """How a node's results lie, where not in the order of their dimensions."""
    if node.name == "conv_general_dilated":
        out = node.outs[0]
        batch, features, *places = node.eqn.params["dimension_numbers"].out_spec
        order = _ranks(aval(node.eqn.outvars[0]).shape, (batch, *places, features))
        return {} if order == _plain(out) else {out: order}
    if node.regions or node.name in _ANEW or _regroups(node):
        return {}
    found = {}
    for out in node.outs:
        orders = (lies[v] for v in node.ins if v in lies)
        order = next((order for order in orders if len(order) == len(_plain(out))), None)
        if order is not None:
            found[out] = order
    return found


def _image(node: Node) -> tuple[Order, Order]:
    """The orders in which a convolution reads an image and a kernel: features of results last."""
    numbers = node.eqn.params["dimension_numbers"]
    image, kernel = numbers.lhs_spec, numbers.rhs_spec
    wanted = (image[0], *image[2:], image[1]), (*kernel[2:], kernel[1], kernel[0])
    shapes = (aval(atom).shape for atom in node.eqn.invars[:2])
    first, second = (_ranks(shape, dims) for shape, dims in zip(shapes, wanted, strict=True))
    return first, second


# ---- products ------------------------------------------------------------------------------------


def reordered(node: Node) -> dict[int, tuple[int, ...]]:
    """The operands of a product that it needs in another order of dimensions, and that order."""
    if node.name == "conv_general_dilated":
        return {i: order for i, order in enumerate(_image(node)) if order != tuple(sorted(order))}
    if node.name != "dot_general":
        return {}
    shapes = (aval(atom).shape for atom in node.eqn.invars[:2])
    return _reordered_for_product(node.eqn.params["dimension_numbers"], *shapes)


@functools.lru_cache(4096)
def _reordered_for_product(numbers: tuple, *shapes: tuple) -> dict[int, tuple[int, ...]]:
    contract, batch = numbers
    found = {}
    for i, shape in enumerate(shapes):
        free = [d for d in range(len(shape)) if d not in contract[i] and d not in batch[i]]
        orders = [(*batch[i], *free, *contract[i]), (*batch[i], *contract[i], *free)]
        wide = [sum(shape[d] > 1 for d in dims) for dims in (free, contract[i])]
        if i == 0 and max(wide) > 1:  # one that is no matrix as it is can't be turned as well
            del orders[1]
        if i == 1 and len(free) > 1:
            del orders[0]
        kept = [d for d, n in enumerate(shape) if n > 1]  # one element has no place of its own
        if kept not in ([d for d in order if shape[d] > 1] for order in orders):
            found[i] = orders[0]
    return found


def flattens(node: Node, i: int) -> bool:
    """Whether an operand of a product is a matrix only when dimensions are taken together."""
    contract, batch = (dims[i] for dims in node.eqn.params["dimension_numbers"])
    wide = {d for d, n in enumerate(aval(node.eqn.invars[i]).shape) if n > 1}
    return len(wide.intersection(contract)) > 1 or len(wide - {*contract, *batch}) > 1


def makes_matrix(node: Node) -> bool:
    """Whether what a product makes has more dimensions than the matrices that XLA makes of it."""
    if node.name != "dot_general":
        return False
    _, batch = node.eqn.params["dimension_numbers"]
    return len(node.outs[0].aval.shape) > len(batch[0]) + 2
