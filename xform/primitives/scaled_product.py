"""Products of numbers of 8 bits, scaled and rounded: one kernel where the device has one.

`xform.precision` asks for them. On a GPU of compute capability 9.0 the product is a kernel that
rounds once, to 16 bits; elsewhere, where the partitioner splits arrays, and under a `vmap` of both
operands, it is XLA's product in float32 and what follows.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.interpreters import ad, batching

from xform._compat import Primitive
from xform.primitives._auto import register
from xform.primitives._choose import Device, default_device
from xform.primitives._rules import join_axes

_LAST = (((1,), (1,)), ((), ()))
_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_NUMBERS = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


def by_kernel(x: Array, y: Array, dtype) -> bool:
    """Whether a product over the last dimensions of `[M,K]` and `[N,K]` is a kernel here.

    A program that is traced where there is no such GPU keeps XLA's product: every transform knows
    that one, and nothing would be gained.
    """
    device = default_device()
    if device is None or device.misfits or jnp.dtype(dtype) not in _DTYPES:
        return False
    whole = all(axis is None for v in (x, y) for axis in jax.typeof(v).sharding.spec)
    return whole and not _misfits(x, y)


def scaled_product(x: Array, y: Array, scale: Array, dtype) -> Array:
    """Returns `x y' scale`, summed in float32 (by a kernel, in as many digits as the device keeps).

    Args:
      x, y: `[M,K]` and `[N,K]`, each e4m3 or e5m2.
      scale: float32, one number.
      dtype: of the result `[M,N]`.
    """
    args = join_axes((x, y, scale))
    return scaled_product_p.bind(*args, dtype=jnp.dtype(dtype))[0]


def _misfits(x, y) -> list[str]:
    from xform.lowering.mosaic_gpu._scaled import misfits

    wrong = [f"{v.dtype}; needed is e4m3 or e5m2" for v in (x, y) if v.dtype not in _NUMBERS]
    return wrong + misfits(x.shape, y.shape)


def _plain(x, y, scale, dtype):
    return (lax.dot_general(x, y, _LAST, preferred_element_type=jnp.float32) * scale).astype(dtype)


scaled_product_p = Primitive("scaled_product")
"""The equation that a call is in a jaxpr, as a key of tables of rules."""
scaled_product_p.multiple_results = True


def _structs(x, y, scale, *, dtype):
    del scale
    return [jax.ShapeDtypeStruct((x.shape[0], y.shape[0]), dtype)]


def _impl(x, y, scale, *, dtype, device: Device, auto: bool):
    if device.platform != "cuda" or device.misfits or auto or _misfits(x, y):
        return [_plain(x, y, scale, dtype)]
    from xform.lowering.mosaic_gpu import _scaled

    return [_scaled.scaled_product(x, y, scale, dtype)]


def _jvp(primals, tangents, *, dtype):
    """XLA's product has the derivative; its value is dropped for the kernel's."""
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    _, tangent = jax.jvp(partial(_plain, dtype=dtype), tuple(primals), tangents)
    x, y, scale = primals
    return [scaled_product(x, y, scale, dtype)], [tangent]


def _batch(args, dims, *, dtype):
    (x, y, scale), (dim, *others) = args, dims
    if dim is None or any(d is not None for d in others):
        return [jax.vmap(partial(_plain, dtype=dtype), dims)(*args)], [0]
    x = jnp.moveaxis(x, dim, 0)
    rows = x.reshape(-1, x.shape[-1])
    out = scaled_product(rows, y, scale, dtype)
    return [out.reshape(*x.shape[:-1], len(y))], [0]


register(scaled_product_p, _structs, _impl)
ad.primitive_jvps[scaled_product_p] = _jvp
batching.primitive_batchers[scaled_product_p] = _batch
