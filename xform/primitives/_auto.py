"""What XLA's partitioner may do with a primitive whose rows are split over automatic mesh axes.

Under plain `jit`, no type says how arrays are split; the partitioner decides when it compiles, and
would take a loop over chunks of a split array apart into collectives. `local_rows` makes a lowering
one operation to it: each device computes on its own rows, and what is summed over rows is summed
over devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec


def local_rows(f: Callable, ins: Sequence[range], outs: Sequence[range], name: str) -> Callable:
    """Returns `f` as one operation that the partitioner can split along rows, and no other way.

    Args:
      f: takes and returns arrays.
      ins, outs: for each operand and result, the dimensions that are rows; none of them for an
        array that all rows share.
      name: what an error calls it.

    Raises:
      NotImplementedError: when it is compiled, if an array is split along another dimension.
    """
    from jax.experimental.custom_partitioning import custom_partitioning

    def partition(mesh, args, results):
        split = [tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in args]
        rows = next(tuple(s[d] for d in r) for s, r in zip(split, ins, strict=True) if r)
        if wrong := [
            f"{x.dtype}{list(x.shape)} over {x.sharding.spec}"
            for x, s, r in zip(args, split, ins, strict=True)
            if any(axis is not None for d, axis in enumerate(s) if d not in r)
        ]:
            raise NotImplementedError(
                f"{name} got arrays that are split along other dimensions than its rows: "
                f"{', '.join(wrong)}. Make them whole before, with `jax.lax."
                "with_sharding_constraint`, or call it inside `jax.shard_map`."
            )
        axes = tuple(
            a for axis in rows if axis for a in ([axis] if isinstance(axis, str) else axis)
        )

        def local(*args):
            values = f(*args)
            whole = lambda y, r: y if r or not axes else lax.psum(y, axes)
            return [whole(y, r) for y, r in zip(values, outs, strict=True)]

        def placed(x, r):
            spec = [None] * x.ndim
            for d, axis in zip(r, rows, strict=False):
                spec[d] = axis
            return NamedSharding(mesh, PartitionSpec(*spec))

        pairs = lambda xs, rs: [placed(x, r) for x, r in zip(xs, rs, strict=True)]
        return mesh, local, pairs(results, outs), tuple(pairs(args, ins))

    def whole(*args):
        g = custom_partitioning(f)
        shapes = jax.eval_shape(f, *args)
        fresh = count()
        factors = lambda x, r: [
            f"r{list(r).index(d)}" if d in r else f"x{next(fresh)}" for d in range(x.ndim)
        ]
        side = lambda xs, rs: ", ".join(
            " ".join(factors(x, r)) for x, r in zip(xs, rs, strict=True)
        )
        g.def_partition(partition, sharding_rule=f"{side(args, ins)} -> {side(shapes, outs)}")
        return g(*args)

    return whole


def axis_names(spec) -> tuple[str, ...]:
    """The mesh axes of a partition, a name, some names or None for each dimension."""
    dims = [() if d is None else d if isinstance(d, tuple) else (d,) for d in spec]
    return tuple(axis for dim in dims for axis in dim)
