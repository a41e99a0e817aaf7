"""What a compiler makes of operations before it fuses: several in the place of one.

Random bits are counters and what a cipher makes of them; a running sum is taken of each sixteen
elements, then of what these end with; the gradient of a maximum over windows finds the place of
each, of which it writes down every coordinate; a product that is turned is that of its operands in
turn; a GPU sums a product of few rows in parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.core import ShapedArray

from xform._cost_rules import aval
from xform._program import VIEWS, Node, Region, Value, folded
from xform._split import GPUS, Gpu, Product, parts

MERGED = "merged product"
# XLA's: a running sum is taken of so many elements at once.
_RUN = 16
_WARP = 32


class Made(Node):
    """A node that the compiler adds to a program, or that stands for several of them.

    Attributes:
      name: what it does, in the words of primitives; "library" for several.
      members: the nodes that it stands for.
    """

    __slots__ = ("members",)

    def __init__(
        self, name: str, at: Node, ins: list[Value], outs: list[Value], members: Sequence[Node] = ()
    ):
        self.eqn, self.place, self.regions = at.eqn, at.place, {}
        self.name, self.ins, self.outs, self.members = name, ins, outs, tuple(members)


type Rule = Callable[[Node, dict], list[Node] | None]
"""What stands for a node, or None where it stays; the second argument is for what nodes share."""


def expand(region: Region, rules: Mapping[str, Rule]) -> Region:
    """Takes operations apart, at every depth, by the rules of a device."""
    for inner in region.bodies():
        expand(inner, rules)
    shared: dict = dict(Counter(_reads(region)))
    nodes: list[Node] = []
    for node in _in_turn(region):
        rule = rules.get(node.name)
        nodes += (rule(node, shared) if rule else None) or [node]
    region.nodes[:] = _zeros_apart(nodes)
    return region


def _reads(region: Region) -> Iterator[Value]:
    """The operands of all nodes, and the results: a value once for each place where it is read."""
    for node in region.nodes:
        yield from node.ins
    yield from region.outputs


def rules_of(name: str) -> Mapping[str, Rule]:
    """The rules of a device by name."""
    if name.lower() == "cpu":
        return _CPU
    gpu = _gpu(name)
    return (
        {**_GPU, **dict.fromkeys(("dot_general", MERGED), partial(_split, gpu=gpu))} if gpu else {}
    )


def _gpu(name: str) -> Gpu | None:
    return next((gpu for known, gpu in GPUS.items() if known.lower() == name.lower()), None)


def is_gpu(name: str) -> bool:
    """Whether a device is a GPU whose compiler is known here."""
    return _gpu(name) is not None


def _make(name: str, at: Node, ins: Sequence[Value], *types: tuple) -> Node:
    """A node that makes new values of these shapes and dtypes."""
    outs = [Value(ShapedArray(shape, jnp.dtype(dtype))) for shape, dtype in types]
    return _made(name, at, ins, outs)


def _made(name: str, at: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Node:
    node = Made(name, at, list(ins), list(outs))
    for v in outs:
        v.node, v.view = node, None
    return node


def _random_bits(node: Node, shared: dict) -> list[Node] | None:
    """Threefry's: a counter of 64 bits for each result, as two numbers, of which it makes two."""
    del shared
    key, out = node.ins[0], node.outs[0]
    if "fry" not in str(key.aval.dtype) or out.size < 2:
        return None
    word = out.aval.shape, jnp.uint32
    counters = [_make("random_counter", node, [key], word) for _ in range(2)]
    cipher = _make("threefry2x32", node, [c.outs[0] for c in counters], word, word)
    if out.aval.dtype.itemsize != 4:
        return [*counters, cipher, _made("or", node, cipher.outs, [out])]
    return [*counters, cipher, _made("xor", node, cipher.outs, [out])]


