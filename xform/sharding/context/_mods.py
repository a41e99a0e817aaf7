"""A user's mods, called on one device with the positions of the whole sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from xform.primitives._open import Opened, open_mod
from xform.sharding.context.layouts import Layout

type Place = Callable[[ArrayLike], ArrayLike]
"""Of an index on a device, the position in the sequence."""


def place(layout: Layout, device: ArrayLike | None) -> Place:
    """Returns where a device's indices stand; those of all devices, side by side, for None.

    One run of positions is a start and an index, which keeps differences of positions what they
    are to a kernel. Several are a table, of which a block map sees the ends of each tile.
    """
    if device is None:
        return (lambda i: i) if layout.in_order else _in_table(jnp.asarray(layout.permutation))
    chunks = layout.at(device).astype(jnp.int32)
    if chunks.shape[0] == 1:
        start = chunks[0] * layout.chunk
        return lambda i: start + i
    within = jnp.arange(layout.chunk, dtype=jnp.int32)
    return _in_table((chunks[:, None] * layout.chunk + within[None]).reshape(-1))


def _in_table(positions: Array) -> Place:
    there = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return lambda i: positions.at[i].get(**there)


class Opens(NamedTuple):
    """Both mods, with the arrays that they read in sight.

    Attributes:
      score, mask: None where there is none.
    """

    score: Opened | None
    mask: Opened | None

    @classmethod
    def of(cls, score_mod: Callable | None, mask_mod: Callable | None, wide) -> "Opens":
        """Traces the mods.

        Args:
          score_mod, mask_mod: the user's.
          wide: dtype of scores.
        """
        score = jax.ShapeDtypeStruct((), wide)
        return cls(
            None if score_mod is None else open_mod("score_mod", score_mod, score),
            None if mask_mod is None else open_mod("mask_mod", mask_mod),
        )

    @property
    def arrays(self) -> list[Array]:
        """What both read."""
        return [x for opened in self if opened is not None for x in opened.arrays]

    def at(self, queries: Place, keys: Place) -> Callable:
        """Returns the mods at the indices of some queries and keys, as functions of `arrays`."""

        def mods(arrays: Sequence[Array]):
            count = len(self.score.arrays) if self.score else 0
            return (
                None if self.score is None else moved(self.score.of(arrays[:count]), queries, keys),
                None if self.mask is None else moved(self.mask.of(arrays[count:]), queries, keys),
            )

        return mods


def moved(mod: Callable | None, queries: Place, keys: Place, head: ArrayLike = 0):
    """Returns a mod at the indices of some queries and keys, and of heads from one on."""
    if mod is None:
        return None

    def at(*args):
        *score, b, h, q, k = args
        return mod(*score, b, h + head, queries(q), keys(k))

    return at
