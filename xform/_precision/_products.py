"""Matrix products whose operands are rounded to a format of 8 or 4 bits, forward and backward.

The product is differentiated by a rule of its own: the operands of the backward pass's two products
are rounded too, the cotangent to a format of its own. A scale of a whole tensor stays outside of
the product, which multiplies the elements themselves; a scale of a block is a part of the operand,
which is then a bfloat16 number that holds element times scale exactly.

Delayed scales look at the largest sizes of the last steps, a state of `[3, history]` per product:
of the left operand, the right one, and the cotangent. The gradient with regard to that state is the
next state: the only way in which what the backward pass saw can leave it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._compat import varying_axes
from xform._precision._formats import FORMATS, encode, quantise, scale_of
from xform._precision._policy import Products
from xform._single import single
from xform.primitives.scaled_product import by_kernel, scaled_product

type Dims = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Options(NamedTuple):
    """What a product is, besides its arrays."""

    dims: Dims
    products: Products
    compute: Any
    out_sharding: Any = None


def product(x: Any, y: Any, state: Any, options: Options) -> Any:
    """Returns a `dot_general` in the policy's formats.

    Args:
      x, y: the operands, in any floating-point dtype.
      state: sizes of the last steps, float32 `[3, history]`, or None for scales of today.
      options: dimension numbers, formats, and the dtype of the result.
    """
    if options.products.delayed and state is not None:
        return _delayed(x, y, state, options)
    return _current(x, y, options)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _current(x, y, options):
    return _forward(x, y, None, options)[0]


def _current_backward(options, kept, ct):
    dx, dy, _ = _backward(options, kept, ct, None)
    return dx, dy


_current.defvjp(lambda x, y, options: _forward(x, y, None, options), _current_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _delayed(x, y, state, options):
    return _forward(x, y, state, options)[0]


def _delayed_forward(x, y, state, options):
    out, kept = _forward(x, y, state, options)
    return out, (kept, state, _size(x), _size(y))


def _delayed_backward(options, saved, ct):
    kept, state, *sizes = saved
    dx, dy, size = _backward(options, kept, ct, state[2])
    axes = tuple(
        sorted(frozenset().union(*map(varying_axes, (*sizes, size))) - varying_axes(state))
    )
    seen = jnp.stack([*sizes, size])
    seen = lax.pmax(seen, axes) if axes else seen
    return dx, dy, jnp.concatenate([seen[:, None], state[:, :-1]], axis=1)


_delayed.defvjp(_delayed_forward, _delayed_backward)


class Operand(NamedTuple):
    """What is multiplied, and the scale of the result that goes with it."""

    array: Any
    scale: Any


def operand(
    x: Any, format: str | None, summed: Sequence[int], history: Any, compute: Any
) -> Operand:
    """An operand of a product, rounded to a format along the dimensions that are summed over."""
    if format is None:
        return Operand(x.astype(compute), None)
    x = single(x) if x.dtype.itemsize == 2 else x  # its size and its elements are of one rounding
    kind = FORMATS[format]
    if kind.block and summed:
        return _block_operand(x, format, tuple(summed))
    size = _size(x)
    if history is not None:
        before = jnp.max(history)
        size = jnp.where(before > 0, before, size)
    scale = scale_of(size, kind)
    return Operand(encode(x.astype(jnp.float32) / scale, kind), scale)


def _block_operand(x: Any, format: str, summed: tuple[int, ...]) -> Operand:
    """Blocks lie along the last of the dimensions that are summed over."""
    q = quantise(x, format, dim=summed[-1])
    exact = q._replace(scale=jnp.float32(1)).dequantise(jnp.bfloat16)
    return Operand(exact, q.scale if format == "nvfp4" else None)


def _size(x: Any) -> Any:
    x = single(x) if x.dtype.itemsize == 2 else x
    return jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0.0)


def _forward(x, y, state, options):
    (x_sum, y_sum), _ = options.dims
    of = options.products
    past = (None, None) if state is None else (state[0], state[1])
    a = operand(x, of.forward, x_sum, past[0], options.compute)
    b = operand(y, of.forward, y_sum, past[1], options.compute)
    out = _multiply(a, b, options.dims, options.compute, options.out_sharding)
    whole = of.forward is not None and not FORMATS[of.forward].block
    kept = (a, b) if whole and of.backward is not None else (x, y)
    return out, (kept, _like(x), _like(y))


def _like(x):
    """A scalar that remembers the dtype of an operand."""
    return jnp.zeros((), x.dtype)


def _backward(options, saved, ct, history):
    """Cotangents of both operands, and the size of the result's."""
    (x, y), like_x, like_y = saved
    (x_sum, y_sum), (x_batch, y_batch) = options.dims
    n = len(x_batch)
    rank = lambda v: (v.array if isinstance(v, Operand) else v).ndim
    x_free = [d for d in range(rank(x)) if d not in (*x_sum, *x_batch)]
    y_free = [d for d in range(rank(y)) if d not in (*y_sum, *y_batch)]
    of_x, of_y = range(n, n + len(x_free)), range(n + len(x_free), ct.ndim)
    side = partial(_again, options)
    cot = lambda summed: operand(ct, options.products.backward, summed, history, options.compute)

    dims = ((tuple(of_y), tuple(y_free)), (tuple(range(n)), tuple(y_batch)))
    dx = _multiply(cot(tuple(of_y)), side(y, y_free), dims, options.compute)
    # Its dimensions: the batch, those of x alone, and those summed over, in the order of y's.
    along = [x_sum[i] for i in np.argsort(y_sum)]
    dx = lax.transpose(dx, np.argsort([*x_batch, *x_free, *along]))

    summed, batch = (tuple(of_x), tuple(x_free)), (tuple(range(n)), tuple(x_batch))
    sides, along = (cot(summed[0]), side(x, x_free)), [y_sum[i] for i in np.argsort(x_sum)]
    order = [*y_batch, *y_free, *along]
    if min(y_sum, default=0) < min(y_free, default=0):  # as a weight `[in, out]`: no transpose
        summed, batch, sides = summed[::-1], batch[::-1], sides[::-1]
        order = [*y_batch, *along, *y_free]
    dy = _multiply(*sides, (summed, batch), options.compute)
    dy = lax.transpose(dy, np.argsort(order))
    return dx.astype(like_x.dtype), dy.astype(like_y.dtype), _size(ct)


