"""`cost`: what a program costs, counted from its jaxpr before anything is compiled.

Every equation's work (`xform._cost_rules`) times how often it runs: a scan as often as its length,
a while as often as its condition says or else a symbolic `T1` times, a cond between its cheapest
and its dearest branch, a `shard_map` on each of its devices, a kernel at each point of its grid.
What is counted is the program as written: XLA may leave out what nothing needs
(`cost(...).compiled()`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from xform._amount import Amount, Polynomial, at, higher, lower, number, ratio
from xform._attention_cost import AttentionFlops, attention_work
from xform._cost_rules import RULES, Work, sent
from xform._program import Node, Region, content, program, prune, trip_count
from xform.jaxpr._walk import trace

_ATTENTION = ("flex_attention", "tile_sum")


@dataclass(frozen=True)
class Cost:
    """An amount of work.

    Attributes:
      matrix: FLOPs of matrix products, by what is multiplied ("bfloat16"; "float32@highest" where
        float32 was asked for in full).
      other: all other FLOPs.
      transcendentals: elementary functions evaluated, not part of FLOPs.
      bytes: moved to and from memory if every equation reads its operands and writes its results.
      fused_bytes: moved if each straight run of equations were one perfect kernel: it reads what
        comes from outside once, and writes once what outlives it. A loop's body is a run of its
        own.
      collective_bytes: sent by devices over each mesh axis.
    """

    matrix: Mapping[str, Amount] = field(default_factory=dict)
    other: Amount = 0
    transcendentals: Amount = 0
    bytes: Amount = 0
    fused_bytes: Amount = 0
    collective_bytes: Mapping[str, Amount] = field(default_factory=dict)

    @property
    def matrix_flops(self) -> Amount:
        """FLOPs of all matrix products."""
        return sum(self.matrix.values())

    @property
    def flops(self) -> Amount:
        """All FLOPs."""
        return self.matrix_flops + self.other

    def __add__(self, other: Cost) -> Cost:
        return self._join(other, lambda a, b: a + b)

    def __mul__(self, times: Amount) -> Cost:
        return self._map(lambda x: x * times)

    __rmul__ = __mul__

    def at(self, **trips: int) -> Cost:
        """The cost where loops run so often."""
        return self._map(lambda x: at(x, trips))

    def _map(self, f: Callable[[Any], Any]) -> Cost:
        of = lambda x: {k: f(v) for k, v in x.items()} if isinstance(x, dict) else f(x)
        return Cost(*(of(getattr(self, name)) for name in _FIELDS))

    def _join(self, other: Cost, f: Callable[[Any, Any], Any]) -> Cost:
        def of(a, b):
            if isinstance(a, dict):
                return {k: f(a.get(k, 0), b.get(k, 0)) for k in (*a, *(k for k in b if k not in a))}
            return f(a, b)

        return Cost(*(of(getattr(self, name), getattr(other, name)) for name in _FIELDS))

    def __str__(self) -> str:
        parts = [
            f"{number(self.flops)}FLOP",
            f"{number(self.transcendentals)}transcendental",
            f"{number(self.bytes)}B every equation",
            f"{number(self.fused_bytes)}B perfect fusion",
            *(f"{number(x)}B over {axis}" for axis, x in self.collective_bytes.items()),
        ]
        return ", ".join(parts)


_FIELDS = tuple(f.name for f in dataclasses.fields(Cost))
_NONE = Cost()


type Each = tuple[str, Amount, Amount, Amount, int, int, Mapping[str, Amount] | None]


class Row:
    """One equation, with what it does once and how often it runs.

    Attributes:
      node: the equation in its place.
      each: what it does, once on one device: kind of product, FLOPs of products, other FLOPs,
        transcendentals, bytes, fused bytes, bytes sent by mesh axis.
      times: how often each device runs it; of a branch, in the mean over branches.
      devices: how many devices do.
    """

    __slots__ = ("devices", "each", "node", "times")

    def __init__(self, node: Node, each: Each, times: Amount, devices: int):
        self.node, self.each, self.times, self.devices = node, each, times, devices


@dataclass(frozen=True)
class Costs:
    """What `cost` returns: the work of one call of a function, on all devices together.

    Attributes:
      rows: every equation that runs, with its work.
      low, high: the bounds on the total where branches, or masks read from arrays, leave a choice.
      trips: the loops whose trip count the program does not tell: symbol and line.
      attention: the FLOPs of each attention by several conventions, with how often it runs.
      unknown: primitives without a rule (with `strict=False`), with their lines.
    """

    rows: tuple[Row, ...]
    low: Cost
    high: Cost
    trips: Mapping[str, str]
    attention: tuple[tuple[AttentionFlops, Amount], ...]
    unknown: Mapping[str, tuple[str, ...]]
    jaxpr: Jaxpr = field(repr=False)

    @property
    def total(self) -> Cost:
        """The work of all devices; of branches, the mean."""
        return _total(self.rows)

    @property
    def per_device(self) -> Cost:
        """The work of the device that does most: one of each `shard_map`."""
        return _total(self.rows, per_device=True)

    flops = property(lambda self: self.total.flops, doc="All FLOPs, on all devices.")
    matrix_flops = property(lambda self: self.total.matrix_flops, doc="Those of matrix products.")
    other_flops = property(lambda self: self.total.other, doc="All other FLOPs.")
    transcendentals = property(lambda self: self.total.transcendentals, doc="Elementary functions.")
    bytes = property(lambda self: self.total.bytes, doc="Bytes moved, every equation by itself.")
    fused_bytes = property(lambda self: self.total.fused_bytes, doc="Bytes moved, fused perfectly.")
    collective_bytes = property(
        lambda self: self.total.collective_bytes, doc="Bytes sent by all devices, by mesh axis."
    )

    @property
    def recompute(self) -> Cost:
        """What runs again for the backward pass that the forward pass ran: the price of remat."""
        again = self.by_phase().get("recompute", _NONE)
        return sum(
            (Cost({a.kind: a.recompute * n}) for a, n in self.attention if a.recompute), again
        )

    @property
    def model(self) -> Mapping[str, Amount]:
        """FLOPs that MFU counts, by kind: products without recompute, causal attention by half."""
        flops = dict(self.total.matrix)
        for kind, again in self.by_phase().get("recompute", _NONE).matrix.items():
            flops[kind] = flops[kind] - again
        for a, n in self.attention:
            flops[a.kind] = flops.get(a.kind, 0) + (a.model - a.tiles) * n
        return flops

    @property
    def model_flops(self) -> Amount:
        """The sum of `model`: the FLOPs of the model itself, whatever the program does besides."""
        return sum(self.model.values())

    @property
    def devices(self) -> int:
        """On how many devices the program runs."""
        return max((row.devices for row in self.rows), default=1)

    def by_line(self, *, per_device: bool = False) -> dict[str, Cost]:
        """The total by the user's line, "file:line (function)", the dearest first."""
        return self._by([row.node.line for row in self.rows], per_device)

    def by_scope(self, *, per_device: bool = False) -> dict[str, Cost]:
        """The total by `jax.named_scope`, "block/attention", the dearest first."""
        return self._by([row.node.scope for row in self.rows], per_device)

    def by_phase(self) -> dict[str, Cost]:
        """The total of "forward", "backward" and "recompute"."""
        return self._by(_phases(self.rows))

    def by_primitive(self) -> dict[str, Cost]:
        """The total by primitive."""
        return self._by([row.node.name for row in self.rows])

    def _by(self, keys: Iterable[str], per_device: bool = False) -> dict[str, Cost]:
        groups: dict[str, list[Row]] = {}
        for key, row in zip(keys, self.rows, strict=True):
            groups.setdefault(key, []).append(row)
        sums = {key: _total(rows, per_device=per_device) for key, rows in groups.items()}
        return dict(sorted(sums.items(), key=lambda item: -_size(item[1].flops)))

    def at(self, **trips: int) -> Costs:
        """The same where loops run so often: `costs.at(T1=10)`.

        Raises:
          ValueError: on a symbol that `trips` does not have.
        """
        if unknown := sorted(trips.keys() - self.trips.keys()):
            have = ", ".join(f"{k} (at {line})" for k, line in self.trips.items()) or "none"
            raise ValueError(
                f"`at` got {', '.join(unknown)}; the loops without a count are {have}."
            )
        return dataclasses.replace(
            self,
            rows=tuple(Row(r.node, r.each, at(r.times, trips), r.devices) for r in self.rows),
            low=self.low.at(**trips),
            high=self.high.at(**trips),
            trips={k: line for k, line in self.trips.items() if k not in trips},
            attention=tuple((a, at(n, trips)) for a, n in self.attention),
        )

    def __str__(self) -> str:
        return table(self)


