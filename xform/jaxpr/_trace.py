"""From a function and its arguments to a program.

Not every argument is an array: a module holds its activation, a jitted function has static
arguments. Such an argument is part of the program, and no input of it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import AbstractValue
from jax.tree_util import keystr, tree_flatten_with_path

from xform._compat import Jaxpr

JITTED = type(jax.jit(lambda: None))


class Call(NamedTuple):
    """A traced call.

    Attributes:
        jaxpr: the program.
        args: what was passed for each of its inputs; None where static arguments hide which it was.
        names: the path of each in the arguments, `"[0]['w']"`.
        positions: the number of the positional argument that each is part of; None by keyword.
        donated: which inputs the function itself gives away.
    """

    jaxpr: Jaxpr
    args: list[Any]
    names: list[str]
    positions: list[int | None]
    donated: list[bool]


def trace(f: Callable, *args, **kwargs) -> Jaxpr:
    """Returns the closed jaxpr of a function.

    Args:
        f: a function of pytrees of arrays. Leaves that are no arrays (a string, the activation in a
            module) and static arguments of a jitted function are taken as they are.
        *args: its arguments, of which only shapes and dtypes count: a `jax.ShapeDtypeStruct` serves
            in place of an array.
        **kwargs: likewise.

    >>> from xform.jaxpr import trace
    >>> trace(lambda x: x + 1.0, jax.ShapeDtypeStruct((2,), "float32"))
    { lambda ; a:f32[2]. let b:f32[2] = add a 1.0:f32[] in (b,) }
    """
    return trace_call(f, args, kwargs).jaxpr


def trace_call(f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns the program of a call, and what was passed for each of its inputs."""
    found, tree = tree_flatten_with_path((tuple(args), dict(kwargs)))
    leaves = [x for _, x in found]
    if isinstance(f, JITTED) and not all(map(_is_array, leaves)):
        traced = f.trace(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
        infos = tree_flatten_with_path(traced.args_info)[0]
        if len(infos) < len(leaves):
            return _beside_static(traced.jaxpr, infos, leaves)
    inputs = [(path, x) for path, x in found if is_input(x)]
    paths = [path for path, _ in inputs]
    if len(inputs) == len(leaves):
        jaxpr = jax.make_jaxpr(f)(*args, **kwargs)
    else:
        jaxpr = jax.make_jaxpr(_on_inputs(f, leaves, tree))(*(x for _, x in inputs))
    return Call(jaxpr, [x for _, x in inputs], *_places(paths), given_away(jaxpr))


def _places(paths: Sequence[tuple]) -> tuple[list[str], list[int | None]]:
    """The names of inputs, and their positions; each path begins in the pair of args and kwargs."""
    names = [keystr(path[1:]) for path in paths]
    return names, [path[1].idx if path[0].idx == 0 else None for path in paths]


def jitted_call(f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple:
    """Returns a jitted function, with arguments for it, that runs the program of a call.

    It is `f` where that is jitted. Where an argument can be no input of a jitted function, it is
    one of the inputs alone.
    """
    if isinstance(f, JITTED):
        return f, tuple(args), dict(kwargs)
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    inputs = [x for x in leaves if is_input(x)]
    if len(inputs) == len(leaves):
        return jax.jit(f), tuple(args), dict(kwargs)
    return jax.jit(_on_inputs(f, leaves, tree)), tuple(inputs), {}


def _on_inputs(f: Callable, leaves: Sequence[Any], tree: Any) -> Callable[..., list]:
    """`f` of its inputs alone, which returns its results as far as they are arrays."""

    def of_inputs(*inputs):
        given = iter(inputs)
        args, kwargs = tree.unflatten([next(given) if is_input(x) else x for x in leaves])
        return [x for x in jax.tree.leaves(f(*args, **kwargs)) if is_input(x)]

    of_inputs.__name__ = getattr(f, "__name__", type(f).__name__)
    return of_inputs


def is_input(x: Any) -> bool:
    """Whether JAX can trace an argument."""
    if _is_array(x) or isinstance(x, AbstractValue):
        return True
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def given_away(jaxpr: Jaxpr) -> list[bool]:
    """The inputs that the one call of a program donates."""
    if len(jaxpr.eqns) != 1 or "donated_invars" not in jaxpr.eqns[0].params:
        return [False] * len(jaxpr.invars)
    (eqn,) = jaxpr.eqns
    given = {
        id(v) for v, away in zip(eqn.invars, eqn.params["donated_invars"], strict=True) if away
    }
    return [id(v) in given for v in jaxpr.invars]


def _beside_static(jaxpr: Jaxpr, infos: Sequence[tuple], leaves: Sequence[Any]) -> Call:
    """A call with static arguments, of which only `jit` knows which they are.

    Arrays never are, and stand in the order of the inputs; what a number was passed for is not
    told.
    """
    arrays = [x for x in leaves if _is_array(x)]
    form = lambda x: (x.shape, x.dtype)
    found: list[Any] = []
    for v in jaxpr.invars:
        own = arrays and not getattr(v.aval, "weak_type", False) and form(arrays[0]) == form(v.aval)
        found.append(arrays.pop(0) if own else None)
    return Call(
        jaxpr,
        [None] * len(found) if arrays else found,
        *_places([path for path, _ in infos]),
        [info.donated for _, info in infos],
    )
