"""Linear cross entropy chunk by chunk in plain XLA, for any device: the logits never exist whole.

Two programs. `forward` takes some tokens and walks the vocabulary with online softmax, as attention
walks its keys; asked for it, it adds up the gradients for the hidden states in the same walk, so
that each chunk of logits serves both. `tile_sum` evaluates any other derivative: for weights it
takes some entries and walks the tokens. Every accumulator is a chunk of a result and is rounded
once, when it is finished; what does not divide into chunks ends in a smaller one, so that nothing
is padded or copied. The order is fixed: a second run gives the same bits.

Chunks are large, since each is a matrix product: `CHUNKS` says how large, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
from jax import lax

from xform.lowering._contract import contract
from xform.lowering._loss_fn import IGNORED, Chunks, CrossEntropy, LossSpec, is_label, others
from xform.lowering._spec import At
from xform.lowering._tile_fn import COL, ROW, Kind, TileFn, base
from xform.lowering._tokens import Layout

CHUNKS = {
    # XLA widens bfloat16 operands here: no more than tens of MB.
    "cpu": Chunks(by_token=(512, 1024), by_entry=(1024, 1024)),
    # By the H200, for rows of 4,096 numbers in bfloat16: products whose tiles of 128 x 256 fill its
    # 132 multiprocessors once or twice (128 and 256 tiles) and take 50 to 100 us, some ten times
    # what starting their kernels does; what one leaves for the next fits into its cache of 50 MB.
    "default": Chunks(by_token=(1024, 4096), by_entry=(8192, 1024)),
}
# Chunk lengths are multiples of it, but for the last one: tiles of any matrix unit fit in.
_ALIGNED = 128


def _default(platform: str) -> Chunks:
    return CHUNKS.get(platform, CHUNKS["default"])


def fold(length: int, chunk: int, step: Callable, carry):
    """Folds `step(start, size, carry)` over equal chunks, if need be with a smaller one at the end.

    The body is compiled once where about as many chunks divide the length evenly.
    """
    count = max(1, math.ceil(length / chunk))
    unit = math.gcd(chunk, _ALIGNED)
    even = math.ceil(length / count / unit) * unit
    divide = (n for n in range(count, count + count // 8 + 1) if length % (8 * n) == 0)
    even = next((length // n for n in divide), even)
    count, rest = divmod(length, even) if even < length else (0, length)
    if count:
        carry = lax.fori_loop(0, count, lambda i, c: step(i * even, even, c), carry)
    return step(count * even, rest, carry) if rest else carry


def forward(spec: LossSpec, hidden: int, rows, operands: Sequence, labels, platform: str) -> list:
    """The sums of `CrossEntropy` for all tokens, and what they are relative to.

    Args:
      spec: what to compute.
      hidden: number of hidden dimensions.
      rows: dtype of the gradients for hidden states, or None for no such gradients.
      operands: h `[*hidden,*tokens,D]`, w `[*hidden,D,V]` or `[*hidden,V,D]`, and a bias
        `[*hidden,V]` if there is one.
      labels: int32 `[*hidden,*tokens]`: an entry of w, `IGNORED`, or any other number.
      platform: a key of `CHUNKS`, or another, which takes the default.

    Returns:
      The largest logit but the label's, minus infinity where there is none, and each sum, in the
      wide dtype and `[*hidden,*tokens]`; then, with `rows`, the gradient of each sum for h.
    """
    fn = CrossEntropy(spec)
    chunks = spec.chunks or _default(platform)
    chunks = chunks.by_entry if rows is None else chunks.by_token

    def flat(labels, h, w, *bias):
        def some_tokens(start, size, outs):
            part = take(h, start, size), take(labels, start, size)
            values = _sums_of(spec, chunks[1], rows is not None, *part, w, bias)
            return [put(x, y[0], start) for x, y in zip(outs, values, strict=True)]

        outs = [jnp.zeros(len(h), spec.wide)] * (1 + len(fn.results))
        if rows is None:
            return fold(len(h), chunks[0], some_tokens, outs)
        # Not zeros, of which XLA would keep one more array for where it writes 0 to ignored tokens.
        outs += [lax.empty(h.shape, rows) for _ in range(1 + spec.both_curved)]
        top, *sums = fold(len(h), chunks[0], some_tokens, outs)
        sums, gradients = sums[: len(fn.results)], sums[len(fn.results) :]
        # Out here, where they become part of what multiplies them and are no arrays of their own.
        own = _columns(spec, w, labels).astype(spec.wide) * spec.slope(sums[1])[:, None]
        gradients.insert(1, own.astype(rows))
        if spec.smooth and not spec.both_curved:
            every = jnp.sum(w, spec.vocab_dim, dtype=spec.wide).astype(rows)
            gradients.append(jnp.broadcast_to(every, h.shape))
        return [top, *sums, *gradients]

    arrays, kinds = [labels, *operands], (ROW, ROW, *fn.operands[2:])
    layout = Layout.of(spec, hidden, kinds, arrays)
    results = layout.run(flat, arrays, kinds)
    return [layout.leave(x, ROW, layout.sizes) for x in results]


def _sums_of(spec: LossSpec, chunk: int, moving: bool, h, labels, w, bias) -> list:
    """`forward` for one chunk of tokens: online softmax over the vocabulary.

    With `moving`, also the gradients that need all weights: `sum_j e_ij slope_ij w_j` of L, and
    `sum_j slope_ij w_j` of S where slopes differ.
    """
    h = clean(h, labels)[None]

    def some_entries(start, count, carry):
        top, (total, *sums), gradients = carry
        w_tile, *bias_tile = (load(spec, x, COL, start, count) for x in (w, *bias))
        x = spec.logits(h, w_tile, bias_tile)
        own = is_label(place(labels, start, count))
        rest = others(x, own)
        new = jnp.maximum(top, rest.max(-1))
        e, keep = jnp.exp(rest - base(new)[..., None]), jnp.exp(top - base(new))
        sums = [s + t.sum(-1) for s, t in zip(sums, (jnp.where(own, x, 0), x), strict=False)]
        if moving:
            weighted = lambda tile: contract(tile, w_tile, out="row", dtype=spec.dtype)
            slope = spec.slope(x)
            gradients = [
                gradients[0] * keep[..., None] + weighted(e * slope),
                *(g + weighted(slope) for g in gradients[1:]),
            ]
        return new, [total * keep + e.sum(-1), *sums], gradients

    zeros = lambda *tail: jnp.zeros((*h.shape[:2], *tail), spec.wide)
    sums = [zeros() for _ in CrossEntropy(spec).results]
    gradients = [zeros(h.shape[-1])] * (moving and 1 + spec.both_curved)
    carry = jnp.full(h.shape[:2], -jnp.inf, spec.wide), sums, gradients
    top, sums, gradients = fold(w.shape[spec.vocab_dim], chunk, some_entries, carry)
    return [top, *sums, *gradients]


def _columns(spec: LossSpec, w, labels):
    """The weights of each label, `[n,D]`; 0 for one that is no entry."""
    size = w.shape[spec.vocab_dim]
    if not size:
        return jnp.zeros((len(labels), w.shape[1 - spec.vocab_dim]), w.dtype)
    index = jnp.where(labels < 0, size, labels)  # a negative index would count from the end
    chosen = jnp.take(w, index, axis=spec.vocab_dim, mode="fill", fill_value=0)
    return chosen if spec.vocab_dim == 0 else chosen.T


def tile_sum(
    fn: TileFn, hidden: int, outs: Sequence, operands: Sequence, context: Sequence, platform: str
) -> list:
    """Evaluates a tile sum over tokens and the vocabulary.

    Args:
      fn: the function of tiles.
      hidden: number of hidden dimensions.
      outs: shape and dtype of each result. Where a hidden dimension of a result is 1, it is summed
        over.
      operands: one array for each of `fn.operands`, laid out as in `forward`.
      context: the labels.
      platform: a key of `CHUNKS`, or another, which takes the default.

    Returns:
      One array for each of `outs`.
    """
    arrays, kinds = [*context, *operands], (ROW, *fn.operands)
    layout = Layout.of(fn.spec, hidden, (*kinds, *fn.results), [*arrays, *outs])
    structs = [layout.flat(k, o) for k, o in zip(fn.results, outs, strict=True)]
    flat = partial(_tile_sum, fn, structs, fn.spec.chunks or _default(platform))
    results = layout.run(flat, arrays, kinds)
    return [
        layout.leave(x, k, o.shape).astype(o.dtype)
        for x, k, o in zip(results, fn.results, outs, strict=True)
    ]


def _tile_sum(fn: TileFn, structs: Sequence, chunks: Chunks, labels, *arrays) -> list:
    """`tile_sum` of flat arrays.

    The side that has results of its own is `outer`, entries before tokens: each of its chunks is
    summed in full, rounded and put in its place. Results of the other side are added to in place.
    """
    spec: LossSpec = fn.spec
    outer, inner = (COL, ROW) if COL in fn.results else (ROW, COL)
    size = chunks.by_entry if outer == COL else chunks.by_token
    chunk: dict[Kind, int] = dict(zip((ROW, COL), size, strict=True))
    kinds = fn.operands
    first = next(x for x, k in zip(arrays, kinds, strict=True) if k == COL)  # the weights
    length: dict[Kind, int] = {ROW: len(labels), COL: first.shape[spec.vocab_dim]}
    # Rows that are all in one chunk are cleaned here, once. In the loops, each chunk of entries
    # would copy them again, and the last one, of another size, might hold a second copy meanwhile.
    once = chunk[ROW] >= length[ROW]
    if once:
        arrays = [clean(x, labels) if k == ROW else x for x, k in zip(arrays, kinds, strict=True)]

    def some_outer(start, size, results):
        def some_inner(at, count, totals):
            where: dict[Kind, tuple] = {outer: (start, size), inner: (at, count)}
            own = take(labels, *where[ROW])
            tiles = [
                load(spec, x, k, *where[k], labels=None if once else own)
                for x, k in zip(arrays, kinds, strict=True)
            ]
            values = fn(place(own, *where[COL]), *tiles)
            values = [unload(spec, v, k) for v, k in zip(values, fn.results, strict=True)]
            return [
                t + v if k == outer else put(t, take(t, at, count, d) + v, at, d)
                for t, v, k, d in zip(totals, values, fn.results, dims, strict=True)
            ]

        totals = [
            jnp.zeros_like(take(x, 0, size, d), spec.wide) if k == outer else x
            for x, k, d in zip(results, fn.results, dims, strict=True)
        ]
        totals = fold(length[inner], chunk[inner], some_inner, totals)
        return [
            put(x, t, start, d) if k == outer else t
            for x, k, t, d in zip(results, fn.results, totals, dims, strict=True)
        ]

    dims = [along(spec, k, len(s.shape)) for k, s in zip(fn.results, structs, strict=True)]
    results = [
        jnp.zeros(s.shape, s.dtype if k == outer else spec.wide)
        for s, k in zip(structs, fn.results, strict=True)
    ]
    return fold(length[outer], chunk[outer], some_outer, results)


# ---- Tiles ---------------------------------------------------------------------------------------


def take(x, start, size: int, dim: int = 0):
    """A chunk of `x` along one dimension."""
    return x if size == x.shape[dim] else lax.dynamic_slice_in_dim(x, start, size, dim)


def put(x, chunk, start, dim: int = 0):
    """`x` with a chunk put in its place, and rounded."""
    chunk = chunk.astype(x.dtype)
    whole = chunk.shape == x.shape
    return chunk if whole else lax.dynamic_update_slice_in_dim(x, chunk, start, dim)


def along(spec: LossSpec, kind: Kind, ndim: int) -> int:
    """The dimension of tokens or of the vocabulary of a flat array."""
    return spec.vocab_dim if kind == COL and ndim == 2 else 0


def load(spec: LossSpec, x, kind: Kind, start, size: int, *, labels=None):
    """A chunk of an operand as a tile in the wide dtype: rows `[1,q,...]`, columns `[k,...]`.

    Rows are those of `labels`, and cleaned here, since a clean copy of all would be an array more;
    without `labels` they are clean already.
    """
    dim = along(spec, kind, x.ndim)
    tile = take(x, start, size, dim)
    if kind == ROW:
        tile = tile if labels is None else clean(tile, labels)
        return tile.astype(spec.wide)[None]
    tile = tile.astype(spec.wide)
    return tile.T if dim else tile


def unload(spec: LossSpec, tile, kind: Kind):
    """A tile as a chunk of a flat array, in which all else happens.

    XLA turns the product that made the tile; a whole result it might turn at the end, by a copy.
    """
    turned = kind == COL and along(spec, kind, tile.ndim)
    return tile[0] if kind == ROW else tile.T if turned else tile


def clean(x, labels):
    """Rows of vectors with 0 for ignored tokens, whatever stood there; other rows as they are."""
    return x if x.ndim == 1 else jnp.where((labels == IGNORED)[:, None], 0, x)


def place(labels, start, size: int) -> At:
    """Where a tile lies: its entries of the vocabulary, and the label of each of its tokens."""
    zero, tokens = jnp.zeros((), jnp.int32), jnp.zeros(len(labels), jnp.int32)
    return At(zero, zero[None], tokens, start + jnp.arange(size, dtype=jnp.int32), (labels,))
