"""A program as the regions that run: what `cost` and `memory` read.

Calls (jit, remat, custom_jvp, …) only name their equations, so they are taken apart: their body's
equations stand where the call stood. A loop, a branch, a kernel or a `shard_map` stays one node
that holds *regions* of its own, because its body runs more or less than once, or on other shapes.
Values are objects: whoever reads one knows what made it, and whether it outlives its region.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xform._compat import Jaxpr, JaxprEqn, Literal
from xform._lowered import AGAIN, Lowering, lowered
from xform.jaxpr._interpret import called
from xform.jaxpr._walk import UNKNOWN, carried, source_line

# Larger arrays are not computed for the sake of a report.
_LARGE = 2**24

# What gives an array another type or shape and leaves its memory as it is.
VIEWS = frozenset(
    {
        "reshape", "squeeze", "expand_dims", "bitcast_convert_type", "stop_gradient", "name",
        "optimization_barrier", "pvary", "pcast", "preduced", "sharding_constraint", "reshard",
        "mesh_cast", "layout_constraint",
    }
)  # fmt: skip


class Value:
    """One array of a program.

    Attributes:
      aval: its type.
      size, bytes: of its elements; a reference counts as the array that it refers to.
      node: what makes it; None for an input of its region.
      escapes: whether anything but plain nodes of its own region reads it.
      view: the value whose memory it is, seen in another shape.
      same_as: for an input of a region, the value outside that it always equals.
      known: its content, where a literal, a constant or a concrete argument says it.
    """

    __slots__ = ("aval", "bytes", "escapes", "known", "node", "same_as", "size", "view")

    def __init__(self, aval, node: Node | None = None, known: Any = None):
        self.aval, self.size, self.bytes = measured(aval)
        self.node = node
        self.known = known
        self.same_as: Value | None = None
        self.view: Value | None = None
        self.escapes = False

    def escape(self) -> None:
        """Marks it, and what it is a view of, as read outside of its run of nodes."""
        self.escapes = True
        if self.view is not None:
            self.view.escapes = True

    def __repr__(self):
        return f"Value({self.aval.str_short()})"


@functools.lru_cache(4096)
def measured(aval: Any) -> tuple[Any, int, int]:
    """The type of an array, or of what a reference refers to, with its elements and bytes."""
    aval = getattr(aval, "inner_aval", aval)
    size = math.prod(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    return aval, size, 0 if dtype is None or is_on_host(aval) else array_bytes(size, dtype)


def array_bytes(size: int, dtype: Any) -> int:
    """The bytes of so many elements, of which those of fewer than 8 bits lie side by side."""
    if any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.integer, jax.numpy.floating)):
        return -(-size * jax.dtypes.itemsize_bits(dtype) // 8)
    return size * dtype.itemsize


def is_on_host(aval: Any) -> bool:
    """Whether it is the type of a value in the host's memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


@dataclass(frozen=True, eq=False)
class Place:
    """Where the nodes of one body stand.

    Attributes:
      parents: the enclosing equations, outermost first.
      scope: the enclosing name scopes.
      phase: "forward", "backward" or "recompute" (JAX names it on the outermost equation), or
        "again" for what is certain to be computed a second time.
      axes: sizes of the mesh axes in sight.
      remat: whether the body is that of a remat that runs again for the backward pass.
      lower: which primitives stand for the program that they are lowered to.
    """

    parents: tuple[JaxprEqn, ...] = ()
    scope: tuple[str, ...] = ()
    phase: str = "forward"
    axes: tuple[tuple[str, int], ...] = ()
    remat: bool = False
    lower: Lowering = lowered

    def of(self, eqn: JaxprEqn) -> tuple[tuple[str, ...], str]:
        """Scope and phase of an equation here."""
        stack = eqn.source_info.name_stack.stack
        if not stack:
            return self.scope, "backward" if self.remat else self.phase
        scope, phase = self.scope, "backward" if self.remat else self.phase
        for part in stack:
            if type(part).__name__ == "Transform":
                phase = "backward" if part.name == "transpose" else phase
            elif part.name == "rematted_computation":
                phase = "recompute"
            elif part.name == AGAIN:
                phase = "again"
            elif part.name != "checkpoint":
                scope = (*scope, part.name)
        return scope, phase

    def within(self, eqn: JaxprEqn) -> Place:
        """The place of an equation's body."""
        scope, phase = self.of(eqn)
        remat = phase == "backward" and bool(eqn.params.get("differentiated"))
        axes = self.axes
        if eqn.primitive.name == "shard_map":
            axes = tuple(eqn.params["mesh"].shape.items())
        return Place((*self.parents, eqn), scope, phase, axes, remat, self.lower)


