"""Communication inside control flow that devices may leave each other in.

Where the predicate of a `cond` or a `while` differs along a mesh axis, so may the branch that a
device takes or the number of its turns. A collective along that axis then waits for devices that
never come: the program compiles without a word, and hangs or mixes up messages.

Along which axes a value differs is followed through the program: it differs where an input is split
or `axis_index` is read, and is equal again after a sum or a gather. Where `shard_map` checks them,
the types of JAX (`check_vma=True`) say it too, and both have to agree that a value may differ.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xform._compat import varying_axes
from xform._cost_rules import named_axes
from xform._program import Node, Region, Value, own_inputs
from xform.jaxpr import carried

Axes = frozenset[str]
_NONE: Axes = frozenset()

# After these, all devices of the axes hold the same.
_LEVELLING = frozenset(
    {
        "psum", "pmax", "pmin", "psum_invariant", "pbroadcast",
        "all_gather", "all_gather_invariant", "all_gather_reduced",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Diverging:
    """A collective in control flow that differs along its own axis.

    Attributes:
        op: its JAX name, such as "psum".
        axes: the axes along which both it runs and the control flow differs.
        array: the type of what it moves.
        line: its line.
        control: "cond" or "while".
        control_line: the line of the control flow.
    """

    op: str
    axes: tuple[str, ...]
    array: str
    line: str
    control: str
    control_line: str


def diverging(program: Region) -> list[Diverging]:
    """Returns the collectives that a program runs in control flow that differs along their axes."""
    found = []
    for node in program.nodes:
        if node.name == "shard_map":
            found += _Manual(node).offenders()
        else:
            for region in node.regions.values():
                found += diverging(region)
    return list(dict.fromkeys(found))


class _Manual:
    """The body of a `shard_map`."""

    def __init__(self, node: Node, outer: Sequence[Axes] = ()):
        self.typed = bool(node.eqn.params["check_vma"])
        self.varies: dict[Value, Axes] = {}
        self.body = node.regions["body"]
        inside = own_inputs(node.eqn.params["jaxpr"], self.body)
        outer = outer or [_NONE] * len(inside)
        for value, spec, more in zip(inside, node.eqn.params["in_specs"], outer, strict=True):
            split = (axis if isinstance(axis, tuple) else (axis,) for axis in spec)
            self.varies[value] = more | {name for axes in split for name in axes if name}

    def offenders(self) -> list[Diverging]:
        self.flow(self.body)
        return list(self.search(self.body, ()))

    def of(self, value: Value) -> Axes:
        """The axes along which a value may differ."""
        found = self.varies.get(value, _NONE)
        return found & varying_axes(value.aval) if self.typed else found

    def join(self, values: Sequence[Value]) -> Axes:
        return _NONE.union(*map(self.of, values))

    def put(self, values: Sequence[Value], axes: Sequence[Axes]) -> bool:
        """Adds axes to values; returns whether that was news."""
        before = [self.varies.get(value, _NONE) for value in values]
        for value, old, new in zip(values, before, axes, strict=True):
            self.varies[value] = old | new
        return any(not new <= old for old, new in zip(before, axes, strict=True))

    # ---- where values differ ----

    def flow(self, region: Region) -> None:
        for node in region.nodes:
            rule = _FLOW.get(node.name)
            if rule:
                rule(self, node)
                continue
            axes = self.join(node.ins)
            if node.name == "axis_index":
                axes |= {node.eqn.params["axis_name"]}
            elif node.name in _LEVELLING and not node.eqn.params.get("axis_index_groups"):
                axes -= set(named_axes(node.eqn) or ())
            for inner in node.regions.values():
                self.put(inner.inputs, [axes] * len(inner.inputs))
                self.flow(inner)
                axes |= self.join(inner.outputs)
            self.put(node.outs, [axes] * len(node.outs))

    def scan(self, node: Node) -> None:
        n, body = carried(node.eqn), node.regions["body"]
        inside = own_inputs(node.eqn.params["jaxpr"], body)
        self.put(inside, [self.of(v) for v in node.ins])
        self.settle(body, inside[n.consts :][: n.carry], body.outputs[: n.carry])
        self.put(node.outs, [self.of(v) for v in body.outputs])
        start = node.ins[n.consts :][: n.carry]
        self.put(node.outs[: n.carry], [self.of(v) for v in start])

    def loop(self, node: Node) -> None:
        params, (test, body) = node.eqn.params, (node.regions["cond"], node.regions["body"])
        n, m = params["cond_nconsts"], params["body_nconsts"]
        asks = own_inputs(params["cond_jaxpr"], test)
        does = own_inputs(params["body_jaxpr"], body)
        start = node.ins[n + m :]
        self.put(asks, [self.of(v) for v in (*node.ins[:n], *start)])
        self.put(does, [self.of(v) for v in (*node.ins[n : n + m], *start)])
        self.settle(body, does[m:], body.outputs)
        self.put(asks[n:], [self.of(v) for v in does[m:]])
        self.flow(test)
        while self.put(does[m:], [self.of(test.outputs[0])] * len(start)):
            # Who turns more often has other values.
            self.settle(body, does[m:], body.outputs)
            self.put(asks[n:], [self.of(v) for v in does[m:]])
            self.flow(test)
        self.put(node.outs, [self.of(v) | self.of(test.outputs[0]) for v in does[m:]])

    def settle(self, body: Region, carry: Sequence[Value], again: Sequence[Value]) -> None:
        """Follows a body until what it hands to itself differs along no further axis."""
        self.flow(body)
        while self.put(carry, [self.of(v) for v in again]):
            self.flow(body)

    def cond(self, node: Node) -> None:
        chosen = self.of(node.ins[0])
        for branch, region in zip(node.eqn.params["branches"], node.regions.values(), strict=True):
            self.put(own_inputs(branch, region), [self.of(v) for v in node.ins[1:]])
            self.flow(region)
            self.put(node.outs, [self.of(v) | chosen for v in region.outputs])

    def nested(self, node: Node) -> None:
        """A `shard_map` over further axes."""
        inside = own_inputs(node.eqn.params["jaxpr"], node.regions["body"])
        specs = _Manual(node, [self.of(v) for v in node.ins]).varies
        self.put(inside, [specs[v] for v in inside])
        self.flow(node.regions["body"])
        axes = self.join(node.ins)
        self.put(node.outs, [axes] * len(node.outs))

    # ---- who waits for whom ----

    def search(self, region: Region, around: tuple[tuple[Node, Axes], ...]) -> Iterator[Diverging]:
        for node in region.nodes:
            along = named_axes(node.eqn)
            for control, axes in around if along else ():
                if both := axes & set(along or ()):
                    yield Diverging(
                        op=node.name,
                        axes=tuple(sorted(both)),
                        array=node.ins[0].aval.str_short(short_dtypes=True),
                        line=node.line,
                        control=control.name,
                        control_line=control.line,
                    )
            inner = around
            if node.name == "cond":
                inner = (*around, (node, self.of(node.ins[0])))
            elif node.name == "while":
                inner = (*around, (node, self.of(node.regions["cond"].outputs[0])))
            for body in node.regions.values():
                yield from self.search(body, inner)


_FLOW = {
    "scan": _Manual.scan,
    "while": _Manual.loop,
    "cond": _Manual.cond,
    "shard_map": _Manual.nested,
}
