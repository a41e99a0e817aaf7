"""Which values of a program need memory, and when: a model of XLA's fusion and buffer assignment.

* A *buffer* is a value that must exist: what a product, reduction, loop or collective makes, what
  such an operation (but a reduction) reads, and what a program returns. All else is computed inside
  the kernels that read it, and prolongs the life of the buffers that it is computed from.
* A value that several kernels read is kept if computing it twice costs more than reading it: if it
  is made of two arrays, or of an elementary function.
* A view (reshape, transpose) is the buffer that it views. A kernel writes over an operand of the
  same size that it reads last; a product can't. A scatter or `dynamic_update_slice` works in place.
* Results have memory of their own; until one is made, a temporary value may be put where it will
  be. A loop holds its operands, carry and stacked results throughout, and beside them the peak of
  its body.
"""

from __future__ import annotations

import bisect
import copy
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xform._attention_cost import attention_program
from xform._compat import Jaxpr, weakref_lru_cache
from xform._expand import Made
from xform._heap import Life, heap_size
from xform._layouts import flattens, makes_matrix, reordered
from xform._library import LIBRARY, by_element, hand_over
from xform._masked import MASKED
from xform._program import VIEWS, Node, Region, Value, merge, own_inputs, program, prune
from xform._rows import ROWS
from xform.jaxpr._walk import carried


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Nothing is computed across it.
_BARRIER = "optimization_barrier"
ALIASES = VIEWS | {"transpose", "copy_p"}
# What runs inside another kernel, of which some need more than one cycle for an element.
EXPENSIVE = _names(
    """
    exp exp2 expm1 log log1p log2 sqrt rsqrt cbrt pow sin cos tan asin acos atan atan2 sinh cosh
    tanh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma div rem integer_pow
    parts_sum windows
    """
)
CHEAP = _names(
    """
    add sub mul neg add_any max min abs sign floor ceil round is_finite nextafter eq ne lt le gt ge
    clamp square one_minus_square reciprocal conj real imag complex select_n convert_element_type
    reduce_precision broadcast_in_dim iota concatenate pad rev slice dynamic_slice gather and or xor
    not shift_left shift_right_logical shift_right_arithmetic population_count clz mulhi copy split
    axis_index program_id platform_index create_token random_wrap random_unwrap running_end
    """
)
REDUCTIONS = _names(
    """
    reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax argmin
    reduce
    """
)
_IN_PLACE = _names(
    """
    dynamic_update_slice scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max
    """
)


# Loops over tiles, which add up their results from zeros on.
_ATTENTION = ("flex_attention", "tile_sum")
# What a CPU's kernels branch on for each element: where several would, it is made once.
_BRANCHES = ("pad", "concatenate")
_SPREAD = ("broadcast_in_dim", "iota")
_PRODUCTS = ("dot_general", "conv_general_dilated")
# What reads other places than it writes.
_MOVES = _names(
    "transpose copy rev gather concatenate pad slice dynamic_slice split broadcast_in_dim"
)


@dataclass
class Peak:
    """The most that a region holds at once, beyond its inputs."""

    bytes: int = 0
    live: list[Value] = field(default_factory=list)
    node: Node | None = None


@dataclass(slots=True)
class _Span:
    """The life of one piece of memory, from the first to the last node that needs it.

    Attributes:
      values: what it holds, from which node on.
    """

    bytes: int
    start: int
    end: int
    values: list[tuple[int, Value]]

    def life(self) -> Life:
        """From when to when a heap has to hold it."""
        return Life(self.bytes, self.start, self.end, tuple(i for i, _ in self.values[1:]))

    def at(self, i: int) -> Value:
        """What it holds at a node."""
        return next(v for start, v in reversed(self.values) if start <= i)


