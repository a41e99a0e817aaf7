"""What a GPU computes of a row at once: a softmax, or the statistics of a norm and what they meet.

XLA looks for *diamonds*: an array is summed over its last dimension (or its maximum taken), and the
sum meets the same array again, element by element, as in `exp(x) / sum(exp(x))`. It runs such a
diamond, and those that follow it at once, in one kernel that holds rows on the chip (openxla/xla,
xla/backends/gpu/transforms/softmax_rewriter_triton.cc). Nothing inside needs memory, but what the
kernel makes can't be written over what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from xform._cost_rules import aval
from xform._expand import Made
from xform._library import BY_ELEMENT
from xform._program import VIEWS, Node, Region, Value

ROWS = "rows"
_SUMS = ("reduce_sum", "reduce_max", "reduce_min")
_SPREADS = (VIEWS | {"broadcast_in_dim"}) - {"optimization_barrier"}


@dataclass(eq=False)
class _Diamond:
    """From an array to the operation that meets it with what its rows sum to."""

    source: Value
    root: Node
    members: dict[Node, None]


type Readers = dict[Value, list[Node | None]]


def by_rows(region: Region) -> Region:
    """Puts one node in the place of what one kernel computes of rows, at every depth."""
    for inner in region.bodies():
        by_rows(inner)
    readers: Readers = {}
    for node in region.nodes:
        for v in dict.fromkeys(node.ins):
            readers.setdefault(v, []).append(node)
    for v in region.outputs:
        readers.setdefault(v, []).append(None)
    kernels: dict[Node, _Diamond] = {}
    for node in region.nodes:
        if (found := _diamond(node, readers)) is not None:
            kernels[node] = _after(found, kernels, readers)
    inside = {node for kernel in kernels.values() for node in kernel.members} - kernels.keys()
    nodes = (node for node in region.nodes if node not in inside)
    region.nodes[:] = [_kernel(kernels[n]) if n in kernels else n for n in nodes]
    return region


def _diamond(root: Node, readers: Readers) -> _Diamond | None:
    """The diamond that ends in a node, if one does: its second operand is made of the sum."""
    if root.name not in BY_ELEMENT or len(root.ins) != 2:
        return None
    array, spread = root.ins
    *between, total = _upwards(spread, readers)
    node = total.node
    if node is None or node.name not in _SUMS or len(readers[total]) > 1:
        return None
    shape = aval(node.eqn.invars[0]).shape
    if tuple(node.eqn.params["axes"]) != (len(shape) - 1,) or array.size != node.ins[0].size:
        return None
    left, right = list(_upwards(array, readers)), list(_upwards(node.ins[0], readers))
    source = next((v for v in left if v in right), None)
    if source is None or source.size == total.size:
        return None
    values = (*between, *left[: left.index(source)], *right[: right.index(source)])
    nodes = (root, node, *(v.node for v in values if v.node is not None))
    return _Diamond(source, root, dict.fromkeys(nodes))


def _upwards(v: Value, readers: Readers) -> Iterator[Value]:
    """A value, and what it is computed from by itself, element by element, for nothing else."""
    yield v
    while len(readers[v]) == 1 and v.node is not None and _keeps_rows(v.node):
        yield (v := v.node.ins[0])


def _keeps_rows(node: Node) -> bool:
    """Whether an operation is of one array, element by element, each in its row."""
    if node.name == "transpose":
        shape = node.ins[0].aval.shape
        moved = [d for d in node.eqn.params["permutation"] if shape[d] > 1]
        return moved == sorted(moved)
    if node.name in BY_ELEMENT:
        return [v for v in node.ins if v.known is None] == node.ins[:1]
    return node.name in _SPREADS and len(node.outs) == 1


def _after(this: _Diamond, kernels: dict[Node, _Diamond], readers: Readers) -> _Diamond:
    """A diamond, with the one before it where nothing else reads what that ends in."""
    v, between = this.source, list[Node]()
    if not this.members.keys() >= set(readers[v]):
        return this
    while v.node is not None and v.node not in kernels and _keeps_rows(v.node):
        between.append(v.node)
        v = v.node.ins[0]
        if len(readers[v]) > 1:
            return this
    if v.node not in kernels:
        return this
    before = kernels.pop(v.node)
    nodes = (*this.members, *between, *before.members)
    return _Diamond(before.source, this.root, dict.fromkeys(nodes))


def _kernel(diamond: _Diamond) -> Made:
    made = {v for node in diamond.members for v in node.outs}
    ins = dict.fromkeys(v for node in diamond.members for v in node.ins if v not in made)
    kernel = Made(ROWS, diamond.root, list(ins), diamond.root.outs, tuple(diamond.members))
    for v in kernel.outs:
        v.node = kernel
    return kernel
