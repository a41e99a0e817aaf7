"""`find_nonfinite`: where the first NaN or infinity of a program is born."""

from __future__ import annotations

import cmath
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xform._lowered import as_written
from xform._ops import ELEMENTWISE
from xform._program import Node, Region, Value, program
from xform.numerics._dims import follow
from xform.numerics._events import (
    OPERANDS,
    Events,
    aligned,
    blank,
    event,
    merge,
    seen,
    value_of,
    watched,
)
from xform.numerics._hints import hint_for
from xform.numerics._run import (
    Site,
    depth,
    held_by,
    owners,
    run,
    runs_regions,
    sites,
    upstream,
)

_SHOWN = 8  # how many places are printed; the report has all


@dataclass(frozen=True)
class Operand:
    """What an equation read.

    Attributes:
      type: shape and dtype.
      value: the element that made the result's, of an elementwise operation; else None.
      low, high: of any other operation, the least and the greatest element that is no NaN.
    """

    type: str
    value: Any = None
    low: float | None = None
    high: float | None = None

    def __str__(self):
        said = f"{self.value:g}" if isinstance(self.value, float) else str(self.value)
        return said if self.low is None else f"{self.type} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Origin:
    """A place where a number that is not finite was born.

    Attributes:
      kind: "nan" or "inf".
      operation: the primitive, "argument", or "literal": a number of the program's own, which is
        told where nothing was born.
      line: the user's line, or the argument's name.
      operands: what the equation read, four of them at most.
      type: of the result.
      index: the first such element of the result, inside `shard_map` of the device's own part.
      iterations: of each loop around it, outermost first, the kind and the iteration (from 0, as
        the loop counts: a scan in reverse begins at its last).
      device: coordinates on the mesh axes of the `shard_map` around it; empty elsewhere.
      more_devices: on how many others it was born as well.
      batch: of each dimension of the result that runs along one of an argument's, as under `vmap`,
        the argument's name and the index: ``(("`xs`", 3),)``. Only where dimensions can be followed
        from the arguments.
      phase: "forward", "backward" or "recompute".
      hint: what to change, where that is known.
    """

    kind: str
    operation: str
    line: str
    operands: tuple[Operand, ...]
    type: str
    index: tuple[int, ...]
    iterations: tuple[tuple[str, int], ...] = ()
    device: tuple[tuple[str, int], ...] = ()
    more_devices: int = 0
    batch: tuple[tuple[str, int], ...] = ()
    phase: str = "forward"
    hint: str | None = None

    def __str__(self):
        name = {"nan": "NaN", "inf": "Inf"}[self.kind]
        of = f"({', '.join(map(str, self.operands))})" if self.operands else ""
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        what = f"`{self.operation}{of}` -> {self.type}{at}, at {self.line}"
        if self.operation == "argument":
            what = f"argument {self.line}, {self.type}{at}"
        parts = [f"{name} in {what}"]
        parts += [f"{loop} iteration {i}" for loop, i in self.iterations]
        parts += [f"index {i} along {along}" for along, i in self.batch]
        if self.device:
            parts.append("device " + ", ".join(f"{axis}={i}" for axis, i in self.device))
            parts += [f"and {self.more_devices} more"] if self.more_devices else []
        if self.phase != "forward":
            parts.append(f"{self.phase} pass")
        return ", ".join(parts) + (f"\n    {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class NonFinite:
    """What `find_nonfinite` found. It is true if a result of the function is not finite.

    Attributes:
      outputs: names of the results that are not finite.
      origins: where what reached them was born, in the order in which it ran.
      dead: where numbers were born that reached no result.
    """

    outputs: tuple[str, ...]
    origins: tuple[Origin, ...]
    dead: tuple[Origin, ...]

    @property
    def first(self) -> Origin | None:
        """The first of `origins`."""
        return self.origins[0] if self.origins else None

    def __bool__(self):
        return bool(self.outputs)

    def __str__(self):
        lines = [f"not finite: {', '.join(self.outputs)}"] if self else ["all results are finite"]
        if self.origins:
            lines.append(f"first: {self.origins[0]}")
            lines += _some("then", self.origins[1:])
        lines += _some("reached no result", self.dead)
        return "\n".join(lines)


def _some(said: str, origins: Sequence[Origin]) -> list[str]:
    lines = [f"{said}: {origin}" for origin in origins[:_SHOWN]]
    more = len(origins) - _SHOWN
    return [*lines, f"{said}: {more} more"] if more > 0 else lines


def find_nonfinite(f: Callable) -> Callable[..., NonFinite]:
    """Returns a function that runs `f` once, and says where its first NaN or infinity is born.

    The run is one compiled program with a probe at every equation: inside jit, scan, while, cond,
    vmap, `shard_map`, remat, custom derivatives and the backward pass, without a call to the host.
    What was born is told apart by whether it reached a result. That goes by whole arrays, and by
    whole loops: where one NaN of an array dies and another lives, both are said to reach what the
    array does.

    The probes keep XLA from fusing equations as it does without them. Where the run says that
    all is finite and the compiled `f` isn't, a rewrite of the compiler made it so: see `lint`.
    A kernel is one equation: of what is born inside, only the result is seen.

    Args:
      f: a function of pytrees of arrays, on the devices and meshes that it needs.

    Returns:
      A function of the arguments of `f`, which must be concrete, that returns `NonFinite`.

    Raises:
      TypeError: at traced arguments.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda xs: jax.lax.scan(lambda c, _: (jnp.log(c - 1.0), c), 3.0, xs)
    >>> found = find_nonfinite(f)(jnp.arange(5))
    >>> found.first.operation, found.first.kind, found.first.iterations
    ('log', 'nan', (('scan', 1),))
    """

    @functools.wraps(f)
    def found(*args, **kwargs) -> NonFinite:
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        flat = [x for _, x in paths]
        if any(isinstance(x, Tracer) for x in flat):
            raise TypeError(
                "`find_nonfinite` runs a program and reads what it computed: call it on concrete "
                "arrays, outside of `jit` and other transforms, with them inside: "
                "`find_nonfinite(jax.jit(f))(x)`."
            )
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(*args, **kwargs)
        region = program(jaxpr, lower=as_written)
        names = [_argument(f, path) for path, _ in paths]
        results = jax.tree_util.tree_flatten_with_path(shapes)[0]
        outputs = [f"result{jax.tree_util.keystr(path)}" for path, _ in results]
        return _report(region, names, outputs, *_watch(region, flat))

    return found


class _Watch:
    """The probe: passes values on, and writes down what is not finite."""

    def __init__(self, levels: int):
        self.levels = levels

    def rows(self, node: Node) -> int:
        return sum(watched(v.aval) for v in node.outs)

    def run(self, node: Node, ins: list) -> tuple[list, Events]:
        eqn = node.eqn
        out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        outs = list(out) if eqn.primitive.multiple_results else [out]
        kept = [x for x, v in zip(outs, node.outs, strict=True) if watched(v.aval)]
        events = [event(node, ins, x, self.levels) for x in kept]
        if not events:
            return outs, self.blank(0)
        return outs, jax.tree.map(lambda *xs: jnp.concatenate(xs), *events)

    def blank(self, rows: int) -> Events:
        return blank(rows, self.levels)

    merge = staticmethod(merge)

    def lift(self, array: Any) -> Any:
        return array

    def array(self, value: Any) -> Any:
        return value


def _watch(region: Region, flat: Sequence) -> tuple[list[Site], Events, Events, list[bool]]:
    """The sites, their record, that of the inputs, and which results are not finite."""
    probe = _Watch(depth(region))
    constants = [held_by(v) for v in region.inputs[: len(region.inputs) - len(flat)]]

    # Of a program that runs once, compiling is what takes time.
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None

    @functools.partial(jax.jit, compiler_options=fast)
    def watch(*flat):
        outs, record = run(region, flat, probe)
        inputs = [blank(0, 0)]
        for x in (*constants, *flat):
            inputs.append(seen(jnp.asarray(x), 0) if watched(jax.typeof(x)) else blank(1, 0))
        whole = jax.tree.map(lambda *xs: jnp.concatenate(xs), *inputs)
        bad = [jnp.any(~jnp.isfinite(x)) if watched(jax.typeof(x)) else False for x in outs]
        return record, whole, bad

    record, inputs, bad = jax.device_get(watch(*flat))
    return list(sites(region, probe)), record, inputs, [bool(x) for x in bad]


def _report(
    region: Region, names: list[str], outputs: list[str],
    places: list[Site], record: Events, inputs: Events, bad_outputs: list[bool],
) -> NonFinite:  # fmt: skip
    bad: dict[Value, bool] = {}
    rows: list[tuple[Value, Site, int]] = []
    for i, site in enumerate(places):
        kept = [v for v in site.node.outs if watched(v.aval)]
        value = kept[site.row]
        bad[value] = bad.get(value, False) or bool(record.bad[i])
        if record.born[i]:
            rows.append((value, site, i))
    bad |= {v: bool(b) for v, b in zip(region.inputs, inputs.bad, strict=True)}
    live = _reaching(
        region, [v for v, b in zip(region.outputs, bad_outputs, strict=True) if b], bad
    )

    rows.sort(key=lambda row: row[1].order(record.turns[row[2]].tolist()))
    labels = follow(region, names)
    devices: dict[Value, list[tuple]] = {}
    for v, site, _ in rows:
        devices.setdefault(v, []).append(site.device)
    origins = [
        (v, _origin(site, record, i, v, labels.get(v, ()), len(set(devices[v])) - 1))
        for v, site, i in rows
        if site.device == devices[v][0]
    ]
    first = len(region.inputs) - len(names)
    given = [
        (v, _argument_origin(names[i - first] if i >= first else "a constant", v, inputs, i))
        for i, v in enumerate(region.inputs)
        if inputs.bad[i]
    ]
    together = [*given, *origins]
    reached = tuple(origin for value, origin in together if value in live)
    return NonFinite(
        tuple(name for name, b in zip(outputs, bad_outputs, strict=True) if b),
        reached or tuple(_written(region, live)),
        tuple(origin for value, origin in together if value not in live),
    )


def _reaching(region: Region, results: Sequence[Value], bad: dict[Value, bool]) -> set[Value]:
    """The values from which the results may have what is not finite in them."""
    owner = owners(region)
    live: set[Value] = set()
    left = list(results)
    while left:
        value = left.pop()
        if value in live:
            continue
        live.add(value)
        left += [v for v in upstream(value, owner) if watched(v.aval) and bad.get(v, True)]
    return live


def _origin(
    site: Site, record: Events, i: int, value: Value, labels: Sequence, more: int
) -> Origin:
    node, shape = site.node, value.aval.shape
    turns = zip(site.loops, record.turns[i].tolist(), strict=False)
    iterations = tuple((step.node.name, step.iteration(turn)) for step, turn in turns)
    operands = tuple(
        _operand(node, v, words)
        for v, words in zip(node.ins[:OPERANDS], record.words[i], strict=False)
    )
    index = tuple(map(int, np.unravel_index(int(record.index[i]), shape))) if shape else ()
    batch = tuple((label, at) for label, at in zip(labels, index, strict=False) if label)
    kind = "nan" if record.nan[i] else "inf"
    return Origin(
        kind, node.name, node.line, operands, value.aval.str_short(short_dtypes=True),
        index, iterations, site.device, more, batch, node.phase,
        hint_for(node, kind, [x.value for x in operands]),
    )  # fmt: skip


def _operand(node: Node, v: Value, words: np.ndarray) -> Operand:
    type_ = v.aval.str_short(short_dtypes=True)
    if not hasattr(v.aval, "dtype") or jnp.issubdtype(v.aval.dtype, jax.dtypes.extended):
        return Operand(type_)
    if node.name in ELEMENTWISE and aligned(v.aval.shape, node.outs[0].aval.shape):
        return Operand(type_, value_of(words, v.aval.dtype))
    low, high = words.view(np.float32)
    return Operand(type_, None, float(low), float(high))


def _written(region: Region, live: set[Value]) -> Iterator[Origin]:
    """The numbers of the program's own text that are not finite and reached a result.

    A mask's -inf is one, and mostly meant: they are told where nothing was born.
    """
    for node in region.nodes:
        for body in node.regions.values() if runs_regions(node) else ():
            yield from _written(body, live)
        for v in node.ins:
            if v.node is not None or v not in live or v.known is None or np.size(v.known) != 1:
                continue
            number = complex(np.asarray(v.known).reshape(()))
            if not cmath.isfinite(number):
                kind = "nan" if cmath.isnan(number) else "inf"
                yield Origin(
                    kind, "literal", node.line, (), v.aval.str_short(short_dtypes=True), (),
                    hint=f"the program says {number.real:g} here, for `{node.name}`",
                )  # fmt: skip


def _argument(f: Callable, path: tuple) -> str:
    """What a user calls a leaf of the arguments: `params['w']`."""
    which, *rest = path
    if which.idx == 1:
        return f"{rest[0].key}{jax.tree_util.keystr(tuple(rest[1:]))}"
    position = rest[0].idx
    try:
        names = list(inspect.signature(f).parameters.values())
        before = names[position]
        spread = [p for p in names[: position + 1] if p.kind is p.VAR_POSITIONAL]
        name = f"{spread[0].name}[{position - names.index(spread[0])}]" if spread else before.name
    except (ValueError, TypeError, IndexError):
        name = f"args[{position}]"
    return f"{name}{jax.tree_util.keystr(tuple(rest[1:]))}"


def _argument_origin(name: str, value: Value, inputs: Events, i: int) -> Origin:
    shape = value.aval.shape
    index = np.unravel_index(int(inputs.index[i]), shape) if math.prod(shape) and shape else ()
    kind = "nan" if inputs.nan[i] else "inf"
    return Origin(
        kind, "argument", f"`{name}`", (), value.aval.str_short(short_dtypes=True),
        tuple(map(int, index)), hint="it was so before the function ran",
    )  # fmt: skip
