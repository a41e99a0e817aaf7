"""Linear cross entropy chunk by chunk in plain XLA, for any device: the logits never exist whole.

Two programs. `forward` takes some tokens and walks the vocabulary with online softmax, as attention
walks its keys; asked for it, it adds up the gradients for the hidden states in the same walk, so
that each chunk of logits serves both. `tile_sum` evaluates any other derivative: for weights it
takes some entries and walks the tokens. Every accumulator is a chunk of a result and is rounded
once, when it is finished; what does not divide into chunks ends in a smaller one, so that nothing
is padded or copied. The order is fixed: a second run gives the same bits.

Chunks are large, since each is a matrix product (`Chunks` says how large): on an H200 one of the
default size takes 0.1 ms at full speed, some ten times what it takes to start its kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._contract import contract
from xform.lowering._loss_fn import IGNORED, CrossEntropy, LossSpec, is_label, others
from xform.lowering._spec import At
from xform.lowering._tile_fn import COL, ROW, Kind, TileFn, base
from xform.lowering._tokens import Layout

# Chunk lengths are multiples of it, but for the last: tiles of any matrix unit fit in.
_ALIGNED = 128


def fold(length: int, chunk: int, step: Callable, carry):
    """Folds `step(start, size, carry)` over chunks of about one size, and a last, smaller one."""
    if length > chunk:
        chunk = math.ceil(length / math.ceil(length / chunk) / _ALIGNED) * _ALIGNED
    count, rest = divmod(length, chunk) if chunk < length else (0, length)
    if count:
        carry = lax.fori_loop(0, count, lambda i, c: step(i * chunk, chunk, c), carry)
    return step(count * chunk, rest, carry) if rest else carry


def forward(spec: LossSpec, hidden: int, rows, operands: Sequence, labels) -> list:
    """The sums of `CrossEntropy` for all tokens, and what they are relative to.

    Args:
      spec: what to compute.
      hidden: number of hidden dimensions.
      rows: dtype of the gradients for hidden states, or None for no such gradients.
      operands: h `[*hidden,*tokens,D]`, w `[*hidden,D,V]` or `[*hidden,V,D]`, and a bias
        `[*hidden,V]` if there is one.
      labels: int32 `[*hidden,*tokens]`: an entry of w, `IGNORED`, or any other number.

    Returns:
      The largest logit but the label's, minus infinity where there is none, and each sum, in the
      wide dtype and `[*hidden,*tokens]`; then, with `rows`, the gradient of each sum for h.
    """
    fn = CrossEntropy(spec)
    sums = len(fn.results)
    vectors = 0 if rows is None else sums

    def flat(labels, h, w, *bias):
        smooth = vectors == 3 and spec.softcap is None
        mean = jnp.sum(w, spec.vocab_dim, dtype=spec.wide) if smooth else None

        def some_tokens(start, size, outs):
            part = take(h, start, size), take(labels, start, size)
            values = _sums_of(spec, rows, *part, w, bias, mean)
            return [store(spec, x, ROW, start, y) for x, y in zip(outs, values, strict=True)]

        outs = [jnp.zeros(len(h), spec.wide)] * (1 + sums) + [jnp.zeros(h.shape, rows)] * vectors
        return fold(len(h), spec.chunks.by_token[0], some_tokens, outs)

    arrays, kinds = [labels, *operands], (ROW, ROW, *fn.operands[2:])
    layout = Layout.of(spec, hidden, kinds, arrays)
    results = layout.run(flat, arrays, kinds)
    return [layout.leave(x, ROW, layout.sizes) for x in results]


def _sums_of(spec: LossSpec, rows, h, labels, w, bias, mean) -> list:
    """`forward` for one chunk of tokens: online softmax over the vocabulary.

    The gradients for h are `sum_j e_ij slope_ij w_j` of L, `slope w` of the label's logit, and
    `sum_j slope_ij w_j` of S.
    """
    h = clean(h, labels)[None]
    capped = spec.smooth and spec.softcap is not None

    def some_entries(start, count, carry):
        top, (total, *sums), grads = carry
        w_tile, *bias_tile = (load(spec, x, COL, start, count) for x in (w, *bias))
        x = spec.logits(h, w_tile, bias_tile)
        own = is_label(place(labels, start, count))
        rest = others(x, own)
        new = jnp.maximum(top, rest.max(-1))
        e, keep = jnp.exp(rest - base(new)[..., None]), jnp.exp(top - base(new))
        sums = [s + t.sum(-1) for s, t in zip(sums, (jnp.where(own, x, 0), x), strict=False)]
        if grads:
            weighted = lambda tile: contract(tile, w_tile, out="row", dtype=spec.dtype)
            slope = spec.slope(x)
            grads = [
                grads[0] * keep[..., None] + weighted(e * slope),
                *(g + weighted(slope) for g in grads[1:]),
            ]
        return new, [total * keep + e.sum(-1), *sums], grads

    zeros = lambda *tail: jnp.zeros((*h.shape[:2], *tail), spec.wide)
    sums = [zeros() for _ in CrossEntropy(spec).results]
    grads = [zeros(h.shape[-1])] * (0 if rows is None else 1 + capped)
    carry = jnp.full(h.shape[:2], -jnp.inf, spec.wide), sums, grads
    entries, chunk = w.shape[spec.vocab_dim], spec.chunks.by_token[1]
    top, sums, grads = fold(entries, chunk, some_entries, carry)
    if rows is not None:
        chosen = _columns(w, labels, spec.vocab_dim).astype(spec.wide)[None]
        grads.insert(1, chosen * spec.slope(sums[1])[..., None])
        if mean is not None:
            grads.append(jnp.broadcast_to(mean, h.shape))
    return [top, *sums, *grads]


def _columns(w, labels, vocab_dim: int):
    """The weights of each label, `[n,D]`; 0 for one that is no entry."""
    size = w.shape[vocab_dim]
    if not size:
        return jnp.zeros((len(labels), w.shape[1 - vocab_dim]), w.dtype)
    index = jnp.where(labels < 0, size, labels)  # a negative index would count from the end
    chosen = jnp.take(w, index, axis=vocab_dim, mode="fill", fill_value=0)
    return chosen if vocab_dim == 0 else chosen.T


def tile_sum(fn: TileFn, hidden: int, outs: Sequence, operands: Sequence, context: Sequence) -> list:
    """Evaluates a tile sum over tokens and the vocabulary.

    Args:
      fn: the function of tiles.
      hidden: number of hidden dimensions.
      outs: shape and dtype of each result. Where a hidden dimension of a result is 1, it is summed
        over.
      operands: one array for each of `fn.operands`, laid out as in `forward`.
      context: the labels.

    Returns:
      One array for each of `outs`.
    """
    arrays, kinds = [*context, *operands], (ROW, *fn.operands)
    layout = Layout.of(fn.spec, hidden, (*kinds, *fn.results), [*arrays, *outs])
    structs = [layout.flat(k, o) for k, o in zip(fn.results, outs, strict=True)]
    results = layout.run(partial(_tile_sum, fn, structs), arrays, kinds)
    return [
        layout.leave(x, k, o.shape).astype(o.dtype)
        for x, k, o in zip(results, fn.results, outs, strict=True)
    ]


def _tile_sum(fn: TileFn, structs: Sequence, labels, *arrays) -> list:
    """`tile_sum` of flat arrays.

    The side that has results of its own is `outer`, entries before tokens: each of its chunks is
    summed in full, rounded and put in its place. Results of the other side are added to in place.
    """
    spec: LossSpec = fn.spec
    outer, inner = (COL, ROW) if COL in fn.results else (ROW, COL)
    chunks = spec.chunks.by_entry if outer == COL else spec.chunks.by_token
    chunk: dict[Kind, int] = dict(zip((ROW, COL), chunks, strict=True))
    kinds = fn.operands
    arrays = [clean(x, labels) if k == ROW else x for x, k in zip(arrays, kinds, strict=True)]
    entries = max(x.shape[spec.vocab_dim] for x, k in zip(arrays, kinds) if k == COL and x.ndim == 2)
    length: dict[Kind, int] = {ROW: len(labels), COL: entries}

    def some_outer(start, size, results):
        def some_inner(at, count, totals):
            where = {outer: (start, size), inner: (at, count)}
            tiles = [load(spec, x, k, *where[k]) for x, k in zip(arrays, kinds, strict=True)]
            values = fn(place(take(labels, *where[ROW]), *where[COL]), *tiles)
            return [
                t + v if k == outer else store(spec, t, k, at, load(spec, t, k, at, count) + v)
                for t, v, k in zip(totals, values, fn.results, strict=True)
            ]

        part = lambda x, k: jax.eval_shape(lambda x: load(spec, x, k, 0, size), x)
        totals = [
            jnp.zeros(part(x, k).shape, spec.wide) if k == outer else x
            for x, k in zip(results, fn.results, strict=True)
        ]
        totals = fold(length[inner], chunk[inner], some_inner, totals)
        return [
            store(spec, x, k, start, t) if k == outer else t
            for x, k, t in zip(results, fn.results, totals, strict=True)
        ]

    results = [
        jnp.zeros(s.shape, s.dtype if k == outer else spec.wide)
        for s, k in zip(structs, fn.results, strict=True)
    ]
    return fold(length[outer], chunk[outer], some_outer, results)


# ---- Tiles ---------------------------------------------------------------------------------------


def take(x, start, size: int, dim: int = 0):
    """A chunk of `x` along one dimension."""
    return x if size == x.shape[dim] else lax.dynamic_slice_in_dim(x, start, size, dim)


def load(spec: LossSpec, x, kind: Kind, start, size: int):
    """A chunk of an operand as a tile: rows `[1,q,...]`, columns `[k,...]`."""
    turned = kind == COL and x.ndim == 2 and spec.vocab_dim == 1
    tile = take(x, start, size, 1).T if turned else take(x, start, size)
    tile = tile.astype(spec.wide) if jnp.issubdtype(x.dtype, jnp.floating) else tile
    return tile[None] if kind == ROW else tile


def store(spec: LossSpec, x, kind: Kind, start, tile):
    """`x` with a tile put in its place, and rounded."""
    turned = kind == COL and x.ndim == 2 and spec.vocab_dim == 1
    tile = tile.T if turned else tile[0] if kind == ROW else tile
    tile = tile.astype(x.dtype)
    if tile.shape == x.shape:
        return tile
    return lax.dynamic_update_slice_in_dim(x, tile, start, 1 if turned else 0)


def clean(x, labels):
    """Rows of vectors with 0 for ignored tokens, whatever stood there; other rows as they are."""
    return x if x.ndim == 1 else jnp.where((labels == IGNORED)[:, None], 0, x)


def place(labels, start, size: int) -> At:
    """Where a tile lies: its entries of the vocabulary, and the label of each of its tokens."""
    zero, tokens = jnp.zeros((), jnp.int32), jnp.zeros(len(labels), jnp.int32)
    return At(zero, zero[None], tokens, start + jnp.arange(size, dtype=jnp.int32), (labels,))
