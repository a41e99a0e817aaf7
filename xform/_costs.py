"""What `cost` returns: amounts of work, by line, by name scope and by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xform._amount import Amount, Polynomial, at, number, ratio
from xform._attention_cost import AttentionFlops
from xform._compat import Jaxpr
from xform._program import Node
from xform._show import Table, as_text, page, short
from xform._traffic import Moved


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
        def of(x) -> Any:
            return {k: f(v) for k, v in x.items()} if isinstance(x, dict) else f(x)

        return Cost(*(of(getattr(self, name)) for name in _FIELDS))

    def _join(self, other: Cost, f: Callable[[Any, Any], Any]) -> Cost:
        def of(a, b) -> Any:
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
NONE = Cost()


ATTENTION = ("flex_attention", "tile_sum")
"""Primitives whose rows have an entry in `Costs.attention`, in the same order."""

type Each = tuple[str, Amount, Amount, Amount, int, int, Mapping[str, Amount] | None]


class Row:
    """One equation, with what it does once and how often it runs.

    Attributes:
      node: the equation in its place.
      each: what it does, once on one device: kind of product, FLOPs of products, other FLOPs,
        transcendentals, bytes, fused bytes, bytes sent by mesh axis.
      times: how often each device runs it; of a branch, in the mean over branches. While a kernel
        is counted, an array of that for each point of its grid.
      devices: how many devices do.
    """

    __slots__ = ("devices", "each", "node", "times")

    def __init__(self, node: Node, each: Each, times: Any, devices: int):
        self.node, self.each, self.times, self.devices = node, each, times, devices


@dataclass(frozen=True)
class Count:
    """All that is counted of a program; the attributes are those of `Costs`.

    What is asked of it is added up once: a program that is asked about again has its count.
    """

    rows: tuple[Row, ...]
    low: Cost
    high: Cost
    trips: Mapping[str, str]
    attention: tuple[tuple[AttentionFlops, Amount], ...]
    unknown: Mapping[str, tuple[str, ...]]

    @cached_property
    def total(self) -> Cost:
        return add_up(self.rows)

    @cached_property
    def per_device(self) -> Cost:
        return add_up(self.rows, per_device=True)

    @cached_property
    def _sums(self) -> dict[tuple[str, bool], dict[str, Cost]]:
        return {}

    def by(self, what: str, per_device: bool = False) -> dict[str, Cost]:
        """The total by line, scope, phase or primitive, the dearest first."""
        if (found := self._sums.get((what, per_device))) is None:
            groups: dict[str, list[Row]] = {}
            for key, row in zip(_KEYS[what](self.rows), self.rows, strict=True):
                groups.setdefault(key, []).append(row)
            sums = {key: add_up(rows, per_device=per_device) for key, rows in groups.items()}
            found = dict(sorted(sums.items(), key=lambda item: -_size(item[1].flops)))
            self._sums[what, per_device] = found
        return dict(found)


@dataclass(frozen=True, repr=False, eq=False)
class Costs:
    """What `cost` returns: the work of one call of a function, on all devices together.

    It prints as a table, and shows itself in a notebook. FLOPs and elementary functions are
    known at once; the bytes of the total from when they are first asked for; lines and whatever
    else asks where each value goes, from when one of them is.

    Attributes:
      jaxpr: the program.
      count: makes the full count.
      tally: FLOPs and elementary functions of the total, where they are known without it.
      traffic: counts the bytes of the total, where they may be known without it.
      compiled: what each device runs of the compiled program, where that was asked for.
      rows: every equation that runs, with its work.
      low, high: the bounds on the total where branches, or masks read from arrays, leave a choice.
      trips: the loops whose trip count the program does not tell: symbol and line.
      attention: the FLOPs of each attention by several conventions, with how often it runs.
      unknown: primitives without a rule (with `strict=False`), with their lines.
    """

    jaxpr: Jaxpr
    count: Callable[[], Count]
    tally: Cost | None = None
    traffic: Callable[[], Moved | None] = lambda: None
    compiled: Cost | None = None

    @cached_property
    def _counted(self) -> Count:
        return self.count()

    rows = property(lambda self: self._counted.rows)
    low = property(lambda self: self._counted.low)
    high = property(lambda self: self._counted.high)
    trips = property(lambda self: self._counted.trips)
    attention = property(lambda self: self._counted.attention)
    unknown = property(lambda self: self._counted.unknown)

    @cached_property
    def total(self) -> Cost:
        """The work of all devices; of branches, the mean."""
        if self.tally is None or (moved := self.traffic()) is None:
            return self._counted.total
        flops = self.tally.matrix, self.tally.other, self.tally.transcendentals
        return Cost(*flops, moved.bytes, moved.fused, dict(moved.network))

    @property
    def per_device(self) -> Cost:
        """The work of the device that does most: one of each `shard_map`."""
        return self._counted.per_device

    @property
    def _arithmetic(self) -> Cost:
        """The total, of which only FLOPs and elementary functions are asked for."""
        return self.tally or self.total

    matrix = property(
        lambda self: self._arithmetic.matrix, doc="FLOPs of products, by what is multiplied."
    )
    flops = property(lambda self: self._arithmetic.flops, doc="All FLOPs, on all devices.")
    matrix_flops = property(
        lambda self: self._arithmetic.matrix_flops, doc="Those of matrix products."
    )
    other_flops = property(lambda self: self._arithmetic.other, doc="All other FLOPs.")
    transcendentals = property(
        lambda self: self._arithmetic.transcendentals, doc="Elementary functions."
    )
    bytes = property(lambda self: self.total.bytes, doc="Bytes moved, every equation by itself.")
    fused_bytes = property(lambda self: self.total.fused_bytes, doc="Bytes moved, fused perfectly.")
    collective_bytes = property(
        lambda self: self.total.collective_bytes, doc="Bytes sent by all devices, by mesh axis."
    )

    @property
    def recompute(self) -> Cost:
        """What runs again for the backward pass that the forward pass ran: the price of remat."""
        again = self.by_phase().get("recompute", NONE)
        return sum(
            (Cost({a.kind: a.recompute * n}) for a, n in self.attention if a.recompute), again
        )

    @property
    def model(self) -> Mapping[str, Amount]:
        """FLOPs that MFU counts, by kind: products without recompute, causal attention by half."""
        flops = dict(self.total.matrix)
        for kind, again in self.by_phase().get("recompute", NONE).matrix.items():
            flops[kind] = flops[kind] + again * -1
        for (a, n), phase in zip(self.attention, self._phases_of_attention(), strict=True):
            if phase != "recompute":  # or else all of it is out already
                flops[a.kind] = flops.get(a.kind, 0) + (a.model - a.tiles) * n
        return flops

    def _phases_of_attention(self) -> list[str]:
        phases = zip(self.rows, _phases(self.rows), strict=True)
        return [phase for row, phase in phases if row.node.name in ATTENTION]

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
        return self._counted.by("line", per_device)

    def by_scope(self, *, per_device: bool = False) -> dict[str, Cost]:
        """The total by `jax.named_scope`, "block/attention", the dearest first."""
        return self._counted.by("scope", per_device)

    def by_phase(self) -> dict[str, Cost]:
        """The total of "forward", "backward" and "recompute"."""
        return self._counted.by("phase")

    def by_primitive(self) -> dict[str, Cost]:
        """The total by primitive."""
        return self._counted.by("primitive")

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
        found = dataclasses.replace(
            self._counted,
            rows=tuple(Row(r.node, r.each, at(r.times, trips), r.devices) for r in self.rows),
            low=self.low.at(**trips),
            high=self.high.at(**trips),
            trips={k: line for k, line in self.trips.items() if k not in trips},
            attention=tuple((a, at(n, trips)) for a, n in self.attention),
        )
        return Costs(self.jaxpr, lambda: found, compiled=self.compiled)

    def __repr__(self) -> str:
        by_line = self.by_line()
        return "\n".join([as_text(_table(self.total, by_line), margin=""), *_notes(self, by_line)])

    def _repr_html_(self) -> str:
        title = f"What a call costs, on {self.devices} device{'s' if self.devices > 1 else ''}"
        by_line = self.by_line()
        return page(title, [_table(self.total, by_line)], _notes(self, by_line))


def _phases(rows: Sequence[Row]) -> list[str]:
    """Of each row: "forward", "backward" or "recompute".

    What a remat runs is not all of it run again: it also computes what only the backward pass
      needs.
    An equation is run again if the forward pass has the same one: from the same point of the user's
    program, the same primitive, the same result.
    """
    phases = [row.node.phase for row in rows]
    if "recompute" not in phases and "again" not in phases:
        return phases

    def key(row: Row) -> tuple:
        eqn = row.node.eqn
        return id(eqn.source_info.traceback), row.node.name, *(v.aval for v in eqn.outvars)

    forward = {key(row) for row, phase in zip(rows, phases, strict=True) if phase == "forward"}
    return [
        "recompute" if phase == "again"
        else "backward" if phase == "recompute" and key(row) not in forward
        else phase
        for row, phase in zip(rows, phases, strict=True)
    ]  # fmt: skip


_KEYS: Mapping[str, Callable[[Sequence[Row]], list[str]]] = {
    "line": lambda rows: [row.node.line for row in rows],
    "scope": lambda rows: [row.node.scope for row in rows],
    "phase": _phases,
    "primitive": lambda rows: [row.node.name for row in rows],
}


def add_up(rows: Iterable[Row], *, per_device: bool = False) -> Cost:
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


def _table(total: Cost, by_line: Mapping[str, Cost], lines: int = 12) -> Table:
    """The total, and what each line costs."""
    head = ("matrix", "other", "transc.", "bytes", "fused", "sent", "line")
    rows = []
    for line, c in [("total", total), *list(by_line.items())[:lines]]:
        network = sum(c.collective_bytes.values())
        amounts = (c.matrix_flops, c.other, c.transcendentals, c.bytes, c.fused_bytes, network)
        rows.append([*map(number, amounts), short(line)])
    return Table("", head, rows)


def _notes(costs: Costs, by_line: Mapping[str, Cost], lines: int = 12) -> list[str]:
    """What the table leaves out: bounds, attention by convention, what is not known."""
    notes = []
    if (more := len(by_line) - lines) > 0:
        notes.append(f"… and {more} lines more")
    if costs.low != costs.high:
        notes += [f"at least {costs.low}", f"at most  {costs.high}"]
    if costs.compiled is not None:
        ran = costs.compiled
        notes.append(
            f"compiled, each device runs {number(ran.flops)}FLOP, moves {number(ran.bytes)}B"
        )
    if again := costs.recompute.flops:
        notes.append(f"of it recompute {number(again)}FLOP")
    for a, n in costs.attention:
        seen = "unknown, the mask reads arrays" if a.exact is None else number(a.exact * n)
        notes.append(
            f"attention at {short(a.line)}: full {number(a.full * n)}, "
            f"{'causal' if a.causal else 'not causal'} model convention {number(a.model * n)}, "
            f"exact {seen}, tiles that run {number(a.tiles * n)} FLOP"
        )
    notes += [
        f"{name} is how often the loop at {short(line)} runs" for name, line in costs.trips.items()
    ]
    for name, found in costs.unknown.items():
        notes.append(f"no rule for `{name}` at {', '.join(map(short, found))}: 0 FLOPs counted")
    return notes
