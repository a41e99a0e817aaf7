"""Sizes of tiles, as data: by device and by what a call looks like."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work.

    A block owns queries and walks along the keys, or the other way round. Each of its warpgroups
    has its own part of what the block owns, and meets all that the block walks along.

    Attributes:
      warpgroups: how many of a block compute.
      q, kv: queries and keys of a tile, what one warpgroup works on at a time.
      stages: how many tiles of what it walks along are in shared memory.
      in_turns: whether the warpgroups issue their products in turns.
      by_keys: whether a block owns keys.
    """

    warpgroups: int = 2
    q: int = 64
    kv: int = 128
    stages: int = 2
    in_turns: bool = False
    by_keys: bool = False

    @property
    def rows(self) -> int:
        """Queries that a block meets at a time."""
        return self.q if self.by_keys else self.warpgroups * self.q

    @property
    def cols(self) -> int:
        """Keys that a block meets at a time."""
        return self.warpgroups * self.kv if self.by_keys else self.kv

    @property
    def shape(self) -> tuple[int, int]:
        """Of a tile in registers: what is owned comes first."""
        return (self.kv, self.q) if self.by_keys else (self.q, self.kv)


def tiles_of(qk_size: int, v_size: int) -> Tiles:
    """The tiles for heads of these sizes."""
    size = max(qk_size, v_size)
    return next(tiles for most, tiles in _H200 if size <= most)


_H200 = (
    (64, Tiles(warpgroups=3, in_turns=True)),
    (128, Tiles()),
    (256, Tiles(kv=64)),
)
"""By the largest head size: the fastest of those timed on an H200 (`benchmarks/RESULTS.md`)."""


def backward_tiles_of(qk_size: int, v_size: int) -> Tiles:
    """The tiles of the backward kernel for heads of these sizes."""
    del qk_size, v_size
    return Tiles(q=64, kv=64, by_keys=True)
