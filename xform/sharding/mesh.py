"""Devices arranged as a mesh: accelerators, or one CPU split into virtual devices.

Axes have one order everywhere, outermost (slowest network) first, which is that of Llama 3
(arXiv:2407.21783): `dp` data, `pp` pipeline, `cp` context, `tp` tensor, and `ep` experts. They are
*Explicit*: an array that reaches `jax.shard_map` in another layout than `in_specs` says is an error
there, never a hidden transfer. `shardings` turns a tree of specs into the placement that such
arrays need, and `place` puts the host's arrays there.

Virtual CPU devices need care. While a device waits in a collective for the others, it holds a
thread of XLA's pool. With as many threads as cores, eight devices on two cores starve each other,
and after 40 seconds XLA aborts the process. `cpu_devices` makes the pool large enough, and `settle`
keeps one step in flight.
"""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import PyTree

AXES = ("dp", "pp", "cp", "tp", "ep")
"""The axes of a mesh, outermost first; `ep`, where there are experts, is the last."""

# A device may run several operations at once, each of which can hold a thread in a collective.
_THREADS_PER_DEVICE = 4
_MIN_THREADS = 32


def cpu_devices(n: int) -> None:
    """Splits the CPU into `n` virtual devices, before JAX starts its backend.

    Accelerators are left as they are, and a second call with the same `n` does nothing.

    Args:
      n: Number of CPU devices, at least 1.

    Raises:
      ValueError: `n` is less than 1.
      RuntimeError: JAX's backend already runs with other settings, which can't change any more.

    >>> cpu_devices(8)
    >>> len(jax.devices("cpu"))
    8
    """
    if n < 1:
        raise ValueError(f"`cpu_devices` needs n >= 1, found n={n}")
    threads = str(max(_MIN_THREADS, _THREADS_PER_DEVICE * n))
    # XLA reads the size of its pool as the backend starts, from the first of these that is set.
    pool = {"PJRT_NPROC": threads, "NPROC": threads}
    if jax.config.jax_num_cpu_devices == n and pool.items() <= os.environ.items():
        return
    try:
        # JAX refuses a new value once the backend runs; 0 is always new.
        jax.config.update("jax_num_cpu_devices", 0)
    except RuntimeError:
        raise RuntimeError(
            f"`cpu_devices({n})` came too late: JAX's backend already runs, with CPU devices: "
            f"{jax.device_count('cpu')}, NPROC: {os.environ.get('NPROC', 'unset')}; needed are "
            f"{n} and {threads}. Call it right after the imports, before `jax.devices()` and "
            "before any array is made."
        ) from None
    os.environ.update(pool)
    jax.config.update("jax_num_cpu_devices", n)


def settle[T](tree: T) -> T:
    """Returns `tree`; on CPU only once its arrays are computed.

    Every loop over virtual CPU devices passes its step's results through this, so that one step
    is in flight: with many queued, their collectives take each other's threads. On accelerators
    it does nothing, and dispatch stays asynchronous.

    Args:
      tree: Any pytree, usually what a jitted step returned.

    Returns:
      The same tree.

    >>> step = jax.jit(lambda x: x + 1)
    >>> x = settle(step(1.0))
    """
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    jax.block_until_ready([x for x in arrays if any(d.platform == "cpu" for d in x.devices())])
    return tree


