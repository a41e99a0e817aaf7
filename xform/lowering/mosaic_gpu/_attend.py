"""From a call of attention to a kernel: which programs, which tiles, which operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.lowering._dropout import kept
from xform.lowering._spec import EMPTY, FULL, PARTIAL, Spec
from xform.lowering.mosaic_gpu._lines import Grid
from xform.lowering.mosaic_gpu._program import TileProgram, split
from xform.lowering.mosaic_gpu._split_keys import Few, decode, plan_if_few
from xform.lowering.mosaic_gpu._tuning import MOST_IN_EIGHT, Tiles, tiles_of

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_MOST = 256
# Indices are exact in float32, and the kernel computes with them there.
_LONGEST = 2**24
# The map of a mask that reads no array is a constant of the program, up to so many tiles.
_CONSTANT = 2**18


def misfits(spec: Spec, q_shape: Sequence[int], kv_len: int, v_size: int) -> list[str]:
    """Returns why the kernels can't take a call; nothing if they can.

    Args:
      spec: the user's program.
      q_shape: `[..., T, H, D]`.
      kv_len: S.
      v_size: V.
    """
    size = max(q_shape[-1], v_size)
    wrong = of_types(spec, size, max(q_shape[-3], kv_len))
    if spec.format and v_size > MOST_IN_EIGHT:
        wrong.append(
            f"values with a head size of {v_size}; products in 8 bits have registers for at most "
            f"{MOST_IN_EIGHT}"
        )
        return wrong
    try:
        parts = programs(spec)
        if size <= _MOST:
            tiles_of(parts, kv_len, q_shape[-1], v_size, eight=bool(spec.format))
    except NotImplementedError as e:
        wrong.append(str(e))
    return wrong


def of_types(spec: Spec, size: int, length: int) -> list[str]:
    """Returns why no kernel takes arrays with heads of `size` and texts of `length`, at most."""
    wrong = []
    if spec.dtype not in _DTYPES:
        wrong.append(f"q, k and v are {spec.dtype}; the tensor cores take bfloat16 and float16")
    if size > _MOST:
        wrong.append(f"a head size of {size}; at most {_MOST} fits in shared memory")
    if length >= _LONGEST:
        wrong.append(f"a length of {length}; at most {_LONGEST - 1}")
    return wrong


@functools.lru_cache(maxsize=1024)
def programs(
    spec: Spec, few: bool = False
) -> tuple[TileProgram | None, TileProgram | None, TileProgram | None]:
    """The user's score, mask and dropout, split for a kernel; for one of `few` queries.

    Raises:
      NotImplementedError: lists what has no form in one.
    """
    wrong, parts = [], []
    reads = tuple(read for group in spec.reads for read in group)
    drop = _dropout(spec.dropout) if spec.dropout else None
    for name, jaxpr, score in (
        ("score_mod", spec.score, True), ("mask_mod", spec.mask, False), ("dropout", drop, False),
    ):  # fmt: skip
        try:
            split_one = jaxpr and split(jaxpr, score=score, reads=reads if score else None, few=few)
            parts.append(split_one)
        except NotImplementedError as e:
            wrong.append(f"in `{name}`: {e}")
    if wrong:
        raise NotImplementedError("; ".join(wrong))
    return tuple(parts)


def _dropout(rate: float):
    index = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    return jax.make_jaxpr(lambda b, h, q, k, key: kept(key, rate, b, h, q, k))(*[index] * 4, key)


def attend(
    spec: Spec, block_map: Callable, hidden: int, q, k, v, captures, context, *,
    dtype, origin=(0, 0), device: str | None = None, tiles: Tiles | None = None, interpret=None,
):  # fmt: skip
    """The forward pass; arguments and results as of `blockwise.attend`, the output in `dtype`.

    `device` is the kind of the device, as JAX calls it, for the table of tiles.
    """
    sizes = [max(x.shape[d] for x in (q, k, v, *captures, *context)) for d in range(hidden)]
    run = functools.partial(
        _attend, spec, block_map,
        origin=origin, dtype=dtype, device=device, tiles=tiles, interpret=interpret,
    )  # fmt: skip
    if all(x.shape[d] == 1 for x in (*captures, *context) for d in range(hidden)):
        # Only q, k and v differ: hidden dimensions are more of the batch.
        batch = q.shape[hidden]
        fold = lambda x: jnp.broadcast_to(x, (*sizes, *x.shape[hidden:])).reshape(
            -1, *x.shape[hidden + 1 :]
        )
        inner = lambda x: x.reshape(x.shape[hidden:])
        q, k, v = map(fold, (q, k, v))
        captures, context = ([inner(x) for x in xs] for xs in (captures, context))
        out = run(q, k, v, captures, context, mods_batch=batch)
        return [x.reshape(*sizes, batch, *x.shape[1:]) for x in out]
    for size in reversed(sizes):
        run = one_by_one(run, size)
    return list(run(q, k, v, list(captures), list(context)))


def one_by_one(run: Callable, size: int) -> Callable:
    """`run` along a leading dimension that arrays have, or have one of."""

    def mapped(*args):
        leaves, tree = jax.tree.flatten(args)
        at = lambda i: [x[0] if x.shape[0] == 1 else x[i] for x in leaves]
        return lax.map(lambda i: run(*jax.tree.unflatten(tree, at(i))), jnp.arange(size))

    return mapped


def _attend(
    spec: Spec, block_map, q, k, v, captures, context, *,
    origin, dtype, device, tiles: Tiles | None, interpret, mods_batch: int | None = None,
):  # fmt: skip
    """`attend` without hidden dimensions; mods see `b % mods_batch`."""
    # Pallas is slow to import, and only wanted where a kernel is built.
    from xform.lowering.mosaic_gpu._call import Call, Programs, Sizes
    from xform.lowering.mosaic_gpu._careful import careful
    from xform.lowering.mosaic_gpu._forward import Forward, forward
    from xform.lowering.mosaic_gpu._forward_eight import ForwardInEight
    from xform.lowering.mosaic_gpu._narrow import in_eight
    from xform.lowering.mosaic_gpu._twins import Hardware, Twin

    (batch, q_len, heads, size), kv_len, v_size = q.shape, k.shape[1], v.shape[-1]
    mods_batch = batch if mods_batch is None else mods_batch
    few = Few.of(q, k, v)
    if tiles is None and (plan := plan_if_few(spec, few)):
        return decode(
            spec, block_map, q, k, v, captures, context, origin=origin, dtype=dtype,
            mods_batch=mods_batch, plan=plan, interpret=interpret,
        )  # fmt: skip
    parts = programs(spec)
    tiles = tiles or tiles_of(parts, kv_len, size, v_size, device, eight=bool(spec.format))
    mods = Mods.of(spec, parts, captures, context)
    operands = mods.operands(mods_batch, heads, origin, q_len, kv_len, tiles)
    lists = steps(
        spec, block_map, mods.context, mods_batch, heads, heads, origin, q_len, kv_len, tiles
    )
    units = (32, 32, 64) if spec.format else (16, 16, 16)
    q, k, v = map(padded, (q, k, v), units)
    sizes = Sizes(batch, q_len, kv_len, heads, k.shape[2], q.shape[-1], v.shape[-1], mods_batch)
    call = Call(
        sizes, Programs(*mods.programs, spec.scale, spec.dropout), tiles, q.dtype, jnp.dtype(dtype),
        bool(lists), Twin() if interpret else Hardware(),
    )  # fmt: skip
    fast, arrays, body = call, (q, k, v), Forward
    if spec.format:
        arrays, body = in_eight(q, k, v, interpret=interpret), ForwardInEight
        fast = call.in_eight
    out, top, total, sums = forward(
        fast, *arrays, steps=lists, operands=operands, body=body, interpret=interpret
    )
    if spec.mask is not None:
        finite = jnp.isfinite(sums[..., :q_len]).all().astype(jnp.int32)[None]
        out = careful(call, q, k, v, lists, operands, out, finite, interpret=interpret)
    if spec.score is not None and not spec.format:
        total = total * jnp.exp2(-residue(top))
    per_row = lambda x: x[..., :q_len].swapaxes(1, 2)
    return [out[:, :q_len, :, :v_size], per_row(top), per_row(total)]


def residue(top):
    """What `top * LOG2E` loses by rounding, of which every weight of a kernel's row has too much.

    The weights are `exp2(fma(s, LOG2E, -(top * LOG2E)))`. Of maxima near 10,000 the residue is a
    thousandth, so the sum of the weights must know it. By the parts of a product that are exact
    (Dekker, 1971).
    """
    from xform.lowering.mosaic_gpu._call import LOG2E

    def halves(x):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        return high, x - high

    factor = jnp.float32(LOG2E)
    top = jnp.where(jnp.isfinite(top), top, 0)
    (a, b), (c, d) = halves(top), halves(factor)
    return ((a * c - top * factor) + a * d + b * c) + b * d


@dataclasses.dataclass(frozen=True)
class Mods:
    """The user's code with what it reads.

    Attributes:
      programs: score, mask and dropout, split, or None.
      loaded: what each of the score's reads reads from.
      context: arrays that masks and indices read.
      key: of dropout, or None.
    """

    programs: tuple[TileProgram | None, TileProgram | None, TileProgram | None]
    loaded: Sequence[jax.Array]
    context: Sequence[jax.Array]
    key: jax.Array | None

    @classmethod
    def of(cls, spec: Spec, programs, captures, context) -> Mods:
        loaded = [x for x, group in zip(captures, spec.reads, strict=True) for _ in group]
        context, key = (context[:-1], context[-1]) if spec.dropout else (context, None)
        return cls(programs, loaded, context, key)

    def operands(self, batch, heads, origin, q_len: int, kv_len: int, tiles: Tiles) -> list:
        """What the programs take, computed; see `TileProgram.arrays`."""
        rows, cols = _positions(q_len, tiles.rows), _positions(kv_len, tiles.cols)
        arrays = ([*self.loaded, *self.context], self.context, [self.key])
        return [
            x
            for program, read in zip(self.programs, arrays, strict=True)
            if program is not None
            for x in program.arrays(read, batch, heads, origin, rows, cols)
        ]


def _positions(length: int, tile: int):
    """The true indices of whole tiles, those of the padding clipped to the last one."""
    return jnp.minimum(jnp.arange(-(-length // tile) * tile, dtype=jnp.int32), length - 1)


def padded(x, size: int = 16):
    """`[B,T,H,D]` with a length of 8 n, for bulk copies, and a multiple of `size`, for products.

    Zeros change no score; what they add to the output is cut off.
    """
    extra = (0, -x.shape[1] % 8, 0, -x.shape[3] % size)
    return jnp.pad(x, [(0, n) for n in extra]) if any(extra) else x


def steps(
    spec: Spec, block_map, context, batch, heads, kv_heads, origin, q_len, kv_len, tiles: Tiles
):
    """The live tiles that each block visits, see `forward`; nothing where all tiles are full."""
    ragged = kv_len % tiles.cols or (tiles.by_keys and q_len % tiles.rows)
    if spec.mask is None and not ragged:
        return ()
    shared = (spec, block_map, batch, (heads, kv_heads), (q_len, kv_len), tiles)
    return _listed(_steps, shared, context, origin)


def kinds(
    spec: Spec, block_map, context, batch, heads, kv_heads, origin, q_len, kv_len, tiles: Tiles
):
    """What each tile is, `([U,W,R,C],)`, int32; nothing where no tile has a mask."""
    if spec.mask is None:
        return ()
    shared = (spec, block_map, batch, (heads, kv_heads), (q_len, kv_len), tiles)
    return _listed(_kinds, shared, context, origin)


def lines(
    spec: Spec, block_map, context, batch, heads, kv_heads, origin, q_len, kv_len, tiles: Tiles,
    *, along: str,
):  # fmt: skip
    """The live tiles of each row or diagonal, see `Grid.lists`; nothing where all are full."""
    if spec.mask is None and not (kv_len % tiles.cols or q_len % tiles.rows):
        return ()
    shared = (spec, block_map, batch, (heads, kv_heads), (q_len, kv_len), tiles, along)
    return _listed(_lines, shared, context, origin)


def _listed(build: Callable, shared: tuple, context, origin):
    """`build(*shared, context, origin)`, made now where it reads no array and is not large."""
    spec, _, batch, (heads, _), (q_len, kv_len), tiles, *_ = shared
    b, h = _units(spec, batch, heads)
    count = b * h * -(-q_len // tiles.rows) * -(-kv_len // tiles.cols)
    if context or count > _CONSTANT or any(isinstance(x, jax.Array) for x in origin):
        return build(*shared, context, origin)
    return _constant(build, shared, tuple(origin))


def _units(spec: Spec, batch: int, heads: int) -> tuple[int, int]:
    """How many batch entries and heads have a mask of their own."""
    return (batch if "b" in spec.mask_dims else 1), (heads if "h" in spec.mask_dims else 1)


def _kinds(spec: Spec, block_map, batch, heads, lengths, tiles: Tiles, context, origin):
    """`kinds` from `origin` on."""
    codes = _codes(spec, block_map, batch, heads, lengths, tiles, context, origin)
    return (codes.astype(jnp.int32),)


def _steps(spec: Spec, block_map, batch, heads, lengths, tiles: Tiles, context, origin):
    """`steps` from `origin` on."""
    codes = _codes(spec, block_map, batch, heads, lengths, tiles, context, origin)
    if not tiles.by_keys:
        return _compact(codes)
    return walks(_by_keys(codes, *heads), back=spec.deterministic)


def _lines(spec: Spec, block_map, batch, heads, lengths, tiles: Tiles, along, context, origin):
    """`lines` from `origin` on."""
    codes = _codes(spec, block_map, batch, heads, lengths, tiles, context, origin)
    return Grid.of(along, lengths, tiles).lists(codes)


def _codes(spec: Spec, block_map, batch, heads, lengths, tiles: Tiles, context, origin):
    """What each tile is, `[U,W,R,C]`."""
    of_unit = lambda b, h: block_map(
        spec.mask, context, b=b, h=h,
        q_len=lengths[0], kv_len=lengths[1], q_tile=tiles.rows, kv_tile=tiles.cols,
    )  # fmt: skip
    units = _units(spec, batch, heads[0])
    each = [x + jnp.arange(n, dtype=jnp.int32) for x, n in zip(origin, units, strict=True)]
    return jax.vmap(jax.vmap(of_unit, (None, 0)), (0, None))(*each)


@functools.lru_cache(maxsize=256)
def _constant(build: Callable, args: tuple, origin: tuple) -> tuple[np.ndarray, ...]:
    """The steps of a mask that reads no array, as numbers.

    Compiled apart from what is being traced, and as one program, since its operations are many and
    small; and once, since every layer and every trace asks for the same.
    """
    with jax.default_device(_host()):
        program = jax.jit(functools.partial(build, *args, (), origin)).lower().compile()
    return tuple(np.asarray(x) for x in program())


def _host() -> Any:
    """A CPU, which compiles small programs many times faster than a GPU; None if JAX has none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # `JAX_PLATFORMS=cuda`
        return None


