"""A user's mod as a program of scalars and of the arrays that it reads, with all calls inlined."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType

from xform._compat import Jaxpr, JaxprEqn
from xform.jaxpr import eqn_rule, interpret, source_line
from xform.jaxpr._walk import UNKNOWN, at_line, current_line
from xform.primitives._branches import choose_results
from xform.primitives._mod_errors import (
    called,
    check_consts,
    check_result,
    check_signature,
    cure_of,
)
from xform.primitives._objects import Mod, Shape, is_in_text
from xform.primitives._rules import check_sizes, join_axes
from xform.primitives._short import short_reads, watched

INDEX = jax.ShapeDtypeStruct((), jnp.int32)
_NO_MESH = jax.sharding.AbstractMesh((), ())
_BODIES = ("jaxpr", "cond_jaxpr", "body_jaxpr", "branches")


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
    check_signature(name, mod, "score, " * len(score) + "b, h, q_idx, kv_idx")
    call, wrong = (mod, []) if shape is None or _is_asked(mod) else watched(mod, shape)
    try:
        with no_mesh():
            jaxpr, out = jax.make_jaxpr(call, return_shape=True)(*score, *[INDEX] * 4)
    except Exception as error:
        if (cure := cure_of(error)) is None:  # the user's own, with their line in its traceback
            error.add_note(f"This is in the `{name}` {called(mod)}.")
            raise
        raise TypeError(
            f"`{name}` {called(mod)} is traced once for all scores, so Python can't know the "
            f"values of its arguments: {cure}. {str(error).splitlines()[0]}"
        ) from error
    check_result(name, mod, out, jnp.floating if score else jnp.bool_)
    check_consts(name, mod, jaxpr.consts)
    arrays = [jnp.asarray(x) for x in jaxpr.consts]
    check_sizes(f"`{name}` {called(mod)}", **{f"array {n}": x for n, x in enumerate(arrays)})
    # Traced again without the types of meshes, which a lowering knows nothing about.
    flat = jax.make_jaxpr(interpret(pe.convert_constvars_jaxpr(jaxpr), _FLATTEN, default=bind))
    with no_mesh():
        program = flat(*map(struct_of, arrays), *score, *[INDEX] * 4)
    if shape is not None and not wrong:  # what is in an object that does not fit need not be said
        wrong = short_reads(f"`{name}` {called(mod)}", program, shape, is_in_text())
    if score:
        with no_mesh():
            program = choose_results(program, len(arrays), bind, _KEEP)
    return Opened(program, arrays, wrong)


def _is_asked(mod) -> bool:
    """Whether it is an object without functions in it: these have been asked whether they fit."""
    return isinstance(mod, Mod) and all(map(_is_asked, filter(callable, vars(mod).values())))


def bind(eqn: JaxprEqn, *args):
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


def results_of(eqn: JaxprEqn, *args) -> list:
    """`bind`, whose results are always a list."""
    out = bind(eqn, *args)
    return list(out) if eqn.primitive.multiple_results else [out]


# Calls are inlined, but for those with a derivative of their own, and the divisions by name that
# jnp makes of many equations: an analysis wants to know them.
_KEEP = {
    "custom_jvp_call": eqn_rule(bind),
    "custom_vjp_call": eqn_rule(bind),
    ("jit", "floor_divide"): lambda x, y, **_: jnp.floor_divide(x, y),
    ("jit", "remainder"): lambda x, y, **_: jnp.remainder(x, y),
    "pvary": lambda x, **_: x,
    "pcast": lambda x, **_: x,
}


def _off_mesh(eqn: JaxprEqn, *args):
    """A loop or branches, whose bodies may be written for arrays on a mesh, for those of none."""
    params = {
        name: jax.tree.map(_without_mesh, value, is_leaf=lambda x: isinstance(x, Jaxpr))
        if name in _BODIES
        else value
        for name, value in eqn.params.items()
    }
    return bind(eqn.replace(params=params), *args)


def _without_mesh(body: Jaxpr) -> Jaxpr:
    """A body whose types name no mesh."""
    avals = [x for x in body.in_avals if isinstance(x, ShapedArray)]
    if all(x.sharding.mesh.empty for x in avals):
        return body
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    with no_mesh():
        return jax.make_jaxpr(interpret(body, _FLATTEN, default=bind))(*structs)


def _stays(eqn: JaxprEqn, x):
    """Arrays that a mod changes (`table.at[q_idx].set(0)`) are put where they are already."""
    if any(name is not None for name in eqn.params["dst_sharding"].spec):
        return bind(eqn, x)
    return x


_FLATTEN = {
    **_KEEP,
    **dict.fromkeys(("cond", "scan", "while"), eqn_rule(_off_mesh)),
    "reshard": eqn_rule(_stays),
}


def _bind_joined(eqn: JaxprEqn, *args):
    """`bind` where operands may differ in the mesh axes that they vary over."""
    return bind(eqn, *join_axes(args))


_JOINED = {
    **_KEEP,
    "custom_jvp_call": eqn_rule(_bind_joined),
    "custom_vjp_call": eqn_rule(_bind_joined),
}

# What puts arrays on a mesh.
_PLACING = ("mesh_cast", "reshard", "shard_map", "sharding_constraint")


def no_mesh():
    """A context in which types name no mesh of `jax.set_mesh`: a program of scalars is on none."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return contextlib.nullcontext() if manual else jax.sharding.use_abstract_mesh(_NO_MESH)


def struct_of(x) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array or a type, on no mesh."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
