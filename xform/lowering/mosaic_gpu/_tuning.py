"""Sizes of tiles, as data: by device and by what a call looks like."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work.

    Attributes:
      warpgroups: how many of a block compute.
      q: queries of one warpgroup.
      kv: keys of one tile.
      stages: key tiles in shared memory.
      in_turns: whether the warpgroups issue their products in turns.
    """

    warpgroups: int = 2
    q: int = 64
    kv: int = 128
    stages: int = 2
    in_turns: bool = False

    @property
    def rows(self) -> int:
        """Queries of one block."""
        return self.warpgroups * self.q


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
