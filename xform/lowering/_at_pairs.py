"""A score mod at every pair of a tile: what is hidden goes nowhere, whatever the mod makes of it.

A mod is a function of scalars, and `vmap` makes one of tiles of it: what belongs to a query alone
is computed once for each query, and what belongs to a key once for each key. That must stay so for
*arrays* that a mod makes (`table.at[kv_idx].set(0)`, the carry of a loop), of which a tile has room
for one per query or per key, and not for one per pair.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from xform._compat import Jaxpr, jaxpr_as_fun
from xform.jaxpr import walk
from xform.jaxpr._intern import latest
from xform.lowering._spec import At, Read, Spec

# As much as this no tile can hold of what a mod makes.
_ROOM = 2**30
# What writes an array to memory; all else compilers fuse with what reads it.
_WRITES = ("cond", "dynamic_update_slice", "scan", "scatter", "scatter-add", "sort", "while")


def modified(spec: Spec, at: At, s, *loaded):
    """The scale and the score mod at every point of a tile.

    Args:
      spec: the user's program.
      at: where the tile lies.
      s: products of queries and keys, `[g,q,k]`.
      *loaded: what each read of the mod gives there.

    Raises:
      NotImplementedError: if the mod makes arrays of which a tile can't hold one per pair.
    """
    s = s * jnp.asarray(spec.scale, s.dtype) if spec.scale_scores else s
    if spec.score is None:
        return s
    mod = jaxpr_as_fun(spec.score)
    reads = [read for group in spec.reads for read in group]
    dims = ("hqk", *(read.dims for read in reads))
    if any(read.shape for read in reads):
        of_mask = None if at.visible is None else at.visible.shape
        own = _own_place(spec.score, tuple(reads), s.shape, s.dtype, of_mask)
        if at.visible is not None:
            return _at_visible_pairs(mod, at, own, at.visible, dims, s, *loaded)
    if at.visible is None:
        return _at_all_pairs(mod, at, dims, s, *loaded)

    def masked(b, h, q, k, visible, s, *reads):
        s, *reads = (jnp.where(visible, x, jnp.zeros_like(x)) for x in (s, *reads))
        return mod(s, b, h, q, k, *reads)[0]

    visible = jnp.broadcast_to(at.visible, s.shape)
    return at.over("hqk", masked, visible, s, *loaded, arg_dims=("hqk", *dims))


def _at_all_pairs(mod: Callable, at: At, dims: Sequence[str], *loaded):
    """A mod at every point of a full tile."""
    unmasked = lambda b, h, q, k, s, *reads: mod(s, b, h, q, k, *reads)[0]
    return at.over("hqk", unmasked, *loaded, arg_dims=tuple(dims))


def _at_visible_pairs(mod: Callable, at: At, own: str, visible, dims: Sequence[str], *loaded):
    """A mod that reads arrays, at every point of a partial tile.

    With a 0 in the place of what is hidden, an array that all pairs share would become one of each
    pair. So at a hidden pair the mod sees a visible one of the same query (`own` is "q"), or of
    another query where this has none: its derivative there is one that is wanted anyway, times a
    cotangent of 0. What belongs to a query alone stays so, and what belongs to all is as it was.
    Or the same with keys for queries (`own` is "k").
    """
    other = "k" if own == "q" else "q"
    axis = "qk".index(other)
    visible = visible.any(0)  # the heads of a unit share their mask
    some = visible.any(axis)
    line = jnp.where(some, jnp.arange(len(some)), some.argmax())
    partner = visible.argmax(axis)[line]
    elsewhere = getattr(at, other)[partner]
    at = dataclasses.replace(at, **{own: getattr(at, own)[line]})

    def chosen(x, dims: str):
        """What pairs have of `x`, and what those have that are hidden: None if that is the same."""
        x = jnp.take(x, line, axis=dims.index(own)) if own in dims else x
        if other not in dims:
            return _held(x, some.any()) if jnp.issubdtype(x.dtype, jnp.floating) else x, None, ""
        outer = f"h{own}" if "h" in dims else own
        there = at.over(outer, lambda b, h, q, k, x, j: x[j], x, partner, arg_dims=(dims, own))
        return x, lax.stop_gradient(there), outer

    everywhere, hidden, hidden_dims = zip(*map(chosen, loaded, dims), strict=True)

    def masked(b, h, q, k, visible, elsewhere, *values):
        """`elsewhere` is where the other index stands at a hidden pair."""
        there, hidden = values[: len(loaded)], values[len(loaded) :]
        pairs = zip((q if own == "k" else k, *there), (elsewhere, *hidden), strict=True)
        index, s, *reads = (x if y is None else jnp.where(visible, x, y) for x, y in pairs)
        q, k = (index, k) if own == "k" else (q, index)
        return mod(s, b, h, q, k, *reads)[0]

    return at.over(
        "hqk", masked, visible, elsewhere, *everywhere, *hidden,
        arg_dims=("qk", own, *dims, *hidden_dims),
    )  # fmt: skip


@jax.custom_jvp
def _held(x, moves):
    """`x`, whose derivative is 0 unless it `moves`: then nothing is copied in the forward pass."""
    del moves
    return x


@_held.defjvp
def _(primals, tangents):
    x, moves = primals
    return x, jnp.where(moves, tangents[0], 0)


@functools.lru_cache(maxsize=256)
def _own_place(score: Jaxpr, reads: tuple[Read, ...], shape: tuple[int, ...], dtype, masked) -> str:
    """Whether a hidden pair stands at another one of its query, "q", or of its key, "k".

    Of both ways, that by which the largest array that a tile writes is smaller.

    Args:
      score, reads: of the spec.
      shape, dtype: of the scores of a tile.
      masked: the shape of its mask, or None.

    Raises:
      NotImplementedError: if there is no room for that array.
    """
    largest = {own: _largest(_traced(own, score, reads, shape, dtype, masked)) for own in "qk"}
    own, (size, what) = min(largest.items(), key=lambda item: item[1][0])
    if size >= _ROOM:
        raise NotImplementedError(
            f"`score_mod` makes an array of each pair of a query and a key: {what} for one tile. "
            "Make one of each key before the call, `arrays = jax.vmap(make)(jnp.arange(S))`, or of "
            "each query, and let the mod read what it wants of them, `arrays[kv_idx, i]`."
        )
    return own


def _traced(own: str, score: Jaxpr, reads: Sequence[Read], shape, dtype, masked) -> Jaxpr:
    """The program of one tile."""
    sizes = dict(zip("hqk", shape, strict=True))
    struct = jax.ShapeDtypeStruct
    index = [struct(n, jnp.int32) for n in ((), *((n,) for n in shape))]
    dims = ("hqk", *(read.dims for read in reads))
    loaded = [struct((*(sizes[d] for d in r.dims), *r.shape), r.dtype) for r in reads]
    mod = jaxpr_as_fun(latest(score))

    def run(index, visible, *loaded):
        at = At(*index)
        if visible is not None:
            return _at_visible_pairs(mod, at, own, visible, dims, *loaded)
        return _at_all_pairs(mod, at, dims, *loaded)

    visible = None if masked is None else struct(masked, bool)
    return jax.make_jaxpr(run)(index, visible, struct(shape, dtype), *loaded)


def _largest(program: Jaxpr) -> tuple[int, str]:
    """Bytes of the largest array that a program writes to memory, and in words which."""
    written = [
        (math.prod(v.aval.shape) * v.aval.dtype.itemsize, v.aval, site)
        for site in walk(program)
        if site.eqn.primitive.name in _WRITES
        for v in site.eqn.outvars
        if isinstance(v.aval, ShapedArray)
    ]
    if not written:
        return 0, ""
    size, aval, site = max(written, key=lambda x: x[0])
    return size, f"`{site.eqn.primitive}` (at {site.line}) gives {aval.str_short()}"
