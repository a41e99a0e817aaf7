"""Attention and cross entropy written down densely: the oracle that every lowering is held to.

Nothing is shared with the other lowerings: mods are called through `jax.vmap` on whole index
arrays, scores are T x S, derivatives are JAX's own. It runs in float64 where the inputs are, and
costs O(T S) memory; tests use it, programs should not.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from xform.lowering._dropout import kept


def attend(q, k, v, *, score_mod, mask_mod, scale, dropout_rate, dropout_key):
    """Output `[B,T,H,V]` in the dtype of q and log-sum-exp `[B,T,H]`, as of `flex_attention`."""
    (b, t, h, _), (_, s, kv, _) = q.shape, k.shape
    dtype, wide = q.dtype, jnp.promote_types(q.dtype, jnp.float32)
    k, v = (jnp.repeat(x, h // kv, axis=2).astype(wide) for x in (k, v))
    visible = jnp.ones((b, h, t, s), bool)
    if mask_mod is not None:
        visible = everywhere(mask_mod, b, h, t, s)

    q, k, v = (x.swapaxes(1, 2) for x in (q.astype(wide), k, v))
    scores = _product(
        "bhtd,bhsd->bhts",
        q,
        k,
        jnp.isfinite(q).all(-1)[..., None] & jnp.isfinite(k).all(-1)[:, :, None],
    )
    scores = jnp.where(visible, scores * scale, 0)
    if score_mod is not None:
        scores = everywhere(score_mod, b, h, t, s, scores).astype(wide)
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top)), 0)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    seen = jnp.einsum("bhts,bhsv->bhtv", visible.astype(wide), 1 - jnp.isfinite(v).astype(wide))
    weights = weights / safe
    if dropout_rate:
        weights = weights * everywhere(partial(kept, dropout_key, dropout_rate), b, h, t, s)
    out = _product("bhts,bhsv->bhtv", weights, v, seen == 0)
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(safe) + top)[..., 0]
    return out.swapaxes(1, 2).astype(dtype), lse.swapaxes(1, 2)


def _product(equation, x, y, finite):
    """A product of what is finite, NaN where `finite` does not hold.

    So neither the product nor its derivatives meet `0 * NaN` for a pair that is hidden.
    """
    clean = (jnp.where(jnp.isfinite(z), z, 0) for z in (x, y))
    return jnp.where(finite, jnp.einsum(equation, *clean, precision="highest"), jnp.nan)


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
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
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
