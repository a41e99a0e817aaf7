"""Attention in 8 bits by the kernel, beside its emulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xform import causal, flex_attention, which

SLOPES = 2.0 ** -jnp.arange(1, 5)
CASES = {
    "full": ((2, 1024, 4, 2, 128), {}),
    "odd sizes": ((1, 333, 4, 4, 40), {"mask_mod": causal()}),
    "alibi": (
        (1, 700, 4, 1, 64), {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * jnp.abs(q - k)}
    ),
    "dropout": ((1, 512, 4, 2, 64), {"dropout_rate": 0.3, "dropout_key": jax.random.key(5)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_as_right_as_its_emulation(name):
    """Values whose blocks differ in size, about a mean: what a sum loses would show."""
    (b, t, h, kv, d), options = CASES[name]
    q, k, v = (
        jax.random.normal(jax.random.key(n), (b, t, heads, d), jnp.bfloat16)
        for n, heads in enumerate((h, kv, kv))
    )
    v = (v + 1).at[:, :128].multiply(20)
    assert which(q, k, v, format="e4m3", **options).name == "mosaic_gpu"

    def run(dtype=jnp.float32, **how):
        wide = [y.astype(dtype) for y in (q, k, v)]
        out, aux = flex_attention(*wide, format="e4m3", aux="lse", **how, **options)
        return [np.asarray(y, np.float64) for y in (out, aux.lse)]

    true = run(implementation="reference")
    found, emulated = run(jnp.bfloat16), run(jnp.bfloat16, implementation="blockwise")
    size = lambda x: np.sqrt(np.square(x).mean())
    for x, y, z in zip(found, emulated, true, strict=True):
        assert size(x - z) < 1.2 * size(y - z) + 1e-3 * size(z)


def test_what_is_hidden_and_not_finite_has_no_influence():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 512, 2, 64), jnp.bfloat16)
    attend = jax.jit(lambda v: flex_attention(q, k, v, mask_mod=causal(), format="e4m3"))
    spoilt = attend(v.at[:, 300].set(jnp.nan))
    assert jnp.isnan(spoilt[:, 300:]).all()
    first = (spoilt - attend(v))[:, :300].astype(jnp.float32)
    assert jnp.abs(first).max() < 0.2  # in 16 bits, which the other is not
