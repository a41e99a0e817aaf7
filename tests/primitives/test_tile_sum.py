"""Tile sums: one sum, whose derivatives and transposes are sums of its own kind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval as pe

from tests.oracle import UNOPTIMISED
from xform.jaxpr import trace, walk
from xform.lowering._spec import At, Spec
from xform.lowering._tile_fn import COL, ROW, Attend, Jvp, Transpose
from xform.primitives._mods import take_apart
from xform.primitives.attention import flex_attention
from xform.primitives.masks import causal
from xform.primitives.tile_sum import tile_sum

T, S, H, K, D, V = 7, 9, 4, 2, 5, 3
unoptimised = partial(jax.jit, compiler_options=UNOPTIMISED)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem(hidden=()):
    """A tile function that reads a table by distance, its operands and its results."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=16))
    score = lambda s, b, h, q, k: jnp.tanh(s) + table[jnp.abs(q - k)]
    mods = take_apart(score, causal(), jnp.float64)
    spec = Spec(0.4, jnp.dtype("float64"), mods.score, mods.reads, mods.mask, mods.mask_dims)
    shapes = [(2, T, H, D), (2, T, H), (2, T, H), (2, S, K, D), (2, S, K, V), (16,)]
    operands = [jnp.asarray(rng.normal(size=(*hidden, *shape))) for shape in shapes]
    outs = [jax.ShapeDtypeStruct((*hidden, 2, T, H, *tail), jnp.float64) for tail in ((V,), ())]
    return Attend(spec), operands, outs


def dense(q, top, norm, k, v, table):
    """The same two sums, all pairs at once."""
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    distance = (jnp.arange(T)[:, None] - jnp.arange(S)[None])[None, None]
    s = jnp.tanh(0.4 * jnp.einsum("bthd,bshd->bhts", q, k)) + table[jnp.abs(distance)]
    top, norm = (x.swapaxes(1, 2)[..., None] for x in (top, norm))
    p = jnp.where(distance >= 0, jnp.exp(s - top) * norm, 0)
    return [jnp.einsum("bhts,bshv->bthv", p, v), p.sum(-1).swapaxes(1, 2)]


def close(found, true):
    for x, y in zip(*map(jax.tree.leaves, (found, true)), strict=True):
        assert np.abs(y).max() > 1e-6
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11 * np.abs(y).max())


def test_a_tile_sum_and_both_its_derivatives_are_those_of_the_dense_sum():
    """All operands move: rows, columns and a captured array, also the maximum and the norm."""
    fn, operands, outs = problem()
    fused = lambda *x: tile_sum(fn, x, (), hidden=0, outs=outs)
    cts = [jnp.cos(jnp.arange(np.prod(o.shape))).reshape(o.shape) for o in outs]
    tangents = [jnp.sin(3 * x) for x in operands]

    @unoptimised
    def run(operands, tangents, cts):
        def of(f):
            values, pull = jax.vjp(f, *operands)
            return values, pull(cts), jax.jvp(f, operands, tangents)[1]

        return of(fused), of(dense)

    close(*run(operands, tangents, cts))


def test_the_transpose_is_the_adjoint_in_any_operands():
    """`<ct, J dx> = <J^T ct, dx>` for some of the operands and for all of them."""
    fn, operands, outs = problem()
    cts = [jnp.cos(jnp.arange(np.prod(o.shape))).reshape(o.shape) for o in outs]
    tangents = [jnp.sin(3 * x) for x in operands]
    dot = lambda xs, ys: sum(jnp.vdot(x, y) for x, y in zip(xs, ys, strict=True))
    subsets = [(0,), (1, 3), (5,), (0, 1, 2, 3, 4, 5)]

    @unoptimised
    def run(operands, tangents, cts):
        sums = []
        for subset in subsets:
            derivative = Jvp(fn, tuple(i in subset for i in range(6)))
            moving = [tangents[i] for i in subset]
            push = lambda *dx, derivative=derivative: tile_sum(
                derivative, [*operands, *dx], (), hidden=0, outs=outs
            )
            back = jax.linear_transpose(push, *moving)(cts)
            sums.append((dot(cts, push(*moving)), dot(back, moving)))
        return sums

    for left, right in run(operands, tangents, cts):
        assert abs(left) > 1e-3
        np.testing.assert_allclose(left, right, rtol=1e-11)


