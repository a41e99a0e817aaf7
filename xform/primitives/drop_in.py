"""The field's names, each a line over `flex_attention`: flash-attn's, and that of `jax.nn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from xform.primitives.attention import flex_attention
from xform.primitives.masks import Mask, as_mask, causal, full, lengths, sliding_window
from xform.primitives.scores import alibi, softcap


def flash_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K V"],
    *,
    causal: bool = False,
    window: int | Sequence[int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Float[Array, " H"] | None = None,
    **options: Any,
) -> Any:
    """Returns attention with the options of flash-attn, as its `flash_attn_func` means them.

    As there, the last query stands at the last key: with T < S, query t sees as if it were query
    `S - T + t`.

    Args:
      q, k, v: as of `flex_attention`.
      causal: whether a query sees no later key.
      window: `(left, right)`: a query sees so many keys before and after its own; -1 or None for
        all of them, one number for both.
      softcap: if not 0, scores become `softcap tanh(score / softcap)`.
      alibi_slopes: `[H]`: what a score loses for each position between query and key.
      **options: those of `flex_attention`, such as `scale`, `aux`, `dropout_rate`.

    Returns:
      What `flex_attention` returns.

    >>> q, k, v = jnp.ones((3, 1, 64, 4, 16))
    >>> flash_attention(q, k, v, causal=True, window=(16, 0)).shape
    (1, 64, 4, 16)
    """
    at = q.shape[1], k.shape[1]
    mask, score = _band(*at, causal, window), _modified(*at, softcap, alibi_slopes)
    return flex_attention(q, k, v, mask_mod=mask, score_mod=score, **options)


def _band(t: int, s: int, is_causal: bool, window) -> Mask | None:
    """FlashAttention's mask of T queries at the end of S keys."""
    left, right = window if isinstance(window, Sequence) else (window, window)
    bounded = lambda n: n is not None and n >= 0
    mask = causal() if is_causal else full()
    if bounded(left) or bounded(right):
        mask &= sliding_window(
            left + 1 if bounded(left) else t + s, right=right if bounded(right) else t + s
        )
    plain = not is_causal and not bounded(left) and not bounded(right)
    return None if plain else mask.shift(q=s - t)


def _modified(t: int, s: int, cap: float, slopes):
    """FlashAttention's score, or None."""
    bias = None if slopes is None else alibi(slopes).shift(q=s - t)
    if not cap:
        return bias
    return softcap(cap) if bias is None else softcap(cap) >> bias


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Returns what `jax.nn.dot_product_attention` does, in O(T V) memory.

    The arguments are those of `jax.nn.dot_product_attention`, with three differences: a query that
    sees no key gives 0, where JAX gives what its backend makes of it; the log-sum-exp is float32
    and has a gradient, where JAX rounds it to the dtype of the keys and stops that; heads of values
    may have a size of their own.

    Args:
      query, key, value: `[B,T,N,H]`, `[B,S,K,H]`, `[B,S,K,V]`, or all without the `B`.
      bias: added to the scores; broadcasts to `[B,N,T,S]`.
      mask: booleans, False hides; broadcasts to `[B,N,T,S]`.
      scale: factor on the products; `H ** -0.5` if None.
      is_causal: whether query t sees keys up to t alone.
      query_seq_lengths, key_value_seq_lengths: `[B]`: how many there are; the rest is padding.
      local_window_size: keys before and after a query's own that it sees; one number for both.
      implementation: as of `flex_attention`, whose names are others: None chooses.
      return_residual: whether to return the log-sum-exp too, `[B,T,N]`.

    Returns:
      The output, of the shape of `query` but for the size of values, or `(output, log-sum-exp)`.

    Raises:
      ValueError: on shapes and dtypes that do not fit.

    >>> q, k, v = jnp.ones((3, 1, 64, 4, 16))
    >>> dot_product_attention(q, k, v, is_causal=True, local_window_size=(16, 0)).shape
    (1, 64, 4, 16)
    """
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if query.ndim == 3:
        query, key, value = (x[None] for x in (query, key, value))
        one = lambda x: x[0]
    else:
        one = lambda x: x
    sees: Mask = causal() if is_causal else full()
    if local_window_size is not None:
        left, right = (
            local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
        )
        sees &= sliding_window(left + 1, right=right)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        there = key.shape[1] if key_value_seq_lengths is None else key_value_seq_lengths
        sees &= lengths(there, query_seq_lengths)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if mask is not None:
        sees &= as_mask(_read(_broadcastable("mask", mask, shape)))
    biased = None if bias is None else _read(_broadcastable("bias", bias, shape))
    out, aux = flex_attention(
        query, key, value, mask_mod=sees, scale=scale, implementation=implementation, aux=("lse",),
        score_mod=biased and (lambda s, *index: s + biased(*index)),
    )  # fmt: skip
    return (one(out), one(aux.lse)) if return_residual else one(out)


def _broadcastable(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    """`x` with four dimensions, each 1 or that of `shape`."""
    x = jnp.asarray(x)
    x = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x
    if x.ndim != 4 or any(n not in (1, m) for n, m in zip(x.shape, shape, strict=True)):
        raise ValueError(
            f"`{name}` has shape {x.shape}; it must broadcast to [B,N,T,S], here {shape}."
        )
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(f"`mask` has dtype {x.dtype}; it must be bool: numbers to add are `bias`.")
    return x


def _read(x: Array):
    """`x` at a pair of indices, where a dimension of 1 is the same everywhere."""
    return lambda *index: x[tuple(0 if n == 1 else i for n, i in zip(x.shape, index, strict=True))]
