"""From a user's Python mods to the programs and operands that a lowering gets.

A mod is traced once, at scalars (`_open.py`), and its jaxpr is taken apart into

* equations that depend on no index: they run once, outside, as ordinary JAX, and their derivatives
  are JAX's own (`jnp.exp(table)[q_idx - kv_idx]` exponentiates the table once);
* *reads*: gathers from what was captured, each with the program of its index (see `Read`);
* the rest: a pointwise program of the score, the indices and what was read.

Programs are interned: a new closure over another array, but with the same code, is the same object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import partial_eval as pe

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform.jaxpr import intern
from xform.lowering._contract import wide_of
from xform.lowering._spec import Read
from xform.primitives._mod_errors import check_fusable
from xform.primitives._objects import Shape
from xform.primitives._open import INDEX, Opened, bind, no_mesh, open_mods, results_of, struct_of
from xform.primitives._rules import join_axes

_GATHERS = ("gather", "dynamic_slice")
_PLAIN = lax.GatherDimensionNumbers((), (), ())


@dataclasses.dataclass(frozen=True)
class Mods:
    """The programs of a score mod and a mask mod, and the arrays that they read.

    Attributes:
      score: `(score, b, h, q, k, *reads) -> score`, or None.
      reads: what `score` reads, one tuple of reads per array of `captures`.
      mask: `(b, h, q, k, *context) -> bool`, or None.
      mask_dims: those of "bhqk" that the mask depends on.
      captures: arrays that `score` reads.
      context: arrays that the mask and the indices of reads depend on.
    """

    score: Jaxpr | None
    reads: tuple[tuple[Read, ...], ...]
    mask: Jaxpr | None
    mask_dims: str
    captures: list[jax.Array]
    context: list[jax.Array]


def take_apart(
    score_mod: Callable | None, mask_mod: Callable | None, wide, shape: Shape | None = None
) -> Mods:
    """Traces the mods and takes them apart.

    Args:
      score_mod, mask_mod: the user's functions, or None.
      wide: dtype of scores.
      shape: how many places there are, for arrays to have entries for; None if that is not asked.

    Raises:
      ValueError: if a mod does not return one scalar, or a mask not a bool, or a score not a float;
        and on arrays that are too short.
    """
    score, mask = open_mods(score_mod, mask_mod, wide, shape)
    score = None if score is None else _trace("score_mod", score)
    mask = None if mask is None else _trace("mask_mod", mask)
    context = _context(score, mask)
    where = list(context)
    reads = _reads(score, where, wide) if score else {}
    return Mods(
        score=_pointwise(score, [v for group in reads.values() for v in group], wide)
        if score
        else None,
        reads=tuple(tuple(group.values()) for group in reads.values()),
        mask=_index_program(mask, [mask.out], where, lambda xs: xs[0]) if mask else None,
        mask_dims=mask.dims([mask.out]) if mask else "",
        captures=[score.known[v] for v in reads] if score else [],
        context=[lax.stop_gradient(x) for x in context.values()],
    )


@dataclasses.dataclass(frozen=True)
class Traced:
    """A mod at scalars, split by what depends on the score or an index.

    Attributes:
      eqns: the equations that do, in order.
      known: the values of all variables that do not.
      scores: the variable of the score, for a score mod.
      indices: the variables of b, h, q_idx, kv_idx.
      out: the result.
    """

    eqns: list[JaxprEqn]
    known: dict[Var, jax.Array]
    scores: list[Var]
    indices: list[Var]
    out: Var | Literal

    def needed(self, outs: Sequence, stop: Collection[Var] = ()) -> set[Var]:
        """All variables behind `outs`, and `outs`; not what is behind those of `stop`."""
        needed = {v for v in outs if isinstance(v, Var)}
        for eqn in reversed(self.eqns):
            if any(v in needed and v not in stop for v in eqn.outvars):
                needed |= {v for v in eqn.invars if isinstance(v, Var)}
        return needed

    def captured(self, outs: Sequence, stop: Collection[Var] = ()) -> list[Var]:
        """The known variables behind `outs`."""
        needed = self.needed(outs, stop)
        return [v for v in self.known if v in needed]

    def dims(self, outs: Sequence) -> str:
        """Which of "bhqk" `outs` depend on."""
        needed = self.needed(outs)
        return "".join(d for d, v in zip("bhqk", self.indices, strict=True) if v in needed)

    def evaluate(self, outs: Sequence, env: dict[Var, jax.Array]) -> list:
        """Computes `outs`, given the values of what they depend on."""
        env = dict(env)
        needed = self.needed(outs, stop=tuple(env))
        value = lambda v: v.val if isinstance(v, Literal) else env[v]
        for eqn in self.eqns:
            if any(v in needed and v not in env for v in eqn.outvars):
                env.update(zip(eqn.outvars, results_of(eqn, *map(value, eqn.invars)), strict=True))
        return [value(v) for v in outs]

    def gathers(self) -> dict[Var, JaxprEqn]:
        """The gathers from captured arrays whose index does not depend on the score."""
        return {
            eqn.outvars[0]: eqn
            for eqn in self.eqns
            if eqn.primitive.name in _GATHERS
            and eqn.invars[0] in self.known
            and not self.needed(eqn.invars[1:]) & set(self.scores)
            and not eqn.params.get("dimension_numbers", _PLAIN).operand_batching_dims
        }


def _trace(name: str, opened: Opened) -> Traced:
    """Evaluates what depends neither on the score nor on an index."""
    flat, arrays, _ = opened
    consts = join_axes(arrays)
    invars = flat.invars[len(consts) :]
    known = dict(zip([*flat.constvars, *flat.invars], [*flat.consts, *consts], strict=False))

    eqns, depends = [], set(invars)
    for eqn in flat.eqns:
        operands = [v for v in eqn.invars if isinstance(v, Var)]
        if _is_number(eqn) or not depends.isdisjoint(operands):
            depends.update(eqn.outvars)
            eqns.append(eqn)
        else:
            values = [known[v] if isinstance(v, Var) else v.val for v in eqn.invars]
            known.update(zip(eqn.outvars, results_of(eqn, *values), strict=True))
    check_fusable(name, eqns)
    return Traced(eqns, known, invars[:-4], invars[-4:], flat.outvars[0])


def _is_number(eqn: JaxprEqn) -> bool:
    """Whether it makes scalars of nothing: a lowering does that itself, but for random keys."""
    avals = [_aval(v) for v in eqn.outvars]
    literal = not any(isinstance(v, Var) for v in eqn.invars)
    return literal and all(
        x.shape == () and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in avals
    )


def _context(score: Traced | None, mask: Traced | None) -> dict[Var, jax.Array]:
    """What the mask and the indices of reads are computed from: one list of arrays for both."""
    context = {}
    if score:
        indices = [v for eqn in score.gathers().values() for v in eqn.invars[1:]]
        context |= {v: score.known[v] for v in score.captured(indices)}
    if mask:
        context |= {v: mask.known[v] for v in mask.captured([mask.out])}
    return context


def _reads(score: Traced, context: list[Var], wide) -> dict[Var, dict[Var, Read]]:
    """For each captured array, its reads by the variable that they define."""
    reads: dict[Var, dict[Var, Read]] = {}
    gathers = score.gathers()
    needed = score.needed([score.out], stop=gathers)
    for out, eqn in gathers.items():
        if out in needed:  # and not only behind the index of another
            reads.setdefault(_var(eqn.invars[0]), {})[out] = _read(score, eqn, context, wide)
    for v in score.captured([score.out], stop=gathers):
        array = score.known[v]
        reads.setdefault(v, {})[v] = Read(array.shape, dtype=_loaded(array.dtype, wide))
    if found := [score.known[v] for v in reads if jnp.iscomplexobj(score.known[v])]:
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in found)
        raise ValueError(
            f"`score_mod` reads complex arrays ({found}): take their parts before it indexes them, "
            "`x.real[q_idx]` for `x[q_idx].real`."
        )
    return reads


def _read(traced: Traced, eqn: JaxprEqn, context: list[Var], wide) -> Read:
    """The read that a `gather` or `dynamic_slice` equation makes."""
    outs = eqn.invars[1:]
    is_gather = eqn.primitive.name == "gather"
    common = {
        "index": _index_program(
            traced, outs, context, (lambda xs: xs[0]) if is_gather else jnp.stack
        ),
        "dims": traced.dims(outs).replace("b", ""),
        "shape": _aval(eqn.outvars[0]).shape,
        "dtype": _loaded(_aval(eqn.outvars[0]).dtype, wide),
        "slice_sizes": eqn.params["slice_sizes"],
    }
    if is_gather:
        keys = ("dimension_numbers", "mode", "fill_value")
        return Read(**common, **{k: _one_nan(eqn.params[k]) for k in keys})
    dims = tuple(range(len(common["shape"])))
    numbers = lax.GatherDimensionNumbers(dims, (), dims)
    return Read(**common, dimension_numbers=numbers, mode=lax.GatherScatterMode.CLIP)


def _one_nan(x) -> Any:
    """`x`, and for every NaN the same one, so that equal reads are equal."""
    return math.nan if isinstance(x, float | np.floating) and math.isnan(x) else x


def _index_program(traced: Traced, outs: Sequence, context: list[Var], join: Callable) -> Jaxpr:
    """`(b, h, q, k, *context) -> join(outs)`."""

    def program(*args):
        return join(
            traced.evaluate(outs, dict(zip([*traced.indices, *context], args, strict=True)))
        )

    return _program(program, *[INDEX] * 4, *(struct_of(_aval(v)) for v in context))


def _pointwise(traced: Traced, loaded: list[Var], wide) -> Jaxpr:
    """`(score, b, h, q, k, *reads) -> score`, reads as they are loaded, the result wide.

    A narrow capture is rounded to its own dtype only where the mod computes with it there. Where
    all that the mod does is widen it, its gradient too is never rounded to the narrow dtype.
    """

    def program(*args):
        env = dict(zip([*traced.scores, *traced.indices], args[:5], strict=True))
        raw = dict(zip(loaded, args[5:], strict=True))
        for eqn in traced.eqns:
            if eqn.primitive.name in ("squeeze", "reshape") and eqn.invars[0] in raw:
                raw[eqn.outvars[0]] = bind(eqn, raw[eqn.invars[0]])
            elif eqn.primitive.name == "convert_element_type" and eqn.invars[0] in raw:
                x = raw[eqn.invars[0]]
                env |= {eqn.outvars[0]: x} if _aval(eqn.outvars[0]).dtype == x.dtype else {}
        env |= {v: x.astype(_aval(v).dtype) for v, x in raw.items()}
        return jnp.asarray(traced.evaluate([traced.out], env)[0]).astype(wide)

    def struct(v: Var):
        return jax.ShapeDtypeStruct(_aval(v).shape, _loaded(_aval(v).dtype, wide))

    return _program(program, jax.ShapeDtypeStruct((), wide), *[INDEX] * 4, *map(struct, loaded))


def _loaded(dtype, wide):
    """What a captured array is loaded in, and its gradient added up in: wide, if it is floating."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return max(wide_of(dtype), jnp.dtype(wide), key=lambda d: d.itemsize)


def _program(f: Callable, *avals) -> Jaxpr:
    with no_mesh():
        jaxpr = jax.make_jaxpr(f)(*avals)
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return intern(jaxpr)


def _var(atom: Var | Literal) -> Var:
    assert isinstance(atom, Var)
    return atom


def _aval(v: Var | Literal) -> ShapedArray:
    assert isinstance(v.aval, ShapedArray)
    return v.aval
