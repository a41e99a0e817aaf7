"""What the rules of several primitives share: hidden dimensions and manual mesh axes.

A *hidden dimension* is one that `vmap` added: a primitive carries it as a leading dimension of
its operands, of full size where the operand was batched and 1 where it was not, so that nothing
is copied and the user's mods never see it.

Inside `shard_map` every array has a type that says which mesh axes it varies over. Operands of
one primitive are cast to one type before it is bound (the transpose of that cast is the sum over
devices that makes the gradient of a replicated operand right), and the lowering, which
communicates nothing, works on types without axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from xform._compat import prim_requires_devices_during_lowering, varying_axes


def join_axes(arrays: Sequence) -> list:
    """Casts all arrays to vary over the mesh axes that any of them varies over."""
    axes = frozenset().union(*map(varying_axes, arrays))
    missing = [tuple(sorted(axes - varying_axes(x))) for x in arrays]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]


def result_type(shape: Sequence[int], dtype, *operands: ShapedArray) -> ShapedArray:
    """The type of a result that varies over the mesh axes that the operands vary over.

    Raises:
      NotImplementedError: if an explicit mesh axis splits an operand.
    """
    if split := [x for x in operands if any(axis is not None for axis in x.sharding.spec)]:
        found = ", ".join(f"{x.dtype}{list(x.shape)} over {x.sharding.spec}" for x in split)
        raise NotImplementedError(
            f"attention got arrays that a mesh splits by their type: {found}. Call it inside "
            "`jax.shard_map`, where each device attends with its own rows of the batch and its own "
            "heads."
        )
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return ShapedArray(shape, dtype)
    axes = operands[0].manual_axis_type
    sharding = NamedSharding(mesh, PartitionSpec())
    return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=axes)


def lower_without_axes(impl: Callable) -> Callable:
    """A lowering rule that traces `impl` on types without mesh axes."""
    lowered = mlir.lower_fun(impl, multiple_results=True)

    def rule(ctx, *args, **params):
        strip = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
        ctx = ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))
        return lowered(ctx, *args, **params)

    return rule


def register_by_platform(primitive: Primitive, impl: Callable) -> None:
    """Registers the lowering `impl(*args, platform, auto, **params)`.

    `platform` is "cpu" or "default"; `auto` says whether the partitioner may split arrays.
    """
    for name in ("cpu", "default"):

        def rule(ctx, *args, platform=name, **params):
            # What `shard_map` and one device have not.
            devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
            lower = partial(impl, platform=platform, auto=len(devices or ()) > 1)
            return lower_without_axes(lower)(ctx, *args, **params)

        mlir.register_lowering(primitive, rule, platform=None if name == "default" else name)
    prim_requires_devices_during_lowering.add(primitive)


def hidden_sizes(arrays: Sequence, hidden: int) -> tuple[int, ...]:
    """The sizes of the hidden dimensions: what any array has there that is not 1."""
    sizes = ({x.shape[d] for x in arrays} - {1} for d in range(hidden))
    return tuple(size.pop() if size else 1 for size in sizes)


def add_hidden_dim(args: Sequence, dims: Sequence) -> tuple[list, int]:
    """Operands with one more leading dimension, of size 1 where not batched, and its full size."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    place = lambda x, d: x[None] if d is None else jnp.moveaxis(x, d, 0)
    return [place(x, d) for x, d in zip(args, dims, strict=True)], size