class Plan:
    """The buffers of one region, and where each is made and last read."""

    def __init__(
        self,
        region: Region,
        local: dict[Value, int],
        *,
        donated: Mapping[Value, Value] | None = None,
        body: Node | None = None,
        cpu: bool = False,
        eager: bool = False,
        at_once: bool | None = None,
    ):
        self.given = self.region = region
        self.local, self.donated, self.body = local, dict(donated or {}), body
        self.cpu, self.eager = cpu, eager
        # Whether sums start as soon as zeros can be made, as they do on a CPU.
        self.at_once = cpu if at_once is None else at_once
        self.stacked = self._stacked(body)
        self.view: dict[Value, Value] = {}
        for node in region.nodes:
            if node.name in ALIASES:
                self.view.update(zip(node.outs, node.ins, strict=False))
        self.place = {node: i for i, node in enumerate(region.nodes)}
        self.again: dict[Value, frozenset] = {}
        self.kept = self._kept()
        self.leaves = self._leaves()
        self.bent = self._bent()
        if eager:
            self.region = self._early()

    def otherwise(self) -> Plan:
        """The same buffers with nodes in the other order: which they are, no order decides."""
        other = copy.copy(self)
        other.eager = not self.eager
        other.region = other._early() if other.eager else self.given
        return other

    def bytes(self, v: Value) -> int:
        return self.local.get(v, v.bytes)

    def root(self, v: Value) -> Value:
        """What a view views."""
        while v in self.view:
            v = self.view[v]
        return v

    def _stacked(self, loop: Node | None) -> set[Value]:
        """What a scan's body reads of stacked arrays, and what it writes to them."""
        if loop is None or loop.name != "scan":
            return set()
        n = carried(loop.eqn)
        inside = own_inputs(loop.eqn.params["jaxpr"], self.region)
        return {*inside[n.consts + n.carry :], *self.region.outputs[n.carry :]}

    def _kept(self) -> set[Value]:
        """The values that are buffers: decided from the end, since readers decide."""
        readers: dict[Value, list[Node]] = {}
        forced = {self.root(v) for v in self.region.outputs if v not in self.stacked}
        direct = set(forced)
        behind = set[Value]()
        for node in self.region.nodes:
            reads = node.ins if node.name not in ALIASES or node.name == _BARRIER else ()
            for v in map(self.root, reads):
                readers.setdefault(v, []).append(node)
                if node.name == _BARRIER:
                    behind.add(v)
                if not _fuses_operands(node, v):
                    forced.add(v)
                    if not _reads_flat(node, v):
                        direct.add(v)
        kept: set[Value] = set()
        ends: dict[Value, set] = {}
        for node in reversed(self.region.nodes):
            for v in node.outs if node.name not in ALIASES else ():
                ends[v] = into = self._sinks(readers.get(v, ()), kept, ends)
                if (
                    v in forced
                    or not _fusible(node)
                    or (len(into) > 1 and self._twice(node, readers, kept))
                ):
                    kept.add(v)
                if self.cpu and v in forced and v not in behind and _fusible(node):
                    worth = v in direct or _is_expensive(node, True)
                    if not (worth and _worth_keeping(node, v, True)):
                        self.again[v] = frozenset()
        for v in self.stacked.intersection(self.region.inputs):
            if self.cpu and v in forced:
                self.again[v] = frozenset()  # each kernel that can takes its part of the array
            several = not self.cpu and len(self._sinks(readers.get(v, ()), kept, ends)) > 1
            if v in forced or several:
                kept.add(v)
        return kept

    def _twice(self, node: Node, readers: Mapping[Value, Sequence[Node]], kept: set[Value]) -> bool:
        """Whether a value is kept because several kernels read it."""
        worth = _worth_keeping(node, node.outs[0], self.cpu)
        if not self.cpu or _is_expensive(node, True):
            return worth
        return node.name in _BRANCHES or (worth and self._returns(node.outs[0], readers, kept))

    def _returns(self, v: Value, readers: Mapping[Value, Sequence[Node]], kept: set[Value]) -> bool:
        """Whether a kernel that would compute a value reads what other kernels make of it too.

        Then a CPU's compiler computes it once; else it makes even what is read from two arrays
        anew in each kernel (XLA's instruction fusion, "on all paths").
        """
        last = max(self.place[node] for node in readers[v])
        made, left = set[Value](), [v]
        while left:
            for node in readers.get(left.pop(), ()):
                if self.place[node] < last:
                    left += (out for out in node.outs if out not in made)
                    made.update(node.outs)
        seen = {v}
        left = [x for node in readers[v] for x in map(self.root, node.ins)]
        while left:
            x = left.pop()
            if x not in made or x in seen:
                continue
            seen.add(x)
            if x.node is None or (x in kept and x not in self.again) or not _fusible(x.node):
                return True
            left += map(self.root, x.node.ins)
        return False

    def _sinks(self, readers: Iterable[Node], kept: set[Value], ends: dict[Value, set]) -> set:
        """The kernels that compute a value with these readers inside; two stand for more."""
        into: set = set()
        for reader in readers:
            fused = reader.outs and kept.isdisjoint(reader.outs)
            again = reader.outs and reader.outs[0] in self.again
            into |= ends.get(reader.outs[0], set()) if fused or again else set()
            into |= set() if fused else {reader}
            if len(into) > 1:
                break
        return into

    def _leaves(self) -> dict[Value, frozenset]:
        """The buffers that each value is computed from: itself, if it is one."""
        leaves: dict[Value, frozenset] = {}
        nothing: frozenset = frozenset()
        for v in self.region.inputs:
            leaves[v] = frozenset() if v in self.stacked and v not in self.kept else frozenset((v,))
        for node in self.region.nodes:
            if self.again:
                below = (self.again.get(self.root(v), leaves.get(v, nothing)) for v in node.ins)
            else:
                below = (leaves.get(v, nothing) for v in node.ins)
            below = nothing.union(*below)
            for v in node.outs:
                if v in self.kept:
                    leaves[v] = frozenset((v,))
                    if v in self.again:
                        self.again[v] = below
                elif node.name in ALIASES:
                    leaves[v] = leaves.get(self.root(v), frozenset())
                else:
                    leaves[v] = below
        return leaves

    def _bent(self) -> dict[Value, frozenset]:
        """The buffers of which each value is computed from other places than its own."""
        bent: dict[Value, frozenset] = {}
        for node in self.region.nodes:
            found: frozenset = frozenset()
            for v in node.ins:
                if _moves(node) or (v.node is not None and makes_matrix(v.node)):
                    found |= self.reads(node, v)
                elif v not in self.kept or v in self.again:
                    found |= bent.get(v, frozenset())
            bent.update(dict.fromkeys(node.outs, found))
        return bent

    def reads(self, node: Node, v: Value) -> frozenset:
        """The buffers that a node reads for its operand `v`."""
        again = self.again.get(self.root(v)) if _fuses_operands(node, v) else None
        return self.leaves.get(v, frozenset()) if again is None else again

    def _runs(self, node: Node) -> bool:
        """Whether a node is a kernel, and not a part of those that read it."""
        if node.regions or not node.outs or not _fusible(node):
            return True
        return not (self.kept.isdisjoint(node.outs) and self.stacked.isdisjoint(node.outs))

    def _early(self) -> Region:
        """The same nodes, each as early as it can run, as far as its kernels are known."""
        return self._breadth_first() if self.cpu else _by_depth(self.given)

    def _breadth_first(self) -> Region:
        """The same nodes, each kernel in the order in which what it waits for has run."""
        after: dict[Value, frozenset[Node]] = {}
        instead: dict[Value, frozenset[Node]] = {}  # where it is computed again
        users: dict[Node, list[Node]] = {}
        waits: dict[Node, int] = {}
        inside = []
        nothing: frozenset[Node] = frozenset()
        for node in self.given.nodes:
            if node.outs and node.outs[0] in self.view and node.name != _BARRIER:
                inside.append(node)
                viewed, v = self.root(node.outs[0]), node.outs[0]
                after[v] = after.get(viewed, nothing)
                if viewed in instead:
                    instead[v] = instead[viewed]
                continue
            before = nothing
            for v in node.ins:
                again = v in instead and _fuses_operands(node, v)
                before |= instead[v] if again else after.get(v, nothing)
            if node.name == _BARRIER or self._runs(node):
                waits[node] = len(before)
                for maker in before:
                    users.setdefault(maker, []).append(node)
                after.update(dict.fromkeys(node.outs, frozenset((node,))))
                instead.update({v: before for v in node.outs if v in self.again})
            else:
                inside.append(node)
                after.update(dict.fromkeys(node.outs, before))
        ready = deque(node for node, n in waits.items() if not n)
        order = []
        while ready:
            order.append(node := ready.popleft())
            for user in _siblings(users.get(node, ())):
                waits[user] -= 1
                if not waits[user]:
                    ready.append(user)
        return Region(self.given.inputs, [*inside, *order], self.given.outputs)

    @cached_property
    def kernel_reads(self) -> dict[Node, frozenset]:
        """The buffers that each kernel reads, in any order of the nodes."""
        nothing: frozenset = frozenset()
        runs = filter(self._runs, self.given.nodes)
        return {node: nothing.union(*(self.reads(node, v) for v in node.ins)) for node in runs}

    def last_reads(self) -> dict[Value, int]:
        """The position of the last kernel that reads each buffer."""
        last: dict[Value, int] = {}
        n, nothing = len(self.region.nodes), frozenset()
        for i, node in enumerate(self.region.nodes):
            last.update(dict.fromkeys(self.kernel_reads.get(node, nothing), i))
        for v in self.region.outputs:
            if v in self.stacked:
                continue
            for leaf in self.leaves.get(v, ()):
                last[leaf] = n
        return last

    def peak(self) -> Peak:
        """The most that is held at once beside arguments and results."""
        nodes, last = self.region.nodes, self.last_reads()
        heap = self._fit(self._spans(last), last)
        passing = self._all_passing()
        totals = self._totals(heap, passing)
        best = max(totals, default=0)
        at = totals.index(best) - 1 if best > 0 else None
        if at is None:
            return Peak()
        live = [span.at(at) for span in heap if span.start <= at <= span.end]
        inside = passing.get(at, Peak())
        most = heap_size(self._lives(heap, passing), best) if self.cpu else best
        return Peak(most, [*live, *inside.live], inside.node or nodes[max(at, 0)])

    def _lives(self, heap: Iterable[_Span], passing: Mapping[int, Peak]) -> list[Life]:
        """All that a heap holds: each array of a body has a place of its own while it runs."""
        lives = [span.life() for span in heap]
        for i, found in passing.items():
            pieces = list(map(self.bytes, found.live))
            pieces.append(found.bytes - sum(pieces))
            lives += [Life(size, i, i) for size in pieces if size > 0]
        return lives

    def held(self) -> list[int]:
        """What is held at each node beside arguments and results."""
        last = self.last_reads()
        return self._totals(self._fit(self._spans(last), last), self._all_passing())[1:]

    def _totals(self, heap: Iterable[_Span], passing: Mapping[int, Peak]) -> list[int]:
        """What is held before the first node, and at each."""
        change: dict[int, int] = {}
        for span in heap:
            change[span.start] = change.get(span.start, 0) + span.bytes
            change[span.end + 1] = change.get(span.end + 1, 0) - span.bytes
        now, totals = 0, []
        for i in range(-1, len(self.region.nodes)):
            now += change.get(i, 0)
            totals.append(now + (passing[i].bytes if i in passing else 0))
        return totals

    def _spans(self, last: Mapping[Value, int]) -> list[_Span]:
        """The lives of all buffers but inputs, results that overwrite an operand as one with it."""
        nodes = self.region.nodes
        spans: list[_Span] = [
            _Span(self.bytes(v), -1, last.get(v, -1), [(-1, v)])
            for v in self.region.inputs
            if v in self.stacked and v in self.kept
        ]
        ending: dict[int, list[_Span]] = {}
        for span in spans:
            ending.setdefault(span.end, []).append(span)
        skip = self._in_carry(last)
        since = self._stacks_since()
        for i, node in enumerate(nodes):
            over = ending.get(i, [])
            for j, v in enumerate(node.outs):
                if v not in self.kept or v in self.view or v in skip:
                    continue
                size = self.bytes(v)
                alike = [span for span in over if span.bytes == size]
                span = self._written_over(node, j, alike) if alike else None
                if span is None:
                    span = _Span(size, since.get(v, i), i, [(since.get(v, i), v)])
                    spans.append(span)
                    if self.eager and self.at_once and node.name in _ATTENTION:
                        span.start, span.values = 0, [(0, v)]  # zeros, which wait for nothing
                else:
                    over.remove(span)
                    span.values.append((i, v))
                span.end = max(i, last.get(v, i))
                ending.setdefault(span.end, []).append(span)
        return spans

    def _stacks_since(self) -> dict[Value, int]:
        """Of what loops stack in arrays of one type, the last: from which node on it has memory.

        All start from the same zeros, of which all but the last loop make copies.
        """
        first: dict[tuple, int] = {}
        last: dict[tuple, Value] = {}
        for i, node in enumerate(self.region.nodes):
            for v in node.outs if node.name == "scan" else ():
                if v in self.kept and _is_stack(v):
                    form = v.aval.shape, v.aval.dtype
                    first.setdefault(form, i)
                    last[form] = v
        return {v: first[form] for form, v in last.items()}

    def _written_over(self, node: Node, result: int, spans: Sequence[_Span]) -> _Span | None:
        """Of memory that is read for the last time, the first that a node's result takes over."""
        leaves = {x for may in _overwritten(node, result) for x in self.reads(node, may)}
        if self.cpu:
            leaves -= self.bent.get(node.outs[result], frozenset())
        if node.name not in ("scan", "while"):
            leaves = {v for v in leaves if not _is_stack(v)}
        return next((span for span in spans if span.values[-1][1] in leaves), None)

    def _in_carry(self, last: Mapping[Value, int]) -> set[Value]:
        """New values of a loop's carry that are made where the old one is no longer needed."""
        if self.body is None or self.body.name not in ("scan", "while"):
            return set()
        n, params = carried(self.body.eqn), self.body.eqn.params
        consts = params["body_nconsts"] if self.body.name == "while" else n.consts
        jaxpr = params["body_jaxpr" if self.body.name == "while" else "jaxpr"]
        if len(self.region.outputs) < n.carry:  # a while's condition
            return set()
        old = own_inputs(jaxpr, self.region)[consts : consts + n.carry]
        made = {v: i for i, node in enumerate(self.region.nodes) for v in node.outs}
        found = set()
        for before, after in zip(old, map(self.root, self.region.outputs), strict=False):
            if after.node is None or self.bytes(before) != self.bytes(after):
                continue
            i = made[after]
            node = self.region.nodes[i]
            elsewhere = _fusible(node) and before in self.bent.get(after, ())
            if last.get(before, -1) < i + (bool(_overwritten(node, 0)) and not elsewhere):
                found.add(after)
        return found

    def _fit(self, spans: list[_Span], last: Mapping[Value, int]) -> list[_Span]:
        """What is left for the heap when results have lent their memory until they are made."""
        if self.body is not None and self.body.name in ("scan", "while"):
            return spans
        if self.body is not None:  # its results are those of the node outside
            results = {self.root(v) for v in self.region.outputs}
            return [span for span in spans if results.isdisjoint(v for _, v in span.values)]
        n = len(self.region.nodes)
        made = {v: i for i, node in enumerate(self.region.nodes) for v in node.outs}
        homes: list[tuple[int, list[tuple[int, int]]]] = []
        # In the order of the program: where homes are alike, which of them is taken first decides.
        results = dict.fromkeys(map(self.root, self.region.outputs))
        before = {self.root(out): v for v, out in self.donated.items()}
        for v in filter(self.kept.__contains__, results):
            busy = [(made.get(v, -1), n)]
            if v in before:
                busy.append((-1, last.get(before[v], -1)))
            homes.append((self.bytes(v), busy))
        homes.sort(key=lambda home: home[0])
        sizes = [size for size, _ in homes]
        heap = []
        written = {v: i for i, node in enumerate(self.given.nodes) for v in node.outs}
        for span in sorted(spans, key=lambda s: (-s.bytes, written.get(s.values[0][1], -1))):
            if any(v in results for _, v in span.values):
                # A result, and what it overwrites: the memory is the result's, unless it is in use.
                # Sums have had their memory since before they were made.
                first = next(made.get(v, i) for i, v in span.values if v in results)
                home = next(b for size, b in homes if size == span.bytes and (first, n) in b)
                others = [(start, end) for start, end in home if (start, end) != (first, n)]
                if all(first <= start or span.start > end for start, end in others):
                    home.append((span.start, first))
                    continue
                span = _Span(
                    span.bytes, span.start, first, [x for x in span.values if x[0] < first]
                )
                if not span.values:
                    continue
            for _, busy in homes[bisect.bisect_left(sizes, span.bytes) :]:
                # Each is in use from when its result is made; most spans end later.
                if busy[0][0] > span.end and _is_free(busy, span):
                    busy.append((span.start, span.end))
                    break
            else:
                heap.append(span)
        return heap

    def _all_passing(self) -> dict[int, Peak]:
        """What exists only while a node runs, at the positions of those that need any."""
        may = (
            (i, node)
            for i, node in enumerate(self.region.nodes)
            if node.regions or node in self.tiled or node in self.copied
        )
        return {i: self._passing(node) for i, node in may}

    def _passing(self, node: Node) -> Peak:
        """What exists only while a node runs."""
        inside, copied = self._inside(node), self.copied.get(node, ())
        inside.live = [*inside.live, *copied]
        inside.bytes += sum(map(self.bytes, copied))
        return inside

    @cached_property
    def tiled(self) -> dict[Node, Jaxpr]:
        """The programs of attentions."""
        nodes = (node for node in self.given.nodes if node.name in _ATTENTION)
        return {node: attention_program(node) for node in nodes}

    @cached_property
    def copied(self) -> dict[Node, list[Value]]:
        """The operands that products need in another order of dimensions, of those that do."""
        if self.cpu:  # there a copy is a node of its own
            return {}
        products = (node for node in self.given.nodes if node.name in _PRODUCTS)
        found = {node: [node.ins[i] for i in reordered(node)] for node in products}
        for node, operands in found.items():
            operands[:] = [v for v in operands if not isinstance(v.node, Made)]  # made when wanted
            if node.name == "conv_general_dilated":  # images are read as they lie
                operands[:] = [v for v in operands if v is node.ins[1]]
        return {node: operands for node, operands in found.items() if operands}

    def _inside(self, node: Node) -> Peak:
        """The peak of what a node runs, beyond its operands and results."""
        best = Peak()
        if node in self.tiled:
            most = _peak_of(self.tiled[node], self.cpu, self.eager)
            return Peak(max(0, most - sum(map(self.bytes, node.outs))))
        for region in node.regions.values():
            if node.name == "pallas_call":
                continue
            found = Plan(
                region, self.local, body=node, cpu=self.cpu, eager=self.eager, at_once=self.at_once
            ).peak()
            best = max(best, found, key=lambda p: p.bytes)
        return best


