"""From the derivative of attention to the backward kernel: operands, and what comes back.

The kernel is one term of `_tile_fn`: `Transpose(Jvp(Attend))`, with gradients for any of q, k, v
and for the captured arrays that the score mod reads: those of keys and heads by the kernel that
makes dK; those of queries, of distances and, where they have about as many numbers as there are
pairs, of pairs by kernels of their own. All others (forward mode, higher orders, the gradient of a
maximum) run blockwise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from itertools import batched

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._contract import wide_of
from xform.lowering._spec import Read, Spec
from xform.lowering._tile_fn import Attend, Jvp, TileFn, Transpose, base
from xform.lowering.mosaic_gpu import _attend
from xform.lowering.mosaic_gpu._classes import BAND, COL, ROW, TILE, Class
from xform.lowering.mosaic_gpu._lines import Grid
from xform.lowering.mosaic_gpu._lookup import of_read
from xform.lowering.mosaic_gpu._program import class_of_read, derivatives, load_one
from xform.lowering.mosaic_gpu._tuning import (
    PAIR_TILES,
    Tiles,
    backward_tiles_of,
    pair_tiles_of,
    vectors_of,
)

# Columns that half a row of dQ has, at least: what one bulk copy takes.
_COLUMNS = 32
# Vectors that shared memory has room for beside all tiles, by the warpgroups with scores: one is
# all that wide heads leave, with less room.
_VECTORS = {1: 4, 2: 8}
# The sums over the batch of what pairs read take so many times the room of the array, at most.
_ROOM = 2
# And those of what queries or distances read, a tile for each line of tiles, so many bytes.
_ROOM_OF_LINES = 4 << 30
# Numbers whose sums one kernel has registers for.
_SUMS = 3
_Q, _K, _V, _CAPTURES = 0, 3, 4, 5
"""Where these are among the operands of `Attend`."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The reverse mode of attention.

    Attributes:
      spec: the user's program.
      moving: of each operand of `Attend`, whether it has a gradient.
    """

    spec: Spec
    moving: tuple[bool, ...]

    @classmethod
    def of(cls, fn: TileFn) -> Gradient | None:
        """`fn` as a gradient, if it is one."""
        match fn:
            case Transpose(Jvp(Attend(spec), moving), linear, _):
                n = len(moving)
                if not any(linear[:n]) and all(linear[n:]):
                    return cls(spec, moving)
        return None

    @property
    def reads(self) -> list[Read]:
        return [read for group in self.spec.reads for read in group]

    @property
    def wanted(self) -> tuple[int, ...]:
        """Which reads have a gradient."""
        groups = zip(self.spec.reads, self.moving[_CAPTURES:], strict=True)
        flags = [moves for group, moves in groups for _ in group]
        return tuple(n for n, moves in enumerate(flags) if moves)

    @property
    def apart(self) -> list[tuple[Class, tuple[int, ...]]]:
        """Of these, those of kernels of their own, and what they belong to."""
        found: dict[Class, tuple[int, ...]] = {}
        for n in self.wanted:
            kind = class_of_read(self.reads[n])
            if kind.pair in (ROW, BAND, TILE):
                found[kind] = (*found.get(kind, ()), n)
        return [(kind, some) for kind, reads in found.items() for some in batched(reads, _SUMS)]

    @property
    def by_key(self) -> tuple[int, ...]:
        """The others, which the kernel that makes dK sums over the queries."""
        apart = {n for _, group in self.apart for n in group}
        return tuple(n for n in self.wanted if n not in apart)


def gradient_misfits(fn: TileFn, operands: Sequence) -> list[str]:
    """Returns why the backward kernel can't evaluate a tile sum; nothing if it can.

    Args:
      fn: its function.
      operands: one array for each of `fn.operands`, or its type.
    """
    gradient = Gradient.of(fn)
    if gradient is None:
        return [f"the kernel is for reverse mode of first order, not for {_named(fn)}"]
    q_shape, (kv_len, _, v_size) = operands[_Q].shape, operands[_V].shape[-3:]
    wrong = _attend.misfits(gradient.spec, q_shape, kv_len, v_size)
    wrong = wrong or _crowded(gradient, q_shape[-1], v_size)
    wrong += _ill_paired(gradient, q_shape, kv_len, operands[_CAPTURES:])
    wrong += _roomy(gradient, q_shape, kv_len)
    return list(dict.fromkeys(wrong))


def _ill_paired(gradient: Gradient, q_shape, kv_len: int, captures: Sequence) -> list[str]:
    """Why the kernel of pairs can't sum what pairs read, or should not, for the room it takes."""
    *hidden, batch, q_len, heads, _ = q_shape
    sizes, wrong = {"b": batch, "h": heads}, []
    groups = zip(gradient.spec.reads, captures, strict=False)
    arrays = [array for group, array in groups for _ in group]
    for kind, reads in gradient.apart:
        if kind.pair != TILE:
            continue
        pairs = q_len * kv_len * math.prod(sizes[x] for x in kind.heads)
        for n in reads:
            numbers = math.prod(arrays[n].shape[len(hidden) :])
            if of_read(gradient.reads[n], arrays[n].dtype) is None:
                wrong.append("the gradient of an array at an index that mixes query and key")
            elif pairs > _ROOM * numbers:
                wrong.append(
                    "the gradient of an array that is read per query and key, and has "
                    f"{numbers} numbers where there are {pairs} pairs"
                )
    return wrong