def cost(f: Callable, *, strict: bool = True) -> Callable[..., Costs]:
    """Returns a function that counts what a call of `f` costs, and runs nothing.

    Args:
      f: a function of pytrees of arrays, jitted or not, differentiated, sharded, …
      strict: whether an unknown primitive raises; if not, it is listed in `unknown`, and counts
        nothing but the bytes of its operands and results.

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
        jaxpr = trace(f, *args, **kwargs)
        return cost_of(jaxpr, jax.tree.leaves((args, kwargs)), strict=strict)

    return counted


def cost_of(jaxpr: Jaxpr, args: Sequence[Any] = (), *, strict: bool = True) -> Costs:
    """Returns what a closed jaxpr costs; `args`, as far as concrete, tell the content of inputs."""
    region = program(jaxpr, args)
    counter = _Counter()
    counter.count(region, 1, 1)
    if counter.unknown and strict:
        raise NotImplementedError(_no_rule(counter.unknown))
    low, high = counter.bounds(region) if counter.choices else (None, None)
    names = {name: node.line for node, name in counter.symbols.items()}
    lines: dict[str, list[str]] = {}
    for node in counter.unknown:
        lines.setdefault(node.name, []).append(node.line)
    costs = Costs(
        rows=tuple(counter.rows),
        low=low or _NONE, high=high or _NONE,
        trips=names,
        attention=tuple((a, n) for _, a, n in counter.attention),
        unknown={name: tuple(dict.fromkeys(found)) for name, found in lines.items()},
        jaxpr=jaxpr,
    )  # fmt: skip
    return costs if low else dataclasses.replace(costs, low=costs.total, high=costs.total)


def _no_rule(nodes: Iterable[Node]) -> str:
    """One error for all primitives without a rule."""
    lines: dict[str, list[str]] = {}
    for node in nodes:
        lines.setdefault(node.name, []).append(node.line)
    found = "; ".join(f"`{name}` at {', '.join(dict.fromkeys(at))}" for name, at in lines.items())
    name = next(iter(lines))
    return (
        f"no cost is known of {found}. Register a rule:\n\n"
        f'    @xform.cost_rule("{name}")\n'
        f"    def {name.replace('-', '_')}_cost(eqn):\n"
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
        self.work: dict[Node, Each] = {}
        self.low: dict[Node, Work] = {}
        self.given = None if trips is None else iter(trips)  # those of an attention's program
        self.counts: dict[Node, Amount] = {}

    def count(self, region: Region, times: Amount, devices: int) -> None:
        """Adds a row for each node, at every depth."""
        loaded: set = set()
        for node in region.nodes:
            if node.name == "pallas_call":
                self._kernel(node, times, devices, loaded)
            elif node.regions:
                for inner, n in self._runs(node):
                    self.count(inner, times * n, devices * _spread(node))
            else:
                self._leaf(node, times, devices, loaded)

    def _runs(self, node: Node) -> list[tuple[Region, Amount]]:
        """How often a structural node runs each of its regions, in the mean."""
        regions = list(node.regions.values())
        if node.name in ("scan", "while"):
            n = self._trips(node)
            return [(r, n + 1 if label == "cond" else n) for label, r in node.regions.items()]
        if node.name == "cond":
            if (taken := _taken(node)) is not None:
                return [(regions[taken], 1)]
            if self.given is not None:
                # Attention's own branch, taken where something is not finite: the shorter is usual.
                return [(min(regions, key=lambda r: len(r.nodes)), 1)]
            self.choices = True
            return [(r, Fraction(1, len(regions))) for r in regions]
        return [(r, 1) for r in regions]

    def _trips(self, node: Node) -> Amount:
        if node in self.counts:
            return self.counts[node]
        n: Amount | None = trip_count(node)
        if n is None and self.given is not None:
            n = next(self.given, None)
        if n is None:
            name = self.symbols.setdefault(node, f"T{len(self.symbols) + 1}")
            n = Polynomial.symbol(name)
        self.counts[node] = n
        return n

    def _leaf(self, node: Node, times: Amount, devices: int, loaded: set) -> None:
        rule, network = RULES.get(node.eqn.primitive.name), None
        if rule is not None:
            work = rule(node.eqn)
        elif node.name in _ATTENTION:
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

    def _kernel(self, node: Node, times: Amount, devices: int, loaded: set) -> None:
        """A kernel: its body at each point of the grid, on blocks that come from memory."""
        grid, start, unknown = _grid(node), len(self.rows), len(self.unknown)
        whole = _each(node, Work(), None, loaded)
        self.count(node.regions["kernel"], times * grid, devices)
        if len(self.unknown) > unknown and (said := node.eqn.params.get("cost_estimate")):
            # What the author of the kernel says of it, where we can't look inside.
            del self.unknown[unknown:], self.rows[start:]
            node.regions.clear()
            kind = node.ins[0].aval.dtype.name
            each = (kind, said.flops, 0, said.transcendentals, said.bytes_accessed, whole[5], None)
        else:
            for row in self.rows[start:]:  # its own arrays are on the chip
                row.each = self.work[row.node] = (*row.each[:4], 0, 0, None)
            each = (*whole[:4], _blocks_moved(node, grid), *whole[5:])
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
        return tuple(_total([Row(node, x, 1, 1)]) for x in (least, each))

    def bounds(self, region: Region) -> tuple[Cost, Cost]:
        """The least and the most that one run of a region costs, on all its devices."""
        low = high = _NONE
        for node in region.nodes:
            parts = [self._bounds(node)] if node in self.work else []
            if node.name == "cond" and _taken(node) is None:
                branches = [self.bounds(r) for r in node.regions.values()]
                least, most = branches[0]
                for a, b in branches[1:]:
                    least, most = least._join(a, lower), most._join(b, higher)
                parts.append((least, most))
            elif node.regions:
                n = _grid(node) if node.name == "pallas_call" else _spread(node)
                for inner, times in self._runs(node):
                    a, b = self.bounds(inner)
                    parts.append((a * (n * times), b * (n * times)))
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
        raise NotImplementedError(_no_rule(counter.unknown))
    total = _total(counter.rows)
    kind = next((kind for kind, flops in total.matrix.items() if flops), None)
    return Work(total.matrix_flops, total.other, total.transcendentals, kind=kind)


def _spread(node: Node) -> int:
    """On how many more devices a node's body runs than the node itself."""
    if node.name != "shard_map":
        return 1
    sizes = node.eqn.params["mesh"].shape
    return math.prod(sizes[axis] for axis in node.eqn.params["newly_manual_axes"])


