"""What mask and score objects share: they are pytrees, print as written, and can be moved.

A *mod object* is a frozen dataclass that is called like the function it stands for, with the batch,
head, query and key index as its last arguments. Its arrays are leaves, so that they may be traced,
scanned over and differentiated; its Python numbers and functions are structure, as they are in the
code. `variant` makes one of a class of a few lines.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeGuard, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from xform.primitives._short import checked

Places = slice | ArrayLike
"""Some indices: a slice, or an array of them."""


class Shape(NamedTuple):
    """The places of a call of attention, each None where their number is not known.

    Attributes:
      b, h: batch and query heads.
      q, k: how many queries and keys; where both are counted from the beginning of a text, the
        positions that it can have.
    """

    b: int | None
    h: int | None
    q: int | None
    k: int | None


class AtLeast(int):
    """A number of places that an array must have, and may have more of."""

    def __repr__(self) -> str:
        return f"at least {int(self)}"


def fits(found: int, needed: int | None) -> bool:
    """Whether an array of `found` places serves where `needed` are."""
    return needed is None or (found >= needed if isinstance(needed, AtLeast) else found == needed)


def blocks_of(places: int | None, size: int) -> int | None:
    """How many blocks so many places make."""
    if places is None:
        return None
    return type(places)(-(-int(places) // size))


# Whether a mod is called with positions in a text, as decoding does; False where such queries were
# moved and are counted from elsewhere, None where they are the rows of q.
_IN_TEXT: ContextVar[bool | None] = ContextVar("in_text", default=None)


@contextmanager
def in_text(yes: bool | None = True) -> Iterator[None]:
    """Within, queries are counted from the beginning of a text, as its keys are.

    Few masks ask (`is_in_text`): those whose queries are counted from elsewhere otherwise.
    """
    before = _IN_TEXT.set(yes)
    try:
        yield
    finally:
        _IN_TEXT.reset(before)


def is_in_text() -> bool:
    """Whether the queries of a mod are counted from the beginning of a text."""
    return _IN_TEXT.get() is True


def are_rows() -> bool:
    """Whether the queries of a mod are all those of a call, and not some positions of a text."""
    return _IN_TEXT.get() is None


class _Object:
    """Printed as it is written, `name(value, name=value)`, arrays by their types; set only once."""

    def __setattr__(self, name: str, value: Any) -> None:
        # What `dataclass(frozen=True)` does takes half a millisecond of the import for each class.
        if name in self.__dict__:
            raise FrozenInstanceError(f"`{self!r}` can't change: make another one.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        shown = map(self._show, fields(self))  # pyright: ignore[reportArgumentType]
        return f"{type(self).__name__}({', '.join(filter(None, shown))})"

    def _show(self, f) -> str:
        value = getattr(self, f.name)
        if f.default is not MISSING and value is f.default:
            return ""
        return _named(f.name, value) if f.kw_only or _is_array(value) else _text(value)


def _named(name: str, value) -> str:
    return f"{name}: {_type(value)}" if _is_array(value) else f"{name}={_text(value)}"


def _text(value) -> str:
    """A number as it is, those of a tuple that are arrays by their types."""
    if not isinstance(value, tuple):
        return str(value)
    parts = [_type(x) if _is_array(x) else _text(x) for x in value]
    return f"({', '.join(parts)}{',' * (len(parts) == 1)})"


def _is_array(x) -> bool:
    return isinstance(x, Tracer) or (not isinstance(x, tuple) and np.ndim(x) > 0)


def _type(x) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" if hasattr(x, "dtype") else type(x).__name__


@dataclass_transform(frozen_default=True, eq_default=False)
def variant[M: type](cls: M) -> M:
    """Makes a mod object: a frozen dataclass and a pytree, equal to itself alone as arrays are.

    >>> from xform.primitives.masks import Mask, causal
    >>> @variant
    ... class every(Mask):
    ...     n: int
    ...     def __call__(self, b, h, q_idx, kv_idx):
    ...         return kv_idx % self.n == 0
    >>> causal() & ~every(3)
    causal() & ~every(3)
    """
    cls = dataclass(eq=False, repr=False)(cls)
    _look_when_called(cls)

    def flatten(mod):
        values = {f.name: getattr(mod, f.name) for f in fields(mod)}
        fixed = {name: x for name, x in values.items() if _is_structure(x)}
        leaves = {name: x for name, x in values.items() if name not in fixed}
        keys = map(jax.tree_util.GetAttrKey, leaves)
        return list(zip(keys, leaves.values(), strict=True)), (tuple(leaves), tuple(fixed.items()))

    def unflatten(structure, leaves):
        names, fixed = structure
        mod = object.__new__(cls)  # JAX puts all kinds of things in the place of arrays
        mod.__dict__.update(zip(names, leaves, strict=True), **dict(fixed))
        return mod

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


def _look_when_called(cls: Any) -> None:
    if issubclass(cls, Mod) and "__call__" in vars(cls):
        cls.__call__ = checked(cls.__call__)


def _is_structure(x) -> bool:
    if isinstance(x, tuple):
        return all(map(_is_structure, x))
    return x is None or isinstance(x, int | float) or (callable(x) and not isinstance(x, _Object))


class Mod(_Object):
    """A mod object."""

    is_compound = False
    """Whether an operator made it, so that its text needs brackets."""

    whole: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[tuple[str, ...]] = ()
    positive: ClassVar[tuple[str, ...]] = ()
    """Which fields are whole numbers, which of those positive, and which are positive numbers."""

    def __post_init__(self):
        for kind in _NUMBERS:
            for name in getattr(self, kind):
                _check_number(f"{type(self).__name__}({name})", getattr(self, name), kind)

    def misfits(self, shape: Shape) -> list[str]:
        """Returns in words which arrays are not made for attention of this shape."""
        parts = [getattr(self, f.name) for f in fields(self)]  # pyright: ignore[reportArgumentType]
        wrong = [words for x in parts if isinstance(x, Mod) for words in x.misfits(shape)]
        return wrong + [
            f"`{type(self).__name__}({name})` has shape {list(np.shape(x))}; it must be a scalar: "
            "give a layer or a member of a batch its own, by `scan` or `vmap` over the object"
            for name in (*self.whole, *self.counts, *self.positive)
            if np.ndim(x := getattr(self, name))
        ]

    def shift[M](
        self: M, *, b: ArrayLike = 0, h: ArrayLike = 0, q: ArrayLike = 0, k: ArrayLike = 0
    ) -> M:
        """Returns this of other places: its query 0 is this one's query `q`, and so on.

        A decoding step at position n has the mask `mask.shift(q=n)`; a device whose keys start at
        n, `mask.shift(k=n)`.

        Args:
          b, h, q, k: what is added to each index; scalars, which may be traced.

        >>> from xform.primitives.masks import causal
        >>> causal().shift(q=5)(0, 0, 0, 5), causal().shift(q=5)
        (True, causal().shift(q=5))
        """
        given = {"b": b, "h": h, "q": q, "k": k}
        for dim, n in given.items():
            _check_number(f"shift({dim})", n, "whole")
        still = lambda n: isinstance(n, int) and n == 0
        return _moved(self, True, {dim: _steps(n) for dim, n in given.items() if not still(n)})

    def slice[M](
        self: M,
        *,
        b: Places | None = None,
        h: Places | None = None,
        q: Places | None = None,
        k: Places | None = None,
    ) -> M:
        """Returns this for some of the places, as an array's slice is of some of its elements.

        What a device has of a split sequence: `mask.slice(q=slice(0, 512))`, every n-th position by
        `slice(start, None, n)`, or any positions in any order as an array of them.

        Args:
          b, h, q, k: a slice, whose start, stop and step are not negative and may be traced, or
            integers `[n]`.

        Raises:
          ValueError: on anything else.

        >>> from xform.primitives.masks import causal
        >>> part = causal().slice(q=slice(4, 8), k=jnp.array([7, 5, 3]))
        >>> part, [bool(part(0, 0, 1, k)) for k in range(3)]
        (causal().slice(q=4:8, k: int32[3]), [False, True, True])
        """
        given = {"b": b, "h": h, "q": q, "k": k}
        given = {d: _of_slice(d, x) for d, x in given.items() if x is not None}
        return _moved(self, False, given)

    @property
    def _at(self) -> Callable:
        """The class of this kind of mod at other places."""
        raise NotImplementedError


def _moved(mod: Any, shifted: bool, moves: dict) -> Any:
    return mod._at(mod, shifted, **moves) if moves else mod


@variant
class _steps(_Object):
    """Index `i` stands for `start + step i`."""

    start: ArrayLike = 0
    stop: ArrayLike | None = None
    step: ArrayLike = 1

    def __call__(self, i):
        return self.start + (i if isinstance(self.step, int) and self.step == 1 else i * self.step)

    @property
    def count(self) -> int | None:
        """How many places there are; None if that is not known."""
        start, stop, step = self.start, self.stop, self.step
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
            return len(range(start, stop, step))
        return None

    def reach(self, count: int | None) -> int | None:
        """How many places there must be for `count` of these; None if that is not known."""
        start, step = self.start, self.step
        if not count or not isinstance(start, int) or not isinstance(step, int):
            return None
        return AtLeast(max(0, start + (count - 1) * step + 1))

    def __repr__(self) -> str:
        start, stop, step = (
            "" if n is None else str(n) if isinstance(n, int) else _type(n)
            for n in (self.start, self.stop, self.step)
        )
        return f"{start}:{stop}" if step == "1" else f"{start}:{stop}:{step}"


@variant
class _listed(_Object):
    """Index `i` stands for `places[i]`."""

    places: ArrayLike

    def __call__(self, i):
        return jnp.asarray(self.places)[i]

    @property
    def count(self) -> int:
        return np.shape(self.places)[-1]

    def reach(self, count: int | None) -> int | None:
        del count
        known = isinstance(self.places, np.ndarray) and self.places.size
        return AtLeast(int(np.max(self.places)) + 1) if known else None

    def __repr__(self) -> str:
        return _type(self.places)


def _of_slice(dim: str, x) -> _steps | _listed:
    if not isinstance(x, slice):
        if np.ndim(x) != 1 or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(
                f"`slice({dim}=...)` takes a slice or integers [n], found {_type(x)}: for the one "
                f"place n, write `shift({dim}=n)`."
            )
        return _listed(x)
    steps = _steps(0 if x.start is None else x.start, x.stop, 1 if x.step is None else x.step)
    least = {"start": 0, "stop": 0, "step": 1}
    if any(isinstance(n := getattr(steps, name), int) and n < least[name] for name in least):
        raise ValueError(
            f"`slice({dim}={steps})`: nothing here knows the length that negative numbers count "
            "from, and a step of 0 leads nowhere. Write the positions themselves, as an array."
        )
    return steps


@variant
class Moved(Mod):
    """What `shift` and `slice` make: another mod at other places."""

    mod: Any
    shifted: bool
    b: Any = None
    h: Any = None
    q: Any = None
    k: Any = None

    def _called(self, score: tuple, *index: ArrayLike) -> Any:
        """The other mod at its own places, after the score if it takes one."""
        moves = zip(self._moves(), index, strict=True)
        moved = [i if move is None else move(i) for move, i in moves]
        with self._within():
            return self.mod(*score, *moved)

    def _moves(self) -> tuple:
        return self.b, self.h, self.q, self.k

    def _within(self):
        """Who moves the queries of a text says where they are counted from."""
        return in_text(_IN_TEXT.get() and self.q is None)

    def misfits(self, shape):
        wrong = [
            f"`{self!r}` has {move.count} places along {dim}; with these q, k and v it needs {n}"
            for dim, move, n in zip(Shape._fields, self._moves(), shape, strict=True)
            if move is not None and move.count is not None and not fits(move.count, n)
        ]
        wrong += [
            f"`{self!r}` moves {dim} by an array of shape {list(np.shape(move.start))}; it must be "
            "a scalar: `slice` takes a list of places"
            for dim, move in zip(Shape._fields, self._moves(), strict=True)
            if isinstance(move, _steps) and np.ndim(move.start)
        ]
        moves = zip(self._moves(), shape, strict=True)
        inner = Shape(*(n if move is None else move.reach(n) for move, n in moves))
        with self._within():
            return wrong + self.mod.misfits(inner)

    def __repr__(self):
        moves = list(zip(Shape._fields, self._moves(), strict=True))
        if self.shifted:
            shown = [_named(dim, move.start) for dim, move in moves if move is not None]
            return f"{bracketed(self.mod)}.shift({', '.join(shown)})"
        shown = [
            f"{dim}: {move}" if isinstance(move, _listed) else f"{dim}={move}"
            for dim, move in moves
            if move is not None
        ]
        return f"{bracketed(self.mod)}.slice({', '.join(shown)})"


def bracketed(x: Mod) -> str:
    """A mod object as text, in brackets where an operator made it."""
    return f"({x!r})" if x.is_compound else repr(x)


# ---- Numbers -------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """What a number must be: in words, of which dtypes, and how large."""

    words: str
    dtype: type
    allows: Callable[[Any], Any]


_NUMBERS = {
    "whole": _Kind("a whole number", np.integer, lambda x: True),
    "counts": _Kind("a positive whole number", np.integer, lambda x: x >= 1),
    "positive": _Kind("a positive number", np.number, lambda x: x > 0),
}


def _check_number(name: str, x: Any, kind: str) -> None:
    """Raises if `x` is not of the kind; of arrays, which may be traced, the dtype counts alone."""
    words, dtype, allows = _NUMBERS[kind]
    if isinstance(x, int | float | np.generic):
        is_one = np.issubdtype(np.asarray(x).dtype, dtype)
        if is_one and not allows(x):
            raise ValueError(f"`{name}` is {x}; it must be {words}.")
    else:
        is_one = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, dtype)
    if not is_one:
        found = _type(x) if hasattr(x, "dtype") else f"{x!r}, a {type(x).__name__}"
        raise TypeError(f"`{name}` is {found}; it must be {words}, which may be a traced array.")


def known(x) -> TypeGuard[int | float]:
    """Whether `x` is a number of Python's, as opposed to an array, which may be traced."""
    return isinstance(x, int | float)


