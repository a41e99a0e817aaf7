"""Small arrays of a mod taken apart into their numbers: a kernel's programs are of scalars.

`jnp.select` stacks its conditions, `jnp.dot(u[q], w[k])` multiplies vectors, `jnp.max` of three
scores reduces them. What such an array holds at a pair of a query and a key is a few numbers; each
of them is a tile inside the kernel, and the operations between are written out.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.lowering.mosaic_gpu._classes import TILE, Class, aval_of, flatten
from xform.lowering.mosaic_gpu._ops import OPS

_MOST = 256
"""Numbers in an array that is taken apart."""


def scalars(jaxpr: Jaxpr, classes: Mapping[Var, Class]) -> Jaxpr:
    """The same program, in which arrays that depend on a query and a key are many scalars."""
    if all(aval_of(v).shape == () for eqn in jaxpr.eqns for v in eqn.outvars):
        return jaxpr

    def run(*args):
        env = dict(zip(jaxpr.invars, args, strict=True))
        for eqn in jaxpr.eqns:
            values = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if rule := _rule_of(eqn, classes):
                out = [rule(eqn, *map(_apart, values))]
            else:
                out = eqn.primitive.bind(
                    *map(_whole, values), **eqn.primitive.get_bind_params(eqn.params)
                )
                out = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, out, strict=True))
        return [_whole(v.val if isinstance(v, Literal) else env[v]) for v in jaxpr.outvars]

    structs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]
    traced = jax.make_jaxpr(run)(*structs)
    return flatten(traced.jaxpr if hasattr(traced, "jaxpr") else traced)


def _rule_of(eqn: JaxprEqn, classes: Mapping[Var, Class]) -> Callable | None:
    """How an equation works on arrays taken apart; None where it stays as it is."""
    name, (out, *more) = eqn.primitive.name, eqn.outvars
    sizes = [aval_of(v).size for v in (*eqn.invars, out)]
    arrays = any(aval_of(v).ndim for v in (*eqn.invars, out))
    if more or not arrays or max(sizes) > _MOST or classes[out].pair != TILE:
        return None
    if name in _RULES:
        first = eqn.invars[0]
        # One number of a whole array is looked up, and the array stays one.
        stays = name == "dynamic_slice" and not (
            isinstance(first, Var) and classes[first].pair == TILE
        )
        return None if stays else _RULES[name]
    return _elementwise if name in OPS else None


def _apart(x) -> np.ndarray:
    """An array of objects, each a scalar."""
    if isinstance(x, np.ndarray) and x.dtype == object:
        return x
    out = np.empty(np.shape(x), object)
    for i in np.ndindex(out.shape):
        one = x if out.size == 1 else lax.slice(x, i, [n + 1 for n in i])
        out[i] = jnp.reshape(one, ())
    return out


def _whole(x):
    """The inverse."""
    if not (isinstance(x, np.ndarray) and x.dtype == object):
        return x
    return jnp.stack(list(x.ravel())).reshape(x.shape) if x.ndim else x[()]


def _elementwise(eqn: JaxprEqn, *xs):
    params = eqn.primitive.get_bind_params(eqn.params)
    xs = np.broadcast_arrays(*xs)  # a dimension of 1 goes with any
    out = np.empty(xs[0].shape, object)
    for i in np.ndindex(out.shape):
        out[i] = eqn.primitive.bind(*(x[i] for x in xs), **params)
    return out


def _broadcast(eqn: JaxprEqn, x):
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    inner = [1] * len(shape)
    for n, d in zip(x.shape, dims, strict=True):
        inner[d] = n
    return np.broadcast_to(x.reshape(inner), shape)


def _slice(eqn: JaxprEqn, x):
    bounds = eqn.params["start_indices"], eqn.params["limit_indices"]
    steps = eqn.params["strides"] or [1] * x.ndim
    return x[tuple(slice(*b) for b in zip(*bounds, steps, strict=True))]


def _dynamic_slice(eqn: JaxprEqn, x, *starts):
    """By a choice among all slices that there are, one dimension after the other."""
    for d, (start, size) in enumerate(zip(starts, eqn.params["slice_sizes"], strict=True)):
        parts = [np.take(x, range(n, n + size), d) for n in range(x.shape[d] - size + 1)]
        out, at = parts[0], jnp.clip(start[()], 0, len(parts) - 1)
        for n, part in enumerate(parts[1:], 1):
            out = _over(lambda a, b, n=n, at=at: jnp.where(at == n, b, a), out, part)
        x = out
    return x


def _over(f: Callable, *xs):
    """`f` of the elements of arrays of one shape."""
    out = np.empty(xs[0].shape, object)
    for i in np.ndindex(out.shape):
        out[i] = f(*(x[i] for x in xs))
    return out


def _reduce(f: Callable) -> Callable:
    def reduced(eqn: JaxprEqn, x):
        for axis in sorted(eqn.params["axes"], reverse=True):
            x = functools.reduce(functools.partial(_over, f), np.moveaxis(x, axis, 0))
            x = x if isinstance(x, np.ndarray) else _apart(x)
        return x

    return reduced


def _wins(better: Callable, a, b):
    """Whether `b` comes before `a`, which stands earlier: a NaN before all, then what is better."""
    if a.dtype == jnp.bool_:
        return b & ~a if better is operator.gt else a & ~b
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return better(b, a)
    return (better(b, a) | (b != b)) & (a == a)


def _first(better: Callable) -> Callable:
    """The index of the first of the best elements."""

    def first(eqn: JaxprEqn, x):
        (axis,) = eqn.params["axes"]
        index = lambda n: jnp.asarray(n, eqn.params["index_dtype"])
        best, *rest = np.moveaxis(x, axis, 0)
        found = _over(lambda _: index(0), _array(best))
        best = _array(best)
        for n, part in enumerate(map(_array, rest), 1):
            wins = _over(functools.partial(_wins, better), best, part)
            found = _over(lambda w, i, n=n: jnp.where(w, index(n), i), wins, found)
            best = _over(jnp.where, wins, part, best)
        return found

    return first


def _array(x) -> np.ndarray:
    """An element of an array of objects as an array without dimensions."""
    if isinstance(x, np.ndarray):
        return x
    out = np.empty((), object)
    out[()] = x
    return out


def _dot(eqn: JaxprEqn, x, y):
    (x_dims, y_dims), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    x = np.moveaxis(x, [*x_batch, *x_dims], range(len(x_batch) + len(x_dims)))
    y = np.moveaxis(y, [*y_batch, *y_dims], range(len(y_batch) + len(y_dims)))
    batch, summed = x.shape[: len(x_batch)], x.shape[len(x_batch) : len(x_batch) + len(x_dims)]
    dtype = aval_of(eqn.outvars[0]).dtype
    left, right = x.shape[len(batch) + len(summed) :], y.shape[len(batch) + len(summed) :]
    out = np.empty((*batch, *left, *right), object)
    for b, i, j in itertools.product(*map(np.ndindex, (batch, left, right))):
        terms = (
            x[(*b, *s, *i)].astype(dtype) * y[(*b, *s, *j)].astype(dtype)
            for s in np.ndindex(summed)
        )
        out[(*b, *i, *j)] = functools.reduce(operator.add, terms)
    return out


_RULES: dict[str, Callable] = {
    "argmax": _first(operator.gt),
    "argmin": _first(operator.lt),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, *xs: np.concatenate(xs, eqn.params["dimension"]),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "reduce_and": _reduce(operator.and_),
    "reduce_max": _reduce(jnp.maximum),
    "reduce_min": _reduce(jnp.minimum),
    "reduce_or": _reduce(operator.or_),
    "reduce_prod": _reduce(operator.mul),
    "reduce_sum": _reduce(operator.add),
    "reshape": lambda eqn, x: x.reshape(eqn.params["new_sizes"]),
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _slice,
    "squeeze": lambda eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "stack": lambda eqn, *xs: np.stack(xs, eqn.params["axis"]),
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}
"""By the name of a primitive: `rule(equation, *operands)`, on arrays of objects."""