def _again(options: Options, kept: Any, summed: Sequence[int]) -> Operand:
    """An operand of the forward pass, as the backward pass reads it."""
    if isinstance(kept, Operand):
        return kept
    format = None if options.products.backward is None else options.products.forward
    return operand(kept, format, summed, None, options.compute)


def _multiply(a: Operand, b: Operand, dims: Dims, dtype: Any, out_sharding: Any = None) -> Any:
    """Elements of 8 bits are multiplied as such, and what has a scale is rounded after it.

    Emulated operands have 8 digits at most: products of float32 are exact for them in matrix units
    that keep fewer, and no device lacks them.
    """
    x, y = a.array, b.array
    scales = [s for s in (a.scale, b.scale) if s is not None]
    if not all(v.dtype.itemsize == 1 for v in (x, y)):
        wide = jnp.float32 if scales else jnp.promote_types(x.dtype, y.dtype)
        x, y = x.astype(wide), y.astype(wide)
    elif len(scales) == 2 and out_sharding is None and not dims[1][0]:
        rows, cols = (_matrix(v, summed) for v, summed in zip((x, y), dims[0], strict=True))
        if by_kernel(rows, cols, dtype):
            free = [
                n
                for v, summed in zip((x, y), dims[0], strict=True)
                for d, n in enumerate(v.shape)
                if d not in summed
            ]
            return scaled_product(rows, cols, a.scale * b.scale, dtype).reshape(free)
    out = lax.dot_general(
        x, y, dims, preferred_element_type=jnp.float32 if scales else x.dtype,
        out_sharding=out_sharding,
    )  # fmt: skip
    for scale in scales:
        out = out * scale
    return out.astype(dtype)


def _matrix(x: Any, summed: Sequence[int]) -> Any:
    """`[rows, K]`, of the dimensions that are summed over, in their order, as one."""
    free = [d for d in range(x.ndim) if d not in summed]
    rows, size = (math.prod(x.shape[d] for d in dims) for dims in (free, summed))
    return lax.transpose(x, [*free, *summed]).reshape(rows, size)
