"""Query heads as queries: what shares its keys becomes one tile.

With few queries, a tile of one head's is nearly empty, and every head of a group would load the
same keys once more. So the queries of all heads of a group become the rows of one head: row
`t G + g` is query t of head `G k + g`. What the user wrote is rewritten to that: a mod at (b, k,
row, kv_idx) is the mod at (b, G k + row % G, row // G, kv_idx). All else follows from there: what
depends on the head becomes a vector over rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from xform._compat import Jaxpr, jaxpr_as_fun
from xform.jaxpr import intern
from xform.lowering._spec import Read, Spec
from xform.lowering.mosaic_gpu._classes import aval_of


@functools.lru_cache(maxsize=1024)
def packed(spec: Spec, group: int, new: int) -> Spec:
    """The same program with `new * group` rows for each key/value head.

    Args:
      spec: of `new` queries of each head.
      group: query heads of a key/value head.
      new: how many queries there are.
    """
    if group == 1:
        return spec
    rewrite = functools.partial(_at_rows, group=group, new=new)
    score = spec.score and rewrite(spec.score, first=1)
    reads = tuple(tuple(_read(read, rewrite) for read in each) for each in spec.reads)
    mask = spec.mask and rewrite(spec.mask, first=0)
    by_row = "q" * ("h" in spec.mask_dims and "q" not in spec.mask_dims)
    return dataclasses.replace(
        spec, score=score, reads=reads, mask=mask, mask_dims=spec.mask_dims + by_row
    )


def pack(q, kv_heads: int):
    """Queries `[B,T,H,D]` as `[B,K,T G,D]`."""
    batch, new, heads, size = q.shape
    q = q.reshape(batch, new, kv_heads, heads // kv_heads, size)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, size)


def unpack(x, new: int):
    """Rows `[B,K,T G,...]` as `[B,T,H,...]`."""
    batch, kv_heads, _, *rest = x.shape
    x = x.reshape(batch, kv_heads, new, -1, *rest)
    return jnp.moveaxis(x, 1, 2).reshape(batch, new, -1, *rest)


def _read(read: Read, rewrite) -> Read:
    if read.index is None:
        return read
    dims = "".join(d for d in "hqk" if d in read.dims or (d == "q" and "h" in read.dims))
    return dataclasses.replace(read, index=rewrite(read.index, first=0), dims=dims)


def _at_rows(jaxpr: Jaxpr, *, first: int, group: int, new: int) -> Jaxpr:
    """A program of (b, h, q, k, ...), which come after `first` others, at rows."""

    def program(*args):
        lead, (b, head, row, k), rest = args[:first], args[first : first + 4], args[first + 4 :]
        # Of one query, the row is the head: its index stays a number that no row changes.
        q, within = (jnp.int32(0), row) if new == 1 else _div_rem(row, group)
        return jaxpr_as_fun(jaxpr)(*lead, b, head * group + within, q, k, *rest)

    structs = [jax.ShapeDtypeStruct(aval_of(v).shape, aval_of(v).dtype) for v in jaxpr.invars]
    return intern(jax.make_jaxpr(program)(*structs).jaxpr)


def _div_rem(x, y: int):
    return lax.div(x, jnp.int32(y)), lax.rem(x, jnp.int32(y))