def _roomy(gradient: Gradient, q_shape, kv_len: int) -> list[str]:
    """Why the kernel of lines should not sum what queries or distances read: the room it takes."""
    *_, batch, q_len, heads, _ = q_shape
    sizes, wrong = {"b": batch, "h": heads}, []
    for kind, reads in gradient.apart:
        if kind.pair == TILE:
            continue
        lines = Grid.of(kind.pair, (q_len, kv_len), PAIR_TILES).lines
        units = math.prod(sizes[x] for x in kind.heads)
        room = 4 * PAIR_TILES.rows * PAIR_TILES.cols * lines * units * len(reads)
        if room > _ROOM_OF_LINES:
            wrong.append(
                f"sums of {units} x {lines} lines of tiles, for what is read per "
                f"{'query' if kind.pair == ROW else 'distance'}, which take {room / 2**30:.0f} GiB"
            )
    return wrong


def _crowded(gradient: Gradient, qk_size: int, v_size: int) -> list[str]:
    """What does not fit into shared memory, or has no derivative."""
    try:
        vectors = len(vectors_of(_programs(gradient, gradient.by_key)))
        apart = [_programs(gradient, reads) for _, reads in gradient.apart]
    except NotImplementedError as e:
        return [f"in the derivative: {e}"]
    wrong, most = [], _VECTORS[backward_tiles_of(qk_size, v_size).warpgroups]
    if vectors > most:
        wrong.append(f"{vectors} vectors that travel with the queries; {most} fit")
    if any(pair_tiles_of(programs, qk_size, v_size) is None for programs in apart):
        wrong.append("more vectors beside what belongs to pairs than shared memory holds")
    return wrong


def _named(fn: TileFn) -> str:
    inner = getattr(fn, "fn", None)
    return f"{type(fn).__name__}({_named(inner)})" if inner else type(fn).__name__


@functools.lru_cache(maxsize=1024)
def _programs(gradient: Gradient, wanted: tuple[int, ...]):
    """Score with its derivatives by some reads, mask and dropout, split for a kernel."""
    spec = gradient.spec
    if spec.score is not None:
        spec = dataclasses.replace(spec, score=derivatives(spec.score, wanted))
    return _attend.programs(spec)


