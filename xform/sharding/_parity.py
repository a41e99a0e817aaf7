"""A sharded loss and its gradients beside those of one device, leaf by leaf.

Sharding is wrong without a word: a loss that is right says nothing about gradients, and most faults
are a sum over devices that is left out, done twice, or taken for a mean. Each leaves its trace. A
sum done twice, or a cast to "varying" too many, multiplies a leaf by the size of an axis: its ratio
to the right one is a whole number. So a leaf whose ratio is one is named as such, with the axes
that have that size; and one whose ratio is the inverse of one.

Both are computed in float64, where numbers of a different order of summation agree to about 1e-13
and the smallest fault stands out.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from xform.sharding.mesh import settle

# A gradient that is 0 in exact arithmetic is noise of this size, beside the largest gradient.
_NOISE = 1e-13


class ParityError(ValueError):
    """Loss or gradients that are not those of one device.

    Attributes:
        report: what was found.
    """

    def __init__(self, report: "Parity"):
        super().__init__(report.complaint())
        self.report = report


@dataclass(frozen=True)
class Leaf:
    """The loss or one gradient.

    Attributes:
        path: "loss", or the path of a parameter, `"layers/query"`.
        error: the largest difference, relative to the largest number of the right one.
        ratio: what the right one is multiplied by, where all of it is multiplied alike; else None.
        axes: the sets of mesh axes whose devices are as many as the ratio, or its inverse.
        wrong: whether the error is more than was allowed.
    """

    path: str
    error: float
    ratio: float | None
    axes: tuple[tuple[str, ...], ...]
    wrong: bool

    @property
    def text(self) -> str:
        """It in words: `layers/query is 2 × the right one, the size of tp`."""
        of = f" of {self.path!r}" if self.path else ""
        name = self.path if self.path == "loss" else f"the gradient{of}"
        if not self.wrong:
            return f"{name} is right to {self.error:.1e}"
        if self.ratio == 0:
            return f"{name} is 0 where it should not be"
        whole = _whole(self.ratio) if self.ratio else None
        if not whole:
            return f"{name} is off by {self.error:.1e} of its largest number"
        up, n = whole
        times = f"{'-' if self.ratio and self.ratio < 0 else ''}{n if up else f'1/{n}'}"
        sizes = " or ".join(" × ".join(axes) for axes in self.axes)
        return f"{name} is {times} × the right one" + (f", the size of {sizes}" if sizes else "")


@dataclass(frozen=True)
class Parity:
    """What `check_parity` returns.

    Attributes:
        mesh: size of each axis.
        leaves: the loss, and each gradient.
        rtol: the error that was allowed.
    """

    mesh: Mapping[str, int]
    leaves: tuple[Leaf, ...]
    rtol: float

    @property
    def wrong(self) -> tuple[Leaf, ...]:
        """The leaves that differ."""
        return tuple(leaf for leaf in self.leaves if leaf.wrong)

    def complaint(self) -> str:
        """The leaves that differ, in words."""
        on = " × ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        lines = [f"  - {leaf.text}" for leaf in self.wrong]
        head = (
            f"on {on}, {len(lines)} of {len(self.leaves)} of loss and gradients are not those of "
            f"one device (allowed is {self.rtol:.0e}):"
        )
        return "\n".join([head, *lines])

    def __str__(self) -> str:
        return self.complaint() if self.wrong else "\n".join(leaf.text for leaf in self.leaves)


def parity(
    loss: Callable[[PyTree, PyTree], Any],
    mesh: Mesh,
    specs: tuple[PyTree, PyTree],
    *,
    reference: Callable[[PyTree, PyTree], Any] | None = None,
    gives_gradients: bool = False,
    rtol: float = 1e-8,
    strict: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[PyTree, PyTree], Parity]:
    """Returns a function of parameters and a batch that compares a mesh with one device.

    It computes the loss and all gradients on both, in float64, and raises unless every leaf is the
    same. Both are compiled once for all batches of one shape.

    Args:
      loss: `loss(params, batch)`, as `jax.shard_map` runs it on each device: of a device's parts,
        the loss, the same on all devices.
      mesh: The mesh, of devices that are present.
      specs: How parameters and batch are split: two trees of `PartitionSpec`s, or parts of trees.
      reference: `reference(params, batch)`, the loss of one device, differentiable. By default
        `loss` itself, on a mesh of one device with the same axes.
      gives_gradients: Whether `loss` returns `(loss, gradients)` by itself; without, they are the
        derivative of the `shard_map`.
      rtol: How far a leaf may be off, relative to its largest number. A model that computes in
        float32 whatever it is given needs about 1e-4.
      strict: Whether to raise; without, the report says what is wrong.
      compiler_options: Of `jax.jit`. Programs that run once are compiled in a fraction of the time
        with `{"xla_backend_optimization_level": 0}`.

    Raises:
      ParityError: From the result; a ValueError that lists every leaf that differs, by path, and of
        one that is a whole multiple of the right one, the number and the axes of that size.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> loss = lambda p, x: jax.lax.psum(jnp.sum((x @ p["w"]) ** 2), "dp")
    >>> print(parity(loss, mesh, (jax.P(), jax.P("dp")))({"w": jnp.ones((3, 2))}, jnp.ones((8, 3))))
    loss is right to 0.0e+00
    the gradient of 'w' is right to 0.0e+00
    """
    options = dict(compiler_options or {})
    on_mesh = _on(loss, mesh, specs, gives_gradients, options)
    if reference is None:
        one = mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim)
        alone = Mesh(one, mesh.axis_names, axis_types=mesh.axis_types)
        on_one = _on(loss, alone, specs, gives_gradients, options)
    else:
        on_one = _derived(reference, tuple(options.items()))

    def compared(params: PyTree, batch: PyTree) -> Parity:
        with jax.enable_x64(True):
            wide = jax.tree.map(_wide, (params, batch))
            found, right = (jax.device_get(settle(f(*wide))) for f in (on_mesh, on_one))
        report = compare(found, right, mesh.shape, rtol=rtol)
        if strict and report.wrong:
            raise ParityError(report)
        return report

    return compared


def compare(
    found: tuple[Any, PyTree], right: tuple[Any, PyTree], mesh: Mapping[str, int], *, rtol: float
) -> Parity:
    """Compares loss and gradients with the right ones: `(loss, gradients)` each, whole arrays.

    Args:
      found: Of the mesh.
      right: Of one device.
      mesh: Size of each axis.
      rtol: How far a leaf may be off, relative to its largest number.

    >>> right = (1.0, {"w": np.array([1.0, 2.0]), "v": np.ones(2)})
    >>> found = (1.0, {"w": np.array([4.0, 8.0]), "v": np.ones(2)})
    >>> print(compare(found, right, {"dp": 2, "tp": 4}, rtol=1e-8))
    on dp=2 × tp=4, 1 of 3 of loss and gradients are not those of one device (allowed is 1e-08):
      - the gradient of 'w' is 4 × the right one, the size of tp
    """
    named = lambda tree: [
        (jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(x, np.float64))
        for path, x in jax.tree.leaves_with_path(tree)
    ]
    gradients = list(zip(named(found[1]), named(right[1]), strict=True))
    noise = _NOISE * max((_size(y) for _, (_, y) in gradients), default=0.0)
    loss = _leaf("loss", np.asarray(found[0]), np.asarray(right[0]), mesh, rtol, 0.0)
    leaves = [_leaf(path, x, y, mesh, rtol, noise) for (path, x), (_, y) in gradients]
    return Parity(dict(mesh), (loss, *leaves), rtol)


def meshes(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yields every way in which so many devices make a mesh of these axes.

    >>> list(meshes(4, ("dp", "tp")))
    [{'dp': 1, 'tp': 4}, {'dp': 2, 'tp': 2}, {'dp': 4, 'tp': 1}]
    """
    first, *rest = axes
    if not rest:
        yield {first: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for more in meshes(devices // size, rest):
                yield {first: size, **more}


# ---- running -------------------------------------------------------------------------------------


def _wide(x: Any) -> Any:
    x = np.asarray(x) if not isinstance(x, jax.Array) else x
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def _on(
    loss: Callable, mesh: Mesh, specs: tuple, gives_gradients: bool, options: dict
) -> Callable[[PyTree, PyTree], tuple[Any, PyTree]]:
    """Loss and gradients of whole parameters and a whole batch, on a mesh."""
    out = (jax.P(), specs[0]) if gives_gradients else jax.P()
    on_each = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=tuple(specs), out_specs=out))
    f = on_each if gives_gradients else jax.value_and_grad(on_each)
    f = jax.jit(f, compiler_options=options)
    is_spec = lambda x: isinstance(x, jax.P)

    def run(*args):
        split = jax.tree.broadcast(tuple(specs), args, is_leaf=is_spec)
        place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
        args = jax.tree.map(place, split, args, is_leaf=is_spec)
        # A loss that was not summed is a type error here; in a derivative, JAX 0.11 and 0.12 fail
        # to say so ("Too few leaves").
        jax.eval_shape(on_each, *args)
        return f(*args)

    return run


