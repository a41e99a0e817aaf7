"""Sizes of tiles, as data: by device, and by what a call looks like.

`tiles.json` is a table that `benchmarks/attention_tune.py` made on the device: nothing is timed in
a user's program, and a program runs the same kernel every day. A call takes its class's tiles, or
smaller ones where its mods bring more vectors than these leave room for.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from importlib import resources

from xform.lowering.mosaic_gpu._program import BAND, COL, ROW, TILE, TileProgram

SIZES, LENGTHS, MODS = (64, 128, 256), ("short", "long"), ("plain", "mask", "score", "vectors")
"""The classes of a call: its larger head size is at most that; see `length_class`, `mods_class`."""

_LONG = 8192
_DEVICE = "NVIDIA H200"
# Bytes of shared memory that one block may have, and the units that they come in.
_SHARED, _UNIT = 227 * 1024, 1024
# 32-bit registers of a thread, by the number of computing warpgroups, and what the tiles leave free
# for all else: addresses, statistics, a mod's own values.
REGISTERS, _SPARE = {2: 240, 3: 160}, 32
MOST_IN_EIGHT = 128
"""The largest head size of values in 8 bits: their sums take registers twice."""
# Columns of dK and dV that one warpgroup has registers for.
_NARROW = 256
# Tiles of a batch entry that are on their way at a time.
_MOST_STAGES = 3


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work.

    A block owns queries and walks along the keys, or the other way round. Each of its warpgroups
    has its own part of what the block owns, and meets all that the block walks along.

    Attributes:
      warpgroups: how many of a block compute.
      q, kv: queries and keys of a tile, what one warpgroup works on at a time; keys are 64 n, which
        a product of weights and values takes.
      stages: how many tiles of what it walks along are in shared memory.
      in_turns: whether the warpgroups issue their products in turns.
      by_keys: whether a block owns keys.
      persistent: whether there are only as many blocks as run at a time, each with several rows.
    """

    warpgroups: int = 2
    q: int = 64
    kv: int = 128
    stages: int = 2
    in_turns: bool = False
    by_keys: bool = False
    persistent: bool = False

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

    def fit(
        self, qk_size: int, v_size: int, vectors: Sequence[str] = (), *, eight: bool = False
    ) -> bool:
        """Whether they fit into registers and shared memory.

        Args:
          qk_size, v_size: head sizes.
          vectors: COL or BAND for each vector that travels with the keys, and TILE for each array
            that is looked up.
          eight: whether numbers of 8 bits are multiplied, whose sums take registers twice.
        """
        width, units = (1, (32, 64)) if eight else (2, (16, 16))
        sizes = zip((qk_size, v_size), units, strict=True)
        qk_size, v_size = (-(-size // unit) * unit for size, unit in sizes)  # they are padded
        # The output's tile and the scores' in float32, the weights' as they are multiplied, over
        # 128 threads.
        # What is looked up is another tile in float32, of which one half is needed at a time.
        looked_up = 2 * vectors.count(TILE) * self.kv
        sums = 8 * v_size if eight else 4 * v_size
        tile = self.q * (sums + 4 * self.kv + width * self.kv + looked_up) // (4 * 128)
        if tile + _SPARE > REGISTERS[self.warpgroups]:
            return False
        out = min(2 if v_size <= 128 else 1, max(1, v_size // 64))
        length = {COL: self.kv, BAND: self.kv + self.rows, TILE: 0}
        buffers = [
            width * self.rows * qk_size,
            width * self.stages * self.kv * qk_size,
            width * self.stages * self.kv * v_size,
            2 * self.rows * out * 64,
            *[4 * self.rows] * 3,
            *[4 * self.stages * length[vector] for vector in vectors],
            2 * _UNIT,  # what reductions may take
            _UNIT,  # barriers
        ]
        return sum(math.ceil(size / _UNIT) for size in buffers) * _UNIT <= _SHARED


def length_class(kv_len: int) -> str:
    """The class of a number of keys."""
    return "short" if kv_len <= _LONG else "long"


def mods_class(programs: Sequence[TileProgram | None]) -> str:
    """The class of `(score, mask, dropout)`: what costs most of what the kernel does beside."""
    score, mask, dropout = programs
    if vectors_of(programs):
        return "vectors"
    return "score" if score or dropout else "mask" if mask else "plain"


def vectors_of(programs: Sequence[TileProgram | None]) -> list[str]:
    """What the programs read that travels with the keys, or is looked up."""
    operands = [operand for program in programs if program for operand in program.operands]
    return [operand.pair for operand in operands if operand.pair in (COL, BAND, TILE)]


def tiles_of(
    programs: Sequence[TileProgram | None], kv_len: int, qk_size: int, v_size: int,
    device: str | None = None, *, eight: bool = False,
) -> Tiles:  # fmt: skip
    """Returns the tiles for a call.

    Args:
      programs: score, mask and dropout.
      kv_len, qk_size, v_size: S, D and V.
      device: the kind of the device, as JAX calls it; None, or one that was never measured, is
        taken for an H200: all Hoppers have its multiprocessors.
      eight: whether numbers of 8 bits are multiplied.

    Raises:
      NotImplementedError: none fit, for all the vectors that the programs read.
    """
    size = next(size for size in SIZES if max(qk_size, v_size) <= size)
    tuned = _table().get(device or _DEVICE, _table()[_DEVICE])["forward"]
    tiles = Tiles(**tuned[key(size, length_class(kv_len), mods_class(programs))])
    vectors = vectors_of(programs)
    if eight:
        tiles = Tiles(warpgroups=2, q=64, kv=128, stages=4, in_turns=True, persistent=True)
    for smaller in _smaller(tiles):
        if smaller.fit(qk_size, v_size, vectors, eight=eight):
            return smaller
    raise NotImplementedError(
        f"{len(vectors)} vectors that travel with the keys (reads by key, or by query minus key); "
        "so many do not fit into shared memory"
    )


def key(size: int, length: str, mods: str) -> str:
    """The name of a class in the table."""
    return f"{size} {length} {mods}"


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """The tiles, and others with fewer keys."""
    yield tiles
    yield from (dataclasses.replace(tiles, stages=2, kv=kv) for kv in (128, 64) if kv < tiles.kv)


@functools.cache
def _table() -> dict:
    """By device: how it was made, and by pass and class the fields of `Tiles`."""
    return json.loads(resources.files(__package__).joinpath("tiles.json").read_text())


def backward_tiles_of(qk_size: int, v_size: int) -> Tiles:
    """The tiles of the backward kernel for heads of these sizes.

    One warpgroup computes scores where dK and dV are too wide for the registers of one.
    """
    wide = -(-qk_size // 32) * 32 + v_size > _NARROW
    return Tiles(warpgroups=1 if wide else 2, q=64, kv=64, by_keys=True)


PAIR_TILES = Tiles(warpgroups=2, q=64, kv=64, by_keys=True)
"""Those of the kernels that sum what pairs, queries or distances read, but for their stages."""


def pair_tiles_of(
    programs: Sequence[TileProgram | None], qk_size: int, v_size: int
) -> Tiles | None:
    """The tiles of the kernel of pairs, whose shared memory holds two tiles of each side a stage.

    None where there are too many vectors that travel with the queries.
    """
    tiles = PAIR_TILES
    width = {ROW: tiles.rows, BAND: tiles.rows + tiles.cols}
    operands = [operand for program in programs if program for operand in program.operands]
    stage = 2 * (tiles.rows + tiles.cols) * (qk_size + v_size)
    stage += 4 * (3 * tiles.rows + sum(width.get(operand.pair, 0) for operand in operands))
    stages = min((_SHARED - 4 * _UNIT) // stage, _MOST_STAGES)
    return dataclasses.replace(tiles, stages=stages) if stages else None
