"""Which dimension of which argument a dimension of a value runs along, as far as that is known.

Under `vmap`, and wherever a user carries a batch along, an element's index then says which example
of the arguments it belongs to. A dimension is followed through what keeps elements aligned with it,
and forgotten elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xform._ops import ELEMENTWISE
from xform._program import Node, Region, Value
from xform.jaxpr import carried
from xform.numerics._run import own_inputs, runs_regions

type Labels = tuple[str | None, ...]


def follow(region: Region, names: Sequence[str]) -> dict[Value, Labels]:
    """Returns the labels of every value's dimensions, `"xs"` or `"xs, dimension 1"`.

    Args:
      region: a program.
      names: of its inputs but for constants.
    """
    known: dict[Value, Labels] = {}
    own = region.inputs[len(region.inputs) - len(names) :]
    for value, name in zip(own, names, strict=True):
        label = lambda d, name=name: f"`{name}`" + (f" dimension {d}" if d else "")
        known[value] = tuple(map(label, range(_rank(value))))
    _follow(region, known)
    return known


def _follow(region: Region, known: dict[Value, Labels]) -> None:
    for node in region.nodes:
        if runs_regions(node):
            _into(node, known)
            continue
        rule = _rule(node)
        ins = [_labels(v, known) for v in node.ins]
        for out in node.outs:
            labels = rule(node, ins, out) if rule else ()
            known[out] = labels if len(labels) == _rank(out) else (None,) * _rank(out)


def _into(node: Node, known: dict[Value, Labels]) -> None:
    """Through a node's regions, twice for what a loop carries."""
    loop = node.name in ("scan", "while")
    for _ in range(2 if loop else 1):
        for label, body in node.regions.items():
            operands, inside = _operands(node, label), own_inputs(node, label)
            for i, (outer, inner) in enumerate(zip(operands, inside, strict=True)):
                labels = _labels(outer, known)
                drop = node.name == "scan" and i >= sum(_scan_split(node))
                if node.name == "shard_map":
                    spec = (*node.eqn.params["in_specs"][i], *[None] * _rank(inner))
                    labels = tuple(
                        x if s is None else None for x, s in zip(labels, spec, strict=False)
                    )
                known[inner] = _join(known.get(inner), labels[1:] if drop else labels)
            _follow(body, known)
            if label == "cond":
                continue
            for k, (outer, inner) in enumerate(zip(node.outs, body.outputs, strict=True)):
                labels = _labels(inner, known)
                if node.name == "shard_map":
                    labels = tuple(
                        x if s is None else None
                        for x, s in zip(
                            labels, (*node.eqn.params["out_specs"][k], *[None] * 8), strict=False
                        )
                    )
                stacked = node.name == "scan" and k >= _scan_split(node)[1]
                known[outer] = _join(known.get(outer), (None, *labels) if stacked else labels)
        if loop:
            _carry_back(node, known)


def _carry_back(node: Node, known: dict[Value, Labels]) -> None:
    body = node.regions["body"]
    inside = own_inputs(node, "body")
    n = carried(node.eqn)
    first = node.eqn.params["body_nconsts"] if node.name == "while" else n.consts
    for k in range(n.carry):
        value = inside[first + k]
        known[value] = _join(known.get(value), _labels(body.outputs[k], known))


def _scan_split(node: Node) -> tuple[int, int]:
    n = carried(node.eqn)
    return n.consts, n.carry


def _operands(node: Node, label: str) -> Sequence[Value]:
    if node.name == "cond":
        return node.ins[1:]
    if node.name != "while":
        return node.ins
    n, m = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
    return [*(node.ins[:n] if label == "cond" else node.ins[n : n + m]), *node.ins[n + m :]]


def _labels(value: Value, known: dict[Value, Labels]) -> Labels:
    return known.get(value, (None,) * _rank(value))


def _rank(value: Value) -> int:
    return len(getattr(value.aval, "shape", ()))


def _join(old: Labels | None, new: Labels) -> Labels:
    if old is None or len(old) != len(new):
        return new
    return tuple(a or b for a, b in zip(old, new, strict=True))


