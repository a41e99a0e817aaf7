"""The picture of a mask: which tiles run, how full they are, what that costs."""

import html
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xform._compat import jaxpr_as_fun
from xform._show import axes
from xform.lowering._spec import EMPTY, FULL, PARTIAL
from xform.primitives._mods import take_apart
from xform.primitives._objects import Shape, static
from xform.primitives.block_map import block_map
from xform.primitives.masks._mask import MaskMod, as_mask

# Cells along a side of a text or HTML picture, and of one that is drawn; a longer side shows
# several tiles in one.
_CELLS, _PIXELS = 64, 1024
# Tiles whose kinds are found at a time, and partial tiles whose pairs are counted one by one.
_AT_ONCE, _COUNTED = 2**18, 2**14
_COLOURS = {EMPTY: "#f2f2ef", PARTIAL: "#f2a65a", FULL: "#2d6a8e"}
_NAMES = {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}
_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


@dataclass(frozen=True, repr=False)
class MaskView:
    """What a mask leaves of each tile, for one batch entry and one head.

    It prints as text, shows itself in notebooks (`_repr_html_`) and draws itself (`plot`). It holds
    at most 1,024 by 1,024 cells: of longer sequences, each is several tiles.

    Attributes:
      mask: the mask as text.
      kinds: int8 `[rows, cols]`: of each cell 0 if its tiles are empty, 2 if full, else 1.
      shares: float32 `[rows, cols]`, which share of its pairs each cell shows.
      counts: how many tiles are full, partial and empty.
      pairs: how many pairs of a query and a key the mask leaves.
      exact: whether all pairs were counted; of more than 16,384 partial tiles some are, evenly
        spaced, and `pairs`, `density` and `shares` are estimates.
      lengths: how many queries and keys there are.
      tile: how many of each make a tile.
      group: how many tiles make a cell, down and across.
      head_size: the size of a head, for the cost.
    """

    mask: str
    kinds: np.ndarray
    shares: np.ndarray
    counts: dict[str, int]
    pairs: int
    exact: bool
    lengths: tuple[int, int]
    tile: tuple[int, int]
    group: tuple[int, int]
    head_size: int

    @property
    def density(self) -> float:
        """The share of all pairs that the mask leaves; 0 where there are none."""
        return self.pairs / max(1, self.lengths[0] * self.lengths[1])

    @property
    def live(self) -> float:
        """The share of tiles that run: of a dense attention's time, what this one's takes."""
        return self._running / max(1, sum(self.counts.values()))

    @property
    def _running(self) -> int:
        return self.counts["full"] + self.counts["partial"]

    @property
    def flops(self) -> int:
        """FLOPs of the tiles that run, forward, of one head: 4 for each pair and element."""
        return 4 * self.head_size * self.tile[0] * self.tile[1] * self._running

    def __repr__(self) -> str:
        kinds, _ = self._cells()
        rows = ["".join(_SIGNS[int(kind)] for kind in row) for row in kinds]
        key = ", ".join(
            f"{_SIGNS[code]} {self.counts[name]:,} {name}" for code, name in _NAMES.items()
        )
        return "\n".join([self._title(), *rows, key, *self._summary()])

    def _title(self) -> str:
        (t, s), (q_tile, kv_tile) = self.lengths, self.tile
        title = f"{self.mask}: {t:,} queries x {s:,} keys, tiles of {q_tile} x {kv_tile}"
        return (
            title if self.group == (1, 1) else f"{title}, {self.group[0]} x {self.group[1]} a cell"
        )

    def _summary(self) -> list[str]:
        return [
            f"{self.live:.1%} of the tiles run, for {'' if self.exact else 'about '}"
            f"{self.density:.1%} of the pairs; the mask is asked in {self.counts['partial']:,}",
            f"{_flops(self.flops)} a head of size {self.head_size}, forward",
        ]

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Kinds and shares of at most `_CELLS` by `_CELLS` groups of cells."""
        group = _group(self.kinds.shape, _CELLS)
        kinds = _pooled_kinds(self.kinds, group)
        return kinds, _pooled(np.add, self.shares, group) / _sizes(self.kinds.shape, group)

    def plot(self, ax: Any = None) -> Any:
        """Draws the tiles with matplotlib.

        Args:
          ax: the axes to draw on; a figure of its own if None.

        Returns:
          The axes; `.figure.savefig(path)` keeps them.
        """
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Patch

        ax = axes(ax, 6, 6.6)
        colour = {code: np.array(to_rgb(c)) for code, c in _COLOURS.items()}
        image = np.stack([colour[code] for code in (EMPTY, PARTIAL, FULL)])[self.kinds]
        # The fuller a partial tile is, the stronger its colour.
        weight = np.where(self.kinds == PARTIAL, 0.35 + 0.65 * self.shares, 1)[..., None]
        image = weight * image + (1 - weight) * colour[EMPTY]
        (t, s), (q_tile, kv_tile) = self.lengths, self.tile
        rows, cols = self.kinds.shape
        q_tile, kv_tile = q_tile * self.group[0], kv_tile * self.group[1]
        extent = (0, cols * kv_tile, rows * q_tile, 0)
        ax.imshow(
            image, extent=extent, interpolation="nearest", aspect="equal" if t == s else "auto"
        )
        if max(rows, cols) <= _CELLS:
            ax.set_xticks(np.arange(1, cols) * kv_tile, minor=True)
            ax.set_yticks(np.arange(1, rows) * q_tile, minor=True)
            ax.grid(which="minor", color="white", linewidth=0.5)
            ax.tick_params(which="minor", length=0)
        ax.set(xlim=(0, s), ylim=(t, 0), xlabel="key", ylabel="query")
        ax.set_title("\n".join([self.mask, *self._summary()]), fontsize=8)
        labels = [
            Patch(
                facecolor=_COLOURS[code], edgecolor="0.7", label=f"{name} ({self.counts[name]:,})"
            )
            for code, name in _NAMES.items()
        ]
        ax.legend(
            handles=labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            borderaxespad=4,  # in heights of the font: below the label of the axis
            ncols=3,
            frameon=False,
        )
        return ax

    def _repr_html_(self) -> str:
        """The picture as one self-contained element, an SVG with its legend."""
        kinds, shares = self._cells()
        rows, cols = kinds.shape
        rects = "".join(
            f'<rect x="{j}" y="{i}" width="1.02" height="1.02" fill="{_COLOURS[int(kind)]}"'
            f"{f''' opacity="{0.35 + 0.65 * shares[i, j]:.2f}\"''' if kind == PARTIAL else ''}/>"
            for (i, j), kind in np.ndenumerate(kinds)
            if kind != EMPTY
        )
        key = "".join(
            f'<span style="background:{_COLOURS[code]};border:1px solid #bbb;padding:0 .6em">'
            f'</span><span style="margin:0 1em 0 .3em">{self.counts[name]:,} {name}</span>'
            for code, name in _NAMES.items()
        )
        text = "<br>".join(html.escape(line) for line in self._summary())
        return (
            f'<figure style="margin:0;font:13px sans-serif;max-width:420px">'
            f"<figcaption><b>{html.escape(self._title())}</b></figcaption>"
            f'<svg viewBox="0 0 {max(1, cols)} {max(1, rows)}" preserveAspectRatio="none" '
            f'width="400" height="{_height(rows, cols)}" role="img" '
            f'style="background:{_COLOURS[EMPTY]};border:1px solid #bbb">{rects}</svg>'
            f"<div>{key}</div><div>{text}</div></figure>"
        )


def _height(rows: int, cols: int) -> int:
    return min(800, max(40, round(400 * rows / max(1, cols))))


def _flops(n: float | int) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if n < 1000 or unit == "P":
            return f"{n:.4g} {unit}FLOP"
        n /= 1000
    raise AssertionError


def show(
    mask: MaskMod, queries: int, keys: int | None = None, *, b: int = 0, h: int = 0,
    tile: int | tuple[int, int] = 128, head_size: int = 64,
) -> MaskView:  # fmt: skip
    """Returns a picture of what a mask leaves of each tile.

    Args:
      mask: a mask object or a plain function.
      queries: how many there are, T.
      keys: how many there are, S; as many as queries if None.
      b, h: which batch entry and which query head is shown.
      tile: how many queries and keys make a tile; one number for both.
      head_size: the size of a head, for the cost.

    Raises:
      ValueError: the mask has arrays that are made for other lengths.

    >>> view = show(lambda b, h, q_idx, kv_idx: q_idx // 32 == kv_idx // 32, 64, tile=16)
    >>> view.counts, view.density
    ({'full': 8, 'partial': 0, 'empty': 8}, 0.5)
    """
    keys = queries if keys is None else keys
    queries = static("show(queries)", queries, least=0)
    keys = static("show(keys)", keys, least=0)
    each = tile if isinstance(tile, tuple | list) else (tile, tile)
    q_tile, kv_tile = (static("show(tile)", n) for n in each)
    mask = as_mask(mask)
    if wrong := mask.misfits(Shape(None, None, queries, keys)):
        raise ValueError(f"show: {'; '.join(wrong)}.")
    if any(isinstance(x, Tracer) for x in take_apart(None, mask, jnp.float32).context):
        raise TypeError(
            f"show: `{mask!r}` reads traced arrays, and a picture needs their values: call it "
            "outside of `jit`, `scan` and `vmap`."
        )
    strips = _Strips(mask, (b, h), (queries, keys), (q_tile, kv_tile))
    kinds, shares, counts, visible, exact = strips.cells()
    named = {name: int(counts[code]) for code, name in _NAMES.items()}
    return MaskView(
        repr(mask), kinds, shares, named, round(visible * q_tile * kv_tile), exact,
        (queries, keys), (q_tile, kv_tile), strips.group, head_size,
    )  # fmt: skip


class _Strips:
    """A mask's tiles, some rows of them at a time, so that no map of all is ever made."""

    def __init__(self, mask, at: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int]):
        self.mask, self.lengths, self.tile = mask, lengths, tile
        self.tiles = tuple(-(-n // size) for n, size in zip(lengths, tile, strict=True))
        self.group = _group(self.tiles, _PIXELS)
        multiple = self.group[0]
        self.rows = max(1, _AT_ONCE // max(1, self.tiles[1]) // multiple) * multiple
        b, h = at
        sizes: dict[str, Any] = dict(kv_len=lengths[1], q_tile=tile[0], kv_tile=tile[1])

        def kinds(mask, start, q_len):
            mods = take_apart(None, mask.shift(q=start), jnp.float32)
            return block_map(mods.mask, mods.context, b=b, h=h, q_len=q_len, **sizes)

        def visible(mask, *places):
            mods = take_apart(None, mask, jnp.float32)
            options = dict(b=b, h=h, q_len=lengths[0], **sizes)
            return _visible(mods.mask, mods.context, *places, **options)

        self._kinds, self._visible = jax.jit(kinds, static_argnums=2), jax.jit(visible)

    def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, bool]:
        """Looks at all tiles.

        Returns:
          Kinds and shares of cells; how many tiles there are of each kind; how many tiles' worth of
          pairs is seen; whether all of that was counted.
        """
        shape = tuple(-(-n // size) for n, size in zip(self.tiles, self.group, strict=True))
        kinds, shares = np.zeros(shape, np.int8), np.zeros(shape, np.float32)
        counts, visible, budget, exact = np.zeros(3, np.int64), 0.0, _COUNTED, True
        starts = range(0, self.tiles[0] if self.tiles[1] else 0, self.rows)
        for left, first in zip(range(len(starts), 0, -1), starts, strict=True):
            codes = self._codes(first)
            partial = np.nonzero(codes == PARTIAL)
            # What earlier strips left of the budget is for the others.
            step = max(1, -(-len(partial[0]) * left // max(1, budget)))
            part, seen = self._shares(first, codes, partial, step)
            budget, exact = budget - len(partial[0][::step]), exact and step == 1
            counts += np.bincount(codes.ravel(), minlength=3)
            visible += seen
            at = slice(first // self.group[0], -(-(first + len(codes)) // self.group[0]))
            kinds[at] = _pooled_kinds(codes, self.group)
            shares[at] = _pooled(np.add, part, self.group) / _sizes(codes.shape, self.group)
        return kinds, shares, counts, visible, exact

    def _codes(self, first: int) -> np.ndarray:
        """The kinds of the tiles of the strip whose first row is `first`."""
        start = first * self.tile[0]
        length = min(self.rows * self.tile[0], self.lengths[0] - start)
        return np.asarray(self._kinds(self.mask, np.int32(start), length))

    def _shares(self, first: int, codes: np.ndarray, partial, step: int):
        """The share of its pairs that each tile of a strip shows, and their sum.

        Every `step`-th of the tiles at `partial` is counted; the others are taken for their mean.
        """
        out = (codes == FULL).astype(np.float32)
        whole, number = float(np.sum(codes == FULL)), len(partial[0])
        if not number:
            return out, whole
        some = tuple(x[::step].astype(np.int32) for x in partial)
        # Rounded up to a power of two, with the last again: few programs are compiled.
        fill = (1 << (len(some[0]) - 1).bit_length()) - len(some[0])
        rows, cols = (np.pad(x, (0, fill), mode="edge") for x in some)
        seen = np.asarray(self._visible(self.mask, rows + np.int32(first), cols), np.float64)
        seen = seen[: len(some[0])] / (self.tile[0] * self.tile[1])
        out[partial] = seen.mean()
        out[some] = seen
        return out, whole + (float(seen.sum()) if step == 1 else float(seen.mean()) * number)


def _group(shape: tuple[int, ...], most: int) -> tuple[int, int]:
    """How many along each side make one of at most `most`."""
    rows, cols = (max(1, -(-n // most)) for n in shape)
    return rows, cols


def _pooled(f, x: np.ndarray, group: tuple[int, int]) -> np.ndarray:
    """`f` over groups of rows and columns."""
    for dim, size in enumerate(group):
        x = f.reduceat(x, np.arange(0, x.shape[dim], size), dim) if x.size else x
    return x


def _pooled_kinds(kinds: np.ndarray, group: tuple[int, int]) -> np.ndarray:
    low, high = (_pooled(f, kinds, group) for f in (np.minimum, np.maximum))
    return np.where(low == high, low, np.int8(PARTIAL))


def _sizes(shape: tuple[int, ...], group: tuple[int, int]) -> np.ndarray:
    """How many are in each group."""
    rows, cols = (
        np.minimum(size, n - np.arange(0, n, size)) for n, size in zip(shape, group, strict=True)
    )
    return rows[:, None] * cols[None]


def _visible(mask, context, rows, cols, *, b, h, q_len, kv_len, q_tile, kv_tile):
    """How many pairs of the tiles at `rows` and `cols` the mask leaves."""
    program = jaxpr_as_fun(mask)
    point = lambda q, k: program(jnp.int32(b), jnp.int32(h), q, k, *context)[0]

    def tile(at):
        q, k = at[0] * q_tile + jnp.arange(q_tile), at[1] * kv_tile + jnp.arange(kv_tile)
        seen = jax.vmap(jax.vmap(point, (None, 0)), (0, None))(q, k)
        return jnp.sum(seen & (q < q_len)[:, None] & (k < kv_len)[None], dtype=jnp.int32)

    return jax.lax.map(tile, (rows, cols))
