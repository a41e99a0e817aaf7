"""Attention of arrays that a mesh splits: each device attends with its own batch and heads.

Three ways lead here. Inside `jax.shard_map` arrays are local already. Axes of type `Explicit` split
arrays by their type, and the primitive is lowered into a `shard_map` over these types. Axes of type
`Auto` are split by XLA's partitioner while it compiles; it asks the rule below. In all of them
batch, heads and the dimensions that `vmap` added may be split, and with them what mods read at
their own batch entry or head alone; no array is moved, and the only collective is the sum that a
gradient needs whose operand other devices read as well. Any other split is an error, never a hidden
transfer.

Mods see the true `b` and `h`: a device's first ones are the `origin` of its part. (Inside
`jax.shard_map` the program is written for one device, and so are its mods.)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xform._compat import Primitive, apply_primitive, cuda_device, lower_with_devices
from xform.lowering._tile_fn import COL, ROW, Kind
from xform.primitives._choose import Device
from xform.primitives._own import Own

type Axes = tuple[str, ...]
type Specs = Sequence[tuple[Axes, ...]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the dimensions of one operand or result are.

    Attributes:
      label: what an error calls it.
      shape, dtype: of the whole array.
      dims: of each dimension a name: "B", "T", "H", "S", "D", the hidden ones "vmap 0", "vmap 1",
        those of captured arrays "dim 0", "dim 1". Key/value heads are "H" too, since they are split
        as query heads are; if there is only one it is "K", and every device has it.
      own: of dimensions that are read at one's own batch entry or head, "B" or "H". They are split
        as that is, or whole.
    """

    label: str
    shape: tuple[int, ...]
    dtype: Any
    dims: tuple[str, ...]
    own: Own = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, label: str, kind: Kind, array, hidden: int) -> Layout:
        """The layout of an array, or its type, with this many hidden dimensions in front."""
        shape = array.shape
        lead = [f"vmap {i}" if n > 1 else "-" for i, n in enumerate(shape[:hidden])]
        rest = [f"dim {i}" for i in range(len(shape) - hidden)]
        if kind == ROW:
            rest = ["B", "T", "H", "D"][: len(rest)]
        elif kind == COL:
            rest = ["B", "S", "H" if shape[hidden + 2] > 1 else "K", "D"][: len(rest)]
        return cls(f"{label} {array.dtype}{list(shape)}", shape, array.dtype, (*lead, *rest))

    @classmethod
    def read(cls, own: Own, name: object, array, hidden: int, rows: Layout) -> Layout:
        """The layout of what mods read, with dimensions of its own as long as those of `rows`.

        Args:
          own: of dimensions but the hidden ones, whether they are read at `b` or `h` alone.
          name: arrays of one name are split alike.
          array: or its type.
          hidden: how many hidden dimensions there are.
          rows: the layout of queries.
        """
        plain = cls.of("a captured array", (), array, hidden)
        sizes = dict(zip(rows.dims, rows.shape, strict=True))
        own = {hidden + d: x for d, x in own.items() if array.shape[hidden + d] == sizes[x]}
        dims = [f"{d} of {hash(name)}" if i in own else d for i, d in enumerate(plain.dims)]
        return dataclasses.replace(plain, dims=tuple(dims), own=own)

    def spec(self, axes: dict[str, Axes]) -> PartitionSpec:
        """The placement of an array whose named dimensions are split over `axes`."""
        return PartitionSpec(*(axes.get(d) or None for d in self.dims))

    def seen(self, axes: dict[str, Axes], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of what one device works on: its part, but all along its own dimensions."""
        split = lambda i, d: () if i in self.own else axes.get(d, ())
        named = zip(self.dims, self.shape, strict=True)
        return tuple(n // _size(split(i, d), sizes) for i, (d, n) in enumerate(named))


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of the operands and results of one call of a primitive.

    Attributes:
      operands, results: one each.
      local: whether a device can do its part alone. If not, explicit axes may split nothing, and
        XLA's partitioner sees the program as it is.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    local: bool = True

    def axes(self, specs: Specs, sizes: Mapping[str, int], *, strict: bool) -> dict[str, Axes]:
        """The mesh axes that split each named dimension.

        Args:
          specs: of each operand, the axes that split each of its dimensions.
          sizes: of the mesh axes.
          strict: whether operands must be split as they will be read. Otherwise one that is whole
            is cut where it lies, which moves nothing.

        Raises:
          ValueError: lists every split that can't stay local.
        """
        given = [
            (x, d, n, s, x.own.get(i))
            for x, spec in zip(self.operands, specs, strict=True)
            for i, (d, n, s) in enumerate(zip(x.dims, x.shape, spec, strict=True))
        ]
        axes: dict[str, Axes] = {}
        for _, d, _, split, _ in given:
            if d in ("B", "H") or d.startswith("vmap"):
                axes[d] = axes.get(d) or split
        # A device has its own part of them, or all.
        axes |= {d: axes[own] for _, d, _, split, own in given if own and split == axes[own] != ()}
        wrong = []
        for x, d, n, split, own in given:
            needed = axes.get(d, ())
            if split != needed and (split or strict):
                d = d.partition(" of ")[0]
                also = f" or {axes[own]}" if own and axes[own] != needed else ""
                wrong.append(f"{x.label} is split over {split} along {d}, needed is {needed}{also}")
            elif n % _size(needed, sizes):
                wrong.append(f"{x.label} has {n} along {d}, no multiple of the axes {needed}")
        shared = {d: split for d, split in axes.items() if d in ("B", "H") or "vmap" in d}
        used = [axis for split in shared.values() for axis in split]
        if len(set(used)) < len(used):
            wrong.append(f"one mesh axis splits two dimensions: {shared}")
        if wrong:
            raise ValueError(
                "flex_attention works on split arrays where the batch, the heads or a dimension of "
                "vmap is split, the same for all of q, k and v, and what mods read is whole, or "
                "split so where it is read at one's own `b` or `h` alone; found: "
                f"{'; '.join(dict.fromkeys(wrong))}. Place these arrays so before the call "
                "(`jax.sharding.reshard` for explicit axes, `jax.lax.with_sharding_constraint` for "
                "others), or write the communication down: call it inside `jax.shard_map`."
            )
        return axes

    def rule(self) -> SdyShardingRule:
        """What XLA's partitioner may propagate: splits of batch, heads and hidden dimensions."""
        heads = {n for x in self.operands for d, n in zip(x.dims, x.shape, strict=True) if d == "H"}
        fresh, shared = itertools.count(), {}

        def factor(dim: str, size: int):
            if dim == "H":  # query heads are key heads times the group
                return "k" if size == min(heads) else CompoundFactor("k", "g")
            if dim == "B" or "vmap" in dim:
                return dim.replace(" ", "")
            # A gradient is split as the array is.
            return shared.setdefault(dim if " of " in dim else next(fresh), f"u{len(shared)}")

        mapping = lambda x: ArrayMapping(*map(factor, x.dims, x.shape))
        group: dict[str, Any] = {"g": max(heads) // min(heads)} if len(heads) > 1 else {}
        return SdyShardingRule(
            tuple(map(mapping, self.operands)), tuple(map(mapping, self.results)), **group
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Batch entries and heads."""
        rows = next(x for x in self.operands if "T" in x.dims)
        return {d: n for d, n in zip(rows.dims, rows.shape, strict=True) if d in ("B", "H")}


def _size(axes: Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


def _spec(sharding, ndim: int) -> tuple[Axes, ...]:
    """The axes that split each dimension."""
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def _explicit(avals: Sequence[ShapedArray]) -> Specs:
    """How the types of operands say that they are split."""
    return [_spec(a.sharding, a.ndim) for a in avals]


def _result_types(layouts: Layouts, operands: Sequence[ShapedArray]) -> list[ShapedArray]:
    """The types of results: split as the operands are, and varying over the same manual axes.

    Raises:
      ValueError: if the operands' types are split in a way that can't stay local.
      NotImplementedError: if explicit axes split them inside a `shard_map` over other axes.
    """
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return [ShapedArray(x.shape, x.dtype) for x in layouts.results]
    axes, specs = {}, _explicit(operands)
    if any(map(any, specs)):
        if AxisType.Manual in mesh.axis_types or not layouts.local:
            raise NotImplementedError(
                f"arrays are split by explicit axes of the mesh: {', '.join(map(str, operands))}. "
                "Do this inside `jax.shard_map`, with these axes among its `axis_names`."
            )
        axes = layouts.axes(specs, mesh.shape, strict=True)
    varying = operands[0].manual_axis_type
    place = lambda x: NamedSharding(mesh, x.spec(axes))
    return [
        ShapedArray(x.shape, x.dtype, sharding=place(x), manual_axis_type=varying)
        for x in layouts.results
    ]


def _local(impl: Callable, layouts: Layouts, axes: dict[str, Axes], sizes: Mapping[str, int]):
    """`impl` on one device's part of the operands; what belongs to all devices is summed, wide."""
    part = {d: n // _size(axes.get(d, ()), sizes) for d, n in layouts.sizes.items()}
    used = {axis for split in axes.values() for axis in split}
    sums = [
        tuple(sorted(used - {axis for d in x.dims for axis in axes.get(d, ())}))
        for x in layouts.results
    ]
    wide = lambda dtype, s: jnp.promote_types(dtype, jnp.float32) if s else dtype
    outs = [
        jax.ShapeDtypeStruct(x.seen(axes, sizes), wide(x.dtype, s))
        for x, s in zip(layouts.results, sums, strict=True)
    ]

    def run(*args):
        start = {d: lax.axis_index(axes[d]) * n if axes.get(d) else 0 for d, n in part.items()}
        args = [_all_of(x, a, axes, start) for x, a in zip(layouts.operands, args, strict=True)]
        results = impl(*args, origin=(start["B"], start["H"]), outs=outs)
        own = lambda x, y: _own_of(x, y, axes, start, part)
        results = [own(x, y) for x, y in zip(layouts.results, results, strict=True)]
        return [
            (lax.psum(y, s) if s else y).astype(x.dtype)
            for y, s, x in zip(results, sums, layouts.results, strict=True)
        ]

    return run


def _all_of(x: Layout, part, axes: dict[str, Axes], start: dict):
    """An array of which a device has its own part, as long as the whole one: mods count from 0.

    What is put around is never read.
    """
    for d, own in x.own.items():
        if axes.get(x.dims[d]):
            shape = (*part.shape[:d], x.shape[d], *part.shape[d + 1 :])
            part = lax.dynamic_update_slice_in_dim(
                jnp.zeros(shape, part.dtype), part, start[own], d
            )
    return part


def _own_of(x: Layout, whole, axes: dict[str, Axes], start: dict, part: Mapping[str, int]):
    """A device's own part of what `_all_of` made whole."""
    for d, own in x.own.items():
        if axes.get(x.dims[d]):
            whole = lax.dynamic_slice_in_dim(whole, start[own], part[own], d)
    return whole


def _in_types(impl: Callable, layouts: Layouts, operands: Sequence[ShapedArray]) -> Callable:
    """`impl` on the parts that explicit axes make."""
    mesh = operands[0].sharding.mesh
    specs = [
        _spec(a.sharding, len(x.shape)) for a, x in zip(operands, layouts.operands, strict=True)
    ]
    axes = layouts.axes(specs, mesh.shape, strict=True)
    return jax.shard_map(
        _local(impl, layouts, axes, mesh.shape), mesh=mesh, check_vma=False,
        in_specs=tuple(x.spec(axes) for x in layouts.operands),
        out_specs=[x.spec(axes) for x in layouts.results],
    )  # fmt: skip


def _in_partitioner(impl: Callable, layouts: Layouts, whole: Callable) -> Callable:
    """`impl` on the parts that XLA's partitioner makes: it calls back while it compiles."""

    def partition(mesh, operands, results):
        del results
        if mesh.empty:
            raise ValueError(
                "flex_attention on several devices needs to know their mesh: place its arrays by "
                "a `jax.sharding.NamedSharding`."
            )
        specs = [_spec(x.sharding, len(x.shape)) for x in operands]
        axes = layouts.axes(specs, mesh.shape, strict=False)
        place = lambda xs: [NamedSharding(mesh, x.spec(axes)) for x in xs]
        local = _local(impl, layouts, axes, mesh.shape)
        return mesh, local, place(layouts.results), tuple(place(layouts.operands))

    f = custom_partitioning(lambda *args: whole(*args))
    f.def_partition(partition, sharding_rule=layouts.rule())
    return f


def _in_words(layouts: Layouts, impl: Callable) -> tuple[Layouts, Callable, Callable]:
    """Layouts, `impl` and a map of operands where random keys are the numbers they are made of.

    A partitioner sees these, with a dimension more than the key has.
    """
    kinds, operands = {}, list(layouts.operands)

    def words(i: int, key):
        kinds[i] = jax.random.key_impl(key)
        return jax.random.key_data(key)

    for i, x in enumerate(layouts.operands):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(partial(words, i), jax.ShapeDtypeStruct(x.shape, x.dtype))
            dims = (*x.dims, *["word"] * (data.ndim - len(x.shape)))
            operands[i] = dataclasses.replace(x, shape=data.shape, dtype=data.dtype, dims=dims)

    def of_words(*args, **options):
        wrapped = [
            jax.random.wrap_key_data(a, impl=kinds[i]) if i in kinds else a
            for i, a in enumerate(args)
        ]
        return impl(*wrapped, **options)

    def to_words(args):
        return [jax.random.key_data(a) if i in kinds else a for i, a in enumerate(args)]

    return dataclasses.replace(layouts, operands=tuple(operands)), of_words, to_words


def splittable(primitive: Primitive, layouts: Callable, impl: Callable) -> None:
    """Gives a primitive its types, its lowering and its evaluation, split or not.

    Args:
      primitive: with several results.
      layouts: `layouts(*avals, **params) -> Layouts`.
      impl: `impl(*args, origin, outs, device, **params)`, on the operands of one device: `origin`
        is the b and h of their first, `outs` are the shapes and dtypes of the results, `device`
        says what they are lowered for.
    """

    def rule(ctx, *args, platform=None, **params):
        platform = platform or "/".join(ctx.module_context.platforms)
        device = Device(platform, *(cuda_device(ctx) if platform == "cuda" else (None, None)))
        operands, on = ctx.avals_in, ctx.module_context.axis_context
        mesh, layout = operands[0].sharding.mesh, layouts(*operands, **params)
        local = partial(impl, device=device, **params)
        explicit = not mesh.empty and mesh.size > 1 and set(mesh.axis_types) == {AxisType.Explicit}
        layout, local, words = _in_words(layout, local)
        if explicit and layout.local:
            part = _in_types(local, layout, operands)
            f = lambda *args: part(*words(args))
            return mlir.lower_fun(f, multiple_results=True)(ctx, *args)
        # Inside `shard_map` a device's program is the whole program.
        several = getattr(on, "num_devices", 1) > 1 and not hasattr(on, "manual_axes")
        whole = partial(local, origin=(0, 0), outs=layout.results)
        split = several and layout.local
        run = _in_partitioner(local, layout, whole) if split else whole
        f = lambda *args: run(*words(args))
        if split and not mesh.empty:  # that of `jax.set_mesh`, which custom partitioning overlooks
            on = dataclasses.replace(on, abstract_mesh=mesh)
            ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=on))
        strip = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
        ctx = ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))
        return mlir.lower_fun(f, multiple_results=True)(ctx, *args)

    primitive.def_impl(partial(apply_primitive, primitive))
    primitive.def_abstract_eval(
        lambda *avals, **params: _result_types(layouts(*avals, **params), avals)
    )
    mlir.register_lowering(primitive, rule)
    mlir.register_lowering(primitive, partial(rule, platform="cuda"), platform="cuda")
    lower_with_devices(primitive)