def _is_stack(v: Value) -> bool:
    """Whether a loop stacked it: XLA lets nothing but another loop write over that."""
    node = v.node
    if node is None or node.name != "scan":
        return False
    return node.outs.index(v) >= carried(node.eqn).carry


def _by_depth(region: Region) -> Region:
    """The same nodes, each as early as its operands allow."""
    level: dict[Value, int] = {}
    depth = []
    for node in region.nodes:
        at = 1 + max([level.get(v, 0) for v in node.ins], default=0)
        level.update(dict.fromkeys(node.outs, at))
        depth.append(at)
    order = sorted(range(len(depth)), key=depth.__getitem__)
    return Region(region.inputs, [region.nodes[i] for i in order], region.outputs)


def _siblings(users: Sequence[Node]) -> list[Node]:
    """The order in which a CPU starts what waits for one kernel: the last that was written first.

    After them come copies into other orders of dimensions, which XLA adds last.
    """
    order = sorted(range(len(users)), key=lambda i: (users[i].name == "copy", -i))
    return [users[i] for i in order]


def _is_free(busy: Sequence[tuple[int, int]], span: _Span) -> bool:
    """Whether memory that is in use at some times is not while a span lasts."""
    first, last = span.start, span.end
    for start, end in busy:  # noqa: SIM110  # for each home of each span: no generator
        if start <= last and first <= end:
            return False
    return True


