"""From a user's Python mods to the programs and operands that a lowering gets.

A mod is traced once, at scalars, and its jaxpr is taken apart into

* equations that depend on no index: they run once, outside, as ordinary JAX, and their derivatives
  are JAX's own (`jnp.exp(table)[q_idx - kv_idx]` exponentiates the table once);
* *reads*: gathers from what was captured, each with the program of its index (see `Read`);
* the rest: a pointwise program of the score, the indices and what was read.

Programs are interned: a new closure over another array, but with the same code, is the same object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType

from xform._compat import Jaxpr, JaxprEqn, Literal, Var
from xform._show import named
from xform.jaxpr import eqn_rule, intern, interpret, source_line, sub_jaxprs, walk
from xform.jaxpr._walk import UNKNOWN, at_line, current_line
from xform.lowering._spec import Read
from xform.primitives._objects import Mod, Shape, is_in_text
from xform.primitives._rules import join_axes
from xform.primitives._short import short_reads, watched

_INDEX = jax.ShapeDtypeStruct((), jnp.int32)
_NO_MESH = jax.sharding.AbstractMesh((), ())


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
    reads = _reads(score, where) if score else {}
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
                env.update(zip(eqn.outvars, _results(eqn, *map(value, eqn.invars)), strict=True))
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


class Opened(NamedTuple):
    """A mod as a program of the arrays that it reads.

    Attributes:
      program: `(*arrays, *score, b, h, q_idx, kv_idx) -> [result]`, of scalars, without calls.
      arrays: what the mod reads.
      misfits: in words, which arrays do not fit, if that was asked.
    """

    program: Jaxpr
    arrays: list[jax.Array]
    misfits: Sequence[str] = ()

    def of(self, arrays: Sequence[jax.Array]) -> Callable:
        """The mod that reads these arrays instead."""
        run = interpret(self.program, _JOINED, default=_bind_joined)
        return lambda *args: run(*arrays, *args)[0]


def open_mods(
    score_mod: Callable | None, mask_mod: Callable | None, wide, shape: Shape | None,
    caller: str = "flex_attention",
) -> tuple[Opened | None, Opened | None]:  # fmt: skip
    """Opens both mods, if they are there.

    Raises:
      ValueError: on arrays that do not fit `shape`, those of both.
    """
    struct = jax.ShapeDtypeStruct((), wide)
    score = None if score_mod is None else open_mod("score_mod", score_mod, struct, shape=shape)
    mask = None if mask_mod is None else open_mod("mask_mod", mask_mod, shape=shape)
    if wrong := [words for mod in (score, mask) if mod for words in mod.misfits]:
        raise ValueError(f"{caller}: {'; '.join(dict.fromkeys(wrong))}.")
    return score, mask


def open_mod(name: str, mod: Callable, *score, shape: Shape | None = None) -> Opened:
    """Traces `mod(*score, b, h, q_idx, kv_idx)`.

    Args:
      name: what it is.
      mod: the user's function.
      *score: the struct of a score, if it takes one.
      shape: how many places there are; None if arrays are not to be held to it.

    Raises:
      ValueError, TypeError: if the mod is no function of scalars, or does not return one.
    """
    _check_signature(name, mod, "score, " * len(score) + "b, h, q_idx, kv_idx")
    call, wrong = (mod, []) if shape is None or _is_asked(mod) else watched(mod, shape)
    try:
        with _no_mesh():
            jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*score, *[_INDEX] * 4)
    except Exception as error:
        if (cure := _cure(error)) is None:  # the user's own, with their line in its traceback
            error.add_note(f"This is in the `{name}` {_called(mod)}.")
            raise
        raise TypeError(
            f"`{name}` {_called(mod)} is traced once for all scores, so Python can't know the "
            f"values of its arguments: {cure}. {str(error).splitlines()[0]}"
        ) from error
    _check_result(name, mod, out, jnp.floating if score else jnp.bool_)
    _check_consts(name, mod, jaxpr.consts)
    arrays = [jnp.asarray(x) for x in jaxpr.consts]
    # Traced again without the types of shard_map, which a lowering knows nothing about.
    flat = jax.make_jaxpr(interpret(pe.convert_constvars_jaxpr(jaxpr), _KEEP, default=_bind))
    with _no_mesh():
        program = flat(*map(_struct, arrays), *score, *[_INDEX] * 4)
    if shape is not None and not wrong:  # what is in an object that does not fit need not be said
        wrong = short_reads(f"`{name}` {_called(mod)}", program, shape, is_in_text())
    return Opened(program, arrays, wrong)


def _check_consts(name: str, mod: Callable, consts: Sequence) -> None:
    """Raises at a captured reference, whose value is not known when the mod is traced."""
    refs = [x for x in consts if isinstance(x, jax.Ref)]
    if refs:
        found = ", ".join(jax.typeof(x).str_short() for x in refs)
        raise TypeError(
            f"`{name}` {_called(mod)} reads what may change, {found}: read it before the call, "
            "`x = ref[...]`, and let the mod read that."
        )


def _is_asked(mod) -> bool:
    """Whether it is an object without functions in it: these have been asked whether they fit."""
    return isinstance(mod, Mod) and all(map(_is_asked, filter(callable, vars(mod).values())))


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
            known.update(zip(eqn.outvars, _results(eqn, *values), strict=True))
    _check_fusable(name, eqns)
    return Traced(eqns, known, invars[:-4], invars[-4:], flat.outvars[0])


def _is_number(eqn: JaxprEqn) -> bool:
    """Whether it makes scalars of nothing: a lowering does that itself, but for random keys."""
    avals = [_aval(v) for v in eqn.outvars]
    literal = not any(isinstance(v, Var) for v in eqn.invars)
    return literal and all(
        x.shape == () and not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in avals
    )


def _bind(eqn: JaxprEqn, *args):
    """Runs one equation as it is, of the user's line; returns what its primitive does."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes"))
    if eqn.effects and axes:
        raise NotImplementedError(
            f"a mod may not communicate, or ask where it runs: `{eqn.primitive.name}` over "
            f"{axes!r} (at {_line(eqn)}). Call it before, and let the mod read what it gives."
        )
    if eqn.primitive.name in _PLACING:
        raise NotImplementedError(
            f"a mod is a function of scalars, which are on no mesh: `{eqn.primitive.name}` (at "
            f"{_line(eqn)}). Call it before, and let the mod read what it gives."
        )
    if eqn.effects:
        raise NotImplementedError(
            f"a mod must be a pure function of its arguments: `{eqn.primitive.name}` has side "
            f"effects (at {_line(eqn)}). Take it out of the mod."
        )
    with at_line(eqn):
        return eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def _line(eqn: JaxprEqn) -> str:
    """The user's line of an equation, or of the call that it is inlined from."""
    line = source_line(eqn)
    return current_line() if line == UNKNOWN else line


