"""What models are made of between their matrix products, as one would write it, with arguments.

`SUBJECTS[name]` is `(f, arguments, argnums)`: a function of arrays, a function of a width and a
dtype that makes its arguments, and which of them have gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed, shape, dtype=jnp.float32, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x, residual, weight):
    """Of a sum, which goes on beside it."""
    h = x + residual
    mean = jnp.mean(jnp.square(wide(h)), axis=-1, keepdims=True)
    return (wide(h) * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * weight[None], h


def layer_norm(x, weight, bias):
    y = wide(x)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * weight[None] + bias[None]


def softmax(x):
    return jax.nn.softmax(x, axis=-1)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def gelu(x):
    return jax.nn.gelu(x, approximate=False)


def rotary(x, cos, sin):
    """`x` is `[B,T,H,D]`, halves are rotated by angles of positions, `[T,D/2]`."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def dropout_add(x, residual, key):
    kept = jax.random.bernoulli(key, 0.9, x.shape)
    return jnp.where(kept, x / 0.9, 0).astype(x.dtype) + residual


def cross_entropy(logits, labels):
    x = wide(logits)
    own = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == labels[:, None]
    return jax.nn.logsumexp(x, axis=-1) - jnp.where(own, x, 0).sum(-1)


def adam(p, g, m, v, step):
    m = 0.9 * m + 0.1 * g
    v = 0.95 * v + 0.05 * g * g
    root = jnp.sqrt(v / (1 - 0.95**step)) + 1e-8
    moved = p - 1e-3 * (m / (1 - 0.9**step) / root + 0.1 * p)
    return moved.astype(p.dtype), m, v


N = 133
"""Rows: an odd number, of which the last block is a part."""

SUBJECTS = {
    "residual + RMSNorm": (
        rms_norm,
        lambda d, t: (normal(0, (N, d), t), normal(1, (N, d), t), normal(2, d, t)),
        (0, 1, 2),
    ),
    "layer norm": (
        layer_norm,
        lambda d, t: (normal(0, (N, d), t), normal(1, d, t), normal(2, d, t)),
        (0, 1, 2),
    ),
    "softmax": (softmax, lambda d, t: (normal(0, (N, d), t, 4.0),), (0,)),
    "SwiGLU": (swiglu, lambda d, t: (normal(0, (N, d), t), normal(1, (N, d), t)), (0, 1)),
    "exact GELU": (gelu, lambda d, t: (normal(0, (N, d), t),), (0,)),
    "rotary embedding": (
        rotary,
        lambda d, t: (normal(0, (3, N, 4, 32), t), normal(1, (N, 16), t), normal(2, (N, 16), t)),
        (0,),
    ),
    "dropout + add": (
        dropout_add,
        lambda d, t: (normal(0, (N, d), t), normal(1, (N, d), t), jax.random.key(3)),
        (0, 1),
    ),
    "row cross-entropy": (
        cross_entropy,
        lambda d, t: (normal(0, (N, d), t, 3.0), jnp.arange(N, dtype=jnp.int32) * 7 % d),
        (0,),
    ),
    "Adam": (
        adam,
        lambda d, t: (
            *(normal(i, (N, d), t) for i in range(3)),
            abs(normal(3, (N, d), t)),
            jnp.float32(3),
        ),
        (0, 1),
    ),
}  # fmt: skip


def with_gradients(f, argnums):
    """A function of the arguments and a seed: results, and gradients along random cotangents."""

    def run(*args):
        moving = [args[i] for i in argnums]

        def of(*moving):
            full = list(args)
            for i, x in zip(argnums, moving, strict=True):
                full[i] = x
            return f(*full)

        outs, back = jax.vjp(of, *moving)
        cts = [
            normal(9 + i, x.shape, jnp.bfloat16).astype(x.dtype)
            for i, x in enumerate(jax.tree.leaves(outs))
        ]
        return outs, back(jax.tree.unflatten(jax.tree.structure(outs), cts))

    return run
