"""Kernels in a loop over layers on a GPU, where XLA lets them read and write stacked arrays.

What a kernel finds in its result, because that is one of its operands too, must be there as well
where the result is a layer's part of a stack that the loop saves for the backward pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests._fuse.subjects import normal, rms_norm
from xform import causal, flex_attention, fuse

LAYERS, T, H, K, D = 3, 512, 4, 2, 64


def layer(x, p, deterministic):
    """Attention and a norm, added to the stream."""
    split = lambda y: y.reshape(1, T, -1, D)
    q, k, v = split(x @ p["q"]), split(x @ p["k"]), split(x @ p["v"])
    out = flex_attention(q, k, v, mask_mod=causal(), deterministic=deterministic)
    return fuse(rms_norm)(x, out.reshape(x.shape) @ p["out"], p["norm"])[0]


def parameters():
    width = H * D
    shapes = {"q": (width, H * D), "k": (width, K * D), "v": (width, K * D), "out": (H * D, width)}
    made = {
        name: normal(i, (LAYERS, *shape), jnp.bfloat16) * width**-0.5
        for i, (name, shape) in enumerate(shapes.items())
    }
    return made | {"norm": jnp.ones((LAYERS, width), jnp.bfloat16)}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_scan_has_the_gradients_of_its_layers(deterministic, again):
    x, params = normal(9, (T, H * D), jnp.bfloat16), parameters()
    step = lambda x, p: layer(x, p, deterministic)
    if again:
        step = jax.checkpoint(step)

    def scanned(x, params):
        return jax.lax.scan(lambda x, p: (step(x, p), None), x, params)[0]

    def unrolled(x, params):
        for i in range(LAYERS):
            x = step(x, jax.tree.map(lambda a, i=i: a[i], params))
        return x

    gradients = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum().astype(float), (0, 1)))
    found, wanted = gradients(scanned)(x, params), gradients(unrolled)(x, params)

    def same(a, b):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)

    jax.tree.map(same, found, wanted)
