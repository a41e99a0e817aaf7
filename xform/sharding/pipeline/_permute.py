"""A `ppermute` of a stage's own axes, in a program where ranks take different branches.

XLA has every device of a program meet in a collective permute, which knows no groups: those of
other ranks too, which may be in another branch. On CPUs they then take each other's messages, or
wait. An all-to-all knows groups. So inside `one_program` a permute over another axis than the
pipeline's is sent as one, in which a device has something for one other, and zeros for the rest. On
an axis of n devices it sends n - 1 times as much: nothing more where n = 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._compat import Jaxpr
from xform.jaxpr._rewrite import rewrite
from xform.jaxpr._walk import walk


def permutes(programs: Sequence[Jaxpr]) -> bool:
    """Whether programs, at any depth, permute."""
    return any(site.eqn.primitive.name == "ppermute" for p in programs for site in walk(p))


def in_groups(f: Callable, but: str) -> Callable:
    """The function with its permutes as all-to-alls, but for those over the axis `but`."""

    def rule(x, *, axis_name, perm, **params):
        del params
        axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        return lax.ppermute(x, axis_name, perm) if axes == (but,) else _sent(x, axes, perm)

    return rewrite(f, {"ppermute": rule})


def _sent(x, axes: tuple[str, ...], perm: Sequence[tuple[int, int]]):
    """What each device gets of its source in `perm`; zeros without one."""
    count = lax.axis_size(axes)
    to, source = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
    for a, b in perm:
        to[a], source[b] = b, a
    here = lax.axis_index(axes)
    of = lambda table: lax.dynamic_index_in_dim(jnp.asarray(table), here, keepdims=False)
    slot = jnp.arange(count, dtype=jnp.int32).reshape(-1, *[1] * x.ndim)
    parts = lax.all_to_all(jnp.where(slot == of(to), x[None], jnp.zeros_like(x[None])), axes, 0, 0)
    arrived = lax.dynamic_index_in_dim(parts, jnp.maximum(of(source), 0), keepdims=False)
    return jnp.where(of(source) >= 0, arrived, jnp.zeros_like(arrived))
