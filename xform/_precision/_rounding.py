"""Stochastic rounding: the mean of what is rounded is what it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Key, PyTree


def stochastic_round(x: PyTree, key: Key[Array, ""]) -> PyTree:
    """Returns float32 arrays as bfloat16, rounded up or down by chance.

    A number between two neighbours becomes the upper one with the probability of its distance from
    the lower one: an update too small to change a bfloat16 parameter still does so now and then,
    and is not lost in the mean. What bfloat16 holds stays as it is, as do infinities and NaN; no
    finite number becomes infinite.

    Args:
      x: a pytree of float32 arrays; leaves of other dtypes are left alone.
      key: a key; each leaf draws from one of its own.

    Returns:
      The same pytree with bfloat16 leaves.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.full(10_000, 1.001)  # between 1 and 1.0078125
    >>> rounded = stochastic_round(x, jax.random.key(0))
    >>> rounded.dtype, abs(float(rounded.astype("float32").mean()) - 1.001) < 1e-4
    (dtype(bfloat16), True)
    """
    leaves, tree = jax.tree.flatten(x)
    keys = jax.random.split(key, max(1, len(leaves)))
    return jax.tree.unflatten(tree, map(_round, leaves, keys))


def _round(x, key):
    if jnp.result_type(x) != jnp.float32:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The 16 bits that go are raised by as many random ones: they carry as often as they are large.
    chance = jax.random.bits(key, jnp.shape(x), jnp.uint16).astype(jnp.uint32)
    up = lax.bitcast_convert_type((bits + chance) & np.uint32(0xFFFF0000), jnp.float32)
    up = jnp.clip(up, *map(float, (jnp.finfo(jnp.bfloat16).min, jnp.finfo(jnp.bfloat16).max)))
    return jnp.where(jnp.isfinite(x), up, x).astype(jnp.bfloat16)
