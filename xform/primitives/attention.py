"""`flex_attention`: attention whose score and mask are the user's own functions.

    out = softmax(mask(score_mod(scale q k^T))) v

in O(T V) memory, with exact gradients for q, k, v, sinks and everything that the mods read, under
every JAX transform. FlexAttention (Dong et al., arXiv:2412.05496) is the model for the two mods;
here block maps need no building and closures no rules.

`flex_attention_p` computes the output and, of each row's scores, the maximum and the sum of the
exponentials relative to it. Its derivative is a tile sum (`xform.primitives.tile_sum`), written
down in `_jvp`; no order needs anything else. Log-sum-exp and sinks are ordinary JAX on these
results, for which the maximum is a constant: that it cancels is exact. Asked for by name, it comes
a second time, with its own derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from xform._compat import Primitive
from xform.lowering import _eight as eight
from xform.lowering import blockwise, reference
from xform.lowering._contract import rounded, wide_of
from xform.lowering._dropout import threefry
from xform.lowering._spec import Spec
from xform.lowering._tile_fn import COL, ROW, Attend, Jvp, Peak, Transpose, base, log_sum
from xform.primitives._attention_checks import (
    check_arguments,
    check_mods,
    check_places,
    of_pairs,
)
from xform.primitives._choose import Choice, choose, choose_for_sum, default_device
from xform.primitives._mods import take_apart
from xform.primitives._objects import Shape
from xform.primitives._own import of_context, of_reads
from xform.primitives._rules import (
    add_hidden_dim,
    broadcast_like,
    from_numpy,
    hidden_sizes,
    join_axes,
)
from xform.primitives._split import Layout, Layouts, splittable
from xform.primitives._undecided import remark
from xform.primitives.block_map import block_map
from xform.primitives.tile_sum import tile_sum


class Aux(NamedTuple):
    """What `flex_attention` returns beside the output, where asked for.

    Attributes:
      lse: natural log-sum-exp of the modified scores, sinks counted, `[B,T,H]`; minus infinity for
        a row with no key. Differentiable.
      max: the largest modified score of each row, sinks not counted, `[B,T,H]`; minus infinity for
        a row with no key. Differentiable: scores that tie share the gradient, as in `jnp.max`.
    """

    lse: Float[Array, "B T H"] | None = None
    max: Float[Array, "B T H"] | None = None


class _Options(TypedDict, total=False):
    """The keyword arguments of `flex_attention` but `aux`, which decides what is returned."""

    score_mod: Callable | None
    mask_mod: Callable | None
    scale: ArrayLike | None
    sinks: Array | None
    dropout_rate: float
    dropout_key: Array | None
    deterministic: bool
    implementation: str | None
    format: str | None


@overload
def flex_attention(
    q: Array | np.ndarray,
    k: Array | np.ndarray,
    v: Array | np.ndarray,
    *,
    aux: tuple[()] = ...,
    **options: Unpack[_Options],
) -> Array: ...
@overload
def flex_attention(
    q: Array | np.ndarray,
    k: Array | np.ndarray,
    v: Array | np.ndarray,
    *,
    aux: Sequence[str],
    **options: Unpack[_Options],
) -> tuple[Array, Aux]: ...
def flex_attention(
    q: Float[Array | np.ndarray, "B T H D"],
    k: Float[Array | np.ndarray, "B S K D"],
    v: Float[Array | np.ndarray, "B S K V"],
    *,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array | np.ndarray, " H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    aux: Sequence[str] = (),
    deterministic: bool = True,
    implementation: str | None = None,
    format: str | None = None,
) -> Float[Array, "B T H V"] | tuple[Float[Array, "B T H V"], Aux]:
    """Returns attention of q over k and v, with the user's functions inside.

    The order is `q k^T scale`, `score_mod`, `mask_mod`, softmax with sinks, dropout. A row with no
    key gives 0; what a mask hides has no influence on values or gradients, NaN and infinity
    included. H is a multiple of K: query head h reads key/value head `h // (H // K)`.

    Args:
      q: queries.
      k, v: keys and values, of the dtype of q.
      score_mod: `score_mod(score, b, h, q_idx, kv_idx) -> score`, a function of scalars: the
        score in float32 (float64 for float64 inputs) and four int32 indices. It may read arrays of
        its closure; floating ones get exact gradients.
      mask_mod: `mask_mod(b, h, q_idx, kv_idx) -> bool`, a function of scalars, or a mask object
        (`causal() & sliding_window(1024)`). Tiles that it leaves empty cost nothing.
      scale: factor on the scores; `D ** -0.5` if None.
      sinks: one logit per query head that takes part in the softmax and has no value.
      dropout_rate: the probability, below 1, with which a weight is dropped.
      dropout_key: a PRNG key, where the rate is not 0. A weight's fate depends on the key and its
        own (b, h, q_idx, kv_idx), on nothing else. Inside `jax.shard_map` these are a device's
        own, as for mods: there, `jax.random.fold_in(key, jax.lax.axis_index(name))`.
      aux: names of further results, a tuple of "lse" and "max".
      deterministic: whether a second run must give the same bits; False lets a lowering add in any
        order, if that is faster.
      implementation: "blockwise" (any device), "mosaic_gpu" (kernels for NVIDIA's Hopper, forward
        and reverse mode), "reference" (dense, for tests), or None to choose: see `which`.
      format: of the numbers that are multiplied: None for the dtype of q, or "e4m3", 8 bits, whose
        outputs are off by some 5 % of their size, where those of bfloat16 are by 0.3 %. Each query
        of a head has a scale of its own, a power of two; keys share theirs, and values too, by
        blocks of 128 and head. Scores and sums stay float32, mods see true scores. The rounding is
        the same everywhere: other devices, and calls that the kernel does not take, emulate it,
        which `which` tells. The derivative is that of attention, in the dtype of q, at the rounded
        q, k and v, straight through the rounding; it makes a forward pass of its own.

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on shapes, dtypes, mods or names that do not fit, all that is wrong at once.
      NotImplementedError: if what was asked for by name can't run, with all reasons.

    >>> import jax, jax.numpy as jnp
    >>> from xform import causal, flex_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 16))
    >>> slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])
    >>> alibi = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)
    >>> flex_attention(q, k, v, score_mod=alibi, mask_mod=causal()).shape
    (1, 64, 4, 16)
    """
    aux = (aux,) if isinstance(aux, str) else aux
    q, k, v, sinks = from_numpy(q, k, v, sinks)
    check_arguments(q, k, v, sinks, dropout_rate, dropout_key, aux, implementation, format)
    shape = Shape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    check_mods(score_mod, mask_mod, scale, shape)
    score_mod, mask_mod = of_pairs(shape, score_mod, mask_mod)
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    size = v.shape[-1]
    q, k, v = (jnp.pad(x, [*[(0, 0)] * 3, (0, 1)]) if x.shape[-1] == 0 else x for x in (q, k, v))
    if implementation == "reference":
        check_places(q, score_mod, mask_mod, shape)
        attend = reference.attend
        q, k, v = eight.rounded(q, k, v) if format else (q, k, v)
    else:
        # What sinks scale is rounded after that, and only then.
        attend = partial(
            _attend, implementation=implementation, deterministic=deterministic,
            wide=sinks is not None, shape=shape, format=format,
        )  # fmt: skip
    out, lse, *peak = attend(
        q, k, v, score_mod=score_mod, mask_mod=mask_mod, scale=scale, peak="max" in aux,
        dropout_rate=float(dropout_rate), dropout_key=dropout_rate and _key_data(dropout_key),
    )  # fmt: skip
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
        out = out.astype(q.dtype)
    results = {"lse": lse, "max": peak[0] if peak else None}
    out = out[..., :size]
    return (out, Aux(**{name: results[name] for name in aux})) if aux else out


def _attend(
    q, k, v, *, score_mod, mask_mod, scale, dropout_rate, dropout_key, peak, implementation,
    deterministic=True, wide=False, shape=None, format=None,
):  # fmt: skip
    """Output, log-sum-exp and, with `peak`, the maximum, by the primitive.

    With `wide`, the output is not rounded to the dtype of q; with a `shape`, arrays of the mods are
    held to it.
    """
    spec, captures, context = _traced(
        q, score_mod, mask_mod, scale, dropout_rate,
        deterministic=deterministic, shape=shape, format=format,
    )  # fmt: skip
    if implementation is not None:
        choose(implementation, spec, q.shape, *v.shape[1::2], peak=peak, device=None)
    context = (*context, dropout_key) if dropout_rate else context
    out, top, total, *maximum = flex_attention_p.bind(
        *join_axes((q, k, v, *captures, *context)),
        spec=spec, hidden=0, dtype=spec.wide if wide else spec.dtype, peak=peak,
        implementation=implementation,
    )  # fmt: skip
    return out, log_sum(top, total), *maximum[:1]


def _traced(
    q, score_mod, mask_mod, scale, dropout_rate, *, deterministic=True, shape=None, format=None
):
    """The user's program, the arrays that its score reads, and those that masks and indices do."""
    if isinstance(scale, jax.Array):  # it may be traced, and has a gradient: a capture like others
        scaled = partial(_scaled, score_mod, scale)
        score_mod, scale = functools.update_wrapper(scaled, score_mod or _scaled), 1.0
    mods = take_apart(score_mod, mask_mod, wide_of(q.dtype), shape)
    spec = Spec(
        float(scale), jnp.dtype(q.dtype),
        mods.score, mods.reads, mods.mask, mods.mask_dims, dropout_rate, deterministic, format,
    )  # fmt: skip
    return spec, mods.captures, mods.context


