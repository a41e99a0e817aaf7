"""From a call with few queries to the decoding kernel: splits of the keys, and their merge."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from xform.lowering._spec import EMPTY, PARTIAL, Spec
from xform.lowering.mosaic_gpu._packed import pack, packed, unpack
from xform.lowering.mosaic_gpu._program import BAND, COL
from xform.lowering.mosaic_gpu._tuning import Tiles, vectors_of

MOST, ROWS, CHUNK = 128, 64, 16
"""Queries of a call at most, rows of a block, and columns in which they leave."""

# Keys that a call has at least, and for each of its queries: with fewer, parts cost more than they
# spare.
_FEWEST, _PER_QUERY = 512, 8
# Multiprocessors of an H200, and of every Hopper that is sold for servers.
_PROCESSORS = 132
# The share of them that splits must keep busy, and keys that one split has at least.
_BUSY, _SPLIT = 0.94, 512
# Bytes of shared memory that one block may have, the units that they come in, and how many of these
# barriers and statistics take; and bytes that the keys and values of one tile should have.
_SHARED, _UNIT, _FIXED, _TILE = 227 * 1024, 1024, 6, 32 * 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernel cuts its work.

    Attributes:
      kv: keys of a tile.
      warpgroups: how many of a block compute.
      stages: tiles that each of them has in shared memory.
      splits: blocks that share the keys of one head.
    """

    kv: int
    warpgroups: int
    stages: int
    splits: int

    @property
    def tiles(self) -> Tiles:
        return Tiles(warpgroups=1, q=ROWS, kv=self.kv, stages=self.warpgroups * self.stages)


