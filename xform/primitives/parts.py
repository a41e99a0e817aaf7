"""Attention over some of the keys at a time, whose parts make up the whole exactly.

Where keys lie on several devices or come one block after the other, each part gives what
`flex_attention_p` leaves of it: of each row the output, unrounded, the maximum of its scores and
the sum of exponentials relative to that. `join` makes one of two. The derivative needs no chain of
joins: with statistics of the *whole* row, p_ij = exp(s_ij - top_i) / total_i is the weight of a key
in the whole, and the derivative of attention is a sum over keys,

    d out = Σ_j p_ij (dv_j + v_j ds_ij) - out dL        dL = d lse = Σ_j p_ij ds_ij

of which each part has its own terms. Transposed, with `do` and `dl` the cotangents of output and
log-sum-exp, A of `Attend` gets `do` and L gets `dl - out . do`, the same for all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from xform.lowering._contract import rounded
from xform.lowering._tile_fn import Attend, Jvp, Transpose, base, log_sum
from xform.lowering.blockwise import inverse
from xform.primitives._rules import join_axes
from xform.primitives.attention import _traced, flex_attention_p
from xform.primitives.tile_sum import tile_sum


class Rows(NamedTuple):
    """What attention over a part of the keys is of each row; all wide, float32 at least.

    Attributes:
      out: the output over this part.
      top: the largest score, minus infinity for a row with no key.
      total: the sum of exponentials of scores relative to `top`, 0 for a row with no key.
    """

    out: Float[Array, "B T H V"]
    top: Float[Array, "B T H"]
    total: Float[Array, "B T H"]

    @property
    def lse(self) -> Float[Array, "B T H"]:
        """The log-sum-exp of scores."""
        return log_sum(self.top, self.total)


class Program(NamedTuple):
    """What of a call is the same for all parts; `mods(arrays)` may differ from part to part.

    Attributes:
      scale: factor on scores, a number.
      deterministic, implementation: as of `flex_attention`.
    """

    scale: float
    deterministic: bool = True
    implementation: str | None = None


type Mods = Callable[[Sequence[Array]], tuple[Callable | None, Callable | None]]
"""A score mod and a mask mod, as functions of the arrays that they read."""


def attend(
    program: Program, mods: Mods, q: Array, k: Array, v: Array, arrays: Sequence[Array]
) -> Rows:
    """Returns what attention over these keys is.

    Args:
      program: the call.
      mods: its mods, at the indices of `q` and `k`.
      q: queries `[B,T,H,D]`.
      k, v: keys and values `[B,S,K,...]` of the part.
      arrays: what the mods read.
    """
    spec, captures, context = _taken_apart(program, mods, q, arrays)
    out, top, total, *_ = flex_attention_p.bind(
        *join_axes((q, k, v, *captures, *context)),
        spec=spec, hidden=0, dtype=spec.wide, peak=False, implementation=program.implementation,
    )  # fmt: skip
    return Rows(out, top, total)


def join(a: Rows, b: Rows) -> Rows:
    """Returns the rows over the keys of both.

    >>> x, y = (Rows(jnp.full((1, 1, 1, 2), n), jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    ...         for n in (1.0, 3.0))
    >>> join(x, y).out.tolist(), float(join(x, y).total[0, 0, 0])
    ([[[[2.0, 2.0]]]], 2.0)
    """
    top = jnp.maximum(a.top, b.top)
    own, other = (x.total * jnp.exp(x.top - base(top)) for x in (a, b))
    total = own + other
    share = inverse(total)
    out = (own * share)[..., None] * a.out + (other * share)[..., None] * b.out
    return Rows(out, top, total)


def pull_back(
    program: Program,
    mods: Mods,
    q: Array,
    k: Array,
    v: Array,
    arrays: Sequence[Array],
    whole: Rows,
    d_out: Array,
    d_lse: Array,
) -> tuple[Array, Array, Array, list[Array], Callable[[Sequence[Array]], list]]:
    """Returns the gradients that a part gives, from cotangents of the whole; wide, not rounded.

    Args:
      program, mods, q, k, v, arrays: of the part, as of `attend`.
      whole: the rows over all parts.
      d_out, d_lse: the cotangents of `whole.out` and `whole.lse`, wide.

    Returns:
      Of q, k and v; of each floating array that the score reads, in an order that is the same for
      all parts; and the function that makes of the sums of these the gradients of `arrays`.
    """
    spec, captures, context = _taken_apart(program, mods, q, arrays)
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in captures]
    moving = (True, False, False, True, True, *floating)
    linear = (*(False for _ in moving), *(True for m in moving if m))
    inputs = [q, k, v, *(x for x, f in zip(captures, floating, strict=True) if f)]
    shapes = tuple(x.shape[3:] for x in inputs[:3]) + tuple(x.shape for x in inputs[3:])
    fn = Transpose(Jvp(Attend(spec), moving), linear, shapes)
    nothing = whole.total == 0  # a row that sees no key, of whose output nothing depends on it
    d_out = rounded(d_out, spec.dtype)  # as products of it are
    d_row = jnp.where(nothing, 0, d_lse - jnp.sum(whole.out * d_out, -1))
    d_out = jnp.where(nothing[..., None], 0, d_out)
    operands = [q, whole.top, inverse(whole.total), k, v, *captures, d_out, d_row]
    dq, dk, dv, *rest = tile_sum(
        fn, operands, context, hidden=0, implementation=program.implementation,
        outs=[jax.ShapeDtypeStruct(x.shape, spec.wide) for x in inputs],
    )  # fmt: skip
    return dq, dk, dv, rest, partial(_to_arrays, program, mods, q, arrays)


def _to_arrays(
    program: Program, mods: Mods, q: Array, arrays: Sequence[Array], cts: Sequence[Array]
) -> list:
    """The gradients of arrays, from those of what is made of them before any tile; None of ints."""
    floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def captured(moving):
        moving = iter(moving)
        given = [next(moving) if f else x for f, x in zip(floating, arrays, strict=True)]
        _, captures, _ = _taken_apart(program, mods, q, given)
        return [x for x in captures if jnp.issubdtype(x.dtype, jnp.floating)]

    outs, back = jax.vjp(captured, [x for x, f in zip(arrays, floating, strict=True) if f])
    cts = [ct.astype(x.dtype) for ct, x in zip(cts, outs, strict=True)]
    (grads,) = back(join_axes_like(cts, outs))
    grads = iter(grads)
    return [next(grads) if f else None for f in floating]


def join_axes_like(xs: Sequence[Array], like: Sequence[Array]) -> list[Array]:
    """`xs`, cast to vary over the mesh axes that `like` varies over."""
    return [join_axes((x, y))[0] for x, y in zip(xs, like, strict=True)]


def _taken_apart(program: Program, mods: Mods, q: Array, arrays: Sequence[Array]):
    score_mod, mask_mod = mods(arrays)
    return _traced(q, score_mod, mask_mod, program.scale, 0.0, deterministic=program.deterministic)
