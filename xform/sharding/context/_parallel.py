"""`ContextParallel`: how a model's sequence is split, or that it is not."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from xform.primitives.attention import flex_attention
from xform.sharding.context._attention import attention, whole
from xform.sharding.context._plan import Method
from xform.sharding.context.layouts import Layout


@dataclass(frozen=True)
class ContextParallel:
    """How a sequence is split over a mesh axis; without an axis, the same code on one device.

    Its methods are called inside `jax.shard_map` over a mesh that has the axis.

    Attributes:
      axis: The mesh axis, or None.
      method: How attention crosses devices, as of `attention`.
      layout: Which device has which positions; by default the i-th part is device i's.

    Raises:
      ValueError: `method` or `layout` without an axis.

    >>> cp = ContextParallel()
    >>> x = jnp.ones((1, 5, 2, 4))
    >>> cp.attention(x, x, x).shape, cp.positions(5).tolist()
    ((1, 5, 2, 4), [0, 1, 2, 3, 4])
    """

    axis: str | None = None
    method: Method | None = None
    layout: Layout | None = None

    def __post_init__(self):
        given = [name for name in ("method", "layout") if getattr(self, name) is not None]
        if self.axis is None and given:
            raise ValueError(
                f"ContextParallel: `{'` and `'.join(given)}` without an `axis`: name the mesh axis "
                "that splits the sequence."
            )

    def positions(self, length: int) -> Array:
        """Returns the positions of the tokens that this device has, of which there are `length`."""
        if self.axis is None:
            return jnp.arange(length)
        if self.layout is None:
            return lax.axis_index(self.axis) * length + jnp.arange(length)
        return self.layout.positions(self.axis)

    def whole[T: PyTree](self, tree: T, dim: int = 1) -> T:
        """Returns arrays of the whole sequence, of this device's parts; see `whole`."""
        if self.axis is None:
            return tree
        return whole(tree, axis=self.axis, layout=self.layout, dim=dim)

    def attention(self, q: Array, k: Array, v: Array, **options: Any) -> Any:
        """Returns this device's part of attention over the whole sequence; see `attention`."""
        if self.axis is None:
            return flex_attention(q, k, v, **options)
        how: dict[str, Any] = dict(axis=self.axis, method=self.method, layout=self.layout)
        return attention(q, k, v, **how, **options)
