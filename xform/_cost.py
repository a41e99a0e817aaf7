"""`cost`: what a program costs, counted from its jaxpr before anything is compiled.

Every equation's work (`xform._cost_rules`) times how often it runs: a scan as often as its length,
a while as often as its condition says or else a symbolic `T1` times, a cond between its cheapest
and its dearest branch, a `shard_map` on each of its devices, a kernel at each point of its grid.
What is counted is the program as written; XLA leaves out what nothing needs, and does once what is
written twice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import numpy as np

from xform._amount import Amount, Polynomial, higher, lower, ratio
from xform._attention_cost import AttentionFlops, attention_work
from xform._compat import Jaxpr, JaxprEqn, weakref_lru_cache
from xform._cost_rules import BY_TYPE, RULES, CostRule, Work, sent
from xform._costs import ATTENTION, NONE, Cost, Costs, Count, Each, Row, add_up
from xform._devices import DTYPES
from xform._grid import at_each, blocks_moved, places, size_of
from xform._hlo import TARGETS, Kernel, compile_for, read
from xform._program import Node, Region, Value, content, is_concrete, program, prune, trip_count
from xform._tally import tally
from xform._traffic import Moved, traffic
from xform.jaxpr._trace import jitted_call, trace_call


def cost(f: Callable, *, strict: bool = True, compiled: str | None = None) -> Callable[..., Costs]:
    """Returns a function that counts what a call of `f` costs, and runs nothing.

    Args:
      f: a function of pytrees of arrays, jitted or not, differentiated, sharded, …
      strict: whether an unknown primitive raises; if not, it is listed in `unknown`, and counts
        nothing but the bytes of its operands and results.

      compiled: a device to compile for besides: what JAX runs on, or one that need not be there
        ("H200"). What the compiled program does is then in `Costs.compiled`.

    Returns:
      A function of the arguments of `f`, which may be `jax.ShapeDtypeStruct`s, that returns
      `Costs`. Concrete arguments tell more: what a mask leaves, how often a loop runs.

    Raises:
      NotImplementedError: at a primitive without a rule, with the user's line and how to write one.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    >>> w = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32)
    >>> layers = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    >>> costs = cost(layers)(x, w)
    >>> costs.matrix_flops == 5 * 2 * 8 * 16 * 16, costs.transcendentals == 5 * 8 * 16
    (True, True)
    """

    def counted(*args, **kwargs) -> Costs:
        call = trace_call(f, args, kwargs)
        costs = cost_of(call.jaxpr, call.args, strict=strict)
        if compiled is None:
            return costs
        return dataclasses.replace(costs, compiled=_compiled(f, compiled, args, kwargs))

    return counted


def _compiled(f: Callable, name: str, args: Sequence, kwargs: Mapping) -> Cost:
    """What each device runs of a compiled program; a loop without a count, once."""
    if name in TARGETS:
        done = compile_for(name, f, *args, **kwargs)
    else:
        jitted, args, kwargs = jitted_call(f, args, kwargs)
        done = jitted.lower(*args, **kwargs).compile()
    ran = read(done)
    kinds = {kernel.factor for kernel in ran.kernels if kernel.work.matrix}
    moved = ran.total(lambda kernel: kernel.bytes)
    return Cost(
        {DTYPES.get(k, k): ran.total(partial(_products, k)) for k in kinds},
        ran.total(lambda kernel: kernel.work.other),
        ran.total(lambda kernel: kernel.work.transcendental),
        moved, moved,
    )  # fmt: skip


def _products(kind: str, kernel: Kernel) -> int:
    return kernel.work.matrix if kernel.factor == kind else 0


def cost_of(jaxpr: Jaxpr, args: Sequence[Any] = (), *, strict: bool = True) -> Costs:
    """Returns what a closed jaxpr costs; `args`, as far as concrete, tell the content of inputs."""
    rules = tuple(RULES.values())
    if (quick := _tallied(jaxpr, rules)) is not None:  # nothing asks for the content of an input
        counted, moved = partial(_counted, jaxpr, rules), partial(_moved, jaxpr, rules)
        return Costs(jaxpr, counted, quick, moved)
    told = any(map(is_concrete, args))
    found = count(jaxpr, args) if told else _counted(jaxpr, rules)
    if found.unknown and strict:
        raise NotImplementedError(_no_rule(found.unknown))
    return Costs(jaxpr, lambda: found)


# What is known of a program while JAX keeps it, and counted by the same rules.


@weakref_lru_cache
def _tallied(jaxpr: Jaxpr, rules: tuple[CostRule, ...]) -> Cost | None:
    del rules
    return tally(jaxpr)


@weakref_lru_cache
def _moved(jaxpr: Jaxpr, rules: tuple[CostRule, ...]) -> Moved | None:
    del rules
    return traffic(jaxpr)


@weakref_lru_cache
def _counted(jaxpr: Jaxpr, rules: tuple[CostRule, ...]) -> Count:
    del rules
    return count(jaxpr)


def count(jaxpr: Jaxpr, args: Sequence[Any] = ()) -> Count:
    """Returns all that is counted of a closed jaxpr."""
    region = program(jaxpr, args)
    counter = _Counter()
    counter.count(region, 1, 1)
    if counter.choices:
        low, high = counter.bounds(region)
    else:
        low = high = add_up(counter.rows)
    return Count(
        rows=tuple(counter.rows),
        low=low, high=high,
        trips={name: node.line for node, name in counter.symbols.items()},
        attention=tuple((a, n) for _, a, n in counter.attention),
        unknown=_lines(counter.unknown),
    )  # fmt: skip


def _lines(nodes: Iterable[Node]) -> dict[str, tuple[str, ...]]:
    """The primitives of nodes, each with its lines."""
    lines: dict[str, list[str]] = {}
    for node in nodes:
        lines.setdefault(node.name, []).append(node.line)
    return {name: tuple(dict.fromkeys(found)) for name, found in lines.items()}


def _no_rule(lines: Mapping[str, Sequence[str]]) -> str:
    """One error for all primitives without a rule."""
    found = "; ".join(f"`{name}` at {', '.join(at)}" for name, at in lines.items())
    name = next(iter(lines))
    return (
        f"no cost is known of {found}. Register a rule:\n\n"
        f'    @xform.cost_rule("{name}")\n'
        f"    def {re.sub(r'\W', '_', name)}_cost(eqn):\n"
        "        return xform.Work(matrix=0, other=eqn.outvars[0].aval.size)\n\n"
        "or call `cost(f, strict=False)`, which lists it in `unknown` and counts its bytes alone."
    )


class _Counter:
    """Counts the nodes of a program, region by region."""

    def __init__(self, trips: Sequence[Amount] | None = None):
        self.rows: list[Row] = []
        self.symbols: dict[Node, str] = {}
        self.unknown: list[Node] = []
        self.attention: list[tuple[Node, AttentionFlops, Amount]] = []
        self.choices = False
        self.known: dict[Any, Work] = {}
        self.work: dict[Node, Each] = {}
        self.low: dict[Node, Work] = {}
        self.given = None if trips is None else iter(trips)  # those of an attention's program
        self.runs: dict[Node, list[tuple[Region, Any]]] = {}
        self.decided: dict[Node, Cost] = {}  # kernels that leave no choice, and what one run does
        self.at: tuple[np.ndarray, ...] | None = None  # in a kernel, the places of its points

    def count(self, region: Region, times: Any, devices: int) -> None:
        """Adds a row for each node, at every depth; in a kernel, `times` is one of each point."""
        loaded: set = set()
        for node in region.nodes:
            if node.name == "pallas_call":
                self._kernel(node, times, devices, loaded)
            elif node.regions:
                self.runs[node] = self._runs(node)
                for inner, n in self.runs[node]:
                    self.count(inner, _product(times, n), devices * _spread(node))
            else:
                self._leaf(node, times, devices, loaded)

    def _runs(self, node: Node) -> list[tuple[Region, Any]]:
        """How often a structural node runs each of its regions, in the mean; or at each point."""
        regions = list(node.regions.values())
        if node.name in ("scan", "while"):
            n = self._trips(node)
            return [(r, n + 1 if label == "cond" else n) for label, r in node.regions.items()]
        if node.name == "cond":
            if (taken := self._taken(node)) is not None:
                if not np.ndim(taken):
                    return [(regions[int(taken)], 1)]
                chosen = [np.asarray(taken == i, np.int64) for i in range(len(regions))]
                return [(r, n) for r, n in zip(regions, chosen, strict=True) if n.any()]
            if self.given is not None:
                # Attention's own branch, taken where something is not finite: the shorter is usual.
                return [(min(regions, key=lambda r: len(r.nodes)), 1)]
            self.choices = True
            return [(r, Fraction(1, len(regions))) for r in regions]
        return [(r, 1) for r in regions]

    def _taken(self, node: Node) -> Any | None:
        """Which branch runs, or which at each point, where that is known."""
        index = _platform(node)
        if index is None:
            index = self._look(node.ins[0])
        return None if index is None else np.clip(index, 0, len(node.regions) - 1)

    def _look(self, value: Value) -> Any | None:
        """What a value holds, or what it holds at each point."""
        if (known := content(value)) is not None or self.at is None:
            return known
        return at_each(value, self.at)

    def _trips(self, node: Node) -> Any:
        n: Any = trip_count(node, self._look)
        if n is None and self.given is not None:
            n = next(self.given, None)
        if n is None:
            name = self.symbols.setdefault(node, f"T{len(self.symbols) + 1}")
            n = Polynomial.symbol(name)
        return n

    def _leaf(self, node: Node, times: Any, devices: int, loaded: set) -> None:
        rule, network = RULES.get(node.eqn.primitive.name), None
        if rule is not None:
            work = self._of_type(rule, node.eqn) if rule in BY_TYPE else rule(node.eqn)
        elif node.name in ATTENTION:
            low, work, flops = attention_work(node, _price)
            self.attention.append((node, flops, times * devices))
            self.choices |= low != work
            self.low[node] = low
        else:
            self.unknown.append(node)
            work = Work()
        if node.place.axes and (found := sent(node.eqn, dict(node.place.axes))) is not None:
            network, additions = found
            work = dataclasses.replace(work, other=work.other + additions)
        each = _each(node, work, network, loaded)
        self.work[node] = each
        self.rows.append(Row(node, each, times, devices))

    def _of_type(self, rule: CostRule, eqn: JaxprEqn) -> Work:
        """What a rule says that asks for no more than types, asked once for equal ones."""
        params = [eqn.params[p] for p in BY_TYPE[rule] if p in eqn.params]
        key = eqn.primitive, eqn.invars[0].aval, eqn.outvars[0].aval, *params
        if (work := self.known.get(key)) is None:
            work = self.known[key] = rule(eqn)
        return work

    def _kernel(self, node: Node, times: Amount, devices: int, loaded: set) -> None:
        """A kernel: its body at each point of the grid, on blocks that come from memory."""
        start, unknown, choices = len(self.rows), len(self.unknown), self.choices
        whole = _each(node, Work(), None, loaded)
        self.at, self.choices = places(node), False
        points = size_of(node) if self.at is None else np.ones(len(self.at[0]), np.int64)
        self.count(node.regions["kernel"], points, devices)
        self.at, body = None, self.rows[start:]
        once = [_summed(row.times) for row in body]
        for row, n in zip(body, once, strict=True):
            row.times = times * n
        if len(self.unknown) > unknown and (said := node.eqn.params.get("cost_estimate")):
            # What the author of the kernel says of it, where we can't look inside.
            del self.unknown[unknown:], self.rows[start:]
            node.regions.clear()
            self.choices = choices
            kind = node.ins[0].aval.dtype.name
            each = (kind, said.flops, 0, said.transcendentals, said.bytes_accessed, whole[5], None)
        else:
            for row in body:  # its own arrays are on the chip
                row.each = self.work[row.node] = (*row.each[:4], 0, 0, None)
            each = (*whole[:4], blocks_moved(node), *whole[5:])
            if not self.choices:
                rows = [Row(r.node, r.each, n, 1) for r, n in zip(body, once, strict=True)]
                self.decided[node] = add_up(rows)
            self.choices |= choices
        self.work[node] = each
        self.rows.insert(start, Row(node, each, times, devices))

    def _bounds(self, node: Node) -> tuple[Cost, Cost]:
        each = self.work[node]
        low = self.low.get(node)
        least = (
            each
            if low is None
            else (each[0], low.matrix, low.other, low.transcendentals, *each[4:])
        )
        return add_up([Row(node, least, 1, 1)]), add_up([Row(node, each, 1, 1)])

    def bounds(self, region: Region) -> tuple[Cost, Cost]:
        """The least and the most that one run of a region costs, on all its devices."""
        low = high = NONE
        for node in region.nodes:
            parts = [self._bounds(node)] if node in self.work else []
            if node in self.decided:
                parts.append((self.decided[node], self.decided[node]))
            elif node.name == "cond" and any(isinstance(n, Fraction) for _, n in self.runs[node]):
                branches = [self.bounds(r) for r in node.regions.values()]
                least, most = branches[0]
                for a, b in branches[1:]:
                    least, most = least._join(a, lower), most._join(b, higher)
                parts.append((least, most))
            elif node.name == "pallas_call":
                a, b = self.bounds(node.regions["kernel"]) if node.regions else (NONE, NONE)
                parts.append((a * size_of(node), b * size_of(node)))
            elif node.regions:
                for inner, n in self.runs[node]:
                    a, b = self.bounds(inner)
                    parts.append((a * (_spread(node) * _mean(n)), b * (_spread(node) * _mean(n))))
            for a, b in parts:
                low, high = low + a, high + b
        return low, high


def _each(node: Node, work: Work, network: Mapping | None, loaded: set) -> Each:
    """What one node does; `loaded` are the values from outside that its region has read."""
    read, fused, seen = work.read, 0, None
    for v in node.ins:
        if v is seen or (v.known is not None and v.size == 1):
            continue
        seen = v  # x * x reads x once
        if work.read is None:
            read = (read or 0) + v.bytes
        v = v if v.view is None else v.view
        if v.node is None or v.node.regions:
            if work.read is not None:
                fused = work.read
            elif v not in loaded:
                loaded.add(v)
                fused += v.bytes
    written = work.written
    if written is None:
        written = 0
        for v in node.outs:
            written += v.bytes
            fused += v.bytes if v.escapes else 0
    elif written and any(v.escapes for v in node.outs):
        fused += written
    kind = work.kind or (node.ins[0].aval.dtype.name if work.matrix and node.ins else "")
    moved = (read or 0) + written
    return kind, work.matrix, work.other, work.transcendentals, moved, fused, network


def _price(jaxpr: Jaxpr, trips: Sequence[Amount]) -> Work:
    """The work of a program whose undecided loops run as often as `trips` says, in order."""
    counter = _Counter(trips)
    counter.count(prune(program(jaxpr)), 1, 1)
    if counter.unknown:
        raise NotImplementedError(_no_rule(_lines(counter.unknown)))
    total = add_up(counter.rows)
    kind = next((kind for kind, flops in total.matrix.items() if flops), None)
    return Work(total.matrix_flops, total.other, total.transcendentals, kind=kind)


def _spread(node: Node) -> int:
    """On how many more devices a node's body runs than the node itself."""
    if node.name != "shard_map":
        return 1
    sizes = node.eqn.params["mesh"].shape
    return math.prod(sizes[axis] for axis in node.eqn.params["newly_manual_axes"])


def _platform(node: Node) -> int | None:
    """Which branch of a choice by platform runs here."""
    maker = node.ins[0].node
    if maker is None or maker.name != "platform_index":
        return None
    names, platform = maker.eqn.params["platforms"], jax.default_backend()
    fits = [i for i, name in enumerate(names) if name is None or platform in name]
    return min(fits, key=lambda i: names[i] is None)


# ---- amounts at each point of a grid -------------------------------------------------------------


def _product(times: Any, n: Any) -> Any:
    """A product of amounts, of which those in a kernel may be one for each point.

    How often a loop without a count runs is one symbol for all points.
    """
    if isinstance(n, Polynomial):
        return _summed(times) * n
    return times * (_mean(n) if isinstance(times, Polynomial) else n)


def _summed(x: Any) -> Amount:
    """The sum over all points."""
    if not isinstance(x, np.ndarray):
        return x
    total = x.sum()
    return total if isinstance(total, Fraction) else int(total)


def _mean(x: Any) -> Amount:
    return ratio(_summed(x), x.size) if isinstance(x, np.ndarray) else x