def _running(node: Node, shared: dict, *, end: str) -> list[Node] | None:
    """A running sum: within runs, then of what the runs end with, then both together."""
    del shared
    params, out = node.eqn.params, node.outs[0]
    shape, dim = list(out.aval.shape), params["axis"]
    nodes: list[Node] = []
    ins = node.ins
    while shape[dim] > _RUN:
        runs = -(-shape[dim] // _RUN)
        shape[dim] = runs * _RUN
        nodes.append(_make("reduce_window", node, ins, (tuple(shape), out.aval.dtype)))
        ins, shape[dim] = nodes[-1].outs, runs
    if not nodes:
        return None
    parts = [v for made in nodes for v in made.outs]
    return [*nodes, _made(end, node, parts, [out])]


def _unstack(node: Node, shared: dict) -> list[Node] | None:
    """A slice for each result, and a view of it without the dimension."""
    del shared
    axis, (stack,) = node.eqn.params["axis"], node.ins
    if jnp.issubdtype(stack.aval.dtype, jax.dtypes.extended):  # keys are a few bytes
        return None
    shape = list(stack.aval.shape)
    shape[axis] = 1
    nodes: list[Node] = []
    for out in node.outs:
        nodes.append(_make("slice", node, [stack], (tuple(shape), out.aval.dtype)))
        nodes.append(_made("squeeze", node, nodes[-1].outs, [out]))
    return nodes


def _choice(node: Node, shared: dict) -> list[Node] | None:
    """A product with what is 1 or 0 chooses the other operand or zero: that of a one-hot label."""
    del shared
    for bits, other in zip(node.ins, node.ins[::-1], strict=True):
        made = bits.node
        if made is not None and made.name == "convert_element_type":
            (chosen,) = made.ins
            if chosen.aval.dtype == jnp.bool:
                return [_made("select_n", node, [chosen, other], node.outs)]
    return None


def _scaled(node: Node, shared: dict) -> list[Node] | None:
    """A quotient by a number that is known is a product with its reciprocal, which costs less."""
    del shared
    above, below = node.ins
    known = folded(source(below))
    if not known or not jnp.issubdtype(below.aval.dtype, jnp.floating):
        return None
    return [_made("mul", node, [above, below], node.outs)]


def _reciprocal(node: Node, shared: dict) -> list[Node] | None:
    """A quotient by what is spread out is a product with its reciprocal, which is found once."""
    if (scaled := _scaled(node, shared)) is not None:
        return scaled
    above, below = node.ins
    small = source(below)
    if small.size in (1, node.outs[0].size) or not jnp.issubdtype(small.aval.dtype, jnp.floating):
        return None
    nodes: list[Node] = []
    if ("1/", below) not in shared:
        nodes.append(_make("div", node, [small], (small.aval.shape, small.aval.dtype)))
        if small is not below:
            assert below.node is not None
            form = below.aval.shape, below.aval.dtype
            nodes.append(_make("broadcast_in_dim", below.node, nodes[0].outs, form))
        shared["1/", below] = nodes[-1].outs[0]
    return [*nodes, _made("mul", node, [above, shared["1/", below]], node.outs)]


def _into_sum(node: Node, shared: dict) -> list[Node] | None:
    """What is scattered into zeros and only added to an array is added in that array's place."""
    for v, array in zip(node.ins, node.ins[::-1], strict=True):
        made = v.node
        if made is None or made.name != "scatter-add" or made is array.node or shared[v] > 1:
            continue
        zeros = made.ins[0].node
        if zeros is not None and zeros.name == "broadcast_in_dim" and folded(zeros.ins[0]) == 0:
            return [_made("scatter-add", made, [array, *made.ins[1:]], node.outs)]
    return None


def source(v: Value) -> Value:
    """The smaller array that one is only spread out from, or itself."""
    made = v.node
    while made is not None and made.name in VIEWS:
        made = made.ins[0].node
    return made.ins[0] if made is not None and made.name == "broadcast_in_dim" else v


def _windows(node: Node, shared: dict) -> list[Node]:
    """Sums over windows are made in the kernel that reads them, and make their operand there."""
    del shared
    return [_made("windows", node, node.ins, node.outs)]


def _by_columns(node: Node, shared: dict) -> list[Node] | None:
    """LAPACK's matrices lie column after column: each is copied into the order that others read."""
    del shared
    matrices = [v for v in node.outs if len(v.aval.shape) > 1]
    instead = {v: Value(v.aval) for v in matrices}
    call = _made("lapack", node, node.ins, [instead.get(v, v) for v in node.outs])
    return [call, *(_made("copy", node, [instead[v]], [v]) for v in matrices)]


def _few(node: Node, shared: dict) -> list[Node] | None:
    """Sums of fewer than a warp's elements are made where they are read, as those of windows."""
    if node.ins[0].size >= _WARP * node.outs[0].size:
        return None
    return _windows(node, shared)


def _largest_of_windows(node: Node, shared: dict, *, alone: bool) -> list[Node]:
    """The place of each largest element, coordinate by coordinate; then what is added there.

    `alone`: whether the search over windows reads all that it needs from memory.
    """
    source, operand = node.ins
    small, shape = (aval(atom).shape for atom in node.eqn.invars)
    out = node.outs[0]
    nodes: list[Node] = []

    def once(d: int) -> Value:
        if (shape, d) not in shared:
            nodes.append(_make("iota", node, [], (shape, jnp.int32)))
            shared[shape, d] = nodes[-1].outs[0]
        return shared[shape, d]

    places = [once(d) for d in range(len(shape))]
    found = _make(
        "reduce_window" if alone else "reduce", node, [operand, *places],
        (small, out.aval.dtype), *[(small, jnp.int32)] * len(shape),
    )  # fmt: skip
    index = _make("concatenate", node, found.outs[1:], ((math.prod(small), len(shape)), jnp.int32))
    zeros = _make("iota", node, [], (shape, out.aval.dtype))
    into = [zeros.outs[0], index.outs[0], source]
    return [*nodes, zeros, found, index, _made("scatter-add", node, into, [out])]


def _stable(node: Node, shared: dict) -> list[Node] | None:
    """A sort that keeps equal elements in order sorts their places too."""
    del shared
    counts = any(v.node is not None and v.node.name == "iota" for v in node.ins)
    if counts or not node.eqn.params["is_stable"]:
        return None
    places = Value(ShapedArray(node.outs[0].aval.shape, jnp.dtype(jnp.int32)))
    return [_made("sort", node, node.ins, [*node.outs, places])]


def _split(node: Node, shared: dict, *, gpu: Gpu) -> list[Node] | None:
    """A product whose sum is made in parts, each a product in float32, and their sum."""
    del shared
    (contract, _), (batch, _) = node.eqn.params["dimension_numbers"]
    left, right = (aval(atom) for atom in node.eqn.invars[:2])
    out = node.outs[0]
    if not contract or left.dtype == jnp.int32:
        return None
    k, b = (math.prod(left.shape[d] for d in dims) for dims in (contract, batch))
    sums = max(4, out.aval.dtype.itemsize)
    m, n = (operand.size // max(1, k * b) for operand in (left, right))
    if node.name == MERGED:
        n = out.size // max(1, m * b)
    product = Product(
        b, m, n, k,
        left.dtype.itemsize, right.dtype.itemsize, out.aval.dtype.itemsize, sums,
    )  # fmt: skip
    if (count := parts(product, gpu)) == 1:
        return None
    dtype = jnp.float32 if out.aval.dtype.itemsize < 4 else out.aval.dtype
    whole = _make("product_parts", node, node.ins, ((count, *out.aval.shape), dtype))
    return [whole, _made("parts_sum", node, whole.outs, [out])]


_RUNNING = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_LAPACK = ("triangular_solve", "lu", "qr", "geqrf", "geqp3", "householder_product", "svd", "eigh")
_BOTH: Mapping[str, Rule] = {**dict.fromkeys(("add", "add_any"), _into_sum), "div": _scaled}
_CPU: Mapping[str, Rule] = {
    **_BOTH,
    "div": _reciprocal,
    **dict.fromkeys(_LAPACK, _by_columns),
    "mul": _choice,
    "random_bits": _random_bits,
    "unstack": _unstack,
    "select_and_scatter_add": partial(_largest_of_windows, alone=True),
    **dict.fromkeys(_RUNNING, partial(_running, end="running_end")),
}
_GPU: Mapping[str, Rule] = {
    **_BOTH,
    "select_and_scatter_add": partial(_largest_of_windows, alone=False),
    "sort": _stable,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _few),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows),
    **dict.fromkeys(_RUNNING, partial(_running, end="add")),
}


