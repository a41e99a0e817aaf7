"""What a primitive hands to a lowering: the user's code and what it reads, as hashable data.

Everything here is frozen and compared by value (jaxprs are interned, so equal code is the same
object): equal programs give equal primitive parameters, and nothing is compiled twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, jaxpr_as_fun
from xform.lowering._contract import wide_of

_FLOAT32 = jnp.dtype(jnp.float32)

EMPTY, PARTIAL, FULL = 0, 1, 2
"""The codes of a block map: what a mask leaves of a tile."""


@dataclasses.dataclass(frozen=True)
class At:
    """Where a tile lies: the arguments that every mod is evaluated at.

    Attributes:
      b: int32 scalar.
      h: int32 `[g]`, the query heads of one key/value head.
      q: int32 `[q]`, true query indices, at most T-1.
      k: int32 `[k]`, true key indices, at most S-1.
      context: whole arrays read by masks and by the index expressions of reads.
      key: uint32 `[2]`, the dropout key, or None.
      visible: bool `[g or 1, q, k]`, or None where the tile is full.
      finite: bool scalar, whether all row and column operands are finite.
    """

    b: jax.Array
    h: jax.Array
    q: jax.Array
    k: jax.Array
    context: Sequence[jax.Array] = ()
    key: jax.Array | None = None
    visible: jax.Array | None = None
    finite: jax.Array | None = None

    def over(self, dims: str, f, *args, arg_dims: tuple[str, ...] = ()):
        """Evaluates scalar `f(b, h, q, k, *args)` at every point of `dims`, a part of "hqk".

        `args` carry the dimensions named in `arg_dims`. What depends on fewer indices is computed
        once per row or column, not once per element: nested `vmap`s see to that.
        """
        pick = lambda dim, x: x if dim in dims else x[0]
        index = (self.b, pick("h", self.h), pick("q", self.q), pick("k", self.k))
        return _over(dims, f, ("", "h", "q", "k", *arg_dims))(*index, *args)


def _over(dims: str, f, arg_dims: tuple[str, ...]):
    """`f` mapped over `dims`, outermost first, for arguments that carry `arg_dims`."""
    if not dims:
        return f
    dim, rest = dims[0], tuple(d.replace(dims[0], "") for d in arg_dims)
    axes = tuple(d.index(dim) if dim in d else None for d in arg_dims)
    return jax.vmap(_over(dims[1:], f, rest), in_axes=axes)


@dataclasses.dataclass(frozen=True)
class Read:
    """One place where a score mod reads a captured array.

    A read is a gather whose index is a program of (b, h, q, k): `dims` says which of h, q, k it
    depends on, and that is its class: "" a scalar per head group, "h" one per head, "q" a row
    vector, "k" a column vector, "hqk" a tile. Its gradient is the transpose, a scatter-add, after
    a sum over the dimensions that it does not depend on.

    Attributes:
      shape: of what one scalar evaluation of the mod reads.
      dtype: that it is loaded in, and that its gradient is added up in.
      index: `(b, h, q, k, *context) -> start indices`; None reads the whole array.
      dims: those of "hqk" that the index depends on.
      dimension_numbers, slice_sizes, mode, fill_value: of the scalar gather, as in
      `jax.lax.gather`.
    """

    shape: tuple[int, ...]
    index: Jaxpr | None = None
    dims: str = ""
    dtype: Any = _FLOAT32
    dimension_numbers: lax.GatherDimensionNumbers = lax.GatherDimensionNumbers((), (), ())
    slice_sizes: tuple[int, ...] = ()
    mode: lax.GatherScatterMode | None = None
    fill_value: int | float | None = None

    def starts(self, at: At):
        """Start indices `[*dims, ...]`; None for a whole read."""
        if self.index is None:
            return None
        program = jaxpr_as_fun(self.index)
        return at.over(self.dims, lambda b, h, q, k: program(b, h, q, k, *at.context)[0])

    def tile_shape(self, at: At) -> tuple[int, ...]:
        """The shape of what `load` returns: `[*dims, *shape]`."""
        return (*(getattr(at, d).shape[0] for d in self.dims), *self.shape)

    def load(self, operand, starts):
        """What the mod reads of `operand`, `[*dims, *slice]`, in its dtype there."""
        if starts is None:
            return self._widened(operand)
        read = lax.gather(
            operand,
            starts,
            self._numbers(),
            self.slice_sizes,
            mode=self.mode,
            fill_value=self.fill_value,
        )
        return self._widened(read)

    def _widened(self, x):
        return x if x.dtype == self.dtype else x.astype(self.dtype)

    def store(self, total, starts, ct):
        """Adds the cotangent `ct` of a read to `total`, the cotangent of the whole array."""
        if starts is None:
            return total + ct
        numbers = self._numbers()
        scatter = lax.ScatterDimensionNumbers(
            update_window_dims=numbers.offset_dims,
            inserted_window_dims=numbers.collapsed_slice_dims,
            scatter_dims_to_operand_dims=numbers.start_index_map,
        )
        return lax.scatter_add(total, starts, ct.astype(total.dtype), scatter, mode=self.mode)

    def _numbers(self) -> lax.GatherDimensionNumbers:
        """The scalar gather's dimension numbers, with `dims` leading in the indices."""
        numbers = self.dimension_numbers
        return lax.GatherDimensionNumbers(
            offset_dims=tuple(d + len(self.dims) for d in numbers.offset_dims),
            collapsed_slice_dims=numbers.collapsed_slice_dims,
            start_index_map=numbers.start_index_map,
        )


