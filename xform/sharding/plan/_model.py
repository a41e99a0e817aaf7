"""What is trained: the shape of a transformer, its products and its parameters.

Shapes are those of `examples/llama.py`: a layer is attention and a feed-forward block, each behind
a norm; before the layers an embedding, after them a norm and the products with a vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax

from xform._cost import cost
from xform.sharding.pipeline._times import Real


class Product(NamedTuple):
    """A matrix of a layer: `inner` rows of which each token is a combination of `outer` columns.

    Attributes:
      name: what it is for.
      inner, outer: its rows and columns.
      split: what `tp` splits, its "column"s (a block opens) or its "row"s (a block closes).
    """

    name: str
    inner: int
    outer: int
    split: str

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return self.inner * self.outer

    def on(self, tp: int) -> Product:
        """A device's part of it."""
        if self.split == "column":
            return self._replace(outer=self.outer // tp)
        return self._replace(inner=self.inner // tp)


class Traced(NamedTuple):
    """What a layer of one's own takes forward, by the rules of `xform.cost`.

    Attributes:
      flops: of products for a token, of causal attention half.
      parameters: how many it has.
    """

    flops: Real
    parameters: int


@dataclass(frozen=True)
class Model:
    """A dense transformer, and how long the rows are that it is trained on.

    Attributes:
      layers: how many.
      width: of the stream between them.
      heads, kv_heads, head_size: of attention, which is causal.
      hidden: feed-forward units.
      codes: entries of the vocabulary.
      length: tokens in a row.
      gated: whether a second matrix gates the feed-forward units.
      tied: whether the embedding is also what the stream is multiplied by at the end.
      name: what tables call it.
      traced: what a layer costs that is not the one above; see `with_layer`.

    Raises:
      ValueError: lists every number that is not above 0, and heads that do not group.

    >>> round(LLAMA_3_405B.parameters / 1e9, 1)
    405.9
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    codes: int
    length: int
    gated: bool = True
    tied: bool = False
    name: str = ""
    traced: Traced | None = None

    def __post_init__(self):
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        wrong = [f"{k}={v!r} must be above 0" for k, v in sizes.items() if not v > 0]
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}"]
        if wrong:
            raise ValueError(f"`Model`: {'; '.join(wrong)}.")

    @classmethod
    def of(cls, config: Any, length: int, **more: Any) -> Model:
        """Returns the model of a config with the attributes that `examples/llama.py` has.

        Args:
          config: an object with `layers`, `width`, `heads`, `kv_heads`, `head_size`, `hidden` and
            `codes`.
          length: tokens in a row.
          **more: other attributes.
        """
        names = ("layers", "width", "heads", "kv_heads", "head_size", "hidden", "codes")
        return cls(**{name: getattr(config, name) for name in names}, length=length, **more)

    def with_layer(self, layer: Callable, x: Any, params: Any) -> Model:
        """Returns this model with a layer of one's own, whose cost is traced.

        Its products stand for those of the shape, by their FLOPs, at the rates of the shape's;
        attention, what lies between, and what is kept stay the shape's.

        Args:
          layer: `layer(x, params)`, forward.
          x: what it is given, [..., width], or its shape.
          params: its parameters, or their shapes.

        >>> import jax, jax.numpy as jnp
        >>> shape = jax.ShapeDtypeStruct
        >>> x, w = shape((8192, 16384), jnp.bfloat16), shape((16384, 65536), jnp.bfloat16)
        >>> mixer = lambda x, w: jnp.tanh(x @ w) @ w.T
        >>> round(LLAMA_3_405B.with_layer(mixer, x, w).parameters / 1e9)
        139
        """
        flops = cost(layer)(x, params).model_flops
        numbers = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        traced = Traced(float(flops) / math.prod(x.shape[:-1]), numbers)
        return replace(self, traced=traced)

    @property
    def products_share(self) -> Real:
        """FLOPs of a layer's products, relative to those of the shape."""
        if self.traced is None:
            return 1.0
        # Attention is counted apart; a layer that is less than that has none.
        attention = 2 * self.length * self.heads * self.head_size
        left = self.traced.flops - attention
        of_shape = 2 * sum(p.size for p in self.products)
        return (left if left > 0 else self.traced.flops) / of_shape

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """The matrices of a layer."""
        D, d = self.width, self.head_size
        opens = [("gate", D, self.hidden, "column")] if self.gated else []
        return tuple(
            Product(*p)
            for p in (
                ("query", D, self.heads * d, "column"),
                ("key", D, self.kv_heads * d, "column"),
                ("value", D, self.kv_heads * d, "column"),
                ("out", self.heads * d, D, "row"),
                *opens,
                ("up", D, self.hidden, "column"),
                ("down", self.hidden, D, "row"),
            )
        )

    @property
    def unembedding(self) -> Product:
        """The products with the vocabulary."""
        return Product("unembed", self.width, self.codes, "column")

    @cached_property
    def of_layer(self) -> int:
        """Parameters of a layer: its matrices and two norms, or what was traced."""
        if self.traced is not None:
            return self.traced.parameters
        return sum(p.size for p in self.products) + 2 * self.width

    @property
    def of_ends(self) -> tuple[int, int]:
        """Parameters before the layers, and behind them."""
        table = self.width * self.codes
        return table, self.width + (0 if self.tied else table)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.of_layer + sum(self.of_ends)

    @property
    def flops_per_token(self) -> Real:
        """Forward and backward, MFU's convention: no recompute, causal attention by half."""
        of_layer = self.products_share * sum(p.size for p in self.products)
        weights = self.layers * of_layer + self.unembedding.size
        attention = 6 * self.layers * self.length * self.heads * self.head_size
        return 6 * weights + attention


LLAMA_3_405B = Model(126, 16384, 128, 8, 128, 53248, 128_256, 8192, name="Llama 3 405B")
"""arXiv 2407.21783, table 3."""
