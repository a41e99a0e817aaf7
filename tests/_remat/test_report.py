"""What a report says is kept is what JAX keeps, each byte once."""

import jax
import jax.numpy as jnp
import pytest

from xform import remat
from xform.lowering._region import type_of

WIDE, ROWS, LAYERS = 8, 16, 6


def layer(x, w):
    with jax.named_scope("layer"):
        with jax.named_scope("in"):
            h = jnp.tanh(x @ w)
        return x + jnp.sin(h @ w)


def unrolled(ws, x):
    for w in ws:
        x = layer(x, w)
    return (x**2).sum()


def scanned(ws, x, layer=layer):
    return (jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2).sum()


def in_loops(ws, x):
    turns = lambda x, w: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, 5)[0]
    return scanned(ws, x, turns)


def in_remat(ws, x):
    return scanned(ws, x, remat(layer, budget="none"))


def in_branches(ws, x):
    other = lambda x, w: jnp.cos(x @ w)
    return scanned(ws, x, lambda x, w: jax.lax.cond(x[0, 0] > 0, layer, other, x, w))


def batched(ws, x):
    own = lambda x: scanned(ws, x, remat(layer, budget="none"))
    return jax.vmap(own)(x[:, None]).sum()


PROGRAMS = [unrolled, scanned, in_loops, in_remat, in_branches, batched]
SLOW = [pytest.param(budget, marks=pytest.mark.slow) for budget in (0.0, {"in": "all"})]
BUDGETS = ["all", "none", {"layer": "none"}, *SLOW]


def arguments():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    return shape(LAYERS, WIDE, WIDE), shape(ROWS, WIDE)


def kept(f, *args) -> int:
    """The bytes of what the forward pass leaves for the backward pass, arguments left out."""
    left = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(f, *args)[1]))(*args).jaxpr
    made = {v for eqn in left.eqns for v in eqn.outvars}
    return sum(type_of(v).size * type_of(v).dtype.itemsize for v in made.intersection(left.outvars))


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("f", PROGRAMS)
def test_saved_bytes_are_those_of_what_jax_keeps(f, budget):
    args = arguments()
    told = remat.report(f, budget=budget)(*args)
    assert told.saved_bytes == kept(remat(f, budget=budget), *args)


def test_what_runs_again_is_told_once():
    args = arguments()
    products = lambda f, budget: sum(
        v.times for v in remat.report(f, budget=budget)(*args).recomputed if v.kind == "products"
    )
    assert products(scanned, "none") == products(scanned, {"layer": "none"}) == 2 * LAYERS
    assert products(in_remat, "all") == products(batched, "all") == 2 * LAYERS
    assert products(in_loops, "none") == 2 * 5 * LAYERS  # and the inner loops as loops, beside
    assert products(scanned, "all") == products(scanned, {"in": "all"}) == 0


def test_what_loops_of_loops_keep_has_the_lines_of_the_loop():
    args = jnp.ones((WIDE, WIDE)), jnp.ones((ROWS, WIDE))
    long = lambda w, x: jax.lax.scan(lambda x, _: (layer(x, w), None), x, None, 100)[0].sum()
    told = remat.report(long, budget=0.0)(*args)
    assert {v.what for v in told.saved} == {"carry"}
    assert all("test_report.py" in v.line for v in (*told.saved, *told.recomputed))


def test_a_result_may_be_a_number():
    def f(ws, x):
        for w in ws:
            x = layer(x, w)
        return (x**2).sum(), 3.0

    told = remat.report(f, budget=0.5)(*arguments())
    assert told.saved_bytes == kept(remat(lambda *args: f(*args)[0], budget=0.5), *arguments())
