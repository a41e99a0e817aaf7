"""`linear_cross_entropy`: the loss of a language model, without its logits.

    loss = lse - logit of the label          lse = log sum exp (hidden weight + bias)

with exact gradients, to any order, under every JAX transform. The idea is that of
Wijmans et al., "Cut your losses in large-vocabulary language models" (arXiv:2411.09009): the
logits are made chunk by chunk, and once more for the gradients. Unlike theirs, no gradient is
filtered, and weights may get theirs or not at no cost to the other.

It is attention of tokens over the vocabulary, in which the label is hidden and whose values are the
weights themselves: `linear_cross_entropy_p` computes the sums of `CrossEntropy` and, where hidden
states have a tangent, what attention would put out, which is the gradient of the log-sum-exp. That
it is known before any cotangent is what the chain rule allows: a token's cotangent is a number, by
which its row is multiplied. Weights sum over tokens and have to wait; theirs is a tile sum. Loss,
smoothing, z-loss and the sums over devices are ordinary JAX on these results.

Products of T·V·D multiplications: one forward; forward and backward 4, in which 3 is the least of
any method that holds all logits. The kernels for NVIDIA's Hopper have 4 too, but one forward and
three backward: there the gradient of hidden states waits for the cotangents with that of weights,
and shares its logits.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from xform._compat import Primitive
from xform.lowering import _tokens, chunked, reference
from xform.lowering._loss_fn import (
    IGNORED,
    Chunks,
    CrossEntropy,
    LossSpec,
    RowGradients,
    without_ignored,
)
from xform.lowering._tile_fn import ROW, Jvp, base, log_sum
from xform.primitives._auto import axis_names, local_rows, register
from xform.primitives._choose import by_kernels, default_device
from xform.primitives._loss_checks import check_arrays, check_kept, check_kinds, check_numbers
from xform.primitives._rules import add_hidden_dim, from_numpy, hidden_sizes, join_axes
from xform.primitives.tile_sum import tile_sum


def linear_cross_entropy(
    hidden: Float[Array | np.ndarray, "*tokens D"],
    weight: Float[Array | np.ndarray, "_ _"],
    labels: Integer[Array | np.ndarray, "*tokens"],
    *,
    bias: Float[Array | np.ndarray, " V"] | None = None,
    vocab_dim: int = 1,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_label: int = -1,
    vocab_axis: str | None = None,
    chunks: Chunks | None = None,
    implementation: str | None = None,
    keep_logits: bool = False,
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """Returns the cross entropy of each token's label, and the log-sum-exp of its logits.

    With `x = softcap(hidden weight + bias)`, `lse = log sum exp x` and `y` the label,

        loss = lse - (1 - label_smoothing) x[y] - label_smoothing mean(x) + z_loss lse²

    in natural logarithms. Gradients are exact for hidden states, weights and bias, of both results
    and of any order; a second run gives the same bits.

    **Memory**, beyond arguments and results, is for N tokens in bfloat16 about

        loss alone                    6 t v + 2 D v + 2 t D          for t, v = chunks.by_entry
        gradient of hidden states     6 t v + 2 D v + 10 t D + 2 N D for t, v = chunks.by_token
        gradient of weights           6 t v + 6 D v + 2 t D          for t, v = chunks.by_entry

    bytes, and 2 N D more with label smoothing: 120 to 190 MB at N = 8,192, V = 128,256 and
    D = 4,096 with any options, where logits would take 4,203. Kernels take 12 N V / 256 for the
    loss, and 4 N D + 2 N v + 2 D v for both gradients, with v = 2,048: 49 and 205 MB there, with
    what XLA adds.

    **Devices.** Tokens may be split over any mesh axes, explicit, automatic or manual: each device
    works on its own, and the gradient of weights that all share is summed. Weights may be split
    along the vocabulary over one axis: say which by `vocab_axis` inside `jax.shard_map`, or by
    their type where axes are explicit. The loss then takes one maximum and two or three sums of a
    number per token over that axis, and the gradient of hidden states one sum. Weights that an
    automatic axis splits are gathered first, as XLA's partitioner sees fit.

    Args:
      hidden: hidden states of the tokens, with any number of leading dimensions.
      weight: the last layer's matrix, `[D,V]`, of the dtype of `hidden`.
      labels: for each token an entry of the vocabulary, or `ignore_label`. Any other number makes
        NaN of the loss of its token and of what has a gradient from it: under `jit`, no value can
        raise.
      bias: added to the logits.
      vocab_dim: which dimension of `weight` is the vocabulary: 1 for `[D,V]`, 0 for `[V,D]`.
      softcap: logits become `softcap tanh(x / softcap)`.
      label_smoothing: the weight, from 0 to 1, of all entries alike beside the label's.
      z_loss: the factor of `lse²`, which keeps logits near 0.
      ignore_label: tokens with this label have loss 0, log-sum-exp 0 and no influence on any
        gradient, whatever their hidden states, NaN included.
      vocab_axis: the manual mesh axis that splits `weight` and `bias` along the vocabulary; labels
        count over the whole of it, and tokens are the same on all devices along it. Labels whose
        type varies over it are an error; hidden states may, since what is gathered has such a type.
      chunks: how many logits are held at once; `xform.lowering.chunked.CHUNKS` has the defaults.
      implementation: "chunked" (any device), "mosaic_gpu" (kernels for NVIDIA's Hopper: bfloat16
        and float16, first derivatives, lengths that its copies take; raises for the rest),
        "reference" (dense, for tests); None takes the kernels where they fit, else chunked.
      keep_logits: keep the logits for the backward pass, rounded to the dtype of `hidden`, instead
        of making them again: three products instead of four, and 2 N V bytes for each array of that
        size in bfloat16, of which there are two. By XLA, without `chunks` or `implementation`.

    Returns:
      loss and log-sum-exp, float32 (float64 for float64 inputs), of the shape of `labels`.

    Raises:
      TypeError, ValueError: on what is no array, and on shapes, dtypes or numbers that do not fit,
        all that is wrong at once.

    >>> import jax, jax.numpy as jnp
    >>> from xform import linear_cross_entropy
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> hidden = jax.random.normal(keys[0], (2, 5, 16))
    >>> weight = jax.random.normal(keys[1], (16, 99))
    >>> labels = jax.random.randint(keys[2], (2, 5), 0, 99).at[0, :3].set(-1)
    >>> loss, lse = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4)
    >>> loss.shape, int((loss == 0).sum())
    ((2, 5), 3)
    """
    hidden, weight, bias = from_numpy(hidden, weight, bias)
    check_kinds(hidden, weight, labels, bias, chunks)
    numbers = dict(softcap=softcap, label_smoothing=label_smoothing, z_loss=z_loss)
    check_numbers(**numbers, ignore_label=ignore_label, vocab_dim=vocab_dim)
    labels, vocab_dim = jnp.asarray(labels), int(vocab_dim)
    check_arrays(hidden, weight, labels, bias, vocab_dim, vocab_axis, implementation)
    check_kept(keep_logits, chunks, implementation)
    options = dict(
        vocab_dim=vocab_dim, softcap=None if softcap is None else float(softcap),
        label_smoothing=float(label_smoothing), z_loss=float(z_loss),
        ignore_label=int(ignore_label),
    )  # fmt: skip
    arrays = (hidden, weight, labels) if bias is None else (hidden, weight, labels, bias)
    if implementation == "reference":
        return reference.cross_entropy(*arrays, **options)
    options |= dict(chunks=chunks, implementation=implementation, keep_logits=bool(keep_logits))
    loss = partial(_cross_entropy, **options)
    return _on_shards(loss, arrays, vocab_dim, vocab_axis)


def _cross_entropy(
    hidden, weight, labels, *bias, vocab_dim, softcap, label_smoothing, z_loss, ignore_label,
    chunks, implementation, keep_logits, vocab_axis,
):  # fmt: skip
    """Loss and log-sum-exp of the tokens of one device."""
    spec = LossSpec(
        jnp.dtype(hidden.dtype), softcap, bool(bias), label_smoothing > 0, labels.ndim, vocab_dim,
        chunks, implementation,
    )  # fmt: skip
    # By kernels, both gradients come from one walk of the vocabulary, and are cheaper so. They have
    # none for a bias. What the forward pass leaves depends on it, and where the program is to run
    # is not known yet: asked for by name, they are meant, else they are on a device that has them.
    device = None if implementation else default_device()
    kernels = by_kernels(spec, weight.shape, labels.size, device)
    spec = dataclasses.replace(spec, together=kernels and not bias)
    size = entries = weight.shape[vocab_dim]
    first = 0
    if vocab_axis is not None:
        first = lax.axis_index(vocab_axis) * size
        entries = size * lax.axis_size(vocab_axis)
    if jnp.issubdtype(labels.dtype, jnp.unsignedinteger):  # none of these is -1
        labels = jnp.minimum(labels, min(jnp.iinfo(labels.dtype).max, jnp.iinfo(jnp.int32).max))
    labels = labels.astype(jnp.int64 if labels.dtype == jnp.int64 else jnp.int32)  # may be -1
    ignored = labels == ignore_label
    found = (labels >= 0) & (labels < entries)
    own = jnp.where((labels >= first) & (labels < first + size), labels - first, -1)
    own = jnp.where(ignored, IGNORED, own).astype(jnp.int32)
    args = join_axes((hidden, weight, *bias, own))
    if keep_logits:
        sums = _sums_of_kept(spec, *args)
    else:
        sums = linear_cross_entropy_p.bind(*args, spec=spec, hidden=0, rows=None)
    top, total, label, *every = _over_devices(vocab_axis, *sums)

    # All but the label's logit, and that one: their log-sum-exps, and that of both.
    rest = log_sum(top, total)
    # A label that is no entry: NaN, which its gradients are then too.
    loss = jax.nn.softplus(rest - jnp.where(found | ignored, label, jnp.nan))
    both = jnp.stack([rest, jnp.where(found, label, -jnp.inf)])
    top = base(lax.stop_gradient(both.max(0)))
    lse = log_sum(top, jnp.exp(both - top[None]).sum(0))
    if every:
        loss = loss + label_smoothing * (label - every[0] / entries)
    if z_loss:
        loss = loss + z_loss * lse**2
    return jnp.where(ignored, 0, loss), jnp.where(ignored, 0, lse)


def _sums_of_kept(spec: LossSpec, hidden, weight, *rest) -> list:
    """What the primitive gives, from all logits, which are kept for the backward pass.

    All else is made of them again there, as part of what reads it: no array of their size but them
    and their cotangents.
    """
    *bias, labels = rest

    def logits(hidden, weight):
        hidden = without_ignored(labels, hidden)
        dims = (((hidden.ndim - 1,), (1 - spec.vocab_dim,)), ((), ()))
        return lax.dot_general(hidden, weight, dims, precision=lax.Precision.HIGHEST)

    @jax.checkpoint
    def sums(x, *bias):
        x = x.astype(spec.wide)
        if bias:
            x = x + jnp.expand_dims(bias[0].astype(spec.wide), tuple(range(labels.ndim)))
        x = x if spec.softcap is None else spec.softcap * jnp.tanh(x / spec.softcap)
        own = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) == labels[..., None]
        others = jnp.where(own, -jnp.inf, x)
        top = lax.stop_gradient(others.max(-1, initial=-jnp.inf))
        total = jnp.exp(others - base(top)[..., None]).sum(-1)
        every = [x.sum(-1)] if spec.smooth else []
        ignored = labels == IGNORED
        sums = [top, total, jnp.where(own, x, 0).sum(-1), *every]
        nothing = [-jnp.inf, 0.0, 0.0, 0.0]
        return [jnp.where(ignored, n, s) for s, n in zip(sums, nothing, strict=False)]

    return sums(logits(hidden, weight), *bias)


def _over_devices(axis: str | None, top, total, *sums):
    """The sums over the whole vocabulary, from those over each device's part of it."""
    if axis is None:
        return top, total, *sums
    whole = lax.pmax(lax.stop_gradient(top), axis)
    total = total * jnp.exp(top - base(whole))
    return whole, *(lax.psum(x, axis) for x in (total, *sums))