def _taken(node: Node) -> int | None:
    """Which branch runs, where that is known: by the platform, or by a known index."""
    maker = node.ins[0].node
    if maker is not None and maker.name == "platform_index":
        names, platform = maker.eqn.params["platforms"], jax.default_backend()
        fits = [i for i, name in enumerate(names) if name is None or platform in name]
        return min(fits, key=lambda i: names[i] is None)
    index = content(node.ins[0])
    return None if index is None else min(max(int(index), 0), len(node.regions) - 1)


def _grid(node: Node) -> int:
    return math.prod(int(n) for n in node.eqn.params["grid_mapping"].grid)


def _blocks_moved(node: Node, points: int) -> int:
    """Bytes of the blocks that a kernel's pipeline fetches and stores.

    A block is moved when its index changes from one point of the grid to the next, the last axis
    running fastest; at every point where the index depends on more than the point.
    """
    import numpy as np

    mapping, moved = node.eqn.params["grid_mapping"], 0
    grid = np.stack(np.unravel_index(np.arange(points), mapping.grid), -1) if mapping.grid else None
    for block in mapping.block_mappings:
        shape = [getattr(n, "block_size", n) for n in block.block_shape]
        size = math.prod(n if isinstance(n, int) else 1 for n in shape)
        index = block.index_map_jaxpr
        changes = points
        if grid is not None and len(index.invars) == grid.shape[1] and points <= 2**20:
            at = jax.vmap(jaxpr_as_fun(index))(*(np.asarray(c, np.int32) for c in grid.T))
            at = np.stack([np.broadcast_to(np.asarray(x), (points,)) for x in at], -1)
            changes = 1 + int(np.any(at[1:] != at[:-1], -1).sum())
        moved += changes * size * block.array_aval.dtype.itemsize
    return moved


