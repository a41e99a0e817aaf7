"""Ring attention: keys and values go around, and each device attends to those that it holds.

In step s a device has the keys of the one that is s before it. Forward, they move on while it
attends to them, and what comes out is joined by maximum and sum of each row (Liu et al.,
arXiv:2310.01889); every message has the attention of a step to hide behind.

Backward (`pull_back` of `xform.primitives.parts` has the derivation) the steps run in the opposite
order: a device still holds the keys that came last, and sends them back the way they came. The sums
of a block's gradients go with it, one step behind, and are home when the block is:

    step n - 1      compute with the keys of me + 1;       me + 2's arrive
    step n - 2      compute with those of me + 2;          me + 3's arrive, and their sums so far
    …
    step 0          compute with my own;                   the sums of mine arrive

So no step waits for a message, there is none after the last, and beside queries, keys, values and
the output nothing is kept but the keys and values that came last. Sums travel in float32.

Steps in which no device has anything to do, as a window leaves most, are left out on both ways: the
keys make one longer move instead. Derivatives are those of reverse mode, of any order.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from xform.lowering._contract import wide_of
from xform.primitives._rules import join_axes
from xform.primitives.parts import Program, Rows, attend, join, pull_back
from xform.sharding.context._mods import Opens, place
from xform.sharding.context.layouts import Layout

barrier: Any = lax.optimization_barrier


class Ring(NamedTuple):
    """What is known of a ring while it is traced.

    Attributes:
      axis: the mesh axis.
      steps: those in which a device has something to do, ascending.
      chunk: positions of a chunk of the layout.
      program: the call.
      opens: the mods.
    """

    axis: str
    steps: Sequence[int]
    chunk: int
    program: Program
    opens: Opens

    def send(self, tree: Any, hops: int) -> Any:
        """Arrays from the device so many before this one; after it, where negative."""
        n = lax.axis_size(self.axis)
        if hops % n == 0:
            return tree
        return lax.ppermute(tree, self.axis, [(i, (i + hops) % n) for i in range(n)])

    def mods(self, order: Array, step: int) -> Callable:
        """The mods at this device's queries and the keys that it holds in a step."""
        n, me = lax.axis_size(self.axis), lax.axis_index(self.axis)
        layout = Layout(order, self.chunk)
        return self.opens.at(place(layout, me), place(layout, (me - step) % n))


def ring(
    q: Array, k: Array, v: Array, layout: Layout, program: Program, opens: Opens, axis: str,
    steps: Sequence[int],
) -> tuple[Array, Array]:  # fmt: skip
    """Returns output, wide, and log-sum-exp of this device's queries over all keys.

    Args:
      q, k, v: this device's parts, `[B,T/n,H,D]` and `[B,T/n,K,...]`.
      layout: where they are of.
      program, opens: the call and its mods.
      axis: the mesh axis.
      steps: at least those in which some device has something to do, ascending.
    """
    if not steps:
        return _nothing(q, v)
    how = Ring(axis, tuple(steps), layout.chunk, program, opens)
    order = jnp.asarray(layout.order, jnp.int32)
    q, k, v, order, *arrays = join_axes((q, k, v, order, *opens.arrays))
    return _differentiable(how)(q, k, v, order, arrays)


def _nothing(q: Array, v: Array) -> tuple[Array, Array]:
    wide = wide_of(q.dtype)
    out = jnp.zeros((*q.shape[:3], v.shape[-1]), wide)
    return tuple(join_axes((out, jnp.full(q.shape[:3], -jnp.inf, wide), q, v))[:2])


class _Saved(NamedTuple):
    """What is kept for the backward pass: what was given, the keys that came last, and the rows."""

    q: Array
    k: Array
    v: Array
    order: Array
    arrays: list[Array]
    last: tuple[Array, Array]
    rows: Rows


def _differentiable(how: Ring) -> Callable:
    @jax.custom_vjp
    def run(q, k, v, order, arrays):
        rows, _ = _forward(how, q, k, v, order, arrays)
        return rows.out, rows.lse

    def forward(q, k, v, order, arrays):
        rows, last = _forward(how, q, k, v, order, arrays)
        return (rows.out, rows.lse), _Saved(q, k, v, order, arrays, last, rows)

    run.defvjp(forward, lambda saved, cts: _backward(how, saved, *cts))
    return run


def _forward(how: Ring, q, k, v, order, arrays) -> tuple[Rows, tuple[Array, Array]]:
    """The rows over all keys, and the keys and values that came last."""
    block, rows = how.send((k, v), how.steps[0]), None
    for step, after in zip(how.steps, (*how.steps[1:], None), strict=True):
        mods = how.mods(order, step)
        if after is None:
            part = attend(how.program, mods, q, block[0], block[1], arrays)
        else:
            block, sent = barrier((block, block))
            arriving = how.send(sent, after - step)
            part = attend(how.program, mods, q, block[0], block[1], arrays)
            block, part = barrier((arriving, part))
        rows = part if rows is None else join(rows, part)
    assert rows is not None
    return rows, block


def _backward(how: Ring, saved: _Saved, d_out: Array, d_lse: Array) -> tuple:
    """The gradients of q, k, v, order (none) and arrays."""
    q, k, v, order, arrays, block, rows = saved
    sums, of_rows, finish = None, [], None
    for step, after in zip(how.steps[::-1], (*how.steps[-2::-1], None), strict=True):
        moving = sums  # those of this step's block, from the device that had it before
        arriving = block
        if after is not None:
            block, sent = barrier((block, block))
            arriving = (k, v) if after == 0 else how.send(sent, after - step)
        mods = how.mods(order, step)
        dq, dk, dv, rest, finish = pull_back(
            how.program, mods, q, *block, arrays, rows, d_out, d_lse
        )
        arriving, moving, (dq, dk, dv) = barrier((arriving, moving, (dq, dk, dv)))
        sums = (dk, dv) if moving is None else tuple(map(add, moving, (dk, dv)))
        of_rows.append([dq, *rest])
        sums = how.send(sums, (0 if after is None else after) - step)
        block = arriving
    assert finish is not None
    assert sums is not None
    dq, *rest = (reduce(add, xs) for xs in zip(*of_rows, strict=True))
    dk, dv = sums
    grads = (x.astype(y.dtype) for x, y in zip((dq, dk, dv), (q, k, v), strict=True))
    return *grads, None, finish(rest)
