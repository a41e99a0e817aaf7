"""How right is right: errors are measured against float64 and judged by a plain implementation.

A result may be off by twice what a straightforward implementation at the same precision is off
by, and one rounding of its own dtype, both as root mean squares over the array: the largest of
many rounding errors is a matter of luck. No tolerance is chosen by hand.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def plain(q, k, v, *, score_mod=None, mask_mod=None):
    """Attention as one would write it: dense, in the dtype of q, softmax in float32."""
    (b, t, h, d), (_, s, kv, _) = q.shape, k.shape
    k, v = (jnp.repeat(x, h // kv, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * d**-0.5
    index = [
        jnp.arange(n, dtype=jnp.int32).reshape([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate((b, h, t, s))
    ]
    if score_mod is not None:
        scores = jnp.vectorize(score_mod)(scores, *index)
    if mask_mod is not None:
        scores = jnp.where(jnp.vectorize(mask_mod)(*index), scores, -1e30)
    p = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhts,bshv->bthv", p, v, preferred_element_type=jnp.float32).astype(q.dtype)


UNOPTIMISED = {"xla_backend_optimization_level": 0}
"""Options of a program that runs once: XLA's optimiser would take longer than it."""


def once(f: Callable, *args):
    """Runs `f` once, unoptimised."""
    return jax.jit(f, compiler_options=UNOPTIMISED)(*args)


def in_float64(f: Callable, *args):
    """`f(*args)` with all floating arguments in float64, as numpy arrays."""
    with jax.enable_x64(True):
        wide = lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return jax.tree.map(np.asarray, once(f, *jax.tree.map(wide, args)))


def assert_as_right_as(found, judge, truth) -> None:
    """Asserts that every leaf of `found` is as near to `truth` as the budget above allows."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(found)]
    leaves = zip(paths, *map(jax.tree.leaves, (found, judge, truth)), strict=True)
    for path, x, other, true in leaves:
        rounding = float(jnp.finfo(x.dtype).eps) * _size(true)
        wide = lambda y: np.asarray(y, np.float64)
        error, allowed = _size(wide(x) - true), 2 * _size(wide(other) - true) + rounding
        assert error <= allowed, f"{path or 'result'}: error {error:.2e}, allowed {allowed:.2e}"


def _size(x) -> float:
    """Root mean square; of nothing, 0."""
    return float(np.sqrt(np.square(x).mean())) if np.size(x) else 0.0