def _results(eqn: JaxprEqn, *args) -> list:
    out = _bind(eqn, *args)
    return list(out) if eqn.primitive.multiple_results else [out]


# Calls are inlined, but for those with a derivative of their own, and the divisions by name that
# jnp makes of many equations: an analysis wants to know them.
_KEEP = {
    "custom_jvp_call": eqn_rule(_bind),
    "custom_vjp_call": eqn_rule(_bind),
    ("jit", "floor_divide"): lambda x, y, **_: jnp.floor_divide(x, y),
    ("jit", "remainder"): lambda x, y, **_: jnp.remainder(x, y),
    "pvary": lambda x, **_: x,
    "pcast": lambda x, **_: x,
}


def _bind_joined(eqn: JaxprEqn, *args):
    """`_bind` where operands may differ in the mesh axes that they vary over."""
    return _bind(eqn, *join_axes(args))


_JOINED = {
    **_KEEP,
    "custom_jvp_call": eqn_rule(_bind_joined),
    "custom_vjp_call": eqn_rule(_bind_joined),
}

# What puts arrays on a mesh.
_PLACING = ("mesh_cast", "reshard", "shard_map", "sharding_constraint")

# What Python asks of a traced value, how its error begins, and what to write instead.
_CURES = (
    (
        jax.errors.TracerBoolConversionError, "",
        "write `jnp.where(condition, x, y)` for `x if condition else y`, `&`, `|` and `~` for "
        "`and`, `or` and `not`, and `(a <= x) & (x < b)` for `a <= x < b`",
    ),
    (
        jax.errors.TracerArrayConversionError, "",
        "make a NumPy array that it indexes a JAX one, `jnp.asarray(array)[q_idx]`, and use "
        "`jax.numpy` for `numpy`",
    ),
    (
        jax.errors.TracerIntegerConversionError, "",
        "make a list that it indexes an array, `jnp.asarray(items)[q_idx]`",
    ),
    (
        jax.errors.ConcretizationTypeError, "",
        "compute with `jax.numpy`, not with Python's numbers",
    ),
    (
        TypeError, "unhashable type: ",
        "make a dict that it looks into an array, `jnp.asarray(list(table.values()))[q_idx]`",
    ),
    (
        IndexError, "Array slice indices must have static",
        "write `jnp.where(jnp.arange(len(x)) < q_idx, x, 0)` for `x[:q_idx]`, or compute sums of "
        "parts before the call, as an array that it indexes",
    ),
    (
        TypeError, "Shapes must be 1D sequences",
        "make arrays of a size that is known, and hide with `jnp.where` what is too much",
    ),
    (
        TypeError, "function ",  # "... returned a value of type ..., which is not a valid JAX type"
        "return what was computed from them",
    ),
)  # fmt: skip