def make_mesh(
    *,
    dp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    tp: int | None = None,
    ep: int | None = None,
    devices: Sequence | None = None,
) -> Mesh:
    """Returns a mesh of the axes that are given a size, in the order of `AXES`.

    Args:
      dp: Devices along the data axis. None leaves an axis out; 1 keeps it, so that rules can
        name it.
      pp: Devices along the pipeline axis.
      cp: Devices along the context axis.
      tp: Devices along the tensor axis, which are neighbours.
      ep: Devices along the expert axis.
      devices: The devices, all of which are used; `jax.devices()` by default.

    Raises:
      ValueError: A size is below 1, the sizes don't multiply to the number of devices, or there
        is none.

    >>> make_mesh(dp=1, tp=1, devices=jax.devices()[:1]).axis_names
    ('dp', 'tp')
    """
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError(
            "`make_mesh` found devices=[]: leave it out to take all, or name at least one"
        )
    given = zip(AXES, (dp, pp, cp, tp, ep), strict=True)
    sizes = {axis: size for axis, size in given if size is not None}
    if not sizes or min(sizes.values()) < 1:
        raise ValueError(
            f"`make_mesh` needs at least one axis, and sizes of at least 1; found {_shape(sizes)}"
        )
    if (needed := math.prod(sizes.values())) != len(devices):
        raise ValueError(
            f"`make_mesh` found {_shape(sizes)}, which takes {needed} devices, but there are "
            f"{len(devices)} ({devices[0].platform}). Choose sizes whose product is "
            f"{len(devices)}, or pass `devices=` with {needed} of them; virtual CPU devices are "
            f"made by `xform.sharding.cpu_devices({needed})` before JAX starts."
        )
    explicit = (AxisType.Explicit,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), explicit, devices=devices)


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Returns the `NamedSharding`s on `mesh` for a tree of `PartitionSpec`s.

    Args:
      mesh: The mesh.
      specs: A tree of specs, for example the one given to `jax.shard_map`.

    Returns:
      A tree of the same structure, for `jax.device_put` and `jax.jit`'s `out_shardings`.

    >>> mesh = make_mesh(dp=1, devices=jax.devices()[:1])
    >>> x = jax.device_put(jax.numpy.ones(4), shardings(mesh, jax.P("dp")))
    >>> jax.typeof(x)
    ShapedArray(float32[4@dp])
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns arrays of the host as arrays of the mesh, of which each process gives its own parts.

    Every process has the whole tree, or at least what its devices need of it: no process asks
    another, and none sends.

    Args:
      tree: NumPy arrays, or what can be indexed as they are.
      shardings: Where each goes; one for all is enough.

    >>> mesh = make_mesh(dp=1, devices=jax.devices()[:1])
    >>> place(np.arange(3), shardings(mesh, jax.P("dp")))
    Array([0, 1, 2], dtype=int32)
    """

    def put(at: NamedSharding, x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, at, lambda index: x[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(partial(put, shardings), tree)
    return jax.tree.map(put, shardings, tree)


def check_divisible(mesh: Mesh, **by_axis: Mapping[str, int]) -> None:
    """Raises unless every named quantity is a multiple of the mesh axis that splits it.

    Args:
      mesh: The mesh.
      **by_axis: For each axis, the quantities that it splits, under the user's names for them.

    Raises:
      ValueError: Lists every quantity that doesn't divide, and the sizes that each axis may have;
        or every axis that the mesh doesn't have.

    >>> mesh = make_mesh(dp=1, tp=1, devices=jax.devices()[:1])
    >>> check_divisible(mesh, dp={"batch": 8}, tp={"heads": 4, "kv_heads": 2})
    """
    if unknown := [axis for axis in by_axis if axis not in mesh.shape]:
        raise ValueError(
            f"`check_divisible` was asked about {', '.join(unknown)}, and the mesh has "
            f"{_shape(mesh.shape)}: name its axes, or give `make_mesh` a size for the missing ones."
        )
    offenders = [
        f"{name}={size} is not a multiple of {axis}={mesh.shape[axis]}"
        for axis, sizes in by_axis.items()
        for name, size in sizes.items()
        if size % mesh.shape[axis]
    ]
    if offenders:
        allowed = [f"{axis} may be {_divisors(*sizes.values())}" for axis, sizes in by_axis.items()]
        raise ValueError(
            f"on the mesh {_shape(mesh.shape)}: {', '.join(offenders)}. Change these, or the mesh: "
            f"with the sizes given, {'; '.join(allowed)}."
        )


def _shape(sizes: Mapping[str, int]) -> str:
    return " × ".join(f"{axis}={size}" for axis, size in sizes.items()) or "no axis"


def _divisors(*sizes: int) -> str:
    common = math.gcd(*sizes)
    return " or ".join(str(d) for d in range(1, common + 1) if common % d == 0)
