"""`fuse`: a function as one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._fuse._primitive import fused
from xform.primitives._rules import check_sizes, join_axes


def fuse(f: Callable, *, donate_argnums: int | Sequence[int] = ()) -> Callable:
    """Returns `f` as one kernel, whose gradient is one kernel too; or raises while it is traced.

    What is elementwise, casts, broadcasts, slices and joins within a row, and sums and maxima along
    rows run together: rows are read once and written once. Which dims are rows, and which lie
    within a row, follows from the program: a dim that some operation reads across is within, all
    others are rows, and have nothing to do with each other. Any rank, any lengths, any dim.

    * **Forward** is one kernel, **backward** one kernel. What sums over rows in the end (the
      gradient of a weight that all rows share, a mean loss) is finished by one reduction more.
    * **A value is computed once.** No two readers of it see two roundings: `exp(z - max(z))` has
      no exponent above 0. Results in 16 bits are rounded where `f` says so.
    * **Saved** for the backward pass are arguments, results, and numbers of rows; random bits are
      made again.
    * On a CPU it is one loop over blocks of rows in which no value is larger than a block, which is
      read off the compiled program. On a GPU it is a kernel in Pallas; an array whose rows do not
      lie side by side (what is reduced is not its last dim) is copied there, by a kernel of XLA's.
    * `vmap` adds rows, `jax.shard_map` runs it on each device's rows. Under `jit`, arrays may be
      split along rows, and nothing moves but sums over rows. Derivatives of any order and in both
      directions are kernels.

    JAX's own hints (`must_fuse_call`, `experimental.fused`) promise this on one backend each, and
    are ignored elsewhere.

    Args:
      f: a function of pytrees of arrays. Leaves that are neither arrays nor floats are part of the
        program, as Python's ints and bools are. Arrays that it closes over are operands.
      donate_argnums: positional arguments over whose arrays results may be written: each result
        over one of its shape and dtype, the first of them, where each element depends on that
        element and on its row, and rows fit into registers. A caller that needs such an array
        afterwards still has it, by a copy of XLA's; so name what `jax.jit` is given to donate as
        well. Kernels of derivatives write over none, nor does a CPU's loop, which meets some rows
        twice.

    Returns:
      A function like `f`.

    Raises:
      ValueError: `donate_argnums` names no positional argument.
      FusionError: what `f` does is not one kernel; with each operation in the way, its line, why,
        and the nearest split that is legal. For its derivatives, when these are traced.
      NotImplementedError: no kernel for this platform, or not for this call on a GPU.

    >>> import jax, jax.numpy as jnp
    >>> from xform import fuse
    >>> @fuse
    ... def rms_norm(x, weight):
    ...     mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    ...     return x * jax.lax.rsqrt(mean + 1e-6) * weight[None]
    >>> x, weight = jnp.ones((5, 257)), jnp.ones(257)
    >>> rms_norm(x, weight).shape
    (5, 257)
    >>> [g.shape for g in jax.grad(lambda *a: rms_norm(*a).sum(), (0, 1))(x, weight)]
    [(5, 257), (257,)]
    """
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)

    @functools.wraps(f)
    def run(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        given = _given(donate, args)
        moving = [i for i, x in enumerate(leaves) if _is_array(x)]
        keys = {i: jax.random.key_impl(leaves[i]) for i in moving if _is_key(leaves[i])}
        arrays = [
            jax.random.key_data(x) if i in keys else _array(x)
            for i, x in ((i, leaves[i]) for i in moving)
        ]
        check_sizes("fuse", **{f"argument {i}": x for i, x in enumerate(arrays)})

        def call(*arrays):
            full = list(leaves)
            for i, x in zip(moving, arrays, strict=True):
                full[i] = jax.random.wrap_key_data(x, impl=keys[i]) if i in keys else x
            args, kwargs = jax.tree.unflatten(tree, full)
            return f(*args, **kwargs)

        arrays = join_axes(arrays)
        jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*arrays)
        donated = [i < len(given) and given[i] for i in moving]
        outs = fused(jaxpr, *arrays, donated=donated)
        return jax.tree.unflatten(jax.tree.structure(out), outs)

    return run


def _given(donate: Sequence[int], args: Sequence) -> list[bool]:
    """Of each leaf of the positional arguments, whether it may be written over."""
    if wrong := [n for n in donate if n not in range(-len(args), len(args))]:
        raise ValueError(
            f"`donate_argnums` of `fuse` names {', '.join(map(str, wrong))}, of {len(args)} "
            "positional arguments. Count from 0, and pass what is donated by position."
        )
    numbers = {n % len(args) for n in donate}
    return [i in numbers for i, x in enumerate(args) for _ in jax.tree.leaves(x)]


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, float)


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray | float) else x
