"""The norm of all gradients, whatever is split how.

    norm² = Σ over leaves of Σ over the axes that split it of Σ x²

A leaf that is the same on all devices of an axis counts once, one that an axis splits has its parts
summed over it: an owner's part is counted once, and none twice. Leaves that the same axes split
share one sum over devices.
"""

from collections import defaultdict

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from xform._compat import varying_axes
from xform.primitives._auto import axis_names
from xform.sharding._declare import declare
from xform.sharding._specs import is_spec


def global_norm(grads: PyTree, specs: PyTree) -> jax.Array:
    """Returns the square root of the sum of squares of all gradients, in float32 at least.

    To be called inside `jax.shard_map`. It doesn't depend on the partition, but for rounding.

    Args:
      grads: This device's parts.
      specs: How each is split, in a tree of the same structure.

    Raises:
      ValueError: Lists the leaves that vary over an axis that doesn't split them: those are each
        device's own, and have not been summed.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=2, tp=2, devices=jax.devices()[:4])
    >>> specs = [jax.P("tp"), jax.P()]
    >>> f = lambda grads: global_norm(grads, specs)
    >>> x = jax.device_put([jnp.ones(12), jnp.ones(4)], [jax.NamedSharding(mesh, s) for s in specs])
    >>> float(jax.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=jax.P())(x))
    4.0
    """
    wrong, sums = [], defaultdict(list)
    paths = jax.tree.leaves_with_path(grads)
    for (path, x), spec in zip(paths, jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        axes = varying_axes(x)
        if extra := sorted(axes - set(axis_names(spec))):
            wrong.append(f"{jax.tree_util.keystr(path)} varies over {extra} and is split by {spec}")
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        sums[tuple(sorted(axes))].append(jnp.sum(jnp.square(jnp.abs(wide))))
    if wrong:
        raise ValueError(
            f"`global_norm`: {'; '.join(wrong)}. Sum these gradients over the devices first, as "
            "`data.value_and_grad` does."
        )
    whole = []
    for axes, parts in sums.items():
        with declare("norm.global_norm", *axes):
            whole.append(lax.psum(sum(parts), axes) if axes else sum(parts))
    return jnp.sqrt(sum(whole))
