"""Arrays that a kernel changes where they lie.

The result of such a kernel is its operand, and holds what was there wherever the kernel writes
nothing. In a loop XLA hands kernels the parts of stacked arrays that they read or that are saved of
them, and copies neither; of a result that is also an operand it then forgets what was there (jax
0.11.2: a `dynamic-slice-fusion` has no alias within). The barriers keep such kernels out of that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def in_place(run: Callable, *arrays) -> tuple[Any, Sequence]:
    """Returns what `run` returns, called with references to arrays; and what it leaves there."""
    refs = [jax.new_ref(lax.optimization_barrier(x)) for x in arrays]
    made = run(*refs)
    return made, [lax.optimization_barrier(ref[...]) for ref in refs]
