"""Context parallelism by one exchange before attention: of keys and values, or of heads.

    all_gather    every device gets all keys and values, and attends to them with its own queries
    ulysses       every device gets all positions of some heads, and gives back their outputs

All-gather (Llama 3, arXiv:2407.21783) moves keys and values alone, which grouped queries make
small, and keeps all of them for the backward pass. Ulysses (Jacobs et al., arXiv:2309.14509) moves
queries and outputs too, but of each 1/n, and needs heads that the axis divides; it is even for any
layout, since heads have the same mask.
"""

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from xform.lowering._contract import wide_of
from xform.primitives._rules import join_axes
from xform.primitives.attention import flex_attention
from xform.sharding.context._mods import moved, place
from xform.sharding.context.layouts import Layout


def by_all_gather(
    q: Array, k: Array, v: Array, layout: Layout, score_mod, mask_mod, axis: str, options: dict
) -> tuple[Array, Array]:
    """Returns output and log-sum-exp of this device's queries over all keys."""
    at = place(layout, lax.axis_index(axis)), place(layout, None)
    k, v = _gathered((k, v), axis)
    score_mod, mask_mod = (moved(mod, *at) for mod in (score_mod, mask_mod))
    return _attended(q, k, v, score_mod=score_mod, mask_mod=mask_mod, **options)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(xs: tuple[Array, ...], axis: str) -> tuple[Array, ...]:
    """All parts of arrays along their dimension 1; gradients are summed in float32 at least."""
    return tuple(lax.all_gather(x, axis, axis=1, tiled=True) for x in xs)


def _summed(axis: str, _, cts: tuple[Array, ...]) -> tuple[tuple[Array, ...]]:
    wide = lambda ct: ct.astype(wide_of(ct.dtype))
    scatter = partial(lax.psum_scatter, axis_name=axis, scatter_dimension=1, tiled=True)
    return (tuple(scatter(wide(ct)).astype(ct.dtype) for ct in cts),)


_gathered.defvjp(lambda xs, axis: (_gathered(xs, axis), None), _summed)


def by_ulysses(
    q: Array, k: Array, v: Array, layout: Layout, score_mod, mask_mod, axis: str, options: dict
) -> tuple[Array, Array]:
    """Returns output and log-sum-exp of this device's queries over all keys."""
    n = lax.axis_size(axis)
    heads = q.shape[2] // n
    first = lax.axis_index(axis) * heads
    same = lambda i: i
    score_mod, mask_mod = (moved(mod, same, same, head=first) for mod in (score_mod, mask_mod))
    copies = n // gcd(k.shape[2], n)
    q, k, v = (_to_heads(x, axis) for x in (q, _repeated(k, copies), _repeated(v, copies)))
    q, k, v = layout.join((q, k, v))  # so that differences of positions are those of indices
    if options["sinks"] is not None:
        sinks, first = join_axes((options["sinks"], first))
        options = options | {"sinks": lax.dynamic_slice_in_dim(sinks, first, heads)}
    out, lse = _attended(q, k, v, score_mod=score_mod, mask_mod=mask_mod, **options)
    out, lse = (_to_positions(x, axis) for x in layout.split((out, lse[..., None])))
    return out, lse[..., 0]


def _attended(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    out, aux = flex_attention(q, k, v, aux=("lse",), **options)
    assert aux.lse is not None
    return out, aux.lse


def _repeated(x: Array, copies: int) -> Array:
    """Each head as often as devices need it; their gradients are added up."""
    if copies == 1:
        return x
    b, t, heads, size = x.shape
    x = jnp.broadcast_to(x[:, :, :, None], (b, t, heads, copies, size))
    return x.reshape(b, t, heads * copies, size)


def _to_heads(x: Array, axis: str) -> Array:
    """`[B,T/n,H,D]` to `[B,T,H/n,D]`."""
    return lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)


def _to_positions(x: Array, axis: str) -> Array:
    """`[B,T,H/n,D]` to `[B,T/n,H,D]`."""
    return lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True)
