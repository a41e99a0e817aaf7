"""Products that hide their own communication: asynchronous tensor parallelism.

    gather_matmul      all_gather(x) @ w                 column parallel, sequence in, columns out
    matmul_scatter     reduce_scatter(x @ w)             row parallel, rows in, sequence out

Both go around the ring of an axis in n steps. `gather_matmul` multiplies the chunk that it holds
while the chunk moves on to the next device. `matmul_scatter` sends on an accumulator while it
multiplies the chunk that is added to it when it arrives. So every one of the n - 1 messages has a
product of its size to hide behind, where `all_gather` and `psum_scatter` have none.

Derivation of the backward rules, with `x_j` the chunk of device j and `W` this device's part:

    Y = [x_0 W; …; x_{n-1} W]          dx_i = Σ over devices of dY_i Wᵀ = matmul_scatter(dY, Wᵀ)
                                       dW = [x_0; …]ᵀ dY: the chunks go around once more, with
                                       the sums of dx
    z_i = Σ over devices of h_i W      dh = [dz_0 Wᵀ; …] = gather_matmul(dz, Wᵀ)
                                       dW = hᵀ [dz_0; …], of the chunks that went around for dh

Written out rather than derived, since the derivative of a ring is a ring with its products in
another order, half of whose messages have nothing to hide behind. The gradient of a weight is one
product, once all chunks are there: added up chunk by chunk, a sum as large as the weight is read
and written n times, in float32. So the backward pass of a product holds all rows for a while, of x
or of dz, as it does with plain collectives; from the forward pass nothing gathered is kept.
Derivatives are those of reverse mode, of any order; JAX refuses forward mode (`jax.jvp`).

**Barriers.** XLA's dot merger puts products that share an operand back together, and messages then
have nothing to hide behind; from four devices on it does so to a ring as one would write it. An
`optimization_barrier` on a chunk that arrives and the product of the one before makes each product
depend on the last, and costs nothing when the program runs.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xform._compat import varying_axes
from xform.primitives._rules import join_axes
from xform.sharding._declare import declare
from xform.sharding._specs import is_bound

barrier = lax.optimization_barrier


def gather_matmul(
    x: Float[Array, "... M"],
    weights: Sequence[Float[Array, "M _"]],
    axis: str,
    *,
    dim: int = -2,
) -> tuple[Float[Array, "..."], ...]:
    """Returns `all_gather(x) @ w` for each weight, from one trip around the ring.

    To be called inside `jax.shard_map`.

    Args:
      x: This device's chunk of the rows.
      weights: This device's columns of each matrix.
      axis: The mesh axis that splits the rows of `x` and the columns of the weights.
      dim: The dimension of `x` that is split; not the last.

    Returns:
      For each weight, the product for the rows of all devices, in their order.

    Raises:
      ValueError: `x` is not split over `axis`, `dim` is the last dimension, or weights have other
        rows than `x` has columns.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(tp=4, devices=jax.devices()[:4])
    >>> x = jax.device_put(jnp.ones((8, 3)), shardings(mesh, jax.P("tp")))
    >>> w = jax.device_put(jnp.ones((3, 4)), shardings(mesh, jax.P(None, "tp")))
    >>> product = lambda x, w: gather_matmul(x, [w], "tp")[0]
    >>> specs = dict(in_specs=(jax.P("tp"), jax.P(None, "tp")), out_specs=jax.P(None, "tp"))
    >>> jax.shard_map(product, mesh=mesh, **specs)(x, w).shape
    (8, 4)
    """
    dim = checked("gather_matmul", x, weights, axis, dim)
    with declare("ring.gather_matmul", axis, hidden=True):
        x, *weights = join_axes([x, *weights])
        return _gather_matmul(axis, dim, x, tuple(weights))


def matmul_scatter(
    x: Float[Array, "... F"], weight: Float[Array, "F M"], axis: str, *, dim: int = -2
) -> Float[Array, "... M"]:
    """Returns this device's rows of the sum over devices of `x @ weight`.

    To be called inside `jax.shard_map`.

    Args:
      x: All rows, of this device's columns.
      weight: This device's rows of the matrix.
      axis: The mesh axis that splits the columns of `x` and the rows of `weight`.
      dim: The dimension of `x` whose rows are dealt out, in order; not the last.

    Raises:
      ValueError: `x` does not vary over `axis`, `dim` is the last dimension, its size is no
        multiple of the axis, or `weight` has other rows than `x` has columns.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(tp=4, devices=jax.devices()[:4])
    >>> x = jax.device_put(jnp.ones((8, 4)), shardings(mesh, jax.P(None, "tp")))
    >>> w = jax.device_put(jnp.ones((4, 3)), shardings(mesh, jax.P("tp")))
    >>> specs = dict(in_specs=(jax.P(None, "tp"), jax.P("tp")), out_specs=jax.P("tp"))
    >>> jax.shard_map(lambda x, w: matmul_scatter(x, w, "tp"), mesh=mesh, **specs)(x, w).shape
    (8, 3)
    """
    dim = checked("matmul_scatter", x, [weight], axis, dim)
    if x.shape[dim] % lax.axis_size(axis):
        raise ValueError(
            f"`matmul_scatter` deals out {x.shape[dim]} rows (dimension {dim} of {x.shape}) over "
            f"{axis}={lax.axis_size(axis)}; needed is a multiple: pad the rows, or change the mesh."
        )
    with declare("ring.matmul_scatter", axis, hidden=True):
        return _matmul_scatter(axis, dim, *join_axes([x, weight]))


# ---- the ring ------------------------------------------------------------------------------------


def _around[C](axis: str, chunk: Array, work: Callable[[C, Array, Array], C], carry: C) -> C:
    """Has `carry = work(carry, j, x_j)` for every device j, while x_j moves on to the next."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    for step in range(n):
        source = (me - step) % n
        if step == n - 1:
            return work(carry, source, chunk)
        chunk, sent = barrier((chunk, chunk))
        arriving = _send(sent, axis)
        chunk, carry = barrier((arriving, work(carry, source, chunk)))
    raise AssertionError(f"an axis of size {n}")


