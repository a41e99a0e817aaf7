"""Random numbers that belong to a place in the whole array, not to a device.

`jax.random` draws number i of an array from its key and i alone, so that a compiler may split the
array and every device draws its part: under `jax.jit`, parameters are bitwise the same on every
mesh. Inside `jax.shard_map` a device knows its part alone: the key that all share gives all the
same numbers, and a key of its own gives numbers that depend on the mesh. `local_key` is a key that
knows where in the whole array a device's part lies:

    number at (i_0, i_1, …) of the part = number at (start_0 + i_0, start_1 + i_1, …) of the whole

It holds the words of the shared key and where the part starts, or where each of its rows is. From
these its generator counts the place in the whole array, in 64 bits, and hashes that as JAX's own
does.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from xform._compat import define_prng_impl
from xform.lowering._dropout import threefry
from xform.primitives._rules import join_axes
from xform.sharding._specs import axes_by_dim


def local_key(
    key: jax.Array,
    shape: Sequence[int],
    spec: P,
    *,
    positions: Mapping[int, jax.Array] = MappingProxyType({}),
) -> jax.Array:
    """Returns a key with which `jax.random` draws this device's part of an array.

    What is drawn with the result, in the part's shape, is bitwise what is drawn with `key` in the
    shape of the whole and then split, on any mesh. To be called inside `jax.shard_map`.

    Args:
      key: A threefry key (JAX's default), the same on all devices.
      shape: The shape of the whole array.
      spec: How it is split.
      positions: By dimension, where this device's part stands in the whole, if not one part after
        the other; under context parallelism `{1: layout.positions("cp")}`.

    Returns:
      A key for numbers of the part's shape alone: drawing another raises.

    Raises:
      ValueError: `shape` is no multiple of what splits it, or has a dimension of 2**32 or more; or
        there are other positions than a part has.
      TypeError: `key` is no threefry key, or JAX's threefry isn't set to be partitionable.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> def draw(key):
    ...     return jax.random.normal(local_key(key, (8, 3), P("dp")), (2, 3))
    >>> key = jax.random.key(0)
    >>> f = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=P("dp"))
    >>> key = jax.device_put(key, jax.NamedSharding(mesh, P()))
    >>> bool((f(key) == jax.random.normal(jax.random.key(0), (8, 3))).all())
    True
    """
    if str(jax.random.key_impl(key)) != "threefry2x32" or not jax.config.jax_threefry_partitionable:
        raise TypeError(
            f"`local_key` needs a threefry key, with `jax_threefry_partitionable` on; found a key "
            f"of {jax.random.key_impl(key)}, and {jax.config.jax_threefry_partitionable=}."
        )
    splits = axes_by_dim(spec, len(shape))
    counts = [lax.axis_size(axes) if axes else 1 for axes in splits]
    if any(s % n or s >= 2**32 for s, n in zip(shape, counts, strict=True)):
        raise ValueError(
            f"`local_key`: {tuple(shape)} can't be split by {spec}, into {tuple(counts)} parts of "
            "less than 2**32 each: pad the array, or change the mesh."
        )
    part = tuple(s // n for s, n in zip(shape, counts, strict=True))
    sizes = {dim: jnp.shape(where) for dim, where in positions.items()}
    if sizes != {dim: part[dim : dim + 1] for dim in positions}:
        raise ValueError(
            f"`local_key` got positions of shapes {sizes} by dimension; needed is one for each row "
            f"of this device's part {part} of {tuple(shape)}."
        )
    places = [lax.axis_index(axes) if axes else 0 for axes in splits]
    starts = [jnp.uint32(i * n)[None] for i, n in zip(places, part, strict=True)]
    where = [positions[d].astype(jnp.uint32) if d in positions else x for d, x in enumerate(starts)]
    words = jnp.concatenate(join_axes([jax.random.key_data(key), *where]))
    impl = _generator(tuple(shape), part, tuple(sorted(positions)))
    return jax.random.wrap_key_data(words, impl=impl)


def dropout(
    x: jax.Array,
    rate: float,
    key: jax.Array,
    shape: Sequence[int],
    spec: P,
    *,
    positions: Mapping[int, jax.Array] = MappingProxyType({}),
) -> jax.Array:
    """Returns `x` with numbers set to 0 with probability `rate`, and others divided by `1 - rate`.

    Which ones it is, is bitwise the same on every mesh.

    Args:
      x: This device's part.
      rate: At least 0 and below 1.
      key, shape, spec, positions: As of `local_key`.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=2, devices=jax.devices()[:2])
    >>> f = lambda x, key: dropout(x, 0.5, key, (4, 3), P("dp"))
    >>> f = jax.shard_map(f, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    >>> place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    >>> out = f(place(jnp.ones((4, 3)), P("dp")), place(jax.random.key(0), P()))
    >>> sorted({*out.ravel().tolist()})
    [0.0, 2.0]
    """
    if not 0 <= rate < 1:
        raise ValueError(f"`dropout` needs a rate of at least 0 and below 1; found {rate=}")
    at = local_key(key, shape, spec, positions=positions)
    stays = jax.random.bernoulli(at, 1 - rate, x.shape)
    return jnp.where(stays, x / (1 - rate), 0)


@lru_cache
def _generator(shape: tuple[int, ...], part: tuple[int, ...], listed: tuple[int, ...]):
    """A generator of keys: two words of a threefry key, and of each dimension where the part is.

    That is where it starts, or, if the dimension is `listed`, where each of its rows is.
    """
    counts = [part[dim] if dim in listed else 1 for dim in range(len(part))]
    ends = [2 + sum(counts[: dim + 1]) for dim in range(len(part))]
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]

    def random_bits(words, width: int, asked: tuple[int, ...]):
        if tuple(asked) != part:
            raise ValueError(
                f"a key of `local_key` for parts of shape {part} was asked for {tuple(asked)}: "
                "draw one number for each of the part, with a key for each array."
            )
        high = low = jnp.zeros(part, jnp.uint32)
        for dim, stride in enumerate(strides):
            index = words[ends[dim] - counts[dim] : ends[dim]]
            index = lax.broadcast_in_dim(index, part, (dim,))
            if dim not in listed:
                index += lax.broadcasted_iota(jnp.uint32, part, dim)
            high, low = _add((high, low), _times(index, stride))
        x, y = threefry((words[0], words[1]), (high, low))
        if width == 64:
            return (x.astype(jnp.uint64) << 32) | y.astype(jnp.uint64)
        return (x ^ y).astype(f"uint{width}")

    def with_starts(change):
        def changed(words, *args):
            key = jax.random.wrap_key_data(words[:2], impl="threefry2x32")
            new = jax.random.key_data(change(key, *args))
            starts = jnp.broadcast_to(words[2:], (*new.shape[:-1], sum(counts)))
            return jnp.concatenate(join_axes([new, starts]), axis=-1)

        return changed

    def seed(_):
        raise TypeError("a key of `local_key` is made from another, not from a seed")

    return define_prng_impl(
        key_shape=(2 + sum(counts),), seed=seed, random_bits=random_bits,
        split=with_starts(jax.random.split), fold_in=with_starts(jax.random.fold_in),
        name=f"threefry2x32 of {part} in {shape}", tag="part",
    )  # fmt: skip


type Words = tuple[jax.Array, jax.Array]


def _times(x: jax.Array, stride: int) -> Words:
    """High and low word of a 32-bit number times a 64-bit one, by halves of 16 bits."""
    high, low = divmod(stride, 2**32)
    half = jnp.uint32(0xFFFF)
    a, b = x >> 16, x & half
    c, d = jnp.uint32(low >> 16), jnp.uint32(low & 0xFFFF)
    middle = a * d + (b * d >> 16)
    other = (middle & half) + b * c
    above = a * c + (middle >> 16) + (other >> 16)
    return above + x * jnp.uint32(high), x * jnp.uint32(low)


def _add(x: Words, y: Words) -> Words:
    low = x[1] + y[1]
    return x[0] + y[0] + (low < y[1]).astype(jnp.uint32), low
