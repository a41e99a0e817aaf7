"""From the derivative of attention to the backward kernel: operands, and what comes back.

The kernel is one term of `_tile_fn`: `Transpose(Jvp(Attend))`, with gradients for any of q, k, v
and for the captured arrays that the score mod reads per key or per head. All others (forward mode,
higher orders, the gradient of a maximum) run blockwise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from xform.lowering._contract import wide_of
from xform.lowering._spec import Read, Spec
from xform.lowering._tile_fn import Attend, Jvp, TileFn, Transpose, base
from xform.lowering.mosaic_gpu import _attend
from xform.lowering.mosaic_gpu._classes import COL, SCALAR
from xform.lowering.mosaic_gpu._program import class_of_read, derivatives, load_one
from xform.lowering.mosaic_gpu._tuning import Tiles, backward_tiles_of, vectors_of

# Columns that half a row of dQ has, at least: what one bulk copy takes.
_COLUMNS = 32
# Vectors that shared memory has room for beside all tiles, by the warpgroups with scores: one is
# all that wide heads leave, with less room.
_VECTORS = {1: 4, 2: 8}
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
    if not wrong:
        try:
            vectors = len(vectors_of(_programs(gradient)))
        except NotImplementedError as e:
            wrong.append(f"in the derivative: {e}")
        else:
            most = _VECTORS[backward_tiles_of(q_shape[-1], v_size).warpgroups]
            if vectors > most:
                wrong.append(f"{vectors} vectors that travel with the queries; {most} fit")
    for n in gradient.wanted:
        pair = class_of_read(gradient.reads[n]).pair
        if pair not in (SCALAR, COL):
            wrong.append(f"the gradient of an array that is read per {_PER[pair]}")
    return list(dict.fromkeys(wrong))


_PER = {"q": "query", "q-k": "difference of query and key", "qk": "query and key"}


def _named(fn: TileFn) -> str:
    inner = getattr(fn, "fn", None)
    return f"{type(fn).__name__}({_named(inner)})" if inner else type(fn).__name__


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@functools.lru_cache(maxsize=1024)
def _programs(gradient: Gradient):
    """Score with its derivatives, mask and dropout, split for a kernel."""
    spec = gradient.spec
    if spec.score is not None:
        score = derivatives(spec.score, gradient.wanted)
        spec = dataclasses.replace(spec, score=score)
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


def _gradient(
    gradient: Gradient, block_map, n_operands: int, *arrays,
    origin, tiles: Tiles | None, interpret, mods_batch: int | None = None,
):  # fmt: skip
    """`tile_sum` without hidden dimensions; mods see `b % mods_batch`."""
    from xform.lowering.mosaic_gpu._backward import Backward, backward
    from xform.lowering.mosaic_gpu._backward_narrow import WIDTH, Narrow
    from xform.lowering.mosaic_gpu._backward_wide import Wide
    from xform.lowering.mosaic_gpu._call import LOG2E, Call, Programs, Sizes
    from xform.lowering.mosaic_gpu._twins import Hardware, Twin

    spec = gradient.spec
    (q, top, norm, k, v, *captures, d_sum, d_one), context = (
        arrays[:n_operands], arrays[n_operands:],
    )  # fmt: skip
    (batch, q_len, heads, size), (kv_len, kv_heads), v_size = q.shape, k.shape[1:3], v.shape[-1]
    mods_batch = batch if mods_batch is None else mods_batch
    if gradient.wanted and kv_heads < heads:  # sums are by head
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    tiles = tiles or backward_tiles_of(size, v_size)
    mods = _attend.Mods.of(spec, _programs(gradient), captures, context)
    rows = -(-q_len // tiles.rows) * tiles.rows
    operands = mods.operands(mods_batch, heads, origin, q_len, kv_len, tiles)
    steps = _attend.steps(
        spec, block_map, mods.context, mods_batch, heads, k.shape[2], origin, q_len, kv_len, tiles
    )
    per_row = lambda x: jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, rows - q_len)])
    if spec.score is not None:
        norm = norm * jnp.exp2(-_attend.residue(top))
    statistics = map(per_row, (base(top) * LOG2E, norm, d_one))
    d_out = d_sum.astype(v.dtype)
    q, k = (_attend.padded(x, _COLUMNS) for x in (q, k))
    v, d_out = (_attend.padded(x) for x in (v, d_out))
    sizes = Sizes(batch, q_len, kv_len, heads, k.shape[2], q.shape[-1], v.shape[-1], mods_batch)
    call = Call(
        sizes, Programs(*mods.programs, spec.scale), tiles, q.dtype, q.dtype,
        bool(steps), Twin() if interpret else Hardware(),
    )  # fmt: skip
    narrow = sizes.qk_size + sizes.v_size <= WIDTH and not spec.deterministic
    kind = Wide if tiles.warpgroups == 1 else Narrow if narrow else Backward
    body = kind(call, len(gradient.wanted), in_turns=spec.deterministic)
    dq, dk, dv, columns = backward(
        body, q, k, v, d_out, *statistics, steps, operands, interpret=interpret
    )
    dq = (dq * spec.scale)[:, :q_len, :, :size]
    dk, dv = dk[:, :kv_len, :, :size], dv[:, :kv_len, :, :v_size]
    if dk.shape[2] > kv_heads:
        by_group = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])
        dk, dv = (by_group(x).sum(3, dtype=jnp.float32) for x in (dk, dv))
    moving = gradient.moving
    results = [x for n, x in ((_Q, dq), (_K, dk), (_V, dv)) if moving[n]]
    loads = dict(zip(gradient.wanted, columns, strict=True))
    first = 0
    for capture, group, moves in zip(captures, spec.reads, moving[_CAPTURES:], strict=True):
        parts = [
            _pulled_back(read, capture, mods.context, origin, mods_batch, loads[n][..., :kv_len])
            for n, read in enumerate(group, first)
            if moves
        ]
        results += [sum(parts)] if moves else []
        first += len(group)
    return results


def _pulled_back(read: Read, capture, context, origin, batch: int, columns):
    """The gradient of a captured array, from the sums over queries of what one read has.

    Args:
      read: which is per key, or per nothing.
      capture: the array.
      context, origin: as of `attend`.
      batch: of the mods, which the batch is a multiple of.
      columns: `[B,H,S]`.
    """
    kind = class_of_read(read)
    per_key = kind.pair == COL
    columns = columns.reshape(-1, batch, *columns.shape[1:]).sum(0)
    sizes = columns.shape
    keep = ("b" in kind.heads, "h" in kind.heads, per_key)
    ct = columns.sum([d for d, kept in enumerate(keep) if not kept])
    zero = jnp.zeros((), jnp.int32)

    def load(capture):
        f = lambda b, h, k: load_one(read, capture, b, h, zero, k, context).reshape(())
        for d in (2, 1, 0):
            if keep[d]:
                f = jax.vmap(f, in_axes=[0 if d == n else None for n in range(3)])
        starts = (*origin, zero)
        index = [
            start + jnp.arange(n, dtype=jnp.int32) if kept else start
            for start, n, kept in zip(starts, sizes, keep, strict=True)
        ]
        return f(*index)

    _, pull_back = jax.vjp(load, capture.astype(jnp.float32))
    return pull_back(ct)[0]