def _scatter(axis: str, part: Callable[[Array], Array]) -> Array:
    """The sum over devices of `part(i)` for this device i, which sends on sums as it adds."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    total = part((me - 1) % n)
    for step in range(1, n):
        # What is multiplied waits for the last product by way of its place.
        total, place = barrier((total, (me - 1 - step) % n))
        arriving = _send(total, axis)
        arriving, more = barrier((arriving, part(place)))
        total = arriving + more
    return total


def _scatter_and_gather(
    axis: str, dim: int, part: Callable[[Array], Array], chunk: Array
) -> tuple[Array, Array]:
    """`_scatter` of `part`, and the chunks of all devices, which move on with the sums.

    A step has one product, so it has one message: a sum and a chunk on their way at a time are one
    array. The first step has no sum to send yet, and the last no chunk.
    """
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    chunks, total = _room(axis, dim, chunk, chunk.shape[-1], chunk.dtype), None
    for step in range(n):
        moving, place = [], (me - 1 - step) % n
        if step < n - 1:
            chunk, sent = barrier((chunk, chunk))
            moving.append(sent)
        if step > 0:
            total, place = barrier((total, place))
            moving.append(total)
        arriving = _send_as_one(moving, axis)
        arriving, more = barrier((arriving, part(place)))
        chunks = _put(chunks, chunk, (me - step) % n, dim)
        total = more if step == 0 else arriving[-1] + more
        chunk = arriving[0] if step < n - 1 else chunk
    assert total is not None
    return total, chunks


def _send(x: Array, axis: str) -> Array:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def _send_as_one(xs: Sequence[Array], axis: str) -> list[Array]:
    """Sends arrays of one shape by one message."""
    if len(xs) < 2:
        return [_send(x, axis) for x in xs]
    return [sent.astype(x.dtype) for x, sent in zip(xs, _send(jnp.stack(xs), axis), strict=True)]


# ---- products and their derivatives --------------------------------------------------------------


def _gathered(axis: str, dim: int, x: Array, weights: tuple) -> tuple:
    def work(outs, j, chunk):
        return tuple(_put(out, chunk @ w, j, dim) for out, w in zip(outs, weights, strict=True))

    outs = [_room(axis, dim, x, w.shape[1], jnp.result_type(x, w)) for w in weights]
    return _around(axis, x, work, tuple(outs))


def _scattered(axis: str, dim: int, x: Array, weight: Array) -> Array:
    return _scatter(axis, _parts(axis, dim, (x,), (weight,)))


def _parts(axis: str, dim: int, xs: tuple, weights: tuple) -> Callable[[Array], Array]:
    """Of a device, its rows of the sum of products."""
    rows = xs[0].shape[dim] // lax.axis_size(axis)

    def part(j):
        chunks = [lax.dynamic_slice_in_dim(x, j * rows, rows, dim) for x in xs]
        return reduce(add, (c @ w for c, w in zip(chunks, weights, strict=True)))

    return part


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather_matmul(axis: str, dim: int, x: Array, weights: tuple) -> tuple:
    return _gathered(axis, dim, x, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul_scatter(axis: str, dim: int, x: Array, weight: Array) -> Array:
    return _scattered(axis, dim, x, weight)


def gather_matmul_bwd(axis: str, dim: int, saved: tuple, dys: tuple) -> tuple:
    """The derivative of `gather_matmul`, however that was computed.

    >>> from xform.sharding import make_mesh, shardings
    >>> mesh = make_mesh(tp=2, devices=jax.devices()[:2])
    >>> rows, columns = jax.P("tp"), jax.P(None, "tp")
    >>> back = lambda x, w, dy: gather_matmul_bwd("tp", 0, (x, (w,)), (dy,))
    >>> specs = dict(in_specs=(rows, columns, columns), out_specs=(rows, (columns,)))
    >>> args = jnp.ones((8, 3)), jnp.ones((3, 4)), jnp.ones((8, 4))
    >>> args = jax.device_put(args, shardings(mesh, (rows, columns, columns)))
    >>> dx, (dw,) = jax.shard_map(back, mesh=mesh, **specs)(*args)
    >>> dx.shape, dw.shape
    ((8, 3), (3, 4))
    """
    x, weights = saved
    part = _parts(axis, dim, dys, tuple(w.T for w in weights))
    dx, xs = _scatter_and_gather(axis, dim, part, x)
    dws = (_outer(xs, dy).astype(w.dtype) for dy, w in zip(dys, weights, strict=True))
    return dx.astype(x.dtype), tuple(dws)


def _matmul_scatter_bwd(axis: str, dim: int, saved: tuple, dz: Array) -> tuple:
    x, weight = saved
    # A cotangent that is there from the start must not take the products that forward messages
    # hide behind: it waits for what the forward pass multiplied.
    x, dz = barrier((x, dz))

    def work(carry, j, chunk):
        dx, dzs = carry
        return _put(dx, chunk @ weight.T, j, dim), _put(dzs, chunk, j, dim)

    room = partial(_room, axis, dim, dz)
    carry = room(x.shape[-1], x.dtype), room(dz.shape[-1], dz.dtype)
    dx, dzs = _around(axis, dz, work, carry)
    return dx, _outer(x, dzs).astype(weight.dtype)


_gather_matmul.defvjp(lambda *args: (_gathered(*args), args[2:]), gather_matmul_bwd)
_matmul_scatter.defvjp(lambda a, d, x, w: (_scattered(a, d, x, w), (x, w)), _matmul_scatter_bwd)


def _outer(x: Array, dy: Array) -> Array:
    """`xᵀ dy`, summed over all leading dimensions; a product adds up in at least float32."""
    rows = tuple(range(x.ndim - 1))
    kind = jnp.result_type(x, dy)
    return lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=kind)


def _room(axis: str, dim: int, chunk: Array, columns: int, dtype: jnp.dtype) -> Array:
    """Room for the rows of all devices, which varies over the axes that a chunk varies over."""
    shape = [*chunk.shape[:-1], columns]
    shape[dim] *= lax.axis_size(axis)
    return join_axes([lax.empty(tuple(shape), dtype), chunk])[0]


def _put(whole: Array, rows: Array, j: Array, dim: int) -> Array:
    """The rows of device j, put where they belong."""
    rows = rows.astype(whole.dtype)
    return lax.dynamic_update_slice_in_dim(whole, rows, j * rows.shape[dim], dim)


# ---- what is refused -----------------------------------------------------------------------------

# openxla/xla#19555: copies between GPUs of one process overtake what they wait for.
_WRONG_RESULTS = "--xla_gpu_use_memcpy_local_p2p"


def checked(name: str, x: Array, weights: Sequence[Array], axis: str, dim: int) -> int:
    """Returns `dim` counted from the front, once it is known that arguments fit.

    >>> x = jnp.ones((8, 3))
    >>> checked("gather_matmul", x, [], "tp", -1)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
        ...
    ValueError: `gather_matmul`: there is no 'tp' among the axes of a `jax.shard_map` ...
    """
    wrong = []
    if not is_bound(axis):
        wrong.append(f"there is no {axis!r} among the axes of a `jax.shard_map` around this call")
    elif axis not in varying_axes(x):
        wrong.append(
            f"`x` is the same on all devices of {axis!r}; it varies over "
            f"{sorted(varying_axes(x)) or 'no axis'}: split it over {axis!r} first"
        )
    if not -x.ndim <= dim < x.ndim or dim % x.ndim == x.ndim - 1:
        wrong.append(f"`dim` is {dim} of {x.shape}; needed is a dimension of rows, {-x.ndim} to -2")
    shapes = [jnp.shape(w) for w in weights]
    if any(len(shape) != 2 or shape[0] != x.shape[-1] for shape in shapes):
        wrong.append(
            f"weights are of shapes {shapes}; needed is a list of matrices of {x.shape[-1]} rows, "
            f"as `x` {x.shape} has columns"
        )
    flags = os.environ.get("XLA_FLAGS", "").split()
    if bad := [f for f in flags if f.startswith(_WRONG_RESULTS) and not f.endswith("=false")]:
        wrong.append(f"XLA_FLAGS has {bad[0]}, with which messages give wrong numbers: remove it")
    if wrong:
        raise ValueError(f"`{name}`: {'; '.join(wrong)}.")
    return dim % x.ndim