def _on_shards(loss, arrays, vocab_dim: int, vocab_axis: str | None):
    """`loss` on each device, where the types of arrays say that explicit mesh axes split them."""
    hidden, weight, labels, *bias = (jax.typeof(x).sharding.spec for x in arrays)
    split = {axis for spec in (hidden, weight, labels, *bias) for axis in axis_names(spec)}
    if not split:
        return loss(*arrays, vocab_axis=vocab_axis)
    tokens, entries = tuple(hidden[:-1]), weight[vocab_dim]
    wrong = []
    if hidden[-1] is not None or weight[1 - vocab_dim] is not None:
        wrong.append(
            f"`hidden` is split over {hidden} and `weight` over {weight}: the dimension that they "
            "share must be whole on every device"
        )
    if tuple(labels) != tokens:
        wrong.append(f"`labels` is split over {labels} and tokens of `hidden` over {P(*tokens)}")
    if bias and tuple(bias[0]) != (entries,):
        wrong.append(f"`bias` is split over {bias[0]} and entries of `weight` over {P(entries)}")
    if vocab_axis is not None and entries is not None:
        wrong.append(f"`vocab_axis` is {vocab_axis!r} and `weight` is split over {entries} by type")
    if isinstance(entries, tuple):
        wrong.append(f"the vocabulary of `weight` is split over {entries}: one axis is supported")
    if entries is not None and entries in axis_names(P(*tokens)):
        wrong.append(f"tokens and vocabulary are split over the same axis, {entries!r}")
    if wrong:
        raise ValueError(
            f"linear_cross_entropy: {'; '.join(wrong)}. Place them with `jax.reshard` before."
        )
    return jax.shard_map(
        partial(loss, vocab_axis=vocab_axis if entries is None else entries),
        mesh=jax.typeof(arrays[0]).sharding.mesh, axis_names=split,
        in_specs=(hidden, weight, labels, *bias), out_specs=(P(*tokens), P(*tokens)),
    )(*arrays)  # fmt: skip