def _phases(rows: Sequence[Row]) -> list[str]:
    """Of each row: "forward", "backward" or "recompute".

    What a remat runs is not all of it run again: it also computes what only the backward pass
      needs.
    An equation is run again if the forward pass has the same one: from the same point of the user's
    program, the same primitive, the same result.
    """
    phases = [row.node.phase for row in rows]
    if "recompute" not in phases:
        return phases

    def key(row: Row) -> tuple:
        eqn = row.node.eqn
        return id(eqn.source_info.traceback), row.node.name, *(v.aval for v in eqn.outvars)

    forward = {key(row) for row, phase in zip(rows, phases, strict=True) if phase == "forward"}
    return [
        "backward" if phase == "recompute" and key(row) not in forward else phase
        for row, phase in zip(rows, phases, strict=True)
    ]


def _total(rows: Iterable[Row], *, per_device: bool = False) -> Cost:
    """The cost of all rows."""
    matrix: dict[str, Amount] = {}
    network: dict[str, Amount] = {}
    other: Amount = 0
    transcendentals: Amount = 0
    moved: Amount = 0
    fused: Amount = 0
    for row in rows:
        n = row.times if per_device else row.times * row.devices
        kind, products, plain, functions, loads, least, sends = row.each
        if products:
            matrix[kind] = matrix.get(kind, 0) + products * n
        other += plain * n
        transcendentals += functions * n
        moved += loads * n
        fused += least * n
        for axis, x in sends.items() if sends else ():
            network[axis] = network.get(axis, 0) + x * n
    whole = Cost(matrix, other, transcendentals, moved, fused, network)
    return whole._map(lambda x: ratio(x, 1))