def _cure(error: Exception) -> str | None:
    """What to write instead of what Python was asked for; None for any other error."""
    of_kind = lambda kind, start: isinstance(error, kind) and str(error).startswith(start)
    return next((cure for kind, start, cure in _CURES if of_kind(kind, start)), None)


_GATHERS = ("gather", "dynamic_slice")
_PLAIN = lax.GatherDimensionNumbers((), (), ())


def _context(score: Traced | None, mask: Traced | None) -> dict[Var, jax.Array]:
    """What the mask and the indices of reads are computed from: one list of arrays for both."""
    context = {}
    if score:
        indices = [v for eqn in score.gathers().values() for v in eqn.invars[1:]]
        context |= {v: score.known[v] for v in score.captured(indices)}
    if mask:
        context |= {v: mask.known[v] for v in mask.captured([mask.out])}
    return context


def _reads(score: Traced, context: list[Var]) -> dict[Var, dict[Var, Read]]:
    """For each captured array, its reads by the variable that they define."""
    reads: dict[Var, dict[Var, Read]] = {}
    gathers = score.gathers()
    needed = score.needed([score.out], stop=gathers)
    for out, eqn in gathers.items():
        if out in needed:  # and not only behind the index of another
            reads.setdefault(_var(eqn.invars[0]), {})[out] = _read(score, eqn, context)
    for v in score.captured([score.out], stop=gathers):
        reads.setdefault(v, {})[v] = Read(shape=score.known[v].shape)
    if found := [score.known[v] for v in reads if jnp.iscomplexobj(score.known[v])]:
        found = ", ".join(f"{x.dtype}{list(x.shape)}" for x in found)
        raise ValueError(
            f"`score_mod` reads complex arrays ({found}): take their parts before it indexes them, "
            "`x.real[q_idx]` for `x[q_idx].real`."
        )
    return reads


def _read(traced: Traced, eqn: JaxprEqn, context: list[Var]) -> Read:
    """The read that a `gather` or `dynamic_slice` equation makes."""
    outs = eqn.invars[1:]
    is_gather = eqn.primitive.name == "gather"
    common = {
        "index": _index_program(
            traced, outs, context, (lambda xs: xs[0]) if is_gather else jnp.stack
        ),
        "dims": traced.dims(outs).replace("b", ""),
        "shape": _aval(eqn.outvars[0]).shape,
        "slice_sizes": eqn.params["slice_sizes"],
    }
    if is_gather:
        keys = ("dimension_numbers", "mode", "fill_value")
        return Read(**common, **{k: _one_nan(eqn.params[k]) for k in keys})
    dims = tuple(range(len(common["shape"])))
    numbers = lax.GatherDimensionNumbers(dims, (), dims)
    return Read(**common, dimension_numbers=numbers, mode=lax.GatherScatterMode.CLIP)


def _one_nan(x):
    """`x`, and for every NaN the same one, so that equal reads are equal."""
    return math.nan if isinstance(x, float | np.floating) and math.isnan(x) else x


def _index_program(traced: Traced, outs: Sequence, context: list[Var], join: Callable) -> Jaxpr:
    """`(b, h, q, k, *context) -> join(outs)`."""

    def program(*args):
        return join(
            traced.evaluate(outs, dict(zip([*traced.indices, *context], args, strict=True)))
        )

    return _program(program, *[_INDEX] * 4, *(_struct(_aval(v)) for v in context))