class Node:
    """One equation that runs.

    Attributes:
      eqn: the equation.
      name: of its primitive.
      place: what encloses it.
      ins, outs: values read and made.
      regions: the bodies that it runs, by label; empty for a plain node.
    """

    __slots__ = ("eqn", "ins", "name", "outs", "place", "regions")

    def __init__(self, eqn: JaxprEqn, place: Place, ins: list[Value]):
        self.eqn, self.place, self.ins = eqn, place, ins
        self.name = eqn.primitive.name
        self.outs = [Value(v.aval, self) for v in eqn.outvars]
        self.regions: dict[str, Region] = {}

    @property
    def line(self) -> str:
        """The user's line that made the equation, or else the innermost one that encloses it."""
        eqns = (self.eqn, *reversed(self.place.parents))
        return next((line for line in map(source_line, eqns) if line != UNKNOWN), UNKNOWN)

    @property
    def scope(self) -> str:
        """The name scopes around it, `"block/attention"`."""
        return "/".join(self.place.of(self.eqn)[0])

    @property
    def phase(self) -> str:
        return self.place.of(self.eqn)[1]


@dataclass(eq=False)
class Region:
    """A straight run of nodes.

    Attributes:
      inputs, outputs: of the body, in its order; consts come first among the inputs.
      nodes: in program order.
    """

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Value]

    def walk(self) -> Iterator[Node]:
        """Every node at every depth."""
        for node in self.nodes:
            yield node
            for region in node.regions.values():
                yield from region.walk()

    def bodies(self) -> Iterator[Region]:
        """What its nodes run, but for kernels of the user's, which a compiler leaves alone."""
        for node in self.nodes:
            if node.name != "pallas_call":
                yield from node.regions.values()


def prune(region: Region) -> Region:
    """Leaves out what nothing needs, at every depth, as a compiler does; returns the region."""
    needed = set(region.outputs)
    kept = []
    for node in reversed(region.nodes):
        if node.eqn.effects or not node.outs or not needed.isdisjoint(node.outs):
            needed.update(node.ins)
            kept.append(node)
            if node.name == "scan":
                _drop_stacks(node, needed)
            for inner in node.regions.values():
                prune(inner)
    region.nodes[:] = reversed(kept)
    return region


def _drop_stacks(scan: Node, needed: set[Value]) -> None:
    """Has a loop stack only those results that something needs."""
    body, start = scan.regions["body"], carried(scan.eqn).carry
    pairs = list(zip(scan.outs, body.outputs, strict=True))
    pairs[start:] = [(out, inner) for out, inner in pairs[start:] if out in needed]
    scan.outs[:], body.outputs[:] = map(list, zip(*pairs, strict=True)) if pairs else ([], [])


def merge(region: Region, *, stacks: bool = True) -> Region:
    """Computes once what is computed twice, at every depth, as a compiler does.

    `stacks`: whether a loop stacks once what it makes once; a CPU's compiler leaves both arrays.
    """
    same: dict[Value, Value] = {}
    made: dict[Any, Node] = {}
    spread: dict[Value, tuple[Value, tuple[int, ...]]] = {}

    def find(v: Value) -> Value:
        return same.get(v, v)

    for node in region.nodes:
        node.ins = [find(v) for v in node.ins]
        for label, inner in node.regions.items():
            merge(inner, stacks=stacks)
            if node.name == "scan" and label == "body" and stacks:
                first: dict[Value, Value] = {}
                start = carried(node.eqn).carry
                for out, made_inside in zip(node.outs[start:], inner.outputs[start:], strict=True):
                    same[out] = first.setdefault(made_inside, out)
        if node.regions or node.eqn.effects:
            continue
        if (chosen := _chosen(node, spread)) is not None:
            same[node.outs[0]] = chosen
            continue
        if node.name in _SUMS and node.outs[0].size == node.ins[0].size:
            same[node.outs[0]] = node.ins[0]  # over dimensions of one element
            continue
        ins = tuple(
            v if v.known is None or v.size > 1 else (v.aval, np.asarray(v.known).tobytes())
            for v in node.ins
        )
        key: tuple = (node.eqn.primitive, ins, *node.eqn.params.items())
        if node.name in _SPREADS and (found := _spread_dims(node)) is not None:
            dims, shape = found
            if dims == tuple(range(len(shape))) and node.ins[0].known is None:
                same[node.outs[0]] = node.ins[0]
                continue
            source, dims = _through(node.ins[0], dims, spread)
            spread[node.outs[0]] = source, dims
            key = "spread", ins if node.ins[0].known is not None else source, dims, shape
        try:
            twin = made.setdefault(key, node)
        except TypeError:  # a parameter that can't be compared
            continue
        if twin is not node:
            same.update(zip(node.outs, twin.outs, strict=True))
    region.outputs = [w if (w := find(v)).aval == v.aval else v for v in region.outputs]
    return region


