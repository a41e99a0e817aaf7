"""What is trained: the shape of a transformer, its products and its parameters.

Shapes are those of `examples/llama.py`: a layer is attention and a feed-forward block, each behind
a norm; before the layers an embedding, after them a norm and the products with a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

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

    Raises:
      ValueError: lists every number that is not above 0, and heads that do not group.

    >>> round(LLAMA_3_405B.parameters / 1e9, 1)
    405.8
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
        """Parameters of a layer: its matrices and two norms."""
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
        weights = self.layers * sum(p.size for p in self.products) + self.unembedding.size
        attention = 6 * self.layers * self.length * self.heads * self.head_size
        return 6 * weights + attention


LLAMA_3_405B = Model(126, 16384, 128, 8, 128, 53248, 128_256, 8192, name="Llama 3 405B")
"""arXiv 2407.21783, table 3."""