@lru_cache(maxsize=16)
def _derived(reference: Callable, options: tuple) -> Callable:
    """The loss of one device and its gradients, compiled once for all meshes."""
    return jax.jit(jax.value_and_grad(reference), compiler_options=dict(options))


# ---- comparing -----------------------------------------------------------------------------------


def _size(x: Any) -> float:
    return float(np.abs(x).max(initial=0.0))


def _leaf(
    path: str, x: np.ndarray, y: np.ndarray, mesh: Mapping[str, int], rtol: float, noise: float
) -> Leaf:
    size = _size(y)
    difference = _size(x - y) if x.shape == y.shape else np.inf
    error = difference / size if size else float(difference > noise)
    wrong = not difference <= rtol * size + noise  # NaN is wrong
    ratio, axes = None, ()
    if wrong and size > noise and x.shape == y.shape:
        ratio = float(np.vdot(x, y) / np.vdot(y, y))
        alike = _size(x - ratio * y) <= max(rtol, 1e-6) * size * max(abs(ratio), 1)
        ratio = ratio if alike else None
        whole = _whole(ratio) if ratio else None
        axes = tuple(_of_size(mesh, whole[1])) if whole else ()
    return Leaf(path, error, 0.0 if ratio is not None and abs(ratio) < rtol else ratio, axes, wrong)


def _whole(ratio: float) -> tuple[bool, int] | None:
    """Whether a ratio is a whole number or the inverse of one, and which number that is."""
    for up, value in ((True, abs(ratio)), (False, 1 / abs(ratio))):
        n = round(value)
        if abs(value - n) < 1e-4 * value and (n > 1 or (n == 1 and ratio < 0)):
            return up, n
    return None


def _of_size(mesh: Mapping[str, int], n: int) -> Iterator[tuple[str, ...]]:
    """The smallest sets of axes with so many devices."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(axes) + 1):
        found = [c for c in combinations(axes, count) if prod(mesh[a] for a in c) == n]
        if found:
            yield from found
            return
