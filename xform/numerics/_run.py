"""Runs a program with a probe at every equation, and brings home what the probes recorded.

The program is that of `xform._program`: loops, branches and `shard_map` are nodes with regions, all
calls are taken apart. It is traced again with its structure kept, so that it is one compiled
program that calls no host: what the probes of a loop's body record is carried through the loop, and
what those of a `shard_map` record is gathered from its devices.

A record is a tuple of arrays with one row for each *site*: a node and whatever else the probe tells
apart. The rows of a region are those of its nodes in order, and a node with regions has theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import varying_axes
from xform._program import Node, Region, Value
from xform.jaxpr import carried

_LOOPS = ("scan", "while")


@runtime_checkable
class Probe(Protocol):
    """What is done at each plain node. Values may be arrays, or tuples of arrays."""

    def rows(self, node: Node) -> int:
        """How many rows the record of a plain node has."""
        ...

    def run(self, node: Node, ins: list) -> tuple[list, Any]:
        """The results of a plain node, and its record."""
        ...

    def blank(self, rows: int) -> Any:
        """The record of what has not run."""
        ...

    def merge(self, old: Any, new: Any, level: int, turn: Any) -> Any:
        """The record of a loop so far, and of its next turn."""
        ...

    def lift(self, array: Any) -> Any:
        """A value of a literal or of a constant."""
        ...

    def array(self, value: Any) -> Any:
        """The plain array of a value that is no floating-point number: of a branch's index."""
        ...


@dataclass(frozen=True)
class Step:
    """One node on the way to a site: its position among its siblings, and the region it led to."""

    node: Node
    position: int
    label: str = ""
    branch: int = 0

    def iteration(self, turn: int) -> int:
        """Which iteration a turn of this loop is: a scan in reverse begins at its last."""
        params = self.node.eqn.params
        return params["length"] - 1 - turn if params.get("reverse") else turn


@dataclass(frozen=True)
class Site:
    """Where a row of a record comes from.

    Attributes:
      steps: the nodes that lead to it, outermost first; the last one is its own.
      row: which of the node's rows it is.
      device: coordinates of the device by mesh axis, inside `shard_map`.
    """

    steps: tuple[Step, ...]
    row: int
    device: tuple[tuple[str, int], ...] = ()

    @property
    def node(self) -> Node:
        return self.steps[-1].node

    @property
    def loops(self) -> list[Step]:
        """The loops around it, outermost first."""
        return [step for step in self.steps[:-1] if step.node.name in _LOOPS]

    def order(self, turns: Sequence[int]) -> tuple:
        """A key that sorts sites by when they ran."""
        left = iter(turns)
        key: list[int] = []
        for step in self.steps:
            turn = int(next(left, 0)) if step.label and step.node.name in _LOOPS else 0
            key += (step.position, turn, step.branch)
        return (*key, *(i for _, i in self.device))


def sites(region: Region, probe: Probe, above: tuple[Step, ...] = ()) -> Iterator[Site]:
    """Yields the sites of a region in the order of the rows of its record."""
    for position, node in enumerate(region.nodes):
        if not runs_regions(node):
            here = (*above, Step(node, position))
            yield from (Site(here, row) for row in range(probe.rows(node)))
            continue
        inner = [
            site
            for branch, (label, body) in enumerate(node.regions.items())
            for site in sites(body, probe, (*above, Step(node, position, label, branch)))
        ]
        if node.name != "shard_map":
            yield from inner
            continue
        axes = [(axis, node.eqn.params["mesh"].shape[axis]) for axis in _axes(node)]
        for place in _coordinates(axes):
            yield from (replace(site, device=(*place, *site.device)) for site in inner)


def depth(region: Region) -> int:
    """How deep loops are nested."""
    inner = [
        depth(body) + (node.name in _LOOPS)
        for node in region.nodes
        if runs_regions(node)
        for body in node.regions.values()
    ]
    return max(inner, default=0)


def runs_regions(node: Node) -> bool:
    """Whether a node is opened; kernels and solvers run as they are."""
    return node.name in _RUN


def run(region: Region, ins: Sequence, probe: Probe) -> tuple[list, Any]:
    """The results of a region, and the record of its sites; `ins` without its constants."""
    constants = [probe.lift(held_by(v)) for v in region.inputs[: len(region.inputs) - len(ins)]]
    return _Runner(probe).region(region, [*constants, *ins], 0)


