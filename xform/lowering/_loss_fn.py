"""The functions inside the tile sums of linear cross entropy: rows are tokens, columns are codes.

They are terms of the same kind as attention's (`xform.lowering._tile_fn`), closed under `Jvp` and
`Transpose`. A row is a token's hidden state `h` and its label, a column an entry of the vocabulary:
its weights `w` and its bias. Both meet in a logit, `x = softcap(h . w + bias)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform.lowering._contract import contract, wide_of
from xform.lowering._spec import At
from xform.lowering._tile_fn import COL, ROW, Kind, TileFn, base

IGNORED = -2
"""The label of a token that is not there: its hidden state reads as 0."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How many logits are held at once, as `(tokens, entries of the vocabulary)`.

    Attributes:
      by_token: where vectors are added up for tokens (gradients of hidden states), as long as the
        vocabulary is walked.
      by_entry: where that is so for entries (gradients of weights), or for none (the loss alone).

    Raises:
      ValueError: if a pair is not two positive integers. Those beyond an array's size take all.
    """

    by_token: tuple[int, int]
    by_entry: tuple[int, int]

    def __post_init__(self):
        wrong = [
            f"`{name}` is {pair!r}"
            for name, pair in (("by_token", self.by_token), ("by_entry", self.by_entry))
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_count, pair))
        ]
        if wrong:
            raise ValueError(
                f"Chunks: {'; '.join(wrong)}; needed is a tuple of two positive integers, how many "
                "tokens and how many entries of the vocabulary, such as `(1024, 4096)`."
            )


def _is_count(x) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x > 0)


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """What linear cross entropy hands to its lowering.

    Attributes:
      dtype: of hidden states and weights; what operands of matrix products are rounded to.
      softcap: logits are `softcap tanh(logit / softcap)`; None leaves them.
      biased: whether there is a bias.
      smooth: whether the sum of all logits is asked for.
      token_dims: how many dimensions the labels have.
      vocab_dim: 0 for weights `[V,D]`, 1 for `[D,V]`.
      chunks: how many logits are held at once; None for the platform's.
      implementation: "chunked", "mosaic_gpu", or None to choose where the device is known.
      together: whether one walk of the vocabulary makes the gradients of hidden states and weights,
        which then both wait for the cotangents.
    """

    dtype: jnp.dtype
    softcap: float | None
    biased: bool
    smooth: bool
    token_dims: int
    vocab_dim: int
    chunks: Chunks | None
    implementation: str | None = None
    together: bool = False

    @property
    def wide(self) -> jnp.dtype:
        """The dtype of logits, statistics and accumulators: float32, float64 for float64."""
        return wide_of(self.dtype)

    @property
    def both_curved(self) -> bool:
        """Whether the sum of all logits has a gradient of its own for each token."""
        return self.smooth and self.softcap is not None

    def tail(self, kind: Kind, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions of a whole operand but those of tokens or of the vocabulary."""
        if kind == ROW:
            return shape[self.token_dims :]
        return tuple(n for d, n in enumerate(shape) if len(shape) == 2 and d != self.vocab_dim)

    def logits(self, h, w, bias):
        """Logits of a tile `[1,q,k]`."""
        x = contract(h, w, out="tile", dtype=self.dtype)
        if self.biased:
            (bias,) = bias
            x = x + bias[None, None]
        return x if self.softcap is None else self.softcap * jnp.tanh(x / self.softcap)

    def slope(self, x):
        """The derivative of `softcap`, where its value is x."""
        return 1 - jnp.square(x / self.softcap) if self.softcap else jnp.ones_like(x)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """`(h, top, w[, bias]) -> (L, X[, S])`, the sums that linear cross entropy is made of.

        L_i = sum over j that are not the label of exp(x_ij - top_i)
        X_i = the label's logit, 0 where there is none
        S_i = sum_j x_ij

    `top` is the largest of the logits that L adds up, a constant: `top + log L` does not depend on
    it, so the derivatives at fixed `top` are exact, at every order. The label is no part of L:
    then `loss = log(1 + L exp(top - X))` and its derivatives are exact however sure the model is,
    where `log-sum-exp - X` and `p - 1` would cancel.
    """

    spec: LossSpec

    @property
    def operands(self) -> tuple[Kind, ...]:
        return (ROW, ROW, COL, COL) if self.spec.biased else (ROW, ROW, COL)

    @property
    def results(self) -> tuple[Kind, ...]:
        return (ROW, ROW, ROW) if self.spec.smooth else (ROW, ROW)

    def __call__(self, at: At, *tiles) -> list:
        h, top, w, *bias = tiles
        x, own = self.spec.logits(h, w, bias), is_label(at)
        total = jnp.exp(others(x, own) - base(top)[..., None]).sum(-1)
        sums = [total, jnp.where(own, x, 0).sum(-1)]
        return [*sums, x.sum(-1)] if self.spec.smooth else sums


@dataclasses.dataclass(frozen=True)
class RowGradients:
    """The gradients of all results of `fn` for its first operand, a row, one `[1,q,d]` each."""

    fn: TileFn

    @property
    def spec(self) -> Any:
        return self.fn.spec

    @property
    def operands(self) -> tuple[Kind, ...]:
        return self.fn.operands

    @property
    def results(self) -> tuple[Kind, ...]:
        return (ROW,) * len(self.fn.results)

    def __call__(self, at: At, *tiles) -> list:
        row, *rest = tiles
        sums, pull = jax.vjp(lambda row: self.fn(at, row, *rest), row)
        unit = lambda i: [jnp.full_like(x, i == j) for j, x in enumerate(sums)]
        return [pull(unit(i))[0] for i in range(len(sums))]


def is_label(at: At):
    """Which entries of a tile are the label of their token, `[1,q,k]`."""
    (labels,) = at.context
    return (labels[:, None] == at.k[None])[None]


def others(x, own):
    """The logits of a tile but those of labels, which read as minus infinity."""
    return jnp.where(own, -jnp.inf, x)


def without_ignored(labels, x):
    """Rows `[*tokens,...]`, those of ignored tokens 0, whatever they were."""
    ignored = (labels == IGNORED).reshape(*labels.shape, *[1] * (x.ndim - labels.ndim))
    return jnp.where(ignored, jnp.zeros((), x.dtype), x)
