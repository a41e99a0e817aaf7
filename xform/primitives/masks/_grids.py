"""Neighbourhoods on grids of one, two or three dimensions, and orders that keep them in few tiles.

A sequence of grid points in row-major order has the two rows of an image next to each other only at
their ends, so that a square neighbourhood touches many tiles. In an order of patches, or along
Morton's curve, a tile of the sequence is a patch of the image:

    order = tiled((64, 64), (8, 16))
    out = flex_attention(q[:, order], k[:, order], v[:, order],
                         mask_mod=neighborhood((64, 64), 7, order=order))[:, jnp.argsort(order)]
"""

import math
from collections.abc import Sequence
from dataclasses import field
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from xform.primitives._objects import fits, known, misfit, static, variant
from xform.primitives.masks._mask import Mask

type Sizes = int | Sequence[int]
type Numbers = ArrayLike | Sequence[ArrayLike]
"""One for all dimensions, or one for each: a tuple, or an array `[dims]`."""


@variant
class neighborhood(Mask):
    """A query sees the `window` points around its own along each dimension of a grid.

    Hassani et al., arXiv:2204.07143, as NATTEN computes it: at the edges the window is moved back
    into the grid, so that all queries see equally many points. Along a causal dimension the window
    ends at the query's own point and is cut off at the edge.

    Args:
        shape: the grid's, one to three Python numbers; the sequence is all of its points.
        window: how many points along each dimension; of an even number, one more lies before the
            query than behind it.
        dilation: how far apart they are, along each dimension.
        causal: whether a query sees no later point, along each dimension.
        order: which point, counted in row-major order, each token of the sequence is, `[T]`, as of
            `tiled` and `morton`; None for row-major order itself.

    Window, dilation and causal are numbers for all dimensions or one for each; they may be traced.

    Raises:
        ValueError: a number is not positive, or there is not one for each dimension.
        TypeError: one is no number, or `shape` is traced.

    >>> mask = neighborhood((4, 5), 3)
    >>> [k for k in range(20) if mask(0, 0, 0, k)]  # of the corner
    [0, 1, 2, 5, 6, 7, 10, 11, 12]
    """

    shape: Sizes
    window: Numbers
    dilation: Numbers = field(default=1, kw_only=True)
    causal: Numbers = field(default=False, kw_only=True)
    order: ArrayLike | None = field(default=None, kw_only=True)

    def __post_init__(self):
        grid = _grid("neighborhood(shape)", self.shape)
        tuples = {n: tuple(x) for n, x in vars(self).items() if isinstance(x, list)}
        # A list would be made of leaves, whose numbers are traced where the mask is an argument.
        self.__dict__.update(tuples, shape=grid)
        for name in ("window", "dilation", "causal"):
            given = getattr(self, name)
            if isinstance(given, tuple) or known(given):
                self._each(name, grid)
            elif not hasattr(given, "dtype"):
                raise TypeError(
                    f"`{name}={given!r}` of a neighborhood: needed is a number for all dimensions "
                    f"or one for each of the {len(grid)}, as a tuple or an array."
                )

    def _each(self, name: str, grid: tuple[int, ...]) -> Sequence[Any]:
        """What `name` is along each dimension."""
        given, least = getattr(self, name), 0 if name == "causal" else 1
        given: Any
        ndim = 1 if isinstance(given, tuple) else np.ndim(given)
        sizes: Any = given if ndim else (given,) * len(grid)
        fits = ndim < 2 and len(sizes) == len(grid)
        if not fits or any(known(n) and n < least for n in sizes):
            raise ValueError(
                f"`{name}={given}` of a neighborhood on a grid {grid}: needed is one for all "
                f"dimensions or a tuple of {len(grid)}, each at least {least}."
            )
        return sizes

    def _dims(self) -> list[tuple]:
        """Of each dimension the number of points, the window, the dilation and whether causal."""
        grid = _grid("neighborhood(shape)", self.shape)
        how = (self._each(name, grid) for name in ("window", "dilation", "causal"))
        return list(zip(grid, *how, strict=True))

    def __call__(self, b, h, q_idx, kv_idx):
        seen, stride = [], 1
        for points, *how in reversed(self._dims()):
            q, k = (self._along(i, stride, points) for i in (q_idx, kv_idx))
            seen.append(_near(q, k, points, *how))
            stride *= points
        return reduce(jnp.logical_and, seen)

    def _along(self, i, stride: int, points: int):
        """The coordinate of token `i` along a dimension whose points are `stride` tokens apart."""
        if self.order is None:
            return i // stride % points
        return (jnp.asarray(self.order) // stride % points)[i]

    def misfits(self, shape):
        points = math.prod(_grid("neighborhood(shape)", self.shape))
        wrong = [] if self.order is None else misfit("order", self.order, [points], None)
        return wrong + [
            f"`{self!r}` is of {points} points, and there are {n!r} {what}"
            for what, n in (("queries", shape.q), ("keys", shape.k))
            if not fits(points, n)
        ]


def _near(q, k, points: int, window, dilation, causal):
    """Whether `k` is in the window of `q` along one dimension; both are coordinates.

    The points that a dilated window may hold are those of the query's phase, `q % dilation`;
    counted by themselves they have a window without dilation.
    """
    same, members = True, points
    if not known(dilation) or dilation > 1:
        same = k % dilation == q % dilation
        members = (points - q % dilation + dilation - 1) // dilation
        q, k = q // dilation, k // dilation
    first = jnp.maximum(0, jnp.minimum(q - window // 2, members - window))
    inside = (k >= first, k < first + window)
    before = (k > q - window, k <= q)
    if known(causal):
        bounds = before if causal else inside
    else:
        bounds = (jnp.where(causal, *both) for both in zip(before, inside, strict=True))
    return reduce(jnp.logical_and, bounds, same)


# ---- Orders --------------------------------------------------------------------------------------


def tiled(shape: Sizes, tile: Sizes) -> np.ndarray:
    """Returns the points of a grid patch by patch, int32 `[T]`: which one each token is.

    `x[:, order]` puts a row-major sequence into this order, `y[:, jnp.argsort(order)]` takes a
    result back. With patches of as many points as a tile of attention has, a wide neighborhood
    meets fewer tiles than in row-major order: of 64 x 64 points in tiles of 64, about half as many
    for a window of 17; of larger grids still fewer.

    Args:
      shape: the grid's.
      tile: a patch's; those at the edges may be smaller.

    >>> tiled((2, 4), (2, 2)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    grid = _grid("tiled(shape)", shape)
    sizes = tile if isinstance(tile, tuple | list) else (tile,) * len(grid)
    sizes = [static("tiled(tile)", n) for n in sizes]
    if len(sizes) != len(grid):
        raise ValueError(
            f"`tile={tile}` of a grid {grid}: needed are {len(grid)} positive numbers."
        )
    at = np.indices(grid).reshape(len(grid), -1)
    size = np.array(sizes)[:, None]
    # The last key counts most: patches in row-major order, and so the points of each.
    return np.lexsort([*reversed(at % size), *reversed(at // size)]).astype(np.int32)


def morton(shape: Sizes) -> np.ndarray:
    """Returns the points of a grid along Morton's curve, int32 `[T]`: patches of every size.

    Args:
      shape: the grid's.

    >>> morton((2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    grid = _grid("morton(shape)", shape)
    at = np.indices(grid).reshape(len(grid), -1)
    code = np.zeros(at.shape[1], np.int64)
    for bit in range(max(grid).bit_length()):
        for d, x in enumerate(reversed(at)):
            code |= (x >> bit & 1) << (bit * len(grid) + d)
    return np.argsort(code).astype(np.int32)


def _grid(name: str, shape) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, tuple | list | np.ndarray) else (shape,)
    grid = tuple(static(name, n) for n in sizes)
    if not 1 <= len(grid) <= 3:
        raise ValueError(
            f"`{name}` is {shape}; a grid has one to three dimensions of positive size."
        )
    return grid
