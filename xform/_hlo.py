"""Compiled programs: made for a named device that need not be present, and read.

XLA compiles for an accelerator that the host lacks from a description of it, a *target config*
(`xform/_targets/`), and the accelerator's compiler (the dependency group `h200`). The result can't
run; all else that a compiled program can tell, it tells.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from xform._compat import register_plugins, target_topology

# The platform of each target, and the file that describes it.
TARGETS = {"H200": ("cuda", "h200.txtpb")}


def target_mesh(target: str, axes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of devices that can be compiled for, but not run on.

    Args:
      target: A device of `TARGETS`, such as "H200".
      axes: Name and size of each mesh axis, outermost first.

    Raises:
      ValueError: The target is not known.
      RuntimeError: Its compiler is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"`target` may be {' or '.join(map(repr, TARGETS))}; found {target!r}")
    platform, file = TARGETS[target]
    config = files("xform").joinpath("_targets", file).read_text()
    register_plugins()
    try:
        topology = target_topology(platform, config, tuple(axes.values()))
    except Exception as e:
        raise RuntimeError(
            f"compiling for {target} needs its compiler: install the dependency group `h200` "
            f"(`uv sync --group h200`); found: {e}"
        ) from e
    explicit = (AxisType.Explicit,) * len(axes)
    return Mesh(topology.reshape(tuple(axes.values())), tuple(axes), axis_types=explicit)


def compile_for(target: str, f: Callable, *args: Any) -> Any:
    """Returns `f` compiled for one device of `target`, as `jax.jit(f).lower(*args).compile()` does.

    Args:
      target: A device of `TARGETS`.
      f: The function, jitted or not.
      *args: Its arguments, of which only shapes and dtypes count.

    Raises:
      ValueError: The target is not known.
      RuntimeError: Its compiler is not installed.
    """
    placement = NamedSharding(target_mesh(target, {"one": 1}), jax.P())
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placement)
    lowered = jax.jit(f).lower(*jax.tree.map(shape, args))
    with warnings.catch_warnings():
        # A cache of programs on disk can't give back one that no device here could run.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache entry")
        return lowered.compile()