def tile_sum(
    fn: TileFn, block_map: Callable, hidden: int, outs: Sequence, operands, context, *,
    origin=(0, 0), tiles: Tiles | None = None, interpret=None,
):  # fmt: skip
    """Evaluates the tile sum of a gradient; arguments and results as of `blockwise.tile_sum`."""
    gradient = Gradient.of(fn)
    assert gradient is not None
    arrays = [*operands, *context]
    sizes = [max(x.shape[d] for x in arrays) for d in range(hidden)]
    run = functools.partial(
        _gradient, gradient, block_map, len(operands),
        origin=origin, tiles=tiles, interpret=interpret,
    )  # fmt: skip
    is_side = [
        n < _CAPTURES or n in (len(operands) - 2, len(operands) - 1) for n in range(len(arrays))
    ]
    shared = [x for x, side in zip(arrays, is_side, strict=True) if not side]
    if all(x.shape[d] == 1 for x in shared for d in range(hidden)):
        # Only rows and columns differ: hidden dimensions are more of the batch.
        batch = operands[_Q].shape[hidden]
        fold = lambda x: jnp.broadcast_to(x, (*sizes, *x.shape[hidden:])).reshape(
            -1, *x.shape[hidden + 1 :]
        )
        inner = lambda x: x.reshape(x.shape[hidden:])
        folded = [fold(x) if side else inner(x) for x, side in zip(arrays, is_side, strict=True)]
        results = run(*folded, mods_batch=batch)
        results = [
            x.reshape(*sizes, batch, *x.shape[1:])
            if n < sum(gradient.moving[:_CAPTURES])
            else x.reshape(*[1] * hidden, *x.shape)
            for n, x in enumerate(results)
        ]
    else:
        for size in reversed(sizes):
            run = _attend.one_by_one(run, size)
        results = run(*arrays)
    return [_summed(x, out) for x, out in zip(results, outs, strict=True)]


def _summed(x, out):
    """A result of the kernel, summed over the hidden dimensions that its operand does not have."""
    wide = wide_of(x.dtype)
    dims = tuple(d for d, (n, m) in enumerate(zip(x.shape, out.shape, strict=True)) if n > m == 1)
    x = x.sum(dims, keepdims=True, dtype=wide) if dims else x
    return x.astype(out.dtype)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What both backward kernels take, without padding but that of head sizes.

    Attributes:
      q, k, v, d_out: `[B,T or S,H or K,*]`.
      statistics: `base`, `norm` and `delta`, `[B,T,H]`, see `backward`.
      captures, context: arrays that the user's code reads.
      origin: as of `attend`.
      mods_batch: mods see `b % mods_batch`.
      q_len, kv_len: T and S.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    statistics: tuple[jax.Array, jax.Array, jax.Array]
    captures: Sequence[jax.Array]
    context: Sequence[jax.Array]
    origin: Sequence
    mods_batch: int
    q_len: int
    kv_len: int

    def prepared(self, spec: Spec, programs, tiles: Tiles, lists: Callable, interpret):
        """What a kernel of these programs takes: its `Call`, statistics, lists and operands."""
        from xform.lowering.mosaic_gpu._call import Call, Programs, Sizes
        from xform.lowering.mosaic_gpu._twins import Hardware, Twin

        q, k, v, batch = self.q, self.k, self.v, self.mods_batch
        lengths = self.q_len, self.kv_len
        mods = _attend.Mods.of(spec, programs, self.captures, self.context)
        operands = mods.operands(batch, q.shape[2], self.origin, *lengths, tiles)
        steps = lists(
            spec, mods.context, batch, q.shape[2], k.shape[2], self.origin, *lengths, tiles
        )
        extra = -self.q_len % tiles.rows
        per_row = lambda x: jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, extra)])
        sizes = Sizes(q.shape[0], *lengths, q.shape[2], k.shape[2], q.shape[-1], v.shape[-1], batch)
        call = Call(
            sizes, Programs(*mods.programs, spec.scale), tiles, q.dtype, q.dtype,
            bool(steps), Twin() if interpret else Hardware(),
        )  # fmt: skip
        return call, [per_row(x) for x in self.statistics], steps, operands