@weakref_lru_cache
def _peak_of(jaxpr: Jaxpr, cpu: bool, eager: bool) -> int:
    """The most that a program holds beyond its inputs: layers share one of an attention's."""
    body = prune(merge(program(jaxpr), stacks=not cpu))
    return Plan(hand_over(body) if cpu else body, {}, cpu=cpu, eager=eager).peak().bytes


def _overwritten(node: Node, result: int) -> Sequence[Value]:
    """The operands that a node can write one of its results over, if it reads them last.

    A kernel over any, an update in place over what it updates, a loop over the start of its carry.
    """
    if node.name == "running_end":  # a CPU cuts its operand into runs
        return ()
    if node.name == LIBRARY and isinstance(node, Made):
        return by_element(node)
    if _fusible(node):
        return node.ins
    if node.name in _IN_PLACE:
        return node.ins[:1]
    if node.name == "sort":
        return node.ins[result : result + 1]
    if node.name in ("scan", "while"):
        n = carried(node.eqn)
        return node.ins[n.consts + result : n.consts + result + 1] if result < n.carry else ()
    return ()


_FUSIBLE = CHEAP | EXPENSIVE | ALIASES
_FUSES = (_FUSIBLE | REDUCTIONS | {MASKED, ROWS}) - {_BARRIER}
# What reads its first operand at places that another tells.
_AT_INDICES = _IN_PLACE | {"gather", "dynamic_slice"}


