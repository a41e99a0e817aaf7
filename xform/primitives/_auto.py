"""What XLA's partitioner may do with a primitive whose rows are split over automatic mesh axes.

Under plain `jit`, no type says how arrays are split; the partitioner decides when it compiles, and
would take a loop over chunks of a split array apart into collectives. `local_rows` makes a lowering
one operation to it: each device computes on its own rows, and what is summed over rows is summed
over devices. Arrays that are split in another way the partitioner makes whole first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def local_rows(f: Callable, ins: Sequence[range], outs: Sequence[range]) -> Callable:
    """Returns `f` as one operation that the partitioner can split along rows, and no other way.

    Args:
      f: takes and returns arrays.
      ins, outs: for each operand and result, the dimensions that are rows; none of them for an
        array that all rows share.
    """
    from jax.experimental.custom_partitioning import custom_partitioning  # only where it is needed

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