def _pointwise(traced: Traced, loaded: list[Var], wide) -> Jaxpr:
    """`(score, b, h, q, k, *reads) -> score`, floating reads and the result in the wide dtype.

    A narrow capture is rounded to its own dtype only where the mod computes with it there. Where
    all that the mod does is widen it, its gradient too is never rounded to the narrow dtype.
    """

    def program(*args):
        env = dict(zip([*traced.scores, *traced.indices], args[:5], strict=True))
        raw = dict(zip(loaded, args[5:], strict=True))
        for eqn in traced.eqns:
            if eqn.primitive.name in ("squeeze", "reshape") and eqn.invars[0] in raw:
                raw[eqn.outvars[0]] = _bind(eqn, raw[eqn.invars[0]])
            elif eqn.primitive.name == "convert_element_type" and eqn.invars[0] in raw:
                x = raw[eqn.invars[0]]
                env |= {eqn.outvars[0]: x} if _aval(eqn.outvars[0]).dtype == x.dtype else {}
        env |= {v: x.astype(_aval(v).dtype) for v, x in raw.items()}
        return jnp.asarray(traced.evaluate([traced.out], env)[0]).astype(wide)

    def struct(v: Var):
        aval = _aval(v)
        floating = jnp.issubdtype(aval.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(aval.shape, wide if floating else aval.dtype)

    return _program(program, jax.ShapeDtypeStruct((), wide), *[_INDEX] * 4, *map(struct, loaded))


def _program(f: Callable, *avals) -> Jaxpr:
    with _no_mesh():
        jaxpr = jax.make_jaxpr(f)(*avals)
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return intern(jaxpr)


def _no_mesh():
    """A context in which types name no mesh of `jax.set_mesh`: a program of scalars is on none."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return contextlib.nullcontext() if manual else jax.sharding.use_abstract_mesh(_NO_MESH)


def _var(atom: Var | Literal) -> Var:
    assert isinstance(atom, Var)
    return atom


def _aval(v: Var | Literal) -> ShapedArray:
    assert isinstance(v.aval, ShapedArray)
    return v.aval


def _struct(x) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _called(mod: Callable) -> str:
    """The user's name of a mod, and where it is written."""
    function = inspect.unwrap(mod)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__name__"):  # an object that can be called
        function = inspect.unwrap(type(function).__call__)
    code = getattr(function, "__code__", None)
    name = f"`{getattr(function, '__qualname__' if mod is not function else '__name__', mod)}`"
    return f"{name} ({named(code.co_filename)}:{code.co_firstlineno})" if code else name


def _check_signature(name: str, mod: Callable, arguments: str) -> None:
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise TypeError(
            f"`{name}` is called as `{name}({arguments})`, and {_called(mod)} takes {signature}: "
            f"{error}."
        ) from None


def _check_result(name: str, mod: Callable, shape, kind) -> None:
    what = "a bool" if kind is jnp.bool_ else "a floating-point number"
    ok = hasattr(shape, "shape") and shape.shape == () and jnp.issubdtype(shape.dtype, kind)
    if not ok:
        found = jax.tree.map(lambda x: x.dtype.name + str(list(x.shape)), shape)
        raise ValueError(
            f"`{name}` must return {what}, one scalar per score: "
            f"{_called(mod)} returned {found}. A mod is called with scalars "
            f"({
                'score, ' if kind is jnp.floating else ''
            }b, h, q_idx, kv_idx), not with arrays of them."
        )


# What no kernel does for one score at a time, by what it is.
_UNFUSABLE = {
    "calls back to the host": ("pure_callback", "io_callback", "debug_callback"),
    "solves or factors a matrix": (
        "cholesky", "custom_linear_solve", "eig", "eigh", "geqp3", "geqrf", "hessenberg",
        "householder_product", "linear_solve", "lu", "qr", "schur", "svd", "triangular_solve",
        "tridiagonal", "tridiagonal_solve",
    ),
    "works on an array as a whole": (
        "approx_top_k", "conv_general_dilated", "fft", "sort", "top_k",
    ),
    "talks to other devices": (
        "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pgather", "pmax",
        "pmin", "ppermute", "psum", "psum_invariant", "ragged_all_to_all", "reduce_scatter",
    ),
    "may draw other numbers each time it runs": ("rng_uniform",),
    "is a kernel itself": (
        "ffi_call", "flex_attention", "linear_cross_entropy", "loss_sum", "pallas_call", "tile_sum",
    ),
}  # fmt: skip
_WHY_UNFUSABLE = {name: why for why, names in _UNFUSABLE.items() for name in names}


def _check_fusable(name: str, eqns: Sequence[JaxprEqn]) -> None:
    """Raises if one of `eqns` of a mod, or one inside them, could be part of no kernel."""
    inside = [site for eqn in eqns for _, body in sub_jaxprs(eqn) for site in walk(body)]
    lines = [(eqn, source_line(eqn)) for eqn in eqns] + [(x.eqn, x.line) for x in inside]
    for eqn, line in lines:
        operation = eqn.primitive.name
        if why := _WHY_UNFUSABLE.get(operation):
            raise NotImplementedError(
                f"`{name}` can't be fused: `{operation}` {why}, and it depends on the score or an "
                f"index (at {line}). Compute what it gives before the call, as an "
                "array that the mod reads at its indices."
            )
