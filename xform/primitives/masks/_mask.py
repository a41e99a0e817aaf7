"""What a mask is, and what operators make of masks."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import ArrayLike

from xform.primitives._objects import Mod, Moved, bracketed, variant

type MaskMod = Callable[[ArrayLike, ArrayLike, ArrayLike, ArrayLike], ArrayLike]
"""`mask(b, h, q_idx, kv_idx) -> bool`, a mask object or a plain function, on scalars."""


class Mask(Mod):
    """What all masks share: the operators, `shift` and `slice`, the printed form, the picture."""

    def __call__(self, b, h, q_idx, kv_idx) -> ArrayLike:
        raise NotImplementedError(f"`{type(self).__name__}` is a mask without a `__call__`.")

    def __and__(self, other: MaskMod) -> "Mask":
        return _and(self, as_mask(other))

    def __rand__(self, other: MaskMod) -> "Mask":
        return _and(as_mask(other), self)

    def __or__(self, other: MaskMod) -> "Mask":
        return _or(self, as_mask(other))

    def __ror__(self, other: MaskMod) -> "Mask":
        return _or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return _not(self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine masks with `&`, `|` and `~`, not with "
            "`and`, `or` and `not`; whether there is one, ask `mask is not None`."
        )

    def show(self, queries: int, keys: int | None = None, **options):
        """Returns a picture of the mask's tiles, see `xform.primitives.masks.show`.

        >>> from xform.primitives.masks import causal
        >>> print(causal().show(64, tile=16))
        causal(): 64 queries x 64 keys, tiles of 16 x 16
        ▒···
        █▒··
        ██▒·
        ███▒
        █ 6 full, ▒ 4 partial, · 6 empty
        62.5% of the tiles run, for 50.8% of the pairs; the mask is asked in 4
        655.4 kFLOP a head of size 64, forward
        """
        from xform.primitives.masks._view import show  # drawing is built on the mask itself

        return show(self, queries, keys, **options)

    @property
    def _at(self):
        return _moved


@variant
class _moved(Moved, Mask):
    def __call__(self, b, h, q_idx, kv_idx):
        return self._called((), b, h, q_idx, kv_idx)


@variant
class _and(Mask):
    left: Mask
    right: Mask

    is_compound = True

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_and(self.left(b, h, q_idx, kv_idx), self.right(b, h, q_idx, kv_idx))

    def __repr__(self):
        left, right = (
            f"({m!r})" if isinstance(m, _or) else repr(m) for m in (self.left, self.right)
        )
        return f"{left} & {right}"


@variant
class _or(Mask):
    left: Mask
    right: Mask

    is_compound = True

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_or(self.left(b, h, q_idx, kv_idx), self.right(b, h, q_idx, kv_idx))

    def __repr__(self):
        return f"{self.left!r} | {self.right!r}"


@variant
class _not(Mask):
    mask: Mask

    is_compound = True

    def __call__(self, b, h, q_idx, kv_idx):
        return jnp.logical_not(self.mask(b, h, q_idx, kv_idx))

    def __repr__(self):
        return (
            f"~{bracketed(self.mask)}" if isinstance(self.mask, _and | _or) else f"~{self.mask!r}"
        )


@variant
class _function(Mask):
    f: MaskMod

    def __call__(self, b, h, q_idx, kv_idx):
        return self.f(b, h, q_idx, kv_idx)

    def __repr__(self):
        return getattr(self.f, "__name__", repr(self.f))


def as_mask(x: MaskMod) -> Mask:
    """Returns a plain function as a mask object; one that is a mask object, as it is.

    Raises:
      TypeError: on what is no function.

    >>> as_mask(lambda b, h, q_idx, kv_idx: q_idx == kv_idx).shift(q=3)(0, 0, 1, 4)
    True
    """
    if isinstance(x, Mask):
        return x
    if isinstance(x, type):
        raise TypeError(f"`{x.__name__}` is a class: call it, `{x.__name__}()`.")
    if callable(x) and not isinstance(x, Mod):
        return _function(x)
    raise TypeError(
        "a mask combines with masks and with functions of `(b, h, q_idx, kv_idx)`, not with "
        f"{type(x).__name__}: wrap an array that says which pairs to keep as "
        "`lambda b, h, q_idx, kv_idx: keep[q_idx, kv_idx]`."
    )