@dataclasses.dataclass(frozen=True)
class Spec:
    """The user's program inside attention.

    Attributes:
      scale: factor on `q . k`.
      dtype: of q, k and v; what operands of matrix products are rounded to.
      score: `(score, b, h, q, k, *reads) -> score`, pointwise, or None.
      reads: what `score` reads, one tuple of reads per captured array.
      mask: `(b, h, q, k, *context) -> bool`, or None.
      mask_dims: those of "bhqk" that the mask depends on.
      dropout: the rate; if not 0, the last array of the context is the key.
      deterministic: whether a second run must give the same bits.
      format: "e4m3" if q, k, v and weights are rounded to it where they are multiplied, each by
        scales of its own (see `_eight`), or None.
    """

    scale: float
    dtype: jnp.dtype
    score: Jaxpr | None = None
    reads: tuple[tuple[Read, ...], ...] = ()
    mask: Jaxpr | None = None
    mask_dims: str = ""
    dropout: float = 0.0
    deterministic: bool = True
    format: str | None = None

    @property
    def wide(self) -> jnp.dtype:
        """The dtype of scores, statistics and accumulators: float32, float64 for float64."""
        return wide_of(self.dtype)

    def tail(self, kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions of a whole operand but `B T H` of rows, `B S K` of columns."""
        return shape[3:] if isinstance(kind, str) else shape

    def visible(self, at: At):
        """The mask over a tile, `[g or 1, q, k]`."""
        program = jaxpr_as_fun(self.mask)
        dims = "hqk" if "h" in self.mask_dims else "qk"
        mask = at.over(dims, lambda b, h, q, k: program(b, h, q, k, *at.context)[0])
        return mask.reshape(-1, *mask.shape[-2:])

    def unit(self, b, h, context: Sequence, finite) -> At:
        """The place of a whole unit: all but the positions of a tile."""
        key = context[-1] if self.dropout else None
        context = context[:-1] if self.dropout else context
        none = jnp.arange(0)
        return At(b, h, none, none, context, key, finite=finite)

    @property
    def scale_scores(self) -> bool:
        """Whether the scale must go on the scores: on queries it could cost them digits or range.

        On the queries it costs `D` multiplications per row, not `S`. Narrow ones it would round,
        unless it is a power of 2. Those of float16 have no room for any factor, and what is large
        or very small could lead out of every range where the product of q and k does not.
        """
        rounds = self.dtype != self.wide and math.frexp(abs(self.scale))[0] != 0.5
        return rounds or self.dtype == jnp.float16 or not 2**-16 <= abs(self.scale) <= 1
