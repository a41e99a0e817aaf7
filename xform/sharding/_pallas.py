"""All-gather and product in one kernel: JAX's own for NVIDIA's Hopper, as an option by name.

The kernel (`jax.experimental.pallas.ops.gpu.collective_matmul_mgpu`) multiplies a chunk while it
writes it into the memory of the next device. It wants two dimensions, bfloat16 or float16, and an
axis that is all devices, in one process or one each; asked for anything else it raises. There is
no such kernel for the reduce-scatter, nor for the way back, where the ring of `ring` serves.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xform.primitives._rules import join_axes
from xform.sharding import ring
from xform.sharding._declare import declare


def gather_matmul(
    x: Float[Array, "... M"],
    weights: Sequence[Float[Array, "M _"]],
    axis: str,
    *,
    dim: int = -2,
) -> tuple[Float[Array, "..."], ...]:
    """Returns what `ring.gather_matmul` does, from one launch for all weights.

    Args:
      x, weights, axis, dim: As there.

    Raises:
      ValueError: As there; or the axis is not all devices.
      NotImplementedError: The kernel has no tiles of these sizes, or not for this dtype or device.
    """
    dim = ring.checked("gather_matmul", x, weights, axis, dim)
    wrong = []
    if any(a.dtype not in (jnp.bfloat16, jnp.float16) or a.dtype != x.dtype for a in (x, *weights)):
        wrong.append(
            f"its arrays are {[str(a.dtype) for a in (x, *weights)]}; needed is one dtype, "
            "bfloat16 or float16"
        )
    device = jax.devices()[0]
    if getattr(device, "compute_capability", None) != "9.0":
        wrong.append(f"devices are {device.device_kind}; needed is NVIDIA's Hopper")
    sizes = {
        "rows": (x.size // x.shape[-1], 128),
        "columns": (sum(w.shape[1] for w in weights), 128),
        "numbers a row": (x.shape[-1], 64),
    }
    wrong += [
        f"a device has {size} {name}; needed is a multiple of {unit}"
        for name, (size, unit) in sizes.items()
        if size % unit
    ]
    if wrong:
        raise NotImplementedError(f'`overlap="pallas"`: {"; ".join(wrong)}. Use `overlap="ring"`.')
    with declare("ring.gather_matmul", axis, hidden=True):
        x, *weights = join_axes([x, *weights])
        return _gather_matmul(axis, dim, x, tuple(weights))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_matmul(axis: str, dim: int, x: Array, weights: tuple) -> tuple:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as kernel

    n, rows = lax.axis_size(axis), jnp.moveaxis(x, dim, 0)
    flat, weight = rows.reshape(-1, x.shape[-1]), jnp.concatenate(weights, axis=1)
    config = kernel.TuningConfig(
        tile_m=128, tile_n=64 if weight.shape[1] % 256 else 128, tile_k=64,
        max_concurrent_steps=4, grid_tile_width=8, grid_minor_dim=kernel.MatmulDimension.M,
        wg_dimension=kernel.MatmulDimension.N,
    )  # fmt: skip
    y = kernel.all_gather_lhs_matmul(flat, weight, axis, config=config, dtype=x.dtype)
    (y, _) = join_axes([y, x])
    y = jnp.moveaxis(y.reshape(n * rows.shape[0], *rows.shape[1:-1], -1), 0, dim)
    ends, end = [], 0
    for w in weights[:-1]:
        ends.append(end := end + w.shape[1])
    return tuple(jnp.split(y, ends, axis=-1))


_gather_matmul.defvjp(lambda *args: (_gather_matmul(*args), args[2:]), ring.gather_matmul_bwd)
