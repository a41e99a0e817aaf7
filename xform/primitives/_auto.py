"""How linear cross entropy is lowered where a mesh splits its arrays.

Inside `jax.shard_map`, also the one that it makes itself where types say how arrays are split, a
device's program is the whole program. Under plain `jit`, no type says how arrays are split; XLA's
partitioner decides when it compiles, and would take a loop over chunks of a split array apart into
collectives. `local_rows` makes a lowering one operation to it: each device computes on its own
rows, and what is summed over rows is summed over devices. Arrays that are split in another way the
partitioner makes whole first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import jax
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from xform._compat import Primitive, apply_primitive, cuda_device, lower_with_devices
from xform.primitives._choose import Device


def register(primitive: Primitive, structs: Callable, impl: Callable) -> None:
    """Gives a primitive with several results its types, its lowering and its evaluation.

    Args:
      structs: `structs(*avals, **params)`, shapes and dtypes of the results.
      impl: `impl(*args, device, auto, **params)`: `device` is what the program is lowered for, on
        platform "cpu", "cuda" or "default", and `auto` says whether the partitioner may split
        arrays.
    """

    def rule(ctx, *args, platform="default", **params):
        # What `shard_map` and one device have not.
        devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
        device = Device(platform, *(cuda_device(ctx) if platform == "cuda" else (None, None)))
        lower = partial(impl, device=device, auto=len(devices or ()) > 1)
        strip = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
        ctx = ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))
        return mlir.lower_fun(lower, multiple_results=True)(ctx, *args, **params)

    primitive.def_impl(partial(apply_primitive, primitive))
    primitive.def_abstract_eval(
        lambda *avals, **params: [_type(s, avals) for s in structs(*avals, **params)]
    )
    mlir.register_lowering(primitive, rule)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, partial(rule, platform=platform), platform=platform)
    lower_with_devices(primitive)


def _type(struct, operands: Sequence[ShapedArray]) -> ShapedArray:
    """The type of a result that varies over the mesh axes that the operands vary over.

    Raises:
      NotImplementedError: if an explicit mesh axis splits an operand.
    """
    if split := [x for x in operands if any(axis is not None for axis in x.sharding.spec)]:
        found = ", ".join(f"{x.dtype}{list(x.shape)} over {x.sharding.spec}" for x in split)
        raise NotImplementedError(
            f"linear_cross_entropy got arrays that a mesh splits by their type: {found}. Call it "
            "inside `jax.shard_map`, where each device has tokens of its own."
        )
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return ShapedArray(struct.shape, struct.dtype)
    return ShapedArray(
        struct.shape, struct.dtype, sharding=NamedSharding(mesh, PartitionSpec()),
        manual_axis_type=operands[0].manual_axis_type,
    )  # fmt: skip


def local_rows(f: Callable, ins: Sequence[range], outs: Sequence[range]) -> Callable:
    """Returns `f` as one operation that the partitioner can split along rows, and no other way.

    Args:
      f: takes and returns arrays.
      ins, outs: for each operand and result, the dimensions that are rows; none of them for an
        array that all rows share.
    """

    def partition(mesh, args, results):
        first, dims = next((x, r) for x, r in zip(args, ins, strict=True) if r)
        spec = dict(enumerate(first.sharding.spec))
        rows = [spec.get(d) for d in dims]
        axes = axis_names(rows)

        def local(*args):
            whole = lambda y, r: y if r or not axes else lax.psum(y, axes)
            return [whole(y, r) for y, r in zip(f(*args), outs, strict=True)]

        def placed(x, r):
            spec = dict(zip(r, rows, strict=bool(r)))
            return NamedSharding(mesh, PartitionSpec(*(spec.get(d) for d in range(x.ndim))))

        pairs = lambda xs, rs: tuple(placed(x, r) for x, r in zip(xs, rs, strict=True))
        return mesh, local, list(pairs(results, outs)), pairs(args, ins)

    def whole(*args):
        unshared = count()

        def side(arrays, rows):
            """The names of all dimensions: rows have theirs in common, all others are alone."""
            name = lambda d, r: f"row{r.index(d)}" if d in r else f"own{next(unshared)}"
            names = lambda x, r: " ".join(name(d, r) for d in range(x.ndim))
            return ", ".join(names(x, r) for x, r in zip(arrays, rows, strict=True))

        operation = custom_partitioning(f)
        rule = f"{side(args, ins)} -> {side(jax.eval_shape(f, *args), outs)}"
        operation.def_partition(partition, sharding_rule=rule)
        return operation(*args)

    return whole


def axis_names(spec) -> tuple[str, ...]:
    """The mesh axes of a partition, a name, some names or None for each dimension."""
    dims = [() if d is None else d if isinstance(d, tuple) else (d,) for d in spec]
    return tuple(axis for dim in dims for axis in dim)
