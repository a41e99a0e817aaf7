"""`single`: a value that every reader sees rounded alike."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Inexact


def single(x: Inexact[Array, ...]) -> Inexact[Array, ...]:
    """Returns `x`, rounded to its dtype once, for everybody who reads it.

    A compiler may compute a value anew for each reader, and keep the digits that its dtype has no
    room for: XLA does so with bfloat16 on a CPU, and with a product that meets a sum on any device
    that has a fused multiply-add. Then `x - max(x)` is positive, and `(a + b) - a` is `b`. Here
    bfloat16 and float16 are rounded by an operation of its own, which costs no memory; any other
    value is computed once, behind a barrier that nothing is fused across.

    Args:
      x: an array of floating-point numbers.

    Returns:
      The same array; its derivative is that of `x`.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.linspace(-1, 1, 256, dtype=jnp.bfloat16)
    >>> above_maximum = lambda x: jnp.max(x.astype("float32") - jnp.max(x).astype("float32"))
    >>> float(jax.jit(lambda x: above_maximum(single(x * jnp.bfloat16(333))))(x))
    0.0
    """
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2:
        info = jnp.finfo(x.dtype)
        return lax.reduce_precision(x, info.nexp, info.nmant)
    return lax.optimization_barrier(x)