# ---- zeros to add to ----------------------------------------------------------------------------


def _zeros_apart(nodes: Sequence[Node]) -> list[Node]:
    """A copy of each array of one number for every scatter into it, all made with the array."""
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        made = node.ins[0].node if node.name.startswith("scatter") else None
        if made is not None and made.name == "broadcast_in_dim" and made.ins[0].size == 1:
            users.setdefault(node.ins[0], []).append(node)
    shared = {v: scatters for v, scatters in users.items() if len(scatters) > 1}
    found: list[Node] = []
    for node in nodes:
        found.append(node)
        for v in node.outs if shared else ():
            for scatter in shared.get(v, ()):
                form = v.aval.shape, v.aval.dtype
                found.append(_make("copy of zeros", node, [v], form))
                scatter.ins[0] = found[-1].outs[0]
    return found


# ---- products that are turned --------------------------------------------------------------------


def _in_turn(region: Region) -> list[Node]:
    """The product of operands in turn, where nothing reads a product but what turns it."""
    nodes = region.nodes
    readers = Counter(_reads(region))
    turned: dict[Node, Node] = {}
    for node in nodes:
        maker = node.ins[0].node if node.name == "transpose" else None
        if maker is not None and readers[node.ins[0]] == 1 and _turns(maker, node):
            turned[maker] = node
    gone = set(turned.values())
    return [_turned(n, turned[n]) if n in turned else n for n in nodes if n not in gone]


def _turns(product: Node, turn: Node) -> bool:
    """Whether a transpose puts the dimensions of a product's second operand before the first's."""
    if product.name != "dot_general" or isinstance(product, Made):
        return False
    (contract, _), (batch, _) = product.eqn.params["dimension_numbers"]
    rank, same = len(product.outs[0].aval.shape), len(batch)
    first = len(aval(product.eqn.invars[0]).shape) - len(contract)
    order = (*range(same), *range(first, rank), *range(same, first))
    return tuple(turn.eqn.params["permutation"]) == order


def _turned(product: Node, turn: Node) -> Node:
    """The product whose operands change places, with the result of the transpose.

    Which of them it needs in another order was decided before, so it stands as it was written.
    """
    return _made("dot_general", product, product.ins, turn.outs)
