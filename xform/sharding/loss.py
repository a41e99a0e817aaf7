"""Losses that don't depend on how tokens and vocabulary are dealt out.

`cross_entropy` splits the last matrix by columns: each device makes the logits of its entries of
the vocabulary, chunk by chunk, and devices exchange a few numbers per token (a maximum, sums of
exponentials, the label's logit), never logits. With `x_i` those of device i:

    lse = m + log Σ_i Σ exp(x_i - m)        m = max_i max x_i
    loss = lse - Σ_i [the label is i's] x_i[label]

Each of the sums is over the axis, and the derivative of a sum over devices is a cast: so device i
has the gradient of its columns, and what the hidden states get is the sum over devices, as where
any block opens (see `tensor`).

`add_up` gives the sum of what all devices found and the number of labels that all of them counted.
The mean of devices' means would weigh a label by how few its device has.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from xform.primitives.cross_entropy import linear_cross_entropy
from xform.sharding._declare import declare
from xform.sharding.tensor import TensorParallel


def cross_entropy(
    hidden: Float[Array, "... M"],
    weight: Float[Array, "_ _"],
    labels: Integer[Array | np.ndarray, "..."],
    tp: TensorParallel,
    *,
    entries: int | None = None,
    vocab_dim: int = 1,
    **options: Any,
) -> tuple[Array, Array]:
    """Returns `linear_cross_entropy` of all positions, by devices that have a part of the entries.

    Args:
      hidden: The stream: all of it, or this device's positions where `tp.sequence`.
      weight: This device's columns of the matrix that makes logits, `[M, C / n]`.
      labels: Those of all positions, the same on all devices of the axis.
      tp: How blocks are split.
      entries: Size of the vocabulary, where the matrix was padded at its end to be split: what is
        beyond gets no probability and no gradient.
      vocab_dim: 0 for a `weight` that is `[C / n, M]`, such as the table that embeds.
      **options: Those of `linear_cross_entropy` but `vocab_axis`.

    Returns:
      Loss and log-sum-exp of each token, the same on all devices of the axis.

    Raises:
      ValueError: On what doesn't fit; see `linear_cross_entropy`.
      NotImplementedError: Padding under `softcap` or `label_smoothing`, for which it would count.

    >>> tp = TensorParallel()
    >>> x, w = jnp.ones((2, 5, 3)), jnp.ones((3, 8))
    >>> loss, _ = cross_entropy(x, w, jnp.zeros((2, 5), int), tp, entries=4)
    >>> float(loss[0, 0]) == float(jnp.log(4.0))
    True
    """
    hidden = tp.enter(hidden) if tp.sequence else hidden
    size, labels = weight.shape[vocab_dim], jnp.asarray(labels)
    padded = size if tp.axis is None else size * lax.axis_size(tp.axis)
    if entries is not None and entries != padded:
        _check_padding(entries, padded, options)
        first = 0 if tp.axis is None else lax.axis_index(tp.axis) * size
        padding = jnp.where(first + jnp.arange(size) < entries, 0, -jnp.inf)
        bias = options.get("bias")
        options["bias"] = padding.astype(weight.dtype) + (0 if bias is None else bias)
        # A label that is beyond is a mistake of the caller's, as it is without padding.
        labels = labels.astype(jnp.promote_types(labels.dtype, jnp.int32))
        labels = jnp.where(labels < entries, labels, padded)
    with declare("loss.cross_entropy", *tp.axes):
        return linear_cross_entropy(
            hidden, weight, labels, vocab_dim=vocab_dim, vocab_axis=tp.axis, **options
        )


def _check_padding(entries: int, padded: int, options: dict) -> None:
    if not 0 < entries < padded:
        raise ValueError(
            f"`cross_entropy`: entries={entries}, and the matrix has {padded} on all devices: "
            "needed are as many or fewer, and at least one."
        )
    if wrong := [name for name in ("softcap", "label_smoothing") if options.get(name)]:
        raise NotImplementedError(
            f"`cross_entropy`: {' and '.join(wrong)} would count the {padded - entries} entries "
            f"that pad {entries} to {padded}. Split a vocabulary that needs no padding."
        )


def add_up(
    total: jax.Array, count: jax.Array, axes: str | Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of all devices' totals, and what to divide it by for their mean.

    Args:
      total: This device's sum of losses.
      count: How many labels it is over.
      axes: The mesh axes over which devices have different tokens.

    Returns:
      The sum of totals, and that of counts as a number of the same dtype: 1 where nothing counts,
      whose mean is 0.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(dp=2, devices=jax.devices()[:2])
    >>> f = lambda losses: add_up(losses.sum(), jnp.sum(losses > 0), "dp")
    >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("dp"), out_specs=jax.P())
    >>> f(jax.device_put(jnp.array([1.0, 2.0, 3.0, 0.0]), shardings(mesh, jax.P("dp"))))
    (Array(6., dtype=float32), Array(3., dtype=float32))
    """
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    with declare("loss.add_up", *axes):
        total, count = lax.psum((total, count), axes)
    return total, jnp.maximum(count, 1).astype(total.dtype)
