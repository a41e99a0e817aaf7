"""Who may look at whom, as values: masks that are called, combined and printed as sentences.

A mask is a scalar function `mask(b, h, q_idx, kv_idx) -> bool` of the batch, head, query and key
index, where `h` is the query head. Any such Python function will do; the objects here add `& | ~`
(with plain functions on either side), a readable `repr`, and numbers that may be traced arrays. A
mask is a pytree: its arrays are leaves, so that a layer's window can be scanned over; its Python
numbers and functions are structure, as they are in the code.

A variant is a class of a few lines:

    @_mask
    class prefix(Mask):
        n: ArrayLike

        def __call__(self, b, h, q_idx, kv_idx):
            return kv_idx < self.n

Variants compare on two sides, `lo < x` and `x <= hi`, where one might write `abs(x) < w`: interval
analysis finds the same tiles in both, and Hopper's assembler has miscompiled the second.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

type MaskMod = Callable[[ArrayLike, ArrayLike, ArrayLike, ArrayLike], ArrayLike]
"""`mask(b, h, q_idx, kv_idx) -> bool`, a mask object or a plain function, on scalars."""


class Mask:
    """What all masks share: the operators and the printed form."""

    def __call__(self, b, h, q_idx, kv_idx) -> ArrayLike:
        raise NotImplementedError(f"`{type(self).__name__}` is a mask without a `__call__`.")

    def misfits(self, batch: int, queries: int, keys: int) -> list[str]:
        """Returns in words which arrays of the mask are not made for attention of this shape."""
        parts = [getattr(self, f.name) for f in fields(self)]  # pyright: ignore[reportArgumentType]
        masks = [part for part in parts if isinstance(part, Mask)]
        return [words for mask in masks for words in mask.misfits(batch, queries, keys)]

    def __and__(self, other: MaskMod) -> "Mask":
        return _and(self, _as_mask(other))

    def __rand__(self, other: MaskMod) -> "Mask":
        return _and(_as_mask(other), self)

    def __or__(self, other: MaskMod) -> "Mask":
        return _or(self, _as_mask(other))

    def __ror__(self, other: MaskMod) -> "Mask":
        return _or(_as_mask(other), self)

    def __invert__(self) -> "Mask":
        return _not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine masks with `&`, `|` and `~`, not with "
            "`and`, `or` and `not`."
        )

    def __repr__(self) -> str:
        shown = map(self._show, fields(self))  # pyright: ignore[reportArgumentType]
        return f"{type(self).__name__}({', '.join(filter(None, shown))})"

    def _show(self, f) -> str:
        value = getattr(self, f.name)
        if f.default is not MISSING and value is f.default:
            return ""
        if isinstance(value, Tracer) or np.ndim(value):
            return f"{f.name}: {_type(value)}"
        return f"{f.name}={value}" if f.kw_only else str(value)


def _type(x) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else type(x).__name__


@dataclass_transform(frozen_default=True, eq_default=False)
def _mask[M: type](cls: M) -> M:
    """Makes a variant: a frozen dataclass and a pytree, equal to itself alone as arrays are."""
    cls = dataclass(frozen=True, eq=False, repr=False)(cls)

    def flatten(mask):
        values = {f.name: getattr(mask, f.name) for f in fields(mask)}
        fixed = {name: x for name, x in values.items() if _is_structure(x)}
        leaves = {name: x for name, x in values.items() if name not in fixed}
        keys = map(jax.tree_util.GetAttrKey, leaves)
        return list(zip(keys, leaves.values(), strict=True)), (tuple(leaves), tuple(fixed.items()))

    def unflatten(structure, leaves):
        names, fixed = structure
        return cls(**dict(zip(names, leaves, strict=True)), **dict(fixed))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def _is_structure(x) -> bool:
    return x is None or isinstance(x, int | float) or (callable(x) and not isinstance(x, Mask))


@_mask
class causal(Mask):
    """A query sees its own key and those before it: `q_idx + offset >= kv_idx`.

    Args:
        offset: the position of query 0 among the keys, as in decoding with a cache; a scalar.

    >>> causal()(0, 0, 2, 3), causal(offset=1)(0, 0, 2, 3)
    (False, True)
    """

    offset: ArrayLike = field(default=0, kw_only=True)

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx + self.offset >= kv_idx


@_mask
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

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_and(kv_idx > q_idx - self.size, kv_idx <= q_idx + self.right)


@_mask
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
        return kv_idx < _of_batch("prefix(n)", self.n, b, 0)

    def misfits(self, batch, queries, keys):
        return _misfits("prefix(n)", self.n, [batch][: np.ndim(self.n)])


@_mask
class documents(Mask):
    """A query sees the keys of its own document: those of equal id. Ids may come in any order.

    Args:
        ids: integers `[T]`, or `[B,T]` for a batch of packed sequences: the document of each query.
        kv_ids: the documents of the keys, `[S]` or `[B,S]`; None if they are those of the queries.

    Raises:
        ValueError: ids have another number of dimensions.

    >>> mask = documents(jnp.array([7, 7, 2]))
    >>> [[bool(mask(0, 0, q, k)) for k in range(3)] for q in (1, 2)]
    [[True, True, False], [False, False, True]]
    """

    ids: ArrayLike
    kv_ids: ArrayLike | None = None

    def __call__(self, b, h, q_idx, kv_idx):
        ids = _of_batch("documents(ids)", self.ids, b, 1)
        kv_ids = ids if self.kv_ids is None else _of_batch("documents(kv_ids)", self.kv_ids, b, 1)
        return ids[q_idx] == kv_ids[kv_idx]

    def misfits(self, batch, queries, keys):
        shape = lambda ids, length: [batch, length][2 - np.ndim(ids) :]
        wrong = _misfits("documents(ids)", self.ids, shape(self.ids, queries))
        if self.kv_ids is not None:
            wrong += _misfits("documents(kv_ids)", self.kv_ids, shape(self.kv_ids, keys))
        elif queries != keys:
            wrong.append(
                f"`documents(ids)` takes the ids of {queries} queries for those of {keys} keys: "
                "give it `kv_ids` too"
            )
        return wrong


def _of_batch(name: str, x: ArrayLike, b, ndim: int):
    """What sequence `b` has of an array that may lead with a batch dimension."""
    x = jnp.asarray(x)
    if x.ndim not in (ndim, ndim + 1):
        names = {0: "a scalar or [B]", 1: "[T] or [B,T]"}[ndim]
        raise ValueError(
            f"`{name}` has shape {list(x.shape)}; it must be {names}: reduce or index the other "
            "dimensions first."
        )
    return x[b] if x.ndim > ndim else x


def _misfits(name: str, x: ArrayLike, shape: list[int]) -> list[str]:
    found = list(np.shape(x))
    right = len(found) != len(shape) or found == shape  # other dimensions are refused when called
    return [] if right else [f"`{name}` has shape {found}; with these q and k it needs {shape}"]


# ---- Combinations -------------------------------------------------------------------------------


@_mask
class _and(Mask):
    left: Mask
    right: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_and(self.left(b, h, q_idx, kv_idx), self.right(b, h, q_idx, kv_idx))

    def __repr__(self):
        left, right = (
            f"({m!r})" if isinstance(m, _or) else repr(m) for m in (self.left, self.right)
        )
        return f"{left} & {right}"


@_mask
class _or(Mask):
    left: Mask
    right: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_or(self.left(b, h, q_idx, kv_idx), self.right(b, h, q_idx, kv_idx))

    def __repr__(self):
        return f"{self.left!r} | {self.right!r}"


@_mask
class _not(Mask):
    mask: Mask

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_not(self.mask(b, h, q_idx, kv_idx))

    def __repr__(self):
        return f"~({self.mask!r})" if isinstance(self.mask, _and | _or) else f"~{self.mask!r}"


@_mask
class _function(Mask):
    f: MaskMod

    def __call__(self, b, h, q_idx, kv_idx):
        return self.f(b, h, q_idx, kv_idx)

    def __repr__(self):
        return getattr(self.f, "__name__", repr(self.f))


def _as_mask(x: MaskMod) -> Mask:
    if isinstance(x, Mask):
        return x
    if callable(x):
        return _function(x)
    raise TypeError(
        "a mask combines with masks and with functions of `(b, h, q_idx, kv_idx)`, not with "
        f"{type(x).__name__}: wrap an array that says which pairs to keep as "
        "`lambda b, h, q_idx, kv_idx: keep[q_idx, kv_idx]`."
    )