def which(
    q: Array, k: Array, v: Array, *,
    aux: Sequence[str] = (), gradient: bool = False, **options: Unpack[_Options],
) -> Choice:  # fmt: skip
    """Returns which implementation `flex_attention` of these arguments runs here, and why.

    Args:
      q, k, v: as for `flex_attention`; only shapes and dtypes count.
      gradient: whether to ask for the backward pass, with gradients for q, k, v and all floating
        arrays that the score mod reads.
      aux, **options: as for `flex_attention`.

    Returns:
      `(name, why)`, on the device where such arrays are put by default. If there are tiles that the
      analysis of a mask can't decide, `why` names the operations that defeat it, how many tiles are
      evaluated pair by pair for them, and the memory that takes.

    Raises:
      ValueError: on mods that do not fit, as `flex_attention`.
      NotImplementedError: if what was asked for by name can't run, with all reasons.

    >>> import jax, jax.numpy as jnp
    >>> from xform import which
    >>> q, k, v = jnp.ones((3, 1, 64, 4, 16))
    >>> which(q, k, v, implementation="blockwise")
    Choice(name='blockwise', why='asked for by name')
    """
    scale = options.get("scale")
    shape = Shape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mods = options.get("score_mod"), options.get("mask_mod")
    check_mods(*mods, scale, shape)
    score, mask = of_pairs(shape, *mods)
    spec, captures, context = _traced(
        q, score, mask, q.shape[-1] ** -0.5 if scale is None else scale,
        float(options.get("dropout_rate", 0.0)), shape=shape, format=options.get("format"),
    )  # fmt: skip
    device, asked = default_device(), options.get("implementation")
    if gradient:
        floating = (jnp.issubdtype(x.dtype, jnp.floating) for x in captures)
        moving = (True, False, False, True, True, *floating)
        linear = (*(False for _ in moving), *(True for m in moving if m))
        read = (x for x, moves in zip(captures, moving[5:], strict=True) if moves)
        shapes = [*(x.shape[3:] for x in (q, k, v)), *(x.shape for x in read)]
        fn = Transpose(Jvp(Attend(_unrounded(spec)), moving), linear, tuple(shapes))
        choice = choose_for_sum(asked, fn, (q, None, None, k, v, *captures), device)
    else:
        choice = choose(asked, spec, q.shape, *v.shape[1::2], peak="max" in aux, device=device)
        if choice.name == "mosaic_gpu" and (words := _few(spec, q, k, v)):
            return choice._replace(why=words)
    if mask is None:
        return choice
    sizes = _map_sizes(choice.name, spec, captures, context, q, k, v, device)
    words = remark(mask, **sizes) if sizes else ""
    return choice._replace(why="; ".join(filter(None, (choice.why, words))))


