"""A stage's passes: forward, whole backward, and the backward pass in its two parts.

`jax.vjp` gives the forward and the backward program of a stage. The backward program is cut by
reachability: what the gradient of the input needs is the first part, I, and the rest, which makes
gradients of weights, is the second, W. What depends on activations is computed in one of them.

Between F and B a stage keeps only what depends on its input. What JAX's backward pass reads that
depends on weights and other given data alone, such as weights in another dtype, is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import partial_eval

from xform._compat import Jaxpr, jaxpr_as_fun, varying_axes
from xform.jaxpr._interpret import run_body
from xform.jaxpr._rewrite import rewrite
from xform.jaxpr._walk import UNKNOWN, source_line
from xform.sharding.pipeline._divide import (
    Node,
    Slot,
    divide,
    inputs,
    is_name,
    moving_names,
    read,
    run,
)
from xform.sharding.pipeline._verify import Held

# Equations that only call: their bodies are looked into.
_CALLS = (
    "jit", "remat2", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "call_hi_primitive",
)  # fmt: skip
_CASTS = ("pvary", "pcast")
_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_product")


@dataclass(frozen=True)
class Crossing:
    """A value that I makes and W reads.

    Attributes:
      type: shape, dtype, and the mesh axes over which it varies.
      line: the user's line that made it.
    """

    type: Any
    line: str

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return self.type.size * self.type.dtype.itemsize

    def __str__(self):
        shape = ",".join(map(str, self.type.shape))
        return f"{self.type.dtype.name}[{shape}] {self.line}"


def split(stage: Callable, weights, x, *given) -> Split:
    """Returns the passes of a stage, with the backward pass whole and in two parts.

    Args:
      stage: `stage(weights, x, *given) -> y`, of trees of arrays.
      weights: a tree of arrays or of their types; those of floats get gradients.
      x: what the stage before sends: floats, which get gradients.
      *given: what else the stage reads, without gradients.

    Raises:
      TypeError: `x` or `y` have leaves that are not floats.

    >>> print(split(lambda w, x: jnp.tanh(x @ w), jnp.ones((4, 4)), jnp.ones((2, 4))))
    keeps 2 arrays from F to B, of which W reads 1; 1 cross from I to W
      float32[2,4] ...
    I: 2 equations, 1 of them matrix products; W: 2 equations, 1 of them matrix products
    """
    return Split(stage, weights, x, *given)


class Split:
    """The passes of a stage. Gradients of weights are trees with None where there is none.

    Attributes:
      keeps: types of what a stage keeps from F to B.
      late: which of these W reads; the others end with I.
      crossing: what goes from I to W beside.
      y_tree, y_types: the tree and the types of the leaves of what the stage returns.
    """

    def __init__(self, stage: Callable, weights, x, *given):
        self.y_tree: Any = None
        self.y_types: list[Any] = []
        self._x_tree: Any = None
        self._pullback: Any = None
        leaves, self._tree = jax.tree.flatten(weights)
        self._floats = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        check_floats("x", x)
        self._trace_forward(stage, leaves, x, given)
        self._trace_backward(leaves, given)

    def _trace_forward(self, stage: Callable, leaves: list, x, given) -> None:
        def forward(leaves, given, x):
            floats, rest = self._part(leaves)
            apply = lambda floats, x: stage(self._join(floats, rest), x, *given)
            y, pullback = jax.vjp(apply, floats, x)
            check_floats("y", y)
            self.y_tree = jax.tree.structure(y)
            residuals, self._pullback = jax.tree.flatten(pullback)
            return jax.tree.leaves(y), residuals

        args = (leaves, given, x)
        self._f = _inlined(jax.make_jaxpr(forward)(*args))
        varies = _flags(*args, varies=(False, False, True))
        n = self.y_tree.num_leaves
        y, self._residuals = self._f.outvars[:n], self._f.outvars[n:]
        self.y_types = [v.aval for v in y]
        sources = _cast_from(self._f)
        self._sources = {v: sources.get(v, v) for v in self._residuals if is_name(v)}
        moving = moving_names(self._f, varies)
        self._kept = [*dict.fromkeys(v for v in self._sources.values() if v in moving)]
        self.keeps = [v.aval for v in self._kept]
        self._forward = divide(self._f, [*y, *self._kept], [], varies, effects=True).head
        again = [v for v in self._sources.values() if v not in moving]
        self._again = divide(self._f, again, [], varies).head

    def _trace_backward(self, leaves: list, given) -> None:
        def backward(leaves, given, kept, g):
            known = [*leaves, *jax.tree.leaves(given)]
            env = inputs(self._f, known + [None] * (len(self._f.invars) - len(known)))
            env.update(zip(self._kept, kept, strict=True))
            run(self._again, env)
            residuals = [
                _cast(env[self._sources[v]], v) if is_name(v) else read(v, env)
                for v in self._residuals
            ]
            pullback = jax.tree.unflatten(self._pullback, residuals)
            floats, dx = pullback(jax.tree.unflatten(self.y_tree, g))
            self._x_tree = jax.tree.structure(dx)
            return jax.tree.leaves(dx), floats

        args = (leaves, given, self.keeps, self.y_types)
        self._b = _inlined(jax.make_jaxpr(backward)(*args))
        varies = _flags(*args, varies=(False, False, True, True))
        n = self._x_tree.num_leaves
        self._dx, self._dw = self._b.outvars[:n], self._b.outvars[n:]
        n = len(self._b.invars) - len(self.y_types)
        kept_in, g_in = self._b.invars[n - len(self._kept) : n], self._b.invars[n:]
        parts = divide(self._b, self._dx, self._dw, varies, carried=g_in, effects=True)
        self._head, self._tail = parts.head, parts.tail
        # Gradients that come with dx are added up at once and need not cross.
        by_tail = {v for node in parts.tail for v in node.outs}
        self._early = [v not in by_tail for v in self._dw]
        reads = {v for node in parts.tail for v in node.ins if is_name(v)}
        self._cross = [v for v in parts.crossing if v in reads]
        self._late_in = [v for v in kept_in if v in reads]
        self.late = [v in reads for v in kept_in]
        lines = [_line(parts.head, v) for v in self._cross]
        types = jax.make_jaxpr(self._crossing)(*args).out_avals
        self.crossing = [Crossing(*pair) for pair in zip(types, lines, strict=True)]

    @property
    def programs(self) -> tuple[Jaxpr, Jaxpr]:
        """The forward and the backward pass."""
        return self._f, self._b

    @property
    def held(self) -> Held:
        """The bytes that a stage keeps of a microbatch on one device, for `verify`."""
        size = lambda types: sum(t.size * t.dtype.itemsize for t in types)
        late = [t for t, is_late in zip(self.keeps, self.late, strict=True) if is_late]
        between = size(c.type for c in self.crossing)
        return Held(size(late), size(self.keeps) - size(late), between)

    def _crossing(self, *args) -> list:
        env = inputs(self._b, jax.tree.leaves(args))
        run(self._head, env)
        return [env[v] for v in self._cross]

    def forward(self, weights, x, *given) -> tuple[Any, list]:
        """Returns `y`, and what to keep for the backward pass."""
        env = inputs(self._f, jax.tree.leaves((weights, given, x)))
        run(self._forward, env)
        y = [_array(v, env) for v in self._f.outvars[: len(self.y_types)]]
        return jax.tree.unflatten(self.y_tree, y), [env[v] for v in self._kept]

    def backward(self, weights, kept: Sequence, g, *given) -> tuple[Any, Any]:
        """Returns the gradients of `x` and of the weights, given that of `y`."""
        leaves = jax.tree.leaves
        out = jaxpr_as_fun(self._b)(*leaves((weights, given)), *kept, *leaves(g))
        n = len(self._dx)
        return jax.tree.unflatten(self._x_tree, out[:n]), self._gradients(out[n:])

    def input_gradient(self, weights, kept: Sequence, g, *given) -> tuple[Any, list, Any]:
        """Returns the gradient of `x`, what crosses, and those of weights that come with it."""
        leaves = jax.tree.leaves
        env = inputs(self._b, [*leaves((weights, given)), *kept, *leaves(g)])
        run(self._head, env)
        crossing = [env[v] for v in self._cross]
        pairs = zip(self._dw, self._early, strict=True)
        early = [_array(v, env) if now else None for v, now in pairs]
        dx = jax.tree.unflatten(self._x_tree, [_array(v, env) for v in self._dx])
        return dx, crossing, self._gradients(early)

    def weight_gradient(self, weights, late: Sequence, crossing: Sequence, *given) -> Any:
        """Returns the other gradients of weights; `late` is what W reads of what was kept."""
        nothing = [None] * (len(self._kept) + len(self.y_types))
        env = inputs(self._b, [*jax.tree.leaves((weights, given)), *nothing])
        env.update(zip([*self._late_in, *self._cross], [*late, *crossing], strict=True))
        run(self._tail, env)
        pairs = zip(self._dw, self._early, strict=True)
        return self._gradients([None if now else _array(v, env) for v, now in pairs])

    def __str__(self):
        crossing = "".join(f"\n  {crossing}" for crossing in self.crossing)
        return (
            f"keeps {len(self.keeps)} arrays from F to B, of which W reads {sum(self.late)}; "
            f"{len(self.crossing)} cross from I to W{crossing}\n"
            f"I: {_count(self._head)}; W: {_count(self._tail)}"
        )

    def _part(self, leaves: Sequence) -> tuple[list, list]:
        both = list(zip(leaves, self._floats, strict=True))
        return [x for x, is_float in both if is_float], [x for x, is_float in both if not is_float]

    def _join(self, floats: Sequence, rest: Sequence) -> Any:
        these, those = iter(floats), iter(rest)
        return jax.tree.unflatten(self._tree, [next(these if f else those) for f in self._floats])

    def _gradients(self, floats: Sequence) -> Any:
        return self._join(floats, [None] * (len(self._floats) - len(floats)))


def check_floats(name: str, tree) -> None:
    """Raises unless all leaves are floats."""
    wrong = [str(leaf.dtype) for leaf in jax.tree.leaves(tree) if not _is_float(leaf)]
    if wrong:
        raise TypeError(
            f"`{name}`, which travels between stages, has leaves of {', '.join(wrong)}: only "
            "floats can have gradients. What else a stage needs comes with the batch."
        )


def _is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _inlined(jaxpr: Jaxpr) -> Jaxpr:
    """The program without calls, and without what nothing reads: gradients of constants, say."""
    whole = rewrite(jaxpr_as_fun(jaxpr), dict.fromkeys(_CALLS, run_body))
    flat = jax.make_jaxpr(whole)(*jaxpr.in_avals)
    return partial_eval.dce_jaxpr(flat, [True] * len(flat.outvars), instantiate=True)[0]


def _flags(*trees, varies: Sequence[bool]) -> list[bool]:
    """A flag for each leaf of some trees, from one for each tree."""
    pairs = zip(trees, varies, strict=True)
    return [moves for tree, moves in pairs for _ in jax.tree.leaves(tree)]


def _cast_from(jaxpr: Jaxpr) -> dict[Any, Any]:
    """What is the same array seen as varying over more mesh axes, and the array."""
    sources: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _CASTS and is_name(eqn.invars[0]):
            sources[eqn.outvars[0]] = sources.get(eqn.invars[0], eqn.invars[0])
    return sources


def _array(atom: Any, env: dict) -> Any:
    return _cast(jnp.asarray(read(atom, env)), atom)


def _cast(value, like) -> Any:
    if not hasattr(value, "dtype"):
        return value
    missing = tuple(sorted(varying_axes(like.aval) - varying_axes(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def _line(nodes: Sequence[Node], name) -> str:
    eqn = next((node.eqn for node in nodes if name in node.outs), None)
    eqn = name.eqn or eqn if isinstance(name, Slot) else eqn
    return source_line(eqn) if eqn is not None else UNKNOWN


def _count(nodes: Sequence[Node]) -> str:
    names = [eqn.primitive.name for node in nodes for eqn in node.eqns]
    products = sum(name in _PRODUCTS for name in names)
    return f"{len(names)} equations, {products} of them matrix products"
