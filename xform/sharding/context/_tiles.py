"""What attention costs where: the tiles of a mask, counted by chunks of queries and of keys."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xform._compat import Jaxpr
from xform.jaxpr import intern
from xform.primitives._intervals import unknown
from xform.primitives._open import open_mod
from xform.primitives.block_map import EMPTY, block_map


@dataclass(frozen=True)
class Load:
    """How many tiles each device computes, with the keys of each other one.

    Attributes:
      tiles: `[devices, devices]`: those of device i's queries with the keys of device j, over all
        maps that there are.
    """

    tiles: np.ndarray

    @property
    def each(self) -> np.ndarray:
        """The tiles of each device."""
        return self.tiles.sum(1)

    @property
    def imbalance(self) -> float:
        """Those of the busiest device over the mean: what all others wait for is beyond 1."""
        return float(self.each.max() / self.each.mean()) if self.tiles.any() else 1.0

    @property
    def rounds(self) -> np.ndarray:
        """Those of the busiest device in each step of a ring, where all wait for all."""
        n = len(self.tiles)
        me = np.arange(n)
        return np.array([self.tiles[me, (me - step) % n].max() for step in range(n)])


def by_device(tiles: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Tiles between chunks, added up for devices that have them in this order."""
    n, m = order.shape
    sorted_ = tiles[np.ix_(order.ravel(), order.ravel())]
    return sorted_.reshape(n, m, n, m).sum((1, 3))


def tiles_by_chunk(
    mask: Callable | None, length: int, tile: int, chunk: int, batch: int = 1, heads: int = 1
) -> tuple[np.ndarray, bool]:
    """Counts the tiles of which a mask leaves something, between all chunks of positions.

    Args:
      mask: the mask, on positions; arrays that it reads may be traced, and are then taken to hold
        anything.
      length: positions.
      tile: queries and keys of a tile.
      chunk: positions of a chunk, a multiple of `tile`.
      batch, heads: how many maps there are of a mask that depends on these.

    Returns:
      `[length / chunk, length / chunk]`, queries by keys, the mean over batch entries and heads;
      and whether all that the mask reads is known: else the counts are the most that there can be.
    """
    count = -(-length // tile)
    group = max(1, chunk // tile)
    if mask is None:
        kinds, known = np.ones((1, count, count), bool), True
    else:
        kinds, known = _live(mask, length, tile, batch, heads)
    pad = -count % group
    kinds = np.pad(kinds, [(0, 0), (0, pad), (0, pad)])
    n = kinds.shape[1] // group
    return kinds.reshape(-1, n, group, n, group).mean(0, dtype=np.float64).sum((1, 3)), known


def _live(mask: Callable, length: int, tile: int, batch: int, heads: int):
    opened = open_mod("mask_mod", mask)
    arrays = [None if isinstance(x, Tracer) else np.asarray(x) for x in opened.arrays]
    types = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in opened.arrays)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    # In the order that block maps know: indices first.
    program = jax.make_jaxpr(lambda b, h, q, k, *xs: opened.of(xs)(b, h, q, k))
    program = intern(program(*[index] * 4, *types))
    read = {id(v) for eqn in program.eqns for v in eqn.invars}
    used = (id(v) in read for v in program.invars[:2])
    sizes = tuple(n if u else 1 for n, u in zip((batch, heads), used, strict=True))
    moving = tuple(x is not None for x in arrays)
    # Apart from whatever is being traced.
    with (
        jax.ensure_compile_time_eval(),
        jax.sharding.use_abstract_mesh(_NO_MESH),
        jax.default_device(_host()),
    ):
        run = _maps(program, types, moving, sizes, length, tile)
        indices = (np.arange(n, dtype=np.int32) for n in sizes)
        found = np.asarray(run(*indices, *(x for x in arrays if x is not None)))
    return found.reshape(-1, *found.shape[2:]), all(moving)


@lru_cache(maxsize=64)
def _maps(
    program: Jaxpr, types: tuple, moving: tuple, sizes: tuple, length: int, tile: int
) -> Callable:
    """Whether a mask leaves something of each tile, `[batch, heads, rows, cols]`, compiled once.

    The result is a function of batch entries, heads and those arrays that are `moving`; others
    may hold anything.
    """

    def live(b, h, *known):
        left = iter(known)
        each = zip(types, moving, strict=True)
        captures = [next(left) if m else unknown(t.shape, t.dtype) for t, m in each]
        lengths: Any = dict(q_len=length, kv_len=length, q_tile=tile, kv_tile=tile)
        return block_map(program, captures, b=b, h=h, **lengths) != EMPTY

    others = (None,) * sum(moving)
    over = jax.vmap(jax.vmap(live, (None, 0, *others)), (0, None, *others))
    indices = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in sizes)
    given = (t for t, m in zip(types, moving, strict=True) if m)
    return jax.jit(over).lower(*indices, *given).compile()


def _host() -> Any:
    """A CPU, which compiles a map sooner than a GPU; where there is none, what there is."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


_NO_MESH = jax.sharding.AbstractMesh((), ())
