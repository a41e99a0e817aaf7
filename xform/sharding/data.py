"""Data parallelism: rows split over axes, parameters whole or split, gradients summed once.

A device's parameters enter the work on its rows in one of two ways, by what its spec says:

    whole on every device     `per_device`: a cast           derivative: all-reduce
    split over the axis       `gather`: all-gather           derivative: reduce-scatter

The derivation is that of any sum: with loss = Σ_i l_i(w), device i finds dl_i/dw, and the gradient
is their sum, of which a device that keeps a part of w needs that part alone.

*Where* it is done decides how often. A parameter that enters inside a loop, over layers or
microbatches, has its gradient summed over devices in every pass of it. `value_and_grad` has all
of them enter before, adds up in each device what its microbatches give, and goes back once: one
sum of each leaf per step, outside of all loops. The types hold one to it: what varies can't leave
`shard_map` as something that is the same on all devices, and what was summed doesn't vary.

JAX has types of exactly this meaning, `reduced` and `unreduced` (`lax.pcast`); they don't pass
through the `scan` over layers in 0.11 and 0.12, where what varies does.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from xform._compat import varying_axes
from xform.sharding._declare import declare
from xform.sharding._specs import axes_by_dim, is_spec, split_dim
from xform.sharding.loss import add_up


def per_device(tree: PyTree, axes: str | Sequence[str]) -> PyTree:
    """Returns the same arrays, as each device's own.

    Gradients with respect to the result are each device's, of its rows alone. Gradients *through*
    this function are sums over the axes.

    Args:
      tree: Arrays inside `jax.shard_map`.
      axes: The mesh axes; those that an array varies over already are left as they are. One cast
        over two axes is one sum over both, and two casts are two.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> def gradients(w, x):
    ...     own = jax.grad(lambda w: jnp.sum(w * x))(per_device(w, "dp"))
    ...     summed = jax.grad(lambda w: jnp.sum(per_device(w, "dp") * x))(w)
    ...     return own[None], summed
    >>> shared, split = jax.P(), jax.P("dp")
    >>> specs = dict(in_specs=(shared, split), out_specs=(split, shared))
    >>> f = jax.shard_map(gradients, mesh=mesh, **specs)
    >>> args = (jnp.ones(1), jnp.arange(4.0))
    >>> own, summed = f(*jax.device_put(args, shardings(mesh, (shared, split))))
    >>> own[:, 0].tolist(), summed.tolist()
    ([0.0, 1.0, 2.0, 3.0], [6.0])
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)

    def cast(x):
        missing = tuple(axis for axis in axes if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    with declare("data.per_device", *axes):
        return jax.tree.map(cast, tree)


def gather(tree: PyTree, specs: PyTree, axis: str) -> PyTree:
    """Returns arrays that are whole over the axis, as each device's own.

    Args:
      tree: Arrays inside `jax.shard_map`.
      specs: How each is split: the tree given to `jax.shard_map`, or its part for `tree`. Where
        another axis splits the same dimension, `axis` comes last.
      axis: The mesh axis to gather over. What it doesn't split is cast, as by `per_device`.

    Raises:
      ValueError: Lists the leaves whose dimension other axes split within `axis`.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> f = lambda w: gather(w, jax.P("dp"), "dp")[None]
    >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P("dp"))
    >>> f(jax.device_put(jnp.arange(8.0), shardings(mesh, jax.P("dp")))).shape  # each has all 8
    (4, 8)
    """
    dims = jax.tree.map(lambda spec: split_dim(spec, axis), specs, is_leaf=is_spec)
    inside = lambda axes: axis in axes and axes[-1] != axis
    wrong = [
        f"{jax.tree_util.keystr(path)} is split over {spec}"
        for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_spec)
        if any(map(inside, axes_by_dim(spec, len(spec))))
    ]
    if wrong:
        raise ValueError(
            f"`gather` over {axis!r}: {'; '.join(wrong)}; needed is {axis!r} as the last axis of "
            "its dimension, so that the parts lie side by side."
        )

    def whole(x, dim):
        return per_device(x, axis) if dim < 0 else lax.all_gather(x, axis, axis=dim, tiled=True)

    with declare("data.gather", axis):
        return jax.tree.map(whole, tree, dims)


