"""Programs that never wait for the host."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.core import Tracer

from xform._hlo import read
from xform.jaxpr import walk
from xform.jaxpr._trace import JITTED, jitted_call

CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "infeed", "outfeed")


def no_host_gap(f: Callable) -> Callable:
    """Returns `f`, made to raise where its compiled program calls back to the host.

    A callback stops the device in the middle of a step: it sends data to the host, Python runs, and
    the device waits. `jax.debug.print` is one. Calls are checked once for each new set of argument
    types, before anything runs. Under another transformation, such as `jax.jit`, the program of `f`
    is checked before it is compiled.

    Args:
      f: The function, jitted or not.

    Raises:
      RuntimeError: When the result is called; it names each callback and the line that makes it.

    >>> step = no_host_gap(lambda x: x + 1)
    >>> step(jax.numpy.ones(2))
    Array([2., 2.], dtype=float32)
    """
    run: Any = f if hasattr(f, "lower") else jax.jit(f)
    passed: set = set()

    @wraps(f)
    def checked(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        key: Any = (tree, *map(_type, leaves))
        if isinstance(f, JITTED) and not all(hasattr(x, "dtype") for x in leaves):
            # Of which some may be static: what is traced, jit knows.
            key = (f.trace(*args, **kwargs).jaxpr, *key)  # pyright: ignore[reportFunctionMemberAccess]
        if key not in passed:
            jitted, inputs, named = jitted_call(f, args, kwargs)
            _refuse(f, _in_jaxpr(jitted, inputs, named))
            if not any(isinstance(x, Tracer) for x in leaves):
                _refuse(f, _in_program(jitted, inputs, named))
            passed.add(key)
        return run(*args, **kwargs)

    return checked


def _type(x: Any) -> Any:
    """What programs differ by: of an array its type and where it lies, of a number its type."""
    if hasattr(x, "dtype"):
        lies = isinstance(x, jax.Array) and not isinstance(x, Tracer)
        return jax.typeof(x), x.sharding if lies else None
    return type(x) if isinstance(x, bool | int | float | complex) else x


def _in_jaxpr(jitted: Any, args: tuple, kwargs: dict) -> list[str]:
    sites = walk(jitted.trace(*args, **kwargs).jaxpr)
    return [
        f"{site.line}: {site.eqn.primitive.name}"
        for site in sites
        if site.eqn.primitive.name in CALLBACKS
    ]


def _in_program(jitted: Any, args: tuple, kwargs: dict) -> list[str]:
    program = read(jitted.lower(*args, **kwargs).compile())
    return [f"{call.line}: {call.target}, {call.trips} × a call" for call in program.host]


def _refuse(f: Callable, found: list[str]) -> None:
    if found:
        calls = "\n  ".join(dict.fromkeys(found))
        name = getattr(f, "__name__", f)
        raise RuntimeError(
            f"`{name}` calls back to the host, and the device waits:\n  {calls}\n"
            "Return these values from the step and use them outside of it."
        )