# ---- plain nodes ---------------------------------------------------------------------------------


def _aligned(node: Node, ins: list[Labels], out: Value) -> Labels:
    """Elementwise: dimension d of each operand is dimension d of the result."""
    labels: Labels = (None,) * _rank(out)
    for value, found in zip(node.ins, ins, strict=True):
        if _rank(value) == len(labels):
            sizes = zip(found, value.aval.shape, out.aval.shape, strict=True)
            labels = _join(labels, tuple(x if a == b else None for x, a, b in sizes))
    return labels


def _broadcast(node: Node, ins: list[Labels], out: Value) -> Labels:
    labels: list[str | None] = [None] * _rank(out)
    dims = node.eqn.params["broadcast_dimensions"]
    for d, label, size in zip(dims, ins[0], node.ins[0].aval.shape, strict=True):
        labels[d] = label if size == out.aval.shape[d] else None
    return tuple(labels)


def _reshape(node: Node, ins: list[Labels], out: Value) -> Labels:
    """Sizes that agree from the front, and from the back, are the same dimensions."""
    old, new = node.ins[0].aval.shape, out.aval.shape
    front = _same(old, new)
    back = min(_same(old[::-1], new[::-1]), len(new) - front, len(old) - front)
    middle = (None,) * (len(new) - front - back)
    return (*ins[0][:front], *middle, *ins[0][len(old) - back :])


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def _product(node: Node, ins: list[Labels], out: Value) -> Labels:
    del out
    (lhs_in, rhs_in), (lhs_batch, rhs_batch) = node.eqn.params["dimension_numbers"]
    free = lambda labels, used: [x for d, x in enumerate(labels) if d not in used]
    return (
        *(ins[0][d] or ins[1][e] for d, e in zip(lhs_batch, rhs_batch, strict=True)),
        *free(ins[0], (*lhs_in, *lhs_batch)),
        *free(ins[1], (*rhs_in, *rhs_batch)),
    )


def _gather(node: Node, ins: list[Labels], out: Value) -> Labels:
    """What is no dimension of the slices is one of the indices."""
    slices = node.eqn.params["dimension_numbers"].offset_dims
    left = iter(ins[1][:-1])
    return tuple(None if d in slices else next(left, None) for d in range(_rank(out)))


def _without(key: str) -> Callable[[Node, list[Labels], Value], Labels]:
    def rule(node: Node, ins: list[Labels], out: Value) -> Labels:
        del out
        return tuple(x for d, x in enumerate(ins[0]) if d not in node.eqn.params[key])

    return rule


def _where_sizes_agree(node: Node, ins: list[Labels], out: Value) -> Labels:
    """Slices, pads and their like: a dimension that kept its size kept its elements."""
    sizes = zip(ins[0], node.ins[0].aval.shape, out.aval.shape, strict=True)
    return tuple(x if a == b else None for x, a, b in sizes)


def _transpose(node: Node, ins: list[Labels], out: Value) -> Labels:
    del out
    return tuple(ins[0][d] for d in node.eqn.params["permutation"])


_RULES: dict[str, Callable[[Node, list[Labels], Value], Labels]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _without("dimensions"),
    "dot_general": _product,
    "gather": _gather,
    "argmax": _without("axes"),
    "argmin": _without("axes"),
    **dict.fromkeys(
        ("slice", "dynamic_slice", "pad", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
         "concatenate", "split"),
        _where_sizes_agree,
    ),
    **dict.fromkeys(
        ("select_n", "stop_gradient", "optimization_barrier", "copy", "pvary", "pcast",
         "sharding_constraint", "name"),
        _aligned,
    ),
}  # fmt: skip


def _rule(node: Node) -> Callable[[Node, list[Labels], Value], Labels] | None:
    if node.name in ELEMENTWISE:
        return _aligned
    if node.name.startswith("reduce_") and "axes" in node.eqn.params:
        return _without("axes")
    return _RULES.get(node.name)
