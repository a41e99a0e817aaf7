"""`decode_attention`, `paged_attention`: a few queries against many keys that are kept.

Both are `flex_attention` on parts of the keys, whose results are merged by their log-sum-exps
(`merge`), which is exact. Mods are called with the positions in the text, wherever a key is stored,
so that one mask serves training, decoding and paging.

Parts that no query sees, as the block map says, are not read: a step costs what its keys cost, not
what the cache could hold. The others are taken one after the other, so that no second copy of the
keys is ever made; each is split over the batch dimension for a device that has more cores than
there are heads.

Known to be slow: on a CPU every part is laid out anew, head by head, before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from xform._compat import varying_axes
from xform.lowering._contract import wide_of
from xform.lowering._tile_fn import base, log_sum
from xform.lowering.blockwise import inverse
from xform.primitives._attention_checks import (
    check_arguments,
    check_mods,
    check_places,
    of_pairs,
)
from xform.primitives._mods import take_apart
from xform.primitives._objects import Shape, in_text, static
from xform.primitives._rules import check_sizes, from_numpy, join_axes
from xform.primitives.attention import (
    Aux,
    _attend,
    _with_sinks,
)
from xform.primitives.block_map import EMPTY, block_map

# Keys that one split of a part has: enough to hide what a call costs, few enough to share out.
_KEYS = 1024
# Splits that fill a GPU, those of all key/value heads together.
_SPLITS = 128


def merge(
    outs: Float[Array, "N ... V"], lses: Float[Array, "N ..."]
) -> tuple[Float[Array, "... V"], Float[Array, ...]]:
    """Returns what attention over all keys is, from the results over N parts of them.

    A part in which a row has no key has an output of 0 and a log-sum-exp of minus infinity there,
    and so has the whole if all have. Differentiable.

    Args:
      outs: the outputs.
      lses: their natural log-sum-exps.

    >>> from xform import flex_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    >>> halves = [flex_attention(q, k[:, i], v[:, i], aux="lse") for i in (slice(5), slice(5, 8))]
    >>> out, _ = merge(*(jnp.stack(x) for x in zip(*((o, a.lse) for o, a in halves))))
    >>> bool(jnp.allclose(out, flex_attention(q, k, v), atol=1e-6))
    True
    """
    top = lax.stop_gradient(jnp.max(lses, 0))
    weights = jnp.exp(lses - base(top)[None])
    total = jnp.sum(weights, 0)
    out = jnp.sum(weights[..., None] * outs, 0) * inverse(total)[..., None]
    return out.astype(outs.dtype), log_sum(top, total)


class _Keys(NamedTuple):
    """Where keys are kept.

    Attributes:
      load: `load(n)`: keys and values `[B,part,K,...]` of part n, and the position of the first.
      part: keys of a part.
      length: positions that there are.
      exists: `exists(b, position)`: whether a key is kept there.
      splits: into how many pieces each part is cut.
      arrays: what all this reads.
    """

    load: Callable
    part: int
    length: int
    exists: Callable
    splits: int
    arrays: Sequence


def decode_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k: Float[Array | np.ndarray, "B S K D"],
    v: Float[Array | np.ndarray, "B S K V"],
    lengths: ArrayLike,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    aux: Sequence[str] = (),
    splits: int | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns attention of the newest tokens of some texts over a cache of their keys.

    The T queries are the last of `lengths[b]` tokens, whose keys are in the cache, their own too:
    query t stands at position `lengths[b] - T + t`. Mods are called with positions, and nothing is
    hidden but what is not there: with T > 1 a language model needs `mask_mod=causal()`. What lies
    behind a text's end has no influence, NaN included; all else is as in `flex_attention`. Arrays
    of masks and scores by position have the S of them that there is room for.

    Args:
      q: queries.
      k, v: the cache, with room for S keys.
      lengths: how many tokens each text has, integers `[B]` or a scalar, at most S; where they are
        traced, and can't be looked at, a text of more gives NaN.
      score_mod, mask_mod, scale, sinks: as of `flex_attention`, on positions.
      aux: names of further results: "lse".
      splits: how many pieces of the keys are attended to side by side; None chooses for the default
        device. It changes the order of sums, and nothing else.
      implementation: as of `flex_attention`.

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on shapes, dtypes or mods that do not fit.

    >>> from xform.primitives.masks import causal, sliding_window
    >>> q, cache = jnp.ones((2, 1, 8, 16)), jnp.ones((2, 100, 4, 16))
    >>> mask = causal() & sliding_window(32)
    >>> decode_attention(q, cache, cache, jnp.array([7, 60]), mask_mod=mask).shape
    (2, 1, 8, 16)
    """
    aux = (aux,) if isinstance(aux, str) else tuple(aux)
    q, k, v, sinks = from_numpy(q, k, v, sinks)
    check_arguments(q, k, v, sinks, 0.0, None, (), implementation, caller="decode_attention")
    room = k.shape[1]
    splits, keys = _cut(q, k, splits, room)
    part = splits * keys

    def load(n):
        # The last part begins where it fits; what it has of the one before is hidden.
        start = jnp.minimum(n * part, room - part)
        return *(lax.dynamic_slice_in_dim(x, start, part, 1) for x in (k, v)), start

    kept = _Keys(load, part, room, lambda b, position: True, splits, (k, v))
    options = {"scale": scale, "sinks": sinks, "aux": aux, "implementation": implementation}
    return _over_parts(
        "decode_attention", q, kept, v.shape[-1], lengths, score_mod, mask_mod, options
    )