def _few(spec: Spec, q, k, v) -> str:
    """How the decoding kernel takes a call; nothing if it does not."""
    from xform.lowering import mosaic_gpu

    plan = mosaic_gpu.plan_if_few(spec, mosaic_gpu.Few.of(q, k, v))
    return f"the decoding kernel takes all of it, its keys cut into {plan.splits}" if plan else ""


def _map_sizes(name: str, spec: Spec, captures, context, q, k, v, device) -> dict[str, int]:
    """How many maps of tiles a call makes, and the sizes that `block_map` takes; none if none."""
    t, s = q.shape[1], k.shape[1]
    if name == "reference" or 0 in (*q.shape, *k.shape):
        return {}
    if name == "mosaic_gpu":
        from xform.lowering.mosaic_gpu._attend import programs
        from xform.lowering.mosaic_gpu._tuning import tiles_of

        tiles = tiles_of(programs(spec), s, q.shape[-1], v.shape[-1], device.kind)
        sizes = (tiles.rows, tiles.cols)
        each = zip("bh", (q.shape[0], q.shape[2]), strict=True)
        maps = math.prod(n for dim, n in each if dim in spec.mask_dims)
    else:
        operands = (q, k, v, *captures, *context)
        units, row, col = blockwise._plan(spec, 0, q, k, operands, context, False)
        maps, sizes = math.prod(units.sizes), (row.tile, col.tile)
        if row.count == col.count == 1:
            return {}
    return {"maps": maps, "q_len": t, "kv_len": s, "q_tile": sizes[0], "kv_tile": sizes[1]}