def _by_keys(kinds, heads: int, kv_heads: int):
    """Codes `[U,W,R,C]` as `[U,W,C,R*G]`: of each block of keys, the tiles of a group's heads."""
    u, w, rows, columns = kinds.shape
    group = heads // kv_heads
    kinds = kinds.reshape(u, 1 if w == 1 else kv_heads, -1, rows, columns)
    kinds = jnp.broadcast_to(kinds, (u, kinds.shape[1], group, rows, columns))
    return kinds.transpose(0, 1, 4, 3, 2).reshape(u, -1, columns, rows * group)


def walks(kinds, *, back: bool):
    """Of codes `[..., C, N]` what each block of keys walks along, from the first tile or the last.

    Under a causal mask the blocks with the most work are launched together. From the last tile
    back they meet where they begin, each a tile behind the one before: so in turns nobody waits.
    From the first one on, where each has its own, they don't meet at all.

    Args:
      kinds: the codes.
      back: from the last tile back.

    Returns:
      The blocks as they are launched, `[..., C]`, the longest walk first. In that order: how many
      tiles each visits, `[..., C, 2]`; which, `[..., C, N]`, twice the index, plus 1 for a partial
      one; and how many blocks are launched before that visit the same, `[..., C, N]`.
    """
    order, kinds = _launched(kinds)
    live = (kinds != EMPTY).astype(jnp.int32)
    count = live.sum(-1, dtype=jnp.int32)
    seen = jnp.cumsum(live, -1)
    place = jnp.where(live, count[..., None] - seen if back else seen - 1, kinds.shape[-1])
    index = 2 * lax.broadcasted_iota(jnp.int32, kinds.shape, kinds.ndim - 1)
    lists = functools.partial(_scattered, place)
    earlier = jnp.cumsum(live, -2) - live
    return order, jnp.stack([count, count], -1), lists(index + (kinds == PARTIAL)), lists(earlier)