def _chosen(node: Node, spread: Mapping[Value, tuple[Value, Any]]) -> Value | None:
    """Which of its operands a node makes, where constants decide that."""
    if node.name in _NEUTRAL:
        return _unchanged(node)
    if node.name != "select_n":
        return None
    which, *cases = node.ins
    found = folded(spread[which][0] if which in spread else which)
    return None if found is None else cases[int(found)]


# With which number an operation leaves its other operand as it is.
_NEUTRAL = {"max": -math.inf, "min": math.inf, "mul": 1}


def _unchanged(node: Node) -> Value | None:
    """The operand that a node leaves as it is: a softmax takes the maximum of all and of `-inf`."""
    for number, other in zip(node.ins, node.ins[::-1], strict=True):
        if other.aval == node.outs[0].aval and folded(number) == _NEUTRAL[node.name]:
            return other
    return None


# What a compiler computes of numbers that it knows.
_FOLDS: dict[str, Callable] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("convert_element_type", "broadcast_in_dim"), lambda x: x),
}  # fmt: skip


def folded(v: Value, depth: int = 8) -> int | float | None:
    """What a single number is, as far as constants tell."""
    if v.size != 1:
        return None
    if v.known is not None:
        return np.asarray(v.known).item()
    if v.node is None or v.node.name not in _FOLDS or not depth:
        return None
    args = [folded(x, depth - 1) for x in v.node.ins]
    return None if None in args else _FOLDS[v.node.name](*args)


_SUMS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod")
# What puts the dimensions of an array among others.
_SPREADS = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")


