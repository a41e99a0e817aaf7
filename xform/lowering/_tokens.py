"""How hidden dimensions meet tokens and a vocabulary.

A hidden dimension (one per enclosing vmap) along which no weights differ is one more dimension of
tokens: all of its tokens share each chunk of the weights. Along any other, one instance runs after
the other, each a large program of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from xform.lowering._loss_fn import LossSpec
from xform.lowering._tile_fn import ROW, Kind, merge


@dataclasses.dataclass(frozen=True)
class Layout:
    """Arrays `[*hidden,...]`, rows `[*hidden,*tokens,...]`, taken apart into flat instances.

    Attributes:
      spec: which dimensions are what.
      sizes: of the hidden dimensions.
      tokens: the shape of the tokens.
      looped: the hidden dimensions along which columns differ.
    """

    spec: LossSpec
    sizes: tuple[int, ...]
    tokens: tuple[int, ...]
    looped: tuple[int, ...]

    @classmethod
    def of(cls, spec: LossSpec, hidden: int, kinds: Sequence[Kind], arrays: Sequence) -> Layout:
        """The layout of arrays, or of their shapes, the first of which has a number per token."""
        columns = [x for x, k in zip(arrays, kinds, strict=True) if k != ROW]
        differ = lambda d, xs: {x.shape[d] for x in xs} - {1}
        sizes = tuple(next(iter(differ(d, arrays)), 1) for d in range(hidden))
        looped = tuple(d for d in range(hidden) if differ(d, columns))
        return cls(spec, sizes, tuple(arrays[0].shape[hidden:]), looped)

    @property
    def _order(self) -> tuple[int, ...]:
        """The hidden dimensions, those first that are looped over."""
        return (*self.looped, *(d for d in range(len(self.sizes)) if d not in self.looped))

    def enter(self, x, kind: Kind):
        """Rows to `[*looped,n,...]`, columns to `[*looped,...]`; a looped dimension may be 1."""
        hidden = len(self.sizes)
        if kind == ROW:
            full = [x.shape[d] if d in self.looped else n for d, n in enumerate(self.sizes)]
            x = jnp.broadcast_to(x, (*full, *x.shape[hidden:]))
        x = jnp.transpose(x, (*self._order, *range(hidden, x.ndim)))
        lead = x.shape[: len(self.looped)]
        if kind == ROW:
            tail = x.shape[hidden + len(self.tokens) :]
            return x.reshape(*lead, self.count, *tail)
        return x.reshape(*lead, *x.shape[hidden:])

    def leave(self, x, kind: Kind, shape: Sequence[int]):
        """The inverse of `enter`, for a result of this shape: summed over where that is 1."""
        hidden, loops = len(self.sizes), len(self.looped)
        ones = tuple(self.sizes[d] if kind == ROW else 1 for d in self._order[loops:])
        own = (*self.tokens, *x.shape[loops + 1 :]) if kind == ROW else x.shape[loops:]
        x = x.reshape(*x.shape[:loops], *ones, *own)
        back = sorted(range(hidden), key=self._order.__getitem__)
        x = jnp.transpose(x, (*back, *range(hidden, x.ndim)))
        once = tuple(d for d in range(hidden) if shape[d] == 1 != x.shape[d])
        return x.sum(once, keepdims=True) if once else x

    def flat(self, kind: Kind, out) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one instance's part of a result; wide, if parts are still summed."""
        hidden = len(self.sizes)
        tail = self.spec.tail(kind, out.shape[hidden:])
        shape = (self.count, *tail) if kind == ROW else out.shape[hidden:]
        own = range(hidden) if kind == ROW else self.looped
        finished = all(out.shape[d] == self.sizes[d] for d in own)
        return jax.ShapeDtypeStruct(shape, out.dtype if finished else self.spec.wide)

    @property
    def count(self) -> int:
        """Tokens of one instance."""
        shared = [n for d, n in enumerate(self.sizes) if d not in self.looped]
        return math.prod((*shared, *self.tokens))

    def run(self, flat: Callable, arrays: Sequence, kinds: Sequence[Kind]) -> list:
        """Evaluates `flat`, which takes and returns flat arrays, for every instance."""
        for d in reversed(self.looped):
            flat = _along(flat, self.sizes[d])
        return flat(*(self.enter(x, k) for x, k in zip(arrays, kinds, strict=True)))


def _along(flat: Callable, size: int) -> Callable:
    """`flat` once for each index of a leading dimension, which is `size` or 1."""

    def mapped(*arrays):
        def step(_, parts):
            return None, flat(*merge(moving, parts, shared))

        moving = tuple(len(x) > 1 for x in arrays)
        parts = [x for x, m in zip(arrays, moving, strict=True) if m]
        shared = [x[0] for x, m in zip(arrays, moving, strict=True) if not m]
        return lax.scan(step, None, parts, length=size)[1]

    return mapped