@pytest.mark.slow
def test_a_hidden_dimension_of_one_is_shared_and_its_gradient_a_sum():
    fn, operands, outs = problem((1,))
    operands[0] = jnp.concatenate([operands[0], 2 * operands[0], -operands[0]])
    outs = [jax.ShapeDtypeStruct((3, *o.shape[1:]), o.dtype) for o in outs]
    fused = lambda *x: tile_sum(fn, x, (), hidden=1, outs=outs)

    def by_hand(q, *others):
        rows = [dense(x, *(y[0] for y in others)) for x in q]
        return [jnp.stack(x) for x in zip(*rows, strict=True)]

    @unoptimised
    def run(operands):
        total = lambda f: lambda *x: sum(jnp.sin(y).sum() for y in f(*x))
        return [jax.grad(total(f), (0, 1, 2, 3, 4, 5))(*operands) for f in (fused, by_hand)]

    found, true = run(operands)
    assert [x.shape for x in found] == [x.shape for x in operands]
    close(found, true)


def test_an_empty_side_sums_to_zero():
    fn, (q, top, norm, k, v, table), outs = problem()
    q, top, norm = (x[:, :0] for x in (q, top, norm))
    no_rows = [jax.ShapeDtypeStruct((2, 0, *o.shape[2:]), o.dtype) for o in outs]
    found = tile_sum(fn, (q, top, norm, k, v, table), (), hidden=0, outs=no_rows)
    assert [x.shape for x in found] == [o.shape for o in no_rows]
    _, (q, top, norm, *_), _ = problem()
    for x in tile_sum(fn, (q, top, norm, k[:, :0], v[:, :0], table), (), hidden=0, outs=outs):
        assert not x.any()


def names(f, *args):
    return [s.eqn.primitive.name for s in walk(trace(f, *args))]


def test_no_order_of_derivative_leaves_the_two_primitives():
    """What is differentiated is never a loop over tiles, whose derivative would store them all."""
    q, k, v = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 600, 2, 8)))
    f = lambda q: jnp.sin(flex_attention(q, k, v, mask_mod=causal())).sum()
    along = lambda f: lambda q: jnp.vdot(jax.jvp(f, (q,), (v,))[1], k)
    for order in (f, jax.grad(f), along(jax.grad(f)), jax.grad(along(jax.grad(f)))):
        found = names(order, q)
        assert "flex_attention" in found
        assert ("tile_sum" in found) == (order is not f)
        assert not {"scan", "while", "cond"} & set(found)


def test_reverse_mode_evaluates_the_five_products_that_one_would_write_by_hand():
    spec = Spec(0.4, jnp.dtype("float64"))
    moving = (True, False, False, True, True)
    fn = Transpose(Jvp(Attend(spec), moving), (False,) * 5 + (True,) * 3, ((D,), (D,), (V,)))
    assert fn.operands == (ROW, ROW, ROW, COL, COL, ROW, ROW)
    assert fn.results == (ROW, COL, COL)
    g, t, s = 2, 4, 6
    at = At(jnp.int32(0), jnp.arange(g), jnp.arange(t), jnp.arange(s))
    tiles = [(g, t, D), (g, t), (g, t), (s, D), (s, V), (g, t, V), (g, t)]
    jaxpr = trace(lambda *x: fn(at, *x), *(jax.ShapeDtypeStruct(x, jnp.float64) for x in tiles))
    jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    found = [s.eqn.params["out"] for s in walk(jaxpr) if s.eqn.primitive.name == "contract"]
    assert sorted(found) == ["col", "col", "row", "tile", "tile"]
    assert names(lambda *x: fn(at, *x), *map(jnp.ones, tiles)).count("exp") == 1
