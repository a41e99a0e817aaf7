"""The field's names, each a line over `flex_attention`: flash-attn's, and that of `jax.nn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Float

from xform.primitives._attention_checks import check_arguments
from xform.primitives._objects import known
from xform.primitives._rules import from_numpy
from xform.primitives.attention import flex_attention
from xform.primitives.masks import Mask, as_mask, causal, full, lengths, sliding_window
from xform.primitives.scores import alibi, as_score, softcap


def flash_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k: Float[Array | np.ndarray, "B S K D"],
    v: Float[Array | np.ndarray, "B S K V"],
    *,
    causal: bool = False,
    window: ArrayLike | Sequence[ArrayLike | None] | None = None,
    softcap: ArrayLike = 0.0,
    alibi_slopes: Float[Array, " H"] | Float[Array, "B H"] | None = None,
    **options: Any,
) -> Any:
    """Returns attention with the options of flash-attn, as its `flash_attn_func` means them.

    As there, the last query stands at the last key: with T < S, query t sees as if it were query
    `S - T + t`.

    Args:
      q, k, v: as of `flex_attention`.
      causal: whether a query sees no later key.
      window: `(left, right)`: a query sees so many keys before and after its own; -1 or None for
        all of them, one number for both. They may be traced.
      softcap: if not 0, scores become `softcap tanh(score / softcap)`.
      alibi_slopes: `[H]` or `[B,H]`: what a score loses for each position between query and key.
      **options: those of `flex_attention`, such as `scale`, `aux`, `dropout_rate`.

    Returns:
      What `flex_attention` returns.

    Raises:
      TypeError: on a window that is none, or an option of another name.
      ValueError: on shapes and dtypes that do not fit.

    >>> q, k, v = jnp.ones((3, 1, 64, 4, 16))
    >>> flash_attention(q, k, v, causal=True, window=(16, 0)).shape
    (1, 64, 4, 16)
    """
    _check_options(options, causal)
    q, k, v = from_numpy(q, k, v)
    check_arguments(q, k, v, None, 0.0, None, (), None, caller="flash_attention")
    at = q.shape[1], k.shape[1]
    needed = [q.shape[2]], [q.shape[0], q.shape[2]]
    if alibi_slopes is not None and list(jnp.shape(alibi_slopes)) not in needed:
        raise ValueError(
            f"flash_attention: `alibi_slopes` has shape {jnp.shape(alibi_slopes)}; needed is [H] "
            f"or [B,H], here {needed[0]} or {needed[1]}."
        )
    mask, score = _band(*at, causal, window), _modified(*at, softcap, alibi_slopes)
    return flex_attention(q, k, v, mask_mod=mask, score_mod=score, **options)


# What flash-attn's options are here.
_OPTIONS = {
    "window_size": "`window`",
    "softmax_scale": "`scale`",
    "dropout_p": "`dropout_rate`, with a `dropout_key`",
    "return_attn_probs": '`aux=("lse",)`: weights are never made',
    "return_softmax_lse": '`aux=("lse",)`',
    "mask_mod": "an argument of `flex_attention`, of which this is one line",
    "score_mod": "an argument of `flex_attention`, of which this is one line",
}


def _check_options(options, is_causal) -> None:
    if wrong := [f"`{name}` is {_OPTIONS[name]}" for name in options if name in _OPTIONS]:
        raise TypeError(f"flash_attention: {'; '.join(wrong)}.")
    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(
            f"flash_attention: `causal` is {is_causal!r}; it must be True or False, and not "
            "traced: a mask that changes inside a program has traced numbers, "
            "`window=(-1, right)`."
        )


def _sides(caller: str, name: str, window) -> tuple:
    """The two numbers of a window, or None for each that is not given."""
    pair = tuple(window) if isinstance(window, tuple | list) else (window, window)
    one = lambda n: (
        n is None or (np.ndim(n) == 0 and jnp.issubdtype(jnp.result_type(n), jnp.integer))
    )
    if len(pair) != 2 or any(isinstance(n, str) or not one(n) for n in pair):
        is_array = not isinstance(window, tuple | list) and np.ndim(window)
        found = f"an array of shape {list(np.shape(window))}" if is_array else repr(window)
        raise TypeError(
            f"{caller}: `{name}` is {found}; needed is a whole number for both sides or a pair "
            "`(left, right)` of them, each a Python number or a scalar array."
        )
    return pair


def _band(t: int, s: int, is_causal: bool, window) -> Mask | None:
    """FlashAttention's mask of T queries at the end of S keys."""
    sides = _sides("flash_attention", "window", window)
    reach = lambda n: t + s if n is None else n if n >= 0 else t + s
    if not all(n is None or known(n) for n in sides):
        reach = lambda n: t + s if n is None else jnp.where(jnp.asarray(n) < 0, t + s, n)
    left, right = map(reach, sides)
    mask = causal() if is_causal else full()
    bounded = any(not (known(n) and n == t + s) for n in (left, right))
    if bounded:
        mask &= sliding_window(left + 1, right=right)
    return mask.shift(q=s - t) if bounded or is_causal else None


