"""`tile_sum_p`, `loss_sum_p`: sums over tiles, closed under every order of derivative.

A tile sum evaluates `sum_j f(row_i, col_j, shared)` for all rows i, and the sums over i that
belong to columns, and the sums over both that belong to shared arrays, without ever holding more
than a tile of what is inside. Its derivative is the tile sum of f's derivative, its transpose the
tile sum of f's transpose, with the same kinds of operands and results (row to row, column to
column, shared to shared). So one jvp rule and one transpose rule serve reverse mode, forward mode
and all their compositions, at fused memory.

The functions are terms of `xform.lowering._tile_fn`; `hidden` counts the leading dimensions that
vmap has added, in which every operand has its full size or 1.

How arrays are laid out, how a mesh may split them and which lowering walks them is the business of
the function's spec. So there are two primitives, `tile_sum_p` for attention and `loss_sum_p` for
linear cross entropy, whose derivatives are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from xform._compat import Primitive
from xform.lowering import _tokens, blockwise
from xform.lowering._loss_fn import LossSpec, without_ignored
from xform.lowering._spec import Spec
from xform.lowering._tile_fn import COL, ROW, Jvp, Kind, TileFn, Transpose, merge
from xform.primitives._auto import local_rows, register
from xform.primitives._choose import by_kernels, choose_for_sum
from xform.primitives._own import of_context, of_reads
from xform.primitives._rules import add_hidden_dim, hidden_sizes, join_axes
from xform.primitives._split import Layout, Layouts, splittable
from xform.primitives.block_map import block_map


def tile_sum(
    fn: TileFn, operands: Sequence, context: Sequence, *,
    hidden: int, outs: Sequence, implementation: str | None = None,
) -> list:  # fmt: skip
    """Sums `fn` over all pairs of a row and a column.

    Args:
      fn: the function of tiles.
      operands: one array per operand of `fn`. Of attention: rows `[*hidden,B,T,H,...]`, columns
        `[*hidden,B,S,K,...]`, captured arrays `[*hidden,...]`. Of cross entropy: rows
        `[*hidden,*tokens,...]`, columns `[*hidden,V]`, `[*hidden,D,V]` or `[*hidden,V,D]`.
      context: arrays that masks and indices read, `[*hidden,...]`; they get no derivative.
      hidden: number of hidden dimensions.
      outs: shape and dtype of each result.
      implementation: what was asked for by name, or None.

    Returns:
      One array for each of `outs`.
    """
    outs = tuple((tuple(o.shape), jnp.dtype(o.dtype)) for o in outs)
    args = join_axes((*operands, *context))
    return _PRIMITIVES[type(fn.spec)].bind(
        *args, fn=fn, hidden=hidden, outs=outs, implementation=implementation
    )


tile_sum_p = Primitive("tile_sum")
loss_sum_p = Primitive("loss_sum")
tile_sum_p.multiple_results = loss_sum_p.multiple_results = True

_PRIMITIVES = {Spec: tile_sum_p, LossSpec: loss_sum_p}


def _split(args: Sequence, fn: TileFn) -> tuple[Sequence, Sequence]:
    """Operands and context."""
    n = len(fn.operands)
    return args[:n], args[n:]


def _layouts(*args, fn, hidden, outs, **_) -> Layouts:
    operands, context = _split(args, fn)
    labels = {ROW: "an array of queries or their derivatives", COL: "an array of keys or values"}
    rows = Layout.of(labels[ROW], ROW, operands[fn.operands.index(ROW)], hidden)

    def of(kind: Kind, x) -> Layout:
        if isinstance(kind, str):
            return Layout.of(labels[kind], kind, x, hidden)
        return Layout.read(of_reads(kind), kind, x, hidden, rows)

    read = zip(of_context(fn.spec, len(context)), range(len(context)), context, strict=True)
    return Layouts(
        (*map(of, fn.operands, operands), *(Layout.read(*x, hidden, rows) for x in read)),
        tuple(map(of, fn.results, _structs(outs))),
    )


def _impl(*args, origin, outs, device, fn, hidden, implementation, kinds=block_map):
    operands, context = _split(args, fn)
    sides = [x for x, kind in zip(operands, fn.operands, strict=True) if kind in (ROW, COL)]
    if 0 in hidden_sizes(args, hidden) or any(0 in x.shape for x in sides):
        return [jnp.zeros(s.shape, s.dtype) for s in outs]
    chosen = choose_for_sum(implementation, fn, operands, device).name
    lowering = blockwise
    if chosen == "mosaic_gpu":
        from xform.lowering import mosaic_gpu as lowering
    return lowering.tile_sum(fn, kinds, hidden, outs, operands, context, origin=origin)


def _loss_impl(*args, fn, hidden, outs, device, auto, **_):
    """The tile sums of linear cross entropy, by tokens where the partitioner splits them."""

    def whole(*args):
        from xform.lowering import chunked  # slow to import, and not wanted by attention
        from xform.lowering.mosaic_gpu import _loss

        operands, context = _split(args, fn)
        call = (fn, hidden, _structs(outs), operands, context)
        weight = next(x for x, kind in zip(operands, fn.operands, strict=True) if kind == COL)
        has = _loss.differentiates(fn)
        kinds = (ROW, *fn.operands, *fn.results)
        arrays = [*context, *operands, *_structs(outs)]
        tokens = _tokens.Layout.of(fn.spec, hidden, kinds, arrays).count
        if by_kernels(fn.spec, weight.shape, tokens, device, has=has):
            return _loss.gradients(*call)
        return chunked.tile_sum(*call, device.platform)

    if not (auto and fn.spec.token_dims):
        return whole(*args)
    tokens, shared = range(hidden, hidden + fn.spec.token_dims), range(0)
    rows = lambda kinds: [tokens if kind == ROW else shared for kind in kinds]
    ins, results = rows((*fn.operands, ROW)), rows(fn.results)
    return local_rows(whole, ins, results)(*args)


def _jvp(primals, tangents, *, fn, outs, **params):
    operands, context = _split(primals, fn)
    tangents, _ = _split(tangents, fn)
    nonzero = tuple(type(t) is not ad.Zero for t in tangents)
    if isinstance(fn.spec, LossSpec):
        rows = zip(tangents, fn.operands, nonzero, strict=True)
        clean = partial(without_ignored, context[0])
        tangents = [clean(t) if z and kind == ROW else t for t, kind, z in rows]
    moving = [t for t, z in zip(tangents, nonzero, strict=True) if z]
    bind = partial(tile_sum, context=context, outs=_structs(outs), **params)
    return bind(fn, operands), bind(Jvp(fn, nonzero), [*operands, *moving])


def _transpose(cts, *args, fn, hidden, outs, implementation):
    del outs
    operands, context = _split(args, fn)
    linear = tuple(ad.is_undefined_primal(x) for x in operands)
    avals = [x.aval for x, z in zip(operands, linear, strict=True) if z]
    known = [x for x, z in zip(operands, linear, strict=True) if not z]
    cts = [ad.instantiate_zeros(ct) for ct in cts]
    kinds = [k for k, z in zip(fn.operands, linear, strict=True) if z]
    shapes = tuple(fn.spec.tail(k, a.shape[hidden:]) for a, k in zip(avals, kinds, strict=True))
    fn = Transpose(fn, linear, shapes)
    grads = tile_sum(
        fn, [*known, *cts], context, hidden=hidden, outs=avals, implementation=implementation
    )
    return [*merge(linear, grads, [None] * len(known)), *(None for _ in context)]


def _batch(args, dims, *, fn, hidden, outs, implementation):
    args, size = add_hidden_dim(args, dims)
    outs = tuple(((size, *shape), dtype) for shape, dtype in outs)
    results = _PRIMITIVES[type(fn.spec)].bind(
        *args, fn=fn, hidden=hidden + 1, outs=outs, implementation=implementation
    )
    return results, [0] * len(results)


def _structs(outs):
    return [jax.ShapeDtypeStruct(*out) for out in outs]


splittable(tile_sum_p, _layouts, _impl)
register(loss_sum_p, lambda *_, outs, **params: _structs(outs), _loss_impl)
for primitive in _PRIMITIVES.values():
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batch
