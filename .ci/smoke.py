"""What an installed xform must do outside its checkout: import its layers, attend, differentiate.

Run by `.ci/run` with the Python of an empty environment: `python .ci/smoke.py`.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import xform
import xform.lowering
import xform.primitives
import xform.sharding

for layer in (xform, xform.primitives, xform.lowering, xform.sharding):
    if not Path(str(layer.__file__)).is_relative_to(sys.prefix):
        sys.exit(f"`{layer.__name__}` comes from {layer.__file__}, not from {sys.prefix}")

B, T, H, D = 2, 65, 4, 16
q, k, v = np.random.default_rng(0).standard_normal((3, B, T, H, D), dtype=np.float32)


def dense(q, k, v):
    """Causal attention with the whole [T, T] matrix in sight."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5
    scores = jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def fused(q, k, v):
    """The same by xform."""
    return xform.flex_attention(q, k, v, mask_mod=xform.causal())


def value_and_grads(attend):
    """The output and its gradients, seeded with a cosine so that none is trivial."""
    out, pull = jax.vjp(jax.jit(attend), q, k, v)
    return out, *pull(jnp.cos(out))


for name, ours, theirs in zip(
    ("out", "dq", "dk", "dv"), value_and_grads(fused), value_and_grads(dense), strict=True
):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)

print(f"xform from {Path(str(xform.__file__)).parent}, jax {jax.__version__}: causal attention ok")