def _modified(t: int, s: int, cap: ArrayLike, slopes):
    """FlashAttention's score, or None."""
    bias = None
    slopes = None if slopes is None else jnp.asarray(slopes)
    if slopes is not None and jnp.ndim(slopes) == 2:
        bias = as_score(
            lambda x, b, h, q, k: jnp.subtract(x, slopes[b, h] * jnp.abs(jnp.subtract(q, k)))
        )
    elif slopes is not None:
        bias = alibi(slopes)
    bias = None if bias is None else bias.shift(q=s - t)
    if known(cap) and not cap:
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
    local_window_size: ArrayLike | Sequence[ArrayLike] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Returns what `jax.nn.dot_product_attention` does, in O(T V) memory.

    The arguments are those of `jax.nn.dot_product_attention`, with three differences: a query that
    sees no key gives 0, where JAX gives what its backend makes of it; the log-sum-exp is float32
    and has a gradient, where JAX rounds it to the dtype of the keys and stops that; heads of values
    may have a size of their own.

    Args:
      query, key, value: `[B,T,N,H]`, `[B,S,K,H]`, `[B,S,K,V]`; without the `B` it is 1.
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
    given = query.shape[:-1]
    query, key, value = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (query, key, value))
    check_arguments(
        query, key, value, None, 0.0, None, (), implementation, caller="dot_product_attention"
    )
    sees: Mask = causal() if is_causal else full()
    if local_window_size is not None:
        # JAX takes a pair in any form, one array of both numbers too.
        window: Any = local_window_size
        window = tuple(window) if getattr(window, "ndim", 0) == 1 else window
        left, right = _sides("dot_product_attention", "local_window_size", window)
        sees &= sliding_window(left + 1, right=right)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        of_queries = _seq_lengths("query_seq_lengths", query_seq_lengths, len(query))
        of_keys = _seq_lengths("key_value_seq_lengths", key_value_seq_lengths, len(query))
        sees &= lengths(key.shape[1] if of_keys is None else of_keys, of_queries)
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    if mask is not None:
        sees &= as_mask(_read(_broadcastable("mask", mask, shape)))
    biased = None if bias is None else _read(_broadcastable("bias", bias, shape))
    out, aux = flex_attention(
        query, key, value, mask_mod=sees, scale=scale, implementation=implementation, aux=("lse",),
        score_mod=biased and (lambda s, *index: s + biased(*index)),
    )  # fmt: skip
    out = out.reshape(*given, out.shape[-1])
    return (out, jnp.reshape(jnp.asarray(aux.lse), given)) if return_residual else out


def _seq_lengths(name: str, n, batch: int):
    """Lengths as `lengths` takes them: a number as it is, a list as an array."""
    if n is None:
        return None
    x = jnp.asarray(n)
    if x.shape not in ((), (batch,)) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"dot_product_attention: `{name}` is {x.dtype}{list(x.shape)}; needed are integers, "
            f"[{batch}] or a scalar."
        )
    return n if known(n) else x


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
