"""`attention`: of queries, keys and values that a mesh axis splits along the sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import Float, PyTree

from xform._compat import varying_axes
from xform.lowering._contract import wide_of
from xform.primitives._attention_checks import check_arguments, check_mods, check_places
from xform.primitives._objects import Shape
from xform.primitives.attention import (
    Aux,
    _scaled,
    _with_sinks,
)
from xform.primitives.parts import Program
from xform.sharding._declare import declare
from xform.sharding._specs import is_bound
from xform.sharding.context._exchange import by_all_gather, by_ulysses
from xform.sharding.context._mods import Opens
from xform.sharding.context._plan import METHODS, Method, live_steps, plan
from xform.sharding.context._ring import ring
from xform.sharding.context.layouts import Layout, contiguous


def attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K V"],
    *,
    axis: str,
    method: Method | None = None,
    layout: Layout | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    scale: ArrayLike | None = None,
    sinks: Float[Array, " H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    aux: Sequence[str] = (),
    deterministic: bool = True,
    implementation: str | None = None,
) -> Any:
    """Returns this device's part of attention over a sequence that a mesh axis splits.

    To be called inside `jax.shard_map`. It is `flex_attention` of the whole sequence: mods are
    called with positions in it, whichever device has them, and read arrays of the whole sequence,
    which `whole` makes of split ones. So a mask or score of one device serves unchanged. As there,
    `b` and `h` count the entries and heads that the device was given (of a batch or of heads that
    other axes split, their own).

    All methods give the same numbers, but for rounding, and exact gradients of q, k, v, sinks and
    of all that `score_mod` reads. Derivatives are those of reverse mode, of any order. A score that
    looks a difference of positions up in a table is a kernel on a GPU where indices differ as
    positions do: under "ulysses", and in the layout that is used by default; else it is blockwise.

    Args:
      q: the queries of this device's positions.
      k, v: keys and values of the same positions.
      axis: the mesh axis.
      method: "ring" (keys and values go around, hidden by the attention to those that are there),
        "all_gather" (every device gets all keys and values), "ulysses" (every device gets all
        positions of some heads), or None to choose by what they cost: see `which`.
      layout: which device has which positions; by default the i-th part is device i's.
      score_mod, mask_mod, scale, sinks, deterministic, implementation: as of `flex_attention`.
      dropout_rate, dropout_key: a rate of 0; there is no dropout of weights here.
      aux: names of further results: "lse".

    Returns:
      The output in the dtype of q; with a non-empty `aux`, `(output, Aux)`.

    Raises:
      ValueError: on what doesn't fit, all that is wrong at once: arrays that are not split over the
        axis, a layout of other sizes, mods of arrays that are not of the whole sequence.
      NotImplementedError: "ulysses" was asked for, and the axis doesn't divide the heads; or
        dropout, whose bits are those of a weight's place on a device, not in the sequence.

    >>> from xform import causal, documents
    >>> import jax.numpy as jnp
    >>> from xform.sharding import context, make_mesh, shardings
    >>> mesh = make_mesh(cp=4, devices=jax.devices()[:4])
    >>> layout = context.zigzag(64, 4)
    >>> x = layout.split(jnp.ones((1, 64, 2, 8)))
    >>> ids = layout.split(jnp.arange(64)[None] // 20)
    >>> def f(x, ids):
    ...     mask = causal() & documents(context.whole(ids, axis="cp", layout=layout))
    ...     return context.attention(x, x, x, axis="cp", layout=layout, mask_mod=mask)
    >>> specs = dict(in_specs=jax.P(None, "cp"), out_specs=jax.P(None, "cp"))
    >>> args = jax.device_put((x, ids), shardings(mesh, jax.P(None, "cp")))
    >>> layout.join(jax.shard_map(f, mesh=mesh, **specs)(*args)).shape
    (1, 64, 2, 8)
    """
    del dropout_key
    aux = (aux,) if isinstance(aux, str) else tuple(aux)
    if dropout_rate:
        raise NotImplementedError(_NO_DROPOUT.format(rate=dropout_rate))
    layout = _checked(q, k, v, sinks, axis, method, layout, aux, implementation)
    n, length = layout.devices, layout.length
    shape = Shape(q.shape[0], q.shape[2], length, length)
    check_mods(score_mod, mask_mod, scale, shape, "context.attention")
    check_places(q, score_mod, mask_mod, shape, "context.attention")
    if method is None:
        method = plan(q, k, v, n, layout=layout, mask_mod=mask_mod, device=None).method
    options = {"deterministic": deterministic, "implementation": implementation}
    with declare(f"context.{method}", axis, hidden=method == "ring"):
        if method == "ring":
            out, lse = _by_ring(q, k, v, layout, score_mod, mask_mod, scale, axis, options)
            if sinks is not None:
                out, lse = _with_sinks(out, lse, sinks)
        else:
            run = by_all_gather if method == "all_gather" else by_ulysses
            options |= {"scale": scale, "sinks": sinks}
            out, lse = run(q, k, v, layout, score_mod, mask_mod, axis, options)
    out = out.astype(q.dtype)
    return (out, Aux(lse=lse)) if aux else out


_NO_DROPOUT = (
    "context.attention: `dropout_rate={rate}`, and kernels drop a weight by its place among the "
    "queries and keys of a device, so other weights on every mesh: take a rate of 0, and drop what "
    "attention returns by `xform.sharding.random.dropout`, which is the same on every mesh."
)


def _by_ring(q, k, v, layout: Layout, score_mod, mask_mod, scale, axis: str, options: dict):
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    if isinstance(scale, jax.Array):
        score_mod, scale = _with_scale(score_mod, scale), 1.0
    opens = Opens.of(score_mod, mask_mod, wide_of(q.dtype))
    steps = live_steps(mask_mod, layout, q.shape[0], q.shape[2])
    return ring(q, k, v, layout, Program(float(scale), **options), opens, axis, steps)


def _with_scale(score_mod: Callable | None, scale: Array) -> Callable:
    return lambda score, *index: _scaled(score_mod, scale, score, *index)


def whole[T: PyTree](tree: T, *, axis: str, layout: Layout | None = None, dim: int = 1) -> T:
    """Returns arrays of the whole sequence, in the order of positions, from each device's part.

    To be called inside `jax.shard_map`, for what mods read: document ids, biases of a position.
    Gradients through it are summed over the axis and dealt out.

    Args:
      tree: this device's parts of some arrays.
      axis: the mesh axis that splits them.
      layout: where they lie; by default the i-th part is device i's.
      dim: their dimension of positions.

    >>> import jax.numpy as jnp
    >>> from xform.sharding import context, make_mesh, shardings
    >>> mesh = make_mesh(cp=2, devices=jax.devices()[:2])
    >>> layout = context.zigzag(8, 2)
    >>> f = lambda x: context.whole(x, axis="cp", layout=layout, dim=0)[None]
    >>> f = jax.shard_map(f, mesh=mesh, in_specs=jax.P("cp"), out_specs=jax.P("cp"))
    >>> x = layout.split(jnp.arange(8), dim=0)
    >>> f(jax.device_put(x, shardings(mesh, jax.P("cp")))).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]
    """

    def gathered(x):
        x = lax.all_gather(x, axis, axis=dim, tiled=True)
        return x if layout is None else layout.join(x, dim)

    with declare("context.whole", axis):
        return jax.tree.map(gathered, tree)


def _checked(q, k, v, sinks, axis: str, method, layout, aux, implementation) -> Layout:
    """The layout, once it is known that arguments fit."""
    check_arguments(q, k, v, sinks, 0.0, None, (), implementation, caller="context.attention")
    if not is_bound(axis):
        raise ValueError(
            f"context.attention: there is no {axis!r} among the axes of a `jax.shard_map` around "
            "this call: call it inside of one, over a mesh with that axis."
        )
    n, wrong = lax.axis_size(axis), []
    if missing := [
        name for name, x in (("q", q), ("k", k), ("v", v)) if axis not in varying_axes(x)
    ]:
        wrong.append(
            f"{', '.join(f'`{name}`' for name in missing)} the same on all devices of {axis!r}: "
            f"split the sequence over it (`in_specs` with {axis!r} along dimension 1)"
        )
    if k.shape[1] != q.shape[1]:
        wrong.append(
            f"{q.shape[1]} queries and {k.shape[1]} keys on a device: needed are equally many, of "
            "the same positions"
        )
    layout = contiguous(q.shape[1] * n, n) if layout is None else layout
    if (layout.devices, layout.length) != (n, q.shape[1] * n):
        wrong.append(
            f"`layout` is of {layout.length} positions on {layout.devices} devices; needed are "
            f"{q.shape[1] * n} on {axis}={n}"
        )
    if unknown := [name for name in aux if name != "lse"]:
        wrong.append(f"`aux` asks for {unknown}; there is ['lse']")
    if implementation == "reference":
        wrong.append('`implementation="reference"` is dense, and of one device: compare with that')
    if method not in (None, *METHODS):
        wrong.append(f"`method` is {method!r}; there is None, {', '.join(map(repr, METHODS))}")
    if wrong:
        raise ValueError(f"context.attention: {'; '.join(wrong)}.")
    if method == "ulysses" and q.shape[2] % n:
        raise NotImplementedError(
            f'context.attention: `method="ulysses"` deals out heads, and {axis}={n} does not '
            f"divide {q.shape[2]} query heads: take another method, or another mesh."
        )
    return layout
