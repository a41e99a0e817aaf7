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


def norm(x, w):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[None]


def norm_and_turn(x, w, cos, sin):
    """The halves that are turned are cut from a row that was computed."""
    a, b = jnp.split(norm(x, w), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


SHAPES = {
    "over columns": (lambda x: x / (1 + (x * x).sum(0, keepdims=True)), [(3, 5, 7)]),
    "over two dims": (lambda x: x - x.max((0, 2), keepdims=True), [(3, 5, 7)]),
    "sums of each dim": (lambda x: (x.sum(0), x.sum(1), x.sum(2)), [(3, 5, 7)]),
    "all of it": (lambda x: x - x.mean(), [(3, 5)]),
    "transposed": (lambda x, y: x + y.T, [(3, 5), (5, 3)]),
    "of fewer dims": (lambda x, y: (x * y[None], (y * y).sum()), [(3, 5), (5,)]),
    "one row": (norm, [(1, 33), (33,)]),
    "one column": (norm, [(7, 1), (1,)]),
    "a number, then a weight": (lambda x, w: ((x * x).sum(), x * w[None]), [(6, 16), (16,)]),
    "a weight a head": (lambda x, w: x * w[None], [(6, 3, 8), (3, 8)]),
    "angles with gradients": (rotary, [(2, 5, 3, 8), (5, 4), (5, 4)]),
    "a computed row is cut": (norm_and_turn, [(6, 16), (16,), (6, 8), (6, 8)]),
}
"""Where rows lie, and what is summed over them: functions, and their arguments' shapes."""


def by_truth(f):
    """Truth values go in and out of kernels: of elements, and of rows."""

    def run(x):
        above, large = f(lambda x: (x > 0, x.max(-1) > 1))(x)
        return f(lambda x, a, b: (jnp.where(a & b[:, None], x, -x), a))(x, above, large)

    return run


LONG = {
    "beside short ones": (
        lambda x, y: (x - y.max(-1, keepdims=True), y - x.max(-1, keepdims=True), (y * y).sum()),
        [(3, 9216), (3, 1024)],
    ),
    "weights of long rows": (norm, [(3, 9000), (9000,)]),
    "a sum of long rows": (lambda x: (2 * x, (x - x.max(-1, keepdims=True)).sum()), [(3, 9000)]),
}
"""The same of rows that registers do not hold."""


def arguments_of(shapes) -> list:
    return [normal(i, shape) for i, shape in enumerate(shapes)]


REFUSED = {
    "a part of a row": (lambda x: x.reshape(3, 2, 4).sum(-1) + x[:, :2], (3, 8), "part of a row"),
    "steps": (lambda x: x[:, ::2] + x[:, 1::2], (3, 8), "leaves elements out"),
    "itself": (lambda x: x + x.T, (4, 4), "all of a row meets all of it"),
    "all pairs": (lambda x: x[:, :, None] - x[:, None], (4, 5), "all of a row meets all of it"),
    "8 bits": (lambda x: x.astype(jnp.int8), (4, 5), "arrays of int8"),
}
"""What has no kernel on a GPU: functions, the shape of their argument, and why."""


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


# ---- what is written over its operands -----------------------------------------------------------


def stream(x, residual):
    """A sum, and its norm."""
    h = x + residual
    return norm_of(h), h


def norm_of(x):
    return (wide(x) * jax.lax.rsqrt(jnp.mean(jnp.square(wide(x)), -1, keepdims=True))).astype(
        x.dtype
    )


def swapped(x, y):
    """Two results are written over an operand that others read; the third is such an operand."""
    return y * 2, x - y, y[None]


# Of shapes, which operands are given up, and how many results can lie there.
DONATED = {
    "AdamW": (lambda p, m, v, g: adam(p, g, m, v, 3.0), [(7, 33)] * 4, (0, 1, 2), 3),
    "sums along rows": (stream, [(6, 200)] * 2, (1,), 1),
    "operands that others read": (swapped, [(5, 128)] * 2, (0, 1), 2),
    "of another shape": (lambda x, w: x * w[None], [(4, 24), (24,)], (1,), 0),
    "numbers of rows": (lambda x, m: jnp.maximum(x.max(-1), m), [(4, 24), (4,)], (1,), 0),
    "cuts": (lambda x: jnp.concatenate(jnp.split(x, 2, -1)[::-1], -1), [(4, 32)], (0,), 0),
    "long rows": (lambda x: x - x.max(-1, keepdims=True), [(3, 9000)], (0,), 0),
}