def static(name: str, x: Any, *, least: int = 1) -> int:
    """Returns a number that is, or sets, the size of an array.

    Raises:
      TypeError: it is traced, or no whole number.
      ValueError: it is less than `least`.
    """
    if isinstance(x, Tracer):
        raise TypeError(
            f"`{name}` is traced, {_type(x)}, and it sets the size of an array, which a program "
            "has before it runs: pass a Python number, by `static_argnums` or a closure."
        )
    try:
        n = operator.index(x)
    except TypeError:
        raise TypeError(
            f"`{name}` is {x!r}, a {type(x).__name__}; it must be a whole number."
        ) from None
    if n < least:
        raise ValueError(f"`{name}` is {n}; it must be at least {least}.")
    return n


# ---- Arrays that may lead with a batch dimension -------------------------------------------------


def of_batch(name: str, x: ArrayLike, b, dims: str = "") -> Callable:
    """Returns `read(*index)`, an element of what sequence `b` has of an array.

    The array has dimensions `dims` and may lead with one of the batch. It is read by one index of
    all of them, which is what JAX allows of an array that an explicit mesh axis splits.

    Raises:
      ValueError: if it has another number of dimensions.
    """
    x = jnp.asarray(x)
    if x.ndim not in (len(dims), len(dims) + 1):
        one = f"[{','.join(dims)}]" if dims else "a scalar"
        raise ValueError(
            f"`{name}` has shape {list(x.shape)}; it must be {one} or [{','.join('B' + dims)}]: "
            "reduce or index the other dimensions first."
        )
    lead = (b,) if x.ndim > len(dims) else ()
    return lambda *index: x[(*lead, *index)]


def not_whole(name: str, x: ArrayLike) -> list[str]:
    """Returns in words that `x` has no integers."""
    dtype = jnp.result_type(x)
    right = jnp.issubdtype(dtype, jnp.integer)
    return [] if right else [f"`{name}` has dtype {dtype}; it needs integers"]


def misfit(name: str, x: ArrayLike, sizes: Sequence[int | None], batch: int | None) -> list[str]:
    """Returns in words that `x` is not of these sizes, or that its batch dimension is not `batch`.

    Unknown sizes fit; another number of dimensions is refused when the mod is called.
    """
    found, needed = list(np.shape(x)), list(sizes)
    if len(found) == len(needed) + 1:
        needed = [batch, *needed]
    if len(found) != len(needed):
        return []
    if all(map(fits, found, needed)):
        return []
    needed = [n if m is None else m for n, m in zip(found, needed, strict=True)]
    return [f"`{name}` has shape {found}; with these q and k it needs {needed}"]
