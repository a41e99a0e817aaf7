"""The masked copies of a ragged product's rows, as a GPU makes them: all of a shape in one kernel.

But on a TPU a ragged product is one over all groups, in whose operand each group has a copy of all
rows, with zeros for those of the others. XLA fuses kernels that read the same array and go through
the same shape (its multi-output fusion), so that the copies for the product itself, for its
transposes and for the other product of a layer of experts are made at once, each in every order of
dimensions that a product wants. They exist together from when the last of what they read is there.
"""

from __future__ import annotations

from collections.abc import Sequence

from xform._expand import Made
from xform._layouts import reordered
from xform._program import Node, Region, Value

MASKED = "masked copies"


def mask_at_once(region: Region) -> Region:
    """Puts one node in the place of masked copies that one kernel makes, at every depth."""
    for inner in region.bodies():
        mask_at_once(inner)
    if copies := [node for node in region.nodes if _is_masked_copy(node)]:
        kernels = [_kernel(group) for group in _groups(region, copies)]
        masked = {v for kernel in kernels for v in kernel.outs}
        region.nodes[:] = _in_order(region, kernels, masked)
        _turn(region, masked)
    return region


def _in_ragged_product(node: Node) -> bool:
    parents = node.place.parents
    return bool(parents) and parents[-1].primitive.name == "ragged_dot_general"


def _is_masked_copy(node: Node) -> bool:
    return node.name == "select_n" and _in_ragged_product(node) and not isinstance(node, Made)


def _sizes(copy: Node) -> frozenset[Value]:
    """What tells the rows of each group: of the mask, all that the product did not make itself."""
    found, left = set(), [copy.ins[0]]
    while left:
        v = left.pop()
        if v.node is not None and _in_ragged_product(v.node):
            left += v.node.ins
        elif v.known is None:
            found.add(v)
    return frozenset(found)


def _groups(region: Region, copies: Sequence[Node]) -> list[list[Node]]:
    """Copies of one shape and of the same groups, of which none waits for another."""
    needs = _needs(region, copies)
    alike: dict[tuple, list[list[Node]]] = {}
    groups: list[list[Node]] = []
    for copy in copies:
        key = _sizes(copy), tuple(sorted(copy.outs[0].aval.shape)), copy.outs[0].aval.dtype
        same = alike.setdefault(key, [])
        free = (group for group in same if not _wait(group, copy, groups, needs))
        if (group := next(free, None)) is None:
            group = []
            same.append(group)
            groups.append(group)
        group.append(copy)
    return groups


def _needs(region: Region, copies: Sequence[Node]) -> dict[Node, frozenset[Node]]:
    """The copies that each copy is computed from, but for those that these are computed from."""
    among, needs = set(copies), dict[Node, frozenset[Node]]()
    before: dict[Value, frozenset[Node]] = {}
    for node in region.nodes:
        found = frozenset().union(*(before.get(v, ()) for v in node.ins))
        if node in among:
            needs[node], found = found, frozenset((node,))
        before.update(dict.fromkeys(node.outs, found))
    return needs


def _wait(
    group: Sequence[Node],
    copy: Node,
    groups: Sequence[Sequence[Node]],
    needs: dict[Node, frozenset],
) -> bool:
    """Whether a copy waits for one of a group, or they for it, where groups are made at once."""
    kernel = {node: group for group in groups for node in group}

    def reaches(start: Sequence[Node], end: Sequence[Node]) -> bool:
        left, seen = list(start), set(start)
        while left:
            for node in needs[left.pop()]:
                if node in end:
                    return True
                new = [x for x in kernel.get(node, (node,)) if x not in seen]
                seen.update(new)
                left += new
        return False

    return reaches((copy,), group) or reaches(group, (copy,))


def _kernel(group: Sequence[Node]) -> Made:
    """One node for a group."""
    outs = [v for copy in group for v in copy.outs]
    ins = list(dict.fromkeys(v for copy in group for v in copy.ins))
    made = Made(MASKED, group[-1], ins, outs, group)
    for v in outs:
        v.node = made
    return made


def _turn(region: Region, masked: set[Value]) -> None:
    """Makes copies of what a product reads in another order of dimensions than others do."""
    orders: dict[Value, set[tuple[int, ...] | None]] = {}
    for node in region.nodes:
        for i, v in enumerate(node.ins):
            orders.setdefault(v, set()).add(reordered(node).get(i))
    nodes: list[Node] = []
    for node in region.nodes:
        for i in reordered(node):
            if (v := node.ins[i]) in masked and len(orders[v]) > 1:
                node.ins[i] = out = Value(v.aval)
                out.node = Made("turned copy", node, [v], [out])
                nodes.append(out.node)
        nodes.append(node)
    region.nodes[:] = nodes


def _in_order(region: Region, kernels: Sequence[Made], masked: set[Value]) -> list[Node]:
    """The nodes in their order, but that what reads a kernel's copies waits for it.

    First in the line are products of two such copies, which then are done with the sooner.
    """
    last = {kernel.members[-1]: kernel for kernel in kernels}
    gone = {copy for kernel in kernels for copy in kernel.members}
    first = dict.fromkeys(n for n in region.nodes if n.ins and masked.issuperset(n.ins))
    missing = masked.copy()
    order: list[Node] = []
    waiting: list[Node] = []

    def run(node: Node) -> None:
        if missing.isdisjoint(node.ins):
            order.append(node)
            missing.difference_update(node.outs)
        else:
            waiting.append(node)
            missing.update(node.outs)

    for node in (*first, *(n for n in region.nodes if n not in first)):
        if node not in gone:
            run(node)
        elif node in last:
            run(last[node])
            while any(missing.isdisjoint(late.ins) for late in waiting):
                again, waiting[:] = waiting.copy(), ()
                for late in again:
                    run(late)
    assert not waiting
    return order
