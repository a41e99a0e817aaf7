"""Arrays that have fewer entries than a mod reads of them.

JAX reads the last entry for every index beyond an array's end: ids of 8 tokens would serve 12
without a word. What a mod reads at an index of its own, as it is, must have an entry for each. At
an index that is computed (`i // 4`, `jnp.minimum(i, 7)`), any array will do: who computes it knows
its range. Not seen are branches (`lax.cond`), which may not run, and reads with a mode of their own
(`jnp.take(x, i, mode="clip")`; of `x.at[i].get(mode="clip")` JAX makes what it makes of `x[i]`).

A read may be guarded: `jnp.where(i < 5, s + x[i], s)` reads an x of 5 entries at every i and uses
what is there. So a mod that compares the same index with a number that is not beyond the array's
end, or with a scalar array, which may be traced, is taken at its word. Whether the read is under
that comparison is not looked at.

A longer array may be a table for the longest text, and serves. Mod objects, whose arrays are made
for one shape, know better: called with the indices as they are, inside a function, they are held
to what they are held to outside (`checked`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jax import lax

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.jaxpr import source_line
from xform.primitives._own import name_of, of_equation

if TYPE_CHECKING:
    from xform.primitives._objects import Shape

_INDICES = ("b", "h", "q_idx", "kv_idx")
_PLACES = ("batch entries", "query heads", "queries", "keys")


def short_reads(mod: str, program: Jaxpr, shape: Shape, in_text: bool) -> list[str]:
    """Returns in words which reads of a mod need longer arrays.

    Args:
      mod: the name of the mod, for the words.
      program: the mod, whose last arguments are b, h, q_idx and kv_idx.
      shape: how many there are of each.
      in_text: whether queries and keys are positions of a text.
    """
    names: dict[Var, str] = dict(zip(program.invars[-4:], _INDICES, strict=True))
    counts: dict[str, int | None] = dict(zip(_INDICES, shape, strict=True))
    words = (*_PLACES[:2], "positions", "positions") if in_text else _PLACES
    places: dict[str, str] = dict(zip(_INDICES, words, strict=True))
    ends = _ends(program, names)
    wrong = []
    for eqn in filter(_is_plain, program.eqns):
        found: Any = eqn.invars[0].aval
        at = of_equation(program, eqn, names)
        beyond = lambda size, i: _is_beyond(size, counts[i], ends.get(i, ()))
        short = {d: i for d, i in at.items() if beyond(found.shape[d], i)}
        if not short:
            continue
        needed = [counts[short[d]] if d in short else n for d, n in enumerate(found.shape)]
        there = dict.fromkeys(f"{counts[i]} {places[i]}" for i in short.values())
        d, i = next(iter(short.items()))
        size = found.shape[d]
        wrong.append(
            f"{mod} reads {found.dtype}{list(found.shape)} at {' and '.join(short.values())} "
            f"(at {source_line(eqn)}), and there are {' and '.join(there)}: make it {needed}; if "
            f"the last entry is meant for all beyond the end, write `x[jnp.minimum({i}, "
            f"{size - 1})]`; if none is, `jnp.where({i} < {size}, x[{i}], 0)`"
        )
    return list(dict.fromkeys(wrong))


def _is_plain(eqn: JaxprEqn) -> bool:
    """Whether it is what indexing makes, which says nothing on indices out of range."""
    if eqn.primitive is lax.gather_p:
        return eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return eqn.primitive is lax.dynamic_slice_p


def _is_beyond(size: int, needed: int | None, ends: Sequence[float]) -> bool:
    """Whether a dimension is read beyond its end, and no comparison says that the mod knows."""
    short = needed is not None and size < needed
    return short and not any(0 < end <= size for end in ends)


# What is added to a number to say below which an index is that is compared with it, where the index
# comes first and where it comes second: `i <= 4` and `4 >= i` ask for one below 5.
_COMPARED = {lax.lt_p: (0, 1), lax.ge_p: (0, 1), lax.le_p: (1, 0), lax.gt_p: (1, 0)}


def _ends(program: Jaxpr, names: dict[Var, str]) -> dict[str, list[float]]:
    """Below which numbers a mod asks whether an index is, by the name of the index.

    A number that an array has counts as 1, which is beyond no array's end. Indexing itself asks
    whether an index is below 0.
    """
    moving = set(names)
    for eqn in program.eqns:
        if any(v in moving for v in eqn.invars if isinstance(v, Var)):
            moving.update(eqn.outvars)
    ends: dict[str, list[float]] = {}
    for eqn in program.eqns:
        result: Any = eqn.outvars[0].aval
        if eqn.primitive not in _COMPARED or result.shape:
            continue
        sides = (eqn.invars, eqn.invars[::-1])
        for (x, other), more in zip(sides, _COMPARED[eqn.primitive], strict=True):
            index = name_of(program, names, x)
            if index is None or (isinstance(other, Var) and other in moving):
                continue
            end = float(other.val) + more if isinstance(other, Literal) else 1.0
            ends.setdefault(index, []).append(end)
    return ends


# ---- Mod objects inside functions ----------------------------------------------------------------


@dataclass
class _Call:
    """A mod while it is traced: its indices, how many there are of each, and what is wrong."""

    indices: tuple
    shape: Shape
    wrong: list[str] = field(default_factory=list)


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)


def watched(mod: Callable, shape: Shape) -> tuple[Callable, list[str]]:
    """Returns `mod`, and a list of which objects it calls do not fit, known once it was called."""
    wrong = []

    @functools.wraps(mod, updated=())
    def call(*args):
        before = _CALL.set(_Call(args[-4:], shape, wrong))
        try:
            return mod(*args)
        finally:
            _CALL.reset(before)

    return call, wrong


def checked(call: Callable) -> Callable:
    """The `__call__` of a class of mod objects, which looks whether an object fits."""

    @functools.wraps(call)
    def checked(self, *args, **named):
        if (now := _CALL.get()) is not None:
            here = dict(zip(map(id, now.indices), now.shape, strict=True))
            at = [*args, *(named[i] for i in _INDICES if i in named)][-4:]
            places = type(now.shape)(*(here.get(id(x)) for x in at))
            now.wrong.extend(x for x in self.misfits(places) if x not in now.wrong)
        return call(self, *args, **named)

    return checked