@dataclasses.dataclass(frozen=True)
class Few:
    """The sizes of a call, batch entries of hidden dimensions counted.

    Attributes:
      batch, new, heads, kv_heads, kv_len, qk_size, v_size: B, T, H, K, S, D and V.
      page: keys of a page, None without pages.
    """

    batch: int
    new: int
    heads: int
    kv_heads: int
    kv_len: int
    qk_size: int
    v_size: int
    page: int | None = None

    @classmethod
    def of(cls, q, k, v, table=None) -> Few:
        """Of queries `[B,T,H,D]`, and keys `[B,S,K,...]` or pages `[P,N,K,...]` with a table."""
        batch, new, heads, size = q.shape
        _, length, kv_heads, v_size = v.shape
        page = None if table is None else length
        length *= 1 if table is None else table.shape[1]
        return cls(batch, new, heads, kv_heads, length, size, v_size, page)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def blocks(self) -> int:
        """Blocks of one split."""
        return self.batch * self.kv_heads * -(-self.new * self.group // ROWS)


def unsuited(spec: Spec, few: Few) -> list[str]:
    """Returns why the decoding kernel can't take a call; nothing if it can.

    Args:
      spec: the user's program.
      few: its sizes.
    """
    from xform.lowering.mosaic_gpu._attend import of_types

    wrong = of_types(spec, max(few.qk_size, few.v_size), few.kv_len)
    if few.new > MOST:
        wrong.append(f"{few.new} queries; decoding takes at most {MOST}")
    if few.kv_len % 8 and few.page is None:
        wrong.append(f"{few.kv_len} keys; bulk copies take multiples of 8")
    if few.qk_size % 16 or few.v_size % 16:
        wrong.append(f"head sizes of {few.qk_size} and {few.v_size}; multiples of 16 are taken")
    if few.page is not None and (few.page < 8 or few.page & (few.page - 1)):
        wrong.append(f"pages of {few.page} keys; a power of 2 from 8 on is taken")
    if spec.dropout:
        wrong.append("dropout")
    if not wrong:
        try:
            plan_of(spec, few)
        except NotImplementedError as e:
            wrong.append(str(e))
    return wrong


def plan_if_few(spec: Spec, few: Few) -> Plan | None:
    """Returns the plan of a call that the decoding kernel takes sooner than the forward kernel.

    There are keys enough to split, and the forward kernel's tiles would be empty for the most part,
    or its blocks too few for all multiprocessors.
    """
    if spec.format:  # there is no decoding kernel in 8 bits
        return None
    enough = few.kv_len >= max(_FEWEST, _PER_QUERY * few.new)
    idle = few.new * few.group <= ROWS or few.batch * few.heads < _PROCESSORS
    return plan_of(spec, few) if enough and idle and not unsuited(spec, few) else None


def plan_of(spec: Spec, few: Few) -> Plan:
    """Returns the plan of a call.

    Raises:
      NotImplementedError: lists what of the user's code has no form in the kernel.
    """
    from xform.lowering.mosaic_gpu._attend import programs

    vectors = vectors_of(programs(packed(spec, few.group, few.new), few=True))
    kv, stages, warpgroups = _ring(few, vectors)
    return Plan(kv, warpgroups, stages, splits_of(few.blocks, few.kv_len))


def _ring(few: Few, vectors: Sequence[str]) -> tuple[int, int, int]:
    """Keys of a tile, how many tiles each warpgroup has in shared memory, and warpgroups."""
    row = 2 * (few.qk_size + few.v_size)
    kv = 128 if 128 * row <= _TILE else 64
    width = {COL: kv, BAND: kv + ROWS}

    def bytes_of(warpgroups: int, stages: int) -> int:
        buffers = [
            2 * ROWS * few.qk_size,
            2 * stages * kv * few.qk_size,
            2 * stages * kv * few.v_size,
            4 * warpgroups * ROWS * CHUNK,
            *[4 * stages * width.get(x, 0) for x in vectors],
        ]
        return (sum(math.ceil(x / _UNIT) for x in buffers) + _FIXED) * _UNIT

    for warpgroups, each in ((2, 4), (2, 3), (2, 2), (1, 3), (1, 2)):
        if bytes_of(warpgroups, warpgroups * each) <= _SHARED:
            return kv, each, warpgroups
    raise NotImplementedError(
        f"{len(vectors)} vectors that travel with the keys; so many do not fit into shared memory"
    )


def splits_of(blocks: int, kv_len: int) -> int:
    """Returns into how many splits keys are cut.

    The fewest with which all multiprocessors are busy nearly all the time, of those that leave each
    enough keys; else those that come closest.

    Args:
      blocks: of the grid that one split has.
      kv_len: how many keys there are.

    >>> splits_of(8, 32768), splits_of(256, 32768), splits_of(8, 600)
    (16, 1, 1)
    """

    def busy(splits: int) -> float:
        waves = blocks * splits / _PROCESSORS
        return waves / math.ceil(waves)

    choices = range(1, max(1, min(kv_len // _SPLIT, 2 * _PROCESSORS)) + 1)
    return next((n for n in choices if busy(n) >= _BUSY), max(choices, key=busy))


def decode(
    spec: Spec, block_map: Callable, q, k, v, captures, context, *,
    origin=(0, 0), dtype, mods_batch: int | None = None, plan: Plan | None = None,
    ends=None, table=None, interpret=None,
):  # fmt: skip
    """Attention of few queries.

    Args:
      spec, block_map, captures, context, origin: as of `_attend.attend`.
      q: `[B,T,H,D]`.
      k, v: `[B,S,K,...]`, or pools of pages `[P,N,K,...]` with a table.
      dtype: of the output.
      mods_batch: the batch that mods see, if it is not that of q.
      plan: how the work is cut, or None for the rule's.
      ends: how many keys there are of each batch entry, int32 `[B]`, or None if all.
      table: int32 `[B,M]`, the pages of each batch entry, or None.
      interpret: parameters of the interpreter, or None.

    Returns:
      The output `[B,T,H,V]`, and of each row the maximum and the sum `[B,T,H]`.
    """
    # Pallas is slow to import, and only wanted where a kernel is built.
    from xform.lowering.mosaic_gpu import _decode
    from xform.lowering.mosaic_gpu._attend import Mods, programs
    from xform.lowering.mosaic_gpu._call import Call, Programs, Sizes
    from xform.lowering.mosaic_gpu._merge import merge
    from xform.lowering.mosaic_gpu._twins import Hardware, Twin

    (batch, new, heads, size), kv_heads, v_size = q.shape, k.shape[2], v.shape[-1]
    kv_len = k.shape[1] if table is None else k.shape[1] * table.shape[1]
    plan = plan or plan_of(spec, Few.of(q, k, v, table))
    mods_batch = batch if mods_batch is None else mods_batch
    group, tiles = heads // kv_heads, plan.tiles
    spec, origin = packed(spec, group, new), (origin[0], _over(origin[1], group))
    mods = Mods.of(spec, programs(spec, few=True), captures, context)
    rows = new * group
    operands = mods.operands(mods_batch, kv_heads, origin, rows, kv_len, tiles)
    steps = _live(spec, block_map, mods.context, (mods_batch, kv_heads), origin, rows, kv_len,
                  tiles, ends)  # fmt: skip
    sizes = Sizes(batch, rows, kv_len, kv_heads, kv_heads, size, v_size, mods_batch)
    call = Call(
        sizes, Programs(*mods.programs, spec.scale), tiles, q.dtype, jnp.dtype(dtype),
        bool(steps), Twin() if interpret else Hardware(),
    )  # fmt: skip
    q = pack(q, kv_heads)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, -rows % 8), (0, 0)))
    table = None if table is None else table.astype(jnp.int32)
    parts = _decode.decode(
        call, plan, q, k, v, ends, table, steps, operands, interpret=interpret
    )  # fmt: skip
    return [unpack(x, new) for x in merge(*parts, rows, dtype, interpret=interpret)]


def _over(x, group: int):
    """The key/value head of a query head."""
    return x // group if isinstance(x, int) else jax.lax.div(x, jnp.int32(group))


def _live(
    spec: Spec, block_map, context, units, origin, rows: int, kv_len: int, tiles: Tiles, ends
) -> tuple:
    """The live tiles of keys, see `_decode.decode`; nothing without a mask.

    By analysis alone: a tile that it can't decide is loaded and masked. To evaluate it here would
    cost a decoding step more than it could spare.
    """
    if spec.mask is None:
        return ()
    each = [
        x + jnp.arange(n if dim in spec.mask_dims else 1, dtype=jnp.int32)
        for dim, x, n in zip("bh", origin, units, strict=True)
    ]
    kinds = lambda b, h: block_map(
        spec.mask, context, b=b, h=h, exact=False,
        q_len=rows, kv_len=kv_len, q_tile=tiles.rows, kv_tile=tiles.cols,
    )  # fmt: skip
    kinds = jax.vmap(jax.vmap(kinds, (None, 0)), (0, None))(*each)
    if ends is not None:
        first = jax.lax.broadcasted_iota(jnp.int32, kinds.shape, 3) * tiles.cols
        kinds = jnp.where(first < ends[:, None, None, None], kinds, EMPTY)
    return _compact(kinds)


def _compact(kinds) -> tuple[jax.Array, jax.Array]:
    """Of codes `[..., C]`: how many tiles are live, and which, in order, with a bit for partial."""
    columns = kinds.shape[-1]
    live = kinds != EMPTY
    place = jnp.where(live, jnp.cumsum(live, -1, dtype=jnp.int32) - 1, columns).reshape(-1, columns)
    entry = 2 * jax.lax.broadcasted_iota(jnp.int32, kinds.shape, kinds.ndim - 1)
    entry = entry + (kinds == PARTIAL)
    which = jnp.arange(len(place), dtype=jnp.int32)[:, None]
    tiles = jnp.zeros(place.shape, jnp.int32)
    tiles = tiles.at[which, place].set(entry.reshape(place.shape), mode="drop", unique_indices=True)
    return live.sum(-1, dtype=jnp.int32), tiles.reshape(kinds.shape)
