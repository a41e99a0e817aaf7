"""Rows and diagonals of a grid of tiles: which tiles are live, and what their sums belong to."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._spec import EMPTY, PARTIAL
from xform.lowering.mosaic_gpu._classes import ROW
from xform.lowering.mosaic_gpu._tuning import Tiles


@dataclasses.dataclass(frozen=True)
class Grid:
    """The lines of a grid of tiles.

    Attributes:
      along: ROW, a line is a row; BAND, a diagonal.
      rows, cols: how many rows and columns of tiles.
      steep: queries that a diagonal advances with a column, in rows.
    """

    along: str
    rows: int
    cols: int
    steep: int

    @classmethod
    def of(cls, along: str, lengths: tuple[int, int], tiles: Tiles) -> Grid:
        rows, cols = -(-lengths[0] // tiles.rows), -(-lengths[1] // tiles.cols)
        return cls(along, rows, cols, tiles.cols // tiles.rows)

    @property
    def lines(self) -> int:
        return self.rows if self.along == ROW else self.rows + self.steep * (self.cols - 1)

    @property
    def first(self) -> int:
        """The row in which the first line would meet column 0."""
        return 0 if self.along == ROW else -self.steep * (self.cols - 1)

    def row(self, line, col):
        """In which row of tiles a line meets a column, if it does."""
        return line if self.along == ROW else line + self.first + self.steep * col

    def lists(self, codes) -> tuple[jax.Array, jax.Array]:
        """Of codes `[..., R, C]`: how many live tiles a line has, and which, `[..., L, C]`.

        A tile is twice its column, plus 1 for a partial one.
        """
        line = lax.broadcasted_iota(jnp.int32, (self.lines, self.cols), 0)
        col = lax.broadcasted_iota(jnp.int32, (self.lines, self.cols), 1)
        row = self.row(line, col)
        there = (row >= 0) & (row < self.rows)
        at = jnp.clip(row, 0, self.rows - 1), col
        codes = jnp.asarray(codes)[..., *at]
        there, col = (jnp.broadcast_to(x, codes.shape) for x in (there, col))
        live = there & (codes != EMPTY)
        order = jnp.argsort(~live, axis=-1, stable=True)
        tiles = jnp.take_along_axis(2 * col + (codes == PARTIAL), order, -1)
        return live.sum(-1, dtype=jnp.int32), tiles.astype(jnp.int32)

    def added(self, sums, q_len: int, kv_len: int):
        """The sums of tiles `[..., L, k, q]`, those of each query `[..., T]` or distance.

        Distances `q - k` go from `1 - S` to `T - 1`.
        """
        if self.along == ROW:
            return sums.sum(-2).reshape(*sums.shape[:-3], -1)[..., :q_len]
        keys, queries = sums.shape[-2:]
        # Row i of k - 1 - i, one longer than what is kept of it, shifts the next by one: element
        # (k, q) comes to the column of its distance.
        flat = jnp.pad(sums[..., ::-1, :], [(0, 0)] * (sums.ndim - 1) + [(0, keys)])
        flat = flat.reshape(*sums.shape[:-2], -1)[..., :-keys]
        by_distance = flat.reshape(*sums.shape[:-2], keys, -1).sum(-2)
        # Of a line, distances from 1 - k on, in parts as long as lines are apart.
        parts = jnp.pad(by_distance, [(0, 0)] * (sums.ndim - 2) + [(1, 0)])
        parts = parts.reshape(*parts.shape[:-1], -1, queries)
        count = parts.shape[-2]
        lead_dims = [(0, 0)] * (sums.ndim - 3)
        shifted = [
            jnp.pad(parts[..., n, :], [*lead_dims, (n, count - 1 - n), (0, 0)])
            for n in range(count)
        ]
        total = functools.reduce(jnp.add, shifted).reshape(*sums.shape[:-3], -1)
        start = self.first * queries - keys  # the distance of the first
        return total[..., 1 - kv_len - start : q_len - start]
