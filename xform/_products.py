"""What a GPU computes at once: products that share an operand, a convolution with what follows it.

XLA makes one product of those that share an operand, with the other operands side by side
(openxla/xla, xla/service/dot_merger.cc): the queries, keys and values of an attention, a primal
and its tangent, the gradients of weights that read the same activations. A convolution adds its
bias and takes the ReLU in one call of cuDNN (xla/backends/gpu/transforms).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.core import ShapedArray

from xform._cost_rules import aval
from xform._expand import MERGED, Made, source
from xform._program import Node, Region, Value, folded

# No product larger than this is made of several.
_MOST = 32 * 2**20


def at_once(region: Region) -> Region:
    """Puts one product in the place of those that share an operand, at every depth."""
    for inner in region.bodies():
        at_once(inner)
    place = {node: i for i, node in enumerate(region.nodes)}
    alike: dict[Any, list[Node]] = {}
    users: dict[Value, list[Node]] = {}
    for node in region.nodes:
        for v in node.ins:
            users.setdefault(v, []).append(node)
        for side in (0, 1) if _is_plain(node) else ():
            alike.setdefault(_key(node, side), []).append(node)
    instead: dict[Node, Sequence[Node]] = {}
    for (side, *_), products in alike.items():
        members = [node for node in products if node not in instead]
        if len(members) < 2 or sum(map(_bytes, members)) > _MOST:
            continue
        if (at := _where(members, side, users, place)) is not None:
            instead.update(dict.fromkeys(members, ()))
            instead[at] = merged = _merged(members, side)
            place.update(dict.fromkeys((*members, *merged), place[at]))
    region.nodes[:] = [new for node in region.nodes for new in instead.get(node, (node,))]
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
    members: Sequence[Node],
    side: int,
    users: Mapping[Value, Sequence[Node]],
    place: Mapping[Node, int],
) -> Node | None:
    """Where all can be made at once: at the last, if nothing reads one before, or at the first."""
    first, last = members[0], members[-1]
    if all(place[user] > place[last] for n in members for user in users.get(n.outs[0], ())):
        return last
    makers = (n.ins[1 - side].node for n in members)
    if all(maker is None or place[maker] < place[first] for maker in makers):
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


def activated(region: Region) -> Region:
    """Has a convolution add its bias and take the ReLU of the sum, at every depth.

    cuDNN does it in one call (cudnn_fused_conv_rewriter.cc). Where the sum is only compared with
    zero besides, so is the ReLU: what the convolution makes is no array then.
    """
    for inner in region.bodies():
        activated(inner)
    readers: dict[Value, list[Node]] = {}
    for node in region.nodes:
        for v in dict.fromkeys(node.ins):
            readers.setdefault(v, []).append(node)
    instead: dict[Node, Node] = {}
    for node in region.nodes:
        relu = _relu(node, readers, set(region.outputs))
        if relu is None:
            continue
        (add,), (out,) = readers[node.outs[0]], relu.outs
        ins = [*node.ins, *(v for v in add.ins if v is not node.outs[0])]
        out.node = instead[relu] = Made("conv_general_dilated", node, ins, [out])
        for other in readers[add.outs[0]]:
            other.ins = [out if v is add.outs[0] else v for v in other.ins]
    region.nodes[:] = [instead.get(node, node) for node in region.nodes]
    return region


def _relu(node: Node, readers: dict[Value, list[Node]], outputs: set[Value]) -> Node | None:
    """The ReLU that a convolution can take of its sum with a bias, if there is one."""
    if node.name != "conv_general_dilated":
        return None
    (v,) = node.outs
    if len(readers.get(v, ())) != 1 or v in outputs or readers[v][0].name != "add":
        return None
    (add,) = readers[v]
    (total,) = add.outs
    if all(source(x).size == v.size for x in add.ins):
        return None
    against_zero = [n for n in readers.get(total, ()) if _is_zero(n.ins[-1])]
    found = [n for n in against_zero if n.name == "max"]
    compared = [n for n in against_zero if n.name == "gt"]
    if len(found) != 1 or total in outputs or len(found + compared) < len(readers[total]):
        return None
    return found[0]


def _is_zero(v: Value) -> bool:
    return folded(source(v)) == 0
