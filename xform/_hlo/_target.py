"""Programs lowered for devices that need not be present.

XLA compiles for an accelerator that the host lacks from a description of it, a *target config*
(`xform/_targets/`), and the accelerator's compiler (the dependency group `h200`). The result can't
run; all else that a compiled program can tell, it tells.
"""

import warnings
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.stages import Compiled, Lowered, Traced

from xform._compat import no_compilation_cache, register_plugin, target_topology
from xform.jaxpr import walk
from xform.jaxpr._trace import jitted_call

# The platform of each target, and the file that describes it.
TARGETS = {"H200": ("cuda", "h200.txtpb")}


def target_mesh(target: str, axes: Mapping[str, int], axis_types: tuple | None = None) -> Mesh:
    """Returns a mesh of devices that can be compiled for, but not run on.

    Args:
      target: A device of `TARGETS`, such as "H200".
      axes: Name and size of each mesh axis, outermost first.
      axis_types: Of each axis; by default all are explicit.

    Raises:
      ValueError: The target is not known.
      RuntimeError: Its compiler is not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"`target` may be {' or '.join(map(repr, TARGETS))}; found {target!r}")
    platform, file = TARGETS[target]
    config = files("xform").joinpath("_targets", file).read_text()
    register_plugin(platform)
    try:
        topology = target_topology(platform, config, tuple(axes.values()))
    except Exception as e:
        raise RuntimeError(
            f"compiling for {target} needs its compiler: install the dependency group `h200` "
            f"(`uv sync --group h200`); found: {e}"
        ) from e
    types = axis_types or (AxisType.Explicit,) * len(axes)
    return Mesh(topology.reshape(tuple(axes.values())), tuple(axes), axis_types=types)


def lower_for(target: str, f: Callable, *args: Any, **kwargs: Any) -> Lowered:
    """Returns `f` lowered for devices of `target`, as `jax.jit(f).lower(*args)` does.

    The program is one for as many devices as the mesh has on which `f` and its arguments are
    written: a mesh of devices that are present, or an abstract one, stands for the same mesh of the
    target's devices. Without any mesh it is a program for one device.

    Args:
      target: A device of `TARGETS`.
      f: The function, jitted or not.
      *args: Its arguments, of which only shapes, dtypes and shardings count.
      **kwargs: Likewise.

    Raises:
      ValueError: The target is not known, or the meshes of the program differ in size.
      RuntimeError: Its compiler is not installed.
    """
    if target not in TARGETS:
        target_mesh(target, {})
    jitted, args, kwargs = jitted_call(f, args, kwargs)
    shapes = jax.tree.map(_shape, (args, kwargs))
    if any(x.sharding for x in _arrays(shapes)) and not _foreign(shapes):
        return jitted.lower(*shapes[0], **shapes[1])  # it is written for the target already
    traced = jitted.trace(*shapes[0], **shapes[1])
    mesh = mesh_of(traced, shapes)
    if mesh is None:
        # Automatic: of an explicit axis each operation would have to say how it is split.
        here = NamedSharding(target_mesh(target, {"one": 1}, (AxisType.Auto,)), jax.P())
        placed = jax.tree.map(lambda x: _placed(x, here), shapes, is_leaf=_is_array)
        return jitted.lower(*placed[0], **placed[1])
    there = target_mesh(target, dict(mesh.shape), mesh.axis_types)
    return _moved(jitted, traced, shapes, there, TARGETS[target][0])


def compile_for(target: str, f: Callable, *args: Any, **kwargs: Any) -> Compiled:
    """Returns `f` compiled for devices of `target`: `lower_for(...)`, compiled."""
    lowered = lower_for(target, f, *args, **kwargs)
    with no_compilation_cache():  # which can't read such programs back
        return lowered.compile()


def mesh_of(traced: Traced, args: Any) -> Mesh | AbstractMesh | None:
    """Returns the mesh on which a program is written: of its arguments, or else inside of it.

    Raises:
      ValueError: There are several, of different sizes.
    """
    found: list[Mesh | AbstractMesh] = []
    for x in _arrays(args):
        if isinstance(getattr(x, "sharding", None), NamedSharding):
            found.append(x.sharding.mesh)
    for site in walk(traced.jaxpr):
        for value in (site.eqn.params.get("mesh"), site.eqn.params.get("sharding")):
            mesh = value.mesh if isinstance(value, NamedSharding) else value
            if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
                found.append(mesh)
    sizes = {mesh.size for mesh in found}
    if len(sizes) > 1:
        raise ValueError(f"a program is for one number of devices; found meshes of {sorted(sizes)}")
    return found[0] if found else None


def _moved(jitted, traced: Traced, shapes: Any, mesh: Mesh, platform: str) -> Lowered:
    """Lowers for a platform where the program is, and places the result on another mesh."""
    with warnings.catch_warnings():  # donation is asked for again below
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        exported = jax.export.export(jitted, platforms=[platform])(*shapes[0], **shapes[1])
    flat, tree = jax.tree.flatten(shapes, is_leaf=_is_array)
    donated = [i for i, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated]
    placed = [_placed(x, NamedSharding(mesh, _spec(x))) for x in flat]

    def call(*flat):
        args, kwargs = jax.tree.unflatten(tree, flat)
        return exported.call(*args, **kwargs)

    call.__name__ = exported.fun_name
    return jax.jit(call, donate_argnums=donated).lower(*placed)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _arrays(tree: Any) -> list:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_array) if _is_array(x)]


def _shape(x: Any) -> Any:
    """What counts of an argument; of one on a single device, where that is does not."""
    if not _is_array(x):
        return x
    sharding = getattr(x, "sharding", None)
    sharding = sharding if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _foreign(tree: Any) -> bool:
    """Whether an argument lies on devices of this host or on none at all."""
    here = set(jax.devices())
    meshes = [x.sharding.mesh for x in _arrays(tree) if x.sharding]
    return any(isinstance(m, AbstractMesh) or not here.isdisjoint(m.devices.flat) for m in meshes)


def _spec(x: Any) -> jax.P:
    return x.sharding.spec if getattr(x, "sharding", None) else jax.P()


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if _is_array(x) else x
