"""How a primitive that works on rows is lowered where a mesh splits its arrays.

Inside `jax.shard_map`, also the one that it makes itself where types say how arrays are split, a
device's program is the whole program. Where types say that a dimension of `vmap` is split, each
device has instances of its own, and what belongs to all is summed. Under plain `jit`, no type says
how arrays are split; XLA's partitioner decides when it compiles, and would take a loop over chunks
of a split array apart into collectives. `local_rows` makes a lowering one operation to it: each
device computes on its own rows, and what is summed over rows is summed over devices. Arrays that
are split in another way the partitioner makes whole first.
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xform._compat import Primitive, apply_primitive, cuda_device, lower_with_devices
from xform.lowering._contract import wide_of
from xform.primitives._choose import Device
from xform.primitives._rules import check_export


def register(primitive: Primitive, structs: Callable, impl: Callable) -> None:
    """Gives a primitive with several results its types, its lowering and its evaluation.

    Args:
      structs: `structs(*avals, **params)`, shapes and dtypes of the results; `hidden` among
        `params` is how many dimensions `vmap` has added in front, 0 without.
      impl: `impl(*args, device, auto, **params)`: `device` is what the program is lowered for, on
        platform "cpu", "cuda" or "default", and `auto` says whether the partitioner may split
        arrays. `outs` among `params` are those of one device.
    """

    def rule(ctx, *args, platform="default", **params):
        # What `shard_map` and one device have not.
        devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
        device = Device(platform, *(cuda_device(ctx) if platform == "cuda" else (None, None)))
        split = _instances(primitive.name, ctx.avals_in, params.get("hidden", 0))
        auto = len(devices or ()) > 1 and not split
        if auto:
            check_export(primitive.name, ctx)
        lower = partial(impl, device=device, auto=auto)
        if split:
            lower = _on_instances(lower, structs, ctx.avals_in, split)
            return mlir.lower_fun(lower, multiple_results=True)(ctx, *args, **params)
        strip = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
        ctx = ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))
        return mlir.lower_fun(lower, multiple_results=True)(ctx, *args, **params)

    def types(*avals, **params):
        split = _instances(primitive.name, avals, params.get("hidden", 0))
        return [_type(s, avals, split) for s in structs(*avals, **params)]

    primitive.def_impl(partial(apply_primitive, primitive))
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, rule)
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, partial(rule, platform=platform), platform=platform)
    lower_with_devices(primitive)


type Split = dict[int, str | tuple[str, ...]]
"""Of dimensions that `vmap` added: the explicit mesh axes that split them."""


def _instances(name: str, operands: Sequence[ShapedArray], hidden: int) -> Split:
    """How the types of operands say that the dimensions of `vmap` are split.

    Raises:
      NotImplementedError: if an explicit mesh axis splits another dimension.
    """
    split: Split = {}
    wrong = []
    for x in operands:
        found = {d: axes for d, axes in enumerate(x.sharding.spec) if axes is not None}
        if any(d >= hidden or split.setdefault(d, axes) != axes for d, axes in found.items()):
            wrong.append(f"{x.dtype}{list(x.shape)} over {x.sharding.spec}")
    if wrong:
        raise NotImplementedError(
            f"{name} got arrays that a mesh splits by their type: {', '.join(wrong)}."
            " Call it inside `jax.shard_map`, where each device has rows of its own."
        )
    if split and AxisType.Manual in operands[0].sharding.mesh.axis_types:
        raise NotImplementedError(
            f"{name} under `vmap`, whose dimensions are split over {split}, and other"
            " axes of the mesh split tokens or vocabulary. Call `vmap` inside `jax.shard_map` over "
            "all of these axes, or place the arrays so that only one kind is split."
        )
    return split


def _place(shape: Sequence[int], split: Split) -> PartitionSpec:
    """The placement of an array: split where it has all instances of a split dimension."""
    return PartitionSpec(*(split.get(d) if n > 1 else None for d, n in enumerate(shape)))


def _type(struct, operands: Sequence[ShapedArray], split: Split) -> ShapedArray:
    """The type of a result: split as instances are, and varying as the operands do."""
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return ShapedArray(struct.shape, struct.dtype)
    return ShapedArray(
        struct.shape, struct.dtype, sharding=NamedSharding(mesh, _place(struct.shape, split)),
        manual_axis_type=operands[0].manual_axis_type,
    )  # fmt: skip


def _on_instances(
    f: Callable, structs: Callable, operands: Sequence[ShapedArray], split: Split
) -> Callable:
    """`f` on the instances of each device; what belongs to all is summed over devices, wide."""
    mesh = operands[0].sharding.mesh

    def whole(*args, **params):
        results = structs(*operands, **params)
        placed = [_place(s.shape, split) for s in results]
        sums = [axis_names(split[d] for d in split if p[d] is None) for p in placed]

        def local(*args):
            wide = lambda s, axes: wide_of(s.dtype) if axes else s.dtype
            part = lambda s, p: NamedSharding(mesh, p).shard_shape(s.shape)
            each = zip(results, placed, sums, strict=True)
            outs = tuple((part(s, p), wide(s, axes)) for s, p, axes in each)
            own = {"outs": outs} if "outs" in params else {}
            ys = f(*args, **(params | own))
            each = zip(ys, results, sums, strict=True)
            return [(lax.psum(y, axes) if axes else y).astype(s.dtype) for y, s, axes in each]

        # Unchecked: here, where all derivatives are taken, values have no types of manual axes.
        return jax.shard_map(
            local, mesh=mesh, axis_names=set(axis_names(split.values())), check_vma=False,
            in_specs=tuple(x.sharding.spec for x in operands), out_specs=placed,
        )(*args)  # fmt: skip

    return whole


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
