"""What a GPU computes with its products: several at once, and what their operands are made of.

XLA makes one product of those that share an operand, with the other operands side by side
(openxla/xla, xla/service/dot_merger.cc): the queries, keys and values of an attention, a primal
and its tangent, the gradients of weights that read the same activations. And it computes what is
made of one array, element by element, in the product that reads it (gemm_fusion.cc): the output of
a ReLU is no array of its own, unless others need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import ShapedArray

from xform._cost_rules import aval
from xform._expand import MERGED, Made
from xform._library import BY_ELEMENT
from xform._program import Node, Region, Value, folded

# No product larger than this is made of several.
_MOST = 32 * 2**20


def at_once(region: Region) -> Region:
    """Puts one product in the place of those that share an operand, at every depth."""
    for inner in region.bodies():
        at_once(inner)
    place = {node: i for i, node in enumerate(region.nodes)}
    classes: dict[Any, list[Node]] = {}
    for node in region.nodes:
        if _is_plain(node):
            for side in (0, 1):
                classes.setdefault(_key(node, side), []).append(node)
    users: dict[Value, list[int]] = {}
    for node in region.nodes:
        for v in node.ins:
            users.setdefault(v, []).append(place[node])
    gone: set[Node] = set()
    instead: dict[Node, list[Node]] = {}
    for (side, *_), members in classes.items():
        members = [node for node in members if node not in gone]
        if len(members) > 1 and sum(_bytes(n) for n in members) <= _MOST:
            at = _where(members, side, users, place)
            if at is not None:
                gone.update(members)
                instead[at] = _merged(members, side)
    if gone:
        nodes = [
            new for node in region.nodes for new in instead.get(node, [] if node in gone else [node])
        ]
        region.nodes[:] = nodes
    return region


def _is_plain(node: Node) -> bool:
    """Whether a product is of matrices that have one dimension each beside what it sums over."""
    if node.name != "dot_general" or isinstance(node, Made):
        return False
    contract, _ = node.eqn.params["dimension_numbers"]
    return bool(contract[0])


def _key(node: Node, side: int) -> tuple:
    """What products must have in common to be made at once: one operand and how they read both."""
    other = aval(node.eqn.invars[1 - side])
    params = node.eqn.params
    summed, batch = (dims[1 - side] for dims in params["dimension_numbers"])
    sizes = tuple(other.shape[d] for d in (*summed, *batch))
    return side, node.ins[side], params["dimension_numbers"], sizes, node.outs[0].aval.dtype


def _bytes(node: Node) -> int:
    return node.outs[0].bytes + min(v.bytes for v in node.ins)


def _where(
    members: Sequence[Node], side: int, users: dict[Value, list[int]], place: dict[Node, int]
) -> Node | None:
    """Where all can be made at once: at the last, if nothing reads one before, or at the first."""
    first, last = members[0], members[-1]
    read = min((min(users.get(n.outs[0], [len(place)])) for n in members), default=0)
    if read > place[last]:
        return last
    made = (n.ins[1 - side].node for n in members)
    if all(maker is None or place[maker] < place[first] for maker in made):
        return first
    return None


def _merged(members: Sequence[Node], side: int) -> list[Node]:
    """One product, of whose result each of the others is a slice."""
    first = members[0]
    ins = [first.ins[side], *(n.ins[1 - side] for n in members)]
    size = sum(n.outs[0].size for n in members)
    whole = Value(ShapedArray((size,), first.outs[0].aval.dtype))
    product = Made(MERGED, first, ins, [whole], members)
    whole.node = product
    nodes: list[Node] = [product]
    for n in members:
        nodes.append(Made("slice", n, [whole], n.outs))
        n.outs[0].node = nodes[-1]
    return nodes


def within(region: Region) -> Region:
    """Has products read what their operands are computed from, where that is one array."""
    for inner in region.bodies():
        within(inner)
    for node in region.nodes:
        if node.name in ("dot_general", "product_parts", "merged product", "merged parts"):
            node.ins = [_source(v) for v in node.ins]
    return region


def _source(v: Value) -> Value:
    while (node := v.node) is not None and node.name in BY_ELEMENT and not isinstance(node, Made):
        large = [x for x in node.ins if folded(x) is None]
        if len(large) != 1 or large[0].bytes > v.bytes or large[0].size != v.size:
            break
        (v,) = large
    return v
