"""Keys that are kept, attended to one part after the other.

Parts that no query sees, as the block map says, are not read. The others follow one another in a
loop, so that no second copy of the keys is ever made; each is split over the batch dimension for a
device that has more cores than there are heads. Results are merged by their log-sum-exps.

Mods are called here with the place of a query among the new ones, t, and the position of a key.

Known to be slow: on a CPU every part is laid out anew, head by head, before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from xform._compat import varying_axes
from xform.lowering._contract import wide_of
from xform.lowering._tile_fn import base, log_sum
from xform.lowering.blockwise import inverse
from xform.primitives._mods import take_apart
from xform.primitives._objects import static
from xform.primitives._rules import join_axes
from xform.primitives.attention import _attend
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


class Cache(NamedTuple):
    """Keys and values, contiguous or in pages.

    Attributes:
      k, v: `[B,S,K,...]`, or pools of pages `[P,N,K,...]` with a table.
      lengths: how many tokens each text has, int32 `[B]`.
      table: the pages of each text, `[B,M]`, or None.
    """

    k: Any
    v: Any
    lengths: Any
    table: Any = None

    @property
    def room(self) -> int:
        """Positions that there are."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def arrays(self) -> Sequence:
        return [x for x in self if x is not None]

    def has(self, b, position):
        """Whether a key of a text is there."""
        inside = position < self.lengths[b]
        if self.table is None or not self.room:
            return inside
        page = self.table[b, position // self.k.shape[1]]
        return inside & (page >= 0) & (page < len(self.k))

    def checked(self, out, lse):
        """Results, NaN for texts of more tokens than there is room for."""
        lost = (self.lengths > self.room)[:, None, None]
        return jnp.where(lost[..., None], jnp.nan, out), jnp.where(lost, jnp.nan, lse)

    def parts(self, batch: int, splits: int | None) -> Parts:
        """How the keys are cut, given the splits asked for."""
        splits, keys = _cut(batch * self.k.shape[2], splits, self.room)
        return (_of_array if self.table is None else _of_pages)(self, splits, keys)


class Parts(NamedTuple):
    """How keys are cut.

    Attributes:
      load: `load(n)`: keys and values `[B,keys,K,...]` of part n, and the position of the first.
      keys: of a part.
      splits: into how many pieces each part is cut.
    """

    load: Callable
    keys: int
    splits: int


def _cut(heads: int, splits: int | None, room: int) -> tuple[int, int]:
    """Into how many pieces a part of the keys is split, and how many keys each has."""
    if splits is not None:
        static("splits", splits)
    else:
        side_by_side = _SPLITS // max(1, heads)
        splits = max(1, min(side_by_side, room // _KEYS)) if jax.default_backend() == "gpu" else 1
    splits = max(1, min(splits, room))
    return splits, min(_KEYS, room // splits)


def _of_array(cache: Cache, splits: int, keys: int) -> Parts:
    part = splits * keys

    def load(n):
        # The last part begins where it fits; what it has of the one before is hidden.
        start = jnp.minimum(n * part, cache.room - part)
        cut = lambda x: lax.dynamic_slice_in_dim(x, start, part, 1)
        return cut(cache.k), cut(cache.v), start

    return Parts(load, part, splits)


def _of_pages(cache: Cache, splits: int, keys: int) -> Parts:
    size, count = cache.k.shape[1], cache.table.shape[1]
    own = splits * max(1, keys // size)
    table = jnp.pad(cache.table, ((0, 0), (0, -count % own or (not count))), constant_values=-1)

    def load(n):
        some = lax.dynamic_slice_in_dim(table, n * own, own, 1)
        return _pages_at(cache.k, some), _pages_at(cache.v, some), n * own * size

    return Parts(load, own * size, splits)


def _pages_at(pool, numbers):
    """The pages `[B,n]` of a pool as keys `[B,n N,...]`; any page for a number that is none."""
    pool = jnp.asarray(pool) if len(pool) else jnp.zeros((1, *pool.shape[1:]), pool.dtype)
    found = pool.at[numbers].get(mode="clip")
    return found.reshape(len(numbers), found.shape[1] * found.shape[2], *pool.shape[2:])


def in_parts(
    q, cache: Cache, score: Callable | None, seen: Callable, *,
    scale, splits: int | None, implementation: str | None,
):  # fmt: skip
    """Output and log-sum-exp, wide, of attention to one part after the other.

    Args:
      q: `[B,T,H,D]`.
      cache: the keys.
      score: `score(s, b, h, t, position)`, or None.
      seen: `seen(b, h, t, position)`, False where no key is.
      scale: on scores, a number or an array.
      splits: how many pieces of a part are attended to side by side, or None.
      implementation: as of `flex_attention`.
    """
    parts, rows, wide = cache.parts(len(q), splits), q.shape[:3], wide_of(q.dtype)
    options = {"scale": scale, "implementation": implementation}

    def attend(n):
        return _part(q, parts, n, score, seen, options)

    count = -(-cache.room // parts.keys) if parts.keys else 1
    nothing = jnp.zeros((*rows, cache.v.shape[-1]), wide), jnp.full(rows, -jnp.inf, wide)
    nothing = tuple(join_axes((*nothing, q, *cache.arrays))[:2])
    if 0 in rows:
        return nothing
    if count <= 1 or q.size == 0:
        return attend(0)
    live = _live(q.shape, cache, parts, seen, count)

    def step(so_far, n):
        both = lambda so_far: zip(so_far, attend(n), strict=True)
        more = lambda so_far: merge(*map(jnp.stack, both(so_far)))
        return lax.cond(live[n], more, lambda so_far: so_far, so_far), None

    # The backward pass loads each part again: to keep them would be a copy of all the keys.
    step = jax.checkpoint(step, prevent_cse=False)
    result, _ = lax.scan(step, nothing, jnp.arange(count, dtype=jnp.int32))
    return result


def named(f, mod: Callable | None):
    """`f` under the name and the signature of the mod that it calls, for errors to say."""
    if mod is not None:
        f.__wrapped__ = mod
    return f


def both(seen, own):
    """Whether both hold; what is no bool goes on as it is, for the check of mods to refuse."""
    is_bool = isinstance(own, bool) or (hasattr(own, "dtype") and own.dtype == jnp.bool_)
    return seen & own if is_bool else own


def _part(q, parts: Parts, n, score: Callable | None, seen: Callable, options: dict):
    """Output and log-sum-exp over part `n`, both wide; its splits are entries of the batch."""
    splits, (batch, *_) = parts.splits, q.shape
    k, v, start = parts.load(n)
    own, first = k.shape[1] // splits, n * parts.keys
    k, v = (x.reshape(batch * splits, own, *x.shape[2:]) for x in (k, v))

    def at(b, j):
        """The text and the position of key `j` of entry `b`."""
        return b // splits, start + (b % splits) * own + j

    def mask(b, h, i, j):
        b, position = at(b, j)
        return both(position >= first, seen(b, h, i, position))

    def modified(s, b, h, i, j):
        assert score is not None
        b, position = at(b, j)
        return score(s, b, h, i, position)

    wrapped = lambda f: getattr(f, "__wrapped__", None)
    out, lse = _attend(
        jnp.repeat(q, splits, 0) if splits > 1 else q, k, v,
        score_mod=None if score is None else named(modified, wrapped(score)),
        mask_mod=named(mask, wrapped(seen)),
        dropout_rate=0.0, dropout_key=None, peak=False, wide=True, **options,
    )  # fmt: skip
    if splits == 1:
        return out, lse
    apart = lambda x: jnp.moveaxis(x.reshape(batch, splits, *x.shape[1:]), 1, 0)
    return merge(apart(out), apart(lse))


def _live(shape: Sequence[int], cache: Cache, parts: Parts, seen, count: int):
    """Which parts some query of some text and head sees something of, `[count]`."""
    batch, new, heads, _ = shape
    mods = take_apart(None, seen, jnp.float32)
    if any(map(varying_axes, mods.context)):
        # The map knows nothing of what varies inside a `shard_map`: there, lengths alone decide.
        return jnp.arange(count) * parts.keys < jnp.max(cache.lengths, initial=0)
    kinds = lambda b, h: block_map(
        mods.mask, mods.context, b=b, h=h,
        q_len=new, kv_len=cache.room, q_tile=new, kv_tile=parts.keys,
    )  # fmt: skip
    each = lambda dim, n: jnp.arange(n if dim in mods.mask_dims else 1, dtype=jnp.int32)
    over_heads = jax.vmap(kinds, (None, 0))
    maps = jax.vmap(over_heads, (0, None))(each("b", batch), each("h", heads))
    return jnp.any(maps != EMPTY, (0, 1, 2))
