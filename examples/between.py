"""What stands between a model's matrix products: through memory once, as one kernel each way.

By default that is so on a Hopper GPU, for which `fuse` has kernels. On a CPU a kernel is a loop
over blocks of rows, on one core, where XLA's own loops are on all of them: there functions are as
they stand.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from xform import fuse


def one_kernel(f: Callable, fused: bool | None = None) -> Callable:
    """Returns `f`, fused or not; None: where there are kernels."""
    here = getattr(jax.devices()[0], "compute_capability", None) == "9.0"
    return fuse(f) if (here if fused is None else fused) else f


def rms_norm(x_BTM, scale_M, eps: float = 1e-5):
    """Rows of unit mean square, times a learned scale."""
    wide_BTM = x_BTM.astype(jnp.promote_types(x_BTM.dtype, jnp.float32))
    unit_BTM = wide_BTM * jax.lax.rsqrt(jnp.mean(wide_BTM**2, -1, keepdims=True) + eps)
    return unit_BTM.astype(x_BTM.dtype) * scale_M


def norm(eps: float, fused: bool | None = None) -> Callable:
    """Returns `rms_norm` of a stream and a scale."""
    return one_kernel(lambda x_BTM, scale_M: rms_norm(x_BTM, scale_M, eps), fused)


def add_and_norm(eps: float, fused: bool | None = None) -> Callable:
    """Returns what adds a block to the stream, and gives that with its `rms_norm`."""

    def f(x_BTM, block_BTM, scale_M):
        x_BTM = x_BTM + block_BTM
        return x_BTM, rms_norm(x_BTM, scale_M, eps)

    return one_kernel(f, fused)


def gate(fused: bool | None = None) -> Callable:
    """Returns what opens units as far as their gates say (Shazeer, arXiv:2002.05202)."""
    return one_kernel(lambda gate, up: jax.nn.silu(gate) * up, fused)
