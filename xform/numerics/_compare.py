"""`compare`: which equation loses the digits, and which only passes the loss on.

Three runs of one program side by side. The *low* one is the program as it is written, in the
policy's dtypes; the *high* one has every floating-point number in a wider dtype. The third is made
anew at each equation: the equation in the wide dtype, of the low run's operands. The low run
differs from it by what this equation *introduces*; it differs from the high run by what the
operands brought along, which the equation passes on, grown or shrunk. Barriers keep a compiler from
computing one equation with another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from xform._lowered import as_written
from xform._precision._classes import ACCUMULATES, LIKE_OPERANDS, REDUCE
from xform._precision._policy import Policy
from xform._precision._transform import precision
from xform._program import Node, Region, program
from xform._single import single
from xform.jaxpr._walk import sub_jaxprs
from xform.numerics._events import watched
from xform.numerics._run import Site, depth, run, sites

_SHOWN = 12


@dataclass(frozen=True)
class Loss:
    """What one equation did to the digits; errors are root mean squares, relative to the result's.

    Attributes:
      operation: the primitive.
      line: the user's line.
      type: shape and dtype of the result.
      introduced: the error of the equation itself, its operands being right.
      passed_on: the error that its operands' errors make in the result.
      total: of the result.
      iterations: of each loop around it the kind, and the iteration with the largest `introduced`,
        of which all three are.
      device: coordinates on the mesh axes of the `shard_map` around it.
    """

    operation: str
    line: str
    type: str
    introduced: float
    passed_on: float
    total: float
    iterations: tuple[tuple[str, int], ...] = ()
    device: tuple[tuple[str, int], ...] = ()

    def __str__(self):
        where = "".join(f", {kind} iteration {i}" for kind, i in self.iterations)
        where += "".join(f", {axis}={i}" for axis, i in self.device)
        numbers = f"{self.introduced:9.2e} {self.passed_on:9.2e} {self.total:9.2e}"
        return f"{numbers}  {self.operation} -> {self.type} at {self.line}{where}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      rows: one for each equation with a floating-point result, in program order.
      outputs: the relative error of each result of the function.
    """

    rows: tuple[Loss, ...]
    outputs: tuple[float, ...]

    @property
    def worst(self) -> tuple[Loss, ...]:
        """The rows by the error that they introduce, largest first."""
        return tuple(sorted(self.rows, key=lambda row: -row.introduced))

    def __str__(self):
        lines = [f"results: {', '.join(f'{x:.2e}' for x in self.outputs)}"]
        lines += ["introduced passed on     total"]
        return "\n".join(lines + [str(row) for row in self.worst[:_SHOWN]])


def compare(f: Callable, low: Policy | str | None = None, high: Any = "float32") -> Callable:
    """Returns a function that runs `f` at two precisions, and tells the errors of each equation.

    Args:
      f: a function of pytrees of arrays.
      low: a policy of `xform.precision` in which `f` is run; None runs it as it is written.
      high: the dtype that all floating-point numbers have in the run that is held to be right. For
        float64, `jax.enable_x64` must be on.

    Returns:
      A function of the arguments of `f`, which must be concrete, that returns a `Comparison`.
      Inside of `shard_map` the errors are of each device's part. Equations that hold programs of
      their own (kernels, attention) run as they are written in both runs.

    Raises:
      ValueError: for a `high` of float64 without `jax.enable_x64`, or one that is no float.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda w, x: jnp.tanh(x @ w) - 1.0
    >>> report = compare(f, "bf16")(jnp.full((8, 4), 0.1), jnp.ones((3, 8)) / 3)
    >>> [row.operation for row in report.rows][2:-1]
    ['dot_general', 'tanh', 'sub']
    """
    high = jnp.dtype(high)
    if not jnp.issubdtype(high, jnp.floating) or high.itemsize < 4:
        raise ValueError(f"`high` is {high}; needed is float32 or float64")
    if high == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("`high` is float64, which JAX has inside of `jax.enable_x64(True)` only")
    if isinstance(low, Policy) and low.products is not None and low.products.delayed:
        raise ValueError(
            "`low` has delayed scales, and `compare` has no state: use scales of today"
        )

    @functools.wraps(f)
    def compared(*args, **kwargs) -> Comparison:
        flat = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, Tracer) for x in flat):
            raise TypeError(
                "`compare` runs a program and reads what it computed: call it on concrete arrays, "
                "outside of `jit`: `compare(jax.jit(f))(x)`."
            )
        written = f if low is None else precision(f, low)
        region = program(jax.make_jaxpr(written)(*args, **kwargs), lower=as_written)
        return _report(region, flat, high)

    return compared


class Pair(NamedTuple):
    """A floating-point value in both runs; of any other there is one."""

    low: Any
    high: Any


class Errors(NamedTuple):
    """A record of `xform.numerics._run`: of each floating-point result of each node."""

    introduced: Any
    passed_on: Any
    total: Any
    turns: Any