def _launched(kinds):
    """Rows of codes `[..., R, C]` as they are launched, those with the most work first, and which.

    What a block needs to know lies where its own number says: it need not ask for its row before.
    """
    live = (kinds != EMPTY).sum(-1, dtype=jnp.int32)
    order = jnp.argsort(-live, axis=-1, stable=True).astype(jnp.int32)
    return order, jnp.take_along_axis(kinds, order[..., None], -2)


def _scattered(place, values):
    """`[..., N]` with each value at its place along the last dimension; beyond it, dropped."""
    flat = place.reshape(-1, place.shape[-1])
    which = jnp.arange(len(flat), dtype=jnp.int32)[:, None]
    zeros = jnp.zeros(flat.shape, jnp.int32)
    return zeros.at[which, flat].set(values.reshape(flat.shape), mode="drop").reshape(place.shape)


def _compact(kinds):
    """Of codes `[..., R, C]`: the rows as launched; their counts, and columns of live tiles."""
    order, kinds = _launched(kinds)
    columns = kinds.shape[-1]
    partial, full = kinds == PARTIAL, kinds == FULL
    n_partial = partial.sum(-1, dtype=jnp.int32)
    n_live = (kinds != EMPTY).sum(-1, dtype=jnp.int32)
    # A row with no tile visits one, and finds nothing visible: its output is 0 all the same.
    nothing = n_live == 0
    count = jnp.stack([n_partial + nothing, n_live + nothing], -1)
    place = jnp.where(
        partial,
        jnp.cumsum(partial, -1, dtype=jnp.int32) - 1,
        jnp.where(full, n_partial[..., None] + jnp.cumsum(full, -1, dtype=jnp.int32) - 1, columns),
    )
    cols = _scattered(place, jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), kinds.shape))
    return order, count, cols
