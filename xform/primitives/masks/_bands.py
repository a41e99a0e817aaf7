"""Masks that are comparisons of the indices with a few numbers."""

from dataclasses import field

import jax.numpy as jnp
from jax.typing import ArrayLike

from xform.primitives._objects import is_in_text, misfit, of_batch, variant
from xform.primitives.masks._mask import Mask


@variant
class full(Mask):
    """Every query sees every key.

    >>> full()(0, 0, 2, 3)
    True
    """

    def __call__(self, b, h, q_idx, kv_idx):
        return True


@variant
class causal(Mask):
    """A query sees its own key and those before it: `q_idx + offset >= kv_idx`.

    Args:
        offset: the position of query 0 among the keys, where queries are counted from 0; a scalar.

    Raises:
        ValueError: there is an offset where queries are positions anyway, in `decode_attention` and
            `paged_attention`: the two would add up.

    >>> causal()(0, 0, 2, 3), causal(offset=1)(0, 0, 2, 3)
    (False, True)
    """

    offset: ArrayLike = field(default=0, kw_only=True)

    whole = ("offset",)

    def __call__(self, b, h, q_idx, kv_idx):
        if is_in_text() and not (isinstance(self.offset, int) and self.offset == 0):
            raise ValueError(
                f"`{self!r}` says where query 0 stands, and in decoding queries are counted from "
                "the beginning of their text anyway: write `causal()`; a mask that is meant to be "
                f"moved further is `causal().shift(q={self.offset})`."
            )
        return q_idx + self.offset >= kv_idx


def causal_lower_right(queries: ArrayLike, keys: ArrayLike) -> Mask:
    """Returns the causal mask under which the last query sees the last key.

    `causal()` starts in the upper left corner instead: query 0 sees key 0 alone. The two are the
    same where there are as many queries as keys. With more queries than keys, the first queries
    see nothing.

    Args:
      queries, keys: how many there are, T and S.

    >>> causal_lower_right(2, 5)
    causal(offset=3)
    """
    return causal(offset=keys - queries)  # pyright: ignore[reportOperatorIssue]


@variant
class sliding_window(Mask):
    """A query sees the last `size` keys, its own included, and `right` keys after it.

    The keys are `q_idx - size < kv_idx <= q_idx + right`: `sliding_window(size)` is causal by
    itself, and is what model configurations call `sliding_window=size`. FlashAttention's
    `window_size=(left, right)` is `sliding_window(left + 1, right=right)`.

    Args:
        size: how many keys, counted back from the query's own; a scalar.
        right: how many keys after the query's own; a scalar.

    >>> [k for k in range(9) if sliding_window(3, right=1)(0, 0, 5, k)]
    [3, 4, 5, 6]
    """

    size: ArrayLike
    right: ArrayLike = field(default=0, kw_only=True)

    whole = ("size", "right")

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_and(kv_idx > q_idx - self.size, kv_idx <= q_idx + self.right)


@variant
class dilated(Mask):
    """A query sees the keys at a distance that is a multiple of `step`, before it and after.

    Longformer's dilated window of n keys is `sliding_window(n * step) & dilated(step)`.

    Args:
        step: a positive integer; a scalar.

    >>> [k for k in range(9) if dilated(3)(0, 0, 4, k)]
    [1, 4, 7]
    """

    step: ArrayLike

    counts = ("step",)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % self.step == 0


def strided(stride: ArrayLike) -> Mask:
    """Returns the mask of the Sparse Transformer: the last `stride` keys, and every `stride`-th.

    Child et al., arXiv:1904.10509, the two heads of its strided pattern merged into one.

    Args:
      stride: about the square root of the length; a scalar.

    >>> strided(3), [k for k in range(9) if strided(3)(0, 0, 7, k)]
    (causal() & (sliding_window(3) | dilated(3)), [1, 4, 5, 6, 7])
    """
    return causal() & (sliding_window(stride) | dilated(stride))


@variant
class block_diagonal(Mask):
    """A query sees the keys of its own block of `size` positions.

    Llama 4's chunked attention is `causal() & block_diagonal(8192)`; blocks of unequal sizes are
    `documents.from_offsets`.

    Args:
        size: how many positions make a block; a scalar.

    >>> [k for k in range(9) if block_diagonal(4)(0, 0, 5, k)]
    [4, 5, 6, 7]
    """

    size: ArrayLike

    counts = ("size",)

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx // self.size == kv_idx // self.size


@variant
class global_tokens(Mask):
    """The first `n` tokens see all and are seen by all, as in Longformer.

    Args:
        n: how many; a scalar.

    >>> [global_tokens(2)(0, 0, q, k) for q, k in ((1, 7), (7, 1), (7, 7))]
    [True, True, False]
    """

    n: ArrayLike

    whole = ("n",)

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx < self.n) | (kv_idx < self.n)


@variant
class prefix(Mask):
    """Every query sees the first `n` keys; `prefix(n) | causal()` is that of a prefix-LM.

    Args:
        n: how many keys: a scalar, or `[B]`, one length for each sequence of the batch.

    Raises:
        ValueError: `n` has more dimensions.

    >>> [bool(prefix(jnp.array([1, 3]))(b, 0, 0, 2)) for b in (0, 1)]
    [False, True]
    """

    n: ArrayLike

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx < of_batch("prefix(n)", self.n, b)()

    def misfits(self, shape):
        return misfit("prefix(n)", self.n, (), shape.b)


@variant
class lengths(Mask):
    """What there is of sequences that were padded to one length; padding sees and shows nothing.

    Args:
        kv: how many keys there are: a scalar, or `[B]`.
        q: how many queries there are: likewise; None if there is no padding among them.

    Raises:
        ValueError: one of them has more dimensions.

    >>> mask = lengths(jnp.array([3, 1]), jnp.array([2, 1]))
    >>> [bool(mask(b, 0, q, k)) for b, q, k in ((0, 1, 2), (0, 2, 2), (1, 0, 1))]
    [True, False, False]
    """

    kv: ArrayLike
    q: ArrayLike | None = None

    def __call__(self, b, h, q_idx, kv_idx):
        seen = kv_idx < of_batch("lengths(kv)", self.kv, b)()
        return seen if self.q is None else seen & (q_idx < of_batch("lengths(q)", self.q, b)())

    def misfits(self, shape):
        wrong = misfit("lengths(kv)", self.kv, (), shape.b)
        return wrong + ([] if self.q is None else misfit("lengths(q)", self.q, (), shape.b))