def _gradient(
    gradient: Gradient, block_map, n_operands: int, *arrays,
    origin, tiles: Tiles | None, interpret, mods_batch: int | None = None,
):  # fmt: skip
    """`tile_sum` without hidden dimensions; mods see `b % mods_batch`."""
    from xform.lowering.mosaic_gpu._call import LOG2E

    spec = gradient.spec
    (q, top, norm, k, v, *captures, d_sum, d_one), context = (
        arrays[:n_operands], arrays[n_operands:],
    )  # fmt: skip
    size, v_size, lengths = q.shape[-1], v.shape[-1], (q.shape[1], k.shape[1])
    mods_batch = q.shape[0] if mods_batch is None else mods_batch
    if spec.score is not None:
        norm = norm * jnp.exp2(-_attend.residue(top))
    q, k = (_attend.padded(x, _COLUMNS) for x in (q, k))
    v, d_out = (_attend.padded(x) for x in (v, d_sum.astype(v.dtype)))
    statistics = base(top) * LOG2E, norm, d_one
    inputs = _Inputs(
        q, k, v, d_out, statistics, captures, context, origin, mods_batch, *lengths
    )  # fmt: skip
    dq, dk, dv, loads = _by_keys(
        gradient, block_map, inputs, tiles or backward_tiles_of(size, v_size), interpret
    )
    for kind, reads in gradient.apart:
        sums = _apart(gradient, block_map, inputs, kind, reads, interpret)
        loads |= dict(zip(reads, sums, strict=True))
    moving = gradient.moving
    own = (_Q, dq[..., :size]), (_K, dk[..., :size]), (_V, dv[..., :v_size])
    results = [x for n, x in own if moving[n]]
    context = context[:-1] if spec.dropout else context
    first = 0
    for capture, group, moves in zip(captures, spec.reads, moving[_CAPTURES:], strict=True):
        parts = [
            _pulled_back(read, capture, context, origin, lengths[1], spec.deterministic, loads[n])
            for n, read in enumerate(group, first)
            if moves
        ]
        results += [sum(parts)] if moves else []
        first += len(group)
    return results


def _by_keys(gradient: Gradient, block_map, inputs: _Inputs, tiles: Tiles, interpret):
    """dQ, dK, dV, and the sums over queries of what belongs to a key or to none, by read."""
    from xform.lowering.mosaic_gpu._backward import Backward, backward
    from xform.lowering.mosaic_gpu._backward_narrow import WIDTH, Narrow
    from xform.lowering.mosaic_gpu._backward_wide import Wide

    spec, wanted = gradient.spec, gradient.by_key
    q, k, v = inputs.q, inputs.k, inputs.v
    heads, kv_heads = q.shape[2], k.shape[2]
    if wanted and kv_heads < heads:  # sums are by head
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        inputs = dataclasses.replace(inputs, k=k, v=v)
    lists = lambda spec, *rest: _attend.steps(spec, block_map, *rest)
    call, statistics, steps, operands = inputs.prepared(
        spec, _programs(gradient, wanted), tiles, lists, interpret
    )
    narrow = q.shape[-1] + v.shape[-1] <= WIDTH and not spec.deterministic
    kind = Wide if tiles.warpgroups == 1 else Narrow if narrow else Backward
    body = kind(call, len(wanted), in_turns=spec.deterministic)
    dq, dk, dv, columns = backward(
        body, q, k, v, inputs.d_out, statistics, steps, operands, interpret=interpret
    )
    dq = (dq * spec.scale)[:, : inputs.q_len]
    dk, dv = (x[:, : inputs.kv_len] for x in (dk, dv))
    if k.shape[2] > kv_heads:
        by_group = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
        dk, dv = (by_group(x).sum(3, dtype=jnp.float32) for x in (dk, dv))
    by_entry = lambda x: x.reshape(-1, inputs.mods_batch, *x.shape[1:]).sum(0)
    columns = [by_entry(x)[:, :, None, : inputs.kv_len] for x in columns]  # [B,H,1,S]
    return dq, dk, dv, dict(zip(wanted, columns, strict=True))


