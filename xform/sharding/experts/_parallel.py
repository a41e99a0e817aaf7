"""Experts dealt out over a mesh axis, each device's tokens sent to theirs and back.

    route        k experts for each token, and weights                           nothing is sent
    out          a token's row to the device of each of its experts              all-to-all
    experts      each row times the matrices of its expert                       nothing is sent
    back         rows to where they came from                                    all-to-all
    together     the sum of a token's rows, weighed                              nothing is sent

These two exchanges are all that goes over the axis in the forward pass, and their derivatives,
which are exchanges too, all in the backward pass. Shapes are fixed, so what is sent is *places*,
and some stay empty. Of N tokens on each of n devices, k experts each, a device has

    with a capacity c       c · N · k rows to work on and to send
    with a bound b          b · N · k
    with neither            n · min(k, E / n) · N, as many as there can be

The last is min(n, E / k) times what arrives where all is even: safe, and dear where n is large. A
bound is kept, or the tokens beyond it are NaN: none is lost without a word. How many rows each
expert has travels in front of the rows, as digits that bfloat16 and wider dtypes
hold exactly; a stream in float8, which does not, is refused (`xform.precision` rounds products).
`lax.ragged_all_to_all` would send no empty place; XLA has no CPU code for it, and what it needs to
be told (where others' rows begin) is an exchange more.

Without a capacity, products are *ragged*: rows lie by expert, and `product` multiplies each run of
them by its own matrix. `lax.ragged_dot` is JAX's: on a CPU it multiplies all rows by all matrices
of the device, and so it does on a GPU unless `JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING=1`; any
kernel that takes the same three arguments can stand in for it. It has no rule for `vmap` over rows
alone: the stream takes leading dimensions instead. With a capacity, products are batched.

Tensor parallelism splits each expert by columns and rows, as it does a block: all devices of `tp`
route and send the same tokens, and one sum over it closes routed and shared experts together. Over
`axis=("ep", "tp")` instead, each device has whole experts, and needs its own positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from xform._compat import varying_axes
from xform.sharding._declare import declare
from xform.sharding._specs import is_bound
from xform.sharding.data import per_device
from xform.sharding.experts._places import by_expert, digits, places, undigits
from xform.sharding.experts._routing import Load, Routes, Routing, load_of, route
from xform.sharding.tensor import TensorParallel

type Dot = Callable[[Array, Array], Array]
type Expert = Callable[[Array, Dot], Array]
type Product = Callable[[Array, Array, Array], Array]

_WHOLE = TensorParallel()


@dataclass(frozen=True)
class ExpertParallel:
    """How experts are dealt out over a mesh axis; without an axis, the same code on one device.

    Its methods are called inside `jax.shard_map` over a mesh that has the axis. Device i of n has
    the i-th E / n experts, and tokens that no other device of the axis has.

    Attributes:
      axis: The mesh axis, or several as one, or None.
      tp: How each expert is split, as a block is.
      product: `product(rows, matrices, sizes)`: the first `sizes[0]` rows times the first matrix,
        and so on; what it gives for rows beyond all sizes is never used.

    Raises:
      ValueError: An axis of `tp` that deals experts out as well, no axis in a tuple, or one twice.

    >>> routing = Routing(experts=4, top_k=2)
    >>> key = jax.random.key(0)
    >>> p = {"router": jax.random.normal(key, (3, 4)), "in": jnp.ones((4, 3, 5)),
    ...      "out": jnp.ones((4, 5, 3))}
    >>> expert = lambda rows, dot: dot(jax.nn.relu(dot(rows, p["in"])), p["out"])
    >>> f = jax.jit(lambda x: ExpertParallel().routed(x, p["router"], expert, routing))
    >>> y, load = f(jnp.ones((2, 6, 3)))
    >>> y.shape, int(load.tokens), int(load.chosen.sum())
    ((2, 6, 3), 12, 24)
    """

    axis: str | tuple[str, ...] | None = None
    tp: TensorParallel = _WHOLE
    product: Product = lax.ragged_dot

    def __post_init__(self):
        if (self.axis is not None and not self.axes) or len({*self.axes}) < len(self.axes):
            raise ValueError(
                f"ExpertParallel: `axis` is {self.axis!r}; needed is a mesh axis, a tuple of "
                "several that differ, or None for one device."
            )
        if self.tp.axis in self.axes:
            raise ValueError(
                f"ExpertParallel: {self.tp.axis!r} deals out whole experts and splits each: leave "
                "it out of `axis`, or give `tp=TensorParallel()`."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which experts are dealt out, or none."""
        axes = () if self.axis is None else self.axis
        return (axes,) if isinstance(axes, str) else axes

    def routed(
        self,
        x: Float[Array, "... T M"],
        router: Float[Array, "M E"],
        expert: Expert,
        routing: Routing,
        *,
        bias: Float[Array, " E"] | None = None,
        shared: Callable[[Array], Array] | None = None,
    ) -> tuple[Float[Array, "... T M"], Load]:
        """Returns what experts make of the stream, and how they were used.

        Args:
          x: The stream; this device's positions where `tp.sequence`.
          router: The router's matrix, whole; see `route`.
          expert: `expert(rows, dot) -> rows`: what an expert makes of its rows, where
            `dot(rows, w)` is each row times its expert's matrix, of `w [E / n, M, F]`. With `tp`,
            of its columns and then its rows. `rows` is `[R, M]`, those of all experts of the
            device one behind the other; with a capacity `[E / n, R, M]`. What is returned has
            as many.
          routing: How tokens are routed.
          bias: Added to scores to choose; see `route`.
          shared: `shared(x) -> y`: experts that every token goes to, opened by columns and closed
            by rows, before the sum over `tp`.

        Returns:
          The sum, and the load of this device's tokens.

        Raises:
          ValueError: Lists all that doesn't fit.
        """
        self._check(x, routing, None, router=router, bias=bias)
        axes = tuple(sorted({*self.axes, *self.tp.axes}))
        with declare("experts.routed", *axes):
            rows = self.tp.enter(x)
            routes = self._route(rows if self.tp.sequence else x, router, routing, bias)
            own = jax.tree.map(lambda x: self.tp.positions(x, -2), routes)
            y, dropped = self.apply(rows, routes, expert, routing)
            if shared is not None:
                y += _checked("shared", y.shape, shared(rows))
            if self.tp.sequence:  # all devices of `tp` dropped the same
                dropped = jnp.where(lax.axis_index(self.tp.axis) == 0, dropped, 0)
            load = load_of(own, routing)
            load = load._replace(dropped=load.dropped + dropped.astype(load.dropped.dtype))
            return self.tp.leave(y), load

    def _route(self, x: Array, router: Array, routing: Routing, bias: Array | None) -> Routes:
        # What all devices have meets what varies: the sum of its gradient stands here.
        axes = tuple(axis for axis in self.tp.axes if axis in varying_axes(x))
        return route(x, per_device(router, axes), routing, bias)

    def apply(
        self, x: Float[Array, "... T M"], routes: Routes, expert: Expert, routing: Routing
    ) -> tuple[Float[Array, "... T M"], Array]:
        """Returns the weighed sum of what each token's experts make of it, and how many it lacks.

        Args:
          x: All tokens of this device, which vary over the axis.
          routes: Where they go: from `route`, or one's own.
          expert: See `routed`.
          routing: How; only sizes, the capacity and the bound count here.

        Returns:
          The sum, of this device's columns and rows under `tp`, and how many choices were dropped.

        Raises:
          ValueError: Lists all that doesn't fit.
        """
        self._check(x, routing, routes)
        # Where nothing is dropped, all tokens are one group.
        g = x.size // x.shape[-1] if routing.capacity is None else routing.group or x.shape[-2]
        grouped = lambda a: a.reshape(-1, g, a.shape[-1])
        axes = tuple(sorted(varying_axes(x)))
        weights = per_device(grouped(routes.weights).swapaxes(1, 2), axes)
        choices = grouped(routes.experts).swapaxes(1, 2)  # [G, k, g]: first choices come first
        G, k, _ = choices.shape
        rows = jnp.broadcast_to(grouped(x)[:, None], (G, k, g, x.shape[-1]))
        rows = rows.reshape(-1, x.shape[-1])
        run = self._dropless if routing.capacity is None else self._with_capacity
        out, place = run(rows, choices.reshape(G, -1), expert, routing, g)
        missing = 0.0 if routing.capacity is not None else jnp.nan
        found = _take(out, place.reshape(-1), missing).reshape(G, k, g, -1)
        y = jnp.sum(weights[..., None] * found.astype(weights.dtype), 1)
        dropped = jnp.sum(place >= len(out), dtype=jnp.int32)
        return y.reshape(*x.shape[:-1], -1).astype(x.dtype), dropped

    # ---- with and without a capacity ---------------------------------------------------------

    def _with_capacity(self, rows, expert_GA, expert, routing: Routing, group: int):
        """An expert has so many places of each group: products are batched."""
        E, n, size = routing.experts, self._devices(), routing.places(group)
        found = places(expert_GA, E, E, size)
        sent = _take(rows, found.choice.reshape(-1), 0.0).reshape(n, -1, rows.shape[-1])
        came = self._exchange(sent).reshape(n, E // n, -1, rows.shape[-1])
        by_expert = came.swapaxes(0, 1).reshape(E // n, -1, rows.shape[-1])

        def dot(rows, matrices):
            _check_matrices(rows, matrices, E // n)
            return jnp.einsum("erm,emf->erf", rows, matrices)

        made = _made(expert, by_expert, dot)
        made = made.reshape(E // n, n, -1, made.shape[-1]).swapaxes(0, 1)
        back = self._exchange(made.reshape(n, -1, made.shape[-1]))
        return back.reshape(-1, made.shape[-1]), found.place

    def _dropless(self, rows, expert_GA, expert, routing: Routing, tokens: int):
        """A device has so many places for each device: rows lie by expert, products are ragged."""
        E, n, M = routing.experts, self._devices(), rows.shape[-1]
        size = routing.sent(tokens, n)
        found = places(expert_GA, E, n, size)
        sent = _take(rows, found.choice.reshape(-1), 0.0).reshape(n, size, M)
        if self.axis is None:  # they lie by expert as they are, and no place is empty
            sizes = found.kept[0]
            return _made(expert, sent[0], self._ragged(sizes, True)), found.place

        head = digits(found.kept.reshape(n, -1), size, M)
        head = lax.stop_gradient(head.astype(rows.dtype))
        came = self._exchange(jnp.concatenate([head, sent], 1))
        kept = undigits(lax.stop_gradient(came[:, : head.shape[1]]), E // n, size)
        came = came[:, head.shape[1] :].reshape(-1, M)

        at = by_expert(kept, size).reshape(-1)
        order = jnp.argsort(at, stable=True)
        dot = self._ragged(jnp.sum(kept, 0, dtype=jnp.int32), (at < E // n)[order, None])
        made = _made(expert, _take(came, order, 0.0), dot)
        made = _take(made, jnp.argsort(order), 0.0).reshape(n, size, -1)
        return self._exchange(made).reshape(n * size, -1), found.place

    def _ragged(self, sizes: Array, filled: Array | bool) -> Dot:
        """Rows times the matrices of their experts; 0 for empty places, whatever a kernel gives."""

        def dot(rows, matrices):
            _check_matrices(rows, matrices, len(sizes))
            return jnp.where(filled, self.product(rows, matrices, sizes), 0)

        return dot

    def _devices(self) -> int:
        return 1 if self.axis is None else lax.axis_size(self.axis)

    def _exchange(self, parts: Array) -> Array:
        """The i-th part of each device goes to device i."""
        if self.axis is None:
            return parts
        with declare("experts.exchange", *self.axes):
            return lax.all_to_all(parts, self.axis, 0, 0, tiled=True)

    # ---- errors ------------------------------------------------------------------------------

    def _check_axes(self) -> None:
        named = dict.fromkeys((*self.axes, *self.tp.axes))
        if missing := [axis for axis in named if not is_bound(axis)]:
            raise ValueError(
                f"ExpertParallel: there is no {' and no '.join(map(repr, missing))} among the axes "
                "of a `jax.shard_map` around this call: call it inside of one, over a mesh that "
                "has them, or name others in `axis` and `tp`."
            )
        if named and not varying_axes(lax.axis_index(tuple(named))):
            raise ValueError(
                "ExpertParallel: the `jax.shard_map` around it has `check_vma=False`, without "
                "which it is not known what differs between devices: leave it True."
            )

    def _check(self, x: Array, routing: Routing, routes: Routes | None, **given: Any) -> None:
        self._check_axes()
        wrong, n, E = [], self._devices(), routing.experts
        width = x.shape[-1] if x.ndim else 0
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            wrong.append(f"the stream is {jax.typeof(x)}; needed is a floating `[..., T, M]`")
        elif jnp.finfo(x.dtype).nmant < 7:  # whole numbers to 256 are in it; see `digits`
            wrong.append(
                f"the stream is {x.dtype}, in which counts of rows cannot travel with them: needed "
                "is bfloat16 or wider; `xform.precision` has products in fewer bits"
            )
        if not x.size:
            wrong.append(f"the stream is {jax.typeof(x)}, which has no token")
        if E % n:
            on = " × ".join(f"{axis}={lax.axis_size(axis)}" for axis in self.axes)
            wrong.append(f"experts={E} is no multiple of the devices of {on}")
        if same := [axis for axis in self.axes if axis not in varying_axes(x)]:
            wrong.append(
                f"the stream is the same on all devices of {' and '.join(map(repr, same))}: split "
                "tokens over it too, so that none is worked on twice"
            )
        wanted = (*x.shape[:-1], routing.top_k)
        for name in ("experts", "weights") if routes is not None else ():
            if (array := getattr(routes, name)).shape != wanted:
                wrong.append(f"`routes.{name}` is {array.shape}; needed is {wanted}, of each token")
        if routes is not None and not jnp.issubdtype(routes.experts.dtype, jnp.integer):
            wrong.append(f"`routes.experts` is {routes.experts.dtype}; needed are whole numbers")
        wanted = {"router": (width, E), "bias": (E,)}
        for name, array in given.items():
            if array is not None and array.shape != wanted[name]:
                wrong.append(f"`{name}` is {array.shape}; needed is {wanted[name]}")
        positions = x.shape[-2] if x.ndim > 1 else 0
        if given and self.tp.sequence:
            positions *= lax.axis_size(self.tp.axis)
        if routing.capacity is not None and routing.group and positions % routing.group:
            wrong.append(
                f"`group` is {routing.group}, and a device has {positions} positions of a row, "
                "which it must divide"
            )
        if wrong:
            raise ValueError(f"ExpertParallel: {'; '.join(wrong)}.")


def _checked(name: str, wanted: tuple[int, ...], made: Array) -> Array:
    if jnp.shape(made) != wanted:
        raise ValueError(
            f"ExpertParallel: `{name}` returned {jnp.shape(made)}; needed is {wanted}, a row for "
            "each that it was given."
        )
    return made


def _made(expert: Expert, rows: Array, dot: Dot) -> Array:
    """What an expert makes of its rows, of whatever width."""
    made = expert(rows, dot)
    return _checked("expert", (*rows.shape[:-1], *jnp.shape(made)[-1:]), made)


def _take(rows: Float[Array, "R M"], index: Array, missing: float) -> Float[Array, "I M"]:
    """Rows by indices that are all different; another number for those that are beyond."""
    how: dict[str, Any] = dict(mode="fill", fill_value=missing, unique_indices=True)
    return rows.at[index].get(**how)


def _check_matrices(rows: Array, matrices: Array, experts: int) -> None:
    if matrices.ndim != 3 or matrices.shape[:2] != (experts, rows.shape[-1]):
        raise ValueError(
            f"ExpertParallel: `dot` of rows {rows.shape} and matrices {matrices.shape}; needed are "
            f"matrices ({experts}, {rows.shape[-1]}, any): of the experts of this device, and as "
            "many rows as there are columns."
        )
