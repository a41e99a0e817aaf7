"""Loss and every gradient leaf of a sharded function against one device's, in float64."""

from collections.abc import Callable

import jax
import numpy as np

from tests.oracle import UNOPTIMISED
from xform.sharding import make_mesh, shardings


def mesh_of(**axes: int):
    """A mesh of the first so many of the eight virtual devices."""
    size = int(np.prod(list(axes.values())))
    return make_mesh(**axes, devices=jax.devices("cpu")[:size])


def run_on(mesh, f: Callable, specs, out_specs, args):
    """`f` in `shard_map` on arguments placed by their specs, unoptimised, in float64."""
    with jax.enable_x64(True):
        g = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs)
        placed = jax.device_put(jax.tree.map(wide, args), shardings(mesh, specs))
        return jax.device_get(jax.jit(g, compiler_options=UNOPTIMISED)(*placed))


def on_one(f: Callable, *args):
    """`f` on one device, unoptimised, in float64."""
    with jax.enable_x64(True):
        g = jax.jit(f, compiler_options=UNOPTIMISED)
        return jax.device_get(g(*jax.tree.map(wide, args)))


def wide(x) -> np.ndarray:
    """Floating-point arrays in float64, others as they are."""
    x = np.asarray(x)
    return x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x


def assert_equal(found, expected, rtol: float = 1e-12) -> None:
    """Asserts that every leaf is equal, relative to the largest number of the leaf."""
    found, tree = jax.tree.flatten_with_path(found)
    expected = tree.flatten_up_to(expected)
    for (path, x), y in zip(found, expected, strict=True):
        name, scale = jax.tree_util.keystr(path), np.abs(y).max()
        assert scale > 0, f"{name}: nothing to compare"
        assert np.shape(x) == np.shape(y), name
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale, err_msg=name)


def values(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Normal numbers by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}