def _key_data(key):
    """The two words of a PRNG key; those of a longer key are hashed to two."""
    words = jax.random.key_data(key).astype(jnp.uint32)
    pairs = [(words[i], words[i + 1]) for i in range(0, words.size, 2)]
    return jnp.stack(functools.reduce(threefry, pairs))


def _scaled(score_mod, scale, score, *index):
    score = score * scale.astype(score.dtype)
    return score if score_mod is None else score_mod(score, *index)


def _with_sinks(out, lse, sinks):
    """Adds one logit without a value to every row's softmax."""
    sinks = broadcast_like(sinks.astype(lse.dtype), lse)
    top = base(jax.lax.stop_gradient(jnp.maximum(lse, sinks)))
    keys = jnp.exp(lse - top)
    total = keys + jnp.exp(sinks - top)
    factor = (keys * blockwise.inverse(total))[..., None]
    return (out.astype(factor.dtype) * factor).astype(out.dtype), log_sum(top, total)


flex_attention_p = Primitive("flex_attention")
"""The equation that a call is in a jaxpr, as a key of tables of rules."""
flex_attention_p.multiple_results = True


def _split(args: Sequence, spec: Spec):
    """q, k, v, captures, context."""
    n = 3 + len(spec.reads)
    return *args[:3], args[3:n], args[n:]


def _structs(args, spec: Spec, hidden: int, dtype, peak: bool, **_):
    """Of each row, shapes and dtypes of the output, the maximum and the sum.

    With `peak`, the maximum once more, as a function of the operands, and the key that has it.
    """
    q, v = args[0], args[2]
    rows = (*hidden_sizes(args, hidden), *q.shape[hidden:-1])
    struct = jax.ShapeDtypeStruct
    statistic = struct(rows, spec.wide)
    structs = [struct((*rows, v.shape[-1]), dtype), statistic, statistic]
    return [*structs, statistic, struct(rows, jnp.int32)] if peak else structs


_QKV = ("`q`", ROW), ("`k`", COL), ("`v`", COL)


def _layouts(*args, spec, hidden, **params) -> Layouts:
    n = 3 + len(spec.reads)
    inputs = tuple(Layout.of(*kind, x, hidden) for kind, x in zip(_QKV, args[:3], strict=True))
    owns = [*map(of_reads, spec.reads), *of_context(spec, len(args) - n)]
    names = [*spec.reads, *range(len(args) - n)]
    read = [Layout.read(*x, hidden, inputs[0]) for x in zip(owns, names, args[3:], strict=True)]
    structs = _structs(args, spec, hidden, **params)
    results = tuple(Layout.of("a result", ROW, x, hidden) for x in structs)
    return Layouts((*inputs, *read), results)


