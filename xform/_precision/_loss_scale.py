"""Dynamic loss scaling: gradients of float16 that neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "good"],
    meta_fields=["period", "factor", "largest"],
)
@dataclass(frozen=True)
class LossScale:
    """A factor of the loss, to be carried from step to step: a pytree.

    Gradients of float16 smaller than 6e-8 are 0, and larger than 65504 are infinite. So the loss is
    multiplied before it is differentiated, and gradients are divided after, in float32. A step with
    a gradient that is not finite is to be left out, and halves the factor; `period` good ones in a
    row double it.

    Attributes:
      value: the factor.
      good: how many good steps there were since it changed.
      period: how many double it.
      factor: by how much it changes.
      largest: how large it may become.

    >>> import jax, jax.numpy as jnp
    >>> from xform import LossScale, precision
    >>> scale = LossScale()
    >>> f = precision(lambda w, x: jnp.mean((x @ w) ** 2), "f16")
    >>> w, x = jnp.ones((4, 1)), jnp.full((8, 4), 1e-5)
    >>> loss, grads, finite = scale.value_and_grad(f)(w, x)
    >>> scale = scale.adjust(finite)
    >>> w = jax.tree.map(lambda w, g: jnp.where(finite, w - g, w), w, grads)
    >>> bool(finite), int(scale.good)
    (True, 1)
    """

    value: Any = field(default_factory=lambda: jnp.float32(2**15))
    good: Any = field(default_factory=lambda: jnp.int32(0))
    period: int = 2000
    factor: float = 2.0
    largest: float = 2.0**24

    def value_and_grad(self, f: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
        """Returns a function that gives loss, float32 gradients, and whether all are finite."""

        def scaled(*args, **kwargs):
            loss = f(*args, **kwargs)
            return self.scale(loss), loss

        def call(*args, **kwargs):
            grads, loss = jax.grad(scaled, argnums, has_aux=True)(*args, **kwargs)
            grads = self.unscale(grads)
            return loss, grads, all_finite(grads)

        return call

    def scale(self, loss: Any) -> Any:
        """The loss, to be differentiated."""
        return loss * self.value.astype(loss.dtype)

    def unscale(self, grads: PyTree) -> PyTree:
        """Gradients of the scaled loss as those of the loss, in float32."""
        return jax.tree.map(lambda g: g.astype(jnp.float32) / self.value, grads)

    def adjust(self, finite: Any) -> LossScale:
        """The factor of the next step, after one whose gradients were finite or not."""
        grown = self.good + 1 >= self.period
        up = jnp.where(grown, jnp.minimum(self.value * self.factor, self.largest), self.value)
        down = jnp.maximum(self.value / self.factor, 1.0)
        good = jnp.where(finite & ~grown, self.good + 1, 0)
        return replace(self, value=jnp.where(finite, up, down), good=good)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Returns whether every element of every floating-point leaf is finite.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf]), "n": jnp.array(3)}))
    False
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves] or [jnp.bool_(True)]))
