"""Linear cross entropy by the kernels of `_logits`: what a call becomes, and which calls don't.

Forward, one product: each tile of logits leaves three or four numbers a token, and XLA joins them.
Backward, three: some entries at a time, a kernel makes the logits again and leaves the cotangents
of the products, for all tokens, in the dtype of the weights. One more product by XLA, and the
gradient of these weights is finished, and rounded once; one by the kernel adds to that of hidden
states, in float32 and in place.

Memory, for N tokens in bfloat16: 12 N V / 256 bytes forward, 4 N D + 2 N v + 2 D v backward with v
entries at a time. At N = 8,192, V = 128,256 and D = 4,096 that is 49 MB and 185 MB (205 with what
XLA adds), where logits in float32 would take 4,203.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._loss_fn import IGNORED, CrossEntropy, LossSpec
from xform.lowering._tile_fn import ROW, Jvp, TileFn, Transpose, base, merge
from xform.lowering._tokens import Layout
from xform.lowering.chunked import clean, fold, take

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
# Entries of the vocabulary that the backward pass takes at a time: products of [D,N] and [N,v] fill
# 132 multiprocessors with tiles of 128 x 256 nearly twice.
ENTRIES = 2048
# Columns of hidden states that are cleaned at a time, where one of an ignored token is not finite.
_CLEANED = 512


def misfits(spec: LossSpec, weight_shape: Sequence[int], tokens: int) -> list[str]:
    """Returns why the kernels can't take a call; nothing if they can."""
    wrong = []
    size, entries = weight_shape[-2:] if spec.vocab_dim else weight_shape[:-3:-1]
    if spec.chunks is not None:
        wrong.append("`chunks` are given, which kernels have not")
    if spec.dtype not in _DTYPES:
        wrong.append(f"`hidden` is {spec.dtype}; the tensor cores take bfloat16 and float16")
    # Bulk copies take tiles of 8 rows of 64 numbers.
    for name, count, tile in (
        ("tokens", tokens, 8),
        ("numbers per token", size, 64),
        ("entries of the vocabulary", entries, 64 if spec.vocab_dim else 8),
    ):
        if count % tile:
            wrong.append(f"{count} {name}; bulk copies need a multiple of {tile}")
    if not size:
        wrong.append("no numbers per token: nothing to compute")
    if not entries or not tokens:
        wrong.append(f"{tokens} tokens and a vocabulary of {entries}: nothing to compute")
    return wrong


def differentiates(fn: TileFn) -> bool:
    """Whether a term is the first-order gradient of hidden states, weights or both.

    That of a bias is a sum of cotangents over tokens, in float32: they leave the kernel rounded.
    """
    match fn:
        case Transpose(Jvp(CrossEntropy(), nonzero), linear, _):
            first = linear == (False,) * len(nonzero) + (True,) * sum(nonzero)
            return first and not any((nonzero[1], *nonzero[3:]))
    return False


def forward(spec: LossSpec, hidden: int, operands: Sequence, labels, *, interpret=None) -> list:
    """The sums of `CrossEntropy`; arguments and results as of `chunked.forward` without `rows`."""
    fn = CrossEntropy(spec)

    def flat(labels, h, w, *bias):
        from xform.lowering.mosaic_gpu._logits import sums

        call = _call(spec, h, w, interpret)
        bias, numbers = [call.cols(x) for x in bias], call.rows(labels, IGNORED)
        tops, totals, *others = sums(call, h, w, bias, numbers, interpret=interpret)
        top = tops.max(0)
        total = (totals * jnp.exp(tops - base(top)[None])).sum(0)
        ignored = labels == IGNORED
        each = zip((top, total, *(x.sum(0) for x in others)), (0, 1, 0, 0), strict=False)
        return [jnp.where(ignored, nothing, x[: len(h)]) for x, nothing in each]

    arrays, kinds = [labels, *operands], (ROW, ROW, *fn.operands[2:])
    layout = Layout.of(spec, hidden, kinds, arrays)
    return [layout.leave(x, ROW, layout.sizes) for x in layout.run(flat, arrays, kinds)]


