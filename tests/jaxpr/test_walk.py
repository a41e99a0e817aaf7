"""Every equation is found, once, at its place, with the user's line."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from xform.jaxpr import sub_jaxprs, trace, walk

X = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), ()), lambda residuals, g: (g,))


def kernel(x_ref, out_ref):
    out_ref[...] = jnp.sin(x_ref[...])


def sharded(f):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))


def solve(x):
    scale = lambda y: jnp.sin(jnp.float32(2)) * y
    unscale = lambda matvec, b: b / jnp.sin(jnp.float32(2))
    return jax.lax.custom_linear_solve(scale, x, unscale, unscale)


# Each encloses a sine; where it stands.
ENCLOSED = {
    "jit": (jax.jit(jnp.sin), ("jit", "jaxpr")),
    "scan": (lambda x: jax.lax.map(jnp.sin, x), ("scan", "jaxpr")),
    "while_body": (
        lambda x: jax.lax.while_loop(lambda x: x[0] > 0, jnp.sin, x),
        ("while", "body_jaxpr"),
    ),
    "while_cond": (
        lambda x: jax.lax.while_loop(lambda x: jnp.sin(x[0]) > 0, lambda x: x - 1, x),
        ("while", "cond_jaxpr"),
    ),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), ("cond", "branches[1]")),
    "custom_jvp": (with_jvp, ("custom_jvp_call", "call_jaxpr")),
    "custom_vjp": (with_vjp, ("custom_vjp_call", "call_jaxpr")),
    "remat": (jax.checkpoint(jnp.sin), ("remat2", "jaxpr")),
    "shard_map": (sharded(jnp.sin), ("shard_map", "jaxpr")),
    "pallas_call": (pl.pallas_call(kernel, out_shape=X), ("pallas_call", "jaxpr")),
    "linear_solve": (solve, ("custom_linear_solve", "jaxprs[matvec]")),
}


@pytest.mark.parametrize("name", ENCLOSED)
def test_walk_enters_every_higher_order_primitive(name):
    f, place = ENCLOSED[name]
    paths = [site.path for site in walk(trace(f, X)) if site.eqn.primitive.name == "sin"]
    assert (place,) in paths


def make_custom_vjp():
    f = jax.custom_vjp(lambda x: jnp.sin(x))
    f.defvjp(lambda x: (f(x), ()), lambda residuals, g: (g,))
    return f


@pytest.mark.parametrize(
    ("flag", "make"),
    [("jax_remat3", lambda: jax.checkpoint(jnp.sin)), ("jax_custom_vjp3", make_custom_vjp)],
)
def test_walk_enters_hijax_primitives(flag, make):
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:
        sites = list(walk(trace(make(), X)))
    finally:
        jax.config.update(flag, before)
    assert sites[0].eqn.primitive.name == "call_hi_primitive"
    assert [site.depth for site in sites if site.eqn.primitive.name == "sin"] == [1]


def test_walk_goes_in_program_order_and_knows_the_parents():
    def f(xs):
        def step(carry, x):
            return jax.lax.cond(x > 0, jnp.sin, jnp.cos, carry), x

        return jax.lax.scan(step, jnp.exp(xs[0]), xs)[0] + 1

    sites = list(walk(trace(f, X)))
    names = [site.eqn.primitive.name for site in sites]
    assert names.index("exp") < names.index("scan") < names.index("cos") < names.index("sin")
    assert names[-1] == "add"
    sine = sites[names.index("sin")]
    assert sine.path == (("scan", "jaxpr"), ("cond", "branches[1]"))
    assert sine.depth == 2
    assert sine.parents[0][0].params["length"] == 8


def test_walk_finds_both_loops_of_the_gradient_of_a_scan():
    def f(x):
        return jax.lax.scan(lambda c, x: (jnp.sin(c * x), None), x[0], x)[0]

    sites = list(walk(trace(jax.grad(f), X)))
    scans = [site for site in sites if site.eqn.primitive.name == "scan"]
    assert [scan.eqn.params["reverse"] for scan in scans] == [False, True]
    assert any(site.path == (("scan", "jaxpr"),) for site in sites)


def test_line_is_the_users_and_survives_transforms():
    def f(x):
        y = jnp.exp(x)
        return jnp.sum(jax.nn.softmax(y))

    first = f.__code__.co_firstlineno
    sites = list(walk(trace(jax.jit(jax.grad(f)), X)))
    assert [site.line for site in sites if site.eqn.primitive.name == "exp"] == [
        f"{__file__}:{first + 1} ({f.__qualname__})",
        f"{__file__}:{first + 2} ({f.__qualname__})",
    ]
    assert sites[-1].line == f"{__file__}:{first + 1} ({f.__qualname__})"  # its cotangent


def test_sub_jaxprs_of_a_plain_equation_are_none():
    (eqn,) = trace(jnp.sin, X).eqns
    assert sub_jaxprs(eqn) == []


# A user's own transform: multiply-adds of a program, each as often as its loops run.


def shape(atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def products(f, *args):
    total = 0
    for site in walk(trace(f, *args)):
        if site.eqn.primitive.name == "dot_general":
            ((contracted, _), _) = site.eqn.params["dimension_numbers"]
            inner = math.prod(shape(site.eqn.invars[0])[dim] for dim in contracted)
            trips = math.prod(eqn.params.get("length", 1) for eqn, _ in site.parents)
            total += trips * inner * math.prod(shape(site.eqn.outvars[0]))
    return total


def test_a_users_count_of_products_knows_trip_counts():
    w = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    x = jax.ShapeDtypeStruct((4, 16), jnp.float32)

    def layers(w, x):
        def step(x, _):
            return jax.lax.fori_loop(0, 3, lambda _, x: jax.jit(jnp.matmul)(x, w), x) @ w, None

        return jnp.sum(jax.lax.scan(step, x, length=5)[0])

    one = 4 * 16 * 16
    assert products(jnp.matmul, x, w) == one
    assert products(layers, w, x) == 5 * (3 + 1) * one
    assert products(jax.grad(layers), w, x) == 3 * 5 * (3 + 1) * one
