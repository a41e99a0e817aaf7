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
        name = self.path if self.path == "loss" else f"the gradient of {self.path!r}"
        if not self.wrong:
            return f"{name} is right to {self.error:.1e}"
        if self.ratio == 0:
            return f"{name} is 0 where it should not be"
        whole = self.ratio and _whole(self.ratio)
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


def check_parity(
    loss: Callable[[PyTree, PyTree], Any],
    params: PyTree,
    batch: PyTree,
    mesh: Mesh,
    specs: tuple[PyTree, PyTree],
    *,
    reference: Callable[[PyTree, PyTree], Any] | None = None,
    gives_gradients: bool = False,
    rtol: float = 1e-8,
    strict: bool = True,
) -> Parity:
    """Compares the loss on a mesh and its gradients with those of one device.

    Floating-point parameters and batch are compared in float64.

    Args:
      loss: `loss(params, batch)`, as `jax.shard_map` runs it on each device: of a device's parts,
        the loss, the same on all devices.
      params: Whole parameters.
      batch: A whole batch.
      mesh: The mesh, of devices that are present.
      specs: How parameters and batch are split: two trees of `PartitionSpec`s, or parts of trees.
      reference: `reference(params, batch)`, the loss of one device, differentiable. By default
        `loss` itself, on a mesh of one device with the same axes.
      gives_gradients: Whether `loss` returns `(loss, gradients)` by itself; without, they are the
        derivative of the `shard_map`.
      rtol: How far a leaf may be off, relative to its largest number. A model that computes in
        float32 whatever it is given needs about 1e-4.
      strict: Whether to raise; without, the report says what is wrong.

    Raises:
      ParityError: A ValueError that lists every leaf that differs, by path; of one that is a whole
        multiple of the right one, the number, and the axes of that size.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> loss = lambda w, x: jax.lax.psum(jnp.sum((x @ w) ** 2), "dp")
    >>> specs = (jax.P(), jax.P("dp"))
    >>> print(check_parity(loss, jnp.ones((3, 2)), jnp.ones((8, 3)), mesh, specs))
    loss is right to 0.0e+00
    the gradient of '' is right to 0.0e+00
    """
    with jax.enable_x64(True):
        params, batch = jax.tree.map(_wide, (params, batch))
        found = _run(loss, params, batch, mesh, specs, gives_gradients)
        if reference is None:
            one = Mesh(
                mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim),
                mesh.axis_names,
                axis_types=mesh.axis_types,
            )
            right = _run(loss, params, batch, one, specs, gives_gradients)
        else:
            right = jax.jit(jax.value_and_grad(reference))(params, batch)
            right = jax.tree.map(np.asarray, right)
    report = compare(found, right, mesh.shape, rtol=rtol)
    if strict and report.wrong:
        raise ParityError(report)
    return report


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


def _run(
    loss: Callable, params: PyTree, batch: PyTree, mesh: Mesh, specs: Any, gives_gradients: bool
) -> tuple[Any, PyTree]:
    """Loss and gradients, as whole arrays of NumPy."""
    split = tuple(
        jax.tree.broadcast(spec, tree, is_leaf=lambda x: isinstance(x, jax.P))
        for spec, tree in zip(specs, (params, batch), strict=True)
    )
    out = (jax.P(), split[0]) if gives_gradients else jax.P()
    on_each = jax.shard_map(loss, mesh=mesh, in_specs=split, out_specs=out)
    f = jax.jit(on_each if gives_gradients else jax.value_and_grad(on_each))
    place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
    is_spec = lambda x: isinstance(x, jax.P)
    args = jax.tree.map(place, split, (params, batch), is_leaf=is_spec)
    return jax.tree.map(np.asarray, settle(f(*args)))


# ---- comparing -----------------------------------------------------------------------------------


def _size(x: np.ndarray) -> float:
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
        if round(value) >= 1 and abs(value - round(value)) < 1e-4 * value:
            if round(value) > 1 or ratio < 0:
                return up, round(value)
    return None


def _of_size(mesh: Mapping[str, int], n: int) -> Iterator[tuple[str, ...]]:
    """The smallest sets of axes with so many devices."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(axes) + 1):
        found = [c for c in combinations(axes, count) if prod(mesh[a] for a in c) == n]
        if found:
            yield from found
            return
