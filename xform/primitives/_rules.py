"""What the rules of several primitives share: hidden dimensions and manual mesh axes.

A *hidden dimension* is one that `vmap` added: a primitive carries it as a leading dimension of
its operands, of full size where the operand was batched and 1 where it was not, so that nothing
is copied and the user's mods never see it.

Inside `shard_map` every array has a type that says which mesh axes it varies over. Operands of
one primitive are cast to one type before it is bound (the transpose of that cast is the sum over
devices that makes the gradient of a replicated operand right).

Sizes are numbers: `check_sizes` says so where `jax.export` has made symbols of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform._compat import is_exported, varying_axes


def from_numpy(*arrays) -> list[Any]:
    """NumPy's arrays as JAX takes them, doubles in float32 unless x64 is on; others as they are."""
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]


def join_axes(arrays: Sequence) -> list:
    """Casts all arrays to vary over the mesh axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))
    missing = [tuple(sorted(axes - varying_axes(x))) for x in arrays]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]


def check_sizes(caller: str, **arrays) -> None:
    """Raises if arrays, by the names of `caller`'s arguments, have sizes that are no numbers."""
    found = {
        f"{', '.join(map(str, unknown))} of `{name}` {tuple(x.shape)}"
        for name, x in arrays.items()
        if (unknown := [n for n in getattr(x, "shape", ()) if not isinstance(n, int)])
    }
    if found:
        raise NotImplementedError(
            f"{caller} needs sizes that are numbers, and some are symbols: "
            f"{'; '.join(sorted(found))}. How arrays are cut into tiles is decided when a program "
            "is traced. Export one program for each size that there is, or one for the longest, "
            "and hide what is beyond a text's end by a mask."
        )


def check_export(caller: str, ctx) -> None:
    """Raises if a program that XLA's partitioner is to split is lowered for `jax.export`."""
    if is_exported(ctx):
        raise NotImplementedError(
            f"{caller} can't be exported for several devices where XLA's partitioner splits arrays,"
            " by mesh axes of type `Auto`: it asks a Python function how, which no file can hold. "
            "Let types say it, `jax.make_mesh(sizes, names, (jax.sharding.AxisType.Explicit,) * "
            "len(names))`, or call it inside `jax.shard_map`."
        )


def broadcast_like(x, y):
    """`x` repeated along the leading dimensions of `y`, and split as it is."""
    sharding = jax.typeof(y).sharding
    return lax.broadcast_in_dim(
        x, y.shape, range(y.ndim - x.ndim, y.ndim),
        out_sharding=sharding if any(sharding.spec) else None,
    )  # fmt: skip


def hidden_sizes(arrays: Sequence, hidden: int) -> tuple[int, ...]:
    """The sizes of the hidden dimensions: what any array has there that is not 1."""
    sizes = ({x.shape[d] for x in arrays} - {1} for d in range(hidden))
    return tuple(size.pop() if size else 1 for size in sizes)


def add_hidden_dim(args: Sequence, dims: Sequence) -> tuple[list, int]:
    """Operands with one more leading dimension, of size 1 where not batched, and its full size."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    place = lambda x, d: x[None] if d is None else jnp.moveaxis(x, d, 0)
    return [place(x, d) for x, d in zip(args, dims, strict=True)], size