def gradients(
    fn: Transpose, hidden: int, outs: Sequence, operands: Sequence, context: Sequence, *,
    interpret=None, entries: int = ENTRIES,
) -> list:  # fmt: skip
    """A term that `differentiates`; arguments and results as of `chunked.tile_sum`.

    `entries` of the vocabulary are taken at a time.
    """
    arrays, kinds = [*context, *operands], (ROW, *fn.operands)
    layout = Layout.of(fn.spec, hidden, (*kinds, *fn.results), [*arrays, *outs])
    structs = [layout.flat(k, o) for k, o in zip(fn.results, outs, strict=True)]
    flat = partial(_gradients, fn, structs, entries, interpret)
    results = layout.run(flat, arrays, kinds)
    return [
        layout.leave(x, k, o.shape).astype(o.dtype)
        for x, k, o in zip(results, fn.results, outs, strict=True)
    ]


def _gradients(fn: Transpose, structs, entries: int, interpret, labels, h, top, w, *rest) -> list:
    """`gradients` of flat arrays: of those of hidden states and weights that move."""
    spec: LossSpec = fn.spec
    bias, cts = rest[: spec.biased], rest[spec.biased :]
    assert isinstance(fn.fn, Jvp)
    moves = fn.fn.nonzero[0], fn.fn.nonzero[2]
    from xform.lowering.mosaic_gpu import _logits

    call = _call(spec, h, w, interpret)
    cut, total = call.cut, w.shape[spec.vocab_dim]
    numbers = [call.rows(labels, IGNORED), call.rows(top), [call.rows(x) for x in cts]]
    bias = [call.cols(x) for x in bias]

    def walk(clean_first: bool) -> list:
        def step(start, count: int, results: tuple) -> tuple:
            first, whole = jnp.full((1,), start, jnp.int32), -(-count // 8) * 8
            ct = _logits.cotangents(call, h, w, bias, first, whole, *numbers, interpret=interpret)
            d_h, d_w = results
            if moves[0]:
                d_h = _logits.add(call, d_h, ct, w, first, interpret=interpret)
            ct = ct[:, :count]
            if moves[1]:
                d_w = _token_sum(spec, d_w, start, ct, h, labels, clean_first)
            return d_h, d_w

        whole = [-(-n // m) * m for n, m in zip(h.shape, (cut.rows, cut.cols), strict=True)]
        nothing = jax.ShapeDtypeStruct((), spec.wide)
        sizes = merge(moves, structs, [nothing] * len(moves))
        sizes[0] = jax.ShapeDtypeStruct(whole, spec.wide) if moves[0] else nothing
        results = tuple(jnp.zeros(s.shape, s.dtype) for s in sizes)
        count, left = divmod(total, entries)
        if count:
            results = lax.fori_loop(0, count, lambda i, c: step(i * entries, entries, c), results)
        if left:
            results = step(count * entries, left, results)
        d_h, d_w = results
        d_h = d_h[: len(h), : h.shape[1]].astype(structs[0].dtype) if moves[0] else d_h
        return [x for x, moving in zip((d_h, d_w), moves, strict=True) if moving]

    if not moves[1]:
        return walk(False)
    # A cotangent of 0 does not hide a NaN from the sum over tokens; copying all would take 2 N D.
    fine = jnp.isfinite(h).all(1) | (labels != IGNORED)
    return lax.cond(fine.all(), partial(walk, False), partial(walk, True))


def _token_sum(spec: LossSpec, result, start, ct, h, labels, clean_first: bool):
    """Puts the sum over tokens, `h' ct` or its transpose, into the gradient of the weights."""

    def step(n, size: int, result):
        part = take(h, n, size, 1)
        part = clean(part, labels) if clean_first else part
        x, y = (part, ct) if spec.vocab_dim else (ct, part)
        product = lax.dot_general(
            x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ).astype(result.dtype)
        at = (n, start) if spec.vocab_dim else (start, n)
        return lax.dynamic_update_slice(result, product, at)

    size = h.shape[1]
    return fold(size, _CLEANED, step, result) if clean_first else step(0, size, result)


def _call(spec: LossSpec, h, w, interpret):
    """What is static of a call."""
    # Pallas is slow to import, and only wanted where a kernel is built.
    from xform.lowering.mosaic_gpu._logits import Logits
    from xform.lowering.mosaic_gpu._product import Cut
    from xform.lowering.mosaic_gpu._twins import Hardware, Twin

    cut, mma = (Cut(blocks=4), Twin()) if interpret else (Cut(), Hardware())
    return Logits(spec, len(h), w.shape[spec.vocab_dim], h.shape[1], cut, mma)
