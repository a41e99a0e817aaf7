"""Tensor parallelism: blocks of work split over an axis, by columns first and then by rows.

    y = f(x A) B          A by columns, B by rows: device i has f(x A_i) B_i, and y is their sum

So a block takes one communication where it opens and one where it closes, whatever it holds:
attention with its heads dealt out (columns of query, key and value are whole heads), or a
feed-forward layer with its units dealt out. What a block's ends do, and their derivatives:

                    opens with          derivative          closes with         derivative
    plain           nothing (a cast)    all-reduce          all-reduce          nothing
    sequence        all-gather          reduce-scatter      reduce-scatter      all-gather
    sequence, ring  `gather_matmul`     `matmul_scatter`    `matmul_scatter`    `gather_matmul`

Under `sequence`, what lies between blocks (norms, residuals, dropout) is split along positions, so
that nothing is computed or kept twice (Korthikanti et al., arXiv:2205.05198). All-gather and
reduce-scatter move as many bytes as the all-reduce did.

**What is on every device but used on a part.** The scale of a norm between blocks sees this
device's positions only, one inside a block (on queries or keys) this device's heads: their
gradients are sums over the axis. Types see to it: such a parameter is *the same* on all devices,
the cast that lets it meet what *varies* has a sum for its derivative, and leaving the sum out is a
type error. Done by `data.per_device`, once and outside of loops, there is one sum per step.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from xform._compat import varying_axes
from xform.sharding import ring
from xform.sharding._declare import declare


@dataclass(frozen=True)
class TensorParallel:
    """How blocks are split over a mesh axis; without an axis, the same code on one device.

    Its methods are called inside `jax.shard_map` over a mesh that has the axis.

    Attributes:
      axis: The mesh axis, or None.
      sequence: Between blocks, each device has its part of the positions, `dim` -2 of the stream.
      overlap: None, or how products hide their communication: "ring" (any device), or "pallas"
        (JAX's kernel for NVIDIA's Hopper where a block opens, the ring elsewhere).

    Raises:
      ValueError: `overlap` without `sequence`, either without an axis, or an unknown `overlap`.

    >>> tp = TensorParallel()
    >>> (y,) = tp.column(jnp.ones((2, 5, 3)), jnp.ones((3, 4)))
    >>> tp.row(y, jnp.ones((4, 3))).shape
    (2, 5, 3)
    """

    axis: str | None = None
    sequence: bool = False
    overlap: Literal["ring", "pallas"] | None = None

    def __post_init__(self):
        wrong = []
        if self.axis is None and (self.sequence or self.overlap):
            wrong.append("`sequence` and `overlap` need an `axis`: name the mesh axis")
        if self.overlap and not self.sequence:
            wrong.append(
                f"`overlap` is {self.overlap!r}, and it hides the gathers and scatters of "
                "`sequence=True`: set that too"
            )
        if self.overlap not in (None, "ring", "pallas"):
            wrong.append(f"`overlap` is {self.overlap!r}; there is None, 'ring' and 'pallas'")
        if wrong:
            raise ValueError(f"TensorParallel: {'; '.join(wrong)}.")

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis, or none."""
        return () if self.axis is None else (self.axis,)

    def column(self, x: Float[Array, "... M"], *weights: Float[Array, "M _"]) -> tuple[Array, ...]:
        """Opens a block: returns `x @ w` for each weight, for all positions and its columns.

        Args:
          x: The stream: all of it, or this device's positions where `sequence`.
          *weights: This device's columns of each matrix.
        """
        if self.overlap == "ring":
            return ring.gather_matmul(x, weights, self._varying("column", x))
        if self.overlap == "pallas":
            from xform.sharding import _pallas

            return _pallas.gather_matmul(x, weights, self._varying("column", x))
        with declare("tensor.column", *self.axes):
            x = self.enter(x)
            return tuple(x @ w for w in weights)

    def row(self, x: Float[Array, "... F"], weight: Float[Array, "F M"]) -> Float[Array, "... M"]:
        """Closes a block: returns the sum over devices of `x @ weight`.

        Args:
          x: What the block made of all positions, in this device's columns.
          weight: This device's rows of the matrix.

        Returns:
          The whole sum, or this device's positions of it where `sequence`.
        """
        if self.overlap:
            return ring.matmul_scatter(x, weight, self._varying("row", x))
        with declare("tensor.row", *self.axes):
            return self.leave(x @ weight)

    def enter(self, x: Float[Array, "... M"]) -> Float[Array, "... M"]:
        """Returns the stream of all positions for work that is split; see `column`."""
        if self.axis is None:
            return x
        if self.sequence:
            axis = self._varying("enter", x)
            with declare("tensor.enter", axis):
                return lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
        if self.axis in varying_axes(x):
            raise ValueError(
                f"`TensorParallel.enter`: the stream {x.shape} varies over {self.axis!r}, and "
                "without `sequence=True` it must be the same on all of its devices: a block before "
                "it was not closed by `row` or `leave`, or a parameter that all devices share was "
                f"cast to vary over {self.axis!r}."
            )
        with declare("tensor.enter", self.axis):
            return lax.pcast(x, self.axis, to="varying")

    def leave(self, x: Float[Array, "... M"]) -> Float[Array, "... M"]:
        """Returns the sum over devices of what each made; see `row`."""
        if self.axis is None:
            return x
        axis = self._varying("leave", x)
        with declare("tensor.leave", axis):
            if not self.sequence:
                return lax.psum(x, axis)
            self._divides(x, x.ndim - 2)
            return lax.psum_scatter(x, axis, scatter_dimension=x.ndim - 2, tiled=True)

    def positions(self, x: Array, dim: int = -1) -> Array:
        """Returns this device's part of something that all devices have along the positions.

        Tokens and labels go through it where the stream is split: it does nothing elsewhere.
        """
        if not self.sequence:
            return x
        size = self._divides(x, dim)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis) * size, size, dim)

    def embed(
        self, table: Float[Array, "C M"], tokens: Integer[Array | np.ndarray, "*shape"]
    ) -> Array:
        """Returns the rows of a table that is split along the vocabulary.

        Each device looks up what it has, and puts 0 for the rest; the sum is the stream. A token
        that is in no device's part is 0.

        Args:
          table: This device's entries of the vocabulary, in order.
          tokens: All tokens, the same on all devices of the axis.

        Returns:
          `[*shape, M]`, or this device's positions of it where `sequence`.
        """
        size = table.shape[0]
        first = 0 if self.axis is None else lax.axis_index(self.axis) * size
        mine = tokens - first
        inside = (mine >= 0) & (mine < size)
        rows = jnp.where(inside[..., None], table[jnp.where(inside, mine, 0)], 0)
        with declare("tensor.embed", *self.axes):
            return self.leave(rows)

    def head_columns(self, weight: Float[Array, "M _"], heads: int) -> Float[Array, "M _"]:
        """Returns this device's columns of a matrix of heads, of which there may be few.

        With as many heads as devices or more, they are split over the axis, and this does nothing.
        With fewer, as of keys and values, all devices have the whole matrix, and those with query
        heads of one group take the columns of the same head; its gradient is their sum.

        Args:
          weight: This device's columns, or the whole matrix where there are fewer heads.
          heads: Their number, of which one of `heads` and the number of devices divides the other.

        Raises:
          ValueError: Neither does, or the columns are no multiple of `heads`.
        """
        n = 1 if self.axis is None else lax.axis_size(self.axis)
        if heads % n == 0:
            return weight
        if n % heads or weight.shape[1] % heads:
            raise ValueError(
                f"`head_columns`: {heads} heads, {weight.shape[1]} columns and {self.axis}={n}; "
                "needed are heads that divide the columns, and that divide the devices or are a "
                "multiple of them."
            )
        size, axis = weight.shape[1] // heads, self.axis
        first = lax.axis_index(axis) * heads // n * size
        with declare("tensor.head_columns", *self.axes):
            own = weight if axis in varying_axes(weight) else lax.pcast(weight, axis, to="varying")
            return lax.dynamic_slice_in_dim(own, first, size, 1)

    def _varying(self, name: str, x: Array) -> str:
        assert self.axis is not None
        if self.axis not in varying_axes(x):
            raise ValueError(
                f"`TensorParallel.{name}`: {x.shape} is the same on all devices of {self.axis!r}, "
                f"and needed is each device's own part: split the weights of the block over "
                f"{self.axis!r} in `in_specs`" + (
                    ", and the stream along its positions." if self.sequence else "."
                )
            )  # fmt: skip
        return self.axis

    def _divides(self, x: Array, dim: int) -> int:
        n = lax.axis_size(self.axis)
        if x.shape[dim] % n:
            raise ValueError(
                f"TensorParallel: {x.shape[dim]} positions (dimension {dim} of {x.shape}) are no "
                f"multiple of {self.axis}={n}: pad the rows, or set `sequence=False`."
            )
        return x.shape[dim] // n