def _fusible(node: Node) -> bool:
    return node.name in _FUSIBLE


def _fuses_operands(node: Node, v: Value) -> bool:
    """Whether a node computes its operand `v` itself, if it can."""
    if node.name in _AT_INDICES:
        return v is not node.ins[0]
    return node.name in _FUSES


def _moves(node: Node) -> bool:
    """Whether a node reads other places than it writes."""
    if node.name != "reshape":
        return node.name in _MOVES
    before, after = ([n for n in v.aval.shape if n > 1] for v in (node.ins[0], node.outs[0]))
    return before != after


def _reads_flat(node: Node, v: Value) -> bool:
    """Whether a product reads `v` in another shape, which stands between the two."""
    return node.name == "dot_general" and all(
        flattens(node, i) for i, x in enumerate(node.ins[:2]) if x is v
    )


def _worth_keeping(node: Node, v: Value, cpu: bool) -> bool:
    """Whether a value is kept for several readers: computing it again reads or costs more.

    On a CPU what is only spread out does not count as read.
    """
    large = {x for x in node.ins if 2 * x.size >= v.size and x.known is None}
    if cpu:
        large = {x for x in large if x.node is None or x.node.name not in _SPREAD}
    return _is_expensive(node, cpu) or len(large) > 1


def _is_expensive(node: Node, cpu: bool) -> bool:
    """Whether an element takes more than one cycle; on a CPU a power is a few products."""
    return node.name in EXPENSIVE and not (cpu and node.name == "integer_pow")
