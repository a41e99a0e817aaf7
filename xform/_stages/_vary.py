"""Over which mesh axes values differ, and casts to more of them."""

from __future__ import annotations

import jax
from jax import lax

from xform._compat import varying_axes


def axes_of(*trees, but: frozenset[str] | set[str] = frozenset()) -> frozenset[str]:
    """The mesh axes over which some leaf differs."""
    return frozenset().union(*map(varying_axes, jax.tree.leaves(trees))) - but


def vary(x, batch):
    """A value that differs over the axes that the batch does, as all that travels has to."""
    return cast(x, axes_of(batch))


def cast(x, axes: frozenset[str]):
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
