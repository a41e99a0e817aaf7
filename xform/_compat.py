"""Every contact with private JAX: one name a line, with the versions it serves and why.

The rest of the package imports from here and from public JAX alone, so that a new release of JAX is
met in one file.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import jax
import numpy as np

# 0.11, 0.12: whether it is in use is asked once a process, whatever the public option says later.
# 0.11, 0.12: holds the client of the service that processes meet at: barriers with a limit, texts.
# 0.11, 0.12: has the only way to register platforms and not start them.
# 0.11, 0.12: whether a `shard_map` checks over which axes values vary has no public name.
from jax._src import compilation_cache, config, distributed, xla_bridge

# 0.11, 0.12: public in `jax.extend`, which takes a tenth of a second: it loads all of Pallas.
from jax._src import source_info_util as source_info_util
from jax._src.core import DebugInfo as DebugInfo
from jax._src.core import Jaxpr as Jaxpr
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Primitive as Primitive
from jax._src.core import Var as Var

# 0.11, 0.12: gives mesh axes the names that collectives in a `shard_map` know them by.
from jax._src.core import extend_axis_env_nd
from jax._src.core import jaxpr_as_fun as jaxpr_as_fun
from jax._src.core import new_jaxpr_eqn as new_jaxpr_eqn

# 0.11, 0.12: runs a primitive eagerly by compiling it once, the `impl` of one that has a lowering.
from jax._src.dispatch import apply_primitive as apply_primitive

# 0.11, 0.12: primitives whose lowering is told its devices, as custom partitioning must be.
from jax._src.dispatch import prim_requires_devices_during_lowering

# 0.11, 0.12: public in `jax.extend`, which loads all of Pallas.
from jax._src.extend.random import define_prng_impl as define_prng_impl

# 0.11, 0.12: a program as the part that makes residuals and the linear part that reads them.
from jax._src.interpreters.ad import linearize_jaxpr as linearize_jaxpr

# 0.11, 0.12: has the program that a ragged product is lowered to, which no public name gives.
from jax._src.lax import lax

# 0.11, 0.12: what a derivative rule writes its output tree to; found in closures, without meaning.
from jax._src.linear_util import EqualStore as EqualStore
from jax._src.linear_util import Store as Store
from jax._src.linear_util import WrappedFun as WrappedFun

# 0.11, 0.12: `jax.extend.linear_util` has it under a private name only.
from jax._src.linear_util import wrap_init as wrap_init

# 0.11, 0.12: the public `summarize` gives only the innermost frame, which may be xform's own.
from jax._src.source_info_util import user_frames as user_frames

# 0.11, 0.12: a program of references as one of values.
from jax._src.state.discharge import discharge_state

# 0.11, 0.12: the static arguments of a derivative rule come wrapped in it.
from jax._src.util import Unhashable as Unhashable

# 0.11, 0.12: a cache that holds its first argument weakly and knows JAX's tracing context.
from jax._src.util import weakref_lru_cache as weakref_lru_cache
from jax.core import AbstractValue
from jax.sharding import AxisType, use_abstract_mesh

# The program of a ragged product off a TPU: one of all groups, masked.
dense_ragged_dot = lax._ragged_dot_general_impl

# 0.11, 0.12: where it says at length why an installed platform can't be used.
platform_log = xla_bridge.logger


def varying_axes(x) -> frozenset[str]:
    """Returns the mesh axes over which `x`, an array or its type, differs inside `shard_map`."""
    aval = x if isinstance(x, AbstractValue | jax.ShapeDtypeStruct) else jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # a token has none
    return axes.varying if axes is not None else frozenset()


@contextmanager
def inside_shard_map(eqn: JaxprEqn) -> Iterator[None]:
    """Where the body of a `shard_map` is traced: its axes have names, its mesh is manual."""
    mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    manual = mesh.abstract_mesh.update_axis_types(dict.fromkeys(axes, AxisType.Manual))
    named = axes | set(mesh.manual_axes)
    sizes = [(name, size) for name, size in mesh.shape.items() if name in named]
    with (
        extend_axis_env_nd(sizes),
        use_abstract_mesh(manual),
        config._check_vma(eqn.params["check_vma"]),
    ):
        yield


def scan_operands(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many constants and how many carried values a scan has, before what it scans."""
    consts, carry, _ = eqn.params["ft_in"].unpack()  # 0.11.2, 0.12: before, two numbers
    return len(list(consts)), len(list(carry))


