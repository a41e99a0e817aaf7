"""How a kernel is called: once, for whoever reads its results.

In a loop over layers XLA hands a kernel the parts of stacked arrays that it reads, which spares
copies of them (jax 0.11.2, `dynamic-slice-fusion`). It would do so with results that are saved in
a stack, too, at a price: one that others read as well is computed twice, by two runs of the kernel;
and of one that is an operand, too, and so holds what was there wherever the kernel writes nothing,
it forgets what was there. Barriers behind results keep one kernel one kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering.mosaic_gpu import _plgpu as plgpu


def kernel(body: Callable, **options) -> Callable:
    """Returns Pallas's kernel of the same arguments, which XLA runs as often as it is called."""
    run = plgpu.kernel(body, **options)
    return lambda *args: lax.optimization_barrier(run(*args))


def zeros(shape: Sequence[int], dtype, like: jax.Array) -> jax.Array:
    """Returns zeros of this call's own, for a kernel to add to; `like` is any operand of it.

    XLA makes equal constants once: of those that are changed it would fetch a copy for each call,
    which takes twice as long as to fill them.
    """
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), like))
    return jnp.broadcast_to(zero, shape)


def in_place(run: Callable, *arrays) -> tuple[Any, Sequence]:
    """Returns what a kernel returns, called with references to arrays; and what it leaves there."""
    refs = [jax.new_ref(lax.optimization_barrier(x)) for x in arrays]
    made = run(*refs)
    return made, [lax.optimization_barrier(ref[...]) for ref in refs]
