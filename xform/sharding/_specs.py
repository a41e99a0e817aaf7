"""What a `PartitionSpec` says, dimension by dimension, and which axes there are to say it of."""

from jax import lax
from jax.sharding import PartitionSpec as P


def is_spec(x) -> bool:
    """Whether it is a leaf of a tree of specs, which JAX takes for a tuple."""
    return isinstance(x, P)


def axes_by_dim(spec: P, ndim: int) -> list[tuple[str, ...]]:
    """Returns the axes that split each dimension, outermost first."""
    names = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    return names + [()] * (ndim - len(names))


def split_dim(spec: P, axis: str) -> int:
    """Returns the dimension that the axis splits, or -1."""
    dims = enumerate(axes_by_dim(spec, len(spec)))
    return next((dim for dim, axes in dims if axis in axes), -1)


def is_bound(axis: str) -> bool:
    """Whether the axis is one of a `jax.shard_map` around this call."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True
