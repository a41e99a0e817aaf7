"""The functions inside a tile sum, closed under differentiation.

A tile sum is `sum_j f(row_i, col_j, shared)` (DESIGN section 4). Its derivative is a tile sum of
f's derivative and its transpose a tile sum of f's transpose, so the functions of all orders are
terms

    f ::= Attend(spec) | Peak(spec) | CrossEntropy(spec) | RowGradients(f)
        | Jvp(f, nonzero) | Transpose(f, linear, shapes)

that compare by value. First-order reverse mode is `Transpose(Jvp(Attend))`: by hand one would write
five matrix products, `s = q k^T`, `dv = p^T do`, `dp = do v^T`, `dq = ds k` and `dk = ds^T q` with
`ds = p (dp + dl)`; the term evaluates to just these.

Each function declares the kind of every operand and result (`ROW`, `COL`, or a tuple of `Read`s
for a captured array) and is called with one tile of each; a captured array arrives as the tuple
of what its reads loaded. All floating tiles are in the spec's wide dtype, and captured arrays in
theirs: what crosses tiles is accumulated there and rounded once, at the end.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from xform.jaxpr import walk
from xform.jaxpr._intern import latest
from xform.lowering._at_pairs import modified
from xform.lowering._contract import contract
from xform.lowering._dropout import kept
from xform.lowering._eight import rounded_weights
from xform.lowering._spec import At, Read, Spec

ROW, COL = "row", "col"
type Kind = str | tuple[Read, ...]


@runtime_checkable
class TileFn(Protocol):
    """A function of tiles: `fn(at, *tiles) -> list of tiles`.

    Its `spec` is what the primitive hands to its lowering (`Spec` for attention, `LossSpec` for
    cross entropy); of all specs, terms use `wide`, the dtype of tiles, and `tail`.
    """

    @property
    def spec(self) -> Any: ...
    @property
    def operands(self) -> tuple[Kind, ...]: ...
    @property
    def results(self) -> tuple[Kind, ...]: ...
    def __call__(self, at: At, *tiles) -> list: ...


def scores(spec: Spec, at: At, q, k, shared):
    """Modified scores of a tile, `[g,q,k]`, minus infinity where hidden.

    In a partial tile the mod sees 0 instead of what is hidden: then whatever its value and its
    derivative are there, NaN included, goes nowhere. (Arrays: see `_at_pairs`.)
    """
    q = q if spec.scale_scores else q * jnp.asarray(spec.scale, q.dtype)
    s = _contract(at, q, k, "tile", spec.dtype)
    if spec.scale_scores or spec.score is not None:
        s = _rounded_once(partial(modified, spec, at), s, *(x for group in shared for x in group))
    return s if at.visible is None else jnp.where(at.visible, s, -jnp.inf)


def _rounded_once(f, *args):
    """`f(*args)`, with the same bits wherever it is computed.

    Compilers contract a product and a sum into one rounding where that suits what is around them.
    Under the exponential, two roundings of one score of 10,000 differ by a thousandth; so the
    maximum, the forward and the backward pass must see the same one. Its derivative, which has
    uses for what is in between, computes that for itself.
    """

    @jax.custom_jvp
    def once(*args):
        out = f(*lax.optimization_barrier(args))
        return lax.optimization_barrier(out.reshape(-1, out.shape[-1])).reshape(out.shape)

    @once.defjvp
    def _(primals, tangents):
        return once(*primals), jax.jvp(f, primals, tangents)[1]

    return once(*args)


def weighted(spec: Spec, at: At, p, v, dtype=None):
    """`sum_j p_ij v_j` over a tile, `[g,q,v]`, after dropout; of operands rounded to `dtype`."""
    if spec.dropout:
        p = p * at.over("hqk", partial(kept, at.key, spec.dropout)).astype(p.dtype)
    if spec.format:
        p = rounded_weights(p, spec.dropout)
    return _contract(at, p, v, "row", dtype or spec.dtype)


def _contract(at: At, x, y, out, dtype):
    return contract(x, y, out=out, dtype=dtype, visible=at.visible, finite=at.finite)


@dataclasses.dataclass(frozen=True)
class Attend:
    """`(q, top, norm, k, v, *captures) -> (A, L)`, the two sums that attention is made of.

        A_i = sum_j p_ij v_j      L_i = sum_j p_ij      p_ij = exp(s_ij - top_i) norm_i

    `top` is the row's maximum and `norm` the inverse of its sum, both constants: `out = A / L` does
    not depend on them, so its derivatives at fixed ones are exact, at every order. With the maximum
    itself, and not the log-sum-exp, under the exponential, p is as exact as s however large the
    scores are. With `norm` in here, and not outside, the output's cotangent is multiplied as it
    comes: divided by L, and rounded to a narrow dtype once more, it would not match the `out . do`
    that is subtracted from it, and a row with one large weight lives on that difference.
    """

    spec: Spec

    @property
    def operands(self) -> tuple[Kind, ...]:
        return (ROW, ROW, ROW, COL, COL, *self.spec.reads)

    @property
    def results(self) -> tuple[Kind, ...]:
        return (ROW, ROW)

    def __call__(self, at: At, *tiles) -> list:
        q, top, norm, k, v, *shared = tiles
        s = scores(self.spec, at, q, k, shared)
        p = jnp.exp(s - base(top)[..., None]) * norm[..., None]
        return [weighted(self.spec, at, p, v), p.sum(-1)]


def base(top):
    """What scores are taken relative to: the maximum, and 0 for a row that has none."""
    return jnp.where(jnp.isneginf(top), 0, top)


def log_sum(top, total):
    """`top + log(total)`, and minus infinity, with no gradient, for a sum over nothing."""
    empty = total == 0
    return jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))


@dataclasses.dataclass(frozen=True)
class Peak:
    """`(q, top, argmax, k, *captures) -> (M, N)`: a row's largest scores, their sum and number.

    The maximum is `M / N`, so scores that tie share its derivative, as in `jnp.max`. `argmax` is
    the key of a largest score, -1 for a row without any: it counts whatever its bits are here, so
    that a score which another program rounds another way cannot lose the gradient.
    """

    spec: Spec

    @property
    def operands(self) -> tuple[Kind, ...]:
        return (ROW, ROW, ROW, COL, *self.spec.reads)

    @property
    def results(self) -> tuple[Kind, ...]:
        return (ROW, ROW)

    def __call__(self, at: At, *tiles) -> list:
        q, top, argmax, k, *shared = tiles
        s = scores(self.spec, at, q, k, shared)
        largest = (s >= top[..., None]) | (at.k[None, None] == argmax[..., None])
        largest &= ~jnp.isneginf(s)
        return [jnp.where(largest, s, 0).sum(-1), largest.sum(-1, dtype=s.dtype)]


@dataclasses.dataclass(frozen=True)
class Jvp:
    """The derivative of `fn` along tangents of the operands where `nonzero`, appended to them."""

    fn: TileFn
    nonzero: tuple[bool, ...]

    @property
    def spec(self) -> Any:
        return self.fn.spec

    @property
    def operands(self) -> tuple[Kind, ...]:
        kinds = self.fn.operands
        return kinds + tuple(k for k, z in zip(kinds, self.nonzero, strict=True) if z)

    @property
    def results(self) -> tuple[Kind, ...]:
        return self.fn.results

    def __call__(self, at: At, *tiles) -> list:
        n = len(self.nonzero)
        primals, tangents = tiles[:n], tiles[n:]
        moving = [p for p, z in zip(primals, self.nonzero, strict=True) if z]

        def along(*moving):
            return self.fn(at, *merge(self.nonzero, moving, _without(self.nonzero, primals)))

        try:
            return jax.jvp(along, tuple(moving), tuple(tangents))[1]
        except (NotImplementedError, TypeError, ValueError) as error:
            raise_underivable(self.spec, error)
            raise  # it was another one


@dataclasses.dataclass(frozen=True)
class Transpose:
    """The transpose of `fn` in the operands where `linear`: `(*others, *cotangents) -> cotangents`.

    `shapes` are the whole shapes of the linear operands without their leading dimensions: `[d]`
    of a row or column, the full shape of a captured array.
    """

    fn: TileFn
    linear: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def spec(self) -> Any:
        return self.fn.spec

    @property
    def operands(self) -> tuple[Kind, ...]:
        return tuple(_without(self.linear, self.fn.operands)) + self.fn.results

    @property
    def results(self) -> tuple[Kind, ...]:
        return tuple(k for k, z in zip(self.fn.operands, self.linear, strict=True) if z)

    def __call__(self, at: At, *tiles) -> list:
        known = tiles[: self.linear.count(False)]
        cotangents = list(tiles[len(known) :])
        wide = self.spec.wide
        avals = [tile_aval(k, at, s, wide) for k, s in zip(self.results, self.shapes, strict=True)]

        def of_linear(*linear):
            return list(self.fn(at, *merge(self.linear, linear, known)))

        try:
            return list(jax.linear_transpose(of_linear, *avals)(cotangents))
        except ValueError as error:
            if not str(error).startswith("Reverse-mode differentiation"):
                raise
            sites = walk(latest(self.spec.score))
            loops = [at.line for at in sites if at.eqn.primitive is lax.while_p]
            raise NotImplementedError(
                f"`score_mod` has a loop, `while` (at {', '.join(dict.fromkeys(loops))}), "
                "whose length is not known before it runs, and so no gradient in reverse mode. "
                "Write `jax.lax.fori_loop` with bounds that are Python's numbers, or "
                "`jax.lax.scan`; or differentiate forward, by `jax.jvp`."
            ) from error


# What JAX calls an operation in a message, where that is not its primitive's name.
_CALLED = {"betainc": "regularized_incomplete_beta", "custom_vjp": "custom_vjp_call"}


def raise_underivable(spec: Any, error: Exception) -> None:
    """Raises what JAX says of a derivative that it does not have, with the user's line."""
    words = str(error).splitlines()[0].rstrip(".")
    if words.startswith("`") or not re.search("(?i)differentiation|gradient|autodiff", words):
        return
    named = {_CALLED.get(word, word) for word in re.findall(r"\w+?(?=_grad_|\b)", words.lower())}
    sites = [site for site in walk(latest(spec.score)) if site.eqn.primitive.name in named]
    lines = ", ".join(dict.fromkeys(f"`{x.eqn.primitive.name}` (at {x.line})" for x in sites))
    raise NotImplementedError(
        f"`score_mod` has no such derivative: {lines or 'an operation of it'}: {words}. Write "
        "`jax.custom_jvp` for a function with a derivative of your own, or "
        "`jax.lax.stop_gradient(x)` for what needs none."
    ) from error


def tile_aval(kind: Kind, at: At, shape: tuple[int, ...], dtype):
    """The abstract tile of an operand whose whole shape ends in `shape`."""
    if not isinstance(kind, str):
        return tuple(jax.ShapeDtypeStruct(read.tile_shape(at), read.dtype) for read in kind)
    lead = (at.h.shape[0], at.q.shape[0]) if kind == ROW else at.k.shape
    return jax.ShapeDtypeStruct((*lead, *shape), dtype)


def primal(fn: TileFn) -> list[bool]:
    """Which operands of a term are the forward pass's own, and no tangents or cotangents."""
    match fn:
        case Jvp(inner, nonzero):
            return primal(inner) + [False] * sum(nonzero)
        case Transpose(inner, linear, _):
            kept = [p for p, gone in zip(primal(inner), linear, strict=True) if not gone]
            return kept + [False] * len(inner.results)
    return [True] * len(fn.operands)


def merge(where: tuple[bool, ...], yes, no) -> list:
    """`yes` in the places where `where` holds, `no` in the others."""
    yes, no = iter(yes), iter(no)
    return [next(yes) if w else next(no) for w in where]


def _without(where: tuple[bool, ...], items) -> list:
    return [x for x, w in zip(items, where, strict=True) if not w]