def held_by(value: Value) -> Any:
    """The array of a literal or of a constant."""
    x = value.known
    return x if hasattr(x, "shape") else jnp.asarray(x, value.aval.dtype)


class _Runner:
    def __init__(self, probe: Probe, axes: tuple[str, ...] = ()):
        self.probe, self.axes = probe, axes

    def region(self, region: Region, ins: Sequence, level: int) -> tuple[list, Any]:
        env = dict(zip(region.inputs, ins, strict=True))
        lift = self.probe.lift
        read = lambda v: env[v] if v in env else lift(held_by(v))
        records = []
        for node in region.nodes:
            with node.eqn.ctx.manager:
                args = [read(v) for v in node.ins]
                opened = _RUN.get(node.name)
                if opened is None:
                    outs, record = self.probe.run(node, args)
                    record = self.vary(record)
                else:
                    outs, record = opened(self, node, args, level)
            env.update(zip(node.outs, outs, strict=True))
            records.append(record)
        return [read(v) for v in region.outputs], self.join(records)

    def body(self, node: Node, label: str, ins: Sequence, level: int) -> tuple[list, Any]:
        """The same of one region of a node, whose constants are its own."""
        region = node.regions[label]
        held = region.inputs[: len(region.inputs) - len(ins)]
        return self.region(region, [*(self.probe.lift(held_by(v)) for v in held), *ins], level)

    def join(self, records: Sequence) -> Any:
        if not records:
            return self.blank(0)
        return jax.tree.map(lambda *xs: jnp.concatenate(xs), *records)

    def blank(self, rows: int) -> Any:
        return self.vary(self.probe.blank(rows))

    def vary(self, tree: Any) -> Any:
        """Records have one type all over: they differ over every manual axis."""

        def cast(x):
            missing = tuple(axis for axis in self.axes if axis not in varying_axes(x))
            return lax.pcast(x, missing, to="varying") if missing else x

        return jax.tree.map(cast, tree)

    # ---- the nodes that have regions ---------------------------------------------------------

    def scan(self, node: Node, ins: list, level: int) -> tuple[list, Any]:
        n, params = carried(node.eqn), node.eqn.params
        consts, init, xs = ins[: n.consts], ins[n.consts :][: n.carry], ins[n.consts + n.carry :]

        def step(state, x):
            turn, values, record = state
            outs, new = self.body(node, "body", [*consts, *values, *x], level + 1)
            record = self.probe.merge(record, new, level, turn)
            return (turn + 1, outs[: n.carry], record), outs[n.carry :]

        state = jnp.int32(0), list(init), self.blank(self.count(node))
        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        (_, values, record), ys = lax.scan(step, state, list(xs), **options)
        return [*values, *ys], record

    def while_(self, node: Node, ins: list, level: int) -> tuple[list, Any]:
        n, m = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
        test, consts, init = ins[:n], ins[n : n + m], ins[n + m :]
        ends = lambda values: self.body(node, "cond", [*test, *values], level + 1)

        def turn(state):
            i, values, record = state
            _, tested = ends(values)
            outs, new = self.body(node, "body", [*consts, *values], level + 1)
            record = self.probe.merge(record, self.join([tested, new]), level, i)
            return i + 1, outs, record

        goes_on = lambda state: self.probe.array(ends(state[1])[0][0])
        state = jnp.int32(0), list(init), self.blank(self.count(node))
        i, values, record = lax.while_loop(goes_on, turn, state)
        # The test that ended it.
        _, tested = ends(values)
        rest = self.blank(self.count(node) - jax.tree.leaves(tested)[0].shape[0])
        return values, self.probe.merge(record, self.join([tested, rest]), level, i)

    def cond(self, node: Node, ins: list, level: int) -> tuple[list, Any]:
        counts = [_count(body, self.probe) for body in node.regions.values()]

        def branch(i: int, label: str):
            def run(*operands):
                outs, record = self.body(node, label, operands, level)
                before, after = sum(counts[:i]), sum(counts[i + 1 :])
                return outs, self.join([self.blank(before), record, self.blank(after)])

            return run

        branches = [branch(i, label) for i, label in enumerate(node.regions)]
        return lax.switch(self.probe.array(ins[0]), branches, *ins[1:])

    def shard_map(self, node: Node, ins: list, level: int) -> tuple[list, Any]:
        params, axes = node.eqn.params, _axes(node)
        inner = _Runner(self.probe, (*self.axes, *axes) if params["check_vma"] else ())
        size = math.prod(params["mesh"].shape[axis] for axis in axes)

        def body(*shards):
            outs, record = inner.body(node, "body", shards, level)
            at = lax.axis_index(axes) if axes else jnp.int32(0)

            def everywhere(x):
                whole = jnp.zeros((size, *x.shape), _summed(x.dtype))
                whole = whole.at[at].set(x.astype(whole.dtype))
                whole = lax.psum(whole, axes).astype(x.dtype) if axes else whole.astype(x.dtype)
                return whole.reshape(size * x.shape[0], *x.shape[1:])

            return outs, jax.tree.map(everywhere, record)

        return jax.shard_map(
            body,
            mesh=params["mesh"], in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), jax.sharding.PartitionSpec()),
            axis_names=frozenset(axes), check_vma=params["check_vma"],
        )(*ins)  # fmt: skip

    def count(self, node: Node) -> int:
        return sum(_count(body, self.probe) for body in node.regions.values())


