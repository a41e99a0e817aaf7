"""The picture of a mask: which tiles run, how full they are, what that costs."""

import html
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._compat import jaxpr_as_fun
from xform._show import axes
from xform.lowering._spec import EMPTY, FULL, PARTIAL
from xform.primitives._mods import take_apart
from xform.primitives._objects import Shape
from xform.primitives.block_map import block_map
from xform.primitives.masks._mask import MaskMod, as_mask

# Cells along a side of a text or HTML picture; a longer side shows several tiles in one.
_CELLS = 64
_COLOURS = {EMPTY: "#f2f2ef", PARTIAL: "#f2a65a", FULL: "#2d6a8e"}
_NAMES = {FULL: "full", PARTIAL: "partial", EMPTY: "empty"}
_SIGNS = {EMPTY: "·", PARTIAL: "▒", FULL: "█"}


@dataclass(frozen=True, repr=False)
class MaskView:
    """What a mask leaves of each tile, for one batch entry and one head.

    It prints as text, shows itself in notebooks (`_repr_html_`) and draws itself (`plot`).

    Attributes:
      mask: the mask as text.
      kinds: int8 `[rows, cols]`, 0 for an empty tile, 1 for a partial, 2 for a full one.
      shares: float `[rows, cols]`, which share of its pairs each tile shows.
      lengths: how many queries and keys there are.
      tile: how many of each make a tile.
      head_size: the size of a head, for the cost.
    """

    mask: str
    kinds: np.ndarray
    shares: np.ndarray
    lengths: tuple[int, int]
    tile: tuple[int, int]
    head_size: int

    @property
    def counts(self) -> dict[str, int]:
        """How many tiles are full, partial and empty."""
        return {name: int(np.sum(self.kinds == code)) for code, name in _NAMES.items()}

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key the mask leaves."""
        return round(float(self.shares.sum()) * self.tile[0] * self.tile[1])

    @property
    def density(self) -> float:
        """The share of all pairs that the mask leaves; 0 where there are none."""
        return self.pairs / max(1, self.lengths[0] * self.lengths[1])

    @property
    def live(self) -> float:
        """The share of tiles that run: of a dense attention's time, what this one's takes."""
        return float(np.mean(self.kinds != EMPTY)) if self.kinds.size else 0.0

    @property
    def flops(self) -> int:
        """FLOPs of the tiles that run, forward, of one head: 4 for each pair and element."""
        live = int(np.sum(self.kinds != EMPTY))
        return 4 * self.head_size * self.tile[0] * self.tile[1] * live

    def __repr__(self) -> str:
        kinds, _ = self._cells()
        rows = ["".join(_SIGNS[int(kind)] for kind in row) for row in kinds]
        key = ", ".join(
            f"{_SIGNS[code]} {self.counts[name]:,} {name}" for code, name in _NAMES.items()
        )
        return "\n".join([self._title(), *rows, key, *self._summary()])

    def _title(self) -> str:
        (t, s), (q_tile, kv_tile) = self.lengths, self.tile
        return f"{self.mask}: {t:,} queries x {s:,} keys, tiles of {q_tile} x {kv_tile}"

    def _summary(self) -> list[str]:
        return [
            f"{self.live:.1%} of the tiles run, for {self.density:.1%} of the pairs; the mask is "
            f"asked in {self.counts['partial']:,}",
            f"{_flops(self.flops)} a head of size {self.head_size}, forward",
        ]

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Kinds and shares of at most `_CELLS` by `_CELLS` groups of tiles."""
        size = [max(1, -(-n // _CELLS)) for n in self.kinds.shape]
        starts = [np.arange(0, n, step) for n, step in zip(self.kinds.shape, size, strict=True)]
        if not self.kinds.size:
            return self.kinds, self.shares
        pool = lambda f, x: f.reduceat(f.reduceat(x, starts[0], 0), starts[1], 1)
        low, high = pool(np.minimum, self.kinds), pool(np.maximum, self.kinds)
        kinds = np.where(low == high, low, PARTIAL)
        return kinds, pool(np.add, self.shares) / pool(np.add, np.ones_like(self.shares))

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
    mask = as_mask(mask)
    if wrong := mask.misfits(Shape(None, None, queries, keys)):
        raise ValueError(f"show: {'; '.join(wrong)}.")
    q_tile, kv_tile = tile if isinstance(tile, tuple) else (tile, tile)
    sizes: dict[str, Any] = dict(q_len=queries, kv_len=keys, q_tile=q_tile, kv_tile=kv_tile)
    mods = take_apart(None, mask, jnp.float32)
    kinds = jax.jit(lambda context: block_map(mods.mask, context, b=b, h=h, **sizes))(mods.context)
    kinds = np.asarray(kinds)
    shares = (kinds == FULL).astype(float)
    partly = np.nonzero(kinds == PARTIAL)
    if len(partly[0]):
        count = jax.jit(partial(_visible, mods.mask, b=b, h=h, **sizes))
        shares[partly] = np.asarray(count(mods.context, *map(np.int32, partly))) / (
            q_tile * kv_tile
        )
    return MaskView(repr(mask), kinds, shares, (queries, keys), (q_tile, kv_tile), head_size)


def _visible(mask, context, rows, cols, *, b, h, q_len, kv_len, q_tile, kv_tile):
    """How many pairs of the tiles at `rows` and `cols` the mask leaves."""
    program = jaxpr_as_fun(mask)
    point = lambda q, k: program(jnp.int32(b), jnp.int32(h), q, k, *context)[0]

    def tile(at):
        q, k = at[0] * q_tile + jnp.arange(q_tile), at[1] * kv_tile + jnp.arange(kv_tile)
        seen = jax.vmap(jax.vmap(point, (None, 0)), (0, None))(q, k)
        return jnp.sum(seen & (q < q_len)[:, None] & (k < kv_len)[None], dtype=jnp.int32)

    return jax.lax.map(tile, (rows, cols))
