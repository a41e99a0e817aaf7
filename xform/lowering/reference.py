"""Attention and cross entropy written down densely: the oracle that every lowering is held to.

Nothing is shared with the other lowerings: mods are called through `jax.vmap` on whole index
arrays, scores are T x S, derivatives are JAX's own. It runs in float64 where the inputs are, and
costs O(T S) memory; tests use it, programs should not.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from xform.lowering._contract import wide_of
from xform.lowering._dropout import kept


def attend(q, k, v, *, score_mod, mask_mod, scale, dropout_rate, dropout_key, peak):
    """Output `[B,T,H,V]` in the dtype of q, log-sum-exp and, with `peak`, maximum `[B,T,H]`."""
    (b, t, h, _), (_, s, kv, _) = q.shape, k.shape
    dtype, wide = q.dtype, wide_of(q.dtype)
    k, v = (jnp.repeat(x, h // kv, axis=2).astype(wide) for x in (k, v))
    visible = jnp.ones((b, h, t, s), bool)
    if mask_mod is not None:
        visible = everywhere(mask_mod, b, h, t, s)

    q, k, v = (x.swapaxes(1, 2) for x in (q.astype(wide), k, v))
    finite = jnp.isfinite(q).all(-1)[..., None] & jnp.isfinite(k).all(-1)[:, :, None]
    scores = _product("bhtd,bhsd->bhts", _clean(q), _clean(k), finite)
    scores = jnp.where(visible, scores * scale, 0)
    if score_mod is not None and scores.size:
        scores = _modified(score_mod, scores, visible).astype(wide)
    scores = jnp.where(visible, scores, -jnp.inf)
    maximum = scores.max(-1, initial=-jnp.inf)
    top = jax.lax.stop_gradient(maximum)[..., None]
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top)), 0)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    seen = jnp.einsum("bhts,bhsv->bhtv", visible.astype(wide), 1 - jnp.isfinite(v).astype(wide))
    weights = jnp.where(visible, weights / safe, 0)
    if dropout_rate:
        keep = everywhere(partial(kept, dropout_key, dropout_rate), b, h, t, s)
        weights = weights * keep.astype(wide)
    out = _product("bhts,bhsv->bhtv", weights, _clean(v), seen == 0)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)[..., 0]
    statistics = (lse, maximum) if peak else (lse,)
    return out.swapaxes(1, 2).astype(dtype), *(x.swapaxes(1, 2) for x in statistics)


def _product(equation, x, y, finite):
    """A product, NaN where `finite` does not hold, though its operands are clean.

    So neither the product nor its derivatives meet `0 * NaN` for a pair that is hidden.
    """
    return jnp.einsum(equation, x, y, precision="highest") + jnp.where(finite, 0, jnp.nan)


@jax.custom_jvp
def _clean(x):
    return jnp.where(jnp.isfinite(x), x, 0)


_clean.defjvp(lambda primals, tangents: (_clean(*primals), *tangents))


def _modified(score_mod, scores, visible):
    """The score mod at all visible pairs.

    At a hidden one it is evaluated where some visible pair is: there its value, and what that does
    to the derivative of a capture, may be NaN.
    """
    flat = jnp.arange(visible.size, dtype=jnp.int32).reshape(visible.shape)
    index = jnp.unravel_index(
        jnp.where(visible, flat, visible.argmax().astype(flat.dtype)), visible.shape
    )
    mod = score_mod
    for _ in visible.shape:
        mod = jax.vmap(mod)
    return mod(scores, *(i.astype(jnp.int32) for i in index))


def everywhere(mod, b, h, t, s, *scores):
    """`mod` at all indices, `[b,h,t,s]`."""
    for dim in range(3, -1, -1):
        axes = [0 if d == dim else None for d in range(4)]
        mod = jax.vmap(mod, in_axes=(*(0 for _ in scores), *axes))
    return mod(*scores, *(jnp.arange(n, dtype=jnp.int32) for n in (b, h, t, s)))


def cross_entropy(
    hidden, weight, labels, bias=None, *, vocab_dim, softcap, label_smoothing, z_loss, ignore_label
):
    """Loss and log-sum-exp of each token, as of `linear_cross_entropy`, from all logits."""
    wide = wide_of(hidden.dtype)
    weight = (weight if vocab_dim == 1 else weight.T).astype(wide)
    ignored = labels == ignore_label
    hidden = jnp.where(ignored[..., None], 0, hidden).astype(wide)
    logits = jnp.matmul(hidden, weight, precision="highest")
    if bias is not None:
        logits = logits + jnp.expand_dims(bias.astype(wide), tuple(range(labels.ndim)))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, -1)
    entries = logits.shape[-1]
    found = (labels >= 0) & (labels < entries)
    uniform = label_smoothing / entries if entries else 0
    target = (1 - label_smoothing) * jax.nn.one_hot(labels, entries, dtype=wide) + uniform
    loss = jnp.where(found, lse, jnp.nan) - (target * logits).sum(-1) + z_loss * lse**2
    return jnp.where(ignored, 0, loss), jnp.where(ignored, 0, lse)