linear_cross_entropy_p = Primitive("linear_cross_entropy")
"""The equation that a call is in a jaxpr, as a key of tables of rules."""
linear_cross_entropy_p.multiple_results = True


def _structs(*args, spec: LossSpec, hidden: int, rows):
    """Of each token: the largest other logit, the sums and, with `rows`, their gradients for h."""
    shape = (*hidden_sizes(args, hidden), *args[-1].shape[hidden:])
    sums = len(CrossEntropy(spec).results)
    gradient = jax.ShapeDtypeStruct((*shape, args[0].shape[-1]), rows or spec.dtype)
    vectors = 0 if rows is None else sums
    return [jax.ShapeDtypeStruct(shape, spec.wide)] * (1 + sums) + [gradient] * vectors


def _impl(*args, spec, hidden, rows, device, auto):
    def forward(*args):
        *operands, labels = args
        kinds = (ROW, ROW, *CrossEntropy(spec).operands[2:])
        tokens = _tokens.Layout.of(spec, hidden, kinds, [labels, *operands]).count
        if by_kernels(spec, operands[1].shape, tokens, device, has=rows is None):
            from xform.lowering.mosaic_gpu import _loss

            return _loss.forward(spec, hidden, operands, labels)
        return chunked.forward(spec, hidden, rows, operands, labels, device.platform)

    if not (auto and spec.token_dims):
        return forward(*args)
    tokens, shared = range(hidden, hidden + spec.token_dims), range(0)
    ins = [tokens, *(shared for _ in args[1:-1]), tokens]
    outs = [tokens for _ in _structs(*args, spec=spec, hidden=hidden, rows=rows)]
    return local_rows(forward, ins, outs)(*args)