def _impl(
    *args, origin, outs, device, spec, hidden, dtype, peak, implementation, kinds=block_map
):  # fmt: skip
    q, k, v, captures, context = _split(args, spec)
    if 0 in (*q.shape, *k.shape, *hidden_sizes(args, hidden)):
        nothing = (0, -jnp.inf, 0, -jnp.inf, -1)
        return [jnp.full(s.shape, x, s.dtype) for s, x in zip(outs, nothing, strict=False)]
    chosen = choose(
        implementation, spec, q.shape, *v.shape[hidden + 1 :: 2], peak=peak, device=device
    ).name
    if chosen == "mosaic_gpu":
        from xform.lowering import mosaic_gpu

        options = dict(origin=origin, dtype=dtype, device=device.kind)
        return mosaic_gpu.attend(spec, kinds, hidden, q, k, v, captures, context, **options)
    if spec.format:
        q, k, v = eight.rounded(q, k, v)
    # A wide output becomes the "delta" of a row's derivatives, which add up to zero only if both
    # are made of the same weights; on a CPU, unrounded ones cost a few percent of a backward pass.
    exact = device.platform == "cpu" and not device.counted
    out, top, total, *argmax = blockwise.attend(
        spec, kinds, hidden, q, k, v, captures, context,
        origin=origin, peak=peak, weights=dtype if exact else None,
    )  # fmt: skip
    return [out.astype(dtype), top, total, *((top, *argmax) if peak else ())]


def _jvp(primals, tangents, *, spec, dtype, **params):
    """`out = A / L` at a fixed maximum and a fixed `norm`, so `d out = (dA - out dL) / L`.

    L is 1 here, but has derivatives (see `Attend`). Transposed, with `do` the cotangent of the
    output, A gets `do` and L gets `-(out . do)`, the "delta" of FlashAttention. The output is kept
    unrounded for it: at a narrow dtype its rounding would be the largest error of every gradient.
    So would that of weights in 8 bits, of which the derivative knows nothing.
    """
    values = None
    if spec.format:
        values = flex_attention_p.bind(*primals, spec=spec, dtype=dtype, **params)
        primals, spec = [*eight.rounded(*primals[:3]), *primals[3:]], _unrounded(spec)
    hidden, peak, implementation = (params[n] for n in ("hidden", "peak", "implementation"))
    q, k, v, captures, context = _split(primals, spec)
    dq, dk, dv, dcaptures, _ = _split(tangents, spec)
    out, top, total, *maximum = flex_attention_p.bind(
        *primals, spec=spec, dtype=spec.wide, **params
    )
    values = values or [out.astype(dtype), top, total, *maximum]
    moving = (dq, None, None, dk, dv, *dcaptures)
    nonzero = tuple(t is not None and type(t) is not ad.Zero for t in moving)
    fixed = jax.lax.stop_gradient(total)
    norm = blockwise.inverse(fixed)
    operands = [q, top, norm, k, v, *captures]
    d_sum, d_one = tile_sum(
        Jvp(Attend(spec), nonzero),
        [*operands, *(t for t, z in zip(moving, nonzero, strict=True) if z)], context,
        hidden=hidden, outs=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (out, total)],
        implementation=implementation,
    )  # fmt: skip
    d_out = (d_sum - d_one[..., None] * out) * _inverse_of_one(total * norm)[..., None]
    d_total = d_one * jax.lax.stop_gradient(values[2])
    # The cotangent of a wide output is rounded as products of it are, so that "delta" agrees.
    d_out = d_out.astype(dtype) if dtype == spec.dtype else rounded(d_out, spec.dtype)
    derivatives = [d_out, ad.Zero(jax.typeof(top)), d_total]
    if peak:
        argmax = maximum[1]
        d_max = _d_max(primals, tangents, top, argmax, spec=spec, hidden=hidden)
        derivatives += [d_max, ad.Zero(jax.typeof(argmax).to_tangent_aval())]
    return values, derivatives


@jax.custom_jvp
def _inverse_of_one(x):
    """`1 / x` of an x that is 1 but for its last bits, and has derivatives.

    As a number it is nothing to multiply with, and a cotangent need not be written once more.
    """
    return jnp.ones_like(x)


