"""Reads of an array at a query and a key together: biases of pairs, graphs, tables of two labels.

Each index of `a[h, f(q), g(k)]` belongs to the row or to the column. So indices are vectors that
XLA computes outside, by the rules that the read has for what is out of range, and the kernel loads
the element where they meet. f and g are any functions; nothing of the size of T times S is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
from jax import lax

from xform._compat import JaxprEqn, Literal, Var
from xform.lowering._spec import Read
from xform.lowering.mosaic_gpu._classes import (
    COL,
    INDICES,
    ROW,
    SCALAR,
    Class,
    aval_of,
    classify,
    flatten,
)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """One number of an array, each of whose indices belongs to the row or to the column.

    Attributes:
      dims: the dimension of the array that each index is of; the others are read at 0.
      classes: what each index depends on.
      fill: what is read out of range; None if that is the nearest element.
    """

    dims: tuple[int, ...]
    classes: tuple[Class, ...]
    fill: float | int | None

    def indices(self, array, starts: Sequence) -> list:
        """The indices, int32: clipped, or -1 out of range where that is filled."""
        return [self._index(array.shape[d], x) for d, x in zip(self.dims, starts, strict=True)]

    def _index(self, size: int, start):
        index = jnp.clip(start, 0, size - 1).astype(jnp.int32)
        return index if self.fill is None else jnp.where(index == start, index, -1)


def of_eqn(
    eqn: JaxprEqn, classes: Mapping[Var, Class], makers: Mapping[Var, JaxprEqn]
) -> tuple[Lookup, Var | Literal, list[Var | Literal]] | None:
    """What an equation looks up, in which array, and where; None if it is no lookup."""
    array, *starts = eqn.invars
    of = lambda v: classes[v] if isinstance(v, Var) else Class()
    if eqn.primitive is lax.dynamic_slice_p:
        dims, mode, fill = range(len(starts)), lax.GatherScatterMode.CLIP, None
    elif eqn.primitive is lax.gather_p:
        numbers = eqn.params["dimension_numbers"]
        dims = () if numbers.operand_batching_dims else numbers.start_index_map
        mode, fill = eqn.params["mode"], eqn.params["fill_value"]
        starts = _components(starts[0], makers)
    else:
        return None
    if of(array) != Class():
        return None
    kinds = [of(v) for v in starts]
    found = _lookup(aval_of(array).dtype, dims, eqn.params["slice_sizes"], kinds, mode, fill)
    return found and (found, array, starts)


def of_read(read: Read, dtype) -> Lookup | None:
    """What a read of a score mod looks up in an array of a dtype; None if it is no lookup."""
    if read.index is None:
        return None
    flat = flatten(read.index)
    classes = classify(flat, [*INDICES, *[Class()] * (len(flat.invars) - 4)])
    makers = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    starts = _components(flat.outvars[0], makers)
    kinds = [classes[v] if isinstance(v, Var) else Class() for v in starts]
    numbers = read.dimension_numbers
    dims = () if numbers.operand_batching_dims else numbers.start_index_map
    return _lookup(dtype, dims, read.slice_sizes, kinds, read.mode, read.fill_value)


def _lookup(dtype, dims, slice_sizes, classes: Sequence[Class], mode, fill) -> Lookup | None:
    if len(classes) != len(dims) or math.prod(slice_sizes) != 1:
        return None
    if not {c.pair for c in classes} <= {SCALAR, ROW, COL}:
        return None
    if mode != lax.GatherScatterMode.FILL_OR_DROP:
        fill = None
    elif fill is None:
        fill = _default_fill(dtype)
    kinds = (dataclasses.replace(c, affine=False) for c in classes)
    return Lookup(tuple(dims), tuple(kinds), fill)


def _default_fill(dtype) -> float | int:
    """What `jax.lax.gather` fills with."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return math.nan
    if dtype == jnp.bool_:
        return True
    info = jnp.iinfo(dtype)
    return info.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else info.min


def _components(v: Var | Literal, makers: Mapping[Var, JaxprEqn]) -> list[Var | Literal]:
    """The numbers that a vector of indices is put together from."""
    eqn = makers.get(v) if isinstance(v, Var) else None
    name = "" if eqn is None else eqn.primitive.name
    if eqn is None or name not in ("stack", "concatenate", "broadcast_in_dim", "reshape"):
        return [v]
    if name in ("broadcast_in_dim", "reshape") and aval_of(v).size != 1:
        return [v]
    return [part for x in eqn.invars for part in _components(x, makers)]