def _spread_dims(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Where a node puts the dimensions of an array, and the shape of what it makes.

    Dimensions of one element do not count: a mean that keeps them is the mean that does not.
    """
    atoms: list[Any] = node.eqn.invars
    given, out = atoms[0].aval.shape, node.outs[0].aval.shape
    wide = [d for d, n in enumerate(out) if n > 1]
    shape = tuple(out[d] for d in wide)
    before = [n for n in given if n > 1]
    if node.name == "broadcast_in_dim":
        at = node.eqn.params["broadcast_dimensions"]
        dims = [wide.index(d) for d, n in zip(at, given, strict=True) if n > 1]
    else:
        dims = list(range(len(shape)))
    if len(atoms) > 1 or [shape[d] for d in dims] != before:
        return None
    return tuple(dims), shape


def _through(
    v: Value, dims: tuple[int, ...], spread: Mapping[Value, tuple[Value, tuple[int, ...]]]
) -> tuple[Value, tuple[int, ...]]:
    """What was spread out to make `v`, and where its dimensions are when `v` is spread again."""
    source, at = spread.get(v, (v, tuple(range(len(dims)))))
    return source, tuple(dims[d] for d in at)


def program(jaxpr: Jaxpr, args: Sequence[Any] = (), *, lower: Lowering = lowered) -> Region:
    """Returns the regions of a closed jaxpr.

    Args:
      jaxpr: the program.
      args: may tell the content of its inputs.
      lower: gives the program that stands for an equation, or None where that is one node.
    """
    region = _region(jaxpr, Place(lower=lower))
    for value, arg in zip(region.inputs[len(jaxpr.consts) :], args, strict=False):
        value.known = arg if is_concrete(arg) else None
    return region


def is_concrete(x: Any) -> bool:
    """Whether an argument tells what it holds."""
    if isinstance(x, Tracer):
        return False
    return isinstance(x, jax.Array | np.ndarray | np.generic | int | float | bool)


def _region(jaxpr: Jaxpr, place: Place) -> Region:
    """A body on its own: new values for its inputs."""
    consts = [Value(v.aval, known=x) for v, x in zip(jaxpr.constvars, jaxpr.consts, strict=True)]
    inputs = [*consts, *(Value(v.aval) for v in jaxpr.invars)]
    region = Region(inputs, [], [])
    region.outputs = _inline(jaxpr, inputs, place, region.nodes)
    for value in region.outputs:
        value.escape()
    return region


def _inline(jaxpr: Jaxpr, inputs: Sequence[Value], place: Place, nodes: list[Node]) -> list[Value]:
    """Appends the nodes of a body, and returns its results."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def read(atom) -> Value:
        return Value(atom.aval, known=atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        if (body := called_body(eqn, place.lower)) is not None:
            consts = [Value(jax.typeof(x), known=x) for x in body.consts]
            outs = _inline(body, [*consts, *ins], place.within(eqn), nodes)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        node = Node(eqn, place, ins)
        if find := _BODIES.get(eqn.primitive.name):
            inside = place.within(eqn)
            node.regions = {label: _region(body, inside) for label, body in find(eqn)}
            for value in ins:
                value.escape()
            _LINKS.get(eqn.primitive.name, lambda node: None)(node)
        elif eqn.primitive.name in VIEWS:
            for value, source in zip(node.outs, ins, strict=False):
                value.view = source if source.view is None else source.view
        nodes.append(node)
        env.update(zip(eqn.outvars, node.outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called_body(eqn: JaxprEqn, lower: Lowering = lowered) -> Jaxpr | None:
    """The program that an equation merely calls, or that its primitive is lowered to."""
    name, params = eqn.primitive.name, eqn.params
    if (body := lower(eqn)) is not None:
        return body
    if not params:
        return None
    if name == "custom_partitioning":
        return params["call"]
    body = called(eqn)
    return _expanded(params["_prim"]) if body is None and "_prim" in params else body


def _expanded(prim: Any) -> Jaxpr | None:
    """The program that a hijax primitive stands for, if it is one of arrays."""
    if not hasattr(prim, "expand"):
        return None
    try:
        return jax.make_jaxpr(lambda *flat: prim.expand(*prim.in_tree.unflatten(flat)))(
            *prim.in_avals_flat
        )
    except (NotImplementedError, TypeError):
        return None


# The bodies that each structural primitive runs, by label.
_BODIES = {
    "scan": lambda eqn: [("body", eqn.params["jaxpr"])],
    "while": lambda eqn: [("cond", eqn.params["cond_jaxpr"]), ("body", eqn.params["body_jaxpr"])],
    "cond": lambda eqn: [(f"branch {i}", b) for i, b in enumerate(eqn.params["branches"])],
    "shard_map": lambda eqn: [("body", eqn.params["jaxpr"])],
    "pallas_call": lambda eqn: [("kernel", eqn.params["jaxpr"])],
    "custom_linear_solve": lambda eqn: [("solve", eqn.params["jaxprs"].solve)],
    "run_scoped": lambda eqn: [("body", eqn.params["jaxpr"])],
    "run_state": lambda eqn: [("body", eqn.params["jaxpr"])],
}
STRUCTURES = frozenset(_BODIES)
"""The primitives that run bodies of their own."""


# ---- which inputs of a body equal a value outside ------------------------------------------------


def own_inputs(jaxpr: Jaxpr, region: Region) -> list[Value]:
    """The inputs of a region but for the constants that its jaxpr holds."""
    return region.inputs[len(jaxpr.consts) :]


def _link_scan(node: Node) -> None:
    n, region = carried(node.eqn), node.regions["body"]
    inside = own_inputs(node.eqn.params["jaxpr"], region)
    for i, (outer, inner) in enumerate(zip(node.ins, inside, strict=True)):
        kept = n.consts <= i < n.consts + n.carry and region.outputs[i - n.consts] is inner
        if i < n.consts or kept:
            inner.same_as = outer


def _link_while(node: Node) -> None:
    params = node.eqn.params
    n, m = params["cond_nconsts"], params["body_nconsts"]
    carry = node.ins[n + m :]
    body = own_inputs(params["body_jaxpr"], node.regions["body"])
    test = own_inputs(params["cond_jaxpr"], node.regions["cond"])
    for outer, inner in zip(
        [*node.ins[:n], *node.ins[n : n + m]], [*test[:n], *body[:m]], strict=True
    ):
        inner.same_as = outer
    for i, outer in enumerate(carry):
        if node.regions["body"].outputs[i] is body[m + i]:
            body[m + i].same_as = test[n + i].same_as = outer


def _link_cond(node: Node) -> None:
    for branch, region in zip(node.eqn.params["branches"], node.regions.values(), strict=True):
        for outer, inner in zip(node.ins[1:], own_inputs(branch, region), strict=True):
            inner.same_as = outer


def _link_shard_map(node: Node) -> None:
    inside = own_inputs(node.eqn.params["jaxpr"], node.regions["body"])
    for outer, inner, spec in zip(node.ins, inside, node.eqn.params["in_specs"], strict=True):
        if all(axis is None for axis in spec):
            inner.same_as = outer


_LINKS = {
    "scan": _link_scan,
    "while": _link_while,
    "cond": _link_cond,
    "shard_map": _link_shard_map,
}


# ---- content -------------------------------------------------------------------------------------


def content(value: Value) -> Any | None:
    """What a value holds, from constants and concrete arguments; None if they don't say."""
    with jax.ensure_compile_time_eval():
        return content_at(value)


# What these hold depends on where they run.
_PLACED = ("program_id", "num_programs", "axis_index")


def content_at(value: Value, here: Callable[[Node], Any] | None = None) -> Any | None:
    """What a value holds where it runs: `here` tells what a node makes there, or None.

    Without `here`, what is found is kept.
    """
    seen: dict[Value, Any] = {}  # also what is not found: many may read it

    def held(value: Value) -> Any | None:
        if value not in seen:
            seen[value] = _content(value, held, here)
        return seen[value]

    return held(value)


def _content(value: Value, held: Callable, here: Callable[[Node], Any] | None) -> Any | None:
    """What a value holds, where `held` says it of others."""
    if value.known is not None:
        return value.known
    if value.same_as is not None:
        return held(value.same_as)
    node = value.node
    if (
        node is None
        or node.regions
        or value.size > _LARGE
        or any(x.size > _LARGE for x in node.ins)
    ):
        return None
    if here is not None and (found := here(node)) is not None:
        return found
    if node.eqn.effects or node.place.axes or node.name in _PLACED:
        return None
    args = [held(x) for x in node.ins]
    if any(x is None for x in args):
        return None
    eqn = node.eqn
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    results = out if eqn.primitive.multiple_results else [out]
    if here is not None:
        return results[node.outs.index(value)]
    for made, result in zip(node.outs, results, strict=True):
        made.known = result
    return value.known


# What a comparison says of its second operand and its first.
_TURNED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "ne": "ne"}


def trip_count(node: Node, look: Callable[[Value], Any] = content) -> Any | None:
    """How often a loop runs; None for a while that no constant or concrete argument decides.

    Decided is a counter: `i < n`, `i > n` or `i != n` with an integer `i` carried, started at a
    known number and changed by the same number in each turn. `look` says what values hold; of
    arrays, one for each of several runs of the loop, the answer is one.
    """
    if node.name == "scan":
        return node.eqn.params["length"]
    params, (test, body) = node.eqn.params, node.regions.values()
    if len(test.nodes) != 1 or test.nodes[0].name not in _TURNED:
        return None
    (compare,), skip = test.nodes, params["cond_nconsts"]
    (x, y), relation = compare.ins, compare.name
    carry = own_inputs(params["cond_jaxpr"], test)[skip:]
    inside = own_inputs(params["body_jaxpr"], body)[params["body_nconsts"] :]
    if test.outputs != [*compare.outs] or x.aval.shape or x.aval.dtype.kind not in "iu":
        return None
    for counter, other, said in ((x, y, relation), (y, x, _TURNED[relation])):
        if counter in carry:
            i = carry.index(counter)
            start, end = look(node.ins[len(node.ins) - len(carry) + i]), look(other)
            by = _step(body.outputs[i], inside[i], look)
            if start is None or end is None or by is None:
                return None
            runs = np.broadcast_arrays(*(np.asarray(n, np.int64) for n in (start, end, by)))
            each = zip(*(n.ravel().tolist() for n in runs), strict=True)
            turns = [_turns(start, end, by, said) for start, end, by in each]
            if None in turns:
                return None
            return np.array(turns, np.int64) if runs[0].shape else turns[0]
    return None


def _step(after: Value, before: Value, look: Callable[[Value], Any]) -> Any | None:
    """What a turn adds to a counter."""
    step = after.node
    if step is None or step.name not in ("add", "sub") or before not in step.ins:
        return None
    first, second = step.ins
    if step.name == "sub" and first is not before:
        return None
    by = look(second if first is before else first)
    return by if by is None or step.name == "add" else -np.asarray(by, np.int64)


def _turns(start: int, end: int, by: int, relation: str) -> int | None:
    """How often `i relation end` holds, for `i` from `start` on; None if for ever."""
    if relation in ("gt", "ge"):
        start, end, by, relation = -start, -end, -by, _TURNED[relation]
    span = end - start + (relation == "le")
    if relation == "ne":
        exact = span == 0 or (by != 0 and span % by == 0 and span // by > 0)
        return (span // by if span else 0) if exact else None
    if span <= 0:
        return 0
    return -(-span // by) if by > 0 else None
