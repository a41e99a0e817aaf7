"""What a program needs that XLA has compiled for devices that need not be present."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xform._hlo import compile_for
from xform.sharding.pipeline._times import Real
from xform.sharding.plan._memory import Memory


def compiled_memory(
    gradients: Callable, *args: Any, optimizer: Real = 0, target: str = "H200"
) -> Memory:
    """Returns what one device needs for loss and gradients, as XLA has laid it out.

    It compiles, in seconds to minutes, for as many devices as the mesh of the arguments has; what
    `predict` says of memory is a model of this.

    Args:
      gradients: the function, jitted or not: parameters first, then the batch.
      *args: its arguments, of which only shapes, dtypes and shardings count.
      optimizer: bytes of a device that the optimiser's state takes beside it.
      target: a device that xform can compile for.

    Returns:
      Arguments as `parameters`, results as `gradients`, and all between as `activations`, which is
      not told apart from workspace.

    Raises:
      RuntimeError: the target's compiler is not installed.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> compiled_memory(lambda w: w @ w, x).parameters  # doctest: +SKIP
    262144
    """
    found: Any = compile_for(target, gradients, *args).memory_analysis()
    results = found.output_size_in_bytes - found.alias_size_in_bytes
    return Memory(
        found.argument_size_in_bytes, results, optimizer, found.temp_size_in_bytes, workspace=0
    )
