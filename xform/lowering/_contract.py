"""The one product of attention: three contractions that are each other's derivatives.

A tile of attention multiplies arrays of three kinds: a *tile* `W[g,q,k]` (scores, weights, their
derivatives), *rows* `R[g,q,d]` (queries, output cotangents) and *columns* `C[k,d]` (keys, values).
Every product that occurs, at any order of derivative, is a partial derivative of one trilinear form

    F(W, R, C) = sum over visible (g, q, k) and d of  W[g,q,k] R[g,q,d] C[k,d]

with respect to one operand: the scores are dF/dW, the weighted values dF/dR, the key gradients
dF/dC. So `contract_p` has one jvp rule (it is bilinear) and one transpose rule (swap the output
with an operand), and it is closed under both.

Two things are promised here, so that no caller needs to think of them:

* operands are rounded to `dtype` (the dtype of the user's q, k, v) and products are accumulated in
  float32 (float64 for float64); float32 is multiplied as float32, never as TF32;
* what `visible` hides has no influence, NaN and infinity included: `0 * NaN` never happens. A sum
  that sees a row or column entry that is not finite is NaN.

Shapes: `g` query heads of one key/value head, `q` queries, `k` keys of a tile, `d` any head size.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from xform._compat import Primitive

Role = Literal["tile", "row", "col"]


def wide_of(dtype) -> jnp.dtype:
    """What numbers of a floating dtype are added up in: float32, float64 for float64.

    By name, since `jnp.promote_types` is a user's to forbid (`jax_numpy_dtype_promotion`).
    """
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def rounded(x, dtype):
    """`x` with the digits and the range of `dtype`, in its own dtype: what a product makes of it.

    By `reduce_precision`, since compilers leave out a cast to and fro.
    """
    if x.dtype == dtype:
        return x
    bits = jnp.finfo(dtype)
    return lax.reduce_precision(x, int(bits.nexp), int(bits.nmant))


# The operands from which each output is made; the dimensions of each, `i` for a pair (g, q); and
# which of them is summed over.
_OPERANDS: dict[Role, tuple[Role, Role]] = {
    "tile": ("row", "col"),
    "row": ("tile", "col"),
    "col": ("tile", "row"),
}
_DIMS: dict[Role, str] = {"tile": "ik", "row": "id", "col": "kd"}
_SUMMED: dict[Role, str] = {"tile": "d", "row": "k", "col": "i"}


def contract(x, y, *, out: Role, dtype, visible=None, finite=None):
    """The derivative of the trilinear form with respect to `out`.

    Args:
      x: rows `[g,q,d]` for `out="tile"`, else a tile.
      y: columns `[k,d]` for `"tile"` and `"row"`, rows `[g,q,d]` for `"col"`.
      out: which operand of the form is the output.
      dtype: what the operands are rounded to.
      visible: bool tile with `g` or 1 heads; None where everything is visible.
      finite: bool scalar, whether every row and column of the whole call is finite. Finding
        who sees a NaN costs one more product, which runs only where this is False.

    Returns:
      A tile, rows or columns in float32 (float64 where `dtype` is float64).
    """
    hide = () if visible is None else (visible, finite)
    return contract_p.bind(x, y, *hide, out=out, dtype=jnp.dtype(dtype))


contract_p = Primitive("contract")


def _impl(x, y, *hide, out, dtype):
    shape = _abstract(x, y, out=out, dtype=dtype).shape
    x, y = _matrix(x), _matrix(y)
    product = partial(_product, out=out)
    if not hide:
        return product(x.astype(dtype), y.astype(dtype)).reshape(shape)
    visible, finite = hide
    if out == "tile":
        return jnp.where(visible, product(x.astype(dtype), y.astype(dtype)).reshape(shape), 0)
    heads = len(x) // visible.shape[1]
    visible = _matrix(jnp.broadcast_to(visible, (heads, *visible.shape[1:])))
    bad = ~jnp.isfinite(y)
    clean = product(jnp.where(visible, x, 0).astype(dtype), jnp.where(bad, 0, y).astype(dtype))
    poison = lambda: jnp.where(
        product(visible.astype(dtype), bad.astype(dtype)) > 0, jnp.nan, clean
    )
    return lax.cond(finite, lambda: clean, poison).reshape(shape)


def _matrix(x):
    """`x` with its (g, q) pairs, if it has any, folded into one dimension `i`."""
    return x.reshape(-1, x.shape[-1])


def _product(x, y, *, out: Role):
    """One matrix product, accumulated in float32 or wider."""
    contracting = [_DIMS[role].index(_SUMMED[out]) for role in _OPERANDS[out]]
    if out == "col":
        # XLA's fast CPU product wants the sum along rows of x: a copied transpose is cheaper.
        copied = lambda x: lax.optimization_barrier(x.T)
        x = lax.platform_dependent(x, cpu=copied, default=jnp.transpose)
        contracting[0] = 1
    return lax.dot_general(
        x, y, ((contracting[:1], contracting[1:]), ((), ())),
        # Float32 stays float32 on GPUs and TPUs; narrower types have one precision.
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=wide_of(x.dtype),
    )  # fmt: skip


def _abstract(x, y, *hide, out, dtype):
    del hide
    shape = {
        "tile": (*x.shape[:2], y.shape[0]),
        "row": (*x.shape[:2], y.shape[-1]),
        "col": (x.shape[2], y.shape[-1]),
    }[out]
    return ShapedArray(shape, wide_of(dtype))


def _jvp(primals, tangents, **params):
    x, y, *hide = primals
    dx, dy, *_ = tangents
    terms = []
    if type(dx) is not ad.Zero:
        terms.append(contract_p.bind(dx, y, *hide, **params))
    if type(dy) is not ad.Zero:
        terms.append(contract_p.bind(x, dy, *hide, **params))
    return contract_p.bind(x, y, *hide, **params), sum(terms[1:], terms[0])


def _transpose(ct, x, y, *hide, out, **params):
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
        grad = contract_p.bind(*operands, *hide, out=role, **params).astype(linear.aval.dtype)
    return [*((grad, None) if linear is x else (None, grad)), *(None for _ in hide)]


def _batch(args, dims, **params):
    return jax.vmap(partial(_impl, **params), in_axes=tuple(dims))(*args), 0


contract_p.def_impl(_impl)
contract_p.def_abstract_eval(_abstract)
ad.primitive_jvps[contract_p] = _jvp
ad.primitive_transposes[contract_p] = _transpose
batching.primitive_batchers[contract_p] = _batch
mlir.register_lowering(contract_p, mlir.lower_fun(_impl, multiple_results=False))
