"""Where each choice of a token travels: integers alone, the same whatever is in the stream.

Tokens come in groups, and a group's choices in an order: all first choices, then all second ones,
each by position. A *bin* is what has a fixed number of places for each group: an expert where there
is a capacity, else a device (with all places that could be needed). Within a bin, choices lie by
expert, then by their order, from the first place on: so what is in a bin is known from counts.

Everything is a sort, sums and gathers by indices that are all different, forward and backward, so
that results are the same bits every time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Integer

from xform.sharding.experts._routing import counts


class Places(NamedTuple):
    """Of G groups of A choices, in bins that have so many places for each group.

    Attributes:
      choice: Which choice, of all `G · A`, is in each place; a number beyond where there is none.
      place: In which place, of all, each choice is; a number beyond where it has none.
      kept: How many choices of each expert have a place.
    """

    choice: Integer[Array, "bins G places"]
    place: Integer[Array, "G A"]
    kept: Integer[Array, "G E"]


def places(expert: Integer[Array, "G A"], experts: int, bins: int, size: int) -> Places:
    """Returns where choices go.

    Args:
      expert: The expert of each choice, in the order in which they are given places.
      experts: How many there are, E.
      bins: How many bins share them, evenly and in order.
      size: How many places a bin has for a group.

    >>> found = places(jnp.array([[1, 0, 1, 1]]), experts=2, bins=2, size=2)
    >>> found.choice[:, 0].tolist(), found.place.tolist(), found.kept.tolist()
    ([[1, 5], [0, 2]], [[2, 0, 3, 7]], [[1, 2]])
    """
    G, A = expert.shape
    group = jnp.arange(G, dtype=jnp.int32)
    order = jnp.argsort(expert, 1, stable=True).astype(jnp.int32)
    rank = jnp.argsort(order, 1).astype(jnp.int32)
    found = counts(expert, experts).reshape(G, bins, experts // bins)
    ends = jnp.cumsum(found, 2)
    in_bin = ends[:, :, -1]
    first = jnp.cumsum(in_bin, 1) - in_bin

    bin_of = expert // (experts // bins)
    within = rank - jnp.take_along_axis(first, bin_of, 1)
    slot = (bin_of * G + group[:, None]) * size + within
    nowhere = bins * G * size + jnp.arange(G * A, dtype=jnp.int32).reshape(G, A)

    at = jnp.arange(size, dtype=jnp.int32)[None, None]
    place = (first[:, :, None] + at).reshape(G, bins * size)
    choice = jnp.take_along_axis(order, jnp.minimum(place, A - 1), 1) + group[:, None] * A
    nothing = G * A + jnp.arange(G * bins * size, dtype=jnp.int32).reshape(G, bins, size)
    choice = jnp.where(at < in_bin[:, :, None], choice.reshape(G, bins, size), nothing)

    ends = jnp.minimum(ends, size)
    kept = jnp.diff(ends, axis=2, prepend=0).reshape(G, experts)
    return Places(choice.swapaxes(0, 1), jnp.where(within < size, slot, nowhere), kept)


def by_expert(kept: Integer[Array, "n E"], size: int) -> Integer[Array, "n size"]:
    """Returns the expert of each place in n bins, of which so many are taken; E where none."""
    ends = jnp.cumsum(kept, 1)
    at = jnp.arange(size, dtype=jnp.int32)[None, :, None]
    return jnp.sum(at >= ends[:, None], 2, dtype=jnp.int32)


def digits(kept: Integer[Array, "n E"], size: int, width: int) -> Integer[Array, "n rows width"]:
    """Returns counts up to `size` as numbers to base 256, which bfloat16 and wider hold.

    They fill rows of a stream, in front of what they count, and travel with it.
    """
    weight = _weights(size)
    found = (kept[:, :, None] // weight[None, None] % 256).reshape(kept.shape[0], -1)
    return jnp.pad(found, ((0, 0), (0, -found.shape[1] % width))).reshape(len(kept), -1, width)


def undigits(rows: Array, experts: int, size: int) -> Integer[Array, "n E"]:
    """Returns the counts that `digits` was given, from numbers of any dtype."""
    weight = _weights(size)
    flat = rows.reshape(rows.shape[0], -1)[:, : experts * len(weight)].astype(jnp.int32)
    parts = flat.reshape(-1, experts, len(weight))
    return jnp.sum(parts * weight[None, None], 2, dtype=jnp.int32)


def _weights(size: int) -> Integer[Array, " digits"]:
    n = max(1, (size.bit_length() + 7) // 8)
    return 256 ** jnp.arange(n, dtype=jnp.int32)