def settings() -> Callable[[], AbstractContextManager[None]]:
    """Returns a context in which another thread has the settings of JAX that this one has now.

    Those are meant that a context manager sets, as `jax.enable_x64(True)`: a thread's own.
    """
    unset, states = config.config_ext.unset, config.config_states.values()  # 0.11, 0.12
    mine = [(state, value) for state in states if (value := state.get_local()) is not unset]

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            for state, value in mine:
                stack.enter_context(state(value))
            yield

    return same


def wait_at_barrier(name: str, seconds: float) -> None:
    """Returns when all processes are at the barrier of a name that none has had before; or raises.

    The error's text has the tasks that did not come, as 0.11 and 0.12 word it.
    """
    if (client := distributed.global_state.client) is not None:
        client.wait_at_barrier(name, int(1000 * seconds))


def put_up(key: str, text: str) -> None:
    """Leaves a text for all processes to read, under a key that none has had before."""
    if (client := distributed.global_state.client) is not None:
        client.key_value_set(key, text)


def texts_up(folder: str) -> dict[str, str]:
    """Returns the texts whose keys are in a folder, by key."""
    client = distributed.global_state.client
    return {} if client is None else dict(client.key_value_dir_get(folder))


def lower_with_devices(primitive: Primitive) -> None:
    """Has the lowering rule of `primitive` told which devices it lowers for."""
    prim_requires_devices_during_lowering.add(primitive)


def without_references(f: Callable) -> Callable:
    """Returns `f` of arrays with the references that it makes as values; 0.11 and 0.12.

    JAX does so of what it lowers, but for the parts of a `custom_partitioning`.
    """

    def run(*args):
        return jaxpr_as_fun(discharge_state(jax.make_jaxpr(f)(*args)))(*args)

    return run


def cuda_device(ctx) -> tuple[str | None, str | None]:
    """Returns compute capability and kind of the GPUs that a program is lowered for, if known."""
    backend = ctx.module_context.backend
    first = next(iter(backend.local_devices()), None) if backend is not None else None
    return getattr(first, "compute_capability", None), getattr(first, "device_kind", None)


def is_exported(ctx) -> bool:
    """Returns whether a program is lowered for `jax.export`; 0.11 and 0.12."""
    return ctx.module_context.lowering_parameters.for_export


def found_races() -> bool:
    """Returns whether the interpreter of GPU kernels saw a race; 0.12 raises where 0.11 prints."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compiles anew, and leaves nothing behind in the persistent cache."""
    known = compilation_cache._cache_checked, compilation_cache._cache_used
    compilation_cache._cache_checked, compilation_cache._cache_used = True, False
    try:
        yield
    finally:
        compilation_cache._cache_checked, compilation_cache._cache_used = known


def register_plugin(platform: str) -> None:
    """Makes an installed platform known, without starting it.

    CUDA's plugin refuses to be where a library is missing that nothing but a GPU needs, unless told
    that it will only compile. JAX asks once a process; where it was refused, it is asked again.
    """
    setting = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # 0.11, 0.12
    before = os.environ.setdefault(setting, "")
    os.environ[setting] = "1"
    try:
        xla_bridge._discover_and_register_pjrt_plugins()
        if platform not in xla_bridge._topology_factories:
            xla_bridge.discover_pjrt_plugins()
    finally:
        os.environ[setting] = before  # an empty one is off


def target_topology(platform: str, config: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns devices of a platform that need not be present, from XLA's description of one."""
    from jax.experimental import topologies  # 0.11, 0.12: slow to import, and seldom needed

    size = math.prod(shape)
    topology = topologies.get_topology_desc(
        platform=platform, target_config=config, topology=f"1x1x{size}"
    )
    return np.array(topology.devices)