def value_and_grad(
    loss: Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]],
    enter: Callable[[PyTree], PyTree],
    axes: str | Sequence[str],
    *,
    microbatches: int = 1,
) -> Callable[[PyTree, PyTree], tuple[jax.Array, PyTree]]:
    """Returns a function of parameters and rows that gives the mean loss and its gradients.

    The mean is over all labels of all devices and microbatches: sums and counts are added up, and
    divided once. Without any label it is 0, and so are its gradients.

    Args:
      loss: `loss(whole, rows) -> (sum, count)`, of this device's rows; both vary over `axes`.
      enter: What makes parameters each device's own, of `per_device` and `gather`. It runs once,
        before all microbatches, and its derivative once, after them.
      axes: The mesh axes over which devices have different rows or positions.
      microbatches: In how many parts, one after another, rows are worked on. Gradients are added
        up in float32 at least.

    Returns:
      `f(params, rows) -> (mean, grads)`, to be called inside `jax.shard_map`; gradients have the
      types of parameters.

    Raises:
      ValueError: From `f`, where rows can't be cut into so many parts.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> loss = lambda w, x: (jnp.sum(w * x), jnp.sum(x > 0))
    >>> f = value_and_grad(loss, lambda w: per_device(w, "dp"), "dp")
    >>> f = jax.shard_map(f, mesh=mesh, in_specs=(jax.P(), jax.P("dp")), out_specs=jax.P())
    >>> x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, jax.P("dp")))
    >>> f(jnp.array(2.0, out_sharding=jax.NamedSharding(mesh, jax.P())), x)
    (Array(8., dtype=float32), Array(4., dtype=float32))
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    one = jax.value_and_grad(loss, has_aux=True)

    def mean_and_grads(params, rows):
        with declare("data.value_and_grad", once=True):
            whole, back = jax.vjp(enter, params)
        (total, count), grads = accumulate(one, microbatches)(whole, rows)
        (grads,) = back(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, whole))
        total, count = add_up(total, count, axes)
        return total / count, jax.tree.map(lambda g: g / count.astype(g.dtype), grads)

    return mean_and_grads


def accumulate(f: Callable, microbatches: int) -> Callable:
    """Returns `f(whole, rows)` as the sum of its results for parts of the rows, one by one.

    Args:
      f: A function of anything and rows; results are trees of numbers that may be added.
      microbatches: The number of parts, which have equally many rows.

    >>> f = lambda w, rows: (w * rows).sum()
    >>> accumulate(f, 2)(jnp.array(2.0), jnp.arange(4.0))
    Array(12., dtype=float32)
    """

    def summed(whole, rows):
        sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(rows)}
        if microbatches < 1 or any(size % microbatches for size in sizes):
            raise ValueError(
                f"`microbatches` is {microbatches}, and a device has {sorted(sizes)} rows: needed "
                "is a number that divides them."
            )
        if microbatches == 1:
            return f(whole, rows)
        part = lambda x: x.reshape(microbatches, -1, *x.shape[1:])
        rows = jax.tree.map(part, rows)
        first = jax.tree.map(lambda x: x[0], rows)
        zeros = jax.tree.map(_zero, jax.eval_shape(f, whole, first))
        step = lambda sums, rows: (jax.tree.map(_add, sums, f(whole, rows)), None)
        return lax.scan(step, zeros, rows)[0]

    return summed


def _zero(like: jax.ShapeDtypeStruct) -> jax.Array:
    wide = jnp.issubdtype(like.dtype, jnp.floating)
    dtype = jnp.promote_types(like.dtype, jnp.float32) if wide else like.dtype
    return per_device(jnp.zeros(like.shape, dtype), tuple(sorted(varying_axes(like))))


def _add(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)