_RUN = {
    "scan": _Runner.scan,
    "while": _Runner.while_,
    "cond": _Runner.cond,
    "shard_map": _Runner.shard_map,
}


def _axes(node: Node) -> tuple[str, ...]:
    """The mesh axes that a `shard_map` makes manual, in the mesh's order."""
    params = node.eqn.params
    return tuple(axis for axis in params["mesh"].axis_names if axis in params["newly_manual_axes"])


def _coordinates(axes: Sequence[tuple[str, int]]) -> Iterator[tuple[tuple[str, int], ...]]:
    if not axes:
        yield ()
        return
    (axis, size), *rest = axes
    for i in range(size):
        yield from (((axis, i), *more) for more in _coordinates(rest))


def _count(region: Region, probe: Probe) -> int:
    return sum(1 for _ in sites(region, probe))


def _summed(dtype) -> Any:
    return jnp.int32 if dtype == jnp.bool_ else dtype


# ---- where values come from ----------------------------------------------------------------------


def owners(region: Region) -> dict[Value, tuple[Node, str, int]]:
    """Of each input of an inner region: the node, the region's label, and its place among them."""
    found: dict[Value, tuple[Node, str, int]] = {}
    for node in region.nodes:
        for label, body in node.regions.items() if runs_regions(node) else ():
            found |= {v: (node, label, i) for i, v in enumerate(own_inputs(node, label))}
            found |= owners(body)
    return found


def own_inputs(node: Node, label: str) -> list[Value]:
    """The inputs of a region of a node but for the constants that it holds."""
    params = node.eqn.params
    count = len(node.ins) - (node.name == "cond")
    if node.name == "while":
        count -= params["body_nconsts" if label == "cond" else "cond_nconsts"]
    inputs = node.regions[label].inputs
    return inputs[len(inputs) - count :]


def upstream(value: Value, owner: dict[Value, tuple[Node, str, int]]) -> list[Value]:
    """The values from which one may have what it holds."""
    if value in owner:
        return _from_outside(*owner[value])
    node = value.node
    if node is None:
        return []
    if not runs_regions(node):
        return list(node.ins)
    k = node.outs.index(value)
    bodies = [body for label, body in node.regions.items() if label != "cond"]
    found = [body.outputs[k] for body in bodies]
    if node.name in _LOOPS and k < (n := carried(node.eqn)).carry:
        found.append(node.ins[n.consts + k])
    return found


def _from_outside(node: Node, label: str, i: int) -> list[Value]:
    """What an input of a region can be: an operand, or a result of the loop's turn before."""
    if node.name == "shard_map":
        return [node.ins[i]]
    if node.name == "cond":
        return [node.ins[1 + i]]
    if node.name == "scan":
        n, k = carried(node.eqn), i - carried(node.eqn).consts
        turns = [node.regions["body"].outputs[k]] if 0 <= k < n.carry else []
        return [node.ins[i], *turns]
    if node.name != "while":
        return list(node.ins)
    n, m = node.eqn.params["cond_nconsts"], node.eqn.params["body_nconsts"]
    consts, first = (n, 0) if label == "cond" else (m, n)
    if i < consts:
        return [node.ins[first + i]]
    return [node.ins[n + m + i - consts], node.regions["body"].outputs[i - consts]]
