"""The one product of attention: three contractions that are each other's derivatives.

A tile of attention multiplies arrays of three kinds: a *tile* `W[g,q,k]` (scores, weights, their
derivatives), *rows* `R[g,q,d]` (queries, output cotangents) and *columns* `C[k,d]` (keys, values).
Every product that occurs, at any order of derivative, is a partial derivative of one trilinear form

    F(W, R, C) = sum over visible (g, q, k) and d of  W[g,q,k] R[g,q,d] C[k,d]

with respect to one operand: the scores are dF/dW, the weighted values dF/dR, the key gradients
dF/dC. So `contract_p` has one jvp rule (it is bilinear) and one transpose rule (swap the output with
an operand), and it is closed under both.

Two things are promised here, so that no caller needs to think of them:

* operands are rounded to `dtype` (the dtype of the user's q, k, v) and products are accumulated in
  float32 (float64 for float64); float32 is multiplied as float32, never as TF32;
* what `visible` hides has no influence, NaN and infinity included: `0 * NaN` never happens. A pair
  that is visible follows IEEE arithmetic.

Shapes: `g` query heads of one key/value head, `q` queries, `k` keys of a tile, `d` any head size.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Role = Literal["tile", "row", "col"]

# For each output: the roles of the two operands, the folded product, and the operand dimensions.
_OPERANDS: dict[Role, tuple[Role, Role]] = {
    "tile": ("row", "col"),
    "row": ("tile", "col"),
    "col": ("tile", "row"),
}
_CONTRACTED: dict[Role, tuple[int, int]] = {"tile": (1, 1), "row": (1, 0), "col": (0, 0)}


def contract(x, y, *, out: Role, dtype, visible=None, finite=None):
    """The derivative of the trilinear form with respect to `out`.

    Args:
      x: `[g,q,d]` for `out="tile"`, else the tile `[g,q,k]`.
      y: `[k,d]` for `"tile"` and `"row"`, `[g,q,d]` for `"col"`.
      out: which operand of the form is the output.
      dtype: what the operands are rounded to.
      visible: bool, broadcastable to `[g,q,k]`; None where everything is visible.
      finite: bool scalar, whether every row and column of the whole call is finite. Hiding
        a NaN costs three more products, which run only where this is False.

    Returns:
      `[g,q,k]`, `[g,q,d]` or `[k,d]` in float32 (float64 where the operands are float64).
    """
    hide = () if visible is None else (visible, finite)
    return contract_p.bind(x, y, *hide, out=out, dtype=jnp.dtype(dtype))


contract_p = Primitive("contract")


def _impl(x, y, *hide, out, dtype):
    if not hide:
        return _product(x, y, out, dtype)
    visible, finite = hide
    if out == "tile":
        return jnp.where(visible, _product(x, y, out, dtype), 0)
    x = jnp.where(visible, x, 0)
    clean = _product(x, jnp.where(jnp.isfinite(y), y, 0), out, dtype)
    visible = jnp.broadcast_to(visible, x.shape)
    return clean + lax.cond(finite, _nothing, partial(_nonfinite, out=out), x, y, visible, clean)


def _product(x, y, out: Role, dtype):
    """One matrix product: `g` and `q` are folded into the rows of a single matrix."""
    wide = jnp.promote_types(dtype, jnp.float32)
    shape = (*x.shape[:2], y.shape[0]) if out == "tile" else (*x.shape[:2], y.shape[-1])
    fold = lambda z: z.reshape(-1, z.shape[-1]) if z.ndim == 3 else z
    lhs, rhs = _CONTRACTED[out]
    # HIGHEST keeps float32 products in float32 on GPUs and TPUs; narrower types ignore it.
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product = lax.dot_general(
        fold(x).astype(dtype),
        fold(y).astype(dtype),
        (((lhs,), (rhs,)), ((), ())),
        precision=precision,
        preferred_element_type=wide,
    )
    return product if out == "col" else product.reshape(shape)


def _nothing(x, y, visible, clean):
    del x, y, visible
    return jnp.zeros_like(clean)


def _nonfinite(x, y, visible, clean, *, out):
    """What the non-finite entries of `y` add to a sum over visible pairs, by IEEE's rules."""
    count = lambda a, b: _product(a.astype(clean.dtype), b.astype(clean.dtype), out, clean.dtype)
    up, down = count(x > 0, y == jnp.inf), count(x < 0, y == -jnp.inf)
    mixed, other = count(x > 0, y == -jnp.inf), count(x < 0, y == jnp.inf)
    undefined = count(visible, jnp.isnan(y)) + count(visible & (x == 0), jnp.isinf(y))
    plus, minus = up + down > 0, mixed + other > 0
    value = jnp.where(plus, jnp.inf, jnp.where(minus, -jnp.inf, 0.0))
    return jnp.where((undefined > 0) | (plus & minus), jnp.nan, value).astype(clean.dtype)


def _abstract(x, y, *hide, out, dtype):
    del hide
    shape = {
        "tile": (*x.shape[:2], y.shape[0]),
        "row": (*x.shape[:2], y.shape[-1]),
        "col": (x.shape[2], y.shape[-1]),
    }[out]
    return jax.core.ShapedArray(shape, jnp.promote_types(dtype, jnp.float32))


def _jvp(primals, tangents, **params):
    x, y, *hide = primals
    dx, dy, *_ = tangents
    terms = []
    if type(dx) is not ad.Zero:
        terms.append(contract_p.bind(dx, y, *hide, **params))
    if type(dy) is not ad.Zero:
        terms.append(contract_p.bind(x, dy, *hide, **params))
    value = contract_p.bind(x, y, *hide, **params)
    return value, sum(terms[1:], terms[0])


def _transpose(ct, x, y, *hide, out, dtype):
    """F is linear in each operand: its derivative in one of them swaps that one with `out`."""
    x_role, y_role = _OPERANDS[out]
    linear, role, known = (
        (x, x_role, {y_role: y}) if ad.is_undefined_primal(x) else (y, y_role, {x_role: x})
    )
    if type(ct) is ad.Zero:
        grad = ct
    else:
        known[out] = ct
        operands = [known[r] for r in _OPERANDS[role]]
        grad = contract_p.bind(*operands, *hide, out=role, dtype=dtype).astype(linear.aval.dtype)
    return [*((grad, None) if linear is x else (None, grad)), *(None for _ in hide)]


def _batch(args, dims, **params):
    return jax.vmap(partial(_impl, **params), in_axes=tuple(dims))(*args), 0


contract_p.def_impl(_impl)
contract_p.def_abstract_eval(_abstract)
ad.primitive_jvps[contract_p] = _jvp
ad.primitive_transposes[contract_p] = _transpose
batching.primitive_batchers[contract_p] = _batch
mlir.register_lowering(contract_p, mlir.lower_fun(_impl, multiple_results=False))