def _size(amount: Amount) -> float:
    """A number to sort by: loops without a count as if they ran once."""
    if isinstance(amount, Polynomial):
        return float(sum(amount.terms.values()))
    return float(amount)


def table(costs: Costs, lines: int = 12) -> str:
    """The report as text: the total, what each line costs, attention by convention."""
    total = costs.total
    rows = [("matrix", "other", "transc.", "bytes", "fused", "sent", "line")]
    by_line = list(costs.by_line().items())
    for line, c in [("total", total), *by_line[:lines]]:
        network = sum(c.collective_bytes.values())
        amounts = (c.matrix_flops, c.other, c.transcendentals, c.bytes, c.fused_bytes, network)
        rows.append((*map(number, amounts), line))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    cells = lambda row: [x.rjust(w) for x, w in zip(row[:-1], widths, strict=True)]
    out = ["  ".join([*cells(row), row[-1]]) for row in rows]
    if len(by_line) > lines:
        out.append(f"… and {len(by_line) - lines} lines more")
    if costs.low != costs.high:
        out.append(f"at least {costs.low}\nat most  {costs.high}")
    if again := costs.recompute.flops:
        out.append(f"of it recompute {number(again)}FLOP")
    for a, n in costs.attention:
        seen = "unknown, the mask reads arrays" if a.exact is None else number(a.exact * n)
        out.append(
            f"attention at {a.line}: full {number(a.full * n)}, "
            f"{'causal' if a.causal else 'not causal'} model convention {number(a.model * n)}, "
            f"exact {seen}, tiles that run {number(a.tiles * n)} FLOP"
        )
    out += [f"{name} is how often the loop at {line} runs" for name, line in costs.trips.items()]
    for name, found in costs.unknown.items():
        out.append(f"no rule for `{name}` at {', '.join(found)}: 0 FLOPs counted")
    return "\n".join(out)