def _jvp(primals, tangents, *, spec, hidden, rows):
    """Along hidden states, `d sum = gradient . dh`; along the rest, a tile sum.

    The gradients are a row's own, `[D]`, and come with the sums in one walk of the vocabulary. Of
    their own tangents, at the second order, all are tile sums.
    """
    *operands, labels = primals
    fn = CrossEntropy(spec)
    n = len(fn.results)
    dh, *columns = tangents[:-1]
    moves = lambda ts: tuple(type(t) is not ad.Zero for t in ts)
    (along_h,), along = moves([dh]), moves(columns)
    if along_h:
        dh = without_ignored(labels, dh)
    together = spec.together and along_h and rows is None
    kept = spec.dtype if rows is None and along_h and not together else rows
    bind = partial(linear_cross_entropy_p.bind, *primals, spec=spec, hidden=hidden)
    top, *outs = bind(rows=kept)
    sums, gradients = outs[:n], outs[n:]

    def derivative(fn, nonzero, results):
        """The tangents of a tile sum along the tangents where `nonzero`."""
        nonzero = (nonzero[0], False, *nonzero[1:])  # `top` is a constant
        moving = [t for t, z in zip((dh, None, *columns), nonzero, strict=True) if z]
        h, *others = operands
        structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results]
        arrays = [h, top, *others, *moving]
        return tile_sum(Jvp(fn, nonzero), arrays, [labels], hidden=hidden, outs=structs)

    d_sums = [jnp.zeros_like(x) for x in sums]
    if any(along) or together:
        d_sums = derivative(fn, (together, *along), sums)
    if along_h and not together:
        wide = lambda x: x.astype(spec.wide)
        d_sums = [d + (wide(g) * wide(dh)).sum(-1) for d, g in zip(d_sums, gradients, strict=True)]
    d_outs = [ad.Zero(jax.typeof(top)), *d_sums]
    if rows is None:
        return [top, *sums], d_outs
    moving = (along_h, *along)
    return [top, *outs], [*d_outs, *derivative(RowGradients(fn), moving, gradients)]


def _batch(args, dims, *, hidden, **params):
    args, _ = add_hidden_dim(args, dims)
    results = linear_cross_entropy_p.bind(*args, hidden=hidden + 1, **params)
    return results, [0] * len(results)


register(linear_cross_entropy_p, _structs, _impl)
ad.primitive_jvps[linear_cross_entropy_p] = _jvp
batching.primitive_batchers[linear_cross_entropy_p] = _batch
