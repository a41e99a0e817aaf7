"""What is wrong with a mod, in words: what was found, where, and what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from xform._compat import JaxprEqn
from xform._show import named
from xform.jaxpr import source_line, sub_jaxprs, walk

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


def cure_of(error: Exception) -> str | None:
    """What to write instead of what Python was asked for; None for any other error."""
    of_kind = lambda kind, start: isinstance(error, kind) and str(error).startswith(start)
    return next((cure for kind, start, cure in _CURES if of_kind(kind, start)), None)


def called(mod: Callable) -> str:
    """The user's name of a mod, and where it is written."""
    function = inspect.unwrap(mod)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not hasattr(function, "__name__"):  # an object that can be called
        function = inspect.unwrap(type(function).__call__)
    code = getattr(function, "__code__", None)
    name = f"`{getattr(function, '__qualname__' if mod is not function else '__name__', mod)}`"
    return f"{name} ({named(code.co_filename)}:{code.co_firstlineno})" if code else name


def check_signature(name: str, mod: Callable, arguments: str) -> None:
    """Raises if the mod does not take these arguments."""
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise TypeError(
            f"`{name}` is called as `{name}({arguments})`, and {called(mod)} takes {signature}: "
            f"{error}."
        ) from None


def check_result(name: str, mod: Callable, shape, kind) -> None:
    """Raises if what the mod returns is not one scalar of this kind."""
    what = "a bool" if kind is jnp.bool_ else "a floating-point number"
    ok = hasattr(shape, "shape") and shape.shape == () and jnp.issubdtype(shape.dtype, kind)
    if not ok:
        found = jax.tree.map(lambda x: x.dtype.name + str(list(x.shape)), shape)
        raise ValueError(
            f"`{name}` must return {what}, one scalar per score: "
            f"{called(mod)} returned {found}. A mod is called with scalars "
            f"({
                'score, ' if kind is jnp.floating else ''
            }b, h, q_idx, kv_idx), not with arrays of them."
        )


def check_consts(name: str, mod: Callable, consts: Sequence) -> None:
    """Raises at a captured reference, whose value is not known when the mod is traced."""
    refs = [x for x in consts if isinstance(x, jax.Ref)]
    if refs:
        found = ", ".join(jax.typeof(x).str_short() for x in refs)
        raise TypeError(
            f"`{name}` {called(mod)} reads what may change, {found}: read it before the call, "
            "`x = ref[...]`, and let the mod read that."
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


def check_fusable(name: str, eqns: Sequence[JaxprEqn]) -> None:
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