def paged_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k_pages: Float[Array | np.ndarray, "P N K D"],
    v_pages: Float[Array | np.ndarray, "P N K V"],
    page_table: Int[Array, "B M"],
    lengths: ArrayLike,
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    aux: Sequence[str] = (),
    splits: int | None = None,
    implementation: str | None = None,
) -> Any:
    """Returns attention of the newest tokens of some texts over keys that are kept in pages.

    Position p of text b is entry `p % N` of page `page_table[b, p // N]`. A page number that is
    negative or not below P is a hole: there are no keys. Pages may be shared, and lie in any
    order; what no text has of them has no influence, NaN included. Gradients of pages add up what
    all texts give. All else is as in `decode_attention`.

    Pages are gathered for some positions at a time, and only where a query sees one of them.

    Args:
      q: queries, the last T of `lengths[b]` tokens.
      k_pages, v_pages: P pages of N keys and values each.
      page_table: the pages of each text, with room for M.
      lengths: how many tokens each text has, as of `decode_attention`, at most `M N`.
      score_mod, mask_mod, scale, sinks: as of `flex_attention`, on positions.
      aux: names of further results: "lse".
      splits: as of `decode_attention`.
      implementation: as of `flex_attention`.

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on shapes, dtypes or mods that do not fit.

    >>> q, pages = jnp.ones((2, 1, 8, 16)), jnp.ones((9, 32, 4, 16))
    >>> table = jnp.array([[3, 0, -1], [8, 3, 5]])
    >>> paged_attention(q, pages, pages, table, jnp.array([40, 96])).shape
    (2, 1, 8, 16)
    """
    aux = (aux,) if isinstance(aux, str) else tuple(aux)
    q, k_pages, v_pages, sinks = from_numpy(q, k_pages, v_pages, sinks)
    check_sizes("paged_attention", q=q, k_pages=k_pages, v_pages=v_pages, page_table=page_table)
    _check_pages(q, k_pages, v_pages, page_table)
    (pages, size), (_, room) = k_pages.shape[:2], page_table.shape
    rows = lambda x: jax.ShapeDtypeStruct((q.shape[0], room * size, *x.shape[2:]), x.dtype)
    check_arguments(
        q, rows(k_pages), rows(v_pages), sinks, 0.0, None, (), implementation,
        caller="paged_attention",
    )  # fmt: skip
    splits, keys = _cut(q, k_pages, splits, room * size)
    count = splits * max(1, keys // size)
    table = jnp.pad(page_table, ((0, 0), (0, -room % count or (not room))), constant_values=-1)

    def load(n):
        some = lax.dynamic_slice_in_dim(table, n * count, count, 1)
        parts = (_pages_at(x, some) for x in (k_pages, v_pages))
        return *parts, n * count * size

    def exists(b, position):
        page = table[b, position // size]
        return (page >= 0) & (page < pages)

    arrays = (k_pages, v_pages, page_table)
    kept = _Keys(load, count * size, room * size, exists, splits, arrays)
    options = {"scale": scale, "sinks": sinks, "aux": aux, "implementation": implementation}
    return _over_parts(
        "paged_attention", q, kept, v_pages.shape[-1], lengths, score_mod, mask_mod, options
    )


def _check_pages(q, k_pages, v_pages, table) -> None:
    """Raises if pages and their table do not fit together, or the queries."""
    wrong = []
    if table.ndim != 2 or q.ndim != 4 or table.shape[0] != q.shape[0]:
        batch = q.shape[0] if q.ndim == 4 else "B"
        wrong.append(
            f"`page_table` has shape {table.shape}; with q {q.shape} needed is [{batch}, M], the "
            "pages of each text"
        )
    if not jnp.issubdtype(table.dtype, jnp.integer):
        wrong.append(f"`page_table` has dtype {table.dtype}; needed are integers, page numbers")
    if k_pages.ndim != 4 or k_pages.shape[:3] != v_pages.shape[:3] or not k_pages.shape[1]:
        wrong.append(
            f"`k_pages` has shape {k_pages.shape} and `v_pages` {v_pages.shape}; needed are "
            "[P, N, K, D] and [P, N, K, V], P pages of N > 0 keys"
        )
    if wrong:
        raise ValueError(f"paged_attention: {'; '.join(wrong)}.")


def _pages_at(pool, numbers):
    """The pages `[B,n]` of a pool as keys `[B,n N,...]`; any page for a number that is none."""
    pool = jnp.asarray(pool) if len(pool) else jnp.zeros((1, *pool.shape[1:]), pool.dtype)
    found = pool.at[numbers].get(mode="clip")
    return found.reshape(len(numbers), found.shape[1] * found.shape[2], *pool.shape[2:])


def _cut(q, k, splits: int | None, room: int) -> tuple[int, int]:
    """Into how many pieces a part of the keys is split, and how many keys each has."""
    if splits is not None:
        static("splits", splits)
    else:
        side_by_side = _SPLITS // max(1, q.shape[0] * k.shape[2])
        splits = max(1, min(side_by_side, room // _KEYS)) if jax.default_backend() == "gpu" else 1
    splits = max(1, min(splits, room))
    return splits, min(_KEYS, room // splits)


def _over_parts(
    caller: str, q, kept: _Keys, v_size: int, lengths, score_mod, mask_mod, options: dict
):
    """Attends to one part after the other, and merges what comes out."""
    lengths, beyond = _lengths(caller, lengths, q.shape[0], kept.length)
    if unknown := [name for name in options["aux"] if name != "lse"]:
        raise ValueError(f"{caller}: `aux` asks for {unknown}; there is ['lse'].")
    # Queries and keys are counted from the beginning of a text: each has any of its positions.
    shape = Shape(q.shape[0], q.shape[2], kept.length, kept.length)
    with in_text():
        check_mods(score_mod, mask_mod, options["scale"], shape, caller)
        score_mod, mask_mod = of_pairs((*q.shape[:3], kept.length), score_mod, mask_mod)
        check_places(q, score_mod, mask_mod, shape, caller)
    seen = _named(partial(_seen, kept, lengths, q.shape[1], mask_mod), mask_mod)
    attend = partial(_part, q, kept, lengths, score_mod, seen, options)
    rows = q.shape[:3]
    wide = wide_of(q.dtype)
    count = -(-kept.length // kept.part) if kept.part else 1
    nothing = jnp.zeros((*rows, v_size), wide), jnp.full(rows, -jnp.inf, wide)
    nothing = tuple(join_axes((*nothing, q, lengths, *kept.arrays))[:2])
    if 0 in rows:
        out, lse = nothing
    elif count <= 1 or q.size == 0:
        out, lse = attend(0)
    else:
        live = _live(q.shape, kept, lengths, seen, count)

        def step(so_far, n):
            both = lambda so_far: zip(so_far, attend(n), strict=True)
            more = lambda so_far: merge(*map(jnp.stack, both(so_far)))
            return lax.cond(live[n], more, lambda so_far: so_far, so_far), None

        # The backward pass loads each part again: to keep them would be a copy of all the keys.
        step = jax.checkpoint(step, prevent_cse=False)
        (out, lse), _ = lax.scan(step, nothing, jnp.arange(count, dtype=jnp.int32))
    if options["sinks"] is not None:
        out, lse = _with_sinks(out, lse, options["sinks"])
    if beyond is not None:
        lost = beyond[:, None, None]
        out, lse = jnp.where(lost[..., None], jnp.nan, out), jnp.where(lost, jnp.nan, lse)
    out = out.astype(q.dtype)
    return (out, Aux(lse=lse)) if options["aux"] else out


def _lengths(caller: str, lengths, batch: int, room: int):
    """Lengths `[B]`; and where they are traced, which are beyond what there is room for."""
    given, lengths = lengths, jnp.asarray(lengths)
    if lengths.shape not in ((), (batch,)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"{caller}: `lengths` is {lengths.dtype}{list(lengths.shape)}; needed are integers, a "
            f"scalar or [{batch}]."
        )
    of_each = jnp.broadcast_to(lengths.astype(jnp.int32), (batch,))
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(given)):
        return of_each, of_each > room
    known = np.ravel(given) if getattr(given, "is_fully_addressable", True) else np.zeros(0, int)
    if (wrong := known[(known < 0) | (known > room)]).size:
        raise ValueError(
            f"{caller}: `lengths` has {', '.join(map(str, wrong[:5]))}, and there is room for the "
            f"keys of {room} tokens: needed are numbers from 0 to {room}, or more room."
        )
    return of_each, None


def _seen(kept: _Keys, lengths, new: int, mask_mod, b, h, t, position):
    """Whether the t-th of the new queries sees a position."""
    place = lengths[b] - new + t
    seen = (position < lengths[b]) & (place >= 0) & kept.exists(b, position)
    if mask_mod is None:
        return seen
    with in_text():
        return _both(seen, mask_mod(b, h, place, position))


def _both(seen, own):
    """Whether both hold; what is no bool goes on as it is, for the check of mods to refuse."""
    is_bool = isinstance(own, bool) or (hasattr(own, "dtype") and own.dtype == jnp.bool_)
    return seen & own if is_bool else own


def _named(f, mod: Callable | None):
    """`f` under the name and the signature of the mod that it calls, for errors to say."""
    if mod is not None:
        f.__wrapped__ = mod
    return f


def _part(q, kept: _Keys, lengths, score_mod, seen, options: dict, n):
    """Output and log-sum-exp over part `n`, both wide; its splits are entries of the batch."""
    splits, (batch, new, *_) = kept.splits, q.shape
    k, v, start = kept.load(n)
    own, first = k.shape[1] // splits, n * kept.part
    k, v = (x.reshape(batch * splits, own, *x.shape[2:]) for x in (k, v))

    def at(b, j):
        """The text and the position of key `j` of entry `b`."""
        return b // splits, start + (b % splits) * own + j

    def mask(b, h, i, j):
        b, position = at(b, j)
        return _both(position >= first, seen(b, h, i, position))

    def score(s, b, h, i, j):
        b, position = at(b, j)
        with in_text():
            return score_mod(s, b, h, lengths[b] - new + i, position)

    scale = max(1, q.shape[-1]) ** -0.5 if options["scale"] is None else options["scale"]
    out, lse = _attend(
        jnp.repeat(q, splits, 0) if splits > 1 else q, k, v,
        score_mod=None if score_mod is None else _named(score, score_mod),
        mask_mod=_named(mask, getattr(seen, "__wrapped__", None)), scale=scale,
        dropout_rate=0.0, dropout_key=None, peak=False,
        implementation=options["implementation"], wide=True,
    )  # fmt: skip
    if splits == 1:
        return out, lse
    apart = lambda x: jnp.moveaxis(x.reshape(batch, splits, *x.shape[1:]), 1, 0)
    return merge(apart(out), apart(lse))


def _live(shape: Sequence[int], kept: _Keys, lengths, seen, count: int):
    """Which parts some query of some text and head sees something of, `[count]`."""
    batch, new, heads, _ = shape
    mods = take_apart(None, seen, jnp.float32)
    if any(map(varying_axes, mods.context)):
        # The map knows nothing of what varies inside a `shard_map`: there, lengths alone decide.
        return jnp.arange(count) * kept.part < jnp.max(lengths, initial=0)
    kinds = lambda b, h: block_map(
        mods.mask, mods.context, b=b, h=h,
        q_len=new, kv_len=kept.length, q_tile=new, kv_tile=kept.part,
    )  # fmt: skip
    each = lambda dim, n: jnp.arange(n if dim in mods.mask_dims else 1, dtype=jnp.int32)
    over_heads = jax.vmap(kinds, (None, 0))
    maps = jax.vmap(over_heads, (0, None))(each("b", batch), each("h", heads))
    return jnp.any(maps != EMPTY, (0, 1, 2))