def _apart(
    gradient: Gradient, block_map, inputs: _Inputs, kind: Class, reads: tuple[int, ...], interpret
) -> list[jax.Array]:
    """The sums, over the batch or heads too, of what has a kernel of its own.

    Returns:
      `[B or 1,H or 1,T,S]` of pairs, `[...,T,1]` of queries, `[...,1,S + T - 1]` of distances.
    """
    from xform.lowering.mosaic_gpu._backward_lines import Lines, backward_lines
    from xform.lowering.mosaic_gpu._backward_pairs import Pairs, backward_pairs

    q, k, v = inputs.q, inputs.k, inputs.v
    programs = _programs(gradient, reads)
    tiles = pair_tiles_of(programs, q.shape[-1], v.shape[-1])
    assert tiles is not None
    lists = (
        _attend.kinds if kind.pair == TILE else functools.partial(_attend.lines, along=kind.pair)
    )
    call, statistics, steps, operands = inputs.prepared(
        gradient.spec, programs, tiles,
        lambda spec, *rest: lists(spec, block_map, *rest), interpret,
    )  # fmt: skip
    arrays = q, k, v, inputs.d_out, statistics, steps, operands
    if kind.pair == TILE:
        body = Pairs(call, kind.heads, len(reads))
        sums = backward_pairs(body, *arrays, interpret=interpret)
        return [x[..., : inputs.kv_len, : inputs.q_len].swapaxes(-1, -2) for x in sums]
    body = Lines(call, kind.heads, len(reads), along=kind.pair)
    sums = backward_lines(body, *arrays, interpret=interpret)
    return [jnp.expand_dims(x, -1 if kind.pair == ROW else -2) for x in sums]


def _pulled_back(read: Read, capture, context, origin, kv_len: int, deterministic: bool, ct):
    """The gradient of a captured array, from sums of the cotangents of what one read has.

    Args:
      read: one place where it is read.
      capture: the array.
      context, origin: as of `attend`.
      kv_len: S.
      deterministic: whether what is read at several places is added up in a fixed order.
      ct: `[B,H,T,S]`, or 1 in the place of what they are summed over; of distances, `[B,H,1,N]`,
        from `1 - S` on.
    """
    kind = class_of_read(read)
    by_key = kind.pair in (COL, BAND, TILE)
    keep = ("b" in kind.heads, "h" in kind.heads, kind.pair in (ROW, TILE), by_key)
    dims = range(4)
    counts = ct.shape
    ct = ct.sum([d for d in dims if not keep[d]])

    def load(read, capture):
        def f(b, h, q, k):
            if kind.pair == BAND:  # any pair at that distance
                distance = k - (kv_len - 1)
                q, k = jnp.maximum(distance, 0), jnp.maximum(-distance, 0)
            return load_one(read, capture, b, h, q, k, context).reshape(())

        for d in reversed(dims):
            if keep[d]:
                f = jax.vmap(f, in_axes=[0 if d == n else None for n in dims])
        zero = jnp.zeros((), jnp.int32)
        index = [
            start + jnp.arange(n, dtype=jnp.int32) if kept else start
            for start, n, kept in zip((*origin, zero, zero), counts, keep, strict=True)
        ]
        return f(*index)

    # A pair's number is seldom another's, too, and there are too many of them to sort.
    if not deterministic or kind.pair == TILE:
        _, pull_back = jax.vjp(functools.partial(load, read), capture.astype(jnp.float32))
        return pull_back(ct)[0]
    numbers = jnp.arange(capture.size, dtype=jnp.int32).reshape(capture.shape)
    filled = read.mode == lax.GatherScatterMode.FILL_OR_DROP
    of_numbers = dataclasses.replace(
        read, dtype=jnp.dtype(jnp.int32), fill_value=-1 if filled else None
    )
    return _summed_by_place(load(of_numbers, numbers), ct, capture.size).reshape(capture.shape)


def _summed_by_place(places, values, size: int):
    """Adds values `[...]` up by their places `[...]`, into `[size]`, the same way every time.

    A GPU's scatter adds what meets in any order. Places below 0 are none.
    """
    order = jnp.argsort(places.ravel(), stable=True)
    places, values = places.ravel()[order], values.ravel()[order]
    new = jnp.append(True, places[1:] != places[:-1])

    def join(a, b):
        (x, starts), (y, starts_again) = a, b
        return jnp.where(starts_again, y, x + y), starts | starts_again

    sums, _ = lax.associative_scan(join, (values, new))
    last = jnp.append(new[1:], True) & (places >= 0)
    at = jnp.where(last, places, size)  # others are dropped
    return jnp.zeros(size, values.dtype).at[at].set(sums, mode="drop")