class _Probe:
    """Runs each equation three times."""

    def __init__(self, levels: int, high: Any):
        self.levels, self.high = levels, high

    def rows(self, node: Node) -> int:
        return sum(watched(v.aval) for v in node.outs)

    def run(self, node: Node, ins: list) -> tuple[list, Errors]:
        low = list(map(_once, _bind(node, list(map(_low, ins)))))
        widened = [Pair(x.low, self.widen(x.low)) if isinstance(x, Pair) else x for x in ins]
        again, high = self.wide(node, widened), self.wide(node, ins)
        outs, errors = [], []
        for v, a, b, c in zip(node.outs, low, again, high, strict=True):
            if not watched(v.aval):
                outs.append(a)
                continue
            outs.append(Pair(a, c))
            errors.append(self.errors(a, b, c))
        if not errors:
            return outs, self.blank(0)
        return outs, jax.tree.map(lambda *xs: jnp.concatenate(xs), *errors)

    def wide(self, node: Node, ins: list) -> list:
        """The equation in the high dtype; as it is written, if it holds dtypes of its own."""
        if sub_jaxprs(node.eqn) or node.name not in _DTYPELESS:
            written = [
                x.high.astype(v.aval.dtype) if isinstance(x, Pair) else x
                for x, v in zip(ins, node.ins, strict=True)
            ]
            return [_once(self.widen(x)) for x in _bind(node, written)]
        params = dict(node.eqn.params)
        for key in ("preferred_element_type", "new_dtype"):
            if params.get(key) is not None and jnp.issubdtype(params[key], jnp.floating):
                params[key] = self.high
        return [_once(self.widen(x)) for x in _bind(node, list(map(_high, ins)), params)]

    def widen(self, x: Any) -> Any:
        return x.astype(self.high) if watched(jax.typeof(x)) and _is_real(x) else x

    def errors(self, low: Any, again: Any, high: Any) -> Errors:
        """Relative to the result's size; what is not finite in the high run doesn't count."""
        low, again, high = (jnp.abs(x) if not _is_real(x) else x for x in (low, again, high))
        wide = lambda x: x.astype(high.dtype)
        counts = jnp.isfinite(high)
        mean = lambda x: jnp.sqrt(jnp.sum(jnp.where(counts, x, 0) ** 2) / max(1, high.size))
        size = mean(high)
        relative = lambda x, y: mean(wide(x) - wide(y)) / jnp.where(size > 0, size, 1)
        found = relative(low, again), relative(again, high), relative(low, high)
        introduced, passed_on, total = (x.astype(jnp.float32)[None] for x in found)
        return Errors(introduced, passed_on, total, jnp.zeros((1, self.levels), jnp.int32))

    def blank(self, rows: int) -> Errors:
        none = jnp.full(rows, -1.0, jnp.float32)
        return Errors(none, none, none, jnp.zeros((rows, self.levels), jnp.int32))

    def merge(self, old: Errors, new: Errors, level: int, turn: Any) -> Errors:
        """The turn with the largest error of the equation's own."""
        new = new._replace(turns=new.turns.at[:, level].set(turn))
        larger = new.introduced > old.introduced
        choose = lambda a, b: jnp.where(larger.reshape(-1, *[1] * (a.ndim - 1)), b, a)
        return Errors(*map(choose, old, new))

    def lift(self, array: Any) -> Any:
        return Pair(array, self.widen(array)) if watched(jax.typeof(array)) else array

    def array(self, value: Any) -> Any:
        return _low(value)


# What can be computed in another dtype by giving it other operands; the rest is run as written.
_DTYPELESS = (ACCUMULATES | LIKE_OPERANDS | REDUCE | {"dot_general", "conv_general_dilated"}) - {
    "reduce_precision"
}


def _bind(node: Node, ins: list, params: Any = None) -> list:
    primitive = node.eqn.primitive
    out = primitive.bind(*ins, **primitive.get_bind_params(params or node.eqn.params))
    return list(out) if primitive.multiple_results else [out]


def _once(x: Any) -> Any:
    """A value rounded once, which no equation is fused with."""
    if not watched(jax.typeof(x)):
        return x
    return lax.optimization_barrier(single(x))


def _low(x: Any) -> Any:
    return x.low if isinstance(x, Pair) else x


def _high(x: Any) -> Any:
    return x.high if isinstance(x, Pair) else x


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _report(region: Region, flat: list, high: Any) -> Comparison:
    probe = _Probe(depth(region), high)
    fast = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None

    @functools.partial(jax.jit, compiler_options=fast)
    def side_by_side(*flat):
        outs, record = run(region, [probe.lift(jnp.asarray(x)) for x in flat], probe)
        ends = [probe.errors(x.low, x.low, x.high).total for x in outs if isinstance(x, Pair)]
        return record, ends

    record, ends = jax.device_get(side_by_side(*flat))
    rows = [
        _row(site, record, i)
        for i, site in enumerate(sites(region, probe))
        if record.introduced[i] >= 0 or np.isnan(record.introduced[i])
    ]
    return Comparison(tuple(rows), tuple(float(x[0]) for x in ends))


def _row(site: Site, record: Errors, i: int) -> Loss:
    node = site.node
    kept = [v for v in node.outs if watched(v.aval)]
    turns = zip(site.loops, record.turns[i].tolist(), strict=False)
    return Loss(
        node.name, node.line, kept[site.row].aval.str_short(short_dtypes=True),
        *(float(x[i]) for x in record[:3]),
        iterations=tuple((step.node.name, step.iteration(turn)) for step, turn in turns),
        device=site.device,
    )  # fmt: skip
