"""How a fused program is lowered: by platform, and on the rows that a device has.

Inside `jax.shard_map` a device's program is the whole program. Elsewhere a mesh may split arrays,
by their types or as XLA's partitioner sees fit: along rows each device works on its own, and sums
over rows are summed over devices. An array that is split within a row is refused, since to make it
whole would be a collective that nobody asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from xform._compat import Primitive, lower_with_devices, without_references
from xform._fuse._error import FusionError
from xform._fuse._region import region_of
from xform._fuse._verify import verify
from xform.lowering import row_blocks
from xform.lowering._region import Lines, Region
from xform.lowering._row_end import WHOLE, Split
from xform.primitives._auto import axis_names
from xform.primitives._rules import check_export


def register(primitive: Primitive) -> None:
    """Gives the primitive its lowering on each platform."""
    for platform, run in (("cpu", _on_cpu), ("cuda", _on_gpu)):
        mlir.register_lowering(primitive, partial(_rule, run), platform=platform)
    lower_with_devices(primitive)


def _on_cpu(region: Region, *args, donated: Sequence[bool], split: Split = WHOLE) -> list:
    """A loop meets some rows twice, and so writes over none."""
    del donated
    verify(region)
    return row_blocks.run(region, *args, split=split)


def _on_gpu(region: Region, *args, donated: Sequence[bool], split: Split = WHOLE) -> list:
    from xform.lowering.mosaic_gpu import _rows

    return _rows.run(region, *args, split=split, donated=donated)


def _rule(run: Callable, ctx, *args, call_jaxpr, donated):
    region, run = region_of(call_jaxpr), partial(run, donated=donated)
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
    here = partial(run, region)
    if len(devices or ()) > 1:
        check_export("fuse", ctx)
        here = _on_devices(run, region)
    strip = lambda avals: [ShapedArray(a.shape, a.dtype) for a in avals]
    ctx = ctx.replace(avals_in=strip(ctx.avals_in), avals_out=strip(ctx.avals_out))
    return mlir.lower_fun(here, multiple_results=True)(ctx, *args)


def _on_devices(run: Callable, region: Region) -> Callable:
    """A region as one operation that the partitioner can split along rows, and no other way."""
    operands = [region.lines[v] for v in region.body.invars]
    results = _result_lines(region)

    def partition(mesh, args, outs):
        del outs
        shardings = [x.sharding for x in args]
        axes = _split_rows(region, operands, shardings)
        local = replace(region, sizes=_local(region, axes, mesh))
        place = lambda lines: NamedSharding(mesh, _spec(lines, axes))
        split = Split({k: a for k, a in axes.items() if a})

        def body(*args):
            # Here arrays are a device's own, and types of explicit axes say nothing of them.
            with use_abstract_mesh(AbstractMesh((), ())):
                return without_references(partial(run, local, split=split))(*args)

        return mesh, body, [place(x) for x in results], tuple(place(x) for x in operands)

    operation = custom_partitioning(lambda *args: run(region, *args))
    operation.def_partition(partition, sharding_rule=_sharding_rule(operands, results, region))
    return operation


def _result_lines(region: Region) -> list[Lines]:
    made = [region.lines_of(v) for v in region.results]
    ends = [region.lines_of(v) for v in region.finish.outvars]
    return [(ends if late else made)[i] for late, i in region.order]


def _split_rows(region: Region, operands: Sequence[Lines], shardings: Sequence) -> dict:
    """The mesh axes that split each line of rows.

    Raises:
      FusionError: an operand is split within a row, or two split the same rows in two ways.
    """
    found: dict[int, tuple[str, ...]] = {}
    for lines, sharding in zip(operands, shardings, strict=True):
        spec = [*sharding.spec, *[None] * (len(lines) - len(sharding.spec))]
        for line, entry in zip(lines, spec, strict=True):
            axes = axis_names([entry])
            if axes and line not in region.rows:
                raise FusionError(
                    f"`fuse` works on whole rows, and a mesh splits an operand within a row, over "
                    f"{', '.join(axes)} (`{sharding.spec}`). Place it so that rows are whole with "
                    "`jax.reshard`, or call it in a `jax.shard_map` that sums over devices itself."
                )
            if axes and line is not None and found.setdefault(line, axes) != axes:
                raise FusionError(
                    f"`fuse` leaves rows where they are, and a mesh splits the same rows of two "
                    f"operands over {', '.join(found[line])} and over {', '.join(axes)}. Place "
                    "them alike with `jax.reshard`."
                )
    return found


def _local(region: Region, axes: dict, mesh) -> tuple[int, ...]:
    """The sizes of lines on one device.

    Raises:
      FusionError: devices would have different numbers of rows.
    """
    parts = [
        math.prod(mesh.shape[axis] for axis in axes.get(k, ())) for k in range(len(region.sizes))
    ]
    if uneven := [f"{n} over {p}" for n, p in zip(region.sizes, parts, strict=True) if n % p]:
        raise FusionError(f"`fuse` needs as many rows on each device; found {', '.join(uneven)}.")
    return tuple(n // p for n, p in zip(region.sizes, parts, strict=True))


def _spec(lines: Lines, axes: dict) -> PartitionSpec:
    return PartitionSpec(*(axes.get(k) if k is not None else None for k in lines))


def _sharding_rule(operands: Sequence[Lines], results: Sequence[Lines], region: Region) -> str:
    """The names of all dims: rows have theirs in common, all others are alone."""
    alone = count()
    name = lambda k: f"row{k}" if k in region.rows else f"own{next(alone)}"
    side = lambda arrays: ", ".join(" ".join(map(name, lines)) for lines in arrays)
    return f"{side(operands)} -> {side(results)}"