@_inverse_of_one.defjvp
def _inverse_of_one_jvp(primals, tangents):
    y = _inverse_of_one(*primals)
    return y, -y * y * tangents[0]


def _unrounded(spec: Spec) -> Spec:
    """The program whose derivative is taken: that of the rounded arrays, in their dtype."""
    return replace(spec, format=None)


def _d_max(primals, tangents, top, argmax, *, spec, hidden):
    """The mean of the derivatives of the scores that are the maximum (see `Peak`)."""
    q, k, _, captures, context = _split(primals, spec)
    dq, dk, _, dcaptures, _ = _split(tangents, spec)
    moving = (dq, None, None, dk, *dcaptures)
    nonzero = tuple(t is not None and type(t) is not ad.Zero for t in moving)
    if not any(nonzero):
        return ad.Zero(jax.typeof(top))
    operands = [q, top, argmax, k, *captures]
    run = partial(tile_sum, context=context, hidden=hidden, outs=[jax.typeof(top)] * 2)
    _, number = run(Peak(spec), [jax.lax.stop_gradient(x) for x in operands])
    tangents = [t for t, z in zip(moving, nonzero, strict=True) if z]
    d_sum, _ = run(Jvp(Peak(spec), nonzero), [*operands, *tangents])
    return d_sum * blockwise.inverse(number)


def _transpose(cts, *args, spec, hidden, dtype, peak, implementation):
    """Attention is linear in v alone: `out = A` of `Attend`, whose L is 1."""
    if spec.format:
        q, k, _ = eight.rounded(*args[:2], args[1])
        args, spec = [q, k, *args[2:]], _unrounded(spec)
    q, k, v, captures, context = _split(args, spec)
    others = (q, k, *captures, *context)
    if not ad.is_undefined_primal(v) or any(map(ad.is_undefined_primal, others)):
        raise NotImplementedError(
            "flex_attention is linear in `v`, and in no other argument: transpose it as a function "
            "of `v` alone, or differentiate it, by `jax.vjp` or `jax.linearize`."
        )
    if type(cts[0]) is ad.Zero:
        return [ad.Zero(v.aval) if x is v else None for x in args]
    params = dict(spec=spec, hidden=hidden, dtype=dtype, implementation=implementation)
    top, total = _statistics(args, v.aval, peak=False, **params)
    linear = (False, False, False, False, True, *(False for _ in captures))
    fn = Transpose(Attend(spec), linear, (v.aval.shape[hidden + 3 :],))
    (ct,) = tile_sum(
        fn, [q, top, blockwise.inverse(total), k, *captures, cts[0], jnp.zeros_like(total)],
        context, hidden=hidden, outs=[v.aval], implementation=implementation,
    )  # fmt: skip
    return [ct if x is v else None for x in args]


def _statistics(args, v, **params):
    """All results but the output, which alone depends on v."""
    v = jnp.zeros((*v.shape[:-1], 1), v.dtype)
    return flex_attention_p.bind(*join_axes((*args[:2], v, *args[3:])), **params)[1:]


def _partial_eval(trace, *tracers, **params):
    """Where v alone is not known, the output alone is not: what is computed of it stays linear."""
    results = trace.default_process_primitive(flex_attention_p, tracers, params)
    others = [*tracers[:2], *tracers[3:]]
    if tracers[2].is_known() or not all(x.is_known() for x in others):
        return results
    known = [x.pval.get_known() if x.is_known() else None for x in tracers]
    return [results[0], *_statistics(known, tracers[2].aval, **params)]


def _batch(args, dims, *, hidden, **params):
    args, _ = add_hidden_dim(args, dims)
    results = flex_attention_p.bind(*args, hidden=hidden + 1, **params)
    return results, [0] * len(results)


splittable(flex_attention_p, _layouts, _impl)
ad.primitive_jvps[flex_attention_p] = _jvp
ad.primitive_transposes[flex_attention_p] = _transpose
pe.custom_partial_eval_rules[flex_attention_p] = _partial_eval
batching.primitive_batchers[flex_attention_p] = _batch
