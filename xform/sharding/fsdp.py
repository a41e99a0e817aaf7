"""Fully sharded data parallelism: parameters, gradients and optimiser state split over data's axis.

Each device keeps 1/n of every parameter, and so of its gradient and of the optimiser's state, which
is made of them. A layer's parameters are gathered shortly before they are used and forgotten after;
its gradients are summed as they are dealt out again (ZeRO-3, Rajbhandari et al., arXiv:1910.02054).

`scan_layers` is a `lax.scan` over layers that does so `ahead` of time. Of L layers and k ahead:

    forward     layer i is computed while the parameters of layer i + k arrive
    backward    layer i is computed, forward once more and backward, while the parameters of layer
                i - k arrive and the gradients of layer i + 1 are summed and dealt out

Why by hand: a plain scan gathers at the top of its body, where nothing but that layer could hide
it, and a loop's passes don't overlap. Gathered parameters in the loop's carry are what its
derivative would keep of every layer. So the derivative is written out, that of reverse mode, of any
order: it keeps each layer's input and gathers again. With `keep` the gathered parameters of all
layers are kept instead, and nothing is gathered twice.

Parameters that arrive while others are used lie beside them, and a loop's carry is in one place: a
pass of one layer would copy all that arrived, each time. A pass of k + 1 layers (`unroll`) ends
where it began. So do the gradients of two layers.

Memory of one device, beside its own 1/n of everything: the inputs of L layers, and of the whole
parameters P of a layer `(k + 1) P`, or `L P` with `keep`; on the way back `2 P` of gradients.

Over microbatches, the sums are taken once for each of them. `late` puts them off until all are
done: one sum of each leaf per step, outside of all loops, for `L P` of gradients on each device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from xform._compat import varying_axes
from xform.sharding._declare import declare
from xform.sharding._specs import axes_by_dim, is_spec
from xform.sharding.data import per_device

type Layer = Callable[[PyTree, PyTree], PyTree]
"""`layer(x, params) -> x`, of gathered parameters."""


class Late(NamedTuple):
    """Layers whose gradients are summed later; see `late`.

    Attributes:
      parts: This device's parts.
      slots: Zeros where whole gradients arrive, which nothing computes; None to sum at once.
    """

    parts: PyTree
    slots: PyTree | None


def split(specs: PyTree, shapes: PyTree, mesh: Mesh, axis: str = "dp", *, skip: int = 0) -> PyTree:
    """Returns specs in which the axis splits every array once more.

    It splits the first dimension that it divides, within what splits that dimension already: the
    parts of a device's neighbours then lie side by side, and gathering them copies nothing twice.

    Args:
      specs: A tree of specs, which don't name `axis`.
      shapes: The arrays, or their shapes, in a tree of the same structure.
      mesh: The mesh.
      axis: The mesh axis over which devices have different rows.
      skip: How many dimensions in front are left alone, such as that of stacked layers.

    Raises:
      ValueError: Lists the arrays of which `axis` divides no dimension, or which it splits already;
        or the mesh has no such axis.

    >>> from xform.sharding import make_mesh
    >>> mesh = make_mesh(dp=4, tp=2, devices=jax.devices()[:8])
    >>> shapes = {"in": jnp.zeros((3, 8, 6)), "out": jnp.zeros((3, 16, 6))}
    >>> split({"in": P(None, None, "tp"), "out": P(None, "tp")}, shapes, mesh, skip=1)
    {'in': P(None, 'dp', 'tp'), 'out': P(None, ('tp', 'dp'), None)}
    """
    if axis not in mesh.shape:
        raise ValueError(f"`split` over {axis!r}, and the mesh has {dict(mesh.shape)}")
    n, wrong = mesh.shape[axis], []

    def place(path, spec: P, x) -> P:
        dims = axes_by_dim(spec, len(x.shape))
        shares = [math.prod(mesh.shape[name] for name in names) for names in dims]
        fits = [d for d in range(skip, len(dims)) if x.shape[d] % (shares[d] * n) == 0]
        if not fits or any(axis in names for names in dims):
            wrong.append(f"{jax.tree_util.keystr(path)} {tuple(x.shape)} as {spec}")
            return spec
        dims[fits[0]] += (axis,)
        return P(*(None if not d else d[0] if len(d) == 1 else d for d in dims))

    placed = jax.tree.map_with_path(place, specs, shapes, is_leaf=is_spec)
    if wrong:
        raise ValueError(
            f"`split` over {axis}={n} found no dimension that it divides (from dimension {skip}, "
            f"within what splits it already), or it splits these already: {'; '.join(wrong)}. "
            "Change these sizes or the mesh, or leave such arrays whole by leaving them out."
        )
    return placed


def scan_layers[X: PyTree](
    layer: Callable[[X, PyTree], X],
    x: X,
    stack: PyTree | Late,
    *,
    gather: Callable[[PyTree], PyTree],
    ahead: int = 1,
    keep: bool = False,
    unroll: int | None = None,
) -> X:
    """Returns `x` after all layers, whose parameters are gathered `ahead` of their use.

    To be called inside `jax.shard_map`. It is `lax.scan` over the layers with another order of
    communication: values and gradients are the same, of `x`, of the parameters, and of every array
    that `layer` closes over. Each layer is computed once more on the way back.

    Args:
      layer: `layer(x, params) -> x`, of gathered parameters.
      x: What the first layer is given: an array, or a tree of them.
      stack: This device's parts of all layers' parameters, along a leading dimension; or these
        from `late`.
      gather: `gather(parts) -> params`, of one layer, linear: `data.gather` of its specs, and
        whatever else is done to parameters before their use, such as a cast to bfloat16.
      ahead: How many layers ahead parameters are gathered; 0 gathers them as they are used.
      keep: Keep gathered parameters from the forward to the backward pass.
      unroll: How many layers one pass of the loop computes; by default `ahead + 1`, and at least
        two, so that neither parameters nor gradients are copied.

    Raises:
      ValueError: `ahead` is negative or more than there are layers, `unroll` is below 1, or arrays
        of `stack` are of different numbers of layers.
      TypeError: `layer` returns another structure, shape or dtype than it is given.

    >>> from xform.sharding import make_mesh, shardings
    >>> from xform.sharding.data import gather
    >>> mesh = make_mesh(dp=4, devices=jax.devices()[:4])
    >>> whole = lambda w: gather(w, P("dp"), "dp")
    >>> f = lambda x, w: scan_layers(lambda x, w: jnp.tanh(x @ w), x, w, gather=whole)
    >>> specs = (P("dp"), P(None, "dp"))
    >>> f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("dp")))
    >>> args = jax.device_put((jnp.ones((8, 4)), jnp.ones((3, 4, 4))), shardings(mesh, specs))
    >>> f(*args).shape
    (8, 4)
    """
    stack = stack if isinstance(stack, Late) else Late(stack, None)
    _check(stack.parts, ahead, unroll)
    whole = jax.eval_shape(gather, _at(stack.parts, 0))
    layer, consts = _closed(layer, x, whole)
    return _scan(_How(layer, gather, ahead, keep, unroll or max(ahead, 1) + 1), x, stack, consts)


def _check(parts: PyTree, ahead: int, unroll: int | None) -> None:
    sizes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree.leaves_with_path(parts)}
    counts = {shape[:1] for shape in sizes.values()}
    if len(counts) != 1 or () in counts:
        raise ValueError(
            f"`scan_layers` needs a stack of arrays of as many layers each; found {sizes}."
        )
    ((layers,),) = counts
    if not 0 <= ahead <= layers:
        raise ValueError(
            f"`scan_layers` can gather 0 to {layers} layers ahead, of {layers}; found {ahead=}."
        )
    if unroll is not None and unroll < 1:
        raise ValueError(f"`scan_layers` computes one layer in a pass, or more; found {unroll=}.")


def _closed(layer: Layer, x: PyTree, whole: PyTree) -> tuple[Callable, list]:
    """The layer as a function of all that it closes over too: a derivative is taken elsewhere."""
    program, out = jax.make_jaxpr(layer, return_shape=True)(x, whole)
    types = lambda tree: jax.tree.map(lambda a: f"{a.dtype}{[*a.shape]}", tree)
    given, returned = types(jax.eval_shape(lambda x: x, x)), types(out)
    if given != returned:
        raise TypeError(
            f"`scan_layers`: `layer` was given {given} and returned {returned}; needed is the same "
            "type, since the next layer is given that."
        )

    def call(x, whole, *consts):
        found = eval_jaxpr(program.jaxpr, consts, *jax.tree.leaves((x, whole)))
        return jax.tree.unflatten(jax.tree.structure(out), found)

    return call, program.consts


def late(stack: PyTree, gather: Callable[[PyTree], PyTree]) -> Late:
    """Returns the layers for `scan_layers`, with sums of gradients that are put off.

    Gradients are then each device's own, whole, and add up as such in whatever loop runs the
    layers. The derivative of this function sums them over devices and deals them out: call it
    outside of loops, in what `data.value_and_grad` calls `enter`.

    Args:
      stack: This device's parts of all layers' parameters.
      gather: Makes the whole of them, as that of `scan_layers` does for one layer.

    >>> from xform.sharding import make_mesh, shardings
    >>> from xform.sharding.data import gather
    >>> mesh = make_mesh(dp=2, devices=jax.devices()[:2])
    >>> whole = lambda w: gather(w, P("dp"), "dp")
    >>> def loss(x, stack):
    ...     layer = lambda x, w: jnp.tanh(x @ w)
    ...     layers = late(stack, lambda w: gather(w, P(None, "dp"), "dp"))
    ...     return scan_layers(layer, x, layers, gather=whole)
    >>> specs = (P("dp"), P(None, "dp"))
    >>> f = jax.jit(jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P("dp")))
    >>> f(*jax.device_put((jnp.ones((4, 2)), jnp.ones((3, 2, 2))), shardings(mesh, specs))).shape
    (4, 2)
    """
    with declare("fsdp.late", once=True):
        return _late(gather, stack)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(gather: Callable, stack: PyTree) -> Late:
    zeros = lambda x: per_device(jnp.zeros(x.shape, x.dtype), tuple(sorted(varying_axes(x))))
    return Late(stack, jax.tree.map(zeros, jax.eval_shape(gather, stack)))


def _late_bwd(gather: Callable, stack: PyTree, grads: Late) -> tuple[PyTree]:
    parts, slots = grads
    (dealt,) = jax.linear_transpose(gather, stack)(slots)
    return (jax.tree.map(jnp.add, parts, dealt),)


_late.defvjp(lambda gather, stack: (_late(gather, stack), stack), _late_bwd)


@dataclass(frozen=True, eq=False)
class _How:
    """What is static about a scan."""

    layer: Callable
    gather: Callable
    ahead: int
    keep: bool
    unroll: int

    def declared(self):
        """Declares what stands before and after the loops."""
        return declare("fsdp.scan_layers")

    def promised(self):
        """Declares what stands in a loop: if it is ahead, a product hides it."""
        return declare("fsdp.scan_layers", hidden=self.ahead > 0 and "all-gather")

    def deal_out(self, grads: PyTree, parts: PyTree) -> PyTree:
        """The derivative of `gather`: gradients, summed, of which each device gets its part."""
        return jax.linear_transpose(self.gather, parts)(grads)[0]


class _Saved(NamedTuple):
    """What the forward pass leaves: inputs of layers and, if kept, their parameters.

    The last layers, whose parameters arrived before the loop ended, come after it one by one.
    """

    loop: tuple
    rest: list

    def at(self, i) -> tuple:
        """Of layer i, which may be traced within the loop."""
        first = jax.tree.leaves(self.loop)[0].shape[0]
        return _at(self.loop, i) if _inside(i, first) else self.rest[i - first]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(how: _How, x: PyTree, stack: Late, consts: list) -> PyTree:
    return _forward(how, x, stack, consts)[0]


def _forward(how: _How, x: PyTree, stack: Late, consts: list) -> tuple[PyTree, tuple]:
    """Layers 0 to L - k - 1 in the loop, in which k to L - 1 arrive; then the last k."""
    parts, k = stack.parts, how.ahead
    layers = jax.tree.leaves(parts)[0].shape[0]
    kept = lambda x, whole: (x, whole if how.keep else None)

    def step(carry, i):
        x, held = carry
        with how.promised():
            whole, *held = (*held, how.gather(_at(parts, i)))
        return (how.layer(x, whole, *consts), tuple(held)), kept(x, whole)

    with how.declared():
        held = tuple(how.gather(_at(parts, i)) for i in range(k))
    (x, held), loop = lax.scan(step, (x, held), jnp.arange(k, layers), unroll=how.unroll)
    rest = []
    for whole in held:
        rest.append(kept(x, whole))
        x = how.layer(x, whole, *consts)
    return x, (_Saved(loop, rest), stack, consts)


def _backward(how: _How, residuals: tuple, dx: PyTree) -> tuple:
    """Layers L - 1 to 0; each deals out the gradients of the one before it."""
    saved, (parts, slots), consts = residuals
    layers = jax.tree.leaves(parts)[0].shape[0]
    k = 0 if how.keep else how.ahead
    fetch = lambda i: how.gather(_at(parts, i))
    deal_out = lambda grads: grads if slots is not None else how.deal_out(grads, _at(parts, 0))

    def step(carry, i, arriving, declared=how.declared):
        dx, dconsts, held, pending = carry
        x, whole = saved.at(i)
        with declared():
            if not how.keep:
                whole, *held = (*held, fetch(arriving)) if arriving is not None else held
            dealt = None if pending is None else _done_here(deal_out(pending))
        dx, pending, *more = jax.vjp(how.layer, x, whole, *consts)[1](dx)
        dconsts = [_add(d, m) for d, m in zip(dconsts, more, strict=True)]
        return (dx, dconsts, tuple(held), pending), dealt

    # Before the loop, the layers that the forward pass had after its own; after it, the first k.
    before = max(len(saved.rest), 1)
    with how.declared():
        held = tuple(fetch(layers - 1 - i) for i in range(k))
    carry, dealt = (dx, [_zero(c) for c in consts], held, None), []
    for i in reversed(range(max(layers - before, 0), layers)):
        carry, d = step(carry, i, i - k if i >= k else None)
        dealt.append(d)
    if layers - before > k:
        inner = jnp.arange(k, layers - before)
        body = lambda carry, i: step(carry, i, i - k, how.promised)
        carry, loop = lax.scan(body, carry, inner, reverse=True, unroll=how.unroll)
        dealt.append(loop)
    for i in reversed(range(min(k, layers - before))):
        carry, d = step(carry, i, None)
        dealt.append(d)
    dx, dconsts, _, pending = carry
    with how.declared():
        dealt.append(deal_out(pending))
    if slots is None:
        return dx, Late(_stacked(dealt[1:], parts), None), dconsts
    return dx, Late(jax.tree.map(jnp.zeros_like, parts), _stacked(dealt[1:], slots)), dconsts


_scan.defvjp(_forward, _backward)


def _done_here[T: PyTree](dealt: T) -> T:
    """Keeps XLA from moving sums into the next pass, for which it would copy gradients.

    Its pipeliner moves what goes straight to a stack of results; these sums are hidden as it is.
    """
    return lax.optimization_barrier(dealt)


def _zero(const: Array) -> Array | None:
    """Where gradients of an array are added up; None for one that has none."""
    return jnp.zeros_like(const) if jnp.issubdtype(const.dtype, jnp.inexact) else None


def _add(total: Array | None, more: Array) -> Array | None:
    return None if total is None else total + more


def _inside(i, size: int) -> bool:
    """Whether a place is in the loop's part, where every traced one is."""
    return not isinstance(i, int) or i < size


def _at(tree: PyTree, i) -> PyTree:
    """Of stacked arrays, those of layer i."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _stacked(parts: list, stack: PyTree) -> PyTree:
    """The layers' arrays, last layer first and some stacked already, as one stack."""
    many = lambda a, like: a if a.ndim == like.ndim else a[None]
    join = lambda like, *xs: jnp.concatenate([many(x, like) for x in reversed(xs)])
    return jax.tree.map(join, stack, *parts)
