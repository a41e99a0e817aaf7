"""`kept_attention_p`: attention to kept keys as one primitive, where one kernel takes all of it.

Which program runs is decided where it is traced, as everything is that inference decides: by name,
or for None by the device where arrays are put by default. The kernel reads keys where they lie, in
an array or in pages, up to the end of each text. Its derivatives, `vmap`, and a program that is
lowered for another device after all, are those of `in_parts`, which does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from xform._compat import Primitive, jaxpr_as_fun
from xform.lowering._spec import Spec
from xform.lowering._tile_fn import COL, ROW, log_sum
from xform.primitives._choose import chosen, default_device
from xform.primitives._kept import Cache, both, in_parts
from xform.primitives._own import of_context, of_reads
from xform.primitives._rules import join_axes
from xform.primitives._split import Layout, Layouts, splittable
from xform.primitives.attention import _traced


def by_kernel(
    q, cache: Cache, score: Callable | None, seen: Callable | None, scale,
    dtype, implementation: str | None,
):  # fmt: skip
    """Returns output and log-sum-exp of the decoding kernel; None if another program runs.

    Texts of more tokens than there is room for give NaN.

    Args:
      q: `[B,T,H,D]`.
      cache: the keys.
      score: `score(s, b, h, t, position)`, or None.
      seen: `seen(b, h, t, position)` of keys that there are, or None if all are seen.
      scale: on scores, a number or an array.
      dtype: of the output.
      implementation: as of `flex_attention`.
    """
    if implementation not in (None, "mosaic_gpu") or 0 in (*q.shape, cache.room, len(cache.k)):
        return None
    if implementation is None and default_device().misfits:
        return None
    from xform.lowering import mosaic_gpu

    spec, captures, context = _traced(q, score, seen, scale, 0.0)
    if mosaic_gpu.unsuited(spec, mosaic_gpu.Few.of(q, cache.k, cache.v, cache.table)):
        return None
    out, lse = kept_attention_p.bind(
        *join_axes((q, *cache.arrays, *captures, *context)),
        spec=spec, paged=cache.table is not None, dtype=jnp.dtype(dtype),
        implementation=implementation,
    )  # fmt: skip
    return out, lse


kept_attention_p = Primitive("kept_attention")
kept_attention_p.multiple_results = True


class _Operands(NamedTuple):
    """Of one call."""

    q: jax.Array
    cache: Cache
    captures: Sequence
    context: Sequence

    @classmethod
    def of(cls, args: Sequence, spec: Spec, *, paged: bool) -> _Operands:
        q, k, v, lengths, *rest = args
        table = rest.pop(0) if paged else None
        n = len(spec.reads)
        return cls(q, Cache(k, v, lengths, table), rest[:n], rest[n:])


def _layouts(*args, spec: Spec, paged: bool, dtype, implementation) -> Layouts:
    del implementation
    q, cache, captures, context = _Operands.of(args, spec, paged=paged)
    rows = Layout.of("`q`", ROW, q, 0)
    keys = [Layout.of(name, COL, x, 0) for name, x in (("`k`", cache.k), ("`v`", cache.v))]
    of_texts = [Layout.of("`lengths`", (), cache.lengths, 0)]
    if cache.table is not None:
        keys = [replace(x, dims=("dim 0", "dim 1", *x.dims[2:])) for x in keys]
        of_texts.append(Layout.of("`page_table`", (), cache.table, 0))
    of_texts = [replace(x, dims=("B", *x.dims[1:])) for x in of_texts]
    owns = [*map(of_reads, spec.reads), *of_context(spec, len(context))]
    names = [*spec.reads, *range(len(context))]
    read = [
        Layout.read(own, name, x, 0, rows)
        for own, name, x in zip(owns, names, (*captures, *context), strict=True)
    ]
    struct = jax.ShapeDtypeStruct
    results = struct((*q.shape[:3], cache.v.shape[3]), dtype), struct(q.shape[:3], spec.wide)
    out = tuple(Layout.of("a result", ROW, x, 0) for x in results)
    return Layouts((rows, *keys, *of_texts, *read), out)


def _impl(*args, origin, outs, device, spec: Spec, paged: bool, dtype, implementation):
    del outs
    q, cache, captures, context = _Operands.of(args, spec, paged=paged)
    if chosen(implementation, [], device).name != "mosaic_gpu":
        return _in_parts(
            *args, spec=spec, paged=paged, dtype=dtype, implementation=None, origin=origin
        )
    from xform.lowering import mosaic_gpu
    from xform.primitives.block_map import block_map

    out, top, total = mosaic_gpu.decode(
        spec, block_map, q, *cache[:2], captures, context,
        ends=cache.lengths, table=cache.table, origin=origin, dtype=dtype,
    )  # fmt: skip
    return [out, log_sum(top, total)]


def _in_parts(*args, spec: Spec, paged: bool, dtype, implementation, origin=(0, 0)):
    """The same, part after part."""
    q, cache, captures, context = _Operands.of(args, spec, paged=paged)
    at = lambda b, h: (b + origin[0], h + origin[1])

    def seen(b, h, t, position):
        there = cache.has(b, position)
        if spec.mask is None:
            return there & (cache.lengths[b] >= q.shape[1] - t)
        return both(there, jaxpr_as_fun(spec.mask)(*at(b, h), t, position, *context)[0])

    def score(s, b, h, t, position):
        index = (*at(b, h), t, position)
        loaded = [
            _load(read, x, index, context)
            for x, group in zip(captures, spec.reads, strict=True)
            for read in group
        ]
        assert spec.score is not None
        return jaxpr_as_fun(spec.score)(s, *index, *loaded)[0]

    out, lse = in_parts(
        q, cache, score if spec.score else None, seen,
        scale=spec.scale, splits=None, implementation=implementation,
    )  # fmt: skip
    return [x.astype(t) for x, t in zip(cache.checked(out, lse), (dtype, spec.wide), strict=True)]


def _load(read, capture, index, context):
    """What a score mod reads at one pair."""
    starts = None if read.index is None else jaxpr_as_fun(read.index)(*index, *context)[0]
    return replace(read, dims="").load(capture, starts)


def _jvp(primals, tangents, **params):
    """That of `in_parts`, by the numbers alone that have a tangent."""
    moving = [type(t) is not ad.Zero for t in tangents]

    def f(*values):
        values = iter(values)
        args = [next(values) if m else x for m, x in zip(moving, primals, strict=True)]
        return _in_parts(*args, **params)

    pick = lambda xs: [x for x, m in zip(xs, moving, strict=True) if m]
    return jax.jvp(f, pick(primals), pick(tangents))


def _batch(args, dims, **params):
    results = jax.vmap(partial(_in_parts, **params), dims)(*args)
    return results, [0] * len(results)


splittable(kept_attention_p, _layouts, _impl)
ad.primitive_jvps[kept_attention_p] = _jvp
batching.primitive_batchers[kept_attention_p] = _batch
